#include "daemon/device/gpu.h"

#include <errno.h>
#include <string.h>

#define GPU_EXPIRE_MS 20
#define GPU_PASSED_MAX 512   /* jobs that wait for slices, looked past in one go, */
#define GPU_FULL_MAX 16      /* of so many rings */
#define GPU_EVENTS_A_LOOK 64 /* asked in one go: each costs about a microsecond */
#define GPU_SEEN_MS 10       /* how long a worker that was seen alive is believed to be */

/* ---- jobs that end ---- */

void gpu_finish(struct gpu *g, struct device_job *job, int status)
{
    struct gpu_region *mapping = job->region->mapping;

    gpu_event_close(job);
    if (job->ring) {
        struct device_job *close = gpu_ring_unref(job->ring);

        if (close)
            job_queue_push(&g->ready, close);
    }
    if (--mapping->jobs == 0 && mapping->last)
        job_queue_push(&g->ready, mapping->last);
    job_outbox_put(&g->outbox, job, status);
}

static int refuse_dying(struct device_job *job)
{
    return job_refuse(job, -EIO, UCM_WIRE_DEVICE,
                      "the worker is exiting: its event says nothing about its memory any more");
}

/* All pieces are done. A dump whose worker died on the way (event_poll), or hung up and may have
 * written over what was read, is not reported as good. */
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

void gpu_job_fail(struct device_job *job, int status)
{
    list_remove(&job->link);
    job->next_item = job->n_items;
    job->status = status;
}

void gpu_piece_fail(struct gpu *g, struct device_job *job, int status)
{
    gpu_job_fail(job, status);
    gpu_piece_end(g, job);
}

/* The context is lost, and with it all that was launched. A stream of a lost context answers at
 * once; waiting for it makes sure that nothing writes to a slot which the loop gives to somebody
 * else. */
void gpu_abandon(struct gpu *g)
{
    struct device_job *job;
    struct list *node;

    while ((node = list_pop_front(&g->waiting)) != NULL) {
        job = LIST_ENTRY(node, struct device_job, link);
        gpu_finish(g, job, gpu_refuse_failed(g, job));
    }
    while ((job = job_queue_first(&g->ready)) != NULL) {
        gpu_job_fail(job, gpu_refuse_failed(g, job));
        if (job->pieces == 0)
            gpu_finish(g, job, job->status);
    }
    gpu_rings_abandon(g);
    for (unsigned i = 0; i < 2; i++) {
        struct gpu_stream *s = &g->streams[i];

        if (s->stream)
            (void)cuda.cuStreamSynchronize(s->stream);
        for (; s->n > 0; s->n--, s->oldest = (s->oldest + 1) % GPU_LAUNCHES) {
            job = s->launches[s->oldest].job;
            job->status = gpu_refuse_failed(g, job);
            if (--job->pieces == 0)
                gpu_finish(g, job, job->status);
        }
        s->bytes = 0;
    }
}

/* ---- events ---- */

/* For dumps whose event has not come yet: that of a worker that is dead, or has hung up, is nothing
 * to wait for, and its memory stays allocated until the region is closed behind them. */
static bool worker_seen(const struct device_job *job, uint64_t now_ms)
{
    struct gpu_region *mapping = job->region->mapping;

    if (now_ms >= mapping->seen_ms + GPU_SEEN_MS) {
        mapping->seen_ms = now_ms;
        mapping->seen_alive = worker_alive(&mapping->worker) && !job_deserted(job);
    }
    return mapping->seen_alive;
}

/* A dump waits here, outside every stream, so that an event which never comes holds up nobody else.
 *
 * When a process dies, the driver frees its objects, and an event of it that was never signalled
 * may read as signalled to others. The kernel marks a process as exiting before it closes the
 * driver's files, so: event seen signalled, and after that the worker seen not exiting, means that
 * the event was really signalled. Then its writes are in memory, and a launch made now sees them.
 * No stream waits for the event besides: the worker may have recorded it anew by then, behind work
 * that never ends. */
static bool event_poll(struct gpu *g, struct device_job *job, uint64_t now_ms)
{
    struct gpu_region *mapping = job->region->mapping;
    CUresult r = cuda.cuEventQuery(job->scratch);
    int rc;

    if (r == CUDA_ERROR_NOT_READY && !job_late(job, now_ms) && worker_seen(job, now_ms))
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
    else
        rc = 0;
    if (rc < 0)
        gpu_finish(g, job, rc);
    else
        job_queue_push(&g->ready, job);
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

CUresult gpu_kernel_launch(struct gpu *g, CUstream stream, CUdeviceptr planes, uint32_t n_planes,
                           struct ucm_copy_item *items, uint32_t n_items, uint32_t largest_chunk,
                           uint32_t direction)
{
    uint32_t tiles = ucm_copy_tiles(largest_chunk);
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &tiles, &direction};

    return cuda.cuLaunchKernel(g->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, stream,
                               arguments, NULL);
}

static CUresult launch_kernel(struct gpu *g, CUstream stream, const struct device_job *job,
                              const struct job_piece *piece, struct ucm_copy_item *items,
                              uint32_t direction)
{
    const struct gpu_region *mapping = job->region->mapping;
    uint32_t largest = 0;

    for (uint32_t p = piece->first_plane; p < piece->first_plane + piece->n_planes; p++)
        if (job->region->planes[p].chunk > largest)
            largest = job->region->planes[p].chunk;
    return gpu_kernel_launch(g, stream,
                             mapping->planes + piece->first_plane * sizeof(struct ucm_copy_plane),
                             piece->n_planes, items, piece->n_items, largest, direction);
}

static enum copy_strategy strategy_pick(struct gpu *g, const struct job_piece *piece,
                                        enum ucm_copy_direction direction, uint32_t extents)
{
    const struct costs *c;
    enum copy_strategy pick;

    if (extents == 0)
        return COPY_SM;
    if (g->config.strategy == COPY_DMA || g->config.strategy == COPY_SM)
        return g->config.strategy;
    c = &g->costs.of[direction];
    pick = costs_pick(c, gpu_dma_extents(g), extents, piece->bytes, false);
    /* What the engines do best needs no look at the others; a companion's kernels are others'. */
    if (pick == COPY_SM && (g->turns > 0 || gpu_others_run(g)))
        pick = costs_pick(c, gpu_dma_extents(g), extents, piece->bytes, true);
    return pick;
}

static CUresult launch_piece(struct gpu *g, struct gpu_launch *l, CUstream stream,
                             const struct device_job *job, const struct job_piece *piece,
                             enum ucm_copy_direction direction)
{
    const struct costs *costs = &g->costs.of[direction];
    uint32_t extents = 0;
    CUresult r;

    if (g->config.strategy != COPY_SM)
        extents = gpu_dma_plan(g, job, piece, l->items);
    l->strategy = strategy_pick(g, piece, direction, extents);
    l->cost_ns =
        (uint64_t)(l->strategy == COPY_DMA ? costs_dma_ns(costs, gpu_dma_extents(g), extents)
                                           : costs_kernel_ns(costs, piece->bytes));
    l->begun_ns = uv_hrtime();
    r = l->strategy == COPY_DMA ? gpu_dma_launch(g, stream, direction, extents)
                                : launch_kernel(g, stream, job, piece, l->items, direction);
    if (r == CUDA_SUCCESS) {
        atomic_fetch_add(&g->strategy_bytes[l->strategy], piece->bytes);
        atomic_fetch_add(&g->strategy_launches[l->strategy], 1);
    }
    return r;
}

struct gpu_launch *gpu_launch_next(struct gpu *g, enum ucm_copy_direction direction)
{
    struct gpu_stream *s = &g->streams[direction];

    if (s->n == GPU_LAUNCHES || s->bytes >= GPU_AHEAD_BYTES)
        return NULL;
    return &s->launches[(s->oldest + s->n) % GPU_LAUNCHES];
}

CUresult gpu_launch_follow(struct gpu *g, enum ucm_copy_direction direction, struct gpu_launch *l,
                           struct device_job *job, uint64_t bytes, struct gpu_turn *turn)
{
    struct gpu_stream *s = &g->streams[direction];
    uint64_t from_ns = l->begun_ns;
    CUresult r = cuda.cuEventRecord(l->done, s->stream);

    if (r != CUDA_SUCCESS) {
        (void)cuda.cuStreamSynchronize(s->stream); /* else it runs, and nobody knows until when */
        gpu_fail(g, r, "a copy can't be followed");
        return r;
    }
    l->job = job;
    l->bytes = bytes;
    l->turn = turn;
    if (s->n > 0 && s->due_ns > from_ns)
        from_ns = s->due_ns;
    s->due_ns = l->due_ns = from_ns + l->cost_ns;
    l->told = false;
    s->n++;
    s->bytes += bytes;
    return r;
}

CUresult gpu_launch_piece(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job,
                          const struct job_piece *piece)
{
    struct gpu_launch *l = gpu_launch_next(g, direction);
    CUresult r;

    memcpy(l->items, &job->items[piece->first_item], piece->n_items * sizeof(*l->items));
    r = launch_piece(g, l, g->streams[direction].stream, job, piece, direction);
    return r == CUDA_SUCCESS ? gpu_launch_follow(g, direction, l, job, piece->bytes, NULL) : r;
}

static void launch(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job)
{
    struct job_piece piece;
    CUresult r;

    if (job_next_piece(job, GPU_LAUNCH_BYTES, GPU_LAUNCH_ITEMS, &piece))
        list_remove(&job->link);
    job->pieces++;
    r = gpu_launch_piece(g, direction, job, &piece);
    if (r != CUDA_SUCCESS)
        gpu_piece_fail(g, job, gpu_refuse(g, job, -EIO, r, "a copy can't be launched"));
}

/* Before the first piece: what must hold for all of them. */
static int begin(struct gpu *g, struct device_job *job)
{
    int rc = job_check(job, job_clock_ms());

    if (rc == 0)
        rc = gpu_memory_need(g, job);
    job->begun = rc == 0;
    job->staged = rc == 0 && gpu_ring_pays(g, job);
    return rc;
}

/* Rings without a free slice: the jobs that wait for one let others pass, whose way is free. */
struct passed {
    const struct device_staging *full[GPU_FULL_MAX];
    unsigned rings, jobs;
};

static bool waits(const struct passed *p, const struct device_job *job)
{
    bool full = false;

    for (unsigned i = 0; i < p->rings; i++)
        full |= p->full[i] == job->ring;
    return full && (!job->begun || job->staged); /* what has not begun is judged when it can */
}

static struct device_job *next_to_try(struct gpu *g, struct device_job *job, struct passed *p)
{
    if (!waits(p, job)) {
        if (p->rings == GPU_FULL_MAX)
            return NULL;
        p->full[p->rings++] = job->ring;
    }
    while (job && waits(p, job))
        job = ++p->jobs < GPU_PASSED_MAX ? job_queue_next_of(&g->ready, job) : NULL;
    return job;
}

bool gpu_fill(struct gpu *g, enum ucm_copy_direction direction)
{
    enum device_op op = direction == UCM_COPY_DUMP ? DEVICE_DUMP : DEVICE_LOAD;
    bool moved = gpu_rings_fill(g, direction);
    struct device_job *job = job_queue_first_of(&g->ready, op);
    struct passed passed = {.rings = 0};
    int rc;

    while (job && !atomic_load(&g->failed) && gpu_launch_next(g, direction) && gpu_probe_ready(g)) {
        enum gpu_ring_took took = GPU_RING_RESTS;

        rc = job->begun ? 0 : begin(g, job);
        if (rc == 0 && job_deserted(job))
            rc = job_refuse_deserted(job);
        if (rc < 0) {
            gpu_job_fail(job, rc);
            if (job->pieces == 0)
                gpu_finish(g, job, rc);
        } else if (job->staged) {
            took = gpu_ring_take(g, job);
            if (took == GPU_RING_FULL) {
                job = next_to_try(g, job, &passed);
                continue;
            }
            if (took == GPU_RING_RESTS) /* else it may have failed, and be gone */
                job->staged = false;
        } else {
            launch(g, direction, job);
        }
        moved = true;
        passed = (struct passed){.rings = 0};
        job = job_queue_first_of(&g->ready, op);
    }
    return moved;
}

bool gpu_reap(struct gpu *g, enum ucm_copy_direction direction)
{
    struct gpu_stream *s = &g->streams[direction];
    bool moved = false;

    while (s->n > 0) {
        struct gpu_launch *l = &s->launches[s->oldest];
        struct device_job *job = l->job;
        CUresult r = cuda.cuEventQuery(l->done);

        if (r == CUDA_ERROR_NOT_READY)
            break;
        if (r != CUDA_SUCCESS) {
            gpu_fail(g, r, "a copy failed");
            return true;
        }
        if (l->strategy == COPY_SM && g->config.strategy == COPY_AUTO)
            gpu_kernel_seen(g, direction, l);
        s->done_ns = uv_hrtime();
        s->oldest = (s->oldest + 1) % GPU_LAUNCHES;
        s->n--;
        s->bytes -= l->bytes;
        if (l->turn)
            gpu_ring_launched(g, l->turn);
        else
            gpu_piece_end(g, job);
        moved = true;
    }
    return moved;
}

/* Copies that wait for their turn behind a bus that is busy, or stuck. */
void gpu_expire(struct gpu *g)
{
    uint64_t now_ms = job_clock_ms();
    struct list expired, *node;

    if (now_ms < g->expired_ms + GPU_EXPIRE_MS)
        return;
    g->expired_ms = now_ms;
    list_init(&expired);
    job_queue_expire(&g->ready, now_ms, &expired);
    while ((node = list_pop_front(&expired)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);

        gpu_finish(g, job,
                   job_refuse(job, -ETIMEDOUT, UCM_WIRE_DEADLINE,
                              "the deadline passed before the copy could begin"));
    }
}
