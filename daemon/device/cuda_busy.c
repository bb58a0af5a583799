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

/* One kernel that copies nothing. False: it was not done in time, or could not be asked; it may
 * still run then, and the next one is not launched before it has ended. */
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

/* The first kernel after a while may take longer: it does not count. */
static bool probe_finds_others(struct gpu *g)
{
    unsigned quick = 0;

    (void)probe_is_quick(g);
    while (quick < BUSY_PROBES && probe_is_quick(g))
        quick++;
    return quick < BUSY_PROBES;
}

bool gpu_others_run(struct gpu *g)
{
    uint64_t now_ns = uv_hrtime();

    if (busy_due(&g->busy, now_ns))
        busy_judge(&g->busy, now_ns, nvml_busy(&g->nvml) && probe_finds_others(g));
    return g->busy.others;
}

void gpu_kernel_seen(struct gpu *g, enum ucm_copy_direction direction, const struct gpu_launch *l)
{
    const struct costs *c = &g->costs.of[direction];
    uint64_t last_ns = g->streams[direction].done_ns;
    uint64_t begun_ns = l->begun_ns > last_ns ? l->begun_ns : last_ns, now_ns = uv_hrtime();

    if (l->bytes >= GPU_SEEN_BYTES)
        busy_launch(&g->busy, now_ns, (double)(now_ns - begun_ns),
                    c->kernel_ns + (double)l->bytes * c->kernel_byte_ns);
}
