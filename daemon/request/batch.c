/* One batch: its items, and its jobs. */
#include "daemon/request/copies.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define JOB_BYTES (32u << 20)

struct copy_batch *batch_new(struct copies *c, const struct form *form, enum copy_way way,
                             uint64_t job_shards, uint32_t copies)
{
    bool converts = way == WAY_CONVERTED;
    bool refuses = converts && c->kind->op == DEVICE_DUMP && form_refuses(form);
    uint64_t fit = JOB_BYTES / (job_shards * form->shard_bytes), most = c->kind->job_items;
    uint32_t cap;
    size_t turns = c->turns ? sizeof(*c->turns) : 0, unfit = refuses ? sizeof(atomic_uchar) : 0;
    struct copy_batch *b;

    most = fit > most ? most : fit == 0 ? 1 : fit;
    most = most < c->n_copies ? most : c->n_copies;
    cap = most > copies ? (uint32_t)most : copies;
    b = calloc(1, sizeof(*b) + cap * (sizeof(*b->job.items) + sizeof(*b->item) + turns + unfit));
    if (!b)
        return NULL;
    b->c = c;
    list_init(&b->link);
    b->form = form;
    b->slot_bytes = arena_padded(form->shards * form->shard_bytes);
    b->job.op = c->kind->op;
    b->job.region = c->region->region;
    b->job.converts = converts;
    device_job_shards(&b->job, c->shard, c->shards);
    b->job.items = (struct ucm_copy_item *)(b + 1);
    b->job.cap_items = cap;
    b->item = (struct batch_item *)(b->job.items + cap);
    if (c->turns)
        b->job.turns = b->turns = (const struct ucm_rope_angle **)(b->item + cap);
    if (refuses)
        b->job.unfit = (atomic_uchar *)(b->item + cap);
    return b;
}

/* Who calls it calls cache_released, once for all items. */
static void item_end(struct copy_batch *b, const struct batch_item *i, enum ucm_block_status status)
{
    struct copies *c = b->c;
    bool ok = status == UCM_BLOCK_OK;

    if (c->kind->put)
        c->kind->put(c, b, i, ok);
    else
        cache_unuse(c->w.rooms->cache, c->w.refs[i->at], c->w.part);
    if (!ok)
        walk_status(&c->w, i->at, status);
    c->w.held_bytes -= b->slot_bytes;
}

void batch_add(struct copy_batch *b, int rc, const struct span *span, const struct batch_item *item)
{
    struct copies *c = b->c;
    struct batch_item *added = &b->item[b->n];
    uint32_t copy = b->job.n_items;

    *added = *item;
    if (rc == 0)
        rc = c->kind->add ? c->kind->add(c, item->at, span, &b->job)
                          : device_job_add(&b->job, span, c->blocks[item->at]);
    if (rc != 0) {
        item_end(b, added, UCM_BLOCK_FAILED);
        cache_released(c->w.rooms->cache);
        return;
    }
    if (b->turns)
        b->turns[copy] = c->turns[item->at];
    added->slot = b->job.items[copy].slot;
    b->n++;
}

/* ---- the end ---- */

/* Which of the batch's items has that copy: of a dump, whose copies may have been sorted. */
static struct batch_item *copy_item(const struct copy_batch *b, uint32_t copy)
{
    uint64_t slot = b->job.items[copy].slot;
    uint32_t k = 0;

    while (k < b->n && (!b->item[k].held.fill || b->item[k].slot != slot))
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
        b->c->w.rooms->metrics->encode_unfit++;
        item_end(b, item, UCM_BLOCK_UNFIT);
        item->held.fill = NULL;
    }
}

/* Counts what the batch copied: so many shards. */
static void copied_count(struct copy_batch *b, uint64_t shards)
{
    struct metrics *m = b->c->w.rooms->metrics;
    uint64_t bytes = shards * b->form->shard_bytes;
    bool load = b->job.op == DEVICE_LOAD;

    b->c->w.bytes += bytes;
    *(load ? &m->load_bytes : &m->dump_bytes) += bytes;
    if (b->job.converts) {
        *(load ? &m->decode_bytes : &m->encode_bytes) += bytes;
        *(load ? &m->decode_plain_bytes : &m->encode_plain_bytes) +=
            shards * form_plain_shard_bytes(b->form);
    }
}

void batch_end(struct copy_batch *b, enum ucm_block_status status)
{
    struct walk *w = &b->c->w;
    uint64_t copies = 0;

    if (status == UCM_BLOCK_OK && b->job.unfit)
        unfit_end(b);
    for (uint32_t i = 0; i < b->n; i++) {
        if (b->job.op == DEVICE_DUMP && !b->item[i].held.fill)
            continue;
        copies += w->kind->weight ? w->kind->weight(w, b->item[i].at) : 1;
        item_end(b, &b->item[i], status);
    }
    if (status == UCM_BLOCK_OK)
        copied_count(b, copies * b->c->shards);
    cache_released(w->rooms->cache);
    free(b);
}

/* ---- its jobs ---- */

bool job_submit(struct copy_batch *b, struct device_job *job,
                void (*done_cb)(struct device_job *job, int status))
{
    struct copies *c = b->c;
    struct device *device = c->region->region->device;

    job->event = c->event;
    job->deadline_ms = c->w.r.deadline.at_ms;
    job->who = tenant_who(c->w.ns->tenant);
    job->priority = copy_priority(&c->w);
    job->beside = c->beside;
    /* One chunk a slot is too narrow for slices; but beside others only a companion decodes. */
    job->straight = c->steps != NULL && !job->converts;
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
    m->bus_due_bytes += job->got.due;
    if (status == 0)
        return UCM_BLOCK_OK;
    if (status == -ECANCELED)
        return UCM_BLOCK_CANCELLED;
    if (status == -ETIMEDOUT) {
        c->w.rooms->metrics->device_event_timeouts += c->event != NULL;
        return UCM_BLOCK_CANCELLED;
    }
    c->w.rooms->metrics->device_errors++;
    return UCM_BLOCK_DEVICE;
}
