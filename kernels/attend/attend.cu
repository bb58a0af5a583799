/* Attention of one decode step over the chosen blocks of each sequence and its local window, in one
 * launch or in rounds. attend.h has the reference, and attend_cuda.h says what these kernels take.
 *
 * A launch's blocks, then the window's, are cut into tiles of 16 tokens. Runs of tiles are splits.
 * A thread block has one split of one KV head. Each of its warps takes every fourth tile, with a
 * softmax of its own (running maximum and sum, in base 2). Warps are merged in their order, splits
 * in theirs, launches in theirs. So the bits depend on the list and its cuts, not on where its
 * blocks lie, nor on which warp ends first. A list of all blocks is dense attention by this kernel,
 * and a step that is run again gives the same.
 *
 * K and V of a tile come by asynchronous copies, a tile ahead. The places of a split's tiles are
 * looked up all at once, before the first is copied. Logits and sums of weights are float32. The
 * weights that V is multiplied by are rounded to V's type (of E4M3 to float16), and results to the
 * query's. So a channel is within 2^-8 (bfloat16) or 2^-10 (float16) of the largest |v|.
 *
 * Entries may hold what the encoding `fp8` made of K and V: E4M3 with a power of two for each row.
 * Then these attend to what ucm_decode gives, except that codes 0x7e and 0xfe are 448 here and not
 * infinities. No entry is filled with them. Pages next to them can have elements of the query's
 * type. */
#include "kernels/attend/attend_cuda.h"
#include "kernels/attend/attend_merge.cuh"
#include "kernels/attend/attend_order.cuh"
#include "kernels/attend/attend_stop.cuh"
#include "kernels/attend/attend_tiles.cuh"

/* A list that one split covers. */
template <typename T, int D, int O>
static __device__ __forceinline__ void finish_block(args_t a, uint64_t row, const sum_t *before,
                                                    const struct block_sums &sums)
{
    for (uint32_t i = threadIdx.x * 4; i < a.group * D; i += THREADS * 4)
        finish_channels<T, D>(a, row + i / D, i % D, merge_warps<D, O>(sums, i / D, i % D), sums.row[i / D],
                              before[i / D]);
}

/* By the last thread block of a list. The tiles' memory is free, and takes the splits' weights. */
template <typename T, int D>
static __device__ __forceinline__ void finish_splits(args_t a, uint64_t list_row, uint32_t splits, const sum_t *before,
                                                     struct block_sums &sums)
{
    struct parts from = parts_of<D>(a, list_row, 0);
    uint32_t all = a.group * D, i = threadIdx.x * 4;
    float *weight = (float *)shared;
    float4 x[AT_ONCE];

    if (i < all)
        load_splits(x, from.out + i, all, splits);
    weigh_splits(a, from.sum, splits, weight, sums);
    __syncthreads();
    for (; i < all; i += THREADS * 4) {
        finish_channels<T, D>(a, list_row * a.group + i / D, i % D,
                              merge_splits(x, from.out + i, all, weight + i / D * splits, splits), sums.row[i / D],
                              before[i / D]);
        if (i + THREADS * 4 < all)
            load_splits(x, from.out + i + THREADS * 4, all, splits);
    }
}

template <typename T, int D, int O>
static __device__ __forceinline__ void finish(args_t a, uint32_t splits, struct block_sums &sums)
{
    uint64_t list_row = (uint64_t)blockIdx.z * a.kv_heads + blockIdx.y, row = list_row * a.group;
    __shared__ sum_t before[ROWS];
    __shared__ float abs_sum[ROWS];

    if (splits > 1) {
        put_split<D, O>(a, list_row, sums);
        if (!is_last((uint32_t *)a.done + list_row, splits))
            return;
    }
    if (threadIdx.x < a.group && a.round > 0)
        before[threadIdx.x] = ((const sum_t *)a.state_sum)[row + threadIdx.x];
    __syncthreads();
    if (splits > 1)
        finish_splits<T, D>(a, list_row, splits, before, sums);
    else
        finish_block<T, D, O>(a, row, before, sums);
    __syncthreads();
    if (threadIdx.x < a.group)
        sums.row[threadIdx.x] = finish_sum(a, row + threadIdx.x, sums.row[threadIdx.x], before[threadIdx.x]);
    __syncthreads();
    if (a.stop.ends != 0)
        stop_head<T, D>(a, sums.row, abs_sum);
    if (a.wait)
        await_launch();
}

/* A split's tiles, all of one type. It leaves the results of its warps in shared memory. */
template <typename T, typename KV, int D, int O, uint32_t S>
static __device__ __forceinline__ void attend_split(args_t a, uint64_t *where, uint32_t n, uint32_t chosen,
                                                    struct block_sums &sums)
{
    struct warp_state<D, O> st;

    warp_begin<D, O>(st, row_of<KV, D>::scales && a.pool.scales != 0);
    attend_tiles<T, KV, D, O, S>(a, where, n, chosen, st);
    __syncthreads(); /* the tiles' memory takes the results */
    put_warp<KV, D, O>(st, sums);
}

/* plain: the tiles have type T, whatever entries have. */
template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void attend_tiles_of(args_t a, uint64_t *where, uint32_t n, uint32_t chosen,
                                                       bool plain, struct block_sums &sums)
{
    if constexpr (sizeof(KV) < sizeof(T)) {
        if (plain) {
            attend_split<T, T, D, O, 1>(a, where, n, chosen, sums);
            return;
        }
    }
    attend_split<T, KV, D, O, STAGES>(a, where, n, chosen, sums);
}

template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void attend(args_t a)
{
    __shared__ uint64_t where[UCM_ATTEND_CUDA_SPLIT];
    __shared__ struct block_sums sums;
    struct chosen early = chosen_early(a, blockIdx.x * a.split_tiles + threadIdx.x);
    struct tiles t = tiles_of(a);
    struct split s = split_of(a, t);

    if (a.round > 0 && t.all == 0) { /* the list has stopped */
        if (a.wait)
            await_launch();
        return;
    }
    if (blockIdx.x >= s.of)
        return;
    look_up<THREADS>(a, t, s, early, where);
    __syncthreads();
    if (a.wait)
        arrived_before_copies(); /* blocks that came just before they were looked up */
    attend_tiles_of<T, KV, D, O>(a, where, s.n, t.chosen > s.first ? t.chosen - s.first : 0,
                                 a.plain_pages && s.first >= t.window, sums);
    __syncthreads();
    weigh_warps(a, sums);
    __syncthreads();
    finish<T, D, O>(a, s.of, sums);
}

#define KERNEL(name, type, kv, d, rows)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        ucm_attend_##name##_##d##_##rows(const __grid_constant__ struct ucm_attend_cuda args)                          \
    {                                                                                                                  \
        attend<type, kv, d, rows / 8>(args);                                                                           \
    }
#define KERNELS(name, type, kv)                                                                                        \
    KERNEL(name, type, kv, 64, 8)                                                                                      \
    KERNEL(name, type, kv, 64, 16)                                                                                     \
    KERNEL(name, type, kv, 128, 8)                                                                                     \
    KERNEL(name, type, kv, 128, 16)                                                                                    \
    KERNEL(name, type, kv, 256, 8)

KERNELS(f16, __half, __half)
KERNELS(bf16, __nv_bfloat16, __nv_bfloat16)
KERNELS(f16_e4m3, __half, e4m3)
KERNELS(bf16_e4m3, __nv_bfloat16, e4m3)

extern "C" __global__ void __launch_bounds__(ORDER_THREADS)
    ucm_attend_order(const __grid_constant__ struct ucm_attend_cuda_order args)
{
    order(args);
}
