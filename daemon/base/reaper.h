/* Closes descriptors that came from clients, and sockets that hold some unread, in threads of its
 * own: a client can make close() wait, by a socket that lingers or a file of a file system that it
 * serves itself.
 *
 * Promises:
 * - reaper_close never waits for a close().
 * - A descriptor counts in its owner's LIMIT_DESCRIPTORS until its close() has returned, which
 *   bounds the queue; a refused client's socket, which its owner may not have, in reaper_refused.
 * - A tenant's descriptors are closed in their order, one at a time: those that hang keep one
 *   thread, and no other tenant waits, but one whose number is alike modulo REAPER_LANES.
 * - closer.h says what is done for a close() to end.
 *
 * Threads: the event loop only. */
#ifndef UCMD_BASE_REAPER_H
#define UCMD_BASE_REAPER_H

#include "daemon/base/limit.h"

#include <uv.h>

#define REAPER_LANES 256u /* and threads at most */
#define REAPER_STOP_MS 1000

struct reaper;

/* 0; or -errno: no memory, or no thread. */
int reaper_new(uv_loop_t *loop, struct reaper **out);
/* Closes fd, one of LIMIT_DESCRIPTORS that the owner has; gives it back when that is done. The
 * reaper holds the owner meanwhile. NULL: nobody's. */
void reaper_close(struct reaper *r, int fd, struct limit_owner *owner);
/* reaper_close of a connected unix socket; at once if no descriptor lies in it. */
void reaper_close_socket(struct reaper *r, int fd, struct limit_owner *owner);
/* reaper_close of one whose client was refused, and which counts in no limit of the owner. */
void reaper_close_refused(struct reaper *r, int fd, struct limit_owner *owner);
/* How many of these wait for their close() or are in it. */
uint32_t reaper_refused(const struct reaper *r);
/* How many wait for their close() or are in it. */
uint32_t reaper_waiting(const struct reaper *r);
/* No reports from now on. Closes a handle on the event loop; descriptors may still come. */
void reaper_stop(struct reaper *r);
/* After reaper_stop and the event loop's last iteration. Waits for what is being closed, for
 * REAPER_STOP_MS at most; what hangs then keeps its thread, which touches nothing of others.
 * NULL-safe. */
void reaper_free(struct reaper *r);

#endif
