/* Builds of summaries of a tenant at its maximum of DRAM. They wait for the tenant's own blocks
 * only, and nothing waits for them. They fail if nothing under way could make room. */
#include "tests/unit/request/summary_rig.h"

#define SLOT (MIB / 4)

static void give_most(uint64_t bytes)
{
    rig.one->tenant->settings.dram_max = bytes;
    cache_tenants_changed(rig.cache);
}

static block_ref held[2];

/* Blocks 1 and 2, which are in use, fill the tenant's maximum. */
static void open_at_most(void)
{
    open_all();
    for (unsigned i = 0; i < 2; i++) {
        held[i] = store(rig.one, 1 + i);
        use(held[i], 0);
    }
    written();
    give_most(2 * SLOT);
    turns_pass();
}

TestSuite(summary_shares, .init = open_all, .fini = close_all);
TestSuite(summary_quota, .init = open_at_most, .fini = close_all);

Test(summary_quota, a_build_waits_for_its_tenants_own_blocks)
{
    struct ns *theirs = space_of("other", "small", 1, 2048), *their_summaries;
    uint32_t first = build(1, 1), second = build(2, 1), other;
    struct msg_summary_build m = {.keys = chain(1, 1)};

    turns_pass();
    cr_expect_null(answer_of(first));
    cr_expect_null(answer_of(second));
    cr_expect_not(rig.cache->chores.on, "the event loop rests while they wait");
    their_summaries = open_summaries_of(theirs, false);
    drop(store(theirs, 1));
    m.ns = their_summaries->id;
    other = call(UCM_METHOD_SUMMARY_BUILD, &proto_summary_build, &m);
    work();
    cr_expect(statuses(other, 1, UCM_BLOCK_OK), "nobody waits after them");
    put_and_drop(held[1], 0);
    work();
    written();
    work();
    cr_expect(statuses(first, 1, UCM_BLOCK_OK));
    cr_expect_null(answer_of(second), "its own block went for the first one's summary");
    put_and_drop(held[0], 0);
    turns_pass();
    written();
    work();
    cr_expect(statuses(second, 1, UCM_BLOCK_OK));
    cr_expect_leq(rig.one->tenant->dram_bytes, 2 * SLOT);
}

Test(summary_quota, nobody_waits_when_nothing_is_under_way)
{
    for (unsigned i = 0; i < 2; i++) {
        cache_ref_lasting(rig.cache, held[i], 0); /* in place of the use */
        drop(held[i]);
    }
    cr_expect(statuses(build(1, 2), 2, UCM_BLOCK_NO_ROOM, UCM_BLOCK_NO_ROOM));
    cr_expect_eq(rig.one->tenant->dram_bytes, 2 * SLOT);
    for (unsigned i = 0; i < 2; i++)
        cache_unref_lasting(rig.cache, held[i], 0);
}

Test(summary_quota, what_is_stored_goes_without_its_summary)
{
    struct ns *theirs = space_of("other", "small", 1, 2048);
    uint64_t skipped = rig.metrics.summaries_skipped;

    give_most(3 * SLOT);
    open_summaries(true);
    open_summaries_of(theirs, true);
    drop(store(rig.one, 3));
    drop(store(theirs, 1));
    work();
    work();
    cr_expect_eq(rig.metrics.summaries_skipped, skipped + 1);
    cr_expect_eq(rig.metrics.summaries_built, 1u, "the other tenant's");
    cr_expect_leq(rig.one->tenant->dram_bytes, 3 * SLOT);
    put_and_drop(held[0], 0);
    put_and_drop(held[1], 0);
}

/* The summary can't be read, and the blocks to build it from find no room. The request is answered
 * at once, not at the deadline. */
Test(summary_shares, an_unreadable_summary_beyond_what_its_tenant_gets_is_missing)
{
    uint32_t name = open_sequence(), asked;

    store_both_below();
    asked = append(name, 1, 1, true);
    cr_assert_eq(rig.tier.n_pending, 1u, "the summary's read");
    give_most(SLOT / 2);
    fake_next(&rig.tier, -EBADMSG);
    turns_pass();
    cr_expect_eq(appended(asked).summaries, 0u);
    cr_expect_eq(rig.metrics.summaries_missing, 1u);
}
