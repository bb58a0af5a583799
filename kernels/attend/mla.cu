/* Attention of one decode step over latents (MLA), of the chosen blocks of each sequence and its
 * local window. It is one launch, and where lists are split, a second one that merges. attend.h has
 * the reference, and mla_cuda.h says what these kernels take. What attend.cu says of tiles, splits,
 * bits and bounds holds here.
 *
 * One latent serves up to 128 query heads, so unlike there the warps of a thread block share all
 * tiles. A split has large results, 2 KiB a query head. So a launch of its own merges them, spread
 * over the whole GPU. */
#include "kernels/attend/mla_tiles.cuh"

/* ---- a split's result ---- */

/* The lane's row of the row group: h (0 or 1) of row tile r. */
template <int R> static __device__ __forceinline__ uint32_t row_of_result(uint32_t r, uint32_t h)
{
    return r * 16 + h * 8 + threadIdx.x % 32 / 4;
}

/* Two neighbours of the lane's channels in a row, n = 0 .. WARP_VALUES / 8 - 1; and where they
 * lie. */
template <typename KV>
static __device__ __forceinline__ float2 channels_at(const float out[WARP_VALUES / 8][4], uint32_t h, uint32_t n,
                                                     uint32_t *at)
{
    uint32_t first = threadIdx.x / 32 * WARP_VALUES, lane = threadIdx.x % 4;

    if constexpr (sizeof(KV) == 2) {
        *at = first + n * 8 + lane * 2;
        return make_float2(out[n][2 * h], out[n][2 * h + 1]);
    } else { /* even ones, odd ones */
        *at = first + n / 2 * 16 + lane * 4 + n % 2 * 2;
        return make_float2(out[n / 2 * 2][2 * h + n % 2], out[n / 2 * 2 + 1][2 * h + n % 2]);
    }
}

static __device__ __forceinline__ float result_factor(args_t a, float sum)
{
    return sum > 0 || sum != sum ? (a.v_scale == 0 ? 1.0f : a.v_scale) / sum : 0.0f;
}

/* A list that one split covers. */
template <typename T, typename KV, int R>
static __device__ __forceinline__ void put_result(args_t a, const struct mla_state<R> &st, const sum_t *sums)
{
    uint64_t first = ((uint64_t)blockIdx.z * a.kv_heads + blockIdx.y) * a.group;

#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t row = row_of_result<R>(r, h);
            float by = result_factor(a, sums[row].sum);

#pragma unroll
            for (uint32_t n = 0; n < WARP_VALUES / 8; n++) {
                uint32_t at;
                float2 x = channels_at<KV>(st.out[r], h, n, &at);

                if (row < a.group)
                    *(uint32_t *)((T *)a.out + (first + row) * VALUES + at) = element<T>::pair(x.x * by, x.y * by);
            }
        }
    if (threadIdx.x < a.group && a.lse != 0)
        ((float *)a.lse)[first + threadIdx.x] = lse_of(sums[threadIdx.x]);
}

template <typename KV, int R>
static __device__ __forceinline__ void put_part(args_t a, const struct mla_state<R> &st, const sum_t *sums)
{
    uint64_t list_row = (uint64_t)blockIdx.z * a.kv_heads + blockIdx.y;
    struct parts to = parts_of<VALUES>(a, list_row, blockIdx.x);

#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++)
#pragma unroll
            for (uint32_t n = 0; n < WARP_VALUES / 8; n++) {
                uint32_t at, row = row_of_result<R>(r, h);
                float2 x = channels_at<KV>(st.out[r], h, n, &at);

                if (row < a.group)
                    *(float2 *)(to.out + row * VALUES + at) = x;
            }
    if (threadIdx.x < a.group)
        to.sum[threadIdx.x] = sums[threadIdx.x];
}

template <int R> static __device__ __forceinline__ void put_sums(const struct mla_state<R> &st, sum_t *sums)
{
#pragma unroll
    for (uint32_t i = 0; i < R; i++) {
        float sum = row16_sum(st.sum[i]);

        if (threadIdx.x % 16 == 0)
            sums[row_of_lane<R>(i)] = sum_t{st.top[i], sum, INFINITY, 0.0f};
    }
}

/* Alongside the scratch and the ring. */
struct mla_block {
    uint64_t where[UCM_ATTEND_CUDA_SPLIT], barriers[UCM_ATTEND_MLA_RING];
    sum_t sums[UCM_ATTEND_MLA_ROWS];
};
static_assert(sizeof(struct mla_block) <= UCM_ATTEND_MLA_STATIC, "mla_cuda.h");

template <typename T, typename KV, int R> static __device__ __forceinline__ void mla(args_t a)
{
    __shared__ struct mla_block block;
    struct mla_scratch<R> &scratch = *(struct mla_scratch<R> *)shared;
    struct ring ring = {(uint8_t *)shared + sizeof(scratch), block.barriers, a.ring, 0, 0, 0, 0};
    struct chosen early = chosen_early(a, blockIdx.x * a.split_tiles + threadIdx.x);
    struct tiles t = tiles_of(a);
    struct split s = split_of(a, t);
    struct mla_state<R> st;

    let_next_launch_begin();
    if (blockIdx.x >= s.of)
        return;
    if (threadIdx.x < a.ring)
        tile_barrier_begin(block.barriers + threadIdx.x);
    look_up<MLA_THREADS>(a, t, s, early, block.where);
    mla_begin<R>(st);
    __syncthreads();
    if (a.wait)
        arrived_before_copies(); /* blocks that came just before they were looked up */
    mla_tiles<T, KV, R>(a, block.where, s.n, ring, scratch, st);
    put_sums<R>(st, block.sums);
    __syncthreads();
    if (s.of > 1)
        put_part<KV, R>(a, st, block.sums);
    else
        put_result<T, KV, R>(a, st, block.sums);
    if (a.wait && blockIdx.x == 0)
        await_launch();
}

/* ---- splits into a list's result ---- */

#define MERGE_CHANNELS (VALUES / UCM_ATTEND_MLA_MERGE_BLOCKS)
#define MERGE_WARPS (UCM_ATTEND_MLA_MERGE_THREADS / 32)

/* Merges the sums of one row; each warp does so for itself. from: the first split's. */
static __device__ __forceinline__ sum_t merge_sums(args_t a, const sum_t *from, uint32_t splits)
{
    sum_t all = sum_t{-INFINITY, 0.0f, INFINITY, 0.0f};

    for (uint32_t s = threadIdx.x % 32; s < splits; s += 32)
        all.top = fmaxf(all.top, from[s * a.group].top);
#pragma unroll
    for (uint32_t h = 16; h > 0; h /= 2)
        all.top = fmaxf(all.top, __shfl_xor_sync(ALL_LANES, all.top, h));
    for (uint32_t s = threadIdx.x % 32; s < splits; s += 32)
        all.sum += exp2f(from[s * a.group].top - base_of(all.top)) * from[s * a.group].sum;
#pragma unroll
    for (uint32_t h = 16; h > 0; h /= 2)
        all.sum += __shfl_xor_sync(ALL_LANES, all.sum, h);
    return all;
}

/* A warp's splits, every fourth, of four channels a lane. */
static __device__ __forceinline__ float4 merge_every_fourth(args_t a, const struct parts &from, uint32_t splits, float base)
{
    uint32_t warp = threadIdx.x / 32, mine = splits > warp ? (splits - warp + MERGE_WARPS - 1) / MERGE_WARPS : 0;
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f), x[AT_ONCE];

    for (uint32_t i = 0; i < mine; i += AT_ONCE) {
        load_splits(x, from.out + (uint64_t)(i * MERGE_WARPS) * a.group * VALUES, (uint64_t)MERGE_WARPS * a.group * VALUES,
                    mine - i);
#pragma unroll
        for (uint32_t j = 0; j < AT_ONCE; j++)
            if (i + j < mine)
                add_scaled(&all, exp2f(from.sum[(i + j) * MERGE_WARPS * a.group].top - base), x[j]);
    }
    return all;
}

/* blockIdx: x: channels and row of a row group; y: row group; z: sequence. */
template <typename T> static __device__ __forceinline__ void mla_merge(args_t a)
{
    uint32_t warp = threadIdx.x / 32, row = blockIdx.x / UCM_ATTEND_MLA_MERGE_BLOCKS;
    uint32_t channel = blockIdx.x % UCM_ATTEND_MLA_MERGE_BLOCKS * MERGE_CHANNELS + threadIdx.x % 32 * 4;
    uint64_t list_row = (uint64_t)blockIdx.z * a.kv_heads + blockIdx.y, out = list_row * a.group + row;
    __shared__ float4 part[MERGE_WARPS][32];
    struct parts from;
    uint32_t splits;
    sum_t all;

    await_launch();
    from = parts_of<VALUES>(a, list_row, 0);
    splits = splits_of(a, tiles_of(a));
    if (splits == 1)
        return;
    all = merge_sums(a, from.sum + row, splits);
    from.out += (uint64_t)(warp * a.group + row) * VALUES + channel;
    from.sum += warp * a.group + row;
    part[warp][threadIdx.x % 32] = merge_every_fourth(a, from, splits, base_of(all.top));
    __syncthreads();
    if (warp > 0)
        return;
    for (uint32_t w = 1; w < MERGE_WARPS; w++)
        add_scaled(&part[0][threadIdx.x], 1.0f, part[w][threadIdx.x]);
    put_out<T>(a, out * VALUES + channel, part[0][threadIdx.x], all.sum);
    if (threadIdx.x == 0 && channel == 0 && a.lse != 0)
        ((float *)a.lse)[out] = lse_of(all);
}

#define KERNEL(name, type, kv, rows)                                                                                   \
    static_assert(sizeof(struct mla_scratch<rows / 16>) == rows / 16 * UCM_ATTEND_MLA_SCRATCH, "mla_cuda.h");          \
    extern "C" __global__ void __launch_bounds__(MLA_THREADS)                                                          \
        ucm_attend_mla_##name##_##rows(const __grid_constant__ struct ucm_attend_cuda args)                            \
    {                                                                                                                  \
        mla<type, kv, rows / 16>(args);                                                                                \
    }
#define KERNELS(name, type)                                                                                            \
    KERNEL(name, type, type, 16)                                                                                       \
    KERNEL(name, type, type, 32)                                                                                       \
    KERNEL(name##_e4m3, type, e4m3, 16)                                                                                \
    KERNEL(name##_e4m3, type, e4m3, 32)                                                                                \
    extern "C" __global__ void __launch_bounds__(UCM_ATTEND_MLA_MERGE_THREADS)                                         \
        ucm_attend_mla_merge_##name(const __grid_constant__ struct ucm_attend_cuda args)                               \
    {                                                                                                                  \
        mla_merge<type>(args);                                                                                         \
    }

KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
