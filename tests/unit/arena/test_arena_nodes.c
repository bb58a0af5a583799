/* The arena's memory spread over two NUMA nodes. */
/* Sanitizers: thread */
#include "daemon/mapping/grant.h"
#include "tests/unit/arena/arena_rig.h"
#include "tests/unit/fake_numa.h"
#include "tests/unit/random.h"

#include <sys/mman.h>
#include <unistd.h>

TestSuite(arena_nodes, .init = begin, .fini = end);

static void open_arena(uint64_t size, const struct numa *numa)
{
    open_arena_as((struct arena_config){.size = size, .prefault = true, .numa = numa});
    await_ready(size);
}

static struct arena_node node_at(uint32_t i)
{
    struct arena_node n;

    arena_node(arena, i, &n);
    return n;
}

static slot_ref slot_on(int wanted, uint64_t bytes, int expected)
{
    slot_ref slot = arena_alloc(arena, bytes, 1, wanted);

    cr_assert_neq(slot, 0u);
    cr_expect_eq(arena_slot_node(arena, slot), expected);
    return slot;
}

Test(arena_nodes, memory_is_spread_evenly_and_slots_lie_where_they_are_wanted)
{
    slot_ref a, b;

    open_arena(6 * MIB, &fake_numa);
    cr_assert_eq(arena_nodes(arena), 2u);
    cr_expect(node_at(0).node == NODE_A && node_at(0).ready_bytes == 3 * MIB);
    cr_expect(node_at(1).node == NODE_B && node_at(1).ready_bytes == 3 * MIB);
    b = slot_on(NODE_B, MIB / 2, NODE_B);
    a = slot_on(NODE_A, MIB / 2, NODE_A);
    cr_expect(node_at(0).used_bytes == MIB / 2 && node_at(1).used_bytes == MIB / 2);
    arena_slot_free(arena, b);
    cr_expect_eq(node_at(1).used_bytes, 0u);
    slot_on(NODE_B, MIB / 4, NODE_B);
    cr_expect(node_at(0).used_bytes == MIB / 2 && node_at(1).used_bytes == MIB / 4);
    arena_slot_free(arena, a);
    cr_expect_eq(arena_bytes_used(arena), MIB / 4);
}

Test(arena_nodes, a_full_node_borrows_and_nothing_is_refused_while_there_is_room)
{
    slot_ref borrowed;

    open_arena(4 * MIB, &fake_numa);
    for (int i = 0; i < 4; i++)
        slot_on(NODE_A, MIB / 2, NODE_A);
    borrowed = slot_on(NODE_A, MIB / 2, NODE_B);
    for (int i = 0; i < 3; i++)
        slot_on(NODE_A, MIB / 2, NODE_B);
    cr_expect_eq(arena_alloc(arena, 4096, 1, NODE_A), 0u);
    cr_expect_eq(arena_alloc(arena, 4096, 1, NODE_B), 0u);
    cr_expect_eq(arena_alloc(arena, MIB / 2, 1, NUMA_NONE), 0u);
    arena_slot_free(arena, borrowed);
    slot_on(NODE_A, MIB / 2, NODE_B);
    cr_expect_eq(arena_bytes_used(arena), 4 * MIB);
}

static unsigned mappings_ready;

static void mapping_cb(void *ctx, enum arena_granted_event event, uint32_t mapping, void *base,
                       uint64_t bytes)
{
    (void)ctx, (void)base, (void)bytes;
    mappings_ready += event == GRANTED_READY;
    if (event == GRANTED_GOES)
        grant_let_go(arena, mapping);
}

/* Shared mappings are spread over nodes like the arena, but no node's arena memory counts them. */
Test(arena_nodes, mappings_are_spread_too)
{
    struct arena_config c = {.size = 2 * MIB,
                             .prefault = true,
                             .numa = &fake_numa,
                             .granted = 4 * MIB,
                             .granted_max = 4 * MIB,
                             .granted_cb = mapping_cb};
    unsigned on[2] = {0, 0};
    struct arena_group *g;
    uv_async_t awake;
    slot_ref slot;

    open_arena_as(c);
    await_ready(2 * MIB);
    cr_assert_eq(grant_group_open(arena, "a", &g), 0);
    cr_assert_eq(uv_async_init(&loop, &awake, NULL), 0);
    for (unsigned i = 0; i < 4; i++) {
        cr_assert_eq(grant_slot(arena, g, MIB, 1, &slot), -EAGAIN);
        for (int turns = 0; turns < 5000 && mappings_ready == i; turns++) {
            uv_run(&loop, UV_RUN_NOWAIT);
            uv_sleep(1);
        }
        cr_assert_eq(grant_slot(arena, g, MIB, 1, &slot), 0);
        on[arena_slot_node(arena, slot) == NODE_B]++;
    }
    cr_expect(on[0] == 2 && on[1] == 2);
    cr_expect(node_at(0).ready_bytes == MIB && node_at(0).used_bytes == 0);
    uv_close((uv_handle_t *)&awake, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
    grant_group_close(arena, g);
}

/* A slab that is not full comes before a fresh one, wherever it lies. */
Test(arena_nodes, wanted_nowhere_in_particular)
{
    open_arena(8 * MIB, &fake_numa);
    slot_on(NODE_B, MIB / 2, NODE_B);
    slot_on(NUMA_NONE, MIB / 2, NODE_B);
    for (int i = 0; i < 14; i++)
        cr_assert_neq(arena_alloc(arena, MIB / 2, 1, NUMA_NONE), 0u);
    cr_expect_eq(arena_alloc(arena, MIB / 2, 1, NUMA_NONE), 0u);
    close_arena();
    open_arena(8 * MIB, &fake_numa);
    for (int i = 0; i < 4; i++)
        cr_assert_neq(arena_alloc(arena, MIB, 1, 5), 0u, "a node that is none of the arena's");
    cr_expect(node_at(0).used_bytes == 2 * MIB && node_at(1).used_bytes == 2 * MIB,
              "both nodes keep room");
}

Test(arena_nodes, an_empty_slab_takes_another_size_on_its_node)
{
    slot_ref slot[4];

    open_arena(2 * MIB, &fake_numa);
    for (int i = 0; i < 4; i++)
        slot[i] = slot_on(NODE_B, MIB / 4, NODE_B);
    slot_on(NODE_B, MIB, NODE_A);
    cr_expect_eq(arena_alloc(arena, MIB, 1, NODE_B), 0u);
    for (int i = 0; i < 4; i++)
        arena_slot_free(arena, slot[i]);
    slot_on(NODE_A, MIB, NODE_B);
}

Test(arena_nodes, memory_counts_where_it_came_to_lie)
{
    fake_memory.full = NODE_B;
    fake_memory.instead = NODE_A;
    open_arena(4 * MIB, &fake_numa);
    cr_expect(node_at(0).ready_bytes == 4 * MIB && node_at(1).ready_bytes == 0);
    slot_on(NODE_B, MIB, NODE_A);
    close_arena();
    fake_memory.instead = 77; /* a node with memory and no processors */
    open_arena(4 * MIB, &fake_numa);
    cr_expect(node_at(0).ready_bytes == 2 * MIB && node_at(1).ready_bytes == 0);
    slot_on(NODE_B, MIB, NUMA_NONE);
    slot_on(NODE_A, MIB, NODE_A);
    slot_on(NODE_A, MIB, NODE_A);
    slot_on(NODE_A, MIB, NUMA_NONE);
}

Test(arena_nodes, a_kernel_that_refuses_stops_nothing)
{
    fake_memory.refuse = -EPERM;
    open_arena(4 * MIB, &fake_numa);
    cr_expect(node_at(0).ready_bytes == 0 && node_at(1).ready_bytes == 0);
    for (int i = 0; i < 4; i++)
        memset(arena_memory(arena, slot_on(NODE_B, MIB, NUMA_NONE), NULL), 1, MIB);
    cr_expect_eq(arena_bytes_used(arena), 4 * MIB);
}

Test(arena_nodes, one_node_is_none)
{
    struct numa one = fake_numa; /* one node counts as none */

    one.n = 1;
    open_arena(2 * MIB, &one);
    cr_expect_eq(arena_nodes(arena), 0u);
    slot_on(NODE_A, MIB, NUMA_NONE);
    slot_on(NODE_B, MIB, NUMA_NONE);
    cr_expect_eq(fake_memory.prefers, 0u, "the kernel is not troubled");
}

/* The arena can't place memory that others touch first. */
Test(arena_nodes, without_prefault_nothing_is_placed)
{
    open_arena_as((struct arena_config){.size = 4 * MIB, .numa = &fake_numa});
    cr_expect_eq(arena_nodes(arena), 0u);
    cr_expect_eq(fake_memory.prefers, 0u);
    slot_on(NODE_B, MIB, NUMA_NONE);
}

/* A file's memory was placed by the run before, maybe not where this run would have put it. */
Test(arena_nodes, kept_memory_counts_where_it_lies)
{
    static const int lies[] = {NODE_B, NODE_A, NODE_B, NODE_B};
    struct arena_config c = {
        .size = 4 * MIB, .file = true, .fd = memfd_create("arena", 0), .numa = &fake_numa};
    slot_ref early, kept;

    cr_assert(c.fd >= 0 && ftruncate(c.fd, 4 * MIB) == 0);
    open_arena_as(c);
    kept = arena_slot_take(arena, 2, 1, MIB / 4);
    early = arena_slot_take(arena, 3, 1, MIB / 4);
    cr_assert(kept != 0 && early != 0);
    arena_slot_free(arena, early);
    fake_memory.lies = lies;
    cr_assert_eq(arena_grow(arena), 0);
    await_ready(4 * MIB);
    cr_expect(node_at(0).ready_bytes == MIB && node_at(1).ready_bytes == 3 * MIB);
    cr_expect(node_at(0).used_bytes == 0 && node_at(1).used_bytes == MIB / 4);
    cr_expect_eq(arena_slot_node(arena, kept), NODE_B);
    for (int i = 0; i < 3; i++)
        cr_expect_eq(arena_slab_of(arena, slot_on(NODE_B, MIB / 4, NODE_B)), 2u);
    arena_slot_free(arena, kept);
    cr_expect_eq(node_at(1).used_bytes, 3 * (MIB / 4));
    close_arena();
    close(c.fd);
}

/* ---- random ops ---- */

#define SLOTS 64

/* Slots of one size, so that it is known what a node has left. */
Test(arena_nodes, who_gets_another_node_could_not_have_his)
{
    static const int nodes[] = {NODE_A, NODE_B, NUMA_NONE};
    slot_ref held[SLOTS] = {0};
    uint64_t used[2] = {0};

    open_arena(12 * MIB, &fake_numa);
    for (int round = 0; round < 20000; round++) {
        uint32_t at = below(SLOTS), want = below(3), got;

        if (held[at]) {
            got = arena_slot_node(arena, held[at]) == NODE_B;
            arena_slot_free(arena, held[at]);
            held[at] = 0;
            used[got] -= MIB / 4;
        } else {
            held[at] = arena_alloc(arena, MIB / 4, 1, nodes[want]);
            cr_assert_eq(held[at] == 0, used[0] + used[1] == 12 * MIB);
            if (!held[at])
                continue;
            got = arena_slot_node(arena, held[at]) == NODE_B;
            cr_assert(want == 2 || got == want || used[want] == 6 * MIB);
            used[got] += MIB / 4;
        }
        cr_assert(node_at(0).used_bytes == used[0] && node_at(1).used_bytes == used[1]);
    }
}
