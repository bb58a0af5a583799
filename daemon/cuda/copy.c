#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <string.h>

#define GPU_EXPIRE_MS 20
#define GPU_PASSED_MAX 512   /* jobs that wait for slices, passed over in one go, */
#define GPU_FULL_MAX 16      /* of so many staging rings */
#define GPU_EVENTS_A_LOOK 64 /* queried in one go: each costs about a microsecond */

/* ---- jobs that end ---- */

void gpu_finish(struct gpu *g, struct device_job *job, int status)
{
    gpu_event_close(job);
    work_finish(&g->work, job, status);
}

static int refuse_dying(struct device_job *job)
{
    return job_refuse(job, -EIO, UCM_WIRE_DEVICE,
                      "the worker is exiting: its event says nothing about its memory any more");
}

/* All pieces are done. A dump fails when its worker died meanwhile (see event_poll), or hung up and
 * may have written over what was read. */
static void copy_done(struct gpu *g, struct device_job *job)
{
    struct gpu_region *mapping = job->region->mapping;

    if (job->status == 0 && job->op == DEVICE_DUMP && job->event && !worker_alive(&mapping->worker))
        job->status = refuse_dying(job);
    if (job->status == 0 && job->op == DEVICE_DUMP && job_deserted(job))
        job->status = job_refuse_deserted(job);
    gpu_finish(g, job, job->status);
}

void gpu_piece_end(struct gpu *g, struct device_job *job)
{
    if (--job->pieces == 0 && job->next_item == job->n_items)
        copy_done(g, job);
}

void gpu_job_fail(struct gpu *g, struct device_job *job, int status)
{
    list_remove(&job->link);
    job->next_item = job->n_items;
    job->status = status;
    if (job->pieces == 0)
        gpu_finish(g, job, status);
}

void gpu_piece_fail(struct gpu *g, struct device_job *job, int status)
{
    job->pieces--;
    gpu_job_fail(g, job, status);
}

/* The context is lost, and with it all that was launched. A stream of a lost context answers at
 * once. Waiting for it ensures that nothing writes to a slot which the loop then reuses. */
void gpu_abandon(struct gpu *g)
{
    struct device_job *job;
    struct list *node;

    while ((node = list_pop_front(&g->waiting)) != NULL) {
        job = LIST_ENTRY(node, struct device_job, link);
        gpu_finish(g, job, gpu_refuse_failed(g, job));
    }
    while ((job = job_queue_first(&g->queued)) != NULL)
        gpu_job_fail(g, job, gpu_refuse_failed(g, job));
    gpu_stagings_abandon(g);
    if (g->turns)
        (void)cuda.cuStreamSynchronize(g->turns);
    for (unsigned i = 0; i < GPU_STREAMS; i++) {
        struct gpu_stream *s = &g->streams[i];

        if (s->stream)
            (void)cuda.cuStreamSynchronize(s->stream);
        for (; s->n > 0; s->n--, s->oldest = (s->oldest + 1) % GPU_LAUNCHES) {
            struct gpu_launch *l = &s->launches[s->oldest];

            if (l->slice)
                gpu_staging_lost(g, l->slice);
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
 * then, behind work that never ends. */
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
        rc = refuse_dying(job);
    else if (job_deserted(job))
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

uint64_t gpu_launch_bytes(const struct gpu *g, enum ucm_copy_direction direction)
{
    if (g->beside.now)
        return GPU_BESIDE_BYTES;
    return g->contended[direction] ? GPU_FAIR_BYTES : GPU_LAUNCH_BYTES;
}

CUresult gpu_kernel_launch(struct gpu *g, CUstream stream, CUdeviceptr planes, uint32_t n_planes,
                           struct ucm_copy_item *items, uint32_t n_items, uint32_t largest_chunk,
                           uint32_t direction)
{
    uint32_t tiles = ucm_copy_tiles(largest_chunk);
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &tiles, &direction};

    return cuda.cuLaunchKernel(g->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, stream,
                               arguments, NULL);
}

static enum copy_strategy strategy_pick(struct gpu *g, const struct job_piece *piece,
                                        enum ucm_copy_direction direction, uint32_t extents)
{
    const struct costs *c = &g->costs.of[direction];
    enum copy_strategy pick;

    if (extents == 0) /* the engines can't; of coded slots never */
        return COPY_SM;
    if (g->config.strategy == COPY_DMA || g->config.strategy == COPY_SM)
        return g->config.strategy;
    pick = costs_pick(c, g->dma.extents, extents, piece->bytes, false);
    /* What the engines do best does not depend on others. A companion's kernels count as others'. */
    if (pick == COPY_SM && (g->slices > 0 || gpu_others_run(g)))
        pick = costs_pick(c, g->dma.extents, extents, piece->bytes, true);
    return pick;
}

CUresult gpu_piece_kernel(struct gpu *g, unsigned stream, struct gpu_launch *l,
                          const struct device_job *job, const struct job_piece *piece)
{
    const struct ucm_copy_plane *planes = &job->region->planes[piece->first_plane];
    const struct gpu_region *mapping = job->region->mapping;

    return gpu_kernel_launch(g, g->streams[stream].stream,
                             mapping->planes + piece->first_plane * sizeof(*planes),
                             piece->n_planes, l->items, piece->n_items,
                             ucm_copy_largest_chunk(planes, piece->n_planes), job_direction(job));
}

/* Where the engines can't, or are slower. */
static CUresult launch_kernels(struct gpu *g, struct gpu_launch *l, const struct device_job *job,
                               const struct job_piece *piece, enum ucm_copy_direction direction,
                               bool turned)
{
    if (job->coded)
        return gpu_encoding_launch(g, job, piece, l->items);
    if (turned)
        return gpu_rope_launch(g, job, piece, l);
    return gpu_piece_kernel(g, direction, l, job, piece);
}

static CUresult launch_piece(struct gpu *g, struct gpu_launch *l, const struct device_job *job,
                             const struct job_piece *piece, enum ucm_copy_direction direction)
{
    const struct costs *costs = &g->costs.of[direction];
    bool turned = gpu_rope_turns(job, piece);
    uint32_t extents = 0;
    double cost_ns;
    CUresult r;

    if (g->config.strategy != COPY_SM && !job->coded)
        extents = gpu_dma_plan(g, job, piece, l->items);
    l->strategy = strategy_pick(g, piece, direction, extents);
    cost_ns = l->strategy == COPY_DMA ? costs_dma_ns(costs, g->dma.extents, extents)
                                      : costs_kernel_ns(costs, piece->bytes);
    l->cost_ns = (uint64_t)cost_ns;
    l->begun_ns = uv_hrtime();
    if (l->strategy == COPY_DMA)
        r = gpu_dma_launch(g, direction, extents);
    else
        r = launch_kernels(g, l, job, piece, direction, turned);
    if (r == CUDA_SUCCESS && turned && (job->coded || l->strategy == COPY_DMA))
        r = gpu_rope_behind(g, job, piece, l);
    if (r == CUDA_SUCCESS) {
        atomic_fetch_add(&g->strategy_bytes[l->strategy], piece->bytes);
        atomic_fetch_add(&g->strategy_launches[l->strategy], 1);
    }
    return r;
}

struct gpu_launch *gpu_launch_next(struct gpu *g, enum ucm_copy_direction direction)
{
    struct gpu_stream *s = &g->streams[direction];
    uint64_t ahead = g->contended[direction] ? GPU_FAIR_BYTES : GPU_AHEAD_BYTES;

    if (s->n == GPU_LAUNCHES || s->cost >= ahead || !gpu_beside_allows(g, direction))
        return NULL;
    return &s->launches[(s->oldest + s->n) % GPU_LAUNCHES];
}

CUresult gpu_launch_follow(struct gpu *g, unsigned stream, struct gpu_launch *l,
                           struct device_job *job, uint64_t cost, struct gpu_slice *slice)
{
    struct gpu_stream *s = &g->streams[stream];
    CUstream last = l->behind ? l->behind : s->stream;
    uint64_t from_ns = l->begun_ns;
    CUresult r = cuda.cuEventRecord(l->done, last);

    l->behind = NULL;
    if (r != CUDA_SUCCESS) {
        (void)cuda.cuStreamSynchronize(last); /* it runs, and no event would show its end */
        gpu_fail(g, r, "a copy can't be followed");
        return r;
    }
    l->job = job;
    l->cost = cost;
    l->slice = slice;
    if (s->n > 0 && s->due_ns > from_ns)
        from_ns = s->due_ns;
    s->due_ns = l->due_ns = from_ns + l->cost_ns;
    l->announced = false;
    s->n++;
    s->cost += cost;
    if (stream != GPU_EXPRESS)
        gpu_beside_launched(g, (enum ucm_copy_direction)stream, cost);
    return r;
}

void gpu_launch_piece(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job,
                      const struct job_piece *piece)
{
    struct gpu_launch *l = gpu_launch_next(g, direction);
    CUresult r;

    l->piece = *piece;
    memcpy(l->items, &job->items[piece->first_item], piece->n_items * sizeof(*l->items));
    r = launch_piece(g, l, job, piece, direction);
    if (r == CUDA_SUCCESS)
        r = gpu_launch_follow(g, direction, l, job, piece->cost, NULL);
    if (r != CUDA_SUCCESS)
        gpu_piece_fail(g, job, gpu_refuse(g, job, -EIO, r, "a copy can't be launched"));
}

static void launch_next(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job)
{
    struct job_piece piece;

    if (job_next_piece(job, gpu_launch_bytes(g, direction),
                       gpu_rope_items(job, GPU_LAUNCH_ITEMS, 0), &piece))
        list_remove(&job->link);
    job_queue_charge(&g->queued, job, piece.cost);
    job->pieces++;
    gpu_launch_piece(g, direction, job, &piece);
}

int gpu_job_check(struct gpu *g, struct device_job *job)
{
    int rc = job_check(job, job_clock_ms());

    return rc == 0 ? gpu_memory_need(g, job) : rc;
}

int gpu_job_begin(struct gpu *g, struct device_job *job)
{
    int rc = gpu_job_check(g, job);

    job->begun = rc == 0;
    job->staged = rc == 0 && gpu_staging_pays(g, job);
    return rc;
}

/* Staging rings without a free slice. Jobs that wait for one let others pass whose way is free. */
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

static struct device_job *next_to_try(struct gpu *g, struct device_job *job, struct passed *p)
{
    if (!waits(p, job)) {
        if (p->rings == GPU_FULL_MAX)
            return NULL;
        p->full[p->rings++] = job->staging;
    }
    while (job && waits(p, job))
        job = ++p->jobs < GPU_PASSED_MAX ? job_queue_next_of(&g->queued, job) : NULL;
    return job;
}

bool gpu_fill(struct gpu *g, enum ucm_copy_direction direction)
{
    enum device_op op = direction == UCM_COPY_DUMP ? DEVICE_DUMP : DEVICE_LOAD;
    bool moved = false;
    struct device_job *job = job_queue_first_of(&g->queued, op);
    struct passed passed = {.rings = 0};

    while (job && !atomic_load(&g->failed)) {
        bool express = gpu_express_takes(g, job);
        int rc = 0;

        if ((!express && !gpu_launch_next(g, direction)) || !gpu_probe_ready(g))
            break;
        if (!job->begun)
            rc = express ? gpu_job_check(g, job) : gpu_job_begin(g, job);
        if (rc == 0 && job_deserted(job))
            rc = job_refuse_deserted(job);
        if (rc < 0) {
            gpu_job_fail(g, job, rc);
        } else if (express) {
            gpu_express_launch(g, job);
        } else if (job->staged) {
            enum gpu_took took = gpu_staging_take(g, job);

            if (took == GPU_FULL) {
                job = next_to_try(g, job, &passed);
                continue;
            }
            if (took == GPU_PAUSED) /* after TOOK the job may have failed, and be freed */
                job->staged = false;
        } else {
            launch_next(g, direction, job);
        }
        moved = true;
        passed = (struct passed){.rings = 0};
        job = job_queue_first_of(&g->queued, op);
    }
    return moved;
}

static void straight_end(struct gpu *g, struct gpu_launch *l)
{
    if (l->job->coded && l->job->op == DEVICE_DUMP)
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
        if (l->strategy == COPY_SM && g->config.strategy == COPY_AUTO && !l->job->coded &&
            !l->job->turns && stream != GPU_EXPRESS)
            gpu_kernel_seen(g, (enum ucm_copy_direction)stream, l);
        s->done_ns = uv_hrtime();
        s->oldest = (s->oldest + 1) % GPU_LAUNCHES;
        s->n--;
        s->cost -= l->cost;
        if (l->slice)
            gpu_staging_launched(g, l->slice);
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
