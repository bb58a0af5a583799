/* A copy engine serves what it has been given one after the other, whatever streams and priorities
 * it comes from: a small load that comes while others keep the bus busy waits for their launches, 8
 * MiB at most. A kernel in another stream waits for none of that. Both share the bus meanwhile
 * (docs/design/fairness.md has the figures). So the load of a tenant that comes back goes that way
 * if it is small, while nobody else's kernels run. */
#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <string.h>

static uint64_t load_cost(const struct device_job *job)
{
    uint64_t cost;

    (void)job_item_bytes(job, &cost);
    return job->n_items * cost;
}

bool gpu_express_takes(struct gpu *g, const struct device_job *job)
{
    const struct gpu_stream *s = &g->streams[GPU_EXPRESS];
    const struct device_region *r = job->region;

    if (job->op != DEVICE_LOAD || g->config.strategy != COPY_AUTO || !g->contended[UCM_COPY_LOAD] ||
        g->streams[UCM_COPY_LOAD].n == 0 || g->entries > 0 || s->n == GPU_LAUNCHES)
        return false;
    if (job->begun || job->converts || job->shifts || job->n_items == 0 ||
        job->n_items > GPU_LAUNCH_ITEMS || job->n_planes == 0 || job->first_plane >= r->n_planes ||
        job->n_planes > r->n_planes - job->first_plane)
        return false;
    return load_cost(job) <= GPU_EXPRESS_BYTES - s->cost &&
           fair_queue_bursts(job->queue, &job->who) && !gpu_others_run(g);
}

void gpu_express_launch(struct gpu *g, struct device_job *job)
{
    struct gpu_stream *s = &g->streams[GPU_EXPRESS];
    struct gpu_launch *l = &s->launches[(s->oldest + s->n) % GPU_LAUNCHES];
    CUresult r;

    (void)job_next_piece(job, GPU_EXPRESS_BYTES, GPU_LAUNCH_ITEMS, &l->piece); /* it is the last */
    list_remove(&job->link);
    job->begun = true;
    fair_queue_charge(job->queue, &job->who, l->piece.cost, &job->got);
    job->pieces++;
    memcpy(l->items, job->items, l->piece.n_items * sizeof(*l->items));
    l->strategy = COPY_SM;
    l->cost_ns = (uint64_t)costs_kernel_ns(&g->costs.of[UCM_COPY_LOAD], l->piece.bytes);
    l->begun_ns = uv_hrtime();
    r = gpu_piece_kernel(g, GPU_EXPRESS, l, job, &l->piece);
    if (r == CUDA_SUCCESS)
        r = gpu_launch_follow(g, GPU_EXPRESS, l, job, l->piece.cost, NULL);
    if (r != CUDA_SUCCESS) {
        gpu_piece_fail(g, job, gpu_refuse(g, job, -EIO, r, "a copy can't be launched"));
        return;
    }
    atomic_fetch_add(&g->strategy_bytes[COPY_SM], l->piece.bytes);
    atomic_fetch_add(&g->strategy_launches[COPY_SM], 1);
}
