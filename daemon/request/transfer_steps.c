/* A load in steps: layer 0 of all blocks, then layer 1 of all; the client gets a progress
 * notification for each.
 *
 * A batch is copied by one job a step. The batch that is furthest behind goes first, and few jobs
 * are under way at once: so a batch whose blocks had to be read from NVMe catches up before the
 * others go on.
 *
 * A step has landed when every item has ended or is in a batch, and every batch has landed it. */
#include "daemon/request/transfer.h"

#define STEP_JOBS 16u /* under way at once: the bus must not wait for the loop */

struct step_job {
    struct device_job job;
    struct list link; /* in steps->idle */
    struct copy_batch *batch;
    uint32_t step;
};

struct steps {
    uint32_t step, n;
    uint32_t reported, reported_failed; /* steps; keys whose status is not OK */
    uint32_t batches_n;
    struct list batches; /* by next_step */
    struct list idle;
    struct step_job jobs[STEP_JOBS];
    uint32_t landed[]; /* of each step: in how many batches */
};

size_t steps_memory(uint32_t step, uint32_t shards)
{
    size_t bytes = sizeof(struct steps) + (size_t)shards * sizeof(uint32_t);

    return step == 0 ? 0 : (bytes + 7) / 8 * 8; /* what lies behind stays aligned */
}

void steps_init(struct transfer *t, void *memory, uint32_t step)
{
    struct steps *st = memory;

    st->step = step < t->shards ? step : t->shards;
    st->n = (t->shards - 1) / st->step + 1;
    list_init(&st->batches);
    list_init(&st->idle);
    for (uint32_t i = 0; i < STEP_JOBS; i++)
        list_push_back(&st->idle, &st->jobs[i].link);
    t->steps = st;
}

uint32_t steps_shards(const struct transfer *t)
{
    return t->steps->step;
}

/* ---- batches ---- */

/* By next_step, behind those that are as far. */
static void batch_queue(struct steps *st, struct copy_batch *b)
{
    struct list *before = st->batches.prev;

    while (before != &st->batches &&
           LIST_ENTRY(before, struct copy_batch, link)->next_step > b->next_step)
        before = before->prev;
    list_push_front(before, &b->link);
}

void steps_add(struct transfer *t, bool coded)
{
    struct copy_batch *b = t->open[coded];

    t->open[coded] = NULL;
    t->steps->batches_n++;
    batch_queue(t->steps, b);
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
        item_status(b->t, b->item[i], b->status);
}

static void step_done_cb(struct device_job *job, int status)
{
    struct step_job *sj = LIST_ENTRY(job, struct step_job, job);
    struct copy_batch *b = sj->batch;
    struct transfer *t = b->t;

    job_count(t, job);
    t->steps->landed[sj->step]++;
    list_push_back(&t->steps->idle, &sj->link);
    t->jobs--;
    b->jobs--;
    if (status != 0)
        batch_stop(t->steps, b, batch_outcome(t, status));
    if (b->jobs == 0 && b->next_step == t->steps->n)
        batch_end(b, b->status);
    transfer_pump(t);
}

static bool step_send(struct transfer *t, struct copy_batch *b, struct step_job *sj)
{
    const struct steps *st = t->steps;
    uint32_t shard = t->shard + b->next_step * st->step, end = shard + st->step;

    if (end > t->shard + t->shards)
        end = t->shard + t->shards;
    sj->batch = b;
    sj->step = b->next_step;
    device_job_cut(&b->job, shard, end - shard, &sj->job);
    return job_submit(b, &sj->job, step_done_cb);
}

bool steps_pump(struct transfer *t)
{
    struct steps *st = t->steps;

    while (!list_empty(&st->batches) && !list_empty(&st->idle)) {
        struct copy_batch *b = LIST_ENTRY(st->batches.next, struct copy_batch, link);
        struct step_job *sj = LIST_ENTRY(st->idle.next, struct step_job, link);

        if (!step_send(t, b, sj))
            return t->jobs > 0;
        list_remove(&sj->link);
        b->jobs++;
        list_remove(&b->link);
        if (++b->next_step < st->n)
            batch_queue(st, b);
    }
    return true;
}

bool steps_sent(const struct transfer *t)
{
    return list_empty(&t->steps->batches);
}

void steps_abandon(struct transfer *t)
{
    struct list *node;

    while ((node = list_pop_front(&t->steps->batches)) != NULL) {
        struct copy_batch *b = LIST_ENTRY(node, struct copy_batch, link);

        batch_stop(t->steps, b, UCM_BLOCK_CANCELLED);
        if (b->jobs == 0)
            batch_end(b, b->status);
    }
}

/* ---- reporting ---- */

void steps_report(struct transfer *t)
{
    struct steps *st = t->steps;
    struct msg_progress m = {.msgid = t->r.msgid};
    uint32_t done = st->reported, failed = 0;

    if (t->stopping || t->cursor < items_of(t) || batch_is_open(t) || t->waits_n > 0)
        return;
    while (done < st->n && st->landed[done] == st->batches_n)
        done++;
    /* The answer reports the last step. */
    if (done == st->reported || done == st->n)
        return;
    for (uint32_t i = 0; i < t->n_keys; i++)
        failed += t->status[i] != UCM_BLOCK_OK;
    m.shards = (uint64_t)done * st->step;
    if (failed != st->reported_failed)
        m.status = (struct proto_bin){t->status, t->n_keys};
    if (!session_progress(t->r.s, &m))
        return;
    st->reported = done;
    st->reported_failed = failed;
}
