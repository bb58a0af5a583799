/* What the steps of a selection have in common. That is an item's place among the sequences,
 * waiting for other items, and queries in the form that scores read. */
#ifndef UCM_KERNELS_SPARSE_SELECT_ITEM_CUH
#define UCM_KERNELS_SPARSE_SELECT_ITEM_CUH

#include "kernels/sparse/arith.h"
#include "kernels/sparse/select.h"
#include "kernels/sparse/select_cuda.h"

#include <cuda_fp16.h>

#define TEAM 8u  /* threads that score a block */
#define TEAMS 4u /* of a warp */
#define THREADS UCM_SELECT_CUDA_THREADS
#define WARPS (THREADS / WARP_LANES)
#define FIRST_SHIFT 21 /* a key's digits have 11, 11 and 10 bits */

typedef const struct ucm_select_cuda &args_t;

extern __shared__ __align__(128) uint32_t shared[]; /* an item's scores, by query head and block; or a list's keys */

/* A sequence and, of its blocks, those of one item. */
struct tile {
    uint32_t sequence, n; /* of all the sequence's blocks */
    uint32_t first, count;
};

/* ---- items that wait for others ---- */

static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *at)
{
    uint32_t value;

    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

static __device__ __forceinline__ void wait_for(const uint32_t *done, uint32_t count)
{
    if (threadIdx.x == 0) {
        while (load_acquire(done) < count)
            __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

static __device__ __forceinline__ void item_done(uint32_t *done)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(done, 1);
    }
}

static __device__ __forceinline__ struct ucm_select_cuda_progress *progress(args_t a, uint32_t sequence)
{
    return (struct ucm_select_cuda_progress *)a.progress + sequence;
}

/* ---- queries ---- */

static __device__ __forceinline__ float query_value(args_t a, uint64_t at)
{
    if (a.q_dtype == UCM_SELECT_Q_F32)
        return __ldg((const float *)a.q + at);
    if (a.q_dtype == UCM_SELECT_Q_BF16)
        return ucm_bf16_decode(__ldg((const uint16_t *)a.q + at));
    return __half2float(__ushort_as_half(__ldg((const uint16_t *)a.q + at)));
}

/* Four channels from c on of the query that begins at element `at`; 0 past the last. */
static __device__ __forceinline__ void query_word(args_t a, uint64_t at, uint32_t c, float out[4])
{
    const uint16_t *channel = (const uint16_t *)a.channel;

    if (channel || !a.q_aligned || c + 4 > a.channels) {
        for (uint32_t j = 0; j < 4; j++)
            out[j] = c + j < a.channels ? query_value(a, at + (channel ? channel[c + j] : c + j)) : 0.0f;
    } else if (a.q_dtype == UCM_SELECT_Q_F32) {
        *(float4 *)out = __ldg((const float4 *)((const float *)a.q + at + c));
    } else {
        ushort4 h = __ldg((const ushort4 *)((const uint16_t *)a.q + at + c));
        uint16_t x[4] = {h.x, h.y, h.z, h.w};

        for (uint32_t j = 0; j < 4; j++)
            out[j] = a.q_dtype == UCM_SELECT_Q_BF16 ? ucm_bf16_decode(x[j])
                                                    : __half2float(__ushort_as_half(x[j]));
    }
}

/* 0xff where a channel's query is not negative: for box, which then takes hi. */
static __device__ __forceinline__ uint32_t high_mask(const float q[4])
{
    uint32_t mask = 0;

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        mask |= q[j] >= 0 ? 0xffu << 8 * j : 0;
    return mask;
}

/* After its channels, a prepared query for box has a mask for each four of them, and the sum of all
 * |q|. */
static __device__ __forceinline__ const uint32_t *query_masks(args_t a, const float *query)
{
    return (const uint32_t *)(query + a.padded);
}

static __device__ __forceinline__ float query_size(args_t a, const float *query)
{
    return query[a.padded + a.padded / 4];
}

/* By a warp: rounds a query as ucm_summary_round does. */
static __device__ __noinline__ void round_query(args_t a, float *q)
{
    uint32_t largest = 0, units = 0;
    int32_t e;

    __syncwarp();
    for (uint32_t c = warp_lane(); c < a.channels; c += WARP_LANES)
        largest = max(largest, ucm_f32_bits(q[c]) & 0x7fffffffu);
    largest = __reduce_max_sync(WARP_ALL, largest);
    e = ucm_grid_first(min(largest, UCM_GRID_TOP));
    if (largest < UCM_GRID_TOP)
        for (uint32_t c = warp_lane(); c < a.channels; c += WARP_LANES)
            units += (uint32_t)ucm_rint(ucm_abs(q[c]) * ucm_power(-e));
    e += (int32_t)ucm_grid_coarser(__reduce_add_sync(WARP_ALL, units), a.channels, a.rounds);
    for (uint32_t c = warp_lane(); c < a.channels; c += WARP_LANES)
        q[c] = largest < UCM_GRID_TOP ? ucm_rint(q[c] * ucm_power(-e)) * ucm_power(e) : ucm_f32(0x7fc00000u);
}

/* By a warp: the query that begins at element `at` of q. */
template <int F>
static __device__ __forceinline__ void prepare_query(args_t a, uint64_t at, float *out)
{
    float sum = 0;

    for (uint32_t c = 4 * warp_lane(); c < a.padded; c += 4 * WARP_LANES) {
        float x[4];

        query_word(a, at, c, x);
        *(float4 *)(out + c) = *(const float4 *)x;
        if (F == UCM_SELECT_BOX)
            ((uint32_t *)out)[a.padded + c / 4] = high_mask(x);
    }
    if ((F == UCM_SELECT_DOT || F == UCM_SELECT_REST) && a.rounds)
        round_query(a, out);
    if (F == UCM_SELECT_BOX) {
        __syncwarp();
        for (uint32_t c = warp_lane(); c < a.padded; c += WARP_LANES)
            sum += ucm_abs(out[c]);
        sum = warp_fold(sum);
        if (warp_lane() == 0)
            out[a.padded + a.padded / 4] = sum;
    }
}

/* The same for hashes, to words. */
static __device__ __forceinline__ void prepare_hash(args_t a, uint64_t at, float *out)
{
    struct bit_writer bits = {(uint32_t *)out, 0, 0};

    for (uint32_t i = 0; i < a.n_segments; i++) {
        const struct ucm_cuda_segment s = a.segment[i];
        auto load = [&](uint32_t j) {
            return query_value(a, at + s.first + warp_lane() + WARP_LANES * j);
        };

        if (s.size <= 4 * WARP_LANES)
            row_hash<4>(s, (const uint32_t *)a.flips, &bits, load);
        else
            row_hash<32>(s, (const uint32_t *)a.flips, &bits, load);
    }
}

/* By all threads: a sequence's queries, those of one KV head together. */
template <int F>
static __device__ __forceinline__ void prepare_queries(args_t a, uint32_t sequence, float *to)
{
    uint32_t group = a.q_heads / a.kv_heads;

#pragma unroll 1
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint32_t row = i / a.q_heads, head = i % a.q_heads;
        uint64_t at = sequence * a.q_stride + (uint64_t)i * a.head_dim;
        float *out = to + (head / group * a.queries_a_head + row * group + head % group) * a.query_floats;

        if constexpr (F == UCM_SELECT_HASH)
            prepare_hash(a, at, out);
        else
            prepare_query<F>(a, at, out);
    }
}

/* A sequence's prepared queries. An item of their own prepares them in the workspace, or each
 * thread block that scores, in its shared memory. */
static __device__ __forceinline__ float *prepared(args_t a, uint32_t sequence)
{
    if (!a.prepares)
        return (float *)(shared + a.query_at / 4);
    return (float *)a.queries + (uint64_t)sequence * a.rows * a.q_heads * a.query_floats;
}

template <int F>
static __device__ __noinline__ void prepare_item(args_t a, uint32_t sequence)
{
    prepare_queries<F>(a, sequence, prepared(a, sequence));
    item_done(&progress(a, sequence)->prepared);
}

#endif
