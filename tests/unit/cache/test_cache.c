/* The cache over a tier that a test controls: the interleavings that a real disk and a network
 * can't be made to time. */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache, .init = rig_open, .fini = rig_close);

/* ---- reads ---- */

Test(cache, one_read_serves_all_who_wait)
{
    block_ref ref = store_below(rig.one, 1);
    struct waiter w[3] = {0};
    unsigned before = rig.tier.submits;

    for (int i = 0; i < 3; i++)
        cr_assert_eq(get(&w[i], ref, 0), CACHE_PENDING);
    cr_expect_eq(rig.tier.submits, before + 1);
    cr_expect_eq(rig.metrics.reads_coalesced, 2u);
    cr_assert_not(cache_in_dram(rig.cache, ref));
    fake_next(&rig.tier, 0);
    for (int i = 0; i < 3; i++) {
        cr_assert(w[i].calls == 1 && w[i].status == 0);
        cr_expect(marks_right(ref, 0));
        cache_put(rig.cache, ref, 0);
    }
    cr_expect_eq(block_of(ref)->part[0].users, 0u);
    drop(ref);
    cr_expect(cache_found(rig.cache, ref));
}

Test(cache, a_read_that_fails_is_a_miss_for_all_and_for_ever)
{
    static const int errors[] = {-EBADMSG, -EIO};

    for (int e = 0; e < 2; e++) {
        block_ref ref = store_below(rig.one, 1);
        struct waiter w[3] = {0}, late = {0};

        for (int i = 0; i < 3; i++)
            cr_assert_eq(get(&w[i], ref, 0), CACHE_PENDING);
        cache_get_cancel(rig.cache, &w[1].w);
        fake_next(&rig.tier, errors[e]);
        cr_expect(w[0].calls == 1 && w[0].status == errors[e]);
        cr_expect_eq(w[1].calls, 0);
        cr_expect(w[2].calls == 1 && w[2].status == errors[e]);
        cr_expect_not(cache_found(rig.cache, ref));
        cr_expect_eq(get(&late, ref, 0), -ENOENT);
        drop(ref);
        expect_nothing_held();
    }
}

/* The callback of the first makes it end the second's wait: the second must not be left a reference. */
Test(cache, a_waiter_that_cancels_the_next)
{
    block_ref ref = store_below(rig.one, 1);
    struct waiter second, first;

    cr_assert_eq(get(&first, ref, 0), CACHE_PENDING);
    cr_assert_eq(get(&second, ref, 0), CACHE_PENDING);
    first.cancels = &second;
    fake_next(&rig.tier, 0);
    cr_expect(first.calls == 1 && second.calls == 0);
    put_and_drop(ref, 0);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_DONE);
    expect_nothing_held();
}

Test(cache, evicted_while_it_is_read)
{
    block_ref ref = store_below(rig.one, 1);
    struct waiter w = {0};

    cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_not(cache_found(rig.cache, ref));
    fake_next(&rig.tier, 0);
    cr_assert(w.calls == 1 && w.status == 0);
    cr_expect(marks_right(ref, 0), "the waiter still gets its bytes");
    drop(ref);
    cr_expect_eq(index_blocks(rig.index), 1u);
    cache_put(rig.cache, ref, 0);
    expect_nothing_held();
}

/* ---- writes ---- */

Test(cache, evicted_while_it_is_written)
{
    static const int ends[] = {0, -ENOSPC};

    for (int i = 0; i < 2; i++) {
        block_ref ref = store(rig.one, 1);

        drop(ref);
        iterate();
        cr_assert_eq(rig.tier.n_pending, 1u);
        cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
        cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
        cr_expect_not(cache_found(rig.cache, ref));
        cr_expect_neq(arena_bytes_used(rig.arena), 0u, "the write still reads the slot");
        fake_next(&rig.tier, ends[i]);
        expect_nothing_held();
    }
}

Test(cache, a_write_that_fails_leaves_the_block_in_dram)
{
    block_ref ref = store(rig.two, 1);

    iterate();
    cr_assert_eq(rig.tier.n_pending, 2u);
    fake_next(&rig.tier, 0);
    fake_next(&rig.tier, -EIO);
    drop(ref);
    cr_expect(cache_found(rig.cache, ref));
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_LATER, "half is not below");
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_DONE);
    expect_nothing_held();
}

Test(cache, a_full_queue_of_the_tier_delays_writes_and_loses_none)
{
    block_ref a = store(rig.two, 1), b = store(rig.two, 2);

    rig.tier.refuse = -EAGAIN;
    iterate();
    cr_assert_eq(rig.tier.n_pending, 4u);
    tier_finish();
    drop(a);
    drop(b);
    a = store(rig.two, 3);
    b = store(rig.two, 4);
    rig.tier.refuse_n = 0;
    iterate(); /* 3 and 4 under way */
    block_ref c = store(rig.two, 5);

    rig.tier.refuse_n = 1;
    iterate();
    cr_assert_eq(rig.tier.n_pending, 4u, "the fifth was refused");
    fake_next(&rig.tier, 0);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 5u, "and tried again when another had ended");
    tier_finish();
    iterate();
    cr_expect_eq(rig.tier.n_live, 10u);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 0u);
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    drop(a);
    drop(b);
    drop(c);
}

/* The write queue has numbers of blocks that are gone, and numbers that other blocks have now. */
Test(cache, stale_numbers_in_the_write_queue)
{
    struct pending_write *f;
    block_ref a = store(rig.one, 1), b, c;

    drop(a);
    cr_assert_eq(cache_evict(rig.cache, a, CACHE_ALL), CACHE_EVICT_DONE);
    b = store(rig.one, 2);
    cr_expect_eq(a, b, "the number is used again");
    iterate();
    cr_expect_eq(rig.tier.n_pending, 1u, "written once, though queued under both");
    fake_next(&rig.tier, 0);
    drop(b);
    c = store(rig.one, 3);
    drop(c);
    cr_assert_eq(cache_evict(rig.cache, c, CACHE_ALL), CACHE_EVICT_DONE);
    c = open_block(rig.one, 4);
    cr_assert_eq(claim(c, 0, 0, 1, &f), 0);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 0u, "an unfinished block is not written");
    pending_write_done(rig.cache, f, 1, false);
    drop(c);
}

/* A purge may take as long as the shared tier does. */
Test(cache, a_namespace_that_is_purged_holds_up_no_other)
{
    struct cache_purge purge = {.only_shared = true};
    block_ref a = store(rig.one, 1), b;

    cr_assert_eq(cache_purge_begin(rig.cache, &purge, rig.one), 0);
    b = store(rig.two, 2);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 2u, "both parts of the other one");
    cr_expect(block_of(a)->flags & BLOCK_QUEUED);
    tier_finish();
    iterate();
    cr_expect_eq(rig.tier.n_pending, 0u);
    cr_expect_not(cache_written(rig.cache));
    cache_purge_end(rig.cache, &purge);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 1u);
    fake_next(&rig.tier, 0);
    cr_expect(cache_written(rig.cache));
    drop(a);
    drop(b);
}

/* Writes that were held back go first: a sequence lies in the log in the order of its dump. */
Test(cache, what_waited_for_its_namespace_keeps_its_place)
{
    struct cache_purge purge = {.only_shared = true};
    block_ref refs[6];

    cr_assert_eq(cache_purge_begin(rig.cache, &purge, rig.one), 0);
    for (unsigned i = 0; i < 3; i++)
        refs[i] = store(rig.one, i + 1);
    iterate();
    for (unsigned i = 3; i < 6; i++)
        refs[i] = store(rig.one, i + 1);
    cache_purge_end(rig.cache, &purge);
    for (unsigned i = 0; i < 6; i++) {
        while (rig.tier.n_pending == 0)
            iterate();
        cr_expect_eq(fake_at(&rig.tier, 0)->name.owner >> 16, refs[i]);
        fake_next(&rig.tier, 0);
    }
    drop_all(refs, 6);
}

/* A request may name a key often, and there are many requests. */
Test(cache, references_to_a_part_are_bounded)
{
    block_ref ref = store(rig.one, 1);
    struct waiter w;
    unsigned n = 0;

    while (get(&w, ref, 0) == CACHE_READY)
        cr_assert_lt(++n, 1u << 17);
    cr_expect_eq(get(&w, ref, 0), -EAGAIN);
    cr_expect_eq(block_of(ref)->part[0].users, n);
    cache_put(rig.cache, ref, 0);
    cr_expect_eq(get(&w, ref, 0), CACHE_READY);
    while (n-- > 0)
        cache_put(rig.cache, ref, 0);
    drop(ref);
}

/* Otherwise two waiters that try in vain would wake each other for ever. */
Test(cache, what_did_not_come_about_wakes_nobody)
{
    block_ref kept = store(rig.one, 1), ref;
    struct asker a;

    use(kept, 0); /* it may end, so others may wait */
    iterate();
    ask_for(&a, WAIT_OTHER);
    ref = open_block(rig.one, 2);
    cache_lease_undo(rig.cache, ref);
    cr_expect_eq(find(rig.one, 2), 0u, "it was opened for this");
    cr_expect_not(cache_unlease_many(rig.cache, (block_ref[2]){0}, 2), "it found none of its keys");
    cache_lease(rig.cache, kept);
    cache_lease_undo(rig.cache, kept);
    iterations(5);
    cr_expect_eq(a.calls, 0);
    cache_put(rig.cache, kept, 0);
    iterate();
    cr_expect_eq(a.calls, 1);
    drop(kept);
}

/* ---- the tier takes a place back ---- */

Test(cache, the_tier_may_not_drop_what_is_leased_pinned_or_read)
{
    block_ref ref = store_below(rig.one, 1);
    uint64_t loc = part_loc(&block_of(ref)->part[0]);
    struct waiter w = {0};

    cr_expect_not(fake_reclaim(&rig.tier, loc), "leased");
    cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
    drop(ref);
    cr_expect_not(fake_reclaim(&rig.tier, loc), "read");
    fake_next(&rig.tier, 0);
    cache_put(rig.cache, ref, 0);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_assert(cache_pin(rig.cache, ref, true));
    cr_expect_not(fake_reclaim(&rig.tier, loc), "pinned");
    cr_assert(cache_pin(rig.cache, ref, false));
    cr_expect(fake_reclaim(&rig.tier, loc));
    expect_nothing_held();
}

/* ---- pending writes ---- */

Test(cache, a_part_is_whole_when_every_layer_was_copied_in_any_order)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *a, *b;

    cr_assert_eq(claim(ref, 0, 1, 1, &a), 0);
    cr_assert_eq(claim(ref, 0, 1, 1, &b), -EINPROGRESS, "claimed before");
    cr_assert_eq(claim(ref, 0, 0, 1, &b), 0);
    marks_write(ref, 0, memory_to_fill(a), 0, 2);
    pending_write_done(rig.cache, a, 1, true);
    cr_expect_not(cache_found(rig.cache, ref));
    pending_write_done(rig.cache, b, 1, true);
    cr_expect(cache_found(rig.cache, ref));
    cr_expect_eq(dump(ref, 0, 0, 2), -EEXIST);
    drop(ref);
}

Test(cache, all_layers_may_be_brought_again_while_none_is_being_copied)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *a, *b;

    cr_assert_eq(claim(ref, 0, 1, 1, &a), 0);
    cr_assert_eq(claim(ref, 0, 0, 2, &b), -EINPROGRESS, "it is being copied");
    pending_write_done(rig.cache, a, 1, true);
    cr_assert_eq(
        pending_write_claim(rig.cache, &rig.pending_writes[1], ref, 0, 0, 2, NUMA_NONE, &b),
        -EINPROGRESS, "another's");
    cr_assert_eq(claim(ref, 0, 0, 2, &b), 0);
    cr_assert_eq(claim(ref, 0, 1, 1, &a), -EINPROGRESS, "claimed again");
    marks_write(ref, 0, memory_to_fill(b), 0, 2);
    pending_write_done(rig.cache, b, 2, true);
    cr_expect(cache_found(rig.cache, ref));
    drop(ref);
}

Test(cache, a_copy_that_fails_takes_the_whole_fill_with_it)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *a, *b, *c;

    cr_assert_eq(claim(ref, 0, 0, 1, &a), 0);
    cr_assert_eq(claim(ref, 0, 1, 1, &b), 0);
    pending_write_done(rig.cache, a, 1, false);
    cr_assert_eq(claim(ref, 0, 0, 1, &c), -EINPROGRESS, "broken");
    pending_write_done(rig.cache, b, 1, true);
    cr_expect_not(cache_found(rig.cache, ref));
    cr_expect_eq(rig.metrics.dump_blocks_dropped, 1u);
    cr_expect_eq(dump(ref, 0, 0, 2), 0, "it may be tried again");
    cr_expect(cache_found(rig.cache, ref));
    drop(ref);
}

Test(cache, fills_belong_to_one_owner_and_vanish_with_it)
{
    block_ref ref = open_block(rig.one, 1);
    struct pending_write *f;

    cr_assert_eq(dump(ref, 0, 0, 1), 0);
    cr_expect_eq(
        pending_write_claim(rig.cache, &rig.pending_writes[1], ref, 0, 1, 1, NUMA_NONE, &f),
        -EINPROGRESS);
    drop(ref);
    cr_expect_eq(index_blocks(rig.index), 1u);
    pending_writes_end(rig.cache, &rig.pending_writes[0]);
    expect_nothing_held();
}

Test(cache, the_pending_write_without_progress_for_longest_makes_room)
{
    block_ref ref[8], more = open_block(rig.one, 100);
    struct pending_write *f;

    for (uint64_t i = 0; i < 8; i++) {
        ref[i] = open_block(rig.one, i);
        cr_assert_eq(dump(ref[i], 0, 0, 1), 0);
    }
    cr_assert_eq(claim(ref[0], 0, 1, 1, &f), 0, "the oldest is being copied");
    cr_assert_eq(pending_write_claim(rig.cache, &rig.pending_writes[1], more, 0, 0, 2, NUMA_NONE,
                                     &(struct pending_write *){NULL}),
                 0);
    cr_expect_eq(block_of(ref[1])->part[0].dram, PART_DRAM_NONE, "so the next oldest goes");
    cr_expect_eq(rig.metrics.dump_blocks_dropped, 1u);
    pending_write_done(rig.cache, f, 1, true);
    cr_expect(cache_found(rig.cache, ref[0]));
    cr_expect_eq(dump(ref[1], 0, 1, 1), 0, "it begins again, one more of the idle ones goes");
    cr_expect_not(cache_found(rig.cache, ref[1]), "and lacks its first layer");
    cr_expect_eq(dump(ref[1], 0, 0, 1), 0);
    cr_expect(cache_found(rig.cache, ref[1]));
    drop_all(ref, 8);
    f = table_get(&rig.cache->pending_writes, part_pending_write(&block_of(more)->part[0]));
    pending_write_done(rig.cache, f, 2, false);
    drop(more);
    pending_writes_end(rig.cache, &rig.pending_writes[0]);
}

/* ---- evicted by name ---- */

Test(cache, an_unfinished_part_goes_with_its_evicted_block)
{
    block_ref ref = open_block(rig.two, 1);

    cr_assert_eq(dump(ref, 0, 0, 2), 0);
    cr_assert_eq(dump(ref, 1, 0, 1), 0);
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_DONE);
    expect_nothing_held();
    ref = store(rig.two, 1);
    cr_expect(cache_found(rig.cache, ref), "and may be stored again");
    drop(ref);
}

Test(cache, a_part_that_is_being_copied_goes_when_the_copy_has_ended)
{
    block_ref ref = open_block(rig.two, 1);
    struct pending_write *f;

    cr_assert_eq(dump(ref, 0, 0, 2), 0);
    cr_assert_eq(claim(ref, 1, 0, 1, &f), 0);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    pending_write_done(rig.cache, f, 1, true);
    drop(ref);
    expect_nothing_held();
}

Test(cache, evicting_from_a_tier_that_holds_nothing_of_it)
{
    block_ref ref = store_below(rig.one, 1);

    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_NONE);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_NVME), CACHE_EVICT_DONE);
    cr_expect_eq(find(rig.one, 1), 0u);
    cache_stop_writing(rig.cache);
    ref = store(rig.one, 2);
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_NVME), CACHE_EVICT_NONE);
    cr_expect(cache_found(rig.cache, ref));
}

Test(cache, pinned_blocks_stay)
{
    block_ref ref = store(rig.one, 1);

    cr_assert(cache_pin(rig.cache, ref, true));
    cr_expect_not(cache_pin(rig.cache, ref, true));
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_LATER);
    store_all(rig.one, 10, 20);
    cr_expect(cache_found(rig.cache, ref));
    cr_expect(cache_in_dram(rig.cache, ref));
}

/* ---- holds ---- */

Test(cache, holds_are_taken_of_what_is_in_dram)
{
    block_ref refs[6] = {store(rig.one, 1),       0,
                         store_below(rig.one, 2), store(rig.one, 3),
                         store(rig.one, 4),       store(rig.one, 5)};
    const void *at[6];
    uint32_t users = rig.cache->users;

    block_of(refs[3])->part[0].users = PART_USERS_MAX;
    cr_expect_eq(cache_evict(rig.cache, refs[4], CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_eq(cache_ref_ready(rig.cache, refs, 6, 0, 6, at), 2u, "1 and 5");
    cr_expect(at[0] && !at[1] && !at[2] && !at[3] && !at[4] && at[5]);
    cr_expect_eq(rig.cache->users, users, "nobody waits for their end");
    cr_expect_eq(at[0], memory_of(refs[0], 0));
    cr_expect_eq(cache_ref_ready(rig.cache, refs, 6, 0, 1, at), 1u, "no more than that");
    block_of(refs[3])->part[0].users = 0;
    cache_unref_lasting(rig.cache, refs[0], 0);
    cache_unref_lasting(rig.cache, refs[0], 0);
    cache_unref_lasting(rig.cache, refs[5], 0);
    cr_expect_eq(rig.cache->users, users);
    for (unsigned i = 0; i < 6; i++)
        if (refs[i])
            drop(refs[i]);
}

Test(cache, what_is_found_is_leased)
{
    block_ref refs[5] = {store(rig.one, 1), store_below(rig.one, 2), store(rig.one, 3),
                         open_block(rig.one, 4), store(rig.one, 5)};
    block_ref found[6] = {refs[0], refs[1], refs[2], refs[3], 0, refs[4]};
    uint8_t tiers[6];

    cache_tiers(rig.cache, found, 6, true, tiers);
    cr_expect(tiers[0] == CACHE_DRAM && tiers[1] == CACHE_NVME && tiers[2] == CACHE_DRAM);
    cr_expect(tiers[3] == 0 && tiers[5] == 0, "4 is empty, and 5 is after a gap");
    cr_expect_eq(cache_lease_many(rig.cache, found, 6, true), 4u, "4 is empty");
    cr_expect(found[2] == refs[2] && found[3] == 0 && found[4] == 0 && found[5] == refs[4]);
    cr_expect(block_of(refs[0])->leases == 2 && block_of(refs[3])->leases == 1);
    cr_expect_eq(cache_evict(rig.cache, refs[2], CACHE_ALL), CACHE_EVICT_LATER);
    cr_expect_eq(cache_lease_many(rig.cache, found, 6, true), 3u, "3 is marked for deletion");
    for (unsigned i = 0; i < 5; i++)
        for (uint32_t leases = block_of(refs[i])->leases; leases > 0; leases--)
            drop(refs[i]);
}
