#include "daemon/cuda/gpu.h"

#include "proto/memory/staging.h"

/* item_bytes: of one slot, from the first plane's offset on. */
static uint32_t plan(struct gpu *g, enum ucm_copy_direction direction,
                     const struct ucm_copy_plane *planes, uint32_t n_planes,
                     struct ucm_copy_item *items, uint32_t n_items, uint64_t item_bytes)
{
    uint32_t n;

    for (uint32_t i = 0; i < n_items; i++) {
        items[i].memory =
            gpu_memory_pin_of(&g->memory, items[i].slot + planes->slot_offset, item_bytes);
        if (items[i].memory == 0)
            return 0;
    }
    n = plan_extents(planes, n_planes, items, n_items, g->dma.extents, GPU_DMA_EXTENTS);
    return costs_cut(&g->costs.of[direction], g->dma.extents, n, GPU_DMA_EXTENTS);
}

uint32_t gpu_dma_plan(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                      struct ucm_copy_item *items)
{
    return plan(g, job_direction(job), &job->region->planes[piece->first_plane], piece->n_planes,
                items, piece->n_items, piece->bytes / piece->n_items);
}

uint32_t gpu_dma_plan_entry(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items,
                            uint64_t entry)
{
    uint64_t bytes = piece->bytes / piece->n_items;
    struct ucm_copy_plane plane = {.base = entry,
                                   .stride = ucm_staging_pitch(bytes),
                                   .slot_offset = job_plane_at(job, piece->first_plane),
                                   .block_bytes = (uint32_t)bytes};

    for (uint32_t i = 0; i < piece->n_items; i++)
        items[i].block = i;
    return plan(g, job_direction(job), &plane, 1, items, piece->n_items, bytes);
}

/* Drivers before CUDA 13 have no batches: one call an extent. */
static CUresult launch_singly(struct gpu *g, CUstream stream, bool load, uint32_t n)
{
    CUresult r = CUDA_SUCCESS;

    for (uint32_t i = 0; r == CUDA_SUCCESS && i < n; i++) {
        const struct plan_extent *e = &g->dma.extents[i];
        CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .srcDevice = load ? e->slot : e->page,
                           .srcPitch = load ? e->slot_pitch : e->page_pitch,
                           .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .dstDevice = load ? e->page : e->slot,
                           .dstPitch = load ? e->page_pitch : e->slot_pitch,
                           .WidthInBytes = e->width,
                           .Height = e->rows};

        r = cuda.cuMemcpy2DAsync(&c, stream);
    }
    return r;
}

static CUmemcpy3DOperand operand(uint64_t address, uint64_t pitch)
{
    CUmemcpy3DOperand o = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER};

    o.op.ptr.ptr = address;
    o.op.ptr.rowLength = pitch;
    return o;
}

/* In stream order on both sides: with the looser source orders the engine could read a dump's pages
 * before what the stream waited for. */
static CUresult launch_batches(struct gpu *g, CUstream stream, bool load, uint32_t n)
{
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    struct gpu_dma *d = &g->dma;
    size_t n_runs = 0, n_rows = 0, first = 0;
    CUresult r = CUDA_SUCCESS;

    for (uint32_t i = 0; i < n; i++) {
        const struct plan_extent *e = &d->extents[i];
        CUmemcpy3DOperand slot = operand(e->slot, e->slot_pitch);
        CUmemcpy3DOperand page = operand(e->page, e->page_pitch);

        if (e->rows == 1) {
            d->to[n_runs] = load ? e->page : e->slot;
            d->from[n_runs] = load ? e->slot : e->page;
            d->sizes[n_runs++] = e->width;
            continue;
        }
        d->ops[n_rows++] =
            (CUDA_MEMCPY3D_BATCH_OP){.src = load ? slot : page,
                                     .dst = load ? page : slot,
                                     .extent = {.width = e->width, .height = e->rows, .depth = 1},
                                     .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    }
    if (n_runs > 0)
        r = cuda.cuMemcpyBatchAsync(d->to, d->from, d->sizes, n_runs, &attributes, &first, 1,
                                    stream);
    if (r == CUDA_SUCCESS && n_rows > 0)
        r = cuda.cuMemcpy3DBatchAsync(n_rows, d->ops, 0, stream);
    return r;
}

CUresult gpu_dma_launch(struct gpu *g, enum ucm_copy_direction direction, uint32_t n)
{
    CUstream stream = g->streams[direction].stream;
    bool load = direction == UCM_COPY_LOAD;
    CUresult r = cuda.cuMemcpyBatchAsync && cuda.cuMemcpy3DBatchAsync
                     ? launch_batches(g, stream, load, n)
                     : launch_singly(g, stream, load, n);

    /* A part may be under way, and no event will follow it. */
    if (r != CUDA_SUCCESS)
        (void)cuda.cuStreamSynchronize(stream);
    return r;
}
