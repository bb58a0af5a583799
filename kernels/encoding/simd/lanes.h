/* Elements of 16 bits and codes in lanes of 32: what arith.h says of one, for VEC of them. Compiled
 * for AVX2 and AVX-512 only. */
#ifndef UCM_KERNELS_ENCODING_LANES_H
#define UCM_KERNELS_ENCODING_LANES_H

#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"
#include "kernels/simd/isa.h"
#include "kernels/simd/vec.h"

#define FORM(name)                                                                                 \
    void UCM_ISA_NAME(name)(const struct ucm_encoding_spec *spec, uint32_t tensor,                 \
                            const uint8_t *from, uint8_t *to)

FORM(fp8_encode);
FORM(fp8_decode);
FORM(int8_encode);
FORM(int8_decode);
FORM(q4_encode);
FORM(q4_decode);
FORM(lossless_encode);
FORM(lossless_decode);

VEC_INLINE vec_u vec_all(uint32_t x)
{
    return x - (vec_u){0};
}

/* Comparisons of values below 2^31: those of signed integers are instructions. */
VEC_INLINE vec_u vec_less(vec_u a, uint32_t b)
{
    return (vec_u)((vec_i)a < (int32_t)b);
}

VEC_INLINE vec_u vec_select(vec_u mask, vec_u yes, vec_u no)
{
    return (yes & mask) | (no & ~mask);
}

/* For values below 2^31. */
VEC_INLINE vec_u vec_max_u(vec_u a, vec_u b)
{
#if VEC == 16
    return (vec_u)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return (vec_u)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}

/* The largest of the lanes. */
VEC_INLINE uint32_t vec_largest(vec_u x)
{
    for (int h = VEC / 2; h > 0; h /= 2)
        x = vec_max_u(x, (vec_u)vec_swap((vec_f)x, h));
    return x[0];
}

/* ---- bytes and 16-bit words ---- */

/* The low bytes. */
VEC_INLINE void vec_store_u8(uint8_t *p, vec_u x)
{
#if VEC == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    const __m256i low = _mm256_set1_epi32(0x0c080400);
    __m256i b = _mm256_shuffle_epi8((__m256i)x, low);

    _mm_storel_epi64((__m128i *)p,
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
#endif
}

/* x is below 2^16. */
VEC_INLINE void vec_store_u16(uint8_t *p, vec_u x)
{
#if VEC == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
#else
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                                                    _mm256_extracti128_si256((__m256i)x, 1)));
#endif
}

/* ---- elements ---- */

VEC_INLINE vec_f element_load(uint32_t dtype, const uint8_t *p)
{
    return dtype == UCM_ENCODING_F16 ? vec_f16(p) : vec_bf16(p);
}

/* y's F16 bits, rounded; |y| < 65520. */
VEC_INLINE vec_u f16_round(vec_f y)
{
#if VEC == 16
    return (vec_u)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)y, _MM_FROUND_TO_NEAREST_INT));
#else
    return (vec_u)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)y, _MM_FROUND_TO_NEAREST_INT));
#endif
}

/* ucm_element_encode of y, which is not NaN and not past the largest finite value. */
VEC_INLINE vec_u element_round(uint32_t dtype, vec_f y)
{
    vec_u u = (vec_u)y;

    return dtype == UCM_ENCODING_F16 ? f16_round(y) : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

VEC_INLINE vec_u element_encode(uint32_t dtype, vec_f y)
{
    vec_f most = vec_all_f(dtype == UCM_ENCODING_F16 ? 65504.0f : 0x1.fep127f);
    vec_u nan = (vec_u)(y != y), h = element_round(dtype, vec_max(vec_min(y, most), -most));

    return vec_select(nan, vec_all(ucm_element_nan(dtype)), h);
}

/* ucm_magnitude */
VEC_INLINE vec_u element_magnitude(vec_f x)
{
    vec_u rest = (vec_u)x & 0x7fffffff;

    return rest & vec_less(rest, UCM_F32_INF);
}

/* ---- rows ---- */

/* The last n < VEC elements of `size` bytes, followed by zeros. */
VEC_INLINE const uint8_t *row_part(uint8_t part[2 * VEC], const uint8_t *from, uint32_t n,
                                   uint32_t size)
{
    memset(part, 0, 2 * VEC);
    memcpy(part, from, (size_t)n * size);
    return part;
}

/* STEP(c, in, out) for each vector of a row of dim elements: in has VEC elements of in_size bytes,
 * out takes as many of out_size. */
#define ROW_EACH(dim, in_row, in_size, out_row, out_size, STEP)                                    \
    do {                                                                                           \
        uint8_t in_part_[2 * VEC], out_part_[2 * VEC];                                             \
        uint32_t c_ = 0;                                                                           \
                                                                                                   \
        for (; c_ + VEC <= (dim); c_ += VEC)                                                       \
            STEP(c_, (in_row) + c_ * (in_size), (out_row) + c_ * (out_size));                      \
        if (c_ < (dim)) {                                                                          \
            const uint8_t *in_ = row_part(in_part_, (in_row) + c_ * (in_size), (dim)-c_, in_size); \
                                                                                                   \
            STEP(c_, in_, out_part_);                                                              \
            memcpy((out_row) + c_ * (out_size), out_part_, (size_t)((dim)-c_) * (out_size));       \
        }                                                                                          \
    } while (0)

VEC_INLINE uint32_t row_largest(uint32_t dtype, uint32_t dim, const uint8_t *raw)
{
    vec_u most = vec_all(0);
    uint8_t part[2 * VEC];
    uint32_t c = 0;

    for (; c + VEC <= dim; c += VEC)
        most = vec_max_u(most, element_magnitude(element_load(dtype, raw + 2 * c)));
    if (c < dim)
        most = vec_max_u(
            most, element_magnitude(element_load(dtype, row_part(part, raw + 2 * c, dim - c, 2))));
    return vec_largest(most);
}

#endif
