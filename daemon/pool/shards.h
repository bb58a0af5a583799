/* Reads of some shards of a part that lies on NVMe alone, into pieces of slots that are nobody's
 * part. Thread: the event loop only. */
#ifndef UCMD_POOL_SHARDS_H
#define UCMD_POOL_SHARDS_H

#include "daemon/cache/cache.h"
#include "daemon/cache/span.h"

#define SHARD_SUM_BITS 16

/* All of them. The caller's memory, zeroed but for what is borrowed. */
struct shard_reads {
    struct cache *cache;
    struct index *index;
    struct arena *arena;
    struct metrics *metrics;
    struct shard_stage *stage; /* the one that pieces are taken of; NULL: none */
    uint16_t sums[1u << SHARD_SUM_BITS];
};

/* As cache_get, for who wants shards [first, first + n) of the part only and holds its block until
 * done_cb or cancel. What lies on NVMe alone may then be read in part: done_cb finds w->shards set,
 * which is the caller's until shards_put. If w->shards is NULL he has a use of the part. */
int shards_get(struct shard_reads *r, block_ref ref, uint32_t part, uint32_t first, uint32_t n,
               uint8_t priority, int node, struct cache_wait *w);
void shards_put(struct cache_shards *s);
/* What was read. */
int shards_span(const struct cache_shards *s, struct span *out);

#endif
