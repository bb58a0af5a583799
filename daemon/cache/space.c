/* Space in DRAM: which block leaves next, and when a whole slab changes its slot size.
 *
 * The policy orders the blocks; part.c says which of them may leave. A search sets aside a block
 * that may not leave, in one of the policy's lists. The block comes back once it may leave
 * (cache_reconsider), or is used again. So a search looks at few blocks, and a search that found
 * nothing costs nothing until something was released. `arena_candidates` counts the looks. */
#include "daemon/cache/extend.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* Looks of one search; it goes on in the next iteration of the event loop. */
#define LOOKS 4096
/* Candidates looked at in the stuck list first: it has blocks of the wanted size, too. */
#define STUCK_LOOKS 16
/* Owners that it looks at, at most, before it empties a slab, and blocks that it then evicts in
 * one iteration of the event loop: so many parts of one count as a block more. */
#define SLAB_LOOKS 4096
#define SLAB_EVICTIONS 1024
#define PARTS_PER_EVICTION 4u
/* A block on the wanted NUMA node goes first, if one is among the coldest: the search looks at
 * NEAR_TRIES candidates, and at most at 1/NEAR_FRACTION of all. */
#define NEAR_TRIES 16
#define NEAR_FRACTION 32
struct space_search {
    struct cache *cache;
    struct leave may;
    bool keep;                  /* what waits to be written stays, whatever else does not help */
    bool any_size;              /* of slots */
    bool beside;                /* for a part that is moved: nothing else is begun for it */
    struct tenant *tenant;      /* that the slot is for; NULL: nobody */
    struct policy_group *only;  /* whose blocks alone may leave; NULL: all */
    struct policy_group *group; /* the current one */
    bool unseen;                /* there are stuck blocks that the search has not looked at */
    uint64_t slot_bytes;
    int node;
    int64_t looks;
    uint64_t seen;    /* blocks */
    uint64_t blocker; /* owner of a slot that keeps a slab from being emptied */
    bool blocked;
    unsigned owners; /* of the current slab, so far */
};

/* ---- slots of the wanted size ---- */

/* An ordinary slot of that size among those of the block, else any of these; 0: it has none. */
static slot_ref block_slot(struct cache *c, block_ref ref, uint64_t slot_bytes)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    slot_ref any = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        slot_ref slot;

        if (b->part[i].dram != PART_DRAM_READY)
            continue;
        slot = part_slot(&b->part[i]);
        if (arena_slot_group(c->arena, slot))
            continue;
        if (arena_slot_bytes(c->arena, slot) == slot_bytes)
            return slot;
        any = any ? any : slot;
    }
    return any;
}

static bool owner_blocked_cb(void *ctx, uint64_t owner)
{
    struct space_search *s = ctx;

    s->looks--;
    s->cache->config.metrics->arena_candidates++;
    s->blocked = owner == 0 || cache_leave_blocked(&s->may, owner);
    s->blocker = owner;
    return !s->blocked && ++s->owners < SLAB_LOOKS;
}

/* Whether all blocks in the slot's slab may leave, as far as the search looks at them. Remembers
 * the first that may not: until that one may, the next searches need one look. */
static bool slab_may_go(struct space_search *s, slot_ref slot)
{
    struct cache *c = s->cache;
    uint32_t slab = arena_slab_of(c->arena, slot);

    if (!c->space.blockers)
        c->space.blockers = calloc(arena_slabs(c->arena), sizeof(*c->space.blockers));
    if (c->space.blockers && c->space.blockers[slab] != 0 &&
        index_peek(c->config.index, owner_block(c->space.blockers[slab])) &&
        cache_leave_blocked(&s->may, c->space.blockers[slab]))
        return false;
    s->blocked = false;
    s->blocker = 0;
    s->owners = 0;
    arena_slab_owners(c->arena, slab, owner_blocked_cb, s);
    if (c->space.blockers)
        c->space.blockers[slab] = s->blocked ? s->blocker : 0;
    return !s->blocked;
}

static unsigned slot_list_cb(void *ctx, block_ref ref)
{
    struct space_search *s = ctx;
    struct arena *a = s->cache->arena;
    unsigned list = cache_leave_list(&s->may, ref);
    slot_ref slot;

    s->seen++;
    s->cache->config.metrics->arena_candidates++;
    if (list != LIST_CANDIDATES)
        return list;
    slot = block_slot(s->cache, ref, s->slot_bytes);
    if (slot == 0)
        return LIST_HELD;
    if (s->any_size || arena_slot_bytes(a, slot) == s->slot_bytes || slab_may_go(s, slot))
        return LIST_CANDIDATES;
    return LIST_STUCK;
}

static bool near_cb(void *ctx, block_ref ref)
{
    struct space_search *s = ctx;
    struct arena *a = s->cache->arena;
    slot_ref slot = block_slot(s->cache, ref, s->slot_bytes);

    s->cache->config.metrics->arena_candidates++;
    return slot != 0 && arena_slot_node(a, slot) == s->node &&
           arena_slot_bytes(a, slot) == s->slot_bytes &&
           cache_leave_list(&s->may, ref) == LIST_CANDIDATES;
}

/* ---- searching ---- */

static block_ref victim_near(struct space_search *s)
{
    struct policy *policy = s->cache->config.policy;
    uint64_t tries = policy_count(policy) / NEAR_FRACTION;

    if (s->node == NUMA_NONE)
        return 0;
    return policy_near(policy, s->group, near_cb, s,
                       tries < NEAR_TRIES ? (uint32_t)tries : NEAR_TRIES);
}

static block_ref victim_from(struct space_search *s, unsigned list)
{
    return policy_victim(s->cache->config.policy, s->group, list, slot_list_cb, s, &s->looks);
}

/* Looks at each of them at most once after something was released. */
static block_ref victim_stuck(struct space_search *s, uint64_t most)
{
    struct policy_group *g = s->group;
    uint64_t n = policy_list_count(g, LIST_STUCK), seen = s->seen;
    int64_t rest;
    block_ref ref;

    if (g->released != s->cache->releases) {
        g->released = s->cache->releases;
        g->stuck = UINT64_MAX;
    }
    if (g->stuck > n)
        g->stuck = n;
    if (most > g->stuck)
        most = g->stuck;
    if (s->looks <= 0 || most == 0)
        return 0;
    rest = s->looks - (int64_t)most;
    s->looks = rest < 0 ? s->looks : (int64_t)most;
    ref = victim_from(s, LIST_STUCK);
    s->looks += rest < 0 ? 0 : rest;
    g->stuck -= s->seen - seen;
    return ref;
}

/* The first victim of the current group. Blocks set aside were the coldest at that time. */
static block_ref victim_first(struct space_search *s)
{
    block_ref ref = victim_near(s);

    if (ref == 0 && s->may.lose)
        ref = victim_from(s, LIST_UNWRITTEN);
    if (ref == 0 && !s->may.spare)
        ref = victim_from(s, LIST_ONLY_COPY);
    if (ref == 0)
        ref = victim_from(s, LIST_KEPT);
    if (ref == 0)
        ref = victim_stuck(s, STUCK_LOOKS);
    return ref ? ref : victim_from(s, LIST_CANDIDATES);
}

static block_ref victim_unwritten(struct space_search *s)
{
    return victim_from(s, LIST_UNWRITTEN);
}

static block_ref victim_any_stuck(struct space_search *s)
{
    block_ref ref = victim_stuck(s, UINT64_MAX);

    s->unseen |= s->group->stuck > 0;
    return ref;
}

static block_ref groups_search(struct space_search *s, struct policy_group **g, uint32_t n,
                               block_ref (*search)(struct space_search *s))
{
    block_ref ref = 0;

    for (uint32_t i = 0; i < n && ref == 0; i++) {
        s->group = g[i];
        ref = search(s);
    }
    return ref;
}

static block_ref victim_among(struct space_search *s, struct policy_group **g, uint32_t n)
{
    block_ref ref = groups_search(s, g, n, victim_first);

    if (ref == 0 && !s->may.spare && !s->may.lose && !s->keep) {
        s->may.lose = true;
        ref = groups_search(s, g, n, victim_unwritten);
    }
    s->unseen = false;
    return ref ? ref : groups_search(s, g, n, victim_any_stuck);
}

static block_ref victim_find(struct space_search *s)
{
    struct policy_group *g[QUOTA_GROUPS] = {s->only};
    uint32_t n = s->only ? 1 : cache_quota_groups(s->cache, g);
    block_ref ref = victim_among(s, g, n);
    bool unseen = s->unseen;

    /* A tenant within its guarantee evicts its own blocks if no other tenant can, now or soon. */
    if (ref == 0 && !s->may.spare && !s->only && s->tenant && s->tenant->group &&
        cache_quota_keeps(s->tenant)) {
        ref = victim_among(s, &s->tenant->group, 1);
        s->unseen |= unseen;
    }
    return ref;
}

/* ---- evicting ---- */

/* The search has looked at as many blocks as it may in one iteration of the event loop: waiters for
 * space try again in the next. */
static void search_later(struct cache *c)
{
    c->space.searching = true;
    cache_wake(c, CHORE_SPACE);
}

/* all: from NVMe, too. */
static void block_evict(struct cache *c, block_ref ref, bool all)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    bool was_complete = block_complete(b, ns), complete;

    if (b->flags & BLOCK_QUEUED)
        c->config.metrics->nvme_write_dropped += cache_parts_missing(b, ns, WRITE_NVME);
    block_drop_dram(c, ref, true);
    complete = block_complete(b, ns);
    c->config.metrics->arena_evicted_blocks++;
    ns->traffic.evicted_blocks++;
    ns->tenant->metrics->evicted_blocks++;
    c->config.metrics->arena_evicted_lost += was_complete && !complete;
    /* A block that lost a part is worth nothing, whatever the tier still has of it. */
    if (all || (!complete && b->leases == 0 && block_idle(b, ns)))
        cache_discard(c, ref);
    else if (complete)
        cache_shared_trim(c);
}

static bool owner_evict_cb(void *ctx, uint64_t owner)
{
    struct space_search *s = ctx;

    s->blocked = owner == 0 || cache_leave_blocked(&s->may, owner);
    if (s->blocked || s->owners >= SLAB_EVICTIONS)
        return false;
    s->owners += 1 + cache_ns(s->cache, owner_block(owner))->identity.parts / PARTS_PER_EVICTION;
    block_evict(s->cache, owner_block(owner), false);
    return true;
}

void cache_owner_evict(struct cache *c, uint64_t owner)
{
    block_evict(c, owner_block(owner), false);
}

/* Evicts some of the blocks in the slab that changes its slot size. False: the rest has to wait
 * for the next iteration of the event loop. */
static bool slab_evict(struct space_search *s)
{
    struct cache *c = s->cache;
    uint32_t slab = c->space.emptying - 1;

    s->blocked = false;
    s->owners = 0;
    if (arena_slab_closed(c->arena, slab) &&
        !arena_slab_owners(c->arena, slab, owner_evict_cb, s) && !s->blocked) {
        search_later(c);
        return false;
    }
    if (s->blocked)
        arena_slab_close(c->arena, slab, false);
    else
        c->config.metrics->arena_slabs_moved++;
    c->space.emptying = 0;
    return true;
}

/* No other slot of that size is available: a slab may be emptied for it (compact.c). Waiters for
 * space are notified then. */
static void compact_for(struct cache *c, uint64_t slot_bytes)
{
    if (c->compact.slot_bytes > 0) {
        if (c->compact.slab > 0 && cache_compact_late(c))
            cache_wake(c, CHORE_COMPACT);
        return;
    }
    if (!c->copier.copy || c->no_writes || c->compact.vain == c->releases ||
        uv_now(c->config.loop) < c->compact.again_ms)
        return;
    c->compact.slot_bytes = slot_bytes;
    c->compact.left = arena_slabs(c->arena);
    cache_wake(c, CHORE_COMPACT);
}

/* Makes one step towards a slot. False: nothing more may leave now. */
static bool evict_some(struct space_search *s)
{
    struct cache *c = s->cache;
    block_ref victim;
    slot_ref slot;

    if (c->space.emptying)
        return slab_evict(s);
    victim = victim_find(s);
    if (victim == 0 && (s->looks <= 0 || s->unseen)) {
        search_later(c);
        return false;
    }
    if (victim == 0 && s->beside)
        return false;
    if (victim == 0 && !s->may.spare && !s->keep && pending_write_reclaim(c))
        return true;
    if (victim == 0) {
        if (!s->may.spare)
            compact_for(c, s->slot_bytes);
        return false;
    }
    slot = block_slot(c, victim, s->slot_bytes);
    if (arena_slot_bytes(c->arena, slot) == s->slot_bytes) {
        /* What is stuck was colder. */
        if (!s->beside && c->quotas.guaranteed && policy_list_count(s->group, LIST_STUCK) > 0)
            compact_for(c, s->slot_bytes);
        block_evict(c, victim, false);
        return true;
    }
    c->space.emptying = 1 + arena_slab_of(c->arena, slot);
    arena_slab_close(c->arena, c->space.emptying - 1, true);
    return slab_evict(s);
}

/* ---- space in the index ---- */

static unsigned drop_list_cb(void *ctx, block_ref ref)
{
    struct space_search *s = ctx;

    s->cache->config.metrics->arena_candidates++;
    return cache_leave_list(&s->may, ref);
}

static block_ref drop_find(struct space_search *s, unsigned list)
{
    return policy_victim(s->cache->config.policy, s->group, list, drop_list_cb, s, &s->looks);
}

static block_ref drop_candidate(struct space_search *s)
{
    block_ref ref = drop_find(s, LIST_CANDIDATES);

    return ref ? ref : drop_find(s, LIST_STUCK);
}

static block_ref drop_in_group(struct space_search *s)
{
    return drop_find(s, LIST_GROUPS);
}

void cache_drop(struct cache *c, block_ref ref)
{
    if (index_block(c->config.index, ref)->dram_parts > 0)
        block_evict(c, ref, true);
    else
        cache_discard(c, ref);
}

bool cache_coldest_drop(struct cache *c)
{
    struct space_search s = {.cache = c, .may = {.cache = c, .drop = true}, .looks = LOOKS};
    struct policy_group *g[QUOTA_GROUPS];
    uint32_t n = cache_quota_groups(c, g);
    block_ref ref = groups_search(&s, g, n, drop_candidate);

    s.may.groups = true;
    if (ref == 0)
        ref = groups_search(&s, g, n, drop_in_group);
    if (ref != 0)
        cache_drop(c, ref);
    return ref != 0;
}

/* ---- a slot ---- */

/* Evicts blocks of a tenant that has reached its maximum. 0, -EDQUOT, or -EBUSY: the search goes on
 * in the next iteration of the event loop. */
static int most_keep(const struct space_search *of)
{
    struct space_search s = *of;
    const struct tenant *t = s.tenant;

    s.any_size = true;
    s.may.spare = false;
    s.node = NUMA_NONE;
    while (t->dram_bytes + s.slot_bytes > t->settings.dram_max) {
        block_ref victim = s.cache->space.searching ? 0 : victim_find(&s);

        if (victim == 0 && s.looks <= 0)
            search_later(s.cache);
        if (victim == 0)
            return s.cache->space.searching ? -EBUSY : -EDQUOT;
        block_evict(s.cache, victim, false);
    }
    return 0;
}

slot_ref cache_slot_beside(struct cache *c, uint64_t bytes, uint64_t owner, int node)
{
    struct space_search s = {.cache = c,
                             .may = {.cache = c, .lose = c->dirty_bytes > c->config.backlog_bytes},
                             .beside = true,
                             .looks = LOOKS,
                             .slot_bytes = arena_padded(bytes),
                             .node = NUMA_NONE};
    slot_ref slot = arena_alloc(c->arena, bytes, owner, node);

    if (slot == 0)
        c->releases++; /* what another size's search found stuck may do for this one */
    while (slot == 0 && !c->space.searching && evict_some(&s))
        slot = arena_alloc(c->arena, bytes, owner, node);
    return slot;
}

/* As cache_slot, if none is free at once. */
static int slot_search(struct space_search *s, uint64_t bytes, uint64_t owner, slot_ref *out)
{
    struct cache *c = s->cache;
    int rc;

    if (s->slot_bytes > arena_slab_bytes(c->arena))
        return -EFBIG;
    rc = s->only ? most_keep(s) : 0;
    if (rc != 0)
        return rc;
    s->only = NULL;
    *out = arena_alloc(c->arena, bytes, owner, s->node);
    while (*out == 0 && !c->space.searching && evict_some(s))
        *out = arena_alloc(c->arena, bytes, owner, s->node);
    if (*out != 0)
        return 0;
    c->config.metrics->arena_full += !s->may.spare && !c->space.searching;
    return -EBUSY;
}

int cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node, bool keep, slot_ref *out)
{
    struct tenant *t = owner ? cache_ns(c, owner_block(owner))->tenant : NULL;
    struct policy_group *only = t && t->settings.dram_max > 0 ? t->group : NULL;
    slot_ref slot = only ? 0 : arena_alloc(c->arena, bytes, owner, node);
    int rc = 0;

    if (slot == 0) {
        struct space_search s = {.cache = c,
                                 .may = {.cache = c,
                                         .lose = !keep && c->dirty_bytes > c->config.backlog_bytes,
                                         .spare = cache_arena_grows(c)},
                                 .keep = keep,
                                 .looks = LOOKS,
                                 .slot_bytes = arena_padded(bytes),
                                 .tenant = t,
                                 .only = only,
                                 .node = arena_nodes(c->arena) > 0 ? node : NUMA_NONE};

        rc = slot_search(&s, bytes, owner, &slot);
    }
    if (rc != 0)
        return rc;
    if (node != NUMA_NONE && arena_nodes(c->arena) > 0)
        *(arena_slot_node(c->arena, slot) == node ? &c->config.metrics->arena_slots_numa_local
                                                  : &c->config.metrics->arena_slots_numa_remote) +=
            1;
    *out = slot;
    return 0;
}

int cache_slot_grant(struct cache *c, uint64_t bytes, int node, slot_ref *out)
{
    int rc = cache_slot(c, bytes, 0, node, false, out);

    c->granted += rc == 0;
    return rc;
}

void cache_slot_return(struct cache *c, slot_ref slot)
{
    c->granted--;
    arena_slot_free(c->arena, slot);
}
