#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot.h"
#include "proto/messages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

struct ns *cache_ns(struct cache *c, block_ref ref)
{
    struct ns *ns;

    cache_block(c, ref, &ns);
    return ns;
}

/* ---- life ---- */

int cache_new(const struct cache_config *config, struct cache **out)
{
    struct cache *c = calloc(1, sizeof(*c));
    int rc;

    if (!c)
        return -ENOMEM;
    c->config = *config;
    c->windows.change = 1;
    rc = cache_chores_init(c);
    if (rc != 0) {
        free(c);
        return rc;
    }
    cache_ns_records_init(c);
    table_init(&c->fills, CACHE_MAX_FILLS);
    table_init(&c->fetches, CACHE_MAX_FETCHES);
    list_init(&c->durables.waiting);
    list_init(&c->durables.stalled);
    list_init(&c->fills_by_age);
    for (enum wait_for what = 0; what < WAITS; what++)
        list_init(&c->waits[what]);
    list_init(&c->firsts);
    list_init(&c->woken);
    list_init(&c->relocations.ops);
    list_init(&c->compact.moves);
    c->compact.vain = UINT64_MAX;
    list_init(&c->hints.all);
    list_init(&c->hints.kept);
    list_init(&c->quotas.open);
    c->relocations.most = CACHE_MOVES_MAX;
    *out = c;
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    struct cache *c = handle->data;

    if (--c->handles > 0)
        return;
    table_close(&c->fills);
    table_close(&c->fetches);
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        writes_free(&c->write[to]);
    free(c->unseeded.entries);
    free(c->space.blockers);
    free(c);
}

void cache_free(struct cache *c)
{
    if (!c)
        return;
    assert(c->tier_busy == 0 && c->share_busy == 0 && table_count(&c->fills) == 0);
    for (enum wait_for what = 0; what < WAITS; what++)
        assert(list_empty(&c->waits[what]));
    assert(list_empty(&c->firsts) && list_empty(&c->woken));
    assert(c->relocations.n == 0 && c->compact.n == 0 && c->hints.n == 0);
    cache_hints_close(c);
    cache_compact_disarm(c);
    cache_snapshot_forget(c); /* where no snapshot was written */
    c->handles = 2;
    chores_close(&c->chores, closed_cb);
    uv_close((uv_handle_t *)&c->records.timer, closed_cb);
}

void cache_tier_attach(struct cache *c, const struct tier_ops *ops, struct tier *tier)
{
    c->tier_ops = ops;
    c->tier = tier;
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
    return c->unseeded.n == 0 && c->durables.unverified == 0 && c->records.n == 0 &&
           !c->snapshot.loading;
}

void cache_stop_writing(struct cache *c)
{
    c->no_writes = true;
    cache_writes_unstall(c); /* durables fail now */
    cache_writes_seeded(c);
    while (cache_writes_seed(c))
        ;
    cache_writes_abandon(c);
    cache_snapshot_load_stop(c);
}

void cache_stats(const struct cache *c, struct cache_stats *out)
{
    *out = c->stats;
    out->shared_only = c->lists.shared.n;
}

/* ---- the state of a part ---- */

/* What the counts depend on, before a change and after it: 0 or 1 each. */
struct part_view {
    int complete, whole, in_dram, on_nvme, to_nvme, on_share, local, dirty, slot;
    uint8_t status; /* of the block, as lookups report it; 0 where nobody follows it */
};

struct part_change {
    block_ref ref;
    struct ns *ns;
    struct block *b;
    struct part *p;
    struct part_view was;
};

static struct part_view part_view(struct cache *c, const struct part_change *k)
{
    const struct block *b = k->b;
    const struct part *p = k->p;

    return (struct part_view){
        .complete = block_complete(b, k->ns),
        .whole = part_whole(p),
        .in_dram = p->dram == PART_DRAM_READY,
        .on_nvme = p->nvme == PART_NVME_READY,
        .to_nvme = p->nvme == PART_NVME_WRITING,
        .on_share = part_on_share(p),
        .local = p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_NONE,
        .slot = cache_quota_slot(c, p),
        .dirty = b->flags & BLOCK_QUEUED && p->dram == PART_DRAM_READY && p->nvme == PART_NVME_NONE,
        .status = cache_followed(k->ns) ? cache_status(c, k->ref) : 0,
    };
}

uint8_t cache_status(const struct cache *c, block_ref ref)
{
    static const uint8_t statuses[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                       [CACHE_NVME] = UCM_LOOKUP_NVME,
                                       [CACHE_SHARE] = UCM_LOOKUP_SHARED};

    return statuses[cache_tier(c, ref)];
}

void cache_follow(struct cache *c,
                  void (*changed_cb)(void *ctx, const struct ns *ns, const uint8_t *key,
                                     uint8_t was, uint8_t is),
                  void *ctx)
{
    c->watch.changed_cb = changed_cb;
    c->watch.changed_ctx = ctx;
}

void cache_status_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was)
{
    uint8_t is = cache_status(c, ref);

    if (is == was)
        return;
    if (ns->hints)
        cache_hints_changed(c, ns, ref, was, is);
    if (ns->tenant->events)
        c->watch.changed_cb(c->watch.changed_ctx, ns, index_block(c->config.index, ref)->key, was,
                            is);
}

static struct part_change change_begin(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_change k = {.ref = ref};

    k.b = cache_block(c, ref, &k.ns);
    assert(part < k.ns->identity.parts);
    k.p = &k.b->part[part];
    k.was = part_view(c, &k);
    return k;
}

static void change_end(struct cache *c, const struct part_change *k)
{
    struct part_view was = k->was, is = part_view(c, k);
    uint64_t part_bytes = ns_part_bytes(k->ns, (uint32_t)(k->p - k->b->part)),
             slot_bytes = arena_padded(part_bytes);
    struct tenant *t = k->ns->tenant;
    struct block *b = k->b;
    struct ns *ns = k->ns;

    b->whole_parts = (uint16_t)(b->whole_parts + is.whole - was.whole);
    b->dram_parts = (uint16_t)(b->dram_parts + is.in_dram - was.in_dram);
    b->local_parts = (uint16_t)(b->local_parts + is.local - was.local);
    ns->dram_bytes += slot_bytes * (uint64_t)(is.in_dram - was.in_dram);
    ns->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was.on_nvme);
    ns->share_bytes += part_bytes * (uint64_t)(is.on_share - was.on_share);
    t->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was.on_nvme);
    t->nvme_writing_bytes += part_bytes * (uint64_t)(is.to_nvme - was.to_nvme);
    t->share_bytes += part_bytes * (uint64_t)(is.on_share - was.on_share);
    if (was.slot != is.slot)
        cache_quota_count(c, ns, slot_bytes * (uint64_t)(is.slot - was.slot));
    c->dirty_bytes += slot_bytes * (uint64_t)(is.dirty - was.dirty);
    if (was.dirty && !is.dirty)
        cache_less_dirty(c);
    c->stats.complete += (uint64_t)(block_complete(b, ns) - was.complete);
    if (b->dram_parts == 0 || b->flags & (BLOCK_BELOW | BLOCK_SHARED_ONLY))
        cache_list_update(c, k->ref);
    if (policy_list(b) != POLICY_CANDIDATES)
        cache_reconsider(c, k->ref);
    if (cache_followed(ns))
        cache_status_changed(c, ns, k->ref, was.status);
}

void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    /* Workers read slots in windows by themselves: they miss this one before anything may change it. */
    if (k.was.in_dram)
        arena_slot_retract(c->arena, part_slot(p));
    p->dram = dram;
    p->dram_at.number = number; /* or slot */
    if (dram == PART_DRAM_READY && !(k.b->flags & BLOCK_DOOMED))
        arena_slot_publish(c->arena, number);
    if (dram == PART_DRAM_NONE && p->nvme == PART_NVME_NONE)
        p->checksum = 0; /* it came with a snapshot */
    change_end(c, &k);
    /* A block without parts in DRAM stays in the policy: eviction takes it out, and says why. */
    if (k.b->dram_parts > 0 && !(k.b->flags & BLOCK_IN_POLICY))
        policy_insert(c->config.policy, ref);
}

void block_retract(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY)
            arena_slot_retract(c->arena, part_slot(&b->part[i]));
}

static void nvme_set(struct cache *c, block_ref ref, uint32_t part, struct part to)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    p->nvme = to.nvme;
    p->nvme_at = to.nvme_at;
    p->checksum = to.checksum;
    p->sealed = to.sealed;
    change_end(c, &k);
}

void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place)
{
    struct part to = {.nvme = PART_NVME_NONE};

    if (place)
        to = (struct part){.nvme = PART_NVME_READY,
                           .nvme_at.loc = place->loc,
                           .checksum = place->checksum,
                           .sealed = place->sealed};
    nvme_set(c, ref, part, to);
}

void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, struct part_op *write)
{
    nvme_set(c, ref, part, (struct part){.nvme = PART_NVME_WRITING, .nvme_at.write = write});
}

void part_set_share(struct cache *c, block_ref ref, uint32_t part, enum part_share share,
                    share_root_id root)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    assert(root <= UCM_MAX_ROOTS);
    p->share = share;
    p->root = root;
    change_end(c, &k);
}
