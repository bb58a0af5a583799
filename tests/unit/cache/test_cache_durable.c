/* Parts that are to be durable while their copies on the tier move, go, or turn out to be none. */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache_durable, .init = rig_open, .fini = rig_close);

#define NOT_YET 1

struct promise {
    struct cache_durable d;
    int status;
};

static void promise_cb(struct cache_durable *d, int status)
{
    ((struct promise *)d)->status = status;
}

static void promise(struct promise *p, block_ref ref)
{
    *p = (struct promise){.d.done_cb = promise_cb, .status = NOT_YET};
    cr_assert_eq(cache_durable(rig.cache, &p->d, ref, 0), 0);
}

/* A whole block on the tier and in DRAM; returned held. */
static block_ref store_both(uint64_t number)
{
    block_ref ref = store(rig.one, number);

    turn();
    fake_next(&rig.tier, 0);
    cr_assert_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    return ref;
}

static void move(block_ref ref)
{
    struct tier *t = &rig.tier;
    struct place *from = &t->place[part_loc(&block_of(ref)->part[0]) - 1];
    struct tier_place to = {.loc = t->places + 1, .checksum = from->bytes};

    t->place[t->places++] = *from;
    from->live = false;
    cr_assert(t->callbacks.moved_cb(t->callbacks.ctx, from->owner,
                                    part_loc(&block_of(ref)->part[0]), &to));
}

static void expect_next(enum tier_op op, uint64_t loc)
{
    cr_assert_eq(rig.tier.n_pending, 1u);
    cr_expect_eq(fake_at(&rig.tier, 0)->op, op);
    cr_expect(loc == 0 || fake_at(&rig.tier, 0)->place.loc == loc);
}

Test(cache_durable, a_sync_of_the_place_that_it_has_left_is_none)
{
    block_ref ref = store_both(1);
    struct promise p;

    promise(&p, ref);
    expect_next(TIER_SYNC, part_loc(&block_of(ref)->part[0]));
    move(ref);
    fake_next(&rig.tier, 0);
    cr_assert_eq(p.status, NOT_YET, "its new place has not been synced");
    expect_next(TIER_SYNC, part_loc(&block_of(ref)->part[0]));
    fake_next(&rig.tier, 0);
    cr_expect_eq(p.status, 0);
    drop(ref);
}

Test(cache_durable, what_was_reclaimed_meanwhile_is_written_again)
{
    block_ref ref = store_both(1);
    struct promise p;

    promise(&p, ref);
    cr_assert(fake_reclaim(&rig.tier, part_loc(&block_of(ref)->part[0])));
    fake_next(&rig.tier, 0);
    cr_assert_eq(p.status, NOT_YET, "nothing of it is there");
    expect_next(TIER_WRITE, 0);
    fake_next(&rig.tier, 0);
    expect_next(TIER_SYNC, part_loc(&block_of(ref)->part[0]));
    fake_next(&rig.tier, 0);
    cr_expect_eq(p.status, 0);
    drop(ref);
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
    expect_next(TIER_WRITE, 0);
    fake_next(&rig.tier, 0);
    tier_finish();
    cr_expect_eq(p[0].status, 0);
    cr_expect_eq(p[1].status, 0);
    drop(ref);
}

/* The tier's queue is full when the write has ended: the sync waits, as the write would have. */
Test(cache_durable, a_sync_that_finds_no_place_waits)
{
    block_ref ref = store(rig.one, 1);
    struct promise p[2];

    promise(&p[0], ref);
    promise(&p[1], ref);
    expect_next(TIER_WRITE, 0);
    rig.tier.refuse = -EAGAIN;
    rig.tier.refuse_n = 3;
    fake_next(&rig.tier, 0);
    cr_expect_eq(p[0].status, NOT_YET);
    cr_expect_eq(p[1].status, NOT_YET);
    rig.tier.refuse_n = 0;
    cache_released(rig.cache); /* as when a read has ended */
    turn();
    cr_assert_eq(rig.tier.n_pending, 2u);
    fake_next(&rig.tier, 0);
    fake_next(&rig.tier, 0);
    cr_expect_eq(p[0].status, 0);
    cr_expect_eq(p[1].status, 0);
    drop(ref);
}

Test(cache_durable, what_is_gone_everywhere_is_not_promised)
{
    block_ref ref = store_both(1);
    struct promise p;

    promise(&p, ref);
    cr_assert(fake_reclaim(&rig.tier, part_loc(&block_of(ref)->part[0])));
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
    turn();
    expect_next(TIER_SYNC, part_loc(&block_of(ref)->part[0]));
    fake_next(&rig.tier, 0);
    cr_expect_eq(p.status, 0);
    drop(ref);
}

/* What was stored since the first try counts, too. */
Test(cache_durable, a_name_that_could_not_be_kept_is_tried_again)
{
    block_ref ref = store_both(1);
    struct promise p;

    rig.one->record = NS_RECORD_NONE;
    promise(&p, ref);
    rig.tier.naming->from_sequence = 77; /* as the tier does */
    rig.tier.naming->done_cb(rig.tier.naming, -ENOSPC);
    turn();
    cr_expect_eq(p.status, -EIO);
    p = (struct promise){.d.done_cb = promise_cb, .status = NOT_YET};
    cr_expect_eq(cache_durable(rig.cache, &p.d, ref, 0), -EIO, "not at once");
    backoff_reset(&rig.cache->records.retry);
    promise(&p, ref);
    cr_expect_eq(rig.tier.naming->from_sequence, 77u);
    rig.tier.naming->done_cb(rig.tier.naming, 0);
    turn();
    expect_next(TIER_SYNC, part_loc(&block_of(ref)->part[0]));
    fake_next(&rig.tier, 0);
    cr_expect_eq(p.status, 0);
    drop(ref);
}

/* ---- copies that are found bad while nobody asks ---- */

Test(cache_durable, what_the_tier_has_lost_is_written_again_from_dram)
{
    block_ref ref = store_both(1);
    struct tier *t = &rig.tier;
    const struct place *p = &t->place[part_loc(&block_of(ref)->part[0]) - 1];

    t->callbacks.lost_cb(t->callbacks.ctx, p->owner, part_loc(&block_of(ref)->part[0]));
    cr_expect_eq(t->forgets, 1u);
    turn();
    expect_next(TIER_WRITE, 0);
    fake_next(t, 0);
    cr_expect_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    drop(ref);
}

Test(cache_durable, of_what_lay_nowhere_else_nothing_is_written)
{
    block_ref ref = store_below(rig.one, 1);
    struct tier *t = &rig.tier;
    const struct place *p = &t->place[part_loc(&block_of(ref)->part[0]) - 1];

    drop(ref);
    t->callbacks.lost_cb(t->callbacks.ctx, p->owner, part_loc(&block_of(ref)->part[0]));
    turn();
    cr_expect_eq(t->n_pending, 0u);
    cr_expect_eq(find(rig.one, 1), 0u);
}

static void check_cb(struct cache_check *k, int status)
{
    (void)k;
    cr_expect_eq(status, -EBADMSG);
}

Test(cache_durable, what_a_check_finds_corrupt_is_written_again_from_dram)
{
    block_ref ref = store_both(1);
    struct cache_check k = {.done_cb = check_cb};

    cr_assert_eq(cache_verify(rig.cache, &k, ref, 0), 0);
    fake_next(&rig.tier, -EBADMSG);
    turn();
    expect_next(TIER_WRITE, 0);
    fake_next(&rig.tier, 0);
    cr_expect_eq(block_of(ref)->part[0].nvme, PART_NVME_READY);
    drop(ref);
}
