/* How a warp copies a run of bytes. It moves a tile in the widest pieces that both of its ends
 * allow. Eight loads are under way before the first store, to cover the bus's latency. Data passes
 * once, so it is marked for early eviction, to leave the caches to the worker. */
#ifndef UCM_KERNELS_COPY_CUH
#define UCM_KERNELS_COPY_CUH

#include <stdint.h>

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

/* Whole pieces of T, then the odd bytes after them. */
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

#endif
