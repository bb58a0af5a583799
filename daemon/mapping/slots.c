/* Slots in mappings, and which blocks leave them for others. The policy's order is of no help: its
 * coldest blocks lie anywhere. So a search goes round the slots of the group, and takes the least
 * used one of a few. */
#include "daemon/mapping/relocate.h"

#include "daemon/index/policy.h"
#include "proto/metrics/metrics.h"

#include <errno.h>

/* Slots that searches look at in an iteration of the event loop; of the blocks that may leave, so
 * many are compared. */
#define LOOKS_TURN 1024u
#define SAMPLE 8u
/* Blocks that leave for one slot, at most: one does, unless slabs are closed meanwhile. */
#define EVICTIONS 4u
/* Slabs of another group that are looked at; owners of one, and in all; blocks that leave one in
 * one iteration of the event loop. */
#define SLABS 16u
#define OWNERS 4096u
#define OWNERS_ALL 16384u
#define EVICTIONS_TURN 256u

/* Another number: a fruitless search may succeed now. */
static uint64_t changes(const struct relocations *rs)
{
    return rs->search.iterations + cache_releases(rs->cache);
}

/* ---- within the group ---- */

/* Evicts one block. -ENOSPC: none may leave; -EAGAIN: the search goes on in the next iteration of
 * the event loop. */
static int evict_one(struct relocations *rs, struct arena_group *group, uint64_t bytes)
{
    struct grant_round *round = grant_group_round(rs->arena, group, bytes);
    uint64_t best = 0, owner;
    unsigned best_heat = 0, found = 0;

    if (!round || round->vain == changes(rs))
        return -ENOSPC;
    while (found < SAMPLE && round->looks < round->slots && rs->search.looks < LOOKS_TURN) {
        unsigned heat;

        round->looks++;
        rs->search.looks++;
        if (grant_group_next(rs->arena, group, bytes, &owner) == 0) {
            round->looks = round->slots;
            break;
        }
        rs->metrics->arena_candidates++;
        if (!cache_owner_may_leave(rs->cache, owner))
            continue;
        heat = policy_heat(index_block(rs->index, owner_block(owner)));
        if (found++ == 0 || heat < best_heat) {
            best = owner;
            best_heat = heat;
        }
    }
    if (found > 0) {
        round->looks = 0;
        cache_owner_evict(rs->cache, best);
        return 0;
    }
    chore_wake(&rs->mover.chore);
    if (round->looks < round->slots)
        return -EAGAIN;
    round->looks = 0;
    round->vain = changes(rs);
    return -ENOSPC;
}

/* ---- from another group ---- */

struct owners {
    struct cache *cache;
    uint32_t n, all; /* of the current slab; of all */
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

/* The slab goes back to the arena with its last slot. True: there is more for the next iteration
 * of the event loop. */
static bool empty_some(struct relocations *rs)
{
    uint32_t slab = rs->search.taking - 1;
    struct owners o = {.cache = rs->cache};

    if (arena_slab_closed(rs->arena, slab) &&
        !arena_slab_owners(rs->arena, slab, owner_evict_cb, &o)) {
        if (!o.blocked)
            return true;
        arena_slab_close(rs->arena, slab, false); /* somebody came first */
    }
    rs->search.taking = 0;
    mapping_slots_changed(rs);
    return false;
}

/* A slab of that group is being emptied from now on. False: none may be, as far as was
 * looked. */
static bool take_from(struct relocations *rs, struct arena_group *from, struct owners *o)
{
    struct arena *a = rs->arena;

    for (uint32_t i = 0; i < SLABS && o->all < OWNERS_ALL; i++) {
        uint32_t slab = grant_group_slab(a, from, rs->search.taken++);

        if (slab == UINT32_MAX)
            continue;
        o->n = 0;
        (void)arena_slab_owners(a, slab, owner_cb, o);
        o->all += o->n;
        if (o->blocked)
            continue;
        arena_slab_close(a, slab, true);
        rs->search.taking = 1 + slab;
        rs->mover.waits = true;
        cache_released(rs->cache); /* and wakes the chore */
        return true;
    }
    return false;
}

static uint64_t has(const struct arena *a, const struct arena_group *group)
{
    return grant_bytes(a, group) + grant_kept_bytes(a, group);
}

/* A slab of a group that has more, those that have most first, is being emptied, or will be from
 * now on. False: none may be. */
static bool take_from_most(struct relocations *rs, const struct arena_group *group)
{
    struct arena *a = rs->arena;
    struct arena_group *from = NULL;
    struct owners o = {.cache = rs->cache};

    if (rs->search.taking)
        return true;
    if (rs->search.untaken == changes(rs) && rs->search.group == group)
        return false;
    while (o.all < OWNERS_ALL && (from = grant_group_most(a, group, from)) != NULL &&
           (!group || grant_bytes(a, from) > has(a, group)))
        if (take_from(rs, from, &o))
            return true;
    rs->search.untaken = changes(rs);
    rs->search.group = group;
    return false;
}

/* ---- a slot ---- */

int mapping_slot(struct relocations *rs, struct arena_group *group, uint64_t bytes, uint64_t owner,
                 slot_ref *out)
{
    struct arena *a = rs->arena;
    int rc = grant_slot(a, group, bytes, owner, out);

    /* A group below its share of the budget gets what others don't use before its own blocks
     * leave. */
    if (rc == -ENOSPC && has(a, group) + arena_slab_bytes(a) <= grant_budget(a) / grant_groups(a) &&
        take_from_most(rs, group))
        return -EAGAIN;
    for (uint32_t i = 0; rc == -ENOSPC && i < EVICTIONS; i++) {
        rc = evict_one(rs, group, bytes);
        if (rc != 0)
            break;
        rc = grant_slot(a, group, bytes, owner, out);
    }
    return rc == -ENOSPC && take_from_most(rs, group) ? -EAGAIN : rc;
}

/* If more is granted than the budget: begins to empty a slab. */
static void trim(struct relocations *rs)
{
    rs->search.over = grant_over(rs->arena);
    if (!rs->search.over)
        return;
    rs->mover.waits = true;
    (void)take_from_most(rs, NULL);
}

bool mapping_slots_step(struct relocations *rs)
{
    trim(rs);
    return rs->search.taking && empty_some(rs);
}

void mapping_slots_changed(struct relocations *rs)
{
    trim(rs);
    cache_released(rs->cache);
}
