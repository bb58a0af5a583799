#include "tests/gpu/staging.h"

#include "daemon/cuda/api.h"
#include "proto/memory/staging.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RINGS 64

/* The ring of each worker with an open region, when the tests want staged copies. Closed with the
 * device. */
static struct ring_of {
    struct test_worker *worker;
    pid_t pid;
    struct device_staging ring;
    struct ucm_staging *words;
} rings[RINGS];
static unsigned n_rings;

static struct ring_of *ring_find(pid_t pid)
{
    for (unsigned i = 0; i < n_rings; i++)
        if (rings[i].pid == pid)
            return &rings[i];
    return NULL;
}

static int ring_job(struct test_device *t, enum device_op op, struct device_staging *ring)
{
    struct test_job j;
    int rc;

    j = (struct test_job){.job = {.op = op, .staging = ring, .done_cb = job_done}};
    rc = job_run(t, &j);
    if (rc != 0)
        printf("INFO  ring: %s\n", j.job.error.text);
    return rc;
}

static CUresult gpu_find(const uint8_t uuid[UCM_UUID_BYTES], CUdevice *dev)
{
    CUuuid found;
    int count = 0;
    CUresult r = cuda.cuDeviceGetCount(&count);

    for (int i = 0; r == CUDA_SUCCESS && i < count; i++) {
        r = cuda.cuDeviceGet(dev, i);
        if (r == CUDA_SUCCESS)
            r = cuda.cuDeviceGetUuid(&found, *dev);
        if (r == CUDA_SUCCESS && memcmp(found.bytes, uuid, UCM_UUID_BYTES) == 0)
            return CUDA_SUCCESS;
    }
    return r == CUDA_SUCCESS ? CUDA_ERROR_INVALID_DEVICE : r;
}

/* A handle's memory, open alongside the device's own opening. */
struct opened {
    CUdevice dev;
    CUdeviceptr at;
};

static CUresult memory_open(const struct test_device *t, const uint8_t *ipc, struct opened *o)
{
    CUipcMemHandle handle;
    CUcontext context;
    CUresult r = gpu_find(t->uuid, &o->dev);

    if (r == CUDA_SUCCESS)
        r = cuda.cuDevicePrimaryCtxRetain(&context, o->dev);
    if (r != CUDA_SUCCESS)
        return r;
    memcpy(&handle, ipc, sizeof(handle));
    r = cuda.cuCtxSetCurrent(context);
    if (r == CUDA_SUCCESS)
        r = cuda.cuIpcOpenMemHandle(&o->at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (r != CUDA_SUCCESS) {
        (void)cuda.cuCtxSetCurrent(NULL);
        (void)cuda.cuDevicePrimaryCtxRelease(o->dev);
    }
    return r;
}

static CUresult memory_close(const struct opened *o)
{
    CUresult r = cuda.cuIpcCloseMemHandle(o->at);

    (void)cuda.cuCtxSetCurrent(NULL);
    (void)cuda.cuDevicePrimaryCtxRelease(o->dev);
    return r;
}

/* initcheck sees only what this process writes: not what the worker's kernels gather, nor what a
 * batch of the driver's copies. So entries are cleared here once, where the device has them mapped.
 */
static CUresult entries_clear(const struct test_device *t, const struct ring_of *of)
{
    struct opened o;
    CUresult r = memory_open(t, of->ring.ipc, &o), closed;

    if (r != CUDA_SUCCESS)
        return r;
    r = cuda.cuMemsetD8Async(o.at + of->ring.offset, 0, STAGING_ENTRIES * STAGING_ENTRY_BYTES,
                             NULL);
    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamSynchronize(NULL);
    closed = memory_close(&o);
    return r == CUDA_SUCCESS ? closed : r;
}

void proof_write(const struct test_device *t, struct device_region *r, struct test_proof *p)
{
    struct opened o;
    CUresult rc = CUDA_SUCCESS;

    memcpy(r->proof.nonce, test_nonce, sizeof(test_nonce));
    p->written = false;
    if (t->proves_nothing || r->n_handles > 16 || r->handles[0].kind != UCM_HANDLE_CUDA_IPC ||
        memory_open(t, r->handles[0].ipc, &o) != CUDA_SUCCESS)
        return;
    for (uint32_t i = 0; rc == CUDA_SUCCESS && i < r->n_handles; i++)
        rc = cuda.cuMemcpyDtoHAsync(p->kept[i], o.at + r->handles[i].offset, UCM_NONCE_BYTES, NULL);
    for (uint32_t i = 0; rc == CUDA_SUCCESS && i < r->n_handles; i++)
        rc = cuda.cuMemcpyHtoDAsync(o.at + r->handles[i].offset, test_nonce, UCM_NONCE_BYTES, NULL);
    if (rc == CUDA_SUCCESS)
        rc = cuda.cuStreamSynchronize(NULL);
    p->written = memory_close(&o) == CUDA_SUCCESS && rc == CUDA_SUCCESS;
}

void proof_undo(const struct test_device *t, const struct device_region *r, struct test_proof *p)
{
    struct opened o;
    CUresult rc = CUDA_SUCCESS;

    if (!p->written || memory_open(t, r->handles[0].ipc, &o) != CUDA_SUCCESS)
        return;
    for (uint32_t i = 0; rc == CUDA_SUCCESS && i < r->n_handles; i++)
        rc = cuda.cuMemcpyHtoDAsync(o.at + r->handles[i].offset, p->kept[i], UCM_NONCE_BYTES, NULL);
    if (rc == CUDA_SUCCESS)
        rc = cuda.cuStreamSynchronize(NULL);
    CHECK(memory_close(&o) == CUDA_SUCCESS && rc == CUDA_SUCCESS, "the first bytes are put back");
}

static void ring_open(struct test_device *t, struct ring_of *of)
{
    struct test_worker *w = of->worker;

    if (!CHECK(worker_do(w, WORKER_RING, 0, 0, 0) && w->fd >= 0, "worker makes a ring"))
        return;
    of->words = mmap(NULL, sizeof(*of->words), PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
    if (of->words == MAP_FAILED)
        die("a ring's words");
    of->ring = (struct device_staging){.pid = w->pid,
                                       .connection = (uint64_t)w->pid,
                                       .offset = w->reply.value,
                                       .entry_bytes = STAGING_ENTRY_BYTES,
                                       .entries = STAGING_ENTRIES,
                                       .fd = w->fd};
    memcpy(of->ring.ipc, w->reply.handle, sizeof(of->ring.ipc));
    memcpy(of->ring.proof.nonce, test_nonce, sizeof(test_nonce));
    w->fd = -1;
    if (CHECK(ring_job(t, DEVICE_OPEN, &of->ring) == 0, "its ring opens") &&
        CHECK(entries_clear(t, of) == CUDA_SUCCESS, "its entries are cleared"))
        worker_do(w, WORKER_RING_SERVE, 0, 0, 0);
}

/* Tests run once for each strategy: UCM_TEST_STRATEGY names it. */
static bool rings_wanted(void)
{
    const char *name = getenv("UCM_TEST_STRATEGY");

    return name && (strcmp(name, "staged") == 0 || strcmp(name, "auto+ring") == 0);
}

void rings_watch(struct test_worker *w)
{
    if (rings_wanted() && n_rings < RINGS)
        rings[n_rings++] = (struct ring_of){.worker = w, .pid = w->pid};
}

static void ring_close(struct test_device *t, struct ring_of *of)
{
    if (!of->ring.mapping)
        return;
    (void)ring_job(t, DEVICE_CLOSE, &of->ring);
    munmap(of->words, sizeof(*of->words));
    of->words = NULL;
}

void rings_close(struct test_device *t)
{
    for (unsigned i = 0; i < n_rings; i++)
        ring_close(t, &rings[i]);
    n_rings = 0;
}

struct ucm_staging *ring_words(const struct test_worker *w)
{
    const struct ring_of *of = ring_find(w->pid);

    return of ? of->words : NULL;
}

void ring_shut(struct test_device *t, const struct test_worker *w)
{
    struct ring_of *of = ring_find(w->pid);

    if (of)
        ring_close(t, of);
}

void ring_region(struct test_device *t, struct device_region *r, uint64_t offset)
{
    struct ring_of *of = ring_find(r->pid);
    struct worker_region *region;
    int fd;

    if (!of || r->blocks < 1 || r->n_planes > 128)
        return;
    fd = of->worker->fd; /* the test may want it still */
    of->worker->fd = -1;
    if (!of->ring.mapping)
        ring_open(t, of);
    of->worker->fd = fd;
    if (!of->ring.mapping)
        return;
    region = (struct worker_region *)(of->worker->shared + WORKER_SHARED_BYTES - sizeof(*region));
    *region = (struct worker_region){.n_planes = r->n_planes, .blocks = r->blocks};
    for (uint32_t p = 0; p < r->n_planes; p++) {
        region->planes[p] = r->planes[p];
        region->planes[p].base =
            r->planes[p].base - r->handles[r->planes[p].memory].address - offset;
    }
    if (worker_do(of->worker, WORKER_RING_REGION, 0, 0, 0))
        r->ring_region = (uint32_t)of->worker->reply.value;
}
