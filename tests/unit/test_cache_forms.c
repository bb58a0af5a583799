/* Blocks in two forms: which of them is written, which leaves, and that at each step one of the two may be found. */
#include "tests/unit/form_rig.h"

TestSuite(cache_forms, .init = open_local_forms, .fini = close_forms);

static uint64_t flags(struct ns *ns, uint64_t number)
{
    return block_of(find(ns, number))->flags;
}

Test(cache_forms, coded_below)
{
    store_form(rig.one, 1, true);
    turns();
    cr_expect_eq(rig.tier.n_pending, 0u, "the plain one is not written");
    cr_expect_eq(coder.n, 1u);
    cr_expect_eq(rig.cache->dirty_bytes, rig.one->block_bytes, "it is dirty all the same");
    cr_expect_not(cache_written(rig.cache));
    cr_assert(build_next(0));
    cr_expect_eq(rig.cache->dirty_bytes, coder.one->block_bytes, "the coded one is, in its place");
    turns();
    cr_expect_eq(rig.tier.n_pending, 1u);
    EXPECT_AT(1, "d", "d");
    fake_next(&rig.tier, 0);
    turns();
    EXPECT_AT(1, "d", "n");
    cr_expect(cache_written(rig.cache));
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    cr_expect_eq(form_users(rig.one), 1u);
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_DRAM), CACHE_EVICT_DONE);
    EXPECT_AT(1, "", "n");
    cr_expect_eq(form_users(rig.one), 0u);
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, plain_below)
{
    store_form(rig.one, 1, false);
    turns();
    cr_expect_eq(rig.tier.n_pending, 1u, "the plain one is written meanwhile");
    cr_assert(build_next(0));
    turns();
    cr_expect_eq(rig.tier.n_pending, 1u, "and only that one");
    EXPECT_AT(1, "d", "d");
    fake_next(&rig.tier, 0);
    turns();
    EXPECT_AT(1, "n", "d");
    cr_expect(flags(coder.one, 1) & BLOCK_HELD_BACK);
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, plain_below_is_written_before_its_form_is_built)
{
    store_form(rig.one, 1, false);
    turns();
    fake_next(&rig.tier, 0);
    turns();
    EXPECT_AT(1, "dn", "");
    cr_assert(build_next(0));
    turns();
    EXPECT_AT(1, "n", "d");
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, what_does_not_fit_is_written_as_it_is)
{
    for (uint64_t i = 0; i < 2; i++) {
        store_form(rig.one, i, i == 0);
        turns();
        cr_assert(build_next(-ERANGE));
        quiet();
        EXPECT_AT(i, "dn", "");
        cr_expect_eq(find(coder.one, i), 0u);
    }
    cr_expect_eq(rig.metrics.transcode_unfit, 2u);
    cr_expect_eq(form_users(rig.one), 0u);
    evict_all(0);
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, half_a_form_is_dropped)
{
    store_form(rig.two, 1, true);
    turns();
    cr_expect_eq(coder.n, 2u);
    cr_assert(build_next(0));
    cr_assert(build_next(-ERANGE));
    quiet();
    cr_expect_str_eq(at(rig.two, 1), "dn");
    cr_expect_eq(find(coder.two, 1), 0u);
    (void)cache_evict(rig.cache, find(rig.two, 1), CACHE_ALL);
    expect_nothing_held();
}

Test(cache_forms, parts_that_disagree_stay_as_they_are)
{
    block_ref ref = open_block(rig.two, 1);

    cr_assert_eq(dump_form(ref, 0, true), 0);
    cr_expect_eq(form_users(rig.two), 1u);
    cr_assert_eq(dump(ref, 1, 0, SHARDS), 0);
    cr_expect_eq(form_users(rig.two), 0u);
    drop(ref);
    quiet();
    cr_expect_eq(coder.begun, 0u);
    cr_expect_str_eq(at(rig.two, 1), "dn");
}

Test(cache_forms, a_fill_that_ends_gives_its_form_back)
{
    block_ref ref = open_block(rig.one, 1);
    struct cache_fill *f;

    cr_assert_eq(claim(ref, 0, 0, 1, &f), 0);
    cache_fill_form(rig.cache, f, coder.one, true);
    cache_fill_form(rig.cache, f, coder.one, true);
    cr_expect_eq(form_users(rig.one), 1u);
    cache_fill_done(rig.cache, f, 1, false);
    cr_expect_eq(form_users(rig.one), 0u);
    cr_expect_eq(coder.one->uses, 0u);
    drop(ref);
    expect_nothing_held();
}

Test(cache_forms, eviction_of_the_plain_block_ends_what_waits)
{
    coder.most = 2;
    for (uint64_t i = 0; i < 4; i++)
        store_form(rig.one, i, true);
    turns();
    cr_expect_eq(coder.n, 2u);
    for (uint64_t i = 0; i < 4; i++)
        cr_expect_eq(cache_evict(rig.cache, find(rig.one, i), CACHE_ALL),
                     i < 3 ? CACHE_EVICT_LATER : CACHE_EVICT_DONE, "%u", (unsigned)i);
    quiet();
    cr_expect_leq(coder.begun, 3u, "the third one waited for its build");
    for (uint64_t i = 0; i < 4; i++)
        EXPECT_AT(i, "", "");
    expect_nothing_held();
}

Test(cache_forms, a_lost_form_is_built_again)
{
    store_form(rig.one, 1, true);
    quiet();
    EXPECT_AT(1, "d", "n");
    rig.tier.callbacks.lost_cb(rig.tier.callbacks.ctx, part_owner(find(coder.one, 1), 0),
                               part_loc(&block_of(find(coder.one, 1))->part[0]));
    quiet();
    EXPECT_AT(1, "d", "n");
    cr_expect_eq(coder.begun, 2u);
    evict_all(1);
    expect_nothing_held();
}

/* Else it takes the place of another one, which is then built again, and so on. */
Test(cache_forms, a_form_whose_place_was_reclaimed_is_not_built_again)
{
    store_form(rig.one, 1, true);
    quiet();
    cr_assert(fake_reclaim(&rig.tier, rig.tier.places));
    quiet();
    EXPECT_AT(1, "d", "");
    cr_expect_not(flags(rig.one, 1) & (BLOCK_PAIRED | BLOCK_HELD_BACK));
    cr_expect_eq(coder.begun, 1u);
    evict_all(1);
    store_form(rig.one, 2, true);
    quiet();
    cr_assert(cache_list_drop(rig.cache, &rig.cache->below));
    quiet();
    EXPECT_AT(2, "d", "");
    cr_expect_eq(coder.begun, 2u);
    evict_all(2);
    store_form(rig.one, 3, false);
    quiet();
    cr_assert(fake_reclaim(&rig.tier, rig.tier.places));
    quiet();
    EXPECT_AT(3, "", "dn");
    evict_all(3);
    expect_nothing_held();
}

Test(cache_forms, what_others_stored_of_a_form_stays)
{
    struct waiter w;

    drop(store(rig.one, 9));
    quiet();
    cr_assert_eq(get(&w, find(rig.one, 9), 0), CACHE_READY);
    coder.most = 0;
    store_form(rig.one, 1, true);
    quiet();
    drop(store(coder.one, 1));
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_ALL), CACHE_EVICT_LATER);
    cache_put(rig.cache, find(rig.one, 9), 0);
    quiet();
    EXPECT_AT(1, "", "dn");
    evict_all(1);
    evict_all(9);
    expect_nothing_held();
}

Test(cache_forms, a_form_that_is_evicted_by_name_stays_away)
{
    store_form(rig.one, 1, true);
    quiet();
    cr_expect_eq(cache_evict(rig.cache, find(coder.one, 1), CACHE_ALL), CACHE_EVICT_DONE);
    quiet();
    EXPECT_AT(1, "dn", "");
    cr_expect_eq(coder.begun, 1u);
    cr_expect_eq(form_users(rig.one), 0u);
    evict_all(1);
    store_form(rig.one, 2, false);
    quiet();
    EXPECT_AT(2, "n", "d");
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 2), CACHE_ALL), CACHE_EVICT_DONE);
    quiet();
    EXPECT_AT(2, "", "dn");
    evict_all(2);
    expect_nothing_held();
}

Test(cache_forms, a_leased_or_used_block_leaves_afterwards)
{
    struct waiter w;
    block_ref ref;

    store_form(rig.one, 1, true);
    turns();
    cr_assert(build_next(0));
    ref = find(coder.one, 1);
    cache_lease(rig.cache, ref);
    cr_assert_eq(get(&w, ref, 0), CACHE_READY);
    quiet();
    EXPECT_AT(1, "d", "dn");
    cache_put(rig.cache, ref, 0);
    EXPECT_AT(1, "d", "dn");
    drop(ref);
    EXPECT_AT(1, "d", "n");
    evict_all(1);
    expect_nothing_held();
}

/* By somebody who wants that form. */
Test(cache_forms, what_was_read_back_stays)
{
    struct waiter w;
    block_ref ref;

    store_form(rig.one, 1, false);
    quiet();
    ref = find(rig.one, 1);
    for (int i = 0; i < 2; i++) {
        EXPECT_AT(1, "n", "d");
        cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
        fake_next(&rig.tier, 0);
        cache_put(rig.cache, ref, 0);
        quiet();
        EXPECT_AT(1, "dn", "d");
        cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    }
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, a_form_stays_in_dram_when_the_other_is_not_there)
{
    block_ref ref;

    store_form(rig.one, 1, true);
    turns();
    cr_assert(build_next(0));
    ref = find(coder.one, 1);
    cache_lease(rig.cache, ref);
    quiet();
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_DRAM), CACHE_EVICT_DONE);
    drop(ref);
    quiet();
    EXPECT_AT(1, "", "dn");
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms, without_a_slot_blocks_are_written_as_they_are)
{
    struct waiter w[8];

    for (uint64_t i = 0; i < 8; i++) {
        block_ref ref = open_block(rig.one, i);

        cr_assert_eq(dump_form(ref, 0, true), 0);
        cr_assert_eq(get(&w[i], ref, 0), CACHE_READY);
        cache_hold(rig.cache, ref, 0); /* nobody waits for that to end */
        drop(ref);
    }
    quiet();
    for (uint64_t i = 0; i < 8; i++)
        EXPECT_AT(i, "dn", "");
    cr_expect_eq(rig.metrics.transcode_no_room, 8u);
    for (uint64_t i = 0; i < 8; i++)
        cache_unhold(rig.cache, find(rig.one, i), 0);
    for (uint64_t i = 0; i < 8; i++)
        evict_all(i);
    expect_nothing_held();
}

/* Of a tenant that gets no more DRAM: no place is taken for it that others want. */
Test(cache_forms, beyond_what_its_tenant_gets_a_block_is_written_as_it_is)
{
    block_ref ref = open_block(rig.one, 1);
    struct waiter w;

    rig.one->tenant->settings.dram_most = MIB / 4;
    cache_tenants_changed(rig.cache);
    cr_assert_eq(dump_form(ref, 0, true), 0);
    cr_assert_eq(get(&w, ref, 0), CACHE_READY); /* something is under way: a wait would not end */
    quiet();
    EXPECT_AT(1, "dn", "");
    cr_expect_eq(rig.metrics.transcode_no_room, 1u);
    cr_expect_eq(coder.begun, 0u);
    cr_expect_eq(rig.one->tenant->dram_bytes, MIB / 4);
    cache_put(rig.cache, ref, 0);
    drop(ref);
    evict_all(1);
    expect_nothing_held();
}

/* What finds no place in it stays in DRAM, counted as not written, or is written as it is; others go on behind it. */
Test(cache_forms, a_full_queue_of_what_is_to_be_encoded)
{
    struct block_queue *queue = &rig.cache->coding.queue;
    block_ref gone = store_form(rig.one, 9, false);

    quiet();
    evict_all(9);
    while (queue_push(queue, gone) == 0)
        continue;
    store_form(rig.one, 1, true);
    store_form(rig.one, 2, false);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 1u);
    turns();
    cr_expect_eq(rig.tier.n_pending, 1u);
    fake_next(&rig.tier, 0);
    turns();
    EXPECT_AT(1, "d", "");
    EXPECT_AT(2, "dn", "");
    cr_expect_eq(coder.begun, 1u, "of the one before");
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    cr_expect(!(flags(rig.one, 1) & (BLOCK_QUEUED | BLOCK_CODING)), "nothing spares it");
    while (queue->n > 1)
        cr_assert_eq(queue_pop(queue), gone);
    store_form(rig.one, 3, true);
    quiet();
    EXPECT_AT(3, "d", "n");
    for (uint64_t i = 1; i < 4; i++)
        evict_all(i);
    cr_expect_eq(form_users(rig.one), 0u);
    expect_nothing_held();
}

Test(cache_forms, many_blocks_flow_through_few_builds)
{
    coder.most = 1;
    for (uint64_t i = 0; i < 4; i++)
        store_form(rig.one, i, i % 2);
    quiet();
    for (uint64_t i = 0; i < 4; i++)
        EXPECT_AT(i, i % 2 ? "d" : "n", i % 2 ? "n" : "d");
    cr_expect_eq(coder.begun, 4u);
}

Test(cache_forms, a_stop_leaves_everything_as_it_is)
{
    coder.most = 1;
    for (uint64_t i = 0; i < 4; i++)
        store_form(rig.one, i, i != 3);
    for (int i = 0; i < 2; i++)
        turn();
    cr_expect_eq(coder.n, 1u);
    cache_stop_writing(rig.cache);
    while (build_next(-ECANCELED))
        turns();
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    turns();
    cr_expect(cache_written(rig.cache));
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 3u);
    cr_expect_eq(rig.metrics.transcode_failed + rig.metrics.transcode_no_room, 0u,
                 "nothing failed");
}

Test(cache_forms, only_blocks_that_are_used_again_are_encoded_with_admission_by_reuse)
{
    block_ref ref;

    rig.cache->config.write_reused = true;
    ref = store_form(rig.one, 1, true);
    quiet();
    cr_expect_eq(coder.begun, 0u);
    cr_expect_eq(rig.metrics.nvme_write_refused, 1u);
    cache_touch(rig.cache, rig.one, &ref, 1);
    store_form(rig.one, 2, true);
    quiet();
    cache_touch(rig.cache, rig.one, &ref, 1);
    quiet();
    EXPECT_AT(1, "d", "n");
    cr_expect_eq(coder.begun, 1u);
    for (int i = 0; i < 3; i++)
        cache_touch(rig.cache, rig.one, &ref, 1);
    quiet();
    cr_expect_eq(coder.begun, 1u, "once");
}

Test(cache_forms, the_use_of_either_form_admits_the_one_that_goes_below)
{
    block_ref ref;

    rig.cache->config.write_reused = true;
    store_form(rig.one, 1, false);
    quiet();
    EXPECT_AT(1, "d", "d");
    ref = find(coder.one, 1);
    cache_touch(rig.cache, coder.one, &ref, 1);
    store_form(rig.one, 2, false);
    quiet();
    cache_touch(rig.cache, coder.one, &ref, 1);
    quiet();
    EXPECT_AT(1, "n", "d");
    EXPECT_AT(2, "d", "d");
}

Test(cache_forms, a_purge_of_the_coded_namespace_ends_what_waits_for_it)
{
    struct cache_purge p = {0};

    coder.most = 2;
    for (uint64_t i = 0; i < 4; i++)
        store_form(rig.one, i, true);
    turns();
    rig.cache->tier = NULL; /* the fake one keeps no records */
    cr_assert_eq(cache_purge_begin(rig.cache, &p, coder.one), 0);
    rig.cache->tier = &rig.tier;
    cr_assert(cache_purge_done(&p));
    cache_purge_end(rig.cache, &p);
    quiet();
    for (uint64_t i = 0; i < 4; i++) {
        EXPECT_AT(i, "dn", "");
        cr_expect_eq(find(coder.one, i), 0u);
    }
    evict_all(0);
    store_form(rig.one, 0, true);
    quiet();
    EXPECT_AT(0, "d", "n");
}
