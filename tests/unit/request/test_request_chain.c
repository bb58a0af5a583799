/* Chains and selections whatever happens beside them: reads that fail, evictions by name, connections and
 * chains that end in any state. */
#include "tests/unit/request/summary_rig.h"

TestSuite(summary_chain, .init = open_all, .fini = close_all);

Test(summary_chain, closing_a_chain_ends_its_append)
{
    uint32_t name = open_chain(), msgid, closed;

    store_both_below();
    msgid = append(name, 1, 1, true);
    cr_expect_eq(answer_code(append(name, 1, 1, true)), UCM_WIRE_BUSY);
    closed = close_chain(name);
    cr_expect_eq(appended(msgid).blocks, 1u);
    cr_expect_eq(answer_code(closed), 0);
    cr_expect_eq(answer_code(close_chain(name)), UCM_WIRE_NOT_FOUND);
    cr_expect_eq(rig.tier.n_pending, 1u, "the read goes on");
}

Test(summary_chain, a_connection_ends_while_its_append_reads)
{
    store_both_below();
    append(open_chain(), 1, 1, true);
    hang_up();
    cr_expect(door.conn.freed);
}

Test(summary_chain, a_connection_ends_while_its_append_builds)
{
    store_base(3);
    append(open_chain(), 1, 3, true);
    hang_up();
    cr_expect(door.conn.freed);
    work();
    cr_expect_eq(rig.metrics.summary_builds, 3u);
}

Test(summary_chain, a_connection_ends_while_a_thread_selects)
{
    uint32_t name = chain_of(3);

    ask_best(name, 2);
    ask_best(name, 2);
    hang_up();
    cr_expect_not(door.conn.freed, "a thread reads what the chain holds");
    cr_expect_gt(taken(LIMIT_SUMMARIES), 0u);
    work();
    cr_expect(door.conn.freed);
}

Test(summary_chain, a_chain_is_closed_while_a_thread_selects)
{
    uint32_t name = chain_of(3), asked, closed;

    asked = ask_best(name, 3);
    closed = close_chain(name);
    cr_expect_null(answer_of(closed));
    work();
    cr_expect_eq(selected(asked).index.n, 12u);
    cr_expect_eq(answer_code(closed), 0);
}

Test(summary_chain, a_cancelled_selection_answers_when_its_thread_is_done)
{
    uint32_t name = chain_of(3), asked = ask_best(name, 3);
    struct msg_cancel_r r;

    result_of(call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){asked}), &proto_cancel_r,
              &r);
    cr_expect(r.cancelled);
    cr_expect_null(answer_of(asked));
    work();
    cr_expect_eq(answer_code(asked), UCM_WIRE_CANCELLED);
}

Test(summary_chain, an_append_grows_the_array_that_a_thread_reads)
{
    uint32_t name = chain_of(2), asked = ask_best(name, 2), more;
    const void *read = LIST_ENTRY(pool.jobs.next, struct selection, job.link)->rows[0].summaries;

    more = append_same(name, 600);
    cr_expect_eq(appended(more).blocks, 602u);
    work();
    cr_expect_eq(selected(asked).index.n, 8u, "of the two that were there");
    more = ask_best(name, 602);
    cr_expect_neq(LIST_ENTRY(pool.jobs.next, struct selection, job.link)->rows[0].summaries, read);
    work();
    cr_expect_eq(selected(more).index.n, 602u * 4);
}

Test(summary_chain, a_block_evicted_by_name_is_left_out)
{
    uint32_t name = chain_of(3), asked = ask_best(name, 3);
    struct msg_select_r r;
    uint32_t index[2];

    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 2), CACHE_ALL), CACHE_EVICT_LATER);
    work();
    r = selected(asked);
    cr_assert_eq(r.index.n, sizeof(index));
    memcpy(index, r.index.p, sizeof(index));
    cr_expect(index[0] == 0 && index[1] == 2);
    cr_expect_eq(r.gone, 1u);
    cr_expect_eq(appended(append(open_chain(), 1, 3, false)).missing, 2u);
}

/* One block, named often: what a chain has to let go of takes several iterations of the event loop. */
Test(summary_chain, a_long_chain_ends_in_turns)
{
    static uint8_t same[UCM_MAX_KEYS * 16];
    uint32_t name = chain_of(1), msgid = 0, closed;
    struct msg_chain_append m = {.chain = name, .keys = {same, sizeof(same)}};

    for (uint32_t i = 0; i < UCM_MAX_KEYS; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    msgid = call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
    cr_expect_null(answer_of(msgid), "the next iterations");
    turns_pass();
    cr_expect_eq(appended(msgid).blocks, 1u + UCM_MAX_KEYS);
    cr_expect_eq(appended(msgid).summaries, HELD_MAX - 1, "a quarter of the arena");
    closed = close_chain(name);
    cr_expect_null(answer_of(closed));
    turns_pass();
    cr_expect_eq(answer_code(closed), 0);
}

Test(summary_chain, a_long_chain_ends_with_its_connection)
{
    static uint8_t same[UCM_MAX_KEYS * 16];
    struct msg_chain_append m = {.chain = chain_of(1), .keys = {same, sizeof(same)}};

    for (uint32_t i = 0; i < UCM_MAX_KEYS; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
    turns_pass();
    for (int i = 0; i < 20; i++)
        open_chain();
    hang_up();
    cr_expect_not(door.conn.freed);
    turns_pass();
    cr_expect(door.conn.freed);
}
