/* The witnesses of busy.h, on a GPU. */
#include "daemon/device/gpu.h"

#define GPU_SEEN_BYTES (1u << 20) /* shorter launches tell nothing */

CUresult gpu_probe_open(struct gpu *g)
{
    int least, greatest;
    CUresult r = cuda.cuCtxGetStreamPriorityRange(&least, &greatest);

    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamCreateWithPriority(&g->probe.stream, CU_STREAM_NON_BLOCKING, greatest);
    if (r == CUDA_SUCCESS)
        r = cuda.cuEventCreate(&g->probe.done, CU_EVENT_DISABLE_TIMING);
    return r;
}

void gpu_probe_close(struct gpu *g)
{
    if (g->probe.done)
        (void)cuda.cuEventDestroy(g->probe.done);
    if (g->probe.stream)
        (void)cuda.cuStreamDestroy(g->probe.stream);
    g->probe = (struct gpu_probe){0};
}

/* One kernel that copies nothing, beside whatever DMA is under way. False: it was not done in time,
 * or could not be asked; it may still run then, and the next one is not launched before it has
 * ended. */
static bool probe_is_quick(struct gpu *g)
{
    uint64_t begin_ns;
    CUresult r;

    if (g->probe.launched && cuda.cuEventQuery(g->probe.done) != CUDA_SUCCESS)
        return false;
    begin_ns = uv_hrtime();
    if (gpu_kernel_launch(g, g->probe.stream, 0, 0, NULL, 0, 0, UCM_COPY_LOAD) != CUDA_SUCCESS ||
        cuda.cuEventRecord(g->probe.done, g->probe.stream) != CUDA_SUCCESS)
        return false;
    g->probe.launched = true;
    do
        r = cuda.cuEventQuery(g->probe.done);
    while (r == CUDA_ERROR_NOT_READY && uv_hrtime() - begin_ns < BUSY_PROBE_NS);
    return r == CUDA_SUCCESS;
}

static bool probe_finds_others(struct gpu *g)
{
    for (unsigned i = 0; i < BUSY_PROBES; i++)
        if (!probe_is_quick(g))
            return true;
    return false;
}

static unsigned kernels_under_way(const struct gpu *g)
{
    unsigned n = 0;

    for (unsigned d = 0; d < 2; d++)
        for (uint32_t i = 0; i < g->streams[d].n; i++)
            n += g->streams[d].launches[(g->streams[d].oldest + i) % GPU_LAUNCHES].strategy ==
                 COPY_SM;
    return n;
}

/* When a probe is due and our own kernels are in its way, the engines take over until they have
 * ended. */
bool gpu_others_run(struct gpu *g)
{
    uint64_t now_ns = uv_hrtime();

    if (!busy_due(&g->busy, now_ns))
        return g->busy.others;
    if (!busy_quiet(&g->busy, now_ns, kernels_under_way(g)))
        return true;
    busy_probed(&g->busy, now_ns, probe_finds_others(g));
    return g->busy.others;
}

void gpu_kernel_seen(struct gpu *g, enum ucm_copy_direction direction, const struct gpu_launch *l)
{
    const struct costs *c = &g->costs.of[direction];
    uint64_t last_ns = g->streams[direction].done_ns;
    uint64_t begun_ns = l->begun_ns > last_ns ? l->begun_ns : last_ns, now_ns = uv_hrtime();

    busy_launch(&g->busy, now_ns, (double)(now_ns - begun_ns),
                l->bytes < GPU_SEEN_BYTES ? 0
                                          : c->kernel_ns + (double)l->bytes * c->kernel_byte_ns);
}
