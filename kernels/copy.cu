/* The copy kernel. Each warp takes tiles of fragments, in the order in which they lie in the slots,
 * so that the bus sees long runs. */
extern "C" {
#include "kernels/copy.h"
}
#include "kernels/copy.cuh"

extern "C" __global__ void __launch_bounds__(UCM_COPY_THREADS)
ucm_copy(const struct ucm_copy_plane *planes, uint32_t n_planes, const struct ucm_copy_item *items,
         uint32_t n_items, uint32_t tiles, uint32_t direction)
{
    uint32_t lane = threadIdx.x % LANES;
    uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    uint64_t warps = (uint64_t)gridDim.x * blockDim.x / LANES;
    uint64_t total = (uint64_t)n_items * n_planes * tiles;

    for (uint64_t t = warp; t < total; t += warps) {
        uint64_t fragment_number = t / tiles;
        uint32_t begin = (uint32_t)(t % tiles) * UCM_COPY_TILE_BYTES;
        const struct ucm_copy_plane *plane = &planes[fragment_number % n_planes];
        uint32_t fragment = plane->block_bytes;

        /* tiles counts those of the largest fragment. A smaller one has no bytes for the last of
         * them. */
        if (begin >= fragment)
            continue;
        const struct ucm_copy_item *item = &items[fragment_number / n_planes];
        uint64_t slot = item->slot + plane->slot_offset + begin;
        uint64_t page = plane->base + item->block * plane->stride + begin;
        uint32_t bytes = min(fragment - begin, UCM_COPY_TILE_BYTES);

        if (direction == UCM_COPY_LOAD)
            copy_tile(page, slot, bytes, lane);
        else
            copy_tile(slot, page, bytes, lane);
    }
}
