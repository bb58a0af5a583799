/* What earlier runs left in DRAM, and what the tier on NVMe asks and tells: which place it may
 * reclaim, what it lost or moved, the parts that earlier runs wrote, what its checkpoints list. */
#include "daemon/cache/extend.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"
#include "proto/errors.h"

#include <assert.h>

/* ---- recovery ---- */

static struct ns *ns_restore(struct cache *c, const struct tier_found *f)
{
    struct ucm_error e = {0};
    struct ns *ns;

    if (index_ns_restore(c->config.index, f->name->fingerprint, f->identity, f->identity_bytes, &ns,
                         &e) != 0) {
        log_warn("cache", "namespace-not-restored", "reason=\"%s\"", e.text);
        return NULL;
    }
    if (ns->record == NS_RECORD_NONE && !f->ns_record_unsynced)
        ns->record = NS_RECORD_WRITTEN;
    return ns;
}

static bool part_wanted(struct cache *c, block_ref ref, const struct tier_found *f)
{
    const struct block *b = index_block(c->config.index, ref);
    const struct part *p = &b->part[f->name->part];
    uint64_t known = 0;

    if (b->flags & BLOCK_DELETING)
        return false;
    if (p->nvme == PART_NVME_READY) {
        known = c->tier_ops->sequence(c->tier, part_loc(p));
        if (known == f->sequence && f->duplicate)
            *f->duplicate = (struct tier_duplicate){part_owner(ref, f->name->part), part_place(p)};
        return known < f->sequence;
    }
    /* Also when the part was dumped since the start: this copy may have been promised. */
    return p->nvme == PART_NVME_NONE;
}

static uint64_t restore_cb(void *ctx, const struct tier_found *f)
{
    struct cache *c = ctx;
    struct ns *ns = ns_restore(c, f);
    const struct part *p;
    block_ref ref;
    bool same;

    if (!ns || f->name->key_bytes != ns->identity.key_bytes ||
        f->name->part >= ns->identity.parts || f->bytes != ns_part_bytes(ns, f->name->part))
        return 0;
    ref = index_find(c->config.index, ns, f->name->key);
    if (ref == 0)
        ref = cache_insert(c, ns, f->name->key, INDEX_SPACE_SHARED);
    /* The tier may find a block that a full index dropped in an earlier run before it finds the
     * newer block that took its place. */
    while (ref == 0 && index_full(c->config.index, ns) && cache_list_drop_older(c, f->sequence))
        ref = cache_insert(c, ns, f->name->key, INDEX_SPACE_SHARED);
    if (ref == 0)
        return 0;
    p = cache_part(c, ref, f->name->part);
    if (!part_wanted(c, ref, f))
        return 0;
    /* Bytes from a snapshot were compared with their checksum. */
    same = p->dram == PART_DRAM_READY && !p->encrypted && !f->place.encrypted &&
           p->checksum == f->place.checksum && p->checksum != 0;
    if (p->nvme == PART_NVME_READY)
        cache_nvme_lost(c, ref, f->name->part, true);
    part_set_nvme(c, ref, f->name->part, &f->place);
    if (p->dram != PART_DRAM_NONE && !same)
        cache_unverified(c, ref, f->name->part);
    return part_owner(ref, f->name->part);
}

static void recovered_cb(void *ctx)
{
    struct cache *c = ctx;

    cache_list_sweep_begin(c);
    cache_wake(c, CHORE_TRIM);
    cache_released(c);
    cache_durables_retry(c);
}

/* ---- parts of an earlier run that are in DRAM ---- */

void cache_restore_begin(struct cache *c)
{
    c->restoring = true;
    c->tier_busy++;
}

void cache_restore_end(struct cache *c)
{
    c->restoring = false;
    c->tier_busy--;
    cache_list_sweep_begin(c);
    cache_released(c);
}

/* Blocks dumped or found on NVMe since the start take precedence. */
static bool restored_wanted(const struct block *b, const struct cache_restored *r)
{
    const struct part *p = &b->part[r->part];

    return !(b->flags & BLOCK_DELETING) && p->dram == PART_DRAM_NONE &&
           (p->nvme == PART_NVME_NONE ||
            (p->nvme == PART_NVME_READY && (p->encrypted || p->checksum == r->checksum)));
}

bool cache_restore(struct cache *c, const struct cache_restored *r)
{
    block_ref ref = index_find(c->config.index, r->ns, r->key);
    struct block *b;

    if (ref == 0)
        ref = cache_insert(c, r->ns, r->key, INDEX_SPACE_BELOW);
    if (ref == 0)
        return false;
    b = index_block(c->config.index, ref);
    if (!restored_wanted(b, r))
        return false;
    arena_slot_own(c->arena, r->slot, part_owner(ref, r->part));
    cache_list_unlink(c, ref);
    if (!(b->flags & BLOCK_IN_POLICY))
        policy_restore(c->config.policy, ref, r->uses);
    part_set_dram(c, ref, r->part, PART_DRAM_READY, r->slot);
    if (b->part[r->part].nvme == PART_NVME_NONE)
        b->part[r->part].checksum = r->checksum;
    if (!c->tier || !block_complete(b, r->ns) || b->part[r->part].nvme == PART_NVME_READY ||
        (r->stored && cache_recovering(c)))
        return true;
    /* It has no copy on NVMe, or a full index dropped that copy. */
    cache_ns_record(c, r->ns);
    cache_write_stored(c, ref, WRITE_NVME);
    return true;
}

/* ---- checkpoints ---- */

static bool describe_cb(void *ctx, uint64_t owner, struct tier_described *out)
{
    struct cache *c = ctx;
    uint32_t part = owner_part(owner);
    struct ns *ns;
    const struct block *b = cache_block(c, owner_block(owner), &ns);

    if (b->part[part].nvme != PART_NVME_READY || b->flags & BLOCK_DELETING)
        return false;
    out->name = cache_tier_name(c, owner_block(owner), part);
    out->bytes = ns_part_bytes(ns, part);
    out->checksum = b->part[part].checksum;
    out->encrypted = b->part[part].encrypted;
    out->layer_bytes = ns->identity.layer_bytes;
    return true;
}

/* ---- places ---- */

/* The part loses nothing when it lies in DRAM or on the shared tier, too, and is not being read. */
static bool tier_may_drop(struct cache *c, uint64_t owner)
{
    struct ns *ns;
    const struct block *b = cache_block(c, owner_block(owner), &ns);
    const struct part *p = &b->part[owner_part(owner)];

    if (p->dram == PART_DRAM_READY || (p->shared == PART_SHARED_KNOWN && p->dram == PART_DRAM_NONE))
        return true;
    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

static bool tier_drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    const struct part *p = cache_part(c, ref, owner_part(owner));

    assert(part_loc(p) == loc);
    if (!tier_may_drop(c, owner))
        return false;
    if (policy_heat(index_block(c->config.index, ref)) == 0)
        admission_unused(cache_ns(c, ref)->admits);
    cache_nvme_lost(c, ref, owner_part(owner), false);
    if (!part_whole(p))
        cache_discard(c, ref);
    else
        cache_shared_trim(c);
    return true;
}

static void tier_lost_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (!part_is_at(&b->part[owner_part(owner)], loc))
        return;
    cache_nvme_lost(c, ref, owner_part(owner), true);
    cache_write_again(c, ref);
    cache_settle(c, ref, b);
    cache_released(c);
}

static unsigned tier_heat_cb(void *ctx, uint64_t owner)
{
    struct cache *c = ctx;

    if (!tier_may_drop(c, owner))
        return TIER_HEAT_BUSY;
    if (cache_quota_keeps_below(cache_ns(c, owner_block(owner))->tenant))
        return TIER_HEAT_KEPT;
    return policy_heat(index_block(c->config.index, owner_block(owner)));
}

static bool tier_moved_cb(void *ctx, uint64_t owner, uint64_t from, const struct tier_place *to)
{
    struct cache *c = ctx;
    block_ref ref = owner_block(owner);
    uint32_t part = owner_part(owner);
    const struct block *b = index_peek(c->config.index, ref);

    /* Another block may have the number by now, but no other part was ever at `from`. */
    if (!b || part >= index_ns(c->config.index, b->ns)->identity.parts ||
        !part_is_at(&b->part[part], from))
        return false;
    part_set_nvme(c, ref, part, to);
    return true;
}

static bool ns_known_cb(void *ctx, const uint8_t *fingerprint)
{
    struct cache *c = ctx;

    return index_ns_find(c->config.index, fingerprint) != NULL;
}

/* ---- all of them ---- */

struct tier_callbacks cache_tier_callbacks(struct cache *c)
{
    return (struct tier_callbacks){.drop_cb = tier_drop_cb,
                                   .heat_cb = tier_heat_cb,
                                   .moved_cb = tier_moved_cb,
                                   .restore_cb = restore_cb,
                                   .recovered_cb = recovered_cb,
                                   .describe_cb = describe_cb,
                                   .ns_known_cb = ns_known_cb,
                                   .lost_cb = tier_lost_cb,
                                   .ctx = c};
}
