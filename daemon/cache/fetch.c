/* Reading parts from NVMe or the shared tier into the slots that copies read from; one read serves
 * all who ask for the part. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"
#include "daemon/observe/histogram.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- one operation ---- */

struct tier_name cache_tier_name(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    struct tier_name name = {
        .key_bytes = ns->identity.key_bytes, .part = part, .owner = part_owner(ref, part)};

    memcpy(name.fingerprint, ns->fingerprint, sizeof(name.fingerprint));
    memcpy(name.key, b->key, sizeof(name.key));
    return name;
}

void cache_tier_io(struct cache *c, struct tier_io *io, enum tier_op op, block_ref ref,
                   uint32_t part, const struct span *span)
{
    *io = (struct tier_io){.op = op,
                           .bytes = ns_part_bytes(cache_ns(c, ref), part),
                           .who = tenant_who(cache_ns(c, ref)->tenant),
                           .shard_bytes = cache_ns(c, ref)->identity.shard_bytes,
                           .seal = cache_sealed(c, cache_ns(c, ref)),
                           .name = cache_tier_name(c, ref, part)};
    if (op != TIER_WRITE)
        io->place = part_place(cache_part(c, ref, part));
    if (span) {
        io->data = span->origin;
        io->buffer = arena_extent_of(c->arena, span->slot);
    }
}

int cache_tier_submit(struct cache *c, struct tier_io *io)
{
    int rc = c->tier_ops->submit(c->tier, io);

    c->tier_busy += rc == 0;
    return rc;
}

struct part_op *part_op_new(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_op *op = calloc(1, sizeof(*op));

    if (!op)
        return NULL;
    op->cache = c;
    op->ref = ref;
    op->part = part;
    list_init(&op->waiters);
    return op;
}

int part_op_share(struct part_op *op, const struct span *span, bool write,
                  void (*done_cb)(struct share_io *io, int status),
                  void (*released_cb)(struct share_io *io))
{
    struct cache *c = op->cache;
    const struct ns *ns = cache_ns(c, op->ref);
    int rc;

    op->shared = true;
    op->io.share = (struct share_io){.write = write,
                                     .id = cache_shared_id(c, op->ref, op->part),
                                     .data = span->origin,
                                     .bytes = span->len,
                                     .who = tenant_who(ns->tenant),
                                     .tenant = ns->identity.tenant,
                                     .root = cache_part(c, op->ref, op->part)->root,
                                     .sealed = cache_sealed(c, ns),
                                     .space = {.fingerprint = ns->fingerprint,
                                               .identity = ns->canonical,
                                               .identity_bytes = ns->canonical_bytes},
                                     .done_cb = done_cb,
                                     .released_cb = released_cb};
    rc = share_submit(c->share, &op->io.share);
    c->share_busy += rc == 0;
    if (rc == -EAGAIN)
        c->write[WRITE_SHARE].full = true;
    return rc;
}

void cache_tier_read(struct cache *c, block_ref ref, const struct tier_io *io, uint64_t bytes)
{
    struct metrics_tenant *m = cache_ns(c, ref)->tenant->metrics;

    m->nvme_read_bytes += bytes;
    m->nvme_contended_bytes += io->got.contended;
    m->nvme_due_bytes += io->got.due;
}

static void log_read_failed(const struct tier_io *io, int status)
{
    log_warn("cache", "read-failed", "status=%s key=%02x%02x%02x%02x part=%u loc=%#llx",
             strerror(-status), io->name.key[0], io->name.key[1], io->name.key[2], io->name.key[3],
             io->name.part, (unsigned long long)io->place.loc);
}

/* ---- fetches ---- */

/* A waiter's callback may evict, or cancel another waiter. The fetch's own use and lease keep
 * part and block until the last callback has run. */
static void fetch_report(struct part_op *f, int status)
{
    struct cache *c = f->cache;
    struct part *p = cache_part(c, f->ref, f->part);
    struct list *node;

    while ((node = list_pop_front(&f->waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);
        int rc = status == 0 && p->users >= PART_USERS_MAX ? -EBUSY : status;

        if (rc == 0)
            part_use(c, p);
        w->shared = f->shared;
        w->done_cb(w, rc);
    }
}

/* The last read ended. With status 0 the fetch has a use of the part; else its slot has no owner, as a
 * thread that hangs may still write into it. */
static void fetch_take(struct part_op *f, int status)
{
    struct cache *c = f->cache;

    f->failed = status != 0;
    if (f->failed) {
        part_set_dram(c, f->ref, f->part, PART_DRAM_NONE, 0);
        arena_slot_own(c->arena, f->slot, 0);
    } else {
        part_set_dram(c, f->ref, f->part, PART_DRAM_READY, f->slot);
        part_use(c, cache_part(c, f->ref, f->part));
    }
    table_remove(&c->fetches, f->number);
}

/* Nobody writes into the slot any more. */
static void fetch_release(struct part_op *f)
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

static int fetch_read(struct part_op *f);

static void tier_done_cb(struct tier_io *io, int status)
{
    struct part_op *f = LIST_ENTRY(io, struct part_op, io.tier);
    struct cache *c = f->cache;
    int rc;

    c->tier_busy--;
    cache_tier_read(c, f->ref, io, status == 0 ? io->bytes : 0);
    histogram_count(c->config.metrics->histograms.nvme_read, uv_hrtime() - f->begun_ns);
    if (status != 0) {
        log_read_failed(io, status);
        /* A copy that can't be read must not stay a hit: engines would ask for it again and again.
         * Recovery may have found another in the meantime, or the shared tier has one. */
        if (part_is_at(cache_part(c, f->ref, f->part), io->place.loc))
            cache_nvme_lost(c, f->ref, f->part, status != -ENOKEY);
        rc = fetch_read(f);
        if (rc == 0)
            return;
        status = rc == -EAGAIN ? -EBUSY : status;
    }
    fetch_take(f, status);
    fetch_report(f, status);
    cache_unlease(c, f->ref);
    fetch_release(f);
}

static int tier_start(struct part_op *f)
{
    struct cache *c = f->cache;
    struct tier_io *io = &f->io.tier;
    struct span span;
    int rc;

    f->shared = false;
    if (span_slot(c, f->slot, ns_form(cache_ns(c, f->ref), f->part), &span) != 0)
        return -EIO;
    cache_tier_io(c, io, TIER_READ, f->ref, f->part, &span);
    io->priority = f->priority;
    io->small = f->small;
    io->done_cb = tier_done_cb;
    f->begun_ns = uv_hrtime();
    rc = cache_tier_submit(c, io);
    if (rc == 0 && policy_heat(c->config.policy, f->ref) == HEAT_ONCE)
        admission_returned(ns_admission(cache_ns(c, f->ref)));
    if (rc == 0 || rc == -EAGAIN || rc == -EINPROGRESS)
        return rc;
    log_read_failed(io, rc);
    cache_nvme_lost(c, f->ref, f->part, true);
    return rc == -ESTALE ? -ENOENT : -EIO;
}

/* The block is not there, as far as is known. */
static void share_missed(struct part_op *f)
{
    cache_shared_forget(f->cache, f->ref);
    f->cache->config.metrics->share_forgotten++;
}

static void share_done_cb(struct share_io *io, int status)
{
    struct part_op *f = LIST_ENTRY(io, struct part_op, io.share);
    struct cache *c = f->cache;
    struct metrics_tenant *m = cache_ns(c, f->ref)->tenant->metrics;

    c->share_busy--;
    m->shared_read_bytes += status == 0 ? io->bytes : 0;
    m->shared_contended_bytes += io->got.contended;
    m->shared_due_bytes += io->got.due;
    fetch_take(f, status);
    if (status == 0) {
        part_set_share(c, f->ref, f->part, PART_SHARE_KNOWN, io->root);
        cache_write_fetched(c, f->ref);
    } else {
        share_missed(f); /* also if no root said so in time */
    }
    fetch_report(f, status == 0 ? 0 : -ENOENT);
    cache_unlease(c, f->ref); /* fetch_release ends the fetch's use */
}

static void share_released_cb(struct share_io *io)
{
    fetch_release(LIST_ENTRY(io, struct part_op, io.share));
}

static int share_start(struct part_op *f)
{
    struct span span;
    int rc = span_slot(f->cache, f->slot, ns_form(cache_ns(f->cache, f->ref), f->part), &span);

    rc = rc == 0 ? part_op_share(f, &span, false, share_done_cb, share_released_cb) : -EIO;

    if (rc == 0 || rc == -EAGAIN)
        return rc;
    share_missed(f);
    return -ENOENT;
}

/* Reads the copy on NVMe, or if there is none that can be read, the one on the shared tier. 0: the
 * read is under way; -EAGAIN: the tier's queue is full; -EINPROGRESS: its key is being read; -ENOENT,
 * -EIO: no copy is left. */
static int fetch_read(struct part_op *f)
{
    const struct part *p = cache_part(f->cache, f->ref, f->part);
    int rc = -ENOENT;

    if (p->nvme == PART_NVME_READY)
        rc = tier_start(f);
    if (p->nvme != PART_NVME_READY && part_on_share(p))
        rc = share_start(f);
    return rc;
}

/* ---- for requests ---- */

/* group: the slot lies in its window; NULL: in an ordinary extent. */
static int fetch_start(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
                       struct arena_group *group, struct cache_wait *w)
{
    uint64_t bytes = ns_part_bytes(cache_ns(c, ref), part), owner = part_owner(ref, part);
    struct part_op *f = part_op_new(c, ref, part);
    int rc = -EBUSY;

    if (!f)
        return -ENOMEM;
    f->priority = priority;
    f->small = w->small;
    f->number = table_add(&c->fetches, f);
    if (f->number == 0)
        goto err_after_fetch;
    /* The fetch holds the block: a search for a slot must not evict it. */
    cache_lease(c, ref);
    rc = group ? cache_window_slot(c, group, bytes, owner, &f->slot)
               : cache_slot(c, bytes, owner, node, false, &f->slot);
    if (rc != 0)
        goto err_after_hold;
    rc = fetch_read(f);
    if (rc != 0)
        goto err_after_slot;
    part_set_dram(c, ref, part, PART_DRAM_FETCHING, f->number);
    list_push_back(&f->waiters, &w->link);
    return CACHE_PENDING;

err_after_slot:
    rc = rc == -EAGAIN && group ? -EBUSY : rc;
    arena_slot_free(c->arena, f->slot);
err_after_hold:
    (void)cache_lease_end(c, ref); /* as it was: nothing to settle */
    cache_reconsider(c, ref);
    table_remove(&c->fetches, f->number);
err_after_fetch:
    free(f);
    return rc;
}

int cache_get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
              struct cache_wait *w)
{
    struct part *p = cache_part(c, ref, part);
    struct part_op *f;

    list_init(&w->link);
    w->shards = NULL;
    if (p->dram == PART_DRAM_READY) {
        if (p->users >= PART_USERS_MAX)
            return -EAGAIN; /* one key may come often in a request */
        part_use(c, p);
        return CACHE_READY;
    }
    if (p->dram == PART_DRAM_FETCHING) {
        f = table_get(&c->fetches, part_fetch(p));
        list_push_back(&f->waiters, &w->link);
        c->config.metrics->single_flight++;
        return CACHE_PENDING;
    }
    if (!part_whole(p) || p->dram == PART_DRAM_FILLING)
        return -ENOENT;
    return fetch_start(c, ref, part, priority, node, NULL, w);
}

int cache_get_window(struct cache *c, block_ref ref, uint32_t part, struct arena_group *group,
                     uint8_t priority, struct cache_wait *w)
{
    assert(cache_part(c, ref, part)->dram == PART_DRAM_NONE);
    list_init(&w->link);
    w->shards = NULL;
    return fetch_start(c, ref, part, priority, NUMA_NONE, group, w);
}

void cache_get_cancel(struct cache *c, struct cache_wait *w)
{
    (void)c;
    list_remove(&w->link);
    cache_shards_cancel(w);
}

void cache_get_undo(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    part_unuse(c, &b->part[part]);
    if (b->part[part].users == 0)
        cache_settle(c, ref);
}

void cache_put(struct cache *c, block_ref ref, uint32_t part)
{
    cache_get_undo(c, ref, part);
    cache_released(c);
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
        /* During the read the place may have been reclaimed, or the part written anew. */
        if (part_is_at(&b->part[k->part], io->place.loc)) {
            cache_nvme_lost(c, k->ref, k->part, true);
            cache_write_again(c, k->ref);
        }
    }
    cache_released(c);
    k->done_cb(k, status);
}

int cache_verify(struct cache *c, struct cache_check *k, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct span span;
    int rc;

    if (b->part[part].nvme != PART_NVME_READY)
        return -ENOENT;
    /* Not the part's slot: the extent it lies in can't be emptied. */
    if (cache_slot(c, ns_part_bytes(ns, part), 0, NUMA_NONE, false, &k->slot) != 0)
        return -EBUSY;
    k->cache = c;
    k->ref = ref;
    k->part = part;
    rc = span_slot(c, k->slot, ns_form(ns, part), &span);
    if (rc == 0) {
        cache_tier_io(c, &k->io, TIER_READ, ref, part, &span);
        k->io.check = true;
        k->io.who = (struct fair_who){0};
        k->io.done_cb = check_done_cb;
        rc = cache_tier_submit(c, &k->io);
    }
    if (rc != 0)
        arena_slot_free(c->arena, k->slot);
    return rc == -EAGAIN ? -EBUSY : rc;
}
