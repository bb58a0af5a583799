/* A transfer's items and batches: slots in, device jobs out. */
#include "daemon/request/transfer.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define JOB_BYTES (32u << 20)
#define JOB_ITEMS 512u
#define FETCH_JOB_ITEMS 4096u /* as many as a device launches at once: pieces are small */

/* ---- batches ---- */

void batch_free(struct copy_batch *b)
{
    if (!b)
        return;
    free(b->job.items);
    free(b->item);
    free(b->fill);
    free(b->shards);
    free(b->unfit);
    free(b->slot);
    free(b->turns);
    free(b);
}

/* How many copies one job makes. */
static uint32_t batch_copies(const struct transfer *t, const struct form *form)
{
    bool fetch = t->kind == TRANSFER_FETCH;
    uint64_t shards = fetch ? 1 : t->steps ? steps_shards(t) : form->shards;
    uint64_t n = JOB_BYTES / (shards * form->shard_bytes),
             most = fetch ? FETCH_JOB_ITEMS : JOB_ITEMS;
    uint32_t all = fetch ? t->n_pieces : items_of(t);

    n = n > most ? most : n == 0 ? 1 : n;
    return n < all ? (uint32_t)n : all;
}

static bool batch_memory(struct copy_batch *b, uint32_t cap, bool refuses)
{
    b->job.items = calloc(cap, sizeof(*b->job.items));
    b->job.cap_items = cap;
    b->item = calloc(cap, sizeof(*b->item));
    b->fill = calloc(cap, sizeof(*b->fill));
    b->shards = calloc(cap, sizeof(*b->shards));
    b->unfit = refuses ? calloc(cap, sizeof(*b->unfit)) : NULL;
    b->slot = refuses ? calloc(cap, sizeof(*b->slot)) : NULL;
    b->turns = b->t->turns ? calloc(cap, sizeof(*b->turns)) : NULL;
    return b->job.items && b->item && b->fill && b->shards && (!refuses || (b->unfit && b->slot)) &&
           (!b->t->turns || b->turns);
}

/* For `copies` at least. */
static struct copy_batch *batch_new(struct transfer *t, const struct form *form, bool coded,
                                    uint32_t copies)
{
    struct copy_batch *b = calloc(1, sizeof(*b));
    uint32_t most = batch_copies(t, form);

    if (!b)
        return NULL;
    b->t = t;
    list_init(&b->link);
    b->form = form;
    device_job_init(&b->job, transfer_loads(t) ? DEVICE_LOAD : DEVICE_DUMP, t->region->region,
                    coded, t->shard, t->shards);
    if (batch_memory(b, most > copies ? most : copies,
                     coded && t->kind == TRANSFER_DUMP && codec_refuses(form->codec)))
        return b;
    batch_free(b);
    return NULL;
}

/* Counts so many copied shards of a batch. Returns their bytes. */
static uint64_t copied_count(const struct copy_batch *b, uint64_t shards)
{
    struct transfer *t = b->t;
    struct metrics *m = metrics_of(t);
    uint64_t bytes = shards * b->form->shard_bytes;
    bool loads = transfer_loads(t);

    *(loads ? &m->load_bytes : &m->dump_bytes) += bytes;
    if (t->kind == TRANSFER_FETCH) {
        m->fetch_items += shards;
        m->fetch_bytes += bytes;
    }
    if (b->job.coded) {
        *(loads ? &m->decode_bytes : &m->encode_bytes) += bytes;
        *(loads ? &m->decode_plain_bytes : &m->encode_plain_bytes) +=
            shards * form_plain_shard_bytes(b->form);
    }
    return bytes;
}

static void durable_done_cb(struct cache_durable *d, int status)
{
    struct durable_wait *dw = LIST_ENTRY(d, struct durable_wait, d);
    struct transfer *t = dw->t;

    list_remove(&dw->link);
    if (t) {
        trace_less(t->r.trace, TRACE_DURABLE);
        item_status(t, dw->item, status == 0 ? dw->status : UCM_BLOCK_NOT_DURABLE);
        t->waits_n--;
    }
    free(dw);
    if (t)
        transfer_pump(t);
}

void item_durable(struct transfer *t, uint32_t item, enum ucm_block_status status)
{
    struct durable_wait *dw = t->stopping ? NULL : calloc(1, sizeof(*dw));
    int rc = -ENOMEM;

    if (dw) {
        dw->d.done_cb = durable_done_cb;
        rc = cache_durable(cache_of(t), &dw->d, t->refs[item_key(t, item)], t->part);
    }
    if (rc == 0) {
        dw->t = t;
        dw->item = item;
        dw->status = status;
        list_push_back(&t->durables, &dw->link);
        t->waits_n++;
        trace_more(t->r.trace, TRACE_DURABLE);
        return;
    }
    free(dw);
    /* -EINPROGRESS: shards are missing; the dump that brings the last of them waits instead. */
    item_status(t, item, rc == -EINPROGRESS ? status : UCM_BLOCK_NOT_DURABLE);
}

void durable_abandon(struct durable_wait *dw)
{
    struct transfer *t = dw->t;

    list_remove(&dw->link);
    trace_less(t->r.trace, TRACE_DURABLE);
    item_status(t, dw->item, UCM_BLOCK_NOT_DURABLE);
    t->waits_n--;
    dw->t = NULL;
}

/* Ends the use of what was read for an item of a load or a fetch. */
static void item_put(struct transfer *t, uint32_t item, struct cache_shards *shards)
{
    if (shards)
        cache_shards_put(cache_of(t), shards);
    else
        cache_put(cache_of(t), t->refs[item_key(t, item)], item_part(t, item));
}

/* A dump has stored the item: other ranks' parts may lie in the other form. */
static void mixed_stored(const struct transfer *t, uint32_t item)
{
    struct view view = region_view(t->region);

    if (view.n > 1 && codec_refuses(t->region->region->codec))
        mixed_part_stored(t->r.s->rq, &view, t->refs[item], t->part);
}

static void batch_item_end(struct copy_batch *b, uint32_t i, enum ucm_block_status status)
{
    struct transfer *t = b->t;
    bool ok = status == UCM_BLOCK_OK;

    if (transfer_loads(t))
        item_put(t, b->item[i], b->shards[i]);
    else
        /* A worker that is gone may have died before its bytes were final. */
        cache_fill_done(cache_of(t), b->fill[i], t->shards, ok && !t->r.s->closing);
    if (ok && t->kind == TRANSFER_DUMP && t->ns->identity.parts > 1)
        mixed_stored(t, b->item[i]);
    if (ok && t->durable)
        item_durable(t, b->item[i], UCM_BLOCK_OK);
    item_status(t, b->item[i], status);
    t->in_window -= item_slot_bytes(t, b->item[i]);
    if (ok)
        t->bytes += copied_count(b, (uint64_t)t->shards * item_copies(t, b->item[i]));
}

/* Which of the batch's items has that copy: of a dump, whose copies may have been sorted. */
static uint32_t copy_item(const struct copy_batch *b, uint32_t copy)
{
    uint64_t slot = b->job.items[copy].slot;
    uint32_t k = 0;

    while (k < b->n && (!b->fill[k] || b->slot[k] != slot))
        k++;
    assert(k < b->n); /* batch_add has noted it */
    return k;
}

/* Ends the batch's items whose bytes the encoding could not hold. */
static void unfit_end(struct copy_batch *b)
{
    for (uint32_t i = 0; b->unfit && i < b->job.n_items; i++) {
        uint32_t k;

        if (!atomic_load_explicit(&b->unfit[i], memory_order_relaxed))
            continue;
        k = copy_item(b, i);
        metrics_of(b->t)->encode_unfit++;
        batch_item_end(b, k, UCM_BLOCK_UNFIT);
        b->fill[k] = NULL;
    }
}

void batch_end(struct copy_batch *b, enum ucm_block_status status)
{
    bool loads = transfer_loads(b->t);

    if (status == UCM_BLOCK_OK)
        unfit_end(b);
    for (uint32_t i = 0; i < b->n; i++)
        if (loads || b->fill[i])
            batch_item_end(b, i, status);
    batch_free(b);
}

void job_count(struct transfer *t, const struct device_job *job)
{
    struct metrics_tenant *m = t->ns->tenant->metrics;

    trace_less(t->r.trace, TRACE_COPY);
    m->bus_contended_bytes += job->got.contended;
    m->bus_due_bytes += job->got.due;
}

enum ucm_block_status batch_outcome(struct transfer *t, int status)
{
    if (status == 0)
        return UCM_BLOCK_OK;
    if (status == -ECANCELED)
        return UCM_BLOCK_CANCELLED;
    if (status == -ETIMEDOUT) {
        metrics_of(t)->device_event_timeouts += t->has_event;
        return UCM_BLOCK_CANCELLED;
    }
    metrics_of(t)->device_errors++;
    return UCM_BLOCK_DEVICE;
}

static void batch_done_cb(struct device_job *job, int status)
{
    struct copy_batch *b = LIST_ENTRY(job, struct copy_batch, job);
    struct transfer *t = b->t;

    enum ucm_block_status outcome = batch_outcome(t, status);

    job_count(t, job);
    if (outcome ==
        UCM_BLOCK_DEVICE) /* the answer has a status for each block, and no room for words */
        log_warn("request", "copy-failed", "pid=%ld why=\"%s\"", (long)t->region->region->pid,
                 job->error.text);
    batch_end(b, outcome);
    t->jobs--;
    transfer_pump(t);
}

bool job_submit(struct copy_batch *b, struct device_job *job,
                void (*done_cb)(struct device_job *job, int status))
{
    struct transfer *t = b->t;
    struct device *device = t->region->region->device;

    job->event = t->has_event ? t->event : NULL;
    job->deadline_ms = t->r.deadline.at_ms;
    job->who = tenant_who(t->ns->tenant);
    job->priority = copy_priority(t);
    job->beside = t->beside;
    /* One chunk a slot is too narrow for slices; but beside others only a companion decodes. */
    job->straight = t->steps != NULL && !job->coded;
    job->unfit = b->unfit;
    job->turns = b->turns;
    job->done_cb = done_cb;
    if (device->ops->submit(device, job) != 0)
        return false;
    metrics_of(t)->device_jobs++;
    t->jobs++;
    trace_more(t->r.trace, TRACE_COPY);
    return true;
}

bool batch_send(struct transfer *t, bool coded)
{
    struct copy_batch *b = t->open[coded];

    /* Slots are handed out in the reverse of the order in which they were freed. Sorted, neighbours
     * become one run of the copy to the worker's slices, where blocks may come in any order. `item`
     * and `fill` stay: they are looked at when all items of the batch end alike. */
    if (t->region->region->ring_region != 0 && !b->turns)
        device_job_sort(&b->job);
    if (!job_submit(b, &b->job, batch_done_cb))
        return false;
    t->open[coded] = NULL;
    return true;
}

/* A place for that item in an open batch of its way; 0, -EAGAIN, -ENOMEM. */
static int batch_reserve(struct transfer *t, uint32_t item)
{
    bool coded = item_way(t, item) == WAY_CODED;
    struct copy_batch **open = &t->open[coded];
    uint32_t copies = item_copies(t, item);

    if (*open && (*open)->n > 0 && (*open)->job.cap_items - (*open)->job.n_items < copies) {
        if (t->steps)
            steps_add(t, coded);
        else if (!batch_send(t, coded))
            return -EAGAIN;
    }
    if (*open && (*open)->job.cap_items < copies) { /* empty: what it was made for did not come */
        batch_free(*open);
        *open = NULL;
    }
    if (!*open)
        *open = batch_new(t, item_form(t, item), coded, copies);
    return *open ? 0 : -ENOMEM;
}

/* span: of the item's part. Without 0 (-EINVAL: it is not what the job may touch) the item ends as
 * FAILED. */
static void batch_add(struct transfer *t, uint32_t item, int rc, const struct span *span,
                      struct cache_fill *fill, struct cache_shards *shards)
{
    struct copy_batch *b = t->open[item_way(t, item) == WAY_CODED];
    uint32_t copy = b->job.n_items;

    b->item[b->n] = item;
    b->fill[b->n] = fill;
    b->shards[b->n] = shards;
    if (rc == 0)
        rc = t->kind == TRANSFER_FETCH ? fetch_copies(t, item, span, &b->job)
                                       : device_job_add(&b->job, span, t->blocks[item]);
    if (rc != 0) {
        batch_item_end(b, b->n, UCM_BLOCK_FAILED);
        return;
    }
    if (b->turns)
        b->turns[copy] = t->turns[item_key(t, item)];
    if (b->slot)
        b->slot[b->n] = b->job.items[copy].slot;
    b->n++;
}

void batch_abandon(struct transfer *t)
{
    for (unsigned form = 0; form < 2; form++) {
        struct copy_batch *b = t->open[form];

        t->open[form] = NULL;
        if (b)
            batch_end(b, UCM_BLOCK_CANCELLED);
    }
}

/* ---- items ---- */

static void read_count(struct transfer *t, const struct cache_wait *w)
{
    uint8_t tier = w->shared ? METRIC_SHARED : METRIC_NVME;

    if (t->kind == TRANSFER_FETCH) {
        metrics_of(t)->fetch_reads++;
        metrics_of(t)->fetch_reads_partial += w->shards != NULL;
    } else if (w->shared)
        metrics_of(t)->load_blocks_shared++;
    else
        metrics_of(t)->load_blocks_nvme++;
    t->slowest = tier > t->slowest ? tier : t->slowest;
}

static void item_read_cb(struct cache_wait *w, int status)
{
    struct item_wait *iw = LIST_ENTRY(w, struct item_wait, w);
    struct transfer *t = iw->t;
    uint32_t item = iw->item, part = item_part(t, item);
    block_ref ref = t->refs[item_key(t, item)];

    list_remove(&iw->link);
    read_ended(iw);
    t->waits_n--;
    if (t->space) {
        if (digest_ended(iw, status))
            iw = NULL;
    } else if (status != 0) {
        item_status(t, item,
                    status == -ENOENT  ? UCM_BLOCK_MISS
                    : status == -EBUSY ? UCM_BLOCK_NO_ROOM
                                       : UCM_BLOCK_FAILED);
        metrics_of(t)->load_blocks_missed += status == -ENOENT && t->kind == TRANSFER_LOAD;
        t->in_window -= item_slot_bytes(t, item);
    } else if (t->kind == TRANSFER_PREFETCH) {
        cache_put(cache_of(t), ref, part);
        metrics_of(t)->prefetch_blocks++;
        if (t->marks)
            cache_prefetched(cache_of(t), ref);
        t->bytes += item_bytes(t, item);
        t->in_window -= item_slot_bytes(t, item);
    } else {
        read_count(t, w);
        t->waits_n++;
        list_push_back(&t->ready, &iw->link);
        iw = NULL;
    }
    free(iw);
    transfer_pump(t);
}

/* Gives up an item that was read, or of digests one that could not be: it leaves the window, its slot
 * is free. */
static void ready_drop(struct item_wait *iw, enum ucm_block_status status)
{
    struct transfer *t = iw->t;

    if (!t->space)
        item_put(t, iw->item, iw->w.shards);
    item_status(t, iw->item, status);
    t->in_window -= item_slot_bytes(t, iw->item);
    t->waits_n--;
    free(iw);
}

/* Puts an item that is in DRAM, or whose shards were read, into its open batch. */
static void batch_load(struct transfer *t, uint32_t item, struct cache_shards *shards)
{
    struct span span;
    int rc = shards ? span_piece(shards, &span)
                    : span_part(cache_of(t), t->refs[item_key(t, item)], t->part, &span);

    batch_add(t, item, rc, &span, NULL, shards);
}

bool ready_take(struct transfer *t)
{
    while (!list_empty(&t->ready)) {
        struct item_wait *iw = LIST_ENTRY(t->ready.next, struct item_wait, link);
        int rc = batch_reserve(t, iw->item);

        if (rc == -EAGAIN) {
            t->most = true;
            return false;
        }
        list_remove(&iw->link);
        if (rc != 0) {
            ready_drop(iw, UCM_BLOCK_NO_ROOM);
            continue;
        }
        batch_load(t, iw->item, iw->w.shards);
        t->waits_n--;
        free(iw);
    }
    return true;
}

void ready_abandon(struct transfer *t, enum ucm_block_status status)
{
    struct list *node;

    while ((node = list_pop_front(&t->ready)) != NULL)
        ready_drop(LIST_ENTRY(node, struct item_wait, link), status);
}

void waits_abandon(struct transfer *t)
{
    struct list *node;

    while ((node = list_pop_front(&t->waits)) != NULL) {
        struct item_wait *iw = LIST_ENTRY(node, struct item_wait, link);

        cache_get_cancel(cache_of(t), &iw->w);
        read_ended(iw);
        item_status(t, iw->item, UCM_BLOCK_CANCELLED);
        t->in_window -= item_slot_bytes(t, iw->item);
        t->waits_n--;
        free(iw);
    }
    ready_abandon(t, UCM_BLOCK_CANCELLED);
}

bool item_in_dram(const struct transfer *t, uint32_t item)
{
    const struct block *b = index_block(t->r.s->rq->rooms.index, t->refs[item_key(t, item)]);

    return b->part[item_part(t, item)].dram == PART_DRAM_READY;
}

/* A prefetch larger than the arena, or than what its tenant gets of that, would evict its own blocks. What is
 * in DRAM needs no slot. */
static bool prefetch_enough(const struct transfer *t, uint32_t item)
{
    uint64_t room = arena_bytes_configured(t->r.s->rq->rooms.arena),
             most = t->ns->tenant->settings.dram_most;

    room = most > 0 && most < room ? most : room;
    return t->kind == TRANSFER_PREFETCH && !item_in_dram(t, item) &&
           t->bytes + t->in_window >= room / 2;
}

bool slot_waits(const struct transfer *t, uint32_t item)
{
    return t->in_window > 0 && cache_slot_awaited(cache_of(t), &t->retry) && !item_in_dram(t, item);
}

int wait_reserve(struct transfer *t)
{
    if (t->spare)
        return 0;
    t->spare = calloc(1, sizeof(*t->spare));
    if (!t->spare)
        return -ENOMEM;
    t->spare->w.small = !transfer_large(t);
    return 0;
}

void item_waits(struct transfer *t, uint32_t item)
{
    struct item_wait *iw = t->spare;

    t->spare = NULL;
    iw->t = t;
    iw->item = item;
    iw->w.done_cb = item_read_cb;
    list_push_back(&t->waits, &iw->link);
    read_begun(iw);
    t->waits_n++;
    t->in_window += item_slot_bytes(t, item);
}

/* Load, fetch and prefetch. 0: begun or ended; -EBUSY, -EDQUOT: no slot now; -EAGAIN: a queue is
 * full. */
static int item_get(struct transfer *t, uint32_t item)
{
    uint32_t part = item_part(t, item);
    block_ref ref = t->refs[item_key(t, item)];
    int rc = wait_reserve(t);
    bool placed;

    if (rc == 0 && transfer_loads(t))
        rc = batch_reserve(t, item);
    placed = rc == 0;
    if (rc == 0 && slot_waits(t, item))
        rc = -EBUSY;
    if (rc == 0 && prefetch_enough(t, item))
        rc = -ENOSPC;
    if (rc == 0)
        rc = t->kind == TRANSFER_FETCH
                 ? fetch_get(t, item, &t->spare->w)
                 : cache_get(cache_of(t), ref, part, read_priority(t), node_of(t), &t->spare->w);
    if (rc == CACHE_READY && transfer_loads(t)) {
        t->in_window += item_slot_bytes(t, item);
        metrics_of(t)->load_blocks_dram += t->kind == TRANSFER_LOAD;
        cache_prefetch_used(cache_of(t), ref);
        batch_load(t, item, NULL);
    } else if (rc == CACHE_READY) {
        cache_put(cache_of(t), ref, part);
    } else if (rc == CACHE_PENDING) {
        item_waits(t, item);
    } else if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN) {
        t->no_slot = placed && rc != -EAGAIN;
        return rc;
    } else {
        item_status(t, item,
                    rc == -ENOENT ? UCM_BLOCK_MISS
                    : rc == -EIO  ? UCM_BLOCK_FAILED
                                  : UCM_BLOCK_NO_ROOM);
        metrics_of(t)->load_blocks_missed += rc == -ENOENT && t->kind == TRANSFER_LOAD;
    }
    return 0;
}

static int item_fill(struct transfer *t, uint32_t item)
{
    struct cache_fill *fill;
    struct span span;
    int rc = slot_waits(t, item) ? -EBUSY : 0;
    bool placed = rc != 0;

    if (rc == 0) {
        rc = batch_reserve(t, item);
        placed = rc == 0;
    }
    if (rc == 0 && t->durable)
        cache_shared_presume(cache_of(t), t->refs[item], t->part);
    if (rc == 0)
        rc = cache_fill_claim(cache_of(t), &t->r.s->fills, t->refs[item], t->part, t->shard,
                              t->shards, node_of(t), &fill);
    if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN) {
        t->no_slot = placed;
        return rc;
    }
    if (rc == 0) {
        t->in_window += item_slot_bytes(t, item);
        rc = span_fill(cache_of(t), fill, t->shard, t->shards, &span);
        batch_add(t, item, rc, &span, fill, NULL);
        rc = 0;
    } else if (rc == -EEXIST) {
        if (t->durable)
            item_durable(t, item, UCM_BLOCK_EXISTS);
        else
            item_status(t, item, UCM_BLOCK_EXISTS);
        metrics_of(t)->dump_blocks_existing++;
    } else if (rc == -EINPROGRESS) {
        item_status(t, item, UCM_BLOCK_IN_PROGRESS);
    } else {
        item_status(t, item, UCM_BLOCK_NO_ROOM);
        metrics_of(t)->dump_blocks_skipped++;
    }
    return 0;
}

/* What the region can't hold misses, as it would if it was not there: a block of a base whose pages
 * here hold the coded form. */
static void item_foreign(struct transfer *t, uint32_t item)
{
    item_status(t, item, UCM_BLOCK_MISS);
    metrics_of(t)->load_blocks_missed += t->kind == TRANSFER_LOAD;
}

int item_begin(struct transfer *t, uint32_t item)
{
    if (t->refs[item_key(t, item)] == 0)
        return 0; /* its status was set at the start */
    if (t->space)
        return digest_begin(t, item);
    if (t->region && item_way(t, item) == WAY_NONE) {
        item_foreign(t, item);
        return 0;
    }
    return t->kind == TRANSFER_DUMP ? item_fill(t, item) : item_get(t, item);
}
