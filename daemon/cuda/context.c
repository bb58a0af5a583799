#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <stdio.h>

extern const unsigned char ucm_copy_fatbin[];

/* ---- failures ---- */

void gpu_fail(struct gpu *g, CUresult r, const char *what)
{
    char text[160];

    if (atomic_load(&g->failed))
        return;
    cuda_error_text(r, text, sizeof(text));
    snprintf(g->why, sizeof(g->why), "%s: %s: %s", g->work.stats.name, what, text);
    atomic_store(&g->failed, true);
    work_wake(&g->work);
}

/* After these errors a context fails every call. */
static bool context_lost(CUresult r)
{
    switch (r) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_DEINITIALIZED:
        return true;
    default:
        return false;
    }
}

int gpu_refuse(struct gpu *g, struct device_job *job, int status, CUresult r, const char *what)
{
    char text[160];

    cuda_error_text(r, text, sizeof(text));
    if (context_lost(r)) {
        gpu_fail(g, r, what);
        status = -EIO;
    }
    return job_refuse(job, status, UCM_WIRE_DEVICE, "%s: %s", what, text);
}

int gpu_upload(struct gpu *g, struct device_job *job, CUdeviceptr *out, const void *data,
               size_t bytes, const char *without)
{
    CUresult r = cuda.cuMemAlloc(out, bytes);

    /* Not cuMemcpyHtoD: it may return before the bytes are there, and no stream of ours waits for
     * the legacy stream. */
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemcpyHtoDAsync(*out, data, bytes, g->uploads);
    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamSynchronize(g->uploads);
    return r == CUDA_SUCCESS ? 0 : gpu_refuse(g, job, -EIO, r, without);
}

int gpu_refuse_failed(struct gpu *g, struct device_job *job)
{
    return job_refuse(job, -EIO, UCM_WIRE_DEVICE, "the GPU failed, the daemon must restart: %s",
                      g->why);
}

/* ---- the context ---- */

static CUresult streams_create(struct gpu *g)
{
    int least, greatest;
    CUresult r = cuda.cuCtxGetStreamPriorityRange(&least, &greatest);
    const struct {
        CUstream *stream;
        int priority;
    } streams[] = {{&g->streams[UCM_COPY_LOAD].stream, greatest},
                   {&g->streams[UCM_COPY_DUMP].stream, least},
                   {&g->streams[GPU_EXPRESS].stream, greatest},
                   {&g->uploads, greatest},
                   {&g->probe.stream, greatest}};

    for (unsigned i = 0; r == CUDA_SUCCESS && i < 5; i++)
        r = cuda.cuStreamCreateWithPriority(streams[i].stream, CU_STREAM_NON_BLOCKING,
                                            streams[i].priority);
    return r;
}

static CUresult launches_create(struct gpu *g)
{
    size_t n = GPU_STREAMS * GPU_LAUNCHES * GPU_LAUNCH_ITEMS;
    CUresult r = cuda.cuMemHostAlloc((void **)&g->items, n * sizeof(*g->items),
                                     CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);

    for (unsigned i = 0; r == CUDA_SUCCESS && i < GPU_STREAMS * GPU_LAUNCHES; i++) {
        struct gpu_launch *l = &g->streams[i / GPU_LAUNCHES].launches[i % GPU_LAUNCHES];

        l->items = g->items + i * GPU_LAUNCH_ITEMS;
        r = cuda.cuEventCreate(&l->done, CU_EVENT_DISABLE_TIMING);
    }
    return r == CUDA_SUCCESS ? cuda.cuEventCreate(&g->probe.done, CU_EVENT_DISABLE_TIMING) : r;
}

static void event_destroy(CUevent event)
{
    if (event)
        (void)cuda.cuEventDestroy(event);
}

static void stream_destroy(CUstream stream)
{
    if (stream)
        (void)cuda.cuStreamDestroy(stream);
}

/* Undoes gpu_context_open, whole or in part. */
void gpu_context_close(struct gpu *g)
{
    for (unsigned i = 0; i < GPU_STREAMS; i++) {
        for (unsigned j = 0; j < GPU_LAUNCHES; j++)
            event_destroy(g->streams[i].launches[j].done);
        stream_destroy(g->streams[i].stream);
        g->streams[i] = (struct gpu_stream){0};
    }
    event_destroy(g->probe.done);
    stream_destroy(g->probe.stream);
    stream_destroy(g->uploads);
    stream_destroy(g->shifts);
    if (g->items)
        (void)cuda.cuMemFreeHost(g->items);
    if (g->module)
        (void)cuda.cuModuleUnload(g->module);
    if (g->convert_module)
        (void)cuda.cuModuleUnload(g->convert_module);
    if (g->tables)
        (void)cuda.cuMemFreeHost(g->tables);
    if (g->rope_module)
        (void)cuda.cuModuleUnload(g->rope_module);
    (void)cuda.cuCtxSetCurrent(NULL);
    (void)cuda.cuDevicePrimaryCtxRelease(g->dev);
    g->probe = (struct gpu_probe){0};
    g->uploads = g->shifts = NULL;
    g->items = NULL;
    g->tables = NULL;
    g->module = g->convert_module = g->rope_module = NULL;
    g->context = NULL;
}

int gpu_context_open(struct gpu *g, struct device_job *job)
{
    struct nvml before, after;
    CUresult r;

    nvml_read(&before, g->work.stats.uuid);
    r = cuda.cuDeviceGet(&g->dev, g->ordinal);
    if (r == CUDA_SUCCESS)
        r = cuda.cuDevicePrimaryCtxRetain(&g->context, g->dev);
    if (r != CUDA_SUCCESS) {
        g->context = NULL;
        return gpu_refuse(g, job, -EIO, r, "the GPU gives no context");
    }
    r = cuda.cuCtxSetCurrent(g->context);
    if (r == CUDA_SUCCESS)
        r = cuda.cuModuleLoadData(&g->module, ucm_copy_fatbin);
    if (r == CUDA_SUCCESS)
        r = cuda.cuModuleGetFunction(&g->kernel, g->module, UCM_COPY_KERNEL);
    if (r == CUDA_SUCCESS)
        r = streams_create(g);
    if (r == CUDA_SUCCESS)
        r = launches_create(g);
    if (r != CUDA_SUCCESS) {
        gpu_context_close(g);
        return gpu_refuse(g, job, -EIO, r, "the GPU can't be prepared for copies");
    }
    nvml_read(&after, g->work.stats.uuid);
    /* Roughly: other processes may have taken or freed memory meanwhile. */
    if (before.used_bytes != 0 && after.used_bytes > before.used_bytes)
        atomic_store(&g->context_bytes, after.used_bytes - before.used_bytes);
    return 0;
}

CUresult gpu_kernel_launch(struct gpu *g, CUstream stream, CUdeviceptr planes, uint32_t n_planes,
                           struct ucm_copy_item *items, uint32_t n_items, uint32_t largest_fragment,
                           uint32_t direction)
{
    uint32_t tiles = ucm_copy_tiles(largest_fragment);
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &tiles, &direction};

    return cuda.cuLaunchKernel(g->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, stream,
                               arguments, NULL);
}
