/* Scalar arithmetic of encodings, one text for C and CUDA: kernels/arith.h says under which
 * rules. */
#ifndef UCM_KERNELS_ENCODING_ARITH_H
#define UCM_KERNELS_ENCODING_ARITH_H

#include "kernels/arith.h"
#include "kernels/encoding/encoding.h"

/* ---- elements of 16 bits ---- */

/* x rounded to nearest even. A larger x than the largest finite value becomes that, with its sign,
 * and so do infinities. NaN becomes 0x7fc0. */
UCM_HD uint32_t ucm_bf16_encode(float x)
{
    uint32_t u = ucm_f32_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;

    if (rest > UCM_F32_INF)
        return UCM_BF16_NAN;
    if (rest > 0x7f7f0000u)
        return sign | 0x7f7fu;
    return sign | (rest + 0x7fffu + (rest >> 16 & 1)) >> 16;
}

/* The same; NaN becomes 0x7e00. */
UCM_HD uint32_t ucm_f16_encode(float x)
{
    uint32_t u = ucm_f32_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;

    if (rest > UCM_F32_INF)
        return 0x7e00u;
    if (rest > 0x477fe000u)
        return sign | 0x7bffu;
    if (rest >= 0x38800000u)
        return sign | (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1)) >> 13;
    return sign | (uint32_t)ucm_rint(ucm_f32(rest) * 0x1p24f); /* denormal */
}

UCM_HD float ucm_element_decode(uint32_t dtype, uint32_t h)
{
    return dtype == UCM_ENCODING_F16 ? ucm_f16_decode(h) : ucm_bf16_decode(h);
}

UCM_HD uint32_t ucm_element_encode(uint32_t dtype, float x)
{
    return dtype == UCM_ENCODING_F16 ? ucm_f16_encode(x) : ucm_bf16_encode(x);
}

UCM_HD uint32_t ucm_element_nan(uint32_t dtype)
{
    return dtype == UCM_ENCODING_F16 ? 0x7e00u : UCM_BF16_NAN;
}

UCM_HD uint32_t ucm_element_inf(uint32_t dtype)
{
    return dtype == UCM_ENCODING_F16 ? 0x7c00u : 0x7f80u;
}

/* The magnitude's bits as float32, but 0 for NaN and infinities. An integer maximum of these gives
 * the largest magnitude of a row. */
UCM_HD uint32_t ucm_magnitude(float x)
{
    return ucm_not_finite(x) ? 0 : ucm_f32_bits(x) & 0x7fffffffu;
}

/* ---- fp8 ---- */

#define UCM_FP8_INF 0x7eu
#define UCM_FP8_NAN 0x7fu
#define UCM_FP8_SCALE_ONE 127u

/* The scale byte, k + 127, of a row whose largest magnitude (ucm_magnitude) is this. k is the least
 * for which the magnitude times 2^-k rounds to a finite code. That product is below 432, which is
 * 1.6875 * 2^8. k is large enough that each code times 2^k is a value of the dtype. */
UCM_HD uint32_t ucm_fp8_scale(uint32_t dtype, uint32_t largest)
{
    uint32_t least = dtype == UCM_ENCODING_F16 ? 112u : 3u;
    uint32_t scale = (largest + 0x280000u) >> 23;

    if (largest == 0)
        return UCM_FP8_SCALE_ONE;
    return scale < least + 8 ? least : scale - 8;
}

/* 2^-k, which the row's elements are multiplied by. */
UCM_HD float ucm_fp8_multiplier(uint32_t scale)
{
    return ucm_f32((254u - scale) << 23); /* 3 <= scale <= 247 */
}

UCM_HD uint32_t ucm_fp8_encode(float x, float multiplier)
{
    uint32_t sign = ucm_f32_bits(x) >> 24 & 0x80u, u;
    float y;

    if (ucm_is_nan(x))
        return UCM_FP8_NAN;
    if (ucm_not_finite(x))
        return sign | UCM_FP8_INF;
    y = ucm_abs(x) * multiplier;
    u = ucm_f32_bits(y);
    if (u < 0x3c800000u) /* 2^-6: denormal */
        return sign | (uint32_t)ucm_rint(y * 0x1p9f);
    return sign | (((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3));
}

/* 2^k for any scale byte; 255 is NaN. */
UCM_HD float ucm_fp8_power(uint32_t scale)
{
    if (scale == 255)
        return ucm_f32(0x7fc00000u);
    return ucm_f32(scale > 0 ? scale << 23 : 1u << 22);
}

/* An element's bits. power: ucm_fp8_power of the row's scale. */
UCM_HD uint32_t ucm_fp8_decode(uint32_t dtype, uint32_t code, float power)
{
    uint32_t rest = code & 0x7fu;

    if (rest == UCM_FP8_NAN)
        return ucm_element_nan(dtype);
    if (rest == UCM_FP8_INF)
        return (code & 0x80u) << 8 | ucm_element_inf(dtype);
    return ucm_element_encode(dtype, ucm_fp8_e4m3_decode(code) * power);
}

/* ---- int8 ---- */

#define UCM_INT8_STEPS 126.0f
#define UCM_INT8_INF 127
#define UCM_INT8_NAN (-128)

/* The scale, as bf16 bits, of elements whose largest magnitude (ucm_magnitude) is this. It is a
 * normal number, so that 1 / scale is finite. */
UCM_HD uint32_t ucm_int8_scale(uint32_t largest)
{
    uint32_t s = ucm_scale(ucm_f32(largest), UCM_INT8_STEPS);

    return s < 0x80u ? 0x80u : s;
}

/* Tokens of the tensor that share a channel's scale; 0: a row has one scale. */
UCM_HD uint32_t ucm_int8_run(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];

    if (spec->axis != UCM_ENCODING_AXIS_CHANNEL || s->kind != UCM_ENCODING_K)
        return 0;
    return spec->run == 0 || spec->run > s->tokens ? s->tokens : spec->run;
}

/* reciprocal: 1 / scale, rounded. A finite x is at most 126 scales. So is the product, except for
 * rounding errors, which rint removes. */
UCM_HD int32_t ucm_int8_encode(float x, float reciprocal)
{
    if (ucm_is_nan(x))
        return UCM_INT8_NAN;
    if (ucm_not_finite(x))
        return x < 0 ? -UCM_INT8_INF : UCM_INT8_INF;
    return (int32_t)ucm_rint(x * reciprocal);
}

/* An element's bits. */
UCM_HD uint32_t ucm_int8_decode(uint32_t dtype, int32_t code, float scale)
{
    if (code == UCM_INT8_NAN)
        return ucm_element_nan(dtype);
    if (code == UCM_INT8_INF || code == -UCM_INT8_INF)
        return (code < 0 ? 0x8000u : 0) | ucm_element_inf(dtype);
    return ucm_element_encode(dtype, (float)code * scale);
}

/* ---- q4 ---- */

#define UCM_Q4_TILE 16u /* tokens that share a centre */
#define UCM_Q4_ROTATION_MIN 16u
#define UCM_Q4_ROTATION_MAX 128u

/* Channels of a group, which has a rotation and a scale of its own. The largest power of two that
 * divides dim. */
UCM_HD uint32_t ucm_q4_rotation(uint32_t dim)
{
    uint32_t power = dim & (~dim + 1);

    return power > UCM_Q4_ROTATION_MAX ? UCM_Q4_ROTATION_MAX : power;
}

/* Channel 64 * word + i is negated if bit i is 1. */
UCM_HD uint64_t ucm_q4_signs(uint64_t seed, uint32_t word)
{
    return ucm_mix64(seed + UINT64_C(0x9e3779b97f4a7c15) * (word + 1));
}

/* K is levelled before its rotation. A channel whose largest value stands out in its tile is
 * divided by 2^shift, so that it does not set the scale of all others. exponent: of that value as
 * float32 (its ucm_magnitude >> 23). median: the least number that at least half of the group's
 * exponents do not exceed. */
UCM_HD uint32_t ucm_q4_shift(uint32_t exponent, uint32_t median)
{
    uint32_t level = median + 2;

    if (exponent <= level)
        return 0;
    return exponent - level < 15 ? exponent - level : 15;
}

/* 2^shift, negative if the channel is negated. */
UCM_HD float ucm_q4_factor(uint32_t shift, uint32_t negated)
{
    return ucm_f32((127 + shift) << 23 | negated << 31);
}

/* The reciprocal of that. It is exact, and so is its product with any element. */
UCM_HD float ucm_q4_divisor(uint32_t shift, uint32_t negated)
{
    return ucm_f32((127 - shift) << 23 | negated << 31);
}

/* What a code stands for, in scales: a sign and one of 8 magnitudes. */
UCM_HD int32_t ucm_q4_level(uint32_t code)
{
    int32_t level = (int32_t)(UINT64_C(0x7f614c3b2c1f1206) >> 8 * (code & 7) & 0xff);

    return code & 8 ? -level : level;
}

#define UCM_Q4_PART 0x3bf2b9d6u /* the float nearest to 1 / 135 */
#define UCM_Q4_SCALE_LEAST 0x1p-100f

/* The scale, as bf16 bits, of a group whose largest magnitude is a, which is finite. 0: the whole
 * group counts as 0. */
UCM_HD uint32_t ucm_q4_scale(float a)
{
    uint32_t s = ucm_bf16_encode(a * ucm_f32(UCM_Q4_PART));

    return ucm_bf16_decode(s) < UCM_Q4_SCALE_LEAST ? 0 : s;
}

/* reciprocal: 1 / scale, rounded. */
UCM_HD uint32_t ucm_q4_code(float y, float reciprocal)
{
    float x = ucm_abs(y) * reciprocal;
    uint32_t index = (uint32_t)(x >= 12.0f) + (uint32_t)(x >= 24.5f) + (uint32_t)(x >= 37.5f) +
                     (uint32_t)(x >= 51.5f) + (uint32_t)(x >= 67.5f) + (uint32_t)(x >= 86.5f) +
                     (uint32_t)(x >= 112.0f);

    return (y < 0 ? 8u : 0u) | index;
}

/* A group's centre is dropped if the remainder of any row is larger than the row by more than
 * this. */
#define UCM_Q4_CENTRE_MOST 1.25f

/* ---- lossless ---- */

#define UCM_LOSSLESS_TILE 16u /* tokens of a head that share a base */
#define UCM_LOSSLESS_ZERO 14u
#define UCM_LOSSLESS_ESCAPE 15u
#define UCM_LOSSLESS_UNFIT 0xffffffffu

UCM_HD uint32_t ucm_lossless_exponent(uint32_t h)
{
    return h >> 7 & 0xffu;
}

/* Sign and mantissa. */
UCM_HD uint32_t ucm_lossless_rest(uint32_t h)
{
    return (h >> 8 & 0x80u) | (h & 0x7fu);
}

UCM_HD uint32_t ucm_lossless_element(uint32_t exponent, uint32_t rest)
{
    return (rest & 0x80u) << 8 | exponent << 7 | (rest & 0x7fu);
}

/* base: the largest exponent from 1 to 254 among those that share it, or 0. */
UCM_HD uint32_t ucm_lossless_code(uint32_t exponent, uint32_t base)
{
    if (exponent == 0)
        return UCM_LOSSLESS_ZERO;
    return exponent <= base && base - exponent < UCM_LOSSLESS_ZERO ? base - exponent
                                                                   : UCM_LOSSLESS_ESCAPE;
}

/* Decodes a code; for an escape, the value until the list replaces it. */
UCM_HD uint32_t ucm_lossless_decode(uint32_t code, uint32_t base)
{
    return code < UCM_LOSSLESS_ZERO ? (base - code) & 0xffu : 0;
}

#endif
