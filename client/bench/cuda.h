/* The CUDA driver's stable binary interface, as cuda.h declares it, found while the program runs.
 * Shared by the files gpu*.c only. */
#ifndef UCM_BENCH_CUDA_H
#define UCM_BENCH_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long cuda_address;

/* X(member, symbol, parameters) */
#define BENCH_CUDA(X)                                                                              \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(device_count, "cuDeviceGetCount", (int *count))                                              \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                       \
    X(device_uuid, "cuDeviceGetUuid_v2", (uint8_t uuid[16], int device))                           \
    X(context_retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                    \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                               \
    X(context_set, "cuCtxSetCurrent", (void *context))                                             \
    X(context_synchronize, "cuCtxSynchronize", (void))                                             \
    X(allocate, "cuMemAlloc_v2", (cuda_address * memory, size_t bytes))                            \
    X(release, "cuMemFree_v2", (cuda_address memory))                                              \
    X(host_allocate, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned flags))              \
    X(host_release, "cuMemFreeHost", (void *memory))                                               \
    X(ipc_handle, "cuIpcGetMemHandle", (uint8_t handle[64], cuda_address memory))                  \
    X(to_device, "cuMemcpyHtoD_v2", (cuda_address to, const void *from, size_t bytes))             \
    X(to_host, "cuMemcpyDtoH_v2", (void *to, cuda_address from, size_t bytes))                     \
    X(to_device_async, "cuMemcpyHtoDAsync_v2",                                                     \
      (cuda_address to, const void *from, size_t bytes, void *stream))                             \
    X(to_host_async, "cuMemcpyDtoHAsync_v2",                                                       \
      (void *to, cuda_address from, size_t bytes, void *stream))                                   \
    X(set_async, "cuMemsetD8Async",                                                                \
      (cuda_address to, unsigned char byte, size_t bytes, void *stream))                           \
    X(module_load, "cuModuleLoadData", (void **module, const void *image))                         \
    X(module_unload, "cuModuleUnload", (void *module))                                             \
    X(module_function, "cuModuleGetFunction", (void **function, void *module, const char *name))   \
    X(launch, "cuLaunchKernel",                                                                    \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,        \
       unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,        \
       void **extra))                                                                              \
    X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                            \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                        \
    X(stream_synchronize, "cuStreamSynchronize", (void *stream))                                   \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                               \
    X(event_destroy, "cuEventDestroy_v2", (void *event))                                           \
    X(event_record, "cuEventRecord", (void *event, void *stream))                                  \
    X(event_synchronize, "cuEventSynchronize", (void *event))                                      \
    X(error_name, "cuGetErrorName", (int error, const char **name))

struct bench_cuda {
#define X(member, symbol, parameters) int(*member) parameters;
    BENCH_CUDA(X)
#undef X
};

extern struct bench_cuda bench_cuda; /* filled by the first gpu_open */

#define BENCH_STREAM_NON_BLOCKING 1u
#define BENCH_EVENT_NO_TIMING 2u

struct gpu;
/* 0, or -1 with g->why set to what the driver says of `what`. */
int gpu_check(struct gpu *g, const char *what, int error);

#endif
