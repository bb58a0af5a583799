/* One root of the shared tier: a backend behind queues, deadlines and breakers.
 *
 * Promises:
 * - released_cb of an accepted task runs once, by its deadline at the latest, or when what is
 *   copied at that moment has been: on the event loop, never from inside the call that submitted
 *   the
 *   task.
 * - Lookups begin before reads, reads before writes, the background last; no write begins while a
 *   read waits. Within a class tenants take turns by their weights. Queues are bounded.
 * - When the breaker opens, waiting tasks end with -EHOSTDOWN, and new ones are refused with it. A
 *   health check (CHECK) after each pause finds out that the root is back.
 * - No timer runs while nothing is under way and the root is well.
 *
 * A task: NONE -> QUEUED -> BEGUN -> ENDING -> NONE.
 *
 * Threads: the event loop. */
#ifndef UCMD_SHARED_ROOT_H
#define UCMD_SHARED_ROOT_H

#include "daemon/shared/backend.h"
#include "daemon/shared/breaker.h"
#include "daemon/shared/shared.h"

/* The first in this order begin first. */
enum shared_class { SHARED_LOOKUP, SHARED_LOAD, SHARED_STORE, SHARED_BACKGROUND, SHARED_CLASSES };

/* Memory of the caller, untouched by it from submit to released_cb, or to a cancel that is true. */
struct shared_task {
    struct shared_op op; /* verb, id and so on as backend.h says; done_cb is the root's */
    enum shared_class class;
    struct fair_who who;
    struct fair_got got;  /* out; 0 in */
    uint64_t deadline_ms; /* by uv_now */
    /* t->status is final; the memory of op is the caller's again, who may free t. */
    void (*released_cb)(struct shared_task *t);
    /* -ETIMEDOUT at the deadline, -EHOSTDOWN when the breaker opened before the task began, else
     * the backend's. */
    int status;
    /* The root's own. */
    struct shared_root *root;
    struct list link;
    struct deadline deadline;
    uint64_t submitted_ms, begun_ns;
    uint64_t cost; /* bytes, as tenants are charged */
    enum { SHARED_TASK_NONE, SHARED_TASK_QUEUED, SHARED_TASK_BEGUN, SHARED_TASK_ENDING } state;
};

#define SHARED_TARGET_SHOWN 256

struct shared_root_config {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct metrics *metrics;
    const struct shared_backend_ops *ops;
    const char *kind;                     /* what users know it by */
    const char *target, *host;            /* borrowed during open */
    const struct config_process *process; /* the same; NULL: it is none */
    const char *launcher;                 /* see backend.h */
    unsigned depth;                       /* tasks that the backend has at a time */
    uint64_t capacity_bytes;              /* 0: no bound */
    bool read_only;
    uint64_t timeout_ms; /* of the root's own CHECKs: a duration */
    /* Runs when a task that was refused with -EAGAIN may be accepted. */
    void (*ready_cb)(void *ctx);
    void *ctx;
};

struct shared_root {
    struct shared_root_config config;
    struct shared_backend *backend;
    uint32_t number;                        /* 1 and up: what shared.h calls a shared_root_id */
    struct gc *gc;                          /* NULL: it is not collected */
    void (*full_cb)(struct shared_root *r); /* the collector's, or NULL */

    struct breaker breaker;                  /* the root as such */
    uint64_t broken_ns;                      /* by uv_hrtime: when it opened last */
    struct breaker writes;                   /* is it full or read-only? */
    struct breaker lookups;                  /* does it answer in time for them? */
    int writes_status;                       /* why `writes` is open; 0 */
    uint64_t writes_stopped_ms;              /* by uv_now: since when it takes none */
    struct fair_queue queue[SHARED_CLASSES]; /* of shared_task.link */
    uint32_t queued[SHARED_CLASSES], begun[SHARED_CLASSES];
    struct list under_way; /* of shared_task.link: those begun */
    uint64_t loading;      /* bytes of begun loads */
    uint64_t store_bytes;  /* of writes that are queued or begun */
    uint64_t heard_ms;     /* of the last answer, or of the first lookup under way */
    bool refused[SHARED_CLASSES], stopped;

    struct shared_task check; /* the health check */
    struct shared_task clock; /* asks for the server's time */
    struct deadline check_at;
    int64_t clock_ahead_ns;  /* the server's clock minus uv_hrtime */
    uint64_t clock_known_ms; /* when that was learned; 0: never */
    uint64_t clock_again_ms; /* no earlier try */

    uint64_t hash;                   /* of its target */
    char shown[SHARED_TARGET_SHOWN]; /* the target, without what may be secret in it */
    struct shared_root_stats stats;  /* the counters of it */
};

static inline uint64_t shared_root_now(const struct shared_root *r)
{
    return uv_now(r->config.loop);
}

/* There was no space for a write. */
static inline void shared_root_full(struct shared_root *r)
{
    if (r->full_cb)
        r->full_cb(r);
}

/* 0 or -errno, as the backend's open. *out by malloc. */
int shared_root_open(const struct shared_root_config *config, struct shared_root **out);
/* Nothing may be under way (shared_root_busy), and not from inside a callback. NULL-safe. */
void shared_root_close(struct shared_root *r);
/* Cancels the root's own checks where it can; no other begins. Waiting writes and background tasks
 * end with -ECANCELED. */
void shared_root_stop(struct shared_root *r);
/* The same, and nothing else goes on: what is under way ends with -ECANCELED, but for what is
 * copied. */
void shared_root_give_up(struct shared_root *r);
/* Begins a health check now: when it fails, the breaker opens without waiting for other
 * failures. */
void shared_root_check(struct shared_root *r);
/* Tasks that were not released yet, the root's own included. */
uint32_t shared_root_busy(const struct shared_root *r);

/* 0: accepted. Otherwise:
 * - -EAGAIN: the queue is full, or (SHARED_STORE) reads wait or too many bytes wait: ready_cb will
 *   run
 * - -EHOSTDOWN: the breaker is open
 * - -EROFS: a WRITE, REMOVE or TOUCH of a root that is configured read-only; a WRITE while the
 *   root takes none
 * - -ECANCELED: a SHARED_STORE or SHARED_BACKGROUND after shared_root_stop */
int shared_root_submit(struct shared_root *r, struct shared_task *t);
/* True: neither callback will run, the task is the caller's again. False: too late, a thread
 * copies; its callback will run, of a write that was not sent yet with -ECANCELED. */
bool shared_root_cancel(struct shared_root *r, struct shared_task *t);

/* Is the breaker closed? */
bool shared_root_up(const struct shared_root *r);
/* May a lookup ask this root? Not while the root is down, has been silent while lookups wait, or is
 * too slow for lookups; in the last case one lookup passes after each pause, as a trial. After true
 * shared_root_lookup_ended must follow. */
bool shared_root_takes_lookups(struct shared_root *r);
/* The root answered the lookup, did not by its deadline, or the lookup ended before either. */
enum shared_lookup_end { SHARED_LOOKUP_ANSWERED, SHARED_LOOKUP_LATE, SHARED_LOOKUP_LEFT };
void shared_root_lookup_ended(struct shared_root *r, enum shared_lookup_end how);
bool shared_root_takes_writes(const struct shared_root *r); /* at present */
enum shared_health shared_root_health(const struct shared_root *r);

/* The server's time, as of the last CHECK that asked for it. 0; -EAGAIN: unknown; a CHECK begins if
 * the root may be written. */
int shared_root_time(struct shared_root *r, uint64_t *now_ns);

void shared_root_stats_get(const struct shared_root *r, struct shared_root_stats *out);

#endif
