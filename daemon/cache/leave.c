/* Which blocks may leave DRAM now, and in which of the policy's lists those wait that may not. */
#include "daemon/cache/internal.h"

/* Memory that is waited for: a slow virtual machine was seen to touch 280 MiB a second. */
#define SOON_BYTES (256u << 20)

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

bool cache_arena_grows(const struct cache *c)
{
    return arena_space_comes(c->arena, SOON_BYTES);
}

static unsigned list_for_dram(const struct leave *l, const struct block *b, const struct ns *ns)
{
    bool only_copy = false;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0)
            return LIST_HELD;
        only_copy = only_copy || (p->dram == PART_DRAM_READY && !part_backed(p));
    }
    if (!only_copy)
        return LIST_CANDIDATES;
    if (b->leases > 0 || b->flags & BLOCK_PINNED || !block_idle(b, ns))
        return LIST_HELD;
    if (l->spare)
        return LIST_ONLY_COPY;
    return b->flags & BLOCK_QUEUED && !l->lose ? LIST_UNWRITTEN : LIST_CANDIDATES;
}

/* None of its parts in DRAM has an ordinary slot. */
static bool in_groups_only(struct cache *c, const struct block *b, const struct ns *ns)
{
    bool any = false;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        if (b->part[i].dram != PART_DRAM_READY)
            continue;
        if (!arena_slot_group(c->arena, part_slot(&b->part[i])))
            return false;
        any = true;
    }
    return any;
}

unsigned cache_leave_list(const struct leave *l, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(l->cache, ref, &ns);
    unsigned list = list_for_dram(l, b, ns);

    if (list == LIST_CANDIDATES && !l->groups && in_groups_only(l->cache, b, ns))
        return LIST_GROUPS;
    if (list != LIST_CANDIDATES || !l->drop)
        return list;
    if (b->leases > 0 || b->flags & BLOCK_PINNED || !block_idle(b, ns))
        return LIST_KEPT;
    return b->flags & BLOCK_QUEUED ? LIST_UNWRITTEN : LIST_CANDIDATES;
}

void cache_reconsider(struct cache *c, block_ref ref)
{
    unsigned was = policy_list(index_block(c->config.index, ref)), list;
    struct leave l = {.cache = c, .drop = true};

    if (was == LIST_CANDIDATES || was == LIST_STUCK)
        return; /* it may leave, or does not depend on the block */
    l.spare = cache_arena_grows(c);
    list = cache_leave_list(&l, ref);
    if (list != was)
        policy_move(c->config.policy, ref, list);
}

/* The slot can't be emptied now. Owner 0: it is not known to be a part's. */
bool cache_leave_blocked(const struct leave *l, uint64_t owner)
{
    const struct block *b = index_peek(l->cache->config.index, owner_block(owner));
    const struct ns *ns = b ? index_ns(l->cache->config.index, b->ns) : NULL;
    uint32_t part = owner_part(owner);

    return !b || part >= ns->identity.parts || b->part[part].dram != PART_DRAM_READY ||
           list_for_dram(l, b, ns) != LIST_CANDIDATES ||
           (!l->groups && cache_quota_keeps(ns->tenant));
}

bool cache_owner_may_leave(struct cache *c, uint64_t owner)
{
    const struct leave l = {
        .cache = c, .lose = c->dirty_bytes > c->config.backlog_bytes, .groups = true};

    return owner != 0 && !cache_leave_blocked(&l, owner);
}
