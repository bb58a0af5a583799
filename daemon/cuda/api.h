/* The CUDA driver's functions, loaded from libcuda.so.1 at run time: one binary serves hosts with
 * and without a GPU. Inside this module only. Threads: loaded once on the event loop, constant
 * afterwards. */
#ifndef UCMD_CUDA_API_H
#define UCMD_CUDA_API_H

#include <cuda.h>
#include <cudaTypedefs.h>

#include <stdint.h>

/* X(name, version): the version of the function's interface, as in PFN_name_v<version>. */
#define CUDA_API(X)                                                                                \
    X(cuInit, 2000)                                                                                \
    X(cuDriverGetVersion, 2020)                                                                    \
    X(cuGetErrorName, 6000)                                                                        \
    X(cuGetErrorString, 6000)                                                                      \
    X(cuDeviceGetCount, 2000)                                                                      \
    X(cuDeviceGet, 2000)                                                                           \
    X(cuDeviceGetName, 2000)                                                                       \
    X(cuDeviceGetUuid, 11040)                                                                      \
    X(cuDeviceGetAttribute, 2000)                                                                  \
    X(cuDevicePrimaryCtxRetain, 7000)                                                              \
    X(cuDevicePrimaryCtxRelease, 11000)                                                            \
    X(cuCtxSetCurrent, 4000)                                                                       \
    X(cuCtxGetStreamPriorityRange, 5050)                                                           \
    X(cuModuleLoadData, 2000)                                                                      \
    X(cuModuleUnload, 2000)                                                                        \
    X(cuModuleGetFunction, 2000)                                                                   \
    X(cuLaunchKernel, 4000)                                                                        \
    X(cuStreamCreateWithPriority, 5050)                                                            \
    X(cuStreamDestroy, 4000)                                                                       \
    X(cuStreamSynchronize, 2000)                                                                   \
    X(cuEventCreate, 2000)                                                                         \
    X(cuEventDestroy, 4000)                                                                        \
    X(cuEventQuery, 2000)                                                                          \
    X(cuEventRecord, 2000)                                                                         \
    X(cuStreamWaitEvent, 3020)                                                                     \
    X(cuMemAlloc, 3020)                                                                            \
    X(cuMemGetInfo, 3020)                                                                          \
    X(cuMemsetD8Async, 3020)                                                                       \
    X(cuMemFree, 3020)                                                                             \
    X(cuMemcpyHtoDAsync, 3020)                                                                     \
    X(cuMemcpyDtoHAsync, 3020)                                                                     \
    X(cuMemcpy2DAsync, 3020)                                                                       \
    X(cuMemHostAlloc, 2020)                                                                        \
    X(cuMemFreeHost, 2000)                                                                         \
    X(cuMemHostRegister, 6050)                                                                     \
    X(cuMemHostUnregister, 4000)                                                                   \
    X(cuMemHostGetDevicePointer, 3020)                                                             \
    X(cuMemGetAddressRange, 3020)                                                                  \
    X(cuPointerGetAttribute, 4000)                                                                 \
    X(cuIpcGetMemHandle, 4010)                                                                     \
    X(cuIpcOpenMemHandle, 11000)                                                                   \
    X(cuIpcCloseMemHandle, 4010)                                                                   \
    X(cuIpcOpenEventHandle, 4010)                                                                  \
    X(cuMemImportFromShareableHandle, 10020)                                                       \
    X(cuMemGetAllocationPropertiesFromHandle, 10020)                                               \
    X(cuMemGetAllocationGranularity, 10020)                                                        \
    X(cuMemAddressReserve, 10020)                                                                  \
    X(cuMemAddressFree, 10020)                                                                     \
    X(cuMemMap, 10020)                                                                             \
    X(cuMemUnmap, 10020)                                                                           \
    X(cuMemSetAccess, 10020)                                                                       \
    X(cuMemRelease, 10020)

/* What newer drivers have; NULL in others. */
#define CUDA_API_OPTIONAL(X)                                                                       \
    X(cuMemcpyBatchAsync, 13000)                                                                   \
    X(cuMemcpy3DBatchAsync, 13000)

struct cuda_api {
#define X(name, version) PFN_##name##_v##version name;
    CUDA_API(X)
    CUDA_API_OPTIONAL(X)
#undef X
};

/* Filled by cuda_load. */
extern struct cuda_api cuda;

/* "CUDA_ERROR_X (sentence)" into text. */
void cuda_error_text(CUresult r, char *text, size_t size);

/* From the driver's management library, which may be missing. Takes milliseconds; any thread. */
struct nvml {
    uint64_t used_bytes; /* of one GPU's memory, by all processes; 0: not known */
    char driver[80];     /* its version, "" when not known */
};
void nvml_read(struct nvml *out, const uint8_t uuid[16]);

#endif
