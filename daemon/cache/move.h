/* A part's way into another slot of DRAM, for windows (relocate.c) and for extents that are emptied (compact.c):
 *
 *   begun, with a use of the part ----> copied ----> exchanged, once that use is the only one
 *
 * Whoever uses the part meanwhile finds it where it was; so DRAM has one copy of it. For the files of this room only. */
#ifndef UCMD_CACHE_MOVE_H
#define UCMD_CACHE_MOVE_H

#include "daemon/cache/cache.h"

struct cache_copier {
    void (*copy)(void *ctx, struct cache_copy *k); /* NULL: nobody copies */
    void *ctx;
};

/* Embedded in who moves the part. */
struct slot_move {
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    slot_ref to; /* the move's until the exchange; then 0 */
    bool copied;
    void (*copied_cb)(struct slot_move *m);
    struct cache_copy copy;
};

/* Begins to copy a READY part into the slot that slot_cb finds; on zeroed memory with cache, ref, part and copied_cb. There must be a
 * copier. 0; -EBUSY: too many uses; or slot_cb's -errno. */
int slot_move_begin(struct slot_move *m, int (*slot_cb)(struct slot_move *m, uint64_t bytes));
/* The part lies in the other slot from now on. False: it is not copied yet, or others use it. */
bool slot_move_exchange(struct slot_move *m);
/* Its use of the part ends, and without an exchange its copy is dropped. It must be copied. */
void slot_move_end(struct slot_move *m);

#endif
