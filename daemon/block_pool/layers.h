/* Reads of some layers of a part that lies on NVMe alone, into pieces of slots that are nobody's
 * part. Thread: the event loop only. */
#ifndef UCMD_BLOCK_POOL_LAYERS_H
#define UCMD_BLOCK_POOL_LAYERS_H

#include "daemon/cache/cache.h"
#include "daemon/cache/span.h"

#define LAYER_SUM_BITS 16

/* All of them. The caller's memory, zeroed but for what is borrowed. */
struct layer_reads {
    struct cache *cache;
    struct index *index;
    struct arena *arena;
    struct metrics *metrics;
    struct layer_stage *stage; /* the one that pieces are taken of; NULL: none */
    uint16_t sums[1u << LAYER_SUM_BITS];
};

/* As cache_get, for only layers [first, first + n) of the part. The caller has a reference to its
 * block until done_cb or cancel. If the part is on NVMe only, just these layers
 * may be read: then done_cb finds w->layers set, which is the caller's until layers_put. If
 * w->layers is NULL, the caller has a reference to the part. */
int layers_get(struct layer_reads *r, block_ref ref, uint32_t part, uint32_t first, uint32_t n,
               uint8_t priority, int node, struct cache_wait *w);
void layers_put(struct cache_layers *s);
/* What was read. */
int layers_span(const struct cache_layers *s, struct span *out);

#endif
