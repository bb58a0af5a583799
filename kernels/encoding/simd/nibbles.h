/* q4's codes in lanes: 4 bits to levels, values to 4 bits. */
#ifndef UCM_KERNELS_ENCODING_NIBBLES_H
#define UCM_KERNELS_ENCODING_NIBBLES_H

#include "kernels/encoding/simd/words.h"

#define NIBBLES (4u * VEC) /* that q4_codes makes */

/* VEC of them. Each lane has its code in its low bits, and any bits above. */
VEC_INLINE vec_u nibbles(const uint8_t *p)
{
    const vec_i lane = VEC_LANES;
#if VEC == 16
    const vec_i half = lane >> 3;
    vec_u x = (vec_u)_mm512_permutexvar_epi32(
        (__m512i)half, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec_u x = vec_all(encoding_get32(p));
#endif

    return x >> ((vec_u)lane % 8 * 4);
}

/* The levels of codes in the low bits of lanes. */
VEC_INLINE vec_f q4_levels(vec_u codes)
{
#if VEC == 16
    const __m512 table =
        _mm512_setr_ps(6, 18, 31, 44, 59, 76, 97, 127, -6, -18, -31, -44, -59, -76, -97, -127);

    return (vec_f)_mm512_permutexvar_ps((__m512i)codes, table);
#else
    const __m256 table = _mm256_setr_ps(6, 18, 31, 44, 59, 76, 97, 127);
    vec_u level = (vec_u)_mm256_permutevar8x32_ps(table, (__m256i)codes);

    return (vec_f)(level ^ (codes << 28 & 0x80000000u));
#endif
}

/* Two tables, indexed by a byte's high half. Each of these 16 ranges has at most one of the doubled
 * thresholds. q4_below has the number of thresholds below the range. q4_threshold has the one in it
 * minus one, or 255 if there is none. */
VEC_INLINE __m128i q4_below(void)
{
    return _mm_setr_epi8(0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7);
}

VEC_INLINE __m128i q4_threshold(void)
{
    return _mm_setr_epi8(-1, 23, -1, 48, 74, -1, 102, -1, (char)134, -1, (char)172, -1, -1, -1,
                         (char)223, -1);
}

/* NIBBLES values, none of which is more than 2^30 / twice. A code is the number of doubled
 * thresholds that are at most twice * |y|, and the sign. */
#if VEC == 16

VEC_INLINE void q4_codes(const float *y, vec_f twice, uint8_t *codes)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i below = _mm512_broadcast_i32x4(q4_below());
    const __m512i threshold = _mm512_broadcast_i32x4(q4_threshold());
    __m512i x[4], bytes, range, code;
    uint64_t negative = 0;

    for (int i = 0; i < 4; i++) {
        vec_f v = vec_load(y + i * VEC), magnitude = (vec_f)((vec_u)v & 0x7fffffffu);

        x[i] = _mm512_cvttps_epi32((__m512)(magnitude * twice));
        negative |= (uint64_t)_mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_LT_OQ)
                    << i * VEC;
    }
    bytes = _mm512_packus_epi16(_mm512_packus_epi32(x[0], x[1]), _mm512_packus_epi32(x[2], x[3]));
    range = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
    code = _mm512_shuffle_epi8(below, range);
    code = _mm512_mask_add_epi8(
        code, _mm512_cmpgt_epu8_mask(bytes, _mm512_shuffle_epi8(threshold, range)), code,
        _mm512_set1_epi8(1));
    code = _mm512_permutexvar_epi32(order, code);
    code = _mm512_mask_add_epi8(code, negative, code, _mm512_set1_epi8(8));
    code = _mm512_maddubs_epi16(code, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(code));
}

#else

VEC_INLINE void q4_codes(const float *y, vec_f twice, uint8_t *codes)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i below = _mm256_broadcastsi128_si256(q4_below());
    const __m256i threshold = _mm256_broadcastsi128_si256(q4_threshold());
    __m256i x[4], negative[4], bytes, range, bound, code, none;

    for (int i = 0; i < 4; i++) {
        vec_f v = vec_load(y + i * VEC), magnitude = (vec_f)((vec_u)v & 0x7fffffffu);

        x[i] = _mm256_cvttps_epi32((__m256)(magnitude * twice));
        negative[i] = (__m256i)(v < 0.0f);
    }
    bytes = _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
    code = _mm256_packs_epi16(_mm256_packs_epi32(negative[0], negative[1]),
                              _mm256_packs_epi32(negative[2], negative[3]));
    code = _mm256_and_si256(code, _mm256_set1_epi8(8));
    range = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
    bound = _mm256_shuffle_epi8(threshold, range);
    none = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, bound), bound);
    code = _mm256_or_si256(code, _mm256_sub_epi8(_mm256_shuffle_epi8(below, range),
                                                 _mm256_cmpeq_epi8(none, _mm256_setzero_si256())));
    code = _mm256_permutevar8x32_epi32(code, order);
    code = _mm256_maddubs_epi16(code, _mm256_set1_epi16(0x1001));
    _mm_storeu_si128((__m128i *)codes, _mm_packus_epi16(_mm256_castsi256_si128(code),
                                                        _mm256_extracti128_si256(code, 1)));
}

#endif

#endif
