#include "daemon/request/copies.h"

#include "daemon/base/log.h"
#include "proto/histogram.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define JOB_BYTES (32u << 20)

/* ---- what a load or dump says ---- */

/* Its layers, all of which the region must have memory for. 0 or -code with call->error. */
static int range_check(struct call *call, const struct copy_params *p,
                       const struct device_region *r)
{
    uint32_t layers = r->pages.layers, end;

    if (p->layer >= layers || p->layers > layers - p->layer)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "layers %llu + %llu reach past this part's %u",
                             (unsigned long long)p->layer, (unsigned long long)p->layers, layers);
    end = p->layers ? (uint32_t)(p->layer + p->layers) : layers;
    for (uint32_t layer = (uint32_t)p->layer; layer < end; layer++)
        if (r->layer_first[layer + 1] == r->layer_first[layer])
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "layers %llu to %u: this region has no memory for layer %u; name "
                                 "layers that it has",
                                 (unsigned long long)p->layer, end - 1, layer);
    return 0;
}

/* A hash set with open addressing, at most half full; zero is an empty place. */
int numbers_distinct(struct call *call, const uint32_t *numbers, uint32_t n, uint32_t step,
                     const char *what, const char *of)
{
    /* A random odd factor: a peer can't choose numbers that fall together. */
    uint32_t bits = 2, *set, factor;
    int rc = 0;

    memcpy(&factor, call->s->rq->secret, sizeof(factor));
    factor |= 1;

    while (1u << bits < 2 * n)
        bits++;
    set = calloc(1u << bits, sizeof(*set));
    if (!set)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        uint32_t number = numbers[i * step], at = number * factor >> (32 - bits);

        while (set[at] != 0 && set[at] != number + 1)
            at = (at + 1) & ((1u << bits) - 1);
        if (set[at] != 0)
            rc = ucm_error_set(&call->error, UCM_WIRE_INVALID,
                               "%s %u is named twice; each %s needs its own", what, number, of);
        set[at] = number + 1;
    }
    free(set);
    return rc;
}

struct registered *copies_check(struct call *call, const struct copy_params *p, uint32_t *n_keys)
{
    struct registered *region = call_region(call, p->region);

    if (region && region->region->block_pool) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "region %llu is a block pool, whose entries hold single layers: use gather",
                      (unsigned long long)p->region);
        return NULL;
    }
    if (!region || range_check(call, p, region->region) != 0)
        return NULL;
    *n_keys = call_keys(call, region->ns, p->keys);
    if (*n_keys == 0)
        return NULL;
    if (p->blocks.n != 4 * *n_keys) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "blocks: %u bytes for %u keys; give 4 for each", p->blocks.n, *n_keys);
        return NULL;
    }
    return region;
}

void *copies_new(struct call *call, const struct copy_kind *kind, const struct copy_params *p,
                 struct registered *region, uint32_t n_keys, size_t bytes)
{
    size_t blocks_at = (bytes + 7) / 8 * 8;
    struct view view = region->view;
    struct copies *c;
    int rc = 0;

    if (p->raw)
        view = (struct view){.ns = {view.ns[view.n - 1]}, .n = 1};
    c = transfer_new(call, &kind->transfer, &view, n_keys, p->timeout_ms,
                     blocks_at + n_keys * sizeof(*c->blocks));
    if (!c)
        return NULL;
    c->kind = kind;
    c->blocks = (uint32_t *)((uint8_t *)c + blocks_at);
    for (uint32_t i = 0; i < n_keys && rc == 0; i++) {
        const uint8_t *id = p->blocks.p + 4 * (size_t)i;

        c->blocks[i] = id[0] | (uint32_t)id[1] << 8 | (uint32_t)id[2] << 16 | (uint32_t)id[3] << 24;
        if (c->blocks[i] >= region->region->blocks)
            rc = ucm_error_set(&call->error, UCM_WIRE_INVALID,
                               "blocks: block %u; this region has blocks 0 to %u", c->blocks[i],
                               region->region->blocks - 1);
    }
    if (rc == 0 && kind->op == DEVICE_LOAD)
        rc = numbers_distinct(call, c->blocks, n_keys, 1, "blocks: block", "key of a load");
    if (rc != 0) {
        request_refuse(&c->w.r, call);
        return NULL;
    }
    c->region = region;
    list_push_back(&region->users, &c->link);
    c->w.part = region->region->part;
    c->n_copies = n_keys;
    c->layer = (uint32_t)p->layer;
    c->layers = p->layers ? (uint32_t)p->layers : region->region->pages.layers - c->layer;
    c->w.priority = (uint8_t)p->priority;
    c->beside = p->gpu_busy ? DEVICE_BESIDE_STEPS : DEVICE_BESIDE_NOTHING;
    return c;
}

uint64_t copies_end(struct copies *c, struct histogram took[METRIC_SIZES])
{
    const struct transfer *w = &c->w;
    enum metric_size size = w->bytes <= 1u << 20    ? METRIC_LE_1MIB
                            : w->bytes <= 64u << 20 ? METRIC_LE_64MIB
                                                    : METRIC_GT_64MIB;
    uint64_t took_ns = took && w->bytes > 0 ? uv_hrtime() - w->r.begun_ns : 0;

    if (took_ns > 0)
        histogram_add(&took[size], took_ns, 1);
    list_remove(&c->link);
    if (c->region->state == REGISTERED_CLOSING)
        registered_close(c->region);
    return took_ns;
}

/* ---- one batch ---- */

/* For `copies` at least. NULL: no memory. */
static struct copy_batch *batch_new(struct copies *c, const struct form *form, enum copy_way way,
                                    uint32_t copies)
{
    /* A job moves so many layers of a block. */
    uint64_t job_layers = c->region->region->block_pool ? 1 : c->step > 0 ? c->step : form->layers;
    bool converts = way == WAY_CONVERTED;
    bool refuses = converts && c->kind->op == DEVICE_DUMP && form_refuses(form);
    uint64_t fit = JOB_BYTES / (job_layers * form->layer_bytes), most = c->kind->job_items;
    uint32_t cap;
    size_t shifts = c->shifts ? sizeof(*c->shifts) : 0, unfit = refuses ? sizeof(atomic_uchar) : 0;
    struct copy_batch *b;

    most = fit > most ? most : fit == 0 ? 1 : fit;
    most = most < c->n_copies ? most : c->n_copies;
    cap = most > copies ? (uint32_t)most : copies;
    b = calloc(1, sizeof(*b) + cap * (sizeof(*b->job.items) + sizeof(*b->item) + shifts + unfit));
    if (!b)
        return NULL;
    b->c = c;
    list_init(&b->link);
    b->form = form;
    b->slot_bytes = arena_padded(form->layers * form->layer_bytes);
    b->job.op = c->kind->op;
    b->job.region = c->region->region;
    b->job.converts = converts;
    device_job_layers(&b->job, c->layer, c->layers);
    b->job.items = (struct ucm_copy_item *)(b + 1);
    b->job.cap_items = cap;
    b->item = (struct batch_item *)(b->job.items + cap);
    if (c->shifts)
        b->job.shifts = b->shifts = (const struct ucm_rope_angle **)(b->item + cap);
    if (refuses)
        b->job.unfit = (atomic_uchar *)(b->item + cap);
    return b;
}

/* The caller calls cache_released, once for all items. */
static void item_end(struct copy_batch *b, const struct batch_item *i, enum ucm_block_status status)
{
    struct copies *c = b->c;
    bool ok = status == UCM_BLOCK_OK;

    if (c->kind->put)
        c->kind->put(c, b, i, ok);
    else
        cache_unref(c->w.modules->cache, c->w.refs[i->at], c->w.part);
    if (!ok)
        transfer_status(&c->w, i->at, status);
    c->w.held_bytes -= b->slot_bytes;
}

void batch_add(struct copy_batch *b, const struct batch_item *item)
{
    struct copies *c = b->c;
    struct batch_item *added = &b->item[b->n];
    uint32_t copy = b->job.n_items;
    struct span span;
    int rc;

    *added = *item;
    c->w.held_bytes += b->slot_bytes;
    if (c->kind->add) {
        rc = c->kind->add(b, added);
    } else {
        rc = span_part(c->w.modules->cache, c->w.refs[item->at], c->w.part, &span);
        if (rc == 0)
            rc = device_job_add(&b->job, &span, c->blocks[item->at]);
    }
    if (rc != 0) {
        item_end(b, added, UCM_BLOCK_FAILED);
        cache_released(c->w.modules->cache);
        return;
    }
    if (b->shifts)
        b->shifts[copy] = c->shifts[item->at];
    added->slot = b->job.items[copy].slot;
    b->n++;
}

/* Which of the batch's items has that copy: of a dump, whose copies may have been sorted. */
static struct batch_item *copy_item(const struct copy_batch *b, uint32_t copy)
{
    uint64_t slot = b->job.items[copy].slot;
    uint32_t k = 0;

    while (k < b->n && (!b->item[k].held.pending_write || b->item[k].slot != slot))
        k++;
    assert(k < b->n); /* batch_add has noted it */
    return &b->item[k];
}

/* Ends the batch's items whose bytes the encoding could not hold. */
static void unfit_end(struct copy_batch *b)
{
    for (uint32_t i = 0; i < b->job.n_items; i++) {
        struct batch_item *item;

        if (!atomic_load_explicit(&b->job.unfit[i], memory_order_relaxed))
            continue;
        item = copy_item(b, i);
        b->c->w.modules->metrics->encode_unfit++;
        item_end(b, item, UCM_BLOCK_UNFIT);
        item->held.pending_write = NULL;
    }
}

void batch_end(struct copy_batch *b, enum ucm_block_status status)
{
    struct transfer *w = &b->c->w;
    struct metrics *m = w->modules->metrics;
    bool load = b->job.op == DEVICE_LOAD;
    uint64_t copies = 0, bytes;

    if (status == UCM_BLOCK_OK && b->job.unfit)
        unfit_end(b);
    for (uint32_t i = 0; i < b->n; i++) {
        if (!load && !b->item[i].held.pending_write)
            continue;
        copies += w->kind->weight ? w->kind->weight(w, b->item[i].at) : 1;
        item_end(b, &b->item[i], status);
    }
    cache_released(w->modules->cache);
    copies *= status == UCM_BLOCK_OK ? b->c->layers : 0;
    bytes = copies * b->form->layer_bytes;
    w->bytes += bytes;
    *(load ? &m->load_bytes : &m->dump_bytes) += bytes;
    if (b->job.converts) {
        *(load ? &m->decode_bytes : &m->encode_bytes) += bytes;
        *(load ? &m->decode_raw_bytes : &m->encode_raw_bytes) +=
            copies * form_raw_layer_bytes(b->form);
    }
    free(b);
}

bool job_submit(struct copy_batch *b, struct device_job *job,
                void (*done_cb)(struct device_job *job, int status))
{
    struct copies *c = b->c;
    struct device *device = c->region->region->device;

    /* Slots are handed out in the reverse of the order in which they were freed. Sorted, neighbours
     * become one run of the copy to the worker's entries, where blocks may come in any order. The
     * batch's items stay: they are looked at when all of them end alike. */
    if (c->step == 0 && c->region->region->ring_region != 0 && !b->shifts)
        device_job_sort(job);
    job->event = c->event;
    job->deadline_ms = c->w.r.deadline.at_ms;
    job->who = tenant_who(c->w.ns->tenant);
    /* A device cuts jobs into pieces, and begins none of a large transfer's while a small one
     * waits. */
    job->priority = c->w.priority;
    if (!transfer_large(&c->w) && c->w.priority < TRANSFER_PRIORITY_MAX)
        job->priority++;
    job->beside = c->beside;
    /* One fragment a slot is too narrow for entries; but alongside others only a copy agent
     * decodes. */
    job->straight = c->step > 0 && !job->converts;
    job->done_cb = done_cb;
    if (device->ops->submit(device, job) != 0)
        return false;
    c->jobs++;
    if (c->w.r.trace)
        trace_span(c->w.r.trace, SPAN_COPY, SPAN_MORE);
    return true;
}

enum ucm_block_status job_ended(struct copies *c, const struct device_job *job, int status)
{
    struct metrics_tenant *m = c->w.ns->tenant->metrics;

    if (c->w.r.trace)
        trace_span(c->w.r.trace, SPAN_COPY, SPAN_LESS);
    m->bus_contended_bytes += job->got.contended;
    m->bus_fair_share_bytes += job->got.due;
    if (status == 0)
        return UCM_BLOCK_OK;
    if (status == -ECANCELED)
        return UCM_BLOCK_CANCELLED;
    if (status == -ETIMEDOUT) {
        c->w.modules->metrics->device_event_timeouts += c->event != NULL;
        return UCM_BLOCK_CANCELLED;
    }
    c->w.modules->metrics->device_errors++;
    return UCM_BLOCK_DEVICE;
}

/* ---- for transfer_kind ---- */

static void batch_done_cb(struct device_job *job, int status)
{
    struct copy_batch *b = LIST_ENTRY(job, struct copy_batch, job);
    struct copies *c = b->c;
    enum ucm_block_status outcome = job_ended(c, job, status);

    /* The answer has a status for each block, and no room for words. */
    if (outcome == UCM_BLOCK_DEVICE)
        log_warn("request", "copy-failed", "pid=%ld why=\"%s\"", (long)c->region->region->pid,
                 job->error.text);
    batch_end(b, outcome);
    c->jobs--;
    transfer_pump(&c->w);
}

static bool batch_send(struct copy_batch *b)
{
    bool (*send)(struct copy_batch *) = b->c->kind->send_batch;

    return send ? send(b) : job_submit(b, &b->job, batch_done_cb);
}

int batch_reserve(struct copies *c, const struct transfer_item *it, struct copy_batch **out)
{
    uint32_t copies = c->w.kind->weight ? c->w.kind->weight(&c->w, it->at) : 1;
    struct copy_batch **open = &c->open[1];
    enum copy_way way;

    /* Nearly always the batch of the item before. */
    if (*open && (*open)->form == it->form &&
        (*open)->job.cap_items - (*open)->job.n_items >= copies) {
        *out = *open;
        return 0;
    }
    way = region_way(c->region->region, it->form);
    open = &c->open[way == WAY_STRAIGHT];
    if (way == WAY_NONE)
        return -EXDEV;
    if (*open && (*open)->n > 0 && (*open)->job.cap_items - (*open)->job.n_items < copies) {
        if (!batch_send(*open))
            return -EAGAIN;
        *open = NULL;
    }
    if (*open && (*open)->job.cap_items < copies) { /* empty: what it was made for did not come */
        free(*open);
        *open = NULL;
    }
    if (!*open)
        *open = batch_new(c, it->form, way, copies);
    *out = *open;
    return *open ? 0 : -ENOMEM;
}

int copies_again(struct transfer *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);

    while (!list_empty(&w->ready)) {
        struct item_wait *iw = LIST_ENTRY(w->ready.next, struct item_wait, link);
        struct copy_batch *b;
        int rc = batch_reserve(c, &iw->it, &b);

        if (rc == -EAGAIN)
            return rc;
        list_remove(&iw->link);
        if (rc != 0) {
            transfer_drop(iw, rc == -EXDEV ? UCM_BLOCK_MISS : UCM_BLOCK_NO_ROOM);
            continue;
        }
        w->held_bytes -= iw->slot_bytes;
        w->waits_n--;
        batch_add(b, &(struct batch_item){.at = iw->it.at, .held.layers = iw->w.layers});
        free(iw);
    }
    return 0;
}

struct copy_batch *batch_open(struct copies *c, unsigned open)
{
    struct copy_batch *b = c->open[open];

    if (b && b->n == 0) {
        free(b);
        b = c->open[open] = NULL;
    }
    return c->w.yielded ? NULL : b;
}

int copies_send(struct transfer *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);

    for (unsigned i = 0; i < 2; i++) {
        struct copy_batch *b = batch_open(c, i);

        /* While a job is under way the batch may grow: when the job ends, the pump comes here
         * again. */
        if (!b || (c->jobs > 0 && b->job.n_items < b->job.cap_items))
            continue;
        if (!batch_send(b))
            return -EAGAIN;
        c->open[i] = NULL;
    }
    return c->jobs > 0 || c->open[0] || c->open[1];
}

void copies_stop(struct transfer *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);

    for (unsigned i = 0; i < 2; i++) {
        struct copy_batch *b = c->open[i];

        c->open[i] = NULL;
        if (b)
            batch_end(b, UCM_BLOCK_CANCELLED);
    }
}
