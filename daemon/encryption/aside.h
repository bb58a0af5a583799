/* A call that may hang, such as one to a file on a mount whose server is gone: in a thread of its
 * own, with a deadline.
 *
 * Promises:
 * - ended_cb runs once, on the event loop: when the call has returned, at its deadline, or inside
 *   aside_wait and aside_stop.
 * - A call that has not returned by its deadline keeps its thread and its job until it does; what
 *   it brings then is freed unseen.
 * - A struct aside has one such call at most: while it hangs no other one begins.
 *
 * Threads: the event loop, except run_cb and free_cb. */
#ifndef UCMD_ENCRYPTION_ASIDE_H
#define UCMD_ENCRYPTION_ASIDE_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct aside_call {
    void (*run_cb)(void *job); /* in the thread */
    /* job NULL: the call hangs, and status is -ETIMEDOUT, or -ECANCELED of aside_stop. Else 0, and
     * the job is freed after it. */
    void (*ended_cb)(void *ctx, void *job, int status);
    void (*free_cb)(void *job); /* the event loop, or the thread of a call that hung */
};

/* Memory of the caller; zeroes are one without a call. */
struct aside {
    struct aside_work *work;
    struct aside_watch *watch; /* NULL: ended_cb has run */
};

/* None may be under way. 0: ended_cb will run, and the job is no longer the caller's. -EBUSY: a
 * former call still hangs; -EAGAIN: no thread; -ENOMEM. */
int aside_start(struct aside *a, uv_loop_t *loop, const struct aside_call *call, void *ctx,
                void *job, uint64_t timeout_ms);
/* Blocks until the call has returned, for at most so long. ended_cb has run, if there is a call and
 * it has. */
void aside_wait(struct aside *a, uint64_t ms);
/* Gives up what is under way, and what hangs. */
void aside_stop(struct aside *a);

#endif
