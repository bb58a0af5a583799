/* Writing one part from its DRAM slot to NVMe or to the shared tier. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* ---- NVMe ---- */

struct nvme_write {
    struct tier_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part, number;
    struct list waiters; /* of cache_durable.link */
};

static void nvme_done_cb(struct tier_io *io, int status)
{
    struct nvme_write *w = LIST_ENTRY(io, struct nvme_write, io);
    struct cache *c = w->cache;
    struct list waiters;

    c->tier_busy--;
    c->write[WRITE_NVME].writing_bytes -= io->bytes;
    table_remove(&c->writes, w->number);
    part_set_nvme(c, w->ref, w->part, status == 0 ? &io->place : NULL);
    list_init(&waiters);
    list_splice_front(&waiters, &w->waiters); /* each holds the block */
    cache_put(c, w->ref, w->part);
    free(w);
    cache_durables_written(c, &waiters, status);
}

int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct nvme_write *w = calloc(1, sizeof(*w));
    struct part *p = cache_part(c, ref, part);
    int rc;

    if (!w)
        return -ENOMEM;
    w->number = table_add(&c->writes, w);
    if (w->number == 0) {
        free(w);
        return -EAGAIN;
    }
    w->cache = c;
    w->ref = ref;
    w->part = part;
    list_init(&w->waiters);
    cache_tier_io(c, &w->io, ref, part, part_slot(p));
    w->io.op = TIER_WRITE;
    w->io.done = nvme_done_cb;
    rc = c->tier_ops->submit(c->tier, &w->io);
    if (rc != 0) {
        table_remove(&c->writes, w->number);
        free(w);
        return rc;
    }
    part_use(c, p);
    part_set_nvme_writing(c, ref, part, w->number);
    c->tier_busy++;
    c->write[WRITE_NVME].writing_bytes += w->io.bytes;
    return 0;
}

struct list *cache_write_waiters(struct cache *c, const struct part *p)
{
    return &((struct nvme_write *)table_get(&c->writes, part_write(p)))->waiters;
}

/* ---- the shared tier ---- */

struct share_write {
    struct share_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
};

static void share_done_cb(struct share_io *io, int status)
{
    struct share_write *w = LIST_ENTRY(io, struct share_write, io);
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

/* The slot stays until now, and the block with it. */
static void share_released_cb(struct share_io *io)
{
    struct share_write *w = LIST_ENTRY(io, struct share_write, io);

    cache_put(w->cache, w->ref, w->part);
    free(w);
}

int cache_share_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct share_write *w = calloc(1, sizeof(*w));
    struct ns *ns;
    struct part *p = &cache_block(c, ref, &ns)->part[part];
    int rc;

    if (!w)
        return -ENOMEM;
    w->cache = c;
    w->ref = ref;
    w->part = part;
    w->io = (struct share_io){.write = true,
                              .id = cache_shared_id(c, ref, part),
                              .data = arena_memory(c->arena, part_slot(p)),
                              .bytes = ns_part_bytes(ns, part),
                              .done_cb = share_done_cb,
                              .released_cb = share_released_cb};
    rc = c->share_ops->submit(c->share, &w->io);
    if (rc != 0) {
        free(w);
        c->config.metrics->share_write_waits += rc == -EAGAIN;
        return rc;
    }
    part_use(c, p);
    part_set_share(c, ref, part, PART_SHARE_WRITING, 0);
    c->share_busy++;
    c->write[WRITE_SHARE].writing_bytes += w->io.bytes;
    return 0;
}
