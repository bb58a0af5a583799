/* The fake driver's memory, devices and contexts. */
#include "tests/unit/cuda/fake_cuda.h"

#include "daemon/cuda/api.h"
#include "kernels/copy.h"
#include "tests/runner/bytes.h"
#include "tests/unit/cuda/fake_cuda_inside.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct memory {
    struct memory *next;
    uint8_t *base;
    size_t size;
    int ordinal;
    unsigned opened;
    bool freed;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct memory *memories; /* under the mutex */
static atomic_uint host_memories;
static _Thread_local int current; /* ordinal */

void fake_cuda_uuid(int ordinal, uint8_t uuid[16])
{
    memset(uuid, 0x20 + ordinal, 16);
}

unsigned fake_cuda_left(void)
{
    unsigned n = fake_cuda_objects + host_memories;

    pthread_mutex_lock(&mutex);
    for (struct memory *m = memories; m; m = m->next)
        n++;
    pthread_mutex_unlock(&mutex);
    return n;
}

/* ---- memory ---- */

static struct memory *memory_at(uint64_t address)
{
    struct memory *m = memories;

    while (m && address - (uint64_t)(uintptr_t)m->base >= m->size)
        m = m->next;
    return m;
}

static struct memory *memory_found(uint64_t address)
{
    struct memory *m;

    pthread_mutex_lock(&mutex);
    m = memory_at(address);
    pthread_mutex_unlock(&mutex);
    return m;
}

CUdeviceptr fake_cuda_alloc(int ordinal, size_t bytes)
{
    struct memory *m = calloc(1, sizeof(*m));

    if (!m)
        abort();
    m->base = bytes_pages(bytes);
    m->size = bytes;
    m->ordinal = ordinal;
    pthread_mutex_lock(&mutex);
    m->next = memories;
    memories = m;
    pthread_mutex_unlock(&mutex);
    return (CUdeviceptr)(uintptr_t)m->base;
}

CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
    *out = fake_cuda_alloc(current, bytes);
    return CUDA_SUCCESS;
}

static void memory_release(struct memory *m)
{
    struct memory **at = &memories;

    if (!m->freed || m->opened > 0)
        return;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free(m->base);
    free(m);
}

CUresult cuMemFree(CUdeviceptr address)
{
    struct memory *m;

    pthread_mutex_lock(&mutex);
    m = memory_at(address);
    if (m) {
        m->freed = true;
        memory_release(m);
    }
    pthread_mutex_unlock(&mutex);
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    struct memory *m = memory_found(address);

    if (m && base)
        *base = (CUdeviceptr)(uintptr_t)m->base;
    if (m && size)
        *size = m->size;
    return m ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address)
{
    struct memory *m = memory_found(address);

    if (m && attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)out = m->ordinal;
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Fields at the places where handles of driver 580 have them: the size, the block's 4 KiB pages,
 * and the memory's offset in it, 0. */
static void handle_sizes(uint8_t *handle, uint64_t size)
{
    uint32_t pages = (uint32_t)((size + 4095) / 4096);

    if (fake_cuda.handles_unlike)
        return;
    memcpy(handle + 16, &size, sizeof(size));
    memcpy(handle + 24, &pages, sizeof(pages));
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    struct memory *m = memory_found(address);

    if (!m)
        return CUDA_ERROR_INVALID_VALUE;
    fake_cuda_handle_fill((uint8_t *)handle, FAKE_HANDLE_MEMORY, m->base);
    handle_sizes((uint8_t *)handle, m->size);
    return CUDA_SUCCESS;
}

uint8_t *fake_cuda_memory_of(const uint8_t handle[64])
{
    uint8_t *base = fake_cuda_handle_of(handle, FAKE_HANDLE_MEMORY);
    struct memory *m = base ? memory_found((uint64_t)(uintptr_t)base) : NULL;

    return m && !m->freed ? base : NULL;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    void *base = fake_cuda_handle_of(&handle, FAKE_HANDLE_MEMORY);
    struct memory *m;

    (void)flags;
    pthread_mutex_lock(&mutex);
    m = base ? memory_at((uint64_t)(uintptr_t)base) : NULL;
    if (m && m->freed)
        m = NULL;
    if (m)
        m->opened++;
    pthread_mutex_unlock(&mutex);
    *out = (CUdeviceptr)(uintptr_t)base;
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    struct memory *m;

    pthread_mutex_lock(&mutex);
    m = memory_at(address);
    if (m) {
        m->opened--;
        memory_release(m);
    }
    pthread_mutex_unlock(&mutex);
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetInfo(size_t *left, size_t *total)
{
    *left = *total = 1u << 30;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    (void)flags;
    *out = malloc(bytes);
    host_memories++;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *memory)
{
    free(memory);
    host_memories--;
    return CUDA_SUCCESS;
}

static atomic_uint registering;

CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)memory, (void)bytes, (void)flags;
    if (fake_cuda.refuse_registrations)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_cuda.registrations++;
    while (fake_cuda.hold_registrations)
        usleep(100);
    if (registering++ > 0)
        fake_cuda.registered_together = true;
    for (int i = 0; i < 200 && fake_cuda.register_together && !fake_cuda.registered_together; i++)
        usleep(1000);
    registering--;
    fake_cuda.registered++;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *memory)
{
    (void)memory;
    fake_cuda.registered--;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *memory, unsigned flags)
{
    (void)flags;
    *out = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

/* ---- devices, contexts, modules ---- */

CUresult cuInit(unsigned flags)
{
    (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult r, const char **out)
{
    (void)r;
    *out = "CUDA_ERROR_FAKED";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult r, const char **out)
{
    (void)r;
    *out = "as the test wants it";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n)
{
    *n = FAKE_GPUS;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    *out = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice dev)
{
    (void)dev;
    strncpy(name, "fake", (size_t)size);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    fake_cuda_uuid(dev, (uint8_t *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice dev)
{
    *out = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID                          ? FAKE_BUS + dev
           : attribute == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID                     ? FAKE_DOMAIN
           : attribute == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID                     ? 0
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR && fake_cuda.clusters > 0
               ? 9
               : 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice dev)
{
    *out = (CUcontext)(uintptr_t)(dev + 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    (void)dev;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    current = context ? (int)(uintptr_t)context - 1 : 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext *out)
{
    *out = NULL;
    return CUDA_SUCCESS;
}

/* Streams are of the first GPU. */
CUresult cuStreamGetCtx(CUstream s, CUcontext *out)
{
    (void)s;
    return cuDevicePrimaryCtxRetain(out, 0);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    static _Thread_local CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUstreamCaptureMode before = now;

    now = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    *out = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module)
{
    (void)module;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    *out = strcmp(name, UCM_COPY_KERNEL) == 0                             ? (CUfunction)module
           : strncmp(name, "ucm_encoding_", strlen("ucm_encoding_")) == 0 ? fake_cuda_coder(name)
           : strncmp(name, "ucm_rope_", strlen("ucm_rope_")) == 0         ? fake_cuda_rerotator()
                                                                          : fake_cuda_idle(name);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *config)
{
    (void)function, (void)config;
    *out = fake_cuda.clusters;
    return *out > 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return CUDA_SUCCESS;
}

/* ---- VMM memory: this driver has none ---- */

#pragma weak cuMemGetAllocationPropertiesFromHandle
#pragma weak cuMemGetAllocationGranularity
#pragma weak cuMemAddressReserve
#pragma weak cuMemAddressFree
#pragma weak cuMemMap
#pragma weak cuMemUnmap
#pragma weak cuMemSetAccess
#pragma weak cuMemRelease

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                        CUmemAllocationHandleType type)
{
    (void)out, (void)handle, (void)type;
    return CUDA_ERROR_NOT_SUPPORTED;
}

void fake_cuda_install(void)
{
#define USE(name, version) cuda.name = name;
    CUDA_API(USE)
    CUDA_API_OPTIONAL(USE)
#undef USE
    cuda.cuEventQuery = fake_cuda_daemon_query;
    cuda.cuLaunchKernel = fake_cuda_daemon_launch;
    cuda.cuEventRecord = fake_cuda_daemon_record;
}
