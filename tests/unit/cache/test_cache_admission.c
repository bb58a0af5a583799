/* Which blocks are written back when admission takes only those that are used again. */
#include "tests/unit/cache/cache_rig.h"

static void open_reused(void)
{
    rig_open();
    rig.cache->config.write_reused = true;
}

TestSuite(admission, .init = open_reused, .fini = rig_close);

static unsigned submitted(void)
{
    iterate();
    return rig.tier.n_pending;
}

Test(admission, a_block_is_written_at_its_second_use)
{
    block_ref ref = store(rig.two, 1);

    cr_expect_eq(submitted(), 0u);
    cr_expect_eq(rig.metrics.nvme_write_refused, 2u);
    cache_touch(rig.cache, rig.two, &ref, 1);
    cr_expect_eq(submitted(), 2u, "both parts");
    cache_touch(rig.cache, rig.two, &ref, 1);
    cr_expect_eq(submitted(), 2u, "and once");
    tier_finish();
    cache_touch(rig.cache, rig.two, &ref, 1);
    cr_expect_eq(submitted(), 0u, "it is there");
    drop(ref);
}

Test(admission, a_block_that_comes_back_is_written)
{
    uint64_t gone = 0;

    store_all(rig.one, 0, 9); /* one more than DRAM holds */
    cr_expect_eq(submitted(), 0u);
    while (find(rig.one, gone) != 0)
        gone++;
    cr_assert_lt(gone, 9u);
    drop(store(rig.one, gone));
    cr_expect_eq(submitted(), 1u);
}

Test(admission, durable_blocks_are_always_written)
{
    block_ref ref = store(rig.one, 1);
    struct promise p;

    promise(&p, ref);
    cr_expect_eq(submitted(), 1u);
    fake_next(&rig.tier, 0);
    fake_next(&rig.tier, 0); /* the sync */
    cr_expect_eq(p.status, 0);
    drop(ref);
    cr_expect_eq(rig.tier.n_live, 1u);
}

Test(admission, what_is_incomplete_or_goes_is_not_written)
{
    block_ref half = open_block(rig.two, 1), deleting = store(rig.one, 2);

    cr_assert_eq(dump(half, 0, 0, LAYERS), 0);
    cr_assert_eq(cache_evict(rig.cache, deleting, CACHE_ALL), CACHE_EVICT_LATER);
    cache_touch(rig.cache, rig.two, &half, 1);
    cache_touch(rig.cache, rig.one, &deleting, 1);
    cr_expect_eq(submitted(), 0u);
    drop(half);
    drop(deleting);
}

static void open_learned(void)
{
    open_reused();
    rig.cache->config.write_reused = false;
    rig.cache->config.write_learned = true;
}

TestSuite(learned_admission, .init = open_learned, .fini = rig_close);

/* Stores a block that is never used again. If it was written to NVMe, NVMe drops it. */
static bool written_in_vain(uint64_t number)
{
    block_ref ref = store(rig.one, number);
    unsigned n = submitted();

    if (n > 0) {
        fake_next(&rig.tier, 0);
        cr_assert(fake_reclaim(&rig.tier, part_loc(&block_of(ref)->part[0])));
    }
    drop(ref);
    return n > 0;
}

Test(learned_admission, blocks_that_nobody_reads_are_written_no_more)
{
    block_ref ref;
    uint32_t n = 0, writes = 0;

    rig.one->admission.hits = 200000; /* by other blocks of the namespace */
    for (; n < 2000; n++)
        writes += written_in_vain(n);
    cr_assert_lt(writes, 1500u);
    cr_expect_gt(rig.metrics.nvme_write_refused, 0u);
    ref = store(rig.one, n);
    if (submitted() == 0)
        cache_touch(rig.cache, rig.one, &ref, 1);
    cr_expect_eq(submitted(), 1u, "a second use causes the write");
    fake_next(&rig.tier, 0);
    drop(ref);
}

Test(learned_admission, another_namespace_learns_for_itself)
{
    rig.one->admission = (struct admission){.hits = 200000, .stored = 2000, .unused = 2000};
    cr_expect(!written_in_vain(1));
    drop(store(rig.two, 2));
    cr_expect_eq(submitted(), 2u);
}

/* A block of two parts, which several workers load: ranks, or a prefetch before the load. */
Test(learned_admission, a_use_of_a_block_is_one_hit)
{
    block_ref ref = store(rig.two, 1);

    cr_expect_eq(rig.two->admission.hits, 0u);
    cache_touch(rig.cache, rig.two, &ref, 1);
    for (uint32_t i = 0; i < 8; i++) {
        use(ref, i % 2);
        cache_put(rig.cache, ref, i % 2);
    }
    cr_expect_eq(rig.two->admission.hits, 1u);
    cr_expect_eq(rig.two->admission.stored, 1u);
    drop(ref);
}
