#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot.h"
#include "proto/messages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns)
{
    struct block *b = index_block(c->config.index, ref);

    assert(b);
    *ns = index_ns(c->config.index, b->ns);
    assert(*ns);
    return b;
}

struct part *cache_part(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    assert(part < ns->identity.parts);
    return &b->part[part];
}

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

/* What the counts depend on, before a change and after it. */
struct part_view {
    bool complete, whole, in_dram, on_nvme, to_nvme, on_share, local, dirty, slot;
    uint8_t status; /* of the block, as lookups report it; 0 where nobody follows it */
};

static struct part_view part_view(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    const struct part *p = &b->part[part];

    return (struct part_view){
        .complete = block_complete(b, ns),
        .whole = part_whole(p),
        .in_dram = p->dram == PART_DRAM_READY,
        .on_nvme = p->nvme == PART_NVME_READY,
        .to_nvme = p->nvme == PART_NVME_WRITING,
        .on_share = part_on_share(p),
        .local = p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_NONE,
        .slot = cache_quota_slot(c, p),
        .dirty = b->flags & BLOCK_QUEUED && p->dram == PART_DRAM_READY && p->nvme == PART_NVME_NONE,
        .status = cache_followed(ns) ? cache_status(c, ref) : 0,
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

static int change(bool was, bool is)
{
    return (int)is - (int)was;
}

static void part_changed(struct cache *c, block_ref ref, uint32_t part, struct part_view was)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    uint64_t part_bytes = ns_part_bytes(ns, part), slot_bytes = arena_padded(part_bytes);
    struct part_view is = part_view(c, ref, part);

    b->whole_parts = (uint16_t)(b->whole_parts + change(was.whole, is.whole));
    b->dram_parts = (uint16_t)(b->dram_parts + change(was.in_dram, is.in_dram));
    ns->dram_bytes += slot_bytes * (uint64_t)change(was.in_dram, is.in_dram);
    b->local_parts = (uint16_t)(b->local_parts + change(was.local, is.local));
    ns->nvme_bytes += part_bytes * (uint64_t)change(was.on_nvme, is.on_nvme);
    ns->share_bytes += part_bytes * (uint64_t)change(was.on_share, is.on_share);
    ns->tenant->nvme_bytes += part_bytes * (uint64_t)change(was.on_nvme, is.on_nvme);
    ns->tenant->nvme_writing_bytes += part_bytes * (uint64_t)change(was.to_nvme, is.to_nvme);
    ns->tenant->share_bytes += part_bytes * (uint64_t)change(was.on_share, is.on_share);
    if (was.slot != is.slot)
        cache_quota_count(c, ns, slot_bytes * (uint64_t)change(was.slot, is.slot));
    c->dirty_bytes += slot_bytes * (uint64_t)change(was.dirty, is.dirty);
    cache_less_dirty(c);
    c->stats.complete += (uint64_t)change(was.complete, block_complete(b, ns));
    cache_list_update(c, ref);
    cache_reconsider(c, ref);
    if (cache_followed(ns))
        cache_status_changed(c, ns, ref, was.status);
}

void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number)
{
    struct part_view was = part_view(c, ref, part);
    struct part *p = cache_part(c, ref, part);
    const struct block *b = index_block(c->config.index, ref);

    /* Workers read slots in windows by themselves: they miss this one before anything may change it. */
    if (was.in_dram)
        arena_slot_retract(c->arena, part_slot(p));
    p->dram = dram;
    p->dram_at.number = number; /* or slot */
    if (dram == PART_DRAM_READY && !(b->flags & BLOCK_DOOMED))
        arena_slot_publish(c->arena, number);
    if (dram == PART_DRAM_NONE && p->nvme == PART_NVME_NONE)
        p->checksum = 0; /* it came with a snapshot */
    part_changed(c, ref, part, was);
    /* A block without parts in DRAM stays in the policy: eviction takes it out, and says why. */
    if (b->dram_parts > 0 && !(b->flags & BLOCK_IN_POLICY))
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
    struct part_view was = part_view(c, ref, part);
    struct part *p = cache_part(c, ref, part);

    p->nvme = to.nvme;
    p->nvme_at = to.nvme_at;
    p->checksum = to.checksum;
    p->sealed = to.sealed;
    part_changed(c, ref, part, was);
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
    struct part_view was = part_view(c, ref, part);
    struct part *p = cache_part(c, ref, part);

    assert(root <= UCM_MAX_ROOTS);
    p->share = share;
    p->root = root;
    part_changed(c, ref, part, was);
}

void part_use(struct cache *c, struct part *p)
{
    assert(p->users < UINT16_MAX);
    p->users++;
    c->users++;
}

void part_unuse(struct cache *c, struct part *p)
{
    assert(p->users > 0);
    p->users--;
    c->users--;
}

/* ---- blocks ---- */

bool cache_found(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b;

    if (ref == 0)
        return false;
    b = cache_block(c, ref, &ns);
    return block_complete(b, ns) && !(b->flags & BLOCK_DOOMED);
}

bool cache_in_dram(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    return b->dram_parts == ns->identity.parts;
}

bool cache_on_share(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (b->flags & BLOCK_SHARED_ONLY)
        return true;
    for (uint32_t i = 0; i < ns->identity.parts && c->share; i++)
        if (!part_whole_local(&b->part[i]))
            return true;
    return false;
}

static void leased_count(struct cache *c, const struct ns *ns, int change)
{
    c->leased.index_bytes += ns->index_bytes * (uint64_t)change;
    c->leased.bytes += ns->block_bytes * (uint64_t)change;
}

static void lease_add(struct cache *c, struct block *b, const struct ns *ns)
{
    assert(b->leases < UINT32_MAX);
    if (b->leases++ == 0)
        leased_count(c, ns, 1);
}

/* True: it was the last one. */
static bool lease_drop(struct cache *c, struct block *b, const struct ns *ns)
{
    assert(b->leases > 0);
    if (--b->leases > 0)
        return false;
    leased_count(c, ns, -1);
    return true;
}

void cache_lease(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    lease_add(c, b, ns);
}

bool cache_lease_end(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    return lease_drop(c, b, ns);
}

void cache_lease_many(struct cache *c, const block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        ns = cache_ns_again(c, b, ns);
        lease_add(c, b, ns);
    }
}

void cache_unlease_many(struct cache *c, const block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;
    bool any = false;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        any = true;
        ns = cache_ns_again(c, b, ns);
        if (lease_drop(c, b, ns))
            cache_settle_block(c, refs[i], b, ns);
    }
    if (any)
        cache_released(c);
}

void cache_unlease(struct cache *c, block_ref ref)
{
    cache_unlease_many(c, &ref, 1);
}

struct cache_leased cache_leased(const struct cache *c)
{
    return c->leased;
}

block_ref cache_open(struct cache *c, struct ns *ns, const uint8_t *key)
{
    block_ref ref = index_find(c->config.index, ns, key);

    if (ref == 0)
        ref = cache_insert(c, ns, key, INDEX_SPACE_DRAM);
    if (ref != 0)
        cache_lease(c, ref);
    if (c->tier)
        cache_ns_record(c, ns);
    return ref;
}

void cache_touch(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n)
{
    admission_hits(ns_admission(ns), policy_touch(c->config.policy, refs, n));
    cache_list_touch(c, refs, n);
    cache_write_used(c, ns, refs, n);
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

bool cache_pin(struct cache *c, block_ref ref, bool pinned)
{
    struct block *b = index_block(c->config.index, ref);

    if (pinned == !!(b->flags & BLOCK_PINNED))
        return false;
    b->flags ^= BLOCK_PINNED;
    c->stats.pinned += pinned ? 1 : -1;
    if (!pinned) {
        cache_reconsider(c, ref);
        cache_released(c);
    }
    return true;
}

bool block_idle(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0 || p->dram == PART_DRAM_FILLING || p->dram == PART_DRAM_FETCHING ||
            p->nvme == PART_NVME_WRITING)
            return false;
    }
    return true;
}
