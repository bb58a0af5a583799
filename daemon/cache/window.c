/* Slots in windows, and which blocks leave them for others. The policy's order is of no help: its coldest blocks
 * lie anywhere. So a search goes round the slots of the group, and takes the least used one of a few. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"
#include "daemon/window/lend.h"

#include <errno.h>

/* Slots that searches look at in a turn of the loop; of the blocks that may leave, so many are compared. */
#define LOOKS_TURN 1024u
#define SAMPLE 8u
/* Blocks that leave for one slot, at most: one does, unless extents are closed meanwhile. */
#define EVICTIONS 4u
/* Extents of another group that are looked at; owners of one, and in all; blocks that leave one in one turn of
 * the loop. */
#define EXTENTS 16u
#define OWNERS 4096u
#define OWNERS_ALL 16384u
#define EVICTIONS_TURN 256u

/* ---- within the group ---- */

/* Evicts one block. -ENOSPC: none may leave; -EAGAIN: the search goes on in the next turn of the loop. */
static int evict_one(struct cache *c, struct arena_group *group, uint64_t bytes)
{
    struct arena_round *round = arena_group_round(c->arena, group, bytes);
    uint64_t best = 0, owner;
    unsigned best_heat = 0, found = 0;

    if (!round || round->vain == c->groups.change)
        return -ENOSPC;
    while (found < SAMPLE && round->looks < round->slots && c->groups.looks < LOOKS_TURN) {
        unsigned heat;

        round->looks++;
        c->groups.looks++;
        if (arena_group_next(c->arena, group, bytes, &owner) == 0) {
            round->looks = round->slots;
            break;
        }
        c->config.metrics->arena_candidates++;
        if (!cache_owner_may_leave(c, owner))
            continue;
        heat = policy_heat(index_block(c->config.index, owner_block(owner)));
        if (found++ == 0 || heat < best_heat) {
            best = owner;
            best_heat = heat;
        }
    }
    if (found > 0) {
        round->looks = 0;
        cache_owner_evict(c, best);
        return 0;
    }
    cache_wake(c, CHORE_GROUPS);
    if (round->looks < round->slots)
        return -EAGAIN;
    round->looks = 0;
    round->vain = c->groups.change;
    return -ENOSPC;
}

/* ---- from another group ---- */

struct owners {
    struct cache *cache;
    uint32_t n, all; /* of the extent at hand; of all */
    bool blocked;
};

static bool owner_cb(void *ctx, uint64_t owner)
{
    struct owners *o = ctx;

    o->blocked = !cache_owner_may_leave(o->cache, owner);
    return !o->blocked && ++o->n < OWNERS;
}

static bool owner_evict_cb(void *ctx, uint64_t owner)
{
    struct owners *o = ctx;

    if (o->n++ == EVICTIONS_TURN)
        return false;
    o->blocked = !cache_owner_may_leave(o->cache, owner);
    if (!o->blocked)
        cache_owner_evict(o->cache, owner);
    return !o->blocked;
}

/* The extent goes back to the arena with its last slot. True: there is more for the next turn of the loop. */
static bool empty_some(struct cache *c)
{
    uint32_t extent = c->groups.taking - 1;
    struct owners o = {.cache = c};

    if (arena_extent_closed(c->arena, extent) &&
        !arena_extent_owners(c->arena, extent, owner_evict_cb, &o)) {
        if (!o.blocked)
            return true;
        arena_extent_close(c->arena, extent, false); /* somebody came first */
    }
    c->groups.taking = 0;
    cache_groups_changed(c);
    return false;
}

/* An extent of that group is being emptied from now on. False: none may be, as far as was looked. */
static bool take_from(struct cache *c, struct arena_group *from, struct owners *o)
{
    struct arena *a = c->arena;

    for (uint32_t i = 0; i < EXTENTS && o->all < OWNERS_ALL; i++) {
        uint32_t extent = arena_group_extent(a, from, c->groups.taken++);

        if (extent == UINT32_MAX)
            continue;
        o->n = 0;
        (void)arena_extent_owners(a, extent, owner_cb, o);
        o->all += o->n;
        if (o->blocked)
            continue;
        arena_extent_close(a, extent, true);
        c->groups.taking = 1 + extent;
        cache_released(c); /* and wakes CHORE_GROUPS */
        return true;
    }
    return false;
}

static uint64_t has(const struct arena *a, const struct arena_group *group)
{
    return arena_window_lent(a, group) + arena_window_kept(a, group);
}

/* An extent of a group that has more, those that have most first, is being emptied, or will be from now on.
 * False: none may be. */
static bool take_from_most(struct cache *c, const struct arena_group *group)
{
    struct arena *a = c->arena;
    struct arena_group *from = NULL;
    struct owners o = {.cache = c};

    if (c->groups.taking)
        return true;
    if (c->groups.untaken == c->groups.change && c->groups.group == group)
        return false;
    while (o.all < OWNERS_ALL && (from = arena_group_most(a, group, from)) != NULL &&
           (!group || arena_window_lent(a, from) > has(a, group)))
        if (take_from(c, from, &o))
            return true;
    c->groups.untaken = c->groups.change;
    c->groups.group = group;
    return false;
}

/* ---- a slot ---- */

int cache_group_slot(struct cache *c, struct arena_group *group, uint64_t bytes, uint64_t owner,
                     slot_ref *out)
{
    struct arena *a = c->arena;
    int rc = arena_alloc_window(a, group, bytes, owner, out);

    /* A group below its share of the budget gets what others don't use before its own blocks leave. */
    if (rc == -ENOSPC &&
        has(a, group) + arena_extent_bytes(a) <= arena_window_budget(a) / arena_groups(a) &&
        take_from_most(c, group))
        return -EAGAIN;
    for (uint32_t i = 0; rc == -ENOSPC && i < EVICTIONS; i++) {
        rc = evict_one(c, group, bytes);
        if (rc != 0)
            break;
        rc = arena_alloc_window(a, group, bytes, owner, out);
    }
    return rc == -ENOSPC && take_from_most(c, group) ? -EAGAIN : rc;
}

/* If more is lent than the budget: begins to empty an extent. */
static void trim(struct cache *c)
{
    c->groups.over = c->arena && arena_window_over(c->arena);
    if (c->groups.over)
        (void)take_from_most(c, NULL);
}

void cache_groups_changed(struct cache *c)
{
    trim(c);
    cache_released(c);
}

bool cache_groups_step(struct cache *c)
{
    trim(c);
    return c->groups.taking && empty_some(c);
}
