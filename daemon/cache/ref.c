/* What keeps blocks in place (leases in some tier, references to parts in DRAM), and how they leave
 * one tier or all; callers decide when. Also spans (span.h), which name a part's bytes for the
 * owner of a reference. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* ---- parts and blocks leave ---- */

void block_drop_dram(struct cache *c, block_ref ref, bool evicted)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        slot_ref slot;

        if (b->part[i].dram != PART_DRAM_READY)
            continue;
        slot = part_slot(&b->part[i]);
        part_set_dram(c, ref, i, PART_DRAM_NONE, 0);
        arena_slot_free(c->arena, slot);
    }
    c->config.metrics->prefetch_useless += !!(b->flags & BLOCK_PREFETCHED);
    b->flags &= (uint16_t)~BLOCK_PREFETCHED;
    if (b->flags & BLOCK_IN_POLICY)
        policy_remove(c->config.policy, ref, evicted);
    cache_list_update(c, ref);
}

void block_drop_nvme(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY)
            cache_nvme_lost(c, ref, i, true);
}

void cache_nvme_lost(struct cache *c, block_ref ref, uint32_t part, bool forget)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct tier_place place = part_place(&b->part[part]);

    part_set_nvme(c, ref, part, NULL);
    if (forget)
        c->tier_ops->forget(c->tier, &place, ns_part_bytes(ns, part));
}

void cache_shared_forget(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (part_on_shared(&b->part[i]))
            part_set_shared(c, ref, i, PART_SHARED_NONE, 0);
}

static void block_remove(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (b->flags & BLOCK_PINNED)
        c->stats.pinned--;
    if (b->flags & BLOCK_SHARED_QUEUED)
        c->config.metrics->shared_write_dropped += cache_parts_missing(b, ns, WRITE_SHARED);
    cache_shared_forget(c, ref);
    block_drop_dram(c, ref, false);
    block_drop_nvme(c, ref);
    index_remove(c->config.index, ref);
}

void cache_discard(struct cache *c, block_ref ref)
{
    block_remove(c, ref);
    cache_released(c);
}

/* An incomplete block in DRAM may still be completed, or the policy evicts it. Nobody would ever
 * find one without anything in DRAM. */
void cache_settle(struct cache *c, block_ref ref, const struct block *b)
{
    const struct ns *ns;

    if (b->policy_data & POLICY_ASIDE)
        cache_reconsider(c, ref);
    if (b->leases > 0 || (!(b->flags & BLOCK_DELETING) && b->dram_parts > 0))
        return;
    ns = index_ns(c->config.index, b->ns);
    if ((b->flags & BLOCK_DELETING || !block_complete(b, ns)) && block_idle(b, ns))
        block_remove(c, ref);
}

/* ---- what nobody needs ---- */

/* A search for a block to drop looks at so many. Those that may not be dropped go to the front, so
 * that the next search looks at others. */
#define DROP_TRIES 64

bool cache_may_drop(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

bool cache_list_drop(struct cache *c, struct block_list *l)
{
    for (unsigned i = 0; i < DROP_TRIES && l->back != 0; i++) {
        block_ref ref = l->back;

        if (cache_may_drop(c, ref) &&
            (l != &c->lists.below || !cache_quota_keeps_below(cache_ns(c, ref)->tenant))) {
            cache_discard(c, ref);
            return true;
        }
        cache_list_front(c, ref);
    }
    return false;
}

/* False: with so much more in the index they would be too many. */
bool cache_shared_room(struct cache *c, uint64_t more_bytes)
{
    while (c->lists.shared_index_bytes + more_bytes > c->config.shared_blocks * INDEX_BLOCK_BYTES)
        if (!cache_list_drop(c, &c->lists.shared))
            return false;
    return true;
}

void cache_shared_trim(struct cache *c)
{
    (void)cache_shared_room(c, 0);
}

/* ---- lookups ---- */

void cache_tiers(const struct cache *c, const block_ref *refs, uint32_t n, bool stop_at_gap,
                 uint8_t *tiers)
{
    const struct ns *ns = NULL;
    bool gap = false;

    for (uint32_t i = 0; i < n; i++) {
        const struct block *b = refs[i] && !gap ? index_block(c->config.index, refs[i]) : NULL;

        if (b && (!ns || ns->id != b->ns))
            ns = index_ns(c->config.index, b->ns);
        if (!b)
            tiers[i] = 0;
        else if (b->dram_parts == ns->identity.parts && block_found(b, ns)) /* as most are */
            tiers[i] = CACHE_DRAM;
        else
            tiers[i] = cache_tier(c, refs[i]);
        gap = gap || (stop_at_gap && tiers[i] == 0);
    }
}

void cache_touch(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n)
{
    uint32_t outside, again = policy_touch(c->config.policy, refs, n, &outside);

    if (c->tier)
        admission_hits(ns->admits, again);
    /* The head of the prefix comes to the front of its list last, so it stays longest. */
    for (uint32_t i = n; outside > 0 && i-- > 0;)
        if (refs[i] != 0 && index_block(c->config.index, refs[i])->flags & BLOCK_LISTED)
            cache_list_front(c, refs[i]);
    if (c->used_cb)
        c->used_cb(c, ns, refs, n);
}

/* ---- leases ---- */

uint32_t cache_lease_many(struct cache *c, block_ref *refs, uint32_t n, bool found)
{
    const struct ns *ns = NULL;
    uint32_t leased = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        if (!ns || ns->id != b->ns)
            ns = index_ns(c->config.index, b->ns);
        if (found && !block_found(b, ns)) {
            refs[i] = 0;
            continue;
        }
        leased++;
        assert(b->leases < UINT32_MAX);
        if (b->leases++ > 0)
            continue;
        c->leased.index_bytes += ns->index_bytes;
        c->leased.bytes += ns->block_bytes;
    }
    return leased;
}

void cache_lease(struct cache *c, block_ref ref)
{
    (void)cache_lease_many(c, &ref, 1, false);
}

bool cache_unlease_many(struct cache *c, const block_ref *refs, uint32_t n)
{
    const struct ns *ns = NULL;
    bool any = false;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;

        if (!b)
            continue;
        assert(b->leases > 0);
        if (--b->leases > 0)
            continue;
        if (!ns || ns->id != b->ns)
            ns = index_ns(c->config.index, b->ns);
        c->leased.index_bytes -= ns->index_bytes;
        c->leased.bytes -= ns->block_bytes;
        cache_settle(c, refs[i], b);
        any = true;
    }
    return any;
}

void cache_unlease(struct cache *c, block_ref ref)
{
    if (cache_unlease_many(c, &ref, 1))
        cache_released(c);
}

void cache_lease_undo(struct cache *c, block_ref ref)
{
    (void)cache_unlease_many(c, &ref, 1);
}

struct cache_leased cache_leased(const struct cache *c)
{
    return c->leased;
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

/* ---- references to a part in DRAM ---- */

int cache_take(struct cache *c, block_ref ref, uint32_t part)
{
    struct part *p = &index_block(c->config.index, ref)->part[part];

    assert(p->dram == PART_DRAM_READY);
    if (p->users >= PART_USERS_MAX)
        return -EAGAIN; /* one key may come often in a request */
    p->users++;
    c->users++;
    return CACHE_READY;
}

void cache_unref(struct cache *c, block_ref ref, uint32_t part)
{
    struct block *b = index_block(c->config.index, ref);

    assert(b->part[part].users > 0);
    c->users--;
    if (--b->part[part].users == 0)
        cache_settle(c, ref, b);
}

void cache_put(struct cache *c, block_ref ref, uint32_t part)
{
    cache_unref(c, ref, part);
    cache_released(c);
}

void cache_ref_lasting(struct cache *c, block_ref ref, uint32_t part)
{
    assert(cache_part(c, ref, part)->users > 0 && c->users > 0);
    c->users--;
    cache_less_under_way(c);
}

uint32_t cache_ref_ready(struct cache *c, const block_ref *refs, uint32_t n, uint32_t part,
                         uint32_t most, const void **memory)
{
    uint32_t held = 0;
    struct span span;

    for (uint32_t i = 0; i < n; i++) {
        struct block *b = refs[i] ? index_block(c->config.index, refs[i]) : NULL;
        struct part *p = b ? &b->part[part] : NULL;

        memory[i] = NULL;
        if (held == most || !p || b->flags & BLOCK_DELETING || p->dram != PART_DRAM_READY ||
            p->users >= PART_USERS_MAX)
            continue;
        p->users++;
        if (span_part(c, refs[i], part, &span) != 0) {
            p->users--;
            continue;
        }
        memory[i] = span.origin;
        held++;
    }
    return held;
}

void cache_unref_lasting(struct cache *c, block_ref ref, uint32_t part)
{
    c->users++;
    cache_put(c, ref, part);
}

/* ---- what a prefetch brought ---- */

void cache_prefetched(struct cache *c, block_ref ref)
{
    index_block(c->config.index, ref)->flags |= BLOCK_PREFETCHED;
}

void cache_prefetch_used(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);

    c->config.metrics->prefetch_useful += !!(b->flags & BLOCK_PREFETCHED);
    b->flags &= (uint16_t)~BLOCK_PREFETCHED;
}

/* ---- the end of pending writes ---- */

void pending_write_abort(struct cache *c, struct pending_write *f)
{
    block_ref ref = f->ref;
    slot_ref slot = f->slot;
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    assert(f->copying == 0);
    part_set_dram(c, ref, f->part, PART_DRAM_NONE, 0);
    list_remove(&f->link);
    list_remove(&f->link_age);
    table_remove(&c->pending_writes, f->number);
    free(f);
    arena_slot_free(c->arena, slot);
    c->config.metrics->dump_blocks_dropped++;
    cache_settle(c, ref, b);
}

void pending_writes_break(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    b->leases++; /* pending_write_abort settles the block, which must outlive this loop */
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        struct pending_write *f;

        if (b->part[i].dram != PART_DRAM_PENDING_WRITE)
            continue;
        f = table_get(&c->pending_writes, part_pending_write(&b->part[i]));
        f->broken = true;
        if (f->copying == 0)
            pending_write_abort(c, f);
    }
    b->leases--;
    cache_released(c);
}

bool pending_write_reclaim(struct cache *c)
{
    if (list_empty(&c->pending_writes_by_age))
        return false;
    pending_write_abort(c,
                        LIST_ENTRY(c->pending_writes_by_age.next, struct pending_write, link_age));
    cache_released(c);
    return true;
}

/* ---- spans ---- */

static int refuse(struct cache *c, const char *why, uint32_t first, uint32_t n)
{
    c->config.metrics->span_refused++;
    log_error("cache", "span-refused", "why=\"%s\" first=%u n=%u", why, first, n);
    return -EINVAL;
}

/* The one place where a slot becomes an address. at: of layer `first` in the slot. */
static int make(struct cache *c, slot_ref slot, uint64_t at, const struct form *form,
                uint32_t first, uint32_t n, bool pending, struct span *out)
{
    uint64_t len, slot_bytes;
    uint8_t *memory;

    if (n == 0 || first >= form->layers || n > form->layers - first)
        return refuse(c, "no such layers", first, n);
    if (slot == 0 || __builtin_mul_overflow(n, form->layer_bytes, &len))
        return refuse(c, "no slot", first, n);
    memory = arena_memory(c->arena, slot, &slot_bytes);
    if (at > slot_bytes || len > slot_bytes - at)
        return refuse(c, "past the slot", first, n);
    *out = (struct span){.form = form,
                         .slot = slot,
                         .first = first,
                         .n = n,
                         .origin = memory + at,
                         .len = len,
                         .pending = pending};
    return 0;
}

int span_part(struct cache *c, block_ref ref, uint32_t part, struct span *out)
{
    const struct block *b = index_block(c->config.index, ref);
    const struct form *form = ns_form(index_ns(c->config.index, b->ns), part);
    const struct part *p = &b->part[part];

    if (p->dram != PART_DRAM_READY || p->users == 0)
        return refuse(c, "not held in DRAM", 0, form->layers);
    return make(c, part_slot(p), 0, form, 0, form->layers, false, out);
}

int span_pending_write(struct cache *c, const struct pending_write *f, uint32_t first, uint32_t n,
                       struct span *out)
{
    const struct form *form = ns_form(cache_ns(c, f->ref), f->part);
    bool claimed = first <= f->layers && n <= f->layers - first;

    /* Claims all of these layers; the part has no others. */
    for (uint32_t s = first; claimed && s < first + n; s++)
        claimed = f->claimed[s / 64] >> (s % 64) & 1;
    if (!claimed)
        return refuse(c, "not claimed", first, n);
    return make(c, f->slot, first * form->layer_bytes, form, first, n, true, out);
}

int span_cut(struct cache *c, const struct span *from, uint32_t first, uint32_t n, struct span *out)
{
    const uint8_t *slot = arena_memory(c->arena, from->slot, NULL);

    if (first < from->first || n > from->n || first - from->first > from->n - n)
        return refuse(c, "not in what it is cut from", first, n);
    return make(c, from->slot,
                (uint64_t)(from->origin - slot) + (first - from->first) * from->form->layer_bytes,
                from->form, first, n, from->pending, out);
}

int span_slot(struct cache *c, slot_ref slot, const struct form *form, struct span *out)
{
    return make(c, slot, 0, form, 0, form->layers, true, out);
}

int span_kept(struct cache *c, slot_ref slot, const struct form *form, struct span *out)
{
    return make(c, slot, 0, form, 0, form->layers, false, out);
}

int span_copy(struct cache *c, block_ref ref, uint32_t part, slot_ref to, struct cache_copy *out)
{
    struct span source, target;
    int rc = span_part(c, ref, part, &source);

    if (rc == 0)
        rc = span_slot(c, to, source.form, &target);
    if (rc == 0)
        *out = (struct cache_copy){.to = target.origin, .from = source.origin, .bytes = source.len};
    return rc;
}

int span_stage(struct cache *c, slot_ref slot, uint64_t at, const struct form *form, uint32_t first,
               uint32_t n, struct span *out)
{
    uint64_t slot_bytes = arena_slot_bytes(c->arena, slot),
             room = tier_layers_room(form->layer_bytes, first, n);

    if (at > slot_bytes || room > slot_bytes - at)
        return refuse(c, "no room on the stage", first, n);
    return make(c, slot, at + tier_layers_at(form->layer_bytes, first), form, first, n, false, out);
}
