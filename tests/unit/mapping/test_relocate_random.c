/* Everything that happens to parts in mappings, at random. A reader that knows a place finds its
 * bytes there, or another sequence number. Nothing is left over. UCM_SEED repeats a run. */
#include "tests/unit/mapping/relocate_rig.h"
#include "tests/unit/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

TestSuite(relocate_random, .init = relocate_open, .fini = relocate_close);

#define KEYS 10u
#define MOVERS 6u
#define USES 6u
#define TOLD 64u
#define STEPS 15000u

static struct {
    struct one_mover {
        struct mover mv;
        block_ref ref;
        bool waits;
    } mover[MOVERS];
    struct use { /* by a mover or a load; the block is leased */
        block_ref ref;
        bool held;
    } use[USES];
    struct one_load {
        struct cache_wait w;
        block_ref ref;
        bool waits, got;
        int status;
    } load;
    struct told {
        struct arena_group *group;
        struct grant_place place;
        const uint8_t *memory;
        uint64_t mark;
    } told[TOLD];
    unsigned n_told, copied, read, failed, stale, right;
} chaos;

static struct ns *some_ns(void)
{
    return below(2) ? rig.one : other;
}

/* A block that a lookup finds and leases; 0: it is not there. */
static block_ref some_block(void)
{
    block_ref ref = find(some_ns(), below(KEYS));

    if (ref == 0 || !cache_found(rig.cache, ref))
        return 0;
    cache_lease(rig.cache, ref);
    return ref;
}

/* The lease becomes a use's that is free, or ends. */
static void use_keep(block_ref ref)
{
    for (unsigned i = 0; i < USES; i++)
        if (!chaos.use[i].held) {
            chaos.use[i] = (struct use){ref, true};
            return;
        }
    put_and_drop(ref, 0);
}

static void use_end(struct use *u)
{
    if (!u->held)
        return;
    u->held = false;
    cr_assert(marks_right(u->ref, 0));
    cache_put(rig.cache, u->ref, 0);
    drop(u->ref);
}

static void tell(block_ref ref)
{
    struct told *t = &chaos.told[chaos.n_told++ % TOLD];

    *t = (struct told){.memory = memory_of(ref, 0), .mark = mark_of(block_of(ref), 0, 0)};
    if (!mapping_place(&relocations, ref, 0, &t->place)) {
        cr_assert(cache_deleting(rig.cache, ref));
        t->memory = NULL;
        return;
    }
    t->group = arena_slot_group(rig.arena, part_slot(&block_of(ref)->part[0]));
    cr_assert_str_eq(grant_group_tenant(t->group), cache_ns(rig.cache, ref)->identity.tenant);
}

static void told_check(void)
{
    const struct told *t = &chaos.told[below(TOLD)];

    if (!t->memory)
        return;
    if (!readable(t->group, &t->place)) {
        chaos.stale++;
        return;
    }
    chaos.right++;
    cr_assert_eq(memcmp(t->memory, &t->mark, sizeof(t->mark)), 0, "other bytes at a told place");
}

/* ---- what happens ---- */

static void some_store(void)
{
    block_ref ref = open_block(some_ns(), below(KEYS));

    if (!cache_deleting(rig.cache, ref))
        (void)dump(ref, 0, 0, LAYERS);
    drop(ref);
}

static void mover_took(struct one_mover *m, int status)
{
    m->waits = false;
    if (status != 0) {
        chaos.failed++;
        drop(m->ref);
        return;
    }
    cr_assert(marks_right(m->ref, 0));
    chaos.copied += m->mv.m.copied;
    chaos.read += m->mv.m.read;
    tell(m->ref);
    use_keep(m->ref);
}

static void mover_cb(struct mapping_move *m, int status)
{
    mover_took((struct one_mover *)m, status);
}

static void some_move(void)
{
    struct one_mover *m = &chaos.mover[below(MOVERS)];
    int rc;

    if (m->waits) {
        if (below(4) > 0)
            return;
        mapping_move_cancel(&relocations, &m->mv.m);
        m->waits = false;
        drop(m->ref);
        return;
    }
    m->ref = some_block();
    if (m->ref == 0)
        return;
    rc = move(&m->mv, m->ref, 0);
    m->mv.m.done_cb = mover_cb;
    if (rc == CACHE_PENDING)
        m->waits = true;
    else
        mover_took(m, rc == CACHE_READY ? 0 : rc);
}

static void load_took(int status)
{
    chaos.load.waits = false;
    if (status == 0)
        use_keep(chaos.load.ref);
    else
        drop(chaos.load.ref);
}

static void load_cb(struct cache_wait *w, int status)
{
    (void)w;
    load_took(status);
}

static void some_load(void)
{
    int rc;

    if (chaos.load.waits)
        return;
    chaos.load.ref = some_block();
    if (chaos.load.ref == 0)
        return;
    chaos.load.w = (struct cache_wait){.done_cb = load_cb};
    rc = cache_get(rig.cache, chaos.load.ref, 0, 0, NUMA_NONE, &chaos.load.w);
    chaos.load.waits = rc == CACHE_PENDING;
    if (rc != CACHE_PENDING)
        load_took(rc == CACHE_READY ? 0 : rc);
}

static void some_use_end(void)
{
    use_end(&chaos.use[below(USES)]);
}

static void some_copy(void)
{
    if (n_copies > 0)
        copy_next();
}

static void some_tier(void)
{
    if (rig.tier.n_pending > 0)
        fake_finish(&rig.tier, fake_at(&rig.tier, below(rig.tier.n_pending)), below(20) ? 0 : -EIO);
}

static void some_evict(void)
{
    block_ref ref = below(8) == 0 ? find(some_ns(), below(KEYS)) : 0;

    if (ref != 0)
        (void)cache_evict(rig.cache, ref, below(3) ? CACHE_DRAM : CACHE_ALL);
}

static void budget(uint64_t slabs)
{
    grant_budget_set(rig.arena, slabs * MIB);
    mapping_slots_changed(&relocations);
}

static void some_budget(void)
{
    if (below(200) == 0)
        budget(below(MAPPINGS + 1));
}

/* One happens in each step; what stands twice happens twice as often. */
static void (*const steps[])(void) = {some_store, some_store,   some_move, some_move,
                                      some_tier,  some_tier,    some_load, some_copy,
                                      some_evict, some_use_end, iterate,   some_budget};

static void uses_end(void)
{
    for (unsigned i = 0; i < USES; i++)
        use_end(&chaos.use[i]);
}

static void evict_all(void)
{
    for (uint64_t k = 0; k < 2 * KEYS; k++) {
        block_ref ref = find(k % 2 ? rig.one : other, k / 2);

        if (ref != 0)
            (void)cache_evict(rig.cache, ref, CACHE_ALL);
    }
}

Test(relocate_random, nobody_reads_other_bytes)
{
    random_state = random_seed(uv_hrtime() | 1);
    fprintf(stderr, "UCM_SEED=%" PRIu64 "\n", random_state);
    for (unsigned i = 0; i < STEPS && rig.tier.places < PLACES_MAX - 64; i++) {
        steps[below(sizeof(steps) / sizeof(steps[0]))]();
        told_check();
        if (i % 64 == 0)
            usleep(50); /* for the arena's thread */
    }
    budget(MAPPINGS);
    uses_end();
    for (int i = 0; i < 5000 && (cache_moves(rig.cache) > 0 || rig.tier.n_pending > 0 ||
                                 n_copies > 0 || chaos.load.waits);
         i++) {
        iterate();
        some_copy();
        if (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        uses_end();
        usleep(i < 4000 ? 0 : 1000);
    }
    cr_assert_eq(cache_moves(rig.cache), 0u, "somebody waits for ever");
    for (unsigned i = 0; i < MOVERS; i++)
        cr_assert_not(chaos.mover[i].waits);
    uses_end();
    evict_all();
    iterate();
    while (rig.tier.n_pending > 0) {
        fake_next(&rig.tier, 0);
        iterate();
    }
    evict_all();
    expect_nothing_held();
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
    cr_expect(chaos.copied > 0 && chaos.read > 0 && chaos.stale > 0 && chaos.right > 0,
              "copied %u read %u failed %u stale %u right %u", chaos.copied, chaos.read,
              chaos.failed, chaos.stale, chaos.right);
}
