#include "tests/bench/ucm_bench_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* The driver's stable binary interface, as cuda.h declares it. */
struct cuda {
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*device_uuid)(uint8_t uuid[16], int device);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_set)(void *context);
    int (*context_synchronize)(void);
    int (*allocate)(unsigned long long *memory, size_t bytes);
    int (*release)(unsigned long long memory);
    int (*ipc_handle)(uint8_t handle[64], unsigned long long memory);
    int (*to_device)(unsigned long long to, const void *from, size_t bytes);
    int (*to_host)(void *to, unsigned long long from, size_t bytes);
    int (*error_name)(int error, const char **name);
};

static struct cuda cuda; /* filled once in a process, by the first gpu_open */

static int load_driver(struct gpu *g)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"cuInit", &cuda.init},
        {"cuDeviceGet", &cuda.device_get},
        {"cuDeviceGetUuid_v2", &cuda.device_uuid},
        {"cuDevicePrimaryCtxRetain", &cuda.context_retain},
        {"cuDevicePrimaryCtxRelease_v2", &cuda.context_release},
        {"cuCtxSetCurrent", &cuda.context_set},
        {"cuCtxSynchronize", &cuda.context_synchronize},
        {"cuMemAlloc_v2", &cuda.allocate},
        {"cuMemFree_v2", &cuda.release},
        {"cuIpcGetMemHandle", &cuda.ipc_handle},
        {"cuMemcpyHtoD_v2", &cuda.to_device},
        {"cuMemcpyDtoH_v2", &cuda.to_host},
        {"cuGetErrorName", &cuda.error_name},
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

static int check(struct gpu *g, const char *what, int error)
{
    const char *name = NULL;

    if (error == 0)
        return 0;
    if (cuda.error_name(error, &name) != 0 || name == NULL)
        name = "an unknown error";
    snprintf(g->why, sizeof g->why, "%s: %s", what, name);
    return -1;
}

int gpu_open(struct gpu *g, size_t bytes)
{
    void *context;

    memset(g, 0, sizeof *g);
    if (load_driver(g) < 0)
        return -1;
    if (check(g, "cuInit", cuda.init(0)) < 0 ||
        check(g, "cuDeviceGet", cuda.device_get(&g->device, 0)) < 0 ||
        check(g, "cuDeviceGetUuid", cuda.device_uuid(g->uuid, g->device)) < 0 ||
        check(g, "cuDevicePrimaryCtxRetain", cuda.context_retain(&context, g->device)) < 0)
        goto err_after_load;
    if (check(g, "cuCtxSetCurrent", cuda.context_set(context)) < 0 ||
        check(g, "cuMemAlloc", cuda.allocate(&g->memory, bytes)) < 0)
        goto err_after_context;
    if (check(g, "cuIpcGetMemHandle", cuda.ipc_handle(g->ipc, g->memory)) == 0)
        return 0;
    cuda.release(g->memory);
err_after_context:
    cuda.context_release(g->device);
err_after_load:
    dlclose(g->library);
    g->library = NULL;
    return -1;
}

void gpu_close(struct gpu *g)
{
    if (g->library == NULL)
        return;
    cuda.release(g->memory);
    cuda.context_release(g->device);
    dlclose(g->library);
    g->library = NULL;
}

/* The copy from pageable memory may return before its last bytes have arrived. */
int gpu_write(struct gpu *g, const void *from, size_t bytes)
{
    if (check(g, "cuMemcpyHtoD", cuda.to_device(g->memory, from, bytes)) < 0)
        return -1;
    return check(g, "cuCtxSynchronize", cuda.context_synchronize());
}

int gpu_read(struct gpu *g, void *to, size_t bytes)
{
    return check(g, "cuMemcpyDtoH", cuda.to_host(to, g->memory, bytes));
}
