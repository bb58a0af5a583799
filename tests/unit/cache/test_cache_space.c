/* Which block is evicted for a new one, which caller waits for space, and what a verify changes in
 * that. */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache_space, .init = rig_open, .fini = rig_close);

/* ---- space ---- */

Test(cache_space, who_waits_is_woken_later_and_all_of_them)
{
    struct asker a[3];
    struct pending_write *f;
    block_ref ref = open_block(rig.one, 1);

    cr_assert_eq(claim(ref, 0, 0, 2, &f), 0);
    for (int i = 0; i < 3; i++)
        ask_for(&a[i], WAIT_SLOT);
    cache_retry_cancel(&a[1].r);
    cache_retry_cancel(&a[1].r);
    pending_write_done(rig.cache, f, 2, false);
    cr_expect(a[0].calls == 0 && a[2].calls == 0, "not from inside the call that released");
    iterate();
    cr_expect(a[0].calls == 1 && a[1].calls == 0 && a[2].calls == 1);
    drop(ref);
}

/* Waiters with little under way go before the others, but not before each other. No waiter is
 * passed over for ever. */
Test(cache_space, the_first_are_served_in_their_order)
{
    struct asker a[5];
    struct pending_write *f[3];
    block_ref ref[3];

    for (unsigned i = 0; i < 3; i++) {
        ref[i] = open_block(rig.one, i + 1);
        cr_assert_eq(claim(ref[i], 0, 0, 1, &f[i]), 0);
    }
    for (int i = 0; i < 5; i++)
        ask(&a[i]);
    a[1].r.first = a[2].r.first = a[3].r.first = true;
    for (int i = 0; i < 3; i++)
        cr_assert(cache_wait_for(rig.cache, &a[i].r, WAIT_SLOT));
    a[1].again = true;
    pending_write_done(rig.cache, f[0], 1, false);
    iterate();
    cr_expect(a[1].calls == 1 && a[2].calls == 0 && a[0].calls == 0);
    cr_assert(cache_wait_for(rig.cache, &a[3].r, WAIT_SLOT)); /* that comes later */
    cr_expect(cache_slot_awaited(rig.cache, &a[3].r));
    cr_expect_not(cache_slot_awaited(rig.cache, &a[1].r), "it is the next");
    a[2].again = true;
    pending_write_done(rig.cache, f[1], 1, false);
    a[1].again = false;
    iterate();
    cr_expect(a[1].calls == 2 && a[2].calls == 1 && a[3].calls == 0 && a[0].calls == 0);
    cache_retry_cancel(&a[2].r);
    a[2].again = false;
    cr_expect(cache_slot_awaited(rig.cache, &a[4].r));
    cache_retry_cancel(&a[3].r);
    cache_retry_cancel(&a[0].r);
    pending_write_done(rig.cache, f[2], 1, false);
    drop_all(ref, 3);
}

/* One layer of the dump has come, and others will. Until they do, its slot can give way. */
Test(cache_space, who_waits_hears_that_a_dump_pauses)
{
    struct asker a;
    struct pending_write *f;
    block_ref ref = open_block(rig.one, 1);

    ask(&a);
    cr_assert_eq(claim(ref, 0, 0, 1, &f), 0);
    cr_assert(cache_wait_for(rig.cache, &a.r, WAIT_SLOT));
    pending_write_done(rig.cache, f, 1, true);
    iterate();
    cr_expect_eq(a.calls, 1);
    pending_writes_end(rig.cache, &rig.pending_writes[0]);
    drop(ref);
}

Test(cache_space, who_waits_hears_that_a_reference_lasts)
{
    block_ref ref = store(rig.one, 1);
    struct asker a;

    ask(&a);
    cache_stop_writing(rig.cache);
    iterate();
    use(ref, 0);
    cr_assert(cache_wait_for(rig.cache, &a.r, WAIT_SLOT));
    cache_ref_lasting(rig.cache, ref, 0);
    iterate();
    cr_expect_eq(a.calls, 1);
    cache_unref_lasting(rig.cache, ref, 0);
    drop(ref);
}

/* The first waiter still has too little. The second is not tried in vain, and is not forgotten
 * either. */
Test(cache_space, who_still_has_too_little_lets_the_next_go_first)
{
    struct asker a[2];
    struct pending_write *f, *g;
    block_ref ref = open_block(rig.one, 1), other = open_block(rig.one, 2);

    cr_assert_eq(claim(ref, 0, 0, 1, &f), 0);
    cr_assert_eq(claim(other, 0, 0, 1, &g), 0);
    for (int i = 0; i < 2; i++)
        ask_for(&a[i], WAIT_SLOT);
    a[0].again = true;
    pending_write_done(rig.cache, f, 1, false);
    iterate();
    cr_expect(a[0].calls == 1 && a[1].calls == 0);
    cr_expect(a[0].again);
    a[0].again = false;
    pending_write_done(rig.cache, g, 1, false);
    iterate();
    cr_expect(a[0].calls == 2 && a[1].calls == 1);
    drop(ref);
    drop(other);
}

Test(cache_space, clean_blocks_go_before_those_that_wait_to_be_written)
{
    block_ref dirty = store(rig.one, 1); /* older, so the policy would rather have this one */
    unsigned gone = 0;

    tier_refuses(-EAGAIN, UINT32_MAX);
    drop(dirty);
    iterate();
    rig.cache->no_writes = true;
    store_all(rig.one, 2, 7);
    store_all(rig.one, 100, 1);
    cr_expect(cache_found(rig.cache, dirty));
    for (uint64_t i = 2; i < 9; i++)
        gone += find(rig.one, i) == 0;
    cr_expect_eq(gone, 1u, "never queued, so nothing speaks for them");
}

/* ---- slots of other sizes ---- */

/* After a restart with a smaller arena.slab. */
Test(cache_space, a_part_longer_than_an_slab_evicts_nothing)
{
    struct ns *big = space("big", 1, MIB);
    struct cache_check k = {0};
    struct cache_wait w = {0};
    struct pending_write *f;
    block_ref ref;

    store_all(rig.one, 0, 8);
    settle();
    ref = open_block(big, 1);
    cr_expect_eq(claim(ref, 0, 0, LAYERS, &f), -EFBIG);
    place_long(ref);
    cr_expect_eq(cache_get(rig.cache, ref, 0, 0, NUMA_NONE, &w), -EFBIG);
    cr_expect_eq(cache_verify(rig.cache, &k, ref, 0), -EBUSY);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 0u);
    cr_expect_eq(rig.metrics.arena_candidates, 0u);
    drop(ref);
}

/* Slabs of 4096 slots, all of them taken by blocks that may leave. */
static void open_fine(void)
{
    struct ns *fine;

    rig.slab = 16 * MIB;
    rig.max_blocks = 10000;
    rig_open();
    cache_stop_writing(rig.cache);
    fine = space("fine", 1, 4096 / LAYERS);
    store_all(fine, 0, 8192);
}

TestSuite(cache_fine, .init = open_fine, .fini = rig_close);

static struct {
    struct asker a;
    block_ref ref;
    unsigned iterations;
    uint64_t evicted, most;
} wide;

/* Until there is a slot of another size. */
static int wide_fill(void)
{
    struct pending_write *f;
    int rc;

    ask(&wide.a);
    for (wide.iterations = 0; (rc = claim(wide.ref, 0, 0, LAYERS, &f)) == -EBUSY;
         wide.iterations++) {
        uint64_t evicted = rig.metrics.arena_evicted_blocks - wide.evicted;

        wide.most = evicted > wide.most ? evicted : wide.most;
        wide.evicted += evicted;
        cr_assert(cache_wait_for(rig.cache, &wide.a.r, WAIT_SLOT));
        iterate();
    }
    if (rc == 0)
        pending_write_done(rig.cache, f, LAYERS, true);
    return rc;
}

/* An iteration of the event loop evicts some of the slab. Meanwhile no other request takes its free
 * slots. */
Test(cache_fine, a_slab_is_emptied_in_several_turns)
{
    struct pending_write *f;
    block_ref other;

    wide.ref = open_block(rig.one, 1);
    cr_assert_eq(claim(wide.ref, 0, 0, LAYERS, &f), -EBUSY);
    other = open_block(index_ns(rig.index, 3), 10000);
    cr_expect_eq(claim(other, 0, 0, LAYERS, &f), -EBUSY, "the free slot is not given to another");
    cr_expect_eq(wide_fill(), 0);
    cr_expect(wide.iterations >= 3 && wide.most <= 1024, "%u iterations", wide.iterations);
    cr_expect_eq(rig.metrics.arena_slabs_moved, 1u);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 4096u);
    drop(other);
    drop(wide.ref);
}

/* A block that is leased while its slab is emptied keeps the slab. The slab's other slots serve as
 * before. */
Test(cache_fine, a_slab_that_can_not_be_emptied_any_more_is_used_again)
{
    struct pending_write *f;
    struct ns *fine = index_ns(rig.index, 3);
    block_ref held[2];

    wide.ref = open_block(rig.one, 1);
    cr_assert_eq(claim(wide.ref, 0, 0, LAYERS, &f), -EBUSY);
    for (unsigned i = 0; i < 2; i++) {
        held[i] = find(fine, 4095 + 4096 * i); /* the last of each slab */
        cr_assert(held[i]);
        cache_lease(rig.cache, held[i]);
    }
    ask_for(&wide.a, WAIT_SLOT);
    for (unsigned i = 0; i < 20 && claim(wide.ref, 0, 0, LAYERS, &f) == -EBUSY; i++)
        iterate();
    cr_expect_eq(claim(wide.ref, 0, 0, LAYERS, &f), -EBUSY);
    cr_expect_eq(rig.metrics.arena_slabs_moved, 0u);
    iterate();
    drop(store(fine, 20000));
    drop_all(held, 2);
    cr_expect_eq(wide_fill(), 0);
    drop(wide.ref);
}

/* ---- a full index ---- */

static struct ns *other; /* of one part, too */

static void open_narrow(void)
{
    rig.max_blocks = 8;
    rig_open();
    other = space("other", 1, rig.two->identity.layer_bytes);
}

TestSuite(narrow, .init = open_narrow, .fini = rig_close);

/* Otherwise the first blocks would stay for ever: without new blocks nothing is written or evicted.
 */
Test(narrow, a_full_index_lets_go_what_left_dram_first)
{
    block_ref held[7], refs[2], pinned = store_below(rig.one, 9);
    uint8_t key[UCM_MAX_KEY_BYTES];

    cr_assert(cache_pin(rig.cache, pinned, true));
    drop(pinned);
    for (unsigned i = 0; i < 3; i++)
        drop(store_below(rig.one, 1 + i));
    refs[0] = find(rig.one, 1);
    refs[1] = find(rig.one, 2);
    cache_touch(rig.cache, rig.one, refs, 2); /* a sequence's head outlives its tail */
    for (unsigned i = 0; i < 4; i++)
        held[i] = open_block(other, 100 + i);
    cr_expect_eq(rig.metrics.index_evicted, 0u);
    for (unsigned i = 0; i < 3; i++) {
        static const uint64_t goes[] = {3, 2, 1};

        cr_expect_neq(find(rig.one, goes[i]), 0u);
        held[4 + i] = open_block(other, 105 + i);
        cr_expect_eq(find(rig.one, goes[i]), 0u);
    }
    cr_expect_eq(rig.metrics.index_evicted, 3u);
    cr_expect_eq(rig.tier.n_live, 1u, "their places are free");
    key_of(200, key);
    cr_expect_eq(cache_open(rig.cache, other, key), 0u, "all are in use, or pinned");
    cr_expect_eq(find(rig.one, 9), pinned);
    drop_all(held, 7);
}

/* ---- verifying ---- */

/* The slot that a verify reads into stays: its slab is not emptied for another slot size. */
Test(cache_space, a_slab_that_is_verified_into_is_not_emptied)
{
    struct cache_check k = {.done_cb = check_cb};
    block_ref ref[8];
    struct pending_write *f;

    for (uint64_t i = 0; i < 8; i++)
        drop(ref[i] = store(rig.one, i));
    settle();
    cr_assert_eq(cache_evict(rig.cache, ref[1], CACHE_DRAM), CACHE_EVICT_DONE);
    cache_lease(rig.cache, ref[0]);
    cr_assert_eq(cache_verify(rig.cache, &k, ref[0], 0), 0);
    for (uint32_t i = 4; i < 8; i++)
        cache_touch(rig.cache, rig.one, &ref[i], 1); /* the slab of the others is colder */
    drop(ref[0]);
    ref[0] = open_block(rig.two, 100);
    cr_assert_eq(claim(ref[0], 0, 0, LAYERS, &f), 0);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 4u, "%u",
                 (unsigned)rig.metrics.arena_evicted_blocks);
    cr_expect_eq(rig.metrics.arena_slabs_moved, 1u);
    pending_write_done(rig.cache, f, LAYERS, false);
    fake_next(&rig.tier, 0);
    drop(ref[0]);
}

Test(cache_space, verify_drops_what_is_corrupt_and_only_that)
{
    block_ref ref = store_below(rig.one, 1);
    struct cache_check k = {.done_cb = check_cb};

    cr_assert_eq(cache_verify(rig.cache, &k, ref, 0), 0);
    fake_next(&rig.tier, 0);
    cr_expect_eq(check_status, 0);
    cr_expect_eq(arena_bytes_used(rig.arena), 0u);
    cr_assert_eq(cache_verify(rig.cache, &k, ref, 0), 0);
    fake_next(&rig.tier, -EIO);
    cr_expect(cache_found(rig.cache, ref));
    cr_assert_eq(cache_verify(rig.cache, &k, ref, 0), 0);
    fake_next(&rig.tier, -EBADMSG);
    cr_expect_not(cache_found(rig.cache, ref));
    cr_expect_eq(cache_verify(rig.cache, &k, ref, 0), -ENOENT);
    drop(ref);
    expect_nothing_held();
}
