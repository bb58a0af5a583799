/* What features see of the cache, beside what requests do: those that bring parts into it, or read them in another way. Thread: the loop only. */
#ifndef UCMD_CACHE_EXTEND_H
#define UCMD_CACHE_EXTEND_H

#include "daemon/cache/op.h"

/* Parts of an earlier run come into DRAM from now on: the tier stays open, and blocks that lack parts stay, until the end. */
void cache_restore_begin(struct cache *c);
void cache_restore_end(struct cache *c);

/* Such a part: its bytes lie in the slot, and agree with the checksum. */
struct cache_restored {
    struct ns *ns;
    const uint8_t *key;
    uint32_t part;
    slot_ref slot;
    uint64_t checksum;
    uint32_t uses; /* of its block, by policy_walk */
    bool stored;   /* it lay on NVMe as well */
};
/* The part is READY, and the slot the cache's. False: it is there, or is not wanted, or the index is full. */
bool cache_restore(struct cache *c, const struct cache_restored *r);

/* A slot that is nobody's part; blocks leave for it as for any. 0; -EBUSY, -EFBIG: see cache_slot. Until it is given back, after which the
 * caller calls cache_released, space may come. */
int cache_slot_lend(struct cache *c, uint64_t bytes, int node, slot_ref *out);
void cache_slot_return(struct cache *c, slot_ref slot);

#endif
