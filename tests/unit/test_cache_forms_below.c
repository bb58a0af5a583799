/* Blocks in two forms below DRAM: which form makes a dump durable, and which goes to the shared tier. */
#include "tests/unit/form_rig.h"

TestSuite(cache_forms_durable, .init = open_local_forms, .fini = close_forms);
TestSuite(cache_forms_shared, .init = open_forms, .fini = close_forms);

/* ---- stable storage ---- */

struct promise {
    struct cache_durable d;
    int calls, status;
};

static void promise_cb(struct cache_durable *d, int status)
{
    struct promise *p = (struct promise *)d;

    p->calls++;
    p->status = status;
}

static int promise(struct promise *p, block_ref ref, uint32_t part)
{
    *p = (struct promise){.d = {.done_cb = promise_cb}};
    return cache_durable(rig.cache, &p->d, ref, part);
}

Test(cache_forms_durable, durable_is_what_goes_below)
{
    struct promise p[2];
    block_ref ref = open_block(rig.two, 1);

    cr_assert_eq(dump_form(ref, 0, true), 0);
    cr_assert_eq(promise(&p[0], ref, 0), 0);
    cr_expect_eq(coder.n, 1u, "one part of two: at once");
    cr_assert(build_next(0));
    turns();
    cr_expect_eq(rig.tier.n_pending, 1u);
    fake_next(&rig.tier, 0); /* the write */
    cr_expect_eq(p[0].calls, 0);
    fake_next(&rig.tier, 0); /* the sync */
    cr_expect(p[0].calls == 1 && p[0].status == 0);
    cr_expect_str_eq(at(rig.two, 1), "d");
    cr_expect_str_eq(at(coder.two, 1), "dn");
    cr_assert_eq(dump_form(ref, 1, true), 0);
    cr_assert_eq(promise(&p[1], ref, 1), 0);
    quiet();
    cr_expect(p[1].calls == 1 && p[1].status == 0);
    drop(ref);
    quiet();
    cr_expect_str_eq(at(coder.two, 1), "n");
    cr_expect_eq(coder.begun, 2u);
    cr_assert_eq(cache_evict(rig.cache, find(coder.two, 1), CACHE_ALL), CACHE_EVICT_DONE);
    quiet();
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_DONE);
    expect_nothing_held();
}

Test(cache_forms_durable, durable_is_the_plain_form_if_that_goes_below)
{
    struct promise p;
    block_ref ref;

    ref = store_form(rig.one, 1, false);
    cr_assert_eq(promise(&p, ref, 0), 0);
    quiet();
    cr_expect(p.calls == 1 && p.status == 0);
    EXPECT_AT(1, "n", "d");
}

Test(cache_forms_durable, durable_is_the_plain_form_if_the_other_can_not_be_had)
{
    struct promise p;
    block_ref ref = store_form(rig.one, 1, true);

    cr_assert_eq(promise(&p, ref, 0), 0);
    cr_assert(build_next(-ERANGE));
    quiet();
    cr_expect(p.calls == 1 && p.status == 0);
    EXPECT_AT(1, "dn", "");
    evict_all(1);
    expect_nothing_held();
}

Test(cache_forms_durable, durable_once_it_is_a_pair)
{
    struct promise p;
    block_ref ref = store_form(rig.one, 1, true);

    quiet();
    cr_assert_eq(promise(&p, ref, 0), 0);
    cr_expect_eq(rig.tier.n_pending, 1u, "the sync of the coded one");
    quiet();
    cr_expect(p.calls == 1 && p.status == 0);
    cr_expect_eq(coder.begun, 1u);
    EXPECT_AT(1, "d", "n");
}

/* ---- the shared tier ---- */

Test(cache_forms_shared, both_targets_get_the_coded_form)
{
    store_form(rig.one, 1, true);
    quiet();
    EXPECT_AT(1, "d", "ns");
    cr_expect(has_file(coder.one, 1, 0, 1));
    cr_expect_not(has_file(rig.one, 1, 0, 1));
    store_form(rig.one, 2, false);
    quiet();
    EXPECT_AT(2, "ns", "d");
}

Test(cache_forms_shared, what_is_on_the_shared_tier_only_stays_bounded)
{
    rig.cache->tier = NULL;
    rig.cache->config.shared_blocks = 1;
    for (uint64_t i = 0; i < 3; i++) {
        store_form(rig.one, i, true);
        quiet();
        EXPECT_AT(i, "d", "s");
    }
    EXPECT_AT(0, "d", "");
    cr_expect_eq(rig.cache->shared.n, 1u);
    cr_expect_eq(coder.begun, 3u);
    rig.cache->tier = &rig.tier;
}

/* Nothing is held back for a block that may not be there. */
Test(cache_forms_shared, a_form_that_is_only_presumed_is_built)
{
    (void)note(coder.one, 1, 0, false);
    store_form(rig.one, 1, true);
    quiet();
    EXPECT_AT(1, "d", "ns");
    cr_expect_eq(coder.begun, 1u);
}

Test(cache_forms_shared, a_write_that_fails_keeps_the_slot)
{
    store_form(rig.one, 1, true);
    turns();
    cr_assert(build_next(0));
    turns();
    fake_share_next(&share, 0);
    fake_next(&rig.tier, -EIO);
    quiet();
    EXPECT_AT(1, "d", "s");
}
