/* Writing one part from its DRAM slot to NVMe or to the shared tier: the operation has a use of the part until it ends. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

static void nvme_cb(struct part_op *w, int status)
{
    struct cache *c = w->cache;
    struct list waiters;

    c->write[WRITE_NVME].writing_bytes -= w->io.tier.bytes;
    part_set_nvme(c, w->ref, w->part, status == 0 ? &w->io.tier.place : NULL);
    list_init(&waiters);
    list_splice_front(&waiters, &w->waiters); /* each holds the block */
    cache_put(c, w->ref, w->part);
    free(w);
    cache_durables_written(c, &waiters, status);
}

static void share_cb(struct part_op *w, int status)
{
    struct cache *c = w->cache;

    c->write[WRITE_SHARE].writing_bytes -= w->io.share.bytes;
    if (status == 0) {
        part_set_share(c, w->ref, w->part, PART_SHARE_KNOWN, w->io.share.root);
        cache_write_next_part(c, w->ref, w->part);
    } else {
        part_set_share(c, w->ref, w->part, PART_SHARE_NONE, 0);
        c->config.metrics->share_write_dropped++;
    }
    cache_released(c);
}

/* The slot stays until now, and the block with it. A file that was written while its block was evicted by name came too
 * late for the removal of the others; a write that failed may have left it, too. */
static void share_released_cb(struct part_op *w)
{
    if (cache_doomed(w->cache, w->ref))
        share_remove(w->cache->share, &w->io.share.id, &w->io.share.who);
    cache_put(w->cache, w->ref, w->part);
    free(w);
}

static const struct op_kind write_kind = {nvme_cb, share_cb, share_released_cb};

/* 0: *out is under way, and has a use of the part. */
static int write_begin(struct cache *c, enum write_to to, block_ref ref, uint32_t part,
                       struct part_op **out)
{
    struct part_op *w = op_new(c, &write_kind, ref, part);
    struct part *p = cache_part(c, ref, part);
    struct span span;
    int rc;

    if (!w)
        return -ENOMEM;
    part_use(c, p);
    rc = span_part(c, ref, part, &span);
    if (rc == 0)
        rc = to == WRITE_NVME ? op_tier(w, TIER_WRITE, &span) : op_share(w, true, &span);
    if (rc != 0) {
        part_unuse(c, p);
        free(w);
        return rc;
    }
    c->write[to].writing_bytes += span.len;
    *out = w;
    return 0;
}

int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part, bool durable)
{
    struct ns *ns = cache_ns(c, ref);
    int rc = cache_quota_below(c, ns->tenant, ns_part_bytes(ns, part), durable);
    struct part_op *w;

    if (rc == 0)
        rc = write_begin(c, WRITE_NVME, ref, part, &w);
    if (rc == 0)
        part_set_nvme_writing(c, ref, part, w);
    return rc;
}

int cache_share_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_op *w;
    int rc = write_begin(c, WRITE_SHARE, ref, part, &w);

    if (rc == 0)
        part_set_share(c, ref, part, PART_SHARE_WRITING, 0);
    c->config.metrics->share_write_waits += rc == -EAGAIN;
    return rc;
}
