/* The digest of one part: a digest for each layer, built by threads of the pool.
 * Thread: the loop; build_run works on the pool's. */
#ifndef UCMD_DIGEST_BUILD_H
#define UCMD_DIGEST_BUILD_H

#include "daemon/digest/pool.h"
#include "kernels/sparse/sparse.h"

struct part_build {
    struct digest_job job; /* job.done_cb is the caller's */
    const struct ucm_digest_plan *plan;
    const uint8_t *from; /* the part: shards of shard_bytes */
    uint8_t *to;         /* plan->bytes for each of them */
    uint64_t shard_bytes;
    uint32_t shards;
    uint32_t piece_shards; /* the pool's: of a piece */
};

/* The caller fills in all but the pool's, and leaves it alone until done_cb. */
void part_build_submit(struct digest_pool *pool, struct part_build *b);

#endif
