/* Parts and blocks leave: a tier, or all. Who decides that is above. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <stdlib.h>

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

void block_drop_nvme(struct cache *c, block_ref ref)
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

void cache_shared_forget(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (part_on_share(&b->part[i]))
            part_set_share(c, ref, i, PART_SHARE_NONE, 0);
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
void cache_settle(struct cache *c, block_ref ref, const struct block *b)
{
    const struct ns *ns;

    if (b->policy_data & POLICY_ASIDE)
        cache_reconsider(c, ref);
    if (b->leases > 0 || (!(b->flags & BLOCK_DOOMED) && b->dram_parts > 0))
        return;
    ns = index_ns(c->config.index, b->ns);
    if ((b->flags & BLOCK_DOOMED || !block_complete(b, ns)) && block_idle(b, ns))
        block_remove(c, ref);
}

/* ---- fills ---- */

/* The slot and the part's state are the caller's. */
void cache_fill_free(struct cache *c, struct cache_fill *f)
{
    list_remove(&f->link);
    list_remove(&f->link_age);
    table_remove(&c->fills, f->number);
    free(f);
}

/* The caller calls cache_released. */
void cache_fill_abort(struct cache *c, struct cache_fill *f)
{
    block_ref ref = f->ref;
    slot_ref slot = f->slot;
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    assert(f->copying == 0);
    part_set_dram(c, ref, f->part, PART_DRAM_NONE, 0);
    cache_fill_free(c, f);
    arena_slot_free(c->arena, slot);
    c->config.metrics->dump_blocks_dropped++;
    cache_settle(c, ref, b);
}

void cache_fills_break(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    b->leases++; /* fill_abort settles the block, which must outlive this loop */
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        struct cache_fill *f;

        if (b->part[i].dram != PART_DRAM_FILLING)
            continue;
        f = table_get(&c->fills, part_fill(&b->part[i]));
        f->broken = true;
        if (f->copying == 0)
            cache_fill_abort(c, f);
    }
    b->leases--;
    cache_released(c);
}

bool cache_fill_reclaim(struct cache *c)
{
    if (list_empty(&c->fills_by_age))
        return false;
    cache_fill_abort(c, LIST_ENTRY(c->fills_by_age.next, struct cache_fill, link_age));
    cache_released(c);
    return true;
}

/* ---- what nobody needs ---- */

/* A search for a block to drop looks at so many. Those that may not be dropped go to the front, so
 * that the next search looks at others. */
#define DROP_TRIES 64

bool cache_may_drop(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

bool cache_list_drop(struct cache *c, struct block_list *l)
{
    for (unsigned i = 0; i < DROP_TRIES && l->back != 0; i++) {
        block_ref ref = l->back;

        if (cache_may_drop(c, ref) &&
            (l != &c->lists.below || !cache_quota_keeps_below(cache_ns(c, ref)->tenant))) {
            cache_discard(c, ref);
            return true;
        }
        cache_list_front(c, ref);
    }
    return false;
}

/* False: with so much more in the index they would be too many. */
bool cache_shared_room(struct cache *c, uint64_t more_bytes)
{
    while (c->lists.shared_index_bytes + more_bytes > c->config.shared_blocks * INDEX_BLOCK_BYTES)
        if (!cache_list_drop(c, &c->lists.shared))
            return false;
    return true;
}

void cache_shared_trim(struct cache *c)
{
    (void)cache_shared_room(c, 0);
}
