/* Writing one part from its DRAM slot to NVMe or to the shared tier: the operation has a reference
 * to the part until it ends. And durable parts: a dump may ask for a part on stable storage; it is
 * written at once, before the queue of write-back, and then synced together with others. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

#define DURABLES_ITERATION (1u << 16) /* looked at in one iteration of the event loop */
#define DURABLES_REFUSED 16u          /* of those, for which a search found no space */

/* The write that these waited for ended; empties the list. */
static void durables_written(struct cache *c, struct list *waiters, int status);

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
    durables_written(c, &waiters, status);
}

static void shared_cb(struct part_op *w, int status)
{
    struct cache *c = w->cache;

    c->write[WRITE_SHARED].writing_bytes -= w->io.shared.bytes;
    if (status == 0) {
        part_set_shared(c, w->ref, w->part, PART_SHARED_KNOWN, w->io.shared.root);
        cache_write_next_part(c, w->ref, w->part);
    } else {
        part_set_shared(c, w->ref, w->part, PART_SHARED_NONE, 0);
        c->config.metrics->shared_write_dropped++;
    }
    cache_released(c);
    /* A file that was written while its block was evicted by name came too late for the removal of
     * the others; a write that failed may have left it, too. */
    if (cache_deleting(c, w->ref))
        shared_remove(c->shared, &w->io.shared.id, &w->io.shared.who);
    cache_put(c, w->ref, w->part);
    free(w);
}

static const struct op_kind write_kind = {nvme_cb, shared_cb};

/* 0: *out is under way, and has a reference to the part. */
static int write_begin(struct cache *c, enum write_to to, block_ref ref, uint32_t part,
                       struct part_op **out)
{
    struct part_op *w = op_new(c, &write_kind, ref, part);
    struct part *p = cache_part(c, ref, part);
    struct span span;
    int rc;

    if (!w)
        return -ENOMEM;
    part_ref(c, p);
    rc = span_part(c, ref, part, &span);
    if (rc == 0)
        rc = to == WRITE_NVME ? op_tier(w, TIER_WRITE, &span) : op_shared(w, true, &span);
    if (rc != 0) {
        part_unref(c, p);
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

int cache_shared_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_op *w;
    int rc = write_begin(c, WRITE_SHARED, ref, part, &w);

    if (rc == 0)
        part_set_shared(c, ref, part, PART_SHARED_WRITING, 0);
    c->config.metrics->shared_write_waits += rc == -EAGAIN;
    return rc;
}

/* ---- stable storage ---- */

/* The cache's own check of an unverified part ended; no client waits for it. */
static void unverified_done_cb(struct cache_durable *d, int status)
{
    (void)status;
    d->cache->durables.unverified--;
    free(d);
}

static void durable_end(struct cache_durable *d, int status)
{
    struct cache *c = d->cache;
    block_ref ref = d->ref;

    if (d->done_cb != unverified_done_cb)
        c->config.metrics->dump_blocks_durable += status == 0;
    d->done_cb(d, status);
    cache_unlease(c, ref);
}

static int durable_begin(struct cache *c, struct cache_durable *d);

/* After an operation of it succeeded. */
static void durable_continue(struct cache *c, struct cache_durable *d)
{
    int rc = durable_begin(c, d);

    if (rc == -EAGAIN || rc == -EBUSY)
        list_push_back(&c->durables.waiting, &d->link);
    else if (rc < 0)
        durable_end(d, rc);
}

static void sync_cb(struct part_op *op, int status)
{
    struct cache_durable *d = LIST_ENTRY(op->waiters.next, struct cache_durable, link);
    struct cache *c = op->cache;
    bool same = part_is_at(cache_part(c, op->ref, op->part), op->io.tier.place.loc);

    list_remove(&d->link);
    if (status == -EBADMSG && same) { /* an unverified copy: its bytes are wrong */
        cache_nvme_lost(c, op->ref, op->part, true);
        same = false;
    }
    free(op);
    if (same)
        durable_end(d, status);
    else /* that copy is gone, so the status says nothing */
        durable_continue(c, d);
    cache_durables_retry(c);
    cache_less_under_way(c);
}

static const struct op_kind sync_kind = {.tier_cb = sync_cb};

static int sync_begin(struct cache *c, struct cache_durable *d)
{
    struct part_op *op = op_new(c, &sync_kind, d->ref, d->part);
    int rc = op ? op_tier(op, TIER_SYNC, NULL) : -ENOMEM;

    if (rc == 0)
        list_push_back(&op->waiters, &d->link);
    else
        free(op);
    return rc;
}

/* Begins the next step. 0: it is under way. -EAGAIN: it has to wait. -EBUSY: so it has, but others
 * need not wait with it. Another -errno: the end. */
static int durable_begin(struct cache *c, struct cache_durable *d)
{
    struct ns *ns;
    struct part *p = &cache_block(c, d->ref, &ns)->part[d->part];
    int rc = 0;

    cache_ns_record(c, ns);
    if (!cache_ns_writable(ns))
        return -EAGAIN;
    if (ns->record == NS_RECORD_FAILED)
        return -EIO; /* no later start would find the part */
    if (p->nvme == PART_NVME_READY)
        return sync_begin(c, d);
    if (p->nvme == PART_NVME_NONE) {
        if (!c->no_writes && cache_recovering(c))
            return -EAGAIN; /* its copy of an earlier run may turn up */
        rc = p->dram != PART_DRAM_READY ? -ENOENT
             : c->no_writes             ? -ESHUTDOWN
                                        : cache_nvme_write(c, d->ref, d->part, true);
        if (rc == -EDQUOT && c->users > 0)
            return -EBUSY; /* of its tenant's blocks none may give way now */
    }
    if (rc == 0)
        list_push_back(&((struct part_op *)part_write(p))->waiters, &d->link);
    return rc;
}

int cache_durable(struct cache *c, struct cache_durable *d, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    int rc;

    if (!c->tier)
        return -EOPNOTSUPP;
    if (!part_whole(&b->part[part]))
        return -EINPROGRESS;
    list_init(&d->link);
    d->cache = c;
    d->ref = ref;
    d->part = part;
    cache_lease(c, ref);
    rc = durable_begin(c, d);
    if (rc == -EAGAIN || rc == -EBUSY) {
        list_push_back(&c->durables.waiting, &d->link);
        rc = 0;
    }
    if (rc != 0)
        cache_unlease(c, d->ref);
    return rc;
}

void cache_unverified(struct cache *c, block_ref ref, uint32_t part)
{
    struct cache_durable *d = calloc(1, sizeof(*d));

    if (!d)
        return; /* its first reader checks it, as with every copy of an earlier run */
    d->cache = c;
    d->ref = ref;
    d->part = part;
    d->done_cb = unverified_done_cb;
    list_push_back(&c->durables.waiting, &d->link);
    cache_lease(c, ref);
    c->durables.unverified++;
}

static void durables_written(struct cache *c, struct list *waiters, int status)
{
    struct list *node;

    while ((node = list_pop_front(waiters)) != NULL) {
        struct cache_durable *d = LIST_ENTRY(node, struct cache_durable, link);

        if (status == 0)
            durable_continue(c, d);
        else
            durable_end(d, status);
    }
    cache_durables_retry(c);
}

void cache_durables_retry(struct cache *c)
{
    uint32_t left = DURABLES_ITERATION, refused = 0;
    const struct list *first_refused = NULL;

    while (!list_empty(&c->durables.waiting) && c->durables.waiting.next != first_refused &&
           left-- > 0) {
        struct cache_durable *d = LIST_ENTRY(c->durables.waiting.next, struct cache_durable, link);
        int rc;

        list_remove(&d->link);
        rc = c->no_writes ? -ESHUTDOWN : durable_begin(c, d);
        if (rc == -EAGAIN && !cache_ns_writable(cache_ns(c, d->ref))) {
            list_push_back(&c->durables.stalled, &d->link);
        } else if (rc == -EAGAIN) {
            list_push_front(&c->durables.waiting, &d->link);
            break;
        } else if (rc == -EBUSY) {
            list_push_back(&c->durables.waiting, &d->link); /* the next time others come first */
            first_refused = first_refused ? first_refused : &d->link;
            if (++refused == DURABLES_REFUSED)
                break;
        } else if (rc < 0) {
            durable_end(d, rc);
        }
    }
}
