/* Scalar arithmetic of re-rotation, one text for C and CUDA: kernels/arith.h says under which
 * rules. */
#ifndef UCM_KERNELS_ROPE_ARITH_H
#define UCM_KERNELS_ROPE_ARITH_H

#include "kernels/encoding/arith.h"
#include "kernels/rope/rope.h"

/* Rotates one pair; each product and each sum is rounded. */
UCM_HD float ucm_rope_x(float x, float y, struct ucm_rope_angle a)
{
    return x * a.cos - y * a.sin;
}

UCM_HD float ucm_rope_y(float x, float y, struct ucm_rope_angle a)
{
    return x * a.sin + y * a.cos;
}

/* Rounds to the nearest, ties to even. Values past 448 and infinities become 448 with the sign; NaN
 * becomes 0x7f. */
UCM_HD uint32_t ucm_rope_e4m3_encode(float x)
{
    uint32_t sign = ucm_f32_bits(x) >> 24 & 0x80u;

    if (ucm_is_nan(x))
        return UCM_FP8_NAN;
    if (ucm_abs(x) >= 448.0f)
        return sign | UCM_FP8_INF; /* the code of 448 */
    return ucm_fp8_encode(x, 1.0f);
}

/* An element's bits. */
UCM_HD float ucm_rope_decode(uint32_t dtype, uint32_t bits)
{
    return dtype == UCM_ROPE_F32    ? ucm_f32(bits)
           : dtype == UCM_ROPE_F16  ? ucm_f16_decode(bits)
           : dtype == UCM_ROPE_BF16 ? ucm_bf16_decode(bits)
                                    : ucm_fp8_e4m3_decode(bits);
}

UCM_HD uint32_t ucm_rope_encode(uint32_t dtype, float x)
{
    if (dtype == UCM_ROPE_F32)
        return ucm_is_nan(x) ? 0x7fc00000u : ucm_f32_bits(x);
    return dtype == UCM_ROPE_F16    ? ucm_f16_encode(x)
           : dtype == UCM_ROPE_BF16 ? ucm_bf16_encode(x)
                                    : ucm_rope_e4m3_encode(x);
}

/* The channels of pair i. */
UCM_HD uint32_t ucm_rope_channel_x(const struct ucm_rope_spec *s, uint32_t i)
{
    return s->first + (s->pairs == UCM_ROPE_HALVES ? i : 2 * i);
}

UCM_HD uint32_t ucm_rope_channel_y(const struct ucm_rope_spec *s, uint32_t i)
{
    return s->first + (s->pairs == UCM_ROPE_HALVES ? i + s->rotary / 2 : 2 * i + 1);
}

#endif
