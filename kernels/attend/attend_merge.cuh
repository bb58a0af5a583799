/* Merges warps into a thread block's result, splits into a list's, and rounds into one. Each goes
 * in order, so the bits depend on the list and not on which ends first. The weights for merging are
 * worked out once for each row, and lie in shared memory before any channel is read. */
#ifndef UCM_KERNELS_ATTEND_MERGE_CUH
#define UCM_KERNELS_ATTEND_MERGE_CUH

#include "kernels/arith.h"
#include "kernels/attend/attend_tiles.cuh"

#define LN_2 0.69314718056f

typedef struct ucm_attend_cuda_sum sum_t;

/* Rows of results in shared memory have eight floats more than D. So neither writing by fragments
 * nor reading by rows has many bank conflicts. */
#define PITCH(D) ((D) + 8)

static __device__ __forceinline__ float base_of(float top)
{
    return top == -INFINITY ? 0.0f : top;
}

/* Joins two sums. The caller joins their values: those of x times keep, plus those of y times more.
 * NaN stays. */
static __device__ __forceinline__ sum_t join_sums(const sum_t &x, const sum_t &y, float *keep, float *more)
{
    sum_t r;

    r.top = fmaxf(x.top, y.top);
    *keep = exp2f(x.top - base_of(r.top));
    *more = exp2f(y.top - base_of(r.top));
    r.sum = x.sum * *keep + y.sum * *more;
    r.lightest = fminf(x.lightest, y.lightest);
    r.key_max = fmaxf(x.key_max, y.key_max);
    return r;
}

static __device__ __forceinline__ void add_scaled(float4 *to, float w, const float4 &x)
{
    to->x = ucm_fma(w, x.x, to->x);
    to->y = ucm_fma(w, x.y, to->y);
    to->z = ucm_fma(w, x.z, to->z);
    to->w = ucm_fma(w, x.w, to->w);
}

/* ---- warps ---- */

/* What the memory of the tiles holds after them. */
template <int D, int O> struct block_results {
    float out[WARPS][8 * O][PITCH(D)];
};

/* Alongside the tiles. */
struct block_sums {
    sum_t warp[WARPS][ROWS], row[ROWS];
    float weight[WARPS][ROWS];
};

/* The largest of a warp's keys; +inf if one is NaN. */
template <typename KV> struct key_max {
    static __device__ __forceinline__ float of(uint32_t bits)
    {
        float x = element<KV>::widen(__reduce_max_sync(ALL_LANES, max(bits & 0xffffu, bits >> 16)));

        return x == x ? x : INFINITY;
    }
};

template <> struct key_max<e4m3> {
    static __device__ __forceinline__ float of(uint32_t bits)
    {
        uint32_t most = max(max(bits & 0xffu, bits >> 8 & 0xffu), max(bits >> 16 & 0xffu, bits >> 24));
        float x = element<__half>::widen(e4m3_pair(__reduce_max_sync(ALL_LANES, most)) & 0xffffu);

        return x == x ? x : INFINITY;
    }
};

/* A lane's channels of one row, times `by`: a piece, and every eighth piece after it. */
template <typename KV, int D>
static __device__ __forceinline__ void put_row(const float out[D / 16][4], uint32_t r, float by, float *to)
{
    constexpr uint32_t n = row_of<KV, D>::v_channels;

#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::v_pieces; i++)
#pragma unroll
        for (uint32_t x = 0; x < n; x += 4) {
            const float *y = out[(i * n + x) / 2], *z = out[(i * n + x) / 2 + 1];

            *(float4 *)(to + (8 * i + threadIdx.x % 32 / 4) * n + x) =
                make_float4(y[r] * by, y[2 + r] * by, z[r] * by, z[2 + r] * by);
        }
}

template <typename KV, int D, int O>
static __device__ __forceinline__ void put_warp(struct warp_state<D, O> &st, struct block_sums &sums)
{
    struct block_results<D, O> *to = (struct block_results<D, O> *)shared;
    uint32_t warp = threadIdx.x / 32;
    float most = key_max<KV>::of(st.key_max), by = 1.0f;

    if (row_of<KV, D>::scales) {
        by = ucm_fp8_power(st.v_scale);
        most *= ucm_fp8_power(__reduce_max_sync(ALL_LANES, st.k_scale));
        most = most == most ? most : INFINITY;
    }
#pragma unroll
    for (uint32_t o = 0; o < O; o++)
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            uint32_t row = o * 8 + threadIdx.x % 4 * 2 + r;
            float sum = row_sum(st.sum[o][r]);

            put_row<KV, D>(st.out[o], r, by, to->out[warp][row]);
            if (threadIdx.x % 32 < 4)
                sums.warp[warp][row] = sum_t{st.top[o][r], sum, st.lightest[o][r], most};
        }
}

static __device__ __forceinline__ void weigh_warps(args_t a, struct block_sums &sums)
{
    uint32_t row = threadIdx.x;
    sum_t all = sum_t{-INFINITY, 0.0f, INFINITY, 0.0f};

    if (row >= a.group)
        return;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++)
        all.top = fmaxf(all.top, sums.warp[w][row].top);
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) {
        const sum_t &x = sums.warp[w][row];
        float weight = exp2f(x.top - base_of(all.top));

        sums.weight[w][row] = weight;
        all.sum += weight * x.sum;
        all.lightest = fminf(all.lightest, x.lightest);
        all.key_max = fmaxf(all.key_max, x.key_max);
    }
    sums.row[row] = all;
}

/* Four channels of a row, of all warps. */
template <int D, int O>
static __device__ __forceinline__ float4 merge_warps(const struct block_sums &sums, uint32_t row, uint32_t channel)
{
    const struct block_results<D, O> *from = (const struct block_results<D, O> *)shared;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++)
        add_scaled(&x, sums.weight[w][row], *(const float4 *)&from->out[w][row][channel]);
    return x;
}

/* ---- a list's row so far, to where callers read it ---- */

template <typename T>
static __device__ __forceinline__ void put_out(args_t a, uint64_t at, float4 x, float sum)
{
    uint2 packed;
    float by = sum > 0 || sum != sum ? (a.v_scale == 0 ? 1.0f : a.v_scale) / sum : 0.0f;

    packed.x = element<T>::pair(x.x * by, x.y * by);
    packed.y = element<T>::pair(x.z * by, x.w * by);
    *(uint2 *)((T *)a.out + at) = packed;
}

static __device__ __forceinline__ float lse_of(const sum_t &s)
{
    return s.sum == 0 ? -INFINITY : (s.top + log2f(s.sum)) * LN_2;
}

/* Joins the earlier rounds' result to a row, and leaves it for the next round. */
template <typename T, int D>
static __device__ __forceinline__ void finish_channels(args_t a, uint64_t row, uint32_t channel, float4 x,
                                                       const sum_t &now, const sum_t &before)
{
    uint64_t at = row * D + channel;
    sum_t all = now;

    if (a.round > 0) {
        float keep, more;
        float4 y = *(const float4 *)((const float *)a.state + at), z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        all = join_sums(before, now, &keep, &more);
        add_scaled(&z, keep, y);
        add_scaled(&z, more, x);
        x = z;
    }
    if (a.state != 0)
        *(float4 *)((float *)a.state + at) = x;
    put_out<T>(a, at, x, all.sum);
}

/* After all channels: the row's sums. */
static __device__ __forceinline__ sum_t finish_sum(args_t a, uint64_t row, sum_t now, const sum_t &before)
{
    float keep, more;

    if (a.round > 0)
        now = join_sums(before, now, &keep, &more);
    if (a.state != 0)
        ((sum_t *)a.state_sum)[row] = now;
    if (a.lse != 0)
        ((float *)a.lse)[row] = lse_of(now);
    return now;
}

/* ---- splits ---- */

/* The list's rows in a workspace. */
struct parts {
    float *out;
    sum_t *sum;
};

template <int D>
static __device__ __forceinline__ struct parts parts_of(args_t a, uint64_t list_row, uint32_t split)
{
    uint64_t at = (list_row * a.splits + split) * a.group;

    return parts{(float *)a.partial + at * D, (sum_t *)a.partial_sum + at};
}

template <int D, int O>
static __device__ __forceinline__ void put_split(args_t a, uint64_t list_row, const struct block_sums &sums)
{
    struct parts to = parts_of<D>(a, list_row, blockIdx.x);

    for (uint32_t i = threadIdx.x * 4; i < a.group * D; i += THREADS * 4)
        *(float4 *)(to.out + i) = merge_warps<D, O>(sums, i / D, i % D);
    if (threadIdx.x < a.group)
        to.sum[threadIdx.x] = sums.row[threadIdx.x];
}

/* Each split's weight in a row, to weight[row][splits]; the row's sums. A warp a row. */
static __device__ __forceinline__ void weigh_splits(args_t a, const sum_t *from, uint32_t splits, float *weight,
                                                    struct block_sums &sums)
{
    uint32_t lane = threadIdx.x % 32;

    for (uint32_t row = threadIdx.x / 32; row < a.group; row += WARPS) {
        sum_t all = sum_t{-INFINITY, 0.0f, INFINITY, 0.0f};

        for (uint32_t s = lane; s < splits; s += 32)
            all.top = fmaxf(all.top, from[s * a.group + row].top);
#pragma unroll
        for (uint32_t h = 16; h > 0; h /= 2)
            all.top = fmaxf(all.top, __shfl_xor_sync(ALL_LANES, all.top, h));
        for (uint32_t s = lane; s < splits; s += 32) {
            sum_t x = from[s * a.group + row];
            float w = exp2f(x.top - base_of(all.top));

            weight[row * splits + s] = w;
            all.sum += w * x.sum;
            all.lightest = fminf(all.lightest, x.lightest);
            all.key_max = fmaxf(all.key_max, x.key_max);
        }
#pragma unroll
        for (uint32_t h = 16; h > 0; h /= 2) {
            all.sum += __shfl_xor_sync(ALL_LANES, all.sum, h);
            all.lightest = fminf(all.lightest, __shfl_xor_sync(ALL_LANES, all.lightest, h));
            all.key_max = fmaxf(all.key_max, __shfl_xor_sync(ALL_LANES, all.key_max, h));
        }
        if (lane == 0)
            sums.row[row] = all;
    }
}

/* Four channels of a row, of splits. It does so many loads at once that their latency counts a few
 * times, not once a split. */
#define AT_ONCE 8u

static __device__ __forceinline__ void load_splits(float4 x[AT_ONCE], const float *from, uint64_t stride, uint32_t splits)
{
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++)
        if (i < splits)
            x[i] = *(const float4 *)(from + i * stride);
}

/* x: of the first ones. */
static __device__ __forceinline__ float4 merge_splits(float4 x[AT_ONCE], const float *from, uint64_t stride,
                                                      const float *weight, uint32_t splits)
{
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (uint32_t s = 0; s < splits; s += AT_ONCE) {
        if (s > 0)
            load_splits(x, from + s * stride, stride, splits - s);
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            if (s + i < splits)
                add_scaled(&all, weight[s + i], x[i]);
    }
    return all;
}

/* Whether this thread block is the last of its list to end. Then it sees what the others wrote. */
static __device__ __forceinline__ bool is_last(uint32_t *done, uint32_t of)
{
    __shared__ bool last;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(done, 1) + 1 == of;
        if (last)
            *done = 0;
    }
    __syncthreads();
    if (last)
        __threadfence();
    return last;
}

#endif
