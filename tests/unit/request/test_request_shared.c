/* Lookups, prefetches and loads of blocks that only other hosts have: which calls wait, for how
 * long, and their answers. The methods as a connection calls them, over a shared tier that a test
 * plays. */
#include "tests/unit/request/request_rig.h"

TestSuite(request_shared, .init = open_door, .fini = close_door);

static uint32_t lookup_as(uint64_t wait_mode, uint64_t first, uint32_t n, bool per_key,
                          uint32_t lease_ms)
{
    struct msg_lookup m = {.ns = rig.one->id,
                           .keys = chain(first, n),
                           .per_key = per_key,
                           .lease_ms = lease_ms,
                           .shared = true,
                           .wait_mode = wait_mode};

    return call(UCM_METHOD_LOOKUP, &proto_lookup, &m);
}

static uint32_t lookup(uint64_t first, uint32_t n, bool per_key, uint32_t lease_ms)
{
    return lookup_as(UCM_LOOKUP_WAIT, first, n, per_key, lease_ms);
}

/* The shared tier answers: the first n keys that it was asked for are there. */
static void lookup_ends(uint32_t n)
{
    struct shared_lookup *p = shared.lookup;

    cr_assert(p, "it was not asked");
    for (uint32_t i = 0; i < p->n; i++)
        p->answers[i] = i < n ? 1 : SHARED_MISSING;
    p->prefix = n;
    shared.lookup = NULL;
    p->done_cb(p);
}

static struct msg_lookup_r lookup_result(uint32_t msgid)
{
    struct msg_lookup_r r = {0};

    result_of(msgid, &proto_lookup_r, &r);
    return r;
}

/* ---- lookups ---- */

Test(request_shared, a_prefix_goes_on_where_this_host_ends)
{
    struct msg_lookup_r r;
    uint32_t id;

    drop(store(rig.one, 1));
    drop(store(rig.one, 4)); /* here, so it need not be asked for */
    id = lookup(1, 8, false, 0);
    cr_expect_null(answer_of(id), "it waits");
    cr_assert(shared.lookup);
    cr_expect_eq(shared.lookup->n, 6u, "keys 2, 3, 5 to 8");
    cr_expect_not(shared.lookup->per_key);
    lookup_ends(4);
    r = lookup_result(id);
    cr_expect_eq(r.hits, 6u, "1 to 6, not %d", (int)r.hits);
    cr_expect_eq(r.dram, 2u);
    cr_expect_eq(r.shared, 4u);
    r = lookup_result(lookup(1, 6, false, 0));
    cr_expect_eq(r.hits, 6u);
    cr_expect_eq(shared.lookups, 1u, "it is known now");
}

/* A lookup waits as long as the caller says, at most shared.lookup_timeout. For a caller that asks
 * again for the answer, the bound is shared.timeout. */
Test(request_shared, who_waits_how_long)
{
    static const struct {
        uint64_t wait_mode, wait_ms, expected_ms;
    } rows[] = {{UCM_LOOKUP_WAIT, 5, 5},
                {UCM_LOOKUP_WAIT, 5000, 50},
                {UCM_LOOKUP_LATER, 300, 300},
                {UCM_LOOKUP_LATER, 9000, 2000}};

    for (unsigned i = 0; i < 4; i++) {
        struct msg_lookup m = {.ns = rig.one->id,
                               .keys = chain(1 + i, 1),
                               .wait_mode = rows[i].wait_mode,
                               .wait_ms = rows[i].wait_ms};
        uint64_t now_ms = uv_now(&rig.loop);

        call(UCM_METHOD_LOOKUP, &proto_lookup, &m);
        cr_expect_eq(shared.lookup->deadline_ms, now_ms + rows[i].expected_ms);
        lookup_ends(0);
    }
}

Test(request_shared, a_lease_covers_what_other_hosts_hold)
{
    struct msg_lookup_r r;
    uint32_t id = lookup(1, 3, false, 60000);

    lookup_ends(3);
    r = lookup_result(id);
    cr_expect_neq(r.lease, 0u);
    for (uint64_t i = 1; i <= 3; i++)
        cr_expect_eq(block_of(find(rig.one, i))->leases, 1u);
    call(UCM_METHOD_RELEASE, &proto_release, &(struct msg_release){.lease = r.lease});
    cr_expect_eq(block_of(find(rig.one, 1))->leases, 0u);
}

Test(request_shared, cancelled_it_tells_what_is_here)
{
    struct msg_lookup_r r;
    uint32_t id;

    drop(store(rig.one, 1));
    id = lookup(1, 3, false, 0);
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    r = lookup_result(id);
    cr_expect_eq(r.hits, 1u);
    cr_expect_null(shared.lookup, "nobody writes into memory that is gone");
}

Test(request_shared, it_ends_with_its_connection)
{
    unsigned sent = door.conn.n;

    lookup(1, 3, false, 60000);
    cr_assert(shared.lookup);
    hang_up();
    cr_expect_null(shared.lookup);
    cr_expect_eq(door.conn.n, sent, "nobody is answered");
    cr_expect_eq(index_blocks(rig.index), 0u);
}

Test(request_shared, a_shared_tier_that_never_answers_holds_no_lookup_for_ever)
{
    uint32_t id = lookup(1, 3, false, 0);
    uint64_t start_ms = uv_hrtime() / 1000000;

    while (!answer_of(id) && uv_hrtime() / 1000000 - start_ms < 5000)
        uv_run(&rig.loop, UV_RUN_ONCE);
    cr_expect_eq(lookup_result(id).hits, 0u);
    cr_expect_null(shared.lookup);
}

Test(request_shared, past_the_limit_of_requests_it_tells_what_is_here)
{
    door.config.max_requests_conn = 0;
    drop(store(rig.one, 1));
    cr_expect_eq(lookup_result(lookup(1, 3, false, 0)).hits, 1u);
    cr_expect_null(shared.lookup);
    cr_expect_eq(rig.metrics.requests_failed, 0u);
}

Test(request_shared, where_not_all_have_room_the_head_of_the_chain_stays)
{
    uint32_t id;

    rig.cache->config.shared_blocks = 4;
    id = lookup(1, 10, false, 0);
    lookup_ends(10);
    cr_expect_eq(lookup_result(id).hits, 4u);
    cr_expect_eq(index_blocks(rig.index), 4u);
}

/* ---- lookups that don't wait ---- */

static struct msg_lookup_r look(uint64_t wait_mode, uint64_t first, uint32_t n, bool per_key)
{
    return lookup_result(lookup_as(wait_mode, first, n, per_key, 60000));
}

Test(request_shared, what_the_client_has_had_holds_for_shared_negative)
{
    for (uint64_t i = 0; i < 2; i++) {
        door.config.shared_negative_ms = i ? 0 : 2000;
        shared.lookups = 0;
        cr_expect(look(UCM_LOOKUP_LATER, 1 + 4 * i, 4, false).pending);
        lookup_ends(0);
        cr_expect_not(look(UCM_LOOKUP_LATER, 1 + 4 * i, 4, false).pending);
        cr_expect_eq(look(UCM_LOOKUP_LATER, 1 + 4 * i, 4, false).pending, i == 1);
        cr_expect_eq(shared.lookups, 1 + i);
    }
    hang_up();
    cr_expect_null(shared.lookup, "it ends with its connection");
}

Test(request_shared, keys_by_themselves_are_asked_for_without_a_wait)
{
    struct msg_lookup_r r;

    drop(store(rig.one, 2));
    r = look(UCM_LOOKUP_LATER, 1, 3, true);
    cr_expect(r.pending && r.hits == 1);
    cr_expect(r.status.n == 3 && r.status.p[1] == UCM_LOOKUP_DRAM);
    cr_expect(shared.lookup->per_key);
    lookup_ends(1);
    r = look(UCM_LOOKUP_LATER, 1, 3, true);
    cr_expect(!r.pending && r.hits == 2 && r.status.p[0] == UCM_LOOKUP_SHARED);
}

Test(request_shared, who_gives_up_gets_what_is_here)
{
    struct msg_lookup_r r;

    drop(store(rig.one, 1));
    r = look(UCM_LOOKUP_HERE, 1, 2, false);
    cr_expect(!r.pending && r.hits == 1 && r.lease != 0);
    cr_expect_eq(shared.lookups, 0u, "nobody is asked");
    cr_expect(look(UCM_LOOKUP_LATER, 1, 2, false).pending);
    r = look(UCM_LOOKUP_HERE, 1, 2, false);
    cr_expect(!r.pending && r.hits == 1 && r.lease != 0);
    lookup_ends(1);
    r = look(UCM_LOOKUP_HERE, 1, 2, false);
    cr_expect(!r.pending && r.hits == 2, "the shared tier's late answer serves the next");
}

Test(request_shared, so_many_of_a_connection_are_under_way)
{
    enum { MOST = 64 }; /* docs/methods.md, lookup */
    struct shared_lookup *asked[MOST];

    for (uint64_t i = 0; i < MOST; i++) {
        cr_assert(look(UCM_LOOKUP_LATER, 1 + 2 * i, 2, false).pending, "%d", (int)i);
        asked[i] = shared.lookup;
        shared.lookup = NULL;
    }
    cr_expect_not(look(UCM_LOOKUP_LATER, 1000, 2, false).pending, "as without a shared tier");
    cr_expect(look(UCM_LOOKUP_LATER, 1, 2, false).pending);
    cr_expect_eq(shared.lookups, (unsigned)MOST, "each is asked once");
    for (uint64_t i = 0; i < MOST; i++) {
        shared.lookup = asked[i];
        lookup_ends(0);
    }
    cr_expect(look(UCM_LOOKUP_LATER, 1000, 2, false).pending);
}

Test(request_shared, a_shared_tier_that_can_not_be_asked_keeps_nobody_waiting)
{
    shared.lookup_error = -EAGAIN;
    cr_expect_not(look(UCM_LOOKUP_LATER, 1, 2, false).pending);
    shared.lookup_error = 0;
    requests_drain(door.requests);
    cr_expect_not(look(UCM_LOOKUP_LATER, 1, 2, false).pending);
    cr_expect_eq(lookup_result(lookup(1, 2, false, 0)).hits, 0u);
    cr_expect_eq(shared.lookups, 0u);
}

/* ---- the policy ---- */

static bool any(void *ctx, block_ref ref)
{
    (void)ctx, (void)ref;
    return true;
}

/* The policy takes blocks that come one after another for one sequence, whose tail leaves first. A
 * lookup between them that found nothing makes them two. */
static void expect_two_chains(bool base)
{
    if (base) { /* what encoding.open does */
        index_ns_derive(rig.index, rig.one, space("base", 1, 1024));
        cr_expect_eq(look(UCM_LOOKUP_HERE, 90, 1, false).hits, 0u); /* opens it */
        session_ns_with_base(door.session, rig.one, rig.one->base);
    }
    for (uint64_t key = 1; key <= 2; key++) {
        cr_expect_eq(look(UCM_LOOKUP_HERE, key, 2, false).hits, 0u);
        drop(store(rig.one, key));
    }
    cr_expect_eq(policy_near(rig.policy, policy_common(rig.policy), any, NULL, 8), find(rig.one, 1),
                 "the older sequence leaves first");
}

Test(request_shared, a_lookup_that_finds_nothing_ends_the_policys_chain)
{
    expect_two_chains(false);
}

Test(request_shared, and_so_does_one_in_two_namespaces)
{
    expect_two_chains(true);
}

/* ---- prefetch ---- */

Test(request_shared, a_prefetch_that_is_stopped_while_it_asks_moves_nothing)
{
    struct msg_prefetch m = {.ns = rig.one->id, .keys = chain(1, 2)};
    uint32_t id = call(UCM_METHOD_PREFETCH, &proto_prefetch, &m);

    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    cr_expect(statuses(id, 2, UCM_BLOCK_CANCELLED, UCM_BLOCK_CANCELLED));
    cr_expect_null(shared.lookup);
}

/* ---- evict and purge ---- */

static struct msg_count_r counted(uint32_t msgid)
{
    struct msg_count_r r = {0};

    result_of(msgid, &proto_count_r, &r);
    return r;
}

Test(request_shared, evicting_a_key_that_is_not_known_here_removes_its_files)
{
    struct msg_evict m = {.ns = rig.one->id, .keys = chain(7, 1), .tier = 3};

    uint32_t id;

    peer_stores(rig.one, 7, 1);
    id = call(UCM_METHOD_EVICT, &proto_evict, &m);
    cr_expect_null(answer_of(id), "the files are still there");
    fake_removal_end(&shared, 0);
    cr_expect_eq(counted(id).missing, 1u);
    cr_expect_not(has_file(rig.one, 7, 0, 0));
    peer_stores(rig.one, 7, 1);
    m.tier = 1;
    call(UCM_METHOD_EVICT, &proto_evict, &m);
    cr_expect(has_file(rig.one, 7, 0, 0), "from DRAM only");
}

Test(request_shared, an_eviction_by_key_is_cancelled)
{
    struct msg_keys m = {.ns = rig.one->id, .keys = chain(1, 3)};
    uint32_t id = call(UCM_METHOD_NS_PURGE, &proto_keys, &m);

    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    cr_expect_eq(answer_code(id), UCM_WIRE_CANCELLED);
    cr_expect_null(shared.removal);
}

/* Two lookups have found the files before they went. One has noted that, the other is about to. */
Test(request_shared, what_came_of_a_file_that_is_evicted_goes_too)
{
    struct msg_keys m = {.ns = rig.one->id, .keys = chain(1, 2)};
    uint32_t id = call(UCM_METHOD_NS_PURGE, &proto_keys, &m), slow;

    note(rig.one, 1, 1, true);
    cr_expect_eq(lookup_result(lookup(1, 1, false, 0)).hits, 1u, "it is not answered yet");
    slow = lookup(2, 2, true, 0);
    fake_removal_end(&shared, 0);
    cr_expect_eq(answer_code(id), 0);
    cr_expect_eq(find(rig.one, 1), 0u);
    lookup_ends(2);
    cr_expect_eq(lookup_result(slow).hits, 1u, "key 3 was not evicted");
    cr_expect_eq(find(rig.one, 2), 0u);
}

Test(request_shared, what_is_stored_while_its_files_go_stays)
{
    struct msg_keys m = {.ns = rig.one->id, .keys = chain(1, 1)};
    uint32_t id = call(UCM_METHOD_NS_PURGE, &proto_keys, &m);

    shared_refuses(-EAGAIN, 1000);
    drop(store(rig.one, 1));
    fake_removal_end(&shared, 0);
    cr_expect_eq(answer_code(id), 0);
    cr_expect_neq(find(rig.one, 1), 0u);
    shared.refuse_n = 0;
}

/* A leased block is marked for deletion: it goes with its last user, and its files go at once. A
 * pinned block stays, with its files. */
Test(request_shared, blocks_in_use_lose_their_files_and_pinned_ones_do_not)
{
    struct msg_evict m = {.ns = rig.one->id, .keys = chain(1, 2)};
    block_ref leased = shared_block(rig.one, 1), pinned = shared_block(rig.one, 2);
    uint32_t id;

    cache_pin(rig.cache, pinned, true);
    id = call(UCM_METHOD_EVICT, &proto_evict, &m);
    cr_assert(shared.removal);
    cr_expect_eq(shared.removal->n, 1u);
    fake_removal_end(&shared, 0);
    cr_expect_eq(counted(id).busy, 2u);
    cr_expect_not(has_file(rig.one, 1, 0, 0));
    cr_expect(has_file(rig.one, 2, 0, 1) && cache_found(rig.cache, pinned));
    cache_pin(rig.cache, pinned, false);
    drop(leased);
    drop(pinned);
}

Test(request_shared, evicting_a_namespace_everywhere_is_done_when_the_shares_are)
{
    struct msg_evict m = {.ns = rig.one->id};
    uint32_t id;

    drop(store(rig.one, 1));
    id = call(UCM_METHOD_EVICT, &proto_evict, &m);
    iterations(5);
    cr_assert(shared.purge);
    cr_expect_null(answer_of(id));
    shared.purge->done_cb(shared.purge, 0, 1);
    cr_expect_eq(counted(id).blocks + counted(id).busy, 1u);
}

Test(request_shared, a_purge_that_left_files_says_so)
{
    struct msg_keys m = {.ns = rig.one->id};
    uint32_t id = call(UCM_METHOD_NS_PURGE, &proto_keys, &m);

    iterations(5);
    rig.tier.naming->done_cb(rig.tier.naming, 0);
    cr_expect_null(answer_of(id));
    shared.purge->done_cb(shared.purge, -ETIMEDOUT, 0);
    cr_expect_eq(answer_code(id), UCM_WIRE_IO);
}
