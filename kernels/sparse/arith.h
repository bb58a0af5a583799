/* Scalar arithmetic of summaries, scores and choices, one text for C and CUDA. kernels/arith.h says
 * by which rules. */
#ifndef UCM_KERNELS_SPARSE_ARITH_H
#define UCM_KERNELS_SPARSE_ARITH_H

#include "kernels/arith.h"

#define UCM_DOT_LANES 32

/* ---- quantisation ---- */

/* x / s rounded to an integer and clamped to -127..127; s as ucm_scale gave it for the largest |x|,
 * not 0. */
UCM_HD float ucm_quantise(float x, float s)
{
    return ucm_max(-127.0f, ucm_min(127.0f, ucm_rint(x / s)));
}

/* The same to 0..255, for x >= 0 and ucm_scale with 255 steps. */
UCM_HD float ucm_quantise_u8(float x, float s)
{
    return ucm_max(0.0f, ucm_min(255.0f, ucm_rint(x / s)));
}

/* box: the largest integer lo with lo * s <= m, and the smallest hi with hi * s >= x. A product of
 * s (8 bits) and an int8 is exact. */
UCM_HD float ucm_box_low(float m, float s)
{
    float lo = ucm_floor(m / s);

    return lo * s > m ? lo - 1.0f : lo;
}

UCM_HD float ucm_box_high(float x, float s)
{
    float hi = ucm_ceil(x / s);

    return hi * s < x ? hi + 1.0f : hi;
}

/* ---- scores of single blocks, after the sums over channels ---- */

/* box: dot is the product of q with hi where q >= 0 and lo elsewhere, abs_sum the sum of |q|.
 * abs_sum * 2^-11 is more than the rounding errors of the sums and of the product with s. Those of
 * the sums are at most (d / 32 + 5) * 2^-24 * 128 * abs_sum <= 2^-11.8 * abs_sum for d up to 1,024.
 * 2^-149 does the same for the last product if that is denormal. A result that overflowed bounds
 * nothing, so it counts as +inf. */
UCM_HD float ucm_box_score(float s, float dot, float abs_sum)
{
    float y = ucm_fma(s, ucm_fma(0x1p-11f, abs_sum, dot), 0x1p-149f);

    return ucm_not_finite(y) ? ucm_inf() : y;
}

/* stats: the logarithm of the block's share of attention, if its logits are normally
 * distributed. */
UCM_HD float ucm_stats_score(float s_mean, float dot_mean, float s_var, float dot_var, float beta,
                             float ln_count)
{
    float first = (beta * s_mean) * dot_mean;
    float second = ((beta * beta / 2.0f) * s_var) * dot_var;

    return (first + second) + ln_count;
}

/* tokens with rest: the logarithm of the weight that one vector stands for. ln_count is 0, or the
 * logarithm of the number of tokens whose mean it is. */
UCM_HD float ucm_rest_score(float s, float dot, float beta, float ln_count)
{
    float t = (beta * s) * dot + ln_count;

    return ucm_is_nan(s) ? ucm_inf() : t;
}

/* ---- rounded queries ---- */

/* Queries are rounded to multiples of 2^e. These are so coarse that no sum of products with
 * integers of a vector has more than 24 bits. Such sums are exact in any order, as floats and in
 * integer units. */
#define UCM_GRID_BITS 14         /* of a query's largest value, at most */
#define UCM_GRID_TOP 0x71800000u /* 2^100: larger queries, and NaN, score NaN */

/* The finest grid: e for queries whose largest |q| has these bits, which are below UCM_GRID_TOP. */
UCM_HD int32_t ucm_grid_first(uint32_t largest)
{
    int32_t e = (int32_t)(largest >> 23) - 126 - UCM_GRID_BITS;

    return e < -100 ? -100 : e;
}

/* 2^e for -126 <= e <= 127. */
UCM_HD float ucm_power(int32_t e)
{
    return ucm_f32((uint32_t)(e + 127) << 23);
}

/* How much is added to that e. units is the sum of |q| on the finest grid, each rounded. `top` is 7
 * for vectors of int8 and 3 for those of 4 bits, since no |value| is above 2^top. */
UCM_HD uint32_t ucm_grid_coarser(uint32_t units, uint32_t channels, uint32_t top)
{
    uint32_t k = 0;

    while (units + ((uint64_t)channels << k) > (uint64_t)1 << (24 - top + k))
        k++;
    return k;
}

/* ---- hash ---- */

/* Word c / 64 of the random signs of transform j (0 is the inner one) of a segment's chunk w.
 * Channel c is negated if bit c % 64 is 1. */
UCM_HD uint64_t ucm_hash_signs(uint64_t seed, uint32_t segment, uint32_t w, uint32_t j, uint32_t c)
{
    uint64_t at = 1 + c / 64 + (uint64_t)1024 * (2 * w + j + 16 * segment);

    return ucm_mix64(seed + UINT64_C(0x9e3779b97f4a7c15) * at);
}

/* ---- exponentials and weights ---- */

/* e^x for x <= 0, off by at most 2 units in the last place; 0 below -87, and for NaN. */
UCM_HD float ucm_exp(float x)
{
    float n, r, p;

    if (!(x >= -87.0f))
        return 0.0f;
    n = ucm_rint(x * 0x1.715476p+0f);                 /* 1 / ln 2 */
    r = ucm_fma(n, -0x1.62e4p-1f, x);                 /* ln 2, its high bits: n * them is exact */
    r = ucm_fma(n, -0x1.7f7d1cp-20f, r);              /* and the rest */
    p = ucm_fma(r, 0x1.a01a02p-13f, 0x1.6c16c2p-10f); /* 1/7!, 1/6!: |r| is at most 0.35 */
    p = ucm_fma(p, r, 0x1.111112p-7f);
    p = ucm_fma(p, r, 0x1.555556p-5f);
    p = ucm_fma(p, r, 0x1.555556p-3f);
    p = ucm_fma(p, r, 0.5f);
    p = ucm_fma(p, r, 1.0f);
    p = ucm_fma(p, r, 1.0f);
    return p * ucm_f32((uint32_t)((int32_t)n + 127) << 23);
}

/* ln(x) for normal x > 0: x = m * 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh((m - 1) / (m +
 * 1)). */
UCM_HD float ucm_log(float x)
{
    uint32_t bits = ucm_f32_bits(x);
    int32_t e = (int32_t)(bits >> 23) - 126;
    float m = ucm_f32((bits & 0x7fffffu) | 0x3f000000u), z, s, p;

    if (m < 0x1.6a09e6p-1f) {
        m *= 2.0f;
        e--;
    }
    z = (m - 1.0f) / (m + 1.0f);
    s = z * z;
    p = ucm_fma(s, ucm_fma(s, ucm_fma(s, 0x1.c71c72p-4f, 0x1.24924ap-3f), 0x1.99999ap-3f),
                0x1.555556p-2f);
    return ucm_fma((float)e, 0x1.62e43p-1f, 2.0f * ucm_fma(z * s, p, z));
}

/* The logarithm of a sum of e^t, term after term: sum * e^top. Begins as {-inf, 0}. NaN adds
 * nothing. */
struct ucm_log_sum {
    float top, sum;
};

UCM_HD void ucm_log_sum_add(struct ucm_log_sum *s, float t)
{
    float e = ucm_exp(-ucm_abs(t - s->top));
    float grown = s->sum * e + 1.0f, same = s->sum + e;

    s->sum = t > s->top ? grown : same;
    s->top = ucm_max(t, s->top);
}

/* +-inf if top is. */
UCM_HD float ucm_log_sum(const struct ucm_log_sum *s)
{
    return s->top + ucm_log(s->sum);
}

/* A weight is the integer rint(p * 2^24), 0 <= p <= 1, so that sums do not depend on the order. */
UCM_HD uint32_t ucm_weight(float p)
{
    float x = p * 0x1p24f;

    return (uint32_t)(x < 0x1p23f ? (x + 0x1p23f) - 0x1p23f : x);
}

/* ---- order ---- */

/* A larger key is a better score: -0 is +0, NaN is -inf. Equal keys: the lower block is better. */
UCM_HD uint32_t ucm_score_key(float score)
{
    uint32_t u = ucm_f32_bits(score);

    if (ucm_is_nan(score))
        u = 0xff800000u;
    if (u == 0x80000000u)
        u = 0;
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

#endif
