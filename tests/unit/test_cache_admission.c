/* Which blocks are written behind when only those that are used again shall be. */
#include "tests/unit/cache_rig.h"

static void open_reused(void)
{
    rig_open();
    cache_free(rig.cache);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    struct cache_config cc = {.loop = &rig.loop,
                              .metrics = &rig.metrics,
                              .index = rig.index,
                              .policy = rig.policy,
                              .write_reused = true,
                              .backlog_bytes = MIB};
    cr_assert_eq(cache_new(&cc, &rig.cache), 0);
    rig.tier.callbacks = cache_tier_callbacks(rig.cache);
    cache_tier_attach(rig.cache, &fake_ops, &rig.tier);
    cache_arena_attach(rig.cache, rig.arena);
}

TestSuite(admission, .init = open_reused, .fini = rig_close);

static unsigned submitted(void)
{
    turn();
    return rig.tier.n_pending;
}

Test(admission, a_block_is_written_at_its_second_use)
{
    block_ref ref = store(rig.two, 1);

    cr_expect_eq(submitted(), 0u);
    cr_expect_eq(rig.metrics.nvme_write_refused, 2u);
    cache_touch(rig.cache, &ref, 1);
    cr_expect_eq(submitted(), 2u, "both parts");
    cache_touch(rig.cache, &ref, 1);
    cr_expect_eq(submitted(), 2u, "and once");
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    cache_touch(rig.cache, &ref, 1);
    cr_expect_eq(submitted(), 0u, "it is there");
    drop(ref);
}

Test(admission, a_block_that_comes_back_is_written)
{
    uint64_t gone = 0;

    for (uint64_t i = 0; i < 9; i++) /* one more than DRAM holds */
        drop(store(rig.one, i));
    cr_expect_eq(submitted(), 0u);
    while (find(rig.one, gone) != 0)
        gone++;
    cr_assert_lt(gone, 9u);
    drop(store(rig.one, gone));
    cr_expect_eq(submitted(), 1u);
}

static void durable_cb(struct cache_durable *d, int status)
{
    (void)d;
    cr_expect_eq(status, 0);
}

Test(admission, durable_blocks_are_always_written)
{
    struct cache_durable d = {.done_cb = durable_cb};
    block_ref ref = store(rig.one, 1);

    cr_assert_eq(cache_durable(rig.cache, &d, ref, 0), 0);
    cr_expect_eq(submitted(), 1u);
    fake_next(&rig.tier, 0);
    fake_next(&rig.tier, 0); /* the sync */
    drop(ref);
    cr_expect_eq(rig.tier.n_live, 1u);
}

Test(admission, what_is_incomplete_or_goes_is_not_written)
{
    block_ref half = open_block(rig.two, 1), doomed = store(rig.one, 2);

    cr_assert_eq(dump(half, 0, 0, SHARDS), 0);
    cr_assert_eq(cache_evict(rig.cache, doomed, CACHE_ALL), CACHE_EVICT_LATER);
    cache_touch(rig.cache, &half, 1);
    cache_touch(rig.cache, &doomed, 1);
    cr_expect_eq(submitted(), 0u);
    drop(half);
    drop(doomed);
}
