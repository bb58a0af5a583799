#include "daemon/device/gpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What one launch is made of. Runs go to the driver as one batch, rows as another; both are read
 * before the calls return. */
struct gpu_dma {
    struct plan_extent extents[GPU_DMA_EXTENTS];
    CUdeviceptr to[GPU_DMA_EXTENTS], from[GPU_DMA_EXTENTS];
    size_t sizes[GPU_DMA_EXTENTS];
    CUDA_MEMCPY3D_BATCH_OP ops[GPU_DMA_EXTENTS];
};

int gpu_dma_init(struct gpu *g)
{
    g->dma = calloc(1, sizeof(*g->dma));
    return g->dma ? 0 : -ENOMEM;
}

void gpu_dma_close(struct gpu *g)
{
    free(g->dma);
    g->dma = NULL;
}

struct plan_extent *gpu_dma_extents(struct gpu *g)
{
    return g->dma->extents;
}

uint32_t gpu_dma_plan(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                      struct ucm_copy_item *items)
{
    const struct ucm_copy_plane *planes = &job->region->planes[piece->first_plane];
    enum ucm_copy_direction direction = job->op == DEVICE_LOAD ? UCM_COPY_LOAD : UCM_COPY_DUMP;
    uint32_t n;
    uint64_t offset = planes->slot_offset;
    uint64_t bytes = piece->bytes / piece->n_items;

    for (uint32_t i = 0; i < piece->n_items; i++) {
        items[i].memory = gpu_memory_pin_of(&g->memory, items[i].slot + offset, bytes);
        if (items[i].memory == 0)
            return 0;
    }
    n = plan_extents(planes, piece->n_planes, items, piece->n_items, g->dma->extents,
                     GPU_DMA_EXTENTS);
    return costs_cut(&g->costs.of[direction], g->dma->extents, n, GPU_DMA_EXTENTS);
}

uint32_t gpu_dma_plan_slice(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items,
                            uint64_t slice, uint64_t pitch)
{
    enum ucm_copy_direction direction = job->op == DEVICE_LOAD ? UCM_COPY_LOAD : UCM_COPY_DUMP;
    uint64_t bytes = piece->bytes / piece->n_items;
    struct ucm_copy_plane plane = {.base = slice,
                                   .stride = pitch,
                                   .slot_offset =
                                       job->region->planes[piece->first_plane].slot_offset,
                                   .chunk = (uint32_t)bytes};
    uint32_t n;

    for (uint32_t i = 0; i < piece->n_items; i++) {
        uint64_t slot = job->items[piece->first_item + i].slot;
        uint32_t memory = gpu_memory_pin_of(&g->memory, slot + plane.slot_offset, bytes);

        if (memory == 0)
            return 0;
        items[i] = (struct ucm_copy_item){.slot = slot, .block = i, .memory = memory};
    }
    n = plan_extents(&plane, 1, items, piece->n_items, g->dma->extents, GPU_DMA_EXTENTS);
    return costs_cut(&g->costs.of[direction], g->dma->extents, n, GPU_DMA_EXTENTS);
}

static CUDA_MEMCPY2D rows_of(const struct plan_extent *e, bool load)
{
    CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                       .srcDevice = load ? e->slot : e->page,
                       .srcPitch = load ? e->slot_pitch : e->page_pitch,
                       .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                       .dstDevice = load ? e->page : e->slot,
                       .dstPitch = load ? e->page_pitch : e->slot_pitch,
                       .WidthInBytes = e->width,
                       .Height = e->rows};
    return c;
}

static CUmemcpy3DOperand operand(uint64_t address, uint64_t pitch)
{
    CUmemcpy3DOperand o = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER};

    o.op.ptr.ptr = address;
    o.op.ptr.rowLength = pitch;
    return o;
}

/* Drivers before CUDA 13 have no such batches: one call an extent. */
static CUresult launch_singly(struct gpu *g, CUstream stream, bool load, uint32_t n)
{
    CUresult r = CUDA_SUCCESS;

    for (uint32_t i = 0; r == CUDA_SUCCESS && i < n; i++) {
        CUDA_MEMCPY2D c = rows_of(&g->dma->extents[i], load);

        r = cuda.cuMemcpy2DAsync(&c, stream);
    }
    return r;
}

/* In stream order on both sides: the looser orders would let the engine read a dump's pages before
 * what the stream waited for. */
static CUresult launch_batches(struct gpu *g, CUstream stream, bool load, uint32_t n)
{
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    struct gpu_dma *d = g->dma;
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

CUresult gpu_dma_launch(struct gpu *g, CUstream stream, enum ucm_copy_direction direction,
                        uint32_t n)
{
    bool load = direction == UCM_COPY_LOAD;
    CUresult r = cuda.cuMemcpyBatchAsync && cuda.cuMemcpy3DBatchAsync
                     ? launch_batches(g, stream, load, n)
                     : launch_singly(g, stream, load, n);

    /* A part may be on its way, and nobody will wait for it. */
    if (r != CUDA_SUCCESS)
        (void)cuda.cuStreamSynchronize(stream);
    return r;
}
