/* The tier's base: its references, its jobs in the pool, and the next iteration of the event loop.
 * The work of one iteration is bounded, since requests wait for it. A load of a block in DRAM waits
 * for two: for its request, and for the end of its copy. */
#include "daemon/tier/nvme.h"

#include <assert.h>

/* Parts of the writes that one iteration begins: as many as one write has at most, or several
 * writes of few. Each part's header is a page to be filled and hashed. */
#define BUDGET_PARTS NVME_MERGE_IOS

void nvme_hold(struct tier *t)
{
    t->held++;
}

void nvme_release(struct tier *t)
{
    if (--t->held == 0 && t->closing)
        t->free_cb(t);
}

/* ---- jobs ---- */

static void job_work_cb(uv_work_t *work)
{
    struct nvme_job *job = work->data;

    if (job->run_cb)
        job->run_cb(job);
}

static void job_done_cb(uv_work_t *work, int status)
{
    struct nvme_job *job = work->data;
    struct tier *t = job->tier;

    assert(status == 0); /* nobody cancels */
    (void)status;
    job->done_cb(job);
    nvme_release(t);
}

void nvme_job_start(struct tier *t, struct nvme_job *job, void (*run_cb)(struct nvme_job *job),
                    void (*done_cb)(struct nvme_job *job))
{
    int rc;

    job->work.data = job;
    job->tier = t;
    job->run_cb = run_cb;
    job->done_cb = done_cb;
    nvme_hold(t);
    rc = uv_queue_work(t->loop, &job->work, job_work_cb, job_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}

/* ---- the next iteration ---- */

static void idle_cb(uv_idle_t *idle)
{
    struct tier *t = idle->data;
    unsigned due = t->iteration.due;

    uv_idle_stop(idle);
    t->iteration.due = t->iteration.parts = t->iteration.drops = 0;
    nvme_hold(t);
    t->iteration.run_cb(t, due);
    nvme_release(t);
}

void nvme_iteration_want(struct tier *t, unsigned what)
{
    int rc = uv_idle_start(&t->iteration.idle, idle_cb); /* nothing is done if it runs already */

    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    t->iteration.due |= what;
}

bool nvme_iteration_may_write(struct tier *t)
{
    if (t->iteration.parts >= BUDGET_PARTS)
        nvme_iteration_want(t, 0);
    return t->iteration.parts < BUDGET_PARTS;
}

void nvme_iteration_spend(struct tier *t, unsigned parts, bool opened)
{
    t->iteration.parts += opened ? BUDGET_PARTS : parts;
    nvme_iteration_want(t, NVME_TURN_BEGUN);
}

void nvme_iteration_dropped(struct tier *t, uint64_t records)
{
    t->iteration.drops += (unsigned)records;
    t->metrics->nvme_reclaimed_blocks += records;
    nvme_iteration_want(t, 0);
}

void nvme_writes_go_on(struct tier *t)
{
    t->stalled = false;
    nvme_iteration_want(t, 0);
}
