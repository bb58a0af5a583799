/* Operations of the tiers, each on one part, from its start to its end; for the files of this
 * module, and for features by extend.h. */
#ifndef UCMD_CACHE_OP_H
#define UCMD_CACHE_OP_H

#include "daemon/base/span.h"
#include "daemon/cache/cache.h"

struct part_op;

/* What ends one. The op is its callback's to free. */
struct op_kind {
    void (*tier_cb)(struct part_op *op, int status);
    void (*shared_cb)(struct part_op *op, int status);
};

struct part_op {
    const struct op_kind *kind;
    union {
        struct tier_io tier;
        struct shared_io shared;
    } io;
    bool shared; /* which of io */
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    /* Its waiters: cache_wait.link of a read, cache_durable.link of a write to NVMe or a sync,
     * cache_check.link. */
    struct list waiters;
    slot_ref slot;     /* of a read or check: its target */
    uint64_t begun_ns; /* when it was submitted to NVMe */
    uint8_t priority;
    bool small;
    bool check; /* a read that nobody uses, at nobody's cost */
    /* For a read into the part's slot. */
    uint32_t number; /* in cache.pending_reads */
    bool failed;     /* reported */
};

struct part_op *op_new(struct cache *c, const struct op_kind *kind, block_ref ref,
                       uint32_t part); /* NULL: no memory */
/* The same in its owner's memory. */
void op_init(struct part_op *op, struct cache *c, const struct op_kind *kind, block_ref ref,
             uint32_t part);
/* Submits it to NVMe, to the shared tier. span: source or target, which also says which layers
 * TIER_READ_LAYERS reads; NULL: none. 0 or the tier's -errno; then op is the caller's. */
int op_tier(struct part_op *op, enum tier_op what, const struct span *span);
int op_shared(struct part_op *op, bool write, const struct span *span);

/* Counts a read from NVMe for a request, which has ended and brought so many bytes. The block must
 * be there. */
void op_read_count(const struct part_op *op, uint64_t bytes);
/* Parts of earlier runs may still turn up. What was dumped since waits: its copy of an earlier run
 * may have been promised, and a newer one that is not durable must not take its place. */
bool cache_recovering(const struct cache *c);
/* What the tier stores with a part. */
struct tier_name cache_tier_name(struct cache *c, block_ref ref, uint32_t part);
/* Its files have no names yet: cache_writes_with_secret says when that is over. */
bool cache_secret_awaited(const struct cache *c, const struct ns *ns);

#endif
