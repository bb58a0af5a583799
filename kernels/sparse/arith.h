/* Scalar arithmetic of digests, scores and choices, one text for C and CUDA.
 *
 * All of it is IEEE float32, rounded to nearest after each operation that is written here, denormals
 * kept. C files that include it are compiled with -ffp-contract=off, CUDA files with -fmad=false and
 * without -use_fast_math; a fused multiply-add is a call of ucm_fma. Both then give the same bits.
 * It needs no libm. */
#ifndef UCM_KERNELS_SPARSE_ARITH_H
#define UCM_KERNELS_SPARSE_ARITH_H

#include <stdint.h>
#ifndef __CUDACC__
#include <string.h>
#endif

#ifdef __CUDACC__
#define UCM_HD static __host__ __device__ __forceinline__
#else
#define UCM_HD static inline __attribute__((always_inline, unused))
#endif

#define UCM_DOT_LANES 32
#define UCM_BF16_NAN 0x7fc0u
#define UCM_F32_INF 0x7f800000u

/* ---- bits ---- */

UCM_HD uint32_t ucm_f32_bits(float x)
{
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t u;

    memcpy(&u, &x, sizeof(u));
    return u;
#endif
}

UCM_HD float ucm_f32(uint32_t u)
{
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
#endif
}

UCM_HD float ucm_inf(void)
{
    return ucm_f32(UCM_F32_INF);
}

/* Not 0: x is NaN or an infinity. An int, for loops that gather it over many values. */
UCM_HD uint32_t ucm_not_finite(float x)
{
    return (ucm_f32_bits(x) & UCM_F32_INF) == UCM_F32_INF;
}

UCM_HD uint32_t ucm_is_nan(float x)
{
    return (ucm_f32_bits(x) & 0x7fffffffu) > UCM_F32_INF;
}

UCM_HD float ucm_abs(float x)
{
    return ucm_f32(ucm_f32_bits(x) & 0x7fffffffu);
}

/* ---- formats, each decoded exactly ---- */

UCM_HD float ucm_bf16_decode(uint32_t h)
{
    return ucm_f32(h << 16);
}

UCM_HD float ucm_f16_decode(uint32_t h)
{
    uint32_t sign = (h & 0x8000u) << 16;
    uint32_t rest = (h & 0x7fffu) << 13;
    float x;

    if (rest >= 0x0f800000u) /* infinity, NaN */
        return ucm_f32(sign | rest | UCM_F32_INF);
    if (rest >= 0x00800000u)
        return ucm_f32(sign | (rest + (112u << 23)));
    x = (float)(int32_t)(h & 0x3ffu) * 0x1p-24f;
    return ucm_f32(sign | ucm_f32_bits(x));
}

UCM_HD float ucm_fp8_e4m3_decode(uint32_t b)
{
    uint32_t sign = (b & 0x80u) << 24;
    uint32_t rest = b & 0x7fu;
    float x;

    if (rest == 0x7fu)
        return ucm_f32(sign | 0x7fc00000u);
    if (rest >= 8)
        return ucm_f32(sign | ((rest << 20) + (120u << 23)));
    x = (float)(int32_t)rest * 0x1p-9f;
    return ucm_f32(sign | ucm_f32_bits(x));
}

/* ---- operations ---- */

/* a * b + c, rounded once. */
UCM_HD float ucm_fma(float a, float b, float c)
{
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    /* The product of two floats is exact in a double. The sum is rounded to odd: when it is not
     * exact and its last bit is 0, it moves to its neighbour on the side of the exact sum. Rounding
     * that to float then equals rounding the exact sum, because a double has two bits more than
     * needed for it. */
    double p = (double)a * (double)b, s = p + (double)c;
    double t = s - p, error = (p - (s - t)) + ((double)c - t);
    uint64_t u;

    memcpy(&u, &s, sizeof(u));
    if ((u & 1) == 0 && (error > 0 || error < 0))
        u += (error > 0) == (s > 0) ? UINT64_C(1) : ~UINT64_C(0);
    memcpy(&s, &u, sizeof(s));
    return (float)s;
#endif
}

/* To the nearest integer, ties to even, for |x| <= 2^22. */
UCM_HD float ucm_rint(float x)
{
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

UCM_HD float ucm_floor(float x) /* |x| <= 2^22 */
{
    float r = ucm_rint(x);

    return r > x ? r - 1.0f : r;
}

UCM_HD float ucm_ceil(float x) /* |x| <= 2^22 */
{
    float r = ucm_rint(x);

    return r < x ? r + 1.0f : r;
}

UCM_HD float ucm_sqrt(float x)
{
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x); /* an instruction: -fno-math-errno */
#endif
}

UCM_HD float ucm_min(float a, float b)
{
    return a < b ? a : b;
}

UCM_HD float ucm_max(float a, float b)
{
    return a > b ? a : b;
}

/* ---- quantisation ---- */

/* The smallest bf16 s, as bits, with steps * s >= a, for finite a >= 0 and steps 127 or 255: a /
 * steps rounded to float, that rounded up to bf16, and the next one if the product is still below a. */
UCM_HD uint32_t ucm_scale(float a, float steps)
{
    uint32_t s;

    if (a == 0.0f)
        return 0;
    s = (ucm_f32_bits(a / steps) + 0xffffu) >> 16;
    if (steps * ucm_bf16_decode(s) < a)
        s++;
    return s;
}

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

/* box: dot is of q with hi where q >= 0 and lo elsewhere, abs_sum the sum of |q|. 2^-11 * abs_sum is
 * more than the sums' rounding errors: see docs/retrieval.md. 2^-149 does the same for the last
 * product where it is denormal. What overflowed bounds nothing, so it counts as +inf. */
UCM_HD float ucm_box_score(float s, float dot, float abs_sum)
{
    float y = ucm_fma(s, ucm_fma(0x1p-11f, abs_sum, dot), 0x1p-149f);

    return ucm_not_finite(y) ? ucm_inf() : y;
}

/* stats: the logarithm of the block's share of attention, if its logits are normally distributed. */
UCM_HD float ucm_stats_score(float s_mean, float dot_mean, float s_var, float dot_var, float beta,
                             float ln_count)
{
    float first = (beta * s_mean) * dot_mean;
    float second = ((beta * beta / 2.0f) * s_var) * dot_var;

    return (first + second) + ln_count;
}

/* tokens with rest: the logarithm of what one vector stands for: ln_count is 0, or the logarithm of how
 * many tokens it is the mean of. */
UCM_HD float ucm_rest_score(float s, float dot, float beta, float ln_count)
{
    float t = (beta * s) * dot + ln_count;

    return ucm_is_nan(s) ? ucm_inf() : t;
}

/* ---- hash ---- */

/* Word c / 64 of the random signs of chunk w's transform j (0 is the inner one) of a segment; channel
 * c is negated if bit c % 64 is 1. */
UCM_HD uint64_t ucm_hash_signs(uint64_t seed, uint32_t segment, uint32_t w, uint32_t j, uint32_t c)
{
    uint64_t at = 1 + c / 64 + (uint64_t)1024 * (2 * w + j + 16 * segment);
    uint64_t z = seed + UINT64_C(0x9e3779b97f4a7c15) * at;

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* ---- exponentials and weights ---- */

/* e^x for x <= 0, at most 2 units in the last place off; 0 below -87, and for NaN. */
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

/* The logarithm of a sum of e^t, term after term: sum * e^top. Begins as {-inf, 0}. NaN adds nothing. */
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

/* Weights are integers, so that their sums do not depend on the order: rint(p * 2^24), 0 <= p <= 1. */
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
