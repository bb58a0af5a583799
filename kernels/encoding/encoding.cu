/* The kernels: each warp takes tiles of sections, in the order in which they lie in the slots. */
#include "kernels/encoding/fp8.cuh"
#include "kernels/encoding/int8.cuh"

template <class M, bool ENCODE>
static __device__ __forceinline__ void one_tile(const struct ucm_encoding_spec &spec,
                                                uint32_t section, uint64_t plain, uint64_t coded,
                                                uint32_t tile, uint32_t lane)
{
    const struct ucm_encoding_section &s = spec.section[section];

    if (M::CHANNELS && ucm_encoding_by_channel(&spec, section))
        columns_tile<M::DTYPE, ENCODE>(s, plain, coded, tile, lane);
    else
        rows_tile<M, ENCODE>(s, plain, coded, tile, lane);
}

template <class M, bool ENCODE>
static __device__ __forceinline__ void
walk(const struct ucm_encoding_plane *planes, uint32_t n_planes, const struct ucm_copy_item *items,
     uint32_t n_items, const struct ucm_encoding_spec &spec, uint32_t tiles)
{
    uint32_t lane = threadIdx.x % LANES;
    uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    uint64_t warps = (uint64_t)gridDim.x * blockDim.x / LANES;
    uint64_t total = (uint64_t)n_items * n_planes * tiles;

    for (uint64_t t = warp; t < total; t += warps) {
        uint64_t number = t / tiles;
        const struct ucm_encoding_plane *plane = &planes[number % n_planes];
        const struct ucm_copy_item *item = &items[number / n_planes];

        one_tile<M, ENCODE>(spec, plane->section, plane->base + item->block * plane->stride,
                            item->slot + plane->slot_offset, (uint32_t)(t % tiles), lane);
    }
}

#define KERNELS(METHOD, NAME, DTYPE)                                                               \
    extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)                             \
        ucm_encoding_##NAME##_load(const struct ucm_encoding_plane *planes, uint32_t n_planes,     \
                                   const struct ucm_copy_item *items, uint32_t n_items,            \
                                   struct ucm_encoding_spec spec, uint32_t tiles)                  \
    {                                                                                              \
        walk<METHOD<DTYPE>, false>(planes, n_planes, items, n_items, spec, tiles);                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)                             \
        ucm_encoding_##NAME##_dump(const struct ucm_encoding_plane *planes, uint32_t n_planes,     \
                                   const struct ucm_copy_item *items, uint32_t n_items,            \
                                   struct ucm_encoding_spec spec, uint32_t tiles)                  \
    {                                                                                              \
        walk<METHOD<DTYPE>, true>(planes, n_planes, items, n_items, spec, tiles);                  \
    }

KERNELS(fp8, fp8_bf16, UCM_ENCODING_BF16)
KERNELS(fp8, fp8_f16, UCM_ENCODING_F16)
KERNELS(int8, int8_bf16, UCM_ENCODING_BF16)
KERNELS(int8, int8_f16, UCM_ENCODING_F16)
