/* Sequences and selections whatever happens alongside them: reads that fail, evictions by name, connections
 * and sequences that end in any state. */
#include "tests/unit/request/summary_rig.h"

TestSuite(summary_sequence, .init = open_all, .fini = close_all);

Test(summary_sequence, closing_a_sequence_ends_its_append)
{
    uint32_t name = open_sequence(), msgid, closed;

    store_both_below();
    msgid = append(name, 1, 1, true);
    cr_expect_eq(answer_code(append(name, 1, 1, true)), UCM_WIRE_BUSY);
    closed = close_sequence(name);
    cr_expect_eq(appended(msgid).blocks, 1u);
    cr_expect_eq(answer_code(closed), 0);
    cr_expect_eq(answer_code(close_sequence(name)), UCM_WIRE_NOT_FOUND);
    cr_expect_eq(rig.tier.n_pending, 1u, "the read goes on");
}

Test(summary_sequence, a_connection_ends_while_its_append_reads)
{
    store_both_below();
    append(open_sequence(), 1, 1, true);
    hang_up();
    cr_expect(door.conn.freed);
}

Test(summary_sequence, a_connection_ends_while_its_append_builds)
{
    store_all(rig.one, 1, 3);
    append(open_sequence(), 1, 3, true);
    hang_up();
    cr_expect(door.conn.freed);
    work();
    cr_expect_eq(rig.metrics.summaries_built, 3u);
}

Test(summary_sequence, a_connection_ends_while_a_thread_selects)
{
    uint32_t name = sequence_of(3);

    ask_best(name, 2);
    ask_best(name, 2);
    hang_up();
    cr_expect_not(door.conn.freed, "a thread reads what the sequence holds");
    cr_expect_gt(taken(LIMIT_SUMMARIES), 0u);
    work();
    cr_expect(door.conn.freed);
}

Test(summary_sequence, a_sequence_is_closed_while_a_thread_selects)
{
    uint32_t name = sequence_of(3), asked, closed;

    asked = ask_best(name, 3);
    closed = close_sequence(name);
    cr_expect_null(answer_of(closed));
    work();
    cr_expect_eq(selected(asked).index.n, 12u);
    cr_expect_eq(answer_code(closed), 0);
}

Test(summary_sequence, a_cancelled_selection_answers_when_its_thread_is_done)
{
    uint32_t name = sequence_of(3), asked = ask_best(name, 3);
    struct msg_cancel_r r;

    result_of(call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){asked}), &proto_cancel_r,
              &r);
    cr_expect(r.cancelled);
    cr_expect_null(answer_of(asked));
    work();
    cr_expect_eq(answer_code(asked), UCM_WIRE_CANCELLED);
}

Test(summary_sequence, an_append_grows_the_array_that_a_thread_reads)
{
    uint32_t name = sequence_of(2), asked = ask_best(name, 2), more;
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

Test(summary_sequence, a_block_evicted_by_name_is_left_out)
{
    uint32_t name = sequence_of(3), asked = ask_best(name, 3);
    struct msg_select_r r;
    uint32_t index[2];

    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 2), CACHE_ALL), CACHE_EVICT_LATER);
    work();
    r = selected(asked);
    cr_assert_eq(r.index.n, sizeof(index));
    memcpy(index, r.index.p, sizeof(index));
    cr_expect(index[0] == 0 && index[1] == 2);
    cr_expect_eq(r.evicted, 1u);
    cr_expect_eq(appended(append(open_sequence(), 1, 3, false)).missing, 2u);
}

/* One block, named often: to release all references of the sequence takes several iterations of the
 * event loop. */
Test(summary_sequence, a_long_sequence_ends_in_turns)
{
    uint32_t name = sequence_of(1), msgid = append_same_begin(name, UCM_MAX_KEYS), closed;

    cr_expect_null(answer_of(msgid), "the next iterations");
    turns_pass();
    cr_expect_eq(appended(msgid).blocks, 1u + UCM_MAX_KEYS);
    cr_expect_eq(appended(msgid).summaries, HELD_MAX - 1, "a quarter of the arena");
    closed = close_sequence(name);
    cr_expect_null(answer_of(closed));
    turns_pass();
    cr_expect_eq(answer_code(closed), 0);
}

Test(summary_sequence, a_long_sequence_ends_with_its_connection)
{
    append_same(sequence_of(1), UCM_MAX_KEYS);
    for (int i = 0; i < 20; i++)
        open_sequence();
    hang_up();
    cr_expect_not(door.conn.freed);
    turns_pass();
    cr_expect(door.conn.freed);
}
