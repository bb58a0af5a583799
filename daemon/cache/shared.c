/* What this host believes about the shared tier. Other hosts write and remove files without a word,
 * so a root here is a hint, and a part that is not there is forgotten. Blocks that lie on the
 * shared tier only have a part of the index, so that they do not fill it. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

/* ---- what is known ---- */

void cache_shared_note(struct cache *c, struct ns *ns, const uint8_t *key, shared_root_id root,
                       bool asked)
{
    block_ref ref = index_find(c->config.index, ns, key);
    uint32_t last = ns->identity.parts - 1;
    const struct block *b;

    if (ns->purges > 0)
        return; /* the lookup found it before the purge removed it */
    if (ref == 0 && !cache_shared_room(c, ns->index_bytes))
        return;
    if (ref == 0)
        ref = cache_insert(c, ns, key, INDEX_SPACE_BELOW);
    if (ref == 0)
        return;
    b = index_block(c->config.index, ref);
    if (b->flags & BLOCK_DELETING)
        return;
    for (uint32_t i = 0; i <= last; i++)
        if (b->part[i].shared == PART_SHARED_NONE ||
            (b->part[i].shared == PART_SHARED_UNVERIFIED && asked))
            part_set_shared(c, ref, i,
                            asked && i == last ? PART_SHARED_KNOWN : PART_SHARED_UNVERIFIED, root);
}

uint32_t cache_shared_roots(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    uint32_t roots = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (part_on_shared(&b->part[i]))
            roots |= b->part[i].root ? 1u << (b->part[i].root - 1) : UINT32_MAX;
    return roots;
}

void cache_shared_presume(struct cache *c, block_ref ref, uint32_t part)
{
    const struct part *p = cache_part(c, ref, part);

    if (c->tier && p->shared == PART_SHARED_KNOWN && p->dram == PART_DRAM_NONE &&
        p->nvme != PART_NVME_READY)
        part_set_shared(c, ref, part, PART_SHARED_UNVERIFIED, p->root);
}

/* ---- attaching ---- */

static void secrets_cb(void *ctx)
{
    cache_writes_with_secret(ctx);
}

static void ready_cb(void *ctx)
{
    struct cache *c = ctx;

    c->write[WRITE_SHARED].full = false;
    cache_released(c);
}

void cache_shared_attach(struct cache *c, struct shared *shared)
{
    c->shared = shared;
    c->used_cb = cache_write_touched;
    shared_on_ready(shared, ready_cb, secrets_cb, c);
}
