/* Reading parts from the tier into the slots that copies read from. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct cache_fetch {
    struct tier_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part, number;
    slot_ref slot;
    struct list waiters;
};

static void tier_read_init(struct cache *c, struct tier_io *io, block_ref ref, uint32_t part,
                           slot_ref slot)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    io->op = TIER_READ;
    io->check = false;
    io->data = arena_memory(c->arena, slot);
    io->bytes = ns_part_bytes(ns, part);
    io->buffer = arena_extent_of(c->arena, slot);
    memcpy(io->name.fingerprint, ns->fingerprint, sizeof(io->name.fingerprint));
    memcpy(io->name.key, b->key, sizeof(io->name.key));
    io->name.key_bytes = ns->identity.key_bytes;
    io->name.part = part;
    io->name.owner = part_owner(ref, part);
    io->place = (struct tier_place){b->part[part].loc, b->part[part].checksum};
}

static void log_read_failed(const struct tier_io *io, int status)
{
    log_warn("cache", "read-failed", "status=%s key=%02x%02x%02x%02x part=%u loc=%#llx",
             strerror(-status), io->name.key[0], io->name.key[1], io->name.key[2], io->name.key[3],
             io->name.part, (unsigned long long)io->place.loc);
}

/* The fetch's own use and hold keep part and block until the last waiter was told: what one does
 * may make room, or cancel another. */
static void fetch_finish(struct cache_fetch *f, int status)
{
    struct cache *c = f->cache;
    struct ns *ns;
    struct block *b = cache_block(c, f->ref, &ns);
    struct part *p = &b->part[f->part];
    struct list *node;

    if (status == 0) {
        part_set_dram(c, f->ref, f->part, PART_DRAM_READY, f->slot);
        part_use(c, p);
    } else {
        log_read_failed(&f->io, status);
        part_set_dram(c, f->ref, f->part, PART_DRAM_NONE, 0);
        arena_slot_free(c->arena, f->slot);
        /* A copy that can't be read must not stay a hit: the engine would ask for it for ever. One
         * that recovery has put in its place meanwhile may. */
        if (p->nvme == PART_NVME_READY && p->loc == f->io.place.loc)
            cache_nvme_lost(c, f->ref, f->part, true);
    }
    while ((node = list_pop_front(&f->waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);

        if (status == 0)
            part_use(c, p);
        w->ready_cb(w, status);
    }
    if (status == 0)
        cache_put(c, f->ref, f->part);
    cache_drop(c, f->ref);
    free(f);
}

static void fetch_done_cb(struct tier_io *io, int status)
{
    struct cache_fetch *f = (struct cache_fetch *)io;

    f->cache->tier_busy--;
    table_remove(&f->cache->fetches, f->number);
    fetch_finish(f, status);
}

static int fetch_start(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
                       struct cache_wait *w)
{
    struct cache_fetch *f = calloc(1, sizeof(*f));
    int rc = -EBUSY;

    if (!f)
        return -ENOMEM;
    f->cache = c;
    f->ref = ref;
    f->part = part;
    list_init(&f->waiters);
    f->number = table_add(&c->fetches, f);
    if (f->number == 0)
        goto err_after_fetch;
    /* Held from here on: making room must not take the block itself. */
    cache_hold(c, ref);
    f->slot = cache_slot(c, ns_part_bytes(cache_ns(c, ref), part), part_owner(ref, part), node);
    if (f->slot == 0)
        goto err_after_hold;
    tier_read_init(c, &f->io, ref, part, f->slot);
    f->io.priority = priority;
    f->io.done = fetch_done_cb;
    rc = c->tier_ops->submit(c->tier, &f->io);
    if (rc == -EAGAIN) {
        rc = -EBUSY;
        goto err_after_slot;
    }
    if (rc != 0) {
        log_read_failed(&f->io, rc);
        cache_nvme_lost(c, ref, part, true);
        rc = -EIO;
        goto err_after_slot;
    }
    c->tier_busy++;
    part_set_dram(c, ref, part, PART_DRAM_FETCHING, f->number);
    list_push_back(&f->waiters, &w->link);
    return CACHE_PENDING;

err_after_slot:
    arena_slot_free(c->arena, f->slot);
err_after_hold:
    index_block(c->config.index, ref)->leases--; /* nothing can have become due meanwhile */
    table_remove(&c->fetches, f->number);
err_after_fetch:
    free(f);
    return rc;
}

int cache_get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
              struct cache_wait *w)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct part *p = &b->part[part];
    struct cache_fetch *f;

    list_init(&w->link);
    if (p->dram == PART_DRAM_READY) {
        part_use(c, p);
        return CACHE_READY;
    }
    if (p->dram == PART_DRAM_FETCHING) {
        f = table_get(&c->fetches, p->slot);
        list_push_back(&f->waiters, &w->link);
        c->config.metrics->single_flight++;
        return CACHE_PENDING;
    }
    if (p->nvme != PART_NVME_READY || p->dram == PART_DRAM_FILLING)
        return -ENOENT;
    return fetch_start(c, ref, part, priority, node, w);
}

void cache_get_cancel(struct cache *c, struct cache_wait *w)
{
    (void)c;
    list_remove(&w->link);
}

void cache_put(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    part_unuse(c, &b->part[part]);
    if (b->part[part].users == 0)
        cache_settle(c, ref);
    cache_released(c);
}

void *cache_memory(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    assert(b->part[part].dram == PART_DRAM_READY && b->part[part].users > 0);
    return arena_memory(c->arena, b->part[part].slot);
}

/* ---- verifying ---- */

static void check_done_cb(struct tier_io *io, int status)
{
    struct cache_check *k = (struct cache_check *)io;
    struct cache *c = k->cache;
    struct ns *ns;
    struct block *b = cache_block(c, k->ref, &ns);

    c->tier_busy--;
    arena_slot_free(c->arena, k->slot);
    if (status == -EBADMSG) {
        log_read_failed(io, status);
        /* The place may have been given up, or the part written anew, while it was read. */
        if (b->part[k->part].nvme == PART_NVME_READY && b->part[k->part].loc == io->place.loc)
            cache_nvme_lost(c, k->ref, k->part, true);
    }
    cache_released(c);
    k->done_cb(k, status);
}

int cache_verify(struct cache *c, struct cache_check *k, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    int rc;

    if (b->part[part].nvme != PART_NVME_READY)
        return -ENOENT;
    k->slot = cache_slot(c, ns_part_bytes(ns, part), part_owner(ref, part), NUMA_NONE);
    if (k->slot == 0)
        return -EBUSY;
    k->cache = c;
    k->ref = ref;
    k->part = part;
    tier_read_init(c, &k->io, ref, part, k->slot);
    k->io.priority = 0;
    k->io.check = true;
    k->io.done = check_done_cb;
    rc = c->tier_ops->submit(c->tier, &k->io);
    if (rc != 0) {
        arena_slot_free(c->arena, k->slot);
        return rc == -EAGAIN ? -EBUSY : rc;
    }
    c->tier_busy++;
    return 0;
}
