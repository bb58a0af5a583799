/* Vectors of floats over AVX-512 or AVX2, so that scores are one text for both. A dot product has 32
 * lanes (arith.h), DOT_VECS vectors; a tile has 16 blocks, TILE_VECS vectors. UCM_LANES, the floats of
 * a vector, is not defined in a build that has neither. */
#ifndef UCM_KERNELS_SPARSE_LANES_H
#define UCM_KERNELS_SPARSE_LANES_H

#include "kernels/simd/vec.h"
#include "kernels/sparse/arith.h"

#if VEC > 4
#define UCM_LANES VEC
#endif

#ifdef UCM_LANES

#define TILE 16u
#define DOT_VECS (UCM_DOT_LANES / UCM_LANES)
#define TILE_VECS (TILE / UCM_LANES)
#define LANES_INLINE static inline __attribute__((always_inline, unused))
#ifdef __clang__
#define LANES_UNROLL _Pragma("unroll")
#else
#define LANES_UNROLL _Pragma("GCC unroll 16")
#endif

#if UCM_LANES == 16
typedef __m512 vec;
#else
typedef __m256 vec;
#endif

LANES_INLINE vec v_set(float x)
{
    return (vec)vec_all_f(x);
}

LANES_INLINE vec v_load(const float *p)
{
    return (vec)vec_load(p);
}

LANES_INLINE void v_store(float *p, vec x)
{
    vec_store(p, (vec_f)x);
}

LANES_INLINE vec v_add(vec a, vec b)
{
    return a + b;
}

LANES_INLINE vec v_sub(vec a, vec b)
{
    return a - b;
}

LANES_INLINE vec v_mul(vec a, vec b)
{
    return a * b;
}

LANES_INLINE vec v_div(vec a, vec b)
{
    return a / b;
}

LANES_INLINE vec v_fma(vec a, vec b, vec c)
{
    return (vec)vec_fma((vec_f)a, (vec_f)b, (vec_f)c);
}

LANES_INLINE vec v_max(vec a, vec b)
{
    return (vec)vec_max((vec_f)a, (vec_f)b);
}

/* Lanes of bf16. */
LANES_INLINE vec v_bf16(const uint16_t *p)
{
    return (vec)vec_bf16((const uint8_t *)p);
}

LANES_INLINE vec v_i8(const uint8_t *p)
{
    return (vec)vec_load_i8(p);
}

LANES_INLINE vec v_u8(const uint8_t *p)
{
    return (vec) __builtin_convertvector((vec_i)vec_load_u8(p), vec_f);
}

/* -|x| */
LANES_INLINE vec v_minus_abs(vec x)
{
    return (vec)((vec_u)x | 0x80000000u);
}

/* x is not negative: the exponent that its bits hold, and its fraction in [1/2, 1). */
LANES_INLINE vec v_exponent(vec x)
{
    return (vec) __builtin_convertvector((vec_i)x >> 23, vec_f);
}

LANES_INLINE vec v_fraction(vec x)
{
    return (vec)(((vec_u)x & 0x7fffffu) | 0x3f000000u);
}

#if UCM_LANES == 16

/* Where a == b: yes, elsewhere no. */
LANES_INLINE vec v_if_equal(vec a, vec b, vec yes, vec no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
}

/* Where a < b (not NaN): yes, elsewhere no. */
LANES_INLINE vec v_if_less(vec a, vec b, vec yes, vec no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

/* x, but y where x is NaN. */
LANES_INLINE vec v_unless_nan(vec x, vec y)
{
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), y);
}

/* x, but y where x is NaN or infinite. */
LANES_INLINE vec v_if_finite(vec x, vec y)
{
    return _mm512_mask_mov_ps(x, _mm512_fpclass_ps_mask(x, 0x99), y);
}

/* 2^n for integers n in -126..127. */
LANES_INLINE vec v_exp2i(vec n)
{
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}

/* The first n lanes; the others are 0 and are not read. */
LANES_INLINE vec v_i8_part(const uint8_t *p, uint32_t n)
{
    __m128i x = _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p);

    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}

LANES_INLINE vec v_u8_part(const uint8_t *p, uint32_t n)
{
    __m128i x = _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p);

    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x));
}

LANES_INLINE void v_store_part(float *p, vec x, uint32_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x);
}

/* x as unsigned integers, to p. */
LANES_INLINE void v_store_u32(uint32_t *p, vec x)
{
    _mm512_storeu_si512(p, _mm512_cvttps_epi32(x));
}

/* The sum of the lanes, which are integers up to 2^24; the sum of sums up to 2^53 is exact. */
typedef __m512d vec_sum;

LANES_INLINE vec_sum v_sum_zero(void)
{
    return _mm512_setzero_pd();
}

LANES_INLINE vec_sum v_sum_add(vec_sum s, vec x)
{
    s = _mm512_add_pd(s, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    return _mm512_add_pd(s, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

LANES_INLINE double v_sum(vec_sum s)
{
    return _mm512_reduce_add_pd(s);
}

/* Halves of a dot's 32 lanes are added until one vector is left. */
LANES_INLINE vec v_dot_fold(const vec acc[DOT_VECS])
{
    return _mm512_add_ps(acc[0], acc[1]);
}

/* Where in folds[16] block t's vector goes, so that v_tile_dots leaves block t's sum in lane t. */
LANES_INLINE unsigned v_fold_place(unsigned t)
{
    return t % 4 * 4 + t / 4;
}

/* Lane l of a becomes a[l] + a[l + 8]; a's 8 such sums in the low half, b's in the high half. */
LANES_INLINE vec add_halves(vec a, vec b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

/* The same with quarters: 4 sums of each half of a, then of b. */
LANES_INLINE vec add_quarters(vec a, vec b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The sums of four folds, 4 lanes each. */
LANES_INLINE vec add_four(const vec *f)
{
    return add_quarters(add_halves(f[0], f[1]), add_halves(f[2], f[3]));
}

LANES_INLINE vec add_pairs(vec a, vec b)
{
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

LANES_INLINE void v_tile_dots(const vec folds[TILE], vec out[TILE_VECS])
{
    vec a = add_pairs(add_four(folds), add_four(folds + 4));
    vec b = add_pairs(add_four(folds + 8), add_four(folds + 12));

    out[0] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

#else /* UCM_LANES == 8 */

LANES_INLINE vec v_if_equal(vec a, vec b, vec yes, vec no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

LANES_INLINE vec v_if_less(vec a, vec b, vec yes, vec no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

LANES_INLINE vec v_unless_nan(vec x, vec y)
{
    return _mm256_blendv_ps(x, y, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

LANES_INLINE vec v_if_finite(vec x, vec y)
{
    vec size = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));

    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(size, v_set(ucm_inf()), _CMP_LT_OQ));
}

LANES_INLINE vec v_exp2i(vec n)
{
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}

LANES_INLINE __m128i load_part(const uint8_t *p, uint32_t n)
{
    uint64_t bytes = 0;

    memcpy(&bytes, p, n);
    return _mm_cvtsi64_si128((int64_t)bytes);
}

LANES_INLINE vec v_i8_part(const uint8_t *p, uint32_t n)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_part(p, n)));
}

LANES_INLINE vec v_u8_part(const uint8_t *p, uint32_t n)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_part(p, n)));
}

LANES_INLINE void v_store_part(float *p, vec x, uint32_t n)
{
    float lane[UCM_LANES];

    v_store(lane, x);
    memcpy(p, lane, n * sizeof(*p));
}

LANES_INLINE void v_store_u32(uint32_t *p, vec x)
{
    _mm256_storeu_si256((__m256i *)p, _mm256_cvttps_epi32(x));
}

typedef __m256d vec_sum;

LANES_INLINE vec_sum v_sum_zero(void)
{
    return _mm256_setzero_pd();
}

LANES_INLINE vec_sum v_sum_add(vec_sum s, vec x)
{
    s = _mm256_add_pd(s, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    return _mm256_add_pd(s, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}

LANES_INLINE double v_sum(vec_sum s)
{
    double lane[4];

    _mm256_storeu_pd(lane, s);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

LANES_INLINE vec v_dot_fold(const vec acc[DOT_VECS])
{
    return _mm256_add_ps(_mm256_add_ps(acc[0], acc[2]), _mm256_add_ps(acc[1], acc[3]));
}

LANES_INLINE unsigned v_fold_place(unsigned t)
{
    return t / 8 * 8 + t % 4 * 2 + t % 8 / 4;
}

/* a's 4 sums of lanes l and l + 4 in the low half, b's in the high half. */
LANES_INLINE vec add_halves(vec a, vec b)
{
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

LANES_INLINE vec add_pairs(vec a, vec b)
{
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}

LANES_INLINE void v_tile_dots(const vec folds[TILE], vec out[TILE_VECS])
{
    LANES_UNROLL
    for (unsigned i = 0; i < TILE_VECS; i++) {
        const vec *f = folds + 8 * i;
        vec a = add_pairs(add_halves(f[0], f[1]), add_halves(f[2], f[3]));
        vec b = add_pairs(add_halves(f[4], f[5]), add_halves(f[6], f[7]));

        out[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
    }
}

#endif

/* ---- both ---- */

/* 32 channels of 4 bits, as rows_put_4 lays them. */
LANES_INLINE void v_i4(const uint8_t *p, vec x[DOT_VECS])
{
    const __m128i low = _mm_set1_epi8(15);
    const __m128i value = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    __m128i both = _mm_loadu_si128((const __m128i *)p);
    uint8_t bytes[UCM_DOT_LANES];

    _mm_storeu_si128((__m128i *)bytes, _mm_shuffle_epi8(value, _mm_and_si128(both, low)));
    both = _mm_and_si128(_mm_srli_epi16(both, 4), low);
    _mm_storeu_si128((__m128i *)(bytes + 16), _mm_shuffle_epi8(value, both));
    LANES_UNROLL
    for (uint32_t v = 0; v < DOT_VECS; v++)
        x[v] = v_i8(bytes + v * UCM_LANES);
}

/* ucm_exp, for x <= 0 or NaN */
LANES_INLINE vec v_exp(vec x)
{
    vec n = v_sub(v_add(v_mul(x, v_set(0x1.715476p+0f)), v_set(0x1.8p23f)), v_set(0x1.8p23f));
    vec r = v_fma(n, v_set(-0x1.7f7d1cp-20f), v_fma(n, v_set(-0x1.62e4p-1f), x));
    vec p = v_fma(r, v_set(0x1.a01a02p-13f), v_set(0x1.6c16c2p-10f));

    p = v_fma(p, r, v_set(0x1.111112p-7f));
    p = v_fma(p, r, v_set(0x1.555556p-5f));
    p = v_fma(p, r, v_set(0x1.555556p-3f));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_mul(p, v_exp2i(n));
    return v_if_less(v_set(-87.0f), x, p, v_if_equal(v_set(-87.0f), x, p, v_set(0)));
}

/* ucm_log */
LANES_INLINE vec v_log(vec x)
{
    vec root = v_set(0x1.6a09e6p-1f), one = v_set(1.0f), f = v_fraction(x), z, s, p;
    vec e = v_sub(v_exponent(x), v_set(126.0f));

    e = v_if_less(f, root, v_sub(e, one), e);
    f = v_if_less(f, root, v_mul(f, v_set(2.0f)), f);
    z = v_div(v_sub(f, one), v_add(f, one));
    s = v_mul(z, z);
    p = v_fma(s, v_set(0x1.c71c72p-4f), v_set(0x1.24924ap-3f));
    p = v_fma(s, v_fma(s, p, v_set(0x1.99999ap-3f)), v_set(0x1.555556p-2f));
    return v_fma(e, v_set(0x1.62e43p-1f), v_mul(v_set(2.0f), v_fma(v_mul(z, s), p, z)));
}

/* ucm_log_sum_add */
LANES_INLINE void v_log_sum_add(vec *top, vec *sum, vec t)
{
    vec e = v_exp(v_minus_abs(v_sub(t, *top)));
    vec grown = v_add(v_mul(*sum, e), v_set(1.0f)), same = v_add(*sum, e);

    *sum = v_if_less(*top, t, grown, same);
    *top = v_max(t, *top);
}

#endif
#endif
