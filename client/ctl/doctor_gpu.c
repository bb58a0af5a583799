/* GPUs: the driver, the bus, and the round trip through each. The driver's library is opened while
 * running. A symbol of it never changes its binary interface, so no headers of CUDA are needed, and
 * every build can look at a GPU. */
#include "client/ctl/doctor.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SECONDS 0.3
#define BUS_BYTES (64u << 20)
#define MAX_GPUS 32
#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */

typedef int gpu_result; /* CUresult; 0 is success */
typedef unsigned long long gpu_pointer;
typedef struct {
    uint8_t bytes[64];
} gpu_ipc;
typedef struct {
    uint8_t bytes[16];
} gpu_uuid;

/* X(symbol, parameters) */
#define GPU_API(X)                                                                                 \
    X(cuInit, (unsigned flags))                                                                    \
    X(cuDriverGetVersion, (int *version))                                                          \
    X(cuGetErrorName, (gpu_result r, const char **name))                                           \
    X(cuDeviceGetCount, (int *n))                                                                  \
    X(cuDeviceGet, (int *device, int i))                                                           \
    X(cuDeviceGetName, (char *name, int n, int device))                                            \
    X(cuDeviceGetUuid, (gpu_uuid * uuid, int device))                                              \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                      \
    X(cuDevicePrimaryCtxRelease_v2, (int device))                                                  \
    X(cuCtxSetCurrent, (void *context))                                                            \
    X(cuCtxSynchronize, (void))                                                                    \
    X(cuMemAlloc_v2, (gpu_pointer * p, size_t bytes))                                              \
    X(cuMemFree_v2, (gpu_pointer p))                                                               \
    X(cuMemGetAddressRange_v2, (gpu_pointer * base, size_t * bytes, gpu_pointer p))                \
    X(cuMemHostAlloc, (void **p, size_t bytes, unsigned flags))                                    \
    X(cuMemFreeHost, (void *p))                                                                    \
    X(cuMemcpyHtoD_v2, (gpu_pointer to, const void *from, size_t bytes))                           \
    X(cuMemcpyDtoH_v2, (void *to, gpu_pointer from, size_t bytes))                                 \
    X(cuIpcGetMemHandle, (gpu_ipc * handle, gpu_pointer p))

static struct {
#define X(symbol, parameters) gpu_result(*symbol) parameters;
    GPU_API(X)
#undef X
} gpu;

/* ---- the driver ---- */

static const char *error_name(gpu_result r)
{
    const char *name = NULL;

    return gpu.cuGetErrorName(r, &name) == 0 && name != NULL ? name : "an unknown error";
}

/* POSIX lets dlsym's result be a function, C does not: hence by memcpy. */
static const char *load(void *library)
{
    void *p;

#define X(symbol, parameters)                                                                      \
    p = dlsym(library, #symbol);                                                                   \
    if (p == NULL)                                                                                 \
        return #symbol;                                                                            \
    memcpy(&gpu.symbol, &p, sizeof p);
    GPU_API(X)
#undef X
    return NULL;
}

/* Opens the driver and counts GPUs. false: there is nothing more to try, and a finding says why. */
static bool driver_open(struct doctor *d)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const char *missing;
    int version = 0;
    gpu_result r;

    if (library == NULL) {
        doctor_add(d, DOCTOR_SKIP, "gpu",
                   access("/proc/driver/nvidia/version", F_OK) == 0
                       ? "install the driver's libcuda.so.1; in a container give it the GPUs"
                       : NULL,
                   "not tried: no GPU (libcuda.so.1 is not here)");
        return false;
    }
    missing = load(library);
    if (missing != NULL) {
        doctor_add(d, DOCTOR_FAIL, "gpu", "a newer driver", "libcuda.so.1 lacks %s", missing);
        return false;
    }
    r = gpu.cuInit(0);
    if (r == 0)
        r = gpu.cuDeviceGetCount(&d->gpus);
    if (r != 0 && r != NO_DEVICE) {
        doctor_add(d, DOCTOR_FAIL, "gpu",
                   "nvidia-smi; is the driver's kernel module of the same version?",
                   "the driver can't be used: %s", error_name(r));
        return false;
    }
    if (d->gpus == 0) {
        doctor_add(d, DOCTOR_SKIP, "gpu", NULL, "not tried: no GPU (the driver shows none)");
        return false;
    }
    gpu.cuDriverGetVersion(&version);
    doctor_add(d, version >= 11080 ? DOCTOR_OK : DOCTOR_WARN, "gpu driver",
               version >= 11080 ? NULL : "a driver of CUDA 11.8 or later, for copy agents",
               "of CUDA %d.%d, %d GPU%s", version / 1000, version % 1000 / 10, d->gpus,
               d->gpus == 1 ? "" : "s");
    return true;
}

/* ---- one GPU ---- */

struct one {
    struct doctor *doctor;
    int device;
    char check[32], name[96];
    gpu_uuid uuid;
    gpu_pointer memory, base; /* base: of its allocation */
    uint8_t kept[16];         /* what stood where a nonce stands now */
};

static int memory_failed(struct trip_memory *m, gpu_result r)
{
    if (r == 0)
        return 0;
    snprintf(m->why, sizeof m->why, "%s", error_name(r));
    return -1;
}

static int gpu_put_cb(struct trip_memory *m, const void *from)
{
    const struct one *g = m->ctx;
    gpu_result r = gpu.cuMemcpyHtoD_v2(g->memory, from, TRIP_BYTES);

    return memory_failed(m, r != 0 ? r : gpu.cuCtxSynchronize());
}

static int gpu_get_cb(struct trip_memory *m, void *to)
{
    const struct one *g = m->ctx;

    return memory_failed(m, gpu.cuMemcpyDtoH_v2(to, g->memory, TRIP_BYTES));
}

/* The doctor has one thread and no streams, so that the plain copies do. */
static int gpu_prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    struct one *g = ctx;
    gpu_pointer at = g->base + offset;
    gpu_result r = nonce != NULL ? gpu.cuMemcpyDtoH_v2(g->kept, at, sizeof g->kept) : 0;

    if (r == 0)
        r = gpu.cuMemcpyHtoD_v2(at, nonce != NULL ? nonce : g->kept, sizeof g->kept);
    return r != 0 ? r : gpu.cuCtxSynchronize();
}

/* Whether the daemon has this GPU by now. */
static bool daemon_has(const struct doctor *d, const gpu_uuid *uuid)
{
    struct answer stats;
    bool has = false;

    if (answer_call(d->client, UCM_METHOD_STATS, NULL, (int)args_number(d->a, "timeout"), &stats) !=
        0)
        return false;
    for (uint32_t i = 0; i < answer_count(stats.root, "devices"); i++) {
        const msgpack_object *o = answer_get(answer_at(stats.root, "devices", i), "uuid");

        has |= o != NULL && o->type == MSGPACK_OBJECT_BIN &&
               o->via.bin.size == sizeof uuid->bytes &&
               memcmp(o->via.bin.ptr, uuid->bytes, sizeof uuid->bytes) == 0;
    }
    answer_close(&stats);
    return has;
}

/* A GPU that the daemon was not given may be meant so; one that it has and can't open is not. */
static bool gpu_refused_cb(struct trip_memory *m, const char *why)
{
    struct one *g = m->ctx;

    if (daemon_has(g->doctor, &g->uuid))
        return false;
    doctor_add(g->doctor, DOCTOR_WARN, g->check,
               "device.cuda: auto, a daemon built with CUDA, and /dev/nvidia-uvm before it starts",
               "the daemon does not use %s: %s", g->name, why);
    return true;
}

static void trip_gpu(struct doctor *d, struct one *g)
{
    struct trip_memory m = {.device = "cuda",
                            .gpu = g->uuid.bytes,
                            .put_cb = gpu_put_cb,
                            .get_cb = gpu_get_cb,
                            .refused_cb = gpu_refused_cb,
                            .ctx = g};
    gpu_ipc handle;
    gpu_result r;

    if (d->client == NULL) {
        doctor_add(d, DOCTOR_SKIP, g->check, "start the daemon", "round trip not tried: no daemon");
        return;
    }
    r = gpu.cuMemAlloc_v2(&g->memory, TRIP_BYTES);
    if (r == 0)
        r = gpu.cuMemGetAddressRange_v2(&g->base, NULL, g->memory);
    if (r == 0)
        r = gpu.cuIpcGetMemHandle(&handle, g->memory);
    if (r == 0) {
        m.memory = (struct ucm_memory){.kind = UCM_MEMORY_CUDA_IPC,
                                       .bytes = TRIP_BYTES,
                                       .offset = g->memory - g->base,
                                       .prove_cb = gpu_prove_cb,
                                       .prove_ctx = g};
        memcpy(m.memory.ipc, handle.bytes, sizeof handle.bytes);
        doctor_trip(d, g->check, &m);
    } else {
        doctor_add(d, DOCTOR_WARN, g->check, "is the GPU's memory full? nvidia-smi",
                   "round trip not tried: %s", error_name(r));
    }
    if (g->memory != 0)
        gpu.cuMemFree_v2(g->memory);
}

/* Pinned memory to the GPU, in one piece. */
static void measure_bus(struct doctor *d, struct one *g)
{
    double start, seconds = 0;
    uint64_t bytes = 0;
    gpu_pointer to = 0;
    void *from = NULL;
    gpu_result r = gpu.cuMemAlloc_v2(&to, BUS_BYTES);

    if (r == 0)
        r = gpu.cuMemHostAlloc(&from, BUS_BYTES, 0);
    if (r == 0)
        r = gpu.cuMemcpyHtoD_v2(to, from, BUS_BYTES); /* the first one warms up */
    for (start = doctor_now(); r == 0 && seconds < SECONDS; seconds = doctor_now() - start) {
        r = gpu.cuMemcpyHtoD_v2(to, from, BUS_BYTES);
        bytes += BUS_BYTES;
    }
    if (r == 0)
        doctor_add(d, DOCTOR_OK, g->check, NULL, "%s: the bus carries %.1f GB/s to it", g->name,
                   (double)bytes / seconds / 1e9);
    else
        doctor_add(d, DOCTOR_WARN, g->check, "is its memory full? nvidia-smi", "%s: %s", g->name,
                   error_name(r));
    if (from != NULL)
        gpu.cuMemFreeHost(from);
    if (to != 0)
        gpu.cuMemFree_v2(to);
}

static void check_gpu(struct doctor *d, int number, struct one *g)
{
    void *context = NULL;
    gpu_result r = gpu.cuDeviceGet(&g->device, number);

    g->doctor = d;
    snprintf(g->check, sizeof g->check, "gpu %d", number);
    if (r == 0)
        r = gpu.cuDeviceGetName(g->name, sizeof g->name, g->device);
    if (r == 0)
        r = gpu.cuDeviceGetUuid(&g->uuid, g->device);
    if (r == 0)
        r = gpu.cuDevicePrimaryCtxRetain(&context, g->device);
    if (r != 0) {
        doctor_add(d, DOCTOR_FAIL, g->check, "nvidia-smi", "%s", error_name(r));
        return;
    }
    r = gpu.cuCtxSetCurrent(context);
    if (r == 0 && d->measure)
        measure_bus(d, g);
    if (r == 0)
        trip_gpu(d, g);
    gpu.cuDevicePrimaryCtxRelease_v2(g->device);
}

void doctor_gpus(struct doctor *d)
{
    static struct one one[MAX_GPUS]; /* findings point to their names */

    if (!driver_open(d))
        return;
    if (access("/dev/nvidia-uvm", F_OK) != 0)
        doctor_add(d, DOCTOR_WARN, "gpu driver",
                   "nvidia-modprobe -u, or nvidia-persistenced at boot",
                   "/dev/nvidia-uvm is not there: the unit's sandbox can't make it");
    for (int i = 0; i < d->gpus && i < MAX_GPUS; i++)
        check_gpu(d, i, &one[i]);
}
