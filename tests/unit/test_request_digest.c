/* Digests, chains and selections whatever happens beside them: reads that fail or hang, evictions, full
 * memory, connections and chains that end in any state. The pool works when a test lets it. */
#include "daemon/digest/select.h"
#include "tests/unit/request_rig.h"

#define DIGEST_BYTES 68u /* mean of one head of 64 channels, and its scale */
#define HELD_MAX (2u * MIB / 4 / 4096)

static struct ns *derived;

/* Mean digests of the first 64 channels of rig.one's layers, taken for 16 tokens of float16. */
static uint32_t open_digests(bool build)
{
    struct msg_digest_open m = {.ns = rig.one->id,
                                .method = UCM_DIGEST_MEAN,
                                .dtype = UCM_KV_F16,
                                .kv_heads = 1,
                                .head_dim = 64,
                                .k_token_stride = 128,
                                .build = build};
    struct msg_digest_open_r r;

    result_of(call(UCM_METHOD_DIGEST_OPEN, &proto_digest_open, &m), &proto_digest_open_r, &r);
    cr_assert_eq(r.shard_bytes, DIGEST_BYTES);
    derived = index_ns(rig.index, (uint32_t)r.ns);
    cr_assert(derived);
    derived->record = NS_RECORD_WRITTEN;
    return derived->id;
}

static void open_all(void)
{
    open_door();
    door.config.lease_max_ms = 600000;
    door.requests->rooms.share = rig.cache->share = NULL; /* this host alone */
    open_digests(false);
}

static void settle(void)
{
    for (int i = 0; i < 40; i++)
        turn();
}

static void close_all(void)
{
    hang_up();
    while (pool_next())
        settle();
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    settle();
    cr_expect_eq(door.requests->digests.held_bytes, 0u);
    cr_expect_eq(door.requests->memory, 0u);
    cr_expect_eq(rig.metrics.chains + rig.metrics.chain_blocks, 0u);
    close_door();
    cr_expect_eq(rig.metrics.digest_held_bytes, 0u);
}

TestSuite(digests, .init = open_all, .fini = close_all);

/* Blocks 1 to n of rig.one in DRAM, not held. */
static void store_base(uint32_t n)
{
    for (uint64_t i = 1; i <= n; i++)
        drop(store(rig.one, i));
}

static uint32_t build(uint64_t first, uint32_t n)
{
    struct msg_digest_build m = {.ns = derived->id, .keys = chain(first, n)};

    return call(UCM_METHOD_DIGEST_BUILD, &proto_digest_build, &m);
}

static bool statuses(uint32_t msgid, uint32_t n, ...)
{
    struct msg_blocks_r r;
    va_list args;
    bool same = true;

    result_of(msgid, &proto_blocks_r, &r);
    cr_assert_eq(r.status.n, n);
    va_start(args, n);
    for (uint32_t i = 0; i < n; i++)
        same = same && r.status.p[i] == va_arg(args, int);
    va_end(args);
    return same;
}

static uint32_t open_chain(void)
{
    struct msg_chain_open m = {.ns = derived->id};
    struct msg_chain r;

    result_of(call(UCM_METHOD_CHAIN_OPEN, &proto_chain_open, &m), &proto_chain, &r);
    return (uint32_t)r.chain;
}

static uint32_t append(uint32_t name, uint64_t first, uint32_t n, bool builds)
{
    struct msg_chain_append m = {.chain = name, .keys = chain(first, n), .build = builds};

    return call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
}

static struct msg_chain_append_r appended(uint32_t msgid)
{
    struct msg_chain_append_r r;

    result_of(msgid, &proto_chain_append_r, &r);
    return r;
}

static uint32_t close_chain(uint32_t name)
{
    return call(UCM_METHOD_CHAIN_CLOSE, &proto_chain, &(struct msg_chain){name});
}

/* The best n of the chain for a query of ones. */
static uint32_t ask_best(uint32_t name, uint32_t n)
{
    static const uint32_t layer = 0;
    uint32_t chains[1] = {name};
    uint16_t q[64];
    struct msg_select m = {.chains = {chains, 1},
                           .shards = {&layer, 1},
                           .q = {(const uint8_t *)q, sizeof(q)},
                           .q_dtype = UCM_KV_F16,
                           .q_heads = 1,
                           .min_blocks = n};

    for (unsigned i = 0; i < 64; i++)
        q[i] = 0x3c00;
    return call(UCM_METHOD_SELECT, &proto_select, &m);
}

static struct msg_select_r selected(uint32_t msgid)
{
    struct msg_select_r r;

    result_of(msgid, &proto_select_r, &r);
    return r;
}

static void work(void)
{
    while (pool_next())
        settle();
}

/* ---- builds ---- */

Test(digests, one_build_serves_all_who_ask)
{
    uint32_t first, second, third;

    store_base(2);
    first = build(1, 2);
    second = build(1, 2);
    third = append(open_chain(), 1, 2, true);
    cr_expect_null(answer_of(first));
    work();
    cr_expect(statuses(first, 2, UCM_BLOCK_OK, UCM_BLOCK_OK));
    cr_expect(statuses(second, 2, UCM_BLOCK_OK, UCM_BLOCK_OK));
    cr_expect_eq(appended(third).digests, 2u);
    cr_expect_eq(rig.metrics.digest_builds, 2u);
    cr_expect(statuses(build(1, 2), 2, UCM_BLOCK_EXISTS, UCM_BLOCK_EXISTS));
}

Test(digests, a_build_outlives_its_connection)
{
    store_base(2);
    drop(store_below(rig.one, 3));
    build(1, 3);
    cr_expect_eq(requests_active(door.requests), 4u, "the request and its builds");
    hang_up();
    cr_expect_eq(requests_active(door.requests), 3u);
    fake_next(&rig.tier, 0);
    work();
    cr_expect_eq(rig.metrics.digest_builds, 3u);
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect_neq(index_find(rig.index, derived, chain(3, 1).p), 0u);
}

Test(digests, a_base_that_can_not_be_read_has_none)
{
    uint32_t msgid;

    drop(store_below(rig.one, 1));
    msgid = build(1, 1);
    cr_expect_neq(index_find(rig.index, derived, chain(1, 1).p), 0u, "a fill");
    fake_next(&rig.tier, -EIO);
    settle();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_FAILED));
    cr_expect_eq(rig.metrics.digest_build_failed, 1u);
    cr_expect_eq(index_find(rig.index, derived, chain(1, 1).p), 0u);
    cr_expect_eq(index_find(rig.index, rig.one, chain(1, 1).p), 0u);
}

Test(digests, evicted_by_name_while_it_is_built)
{
    uint32_t msgid, chained;
    block_ref ref;

    store_base(1);
    msgid = build(1, 1);
    chained = append(open_chain(), 1, 1, true);
    ref = index_find(rig.index, derived, chain(1, 1).p);
    /* Nothing of it is whole yet, so there is nothing to evict; its part is of the base. */
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_NONE);
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_ALL), CACHE_EVICT_LATER);
    work();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_OK));
    cr_expect_eq(appended(chained).digests, 1u);
    cr_expect_eq(find(rig.one, 1) != 0, true, "the chain leases it");
}

Test(digests, a_deadline_ends_the_waiting_not_the_build)
{
    struct msg_digest_build m = {.ns = derived->id, .deadline_ms = 1};
    uint32_t msgid;

    store_base(1);
    m.keys = chain(1, 1);
    msgid = call(UCM_METHOD_DIGEST_BUILD, &proto_digest_build, &m);
    for (int i = 0; i < 5000 && !answer_of(msgid); i++) {
        uv_sleep(1);
        turn();
    }
    cr_expect(statuses(msgid, 1, UCM_BLOCK_CANCELLED));
    work();
    cr_expect_eq(rig.metrics.digest_builds, 1u);
    cr_expect(statuses(build(1, 1), 1, UCM_BLOCK_EXISTS));
}

Test(digests, a_build_waits_for_a_slot)
{
    block_ref held[8];
    struct waiter w[8];
    uint32_t msgid;

    /* All slots are of the base's size and in use. */
    for (unsigned i = 0; i < 8; i++) {
        held[i] = store(rig.one, 1 + i);
        cr_assert_eq(get(&w[i], held[i], 0), CACHE_READY);
    }
    msgid = build(1, 1);
    settle();
    cr_expect_null(answer_of(msgid));
    cr_expect(list_empty(&pool.jobs));
    for (unsigned i = 0; i < 8; i++) {
        cache_put(rig.cache, held[i], 0);
        drop(held[i]);
    }
    for (int i = 0; i < 10; i++) {
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        settle();
    }
    work();
    cr_expect(statuses(msgid, 1, UCM_BLOCK_OK));
}

Test(digests, what_is_stored_gets_one_while_somebody_wants_it)
{
    open_digests(true);
    open_digests(true);
    store_base(2);
    settle();
    work();
    cr_expect_eq(rig.metrics.digest_builds, 2u);
    drop(store(rig.one, 3));
    hang_up(); /* it waited for a turn of the loop */
    settle();
    work();
    cr_expect_eq(rig.metrics.digest_builds, 2u);
    cr_expect_eq(rig.metrics.digest_build_skipped, 1u);
    drop(store(rig.one, 4));
    settle();
    cr_expect(list_empty(&pool.jobs));
    cr_expect(list_empty(&door.requests->digests.spaces), "nobody uses the space");
}

Test(digests, a_block_that_left_before_its_turn_is_passed_over)
{
    open_digests(true);
    store_base(2);
    cr_expect_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_ALL), CACHE_EVICT_DONE);
    settle();
    work();
    cr_expect_eq(rig.metrics.digest_builds, 1u);
    cr_expect_eq(rig.metrics.digest_build_skipped, 1u);
}

Test(digests, a_draining_daemon_begins_none)
{
    open_digests(true);
    store_base(2);
    requests_drain(door.requests);
    drop(store(rig.one, 3));
    settle();
    cr_expect(list_empty(&pool.jobs));
    cr_expect_eq(answer_code(build(1, 1)), UCM_WIRE_SHUTDOWN);
}

/* The daemon's end does not wait for builds: one of many layers takes longer than it may. */
Test(digests, builds_end_with_the_daemon)
{
    uint32_t msgid;

    store_base(2);
    msgid = build(1, 2);
    requests_stop_all(door.requests);
    work();
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect(statuses(msgid, 2, UCM_BLOCK_CANCELLED, UCM_BLOCK_CANCELLED));
    cr_expect_eq(rig.metrics.digest_builds, 0u);
    cr_expect_not(cache_found(rig.cache, index_find(rig.index, derived, chain(1, 1).p)));
}

Test(digests, a_build_that_reads_ends_with_the_daemon)
{
    drop(store_below(rig.one, 1));
    build(1, 1);
    requests_stop_all(door.requests);
    fake_next(&rig.tier, 0);
    work();
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect_eq(rig.metrics.digest_builds, 0u);
}

/* ---- chains ---- */

Test(digests, nobody_waits_for_the_end_of_a_hold)
{
    uint32_t name = open_chain();
    struct asker a;

    store_base(2);
    build(1, 2);
    work();
    cr_expect_eq(appended(append(name, 1, 2, false)).digests, 2u);
    for (int i = 0; i < 10; i++) {
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        settle();
    }
    cr_expect_eq(rig.cache->users, 0u);
    ask(&a);
    cr_expect_not(cache_space_wait(rig.cache, &a.r, false));
    cr_expect_eq(cache_evict(rig.cache, index_find(rig.index, derived, chain(1, 1).p), CACHE_DRAM),
                 CACHE_EVICT_LATER, "it stays in DRAM");
    cr_expect_eq(answer_code(close_chain(name)), 0);
    cr_expect_eq(rig.cache->users, 0u);
    cr_expect_eq(cache_evict(rig.cache, index_find(rig.index, derived, chain(1, 1).p), CACHE_DRAM),
                 CACHE_EVICT_DONE);
}

/* Block 1 and its digest, both on the tier only. */
static void store_both_below(void)
{
    block_ref ref;

    drop(store_below(rig.one, 1));
    build(1, 1);
    fake_next(&rig.tier, 0);
    work();
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    settle();
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    ref = index_find(rig.index, derived, chain(1, 1).p);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_assert_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_DRAM), CACHE_EVICT_DONE);
}

Test(digests, a_digest_that_can_not_be_read_is_built)
{
    uint32_t name = open_chain(), msgid;

    store_both_below();
    msgid = append(name, 1, 1, true);
    cr_assert_eq(rig.tier.n_pending, 1u, "the digest's read");
    fake_next(&rig.tier, -EBADMSG);
    settle();
    cr_assert_eq(rig.tier.n_pending, 1u, "the base's");
    fake_next(&rig.tier, 0);
    work();
    cr_expect_eq(appended(msgid).digests, 1u);
    cr_expect_eq(appended(msgid).built, 1u);
}

Test(digests, or_is_missing_where_nobody_builds)
{
    uint32_t name = open_chain(), msgid, asked;

    store_both_below();
    msgid = append(name, 1, 1, false);
    fake_next(&rig.tier, -EBADMSG);
    settle();
    cr_expect_eq(appended(msgid).digests, 0u);
    cr_expect_eq(rig.metrics.digest_missing, 1u);
    asked = ask_best(name, 1);
    work();
    cr_expect_eq(selected(asked).index.n, 4u);
    cr_expect_eq(selected(asked).no_digest, 1u);
}

Test(digests, closing_a_chain_ends_its_append)
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

Test(digests, a_connection_ends_while_its_append_reads)
{
    store_both_below();
    append(open_chain(), 1, 1, true);
    hang_up();
    cr_expect(door.conn.freed);
}

Test(digests, a_connection_ends_while_its_append_builds)
{
    store_base(3);
    append(open_chain(), 1, 3, true);
    hang_up();
    cr_expect(door.conn.freed);
    work();
    cr_expect_eq(rig.metrics.digest_builds, 3u);
}

static uint32_t chain_of(uint32_t n)
{
    uint32_t name = open_chain();

    store_base(n);
    append(name, 1, n, true);
    work();
    return name;
}

Test(digests, a_connection_ends_while_a_thread_selects)
{
    uint32_t name = chain_of(3);

    ask_best(name, 2);
    ask_best(name, 2);
    hang_up();
    cr_expect_not(door.conn.freed, "a thread reads what the chain holds");
    cr_expect_gt(door.requests->digests.held_bytes, 0u);
    work();
    cr_expect(door.conn.freed);
}

Test(digests, a_chain_is_closed_while_a_thread_selects)
{
    uint32_t name = chain_of(3), asked, closed;

    asked = ask_best(name, 3);
    closed = close_chain(name);
    cr_expect_null(answer_of(closed));
    work();
    cr_expect_eq(selected(asked).index.n, 12u);
    cr_expect_eq(answer_code(closed), 0);
}

Test(digests, a_cancelled_selection_answers_when_its_thread_is_done)
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

static uint32_t append_same(uint32_t name, uint32_t n)
{
    static uint8_t same[2000 * 16];
    struct msg_chain_append m = {.chain = name, .keys = {same, 16 * n}};
    uint32_t msgid;

    for (uint32_t i = 0; i < n; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    msgid = call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
    settle();
    return msgid;
}

Test(digests, an_append_grows_the_array_that_a_thread_reads)
{
    uint32_t name = chain_of(2), asked = ask_best(name, 2), more;
    const void *read = LIST_ENTRY(pool.jobs.next, struct selection, job.link)->rows[0].digests;

    more = append_same(name, 600);
    cr_expect_eq(appended(more).blocks, 602u);
    work();
    cr_expect_eq(selected(asked).index.n, 8u, "of the two that were there");
    more = ask_best(name, 602);
    cr_expect_neq(LIST_ENTRY(pool.jobs.next, struct selection, job.link)->rows[0].digests, read);
    work();
    cr_expect_eq(selected(more).index.n, 602u * 4);
}

Test(digests, a_block_evicted_by_name_is_left_out)
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

/* One block, named often: what a chain has to let go of takes several turns of the loop. */
Test(digests, a_long_chain_ends_in_turns)
{
    static uint8_t same[UCM_MAX_KEYS * 16];
    uint32_t name = chain_of(1), msgid = 0, closed;
    struct msg_chain_append m = {.chain = name, .keys = {same, sizeof(same)}};

    for (uint32_t i = 0; i < UCM_MAX_KEYS; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    msgid = call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
    cr_expect_null(answer_of(msgid), "the next turns");
    settle();
    cr_expect_eq(appended(msgid).blocks, 1u + UCM_MAX_KEYS);
    cr_expect_eq(appended(msgid).digests, HELD_MAX - 1, "a quarter of the arena");
    closed = close_chain(name);
    cr_expect_null(answer_of(closed));
    settle();
    cr_expect_eq(answer_code(closed), 0);
}

Test(digests, a_long_chain_ends_with_its_connection)
{
    static uint8_t same[UCM_MAX_KEYS * 16];
    struct msg_chain_append m = {.chain = chain_of(1), .keys = {same, sizeof(same)}};

    for (uint32_t i = 0; i < UCM_MAX_KEYS; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m);
    settle();
    for (int i = 0; i < 20; i++)
        open_chain();
    hang_up();
    cr_expect_not(door.conn.freed);
    settle();
    cr_expect(door.conn.freed);
}

Test(digests, a_chain_that_nobody_uses_ends)
{
    struct msg_chain_open m = {.ns = derived->id, .lease_ms = 20};
    struct msg_chain r;

    store_base(1);
    result_of(call(UCM_METHOD_CHAIN_OPEN, &proto_chain_open, &m), &proto_chain, &r);
    append((uint32_t)r.chain, 1, 1, true);
    work();
    for (int i = 0; i < 5000 && rig.metrics.chains_expired == 0; i++) {
        uv_sleep(1);
        turn();
    }
    cr_expect_eq(rig.metrics.chains, 0u);
    cr_expect_eq(answer_code(ask_best((uint32_t)r.chain, 1)), UCM_WIRE_NOT_FOUND);
}

Test(digests, memory_of_chains_and_selections_is_bounded)
{
    uint32_t name = chain_of(2);
    const uint64_t all = door.config.max_frame_memory, before = door.requests->memory;

    cr_assert(memory_take(door.requests, NULL, all - door.requests->memory - 1000));
    cr_expect_eq(answer_code(ask_best(name, 2)), UCM_WIRE_BUSY);
    door.config.max_frame_memory = 1000;
    cr_expect_eq(answer_code(ask_best(name, 2)), UCM_WIRE_INVALID, "never fits");
    door.config.max_frame_memory = all;
    cr_expect_eq(answer_code(append(name, 1, KEYS_MAX, false)), UCM_WIRE_BUSY);
    memory_return(door.requests, NULL, door.requests->memory - before);
}

Test(digests, keys_that_are_missing_take_no_memory)
{
    static uint8_t missing[UCM_MAX_KEYS * 16];
    struct msg_chain_append m = {.keys = {missing, sizeof(missing)}};
    uint64_t before = 0;

    memset(missing, 0xee, sizeof(missing));
    for (int i = 0; i < 2; i++) {
        m.chain = i ? open_chain() : chain_of(2);
        before = door.requests->memory;
        cr_expect_eq(appended(call(UCM_METHOD_CHAIN_APPEND, &proto_chain_append, &m)).missing,
                     UCM_MAX_KEYS);
        cr_expect_eq(door.requests->memory, before);
    }
}

/* Others find a quarter of the memory, and requests half of it, whatever one user's chains take. */
Test(digests, a_user_takes_a_part_of_the_memory)
{
    struct session *s = door.session;
    const uint64_t limit = 24 << 10;
    uint32_t name = chain_of(1), i = 0;
    struct msg_chain_open open = {.ns = derived->id};
    uint64_t left;

    s->peer.admin = false;
    door.config.max_frame_memory = limit;
    while (i < 50 && answer_code(call(UCM_METHOD_CHAIN_OPEN, &proto_chain_open, &open)) == 0)
        i++;
    cr_expect_lt(i, 50u);
    cr_expect_leq(door.requests->digests.chain_memory, limit / 2);
    cr_expect_eq(answer_code(append(name, 1, 1, false)), 0);
    left = user_most(s, limit) - s->user->memory;
    cr_assert(memory_take(door.requests, s, left));
    cr_expect_not(memory_take(door.requests, s, 1));
    cr_expect(memory_take(door.requests, NULL, limit / 4), "nobody's");
    memory_return(door.requests, NULL, limit / 4);
    s->peer.admin = true;
    cr_expect(memory_take(door.requests, s, limit / 4), "an operator's");
    memory_return(door.requests, s, left + limit / 4);
}

Test(digests, a_user_holds_a_part_of_the_digests)
{
    struct session *s = door.session;
    uint32_t name = chain_of(1);

    s->peer.admin = false;
    cr_expect_eq(appended(append_same(name, 2000)).digests, HELD_MAX * 3 / 4 - 1);
    s->peer.admin = true;
    cr_expect_eq(appended(append_same(name, 2000)).digests, HELD_MAX / 4);
}

static uint32_t ask_prefetch(const uint32_t *chains, uint32_t n)
{
    static const uint16_t q[8 * 64];
    static const uint32_t layers[8];
    struct msg_select m = {.chains = {chains, n},
                           .shards = {layers, n},
                           .q = {(const uint8_t *)q, n * 128},
                           .q_dtype = UCM_KV_F16,
                           .q_heads = 1,
                           .min_blocks = 1,
                           .prefetch = 1};

    return call(UCM_METHOD_SELECT, &proto_select, &m);
}

/* One for each chain, in whatever order their rows come. */
Test(digests, prefetches_of_a_selection_are_few)
{
    uint32_t a = open_chain(), b = open_chain(), rows[8] = {a, b, a, b, a, b, a, b};

    store_both_below();
    append(a, 1, 1, false);
    append(b, 1, 1, false);
    fake_next(&rig.tier, 0);
    settle();
    ask_prefetch(rows, 8);
    work();
    cr_expect_eq(requests_active(door.requests), 2u);
    fake_next(&rig.tier, 0);
    settle();
    cr_expect_eq(requests_active(door.requests), 0u);
}

/* Its memory was for the blocks that the chain had. */
Test(digests, a_chain_grows_under_a_selection_that_prefetches)
{
    uint32_t name = chain_of(1), asked = ask_prefetch(&name, 1);

    for (uint32_t i = 0; i < 40; i++)
        cr_assert_eq(appended(append_same(name, 2000)).blocks, 1 + 2000 * (i + 1));
    work();
    cr_expect_eq(selected(asked).index.n, 4u);
}

Test(digests, a_prefetch_of_what_was_chosen_is_not_answered)
{
    uint32_t name = open_chain(), before;

    store_both_below();
    append(name, 1, 1, false);
    fake_next(&rig.tier, 0);
    settle();
    before = door.conn.n;
    ask_prefetch(&name, 1);
    work();
    cr_assert_eq(rig.tier.n_pending, 1u, "the block's read");
    cr_expect_eq(requests_active(door.requests), 1u);
    fake_next(&rig.tier, 0);
    settle();
    cr_expect_eq(door.conn.n, before + 1);
    cr_expect_eq(requests_active(door.requests), 0u);
    cr_expect(cache_in_dram(rig.cache, find(rig.one, 1)));
}

/* ---- a full index: a digest's block takes the place of another ---- */

static void open_full(void)
{
    rig.max_blocks = 4;
    open_all();
}

TestSuite(digests_full, .init = open_full, .fini = close_all);

Test(digests_full, a_base_does_not_go_for_its_own_digest)
{
    uint32_t msgid;

    store_base(3);
    msgid = build(1, 3);
    work();
    cr_expect(statuses(msgid, 3, UCM_BLOCK_OK, UCM_BLOCK_NO_ROOM, UCM_BLOCK_NO_ROOM));
}

Test(digests_full, nor_one_that_an_append_found)
{
    uint32_t name = open_chain();
    block_ref ref;

    store_base(2);
    build(2, 1);
    work();
    for (int i = 0; i < 10; i++) {
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        settle();
    }
    ref = index_find(rig.index, derived, chain(2, 1).p);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    store(rig.one, 3); /* it stays, and the index is full */
    append(name, 1, 2, true);
    cr_expect_eq(index_find(rig.index, derived, chain(2, 1).p), ref);
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    work();
    drop(find(rig.one, 3));
}

Test(digests_full, what_is_stored_does_not_go_for_its_own_digest)
{
    open_digests(true);
    for (uint64_t i = 1; i <= 6; i++) {
        drop(store(rig.one, i));
        for (int k = 0; k < 10; k++) {
            settle();
            work();
            while (rig.tier.n_pending > 0)
                fake_next(&rig.tier, 0);
        }
    }
    cr_expect_gt(rig.metrics.digest_builds, 1u);
}
