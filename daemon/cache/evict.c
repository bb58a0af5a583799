/* Blocks leave a tier: evicted by name, because their place is reclaimed, or because they are not
 * whole any more. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>

bool block_idle(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0 || p->dram == PART_DRAM_FILLING || p->dram == PART_DRAM_FETCHING ||
            p->nvme == PART_NVME_WRITING)
            return false;
    }
    return true;
}

void block_drop_dram(struct cache *c, block_ref ref, bool evicted)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        slot_ref slot;

        if (b->part[i].dram != PART_DRAM_READY)
            continue;
        slot = part_slot(&b->part[i]);
        part_set_dram(c, ref, i, PART_DRAM_NONE, 0);
        arena_slot_free(c->arena, slot);
    }
    c->config.metrics->prefetch_useless += !!(b->flags & BLOCK_PREFETCHED);
    b->flags &= (uint16_t)~BLOCK_PREFETCHED;
    if (b->flags & BLOCK_IN_POLICY)
        policy_remove(c->config.policy, ref, evicted);
    cache_list_update(c, ref);
}

static void block_drop_nvme(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY)
            cache_nvme_lost(c, ref, i, true);
}

void cache_nvme_lost(struct cache *c, block_ref ref, uint32_t part, bool forget)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct tier_place place = part_place(&b->part[part]);

    part_set_nvme(c, ref, part, NULL);
    if (forget)
        c->tier_ops->forget(c->tier, &place, ns_part_bytes(ns, part));
}

static void block_remove(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (b->flags & BLOCK_PINNED)
        c->stats.pinned--;
    if (b->flags & BLOCK_SHARE_QUEUED)
        c->config.metrics->share_write_dropped += cache_parts_missing(b, ns, WRITE_SHARE);
    cache_shared_forget(c, ref);
    block_drop_dram(c, ref, false);
    block_drop_nvme(c, ref);
    index_remove(c->config.index, ref);
}

void cache_discard(struct cache *c, block_ref ref)
{
    block_remove(c, ref);
    cache_released(c);
}

/* An incomplete block in DRAM may still be completed, or the policy evicts it. Nobody would ever find
 * one without anything in DRAM. */
void cache_settle(struct cache *c, block_ref ref, const struct block *b, const struct ns *ns)
{
    if (policy_list(b) != POLICY_CANDIDATES)
        cache_reconsider(c, ref);
    if (b->leases == 0 &&
        (b->flags & BLOCK_DOOMED || (b->dram_parts == 0 && !block_complete(b, ns))) &&
        block_idle(b, ns))
        block_remove(c, ref);
}

void cache_lease_undo(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    (void)cache_lease_end(c, ref);
    cache_settle(c, ref, b, ns);
}

/* The tiers in which something of it lies, or to which something is on its way. backed: leaving
 * DRAM loses nothing. */
static unsigned block_tiers(const struct block *b, const struct ns *ns, bool *backed)
{
    unsigned tiers = b->dram_parts > 0 ? CACHE_DRAM : 0;

    *backed = true;
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        tiers |= p->nvme != PART_NVME_NONE ? CACHE_NVME : 0;
        tiers |= p->share != PART_SHARE_NONE ? CACHE_SHARE : 0;
        *backed = *backed && part_backed(p);
    }
    return tiers;
}

enum cache_evicted cache_evict(struct cache *c, block_ref ref, unsigned tiers)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    bool all = tiers == CACHE_ALL, backed;

    if (b->whole_parts == 0 || !(block_tiers(b, ns, &backed) & tiers))
        return CACHE_EVICT_NONE;
    if (b->flags & BLOCK_PINNED || (tiers == CACHE_DRAM && !backed))
        return CACHE_EVICT_LATER;
    if (all)
        cache_fills_break(c, ref);
    if (b->leases > 0 || !block_idle(b, ns)) {
        if (all) {
            uint8_t status = cache_followed(ns) ? cache_status(c, ref) : 0;

            c->dooms += !(b->flags & BLOCK_DOOMED);
            b->flags |= BLOCK_DOOMED;
            if (cache_followed(ns))
                cache_status_changed(c, ns, ref, status);
            block_retract(c, ref);
            cache_wake(c, CHORE_WINDOWS);
        }
        return CACHE_EVICT_LATER;
    }
    if (tiers & CACHE_SHARE)
        cache_shared_forget(c, ref);
    if (tiers & CACHE_DRAM)
        block_drop_dram(c, ref, false);
    if (tiers & CACHE_NVME)
        block_drop_nvme(c, ref);
    if (!block_complete(b, ns))
        cache_discard(c, ref);
    cache_released(c);
    return CACHE_EVICT_DONE;
}

uint64_t cache_dooms(const struct cache *c)
{
    return c->dooms;
}

bool cache_doomed(struct cache *c, block_ref ref)
{
    return index_block(c->config.index, ref)->flags & BLOCK_DOOMED;
}

/* ---- callbacks of the tier ---- */

/* The part loses nothing when it lies in DRAM or on the shared tier, too, and is not being read. */
static bool tier_may_drop(struct cache *c, uint64_t owner)
{
    struct ns *ns;
    const struct block *b = cache_block(c, owner_block(owner), &ns);
    const struct part *p = &b->part[owner_part(owner)];

    if (p->dram == PART_DRAM_READY || (p->share == PART_SHARE_KNOWN && p->dram == PART_DRAM_NONE))
        return true;
    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

static bool tier_drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    const struct part *p = cache_part(c, ref, owner_part(owner));

    assert(part_loc(p) == loc);
    if (!tier_may_drop(c, owner))
        return false;
    if (policy_heat(index_block(c->config.index, ref)) == 0)
        admission_unused(ns_admission(cache_ns(c, ref)));
    cache_nvme_lost(c, ref, owner_part(owner), false);
    if (!part_whole(p))
        cache_discard(c, ref);
    else
        cache_shared_trim(c);
    return true;
}

static void tier_lost_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (!part_is_at(&b->part[owner_part(owner)], loc))
        return;
    cache_nvme_lost(c, ref, owner_part(owner), true);
    cache_write_again(c, ref);
    cache_settle(c, ref, b, ns);
    cache_released(c);
}

static unsigned tier_heat_cb(void *ctx, uint64_t owner)
{
    struct cache *c = ctx;

    if (!tier_may_drop(c, owner))
        return TIER_HEAT_BUSY;
    if (cache_quota_keeps_below(cache_ns(c, owner_block(owner))->tenant))
        return TIER_HEAT_KEPT;
    return policy_heat(index_block(c->config.index, owner_block(owner)));
}

static bool tier_moved_cb(void *ctx, uint64_t owner, uint64_t from, const struct tier_place *to)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    uint32_t part = owner_part(owner);
    const struct block *b = index_peek(c->config.index, ref);

    /* Another block may have the number by now, but no other part was ever at `from`. */
    if (!b || part >= index_ns(c->config.index, b->ns)->identity.parts ||
        !part_is_at(&b->part[part], from))
        return false;
    part_set_nvme(c, ref, part, to);
    return true;
}

struct tier_callbacks cache_tier_callbacks(struct cache *c)
{
    return (struct tier_callbacks){.drop_cb = tier_drop_cb,
                                   .heat_cb = tier_heat_cb,
                                   .moved_cb = tier_moved_cb,
                                   .restore_cb = cache_restore_cb,
                                   .recovered_cb = cache_recovered_cb,
                                   .describe_cb = cache_describe_cb,
                                   .ns_known_cb = cache_ns_known_cb,
                                   .lost_cb = tier_lost_cb,
                                   .ctx = c};
}
