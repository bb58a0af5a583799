/* Holds: uses of parts in DRAM that last, and are nobody's copy. Blocks that a prefetch brought. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>

/* ---- holds ---- */

void cache_hold(struct cache *c, block_ref ref, uint32_t part)
{
    assert(cache_part(c, ref, part)->users > 0 && c->users > 0);
    c->users--;
    cache_less_under_way(c);
}

uint32_t cache_hold_ready(struct cache *c, const block_ref *refs, uint32_t n, uint32_t part,
                          uint32_t most, const void **memory)
{
    uint32_t held = 0;
    struct span span;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;
        struct part *p = b ? &b->part[part] : NULL;

        memory[i] = NULL;
        if (held == most || !p || b->flags & BLOCK_DOOMED || p->dram != PART_DRAM_READY ||
            p->users >= PART_USERS_MAX)
            continue;
        p->users++;
        if (span_part(c, refs[i], part, &span) != 0) {
            p->users--;
            continue;
        }
        memory[i] = span.origin;
        held++;
    }
    return held;
}

void cache_unhold(struct cache *c, block_ref ref, uint32_t part)
{
    c->users++;
    cache_put(c, ref, part);
}

/* ---- leases of a prefix ---- */

static uint8_t tier_of(const struct cache *c, const struct block *b, const struct ns *ns)
{
    if (b->dram_parts == ns->identity.parts)
        return CACHE_DRAM;
    if (b->flags & BLOCK_SHARED_ONLY)
        return CACHE_SHARE;
    for (uint32_t i = 0; c->share && i < ns->identity.parts; i++)
        if (!part_whole_local(&b->part[i]))
            return CACHE_SHARE;
    return CACHE_NVME;
}

static uint8_t tier_found(const struct cache *c, const struct block *b, const struct ns *ns)
{
    return block_complete(b, ns) && !(b->flags & BLOCK_DOOMED) ? tier_of(c, b, ns) : 0;
}

uint8_t cache_tier(const struct cache *c, block_ref ref)
{
    const struct block *b = ref ? index_block(c->config.index, ref) : NULL;

    return b ? tier_found(c, b, cache_ns_again(c, b, NULL)) : 0;
}

void cache_tiers(const struct cache *c, const block_ref *refs, uint32_t n, bool stop_at_gap,
                 uint8_t *tiers)
{
    const struct ns *ns = NULL;
    bool gap = false;

    for (uint32_t i = 0; i < n; i++) {
        const struct block *b = refs[i] && !gap ? index_block(c->config.index, refs[i]) : NULL;

        tiers[i] = 0;
        if (b) {
            ns = cache_ns_again(c, b, ns);
            tiers[i] = tier_found(c, b, ns);
        }
        gap = gap || (stop_at_gap && tiers[i] == 0);
    }
}

uint32_t cache_lease_found(struct cache *c, const block_ref *refs, uint32_t n, uint8_t *tiers)
{
    uint32_t i;

    for (i = 0; i < n; i++) {
        tiers[i] = cache_tier(c, refs[i]);
        if (tiers[i] == 0)
            break;
        cache_lease(c, refs[i]);
    }
    return i;
}

/* ---- what a prefetch brought ---- */

void cache_prefetched(struct cache *c, block_ref ref)
{
    index_block(c->config.index, ref)->flags |= BLOCK_PREFETCHED;
}

void cache_prefetch_used(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);

    c->config.metrics->prefetch_useful += !!(b->flags & BLOCK_PREFETCHED);
    b->flags &= (uint16_t)~BLOCK_PREFETCHED;
}
