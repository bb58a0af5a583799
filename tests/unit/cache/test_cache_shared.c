/* The cache over a shared tier. A block that another host stored is found, read once and kept. One
 * that is not there is a miss, and is forgotten. A block stored here is written back, and nothing
 * waits for that. */
#include "tests/unit/cache/cache_shared_rig.h"

TestSuite(cache_shared, .init = open_shared, .fini = close_shared);

/* ---- reading ---- */

Test(cache_shared, a_block_of_another_host_is_found_and_read_once)
{
    block_ref ref = shared_block(rig.one, 1);
    struct waiter a, b;

    cr_expect_eq(cache_tier(rig.cache, ref), CACHE_SHARED);
    cr_expect_not(cache_in_dram(rig.cache, ref));
    cr_assert_eq(get(&a, ref, 0), CACHE_PENDING);
    cr_assert_eq(get(&b, ref, 0), CACHE_PENDING);
    cr_expect_eq(shared.submits, 1u, "single flight");
    fake_shared_next(&shared, 0);
    cr_assert(a.calls == 1 && a.status == 0 && b.calls == 1 && b.status == 0);
    cr_expect(a.w.shared && b.w.shared);
    cr_expect(marks_right(ref, 0));
    cr_expect_eq(cache_tier(rig.cache, ref), CACHE_DRAM);
    cache_put(rig.cache, ref, 0);
    cache_put(rig.cache, ref, 0);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 1u, "it goes on to NVMe");
    cr_expect_eq(shared.submits, 1u, "and is not written where it came from");
    drop(ref);
}

Test(cache_shared, what_a_root_says_is_an_error_is_a_miss_to_who_asked)
{
    static const int errors[] = {-ETIMEDOUT, -EIO, -EACCES};

    for (uint64_t i = 0; i < 3; i++) {
        block_ref ref = shared_block(rig.one, i);
        struct waiter w;

        cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
        fake_shared_next(&shared, errors[i]);
        cr_expect_eq(w.status, -ENOENT);
        drop(ref);
    }
    expect_no_shared_left();
}

Test(cache_shared, who_finds_the_shared_tier_full_is_woken)
{
    block_ref ref = shared_block(rig.one, 1);
    struct asker a;
    struct waiter w;

    shared_refuses(-EAGAIN, 1);
    while (arena_bytes_ready(rig.arena) < arena_bytes_configured(rig.arena))
        iterate();
    cr_assert_eq(get(&w, ref, 0), -EAGAIN);
    ask_for(&a, WAIT_OTHER);
    iterate();
    cr_expect_eq(a.calls, 0);
    fake_shared_ready(&shared);
    iterate();
    cr_expect_eq(a.calls, 1);
    cr_expect_eq(get(&w, ref, 0), CACHE_PENDING);
    cache_get_cancel(rig.cache, &w.w);
    drop(ref);
}

/* ---- alongside NVMe ---- */

Test(cache_shared, nvme_may_take_its_place_back_from_what_a_shared_tier_has)
{
    block_ref ref;

    shared_refuses(-EROFS, 1);
    ref = store_below(rig.one, 1); /* leased */
    cr_expect_not(fake_reclaim(&rig.tier, 1));
    note(rig.one, 1, 1, true);
    cr_expect(fake_reclaim(&rig.tier, 1));
    cr_expect_eq(cache_tier(rig.cache, ref), CACHE_SHARED);
    drop(ref);
    cr_expect(cache_found(rig.cache, ref));
}

/* A block that lies on NVMe and, known, on the shared tier. */
static block_ref store_twice(struct ns *ns, uint64_t number)
{
    block_ref ref = store(ns, number);

    iterate();
    fake_next(&rig.tier, 0);
    fake_shared_next(&shared, 0);
    drop(ref);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_assert(has_file(ns, number, 0, 1));
    cache_lease(rig.cache, ref);
    return ref;
}

Test(cache_shared, a_copy_on_nvme_that_fails_makes_way_for_the_one_on_the_shared_tier)
{
    block_ref ref = store_twice(rig.one, 1);
    struct waiter a, b;

    cr_assert_eq(get(&a, ref, 0), CACHE_PENDING);
    cr_expect_eq(shared.n_pending, 0u, "the nearer one is read");
    fake_next(&rig.tier, -EBADMSG);
    cr_expect_eq(a.calls, 0, "there is another copy");
    cr_expect_eq(rig.tier.forgets, 1u);
    cr_expect(cache_found(rig.cache, ref));
    cr_assert_eq(get(&b, ref, 0), CACHE_PENDING);
    fake_shared_next(&shared, 0);
    cr_expect(a.calls == 1 && a.status == 0 && a.w.shared && marks_right(ref, 0));
    cr_expect(b.calls == 1 && b.status == 0 && b.w.shared);
    cache_put(rig.cache, ref, 0);
    put_and_drop(ref, 0);
}

Test(cache_shared, a_read_that_fails_everywhere_fails_and_leaves_nothing)
{
    block_ref ref = store_twice(rig.one, 1);
    struct waiter w;

    cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
    fake_next(&rig.tier, -EIO);
    fake_shared_next(&shared, -ENOENT);
    cr_expect(w.calls == 1 && w.status == -ENOENT);
    cr_expect_not(cache_found(rig.cache, ref));
    drop(ref);
    expect_no_shared_left();
}

Test(cache_shared, a_shared_tier_that_is_busy_keeps_the_copy_that_nvme_lost)
{
    block_ref ref = store_twice(rig.one, 1);
    struct waiter w;

    cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
    shared_refuses(-EAGAIN, 1);
    fake_next(&rig.tier, -EIO);
    cr_expect(w.calls == 1 && w.status == -EBUSY, "not now");
    cr_expect_eq(cache_tier(rig.cache, ref), CACHE_SHARED);
    expect_shared_read(ref);
}

Test(cache_shared, what_nvme_knows_no_more_is_read_from_the_shared_tier)
{
    block_ref ref = store_twice(rig.one, 1);

    tier_refuses(-ESTALE, 1);
    expect_shared_read(ref);
}

/* ---- going ---- */

Test(cache_shared, evicted_while_leased_it_can_be_loaded_until_the_end)
{
    block_ref ref = shared_block(rig.one, 1);

    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_not(cache_found(rig.cache, ref));
    expect_shared_read(ref);
    expect_no_shared_left();
}

Test(cache_shared, leaving_the_shared_tier_alone_leaves_what_lies_here)
{
    block_ref ref = store_dram(rig.one, 1), other = shared_block(rig.one, 2);

    fake_shared_next(&shared, 0);
    drop(ref);
    drop(other);
    cr_expect_eq(cache_shared_roots(rig.cache, other), 1u);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_SHARED), CACHE_EVICT_DONE);
    cr_expect(cache_in_dram(rig.cache, ref));
    cr_expect_eq(cache_evict(rig.cache, other, CACHE_SHARED), CACHE_EVICT_DONE);
    cr_expect_eq(find(rig.one, 2), 0u);
    cr_expect_eq(cache_shared_roots(rig.cache, ref), 0u);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_SHARED), CACHE_EVICT_NONE);
}

Test(cache_shared, what_is_written_while_it_is_evicted_goes_again)
{
    static const int ends[] = {0, -ETIMEDOUT};

    for (uint64_t i = 0; i < 2; i++) {
        block_ref ref = store_dram(rig.one, i);

        cr_assert_eq(shared.n_pending, 1u);
        drop(ref);
        cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
        cr_expect_eq(shared.removes, i, "the root may still write it");
        fake_shared_next(&shared, ends[i]);
        cr_expect_eq(shared.removes, i + 1);
        cr_expect_not(has_file(rig.one, i, 0, 0));
        cr_expect_eq(find(rig.one, i), 0u);
    }
    expect_no_shared_left();
}

static void purged_cb(struct cache_purge *p, int status)
{
    (void)p;
    cr_expect_eq(status, 0);
}

/* The purge evicts the block, or the block is stored again and written when the purge is over. */
Test(cache_shared, what_is_stored_in_a_purge_is_written_after_it)
{
    struct cache_purge p = {.done_cb = purged_cb};
    block_ref ref;

    cr_assert_eq(cache_purge_begin(rig.cache, &p, rig.one), 0);
    ref = store(rig.one, 1);
    iterate();
    cr_expect_eq(shared.n_pending, 0u);
    cr_expect_not(cache_written(rig.cache));
    rig.tier.naming->done_cb(rig.tier.naming, 0);
    shared.purge->done_cb(shared.purge, 0, 0);
    cache_purge_end(rig.cache, &p);
    iterate();
    cr_expect_eq(shared.n_pending, 1u);
    fake_shared_next(&shared, 0);
    cr_expect(has_file(rig.one, 1, 0, 1));
    cr_expect_eq(rig.metrics.shared_write_dropped, 0u);
    drop(ref);
}

Test(cache_shared, what_was_found_before_it_was_purged_does_not_come_back)
{
    struct cache_purge p = {.done_cb = purged_cb};
    uint8_t key[UCM_MAX_KEY_BYTES];

    cr_assert_eq(cache_purge_begin(rig.cache, &p, rig.one), 0);
    key_of(1, key);
    cache_shared_note(rig.cache, rig.one, key, 1, false);
    cr_expect_eq(find(rig.one, 1), 0u);
    rig.tier.naming->done_cb(rig.tier.naming, 0);
    shared.purge->done_cb(shared.purge, 0, 1);
    cache_purge_end(rig.cache, &p);
    cr_expect_neq(note(rig.one, 1, 1, false), 0u);
}

/* ---- blocks that lie on a shared tier only ---- */

Test(cache_shared, few_blocks_are_known_by_a_shared_tier_only_and_the_oldest_go_first)
{
    struct cache_stats stats;
    block_ref held = note(rig.one, 1, 1, false);

    cache_lease(rig.cache, held);
    for (uint64_t i = 2; i <= 12; i++)
        note(rig.one, i, 1, false);
    cache_stats(rig.cache, &stats);
    cr_expect_eq(stats.shared_only, 8u);
    cr_expect_eq(index_blocks(rig.index), 8u);
    cr_expect(cache_found(rig.cache, held), "held");
    for (uint64_t i = 2; i <= 12; i++)
        cr_expect_eq(find(rig.one, i) != 0, i >= 6, "block %d", (int)i);
    drop(held);
    cr_expect(cache_found(rig.cache, held));
}

Test(cache_shared, they_make_way_for_what_is_stored_here)
{
    uint64_t n = 0;

    rig.cache->config.shared_blocks = 1000;
    while (index_blocks(rig.index) < 1000)
        note(rig.one, n++, 1, false);
    drop(store(rig.one, 5000));
    cr_expect_neq(find(rig.one, 5000), 0u);
    cr_expect_eq(find(rig.one, 0), 0u);
}

Test(cache_shared, what_is_read_and_evicted_again_stays_within_the_bound)
{
    struct cache_stats stats;

    for (uint64_t i = 0; i < 40; i++) {
        expect_shared_read(shared_block(rig.one, i));
        iterate();
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, -ENOSPC);
    }
    cache_stats(rig.cache, &stats);
    cr_expect_leq(stats.shared_only, 8u);
    cr_expect_leq(index_blocks(rig.index), 16u, "eight in DRAM, eight known");
}
