#include "daemon/device/gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- IPC memory ---- */

/* Fills size, and checks that the memory is this GPU's own. */
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
    if (wish->offset > ipc->size || wish->bytes > ipc->size - wish->offset) {
        rc = job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                        "%s: offset %" PRIu64 " + bytes %" PRIu64 " pass the %" PRIu64
                        " bytes of its allocation",
                        wish->name, wish->offset, wish->bytes, ipc->size);
        gpu_ipc_put(ipc);
        return rc;
    }
    *out = ipc;
    return 0;
}

/* ---- VMM memory ---- */

/* Maps an imported allocation at h->address. map->handle stays the caller's. The driver does not
 * tell the allocation's size, and maps it as a whole or not at all. */
static CUresult vmm_map(struct gpu *g, struct device_handle *h, struct gpu_map *map)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = g->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemAllocationProp prop;
    CUdeviceptr address;
    size_t grain;
    CUresult r = cuda.cuMemGetAllocationPropertiesFromHandle(&prop, map->handle);

    if (r == CUDA_SUCCESS)
        r = cuda.cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (r != CUDA_SUCCESS)
        return r;
    map->bytes = (h->offset + h->bytes + grain - 1) / grain * grain;
    r = cuda.cuMemAddressReserve(&address, map->bytes, 0, 0, 0);
    if (r != CUDA_SUCCESS)
        return r;
    r = cuda.cuMemMap(address, map->bytes, 0, map->handle, 0);
    if (r != CUDA_SUCCESS)
        goto err_after_reserve;
    r = cuda.cuMemSetAccess(address, map->bytes, &access, 1);
    if (r != CUDA_SUCCESS)
        goto err_after_map;
    h->address = address;
    return r;

err_after_map:
    (void)cuda.cuMemUnmap(address, map->bytes);
err_after_reserve:
    (void)cuda.cuMemAddressFree(address, map->bytes);
    return r;
}

static void vmm_close(const struct device_handle *h, const struct gpu_map *map)
{
    (void)cuda.cuMemUnmap(h->address, map->bytes);
    (void)cuda.cuMemAddressFree(h->address, map->bytes);
    (void)cuda.cuMemRelease(map->handle);
}

static int vmm_open(struct gpu *g, struct device_job *job, uint32_t i, struct gpu_map *map)
{
    struct device_handle *h = &job->region->handles[i];
    int ordinal = -1;
    CUresult r = cuda.cuMemImportFromShareableHandle(&map->handle, (void *)(intptr_t)h->fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "a descriptor is no CUDA memory");
    r = vmm_map(g, h, map);
    if (r != CUDA_SUCCESS) {
        (void)cuda.cuMemRelease(map->handle);
        return gpu_refuse(
            g, job, -EINVAL, r,
            "a descriptor's memory can't be mapped; offset + bytes must be its whole size");
    }
    r = cuda.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, h->address);
    if (r == CUDA_SUCCESS && ordinal == g->ordinal)
        return 0;
    vmm_close(h, map);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "a descriptor's memory can't be inspected");
    return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                      "handle %u is memory of another GPU than the region's", i);
}

/* ---- regions ---- */

static int map_open(struct gpu *g, struct device_job *job, uint32_t i, struct gpu_region *mapping)
{
    struct device_handle *h = &job->region->handles[i];
    struct gpu_ipc_wish wish = {.ipc = h->ipc, .offset = h->offset, .bytes = h->bytes};
    struct gpu_map *map = &mapping->maps[i];
    int rc;

    snprintf(wish.name, sizeof(wish.name), "handle %u", i);
    if (h->kind != UCM_HANDLE_CUDA_IPC)
        return vmm_open(g, job, i, map);
    rc = gpu_ipc_get(g, job, &wish, &mapping->worker, &map->ipc);
    if (rc == 0)
        h->address = map->ipc->address;
    return rc;
}

void gpu_region_close(struct device_region *region)
{
    struct gpu_region *mapping = region->mapping;

    if (mapping->planes)
        (void)cuda.cuMemFree(mapping->planes);
    gpu_encoding_close(mapping);
    gpu_rope_close(mapping);
    for (uint32_t i = 0; i < mapping->n; i++) {
        if (mapping->maps[i].ipc)
            gpu_ipc_put(mapping->maps[i].ipc);
        else
            vmm_close(&region->handles[i], &mapping->maps[i]);
    }
    worker_close(&mapping->worker);
    free(mapping);
    region->mapping = NULL;
}

/* The kernel reads the planes from GPU memory. Over the bus each read would cost as much as the
 * chunk's first bytes. */
static int planes_upload(struct gpu *g, struct device_job *job, struct gpu_region *mapping)
{
    const struct device_region *region = job->region;
    size_t size = region->n_planes * sizeof(*region->planes);
    CUresult r = cuda.cuMemAlloc(&mapping->planes, size);

    /* Not cuMemcpyHtoD: it may return before the bytes are there, and no stream of ours waits for
     * the legacy stream. */
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemcpyHtoDAsync(mapping->planes, region->planes, size, g->uploads);
    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamSynchronize(g->uploads);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EIO, r, "no GPU memory for the region's planes");
    return 0;
}

int gpu_region_open(struct gpu *g, struct device_job *job)
{
    struct device_region *region = job->region;
    struct gpu_region *mapping =
        calloc(1, sizeof(*mapping) + region->n_handles * sizeof(*mapping->maps));
    int rc = 0;

    if (!mapping)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for the region");
    region->mapping = mapping;
    /* Only dumps with an event need to see the worker. Without it, the connection tells workers
     * apart, since regions of one worker share memory. */
    if (worker_open(&mapping->worker, region->pid) < 0)
        mapping->worker.start = region->connection;
    mapping->events_foreign = worker_events_foreign(&mapping->worker);
    while (rc == 0 && mapping->n < region->n_handles) {
        rc = map_open(g, job, mapping->n, mapping);
        mapping->n += rc == 0;
    }
    if (rc == 0) {
        region_mapped(region);
        rc = planes_upload(g, job, mapping);
    }
    if (rc == 0 && region->codec)
        rc = gpu_encoding_open(g, job);
    if (rc == 0 && region->rope)
        rc = gpu_rope_open(g, job);
    if (rc < 0)
        gpu_region_close(region);
    return rc;
}

/* ---- events ---- */

/* Each dump opens the event again, after the worker recorded it: a worker that destroys an event and
 * creates another may get the same handle bytes, and an old opening could be taken for the new event.
 */
int gpu_event_open(struct gpu *g, struct device_job *job)
{
    const struct gpu_region *mapping = job->region->mapping;
    CUipcEventHandle handle;
    CUevent event;
    CUresult r;

    if (mapping->events_foreign)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "%s, so its event could be taken for another's; wait for the event in "
                          "the worker, and dump without one",
                          mapping->events_foreign);
    memcpy(&handle, job->event, sizeof(handle));
    r = cuda.cuIpcOpenEventHandle(&event, handle);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "the event's handle can't be opened");
    job->scratch = event;
    return 0;
}

void gpu_event_close(struct device_job *job)
{
    if (job->scratch)
        (void)cuda.cuEventDestroy(job->scratch);
    job->scratch = NULL;
}
