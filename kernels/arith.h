/* Scalar arithmetic that the kernels of kernels/sparse and kernels/encoding have in common, one
 * text for C and CUDA.
 *
 * All of it is IEEE float32, rounded to nearest after each operation that is written here, with
 * denormals kept. C files that include it are compiled with -ffp-contract=off, CUDA files with
 * -fmad=false and without -use_fast_math. A fused multiply-add is a call of ucm_fma. So both give
 * the same bits. It needs no libm. */
#ifndef UCM_KERNELS_ARITH_H
#define UCM_KERNELS_ARITH_H

#include <stdint.h>
#ifndef __CUDACC__
#include <string.h>
#endif

#ifdef __CUDACC__
#define UCM_HD static __host__ __device__ __forceinline__
#else
#define UCM_HD static inline __attribute__((always_inline, unused))
#endif

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
    /* The product of two floats is exact in a double. The sum is rounded to odd. That is, if it is
     * not exact and its last bit is 0, it moves to its neighbour on the side of the exact sum.
     * Rounding that to float equals rounding the exact sum, because a double has two bits more than
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

/* ---- scales ---- */

/* The smallest bf16 s, as bits, with steps * s >= a, for finite a >= 0 and steps 7, 126, 127 or
 * 255. It is a / steps rounded to float, and then up to bf16, or the next bf16 if the product is
 * still below a. */
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

/* ---- random bits ---- */

/* splitmix64's: each bit of the result depends on all of z's. */
UCM_HD uint64_t ucm_mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

#endif
