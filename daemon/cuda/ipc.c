/* IPC memory: opened once for a worker, counted, and only for a peer that can write there.
 *
 * The driver opens a handle for any process with its 64 bytes, most of which it ignores, and the
 * rest of which can be guessed. So the peer proves each handle of each registration (struct
 * device_proof) while it is opened. */
#include "daemon/cuda/gpu.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- what a handle says ---- */

/* The driver takes the size of memory from its handle, and a copy beyond what is there loses the
 * context. These fields are nowhere documented: gpu_ipc_learn sees whether a driver's handles have
 * them. */
struct handle_layout {
    uint8_t other[16];
    uint64_t size;   /* of the allocation */
    uint32_t pages;  /* of HANDLE_PAGE bytes, of the block that it lies in; the driver checks it */
    uint32_t offset; /* in the block */
};
#define HANDLE_PAGE 4096u

static struct handle_layout handle_read(const uint8_t *bytes)
{
    struct handle_layout h;

    memcpy(&h, bytes, sizeof(h));
    return h;
}

static bool handle_fits(const uint8_t *bytes)
{
    struct handle_layout h = handle_read(bytes);
    uint64_t room = (uint64_t)h.pages * HANDLE_PAGE;

    return h.size > 0 && h.offset < room && h.size <= room - h.offset;
}

struct own_memory {
    CUdeviceptr at;
    size_t size;
    struct handle_layout handle;
    bool fits;
};

static CUresult own_alloc(struct own_memory *m, size_t bytes)
{
    CUipcMemHandle handle;
    CUdeviceptr base;
    CUresult r = cuda.cuMemAlloc(&m->at, bytes);

    if (r == CUDA_SUCCESS)
        r = cuda.cuMemGetAddressRange(&base, &m->size, m->at);
    if (r == CUDA_SUCCESS)
        r = cuda.cuIpcGetMemHandle(&handle, m->at);
    if (r != CUDA_SUCCESS)
        return r;
    m->handle = handle_read((const uint8_t *)&handle);
    m->fits = handle_fits((const uint8_t *)&handle) && m->handle.size == m->size;
    return r;
}

/* Where its block begins, if the handle says where in it the memory lies. */
static CUdeviceptr own_block(const struct own_memory *m)
{
    return m->at - m->handle.offset;
}

void gpu_ipc_learn(struct gpu *g)
{
    struct own_memory m[2] = {{0}};
    CUresult r = own_alloc(&m[0], 512);

    if (r == CUDA_SUCCESS)
        r = own_alloc(&m[1], 4096);
    g->ipc_checked = r == CUDA_SUCCESS;
    for (unsigned i = 0; i < 2; i++) {
        g->ipc_checked &= m[i].fits && own_block(&m[i]) % HANDLE_PAGE == 0;
        if (m[i].at)
            (void)cuda.cuMemFree(m[i].at);
    }
    if (!g->ipc_checked)
        log_warn(
            "device", "handles-unchecked",
            "gpu=%d hint=\"this driver's IPC handles are not as known: a worker that alters one "
            "may end the daemon\"",
            g->ordinal);
}

/* ---- open and close ---- */

static int refuse_altered(struct device_job *job, const struct gpu_ipc_wish *wish)
{
    return job_refuse(
        job, -EINVAL, UCM_WIRE_INVALID,
        "%s is no handle that cudaIpcGetMemHandle gave; send its 64 bytes as they are", wish->name);
}

/* Fills size, and checks that the memory is this GPU's own, and as large as its handle says. */
static int ipc_inspect(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                       struct gpu_ipc *ipc)
{
    CUdeviceptr base;
    size_t size;
    int ordinal = -1;
    CUresult r =
        cuda.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ipc->address);

    if (r == CUDA_SUCCESS)
        r = cuda.cuMemGetAddressRange(&base, &size, ipc->address);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "the memory of an IPC handle can't be inspected");
    if (ordinal != g->ordinal)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID, "%s is memory of another GPU",
                          wish->name);
    if (g->ipc_checked && handle_read(ipc->bytes).size != size)
        return refuse_altered(job, wish);
    ipc->size = base + size - ipc->address;
    return 0;
}

static bool ipc_is_of(const struct gpu_ipc *ipc, const struct worker *worker)
{
    return ipc->pid == worker->pid && ipc->start == worker->start;
}

/* When an allocation is open already, the driver returns it again at the same address. For another
 * process, or a worker that came back with its old pid, that would be memory which it does not own.
 * Comparing addresses is needed because the driver ignores some of a handle's bytes. */
static int ipc_refuse_foreign(struct gpu *g, struct device_job *job,
                              const struct gpu_ipc_wish *wish, CUdeviceptr address,
                              const struct worker *worker)
{
    for (struct list *node = g->opened.next; node != &g->opened; node = node->next) {
        const struct gpu_ipc *other = LIST_ENTRY(node, struct gpu_ipc, link);

        if (other->address == address && !ipc_is_of(other, worker))
            return job_refuse(
                job, -EBUSY, UCM_WIRE_BUSY,
                "%s is still open for another process (%ld); try again when its region is gone",
                wish->name, (long)other->pid);
    }
    return 0;
}

static int ipc_new(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                   const struct worker *worker, struct gpu_ipc **out)
{
    struct gpu_ipc *ipc = calloc(1, sizeof(*ipc));
    CUipcMemHandle handle;
    CUresult r;
    int rc;

    if (!ipc)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for %s", wish->name);
    if (g->ipc_checked && !handle_fits(wish->ipc)) {
        free(ipc);
        return refuse_altered(job, wish);
    }
    memcpy(ipc->bytes, wish->ipc, sizeof(ipc->bytes));
    memcpy(&handle, ipc->bytes, sizeof(handle));
    ipc->pid = worker->pid;
    ipc->start = worker->start;
    r = cuda.cuIpcOpenMemHandle(&ipc->address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (r != CUDA_SUCCESS) {
        free(ipc);
        return gpu_refuse(
            g, job, -EINVAL, r,
            r == CUDA_ERROR_INVALID_CONTEXT
                ? "an IPC memory handle can't be opened: its process has the daemon's "
                  "own number in another pid namespace (give the daemon's container "
                  "hostPID, or share cuMemCreate memory by descriptor)"
                : "an IPC memory handle can't be opened");
    }
    rc = ipc_refuse_foreign(g, job, wish, ipc->address, worker);
    if (rc == 0)
        rc = ipc_inspect(g, job, wish, ipc);
    if (rc < 0) {
        (void)cuda.cuIpcCloseMemHandle(ipc->address);
        free(ipc);
        return rc;
    }
    list_push_back(&g->opened, &ipc->link);
    *out = ipc;
    return 0;
}

void gpu_ipc_put(struct gpu_ipc *ipc)
{
    if (--ipc->refs > 0)
        return;
    list_remove(&ipc->link);
    (void)cuda.cuIpcCloseMemHandle(ipc->address);
    free(ipc);
}

/* Whether the worker's proof stands where the memory begins, which lies in the allocation. */
static int ipc_prove(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                     const struct gpu_ipc *ipc)
{
    uint8_t found[UCM_NONCE_BYTES];
    CUresult r =
        cuda.cuMemcpyDtoHAsync(found, ipc->address + wish->offset, sizeof(found), g->uploads);

    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamSynchronize(g->uploads);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "the memory of an IPC handle can't be read");
    if (memcmp(found, wish->proof->nonce, sizeof(found)) != 0)
        return job_refuse(
            job, -EINVAL, UCM_WIRE_DENIED,
            "%s: its memory does not begin with the nonce of region.challenge; the owner must "
            "write the nonce there, and wait for the write to finish, before it registers",
            wish->name);
    return 0;
}

/* wish lies in the memory? */
static int ipc_bounds(struct device_job *job, const struct gpu_ipc_wish *wish,
                      const struct gpu_ipc *ipc)
{
    if (wish->offset <= ipc->size && wish->bytes <= ipc->size - wish->offset)
        return 0;
    return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                      "%s: offset %" PRIu64 " + bytes %" PRIu64 " pass the %" PRIu64
                      " bytes of its allocation",
                      wish->name, wish->offset, wish->bytes, ipc->size);
}

int gpu_ipc_get(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                const struct worker *worker, struct gpu_ipc **out)
{
    struct gpu_ipc *ipc = NULL;
    int rc;

    for (struct list *node = g->opened.next; node != &g->opened && !ipc; node = node->next) {
        struct gpu_ipc *other = LIST_ENTRY(node, struct gpu_ipc, link);

        if (ipc_is_of(other, worker) && memcmp(other->bytes, wish->ipc, sizeof(other->bytes)) == 0)
            ipc = other;
    }
    if (!ipc) {
        rc = ipc_new(g, job, wish, worker, &ipc);
        if (rc < 0)
            return rc;
    }
    ipc->refs++;
    rc = ipc_bounds(job, wish, ipc);
    if (rc == 0)
        rc = ipc_prove(g, job, wish, ipc);
    if (rc < 0) {
        gpu_ipc_put(ipc);
        return rc;
    }
    *out = ipc;
    return 0;
}
