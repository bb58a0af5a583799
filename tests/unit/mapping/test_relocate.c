/* Parts move into mappings: they are read there, or copied and exchanged once nothing else uses
 * them. */
/* Sanitizers: thread */
#include "tests/unit/mapping/relocate_rig.h"

#include "daemon/snapshot/format.h"
#include "daemon/snapshot/persist.h"
#include "daemon/snapshot/snapshot.h"
#include "tests/runner/wipe.h"

TestSuite(relocate, .init = relocate_open, .fini = relocate_close);

/* ---- moving what is in DRAM ---- */

Test(relocate, one_copy_in_dram)
{
    block_ref ref = stored(rig.one, 1);
    struct grant_place place = moved(ref, 0), again;
    struct mover mv;

    cr_expect_eq(arena_bytes_used(rig.arena), 0u, "the ordinary slot is free");
    cr_expect_eq(grant_used_bytes(rig.arena), MIB / 4);
    cr_expect(readable(group, &place));
    cr_expect_eq(move(&mv, ref, 0), CACHE_READY);
    cr_expect(mapping_place(&relocations, ref, 0, &again));
    cr_expect_eq(memcmp(&again, &place, sizeof(place)), 0);
    cr_expect_eq(block_of(ref)->part[0].users, 2u);
    cache_put(rig.cache, ref, 0);
    cache_put(rig.cache, ref, 0);
    cr_expect(readable(group, &place), "until it leaves");
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_not(readable(group, &place), "evicted by name, though it is held");
    cr_expect_not(mapping_place(&relocations, ref, 0, &again));
    drop(ref);
    expect_nothing_held();
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
    await(GRANTED_GONE, 1);
}

Test(relocate, it_waits_for_other_users)
{
    block_ref ref = stored(rig.one, 1);
    struct cache_wait w = {.done_cb = NULL};
    struct grant_place place;
    struct mover mv;

    cr_assert_eq(cache_get(rig.cache, ref, 0, 0, NUMA_NONE, &w), CACHE_READY);
    move_granted(&mv, ref);
    copy_next();
    iterate();
    cr_expect_eq(mv.calls, 0);
    cr_expect(marks_right(ref, 0));
    cr_expect_not(mapping_place(&relocations, ref, 0, &place), "it is where it was");
    cr_expect_eq(arena_bytes_used(rig.arena), MIB / 4);
    cache_put(rig.cache, ref, 0);
    cr_expect_eq(mv.calls, 0, "not inside the call");
    iterate();
    move_ended(&mv, 0);
    cr_expect(mapping_place(&relocations, ref, 0, &place));
    cr_expect(marks_right(ref, 0));
    cr_expect_eq(arena_bytes_used(rig.arena), 0u);
    put_and_drop(ref, 0);
}

Test(relocate, a_hold_keeps_it_where_it_is)
{
    block_ref ref = stored(rig.one, 1);
    const void *memory;
    struct mover mv;

    cr_assert_eq(cache_ref_ready(rig.cache, &ref, 1, 0, 1, &memory), 1u);
    move_granted(&mv, ref);
    copy_next();
    for (int i = 0; i < 5; i++)
        iterate();
    cr_expect_eq(mv.calls, 0);
    mapping_move_cancel(&relocations, &mv.m); /* its deadline */
    iterate();
    cr_expect_eq(mv.calls, 0);
    cr_expect_eq(cache_moves(rig.cache), 0u);
    cr_expect_eq(grant_used_bytes(rig.arena), 0u, "the slot is given back");
    cr_expect_eq(arena_bytes_used(rig.arena), MIB / 4);
    cr_expect_eq(block_of(ref)->part[0].users, 1u);
    cache_unref_lasting(rig.cache, ref, 0);
    drop(ref);
}

Test(relocate, all_who_ask_get_it)
{
    block_ref ref = stored(rig.one, 1);
    struct mover mv[3];

    cr_assert_eq(move(&mv[0], ref, 0), CACHE_PENDING);
    cr_assert_eq(move(&mv[1], ref, 0), CACHE_PENDING);
    await(GRANTED_READY, 1);
    cr_assert_eq(move(&mv[2], ref, 0), CACHE_PENDING);
    cr_assert_eq(n_copies, 1u);
    mapping_move_cancel(&relocations, &mv[1].m);
    copy_next();
    cr_expect_eq(mv[0].calls, 1);
    cr_expect_eq(mv[1].calls, 0);
    cr_expect_eq(mv[2].calls, 1);
    cr_expect_eq(block_of(ref)->part[0].users, 2u);
    cache_put(rig.cache, ref, 0);
    put_and_drop(ref, 0);
}

Test(relocate, nobody_waits_any_more)
{
    block_ref ref = stored(rig.one, 1);
    struct mover mv;

    /* Cancelled while it waits for a slab. */
    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    mapping_move_cancel(&relocations, &mv.m);
    iterate();
    cr_expect_eq(cache_moves(rig.cache), 0u);
    await(GRANTED_READY, 1);
    /* Cancelled while it waits for the copy, which goes on. */
    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    mapping_move_cancel(&relocations, &mv.m);
    iterate();
    cr_expect_eq(cache_moves(rig.cache), 1u);
    cr_expect_eq(block_of(ref)->part[0].users, 1u);
    copy_next();
    cr_expect_eq(cache_moves(rig.cache), 0u);
    cr_expect_eq(mv.calls, 0);
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
    cr_expect_eq(block_of(ref)->part[0].users, 0u);
    /* Another caller asks while the copy goes on. */
    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    if (n_copies == 0)
        await(GRANTED_READY, 2);
    mapping_move_cancel(&relocations, &mv.m);
    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    iterate();
    copy_next();
    move_ended(&mv, 0);
    put_and_drop(ref, 0);
}

Test(relocate, evicted_by_name_meanwhile)
{
    block_ref ref = stored(rig.one, 1);
    struct mover mv, late;

    move_granted(&mv, ref);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_eq(move(&late, ref, 0), -ENOENT);
    iterate();
    cr_expect_eq(mv.calls, 0, "the copy is under way");
    copy_next();
    move_ended(&mv, -ENOENT);
    drop(ref);
    expect_nothing_held();
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
}

Test(relocate, what_is_not_whole)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *f;
    struct mover mv;

    cr_expect_eq(move(&mv, ref, 0), -ENOENT);
    cr_assert_eq(claim(ref, 0, 0, 1, &f), 0);
    cr_expect_eq(move(&mv, ref, 0), -ENOENT);
    pending_write_done(rig.cache, f, 1, false);
    drop(ref);
    expect_nothing_held();
}

/* ---- reading ---- */

Test(relocate, read_straight_into_the_mapping)
{
    block_ref ref = store_below(rig.one, 1);
    struct grant_place place;
    struct mover mv;

    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    cr_expect_eq(rig.tier.n_pending, 0u, "there is no slot yet");
    await(GRANTED_READY, 1);
    cr_assert_eq(rig.tier.n_pending, 1u);
    cr_expect_eq(arena_bytes_used(rig.arena), 0u);
    fake_next(&rig.tier, 0);
    move_ended(&mv, 0);
    cr_expect(mv.m.read);
    cr_expect_not(mv.m.copied);
    cr_expect(marks_right(ref, 0));
    cr_assert(mapping_place(&relocations, ref, 0, &place));
    cr_expect(readable(group, &place));
    cache_put(rig.cache, ref, 0);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_LATER, "leased");
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_expect_not(readable(group, &place));
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
}

static int got_status;

static void got_cb(struct cache_wait *w, int status)
{
    (void)w;
    got_status = status;
}

Test(relocate, somebody_else_reads_it_elsewhere)
{
    block_ref ref = store_below(rig.one, 1);
    struct cache_wait w = {.done_cb = got_cb};
    struct mover mv;

    got_status = 1;
    cr_assert_eq(cache_get(rig.cache, ref, 0, 0, NUMA_NONE, &w), CACHE_PENDING);
    cr_assert_eq(move(&mv, ref, 0), CACHE_PENDING);
    fake_next(&rig.tier, 0);
    cr_expect_eq(got_status, 0);
    cr_expect_eq(mv.calls, 0);
    await(GRANTED_READY, 1);
    copy_next();
    cr_expect_eq(mv.calls, 0);
    cache_put(rig.cache, ref, 0); /* the reader's */
    iterate();
    move_ended(&mv, 0);
    cr_expect_not(mv.m.read);
    cr_expect(mv.m.copied);
    put_and_drop(ref, 0);
}

Test(relocate, a_read_that_fails)
{
    block_ref ref = store_below(rig.one, 1);
    struct mover mv;

    move_granted(&mv, ref);
    fake_next(&rig.tier, -EIO);
    move_ended(&mv, -EIO);
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
    drop(ref);
    expect_nothing_held();
}

Test(relocate, a_read_that_nobody_waits_for)
{
    block_ref ref = store_below(rig.one, 1);
    struct mover mv;

    move_granted(&mv, ref);
    mapping_move_cancel(&relocations, &mv.m);
    iterate();
    cr_expect_eq(cache_moves(rig.cache), 0u);
    fake_next(&rig.tier, 0);
    cr_expect_eq(mv.calls, 0);
    cr_expect_eq(move(&mv, ref, 0), CACHE_READY, "it lies there now");
    put_and_drop(ref, 0);
}

/* ---- with other things that the cache does ---- */

/* The memory of mappings ends with the daemon. */
Test(relocate, a_snapshot_leaves_them_out)
{
    char directory[] = "/dev/shm/ucm-test-relocate-XXXXXX", why[PERSIST_WHY_BYTES];
    struct persist_identity id;
    struct snapshot_head head;
    struct snapshot *s;
    struct persist *k;
    const uint8_t *p;
    size_t n, at;
    block_ref ref;

    cr_assert(mkdtemp(directory));
    cr_assert_eq(snapshot_open(directory, 2 * MIB, MIB, &s, why), 0, "%s", why);
    snapshot_load(s, &(struct snapshot_modules){.loop = &rig.loop,
                                                .cache = rig.cache,
                                                .index = rig.index,
                                                .policy = rig.policy,
                                                .arena = rig.arena,
                                                .metrics = &rig.metrics});
    for (uint64_t i = 1; i <= 3; i++)
        drop(stored(rig.one, i));
    ref = find(rig.one, 2);
    cache_lease(rig.cache, ref);
    (void)moved(ref, 0);
    put_and_drop(ref, 0);
    cr_assert_eq(snapshot_start(s), 0);
    for (int i = 0; i < 5000 && !snapshot_ready(s); i++) {
        iterate();
        uv_sleep(1);
    }
    snapshot_finish(s);
    snapshot_close(s);
    cr_assert_eq(persist_open(directory, &k, why), 0, "%s", why);
    p = persist_snapshot(k, &n);
    cr_assert(p);
    id = persist_identity(k);
    cr_assert_eq(snapshot_check(p, n, &id, MIB, &head, &at), 0);
    cr_expect_eq(head.parts, 2u);
    persist_close(k);
    cr_assert_eq(wipe(directory), 0);
}

/* Blocks of two parts, of which one lies in a mapping. */
Test(relocate, one_part_of_two)
{
    block_ref ref = stored(rig.two, 1);
    struct grant_place place;

    settle();
    place = moved(ref, 1);
    cr_expect_eq(arena_bytes_used(rig.arena), MIB / 8);
    cr_expect_eq(grant_used_bytes(rig.arena), MIB / 8);
    cr_expect(cache_in_dram(rig.cache, ref));
    put_and_drop(ref, 1);
    for (uint64_t i = 100; i < 140 && in_dram(rig.two, 1); i++) {
        drop(store(rig.two, i));
        settle();
    }
    cr_expect_not(in_dram(rig.two, 1), "for its ordinary slot");
    cr_expect_not(readable(group, &place));
    cr_expect_eq(grant_used_bytes(rig.arena), 0u);
}

/* A full index drops blocks of mappings, too, if there are no others. */
Test(relocate, the_index_needs_their_place)
{
    struct grant_place place;
    block_ref ref = stored(rig.one, 1);

    place = moved(ref, 0);
    put_and_drop(ref, 0);
    cr_expect(cache_coldest_drop(rig.cache) || cache_coldest_drop(rig.cache));
    cr_expect_eq(find(rig.one, 1), 0u);
    cr_expect_not(readable(group, &place));
}
