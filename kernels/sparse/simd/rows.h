/* Rows of channels: decoding, sums, quantising. Loops over channels that a compiler vectorises; each
 * channel's arithmetic is arith.h's, in the same order in every form. */
#ifndef UCM_KERNELS_SPARSE_ROWS_H
#define UCM_KERNELS_SPARSE_ROWS_H

#include "kernels/sparse/arith.h"
#include "kernels/sparse/sparse.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#define ROWS_F16C 1
#endif

/* No array of channels is longer. */
#define ROW_MAX UCM_KV_HEAD_DIM_MAX

static inline uint32_t rows_load16(const uint8_t *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof(h));
    return h;
}

/* Sizes are multiples of 4 (head_dim), so a tail of 4 ends each. */
static inline void rows_decode_f16(float *restrict out, const uint8_t *restrict in, uint32_t n)
{
    uint32_t c = 0;

#ifdef ROWS_F16C
    for (; c + 8 <= n; c += 8)
        _mm256_storeu_ps(out + c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + 2 * c))));
#endif
    for (; c < n; c++)
        out[c] = ucm_f16_decode(rows_load16(in + 2 * c));
}

static inline void rows_decode_fp8(float *restrict out, const uint8_t *restrict in, uint32_t n)
{
    uint32_t c = 0;

#ifdef ROWS_F16C
    /* E4M3 is F16 without the low 7 bits, times 2^8, but for NaN. */
    for (; c + 8 <= n; c += 8) {
        __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(in + c)));
        __m128i sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
        __m128i rest = _mm_and_si128(b, _mm_set1_epi16(0x7f));
        __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
        __m128i h = _mm_or_si128(sign, _mm_slli_epi16(rest, 7));

        h = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
        _mm256_storeu_ps(out + c, _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f)));
    }
#endif
    for (; c < n; c++)
        out[c] = ucm_fp8_e4m3_decode(in[c]);
}

/* n values of a row as floats. */
static inline void rows_decode(float *restrict out, const uint8_t *restrict in, uint32_t dtype,
                               uint32_t n)
{
    switch (dtype) {
    case UCM_KV_F32:
        memcpy(out, in, n * sizeof(*out));
        break;
    case UCM_KV_F16:
        rows_decode_f16(out, in, n);
        break;
    case UCM_KV_BF16:
        for (uint32_t c = 0; c < n; c++)
            out[c] = ucm_bf16_decode(rows_load16(in + 2 * c));
        break;
    default:
        rows_decode_fp8(out, in, n);
    }
}

/* Token t of KV head g. */
static inline void rows_k(const struct ucm_kv_shape *s, const uint8_t *shard, uint32_t g,
                          uint32_t t, float *out)
{
    rows_decode(out, shard + s->k_offset + t * s->k_token_stride + g * s->k_head_stride, s->dtype,
                s->head_dim);
}

static inline void rows_v(const struct ucm_kv_shape *s, const uint8_t *shard, uint32_t g,
                          uint32_t t, float *out)
{
    rows_decode(out, shard + s->v_offset + t * s->v_token_stride + g * s->v_head_stride, s->dtype,
                s->v_head_dim);
}

/* Whether any value is NaN or infinite. */
static inline bool rows_bad(const float *x, uint32_t n)
{
    uint32_t bad = 0;

    for (uint32_t c = 0; c < n; c++)
        bad |= ucm_not_finite(x[c]);
    return bad != 0;
}

static inline float rows_largest(const float *x, uint32_t n)
{
    uint32_t a = 0; /* bits of values that are not negative order as the values do */

    for (uint32_t c = 0; c < n; c++) {
        uint32_t u = ucm_f32_bits(x[c]) & 0x7fffffffu;

        a = u > a ? u : a;
    }
    return ucm_f32(a);
}

static inline void rows_put_scale(uint8_t *at, uint32_t scale)
{
    uint16_t s = (uint16_t)scale;

    memcpy(at, &s, sizeof(s));
}

static inline float rows_scale(const uint8_t *at)
{
    return ucm_bf16_decode(rows_load16(at));
}

/* A poisoned head: its bytes are 0, its scales NaN. */
static inline void rows_poison(uint8_t *out, uint32_t n, uint8_t *scale, uint32_t scales)
{
    memset(out, 0, n);
    for (uint32_t i = 0; i < scales; i++)
        rows_put_scale(scale + 2 * i, UCM_BF16_NAN);
}

/* Quantises x to int8 with a scale of its own; poison, or x not finite: the scale is NaN, the rest 0. */
static inline void rows_put(const float *x, uint32_t n, bool poison, uint8_t *out, uint8_t *scale)
{
    int8_t *q = (int8_t *)out;
    uint32_t bits;
    float s;

    if (poison || rows_bad(x, n)) {
        rows_poison(out, n, scale, 1);
        return;
    }
    bits = ucm_scale(rows_largest(x, n), 127.0f);
    rows_put_scale(scale, bits);
    if (bits == 0) {
        memset(out, 0, n);
        return;
    }
    s = ucm_bf16_decode(bits);
    for (uint32_t c = 0; c < n; c++)
        q[c] = (int8_t)ucm_quantise(x[c], s);
}

/* ---- sums over channels: 32 lanes, then halves ---- */

static inline float rows_fold(float lane[UCM_DOT_LANES])
{
    for (uint32_t s = UCM_DOT_LANES / 2; s > 0; s /= 2)
        for (uint32_t l = 0; l < s; l++)
            lane[l] += lane[l + s];
    return lane[0];
}

/* The sum of TERM(c, accumulator), which adds channel c's term; in n channels. */
#define ROWS_SUM(result, n, ADD)                                                                   \
    do {                                                                                           \
        float lane_[UCM_DOT_LANES] = {0};                                                          \
        uint32_t c_ = 0;                                                                           \
                                                                                                   \
        for (; c_ + UCM_DOT_LANES <= (n); c_ += UCM_DOT_LANES)                                     \
            for (uint32_t l_ = 0; l_ < UCM_DOT_LANES; l_++)                                        \
                lane_[l_] = ADD(c_ + l_, lane_[l_]);                                               \
        for (uint32_t l_ = 0; c_ + l_ < (n); l_++)                                                 \
            lane_[l_] = ADD(c_ + l_, lane_[l_]);                                                   \
        (result) = rows_fold(lane_);                                                               \
    } while (0)

static inline float rows_dot(const float *a, const float *b, uint32_t n)
{
    float sum;

#define ADD(c, acc) ucm_fma(a[c], b[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return sum;
}

static inline float rows_distance(const float *a, const float *b, uint32_t n)
{
    float sum;

#define ADD(c, acc) ucm_fma(a[c] - b[c], a[c] - b[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return sum;
}

static inline float rows_dot_i8(const float *q, const int8_t *r, uint32_t n)
{
    float sum;

#define ADD(c, acc) ucm_fma(q[c], (float)r[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return sum;
}

static inline float rows_dot_u8(const float *q, const uint8_t *r, uint32_t n)
{
    float sum;

#define ADD(c, acc) ucm_fma(q[c], (float)r[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return sum;
}

/* One int8 vector with its scale, in the metric. */
static inline float rows_score(enum ucm_score_metric metric, const float *q, const int8_t *r,
                               float s, uint32_t n)
{
    float sum;

    if (ucm_is_nan(s))
        return ucm_inf();
    if (metric == UCM_METRIC_DOT)
        return s * rows_dot_i8(q, r, n);
#define ADD(c, acc) ucm_fma(q[c] - s * (float)r[c], q[c] - s * (float)r[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return -sum;
}

/* The best of a head's vectors; NaN is never better. */
static inline float rows_score_best(const struct ucm_digest_plan *plan,
                                    enum ucm_score_metric metric, const float *q,
                                    const uint8_t *digest, uint32_t g)
{
    uint32_t n = plan->channels;
    float best = -ucm_inf();

    for (uint32_t v = g * plan->vectors; v < (g + 1) * plan->vectors; v++)
        best = ucm_max(rows_score(metric, q, (const int8_t *)digest + v * n,
                                  rows_scale(digest + plan->scale[0] + 2 * v), n),
                       best);
    return best;
}

#endif
