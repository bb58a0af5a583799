/* Scores of a list's blocks by the matrix units, for UCM_METRIC_ROUNDED. They multiply vectors of
 * 32 N channels with 4 P queries of a KV head; a panel is four queries. A thread takes the vectors
 * of two blocks one after the other, so it alone makes those blocks' scores. Channels are taken in
 * the order in which a thread loads them, also those of queries. */
#ifndef UCM_KERNELS_SPARSE_LIST_SCORE_CUH
#define UCM_KERNELS_SPARSE_LIST_SCORE_CUH

#include "kernels/sparse/list_choose.cuh"
#include "kernels/sparse/select_halves.cuh"
#include "kernels/sparse/select_sums.cuh"

#define GROUP UCM_SELECT_CUDA_MATRIX_BLOCKS

/* ---- queries ---- */

/* Where channels c .. c + 3 of a query are: the thread of four, and its word. */
template <int F, int N>
static __device__ __forceinline__ uint32_t channel_place(uint32_t c, uint32_t *word)
{
    uint32_t at = c / 32 * 16 + c % 16; /* rest: the byte of the vector that has them in its halves */

    if (F == UCM_SELECT_REST) {
        *word = at % (4 * N) / 4 * 2 + c / 16 % 2;
        return at / (4 * N);
    }
    *word = c / 64 * 4 + c % 16 / 4;
    return c % 64 / 16;
}

/* By a warp: rounds the i-th query of the list, and puts its halves where the unit's threads take
 * them: halves[panel][word][lane]. The high half is in an even eighth of the lanes, the low one in
 * the next eighth. *step: what its sums are multiplied with. */
template <int F, int N>
static __device__ __forceinline__ void round_query_halves(args_t a, const struct part &p, uint32_t i,
                                                          uint32_t *halves, float *step)
{
    uint32_t group = a.q_heads / a.kv_heads, row = i / group, c = 4 * warp_lane(), word, to;
    float x[1][4] = {};
    struct grid grid;
    int32_t n[4];

    if (i < a.queries_a_head && c < 32 * N)
        query_word(a, p.sequence * a.q_stride + ((uint64_t)row * a.q_heads + p.list * group + i % group) * a.head_dim,
                   c, x[0]);
    grid = grid_of<F, N, true, 1>(a, x);
    to_integers(grid, x[0], n);
    if (c < 32 * N) {
        to = 8 * (i % 4) + channel_place<F, N>(c, &word);
        word = ((i / 4 * 2 * N) + word) * WARP_LANES + to;
        halves[word] = pack_halves(n, false);
        halves[word + 4] = pack_halves(n, true);
    }
    if (warp_lane() == 0)
        *step = step_of<F>(grid);
}

/* ---- scores ---- */

/* A thread's quarter of two blocks' vectors. */
template <int F, int N> struct vectors {
    uint32_t word[2][quarter_of<F, N>::words];
    float scale[2];
};

/* ucm_exp without a branch and a conversion: the sum that rounds has the integer in its low
 * bits. */
static __device__ __forceinline__ float exp_of(float x)
{
    float shifted = x * 0x1.715476p+0f + 0x1.8p23f, n = shifted - 0x1.8p23f, r, p;

    r = ucm_fma(n, -0x1.62e4p-1f, x);
    r = ucm_fma(n, -0x1.7f7d1cp-20f, r);
    p = ucm_fma(r, 0x1.a01a02p-13f, 0x1.6c16c2p-10f);
    p = ucm_fma(p, r, 0x1.111112p-7f);
    p = ucm_fma(p, r, 0x1.555556p-5f);
    p = ucm_fma(p, r, 0x1.555556p-3f);
    p = ucm_fma(p, r, 0.5f);
    p = ucm_fma(p, r, 1.0f);
    p = ucm_fma(p, r, 1.0f);
    p *= ucm_f32((ucm_f32_bits(shifted) << 23) + 0x3f800000u);
    return x >= -87.0f ? p : 0.0f;
}

/* ucm_log_sum_add with it. */
static __device__ __forceinline__ void add_to_log_sum(struct ucm_log_sum *s, float t)
{
    float e = exp_of(-ucm_abs(t - s->top));
    float grown = s->sum * e + 1.0f, same = s->sum + e;

    s->sum = t > s->top ? grown : same;
    s->top = ucm_max(t, s->top);
}

/* The larger; NaN if either is. */
static __device__ __forceinline__ float max_or_nan(float x, float y)
{
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

/* A warp's queries, P panels of them, and what they give for two blocks so far. */
template <int F, int N, int P> struct scoring {
    uint32_t query[P][2 * N];
    float step[P];
    uint32_t top[P]; /* key of the largest score that is not +inf */
    struct gathered<F> of[P][2];
    float worst[2]; /* scale: NaN if any scale is NaN; then the score is +inf */
};

/* What a vector of each of two blocks weighs by a warp's queries, before ln_count. It does not wait
 * for another vector. */
template <int F, int N, int P>
static __device__ __forceinline__ void weigh_vectors(args_t a, const struct vectors<F, N> &x, struct scoring<F, N, P> *s,
                                                     float of[P][2])
{
    int32_t sums[P][4] = {};

#pragma unroll
    for (uint32_t k = 0; k < N; k++) {
        uint32_t channels[4];

        channels_of<F, N>(x.word, k, channels);
#pragma unroll
        for (uint32_t p = 0; p < P; p++)
            multiply(sums[p], channels, s->query[p] + 2 * k);
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        float scale = x.scale[k];

        s->worst[k] = max_or_nan(s->worst[k], scale);
#pragma unroll
        for (uint32_t p = 0; p < P; p++) {
            float sum = (float)(256 * sums[p][2 * k] + sums[p][2 * k + 1]) * s->step[p];

            of[p][k] = (F == UCM_SELECT_REST ? a.stats_beta * scale : scale) * sum;
        }
    }
}

template <int F, int N, int P>
static __device__ __forceinline__ void add_weighed(const float of[P][2], float ln_count, struct scoring<F, N, P> *s)
{
#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
#pragma unroll
        for (uint32_t p = 0; p < P; p++)
            if (F == UCM_SELECT_REST) /* ucm_rest_score, except for NaN */
                add_to_log_sum(&s->of[p][k].sum, of[p][k] + ln_count);
            else
                s->of[p][k].add(of[p][k]);
}

template <int F, int N, int P>
static __device__ __forceinline__ void add_vectors(args_t a, const struct vectors<F, N> &x, float ln_count,
                                                   struct scoring<F, N, P> *s)
{
    float of[P][2];

    weigh_vectors<F, N, P>(a, x, s, of);
    add_weighed<F, N, P>(of, ln_count, s);
}

#endif
