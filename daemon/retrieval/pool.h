/* Threads that build summaries and score them, on memory that the event loop gave.
 *
 * A job is cut into pieces that threads run at the same time. When all pieces of a phase have
 * ended, the thread that ended the last one may set up another phase. Tenants take turns, piece by
 * piece, so do the queues of one tenant, and the jobs of one queue. Urgent jobs (somebody waits for
 * the answer to a query) go before the others, but for every POOL_OTHERS_TURN-th piece. Slow pieces
 * run on all threads but one, if there are two, so a piece that is not slow never waits for one.
 *
 * Promises:
 * - Every job that was submitted comes back once through done_cb, on the event loop, never inside
 *   summary_pool_submit.
 * - Between submit and done_cb the pool alone touches the job, but for summary_job_stop.
 * - The pool allocates nothing for a job, so its owner bounds how many there are.
 * Thread: the event loop, unless a comment says otherwise. */
#ifndef UCMD_RETRIEVAL_POOL_H
#define UCMD_RETRIEVAL_POOL_H

#include "daemon/base/list.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define POOL_OTHERS_TURN 8

struct summary_pool;
struct uv_loop_s;

/* Queues that share one turn among those of others: one tenant's. Its owner's memory, which stays
 * while a job of it is under way; the fields are the pool's own. */
struct summary_turns {
    struct list link;   /* in the pool, while there are jobs */
    struct list queues; /* with jobs */
};

/* Jobs that share one of their tenant's turns: one user's. As above. */
struct summary_queue {
    struct summary_turns *turns;
    struct list link; /* in turns, while there are jobs */
    struct list jobs; /* with pieces that have not begun */
};

struct summary_job {
    /* On any thread of the pool, which has that number, from 0. */
    void (*run_cb)(struct summary_job *job, uint32_t piece, unsigned thread);
    /* On the thread that ended the phase's last piece, and no other runs one of the job then. Sets
     * up the next phase and returns its pieces; 0: the job is done. NULL: there is one phase. */
    uint32_t (*phase_cb)(struct summary_job *job);
    void (*done_cb)(struct summary_job *job); /* on the event loop; may free the job */
    struct summary_queue *queue;              /* NULL: not urgent */
    bool slow; /* the phase's pieces may take milliseconds; phase_cb may set and clear it */
    /* The pool's own. */
    struct list link;
    uint32_t pieces, next, ended; /* of the phase */
    atomic_bool stop;
};

/* 0 or -errno. */
int summary_pool_new(struct uv_loop_s *loop, unsigned threads, struct summary_pool **out);
/* No job may be under way. Joins the threads; closes its handle on the event loop. NULL-safe. */
void summary_pool_free(struct summary_pool *pool);
unsigned summary_pool_threads(const struct summary_pool *pool);
void summary_turns_init(struct summary_turns *turns);
void summary_queue_init(struct summary_queue *queue, struct summary_turns *turns);
void summary_pool_submit(struct summary_pool *pool, struct summary_job *job, uint32_t pieces);
/* Pieces and phases that have not begun are left out; done_cb runs as ever. */
void summary_job_stop(struct summary_job *job);
bool summary_job_stopped(const struct summary_job *job);

#endif
