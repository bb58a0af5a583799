/* What the steps of a selection have in common: an item's place among the chains, waiting for other
 * items, and queries in the form in which scores read them. */
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

/* A chain and, of its blocks, those of one item. */
struct tile {
    uint32_t chain, n; /* of all the chain's blocks */
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

static __device__ __forceinline__ struct ucm_select_cuda_progress *progress(args_t a, uint32_t chain)
{
    return (struct ucm_select_cuda_progress *)a.progress + chain;
}

/* ---- queries ---- */

static __device__ __forceinline__ float query_value(args_t a, uint64_t at)
{
    if (a.q_dtype == UCM_SELECT_Q_F32)
        return ((const float *)a.q)[at];
    if (a.q_dtype == UCM_SELECT_Q_BF16)
        return ucm_bf16_decode(((const uint16_t *)a.q)[at]);
    return __half2float(((const __half *)a.q)[at]);
}

static __device__ __forceinline__ float *prepared(args_t a, uint32_t chain, uint32_t g, uint32_t i)
{
    uint64_t query = ((uint64_t)chain * a.kv_heads + g) * a.queries_a_head + i;

    return (float *)a.queries + query * a.query_floats;
}

static __device__ __forceinline__ void prepare_hash(args_t a, uint64_t at, float *out)
{
    struct bit_writer bits = {(uint32_t *)out, 0, 0};

    for (uint32_t i = 0; i < a.n_segments; i++) {
        const struct ucm_cuda_segment s = a.segment[i];

        row_hash<32>(s, (const uint32_t *)a.flips, &bits, [&](uint32_t j) {
            return query_value(a, at + s.first + warp_lane() + WARP_LANES * j);
        });
    }
}

/* By a warp: one query head, from element `at` of q. */
template <int F>
static __device__ __forceinline__ void prepare_query(args_t a, uint64_t at, float *out)
{
    const uint16_t *channel = (const uint16_t *)a.channel;
    float sum = 0;

    for (uint32_t c = warp_lane(); c < a.padded; c += WARP_LANES) {
        float x = c < a.channels ? query_value(a, at + (channel ? channel[c] : c)) : 0.0f;

        out[c] = x;
        if (F == UCM_SELECT_STATS)
            out[a.padded + c] = x * x;
        if (c < a.channels)
            sum += ucm_abs(x);
    }
    if (F == UCM_SELECT_BOX) {
        sum = warp_fold(sum);
        if (warp_lane() == 0)
            out[a.padded] = sum;
    }
}

template <int F>
static __device__ __noinline__ void prepare_item(args_t a, uint32_t chain)
{
    uint32_t group = a.q_heads / a.kv_heads;

    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint32_t row = i / a.q_heads, head = i % a.q_heads;

        uint64_t at = chain * a.q_stride + (uint64_t)i * a.head_dim;
        float *out = prepared(a, chain, head / group, row * group + head % group);

        if constexpr (F == UCM_SELECT_HASH)
            prepare_hash(a, at, out);
        else
            prepare_query<F>(a, at, out);
    }
    item_done(&progress(a, chain)->prepared);
}

#endif
