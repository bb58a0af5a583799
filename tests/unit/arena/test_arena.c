/* The arena against a model. No two slots overlap, owners stay with their slots, and counters match
 * the slots in use. An empty slab changes its slot size. */
#include "daemon/base/poison.h"
#include "tests/unit/arena/arena_rig.h"
#include "tests/unit/random.h"

TestSuite(arena, .init = begin, .fini = end);

static uint32_t ready_n;
static uint8_t *ready_base[64];

static void in_turn_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    cr_assert_eq(ctx, &loop);
    cr_assert_eq(slab, ready_n, "one after the other");
    cr_assert_eq(bytes, MIB);
    ready_base[ready_n++] = base;
}

static void open_arena(uint64_t size, bool prefault)
{
    open_arena_as((struct arena_config){
        .size = size, .prefault = prefault, .slab_ready_cb = in_turn_cb, .ctx = &loop});
}

Test(arena, sizes)
{
    open_arena(3 * MIB + 5000, false);
    cr_expect_eq(arena_bytes_configured(arena), 3 * MIB, "whole slabs");
    cr_expect_eq(arena_bytes_ready(arena), 3 * MIB);
    cr_expect_eq(arena_slab_bytes(arena), MIB);
    cr_expect_eq(ready_n, 3u);
    cr_expect_eq(arena_padded(1), 4096u);
    cr_expect_eq(arena_padded(4096), 4096u);
    cr_expect_eq(arena_padded(4097), 8192u);
    arena_free(NULL);
}

Test(arena, refusals)
{
    struct arena_config c = {.size = MIB - 1, .slab = MIB, .slab_ready_cb = ready_cb};

    cr_expect_eq(arena_new(&loop, &c, &arena), -EINVAL, "not one slab");
    open_arena(2 * MIB, false);
    cr_expect_eq(arena_alloc(arena, MIB + 1, 0, NUMA_NONE), 0u, "longer than a slab");
    cr_expect_neq(arena_alloc(arena, MIB, 0, NUMA_NONE), 0u);
    cr_expect_neq(arena_alloc(arena, MIB, 0, NUMA_NONE), 0u);
    cr_expect_eq(arena_alloc(arena, 1, 0, NUMA_NONE), 0u, "full");
    cr_expect_eq(arena_bytes_used(arena), 2 * MIB);
}

static void count_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    (void)slab, (void)base, (void)bytes;
    ++*(uint32_t *)ctx;
}

/* A slot's padding is written to disk with the slot. */
Test(arena, padding_has_nothing_of_who_had_the_slot_before)
{
    slot_ref slot;
    uint8_t *p;

    open_arena(MIB, false);
    slot = arena_alloc(arena, 2 * ARENA_ALIGN, 0, NUMA_NONE);
    p = arena_memory(arena, slot, NULL);
    memset(p, 's', 2 * ARENA_ALIGN);
    arena_slot_free(arena, slot);
    slot = arena_alloc(arena, ARENA_ALIGN + 5, 0, NUMA_NONE);
    cr_assert_eq(arena_memory(arena, slot, NULL), p);
    poison(p, 2 * ARENA_ALIGN, 2 * ARENA_ALIGN);
    for (unsigned i = ARENA_ALIGN + 5; i < 2 * ARENA_ALIGN; i++)
        cr_assert_eq(p[i], 0);
}

/* AddressSanitizer, where it is built in, reports the first touch past the requested bytes, or of a
 * free slot. */
Test(arena, what_is_no_slots_is_poisoned)
{
    uint64_t whole = 2 * ARENA_ALIGN, asked = ARENA_ALIGN + 1000;
    slot_ref slot;
    char *p;

    open_arena(2 * MIB, false);
    slot = arena_alloc(arena, asked, 0, NUMA_NONE);
    p = arena_memory(arena, slot, NULL);
    memset(p, 1, asked);
#ifdef POISON
    cr_expect_eq(poison_begins(p, whole), asked);
    cr_expect_eq(poison_begins(p + whole, 1), 0u, "its neighbour");
    arena_slot_free(arena, slot);
    cr_expect_eq(poison_begins(p, 1), 0u, "the slab has no slots any more");
    slot = arena_alloc(arena, whole, 0, NUMA_NONE);
    cr_expect_eq(arena_memory(arena, slot, NULL), p);
#endif
    cr_expect_eq(poison_begins(p, whole), whole);
    close_arena();
    cr_expect_eq(poison_begins(p, whole), whole, "the next owner of that memory may use it");
}

/* Address space only: a page is taken when it is touched. */
Test(arena, large_ones_of_any_slab)
{
    uint32_t n = 0, slots = 0;
    struct arena_config c = {.size = 20480 * MIB, .slab_ready_cb = count_cb, .ctx = &n};

    open_arena_as(c);
    cr_expect_eq(n, 20480u);
    for (slot_ref slot; (slot = arena_alloc(arena, MIB / 2, slots, NUMA_NONE)) != 0; slots++)
        if (slots % 1000 == 0)
            memset(arena_memory(arena, slot, NULL), 1, 4096);
    cr_expect_eq(slots, 2 * 20480u);
    cr_expect_eq(arena_bytes_used(arena), 20480 * MIB);
    close_arena();
    c.slab = MIB;
    c.size = 16384 * 1024 * MIB;
    cr_expect_eq(arena_new(&loop, &c, &arena), -EINVAL, "16 TiB: more than slots have names");
}

Test(arena, closed_while_it_grows)
{
    open_arena(256 * MIB, true);
}

/* ---- owners ---- */

struct visit {
    slot_ref slot[256];
    uint64_t seen[256];
    uint32_t n;
    bool twins;
};

static bool visit_cb(void *ctx, uint64_t owner)
{
    struct visit *v = ctx;

    cr_assert(owner < 256 && !v->seen[owner], "owner %llu", (unsigned long long)owner);
    v->seen[owner] = 1;
    v->n++;
    arena_slot_free(arena, v->slot[owner]);
    if (v->twins && owner + 1 < 256 && v->slot[owner + 1]) {
        arena_slot_free(arena, v->slot[owner + 1]);
        v->slot[owner + 1] = 0;
    }
    return true;
}

/* Blocks of several parts have twins: the visit of one slot may free its neighbour, too. */
Test(arena, owners_of_a_slab_may_be_emptied_on_the_way)
{
    for (unsigned twins = 0; twins < 2; twins++) {
        struct visit v = {.twins = twins};

        ready_n = 0;
        open_arena(2 * MIB, false);
        for (uint64_t i = 0; i < 4; i++)
            v.slot[i] = arena_alloc(arena, MIB / 4, i, NUMA_NONE);
        cr_assert_neq(arena_alloc(arena, MIB / 4, 77, NUMA_NONE), 0u, "in the other slab");
        arena_slab_owners(arena, arena_slab_of(arena, v.slot[0]), visit_cb, &v);
        cr_expect_eq(v.n, twins ? 2u : 4u);
        cr_expect_eq(arena_bytes_used(arena), MIB / 4);
        close_arena();
    }
}

/* ---- random ops ---- */

#define SLOTS 400
#define SLABS 8

static struct held {
    slot_ref slot;
    uint64_t bytes, owner;
} held[SLOTS];

static void held_check(const struct held *h)
{
    uint8_t *p = arena_memory(arena, h->slot, NULL),
            *base = ready_base[arena_slab_of(arena, h->slot)];
    uint64_t padded = arena_padded(h->bytes);

    cr_assert_eq((uintptr_t)p % ARENA_ALIGN, 0u);
    cr_assert(p >= base && p + padded <= base + MIB, "outside of its slab");
    cr_assert_eq(arena_slot_bytes(arena, h->slot), padded);
    cr_assert_eq(memcmp(p, &h->owner, 8), 0, "another slot lies over this one");
    cr_assert_eq(memcmp(p + h->bytes - 8, &h->owner, 8), 0, "another slot lies over this one");
}

static uint64_t present_slab;

static bool slab_owner_cb(void *ctx, uint64_t owner)
{
    uint64_t *n = ctx;

    for (uint32_t i = 0; i < SLOTS; i++)
        if (held[i].slot && held[i].owner == owner) {
            cr_assert_eq(arena_slab_of(arena, held[i].slot), present_slab);
            (*n)++;
            return true;
        }
    cr_assert_fail("an owner of no slot");
    return false;
}

static void owners_check(slot_ref slot)
{
    uint64_t visited = 0, expected = 0;

    present_slab = arena_slab_of(arena, slot);
    for (uint32_t i = 0; i < SLOTS; i++)
        expected += held[i].slot && arena_slab_of(arena, held[i].slot) == present_slab;
    arena_slab_owners(arena, arena_slab_of(arena, slot), slab_owner_cb, &visited);
    cr_assert_eq(visited, expected);
}

Test(arena, random_ops_against_a_model)
{
    static const uint32_t sizes[] = {8, 4096, 10000, 65536, 300000, 1u << 20};
    uint64_t used = 0, owner = 0, allocs = 0, fulls = 0;

    open_arena(SLABS * MIB, false);
    for (int op = 0; op < 60000; op++) {
        struct held *h = &held[below(SLOTS)];
        /* it fills up and runs empty by turns, so that slabs change their size */
        bool add = below(100) < (op / 3000 % 2 ? 25u : 75u);

        if (h->slot) {
            held_check(h);
            if (op % 32 == 0)
                owners_check(h->slot);
        }
        if (add && !h->slot) {
            h->bytes = sizes[below(6)];
            h->owner = ++owner;
            h->slot = arena_alloc(arena, h->bytes, h->owner, NUMA_NONE);
            fulls += !h->slot;
            if (h->slot) {
                uint8_t *p = arena_memory(arena, h->slot, NULL);

                memcpy(p, &h->owner, 8);
                memcpy(p + h->bytes - 8, &h->owner, 8);
                used += arena_padded(h->bytes);
                allocs++;
            }
        } else if (!add && h->slot) {
            arena_slot_free(arena, h->slot);
            used -= arena_padded(h->bytes);
            h->slot = 0;
        }
        cr_assert_eq(arena_bytes_used(arena), used);
    }
    cr_expect(allocs > 1000 && fulls > 100, "%llu allocated, %llu times full",
              (unsigned long long)allocs, (unsigned long long)fulls);
    for (uint32_t i = 0; i < SLOTS; i++)
        if (held[i].slot)
            arena_slot_free(arena, held[i].slot);
    cr_expect_eq(arena_bytes_used(arena), 0u);
    for (uint32_t i = 0; i < SLABS; i++)
        cr_expect_neq(arena_alloc(arena, MIB, i, NUMA_NONE), 0u, "every slab is whole again");
}
