/* After a round: whether its list ends, and what is reported. Before the first: the order of the lists. */
#ifndef UCM_KERNELS_ATTEND_STOP_CUH
#define UCM_KERNELS_ATTEND_STOP_CUH

#include "kernels/attend/arith.h"
#include "kernels/attend/attend_merge.cuh"

#define RULE_ESTIMATED 2u /* enum ucm_stop_rule */
#define RULE_CERTIFIED 3u
#define UNKNOWN UINT64_MAX /* units */

/* struct ucm_stop_report */
struct report {
    uint32_t blocks, rounds;
    float share, certificate;
};

/* ---- shares of rows ---- */

static __device__ __forceinline__ float left_ratio(const struct ucm_attend_cuda_left &l, uint32_t list, uint32_t room,
                                                   uint32_t blocks, float top, float sum, float slack)
{
    struct ucm_left left;
    float ratio;

    left.top = ((const float *)l.top)[list];
    left.units = ((const uint64_t *)l.units)[(uint64_t)list * (room + 1) + blocks];
    left.unknown = left.units == UNKNOWN;
    ratio = ucm_left_ratio(top, sum, slack, &left);
    if (l.beyond != 0)
        ratio += ucm_left_ratio(top, sum, slack, (const struct ucm_left *)l.beyond + list);
    return ratio;
}

/* How far top + ln(sum) is from exact, at most. Tensor cores add 16 products to a sum at once, each cut at the last bit
 * of the largest: 17 units of 2^-23 of what the absolute values add up to, D / 16 times, is less than 2^-18 of it
 * each. exp2f is off by 2 units, its argument by a rounding; sums over tiles, warps, splits and rounds are as in
 * ucm_attend_slack, whose 2^-20 a tile is twice what they take here. */
static __device__ __forceinline__ float slack_of(args_t a, uint32_t channels, float abs_sum, float key_max, float top,
                                                 uint32_t tiles)
{
    float logits = (float)(channels / 16 + 4) * 0x1p-18f * (abs_sum * key_max) + 0x1p-120f;
    float slack = (logits * a.stop.logit_scale + (float)tiles * 0x1p-20f + 0x1p-16f + ucm_abs(top) * 0x1p-21f) * 1.125f;

    return slack < 0.25f ? slack : INFINITY;
}

/* |q| of each row, to abs_sum: a warp a row. */
template <typename T, int D>
static __device__ __forceinline__ void add_queries(args_t a, float *abs_sum)
{
    const T *q = (const T *)a.q + blockIdx.z * a.q_stride + (uint64_t)blockIdx.y * a.group * D;

    for (uint32_t row = threadIdx.x / 32; row < a.group; row += WARPS) {
        float sum = 0.0f;

        for (uint32_t c = threadIdx.x % 32; c < D; c += 32)
            sum += fabsf(float(q[row * D + c]));
#pragma unroll
        for (uint32_t h = 16; h > 0; h /= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, h);
        if (threadIdx.x % 32 == 0)
            abs_sum[row] = sum;
    }
}

static __device__ __forceinline__ float rule_share(args_t a, uint32_t list, const sum_t &s, uint32_t blocks,
                                                   uint32_t rest, float certificate)
{
    float top = s.top * LN_2;
    struct ucm_left alike;

    if (rest == 0)
        return 1.0f;
    if (!(s.sum == s.sum))
        return 0.0f;
    switch (a.stop.rule) {
    case RULE_PSA:
        alike = ucm_left_alike(s.lightest * LN_2, rest);
        return ucm_left_share_of(ucm_left_ratio(top, s.sum, 0.0f, &alike));
    case RULE_ESTIMATED:
        return ucm_left_share_of(left_ratio(a.stop.estimate, list, a.room, blocks, top, s.sum, 0.0f));
    case RULE_CERTIFIED:
        return certificate;
    default:
        return 0.0f;
    }
}

/* ---- a list ---- */

/* Shares are positive, so their bits order as they do. */
static __device__ __forceinline__ void take_least(float *cell, float x)
{
    atomicMin((uint32_t *)cell, __float_as_uint(x));
}

/* By the last of the list's KV heads. */
static __device__ __forceinline__ void decide(args_t a, uint32_t list, uint32_t blocks)
{
    volatile float *least = (volatile float *)a.stop.least + 2 * list;
    float share = least[0], certificate = least[1];

    ((struct report *)a.stop.report)[list] = report{blocks, a.round + 1, share, certificate};
    if (a.stop.rule != 0 && share >= a.stop.eps)
        ((uint32_t *)a.stop.stopped)[list] = 1;
    least[0] = least[1] = 1.0f;
}

/* By the thread block that has finished a KV head's rows. abs_sum: scratch, of each row. */
template <typename T, int D>
static __device__ __forceinline__ void stop_head(args_t a, const sum_t *rows, float *abs_sum)
{
    uint32_t list = list_of(a), heads = a.lists > 1 ? 1 : a.kv_heads, row = threadIdx.x;
    uint32_t count = min(((const uint32_t *)a.count)[list], a.room), blocks = min(a.end, count);
    uint32_t rest = count - blocks + (a.stop.beyond != 0 ? ((const uint32_t *)a.stop.beyond)[list] : 0);
    uint32_t tiles = blocks * (a.tokens / TILE);
    float *least = (float *)a.stop.least + 2 * list;

    if (a.length != 0) /* the window has fewer than its chain */
        tiles += ((const uint32_t *)a.length)[blockIdx.z] / TILE + 1;
    if (a.stop.certify != 0)
        add_queries<T, D>(a, abs_sum);
    __syncthreads();
    if (row < a.group) {
        const sum_t s = rows[row];
        float certificate = 0.0f, top = s.top * LN_2, slack;

        if (rest == 0) {
            certificate = 1.0f;
        } else if (a.stop.certify != 0 && s.sum == s.sum) {
            slack = slack_of(a, D, abs_sum[row], s.key_max, top, tiles);
            certificate = ucm_left_share_of(left_ratio(a.stop.bound, list, a.room, blocks, top, s.sum, slack));
        }
        take_least(&least[0], rule_share(a, list, s, blocks, rest, certificate));
        take_least(&least[1], certificate);
    }
    if (is_last((uint32_t *)a.stop.heads + list, heads) && threadIdx.x == 0)
        decide(a, list, blocks);
}

/* ---- the order of a list ---- */

#define ORDER_THREADS UCM_ATTEND_CUDA_ORDER_THREADS

/* The best score has the smallest key; of equals the earlier. */
static __device__ __forceinline__ void sort_keys(uint64_t *key, uint32_t n)
{
    for (uint32_t size = 2; size <= n; size *= 2)
        for (uint32_t half = size / 2; half > 0; half /= 2) {
            for (uint32_t i = threadIdx.x; i < n / 2; i += ORDER_THREADS) {
                uint32_t at = i / half * 2 * half + i % half;
                bool up = (at & size) == 0;
                uint64_t x = key[at], y = key[at + half];

                if ((x > y) == up) {
                    key[at] = y;
                    key[at + half] = x;
                }
            }
            __syncthreads();
        }
}

/* The largest of what is known, over the thread block. */
static __device__ __forceinline__ float largest_known(float x)
{
    __shared__ float warp[ORDER_THREADS / 32];

#pragma unroll
    for (uint32_t h = 16; h > 0; h /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, h));
    if (threadIdx.x % 32 == 0)
        warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp[0];
#pragma unroll
    for (uint32_t w = 1; w < ORDER_THREADS / 32; w++)
        x = fmaxf(x, warp[w]);
    __syncthreads();
    return x;
}

/* Sums never reach it: at most 2^12 blocks of 2^41 units. */
static __device__ __forceinline__ uint64_t add_units(uint64_t x, uint64_t y)
{
    return x == UNKNOWN || y == UNKNOWN ? UNKNOWN : x + y;
}

/* This thread's sum and those of the threads behind it. */
static __device__ __forceinline__ uint64_t units_behind(uint64_t own, uint64_t *sum)
{
    sum[threadIdx.x] = own;
    __syncthreads();
    for (uint32_t h = 1; h < ORDER_THREADS; h *= 2) {
        uint64_t x = threadIdx.x + h < ORDER_THREADS ? sum[threadIdx.x + h] : 0;

        __syncthreads();
        sum[threadIdx.x] = add_units(sum[threadIdx.x], x);
        __syncthreads();
    }
    return threadIdx.x + 1 < ORDER_THREADS ? sum[threadIdx.x + 1] : 0;
}

struct order_scores {
    const float *at;
    bool box;
    float logit_scale, ln_tokens;
};

static __device__ __forceinline__ float log_weight_of(const struct order_scores &s, uint32_t entry)
{
    return s.box ? ucm_left_of_box(s.logit_scale, s.at[entry], s.ln_tokens) : s.at[entry];
}

/* What is left behind each of the list's n blocks, which come in the order of the low halves of key. */
static __device__ __forceinline__ void put_left(const struct ucm_attend_cuda_left &to, uint32_t list, uint32_t room,
                                                const struct order_scores &scores, const uint64_t *key, uint32_t n)
{
    __shared__ uint64_t sum[ORDER_THREADS];
    uint32_t each = (n + ORDER_THREADS - 1) / ORDER_THREADS, first = threadIdx.x * each, end = min(first + each, n);
    uint64_t *units = (uint64_t *)to.units + (uint64_t)list * (room + 1), behind = 0;
    float top = -INFINITY;

    for (uint32_t i = first; i < end; i++) {
        float w = log_weight_of(scores, (uint32_t)key[i]);

        if (ucm_left_is_known(w))
            top = fmaxf(top, w);
    }
    top = largest_known(top);
    for (uint32_t i = first; i < end; i++) {
        float w = log_weight_of(scores, (uint32_t)key[i]);

        behind = add_units(behind, ucm_left_is_known(w) ? ucm_left_units(top, w) : UNKNOWN);
    }
    behind = units_behind(behind, sum);
    for (uint32_t i = end; i > first; i--) {
        float w = log_weight_of(scores, (uint32_t)key[i - 1]);

        units[i] = behind;
        behind = add_units(behind, ucm_left_is_known(w) ? ucm_left_units(top, w) : UNKNOWN);
    }
    if (threadIdx.x == 0) {
        units[0] = behind;
        if (n == 0)
            units[0] = 0;
        ((float *)to.top)[list] = top;
    }
    __syncthreads();
}

static __device__ __forceinline__ void order(const struct ucm_attend_cuda_order &a)
{
    __shared__ uint64_t key[UCM_ATTEND_CUDA_ORDER];
    uint32_t list = blockIdx.x, n = min(((const uint32_t *)a.count)[list], a.room), size = 1;
    uint64_t at = (uint64_t)list * a.room;
    const float *score = (const float *)a.score;

    while (size < n)
        size *= 2;
    for (uint32_t i = threadIdx.x; i < size; i += ORDER_THREADS)
        key[i] = i >= n         ? UINT64_MAX
                 : a.score == 0 ? i
                                : (uint64_t)~ucm_score_key(score[at + i]) << 32 | i;
    __syncthreads();
    if (a.score != 0)
        sort_keys(key, size);
    for (uint32_t i = threadIdx.x; i < n; i += ORDER_THREADS)
        ((int32_t *)a.to)[at + i] = ((const int32_t *)a.list)[at + (uint32_t)key[i]];
    if (a.estimate_score != 0)
        put_left(a.estimate, list, a.room, order_scores{(const float *)a.estimate_score + at, false, 0.0f, 0.0f}, key,
                 n);
    if (a.box_score != 0)
        put_left(a.bound, list, a.room,
                 order_scores{(const float *)a.box_score + at, true, a.logit_scale, a.ln_tokens}, key, n);
    if (threadIdx.x == 0) {
        ((uint32_t *)a.stopped)[list] = 0;
        ((float *)a.least)[2 * list] = ((float *)a.least)[2 * list + 1] = 1.0f;
    }
}

#endif
