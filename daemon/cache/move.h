/* MOVE: a part's way into another slot of DRAM, for slabs that are emptied (compact.c) and for
 * features that want parts in slots of their own (extend.h):
 *
 *   begun, with a reference to the part ----> copied ----> exchanged, once that reference is the
 *   only one
 *
 * Whoever uses the part meanwhile finds it where it was; so DRAM has one copy of it. Thread: the
 * event loop only. */
#ifndef UCMD_CACHE_MOVE_H
#define UCMD_CACHE_MOVE_H

#include "daemon/cache/cache.h"

/* One copy within DRAM. The cache allocates it, and leaves it alone until done_cb. */
struct cache_copy {
    void *to;
    const void *from;
    uint64_t bytes;
    void (*done_cb)(struct cache_copy *k); /* on the event loop, not inside the call that asked */
    void *scratch[16];                     /* the copier's own */
};
struct cache_copier {
    void (*copy)(void *ctx, struct cache_copy *k); /* NULL: nobody copies */
    void *ctx;
};
/* copy: always begins, and does not block. Without it (NULL) parts in DRAM stay where they are. */
void cache_copier_attach(struct cache *c, void (*copy)(void *ctx, struct cache_copy *k), void *ctx);

/* Embedded in the mover of the part. */
struct cache_move {
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    slot_ref to; /* the move's until the exchange; then 0 */
    bool copied;
    void (*copied_cb)(struct cache_move *m);
    struct cache_copy copy;
};

/* Begins to copy a READY part into the slot that slot_cb finds; on zeroed memory with cache, ref,
 * part and copied_cb. 0; -ENOSPC: nobody copies; -EBUSY: too many references; or slot_cb's
 * -errno. */
int cache_move_begin(struct cache_move *m, int (*slot_cb)(struct cache_move *m, uint64_t bytes));
/* The part lies in the other slot from now on. False: it is not copied yet, or others use it. */
bool cache_move_exchange(struct cache_move *m);
/* Its use of the part ends, and without an exchange its copy is dropped. It must be copied. */
void cache_move_end(struct cache_move *m);

#endif
