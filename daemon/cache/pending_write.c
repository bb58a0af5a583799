/* Pending writes: dumps copy a part from a worker's memory layer by layer; the whole part is
 * published. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void pending_writes_init(struct pending_writes *pending_writes)
{
    list_init(&pending_writes->list);
    pending_writes->keep = false;
}

static void pending_write_publish(struct cache *c, struct pending_write *f)
{
    block_ref ref = f->ref;
    uint32_t part = f->part;
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    part_set_dram(c, ref, part, PART_DRAM_READY, f->slot);
    list_remove(&f->link);
    table_remove(&c->pending_writes, f->number);
    free(f);
    c->config.metrics->dump_blocks++;
    if (c->watch.published_cb)
        c->watch.published_cb(c->watch.published_ctx, ns, ref, part);
    if (c->tier && block_complete(b, ns))
        cache_write_stored(c, ref, WRITE_NVME);
    if (c->shared && block_complete(b, ns))
        cache_write_stored(c, ref, WRITE_SHARED);
    cache_settle(c, ref, b);
}

static int pending_write_new(struct cache *c, struct pending_writes *pending_writes,
                             const struct ns *ns, block_ref ref, uint32_t part, int node,
                             struct pending_write **out)
{
    uint32_t layers = ns->identity.layers[part];
    struct pending_write *f = calloc(1, sizeof(*f) + (layers + 63) / 64 * sizeof(uint64_t));
    int rc;

    if (!f)
        return -ENOMEM;
    rc = cache_slot(c, ns_part_bytes(ns, part), part_owner(ref, part), node, pending_writes->keep,
                    &f->slot);
    if (rc != 0) {
        free(f);
        return rc;
    }
    f->number = table_add(&c->pending_writes, f);
    if (f->number == 0) {
        arena_slot_free(c->arena, f->slot);
        free(f);
        return -EBUSY;
    }
    f->pending_writes = pending_writes;
    f->ref = ref;
    f->part = part;
    f->layers = layers;
    list_init(&f->link_age);
    list_push_back(&pending_writes->list, &f->link);
    part_set_dram(c, ref, part, PART_DRAM_PENDING_WRITE, f->number);
    *out = f;
    return 0;
}

static bool pending_write_take(struct pending_write *f, uint32_t layer, uint32_t n)
{
    for (uint32_t s = layer; s < layer + n; s++)
        if (f->claimed[s / 64] >> (s % 64) & 1)
            return false;
    for (uint32_t s = layer; s < layer + n; s++)
        f->claimed[s / 64] |= UINT64_C(1) << (s % 64);
    return true;
}

int pending_write_claim(struct cache *c, struct pending_writes *pending_writes, block_ref ref,
                        uint32_t part, uint32_t layer, uint32_t n, int node,
                        struct pending_write **out)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct part *p = &b->part[part];
    struct pending_write *f;
    int rc;

    assert(n > 0 && layer + n <= ns->identity.layers[part]);
    if (b->flags & BLOCK_DELETING)
        return -EINPROGRESS;
    /* A pending write goes on when recovery finds the part in the meantime. A part that is only
     * UNVERIFIED is taken: the worker that computed it again may have missed it there. */
    if (p->dram != PART_DRAM_PENDING_WRITE &&
        (p->dram != PART_DRAM_NONE || p->nvme == PART_NVME_READY || p->shared == PART_SHARED_KNOWN))
        return -EEXIST;
    if (p->dram == PART_DRAM_NONE) {
        rc = pending_write_new(c, pending_writes, ns, ref, part, node, &f);
        if (rc != 0)
            return rc;
    } else {
        f = table_get(&c->pending_writes, part_pending_write(p));
    }
    /* A dump of all layers does not continue an earlier one: a dump by layers may have been
     * cancelled midway. */
    if (f->pending_writes == pending_writes && f->copying == 0 && n == f->layers) {
        memset(f->claimed, 0, (f->layers + 63) / 64 * sizeof(f->claimed[0]));
        f->done = 0;
    }
    if (f->pending_writes != pending_writes || f->broken || !pending_write_take(f, layer, n))
        return -EINPROGRESS;
    if (p->shared == PART_SHARED_UNVERIFIED)
        part_set_shared(c, ref, part, PART_SHARED_NONE, 0);
    list_remove(&f->link_age);
    if (f->copying == 0)
        c->users++;
    f->copying += n;
    *out = f;
    return 0;
}

void pending_write_end(struct cache *c, struct pending_write *f, uint32_t n, bool ok)
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
        pending_write_abort(c, f);
    else if (f->done == f->layers && !f->broken)
        pending_write_publish(c, f);
    else if (f->copying == 0)
        /* a waiter for a slot may take this one */
        list_push_back(&c->pending_writes_by_age, &f->link_age);
}

void pending_write_done(struct cache *c, struct pending_write *f, uint32_t n, bool ok)
{
    pending_write_end(c, f, n, ok);
    cache_released(c);
}

void cache_watch(struct cache *c,
                 void (*published_cb)(void *ctx, struct ns *ns, block_ref ref, uint32_t part),
                 void *ctx)
{
    c->watch.published_cb = published_cb;
    c->watch.published_ctx = ctx;
}

void pending_writes_end(struct cache *c, struct pending_writes *pending_writes)
{
    struct list *node;

    if (list_empty(&pending_writes->list))
        return;
    while ((node = pending_writes->list.next) != &pending_writes->list)
        pending_write_abort(c, LIST_ENTRY(node, struct pending_write, link));
    cache_released(c);
}
