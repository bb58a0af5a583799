/* Recovery: the tier offers the parts that earlier runs wrote, and asks for what its checkpoints
 * list. */
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"
#include "proto/errors.h"

#include <string.h>

/* ---- what the tier finds ---- */

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

    if (b->flags & BLOCK_DOOMED)
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

uint64_t cache_restore_cb(void *ctx, const struct tier_found *f)
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
    /* The tier may find a block that a full index dropped in an earlier run before it finds the newer
     * block that took its place. */
    while (ref == 0 && index_full(c->config.index, ns) && cache_list_drop_older(c, f->sequence))
        ref = cache_insert(c, ns, f->name->key, INDEX_SPACE_SHARED);
    if (ref == 0)
        return 0;
    p = cache_part(c, ref, f->name->part);
    if (!part_wanted(c, ref, f))
        return 0;
    /* Bytes from a snapshot were compared with their checksum. */
    same = p->dram == PART_DRAM_READY && !p->sealed && !f->place.sealed &&
           p->checksum == f->place.checksum && p->checksum != 0;
    if (p->nvme == PART_NVME_READY)
        cache_nvme_lost(c, ref, f->name->part, true);
    part_set_nvme(c, ref, f->name->part, &f->place);
    if (p->dram != PART_DRAM_NONE && !same)
        cache_unverified(c, ref, f->name->part);
    return part_owner(ref, f->name->part);
}

bool cache_recovering(const struct cache *c)
{
    struct tier_stats stats = {0};

    c->tier_ops->stats(c->tier, &stats);
    return stats.recovering;
}

void cache_recovered_cb(void *ctx)
{
    struct cache *c = ctx;

    cache_list_sweep_begin(c);
    cache_wake(c, CHORE_TRIM);
    cache_released(c);
    cache_durables_retry(c);
}

/* ---- checkpoints ---- */

bool cache_describe_cb(void *ctx, uint64_t owner, struct tier_described *out)
{
    struct cache *c = ctx;
    uint32_t part = owner_part(owner);
    struct ns *ns;
    const struct block *b = cache_block(c, owner_block(owner), &ns);

    if (b->part[part].nvme != PART_NVME_READY || b->flags & BLOCK_DOOMED)
        return false;
    out->name = cache_tier_name(c, owner_block(owner), part);
    out->bytes = ns_part_bytes(ns, part);
    out->checksum = b->part[part].checksum;
    out->sealed = b->part[part].sealed;
    out->shard_bytes = ns->identity.shard_bytes;
    return true;
}
