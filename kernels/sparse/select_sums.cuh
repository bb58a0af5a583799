/* Sums over channels, and scores of vectors from them.
 *
 * Sums are defined with 32 lanes (docs/design/retrieval.md). A team of 8 threads computes one:
 * thread t has lanes 4t .. 4t + 3, a word of int8 in each 32 channels. For four queries at a time
 * each step of the fold halves the queries whose sums a thread keeps. */
#ifndef UCM_KERNELS_SPARSE_SELECT_SUMS_CUH
#define UCM_KERNELS_SPARSE_SELECT_SUMS_CUH

#include "kernels/sparse/select_item.cuh"

/* ---- words of int8 ---- */

/* Four bytes as floats, without conversions: each becomes the low byte of 2^23. */
static __device__ __forceinline__ void bytes_to_floats(uint32_t word, float bias, float out[4])
{
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        out[j] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + j)) - bias;
}

/* int8 as bytes that are larger by 128. */
static __device__ __forceinline__ uint32_t biased(uint32_t word)
{
    return word ^ 0x80808080u;
}

static __device__ __forceinline__ void biased_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word, 0x1.0001p23f, out);
}

static __device__ __forceinline__ void uint8_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word, 0x1p23f, out);
}

/* Channels of 4 bits, one in each byte's low half. */
static __device__ __forceinline__ void int4_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word ^ 0x08080808u, 0x1.00001p23f, out);
}

/* 16 bytes have 32 channels of 4 bits; a thread's 4 lie in word part % 4. */
static __device__ __forceinline__ uint32_t half_channels(uint32_t word, uint32_t part)
{
    return word >> part / 4 * 4 & 0x0f0f0f0fu;
}

/* Bytes c .. c + 3 of a vector of n; 0 past its end. */
static __device__ __forceinline__ uint32_t load_word(const uint8_t *vector, uint32_t c, uint32_t n,
                                                     uint32_t aligned)
{
    uint32_t word = 0;

    if (c >= n)
        return 0;
    if (aligned)
        return *(const uint32_t *)(vector + c);
    for (uint32_t j = 0; j < 4 && c + j < n; j++)
        word |= (uint32_t)vector[c + j] << 8 * j;
    return word;
}

static __device__ __forceinline__ float load_scale(const uint8_t *at)
{
    return ucm_bf16_decode(*(const uint16_t *)at);
}

/* ---- sums over channels, by teams ---- */

/* A family's int8 arrays, the sums that it needs, and whether a block has one vector a KV head. */
template <int F> struct family {
    static constexpr int arrays = F == UCM_SELECT_BOX || F == UCM_SELECT_STATS ? 2 : 1;
    static constexpr int sums = F == UCM_SELECT_STATS ? 2 : 1;
    static constexpr bool single = F == UCM_SELECT_BOX || F == UCM_SELECT_STATS;
};

/* The terms of four channels: q of Q queries, and the words of the family's arrays. mask: box,
 * high_mask of each query. */
template <int F, int Q>
static __device__ __forceinline__ void add_terms(float acc[family<F>::sums][Q][4], const float q[Q][4],
                                                 const uint32_t mask[Q],
                                                 const uint32_t word[family<F>::arrays], float s)
{
    uint32_t low = biased(word[0]), high = biased(word[family<F>::arrays - 1]);
    float r[2][4];

    if (F == UCM_SELECT_REST)
        int4_to_floats(word[0], r[0]);
    else if (F != UCM_SELECT_BOX)
        biased_to_floats(low, r[0]);
    if (F == UCM_SELECT_STATS)
        uint8_to_floats(word[family<F>::arrays - 1], r[1]);
#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        if (F == UCM_SELECT_BOX)
            biased_to_floats((high & mask[i]) | (low & ~mask[i]), r[0]);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float x = q[i][j];

            if (F == UCM_SELECT_DOT || F == UCM_SELECT_BOX || F == UCM_SELECT_REST)
                acc[0][i][j] = ucm_fma(x, r[0][j], acc[0][i][j]);
            if (F == UCM_SELECT_L2)
                acc[0][i][j] = ucm_fma(x - s * r[0][j], x - s * r[0][j], acc[0][i][j]);
            if (F == UCM_SELECT_STATS) {
                acc[0][i][j] = ucm_fma(x, r[0][j], acc[0][i][j]);
                acc[family<F>::sums - 1][i][j] =
                    ucm_fma(x * x, r[1][j], acc[family<F>::sums - 1][i][j]);
            }
        }
    }
}

static __device__ __forceinline__ float swap_add(float keep, float give, uint32_t with)
{
    return keep + __shfl_xor_sync(WARP_ALL, give, with);
}

/* Which query a thread has in place i. Each step of the fold keeps the first half of the places and
 * gives the second half away. For the thread that gets them these are the first half. */
template <int Q> static __device__ __forceinline__ uint32_t query_of(uint32_t i)
{
    return Q == 4 ? i ^ threadIdx.x % TEAM / 2 : i;
}

/* The sum over 32 lanes of query_of<Q>(0). */
template <int Q>
static __device__ __forceinline__ float team_fold(const float acc[Q][4])
{
    float x[4];

#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        if constexpr (Q == 4) {
            float a = swap_add(acc[0][j], acc[2][j], 4), b = swap_add(acc[1][j], acc[3][j], 4);

            x[j] = swap_add(a, b, 2);
        } else {
            x[j] = swap_add(acc[0][j], acc[0][j], 4);
            x[j] = swap_add(x[j], x[j], 2);
        }
        x[j] = swap_add(x[j], x[j], 1);
    }
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* The score of a block's vector v of a head, from its sums and scales. */
template <int F>
static __device__ __forceinline__ float finish(args_t a, const float sum[family<F>::sums],
                                               const float s[family<F>::sums], float abs_sum,
                                               uint32_t v)
{
    if (F == UCM_SELECT_REST)
        return ucm_rest_score(s[0], sum[0], a.stats_beta, v < a.chosen ? 0.0f : a.ln_count);
    if (F == UCM_SELECT_BOX)
        return ucm_box_score(s[0], sum[0], abs_sum);
    if (ucm_is_nan(s[0]))
        return ucm_inf();
    if (F == UCM_SELECT_L2)
        return -sum[0];
    if (F == UCM_SELECT_STATS)
        return ucm_stats_score(s[0], sum[0], s[family<F>::sums - 1], sum[family<F>::sums - 1],
                               a.stats_beta, a.ln_count);
    return s[0] * sum[0];
}

/* What a block's vectors give: the best of them; with `rest` the logarithm of their sum. */
template <int F> struct gathered {
    struct ucm_log_sum sum = {-ucm_inf(), 0.0f};

    __device__ __forceinline__ void add(float score)
    {
        if (F == UCM_SELECT_REST)
            ucm_log_sum_add(&sum, score);
        else
            sum.top = ucm_max(score, sum.top);
    }

    __device__ __forceinline__ float score(void) const
    {
        return F == UCM_SELECT_REST ? ucm_log_sum(&sum) : sum.top;
    }
};

#endif
