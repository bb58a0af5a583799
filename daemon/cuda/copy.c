/* What waits for its event, for its turn, for its end. */
#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <string.h>

#define GPU_EXPIRE_MS 20
#define GPU_PASSED_MAX 512   /* jobs that wait for entries, skipped in one go, */
#define GPU_FULL_MAX 16      /* of so many staging rings */
#define GPU_EVENTS_A_LOOK 64 /* queried in one go: each costs about a microsecond */

/* The context is lost, and with it all that was launched. A stream of a lost context answers at
 * once. Waiting for it ensures that nothing writes to a slot which the event loop then reuses. */
void gpu_abandon(struct gpu *g)
{
    struct device_job *job;
    struct list *node;

    while ((node = list_pop_front(&g->waiting)) != NULL) {
        job = LIST_ENTRY(node, struct device_job, link);
        gpu_finish(g, job, gpu_refuse_failed(g, job));
    }
    while ((job = job_queue_first(&g->queued, DEVICE_LOAD)) != NULL ||
           (job = job_queue_first(&g->queued, DEVICE_DUMP)) != NULL)
        gpu_job_fail(g, job, gpu_refuse_failed(g, job));
    gpu_stagings_abandon(g);
    if (g->shifts)
        (void)cuda.cuStreamSynchronize(g->shifts);
    for (unsigned i = 0; i < GPU_STREAMS; i++) {
        struct gpu_stream *s = &g->streams[i];

        if (s->stream)
            (void)cuda.cuStreamSynchronize(s->stream);
        for (; s->n > 0; s->n--, s->oldest = (s->oldest + 1) % GPU_LAUNCHES) {
            struct gpu_launch *l = &s->launches[s->oldest];

            if (l->entry)
                gpu_staging_lost(g, l->entry);
            else
                gpu_piece_fail(g, l->job, gpu_refuse_failed(g, l->job));
        }
        s->cost = 0;
    }
}

/* ---- events ---- */

/* A dump waits here and in no stream, so an event that never comes holds up no other job.
 *
 * When a process dies the driver frees its objects, and an event that was never signalled may read
 * as signalled to other processes. The kernel marks a process as exiting before it closes the
 * driver's files. So an event seen signalled, and after that the worker seen not exiting, means
 * that the event was really signalled: the worker's writes are in memory, and a launch made now
 * sees them. No stream waits for the event in addition: the worker may have recorded it again by
 * then, after work that never ends. */
static bool event_poll(struct gpu *g, struct device_job *job, uint64_t now_ms)
{
    struct gpu_region *mapping = job->region->mapping;
    CUresult r = cuda.cuEventQuery(job->scratch);
    int rc = 0;

    /* Waiting for the event of a worker that died or hung up is pointless. */
    if (r == CUDA_ERROR_NOT_READY && !job_late(job, now_ms) &&
        worker_seen(&mapping->worker, job->region->peer_fd, now_ms))
        return false;
    list_remove(&job->link);
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY)
        rc = gpu_refuse(g, job, -EIO, r, "the worker's event failed");
    else if (!worker_alive(&mapping->worker))
        rc = gpu_refuse_dying(job);
    else if (peer_hung_up(job->region->peer_fd))
        rc = job_refuse_deserted(job);
    else if (r == CUDA_ERROR_NOT_READY)
        rc = job_refuse(job, -ETIMEDOUT, UCM_WIRE_DEADLINE,
                        "the worker's event was not signalled before the deadline");
    if (rc < 0)
        gpu_finish(g, job, rc);
    else
        job_queue_push(&g->queued, job);
    return true;
}

bool gpu_events_poll(struct gpu *g)
{
    uint64_t now_ms = job_clock_ms();
    struct list *last = g->waiting.prev, *node = NULL;
    bool moved = false;

    for (unsigned i = 0; i < GPU_EVENTS_A_LOOK && node != last; i++) {
        node = list_pop_front(&g->waiting);
        if (!node)
            break;
        list_push_back(&g->waiting, node);
        moved |= event_poll(g, LIST_ENTRY(node, struct device_job, link), now_ms);
    }
    return moved;
}

/* ---- launches ---- */

void gpu_contended_look(struct gpu *g)
{
    for (unsigned i = 0; i < 2; i++)
        g->contended[i] = fair_contended(&g->queued.copies[i].fair, GPU_FAIR_WINDOW);
}

static void launch_next(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job)
{
    struct job_piece piece;

    if (job_next_piece(job, gpu_launch_bytes(g, direction),
                       gpu_rope_items(job, GPU_LAUNCH_ITEMS, 0), &piece))
        list_remove(&job->link);
    fair_queue_charge(job->queue, &job->who, piece.cost, &job->got);
    job->pieces++;
    gpu_launch_piece(g, direction, job, &piece);
}

/* Staging rings without a free entry. Jobs that wait for one let others pass whose way is free. */
struct passed {
    const struct device_staging *full[GPU_FULL_MAX];
    unsigned rings, jobs;
};

static bool waits(const struct passed *p, const struct device_job *job)
{
    bool full = false;

    for (unsigned i = 0; i < p->rings; i++)
        full |= p->full[i] == job->staging;
    return full && (!job->begun || job->staged); /* a job that has not begun may yet be staged */
}

static struct device_job *next_to_try(struct device_job *job, struct passed *p)
{
    if (!waits(p, job)) {
        if (p->rings == GPU_FULL_MAX)
            return NULL;
        p->full[p->rings++] = job->staging;
    }
    while (job && waits(p, job))
        job = ++p->jobs < GPU_PASSED_MAX ? job_queue_next(job) : NULL;
    return job;
}

bool gpu_fill(struct gpu *g, enum ucm_copy_direction direction)
{
    enum device_op op = direction == UCM_COPY_DUMP ? DEVICE_DUMP : DEVICE_LOAD;
    bool moved = false;
    struct device_job *job = job_queue_first(&g->queued, op);
    struct passed passed = {.rings = 0};

    while (job && !atomic_load(&g->failed)) {
        bool express = gpu_express_takes(g, job);
        int rc = 0;

        if ((!express && !gpu_launch_next(g, direction)) || !gpu_probe_ready(g))
            break;
        if (!job->begun)
            rc = express ? gpu_job_check(g, job) : gpu_job_begin(g, job);
        if (rc == 0 && peer_hung_up(job->region->peer_fd))
            rc = job_refuse_deserted(job);
        if (rc < 0) {
            gpu_job_fail(g, job, rc);
        } else if (express) {
            gpu_express_launch(g, job);
        } else if (job->staged) {
            enum gpu_took took = gpu_staging_take(g, job);

            if (took == GPU_FULL) {
                job = next_to_try(job, &passed);
                continue;
            }
            if (took == GPU_PAUSED) /* after TOOK the job may have failed, and be freed */
                job->staged = false;
        } else {
            launch_next(g, direction, job);
        }
        moved = true;
        passed = (struct passed){.rings = 0};
        job = job_queue_first(&g->queued, op);
    }
    return moved;
}

static void straight_end(struct gpu *g, struct gpu_launch *l)
{
    if (l->job->converts && l->job->op == DEVICE_DUMP)
        job_mark_unfit(l->job, &l->piece);
    gpu_piece_end(g, l->job);
}

bool gpu_reap(struct gpu *g, unsigned stream)
{
    struct gpu_stream *s = &g->streams[stream];
    bool moved = false;

    while (s->n > 0) {
        struct gpu_launch *l = &s->launches[s->oldest];
        CUresult r = cuda.cuEventQuery(l->done);

        if (r == CUDA_ERROR_NOT_READY)
            break;
        if (r != CUDA_SUCCESS) {
            gpu_fail(g, r, "a copy failed");
            return true;
        }
        if (l->strategy == COPY_SM && g->config.strategy == COPY_AUTO && !l->job->converts &&
            !l->job->shifts && stream != GPU_EXPRESS)
            gpu_kernel_seen(g, (enum ucm_copy_direction)stream, l);
        s->done_ns = uv_hrtime();
        s->oldest = (s->oldest + 1) % GPU_LAUNCHES;
        s->n--;
        s->cost -= l->cost;
        if (l->entry)
            gpu_staging_launched(g, l->entry);
        else
            straight_end(g, l);
        moved = true;
    }
    return moved;
}

/* Fails copies that waited past their deadline behind a bus that is busy, or stuck. */
void gpu_expire(struct gpu *g)
{
    uint64_t now_ms = job_clock_ms();
    struct list expired, *node;

    if (now_ms < g->expired_ms + GPU_EXPIRE_MS)
        return;
    g->expired_ms = now_ms;
    list_init(&expired);
    job_queue_expire(&g->queued, now_ms, &expired);
    while ((node = list_pop_front(&expired)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);

        gpu_finish(g, job, job_refuse_late(job));
    }
}
