/* The eviction policy: what goes first, and that everything goes in the end. */
#include "daemon/index/policy.h"
#include "tests/unit/index/index_rig.h"

#define N 4096

static uint32_t outside;
static struct ns *ns;
static struct policy *p;
static bool pinned[N];

static void setup(void)
{
    struct ns_identity id = identity();

    index_again(N, 1);
    ns = open_ns(&id);
    cr_assert_eq(policy_new(ix, 256, &p), 0);
}

static void teardown(void)
{
    policy_free(p);
    index_end();
}

TestSuite(policy, .init = setup, .fini = teardown);

/* A block in the index and in DRAM. */
static block_ref bring(uint32_t number)
{
    block_ref ref = add(ns, number);

    policy_insert(p, ref);
    cr_assert(index_block(ix, ref)->flags & BLOCK_IN_POLICY);
    return ref;
}

/* Lists aside. */
enum { PINNED = 1, OTHERS };

static unsigned any_cb(void *ctx, block_ref ref)
{
    (void)ctx;
    (void)ref;
    return POLICY_CANDIDATES;
}

static unsigned unpinned_cb(void *ctx, block_ref ref)
{
    if (ctx)
        ++*(uint32_t *)ctx;
    return pinned[number_of(index_block(ix, ref))] ? PINNED : POLICY_CANDIDATES;
}

static block_ref victim(unsigned (*judge)(void *ctx, block_ref ref), void *ctx, int64_t looks)
{
    return policy_victim(p, policy_common(p), POLICY_CANDIDATES, judge, ctx, &looks);
}

static void drop(block_ref ref, bool evicted)
{
    policy_remove(p, ref, evicted);
    cr_assert(!(index_block(ix, ref)->flags & BLOCK_IN_POLICY));
    index_remove(ix, ref);
}

/* Evicts one block and returns its number, N when there was none. */
static uint32_t evict(void)
{
    block_ref ref = victim(any_cb, NULL, 1);
    uint32_t number = ref ? number_of(index_block(ix, ref)) : N;

    if (ref)
        drop(ref, true);
    return number;
}

Test(policy, a_touched_chain_goes_tail_first)
{
    block_ref refs[11];

    for (uint32_t i = 10; i-- > 0;)
        refs[i + (i > 4)] = bring(i);
    refs[5] = 0; /* a gap is passed over */
    policy_touch(p, refs, 11, &outside);
    for (uint32_t i = 10; i-- > 0;)
        cr_assert_eq(evict(), i);
}

/* The head has more uses than what this request brought; in LRU's order it still goes last. */
Test(policy, a_chain_that_was_found_in_part_goes_tail_first)
{
    block_ref head[4];

    for (uint32_t i = 0; i < 4; i++)
        head[i] = bring(i);
    for (uint32_t i = 100; i < 164; i++)
        bring(i);
    policy_touch(p, head, 4, &outside);
    for (uint32_t i = 4; i < 8; i++)
        bring(i);
    for (uint32_t i = 100; i < 164; i++)
        cr_assert_geq(evict(), 100);
    for (uint32_t i = 8; i-- > 0;)
        cr_assert_eq(evict(), i);
}

/* Blocks come in without end. The one that is used now and then survives; the others do not. */
Test(policy, a_used_block_outlives_a_scan)
{
    block_ref used = bring(0);

    for (uint32_t i = 1; i < 3000; i++) {
        bring(i);
        if (i % 20 == 0)
            policy_touch(p, &used, 1, &outside);
        if (policy_count(p) > 64)
            cr_assert_neq(evict(), 0);
    }
    cr_assert_eq(policy_heat(index_block(ix, used)), 3);
}

Test(policy, a_block_that_is_used_no_more_goes_at_last)
{
    block_ref hot = bring(0);
    uint32_t i = 1;

    for (; i < 500; i++) {
        bring(i);
        policy_touch(p, &hot, 1, &outside);
        if (policy_count(p) > 32)
            cr_assert_neq(evict(), 0);
    }
    for (; i < 3000; i++) {
        bring(i);
        if (evict() == 0)
            return;
    }
    cr_assert_fail("still here");
}

/* Twenty blocks, numbered from `first`, fill DRAM and leave. Returns how many were known. */
static uint32_t come_and_go(uint32_t first)
{
    uint32_t known = 0;

    for (uint32_t i = 0; i < 20; i++)
        known += policy_heat(index_block(ix, bring(first + i))) > 0;
    for (uint32_t i = 0; i < 20; i++)
        evict();
    return known;
}

/* Ghosts are kept in sets by their hash, so some leave before their time. */
Test(policy, a_small_dram_remembers_a_block_for_a_while)
{
    come_and_go(0);
    for (uint32_t k = 1; k <= 15; k++)
        come_and_go(20 * k);
    cr_expect_geq(come_and_go(0), 10);
    for (uint32_t k = 16; k < 200; k++)
        come_and_go(20 * k);
    cr_expect_leq(come_and_go(0), 5);
}

/* A head without its tail still serves. A tail without its head does not. */
Test(policy, the_head_of_a_chain_that_comes_back_counts_as_often_as_its_tail)
{
    block_ref refs[8];

    for (uint32_t i = 0; i < 4; i++)
        bring(i);
    for (uint32_t i = 0; i < 4; i++)
        evict();
    for (uint32_t i = 0; i < 8; i++) {
        uint8_t key[UCM_MAX_KEY_BYTES];

        key_make(key, i < 4 ? 20 + i : i - 4); /* 20 to 23 are new, 0 to 3 come back */
        refs[i] = index_insert(ix, ns, key);
    }
    policy_touch(p, refs, 8, &outside);
    for (uint32_t i = 0; i < 8; i++) {
        policy_insert(p, refs[i]);
        cr_expect_eq(policy_heat(index_block(ix, refs[i])), 1, "block %u", i);
    }
    for (uint32_t i = 8; i-- > 0;)
        cr_expect_eq(evict(), i < 4 ? 20 + i : i - 4);
}

/* The blocks of a set are used in turn, with so many others in between that LRU never has one in
 * time. */
Test(policy, learns_to_keep_what_comes_back)
{
    enum { CAPACITY = 200, SET = 100, BETWEEN = 3 };
    block_ref set[SET] = {0};
    uint32_t other = SET, hits = 0;

    for (uint32_t turn = 0; turn < 60; turn++) {
        for (uint32_t i = 0; i < SET; i++) {
            uint32_t number = i;

            hits += set[i] != 0 && turn >= 40;
            if (set[i])
                policy_touch(p, &set[i], 1, &outside);
            else
                set[i] = bring(number);
            for (uint32_t k = 0; k < BETWEEN; k++, other = other + 1 < N ? other + 1 : SET)
                bring(other);
            while (policy_count(p) > CAPACITY)
                if ((number = evict()) < SET)
                    set[number] = 0;
        }
    }
    cr_expect_gt(hits, 20 * SET * 9 / 10, "%u of %u", hits, 20 * SET);
}

Test(policy, a_block_that_stays_on_a_slower_tier_keeps_its_heat)
{
    block_ref ref = bring(0);

    for (uint32_t i = 1; i < 100; i++) {
        bring(i);
        policy_touch(p, &ref, 1, &outside);
    }
    cr_assert_eq(policy_heat(index_block(ix, ref)), 3);
    policy_remove(p, ref, true);
    cr_assert_eq(policy_heat(index_block(ix, ref)), 3);
    policy_insert(p, ref);
    cr_assert_eq(policy_heat(index_block(ix, ref)), 3);
}

Test(policy, lookup_and_load_are_one_use)
{
    block_ref before = 0, ref;

    for (uint32_t i = 1; i <= 256; i++)
        before = bring(i);
    policy_touch(p, &before, 1, &outside); /* another request: what comes next is of its time */
    ref = bring(0);
    cr_assert_eq(policy_heat(index_block(ix, ref)), 0);
    for (int i = 0; i < 10; i++)
        policy_touch(p, &ref, 1, &outside);
    cr_assert_eq(policy_heat(index_block(ix, ref)), 0);
    for (uint32_t i = 257; i <= 512; i++)
        bring(i);
    for (int i = 0; i < 10; i++)
        policy_touch(p, &ref, 1, &outside);
    cr_assert_eq(policy_heat(index_block(ix, ref)), 1);
}

/* A search looks at each pinned block once and puts it aside. No search meets it again until it
 * comes back. */
Test(policy, the_pinned_are_looked_at_once)
{
    uint32_t asked = 0;

    memset(pinned, 0, sizeof(pinned));
    for (uint32_t i = 0; i < 2000; i++) {
        bring(i);
        pinned[i] = i % 10 != 3; /* nine in ten */
    }
    for (uint32_t got = 0; got < 200;) {
        block_ref ref = victim(unpinned_cb, &asked, 8);

        if (!ref)
            continue;
        cr_assert(!pinned[number_of(index_block(ix, ref))]);
        drop(ref, true);
        got++;
    }
    cr_assert_eq(victim(unpinned_cb, &asked, 5000), 0);
    cr_expect_eq(asked, 2000u);
    cr_expect_eq(policy_count(p), 1800);
    cr_expect_eq(policy_list_count(policy_common(p), PINNED), 1800);
    cr_expect_eq(policy_list_count(policy_common(p), POLICY_CANDIDATES), 0);
    cr_assert_eq(victim(unpinned_cb, &asked, 5000), 0);
    cr_expect_eq(asked, 2000u);
}

Test(policy, what_comes_back_leaves_next)
{
    block_ref refs[10];
    int64_t looks = 100;

    memset(pinned, 0, sizeof(pinned));
    for (uint32_t i = 0; i < 10; i++) {
        refs[i] = bring(i);
        pinned[i] = i >= 4 && i < 8;
    }
    cr_expect_eq(evict(), 9u);
    cr_expect_eq(evict(), 8u);
    cr_expect_eq(number_of(index_block(ix, victim(unpinned_cb, NULL, 100))), 3u);
    for (uint32_t i = 4; i < 8; i++)
        cr_expect_eq(policy_list(index_block(ix, refs[i])), PINNED);
    policy_move(p, refs[4], POLICY_CANDIDATES); /* head first, as a request lets go of its blocks */
    policy_move(p, refs[5], POLICY_CANDIDATES);
    cr_expect_eq(evict(), 5u);
    cr_expect_eq(evict(), 4u);
    cr_expect_eq(evict(), 3u);
    policy_touch(p, &refs[6], 1, &outside); /* brings it back, too, as what was used last */
    cr_expect_eq(policy_list(index_block(ix, refs[6])), POLICY_CANDIDATES);
    for (uint32_t i = 3; i-- > 0;)
        cr_expect_eq(evict(), i);
    cr_expect_eq(evict(), 6u);
    policy_move(p, refs[7], OTHERS);
    cr_expect_eq(policy_victim(p, policy_common(p), PINNED, any_cb, NULL, &looks), 0u);
    cr_expect_eq(policy_victim(p, policy_common(p), OTHERS, any_cb, NULL, &looks), refs[7]);
    cr_expect_eq(looks, 99);
    drop(refs[7], true);
    cr_expect_eq(policy_count(p), 0u);
}

/* ---- kept over a restart ---- */

static block_ref seen[64];
static uint32_t seen_uses[64];
static unsigned seen_n;

static void see_cb(void *ctx, block_ref ref, uint32_t uses)
{
    (void)ctx;
    seen[seen_n] = ref;
    seen_uses[seen_n++] = uses;
}

Test(policy, what_goes_first_goes_first_again)
{
    block_ref refs[40], order[40];

    for (unsigned i = 0; i < 40; i++) {
        refs[i] = bring(i);
        if (i % 7 == 3)
            policy_touch(p, &refs[i / 2], 1, &outside);
    }
    policy_walk(p, see_cb, NULL);
    cr_assert_eq(seen_n, 40u);
    for (unsigned i = 0; i < 40; i++)
        policy_remove(p, refs[i], false);
    for (unsigned i = 0; i < 40; i++)
        policy_restore(p, seen[i], seen_uses[i]);
    for (unsigned i = 40; i-- > 0;) {
        order[i] = victim(any_cb, NULL, 1);
        policy_remove(p, order[i], true);
    }
    cr_expect_eq(memcmp(order, seen, sizeof(order)), 0);
}

/* ---- anything in any order ---- */

static block_ref in_dram[N];
static uint32_t in_dram_n;

static void random_step(uint64_t r)
{
    uint32_t number = (uint32_t)(r >> 8) % N;
    block_ref refs[8], ref;

    switch (r % 8) {
    case 0:
    case 1:
    case 2:
        if (in_dram[number])
            return;
        in_dram[number] = bring(number);
        in_dram_n++;
        return;
    case 3:
    case 4:
        for (uint32_t i = 0; i < 8; i++)
            refs[i] = in_dram[(number + i) % N];
        policy_touch(p, refs, 8, &outside);
        return;
    case 5:
        if (!in_dram[number])
            return;
        drop(in_dram[number], r & 0x10000);
        in_dram[number] = 0;
        in_dram_n--;
        return;
    case 6:
        pinned[number] = !pinned[number] && number % 5 == 0;
        if (!pinned[number] && in_dram[number] &&
            policy_list(index_block(ix, in_dram[number])) == PINNED)
            policy_move(p, in_dram[number], POLICY_CANDIDATES);
        return;
    default:
        ref = victim(unpinned_cb, NULL, 64);
        if (!ref)
            return;
        number = number_of(index_block(ix, ref));
        cr_assert_eq(in_dram[number], ref);
        cr_assert(!pinned[number]);
        drop(ref, true);
        in_dram[number] = 0;
        in_dram_n--;
    }
}

Test(policy, random_operations_lose_nothing)
{
    uint64_t r = 88172645463325252u;

    for (uint32_t step = 0; step < 200000; step++) {
        random_next(&r);
        random_step(r >> 11);
        cr_assert_eq(policy_count(p), in_dram_n);
    }
    for (uint32_t i = 0; i < N; i++)
        if (in_dram[i])
            policy_move(p, in_dram[i], POLICY_CANDIDATES);
    for (; in_dram_n > 0; in_dram_n--) {
        uint32_t number = evict();

        cr_assert_lt(number, N);
        cr_assert_neq(in_dram[number], 0, "%u came out twice", number);
        in_dram[number] = 0;
    }
    cr_assert_eq(evict(), N);
    cr_assert_eq(index_blocks(ix), 0);
}
