/* Shared by the files of this module only. */
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
    uint64_t refused_most; /* refused sockets that wait for their close(); with more the listener
                              rests */
    struct metrics *metrics;
    struct front_handler handler;
    uv_poll_t listener;
    uv_timer_t backoff; /* out of descriptors: the listener rests */
    uv_check_t server;  /* serves what is ready, after each poll */
    /* runs while something is ready or unflushed: the event loop does not sleep */
    uv_idle_t waker;
    struct fair_queue ready; /* connections that may have frames to handle; charged in ns */
    struct listener socket;
    uint32_t handles; /* its own, and those of connections, that the event loop still has */
    bool stopped;
    /* spent on connections that have ended, in this iteration of the event loop */
    uint64_t ended_ns;
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
    bool ready;      /* waits in front.ready, and the event loop asks nothing about it */
    bool serving;    /* has its turn, at whose end it is flushed */
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
    bool behind;                     /* backed up, when it was last flushed */
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

/* Files from the lowest to the highest: each calls those above it here, and no other. front.c calls
 * all. */

/* ---- conn.c ---- */

/* Takes fd. 0, and *out is to be started, or is NULL: its session was refused, and it has ended. Or
 * -EUSERS or -ENOMEM with *e, and then fd is the caller's still. */
int conn_new(struct front *f, int fd, const struct peer *peer, struct conn **out,
             struct ucm_error *e);
/* Runs close_cb. From the event loop's callbacks only. */
void conn_close(struct conn *c, const char *reason, bool offence);
/* Descriptors that came and that nobody has taken are closed. */
void conn_fds_drop(struct conn *c);
/* It is sent, or never will be. */
void conn_parcel_free(struct conn *c, struct parcel *p);
/* Stops counting descriptors that wait, or that the peer has not read. */
void conn_parcels_drop(struct conn *c);
void conn_out_free(struct conn *c);
/* When nothing of the front is with the event loop any more. */
void front_release(struct front *f);
void front_handle_closed(struct front *f);

/* ---- conn_out.c ---- */

/* It may have something to read or to handle: it is served when its tenant's turn comes. */
void conn_ready(struct conn *c);
/* Writes what the peer takes, and asks the event loop for what comes next. From the event loop's
 * callbacks only. */
void conn_flush(struct conn *c);
/* Asks the event loop for what comes next. */
void conn_interest(struct conn *c);
/* Which of the descriptors that were sent the peer has read by now. */
void conn_fds_refresh(struct conn *c);

/* ---- conn_input.c ---- */

/* From now on it is read, and hello is due. */
void conn_start(struct conn *c);
void front_serve_cb(uv_check_t *check);

#endif
