/* Bounds of sequences, selections and builds: memory, held summaries, prefetches; and an arena that is full. */
#include "tests/unit/request/summary_rig.h"

TestSuite(summary_bounds, .init = open_all, .fini = close_all);

Test(summary_bounds, memory_of_sequences_and_selections_is_bounded)
{
    uint32_t name = sequence_of(2);
    const uint64_t all = door.config.max_frame_memory, before = taken(LIMIT_MEMORY);
    struct limit_owner *other = limits_uid(door.limits, "other", 1, true);

    cr_assert_eq(limit_take(other, LIMIT_MEMORY, all - before - 1000, NULL), 0);
    cr_expect_eq(answer_code(ask_best(name, 2)), UCM_WIRE_BUSY);
    limits_set(door.limits, LIMIT_MEMORY, 1000);
    cr_expect_eq(answer_code(ask_best(name, 2)), UCM_WIRE_INVALID, "never fits");
    limits_set(door.limits, LIMIT_MEMORY, all);
    cr_expect_eq(answer_code(append(name, 1, KEYS_MAX, false)), UCM_WIRE_BUSY);
    limit_give(other, LIMIT_MEMORY, all - before - 1000);
    limit_owner_unref(other);
}

Test(summary_bounds, keys_that_are_missing_take_no_memory)
{
    static uint8_t missing[UCM_MAX_KEYS * 16];
    struct msg_sequence_append m = {.keys = {missing, sizeof(missing)}};
    uint64_t before = 0;

    memset(missing, 0xee, sizeof(missing));
    for (int i = 0; i < 2; i++) {
        m.sequence = i ? open_sequence() : sequence_of(2);
        before = taken(LIMIT_MEMORY);
        cr_expect_eq(appended(call(UCM_METHOD_SEQUENCE_APPEND, &proto_sequence_append, &m)).missing,
                     UCM_MAX_KEYS);
        cr_expect_eq(taken(LIMIT_MEMORY), before);
    }
}

/* Whatever one user's sequences take, other users find memory, and requests find half of it. */
Test(summary_bounds, a_user_takes_a_part_of_the_memory)
{
    const uint64_t limit = 24 << 10;
    struct limit_owner *other = limits_uid(door.limits, "other", 1, false);
    uint32_t name = sequence_of(1), i = 0;
    struct msg_sequence_open open = {.ns = derived->id};
    uint64_t left;

    become(false);
    limits_set(door.limits, LIMIT_MEMORY, limit);
    limits_set(door.limits, LIMIT_SEQUENCES, limit / 2);
    while (i < 50 && answer_code(call(UCM_METHOD_SEQUENCE_OPEN, &proto_sequence_open, &open)) == 0)
        i++;
    cr_expect_lt(i, 50u);
    cr_expect_leq(taken(LIMIT_SEQUENCES), limit / 2);
    cr_expect_eq(answer_code(append(name, 1, 1, false)), 0);
    left = limit_room(door.owner, LIMIT_MEMORY);
    cr_assert_gt(left, 0u);
    cr_assert(memory_take(door.session, left));
    cr_expect_not(memory_take(door.session, 1));
    cr_expect_eq(limit_take(other, LIMIT_MEMORY, limit / 8, NULL), 0, "another tenant's");
    limit_give(other, LIMIT_MEMORY, limit / 8);
    limit_owner_unref(other);
    become(true);
    cr_expect(memory_take(door.session, limit / 4), "an operator's");
    memory_return(door.session, left + limit / 4);
}

/* Tenant "t" may have several uids, so one uid gets three quarters of three quarters. */
Test(summary_bounds, a_user_holds_a_part_of_the_summaries)
{
    uint32_t name = sequence_of(1), held;

    become(false);
    held = appended(append_same(name, 2000)).summaries + 1;
    cr_expect_geq(held, HELD_MAX / 2);
    cr_expect_leq(held, HELD_MAX * 9 / 16);
    become(true);
    cr_expect_eq(appended(append_same(name, 2000)).summaries, HELD_MAX - held);
}

static int lease_code(uint64_t first, uint32_t n)
{
    struct msg_lookup m = {.ns = rig.one->id, .keys = chain(first, n), .lease_ms = 1000};

    return answer_code(call(UCM_METHOD_LOOKUP, &proto_lookup, &m));
}

/* Whatever one user's leases and sequences cover, others can store and lease. */
Test(summary_bounds, a_user_leases_a_part_of_what_there_is)
{
    uint64_t all = arena_bytes_configured(rig.arena) / ns_part_bytes(rig.one, 0);
    uint32_t blocks = (uint32_t)(all * 9 + 15) / 16, name; /* a uid's part of its tenant's part */
    struct limit_owner *other = limits_uid(door.limits, "other", 1, false);

    become(false);
    store_all(rig.one, 1, blocks);
    name = open_sequence();
    cr_expect_eq(lease_code(1, blocks - 1), 0);
    cr_expect_eq(answer_code(append(name, 1, blocks, false)), 0, "one less than too many");
    cr_expect_eq(cache_leased(rig.cache).index_bytes, blocks * INDEX_BLOCK_BYTES);
    cr_expect_eq(cache_leased(rig.cache).bytes, blocks * ns_part_bytes(rig.one, 0));
    cr_expect_eq(lease_code(1, 1), UCM_WIRE_BUSY);
    cr_expect_eq(answer_code(append(name, 1, 1, false)), UCM_WIRE_BUSY);
    cr_assert_eq(limit_take(other, LIMIT_LEASED, 10 * blocks, NULL), 0);
    cr_expect_eq(lease_code(1, 1), 0, "most of it is another user's");
    limit_give(other, LIMIT_LEASED, 10 * blocks);
    limit_owner_unref(other);
    become(true);
    cr_expect_eq(lease_code(1, 1), 0, "an operator");
    become(false);
    close_sequence(name);
    cr_expect_eq(lease_code(1, 1), 0, "one block is free");
    hang_up();
    turns_pass();
    cr_expect_eq(cache_leased(rig.cache).index_bytes + cache_leased(rig.cache).bytes, 0u);
}

static uint32_t ask_prefetch(const uint32_t *sequences, uint32_t n)
{
    static const uint16_t q[8 * 64];
    static const uint32_t layers[8];
    struct msg_select m = {.sequences = {sequences, n},
                           .layers = {layers, n},
                           .q = {(const uint8_t *)q, n * 128},
                           .q_dtype = UCM_KV_F16,
                           .q_heads = 1,
                           .min_blocks = 1,
                           .prefetch = 1};

    return call(UCM_METHOD_SELECT, &proto_select, &m);
}

/* One prefetch for each sequence, in whatever order their rows come. */
Test(summary_bounds, prefetches_of_a_selection_are_few)
{
    uint32_t a = open_sequence(), b = open_sequence(), rows[8] = {a, b, a, b, a, b, a, b};

    store_both_below();
    append(a, 1, 1, false);
    append(b, 1, 1, false);
    fake_next(&rig.tier, 0);
    turns_pass();
    ask_prefetch(rows, 8);
    work();
    cr_expect_eq(requests_active(door.requests), 2u);
    fake_next(&rig.tier, 0);
    turns_pass();
    cr_expect_eq(requests_active(door.requests), 0u);
}

/* Its memory was for the blocks that the sequence had. */
Test(summary_bounds, a_sequence_grows_under_a_selection_that_prefetches)
{
    uint32_t name = sequence_of(1), asked = ask_prefetch(&name, 1);

    for (uint32_t i = 0; i < 40; i++)
        cr_assert_eq(appended(append_same(name, 2000)).blocks, 1 + 2000 * (i + 1));
    work();
    cr_expect_eq(selected(asked).index.n, 4u);
}

/* ---- a full index: a summary's block takes the place of another ---- */

static void open_full(void)
{
    rig.max_blocks = 4;
    open_all();
}

TestSuite(summaries_full, .init = open_full, .fini = close_all);

Test(summaries_full, a_base_does_not_go_for_its_own_summary)
{
    uint32_t msgid;

    store_all(rig.one, 1, 3);
    msgid = build(1, 3);
    work();
    cr_expect(statuses(msgid, 3, UCM_BLOCK_OK, UCM_BLOCK_NO_ROOM, UCM_BLOCK_NO_ROOM));
}

Test(summaries_full, nor_one_that_an_append_found)
{
    uint32_t name = open_sequence();
    block_ref ref;

    store_all(rig.one, 1, 2);
    build(2, 1);
    work();
    written();
    ref = find(derived, 2);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    store(rig.one, 3); /* it stays, and the index is full */
    append(name, 1, 2, true);
    cr_expect_eq(find(derived, 2), ref);
    tier_finish();
    work();
    drop(find(rig.one, 3));
}

Test(summaries_full, what_is_stored_does_not_go_for_its_own_summary)
{
    open_summaries(true);
    for (uint64_t i = 1; i <= 6; i++) {
        drop(store(rig.one, i));
        for (int k = 0; k < 10; k++) {
            work();
            tier_finish();
        }
    }
    cr_expect_gt(rig.metrics.summaries_built, 1u);
}
