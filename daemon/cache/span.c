#include "daemon/cache/span.h"

#include "daemon/base/log.h"
#include "daemon/cache/internal.h"

#include <errno.h>

static int refuse(struct cache *c, const char *why, uint32_t first, uint32_t n)
{
    c->config.metrics->span_refused++;
    log_error("cache", "span-refused", "why=\"%s\" first=%u n=%u", why, first, n);
    return -EINVAL;
}

/* The one place where a slot becomes an address. at: of shard `first` in the slot. */
static int make(struct cache *c, slot_ref slot, uint64_t at, const struct form *form,
                uint32_t first, uint32_t n, bool fill, struct span *out)
{
    uint64_t len, slot_bytes;
    uint8_t *memory;

    if (n == 0 || first >= form->shards || n > form->shards - first)
        return refuse(c, "no such shards", first, n);
    if (slot == 0 || __builtin_mul_overflow(n, form->shard_bytes, &len))
        return refuse(c, "no slot", first, n);
    memory = arena_memory(c->arena, slot, &slot_bytes);
    if (at > slot_bytes || len > slot_bytes - at)
        return refuse(c, "behind the slot", first, n);
    *out = (struct span){.form = form,
                         .slot = slot,
                         .first = first,
                         .n = n,
                         .origin = memory + at,
                         .len = len,
                         .fill = fill};
    return 0;
}

int span_part(struct cache *c, block_ref ref, uint32_t part, struct span *out)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    const struct form *form = ns_form(ns, part);
    const struct part *p = &b->part[part];

    if (p->dram != PART_DRAM_READY || p->users == 0)
        return refuse(c, "not held in DRAM", 0, form->shards);
    return make(c, part_slot(p), 0, form, 0, form->shards, false, out);
}

/* Whether all of these shards are claimed; no others are the part's. */
static bool fill_claimed(const struct cache_fill *f, uint32_t shard, uint32_t n)
{
    if (shard > f->shards || n > f->shards - shard)
        return false;
    for (uint32_t s = shard; s < shard + n; s++)
        if (!(f->claimed[s / 64] >> (s % 64) & 1))
            return false;
    return true;
}

int span_fill(struct cache *c, const struct cache_fill *f, uint32_t first, uint32_t n,
              struct span *out)
{
    const struct form *form = ns_form(cache_ns(c, f->ref), f->part);

    if (!fill_claimed(f, first, n))
        return refuse(c, "not claimed", first, n);
    return make(c, f->slot, first * form->shard_bytes, form, first, n, true, out);
}

int span_cut(struct cache *c, const struct span *from, uint32_t first, uint32_t n, struct span *out)
{
    const uint8_t *slot = arena_memory(c->arena, from->slot, NULL);

    if (first < from->first || n > from->n || first - from->first > from->n - n)
        return refuse(c, "not in what it is cut from", first, n);
    return make(c, from->slot,
                (uint64_t)(from->origin - slot) + (first - from->first) * from->form->shard_bytes,
                from->form, first, n, from->fill, out);
}

int span_slot(struct cache *c, slot_ref slot, const struct form *form, struct span *out)
{
    return make(c, slot, 0, form, 0, form->shards, true, out);
}

int span_kept(struct cache *c, slot_ref slot, const struct form *form, struct span *out)
{
    return make(c, slot, 0, form, 0, form->shards, false, out);
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
             room = tier_shards_room(form->shard_bytes, first, n);

    if (at > slot_bytes || room > slot_bytes - at)
        return refuse(c, "no room on the stage", first, n);
    return make(c, slot, at + tier_shards_at(form->shard_bytes, first), form, first, n, false, out);
}
