/* Reading parts from NVMe or the shared tier into the slots that copies read from; one read serves
 * all requests for the part. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"
#include "proto/histogram.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void log_read_failed(const struct tier_io *io, int status)
{
    log_warn("cache", "read-failed", "status=%s key=%02x%02x%02x%02x part=%u loc=%#llx",
             strerror(-status), io->name.key[0], io->name.key[1], io->name.key[2], io->name.key[3],
             io->name.part, (unsigned long long)io->place.loc);
}

/* ---- pending reads ---- */

/* A waiter's callback may evict, or cancel another waiter. The pending read's own reference and
 * lease keep part and block until the last callback has run. */
static void pending_read_report(struct part_op *f, int status)
{
    struct cache *c = f->cache;
    struct part *p = cache_part(c, f->ref, f->part);
    struct list *node;

    while ((node = list_pop_front(&f->waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);
        int rc = status == 0 && p->users >= PART_USERS_MAX ? -EBUSY : status;

        if (rc == 0)
            part_ref(c, p);
        w->shared = f->shared;
        w->done_cb(w, rc);
    }
}

/* The last read ended. With status 0 the pending read has a reference to the part, else its slot
 * has no owner, until pending_read_release. */
static void pending_read_take(struct part_op *f, int status)
{
    struct cache *c = f->cache;

    f->failed = status != 0;
    if (f->failed) {
        part_set_dram(c, f->ref, f->part, PART_DRAM_NONE, 0);
        arena_slot_own(c->arena, f->slot, 0);
    } else {
        part_set_dram(c, f->ref, f->part, PART_DRAM_READY, f->slot);
        part_ref(c, cache_part(c, f->ref, f->part));
    }
    table_remove(&c->pending_reads, f->number);
}

static void pending_read_release(struct part_op *f)
{
    struct cache *c = f->cache;

    if (f->failed) {
        arena_slot_free(c->arena, f->slot);
        cache_released(c);
    } else {
        cache_put(c, f->ref, f->part);
    }
    free(f);
}

static int pending_read_read(struct part_op *f);

static void pending_read_tier_cb(struct part_op *f, int status)
{
    const struct tier_io *io = &f->io.tier;
    struct cache *c = f->cache;
    int rc;

    op_read_count(f, status == 0 ? io->bytes : 0);
    histogram_add(c->config.metrics->histograms.nvme_read, uv_hrtime() - f->begun_ns, 1);
    if (status != 0) {
        log_read_failed(io, status);
        /* A copy that can't be read must not stay a hit: engines would ask for it again and again.
         * Recovery may have found another in the meantime, or the shared tier has one. */
        if (part_is_at(cache_part(c, f->ref, f->part), io->place.loc))
            cache_nvme_lost(c, f->ref, f->part, status != -ENOKEY);
        rc = pending_read_read(f);
        if (rc == 0)
            return;
        status = rc == -EAGAIN ? -EBUSY : status;
    }
    pending_read_take(f, status);
    pending_read_report(f, status);
    cache_unlease(c, f->ref);
    pending_read_release(f);
}

static int tier_start(struct part_op *f)
{
    struct cache *c = f->cache;
    struct span span;
    int rc;

    if (span_slot(c, f->slot, ns_form(cache_ns(c, f->ref), f->part), &span) != 0)
        return -EIO;
    rc = op_tier(f, TIER_READ, &span);
    if (rc == 0 || rc == -EAGAIN || rc == -EINPROGRESS)
        return rc;
    log_read_failed(&f->io.tier, rc);
    cache_nvme_lost(c, f->ref, f->part, true);
    return rc == -ESTALE ? -ENOENT : -EIO;
}

/* The block is not there, as far as is known. */
static void shared_missed(struct part_op *f)
{
    cache_shared_forget(f->cache, f->ref);
    f->cache->config.metrics->shared_stale_lookups++;
}

static void pending_read_shared_cb(struct part_op *f, int status)
{
    const struct shared_io *io = &f->io.shared;
    struct cache *c = f->cache;
    struct metrics_tenant *m = cache_ns(c, f->ref)->tenant->metrics;

    m->shared_read_bytes += status == 0 ? io->bytes : 0;
    m->shared_contended_bytes += io->got.contended;
    m->shared_fair_share_bytes += io->got.due;
    pending_read_take(f, status);
    if (status == 0) {
        part_set_shared(c, f->ref, f->part, PART_SHARED_KNOWN, io->root);
        cache_write_fetched(c, f->ref);
    } else {
        shared_missed(f); /* also if no root said so in time */
    }
    pending_read_report(f, status == 0 ? 0 : -ENOENT);
    cache_unlease(c, f->ref);
    pending_read_release(f);
}

static int shared_start(struct part_op *f)
{
    struct span span;
    int rc = span_slot(f->cache, f->slot, ns_form(cache_ns(f->cache, f->ref), f->part), &span);

    rc = rc == 0 ? op_shared(f, false, &span) : -EIO;
    if (rc == 0 || rc == -EAGAIN)
        return rc;
    shared_missed(f);
    return -ENOENT;
}

/* Reads the copy on NVMe, or if there is none that can be read, the one on the shared tier. 0: the
 * read is under way; -EAGAIN: the tier's queue is full; -EINPROGRESS: its key is being read;
 * -ENOENT, -EIO: no copy is left. */
static int pending_read_read(struct part_op *f)
{
    const struct part *p = cache_part(f->cache, f->ref, f->part);
    int rc = -ENOENT;

    if (p->nvme == PART_NVME_READY)
        rc = tier_start(f);
    if (p->nvme != PART_NVME_READY && part_on_shared(p))
        rc = shared_start(f);
    return rc;
}

static const struct op_kind pending_read_kind = {pending_read_tier_cb, pending_read_shared_cb};

/* ---- for requests ---- */

/* slot_cb: NULL: an ordinary slot, on the node. */
static int pending_read_start(struct cache *c, block_ref ref, uint32_t part, uint8_t priority,
                              int node,
                              int (*slot_cb)(struct cache_wait *w, uint64_t bytes, slot_ref *out),
                              struct cache_wait *w)
{
    uint64_t bytes = ns_part_bytes(cache_ns(c, ref), part);
    struct part_op *f = op_new(c, &pending_read_kind, ref, part);
    int rc = -EBUSY;

    if (!f)
        return -ENOMEM;
    f->priority = priority;
    f->small = w->small;
    f->number = table_add(&c->pending_reads, f);
    if (f->number == 0)
        goto err_after_fetch;
    /* The pending read holds the block: a search for a slot must not evict it. */
    cache_lease(c, ref);
    rc = slot_cb ? slot_cb(w, bytes, &f->slot)
                 : cache_slot(c, bytes, part_owner(ref, part), node, false, &f->slot);
    if (rc != 0)
        goto err_after_hold;
    rc = pending_read_read(f);
    if (rc != 0)
        goto err_after_slot;
    part_set_dram(c, ref, part, PART_DRAM_PENDING_READ, f->number);
    list_push_back(&f->waiters, &w->link);
    return CACHE_PENDING;

err_after_slot:
    rc = rc == -EAGAIN && slot_cb ? -EBUSY : rc;
    arena_slot_free(c->arena, f->slot);
err_after_hold:
    cache_lease_undo(c, ref);
    table_remove(&c->pending_reads, f->number);
err_after_fetch:
    free(f);
    return rc;
}

static int get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
               int (*slot_cb)(struct cache_wait *w, uint64_t bytes, slot_ref *out),
               struct cache_wait *w)
{
    struct part *p = cache_part(c, ref, part);
    struct part_op *f;

    list_init(&w->link);
    w->layers = NULL;
    w->cancel_cb = NULL;
    if (p->dram == PART_DRAM_READY)
        return cache_take(c, ref, part);
    if (p->dram == PART_DRAM_PENDING_READ) {
        f = table_get(&c->pending_reads, part_pending_read(p));
        list_push_back(&f->waiters, &w->link);
        c->config.metrics->reads_coalesced++;
        return CACHE_PENDING;
    }
    if (!part_whole(p) || p->dram == PART_DRAM_PENDING_WRITE)
        return -ENOENT;
    return pending_read_start(c, ref, part, priority, node, slot_cb, w);
}

int cache_get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
              struct cache_wait *w)
{
    return get(c, ref, part, priority, node, NULL, w);
}

int cache_get_into(struct cache *c, block_ref ref, uint32_t part, uint8_t priority,
                   int (*slot_cb)(struct cache_wait *w, uint64_t bytes, slot_ref *out),
                   struct cache_wait *w)
{
    return get(c, ref, part, priority, NUMA_NONE, slot_cb, w);
}

void cache_get_cancel(struct cache *c, struct cache_wait *w)
{
    (void)c;
    list_remove(&w->link);
    if (w->cancel_cb)
        w->cancel_cb(w);
}

/* ---- verifying ---- */

static void check_cb(struct part_op *op, int status)
{
    struct cache_check *k = LIST_ENTRY(op->waiters.next, struct cache_check, link);
    struct cache *c = op->cache;

    arena_slot_free(c->arena, op->slot);
    if (status == -EBADMSG) {
        log_read_failed(&op->io.tier, status);
        /* During the read the place may have been reclaimed, or the part written again. */
        if (part_is_at(cache_part(c, op->ref, op->part), op->io.tier.place.loc)) {
            cache_nvme_lost(c, op->ref, op->part, true);
            cache_write_again(c, op->ref);
        }
    }
    free(op);
    cache_released(c);
    k->done_cb(k, status);
}

static const struct op_kind check_kind = {.tier_cb = check_cb};

int cache_verify(struct cache *c, struct cache_check *k, block_ref ref, uint32_t part)
{
    const struct form *form = ns_form(cache_ns(c, ref), part);
    struct part_op *op;
    struct span span;
    int rc = -EBUSY;

    if (cache_part(c, ref, part)->nvme != PART_NVME_READY)
        return -ENOENT;
    op = op_new(c, &check_kind, ref, part);
    if (!op)
        return -EBUSY;
    op->check = true;
    /* Not the part's slot: the slab it lies in can't be emptied. */
    if (cache_slot(c, form->layers * form->layer_bytes, 0, NUMA_NONE, false, &op->slot) != 0)
        goto err_after_op;
    rc = span_slot(c, op->slot, form, &span);
    if (rc == 0)
        rc = op_tier(op, TIER_READ, &span);
    if (rc != 0)
        goto err_after_slot;
    list_push_back(&op->waiters, &k->link);
    return 0;

err_after_slot:
    arena_slot_free(c->arena, op->slot);
err_after_op:
    free(op);
    return rc == -EAGAIN ? -EBUSY : rc;
}
