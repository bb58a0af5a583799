/* The copy kernel: each warp takes tiles of chunks, in the order in which they lie in the slots, so
 * that the bus sees long runs. A tile is moved in the widest pieces that both of its ends allow;
 * eight loads are under way before the first store, to cover the bus's latency. Data passes once:
 * it is marked for early eviction, to leave the caches to the worker. */
extern "C" {
#include "kernels/copy.h"
}

#define LANES 32u
#define UNROLL 8u

template <typename T>
static __device__ __forceinline__ void copy_pieces(T *to, const T *from, uint32_t n, uint32_t lane)
{
    for (uint32_t i = lane; i < n; i += LANES * UNROLL) {
        T piece[UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++)
            if (i + u * LANES < n)
                piece[u] = __ldcs(from + i + u * LANES);
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++)
            if (i + u * LANES < n)
                __stcs(to + i + u * LANES, piece[u]);
    }
}

/* Whole pieces of T, then the odd bytes behind them. */
template <typename T>
static __device__ __forceinline__ void copy_run(uint64_t to, uint64_t from, uint32_t bytes,
                                                uint32_t lane)
{
    uint32_t n = bytes / (uint32_t)sizeof(T), whole = n * (uint32_t)sizeof(T);

    copy_pieces((T *)to, (const T *)from, n, lane);
    if (whole < bytes)
        copy_pieces((unsigned char *)(to + whole), (const unsigned char *)(from + whole),
                    bytes - whole, lane);
}

static __device__ __forceinline__ void copy_tile(uint64_t to, uint64_t from, uint32_t bytes,
                                                 uint32_t lane)
{
    uint64_t ends = to | from;

    if (ends % sizeof(uint4) == 0)
        copy_run<uint4>(to, from, bytes, lane);
    else if (ends % sizeof(uint32_t) == 0)
        copy_run<uint32_t>(to, from, bytes, lane);
    else
        copy_pieces((unsigned char *)to, (const unsigned char *)from, bytes, lane);
}

extern "C" __global__ void __launch_bounds__(UCM_COPY_THREADS)
ucm_copy(const struct ucm_copy_plane *planes, uint32_t n_planes, const struct ucm_copy_item *items,
         uint32_t n_items, uint32_t tiles, uint32_t direction)
{
    uint32_t lane = threadIdx.x % LANES;
    uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    uint64_t warps = (uint64_t)gridDim.x * blockDim.x / LANES;
    uint64_t total = (uint64_t)n_items * n_planes * tiles;

    for (uint64_t t = warp; t < total; t += warps) {
        uint64_t chunk_number = t / tiles;
        uint32_t begin = (uint32_t)(t % tiles) * UCM_COPY_TILE_BYTES;
        const struct ucm_copy_plane *plane = &planes[chunk_number % n_planes];
        uint32_t chunk = plane->chunk;

        /* tiles counts those of the largest chunk: a smaller one has no bytes for the last of them. */
        if (begin >= chunk)
            continue;
        const struct ucm_copy_item *item = &items[chunk_number / n_planes];
        uint64_t slot = item->slot + plane->slot_offset + begin;
        uint64_t page = plane->base + item->block * plane->stride + begin;
        uint32_t bytes = min(chunk - begin, UCM_COPY_TILE_BYTES);

        if (direction == UCM_COPY_LOAD)
            copy_tile(page, slot, bytes, lane);
        else
            copy_tile(slot, page, bytes, lane);
    }
}
