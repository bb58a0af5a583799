/* Making room in DRAM: which blocks go, and when a whole extent must change its slot size. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

/* Extents of another slot size that could not be emptied: not to be tried again for one slot. */
#define REFUSED_MAX 8
#define VICTIM_TRIES 256
/* Before giving up: thousands that are pinned or leased may lie in front of one that may go. */
#define LAST_TRIES 16384
/* Of the coldest, one on the wanted NUMA node goes first: of so many at most, and of that share. */
#define NEAR_TRIES 16
#define NEAR_SHARE 32
/* Memory that is waited for: a slow virtual machine was seen to touch 280 MiB a second. */
#define SOON_BYTES (256u << 20)

struct room_search {
    struct cache *cache;
    bool lose;  /* blocks that lie nowhere else may go though they wait to be written */
    bool spare; /* the arena has room in a moment: what lies nowhere else stays */
    uint64_t slot_bytes;
    int node;
    uint32_t refused[REFUSED_MAX], n_refused;
    bool blocked;
};

static bool block_may_go(struct room_search *s, block_ref ref)
{
    struct cache *c = s->cache;
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    bool kept = b->leases > 0 || b->flags & BLOCK_PINNED;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0)
            return false;
        if (p->dram != PART_DRAM_READY || part_backed(p))
            continue;
        if (kept || s->spare || !block_idle(b, ns) || (b->flags & BLOCK_QUEUED && !s->lose))
            return false;
    }
    return true;
}

static slot_ref block_slot(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY)
            return part_slot(&b->part[i]);
    return 0;
}

static bool may_go_cb(void *ctx, block_ref ref)
{
    struct room_search *s = ctx;
    slot_ref slot = block_slot(s->cache, ref);
    uint32_t extent;

    if (slot == 0 || !block_may_go(s, ref))
        return false;
    extent = arena_extent_of(s->cache->arena, slot);
    for (uint32_t i = 0; i < s->n_refused; i++)
        if (s->refused[i] == extent)
            return false;
    return true;
}

/* Parts that were waiting for their turn to be written will not be. */
static uint32_t parts_unwritten(const struct block *b, const struct ns *ns)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        n += b->part[i].dram == PART_DRAM_READY && b->part[i].nvme == PART_NVME_NONE;
    return b->flags & BLOCK_QUEUED ? n : 0;
}

static void block_evict(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    bool was_complete = block_complete(b, ns);

    c->config.metrics->nvme_write_dropped += parts_unwritten(b, ns);
    block_leave_dram(c, ref, true);
    c->config.metrics->arena_evicted_blocks++;
    if (!block_complete(b, ns)) {
        if (was_complete)
            c->config.metrics->arena_evicted_lost++;
        /* A block that lost a part is worth nothing, whatever the tier still has of it. */
        if (b->leases == 0 && block_idle(b, ns))
            cache_discard(c, ref);
    } else {
        cache_shared_trim(c);
    }
}

static void owner_blocked_cb(void *ctx, uint64_t owner)
{
    struct room_search *s = ctx;
    block_ref ref = (block_ref)(owner >> 16);
    struct ns *ns;
    struct block *b;

    if (ref == 0) { /* kept over a restart, and not known to be good yet */
        s->blocked = true;
        return;
    }
    b = cache_block(s->cache, ref, &ns);
    if (b->part[owner & 0xffff].dram != PART_DRAM_READY || !block_may_go(s, ref))
        s->blocked = true;
}

static void owner_evict_cb(void *ctx, uint64_t owner)
{
    struct room_search *s = ctx;

    block_evict(s->cache, (block_ref)(owner >> 16));
}

/* The coldest block has another slot size: its whole extent must go, or none of it. */
static bool extent_steal(struct room_search *s, slot_ref slot)
{
    struct cache *c = s->cache;

    s->blocked = false;
    arena_extent_owners(c->arena, slot, owner_blocked_cb, s);
    if (s->blocked) {
        if (s->n_refused == REFUSED_MAX)
            return false;
        s->refused[s->n_refused++] = arena_extent_of(c->arena, slot);
        return true;
    }
    arena_extent_owners(c->arena, slot, owner_evict_cb, s);
    c->config.metrics->arena_extents_moved++;
    return true;
}

/* Its slot is one that is wanted. */
static bool near_cb(void *ctx, block_ref ref)
{
    struct room_search *s = ctx;
    struct arena *a = s->cache->arena;
    slot_ref slot = block_slot(s->cache, ref);

    return slot != 0 && arena_slot_node(a, slot) == s->node &&
           arena_slot_bytes(a, slot) == s->slot_bytes && may_go_cb(s, ref);
}

static block_ref near_victim(struct room_search *s)
{
    struct policy *policy = s->cache->config.policy;
    uint64_t tries = policy_count(policy) / NEAR_SHARE;

    if (s->node == NUMA_NONE)
        return 0;
    return policy_near(policy, near_cb, s, tries < NEAR_TRIES ? (uint32_t)tries : NEAR_TRIES);
}

/* Makes one step towards a slot. False: nothing more can go. */
static bool room_step(struct room_search *s)
{
    struct cache *c = s->cache;
    block_ref victim = near_victim(s);
    slot_ref slot;

    if (victim == 0)
        victim = policy_victim(c->config.policy, may_go_cb, s, VICTIM_TRIES);
    if (victim == 0 && s->spare)
        return false;
    if (victim == 0)
        victim = policy_victim(c->config.policy, may_go_cb, s, LAST_TRIES);
    if (victim == 0 && !s->lose) {
        s->lose = true;
        victim = policy_victim(c->config.policy, may_go_cb, s, LAST_TRIES);
    }
    if (victim == 0)
        return cache_fill_reclaim(c);
    slot = block_slot(c, victim);
    if (arena_slot_bytes(c->arena, slot) == s->slot_bytes) {
        block_evict(c, victim);
        return true;
    }
    return extent_steal(s, slot);
}

static void slot_count(struct room_search *s, slot_ref slot)
{
    struct cache *c = s->cache;

    if (slot == 0)
        c->config.metrics->arena_full += !s->spare;
    else if (s->node != NUMA_NONE && arena_slot_node(c->arena, slot) == s->node)
        c->config.metrics->arena_slots_near++;
    else if (s->node != NUMA_NONE)
        c->config.metrics->arena_slots_far++;
}

/* ---- room in the index ---- */

static bool may_drop_cb(void *ctx, block_ref ref)
{
    struct cache *c = ctx;
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return b->leases == 0 && !(b->flags & (BLOCK_PINNED | BLOCK_QUEUED)) && block_idle(b, ns);
}

bool cache_coldest_drop(struct cache *c)
{
    block_ref ref = policy_victim(c->config.policy, may_drop_cb, c, VICTIM_TRIES);
    const struct block *b;
    struct ns *ns;
    bool was_complete;

    if (ref == 0)
        return false;
    b = cache_block(c, ref, &ns);
    was_complete = block_complete(b, ns);
    c->config.metrics->arena_evicted_blocks++;
    block_leave_dram(c, ref, true);
    if (was_complete && !block_complete(b, ns))
        c->config.metrics->arena_evicted_lost++;
    cache_discard(c, ref);
    return true;
}

/* ---- room for a part ---- */

slot_ref cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node)
{
    struct room_search s = {.cache = c,
                            .lose = c->dirty_bytes > c->config.backlog_bytes,
                            .spare = arena_room_comes(c->arena, SOON_BYTES),
                            .slot_bytes = arena_padded(bytes),
                            .node = arena_nodes(c->arena) > 0 ? node : NUMA_NONE};
    slot_ref slot = arena_alloc(c->arena, bytes, owner, s.node);

    while (slot == 0 && room_step(&s))
        slot = arena_alloc(c->arena, bytes, owner, s.node);
    slot_count(&s, slot);
    return slot;
}
