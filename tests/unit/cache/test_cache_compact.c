/* Slabs with blocks that may not be evicted are emptied for slots of another size. Such blocks are
 * guaranteed ones, and those of which another part is in use. The arena has two slabs of 4 slots.
 */
#include "tests/unit/cache/cache_rig.h"

#define SLOT (MIB / 4)

static struct ns *quiet, *noisy,
    *big; /* of three tenants; a block of `big` takes two slots of the others */

static void copy_all(void)
{
    while (n_copies > 0)
        copy_next();
}

static void compact_open(void)
{
    rig_open();
    n_copies = 0;
    quiet = rig.one;
    noisy = space_of("u", "one", 1, SLOT / LAYERS);
    big = space_of("v", "big", 1, 2 * SLOT / LAYERS);
    cache_copier_attach(rig.cache, copy_cb, &rig);
}

TestSuite(cache_compact, .init = compact_open, .fini = rig_close);

static void fill(struct ns *ns, uint64_t number)
{
    block_ref ref = open_block(ns, number);

    cache_touch(rig.cache, ns, &ref, 1);
    cr_assert_eq(dump(ref, 0, 0, LAYERS), 0);
    memset(arena_memory(rig.arena, part_slot(cache_part(rig.cache, ref, 0)), NULL), 1 + (int)number,
           SLOT);
    drop(ref);
    settle();
}

/* Each slab has two blocks of both. */
static void mix(uint64_t guaranteed)
{
    quiet->tenant->settings.dram_min = guaranteed;
    for (uint64_t i = 0; i < 4; i++) {
        fill(quiet, i);
        fill(noisy, i);
    }
    cache_tenants_changed(rig.cache);
    settle();
}

/* How many of the quiet tenant's blocks are in DRAM, with their bytes. */
static unsigned whole(uint64_t n)
{
    unsigned found = 0;

    for (uint64_t i = 0; i < n; i++) {
        block_ref ref = find(quiet, i);
        const uint8_t *at;

        if (ref == 0 || !cache_in_dram(rig.cache, ref))
            continue;
        at = arena_memory(rig.arena, part_slot(cache_part(rig.cache, ref, 0)), NULL);
        cr_expect(at[0] == 1 + i && memcmp(at, at + 1, SLOT - 1) == 0, "block %u", (unsigned)i);
        found++;
    }
    return found;
}

static int want(uint64_t number, struct pending_write **f)
{
    block_ref ref = open_block(big, number);
    int rc = claim(ref, 0, 0, 1, f);

    drop(ref);
    return rc;
}

Test(cache_compact, room_for_another_size_alongside_what_is_guaranteed)
{
    struct pending_write *f[2];

    mix(4 * SLOT);
    cr_assert_eq(want(0, &f[0]), -EBUSY);
    cr_assert_eq(want(0, &f[0]), -EBUSY, "it looks at all blocks of the other size");
    iterations(2);
    cr_assert_eq(n_copies, 2u, "the two of the slab that is emptied");
    cr_expect_eq(want(0, &f[0]), -EBUSY);
    copy_all();
    settle();
    cr_expect_eq(rig.metrics.arena_parts_moved, 2u);
    cr_assert_eq(want(0, &f[0]), 0);
    cr_assert_eq(want(1, &f[1]), 0);
    cr_expect_eq(whole(4), 4u);
    cr_expect_eq(quiet->tenant->dram_bytes, 4 * SLOT);
    cr_expect_eq(arena_bytes_used(rig.arena), 8 * SLOT);
    for (int i = 0; i < 2; i++)
        pending_write_done(rig.cache, f[i], 1, false);
}

/* A waiter wants room while the two guaranteed parts of a slab are being copied. */
static void copies_begin(struct pending_write **f)
{
    mix(4 * SLOT);
    cr_assert_eq(want(0, f), -EBUSY);
    iterations(2);
    cr_assert_eq(n_copies, 2u);
}

static void use_all(bool begin)
{
    for (uint64_t i = 0; i < 4; i++)
        if (begin)
            use(find(quiet, i), 0);
        else
            cache_put(rig.cache, find(quiet, i), 0);
}

Test(cache_compact, a_part_in_use_moves_when_it_is_let_go)
{
    struct pending_write *f;

    copies_begin(&f);
    use_all(true); /* whichever two it is */
    copy_all();
    settle();
    cr_expect_eq(rig.metrics.arena_parts_moved, 0u);
    use_all(false);
    settle();
    copy_all();
    settle();
    cr_expect_eq(rig.metrics.arena_parts_moved, 2u);
    cr_assert_eq(want(0, &f), 0);
    cr_expect_eq(whole(4), 4u);
    pending_write_done(rig.cache, f, 1, false);
}

/* Blocks of two parts, which lie in different slabs; the first two blocks are in use, by one part each. */
Test(cache_compact, room_for_another_size_alongside_blocks_of_parts_in_use)
{
    struct ns *wide = space_of("t", "wide", 2, SLOT / LAYERS);
    struct pending_write *f[2];
    block_ref ref;

    for (uint32_t part = 0; part < 2; part++)
        for (uint64_t i = 0; i < 4; i++) {
            ref = open_block(wide, i);
            cr_assert_eq(dump(ref, part, 0, LAYERS), 0);
            drop(ref);
        }
    settle();
    for (uint64_t i = 0; i < 2; i++)
        use(find(wide, i), 1);
    cr_assert_eq(want(0, &f[0]), -EBUSY);
    settle();
    cr_assert_eq(n_copies, 2u, "the two that stay, of the slab that has nothing in use");
    copy_all();
    settle();
    cr_expect_eq(rig.metrics.arena_parts_moved, 2u);
    for (uint64_t i = 0; i < 2; i++)
        cr_assert_eq(want(i, &f[i]), 0);
    for (uint64_t i = 0; i < 2; i++) {
        cr_expect(cache_in_dram(rig.cache, find(wide, i)), "block %u", (unsigned)i);
        pending_write_done(rig.cache, f[i], 1, false);
        cache_put(rig.cache, find(wide, i), 1);
    }
}

Test(cache_compact, where_all_is_guaranteed_nothing_moves_or_leaves)
{
    struct pending_write *f;

    quiet->tenant->settings.dram_min = 8 * SLOT;
    for (uint64_t i = 0; i < 8; i++)
        fill(quiet, i);
    cr_assert_eq(want(0, &f), -EBUSY);
    settle();
    cr_expect_eq(n_copies, 0u);
    cr_expect_eq(want(0, &f), -EBUSY);
    cr_expect_eq(whole(8), 8u);
    /* and the slabs take as many parts as before */
    fill(quiet, 8);
    cr_expect_eq(quiet->tenant->dram_bytes, 8 * SLOT);
}

/* A waiter for room itself uses the part that is in the way, as an append that builds may. Nothing
 * else happens. */
static struct {
    struct asker a;
    struct deadlines deadlines;
    uv_timer_t limit;
    block_ref ref;
} waiter;

static void limit_cb(uv_timer_t *timer)
{
    (void)timer;
    cr_assert_fail("nothing looked at it again");
}

static void waiter_open(void)
{
    ask(&waiter.a);
    cr_assert_eq(deadlines_init(&waiter.deadlines, &rig.loop), 0);
    cr_assert_eq(uv_timer_init(&rig.loop, &waiter.limit), 0);
    cr_assert_eq(uv_timer_start(&waiter.limit, limit_cb, 60000, 0), 0);
    rig.cache->config.deadlines = &waiter.deadlines;
}

static void waiter_close(void)
{
    uv_close((uv_handle_t *)&waiter.limit, NULL);
    cache_compact_disarm(rig.cache);
    deadlines_close(&waiter.deadlines);
}

static void wait_until_tried(void)
{
    cr_assert(cache_wait_for(rig.cache, &waiter.a.r, WAIT_SLOT));
    while (waiter.a.calls == 0)
        uv_run(&rig.loop, UV_RUN_ONCE);
}

Test(cache_compact, who_waits_may_have_the_part_that_is_in_the_way, .init = waiter_open,
     .fini = waiter_close)
{
    struct pending_write *f;

    mix(4 * SLOT);
    use_all(true);
    cr_assert_eq(want(0, &f), -EBUSY);
    iterations(2);
    cr_assert_neq(rig.cache->compact.slab, 0u, "a slab is closed, for parts that stay in use");
    wait_until_tried();
    cr_expect_eq(rig.cache->compact.slab, 0u, "it is put back");
    use_all(false);
}

Test(cache_compact, who_waits_may_take_the_part_while_it_is_copied, .init = waiter_open,
     .fini = waiter_close)
{
    struct pending_write *f;

    copies_begin(&f);
    use_all(true);
    copy_all();
    settle();
    cr_assert_neq(rig.cache->compact.slab, 0u);
    wait_until_tried();
    while (rig.cache->compact.slab != 0)
        uv_run(&rig.loop, UV_RUN_ONCE);
    cr_expect_eq(rig.metrics.arena_parts_moved, 0u);
    use_all(false);
}

static void want_again_cb(struct cache_retry *r)
{
    struct pending_write *f;

    cr_assert_eq(claim(waiter.ref, 0, 0, 1, &f), -EBUSY); /* which releases nothing */
    cr_assert(cache_wait_for(rig.cache, r, WAIT_SLOT));
}

static void run_until_compacting(bool compacting)
{
    while ((rig.cache->compact.slot_bytes > 0) != compacting)
        uv_run(&rig.loop, UV_RUN_ONCE);
}

Test(cache_compact, what_is_not_tried_for_a_moment_is_tried_after_it, .init = waiter_open,
     .fini = waiter_close)
{
    mix(4 * SLOT);
    use_all(true);
    waiter.ref = open_block(big, 0);
    waiter.a.r.retry_cb = want_again_cb;
    want_again_cb(&waiter.a.r);
    run_until_compacting(true);
    run_until_compacting(false);
    cr_assert_lt(uv_now(&rig.loop), rig.cache->compact.again_ms);
    cache_released(rig.cache);
    run_until_compacting(true);
    cr_expect_geq(uv_now(&rig.loop), rig.cache->compact.again_ms);
    /* Once: in the next pause nothing is released, and after it nothing is tried. */
    run_until_compacting(false);
    while (uv_now(&rig.loop) < rig.cache->compact.again_ms + 100) {
        uv_run(&rig.loop, UV_RUN_NOWAIT);
        cr_assert_eq(rig.cache->compact.slot_bytes, 0u);
        uv_sleep(5);
    }
    cache_retry_cancel(&waiter.a.r);
    drop(waiter.ref);
    use_all(false);
}

Test(cache_compact, what_is_evicted_by_name_on_its_way_is_gone)
{
    struct pending_write *f;

    copies_begin(&f);
    for (uint64_t i = 0; i < 4; i++)
        (void)cache_evict(rig.cache, find(quiet, i), CACHE_ALL);
    copy_all();
    settle();
    cr_expect_eq(whole(4), 0u);
    cr_expect_eq(rig.metrics.arena_parts_moved, 0u);
    cr_assert_eq(want(0, &f), 0);
    pending_write_done(rig.cache, f, 1, false);
    settle();
    cr_expect_leq(arena_bytes_used(rig.arena), 4 * SLOT);
}

Test(cache_compact, a_stop_puts_the_slab_back)
{
    struct pending_write *f;

    copies_begin(&f);
    cr_assert_eq(cache_moves(rig.cache), 2u);
    cache_stop_writing(rig.cache);
    copy_all();
    settle();
    cr_expect_eq(cache_moves(rig.cache), 0u);
    cr_expect_eq(whole(4), 4u);
    cr_expect_eq(rig.cache->compact.slot_bytes, 0u);
}
