/* A libcuda.so.1 for tests, of GPUs whose memory is the host's. It has what `ucmctl doctor` and the
 * daemon's copies by the copy engine (copy.strategy: dma) call. Copies are done when their call
 * returns. Kernels do nothing.
 *
 * From the environment: DRIVER_GPUS, 1; DRIVER_ERROR, what cuInit returns; DRIVER_SLOW_MS, how long it takes;
 * DRIVER_CONTEXT_ERROR, what opening a context returns. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALLOCATIONS 64
#define INVALID 1

typedef unsigned long long pointer;
/* bytes, pages and offset where driver 580 has them. */
typedef struct {
    int pid, fd;
    uint64_t none, bytes;
    unsigned pages, offset;
    char rest[32];
} handle;
/* CUDA_MEMCPY2D */
typedef struct {
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    pointer from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_type;
    void *to_host;
    pointer to;
    void *to_array;
    size_t to_pitch, width, rows;
} copy_2d;

static struct {
    pointer base;
    size_t bytes;
    int fd;
} allocation[ALLOCATIONS];

static int number(const char *name, int otherwise)
{
    return getenv(name) ? atoi(getenv(name)) : otherwise;
}

/* ---- devices ---- */

int cuInit(unsigned flags)
{
    usleep((useconds_t)number("DRIVER_SLOW_MS", 0) * 1000);
    return number("DRIVER_ERROR", 0);
}

int cuDriverGetVersion(int *version)
{
    *version = 12040;
    return 0;
}

int cuGetErrorName(int r, const char **name)
{
    *name = "CUDA_ERROR_MADE_HERE";
    return 0;
}

int cuGetErrorString(int r, const char **sentence)
{
    *sentence = "made here";
    return 0;
}

int cuDeviceGetCount(int *n)
{
    *n = number("DRIVER_GPUS", 1);
    return 0;
}

int cuDeviceGet(int *device, int i)
{
    *device = i;
    return 0;
}

int cuDeviceGetName(char *name, int n, int device)
{
    snprintf(name, (size_t)n, "Made here");
    return 0;
}

int cuDeviceGetUuid(char *uuid, int device)
{
    memset(uuid, 7 + device, 16);
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int device)
{
    return cuDeviceGetUuid(uuid, device);
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = allocation;
    return number("DRIVER_CONTEXT_ERROR", 0);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    return 0;
}

int cuCtxSetCurrent(void *context)
{
    return 0;
}

int cuCtxGetCurrent(void **context)
{
    *context = allocation;
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    return context == allocation ? 0 : INVALID;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = allocation;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    *mode = 0;
    return 0;
}

int cuCtxSynchronize(void)
{
    return 0;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return 0;
}

/* ---- memory ---- */

static int map(int fd, size_t bytes, pointer *p)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    for (int i = 0; at != MAP_FAILED && i < ALLOCATIONS; i++)
        if (allocation[i].base == 0) {
            allocation[i].base = *p = (uintptr_t)at;
            allocation[i].bytes = bytes;
            allocation[i].fd = fd;
            return 0;
        }
    close(fd);
    return INVALID;
}

static int find(pointer p)
{
    for (int i = 0; i < ALLOCATIONS; i++)
        if (p - allocation[i].base < allocation[i].bytes)
            return i;
    return -1;
}

static int unmap(pointer p)
{
    int i = find(p);

    if (i < 0)
        return INVALID;
    munmap((void *)(uintptr_t)p, allocation[i].bytes);
    close(allocation[i].fd);
    memset(&allocation[i], 0, sizeof(allocation[i]));
    return 0;
}

int cuMemAlloc_v2(pointer *p, size_t bytes)
{
    int fd = memfd_create("gpu", MFD_CLOEXEC);

    return fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 ? map(fd, bytes, p) : INVALID;
}

int cuMemFree_v2(pointer p)
{
    return unmap(p);
}

int cuMemGetInfo(size_t *left, size_t *total)
{
    *left = *total = 1 << 30;
    return 0;
}

int cuMemGetAddressRange_v2(pointer *base, size_t *bytes, pointer p)
{
    int i = find(p);

    if (i < 0)
        return INVALID;
    *base = allocation[i].base;
    if (bytes)
        *bytes = allocation[i].bytes;
    return 0;
}

/* The ordinal of the memory's GPU, or its type: memory of a GPU. */
int cuPointerGetAttribute(void *out, int attribute, pointer p)
{
    *(int *)out = attribute == 2 ? 2 : 0;
    return find(p) < 0 ? INVALID : 0;
}

int cuMemRetainAllocationHandle(pointer *h, void *p)
{
    return INVALID;
}

int cuIpcGetMemHandle(handle *h, pointer p)
{
    int i = find(p);

    if (i < 0)
        return INVALID;
    *h = (handle){.pid = getpid(),
                  .fd = allocation[i].fd,
                  .bytes = allocation[i].bytes,
                  .pages = (unsigned)((allocation[i].bytes + 4095) / 4096)};
    return 0;
}

int cuIpcOpenMemHandle(pointer *p, handle h, unsigned flags)
{
    char path[64];
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? INVALID : map(fd, h.bytes, p);
}

int cuIpcCloseMemHandle(pointer p)
{
    return unmap(p);
}

int cuMemHostAlloc(void **p, size_t bytes, unsigned flags)
{
    *p = calloc(1, bytes);
    return *p ? 0 : INVALID;
}

int cuMemFreeHost(void *p)
{
    free(p);
    return 0;
}

int cuMemHostGetDevicePointer(pointer *out, void *p, unsigned flags)
{
    *out = (uintptr_t)p;
    return 0;
}

/* ---- copies ---- */

int cuMemcpyHtoD_v2(pointer to, const void *from, size_t bytes)
{
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, pointer from, size_t bytes)
{
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}

int cuMemcpyHtoDAsync_v2(pointer to, const void *from, size_t bytes, void *stream)
{
    return cuMemcpyHtoD_v2(to, from, bytes);
}

int cuMemcpyDtoHAsync_v2(void *to, pointer from, size_t bytes, void *stream)
{
    return cuMemcpyDtoH_v2(to, from, bytes);
}

int cuStreamCreate(void **stream, unsigned flags)
{
    *stream = allocation;
    return 0;
}

int cuStreamDestroy_v2(void *stream)
{
    return 0;
}

int cuStreamSynchronize(void *stream)
{
    return 0;
}

int cuMemcpy2DAsync(const copy_2d *c, void *stream)
{
    for (size_t i = 0; i < c->rows; i++)
        memcpy((void *)(uintptr_t)(c->to + i * c->to_pitch),
               (void *)(uintptr_t)(c->from + i * c->from_pitch), c->width);
    return 0;
}

/* ---- how the daemon finds these functions ---- */

static int nothing(void)
{
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *found)
{
    char second[64];
    Dl_info here;
    void *library = dladdr(allocation, &here) ? dlopen(here.dli_fname, RTLD_NOW) : NULL;

    *found = 0;
    *address = NULL;
    if (!library || strstr(name, "BatchAsync"))
        return INVALID;
    snprintf(second, sizeof(second), "%s_v2", name);
    *address = dlsym(library, name);
    if (!*address)
        *address = dlsym(library, second);
    if (!*address)
        *address = (void *)nothing;
    return 0;
}
