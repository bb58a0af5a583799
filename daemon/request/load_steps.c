/* A load in steps: layer 0 of all blocks, then layer 1 of all; the client gets a progress
 * notification for each.
 *
 * A batch is copied by one job a step. The batch that is furthest behind goes first, and few jobs
 * are under way at once: so a batch whose blocks had to be read from NVMe catches up before the
 * others go on.
 *
 * A step has landed when every item has ended or is in a batch, and every batch has landed it. */
#include "daemon/request/copies.h"

#include <errno.h>

#define STEP_JOBS 16u /* under way at once: the bus must not wait for the event loop */

struct step_job {
    struct device_job job;
    struct list link; /* in steps->idle */
    struct copy_batch *batch;
    uint32_t step;
};

struct steps {
    uint32_t n;
    uint32_t reported, reported_failed; /* steps; keys whose status is not OK */
    uint32_t batches_n;
    struct list batches; /* by next_step */
    struct list idle;
    struct step_job jobs[STEP_JOBS];
    uint32_t landed[]; /* of each step: in how many batches */
};

size_t steps_memory(uint32_t layers)
{
    size_t bytes = sizeof(struct steps) + (size_t)layers * sizeof(uint32_t);

    return (bytes + 7) / 8 * 8; /* what lies after stays aligned */
}

void steps_init(struct copies *c, void *memory, uint32_t step)
{
    struct steps *st = memory;

    c->step = step < c->layers ? step : c->layers;
    st->n = (c->layers - 1) / c->step + 1;
    list_init(&st->batches);
    list_init(&st->idle);
    for (uint32_t i = 0; i < STEP_JOBS; i++)
        list_push_back(&st->idle, &st->jobs[i].link);
    c->steps = st;
}

/* ---- batches ---- */

/* By next_step, after those that are as far. */
static void batch_queue(struct steps *st, struct copy_batch *b)
{
    struct list *before = st->batches.prev;

    while (before != &st->batches &&
           LIST_ENTRY(before, struct copy_batch, link)->next_step > b->next_step)
        before = before->prev;
    list_push_front(before, &b->link);
}

bool steps_send_batch(struct copy_batch *b)
{
    b->c->steps->batches_n++;
    batch_queue(b->c->steps, b);
    return true;
}

/* No further step of it is sent. */
static void batch_stop(struct steps *st, struct copy_batch *b, enum ucm_block_status status)
{
    if (b->status == UCM_BLOCK_OK)
        b->status = status;
    list_remove(&b->link);
    for (; b->next_step < st->n; b->next_step++)
        st->landed[b->next_step]++;
    for (uint32_t i = 0; i < b->n; i++)
        transfer_status(&b->c->w, b->item[i].at, b->status);
}

static void step_done_cb(struct device_job *job, int status)
{
    struct step_job *sj = LIST_ENTRY(job, struct step_job, job);
    struct copy_batch *b = sj->batch;
    struct copies *c = b->c;

    enum ucm_block_status outcome = job_ended(c, job, status);

    c->steps->landed[sj->step]++;
    list_push_back(&c->steps->idle, &sj->link);
    c->jobs--;
    b->jobs--;
    if (status != 0)
        batch_stop(c->steps, b, outcome);
    if (b->jobs == 0 && b->next_step == c->steps->n)
        batch_end(b, b->status);
    transfer_pump(&c->w);
}

static bool step_send(struct copies *c, struct copy_batch *b, struct step_job *sj)
{
    uint32_t layer = c->layer + b->next_step * c->step, end = layer + c->step;

    if (end > c->layer + c->layers)
        end = c->layer + c->layers;
    sj->batch = b;
    sj->step = b->next_step;
    sj->job = b->job;
    device_job_layers(&sj->job, layer, end - layer);
    return job_submit(b, &sj->job, step_done_cb);
}

/* Sends what may go now. False: the device's queue is full, and no job of this load is under
 * way. */
static bool steps_pump(struct copies *c)
{
    struct steps *st = c->steps;

    while (!list_empty(&st->batches) && !list_empty(&st->idle)) {
        struct copy_batch *b = LIST_ENTRY(st->batches.next, struct copy_batch, link);
        struct step_job *sj = LIST_ENTRY(st->idle.next, struct step_job, link);

        if (!step_send(c, b, sj))
            return c->jobs > 0;
        list_remove(&sj->link);
        b->jobs++;
        list_remove(&b->link);
        if (++b->next_step < st->n)
            batch_queue(st, b);
    }
    return true;
}

/* ---- reporting ---- */

/* Reports the steps that have landed since the last report. */
static void steps_report(struct copies *c)
{
    struct steps *st = c->steps;
    struct msg_progress m = {.msgid = c->w.r.msgid};
    uint32_t done = st->reported, failed = 0;

    if (c->w.stopping || c->w.cursor < c->w.n_keys || c->open[0] || c->open[1] || c->w.waits_n > 0)
        return;
    while (done < st->n && st->landed[done] == st->batches_n)
        done++;
    /* The answer reports the last step. */
    if (done == st->reported || done == st->n)
        return;
    for (uint32_t i = 0; i < c->w.n_keys; i++)
        failed += c->w.status[i] != UCM_BLOCK_OK;
    m.layers = (uint64_t)done * c->step;
    if (failed != st->reported_failed)
        m.status = (struct proto_bin){c->w.status, c->w.n_keys};
    if (!session_progress(c->w.r.s, &m))
        return;
    st->reported = done;
    st->reported_failed = failed;
}

/* ---- for transfer_kind ---- */

int steps_send(struct transfer *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    bool whole = w->cursor == w->n_keys && list_empty(&w->waits) && list_empty(&w->ready);
    bool sent;

    for (unsigned i = 0; i < 2; i++) {
        struct copy_batch *b = batch_open(c, i);

        /* The last batch must not fall behind the others. */
        if (b && (whole || list_empty(&c->steps->batches))) {
            (void)steps_send_batch(b);
            c->open[i] = NULL;
        }
    }
    sent = steps_pump(c);
    steps_report(c);
    if (!sent)
        return -EAGAIN;
    return c->jobs > 0 || c->open[0] || c->open[1] || !list_empty(&c->steps->batches);
}

/* Gives up what was not sent. */
void steps_stop(struct transfer *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    struct list *node;

    copies_stop(w);
    while ((node = list_pop_front(&c->steps->batches)) != NULL) {
        struct copy_batch *b = LIST_ENTRY(node, struct copy_batch, link);

        batch_stop(c->steps, b, UCM_BLOCK_CANCELLED);
        if (b->jobs == 0)
            batch_end(b, b->status);
    }
}
