/* A full mapping: which blocks leave it for others, of the same and of another tenant, and the
 * effort of the search. */
/* Sanitizers: thread */
#include "tests/unit/mapping/relocate_rig.h"

#include <stdlib.h>

TestSuite(mapping_slots, .init = relocate_open, .fini = relocate_close);

/* Stored, written below, moved into the mapping, and released. */
static void fill_mapping(struct ns *ns, uint64_t first, uint64_t n)
{
    for (uint64_t i = first; i < first + n; i++) {
        block_ref ref = stored(ns, i);

        (void)moved(ref, 0);
        put_and_drop(ref, 0);
    }
}

/* Used slots lie before those that may leave, more than a search looks at in an iteration of the event loop. */
Test(mapping_slots_wide, unused_blocks_after_many_used_ones_leave)
{
    uint32_t slots = 6 * 256, used = slots - 100;
    block_ref *ref = calloc(used, sizeof(*ref)), late;
    struct mover mv;
    struct ns *ns;

    rig.max_blocks = 8192;
    relocate_open_with(6);
    ns = space_of("t", "small", 1, 4096 / LAYERS);
    for (uint32_t i = 0; i < used; i++) {
        ref[i] = stored(ns, 1 + i);
        (void)moved(ref[i], 0);
    }
    fill_mapping(ns, 1 + used, slots - used);
    late = stored(ns, 1 + slots);
    cr_assert_eq(move(&mv, late, 0), CACHE_PENDING, "some may leave");
    cr_expect_eq(n_copies, 0u, "an iteration's looks are bounded");
    for (int i = 0; i < 10 && n_copies == 0; i++)
        iterate();
    copy_next();
    cr_expect_eq(mv.status, 0);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 1u);
    put_and_drop(late, 0);
    for (uint32_t i = 0; i < used; i++)
        put_and_drop(ref[i], 0);
    free(ref);
    relocate_close();
}

Test(mapping_slots, what_is_used_or_waits_to_be_written_stays)
{
    struct mover mv;
    block_ref ref[8], late;

    rig.cache->config.backlog_bytes = 64 * MIB;
    rig.tier.refuse = -EAGAIN;
    rig.tier.refuse_n = 1u << 30; /* nothing is written */
    for (uint64_t i = 0; i < 8; i++) {
        ref[i] = store(rig.one, i);
        (void)moved(ref[i], 0);
        if (i >= 4)
            put_and_drop(ref[i], 0);
    }
    late = store(rig.one, 8);
    cr_expect_eq(move(&mv, late, 0), -ENOSPC);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 0u);
    cr_expect_eq(block_of(late)->part[0].users, 0u);
    cr_expect_eq(arena_bytes_used(rig.arena), MIB / 4, "it stays where it is");
    for (uint64_t i = 0; i < 4; i++)
        put_and_drop(ref[i], 0);
    drop(late);
}

/* Ordinary searches pass over blocks in mappings: they can't use those slots. */
Test(mapping_slots, ordinary_space_comes_from_ordinary_slots)
{
    block_ref ref;

    fill_mapping(rig.one, 1, 8);
    for (uint64_t i = 100; i < 120; i++) {
        ref = stored(rig.one, i);
        drop(ref);
    }
    for (uint64_t i = 1; i <= 8; i++)
        cr_expect(in_dram(rig.one, i), "%u", (unsigned)i);
    cr_expect_eq(arena_bytes_used(rig.arena), 2 * MIB);
}

Test(mapping_slots, but_not_what_is)
{
    block_ref ref[8], late;
    struct mover mv;

    for (uint64_t i = 0; i < 8; i++) {
        ref[i] = stored(rig.one, i);
        (void)moved(ref[i], 0);
        if (i % 4 != 0)
            cache_put(rig.cache, ref[i], 0);
    }
    late = stored(other, 1);
    cr_expect_eq(move(&mv, late, 0), -ENOSPC, "one of each slab is referenced");
    cache_put(rig.cache, ref[4], 0);
    for (uint64_t i = 0; i < 8; i++)
        drop(ref[i]);
    cr_assert_eq(move(&mv, late, 0), CACHE_PENDING);
    await(GRANTED_READY, 3);
    copy_next();
    cr_expect_eq(mv.status, 0);
    cache_put(rig.cache, late, 0);
    cache_put(rig.cache, ref[0], 0);
    drop(late);
}

Test(mapping_slots, a_lower_budget_waits_for_users)
{
    block_ref ref = stored(rig.one, 1);
    struct grant_place place;

    settle();
    place = moved(ref, 0);
    grant_budget_set(rig.arena, 0);
    mapping_slots_changed(&relocations);
    for (int i = 0; i < 5; i++)
        iterate();
    cr_expect(readable(group, &place));
    drop(ref);
    cache_put(rig.cache, ref, 0);
    await(GRANTED_GONE, 1);
    cr_expect_not(readable(group, &place));
    cr_expect_not(in_dram(rig.one, 1));
}

/* ---- bounds ---- */

/* A search that found nothing is not repeated in its iteration of the event loop, unless something was
 * released. */
Test(mapping_slots, what_was_in_vain_is_remembered_for_a_turn)
{
    block_ref used[8], late[3];
    struct mover mv;
    uint64_t looks;

    for (uint64_t i = 0; i < 8; i++) {
        used[i] = stored(rig.one, 1 + i);
        (void)moved(used[i], 0);
    }
    for (uint64_t i = 0; i < 3; i++)
        late[i] = stored(rig.one, 100 + i);
    looks = rig.metrics.arena_candidates;
    cr_expect_eq(move(&mv, late[0], 0), -ENOSPC);
    cr_expect_eq(rig.metrics.arena_candidates, looks + 8);
    cr_expect_eq(move(&mv, late[1], 0), -ENOSPC);
    cr_expect_eq(rig.metrics.arena_candidates, looks + 8, "in the same iteration");
    iterate();
    cr_expect_eq(move(&mv, late[1], 0), -ENOSPC);
    cr_expect_eq(rig.metrics.arena_candidates, looks + 16, "in the next one");
    put_and_drop(used[5], 0);
    cr_expect_eq(move(&mv, late[2], 0), CACHE_PENDING, "one was released in this iteration");
    copy_next();
    cr_expect_eq(mv.status, 0);
    cache_put(rig.cache, late[2], 0);
    for (uint64_t i = 0; i < 8; i++)
        if (i != 5)
            put_and_drop(used[i], 0);
    for (uint64_t i = 0; i < 3; i++)
        drop(late[i]);
}

/* However many relocations one tenant begins, the other may begin as many. */
Test(mapping_slots, tenants_have_equal_parts_of_the_relocations)
{
    struct mover mine[3], others[3];
    block_ref ref[3], other_ref[3];

    relocations.most = 4;
    for (uint64_t i = 0; i < 3; i++) {
        ref[i] = stored(rig.one, 1 + i);
        other_ref[i] = stored(other, 1 + i);
    }
    for (unsigned i = 0; i < 2; i++)
        cr_expect_eq(move(&mine[i], ref[i], 0), CACHE_PENDING);
    cr_expect_eq(move(&mine[2], ref[2], 0), -EBUSY);
    for (unsigned i = 0; i < 2; i++)
        cr_expect_eq(move(&others[i], other_ref[i], 0), CACHE_PENDING);
    cr_expect_eq(move(&others[2], other_ref[2], 0), -EBUSY);
    await(GRANTED_READY, 2);
    cr_assert_eq(n_copies, 4u);
    copy_next();
    cr_expect_eq(mine[0].calls + mine[1].calls, 1);
    cr_expect_eq(move(&others[2], other_ref[2], 0), -EBUSY, "the place is not theirs");
    cr_expect_eq(move(&mine[2], ref[2], 0), CACHE_PENDING);
    while (n_copies > 0)
        copy_next();
    for (unsigned i = 0; i < 3; i++) {
        cr_expect_eq(mine[i].status, 0);
        put_and_drop(ref[i], 0);
        if (i < 2)
            put_and_drop(other_ref[i], 0);
    }
}
