/* The front: the listening socket and the connections. Turns bytes into checked frames and frames
 * into bytes; knows peers by what the kernel says of them, and nothing of what frames mean.
 *
 * Promise: no peer makes memory grow past limits.connections and limits.frame_memory, or delays
 * another by more than a turn: connections that have sent something wait in a queue by tenant,
 * which is charged with the time that their frames take. hello, and later each frame, must arrive
 * within request.handshake (the time that the peer's process is stopped does not count); a peer
 * that does not read is not read from, and is dropped when it has read nothing for request.unread.
 * The front drops the offender only, and says why. Connections, those that have not said hello,
 * descriptors, and the bytes that arrive or wait to be read are bounded by uid and tenant
 * (limit.h). Thread: the event loop only. */
#ifndef UCMD_FRONT_FRONT_H
#define UCMD_FRONT_FRONT_H

#include "daemon/base/deadline.h"
#include "daemon/base/limit.h"
#include "daemon/base/reaper.h"
#include "daemon/config/config.h"
#include "daemon/front/place.h"
#include "proto/metrics/metrics.h"
#include "proto/proto.h"

#include <sys/types.h>

struct front;
struct conn;

/* The process at the other end, as of connect; peer.h has the rules. */
struct peer {
    uid_t uid;
    gid_t gid;
    pid_t pid;
    enum peer_place place;
    bool admin;
    char tenant[UCM_MAX_NAME_BYTES + 1];
    struct limit_owner *owner; /* the connection's, which has it until conn_free */
    int fd; /* the socket, open until conn_free; others may only ask whether it hung up */
};

struct front_handler {
    /* A peer connected. Returns the session, or NULL to refuse it. */
    void *(*open_cb)(void *ctx, struct conn *conn, const struct peer *peer);
    /* A sound frame. env and what it points to die with the call. fds are the descriptors that came
     * with it; the callee sets those that it takes to -1, the rest are closed. */
    void (*frame_cb)(void *session, struct proto_envelope *env, int *fds, uint32_t n_fds);
    /* The connection is closed. Never runs from inside a conn_ function that the session called.
     * From now on conn_send does nothing; the session calls conn_free when it no longer needs conn.
     */
    void (*close_cb)(void *session);
    void *ctx;
};

/* Listens on config->socket, or on listen_fd when it is not -1 (socket activation). A socket that
 * another daemon serves is refused, a stale one replaced. 0 or -errno with *e. config, limits and
 * reaper are borrowed; the front sets what there is of the kinds that it counts. */
int front_new(uv_loop_t *loop, const struct config *config, int listen_fd,
              struct deadlines *deadlines, struct limits *limits, struct reaper *reaper,
              struct metrics *metrics, const struct front_handler *handler, struct front **out,
              struct ucm_error *e);
/* No new connections from now on. */
void front_stop(struct front *f);
/* Drops every connection (their close_cb run). */
void front_drop_all(struct front *f);
/* After every conn_free. Removes the socket if this front made it. Closes handles on the event
 * loop. */
void front_free(struct front *f);

/* Queues whole frames that the proto functions appended; takes what is in b and leaves b empty.
 * They are written at the end of this iteration of the event loop, or sooner. */
void conn_send(struct conn *c, struct proto_buf *b);
/* The same for one frame that n descriptors go with, at most UCM_MAX_FRAME_FDS. They are the
 * front's from now on: it closes them once they are sent, or can't be. */
void conn_send_fds(struct conn *c, struct proto_buf *b, const int *fds, uint32_t n);
/* How many descriptors may be sent now. A peer that does not read keeps them open in the kernel.
 * They count against the limits of the daemon, its uid and its tenant. It gets no further ones
 * until it has read all. */
uint32_t conn_fds_room(struct conn *c);
/* The peer has said hello: from now on it may be silent between frames. */
void conn_welcome(struct conn *c);
/* The peer does not read its answers: better not to send what it can do without. */
bool conn_backed_up(const struct conn *c);
/* The peer broke the protocol: the notification `error` with *e, then conn_drop. */
void conn_offend(struct conn *c, const struct ucm_error *e);
/* Sends what is queued, for a second at most, then closes the connection. Reads nothing more. */
void conn_drop(struct conn *c, const char *reason);
/* The session's last word to a closed connection. */
void conn_free(struct conn *c);

#endif
