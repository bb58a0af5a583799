/* Top k of a list that fits a thread block's registers. A thread has HELD blocks in a row. The
 * first digits are counted already. Two more digits give the key at which the taking ends. Then
 * every thread knows where its blocks go. */
#ifndef UCM_KERNELS_SPARSE_SELECT_TOP_CUH
#define UCM_KERNELS_SPARSE_SELECT_TOP_CUH

#include "kernels/sparse/select_cut.cuh"

#define HELD (UCM_SELECT_CUDA_LONG / THREADS)

/* The digit, from the largest down, in which the taking ends, and what of it is still to be taken.
 * -1: all are taken. count: the thread's, of digits DIGITS - 1 - 4 threadIdx.x and the three below,
 * the highest first. */
static __device__ __forceinline__ int32_t walk_counts(const uint32_t count[4], uint32_t *need)
{
    __shared__ uint32_t part[WARPS], left;
    __shared__ int32_t digit;
    uint32_t warp = threadIdx.x / WARP_LANES, own = count[0] + count[1] + count[2] + count[3];
    uint32_t before = own;

    for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
        uint32_t other = __shfl_up_sync(WARP_ALL, before, s);

        before += warp_lane() >= s ? other : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        digit = -1;
    if (warp_lane() == WARP_LANES - 1)
        part[warp] = before;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++)
        before += i < warp ? part[i] : 0;
    before -= own;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (before < *need && before + count[i] >= *need) {
            digit = (int32_t)(DIGITS - 1 - 4 * threadIdx.x - i);
            left = *need - before;
        }
        before += count[i];
    }
    __syncthreads();
    if (digit >= 0)
        *need = left;
    return digit;
}

/* The thread's digits at `from`, in the form that walk_counts takes. */
static __device__ __forceinline__ uint4 *own_digits(uint32_t *from)
{
    static_assert(DIGITS == 4 * THREADS, "a thread has four digits");
    return (uint4 *)from + (THREADS - 1 - threadIdx.x);
}

/* As walk_counts, of the thread's own digits. The digit is known to exist. */
static __device__ __forceinline__ uint32_t walk_digits(uint4 own, uint32_t *need)
{
    uint32_t count[4] = {own.w, own.z, own.y, own.x};

    return (uint32_t)walk_counts(count, need);
}

/* Keys of blocks between the windows; 0, which no score has, for others. */
struct held {
    uint32_t key[HELD];
};

static __device__ __forceinline__ void load_held(const struct choose &c, struct held *to)
{
    static_assert(HELD % 4 == 0, "scores are loaded four at a time");
#pragma unroll
    for (uint32_t i = 0; i < HELD; i += 4) {
        uint32_t b = HELD * threadIdx.x + i;
        float4 x = b < c.n ? __ldcg((const float4 *)(c.scores + b)) : float4{};
        float four[4] = {x.x, x.y, x.z, x.w};

#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            to->key[i + j] = b + j >= c.begin && b + j < c.end ? ucm_score_key(four[j]) : 0;
    }
}

/* Goes one digit further: among the keys that begin with prefix, the next `width` bits of the one
 * at which the taking ends. counts are 0. */
static __device__ __forceinline__ uint32_t next_digit(const struct held &h, uint32_t *counts, uint32_t prefix,
                                                      uint32_t shift, uint32_t width, uint32_t *need)
{
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        if (h.key[i] >> (shift + width) == prefix)
            atomicAdd(counts + (h.key[i] >> shift & ((1u << width) - 1)), 1);
    __syncthreads();
    return prefix << width | walk_digits(*own_digits(counts), need);
}

/* How many the threads before this one have. x: at most 16 in each half; both halves at once. */
static __device__ __forceinline__ uint32_t sum_before(uint32_t x, uint32_t *all)
{
    __shared__ uint32_t part[WARPS];
    uint32_t warp = threadIdx.x / WARP_LANES, sum = x;

    static_assert(UCM_SELECT_CUDA_LONG < 1u << 16, "a sum fits a half");
    for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
        uint32_t other = __shfl_up_sync(WARP_ALL, sum, s);

        sum += warp_lane() >= s ? other : 0;
    }
    if (warp_lane() == WARP_LANES - 1)
        part[warp] = sum;
    __syncthreads();
    *all = 0;
    for (uint32_t i = 0; i < WARPS; i++) {
        sum += i < warp ? part[i] : 0;
        *all += part[i];
    }
    return sum - x;
}

/* Puts the blocks above the cut, and of those that equal it the lowest, from place `at` on. Returns
 * how many. */
static __device__ __forceinline__ uint32_t put_held(const struct choose &c, const struct held &h,
                                                    const struct cut &cut, const struct answer &to, uint32_t at)
{
    uint32_t halves = 0, all, over, same;

#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        halves += (uint32_t)(h.key[i] > cut.key) + ((uint32_t)(h.key[i] == cut.key) << 16);
    halves = sum_before(halves, &all);
    over = halves & 0xffff;
    same = halves >> 16;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        bool is_over = h.key[i] > cut.key, is_same = h.key[i] == cut.key;

        if (is_over || (is_same && same < cut.ties))
            put(c, to, at + over + min(same, cut.ties), HELD * threadIdx.x + i);
        over += is_over;
        same += is_same;
    }
    return (all & 0xffff) + min(all >> 16, cut.ties);
}

/* windows < room <= n <= UCM_SELECT_CUDA_LONG. Puts blocks between the windows at place `at` and
 * after it. Returns how many. counts: 2 * DIGITS. +inf is the largest key, so those blocks come
 * first, as far as they fit. */
static __device__ __forceinline__ uint32_t put_top_held(args_t a, const struct choose &c, uint32_t *counts,
                                                        uint32_t *digits, uint32_t windows, uint32_t room,
                                                        const struct answer &to, uint32_t at)
{
    __shared__ uint32_t poison;
    uint32_t most = min(c.most, room), need;
    struct cut cut = {0, 0}; /* all */
    struct held h;
    uint4 own = __ldcg(own_digits(digits));

    load_held(c, &h);
    *own_digits(digits) = *own_digits(counts) = *own_digits(counts + DIGITS) = uint4{};
    if (DIGITS - 1 - POISON_DIGIT >= 4 * threadIdx.x && DIGITS - 1 - POISON_DIGIT < 4 * threadIdx.x + 4)
        poison = POISON_DIGIT % 4 == 0 ? own.x : POISON_DIGIT % 4 == 1 ? own.y : POISON_DIGIT % 4 == 2 ? own.z : own.w;
    __syncthreads();
    need = max(most > windows ? most - windows : 0, min(poison, room - windows));
    if (need < c.end - c.begin) {
        uint32_t prefix = need > 0 ? walk_digits(own, &need) : 0;

        if (need > 0) {
            prefix = next_digit(h, counts, prefix, 10, 11, &need);
            prefix = next_digit(h, counts + DIGITS, prefix, 0, 10, &need);
        } else {
            prefix = ~0u;
        }
        cut = {prefix, need};
    }
    return put_held(c, h, cut, to, at);
}

#endif
