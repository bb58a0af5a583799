/* Builds of summaries whatever happens alongside them: reads that fail or hang, evictions, full memory,
 * connections that end, a daemon that stops. */
#include "tests/unit/request/summary_rig.h"

TestSuite(summaries, .init = open_all, .fini = close_all);

Test(summaries, a_build_outlives_its_connection)
{
    store_all(rig.one, 1, 2);
    drop(store_below(rig.one, 3));
    build(1, 3);
    cr_expect_eq(requests_active(door.requests), 4u, "the request and its builds");
    hang_up();
    cr_expect_eq(requests_active(door.requests), 3u);
    fake_next(&rig.tier, 0);
    work();
    cr_expect_eq(rig.metrics.summaries_built, 3u);
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect_neq(find(derived, 3), 0u);
}

Test(summaries, a_base_that_can_not_be_read_has_none)
{
    uint32_t msgid;

    drop(store_below(rig.one, 1));
    msgid = build(1, 1);
    cr_expect_neq(find(derived, 1), 0u, "a pending write");
    fake_next(&rig.tier, -EIO);
    turns_pass();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_FAILED));
    cr_expect_eq(rig.metrics.summaries_failed, 1u);
    cr_expect_eq(find(derived, 1), 0u);
    cr_expect_eq(find(rig.one, 1), 0u);
}

Test(summaries, evicted_by_name_while_it_is_built)
{
    uint32_t msgid, chained;
    block_ref ref;

    store_all(rig.one, 1, 1);
    msgid = build(1, 1);
    chained = append(open_sequence(), 1, 1, true);
    ref = find(derived, 1);
    /* No part of the summary is whole yet, so there is nothing to evict. The part in use is the
     * base's. */
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_NONE);
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_ALL), CACHE_EVICT_LATER);
    work();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_OK));
    cr_expect_eq(appended(chained).summaries, 1u);
    cr_expect_eq(find(rig.one, 1) != 0, true, "the sequence leases it");
}

Test(summaries, a_deadline_ends_the_waiting_not_the_build)
{
    struct msg_summary_build m = {.ns = derived->id, .timeout_ms = 1};
    uint32_t msgid;

    store_all(rig.one, 1, 1);
    m.keys = chain(1, 1);
    msgid = call(UCM_METHOD_SUMMARY_BUILD, &proto_summary_build, &m);
    for (int i = 0; i < 5000 && !answer_of(msgid); i++) {
        uv_sleep(1);
        iterate();
    }
    cr_expect(statuses(msgid, 1, UCM_BLOCK_CANCELLED));
    work();
    cr_expect_eq(rig.metrics.summaries_built, 1u);
    cr_expect(statuses(build(1, 1), 1, UCM_BLOCK_EXISTS));
}

Test(summaries, a_build_waits_for_a_slot)
{
    block_ref held[8];
    uint32_t msgid;

    /* All slots are of the base's size and in use. */
    for (unsigned i = 0; i < 8; i++) {
        held[i] = store(rig.one, 1 + i);
        use(held[i], 0);
    }
    msgid = build(1, 1);
    turns_pass();
    cr_expect_null(answer_of(msgid));
    cr_expect(list_empty(&pool.jobs));
    for (unsigned i = 0; i < 8; i++)
        put_and_drop(held[i], 0);
    written();
    work();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_OK));
}

Test(summaries, what_is_stored_gets_one_while_somebody_wants_it)
{
    open_summaries(true);
    open_summaries(true);
    store_all(rig.one, 1, 2);
    work();
    cr_expect_eq(rig.metrics.summaries_built, 2u);
    drop(store(rig.one, 3));
    hang_up(); /* it waited for an iteration of the event loop */
    work();
    cr_expect_eq(rig.metrics.summaries_built, 2u);
    cr_expect_eq(rig.metrics.summaries_skipped, 1u);
    drop(store(rig.one, 4));
    turns_pass();
    cr_expect(list_empty(&pool.jobs));
    cr_expect(list_empty(&retrieval_of(door.requests)->derived.spaces), "nobody uses the space");
}

Test(summaries, a_draining_daemon_begins_none)
{
    open_summaries(true);
    store_all(rig.one, 1, 2);
    requests_drain(door.requests);
    drop(store(rig.one, 3));
    turns_pass();
    cr_expect(list_empty(&pool.jobs));
    cr_expect_eq(answer_code(build(1, 1)), UCM_WIRE_SHUTDOWN);
}

/* The daemon's end does not wait for builds: a build of many layers takes longer than the end may.
 */
Test(summaries, builds_end_with_the_daemon)
{
    uint32_t msgid;

    store_all(rig.one, 1, 2);
    drop(store_below(rig.one, 3));
    msgid = build(1, 3);
    cr_assert_eq(rig.tier.n_pending, 1u, "the third reads");
    requests_stop_all(door.requests);
    fake_next(&rig.tier, 0);
    work();
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect(statuses(msgid, 3, UCM_BLOCK_CANCELLED, UCM_BLOCK_CANCELLED, UCM_BLOCK_CANCELLED));
    cr_expect_eq(rig.metrics.summaries_built, 0u);
    cr_expect_not(cache_found(rig.cache, find(derived, 1)));
}

/* ---- tenants ---- */

/* Bases of two tenants with layers of 2,048 bytes, whose stored blocks get summaries. */
static struct ns *ours, *theirs, *our_summaries, *their_summaries;

static void open_two(void)
{
    open_all();
    ours = space_of("t", "small", 1, 2048);
    theirs = space_of("other", "small", 1, 2048);
    our_summaries = open_summaries_of(ours, true);
    their_summaries = open_summaries_of(theirs, true);
}

static uint32_t summaries_in_dram(struct ns *ns, uint32_t n)
{
    uint32_t ready = 0;

    for (uint64_t i = 1; i <= n; i++) {
        block_ref ref = find(ns, i);

        ready += ref != 0 && index_block(rig.index, ref)->part[0].dram == PART_DRAM_READY;
    }
    return ready;
}

TestSuite(summary_tenants, .init = open_two, .fini = close_all);

Test(summary_tenants, take_turns_with_what_they_stored)
{
    store_all(ours, 1, 20);
    store_all(theirs, 1, 2);
    turns_pass();
    for (int i = 0; i < 4; i++)
        cr_assert(pool_next());
    cr_expect_eq(summaries_in_dram(our_summaries, 20), 2u);
    cr_expect_eq(summaries_in_dram(their_summaries, 2), 2u);
    work();
    cr_expect_eq(rig.metrics.summaries_built, 22u);
}

Test(summary_tenants, one_has_three_quarters_of_the_builds)
{
    const uint32_t most = most_of_tenant(LIMIT_BUILDS);

    store_all(ours, 1, most + 8);
    turns_pass();
    cr_expect_eq(taken(LIMIT_BUILDS), most);
    drop(store(theirs, 1));
    turns_pass();
    cr_expect_eq(taken(LIMIT_BUILDS), most + 1);
    work();
    cr_expect_eq(rig.metrics.summaries_built, most + 9);
    cr_expect_eq(rig.metrics.summaries_skipped, 0u);
}

/* An append that builds waits for its tenant's places, and gets them. */
Test(summary_tenants, an_append_waits_for_its_tenants_builds)
{
    const uint32_t most = most_of_tenant(LIMIT_BUILDS);
    struct msg_sequence_open open = {.ns = our_summaries->id};
    struct msg_sequence r;
    uint32_t asked;

    store_all(ours, 1, most);
    turns_pass();
    retrieval_of(door.requests)->summaries.watchers = 0; /* what comes now is the append's */
    drop(store(ours, most + 1));
    retrieval_of(door.requests)->summaries.watchers = 2;
    result_of(call(UCM_METHOD_SEQUENCE_OPEN, &proto_sequence_open, &open), &proto_sequence, &r);
    asked = append((uint32_t)r.sequence, most + 1, 1, true);
    turns_pass();
    cr_expect_eq(taken(LIMIT_BUILDS), most);
    cr_expect(list_empty(&rig.cache->waits[WAIT_SLOT]), "it is in the way of waiters for space");
    work();
    cr_expect_eq(appended(asked).summaries, 1u);
}

Test(summary_tenants, one_has_three_quarters_of_the_places_to_wait_in)
{
    const uint32_t most = most_of_tenant(LIMIT_BUILDS_WAITING);

    for (uint32_t i = 0; i < most + 5; i++) {
        drop(store(ours, 1));
        cr_assert_eq(cache_evict(rig.cache, find(ours, 1), CACHE_ALL), CACHE_EVICT_DONE);
    }
    cr_expect_eq(rig.metrics.summaries_skipped, 5u);
    drop(store(theirs, 1));
    cr_expect_eq(rig.metrics.summaries_skipped, 5u);
    for (int i = 0; i < 4; i++)
        work();
    cr_expect_eq(summaries_in_dram(their_summaries, 1), 1u);
    cr_expect_eq(rig.metrics.summaries_skipped, most + 5);
    cr_expect(list_empty(&retrieval_of(door.requests)->summaries.turns));
}
