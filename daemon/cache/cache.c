#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* ---- chores ---- */

/* In this order: requests that wait for the slab that compact.c has emptied take it before
 * others. */
static const struct {
    bool (*run_cb)(void *ctx);
    bool (*ready_cb)(const void *ctx);
} chores[CHORES] = {
    [CHORE_COMPACT] = {cache_compact_run, cache_compact_ready},
    [CHORE_SPACE] = {cache_space_run, cache_space_ready},
    [CHORE_OTHER] = {cache_other_run, cache_other_ready},
    [CHORE_WAITERS] = {cache_iteration_run, cache_iteration_ready},
    [CHORE_SECRETS] = {cache_secrets_run, cache_secrets_ready},
    [CHORE_WRITE_NVME] = {cache_write_nvme_run, cache_write_nvme_ready},
    [CHORE_WRITE_SHARED] = {cache_write_shared_run, cache_write_shared_ready},
    [CHORE_SWEEP] = {cache_list_sweep_run, cache_list_sweep_ready},
    [CHORE_REGROUP] = {cache_quota_regroup_run, NULL},
    [CHORE_TRIM] = {cache_quota_trim_run, NULL},
    [CHORE_PRESSURE] = {cache_pressure_run, cache_pressure_ready},
};

static int chores_open(struct cache *c)
{
    int rc = chores_init(&c->chores, c->config.loop);

    c->chores.idle.data = c;
    for (unsigned i = 0; rc == 0 && i < CHORES; i++)
        chore_add(&c->chores, &c->chore[i], chores[i].run_cb, chores[i].ready_cb, c);
    return rc;
}

/* ---- life ---- */

int cache_new(const struct cache_config *config, struct cache **out)
{
    struct cache *c = calloc(1, sizeof(*c));
    int rc;

    if (!c)
        return -ENOMEM;
    c->config = *config;
    rc = chores_open(c);
    if (rc != 0) {
        free(c);
        return rc;
    }
    cache_ns_records_init(c);
    table_init(&c->pending_writes, CACHE_MAX_PENDING_WRITES);
    table_init(&c->pending_reads, CACHE_MAX_PENDING_READS);
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        fair_queue_init(&c->write[to].turns, 0);
    list_init(&c->durables.waiting);
    list_init(&c->durables.stalled);
    list_init(&c->pending_writes_by_age);
    for (enum wait_for what = 0; what < WAITS; what++)
        list_init(&c->waits[what]);
    list_init(&c->firsts);
    list_init(&c->woken);
    list_init(&c->compact.moves);
    c->compact.vain = UINT64_MAX;
    list_init(&c->followers);
    list_init(&c->quotas.open);
    *out = c;
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    struct cache *c = handle->data;

    if (--c->handles > 0)
        return;
    table_close(&c->pending_writes);
    table_close(&c->pending_reads);
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        writes_free(&c->write[to]);
    free(c->without_secret.entries);
    free(c->space.blockers);
    free(c);
}

void cache_free(struct cache *c)
{
    if (!c)
        return;
    assert(c->tier_busy == 0 && c->shared_busy == 0 && table_count(&c->pending_writes) == 0);
    for (enum wait_for what = 0; what < WAITS; what++)
        assert(list_empty(&c->waits[what]));
    assert(list_empty(&c->firsts) && list_empty(&c->woken));
    assert(cache_moves(c) == 0 && !c->mover && list_empty(&c->followers));
    cache_compact_disarm(c);
    c->handles = 2;
    chores_close(&c->chores, closed_cb);
    uv_close((uv_handle_t *)&c->records.timer, closed_cb);
}

void cache_tier_attach(struct cache *c, const struct tier_ops *ops, struct tier *tier)
{
    c->tier_ops = ops;
    c->tier = tier;
    c->used_cb = cache_write_touched;
}

void cache_arena_attach(struct cache *c, struct arena *arena)
{
    c->arena = arena;
}

uint32_t cache_tier_busy(const struct cache *c)
{
    return c->tier_busy;
}

bool cache_written(const struct cache *c)
{
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        if (c->write[to].n + c->write[to].stalled.n > 0 || c->write[to].writing_bytes > 0)
            return false;
    return c->without_secret.n == 0 && c->durables.unverified == 0 && c->records.n == 0 &&
           !c->restoring;
}

void cache_stop_writing(struct cache *c)
{
    c->no_writes = true;
    cache_writes_unstall(c);
    cache_durables_retry(c); /* they fail now */
    cache_writes_with_secret(c);
    while (cache_writes_secret(c))
        ;
    cache_writes_abandon(c);
}

void cache_stats(const struct cache *c, struct cache_stats *out)
{
    *out = c->stats;
    out->shared_only = c->lists.shared.n;
}

void cache_arena_grew(struct cache *c)
{
    cache_released(c);
}

/* ---- what requests ask ---- */

block_ref cache_open(struct cache *c, struct ns *ns, const uint8_t *key)
{
    block_ref ref = index_find(c->config.index, ns, key);

    if (ref == 0)
        ref = cache_insert(c, ns, key, INDEX_SPACE_DRAM);
    if (ref != 0)
        cache_lease_many(c, &ref, 1, false);
    if (c->tier)
        cache_ns_record(c, ns);
    return ref;
}

void cache_touch_own(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n)
{
    block_ref own[UCM_MAX_KEYS];
    uint32_t some = 0;

    assert(n <= UCM_MAX_KEYS);
    for (uint32_t i = 0; i < n; i++) {
        bool is = refs[i] != 0 && index_block(c->config.index, refs[i])->ns == ns->id;

        own[i] = is ? refs[i] : 0;
        some += is;
    }
    if (some > 0)
        cache_touch(c, ns, own, n);
}

/* One with many parts takes the place of some with few. */
block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_space from)
{
    while (index_full(c->config.index, ns))
        if (!cache_index_drop(c, ns, from))
            return 0;
    return index_insert(c->config.index, ns, key);
}

/* ---- by name ---- */

/* The tiers in which something of it lies, or to which something is on its way. clean: leaving
 * DRAM loses nothing. */
static unsigned block_tiers(const struct block *b, const struct ns *ns, bool *clean)
{
    unsigned tiers = b->dram_parts > 0 ? CACHE_DRAM : 0;

    *clean = true;
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        tiers |= p->nvme != PART_NVME_NONE ? CACHE_NVME : 0;
        tiers |= p->shared != PART_SHARED_NONE ? CACHE_SHARED : 0;
        *clean = *clean && part_clean(p);
    }
    return tiers;
}

enum cache_evicted cache_evict(struct cache *c, block_ref ref, unsigned tiers)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    bool all = tiers == CACHE_ALL, clean;

    if (b->whole_parts == 0 || !(block_tiers(b, ns, &clean) & tiers))
        return CACHE_EVICT_NONE;
    if (b->flags & BLOCK_PINNED || (tiers == CACHE_DRAM && !clean))
        return CACHE_EVICT_LATER;
    if (all)
        pending_writes_break(c, ref);
    if (b->leases > 0 || !block_idle(b, ns)) {
        if (all)
            block_mark_deleting(c, ref);
        return CACHE_EVICT_LATER;
    }
    if (tiers & CACHE_SHARED)
        cache_shared_forget(c, ref);
    if (tiers & CACHE_DRAM)
        block_drop_dram(c, ref, false);
    if (tiers & CACHE_NVME)
        block_drop_nvme(c, ref);
    if (!block_complete(b, ns))
        cache_discard(c, ref);
    cache_released(c);
    return CACHE_EVICT_DONE;
}

uint64_t cache_deletions(const struct cache *c)
{
    return c->deletions;
}
