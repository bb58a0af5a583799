/* What the daemon shows to monitoring: once a second the event loop publishes a snapshot of what it
 * counts, and the thread of http.h answers from it.
 *
 * Threads: the event loop, unless stated. */
#ifndef UCMD_OBSERVE_OBSERVE_H
#define UCMD_OBSERVE_OBSERVE_H

#include "daemon/observe/snapshot.h"

#include <uv.h>

struct observe;

#define OBSERVE_EVERY_MS 1000

struct observe_options {
    uv_loop_t *loop;
    const struct config *config; /* borrowed until observe_new returns */
    /* Fills all of *out, which holds what an earlier call left there. */
    void (*fill_cb)(void *ctx, struct observe_snapshot *out);
    void *ctx;
};

/* Listens where the configuration says, publishes once, and starts the thread. What can't be
 * listened on is logged and left out: the cache is worth more than its monitoring. *out is NULL
 * when nothing is left. 0 or -errno. */
int observe_new(const struct observe_options *o, struct observe **out);
/* Publishes at once, for a change that nobody should wait a second for. NULL is allowed. */
void observe_publish(struct observe *o);
/* Ends the thread and its sockets; the handles close on the event loop: run it once more. NULL is
 * allowed. */
void observe_free(struct observe *o);

/* warn_cb runs with a sentence for each thing that observe_new would leave out now. Silent about a
 * port that a running ucmd has. Blocks for at most a second. Any thread. */
void observe_check(const struct config *c, void (*warn_cb)(const char *text));

#endif
