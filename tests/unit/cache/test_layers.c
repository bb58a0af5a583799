/* Reads of some layers of a part that lies on NVMe alone. */
#include "daemon/block_pool/layers.h"

#include "tests/unit/cache/cache_rig.h"

#define MANY 20u
#define LAYER 10000u
#define PART (MANY * LAYER)

static struct ns *space_many;
static struct layer_reads pool;

static void open_cb(void)
{
    static const uint32_t layers[] = {MANY};

    rig_open();
    pool = (struct layer_reads){
        .cache = rig.cache, .index = rig.index, .arena = rig.arena, .metrics = &rig.metrics};
    space_many = space_with("t", "many", 1, layers, LAYER);
}

TestSuite(layers, .init = open_cb, .fini = rig_close);

static int some(struct waiter *w, block_ref ref, uint32_t first, uint32_t n)
{
    *w = (struct waiter){.w = {.done_cb = waiter_cb}};
    return layers_get(&pool, ref, 0, first, n, 0, NUMA_NONE, &w->w);
}

static block_ref below(uint64_t number)
{
    return store_below(space_many, number);
}

static bool right(const struct waiter *w, block_ref ref, uint32_t first, uint32_t n)
{
    struct span span;

    cr_assert_eq(layers_span(w->w.layers, &span), 0);
    cr_assert(first >= span.first && first + n <= span.first + span.n);
    for (uint32_t s = first; s < first + n; s++) {
        const uint8_t *at = span.origin + (s - span.first) * LAYER;
        uint64_t mark = mark_of(block_of(ref), 0, s);

        if (memcmp(at, &mark, 8) != 0 || memcmp(at + LAYER - 8, &mark, 8) != 0)
            return false;
    }
    return true;
}

/* The wait has ended with the part, which the waiter uses. */
static void expect_whole(const struct waiter *w)
{
    cr_expect(w->calls == 1 && w->status == 0);
    cr_expect_null(w->w.layers);
}

static enum part_dram dram(block_ref ref)
{
    return block_of(ref)->part[0].dram;
}

static void all_ended(block_ref ref)
{
    cr_expect_eq(rig.cache->granted, 0u);
    cr_expect_null(pool.stage);
    cr_expect_eq(arena_slots_used(rig.arena), dram(ref) == PART_DRAM_READY ? 1u : 0u);
    drop(ref);
    cr_expect_eq(cache_evict(rig.cache, ref, CACHE_ALL), CACHE_EVICT_DONE);
    expect_nothing_held();
}

Test(layers, the_part_stays_where_it_is)
{
    block_ref ref = below(1);
    struct waiter w;

    for (uint32_t first = 0; first < 3; first++) {
        cr_assert_eq(some(&w, ref, 9 * first, 2), CACHE_PENDING);
        cr_expect_eq(dram(ref), PART_DRAM_NONE);
        fake_next(&rig.tier, 0);
        cr_assert(w.calls == 1 && w.status == 0);
        cr_assert_not_null(w.w.layers);
        cr_expect(right(&w, ref, 9 * first, 2));
        cr_expect_eq(dram(ref), PART_DRAM_NONE);
        cr_expect_eq(block_of(ref)->part[0].users, 0u);
        layers_put(w.w.layers);
    }
    all_ended(ref);
}

Test(layers, fragments_share_a_slot)
{
    block_ref ref = below(1), other = below(2);
    struct waiter w[40];

    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(some(&w[i], i % 2 ? other : ref, i, 1), CACHE_PENDING);
    cr_expect_eq(arena_slots_used(rig.arena), 1u);
    for (unsigned i = 4; i < 16; i++) /* 12 to 16 KiB each, of 200 KiB */
        cr_assert_eq(some(&w[i], i % 2 ? other : ref, i, 1), CACHE_PENDING);
    cr_expect_eq(arena_slots_used(rig.arena), 2u);
    for (unsigned i = 0; i < 16; i++)
        fake_next(&rig.tier, 0);
    for (unsigned i = 0; i < 16; i++) {
        cr_expect(right(&w[i], i % 2 ? other : ref, i, 1), "%u", i);
        layers_put(w[i].w.layers);
    }
    drop(other);
    cr_expect_eq(cache_evict(rig.cache, other, CACHE_ALL), CACHE_EVICT_DONE);
    all_ended(ref);
}

Test(layers, who_cancels_gets_nothing)
{
    block_ref ref = below(1);
    struct waiter w;

    for (int status = 0; status >= -EIO; status -= EIO) {
        cr_assert_eq(some(&w, ref, 3, 1), CACHE_PENDING);
        cache_get_cancel(rig.cache, &w.w);
        fake_next(&rig.tier, status);
        cr_expect_eq(w.calls, 0);
        cr_expect_eq(rig.tier.n_pending, 0u, "nor is the part read");
    }
    all_ended(ref);
}

Test(layers, what_can_not_be_had_so_is_read_whole)
{
    static const int why[] = {0, -ENODATA, -EBADMSG, -EIO};

    for (unsigned i = 0; i < 4; i++) {
        block_ref ref = below(1 + i);
        struct waiter w;

        if (i == 0) /* the tier knows before it reads */
            tier_refuses(-ENODATA, 1);
        cr_assert_eq(some(&w, ref, 3, 1), CACHE_PENDING);
        if (i > 0)
            fake_next(&rig.tier, why[i]);
        cr_assert_eq(w.calls, 0);
        cr_expect_eq(dram(ref), PART_DRAM_PENDING_READ);
        fake_next(&rig.tier, 0);
        expect_whole(&w);
        cr_expect_eq(dram(ref), PART_DRAM_READY);
        cache_put(rig.cache, ref, 0);
        all_ended(ref);
    }
}

/* Meanwhile another request read the part. */
Test(layers, the_part_came_to_dram_meanwhile)
{
    block_ref ref = below(1);
    struct waiter w, whole;

    cr_assert_eq(some(&w, ref, 3, 1), CACHE_PENDING);
    cr_assert_eq(some(&whole, ref, 3, 15), CACHE_PENDING);
    fake_finish(&rig.tier, fake_at(&rig.tier, 1), 0);
    expect_whole(&whole);
    fake_next(&rig.tier, -ENODATA);
    expect_whole(&w);
    cr_expect_eq(block_of(ref)->part[0].users, 2u);
    cache_put(rig.cache, ref, 0);
    cache_put(rig.cache, ref, 0);
    all_ended(ref);
}

Test(layers, who_comes_again_gets_the_part)
{
    block_ref ref = below(1);
    unsigned reads = 0;
    struct waiter w;

    for (;; reads++) {
        cr_assert_eq(some(&w, ref, reads % MANY, 1), CACHE_PENDING);
        fake_next(&rig.tier, 0);
        cr_assert_eq(w.status, 0);
        if (!w.w.layers)
            break;
        layers_put(w.w.layers);
        cr_assert_lt(reads, MANY);
    }
    cr_expect_geq(reads, PART / (LAYER + 3 * TIER_ALIGN));
    cr_expect_eq(dram(ref), PART_DRAM_READY);
    cache_put(rig.cache, ref, 0);
    cr_expect_eq(some(&w, ref, 1, 1), CACHE_READY);
    cr_expect_null(w.w.layers);
    cache_put(rig.cache, ref, 0);
    all_ended(ref);
}

Test(layers, neither_slot_nor_place_in_the_queue)
{
    block_ref ref = below(1), used[10];
    struct waiter w, users[10];
    unsigned n = 0;

    tier_refuses(-EAGAIN, 1);
    cr_expect_eq(some(&w, ref, 1, 1), -EAGAIN);
    for (; n < 10; n++) { /* until all slots are in use */
        used[n] = below(2 + n);
        if (some(&users[n], used[n], 0, MANY) != CACHE_PENDING)
            break;
    }
    cr_assert_eq(n, 10u);
    cr_expect_eq(some(&w, ref, 1, 1), -EBUSY);
    fake_next(&rig.tier, 0); /* the last one; the others ended while blocks were stored */
    for (unsigned i = 0; i < n; i++)
        put_and_drop(used[i], 0);
    cr_expect_eq(some(&w, ref, 1, 1), CACHE_PENDING);
    fake_next(&rig.tier, 0);
    cr_expect(right(&w, ref, 1, 1));
    layers_put(w.w.layers);
    drop(ref);
}

/* A read of layers of block 1 failed. Layers of block 2 keep the slot of both, and parts in use
 * take all others. */
static struct {
    block_ref ref, other, used[9];
    struct waiter w, piece, users[9];
} full;

static void fail_in_a_full_arena(void)
{
    full.ref = below(1);
    full.other = below(2);
    for (unsigned i = 0; i < 9; i++) {
        full.used[i] = below(3 + i);
        cr_assert_eq(some(&full.users[i], full.used[i], 0, MANY), CACHE_PENDING);
        fake_next(&rig.tier, 0);
    }
    cr_assert_eq(some(&full.w, full.ref, 3, 1), CACHE_PENDING);
    cr_assert_eq(some(&full.piece, full.other, 3, 1), CACHE_PENDING);
    fake_finish(&rig.tier, fake_at(&rig.tier, 0), -ENODATA);
    iterate();
    cr_assert_eq(full.w.calls, 0, "it waits for a slot");
    cr_expect_eq(dram(full.ref), PART_DRAM_NONE);
}

static void empty_the_arena(void)
{
    for (unsigned i = 0; i < 9; i++)
        put_and_drop(full.used[i], 0);
    fake_next(&rig.tier, 0);
    cr_expect_eq(full.piece.status, 0);
    layers_put(full.piece.w.layers);
    iterate();
}

Test(layers, without_a_slot_for_the_whole_part_he_waits)
{
    fail_in_a_full_arena();
    empty_the_arena();
    cr_assert_eq(dram(full.ref), PART_DRAM_PENDING_READ);
    fake_next(&rig.tier, 0);
    expect_whole(&full.w);
    cache_put(rig.cache, full.ref, 0);
    drop(full.ref);
    drop(full.other);
}

Test(layers, who_waits_for_a_slot_may_cancel)
{
    fail_in_a_full_arena();
    cache_get_cancel(rig.cache, &full.w.w);
    empty_the_arena();
    cr_expect_eq(full.w.calls, 0);
    cr_expect_eq(dram(full.ref), PART_DRAM_NONE);
    drop(full.ref);
    drop(full.other);
}

Test(layers, a_tenant_that_gets_no_more_has_no_room_and_loses_nothing)
{
    block_ref ref = below(1);
    struct waiter w;

    space_many->tenant->settings.dram_max = 1;
    cache_tenants_changed(rig.cache);
    cr_assert_eq(some(&w, ref, 3, 1), CACHE_PENDING);
    fake_finish(&rig.tier, fake_at(&rig.tier, 0), -ENODATA);
    iterate();
    cr_expect_eq(w.calls, 1);
    cr_expect_eq(w.status, -EBUSY);
    cr_expect_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    drop(ref);
}

/* The tier has reused its place. */
Test(layers, a_place_that_is_gone_is_a_miss)
{
    block_ref ref = below(1);
    struct waiter w;

    tier_refuses(-ESTALE, 2);
    cr_expect_eq(some(&w, ref, 1, 1), -ENOENT);
    cr_expect_eq(some(&w, ref, 1, 1), -ENOENT);
    cr_expect_eq(rig.tier.submits, 3u, "one write, and a read of layers and of the part");
    cr_expect_eq(rig.cache->granted, 0u);
    drop(ref);
    expect_nothing_held();
}
