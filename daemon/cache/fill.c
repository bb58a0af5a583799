/* Fills: dumps copy a part from a worker's memory layer by layer; the whole part is published. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void cache_fills_init(struct cache_fills *fills)
{
    list_init(&fills->list);
    fills->keep = false;
}

static void fill_publish(struct cache *c, struct cache_fill *f)
{
    block_ref ref = f->ref;
    uint32_t part = f->part;
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    part_set_dram(c, ref, part, PART_DRAM_READY, f->slot);
    list_remove(&f->link);
    table_remove(&c->fills, f->number);
    free(f);
    c->config.metrics->dump_blocks++;
    if (c->watch.published_cb)
        c->watch.published_cb(c->watch.published_ctx, ns, ref, part);
    if (c->tier && block_complete(b, ns))
        cache_write_stored(c, ref, WRITE_NVME);
    if (c->share && block_complete(b, ns))
        cache_write_stored(c, ref, WRITE_SHARE);
    cache_settle(c, ref, b);
}

static int fill_new(struct cache *c, struct cache_fills *fills, const struct ns *ns, block_ref ref,
                    uint32_t part, int node, struct cache_fill **out)
{
    uint32_t layers = ns->identity.layers[part];
    struct cache_fill *f = calloc(1, sizeof(*f) + (layers + 63) / 64 * sizeof(uint64_t));
    int rc;

    if (!f)
        return -ENOMEM;
    rc = cache_slot(c, ns_part_bytes(ns, part), part_owner(ref, part), node, fills->keep, &f->slot);
    if (rc != 0) {
        free(f);
        return rc;
    }
    f->number = table_add(&c->fills, f);
    if (f->number == 0) {
        arena_slot_free(c->arena, f->slot);
        free(f);
        return -EBUSY;
    }
    f->fills = fills;
    f->ref = ref;
    f->part = part;
    f->layers = layers;
    list_init(&f->link_age);
    list_push_back(&fills->list, &f->link);
    part_set_dram(c, ref, part, PART_DRAM_FILLING, f->number);
    *out = f;
    return 0;
}

static bool fill_take(struct cache_fill *f, uint32_t layer, uint32_t n)
{
    for (uint32_t s = layer; s < layer + n; s++)
        if (f->claimed[s / 64] >> (s % 64) & 1)
            return false;
    for (uint32_t s = layer; s < layer + n; s++)
        f->claimed[s / 64] |= UINT64_C(1) << (s % 64);
    return true;
}

int cache_fill_claim(struct cache *c, struct cache_fills *fills, block_ref ref, uint32_t part,
                     uint32_t layer, uint32_t n, int node, struct cache_fill **out)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct part *p = &b->part[part];
    struct cache_fill *f;
    int rc;

    assert(n > 0 && layer + n <= ns->identity.layers[part]);
    if (b->flags & BLOCK_DOOMED)
        return -EINPROGRESS;
    /* A fill goes on when recovery finds the part in the meantime. A part that is only PRESUMED is
     * taken: the worker that computed it anew may have missed it there. */
    if (p->dram != PART_DRAM_FILLING &&
        (p->dram != PART_DRAM_NONE || p->nvme == PART_NVME_READY || p->share == PART_SHARE_KNOWN))
        return -EEXIST;
    if (p->dram == PART_DRAM_NONE) {
        rc = fill_new(c, fills, ns, ref, part, node, &f);
        if (rc != 0)
            return rc;
    } else {
        f = table_get(&c->fills, part_fill(p));
    }
    /* Who brings all layers does not go on with what was brought before: a dump by layers may have
     * been cancelled midway. */
    if (f->fills == fills && f->copying == 0 && n == f->layers) {
        memset(f->claimed, 0, (f->layers + 63) / 64 * sizeof(f->claimed[0]));
        f->done = 0;
    }
    if (f->fills != fills || f->broken || !fill_take(f, layer, n))
        return -EINPROGRESS;
    if (p->share == PART_SHARE_PRESUMED)
        part_set_share(c, ref, part, PART_SHARE_NONE, 0);
    list_remove(&f->link_age);
    if (f->copying == 0)
        c->users++;
    f->copying += n;
    *out = f;
    return 0;
}

void cache_fill_end(struct cache *c, struct cache_fill *f, uint32_t n, bool ok)
{
    assert(f->copying >= n);
    f->copying -= n;
    if (f->copying == 0)
        c->users--;
    if (ok)
        f->done += n;
    else
        f->broken = true;
    if (f->broken && f->copying == 0)
        cache_fill_abort(c, f);
    else if (f->done == f->layers && !f->broken)
        fill_publish(c, f);
    else if (f->copying == 0)
        list_push_back(&c->fills_by_age, &f->link_age); /* who waits for a slot may take this one */
}

void cache_fill_done(struct cache *c, struct cache_fill *f, uint32_t n, bool ok)
{
    cache_fill_end(c, f, n, ok);
    cache_released(c);
}

void cache_watch(struct cache *c,
                 void (*published_cb)(void *ctx, struct ns *ns, block_ref ref, uint32_t part),
                 void *ctx)
{
    c->watch.published_cb = published_cb;
    c->watch.published_ctx = ctx;
}

void cache_fills_end(struct cache *c, struct cache_fills *fills)
{
    struct list *node;

    if (list_empty(&fills->list))
        return;
    while ((node = fills->list.next) != &fills->list)
        cache_fill_abort(c, LIST_ENTRY(node, struct cache_fill, link));
    cache_released(c);
}
