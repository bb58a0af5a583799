/* Rows of channels: quantising, and one pass over a head's rows for each thing that is built from
 * them. Each channel's arithmetic is arith.h's, in the same order in every form.
 *
 * Arrays of channels have ROW_MAX floats and are 0 from the last channel to the next multiple of
 * the dot product's lanes. Functions that return bool say whether all elements were finite. */
#ifndef UCM_KERNELS_SPARSE_ROWS_H
#define UCM_KERNELS_SPARSE_ROWS_H

#include "kernels/sparse/arith.h"
#include "kernels/sparse/simd/vec.h"
#include "kernels/sparse/sparse.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define ROW_MAX UCM_KV_HEAD_DIM_MAX

/* Some tokens of one KV head, of K or of V. */
struct rows {
    const uint8_t *at;
    uint64_t stride;
    uint32_t dtype, channels, count;
};

static inline struct rows rows_of_k(const struct ucm_kv_shape *s, const uint8_t *layer, uint32_t g)
{
    return (struct rows){layer + s->k_offset + g * s->k_head_stride, s->k_token_stride, s->dtype,
                         s->head_dim, s->tokens};
}

static inline struct rows rows_of_v(const struct ucm_kv_shape *s, const uint8_t *layer, uint32_t g)
{
    return (struct rows){layer + s->v_offset + g * s->v_head_stride, s->v_token_stride, s->dtype,
                         s->v_head_dim, s->tokens};
}

/* Calls name(dtype, ...) with a constant for each element type; how: return, or nothing. */
#define ROWS_BY_DTYPE(how, name, ...)                                                              \
    switch (r->dtype) {                                                                            \
    case UCM_KV_F16:                                                                               \
        how name(UCM_KV_F16, __VA_ARGS__);                                                         \
        break;                                                                                     \
    case UCM_KV_BF16:                                                                              \
        how name(UCM_KV_BF16, __VA_ARGS__);                                                        \
        break;                                                                                     \
    case UCM_KV_FP8_E4M3:                                                                          \
        how name(UCM_KV_FP8_E4M3, __VA_ARGS__);                                                    \
        break;                                                                                     \
    default:                                                                                       \
        how name(UCM_KV_F32, __VA_ARGS__);                                                         \
    }

/* The sum of a dot product's lanes: halves are added to halves. */
static inline float rows_fold(float lane[UCM_DOT_LANES])
{
    for (uint32_t s = UCM_DOT_LANES / 2; s > 0; s /= 2)
        for (uint32_t l = 0; l < s; l++)
            lane[l] += lane[l + s];
    return lane[0];
}

/* ---- one row ---- */

VEC_INLINE bool decode_as(uint32_t dtype, const struct rows *r, uint32_t t, float *x)
{
    vec_i bad = {0};

#define STEP(c, channels)                                                                          \
    do {                                                                                           \
        vec_f v_ = channels;                                                                       \
                                                                                                   \
        bad |= vec_not_finite(v_);                                                                 \
        vec_store(x + (c), v_);                                                                    \
    } while (0)
    VEC_EACH(dtype, r->at + t * r->stride, r->channels, STEP);
#undef STEP
    return !vec_any_sign(bad);
}

static __attribute__((unused)) bool rows_decode(const struct rows *r, uint32_t t,
                                                float *x){ROWS_BY_DTYPE(return, decode_as, r, t, x)}

/* ---- the mean ---- */

VEC_INLINE bool sum_as(uint32_t dtype, const struct rows *r, float *x)
{
    vec_i bad = {0};
    bool good = decode_as(dtype, r, 0, x);

#define STEP(c, channels)                                                                          \
    do {                                                                                           \
        vec_f v_ = channels;                                                                       \
                                                                                                   \
        bad |= vec_not_finite(v_);                                                                 \
        vec_store(x + (c), vec_load(x + (c)) + v_);                                                \
    } while (0)
    for (uint32_t t = 1; t < r->count; t++)
        VEC_EACH(dtype, r->at + t * r->stride, r->channels, STEP);
#undef STEP
    return good && !vec_any_sign(bad);
}

static __attribute__((unused)) bool rows_sum(const struct rows *r, float *x)
{
    ROWS_BY_DTYPE(return, sum_as, r, x)
}

static inline void rows_divide(float *x, uint32_t n, float by)
{
    for (uint32_t c = 0; c < n; c++)
        x[c] /= by;
}

static inline bool rows_mean(const struct rows *r, float *x)
{
    bool good = rows_sum(r, x);

    rows_divide(x, r->channels, (float)r->count);
    return good;
}

/* ---- the bounds ---- */

VEC_INLINE bool bounds_as(uint32_t dtype, const struct rows *r, float *low, float *high)
{
    vec_i bad = {0};
    bool good = decode_as(dtype, r, 0, low);

    decode_as(dtype, r, 0, high);
#define STEP(c, channels)                                                                          \
    do {                                                                                           \
        vec_f v_ = channels;                                                                       \
                                                                                                   \
        bad |= vec_not_finite(v_);                                                                 \
        vec_store(low + (c), vec_min(v_, vec_load(low + (c))));                                    \
        vec_store(high + (c), vec_max(v_, vec_load(high + (c))));                                  \
    } while (0)
    for (uint32_t t = 1; t < r->count; t++)
        VEC_EACH(dtype, r->at + t * r->stride, r->channels, STEP);
#undef STEP
    return good && !vec_any_sign(bad);
}

static __attribute__((unused)) bool rows_bounds(const struct rows *r, float *low, float *high){
    ROWS_BY_DTYPE(return, bounds_as, r, low, high)}

/* ---- deviations ---- */

VEC_INLINE void squares_as(uint32_t dtype, const struct rows *r, const float *mean, float *sum)
{
    memset(sum, 0, (r->channels + VEC - 1) / VEC * VEC * sizeof(*sum));
#define STEP(c, channels)                                                                          \
    do {                                                                                           \
        vec_f x_ = channels - vec_load(mean + (c));                                                \
                                                                                                   \
        vec_store(sum + (c), vec_fma(x_, x_, vec_load(sum + (c))));                                \
    } while (0)
    for (uint32_t t = 0; t < r->count; t++)
        VEC_EACH(dtype, r->at + t * r->stride, r->channels, STEP);
#undef STEP
}

/* The sum of the squared deviations of each channel. */
static __attribute__((unused)) void rows_squares(const struct rows *r, const float *mean,
                                                 float *sum){
    ROWS_BY_DTYPE(, squares_as, r, mean, sum)}

VEC_INLINE float distance_as(uint32_t dtype, const uint8_t *row, const float *from, uint32_t n)
{
    vec_f sum[UCM_DOT_LANES / VEC] = {{0}};
    uint32_t c = 0, size = vec_element_bytes(dtype);

    for (; c + UCM_DOT_LANES <= n; c += UCM_DOT_LANES)
        for (uint32_t i = 0; i < UCM_DOT_LANES / VEC; i++) {
            uint32_t at = c + i * VEC;
            vec_f x = vec_decode(dtype, row + at * size) - vec_load(from + at);

            sum[i] = vec_fma(x, x, sum[i]);
        }
    for (uint32_t i = 0; c < n && i < UCM_DOT_LANES / VEC; i++) {
        uint32_t at = c + i * VEC;
        vec_f x = vec_part(dtype, row, at, n) - vec_load(from + at);

        sum[i] = vec_fma(x, x, sum[i]);
    }
    return vec_fold(sum);
}

VEC_INLINE void distances_as(uint32_t dtype, const struct rows *r, const float *from,
                             float *distance)
{
    for (uint32_t t = 0; t < r->count; t++) {
        float x = distance_as(dtype, r->at + t * r->stride, from, r->channels);

        distance[t] = ucm_min(x, distance[t]);
    }
}

/* Lowers each row's squared distance to that from one more vector, if that is less. */
static __attribute__((unused)) void rows_distances(const struct rows *r, const float *from,
                                                   float *distance)
{
    ROWS_BY_DTYPE(, distances_as, r, from, distance)
}

/* ---- quantising ---- */

#define ROWS_BYTES_4(channels) (((channels) + 31) / 32 * 16)

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
    return ucm_bf16_decode(vec_load16(at));
}

/* A poisoned head: its bytes are 0, its scales NaN. */
static inline void rows_poison(uint8_t *out, uint32_t n, uint8_t *scale, uint32_t scales)
{
    memset(out, 0, n);
    for (uint32_t i = 0; i < scales; i++)
        rows_put_scale(scale + 2 * i, UCM_BF16_NAN);
}

/* Quantises x to int8 with a scale of its own. If poison is set, or x is not finite, the scale is
 * NaN and the rest 0. */
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

/* The same to 4 bits, two's complement. 16 bytes hold 32 channels. Byte i has channel i in its low
 * half and channel 16 + i in the high one. x is finite. */
static __attribute__((unused)) void rows_put_4(const float *x, uint32_t n, uint8_t *out,
                                               uint8_t *scale)
{
    uint32_t bits = ucm_scale(rows_largest(x, n), 7.0f);
    float s = ucm_bf16_decode(bits);

    rows_put_scale(scale, bits);
    memset(out, 0, ROWS_BYTES_4(n));
    for (uint32_t c = 0; bits != 0 && c < n; c++) {
        uint32_t v = (uint32_t)(int32_t)ucm_quantise(x[c], s) & 15;

        out[c / 32 * 16 + c % 16] |= (uint8_t)(v << c % 32 / 16 * 4);
    }
}

static __attribute__((unused)) void rows_take_4(const uint8_t *in, uint32_t n, int8_t *out)
{
    for (uint32_t c = 0; c < n; c++) {
        uint32_t v = in[c / 32 * 16 + c % 16] >> c % 32 / 16 * 4 & 15;

        out[c] = (int8_t)((int32_t)(v ^ 8) - 8);
    }
}

/* ---- sums over channels ---- */

/* result: the sum of n channels' terms in 32 lanes; ADD(c, sum) is sum with channel c's term. */
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
    if (metric != UCM_METRIC_L2)
        return s * rows_dot_i8(q, r, n);
#define ADD(c, acc) ucm_fma(q[c] - s * (float)r[c], q[c] - s * (float)r[c], acc)
    ROWS_SUM(sum, n, ADD);
#undef ADD
    return -sum;
}

/* The best of a head's vectors; NaN is never better. */
static inline float rows_score_best(const struct ucm_summary_plan *plan,
                                    enum ucm_score_metric metric, const float *q,
                                    const uint8_t *summary, uint32_t g)
{
    uint32_t n = plan->channels;
    float best = -ucm_inf();

    for (uint32_t v = g * plan->vectors; v < (g + 1) * plan->vectors; v++)
        best = ucm_max(rows_score(metric, q, (const int8_t *)summary + v * n,
                                  rows_scale(summary + plan->scale[0] + 2 * v), n),
                       best);
    return best;
}

#endif
