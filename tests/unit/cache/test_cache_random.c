/* Everything that happens to a cache, at random, against a recount of all that it counts. No byte
 * is wrong, no use or hold is left over, and no waiter waits for ever. Runs: over NVMe alone; with
 * a shared tier that other hosts change; in a full index; with changing minimums and maximums of
 * tenants. UCM_SEED repeats a run. */
#include "tests/unit/cache/cache_recount.h"
#include "tests/unit/random.h"

TestSuite(cache_random, .init = open_shared, .fini = close_shared);

/* ---- everything at once, against a recount ---- */

#define KEYS RECOUNT_KEYS
#define COPIES 5
#define LOADS 8
#define ASKERS 4

struct copy {
    struct pending_write *pending_write; /* NULL: not in use */
    block_ref ref;
    uint32_t part, layer, n, owner;
};

struct load {
    struct cache_wait w;
    enum { LOAD_FREE, LOAD_WAITS, LOAD_HAS } state;
    block_ref ref;
    uint32_t part;
};

static struct {
    struct copy copy[COPIES];
    struct load load[LOADS];
    struct asker asker[ASKERS];
    unsigned reads, failures, waits, shared_reads, refused;
} chaos;

static struct ns *some_ns(void)
{
    return below(2) ? rig.one : rig.two;
}

static void invariants(void)
{
    uint64_t copying = 0;

    for (uint32_t i = table_next(&rig.cache->pending_writes, 0); i;
         i = table_next(&rig.cache->pending_writes, i)) {
        uint32_t at = 0;

        for (; at < COPIES; at++)
            if (chaos.copy[at].pending_write == table_get(&rig.cache->pending_writes, i))
                break;
        copying += at < COPIES;
    }
    recount_cache(copying);
}

static void chaos_wait_room(void)
{
    struct asker *a = &chaos.asker[below(ASKERS)];

    if (!list_empty(&a->r.link))
        return;
    a->again = below(2);
    a->r.first = below(2);
    chaos.waits += cache_wait_for(rig.cache, &a->r, WAIT_SLOT);
}

static void chaos_claim(void)
{
    struct copy *c = &chaos.copy[below(COPIES)];
    struct ns *ns = some_ns();
    uint64_t number = below(KEYS);
    uint8_t key[UCM_MAX_KEY_BYTES];
    int rc;

    if (c->pending_write)
        return;
    c->part = below(ns->identity.parts);
    c->layer = below(LAYERS);
    c->n = 1 + below(LAYERS - c->layer);
    c->owner = below(8) ? (uint32_t)number % 3 : below(3);
    key_of(number, key);
    c->ref = cache_open(rig.cache, ns, key);
    cr_assert(c->ref != 0 || rig.max_blocks > 0);
    if (c->ref == 0)
        return;
    rc = pending_write_claim(rig.cache, &rig.pending_writes[c->owner], c->ref, c->part, c->layer,
                             c->n, NUMA_NONE, &c->pending_write);
    if (rc == 0)
        return; /* the block stays held until the copy has ended */
    c->pending_write = NULL;
    cr_assert(rc == -EEXIST || rc == -EINPROGRESS || rc == -EBUSY ||
              (rc == -EDQUOT && ns->tenant->settings.dram_max > 0));
    chaos.refused += rc == -EDQUOT;
    drop(c->ref);
    if (rc == -EBUSY)
        chaos_wait_room();
}

static void copy_end(struct copy *c, bool ok)
{
    struct pending_write *f = c->pending_write;

    marks_write(c->ref, c->part, memory_to_fill(f), c->layer, c->n);
    c->pending_write = NULL;
    pending_write_done(rig.cache, f, c->n, ok);
    drop(c->ref);
}

static void load_has(struct load *l)
{
    cr_assert(marks_right(l->ref, l->part), "wrong bytes");
    l->state = LOAD_HAS;
    chaos.reads++;
    chaos.shared_reads += l->w.shared;
}

static void load_read_cb(struct cache_wait *w, int status)
{
    struct load *l = (struct load *)w;

    cr_assert_eq(l->state, LOAD_WAITS);
    if (status == 0) {
        load_has(l);
        return;
    }
    l->state = LOAD_FREE;
    chaos.failures++;
    drop(l->ref);
}

static void chaos_load(void)
{
    struct load *l = &chaos.load[below(LOADS)];
    struct ns *ns = some_ns();
    block_ref ref = find(ns, below(KEYS));
    int rc;

    if (l->state != LOAD_FREE || !cache_found(rig.cache, ref))
        return;
    *l = (struct load){.ref = ref, .part = below(ns->identity.parts), .state = LOAD_WAITS};
    l->w.done_cb = load_read_cb;
    cache_lease(rig.cache, ref);
    rc = cache_get(rig.cache, ref, l->part, (uint8_t)below(8), NUMA_NONE, &l->w);
    if (rc == CACHE_READY)
        load_has(l);
    if (rc == CACHE_READY || rc == CACHE_PENDING)
        return;
    cr_assert(rc == -EBUSY || rc == -EAGAIN || (rc == -EDQUOT && ns->tenant->settings.dram_max > 0),
              "found, and then not there: %d", rc);
    l->state = LOAD_FREE;
    drop(ref);
    chaos.refused += rc == -EDQUOT;
    if (rc == -EBUSY)
        chaos_wait_room();
}

static void load_end(struct load *l)
{
    if (l->state == LOAD_FREE)
        return;
    if (l->state == LOAD_WAITS)
        cache_get_cancel(rig.cache, &l->w);
    else
        cache_put(rig.cache, l->ref, l->part);
    l->state = LOAD_FREE;
    drop(l->ref);
}

static void chaos_tier(void)
{
    static const int read_errors[] = {-EBADMSG, -EIO}, write_errors[] = {-ENOSPC, -EIO};
    struct tier_io *io;
    int status = 0;

    if (rig.tier.n_pending == 0)
        return;
    io = fake_at(&rig.tier, below(rig.tier.n_pending));
    if (below(8) == 0)
        status = io->op == TIER_READ ? read_errors[below(2)] : write_errors[below(2)];
    fake_finish(&rig.tier, io, status);
}

static void chaos_reclaim(void)
{
    uint64_t loc;

    if (rig.tier.places == 0 || below(4) != 0)
        return;
    loc = 1 + below((uint32_t)rig.tier.places);
    if (rig.tier.place[loc - 1].live)
        fake_reclaim(&rig.tier, loc);
}

static void chaos_evict(void)
{
    block_ref ref = find(some_ns(), below(KEYS));
    static const unsigned tiers[] = {CACHE_DRAM, CACHE_NVME, CACHE_SHARED, CACHE_ALL};

    if (ref == 0 || below(4) != 0)
        return;
    if (below(3) == 0)
        cache_pin(rig.cache, ref, below(4) == 0);
    else
        (void)cache_evict(rig.cache, ref, tiers[below(4)]);
}

static void chaos_owner_gone(void)
{
    uint32_t owner = below(3);

    if (below(30) != 0)
        return;
    for (int i = 0; i < COPIES; i++)
        if (chaos.copy[i].pending_write && chaos.copy[i].owner == owner)
            copy_end(&chaos.copy[i], false);
    pending_writes_end(rig.cache, &rig.pending_writes[owner]);
    cr_assert(list_empty(&rig.pending_writes[owner].list));
}

static void chaos_copy_end(void)
{
    struct copy *c = &chaos.copy[below(COPIES)];

    if (c->pending_write)
        copy_end(c, below(12) != 0);
}

static void chaos_load_end(void)
{
    load_end(&chaos.load[below(LOADS)]);
}

static void chaos_refuse(void)
{
    tier_refuses(-EAGAIN, below(3));
}

/* ---- the shared tier: answers, and other hosts ---- */

static void chaos_shared(void)
{
    static const int errors[] = {-ETIMEDOUT, -ENOENT, -EIO, -ENOSPC};

    if (shared.n_pending > 0)
        fake_shared_finish(&shared, fake_shared_at(&shared, below(shared.n_pending)),
                           below(6) == 0 ? errors[below(4)] : 0);
}

static void chaos_peer(void)
{
    struct ns *ns = some_ns();
    uint64_t key = below(KEYS);
    struct block_file_id id = id_of(ns, key, below(ns->identity.parts));
    struct fake_file *f = fake_file_find(&shared, &id, 0);

    if (below(4) != 0)
        return;
    if (f && below(2))
        fake_file_remove(f);
    else
        peer_stores(ns, key, (shared_root_id)(1 + below(2)));
}

static void chaos_note(void)
{
    struct ns *ns = some_ns();
    uint64_t key = below(KEYS);
    struct block_file_id id = id_of(ns, key, ns->identity.parts - 1);

    /* Now and then it notes a file that is not there: unverified, or gone since. */
    if (fake_file_find(&shared, &id, 0) || below(4) == 0)
        note(ns, key, (shared_root_id)below(3), below(2));
}

static void chaos_shared_refuse(void)
{
    fake_shared_ready(&shared);
    if (below(4) != 0)
        return;
    shared_refuses(-EAGAIN, 1 + below(2));
}

typedef void (*act)(void);
static const act chaos_acts[] = {
    chaos_claim,    chaos_claim,  chaos_claim, chaos_copy_end, chaos_copy_end,      chaos_copy_end,
    chaos_load,     chaos_load,   chaos_tier,  chaos_tier,     chaos_reclaim,       chaos_evict,
    chaos_load_end, iterate,      iterate,     chaos_refuse,   chaos_owner_gone,    chaos_shared,
    chaos_shared,   chaos_shared, chaos_peer,  chaos_note,     chaos_shared_refuse,
};
#define ACTS_LOCAL 17u /* the first of these need no shared tier */
#define ACTS_SHARED (sizeof(chaos_acts) / sizeof(chaos_acts[0]))

/* A worker begins or stops looking at a namespace's lookup table. */
static void chaos_lookup_table(void)
{
    struct ns *ns = some_ns();

    if (!ns->follower)
        cr_assert_eq(lookup_tables_ref(rig.lookup_tables, ns, NULL), 0);
    else if (below(8) == 0)
        lookup_tables_unref(rig.lookup_tables, ns);
}

static void chaos_quota(struct tenant *t)
{
    t->settings.dram_min = below(4) * (MIB / 4);
    t->settings.dram_max = below(2) ? t->settings.dram_min + (1 + below(4)) * (MIB / 4) : 0;
    t->settings.nvme_max = below(2) ? (1 + below(8)) * (MIB / 4) : 0;
    cache_tenants_changed(rig.cache);
}

/* Everything ends: then nobody may still wait, and evicting everything leaves nothing. */
static void chaos_end(void)
{
    for (int i = 0; i < COPIES; i++)
        if (chaos.copy[i].pending_write)
            copy_end(&chaos.copy[i], true);
    for (int i = 0; i < LOADS; i++)
        load_end(&chaos.load[i]);
    for (int i = 0; i < ASKERS; i++)
        chaos.asker[i].again = false;
    for (int i = 0; i < 3; i++)
        pending_writes_end(rig.cache, &rig.pending_writes[i]);
    rig.tier.refuse_n = shared.refuse_n = 0;
    for (int i = 0; i < 200; i++) {
        iterate();
        fake_shared_ready(&shared);
        if (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        if (shared.n_pending > 0)
            fake_shared_next(&shared, 0);
    }
    invariants();
    cr_assert(list_empty(&rig.cache->waits[WAIT_SLOT]) && list_empty(&rig.cache->firsts),
              "somebody waits for ever");
    for (uint64_t k = 0; k < KEYS; k++) {
        for (unsigned i = 0; i < NAMESPACES; i++) {
            block_ref ref = find(ns_at(i), k);

            if (ref == 0)
                continue;
            cache_pin(rig.cache, ref, false);
            (void)cache_evict(rig.cache, ref, CACHE_ALL);
        }
    }
    invariants(); /* the lookup tables, too */
    for (unsigned i = 0; i < NAMESPACES; i++)
        while (ns_at(i)->follower)
            lookup_tables_unref(rig.lookup_tables, ns_at(i));
    expect_nothing_held();
    cr_expect(rig.cache->write[WRITE_SHARED].writing_bytes == 0);
}

static void chaos_run(unsigned acts)
{
    uint64_t seed = random_seed(0x5EED);

    for (unsigned round = 0; round < 2; round++) {
        memset(&chaos, 0, sizeof(chaos));
        random_state = (seed + round) * UINT64_C(0x9E3779B97F4A7C15) | 1;
        for (int i = 0; i < ASKERS; i++)
            ask(&chaos.asker[i]);
        for (unsigned op = 0; op < 20000 && rig.tier.places < PLACES_MAX - 200; op++) {
            chaos_acts[below(acts)]();
            if (op % 8 == 0)
                invariants();
            if (op % 64 == 0)
                chaos_lookup_table();
            if (rig.apart && op % 256 == 0)
                chaos_quota(below(2) ? rig.one->tenant : rig.two->tenant);
        }
        chaos_end();
        cr_assert_gt(chaos.reads, 20u, "round %u", round);
        for (uint64_t i = 0; i < rig.tier.places; i++)
            cr_assert_not(rig.tier.place[i].live);
        rig.tier.places = 0;
    }
}

Test(cache_random, random_interleavings)
{
    rig.cache->shared = NULL; /* none was configured */
    chaos_run(ACTS_LOCAL);
}

Test(cache_random, random_interleavings_over_a_shared_tier)
{
    chaos_run(ACTS_SHARED);
    cr_expect_gt(chaos.shared_reads, 20u);
    cr_expect_gt(rig.metrics.shared_stale_lookups, 20u);
}

static void open_narrow(void)
{
    rig.max_blocks = 10;
    open_shared();
    rig.cache->config.shared_blocks = 3;
}

TestSuite(cache_random_narrow, .init = open_narrow, .fini = close_shared);

Test(cache_random_narrow, random_interleavings_in_a_full_index)
{
    chaos_run(ACTS_SHARED);
    cr_expect_gt(rig.metrics.index_evicted, 200u);
    cr_expect_gt(rig.metrics.nvme_write_dropped + rig.tier.forgets, 200u);
}

static void open_apart(void)
{
    rig.apart = true;
    open_shared();
}

TestSuite(quotas, .init = open_apart, .fini = close_shared);

Test(quotas, random_interleavings_of_two_tenants)
{
    chaos_run(ACTS_SHARED);
    cr_expect_gt(chaos.refused, 20u);
}
