#include "daemon/request/batch.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define JOB_BYTES (32u << 20)

/* How many copies one job makes. */
static uint32_t batch_copies(const struct copies *c, const struct form *form)
{
    uint64_t shards = c->region->region->pool ? 1 : c->steps ? steps_shards(c) : form->shards;
    uint64_t n = JOB_BYTES / (shards * form->shard_bytes), most = copy_kind(c)->job_items;

    n = n > most ? most : n == 0 ? 1 : n;
    return n < c->n_copies ? (uint32_t)n : c->n_copies;
}

/* For `copies` at least. */
static struct copy_batch *batch_new(struct copies *c, const struct form *form, bool coded,
                                    uint32_t copies)
{
    bool refuses = coded && copy_kind(c)->op == DEVICE_DUMP && codec_refuses(form->codec);
    uint32_t most = batch_copies(c, form), cap = most > copies ? most : copies;
    size_t turns = c->turns ? sizeof(*c->turns) : 0, unfit = refuses ? sizeof(atomic_uchar) : 0;
    struct copy_batch *b =
        calloc(1, sizeof(*b) + cap * (sizeof(*b->job.items) + sizeof(*b->item) + turns + unfit));

    if (!b)
        return NULL;
    b->c = c;
    list_init(&b->link);
    b->form = form;
    device_job_init(&b->job, copy_kind(c)->op, c->region->region, coded, c->shard, c->shards);
    b->job.items = (struct ucm_copy_item *)(b + 1);
    b->job.cap_items = cap;
    b->item = (struct batch_item *)(b->job.items + cap);
    if (c->turns)
        b->job.turns = b->turns = (const struct ucm_rope_angle **)(b->item + cap);
    if (refuses)
        b->job.unfit = (atomic_uchar *)(b->item + cap);
    return b;
}

int batch_reserve(struct copies *c, const struct walk_item *it, struct copy_batch **out)
{
    enum copy_way way = region_way(c->region->region, it->form);
    bool coded = way == WAY_CODED;
    struct copy_batch **open = &c->open[coded];
    uint32_t copies = c->w.kind->weight ? c->w.kind->weight(&c->w, it->at) : 1;

    if (way == WAY_NONE) {
        walk_status(&c->w, it->at, UCM_BLOCK_MISS);
        return -EXDEV;
    }
    if (*open && (*open)->n > 0 && (*open)->job.cap_items - (*open)->job.n_items < copies) {
        if (c->steps)
            steps_add(open);
        else if (!batch_send(open))
            return -EAGAIN;
    }
    if (*open && (*open)->job.cap_items < copies) { /* empty: what it was made for did not come */
        free(*open);
        *open = NULL;
    }
    if (!*open)
        *open = batch_new(c, it->form, coded, copies);
    *out = *open;
    return *open ? 0 : -ENOMEM;
}

/* ---- the end ---- */

/* Counts so many copied shards of a batch. Returns their bytes. */
static uint64_t copied_count(const struct copy_batch *b, uint64_t shards)
{
    struct metrics *m = metrics_of(&b->c->w);
    uint64_t bytes = shards * b->form->shard_bytes;
    bool load = b->job.op == DEVICE_LOAD;

    *(load ? &m->load_bytes : &m->dump_bytes) += bytes;
    if (b->job.coded) {
        *(load ? &m->decode_bytes : &m->encode_bytes) += bytes;
        *(load ? &m->decode_plain_bytes : &m->encode_plain_bytes) +=
            shards * form_plain_shard_bytes(b->form);
    }
    return bytes;
}

static void item_end(struct copy_batch *b, const struct batch_item *i, enum ucm_block_status status)
{
    struct copies *c = b->c;
    struct walk *w = &c->w;
    bool ok = status == UCM_BLOCK_OK;

    copy_kind(c)->put(c, b, i, ok);
    walk_status(w, i->at, status);
    w->held_bytes -= arena_padded(b->form->shards * b->form->shard_bytes);
    if (ok)
        w->bytes += copied_count(b, (uint64_t)c->shards *
                                        (w->kind->weight ? w->kind->weight(w, i->at) : 1));
}

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
        metrics_of(&b->c->w)->encode_unfit++;
        item_end(b, item, UCM_BLOCK_UNFIT);
        item->held.fill = NULL;
    }
}

void batch_end(struct copy_batch *b, enum ucm_block_status status)
{
    bool load = b->job.op == DEVICE_LOAD;

    if (status == UCM_BLOCK_OK && b->job.unfit)
        unfit_end(b);
    for (uint32_t i = 0; i < b->n; i++)
        if (load || b->item[i].held.fill)
            item_end(b, &b->item[i], status);
    free(b);
}

void job_count(struct copies *c, const struct device_job *job)
{
    struct metrics_tenant *m = c->w.ns->tenant->metrics;

    trace_less(c->w.r.trace, TRACE_COPY);
    m->bus_contended_bytes += job->got.contended;
    m->bus_due_bytes += job->got.due;
}

enum ucm_block_status job_outcome(struct copies *c, int status)
{
    if (status == 0)
        return UCM_BLOCK_OK;
    if (status == -ECANCELED)
        return UCM_BLOCK_CANCELLED;
    if (status == -ETIMEDOUT) {
        metrics_of(&c->w)->device_event_timeouts += c->event != NULL;
        return UCM_BLOCK_CANCELLED;
    }
    metrics_of(&c->w)->device_errors++;
    return UCM_BLOCK_DEVICE;
}

static void batch_done_cb(struct device_job *job, int status)
{
    struct copy_batch *b = LIST_ENTRY(job, struct copy_batch, job);
    struct copies *c = b->c;
    enum ucm_block_status outcome = job_outcome(c, status);

    job_count(c, job);
    if (outcome ==
        UCM_BLOCK_DEVICE) /* the answer has a status for each block, and no room for words */
        log_warn("request", "copy-failed", "pid=%ld why=\"%s\"", (long)c->region->region->pid,
                 job->error.text);
    batch_end(b, outcome);
    c->jobs--;
    walk_pump(&c->w);
}

/* ---- to the device ---- */

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
    job->straight = c->steps != NULL && !job->coded;
    job->done_cb = done_cb;
    if (device->ops->submit(device, job) != 0)
        return false;
    c->jobs++;
    trace_more(c->w.r.trace, TRACE_COPY);
    return true;
}

bool batch_send(struct copy_batch **open)
{
    struct copy_batch *b = *open;
    struct copies *c = b->c;

    /* Slots are handed out in the reverse of the order in which they were freed. Sorted, neighbours
     * become one run of the copy to the worker's slices, where blocks may come in any order. The batch's items
     * stay: they are looked at when all of them end alike. */
    if (c->region->region->ring_region != 0 && !b->turns)
        device_job_sort(&b->job);
    if (!job_submit(b, &b->job, batch_done_cb))
        return false;
    *open = NULL;
    return true;
}

void batch_add(struct copy_batch *b, int rc, const struct span *span, const struct batch_item *item)
{
    struct copies *c = b->c;
    struct batch_item *added = &b->item[b->n];
    uint32_t copy = b->job.n_items;

    *added = *item;
    if (rc == 0)
        rc = copy_kind(c)->add ? copy_kind(c)->add(c, item->at, span, &b->job)
                               : device_job_add(&b->job, span, c->blocks[item->at]);
    if (rc != 0) {
        item_end(b, added, UCM_BLOCK_FAILED);
        return;
    }
    if (b->turns)
        b->turns[copy] = c->turns[item->at];
    added->slot = b->job.items[copy].slot;
    b->n++;
}
