#include "daemon/retrieval/copier.h"

#include "daemon/cache/move.h"
#include "daemon/retrieval/pool.h"

#include <string.h>

#define PIECE_BYTES (256u << 10) /* as long as a piece of a build takes, or less */

/* The job lies in the copy's scratch memory. */
struct copier_job {
    struct summary_job job;
    struct cache_copy *copy;
};
_Static_assert(sizeof(struct copier_job) <= sizeof(((struct cache_copy *)0)->scratch),
               "the cache leaves too little memory for a job");

static void run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    const struct cache_copy *k = LIST_ENTRY(job, struct copier_job, job)->copy;
    uint64_t at = (uint64_t)piece * PIECE_BYTES;
    uint64_t n = k->bytes - at < PIECE_BYTES ? k->bytes - at : PIECE_BYTES;

    (void)thread;
    memcpy((char *)k->to + at, (const char *)k->from + at, n);
}

static void done_cb(struct summary_job *job)
{
    struct cache_copy *k = LIST_ENTRY(job, struct copier_job, job)->copy;

    k->done_cb(k);
}

void copier_copy(void *ctx, struct cache_copy *k)
{
    struct copier_job *j = (struct copier_job *)k->scratch;

    memset(j, 0, sizeof(*j));
    j->job.run_cb = run_cb;
    j->job.done_cb = done_cb;
    j->copy = k;
    summary_pool_submit(ctx, &j->job, (uint32_t)((k->bytes + PIECE_BYTES - 1) / PIECE_BYTES));
}
