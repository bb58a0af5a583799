/* What features see of the cache, besides what requests do: those that bring parts into it, read
 * them in another way, or move them. Thread: the event loop only. */
#ifndef UCMD_CACHE_EXTEND_H
#define UCMD_CACHE_EXTEND_H

#include "daemon/base/chore.h"
#include "daemon/cache/move.h"
#include "daemon/cache/op.h"

/* ---- parts of an earlier run ---- */

/* Parts of an earlier run come into DRAM from now on: the tier stays open, and blocks that lack
 * parts stay, until the end. */
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
/* The part is READY, and the slot the cache's. False: it is there, or is not wanted, or the index
 * is full. */
bool cache_restore(struct cache *c, const struct cache_restored *r);

/* ---- slots that are nobody's part ---- */

/* Blocks leave for it as for any. 0; -EBUSY, -EFBIG: see cache_slot. Until it is given back, after
 * which the caller calls cache_released, space may come. */
int cache_slot_grant(struct cache *c, uint64_t bytes, int node, slot_ref *out);
void cache_slot_return(struct cache *c, slot_ref slot);

/* ---- moving parts ----
 *
 * A feature that wants parts in slots of its own choice decides which part goes into which slot,
 * for whom, and when to give up. The cache moves one part there, without knowing the reason. It
 * provides:
 * - a claim of the part, one at a time: nothing else moves it, and a stop waits for the claim's
 *   end;
 * - two ways: a MOVE (move.h) of a part in DRAM, and a read of any other into the slot;
 * - the slots: whose blocks may leave one for the part, and their leaving;
 * - a chore, woken when something is released, or evicted by name: the end of somebody else's
 *   reference lets a MOVE exchange. */

/* False: somebody has claimed it. The caller holds the block until the claim ends. After a claim
 * that lasted longer than the call it calls cache_released. */
bool cache_move_claim(struct cache *c, block_ref ref, uint32_t part);
void cache_move_unclaim(struct cache *c, block_ref ref, uint32_t part);

/* As cache_get, of a part that is not READY; a read that has to begin goes into the slot that
 * slot_cb finds. -ENOENT: also a part that is being filled. -EBUSY instead of -EAGAIN; or slot_cb's
 * -errno. */
int cache_get_into(struct cache *c, block_ref ref, uint32_t part, uint8_t priority,
                   int (*slot_cb)(struct cache_wait *w, uint64_t bytes, slot_ref *out),
                   struct cache_wait *w);

/* A part as the owner of a slot or of a place on NVMe. */
uint64_t part_owner(block_ref ref, uint32_t part);
block_ref owner_block(uint64_t owner);
/* The block in a slot of this owner may leave DRAM now without loss, or is not waiting to be
 * written. */
bool cache_owner_may_leave(struct cache *c, uint64_t owner);
/* That block leaves DRAM. */
void cache_owner_evict(struct cache *c, uint64_t owner);

/* A feature that moves parts; the cache has one at most. */
struct cache_mover {
    struct chore chore;
    bool waits; /* the chore is woken when something is released, or evicted by name */
};
/* run_cb, ready_cb: of the chore, among the cache's own. Until detached, which is no callback's to
 * do. */
void cache_mover_attach(struct cache *c, struct cache_mover *m, bool (*run_cb)(void *ctx),
                        bool (*ready_cb)(const void *ctx), void *ctx);
void cache_mover_detach(struct cache *c);
/* Another number: something was released since. */
uint64_t cache_releases(const struct cache *c);

#endif
