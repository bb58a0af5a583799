/* After a round: whether its list ends, where the next round ends, and what is reported. */
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

/* For a query row (counted over all sequences): what is left after the first 0, 1, .. blocks of its
 * list. */
static __device__ __forceinline__ const uint64_t *left_units(args_t a, uint64_t row)
{
    return (const uint64_t *)a.stop.left.units + row * (a.room + 1);
}

static __device__ __forceinline__ float left_ratio(args_t a, uint64_t row, uint32_t blocks, float top, float sum,
                                                   float slack)
{
    struct ucm_left left;

    left.top = ((const float *)a.stop.left.top)[row];
    left.units = left_units(a, row)[blocks];
    left.unknown = left.units == UNKNOWN;
    return ucm_left_ratio(top, sum, slack, &left);
}

/* How far top + ln(sum) is from exact, at most. Tensor cores add 16 products to a sum at once, each
 * cut at the last bit of the largest. That errs by 17 units of 2^-23 of the sum of absolute values,
 * D / 16 times: less than 2^-18 of the sum each. exp2f is off by 2 units, its argument by a
 * rounding. Sums over tiles, warps, splits and rounds are as in ucm_attend_slack, whose 2^-20 a
 * tile is twice what they need here. */
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

static __device__ __forceinline__ float rule_share(args_t a, uint64_t row, const sum_t &s, uint32_t blocks,
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
        return ucm_left_share_of(left_ratio(a, row, blocks, top, s.sum, 0.0f));
    case RULE_CERTIFIED:
        return certificate;
    default:
        return 0.0f;
    }
}

/* ---- where the next round ends ---- */

/* Whether the rule would be fulfilled after `end` blocks for each row of a KV head. */
static __device__ __forceinline__ bool would_end(args_t a, uint64_t first_row, const sum_t *rows, uint32_t blocks,
                                                 uint32_t end)
{
    bool all = true;

    for (uint32_t row = 0; row < a.group && all; row++) {
        const uint64_t *units = left_units(a, first_row + row);
        float top = ((const float *)a.stop.left.top)[first_row + row] * 1.44269504f;
        float unit = exp2f(top - rows[row].top) / rows[row].sum * 0x1p-40f, gain = 0.0f;

        if (a.stop.rule == RULE_ESTIMATED && units[blocks] != UNKNOWN)
            gain = (float)(units[blocks] - units[end]) * unit;
        all = units[end] != UNKNOWN && (float)units[end] * unit * a.stop.eps <= (1.0f - a.stop.eps) * (1.0f + gain);
    }
    return all;
}

/* At least an eighth more than now, so that few rounds reach the end. By the whole thread block. */
static __device__ __noinline__ uint32_t next_end(args_t a, uint64_t first_row, const sum_t *rows, uint32_t blocks,
                                                 uint32_t count)
{
    uint32_t every = a.stop.every, least = (blocks + max(every, blocks / 8) + every - 1) / every * every;
    bool predicts = a.stop.rule >= RULE_ESTIMATED;
    __shared__ uint32_t end;

    if (threadIdx.x == 0)
        end = predicts ? count : min(count, max(2 * blocks, least));
    __syncthreads();
    for (uint32_t i = least + threadIdx.x * every; predicts && i < count; i += THREADS * every)
        if (would_end(a, first_row, rows, blocks, i)) {
            atomicMin(&end, i);
            break;
        }
    __syncthreads();
    return end;
}

/* ---- a list ---- */

/* Shares are positive, so their bits have the same order. */
static __device__ __forceinline__ void take_least(float *cell, float x)
{
    atomicMin((uint32_t *)cell, __float_as_uint(x));
}

static __device__ __forceinline__ void tell(args_t a, uint32_t blocks, float share)
{
    struct ucm_attend_cuda_told *told = (struct ucm_attend_cuda_told *)a.stop.told;

    atomicMax(&told->rounds, a.round + 1);
    take_least(&told->share, share);
    atomicAdd((unsigned long long *)&told->blocks, blocks);
}

/* By the last of the list's KV heads. If a block was missing the list ends, since the step does not
 * count. */
static __device__ __forceinline__ void decide(args_t a, uint32_t list, uint32_t blocks, uint32_t count)
{
    volatile float *least = (volatile float *)a.stop.least + 2 * list;
    volatile uint32_t *next = (volatile uint32_t *)a.stop.next + list;
    float share = least[0], certificate = least[1];
    bool over = blocks == count || (a.stop.rule != 0 && share >= a.stop.eps) ||
                (*(volatile uint32_t *)a.flags & UCM_ATTEND_NO_ENTRY) != 0;
    uint32_t end = over ? blocks : a.round + 2 < a.stop.rounds ? min(*next, count) : count;

    for (uint32_t r = a.round + 2; r <= a.stop.rounds; r++)
        ((uint32_t *)a.stop.ends)[(uint64_t)r * a.sequences * a.lists + list] = end;
    if (a.stop.report != 0)
        ((struct report *)a.stop.report)[list] = report{blocks, a.round + 1, share, certificate};
    if (a.stop.told != 0 && (over || a.round + 1 == a.stop.rounds))
        tell(a, blocks, share);
    least[0] = least[1] = 1.0f;
    *next = 0;
}

/* By the thread block that has finished a KV head's rows. abs_sum: scratch, a value for each
 * row. */
template <typename T, int D>
static __device__ __forceinline__ void stop_head(args_t a, const sum_t *rows, float *abs_sum)
{
    uint32_t list = list_of(a), heads = a.kv_heads / a.lists, row = threadIdx.x;
    uint64_t first_row = ((uint64_t)blockIdx.z * a.kv_heads + blockIdx.y) * a.group;
    uint32_t count = min(((const uint32_t *)a.count)[list], a.room);
    uint32_t blocks = min(count, round_at(a, a.round + 1, list));
    uint32_t rest = max(count, (uint32_t)max(0, ((const int32_t *)a.stop.candidates)[blockIdx.z])) - blocks;
    uint32_t tiles = blocks * (a.tokens / TILE), next = count;
    float *least = (float *)a.stop.least + 2 * list;
    bool certify = a.stop.known == UCM_ATTEND_CUDA_BOUNDS;

    if (a.length != 0) /* the window has fewer blocks than its sequence */
        tiles += ((const uint32_t *)a.length)[blockIdx.z] / TILE + 1;
    if (certify)
        add_queries<T, D>(a, abs_sum);
    if (a.round + 2 < a.stop.rounds && blocks < count)
        next = next_end(a, first_row, rows, blocks, count);
    __syncthreads();
    if (row < a.group) {
        const sum_t s = rows[row];
        float certificate = 0.0f, top = s.top * LN_2, slack;

        if (rest == 0) {
            certificate = 1.0f;
        } else if (certify && s.sum == s.sum) {
            slack = slack_of(a, D, abs_sum[row], s.key_max, top, tiles);
            certificate = ucm_left_share_of(left_ratio(a, first_row + row, blocks, top, s.sum, slack));
        }
        take_least(&least[0], rule_share(a, first_row + row, s, blocks, rest, certificate));
        take_least(&least[1], certificate);
    }
    if (row == 0)
        atomicMax((uint32_t *)a.stop.next + list, next);
    if (is_last((uint32_t *)a.stop.heads + list, heads) && threadIdx.x == 0)
        decide(a, list, blocks, count);
}

#endif
