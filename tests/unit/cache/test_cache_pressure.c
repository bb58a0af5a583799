/* More parts wait to be written than may. Dropped writes are counted, callbacks of waiters for the
 * disks run, and reads find slots. */
/* Sanitizers: thread */
#include "tests/unit/cache/cache_rig.h"

#include <semaphore.h>

TestSuite(pressure, .init = rig_open, .fini = rig_close);

/* The tier takes nothing until rig.tier.refuse_n is 0 again. */
static void fill_and_wait(uint64_t first, unsigned n)
{
    tier_refuses(-EAGAIN, UINT32_MAX);
    store_all(rig.one, first, n);
    iterate();
}

static void tier_drain(void)
{
    rig.tier.refuse_n = 0;
    cache_released(rig.cache);
    settle();
    settle();
}

Test(pressure, a_daemon_that_stops_writes_nothing_and_keeps_nobody_waiting)
{
    unsigned before;
    struct asker a;

    fill_and_wait(0, 5);
    before = rig.tier.submits;
    ask(&a);
    (void)cache_wait_for(rig.cache, &a.r, WAIT_PRESSURE);
    cache_stop_writing(rig.cache);
    iterate();
    cr_expect_eq(a.calls, 1);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 5u);
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    cr_expect_eq(rig.tier.submits, before);
}

/* Part 0 of a block of two is lost on the tier, which then takes no writes: part 1 is still there. */
Test(pressure, of_a_block_that_is_written_again_only_what_is_missing_counts)
{
    block_ref ref = store(rig.two, 1);
    const struct part *part = block_of(ref)->part;

    tier_drain();
    tier_refuses(-EROFS, 1);
    fake_lose(&rig.tier, part_loc(&part[0]));
    iterate();
    cr_expect_eq(rig.tier.refuse_n, 0u);
    cr_expect_eq(part[1].nvme, PART_NVME_READY);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 1u);
    drop(ref);
}

/* All DRAM waits to be written to a tier that takes no writes. A read gets its slot all the same.
 */
Test(pressure, reads_find_room)
{
    struct waiter w;
    block_ref below = store_below(rig.one, 100);

    fill_and_wait(0, 8);
    rig.tier.refuse_n = 0;
    cr_expect_eq(get(&w, below, 0), CACHE_PENDING);
    fake_next(&rig.tier, 0);
    cr_expect(marks_right(below, 0));
    put_and_drop(below, 0);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 1u);
}

/* A dump waits or fails. It never reports a block as stored that is not. */
Test(pressure, a_durable_part_is_acknowledged_when_it_is_stored_and_not_before)
{
    static const int ends[] = {0, -ENOSPC};

    for (int i = 0; i < 2; i++) {
        struct promise p;
        block_ref ref;

        fill_and_wait(10 * (uint64_t)i, 5);
        ref = store(rig.one, 10 * (uint64_t)i + 9);
        promise(&p, ref);
        iterate();
        cr_expect_eq(p.status, NOT_YET, "the tier takes nothing now");
        rig.tier.refuse_n = 0;
        cache_durables_retry(rig.cache);
        cr_assert_eq(rig.tier.n_pending, 1u);
        fake_next(&rig.tier, ends[i]);
        if (ends[i] == 0) {
            cr_expect_eq(p.status, NOT_YET, "written, but not synced");
            fake_next(&rig.tier, 0);
        }
        cr_expect_eq(p.status, ends[i]);
        drop(ref);
        tier_drain();
    }
}

/* ---- an iteration of the event loop ---- */

/* More iterations than parts: each begins a bounded number, and all parts are begun. */
static void expect_small_iterations(unsigned parts)
{
    for (unsigned begun = 0, i = 0; begun < parts; i++) {
        unsigned before = rig.tier.submits;

        cr_assert_lt(i, parts, "writes don't go on");
        iterate();
        cr_expect_leq(rig.tier.submits - before, 4u);
        begun += rig.tier.submits - before;
    }
}

Test(pressure, a_turn_begins_few_of_many_blocks)
{
    store_all(rig.one, 0, 8);
    expect_small_iterations(8);
}

Test(pressure, a_turn_begins_few_of_many_parts)
{
    static const uint32_t layers[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    block_ref ref = open_block(space_with("t", "many", 16, layers, MIB / 32), 1);

    for (uint32_t p = 0; p < 16; p++)
        cr_assert_eq(dump(ref, p, 0, 1), 0);
    drop(ref);
    cr_expect_eq(rig.cache->dirty_bytes, 16 * (MIB / 32));
    expect_small_iterations(16);
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 0u);
}

/* ---- while memory is still coming ---- */

static sem_t more;

/* The second slab comes when the test says so. */
static int prefer_late(int node)
{
    while (node == 1 && sem_wait(&more) != 0)
        ;
    return 0;
}

static int where(const void *memory)
{
    (void)memory;
    return 0;
}

static const struct numa late = {.n = 2, .node = {0, 1}, .prefer = prefer_late, .where = where};

static void growing_open(void)
{
    cr_assert_eq(sem_init(&more, 0, 0), 0);
    rig.numa = &late;
    rig.ready_bytes = MIB;
    rig_open();
}

static void growing_close(void)
{
    tier_drain();
    cr_assert_eq(sem_post(&more), 0);
    rig_close();
    sem_destroy(&more);
}

TestSuite(growing, .init = growing_open, .fini = growing_close);

static int try_store(uint64_t number)
{
    block_ref ref = open_block(rig.one, number);
    int rc = dump(ref, 0, 0, LAYERS);

    drop(ref);
    return rc;
}

/* Blocks that lie nowhere else are not evicted: the next slab makes room, and the waiter is
 * notified. */
Test(growing, nothing_is_lost_for_want_of_a_moment)
{
    struct asker a;

    fill_and_wait(0, 4);
    cr_expect_eq(try_store(4), -EBUSY);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 0u);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 0u);
    cr_expect_eq(rig.metrics.arena_full, 0u);
    ask_for(&a, WAIT_SLOT);

    cr_assert_eq(sem_post(&more), 0);
    arena_wait(2 * MIB);
    cache_arena_grew(rig.cache);
    iterate();
    cr_expect_eq(a.calls, 1);
    for (uint64_t i = 4; i < 8; i++)
        cr_expect_eq(try_store(i), 0);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 0u);
    cr_expect_eq(try_store(8), 0);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 1u, "all there will be is there");
}

/* Another slot size would take a whole slab: that waits, too. */
Test(growing, no_slab_changes_its_slots)
{
    block_ref ref;

    fill_and_wait(0, 4);
    ref = open_block(rig.two, 1);
    cr_expect_eq(dump(ref, 0, 0, LAYERS), -EBUSY);
    drop(ref);
    cr_expect_eq(rig.metrics.arena_slabs_moved, 0u);
    for (uint64_t i = 0; i < 4; i++)
        cr_expect_neq(find(rig.one, i), 0u);
}

/* The next slab is full of blocks kept over a restart, so it is not worth waiting for. */
Test(growing, room_that_is_taken_is_not_waited_for)
{
    cr_assert_neq(arena_slot_take(rig.arena, 1, 0, MIB / 4), 0u);
    fill_and_wait(0, 4);
    cr_expect_eq(try_store(4), 0);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 1u);
}

/* Blocks that also lie on a lower tier may be evicted. */
Test(growing, what_is_kept_below_makes_room)
{
    fill_and_wait(0, 4);
    tier_drain();
    cr_expect_eq(try_store(4), 0);
    cr_expect_eq(rig.metrics.arena_evicted_blocks, 1u);
    cr_expect_eq(rig.metrics.arena_evicted_lost, 0u);
}

/* A dump larger than DRAM has filled it with parts that are not written yet. No write has begun. */
Test(pressure, room_that_writes_are_about_to_make_is_waited_for)
{
    block_ref refs[8];
    struct asker a;

    for (unsigned i = 0; i < 8; i++)
        refs[i] = store(rig.one, i + 1);
    cr_assert_eq(rig.tier.n_pending, 0u);
    ask_for(&a, WAIT_SLOT);
    iterate();
    cr_assert_gt(rig.tier.n_pending, 0u);
    cr_expect_eq(a.calls, 0);
    fake_next(&rig.tier, 0);
    iterate();
    cr_expect_eq(a.calls, 1);
    drop_all(refs, 8);
}

Test(pressure, who_waits_for_writes_that_do_not_begin_is_told)
{
    struct pending_write *f;
    block_ref refs[8], ninth;
    struct asker a;

    tier_refuses(-EAGAIN, 1000);
    for (unsigned i = 0; i < 8; i++)
        refs[i] = store(rig.one, i + 1);
    ask_for(&a, WAIT_SLOT);
    iterations(3);
    cr_expect_eq(a.calls, 1);
    cr_expect_not(cache_wait_for(rig.cache, &a.r, WAIT_SLOT), "nothing is under way");
    ninth = open_block(rig.one, 100);
    cr_expect_eq(claim(ninth, 0, 0, 1, &f), -EBUSY, "all is leased");
    cr_expect_eq(rig.metrics.arena_full, 1u);
    drop(ninth);
    drop_all(refs, 8);
}
