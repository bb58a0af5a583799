#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    struct gpu_ipc_wish wish = {
        .ipc = h->ipc, .offset = h->offset, .bytes = h->bytes, .proof = &job->region->proof};
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
    gpu_convert_close(mapping);
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
    mapping->events_foreign = region->stranger ? "the worker is of another tenant than the daemon"
                                               : worker_events_foreign(&mapping->worker);
    while (rc == 0 && mapping->n < region->n_handles) {
        rc = map_open(g, job, mapping->n, mapping);
        mapping->n += rc == 0;
    }
    if (rc == 0) {
        region_mapped(region);
        /* Over the bus each read of a kernel would cost as much as the fragment's first bytes. */
        rc = gpu_upload(g, job, &mapping->planes, region->planes,
                        region->n_planes * sizeof(*region->planes),
                        "no GPU memory for the region's planes");
    }
    if (rc == 0 && region->tensors)
        rc = gpu_convert_open(g, job);
    if (rc == 0 && region->rope)
        rc = gpu_rope_open(g, job);
    if (rc < 0)
        gpu_region_close(region);
    return rc;
}

/* ---- events ---- */

/* The driver takes numbers of an event's handle as places in the worker's file under /dev/shm: an
 * altered one ends this process. So events come only from workers that could end it anyway.
 *
 * Each dump opens the event again, after the worker recorded it: a worker that destroys an event
 * and creates another may get the same handle bytes. An old opening could then be taken for the new
 * event. */
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
