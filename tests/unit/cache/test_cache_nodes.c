/* The cache over memory on two NUMA nodes. A slot lies on the named node where that costs nothing,
 * and no block that is used more leaves for it. */
#include "tests/unit/cache/cache_rig.h"
#include "tests/unit/fake_numa.h"

#define BLOCKS 512u /* that fill DRAM, half of them on each node */

static void nodes_open(void)
{
    rig.numa = &fake_numa;
    rig_open();
}

TestSuite(cache_nodes, .init = nodes_open, .fini = rig_close);

static int node_of(block_ref ref)
{
    cr_assert_eq(block_of(ref)->part[0].dram, PART_DRAM_READY);
    return arena_slot_node(rig.arena, part_slot(&block_of(ref)->part[0]));
}

static void tier_run(void)
{
    iterate();
    while (rig.tier.n_pending > 0) {
        fake_next(&rig.tier, 0);
        iterate();
    }
}

/* Stored in DRAM and below; not held. */
static block_ref store_on(struct ns *ns, uint64_t number, int node)
{
    block_ref ref = open_block(ns, number);
    struct pending_write *f;

    cr_assert_eq(
        pending_write_claim(rig.cache, &rig.pending_writes[0], ref, 0, 0, LAYERS, node, &f), 0);
    marks_write(ref, 0, memory_to_fill(f), 0, LAYERS);
    pending_write_done(rig.cache, f, LAYERS, true);
    drop(ref);
    tier_run();
    return ref;
}

static block_ref fetch_to(struct ns *ns, uint64_t number, int node)
{
    struct waiter w = {.w.done_cb = waiter_cb};
    block_ref ref = find(ns, number);

    cr_assert_eq(cache_get(rig.cache, ref, 0, 0, node, &w.w), CACHE_PENDING);
    tier_run();
    cr_assert(w.calls == 1 && w.status == 0);
    cr_expect(marks_right(ref, 0));
    cache_put(rig.cache, ref, 0);
    return ref;
}

/* Fills DRAM with blocks numbered from 0, on the nodes in turn; ref[i] is block i. */
static struct ns *fill_dram(block_ref ref[BLOCKS])
{
    struct ns *small = space("small", 1, 4096 / LAYERS);

    for (uint32_t i = 0; i < BLOCKS; i++) {
        ref[i] = store_on(small, i, i % 2 ? NODE_B : NODE_A);
        cr_assert_eq(node_of(ref[i]), i % 2 ? NODE_B : NODE_A);
    }
    cr_assert_eq(arena_bytes_used(rig.arena), 2 * MIB);
    return small;
}

static uint32_t left_dram(const block_ref ref[BLOCKS], uint32_t odd)
{
    uint32_t n = 0;

    for (uint32_t i = odd; i < BLOCKS; i += 2)
        n += block_of(ref[i])->part[0].dram == PART_DRAM_NONE;
    return n;
}

Test(cache_nodes, dumps_and_reads_lie_on_the_node_that_asked)
{
    block_ref ref = store_on(rig.one, 1, NODE_B);

    cr_expect_eq(node_of(ref), NODE_B);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_expect_eq(node_of(fetch_to(rig.one, 1, NODE_A)), NODE_A);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_expect_eq(node_of(fetch_to(rig.one, 1, NODE_B)), NODE_B);
    cr_expect(rig.metrics.arena_slots_numa_local == 3 && rig.metrics.arena_slots_numa_remote == 0);
    store_on(rig.one, 2, NUMA_NONE);
    cr_expect_eq(rig.metrics.arena_slots_numa_local, 3u, "a request without a node is not counted");
}

/* A full cache, as most caches are for most of their life. The nodes' requests alternate. A node
 * alone would rightly get the memory of both. */
Test(cache_nodes, when_dram_is_full_each_node_gives_its_cold_blocks)
{
    block_ref ref[BLOCKS];
    struct ns *small = fill_dram(ref);
    uint64_t near = rig.metrics.arena_slots_numa_local;
    static const int asker[] = {NODE_B, NODE_B, NODE_A, NODE_A, NODE_B, NODE_A};

    for (uint32_t i = 0; i < 120; i++)
        cr_expect_eq(node_of(store_on(small, BLOCKS + i, asker[i % 6])), asker[i % 6]);
    cr_expect_eq(rig.metrics.arena_slots_numa_local, near + 120);
    cr_expect_eq(rig.metrics.arena_slots_numa_remote, 0u);
    cr_expect_eq(left_dram(ref, 0), 60u);
    cr_expect_eq(left_dram(ref, 1), 60u);
}

Test(cache_nodes, one_node_may_have_all_of_dram)
{
    block_ref ref[BLOCKS];
    struct ns *small = fill_dram(ref);
    uint64_t asked = rig.metrics.arena_slots_numa_local;

    for (uint32_t i = 0; i < 400; i++)
        store_on(small, BLOCKS + i, NODE_B);
    asked = rig.metrics.arena_slots_numa_local + rig.metrics.arena_slots_numa_remote - asked;
    cr_expect_eq(asked, 400u);
    cr_expect_gt(left_dram(ref, 0), 100u, "cold blocks of the other node went, too");
    cr_expect_eq(left_dram(ref, 0) + left_dram(ref, 1), 400u);
}

Test(cache_nodes, no_hot_block_goes_for_the_sake_of_its_node)
{
    block_ref ref[BLOCKS];
    struct ns *small = fill_dram(ref);

    for (int use = 0; use < 3; use++)
        for (uint32_t i = 1; i < BLOCKS; i += 2)
            cache_touch(rig.cache, small, &ref[i], 1);
    for (uint32_t i = 0; i < 32; i++)
        cr_expect_eq(node_of(store_on(small, BLOCKS + i, NODE_B)), NODE_A, "block %u", i);
    cr_expect_eq(rig.metrics.arena_slots_numa_remote, 32u);
    cr_expect_eq(left_dram(ref, 1), 0u);
    cr_expect_eq(left_dram(ref, 0), 32u);
}
