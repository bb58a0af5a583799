/* Writing one part from its DRAM slot to NVMe or to the shared tier. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* ---- NVMe ---- */

static void nvme_done_cb(struct tier_io *io, int status)
{
    struct part_op *w = LIST_ENTRY(io, struct part_op, io.tier);
    struct cache *c = w->cache;
    struct list waiters;

    c->tier_busy--;
    c->write[WRITE_NVME].writing_bytes -= io->bytes;
    part_set_nvme(c, w->ref, w->part, status == 0 ? &io->place : NULL);
    list_init(&waiters);
    list_splice_front(&waiters, &w->waiters); /* each holds the block */
    cache_put(c, w->ref, w->part);
    free(w);
    cache_durables_written(c, &waiters, status);
}

int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part, bool durable)
{
    struct ns *ns = cache_ns(c, ref);
    int rc = cache_quota_below(c, ns->tenant, ns_part_bytes(ns, part), durable);
    struct part_op *w = rc == 0 ? part_op_new(c, ref, part) : NULL;
    struct part *p = cache_part(c, ref, part);
    struct span span;

    if (!w)
        return rc != 0 ? rc : -ENOMEM;
    part_use(c, p);
    rc = span_part(c, ref, part, &span);
    if (rc == 0) {
        cache_tier_io(c, &w->io.tier, TIER_WRITE, ref, part, &span);
        w->io.tier.done_cb = nvme_done_cb;
        rc = cache_tier_submit(c, &w->io.tier);
    }
    if (rc != 0) {
        part_unuse(c, p);
        free(w);
        return rc;
    }
    part_set_nvme_writing(c, ref, part, w);
    c->write[WRITE_NVME].writing_bytes += w->io.tier.bytes;
    return 0;
}

/* ---- the shared tier ---- */

static void share_done_cb(struct share_io *io, int status)
{
    struct part_op *w = LIST_ENTRY(io, struct part_op, io.share);
    struct cache *c = w->cache;

    c->share_busy--;
    c->write[WRITE_SHARE].writing_bytes -= io->bytes;
    if (status == 0) {
        part_set_share(c, w->ref, w->part, PART_SHARE_KNOWN, io->root);
        cache_write_next_part(c, w->ref, w->part);
    } else {
        part_set_share(c, w->ref, w->part, PART_SHARE_NONE, 0);
        c->config.metrics->share_write_dropped++;
    }
    cache_released(c);
}

/* The slot stays until now, and the block with it. A file that was written while its block was evicted by name came too
 * late for the removal of the others; a write that failed may have left it, too. */
static void share_released_cb(struct share_io *io)
{
    struct part_op *w = LIST_ENTRY(io, struct part_op, io.share);

    if (cache_doomed(w->cache, w->ref))
        share_remove(w->cache->share, &io->id, &io->who);
    cache_put(w->cache, w->ref, w->part);
    cache_shared_trim(w->cache); /* a form of it that is in DRAM in the other one has left that */
    free(w);
}

int cache_share_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_op *w = part_op_new(c, ref, part);
    struct part *p = cache_part(c, ref, part);
    struct span span;
    int rc;

    if (!w)
        return -ENOMEM;
    part_use(c, p);
    rc = span_part(c, ref, part, &span);
    if (rc == 0)
        rc = part_op_share(w, &span, true, share_done_cb, share_released_cb);
    if (rc != 0) {
        part_unuse(c, p);
        free(w);
        c->config.metrics->share_write_waits += rc == -EAGAIN;
        return rc;
    }
    part_set_share(c, ref, part, PART_SHARE_WRITING, 0);
    c->write[WRITE_SHARE].writing_bytes += w->io.share.bytes;
    return 0;
}
