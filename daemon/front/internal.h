/* Shared by the files of this room only. */
#ifndef UCMD_FRONT_INTERNAL_H
#define UCMD_FRONT_INTERNAL_H

#include "daemon/base/fair.h"
#include "daemon/base/list.h"
#include "daemon/base/listener.h"
#include "daemon/front/front.h"

#include <sys/types.h>

#define CONNECTS_BITS 8
#define IN_FIRST_BYTES 4096 /* of a connection's buffer for what comes */

/* How often a uid has connected lately; of uids with one place the last. */
struct connects {
    uint64_t counted_ms;
    uid_t uid;
    uint32_t n; /* less those that time has taken off */
};

struct front {
    uv_loop_t *loop;
    const struct config *config;
    struct deadlines *deadlines;
    struct limits *limits;
    struct reaper *reaper;
    uint64_t
        refused_most; /* refused sockets that wait for their close(); with more the listener rests */
    struct metrics *metrics;
    struct front_handler handler;
    uv_poll_t listener;
    uv_idle_t flusher;       /* runs for one turn while a connection has something to write */
    uv_timer_t backoff;      /* out of descriptors: the listener rests */
    uv_check_t server;       /* serves what is ready, behind each poll */
    uv_idle_t waker;         /* runs while something is ready: the loop does not sleep */
    struct fair_queue ready; /* connections that may have frames to handle; charged in ns */
    struct listener socket;
    uint32_t handles; /* its own, and those of connections, that the loop still has */
    bool stopped;
    uint64_t ended_ns; /* spent on connections that have ended, in this turn of the loop */
    struct list conns, unflushed;
    uint32_t n_conns;
    uint64_t next_id;
    struct connects connects[1 << CONNECTS_BITS];
};

enum conn_state {
    CONN_OPEN,
    CONN_DRAINING, /* writes what is queued, reads nothing, then closes */
    CONN_CLOSED,   /* close_cb has run or runs; waits for conn_free */
};

struct conn {
    struct list link, link_unflushed, link_ready;
    struct front *front;
    struct peer peer;
    struct fair_who who; /* its tenant, in front.ready */
    uint64_t id;
    void *session;
    enum conn_state state;
    uv_poll_t poll;
    bool polling, freed;
    bool ready;      /* waits in front.ready, and the loop asks nothing about it */
    bool greeted;    /* the peer has said hello */
    uint64_t frames; /* handled since hello */
    bool stalled;    /* whole frames wait in `in` until the peer has read its answers */
    bool excused;    /* a frame's time was over, and it was not the peer's fault */
    bool overdue;    /* a frame's time is over, and nobody has looked since whether it came */
    int fd, events;

    uint8_t *in;
    size_t in_at, in_n, in_cap; /* bytes before in_at are handled */
    int fds[UCM_MAX_FRAME_FDS];
    uint32_t n_fds;
    size_t fds_end; /* bytes of `in` when fds came: the last of these bytes is of their frame */
    struct deadline frame_deadline;

    uint8_t *out;
    size_t out_at, out_n, out_cap;
    uint64_t sent;                   /* bytes so far */
    uint64_t sent_then;              /* when unread_deadline was armed */
    struct deadline unread_deadline; /* while the peer is backed up */
    struct list parcels;             /* struct parcel, in the order in which they go */
    uint32_t fds_waiting;            /* in parcels */
    uint32_t fds_unread;             /* sent since the peer was last known to have read all */
};

/* Descriptors that go with the frame whose bytes are [at, end) of all that the connection sends. */
struct parcel {
    struct list link;
    uint64_t at, end;
    uint32_t n;
    int fds[];
};

/* Takes fd. 0; or -EUSERS or -ENOMEM, and then fd is the caller's still. */
int conn_new(struct front *f, int fd, const struct peer *peer, struct ucm_error *e);
/* Runs close_cb. From the loop's callbacks only. */
void conn_close(struct conn *c, const char *reason, bool offence);
void conn_flush(struct conn *c);
void front_handle_closed(struct front *f);
void front_serve_cb(uv_check_t *check);

/* Whether descriptors and bytes of frames may be taken; what is taken is given back by limit_give. */
static inline bool conn_take(struct conn *c, enum limit what, uint64_t n)
{
    return limit_take(c->peer.owner, what, n, NULL) == 0;
}

/* conn_out.c */
/* Queues a frame: 0, -ENOMEM, or -EUSERS: the peer's uid or tenant leaves too much unread. */
int conn_out_add(struct conn *c, const uint8_t *p, size_t n);
/* The same of a frame with descriptors, which are the connection's then; or -EMFILE. */
int conn_out_add_fds(struct conn *c, const uint8_t *bytes, size_t n, const int *fds,
                     uint32_t n_fds);
/* Writes what the peer takes now. 0, or -errno: the connection is broken. */
int conn_out_write(struct conn *c);
void conn_out_free(struct conn *c);
/* Descriptors that wait, or that the peer has not read, count no more. */
void conn_parcels_drop(struct conn *c);
/* Which of the descriptors that were sent the peer has read by now. */
void conn_fds_refresh(struct conn *c);
void conn_fds_close(const int *fds, uint32_t n);

/* conn.c */
/* Those that came and that nobody has taken are closed. */
void conn_fds_drop(struct conn *c);
/* Arms or disarms the time for hello, or for the frame under way. */
void conn_watch(struct conn *c);
void conn_frame_clock(struct conn *c); /* it begins anew */
/* When nothing of the front is with the loop any more. */
void front_release(struct front *f);
/* It may have something to read or to handle: it is served when its tenant's turn comes. */
void conn_ready(struct conn *c);

/* conn_input.c */
/* Handles frames and reads, until there is nothing more, the peer must read answers first, or the slice is over.
 * True: there may be more. until_ns: when the slice is over, by uv_hrtime(). */
bool conn_serve(struct conn *c, uint64_t until_ns);

#endif
