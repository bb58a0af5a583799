/* What devices share: the queue that jobs wait in, how a job is cut into pieces, and the way of
 * done jobs back to the loop. Inside this room only.
 *
 * Promises: the queue takes no memory of its own and never grows past DEVICE_QUEUE_MAX loads and
 * dumps. Pieces of a job cover each (item, plane) once. A job put into the outbox calls done once.
 * Threads: a queue belongs to whoever holds its owner's lock; the outbox takes jobs from any thread
 * and delivers on the loop. */
#ifndef UCMD_DEVICE_WORK_H
#define UCMD_DEVICE_WORK_H

#include "daemon/device/device.h"

#include <stdatomic.h>
#include <uv.h>

/* ---- queue ---- */

#define JOB_CLASSES 16 /* 8 priorities, each loads before dumps */

struct job_queue {
    struct list control;             /* OPEN and CLOSE */
    struct list copies[JOB_CLASSES]; /* the most urgent first */
};

void job_queue_init(struct job_queue *q);
bool job_queue_empty(const struct job_queue *q);
void job_queue_push(struct job_queue *q, struct device_job *job);
/* Back to the front of its class, to go on with. */
void job_queue_push_front(struct job_queue *q, struct device_job *job);
struct device_job *job_queue_pop_control(struct job_queue *q); /* or NULL */
/* The most urgent copy, left in the queue, or NULL. */
struct device_job *job_queue_first(const struct job_queue *q);
/* Of one direction only. */
struct device_job *job_queue_first_of(const struct job_queue *q, enum device_op op);
/* The next one of its direction behind `job`, or NULL. */
struct device_job *job_queue_next_of(const struct job_queue *q, const struct device_job *job);
/* Takes out every copy of which no piece was taken and whose deadline has passed, and appends it to
 * `expired`. */
void job_queue_expire(struct job_queue *q, uint64_t now_ms, struct list *expired);
/* Appends every job of `from`, in order; `from` is empty afterwards. */
void job_queue_move(struct job_queue *to, struct job_queue *from);

/* ---- jobs ---- */

/* On the clock of uv_now(), from any thread. */
uint64_t job_clock_ms(void);
static inline bool job_is_copy(const struct device_job *job)
{
    return job->op == DEVICE_LOAD || job->op == DEVICE_DUMP;
}
static inline bool job_late(const struct device_job *job, uint64_t now_ms)
{
    return job->deadline_ms != 0 && now_ms >= job->deadline_ms;
}
/* What must hold before a copy begins: it is not late, its planes and block ids are the region's.
 * 0 or -errno, job->error filled. */
int job_check(struct device_job *job, uint64_t now_ms);
/* Fills job->error and returns `status`. */
int job_refuse(struct device_job *job, int status, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
uint64_t job_item_bytes(const struct device_job *job);
/* Has its worker hung up? One system call. */
bool job_deserted(const struct device_job *job);
/* Likewise job_refuse, for that reason: -ECANCELED. */
int job_refuse_deserted(struct device_job *job);
/* Memory that a peer shares is safe to touch for good: a memfd that can't shrink, of tmpfs, whose
 * holes are filled on demand. 0, or -EINVAL with job->error; `what` names it there. */
int job_check_memfd(struct device_job *job, const char *what, int fd, uint64_t bytes);

struct job_piece {
    uint32_t first_item, n_items, first_plane, n_planes;
    uint64_t bytes;
};
/* The next piece of about max_bytes (at least one chunk) and at most max_items. true: it was the
 * last one. Not called again after that. */
bool job_next_piece(struct device_job *job, uint64_t max_bytes, uint32_t max_items,
                    struct job_piece *out);

/* ---- outbox ---- */

struct job_outbox {
    uv_async_t async;
    uv_mutex_t mutex;
    struct list done;
    atomic_bool soon; /* something will be done */
    /* Loop only. */
    uv_idle_t awake; /* while it runs the loop doesn't sleep */
    uint64_t awake_until_ns;
    uv_close_cb closed_cb;
    uint32_t accepted; /* loads and dumps under way */
    struct device_stats stats;
    void (*woken_cb)(struct job_outbox *b); /* after each delivery; may be NULL */
};

int job_outbox_init(struct job_outbox *b, uv_loop_t *loop);
/* Loop: counts a job in. 0, or -EAGAIN when DEVICE_QUEUE_MAX copies are under way. */
int job_outbox_accept(struct job_outbox *b, struct device_job *job);
/* Any thread: the job is done. */
void job_outbox_put(struct job_outbox *b, struct device_job *job, int status);
void job_outbox_wake(struct job_outbox *b);
/* Any thread: a job will be done within a tenth of a millisecond or so. The loop stays awake until
 * one is and shortly after, for a quarter of a millisecond at most: to wake a processor that sleeps
 * takes up to half as long. */
void job_outbox_soon(struct job_outbox *b);
/* Loop, nothing accepted any more. closed_cb gets b->async.data, which is the caller's to set. */
void job_outbox_close(struct job_outbox *b, uv_close_cb closed_cb);

#endif
