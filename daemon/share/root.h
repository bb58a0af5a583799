/* One root of the shared tier: a backend, what is asked of it and in which order, how long that may
 * take, and whether it is asked at all. Knows nothing of policy: that is share.c's.
 *
 * Promise: a task that was accepted is told once by its deadline at the latest, and released once,
 * then or later, on the loop and never from inside the call that submitted it. Between the two the
 * backend may still use its memory (a thread that hangs in a mounted folder); such tasks count
 * against `depth`, so a root that hangs holds no more than that. Lookups go before reads, these
 * before writes, background comes last; no write begins while a read waits. Queues are bounded.
 *
 * When the breaker opens, what waits is ended with -EHOSTDOWN and new tasks are refused with it;
 * one CHECK after a growing pause finds out that the root is back. No timer runs while nothing is
 * under way and the root is well. Threads: the loop. */
#ifndef UCMD_SHARE_ROOT_H
#define UCMD_SHARE_ROOT_H

#include "daemon/base/deadline.h"
#include "daemon/share/backend.h"
#include "daemon/share/breaker.h"
#include "daemon/share/share.h"

/* In the order in which they are begun. */
enum share_class { SHARE_LOOKUP, SHARE_LOAD, SHARE_STORE, SHARE_BACKGROUND, SHARE_CLASSES };

/* Memory of the caller, untouched by it from submit to released_cb, or to a cancel that is true. */
struct share_task {
    struct share_op op; /* verb, id and so on as backend.h says; `done` is the root's */
    enum share_class class;
    uint64_t deadline_ms; /* by uv_now */
    /* -ETIMEDOUT by the deadline, -EHOSTDOWN when the breaker opened before it was begun, else the
     * backend's answer. May be NULL. */
    void (*done_cb)(struct share_task *t, int status);
    /* `status` is what was told; op's memory and data are the caller's again, and it may free t. */
    void (*released_cb)(struct share_task *t);
    void *owner; /* the caller's */
    int status;
    /* The root's own. */
    struct share_root *root;
    struct list link;
    struct deadline deadline;
    uint64_t submitted_ms, begun_ns;
    enum {
        SHARE_TASK_NONE,
        SHARE_TASK_QUEUED,
        SHARE_TASK_BEGUN,
        SHARE_TASK_LATE,
        SHARE_TASK_ENDING
    } state;
};

/* In done_cb: released_cb does not follow at once, the backend can't let go of the memory yet. */
static inline bool share_task_late(const struct share_task *t)
{
    return t->state == SHARE_TASK_LATE;
}

#define SHARE_TARGET_SHOWN 256

struct share_root_config {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct metrics *metrics;
    const struct share_backend_ops *ops;
    const char *target, *host; /* not kept */
    unsigned depth;            /* tasks that the backend is given at a time */
    uint64_t capacity_bytes;   /* 0: no bound */
    bool read_only;
    uint64_t deadline_ms; /* of the root's own CHECKs: a duration */
    /* A task that was refused with -EAGAIN may be accepted now. */
    void (*ready_cb)(void *ctx);
    void *ctx;
};

struct share_root {
    struct share_root_config config;
    struct share_backend *backend;
    uint32_t number; /* 1 and up: what share.h calls a share_root_id */
    void *gc;        /* garbage collection's, NULL without */

    struct breaker breaker;                               /* the root as such */
    struct breaker writes;                                /* is it full or read-only? */
    struct breaker lookups;                               /* does it answer in time for them? */
    int writes_status;                                    /* why not: -ENOSPC, -EROFS, ...; 0 */
    struct list queue[SHARE_CLASSES];                     /* of share_task.link */
    uint32_t queued[SHARE_CLASSES], begun[SHARE_CLASSES]; /* begun: LATE ones too */
    uint32_t late;
    uint64_t store_bytes; /* of writes that are queued or begun */
    uint64_t heard_ms;    /* when it last answered, or was given a lookup while it had none */
    bool refused[SHARE_CLASSES], stopped;

    struct share_task check; /* the breaker's */
    struct share_task clock; /* the server's time */
    struct deadline check_at;
    int64_t clock_ahead_ns;  /* the server's clock minus uv_hrtime */
    uint64_t clock_known_ms; /* when that was learned; 0: never */
    uint64_t clock_again_ms; /* it is not asked for before that */

    uint64_t hash;                  /* of its target */
    char shown[SHARE_TARGET_SHOWN]; /* the target, without what may be secret in it */
    struct share_root_stats stats;  /* what is counted as it happens */
};

/* 0 or -errno, as the backend's open. *out by malloc. */
int share_root_open(const struct share_root_config *config, struct share_root **out);
/* Nothing may be under way (share_root_busy), and not from inside a callback. NULL-safe. */
void share_root_close(struct share_root *r);
/* Ends the root's own checks, as far as they can be; none begins any more. What waits in the queue
 * of writes and of the background is ended with -ECANCELED. */
void share_root_stop(struct share_root *r);
/* Begins a health check now: when it fails, the breaker opens without waiting for other failures. */
void share_root_check(struct share_root *r);
/* Tasks, the root's own too, that were not released yet. */
uint32_t share_root_busy(const struct share_root *r);

/* 0: accepted. -EAGAIN: its queue is full, or (SHARE_STORE) reads wait or the window of bytes is
 * full: ready_cb will run. -EHOSTDOWN: the breaker is open. -EROFS: a WRITE, REMOVE or TOUCH, and
 * the root takes none by its configuration or, WRITE only, at present. -ENOMEM. -ECANCELED: a
 * SHARE_STORE or SHARE_BACKGROUND after share_root_stop. */
int share_root_submit(struct share_root *r, struct share_task *t);
/* True: neither callback will run, the task is the caller's again. False: it is too late for that;
 * it goes on to its end as if nothing had been asked. */
bool share_root_cancel(struct share_root *r, struct share_task *t);

/* Is it worth asking? Lookups are refused besides while the root is too slow for them, or has been
 * silent for a while: true lets one through now and then to find out. */
bool share_root_asked(const struct share_root *r);
bool share_root_lookups_asked(struct share_root *r);
/* How a lookup fared that was let through: it had an answer of this root, it had none by its
 * deadline, or it ended before either. Must follow. */
enum share_lookup_end { SHARE_LOOKUP_ANSWERED, SHARE_LOOKUP_LATE, SHARE_LOOKUP_LEFT };
void share_root_lookup_ended(struct share_root *r, enum share_lookup_end how);
bool share_root_takes_writes(const struct share_root *r); /* at present */
enum share_health share_root_health(const struct share_root *r);

/* The server's time, from its last CHECK. 0; -EAGAIN: not known (yet): asks for it, where the root
 * takes writes. */
int share_root_time(struct share_root *r, uint64_t *now_ns);

void share_root_stats_get(const struct share_root *r, struct share_root_stats *out);

#endif
