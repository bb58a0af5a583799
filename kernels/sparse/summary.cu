/* Summaries on a GPU. A warp computes one KV head of one layer of one block, then the next. A
 * launch takes few thread blocks with little or no shared memory, so that it runs alongside the
 * worker's own kernels. The bits are those of the C code in simd/, whose functions have the same
 * names.
 *
 * summary_rows.cuh has what the methods have in common, summary_mean.cuh, summary_hash.cuh,
 * summary_stats.cuh and summary_tokens.cuh the methods; here are the kernels. */
#include "kernels/sparse/summary_hash.cuh"
#include "kernels/sparse/summary_mean.cuh"
#include "kernels/sparse/summary_stats.cuh"
#include "kernels/sparse/summary_tokens.cuh"

template <int M, int D, int N>
static __device__ __forceinline__ void build_head(args_t a, const struct head &h)
{
    if (M == UCM_SUMMARY_MEAN)
        build_mean<D, N>(a, h);
    else if (M == UCM_SUMMARY_SUBMEAN)
        build_submean<D, N>(a, h);
    else if (M == UCM_SUMMARY_BOX)
        build_box<D, N>(a, h);
    else if (M == UCM_SUMMARY_HASH)
        build_hash<D, N>(a, h);
    else if (M == UCM_SUMMARY_STATS)
        build_stats<D, N>(a, h);
    else
        build_tokens<D, N>(a, h);
}

template <int M, int D, int N>
static __device__ __forceinline__ void build_all(args_t a)
{
    extern __shared__ float distances[];
    uint32_t warp = threadIdx.x / WARP_LANES;
    uint64_t heads = (uint64_t)a.n_layers * a.n_blocks * a.kv_heads;
    uint64_t step = (uint64_t)gridDim.x * UCM_SUMMARY_CUDA_WARPS;

    for (uint64_t i = (uint64_t)blockIdx.x * UCM_SUMMARY_CUDA_WARPS + warp; i < heads; i += step) {
        uint32_t g = (uint32_t)(i % a.kv_heads), b = (uint32_t)(i / a.kv_heads % a.n_blocks);
        const struct ucm_summary_cuda_layer *l = &a.layer[i / a.kv_heads / a.n_blocks];
        uint32_t from = ((const uint32_t *)a.block)[b], to = ((const uint32_t *)a.out_block)[b];
        struct head h;

        if (from >= a.blocks || to >= a.out_blocks)
            continue;
        h.k = l->k + from * a.block_stride + g * a.k_head_stride;
        h.v = l->v + from * a.block_stride + g * a.v_head_stride;
        h.out = (uint8_t *)(l->out + to * a.out_stride);
        h.g = g;
        h.distance = distances + warp * a.tokens;
        build_head<M, D, N>(a, h);
        if (g == 0 && warp_lane() < a.bytes - a.used)
            h.out[a.used + warp_lane()] = 0;
    }
}

#define KERNEL(method, dtype, n)                                                                   \
    extern "C" __global__ void __launch_bounds__(UCM_SUMMARY_CUDA_THREADS)                          \
    ucm_summary_##method##_##dtype##_##n(const __grid_constant__ struct ucm_summary_cuda args)       \
    {                                                                                              \
        build_all<method, dtype, n>(args);                                                         \
    }
#define KERNELS_OF(method, dtype)                                                                  \
    KERNEL(method, dtype, 4)                                                                       \
    KERNEL(method, dtype, 8)                                                                       \
    KERNEL(method, dtype, 32)
#define KERNELS(method)                                                                            \
    KERNEL(method, 0, 32)                                                                          \
    KERNELS_OF(method, 1)                                                                          \
    KERNELS_OF(method, 2)                                                                          \
    KERNELS_OF(method, 3)

/* By the numbers of sparse.h. */
KERNELS(1)
KERNELS(2)
KERNELS(3)
KERNELS(4)
KERNELS(5)
KERNELS(6)
