/* Tenants' minimum and maximum of DRAM. The arena has 8 slots of a quarter of a MiB. */
#include "tests/unit/cache/cache_rig.h"

#define SLOT (MIB / 4)

static struct ns *quiet, *noisy; /* of two tenants */

static void open_tenants(void)
{
    rig_open();
    quiet = rig.one;
    noisy = space_of("u", "one", 1, SLOT / LAYERS);
}

/* The same, with these in the rig. */
static void reopen(uint64_t max_blocks, uint64_t slab)
{
    rig_close();
    rig.max_blocks = max_blocks;
    rig.slab = slab;
    rig.tier = (struct tier){0};
    open_tenants();
}

TestSuite(cache_quota, .init = open_tenants, .fini = rig_close);

static void give(struct ns *ns, uint64_t guaranteed, uint64_t most)
{
    ns->tenant->settings.dram_min = guaranteed;
    ns->tenant->settings.dram_max = most;
    cache_tenants_changed(rig.cache);
}

/* Stores blocks, each as a prefix of its own, and lets go of them; they are written below. */
static void stores(struct ns *ns, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        block_ref ref = open_block(ns, i);

        cache_touch(rig.cache, ns, &ref, 1);
        cr_assert_eq(dump(ref, 0, 0, LAYERS), 0);
        drop(ref);
        settle();
    }
}

/* How many of these blocks a tier has. */
static unsigned count(struct ns *ns, uint64_t from, uint64_t n, bool nvme)
{
    unsigned found = 0;

    for (uint64_t i = from; i < from + n; i++) {
        block_ref ref = find(ns, i);

        if (ref != 0)
            found += nvme ? cache_part(rig.cache, ref, 0)->nvme == PART_NVME_READY
                          : cache_in_dram(rig.cache, ref);
    }
    return found;
}

static unsigned in_dram(struct ns *ns, uint64_t from, uint64_t n)
{
    return count(ns, from, n, false);
}

Test(cache_quota, what_is_guaranteed_stays)
{
    give(quiet, 3 * SLOT, 0);
    stores(quiet, 0, 3);
    stores(noisy, 0, 50);
    cr_expect_eq(in_dram(quiet, 0, 3), 3u);
    cr_expect_eq(in_dram(noisy, 0, 50), 5u);
    /* and blocks beyond that may leave for any tenant */
    stores(quiet, 3, 4);
    cr_expect_eq(in_dram(quiet, 3, 4), 4u);
    stores(noisy, 50, 50);
    cr_expect_eq(in_dram(quiet, 0, 7), 3u);
    cr_expect_eq(in_dram(quiet, 4, 3), 3u, "its coldest left");
}

Test(cache_quota, who_has_less_than_is_guaranteed_gets_it_back)
{
    stores(noisy, 0, 8);
    give(quiet, 4 * SLOT, 0);
    stores(quiet, 0, 4);
    stores(noisy, 8, 8);
    cr_expect_eq(in_dram(quiet, 0, 4), 4u);
    /* Its own new blocks replace its own blocks. */
    give(noisy, 4 * SLOT, 0);
    stores(quiet, 4, 2);
    cr_expect_eq(in_dram(quiet, 0, 6), 4u);
    cr_expect_eq(in_dram(noisy, 0, 16), 4u);
}

Test(cache_quota, a_guarantee_that_comes_late_keeps_what_is_there)
{
    stores(quiet, 0, 8);
    give(quiet, 5 * SLOT, 0);
    stores(noisy, 0, 50);
    cr_expect_eq(in_dram(quiet, 3, 5), 5u, "its coldest left");
    give(quiet, 2 * SLOT, 0);
    stores(noisy, 50, 50);
    cr_expect_eq(in_dram(quiet, 6, 2), 2u);
    give(quiet, 0, 0);
    stores(noisy, 100, 50);
    cr_expect_eq(in_dram(quiet, 0, 8), 0u);
}

Test(cache_quota, huge_blocks_keep_no_more_than_twice_what_is_guaranteed)
{
    struct ns *huge = space_of("t", "huge", 2, MIB / LAYERS);
    block_ref ref = open_block(huge, 0);

    give(quiet, SLOT, 0);
    cr_assert_eq(dump(ref, 0, 0, LAYERS), 0);
    drop(ref);
    settle();
    cr_assert_eq(huge->tenant->block_max_bytes, 8 * SLOT, "though one part of it was stored");
    stores(quiet, 0, 4);
    stores(noisy, 0, 50);
    cr_expect_leq(quiet->tenant->dram_bytes, 2 * SLOT);
    cr_expect_geq(in_dram(noisy, 0, 50), 6u);
}

Test(cache_quota, at_most_gives_way_to_itself)
{
    stores(quiet, 0, 4);
    give(noisy, 0, 3 * SLOT);
    for (uint64_t i = 0; i < 20; i++) {
        stores(noisy, i, 1);
        cr_assert_leq(noisy->tenant->dram_bytes, 3 * SLOT);
    }
    cr_expect_eq(in_dram(quiet, 0, 4), 4u, "though a slot was free");
    cr_expect_eq(in_dram(noisy, 17, 3), 3u);
    cr_expect_eq(arena_bytes_used(rig.arena), 7 * SLOT);
}

Test(cache_quota, at_most_set_late_is_reached_by_its_own_blocks)
{
    stores(noisy, 0, 6);
    stores(quiet, 0, 2);
    give(noisy, 0, 2 * SLOT);
    settle();
    stores(noisy, 6, 1);
    cr_expect_eq(noisy->tenant->dram_bytes, 2 * SLOT);
    cr_expect_eq(in_dram(noisy, 6, 1), 1u);
    cr_expect_eq(in_dram(quiet, 0, 2), 2u);
}

Test(cache_quota, at_most_is_refused_while_all_of_it_is_in_use)
{
    block_ref held[2], more;
    struct pending_write *f;

    give(noisy, 0, 2 * SLOT);
    for (uint64_t i = 0; i < 2; i++)
        held[i] = store(noisy, i);
    rig.cache->no_writes = true;
    more = open_block(noisy, 2);
    cr_expect_eq(claim(more, 0, 0, 1, &f), -EDQUOT);
    cr_expect_eq(in_dram(noisy, 0, 2), 2u);
    drop(held[0]);
    cr_expect_eq(claim(more, 0, 0, 1, &f), 0);
    cr_expect_eq(noisy->tenant->dram_bytes, 2 * SLOT);
    pending_write_done(rig.cache, f, 1, false);
    cr_expect_eq(noisy->tenant->dram_bytes, SLOT);
    drop(held[1]);
    drop(more);
}

Test(cache_quota, blocks_of_more_parts_push_none_of_others_out_of_a_full_index)
{
    struct ns *wide;

    reopen(8, 0);
    wide = space_of("u", "wide", 2, SLOT / LAYERS);
    cache_stop_writing(rig.cache);
    stores(quiet, 0, 3);
    stores(wide, 0, 20);
    cr_expect_eq(in_dram(quiet, 0, 3), 3u);
    cr_expect_eq(wide->blocks, 4u);
    cr_expect_neq(find(wide, 19), 0u);
    cr_expect_eq(rig.metrics.index_evicted, 16u);
}

Test(cache_quota, an_index_that_is_full_drops_no_guaranteed_block)
{
    reopen(6, 0);
    cache_stop_writing(rig.cache);
    give(quiet, 3 * SLOT, 0);
    stores(quiet, 0, 3);
    stores(noisy, 0, 50);
    cr_expect_eq(in_dram(quiet, 0, 3), 3u);
    cr_expect_eq(in_dram(noisy, 0, 50), 3u);
}

Test(cache_quota, what_is_guaranteed_below_is_moved_with_the_log)
{
    const struct tier_callbacks *cb = &rig.tier.callbacks;
    uint64_t owner;

    quiet->tenant->settings.nvme_min = 2 * SLOT;
    stores(quiet, 0, 2);
    owner = part_owner(find(quiet, 0), 0);
    cr_expect_eq(quiet->tenant->nvme_bytes, 2 * SLOT);
    cr_expect_eq(cb->heat_cb(cb->ctx, owner), TIER_HEAT_KEPT);
    stores(quiet, 2, 1);
    cr_expect_neq(cb->heat_cb(cb->ctx, owner), TIER_HEAT_KEPT, "the log's oldest goes");
    stores(noisy, 0, 1);
    cr_expect_neq(cb->heat_cb(cb->ctx, part_owner(find(noisy, 0), 0)), TIER_HEAT_KEPT);
}

static unsigned on_nvme(struct ns *ns, uint64_t from, uint64_t n)
{
    return count(ns, from, n, true);
}

Test(cache_quota, at_most_on_nvme_gives_way_to_itself)
{
    noisy->tenant->settings.nvme_max = 10 * SLOT;
    stores(quiet, 0, 20);
    for (uint64_t i = 0; i < 40; i++) {
        stores(noisy, i, 1);
        cr_assert_leq(noisy->tenant->nvme_bytes, 10 * SLOT);
    }
    cr_expect_eq(on_nvme(noisy, 30, 10), 10u, "those that were written first went");
    cr_expect_eq(on_nvme(quiet, 0, 20), 20u);
    cr_expect_eq(rig.metrics.nvme_max_dropped, 30u);
}

Test(cache_quota, at_most_on_nvme_spares_what_dram_has)
{
    noisy->tenant->settings.nvme_max = 3 * SLOT;
    stores(noisy, 0, 8);
    cr_expect_eq(on_nvme(noisy, 0, 3), 3u);
    cr_expect_eq(on_nvme(noisy, 0, 8), 3u);
    cr_expect_eq(rig.metrics.nvme_write_dropped, 5u);
}

Test(cache_quota, at_most_on_nvme_that_is_lowered)
{
    stores(noisy, 0, 30);
    cr_assert_eq(noisy->tenant->nvme_bytes, 30 * SLOT);
    noisy->tenant->settings.nvme_max = 4 * SLOT;
    cache_tenants_changed(rig.cache);
    settle();
    cr_expect_eq(noisy->tenant->nvme_bytes, 4 * SLOT);
    noisy->tenant->settings.nvme_max = SLOT / 2;
    cache_tenants_changed(rig.cache);
    settle();
    cr_expect_eq(noisy->tenant->nvme_bytes, 0u);
    stores(noisy, 30, 1);
    cr_expect_eq(on_nvme(noisy, 30, 1), 0u, "a part that is larger than all");
}

/* All of a tenant's part of NVMe is leased. Its durable dumps wait; another tenant's later ones do
 * not. */
Test(cache_quota, durable_beyond_at_most_on_nvme_keeps_nobody_waiting)
{
    struct promise p[6];
    block_ref refs[6], leased;

    noisy->tenant->settings.nvme_max = SLOT;
    stores(noisy, 0, 1);
    leased = find(noisy, 0);
    cache_lease(rig.cache, leased);
    use(leased, 0);             /* something is under way */
    rig.tier.recovering = true; /* none is begun yet */
    for (unsigned i = 0; i < 6; i++) {
        refs[i] = store(i < 5 ? noisy : quiet, 10 + i);
        promise(&p[i], refs[i]);
    }
    rig.tier.recovering = false;
    rig.tier.callbacks.recovered_cb(rig.tier.callbacks.ctx);
    settle();
    cr_expect_eq(p[5].status, 0, "the other tenant's");
    for (unsigned i = 0; i < 5; i++)
        cr_expect_eq(p[i].status, NOT_YET);
    put_and_drop(leased, 0);
    settle();
    drop_all(refs, 6);
    settle();
    for (unsigned i = 0; i < 5; i++)
        cr_expect_neq(p[i].status, NOT_YET, "nothing is under way any more");
    cr_expect_leq(noisy->tenant->nvme_bytes, SLOT);
}

Test(cache_quota, durable_beyond_at_most_on_nvme_hears_that_a_use_lasts)
{
    block_ref leased, ref;
    struct promise p;

    noisy->tenant->settings.nvme_max = SLOT;
    stores(noisy, 0, 1);
    leased = find(noisy, 0);
    cache_lease(rig.cache, leased);
    use(leased, 0);
    ref = store(noisy, 10);
    promise(&p, ref);
    settle();
    cr_expect_eq(p.status, NOT_YET, "the use may end");
    cache_ref_lasting(rig.cache, leased, 0);
    settle();
    cr_expect_eq(p.status, -EDQUOT);
    cache_unref_lasting(rig.cache, leased, 0);
    drop(leased);
    drop(ref);
}

/* Which tenant's block is the i-th that is being written. */
static const struct tenant *writes_at(unsigned i)
{
    return cache_ns(rig.cache, owner_block(fake_at(&rig.tier, i)->name.owner))->tenant;
}

Test(cache_quota, write_back_takes_turns)
{
    block_ref refs[7];

    tier_refuses(-EAGAIN, UINT32_MAX);
    noisy->tenant->settings.weight = 100;
    quiet->tenant->settings.weight = 100;
    for (unsigned i = 0; i < 7; i++)
        refs[i] = store(i < 5 ? noisy : quiet, i);
    iterate();
    rig.tier.refuse_n = 0;
    drop_all(refs, 7);
    iterations(3);
    cr_assert_eq(rig.tier.n_pending, 7u);
    cr_expect_eq(writes_at(0), noisy->tenant);
    cr_expect_eq(writes_at(1), quiet->tenant, "though all of the noisy one's were complete before");
    cr_expect_eq(writes_at(2), noisy->tenant);
    cr_expect_eq(writes_at(3), quiet->tenant);
    settle();
    cr_expect_eq(on_nvme(noisy, 0, 5) + on_nvme(quiet, 5, 2), 7u);
}

/* There are more tenants than a search looks at. All get their turn. */
Test(cache_quota, many_tenants)
{
    struct ns *ns[24];
    unsigned kept = 0;
    char name[16];

    reopen(0, 8 * MIB);
    for (unsigned i = 0; i < 24; i++) {
        snprintf(name, sizeof(name), "uid:%u", i);
        ns[i] = space_of(name, "one", 1, SLOT / LAYERS);
        give(ns[i], i % 2 ? SLOT : 0, i % 2 ? 0 : 8 * SLOT);
        stores(ns[i], 0, 2);
    }
    stores(noisy, 0, 100);
    for (unsigned i = 0; i < 24; i++) {
        cr_expect_eq(in_dram(ns[i], 0, 2), i % 2, "tenant %u", i);
        kept += in_dram(ns[i], 0, 2);
    }
    cr_expect_eq(in_dram(noisy, 0, 100), 64 - kept);
}

/* ---- waiters for their own blocks ---- */

#define WAITERS 40

static struct cache_retry waiters[WAITERS];
static bool tried[WAITERS];

static void wait_on_cb(struct cache_retry *r)
{
    tried[r - waiters] = true;
    cr_assert(cache_wait_for(rig.cache, r, WAIT_OTHER));
}

Test(cache_quota, each_that_waits_for_its_own_tries_again_after_one_release)
{
    block_ref ref;

    stores(quiet, 0, 1);
    ref = find(quiet, 0);
    use(ref, 0);
    for (unsigned i = 0; i < WAITERS; i++) {
        waiters[i].retry_cb = wait_on_cb;
        list_init(&waiters[i].link);
        cr_assert(cache_wait_for(rig.cache, &waiters[i], WAIT_OTHER));
    }
    cache_released(rig.cache);
    iterations(10);
    for (unsigned i = 0; i < WAITERS; i++)
        cr_expect(tried[i], "waiter %u", i);
    for (unsigned i = 0; i < WAITERS; i++)
        cache_retry_cancel(&waiters[i]);
    cache_put(rig.cache, ref, 0);
}
