/* Parts that are to be durable while their copies on the tier move, go, or prove damaged. */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache_durable, .init = rig_open, .fini = rig_close);

/* A whole block on the tier and in DRAM; returned held. */
static block_ref store_both(uint64_t number)
{
    block_ref ref = store(rig.one, number);

    iterate();
    fake_next(&rig.tier, 0);
    cr_assert_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    return ref;
}

static uint64_t loc_of(block_ref ref)
{
    return part_loc(&block_of(ref)->part[0]);
}

static void move(block_ref ref)
{
    struct tier *t = &rig.tier;
    struct place *from = &t->place[loc_of(ref) - 1];
    struct tier_place to = {.loc = t->places + 1, .checksum = from->bytes};

    t->place[t->places++] = *from;
    from->live = false;
    cr_assert(t->callbacks.moved_cb(t->callbacks.ctx, from->owner, loc_of(ref), &to));
}

/* Ends the one operation under way with the status. It must be `op`, and of `loc` unless that is 0.
 */
static void finish_next(enum tier_op op, uint64_t loc, int status)
{
    cr_assert_eq(rig.tier.n_pending, 1u);
    cr_expect_eq(fake_at(&rig.tier, 0)->op, op);
    cr_expect(loc == 0 || fake_at(&rig.tier, 0)->place.loc == loc);
    fake_next(&rig.tier, status);
}

/* Only a sync of the block, where it lies now, is missing. */
static void expect_kept_by_sync(struct promise *p, block_ref ref)
{
    cr_assert_eq(p->status, NOT_YET);
    finish_next(TIER_SYNC, loc_of(ref), 0);
    cr_expect_eq(p->status, 0);
    drop(ref);
}

static void expect_written_again(block_ref ref)
{
    iterate();
    finish_next(TIER_WRITE, 0, 0);
    cr_expect_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    drop(ref);
}

Test(cache_durable, a_sync_of_the_place_that_it_has_left_is_none)
{
    block_ref ref = store_both(1);
    struct promise p;
    uint64_t left;

    promise(&p, ref);
    left = loc_of(ref);
    move(ref);
    finish_next(TIER_SYNC, left, 0);
    expect_kept_by_sync(&p, ref);
}

Test(cache_durable, what_was_reclaimed_meanwhile_is_written_again)
{
    block_ref ref = store_both(1);
    struct promise p;

    promise(&p, ref);
    cr_assert(fake_reclaim(&rig.tier, loc_of(ref)));
    fake_next(&rig.tier, 0);
    cr_assert_eq(p.status, NOT_YET, "nothing of it is there");
    finish_next(TIER_WRITE, 0, 0);
    expect_kept_by_sync(&p, ref);
}

Test(cache_durable, of_two_who_wait_for_a_copy_that_is_none_both_are_served)
{
    block_ref ref = store_both(1);
    struct promise p[2];

    promise(&p[0], ref);
    promise(&p[1], ref);
    cr_assert_eq(rig.tier.n_pending, 2u);
    fake_next(&rig.tier, -EBADMSG); /* the first has read it, */
    fake_next(&rig.tier, -ESTALE);  /* so it is gone for the second */
    cr_expect_eq(rig.tier.forgets, 1u);
    finish_next(TIER_WRITE, 0, 0);
    tier_finish();
    cr_expect_eq(p[0].status, 0);
    cr_expect_eq(p[1].status, 0);
    drop(ref);
}

/* The tier's queue is full when the write has ended. The sync waits, as the write would have. */
Test(cache_durable, a_sync_that_finds_no_place_waits)
{
    block_ref ref = store(rig.one, 1);
    struct promise p[2];

    promise(&p[0], ref);
    promise(&p[1], ref);
    tier_refuses(-EAGAIN, 3);
    finish_next(TIER_WRITE, 0, 0);
    cr_expect_eq(p[0].status, NOT_YET);
    cr_expect_eq(p[1].status, NOT_YET);
    rig.tier.refuse_n = 0;
    cache_released(rig.cache); /* as when a read has ended */
    iterate();
    cr_assert_eq(rig.tier.n_pending, 2u);
    tier_finish();
    cr_expect_eq(p[0].status, 0);
    cr_expect_eq(p[1].status, 0);
    drop(ref);
}

Test(cache_durable, what_is_gone_everywhere_is_not_promised)
{
    block_ref ref = store_both(1);
    struct promise p;

    promise(&p, ref);
    cr_assert(fake_reclaim(&rig.tier, loc_of(ref)));
    block_drop_dram(rig.cache, ref, true);
    fake_next(&rig.tier, 0);
    cr_expect_eq(p.status, -ENOENT);
    drop(ref);
}

Test(cache_durable, a_namespace_whose_name_is_in_doubt_is_named_first)
{
    block_ref ref = store_both(1);
    struct tier_ns_record *n;
    struct promise p;

    rig.one->record = NS_RECORD_NONE; /* as it is when the tier is not sure of its record */
    promise(&p, ref);
    n = rig.tier.naming;
    cr_assert(n && rig.tier.n_pending == 0);
    rig.tier.naming = NULL;
    n->done_cb(n, 0);
    iterate();
    expect_kept_by_sync(&p, ref);
}

/* ---- copies that are found bad while nobody asks ---- */

Test(cache_durable, what_the_tier_has_lost_is_written_again_from_dram)
{
    block_ref ref = store_both(1);

    fake_lose(&rig.tier, loc_of(ref));
    cr_expect_eq(rig.tier.forgets, 1u);
    expect_written_again(ref);
}

Test(cache_durable, of_what_lay_nowhere_else_nothing_is_written)
{
    block_ref ref = store_below(rig.one, 1);

    drop(ref);
    fake_lose(&rig.tier, loc_of(ref));
    iterate();
    cr_expect_eq(rig.tier.n_pending, 0u);
    cr_expect_eq(find(rig.one, 1), 0u);
}

Test(cache_durable, what_a_check_finds_corrupt_is_written_again_from_dram)
{
    block_ref ref = store_both(1);
    struct cache_check k = {.done_cb = check_cb};

    cr_assert_eq(cache_verify(rig.cache, &k, ref, 0), 0);
    fake_next(&rig.tier, -EBADMSG);
    cr_expect_eq(check_status, -EBADMSG);
    expect_written_again(ref);
}
