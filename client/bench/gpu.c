#include "client/bench/gpu.h"

#include "client/bench/cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct bench_cuda bench_cuda;

static int load_driver(struct gpu *g)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
#define X(member, symbol, parameters) {symbol, &bench_cuda.member},
        BENCH_CUDA(X)
#undef X
    };

    g->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (g->library == NULL) {
        snprintf(g->why, sizeof g->why, "%s", dlerror());
        return -1;
    }
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(g->library, symbols[i].name);

        if (found == NULL) {
            snprintf(g->why, sizeof g->why, "the CUDA driver has no %s", symbols[i].name);
            dlclose(g->library);
            g->library = NULL;
            return -1;
        }
        memcpy(symbols[i].to, &found, sizeof found);
    }
    return 0;
}

int gpu_check(struct gpu *g, const char *what, int error)
{
    const char *name = NULL;

    if (error == 0)
        return 0;
    if (bench_cuda.error_name(error, &name) != 0 || name == NULL)
        name = "an unknown error";
    snprintf(g->why, sizeof g->why, "%s: %s", what, name);
    return -1;
}

int gpu_open(struct gpu *g, int ordinal, size_t bytes)
{
    memset(g, 0, sizeof *g);
    if (load_driver(g) < 0)
        return -1;
    if (gpu_check(g, "cuInit", bench_cuda.init(0)) < 0 ||
        gpu_check(g, "cuDeviceGet", bench_cuda.device_get(&g->device, ordinal)) < 0 ||
        gpu_check(g, "cuDeviceGetUuid", bench_cuda.device_uuid(g->uuid, g->device)) < 0 ||
        gpu_check(g, "cuDevicePrimaryCtxRetain",
                  bench_cuda.context_retain(&g->context, g->device)) < 0)
        goto err_after_load;
    if (gpu_check(g, "cuCtxSetCurrent", bench_cuda.context_set(g->context)) < 0 ||
        gpu_check(g, "cuMemAlloc", bench_cuda.allocate(&g->memory, bytes)) < 0)
        goto err_after_context;
    if (gpu_check(g, "cuIpcGetMemHandle", bench_cuda.ipc_handle(g->ipc, g->memory)) == 0)
        return 0;
    bench_cuda.release(g->memory);
err_after_context:
    bench_cuda.context_release(g->device);
err_after_load:
    dlclose(g->library);
    g->library = NULL;
    return -1;
}

void gpu_close(struct gpu *g)
{
    if (g->library == NULL)
        return;
    bench_cuda.release(g->memory);
    bench_cuda.context_release(g->device);
    dlclose(g->library);
    g->library = NULL;
}

/* The copy from pageable memory may return before its last bytes have arrived. */
int gpu_write(struct gpu *g, const void *from, size_t bytes)
{
    if (gpu_check(g, "cuMemcpyHtoD", bench_cuda.to_device(g->memory, from, bytes)) < 0)
        return -1;
    return gpu_check(g, "cuCtxSynchronize", bench_cuda.context_synchronize());
}

int gpu_read(struct gpu *g, void *to, size_t bytes)
{
    return gpu_check(g, "cuMemcpyDtoH", bench_cuda.to_host(to, g->memory, bytes));
}

/* In a stream of its own: those of the bench may wait for a load. */
static int prove(struct gpu *g, cuda_address at, const uint8_t *nonce, void *stream)
{
    int r = nonce ? bench_cuda.to_host_async(g->kept, at, sizeof g->kept, stream) : 0;

    if (r == 0)
        r = bench_cuda.to_device_async(at, nonce ? nonce : g->kept, sizeof g->kept, stream);
    return r == 0 ? bench_cuda.stream_synchronize(stream) : r;
}

int gpu_prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    struct gpu *g = ctx;
    void *stream;
    int r = bench_cuda.context_set(g->context);

    if (r == 0)
        r = bench_cuda.stream_create(&stream, BENCH_STREAM_NON_BLOCKING);
    if (r != 0)
        return r;
    r = prove(g, g->memory + offset, nonce, stream);
    (void)bench_cuda.stream_destroy(stream);
    return r;
}

int gpu_current(struct gpu *g)
{
    return gpu_check(g, "cuCtxSetCurrent", bench_cuda.context_set(g->context));
}

int gpu_count(void)
{
    int n = 0;

    return bench_cuda.device_count(&n) == 0 ? n : 0;
}
