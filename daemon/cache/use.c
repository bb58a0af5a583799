/* What keeps blocks where they are: leases in some tier, uses of their parts in DRAM. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>

/* ---- leases ---- */

static void lease_add(struct cache *c, struct block *b, const struct ns *ns)
{
    assert(b->leases < UINT32_MAX);
    if (b->leases++ > 0)
        return;
    c->leased.index_bytes += ns->index_bytes;
    c->leased.bytes += ns->block_bytes;
}

/* True: it was the last one. */
static bool lease_drop(struct cache *c, struct block *b, const struct ns *ns)
{
    assert(b->leases > 0);
    if (--b->leases > 0)
        return false;
    c->leased.index_bytes -= ns->index_bytes;
    c->leased.bytes -= ns->block_bytes;
    return true;
}

void cache_lease(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    lease_add(c, b, ns);
}

bool cache_lease_end(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    return lease_drop(c, b, ns);
}

void cache_lease_many(struct cache *c, const block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        ns = cache_ns_again(c, b, ns);
        lease_add(c, b, ns);
    }
}

uint32_t cache_lease_found(struct cache *c, block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;
    uint32_t leased = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        ns = cache_ns_again(c, b, ns);
        if (!block_found(b, ns)) {
            refs[i] = 0;
            continue;
        }
        lease_add(c, b, ns);
        leased++;
    }
    return leased;
}

void cache_unlease_many(struct cache *c, const block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;
    bool any = false;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        ns = cache_ns_again(c, b, ns);
        if (!lease_drop(c, b, ns))
            continue;
        cache_settle(c, refs[i], b);
        any = true;
    }
    if (any)
        cache_released(c);
}

void cache_unlease(struct cache *c, block_ref ref)
{
    cache_unlease_many(c, &ref, 1);
}

void cache_lease_undo(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    (void)cache_lease_end(c, ref);
    cache_settle(c, ref, b);
}

struct cache_leased cache_leased(const struct cache *c)
{
    return c->leased;
}

bool cache_pin(struct cache *c, block_ref ref, bool pinned)
{
    struct block *b = index_block(c->config.index, ref);

    if (pinned == !!(b->flags & BLOCK_PINNED))
        return false;
    b->flags ^= BLOCK_PINNED;
    c->stats.pinned += pinned ? 1 : -1;
    if (!pinned) {
        cache_reconsider(c, ref);
        cache_released(c);
    }
    return true;
}

/* ---- uses of a part in DRAM ---- */

int cache_take(struct cache *c, block_ref ref, uint32_t part)
{
    struct part *p = cache_part(c, ref, part);

    assert(p->dram == PART_DRAM_READY);
    if (p->users >= PART_USERS_MAX)
        return -EAGAIN; /* one key may come often in a request */
    part_use(c, p);
    return CACHE_READY;
}

void cache_unuse(struct cache *c, block_ref ref, uint32_t part)
{
    struct block *b = index_block(c->config.index, ref);

    part_unuse(c, &b->part[part]);
    if (b->part[part].users == 0)
        cache_settle(c, ref, b);
}

void cache_put(struct cache *c, block_ref ref, uint32_t part)
{
    cache_unuse(c, ref, part);
    cache_released(c);
}

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
