/* Vectors of channels, in every instruction set: the compiler's vector types, and intrinsics for
 * what these lack. Each lane's arithmetic is that of arith.h. Only files of simd/ directories use
 * it. */
#ifndef UCM_KERNELS_SIMD_VEC_H
#define UCM_KERNELS_SIMD_VEC_H

#include "kernels/arith.h"

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&                      \
    defined(__AVX512VL__) && defined(__AVX512VPOPCNTDQ__)
#define VEC 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VEC 8
#else
#define VEC 4
#endif

typedef float vec_f __attribute__((vector_size(4 * VEC)));
typedef int32_t vec_i __attribute__((vector_size(4 * VEC)));
typedef uint32_t vec_u __attribute__((vector_size(4 * VEC)));

#define VEC_INLINE static inline __attribute__((always_inline, unused))

VEC_INLINE vec_f vec_load(const float *p)
{
    vec_f v;

    memcpy(&v, p, sizeof(v));
    return v;
}

VEC_INLINE void vec_store(float *p, vec_f v)
{
    memcpy(p, &v, sizeof(v));
}

VEC_INLINE vec_f vec_all_f(float x)
{
    return x - (vec_f){0};
}

VEC_INLINE vec_f vec_fma(vec_f a, vec_f b, vec_f c)
{
#if VEC == 16
    return (vec_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VEC == 8
    return (vec_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vec_f x;

    for (int l = 0; l < VEC; l++)
        x[l] = ucm_fma(a[l], b[l], c[l]);
    return x;
#endif
}

/* ucm_min and ucm_max, lane by lane. */
VEC_INLINE vec_f vec_min(vec_f a, vec_f b)
{
#if VEC == 16
    return (vec_f)_mm512_min_ps((__m512)a, (__m512)b);
#elif VEC == 8
    return (vec_f)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vec_i m = a < b;

    return (vec_f)(((vec_i)a & m) | ((vec_i)b & ~m));
#endif
}

VEC_INLINE vec_f vec_max(vec_f a, vec_f b)
{
#if VEC == 16
    return (vec_f)_mm512_max_ps((__m512)a, (__m512)b);
#elif VEC == 8
    return (vec_f)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vec_i m = a > b;

    return (vec_f)(((vec_i)a & m) | ((vec_i)b & ~m));
#endif
}

/* Lane l of the result is lane l ^ h; h is a power of two below VEC, and a constant. */
VEC_INLINE vec_f vec_swap(vec_f v, int h)
{
#if VEC == 16
    return h == 1   ? (vec_f)_mm512_permute_ps((__m512)v, 0xb1)
           : h == 2 ? (vec_f)_mm512_permute_ps((__m512)v, 0x4e)
           : h == 4 ? (vec_f)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1)
                    : (vec_f)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
#elif VEC == 8
    return h == 1   ? (vec_f)_mm256_permute_ps((__m256)v, 0xb1)
           : h == 2 ? (vec_f)_mm256_permute_ps((__m256)v, 0x4e)
                    : (vec_f)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
#else
    vec_f x;

    for (int l = 0; l < VEC; l++)
        x[l] = v[l ^ h];
    return x;
#endif
}

#if VEC == 16
#define VEC_LANES                                                                                  \
    {                                                                                              \
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15                                       \
    }
#elif VEC == 8
#define VEC_LANES                                                                                  \
    {                                                                                              \
        0, 1, 2, 3, 4, 5, 6, 7                                                                     \
    }
#else
#define VEC_LANES                                                                                  \
    {                                                                                              \
        0, 1, 2, 3                                                                                 \
    }
#endif

/* The stages of a Hadamard transform below VEC: h = 1, 2, ... Lanes l and l + h with values a and b
 * become a + b and a - b. */
VEC_INLINE vec_f vec_hadamard(vec_f v)
{
    const vec_i lane = VEC_LANES;

    for (int h = 1; h < VEC; h *= 2) {
        vec_i upper = (lane & h) != 0;

#if VEC > 4 /* times 1 or -1: no rounding but the sum's */
        v = vec_fma(v, (vec_f)((upper & INT32_MIN) | 0x3f800000), vec_swap(v, h));
#else
        v = vec_swap(v, h) + (vec_f)((vec_i)v ^ (upper & INT32_MIN));
#endif
    }
    return v;
}

/* Bit l: lane l is positive. */
VEC_INLINE uint32_t vec_positive(vec_f v)
{
#if VEC == 16
    return _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ);
#elif VEC == 8
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_setzero_ps(), _CMP_GT_OQ));
#else
    uint32_t bits = 0;

    for (int l = 0; l < VEC; l++)
        bits |= (uint32_t)(v[l] > 0) << l;
    return bits;
#endif
}

/* Collects, by |, whether any lane is NaN or infinite; then the sign bit of a lane is 1. */
VEC_INLINE vec_i vec_not_finite(vec_f v)
{
    return ((vec_i)v & (int32_t)UCM_F32_INF) == (int32_t)UCM_F32_INF;
}

VEC_INLINE uint32_t vec_any_sign(vec_i v)
{
    int32_t any = 0;

    for (int l = 0; l < VEC; l++)
        any |= v[l];
    return (uint32_t)any >> 31;
}

/* ---- decoding ---- */

VEC_INLINE uint32_t vec_load16(const uint8_t *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof(h));
    return h;
}

VEC_INLINE vec_f vec_bf16(const uint8_t *p)
{
#if VEC == 16
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));

    return (vec_f)_mm512_slli_epi32(h, 16);
#elif VEC == 8
    return (vec_f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vec_f v;

    for (int l = 0; l < VEC; l++)
        v[l] = ucm_bf16_decode(vec_load16(p + 2 * l));
    return v;
#endif
}

VEC_INLINE vec_f vec_f16(const uint8_t *p)
{
#if VEC == 16
    return (vec_f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VEC == 8
    return (vec_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vec_f v;

    for (int l = 0; l < VEC; l++)
        v[l] = ucm_f16_decode(vec_load16(p + 2 * l));
    return v;
#endif
}

VEC_INLINE vec_u vec_load_u8(const uint8_t *p)
{
#if VEC == 16
    return (vec_u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VEC == 8
    return (vec_u)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vec_u v;

    for (int l = 0; l < VEC; l++)
        v[l] = p[l];
    return v;
#endif
}

VEC_INLINE vec_f vec_load_i8(const uint8_t *p)
{
#if VEC == 16
    return (vec_f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif VEC == 8
    return (vec_f)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec_f v;

    for (int l = 0; l < VEC; l++)
        v[l] = (float)(int8_t)p[l];
    return v;
#endif
}

/* E4M3 is F16 without the low 7 bits, times 2^8, except for NaN. */
VEC_INLINE vec_f vec_fp8(const uint8_t *p)
{
#if VEC == 16
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
    __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f));
    __m256i h = _mm256_or_si256(sign, _mm256_slli_epi16(rest, 7));

    h = _mm256_or_si256(h, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    return (vec_f)_mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
#elif VEC == 8
    __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_and_si128(b, _mm_set1_epi16(0x7f));
    __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
    __m128i h = _mm_or_si128(sign, _mm_slli_epi16(rest, 7));

    h = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return (vec_f)_mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f));
#else
    vec_f v;

    for (int l = 0; l < VEC; l++)
        v[l] = ucm_fp8_e4m3_decode(p[l]);
    return v;
#endif
}

#endif
