#include "daemon/digest/build.h"

#define PIECE_BYTES (256u << 10) /* of KV, so that selections overtake builds */
#define SLOW_BYTES (1u << 20)    /* of one layer, which is a piece at least */

static void run_cb(struct digest_job *job, uint32_t piece, unsigned thread)
{
    const struct part_build *b = LIST_ENTRY(job, struct part_build, job);
    uint32_t first = piece * b->piece_shards, end = first + b->piece_shards;

    (void)thread;
    for (uint32_t shard = first; shard < end && shard < b->shards; shard++)
        ucm_digest_build(b->plan, b->from + shard * b->shard_bytes,
                         b->to + (size_t)shard * b->plan->bytes);
}

void part_build_submit(struct digest_pool *pool, struct part_build *b)
{
    b->piece_shards = b->shard_bytes < PIECE_BYTES ? (uint32_t)(PIECE_BYTES / b->shard_bytes) : 1;
    b->job.run_cb = run_cb;
    b->job.phase_cb = NULL;
    b->job.queue = NULL;
    b->job.slow = b->shard_bytes > SLOW_BYTES;
    digest_pool_submit(pool, &b->job, (b->shards + b->piece_shards - 1) / b->piece_shards);
}
