/* Pieces become launches, straight between slots and pages, and jobs end with them. */
#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <string.h>

/* ---- jobs that end ---- */

void gpu_finish(struct gpu *g, struct device_job *job, int status)
{
    gpu_event_close(job);
    work_finish(&g->work, job, status);
}

int gpu_refuse_dying(struct device_job *job)
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
        job->status = gpu_refuse_dying(job);
    if (job->status == 0 && job->op == DEVICE_DUMP && peer_hung_up(job->region->peer_fd))
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

/* ---- launches ---- */

uint64_t gpu_launch_bytes(const struct gpu *g, enum ucm_copy_direction direction)
{
    if (g->beside.now)
        return GPU_BESIDE_BYTES;
    return g->contended[direction] ? GPU_FAIR_BYTES : GPU_LAUNCH_BYTES;
}

static enum copy_strategy strategy_pick(struct gpu *g, const struct job_piece *piece,
                                        enum ucm_copy_direction direction, uint32_t extents)
{
    const struct costs *c = &g->costs.of[direction];
    enum copy_strategy pick;

    if (extents == 0) /* the engines can't; of encoded slots never */
        return COPY_SM;
    if (g->config.strategy == COPY_DMA || g->config.strategy == COPY_SM)
        return g->config.strategy;
    pick = costs_pick(c, g->dma.extents, extents, piece->bytes, false);
    /* What the engines do best does not depend on others. A copy agent's kernels count as
     * others'. */
    if (pick == COPY_SM && (g->entries > 0 || gpu_others_run(g)))
        pick = costs_pick(c, g->dma.extents, extents, piece->bytes, true);
    return pick;
}

CUresult gpu_piece_kernel(struct gpu *g, unsigned stream, struct gpu_launch *l,
                          const struct device_job *job, const struct job_piece *piece)
{
    const struct ucm_copy_plane *planes = &job->region->planes[piece->first_plane];
    const struct gpu_region *mapping = job->region->mapping;

    return gpu_kernel_launch(
        g, g->streams[stream].stream, mapping->planes + piece->first_plane * sizeof(*planes),
        piece->n_planes, l->items, piece->n_items,
        ucm_copy_largest_fragment(planes, piece->n_planes), job_direction(job));
}

/* Where the engines can't, or are slower. */
static CUresult launch_kernels(struct gpu *g, struct gpu_launch *l, const struct device_job *job,
                               const struct job_piece *piece, enum ucm_copy_direction direction,
                               bool shifted)
{
    if (job->converts)
        return gpu_convert_launch(g, job, piece, l->items);
    if (shifted)
        return gpu_rope_launch(g, job, piece, l);
    return gpu_piece_kernel(g, direction, l, job, piece);
}

static CUresult launch_piece(struct gpu *g, struct gpu_launch *l, const struct device_job *job,
                             const struct job_piece *piece, enum ucm_copy_direction direction)
{
    const struct costs *costs = &g->costs.of[direction];
    bool shifted = gpu_rope_shifts(job, piece);
    uint32_t extents = 0;
    double cost_ns;
    CUresult r;

    if (g->config.strategy != COPY_SM && !job->converts)
        extents = gpu_dma_plan(g, job, piece, l->items);
    l->strategy = strategy_pick(g, piece, direction, extents);
    cost_ns = l->strategy == COPY_DMA ? costs_dma_ns(costs, g->dma.extents, extents)
                                      : costs_kernel_ns(costs, piece->bytes);
    l->cost_ns = (uint64_t)cost_ns;
    l->begun_ns = uv_hrtime();
    if (l->strategy == COPY_DMA)
        r = gpu_dma_launch(g, direction, extents);
    else
        r = launch_kernels(g, l, job, piece, direction, shifted);
    if (r == CUDA_SUCCESS && shifted && (job->converts || l->strategy == COPY_DMA))
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
                           struct device_job *job, uint64_t cost, struct gpu_staging_entry *entry)
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
    l->entry = entry;
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

int gpu_job_check(struct gpu *g, struct device_job *job)
{
    int rc = job_check(job, job_clock_ms());

    return rc == 0 ? gpu_memory_need(g, job) : rc;
}
