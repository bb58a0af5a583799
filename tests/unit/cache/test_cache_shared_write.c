/* Write-back to the shared tier: what is written, in which order, and what waits meanwhile. */
#include "tests/unit/cache/cache_shared_rig.h"

#include "daemon/config/config.h"

TestSuite(cache_shared_write, .init = open_shared, .fini = close_shared);

Test(cache_shared_write, the_last_part_is_written_when_the_others_are_there)
{
    block_ref ref = store(rig.two, 1);

    iterate();
    cr_assert_eq(shared.n_pending, 1u);
    cr_expect_eq(fake_shared_at(&shared, 0)->id.part, 0u);
    iterate();
    cr_expect_eq(shared.n_pending, 1u);
    fake_shared_next(&shared, 0);
    iterate();
    cr_assert_eq(shared.n_pending, 1u);
    cr_expect_eq(fake_shared_at(&shared, 0)->id.part, 1u);
    fake_shared_next(&shared, 0);
    iterate();
    cr_expect(has_file(rig.two, 1, 0, 1) && has_file(rig.two, 1, 1, 1));
    cr_expect_eq(shared.n_pending, 0u);
    cr_expect_eq(rig.metrics.shared_write_dropped, 0u);
    drop(ref);
}

Test(cache_shared_write, what_fails_leaves_no_last_part)
{
    block_ref ref = store(rig.two, 1);

    iterate();
    fake_shared_next(&shared, -EIO);
    iterate();
    cr_expect_eq(shared.n_pending, 0u);
    cr_expect_not(has_file(rig.two, 1, 1, 0));
    cr_expect_gt(rig.metrics.shared_write_dropped, 0u);
    cr_expect(cache_found(rig.cache, ref), "here it is as before");
    drop(ref);
}

Test(cache_shared_write, leaving_dram_loses_nothing_that_was_written)
{
    block_ref ref = store_dram(rig.one, 1);

    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_LATER, "the only copy");
    fake_shared_next(&shared, 0);
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_expect_eq(cache_tier(rig.cache, ref), CACHE_SHARED);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 0u);
}

Test(cache_shared_write, what_is_only_unverified_is_no_copy)
{
    block_ref ref = store_dram(rig.one, 1);

    fake_shared_next(&shared, -EIO);
    note(rig.one, 1, 1, false);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_LATER);
    store_all(rig.one, 10, 20); /* leased: a search does not take it */
    cr_expect(cache_in_dram(rig.cache, ref));
    drop(ref);
}

Test(cache_shared_write, making_room_takes_leased_blocks_that_are_known_to_be_there)
{
    block_ref ref = store_dram(rig.one, 1);

    fake_shared_next(&shared, 0);
    iterate();
    store_all(rig.one, 10, 20);
    cr_expect_not(cache_in_dram(rig.cache, ref));
    cr_assert(cache_found(rig.cache, ref));
    tier_finish();
    shared_finish();
    expect_shared_read(ref);
}

Test(cache_shared_write, what_was_evicted_before_its_turn_is_not_written)
{
    shared_refuses(-EAGAIN, 1000);
    store_all(rig.one, 0, 30);
    iterate();
    shared.refuse_n = 0;
    fake_shared_ready(&shared);
    for (int i = 0; i < 40; i++) {
        iterate();
        tier_finish();
        shared_finish();
    }
    cr_expect(cache_written(rig.cache));
    cr_expect_eq(shared.files, 8u, "as many as DRAM held, not %u", shared.files);
    cr_expect_eq(rig.metrics.shared_write_dropped, 22u);
}

Test(cache_shared_write, writes_wait_while_the_shared_tier_takes_none)
{
    block_ref ref = store(rig.one, 1);

    shared_refuses(-EAGAIN, 1);
    iterate();
    cr_expect_eq(shared.n_pending, 0u);
    iterations(5);
    cr_expect_eq(shared.submits, 1u, "it is not asked again before it says so");
    fake_shared_ready(&shared);
    iterate();
    cr_expect_eq(shared.n_pending, 1u);
    drop(ref);
}

Test(cache_shared_write, blocks_of_peers_are_not_written)
{
    block_ref ref = store(rig.one, 1);

    note(rig.one, 1, 2, true);
    iterations(3);
    cr_expect_eq(shared.submits, 0u);
    drop(ref);
}

Test(cache_shared_write, a_durable_dump_is_taken_though_a_shared_tier_has_it)
{
    struct pending_write *f;
    block_ref ref = shared_block(rig.one, 1);

    cr_expect_eq(claim(ref, 0, 0, LAYERS, &f), -EEXIST, "one that is not durable is not");
    cache_shared_presume(rig.cache, ref, 0);
    cr_assert_eq(claim(ref, 0, 0, LAYERS, &f), 0);
    cr_expect_not(cache_found(rig.cache, ref));
    pending_write_done(rig.cache, f, LAYERS, true);
    cr_expect(cache_in_dram(rig.cache, ref));
    cache_shared_presume(rig.cache, ref, 0);
    cr_expect_eq(claim(ref, 0, 0, LAYERS, &f), -EEXIST);
    drop(ref);
}

Test(cache_shared_write, a_dump_of_what_is_only_unverified_is_taken_and_written)
{
    block_ref ref = note(rig.one, 1, 1, false);

    cache_lease(rig.cache, ref);
    cr_assert_eq(dump(ref, 0, 0, LAYERS), 0);
    cr_expect(cache_in_dram(rig.cache, ref));
    iterate();
    cr_assert_eq(shared.n_pending, 1u);
    fake_shared_next(&shared, 0);
    cr_expect(has_file(rig.one, 1, 0, 1));
    drop(ref);
}

Test(cache_shared_write, only_what_is_used_again_is_written_when_that_is_wished)
{
    block_ref ref;

    rig.cache->config.shared_reused = true;
    ref = store(rig.one, 1);
    iterate();
    cr_expect_eq(shared.submits, 0u);
    cr_expect_eq(rig.metrics.shared_write_refused, 1u);
    cache_touch(rig.cache, rig.one, &ref, 1);
    iterate();
    cr_expect_eq(shared.submits, 1u);
    drop(ref);
}

/* The last part is written after the others. The stop comes while the others' writes are under way.
 */
Test(cache_shared_write, the_last_part_is_not_written_after_a_stop_and_counted)
{
    block_ref ref = store_dram(rig.two, 1);

    cr_assert_eq(shared.n_pending, 1u, "the first part");
    cache_stop_writing(rig.cache);
    cr_expect_eq(rig.metrics.shared_write_dropped, 0u);
    fake_shared_next(&shared, 0);
    iterate();
    cr_expect_eq(shared.submits, 1u);
    cr_expect(cache_written(rig.cache), "nothing waits for a write that nobody begins");
    cr_expect_eq(rig.metrics.shared_write_dropped, 1u);
    drop(ref);
}

/* ---- secrets of encrypted namespaces ---- */

/* The blocks of all tenants are encrypted, and the secret of that namespace is being read. */
static void await_secret(const struct ns *ns)
{
    static char *tenants[] = {"* file:/nonexistent/keys"};
    static const struct config config = {.encryption_tenants = {tenants, 1},
                                         .encryption_timeout_ms = 1000};
    struct encryption *encryption;

    cr_assert_eq(encryption_open(&rig.loop, &config, &rig.metrics, &encryption), 0);
    rig.cache->config.encryption = encryption;
    shared.without_secret = ns->fingerprint;
}

static void encryption_end(void)
{
    encryption_close((struct encryption *)rig.cache->config.encryption);
    rig.cache->config.encryption = NULL;
}

static uint64_t number_at(unsigned i)
{
    uint64_t number;

    memcpy(&number, fake_shared_at(&shared, i)->id.key, sizeof(number));
    return number;
}

Test(cache_shared_write, blocks_without_a_secret_hold_up_no_others)
{
    struct ns *third = space_of("u", "three", 1, MIB / 4 / LAYERS);
    block_ref refs[4];

    await_secret(rig.one);
    for (uint64_t i = 0; i < 2; i++)
        refs[i] = store(rig.one, 10 + i);
    refs[2] = store(third, 20);
    refs[3] = store(rig.two, 30);
    iterations(4);
    cr_assert_eq(shared.n_pending, 2u, "another tenant's, and one of another namespace");
    cr_expect_eq(number_at(0) + number_at(1), 50u);
    cr_expect_eq(shared.submits, 2u);
    shared_finish();
    iterate();
    fake_shared_next(&shared, 0); /* the last part of 30 */
    fake_shared_has_secret(&shared, rig.one->fingerprint);
    iterations(4);
    cr_expect_eq(shared.n_pending, 0u, "the secret that has come is another one's");
    cr_expect_not(cache_written(rig.cache));
    fake_shared_has_secret(&shared, rig.two->fingerprint);
    iterations(4);
    cr_assert_eq(shared.n_pending, 2u);
    cr_expect_eq(number_at(0), 10u, "in their order");
    cr_expect_eq(number_at(1), 11u);
    shared_finish();
    cr_expect_eq(rig.metrics.shared_write_dropped, 0u);
    drop_all(refs, 4);
    encryption_end();
}

Test(cache_shared_write, blocks_without_a_secret_are_counted_at_a_stop)
{
    block_ref ref;

    await_secret(rig.one);
    ref = store_dram(rig.one, 1);
    cr_expect_eq(rig.metrics.shared_write_dropped, 0u);
    cache_stop_writing(rig.cache);
    cr_expect_eq(rig.metrics.shared_write_dropped, 1u);
    iterate();
    cr_expect_eq(shared.submits, 0u);
    cr_expect(cache_written(rig.cache));
    drop(ref);
    encryption_end();
}
