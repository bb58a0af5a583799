/* 2 * VEC elements in lanes of 16 bits, and as many codes of 4 bits in bytes. */
#ifndef UCM_KERNELS_ENCODING_WORDS_H
#define UCM_KERNELS_ENCODING_WORDS_H

#include "kernels/encoding/simd/lanes.h"

#define WORDS (2u * VEC)

/* ---- 16 codes ---- */

VEC_INLINE __m128i unpack_codes(const uint8_t *p)
{
    __m128i b = _mm_loadl_epi64((const __m128i *)p), low = _mm_set1_epi8(15);

    return _mm_unpacklo_epi8(_mm_and_si128(b, low), _mm_and_si128(_mm_srli_epi16(b, 4), low));
}

VEC_INLINE void pack_codes(uint8_t *p, __m128i codes)
{
    __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));

    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(pairs, pairs));
}

/* ---- a step ---- */

#if VEC == 16
typedef __m512i words;

VEC_INLINE words words_load(const uint8_t *p)
{
    return _mm512_loadu_si512(p);
}

VEC_INLINE void words_store(uint8_t *p, words x)
{
    _mm512_storeu_si512(p, x);
}

VEC_INLINE words words_all(uint32_t x)
{
    return _mm512_set1_epi16((short)x);
}

VEC_INLINE words words_of_bytes(__m256i bytes)
{
    return _mm512_cvtepu8_epi16(bytes);
}

/* The low bytes. */
VEC_INLINE __m256i words_bytes(words x)
{
    return _mm512_cvtepi16_epi8(x);
}

VEC_INLINE words words_max(words a, words b)
{
    return _mm512_max_epi16(a, b);
}

/* Where a == b: yes, elsewhere no. */
VEC_INLINE words words_if_equal(words a, words b, words yes, words no)
{
    return _mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(a, b), no, yes);
}

VEC_INLINE uint32_t words_largest(words x)
{
    __m256i y = _mm256_max_epi16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i z = _mm_max_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));

    return 0xffffu -
           (uint32_t)_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(z, _mm_set1_epi16(-1))), 0);
}

typedef __m256i codes_t; /* a byte each */

VEC_INLINE codes_t codes_load(const uint8_t *p)
{
    __m128i b = _mm_loadu_si128((const __m128i *)p), low = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(b, low), odd = _mm_and_si128(_mm_srli_epi16(b, 4), low);

    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

VEC_INLINE void codes_store(uint8_t *p, codes_t c)
{
    __m256i pairs = _mm256_maddubs_epi16(c, _mm256_set1_epi16(0x1001));

    _mm_storeu_si128((__m128i *)p, _mm256_cvtepi16_epi8(pairs));
}

VEC_INLINE codes_t codes_look_up(__m128i table, codes_t c)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), c);
}

/* Bit i: code i is 15. */
VEC_INLINE uint32_t codes_escapes(codes_t c)
{
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(c, _mm256_set1_epi8(15)));
}

VEC_INLINE codes_t codes_load_bytes(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

VEC_INLINE void codes_store_bytes(uint8_t *p, codes_t x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

#define WORDS_OP(name) _mm512_##name##_si512
#define WORDS_SHIFT(name) _mm512_##name##_epi16
#define WORDS_MIN _mm512_min_epu16
#define WORDS_SUB _mm512_sub_epi16

#else

typedef __m256i words;

VEC_INLINE words words_load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

VEC_INLINE void words_store(uint8_t *p, words x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

VEC_INLINE words words_all(uint32_t x)
{
    return _mm256_set1_epi16((short)x);
}

VEC_INLINE words words_of_bytes(__m128i bytes)
{
    return _mm256_cvtepu8_epi16(bytes);
}

/* x is below 2^8. */
VEC_INLINE __m128i words_bytes(words x)
{
    return _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

VEC_INLINE words words_max(words a, words b)
{
    return _mm256_max_epi16(a, b);
}

VEC_INLINE words words_if_equal(words a, words b, words yes, words no)
{
    return _mm256_blendv_epi8(no, yes, _mm256_cmpeq_epi16(a, b));
}

VEC_INLINE uint32_t words_largest(words x)
{
    __m128i z = _mm_max_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));

    return 0xffffu -
           (uint32_t)_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(z, _mm_set1_epi16(-1))), 0);
}

typedef __m128i codes_t; /* a byte each */

VEC_INLINE codes_t codes_load(const uint8_t *p)
{
    return unpack_codes(p);
}

VEC_INLINE void codes_store(uint8_t *p, codes_t c)
{
    pack_codes(p, c);
}

VEC_INLINE codes_t codes_look_up(__m128i table, codes_t c)
{
    return _mm_shuffle_epi8(table, c);
}

VEC_INLINE uint32_t codes_escapes(codes_t c)
{
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(c, _mm_set1_epi8(15)));
}

VEC_INLINE codes_t codes_load_bytes(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

VEC_INLINE void codes_store_bytes(uint8_t *p, codes_t x)
{
    _mm_storeu_si128((__m128i *)p, x);
}

#define WORDS_OP(name) _mm256_##name##_si256
#define WORDS_SHIFT(name) _mm256_##name##_epi16
#define WORDS_MIN _mm256_min_epu16
#define WORDS_SUB _mm256_sub_epi16
#endif

#endif
