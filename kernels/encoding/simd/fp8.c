/* fp8, VEC elements at a time: kernels/encoding/fp8.c is the reference. */
#include "kernels/encoding/simd/lanes.h"

VEC_INLINE vec_u encode_lanes(vec_f x, vec_f multiplier)
{
    vec_u u = (vec_u)x, sign = (u >> 24) & 0x80, rest = u & 0x7fffffff;
    vec_f y = (vec_f)rest * multiplier;
    vec_u b = (vec_u)y;
    vec_u denormal = (vec_u)(y + 0x1p14f) - 0x46800000; /* 2^-9 is the last bit of 2^14 */
    vec_u code = ((b + 0x7ffff + ((b >> 20) & 1)) >> 20) - (120 << 3);

    code = vec_select(vec_less(b, 0x3c800000), denormal, code);
    code = vec_select(vec_less(rest, UCM_F32_INF), code, vec_all(UCM_FP8_INF)) | sign;
    return vec_select(vec_less(rest, UCM_F32_INF + 1), code, vec_all(UCM_FP8_NAN));
}

/* exact: codes times power are values of the dtype, or in F16 round to one. */
VEC_INLINE vec_u decode_lanes(uint32_t dtype, vec_u code, vec_f power, bool exact)
{
    vec_u rest = code & 0x7f, sign = (code & 0x80) << 8;
    vec_u normal = (rest << 20) + (120u << 23);
    vec_u denormal = (vec_u)(__builtin_convertvector((vec_i)rest, vec_f) * 0x1p-9f);
    vec_f y = (vec_f)vec_select(vec_less(rest, 8), denormal, normal) * power;
    vec_u h = !exact                      ? element_encode(dtype, y)
              : dtype == UCM_ENCODING_F16 ? f16_round(y)
                                          : (vec_u)y >> 16;

    h |= exact ? sign : sign & (vec_u)(y == y); /* NaN has no sign */
    h = vec_select(vec_less(rest, UCM_FP8_INF), h, sign | ucm_element_inf(dtype));
    return vec_select(vec_less(rest, UCM_FP8_NAN), h, vec_all(ucm_element_nan(dtype)));
}

VEC_INLINE uint32_t encode_row(uint32_t dtype, uint32_t dim, const uint8_t *raw, uint8_t *codes)
{
    uint32_t scale = ucm_fp8_scale(dtype, row_largest(dtype, dim, raw));
    vec_f multiplier = vec_all_f(ucm_fp8_multiplier(scale));

#define STEP(c, in, out) vec_store_u8(out, encode_lanes(element_load(dtype, in), multiplier))
    ROW_EACH(dim, raw, 2, codes, 1, STEP);
#undef STEP
    return scale;
}

VEC_INLINE void decode_row(uint32_t dtype, uint32_t dim, const uint8_t *codes, uint32_t scale,
                           bool exact, uint8_t *raw)
{
    vec_f power = vec_all_f(ucm_fp8_power(scale));

#define STEP(c, in, out) vec_store_u16(out, decode_lanes(dtype, vec_load_u8(in), power, exact))
    ROW_EACH(dim, codes, 1, raw, 2, STEP);
#undef STEP
}

/* Whether 416 times the power is finite in the dtype, and BF16 holds 2^-9 times it. */
VEC_INLINE bool is_exact(uint32_t dtype, uint32_t scale)
{
    return dtype == UCM_ENCODING_F16 ? scale <= 134 : scale >= 3 && scale <= 246;
}

VEC_INLINE void encode_rows(uint32_t dtype, uint32_t rows, uint32_t dim, const uint8_t *raw,
                            uint8_t *codes, uint8_t *scales)
{
    for (uint32_t row = 0; row < rows; row++, raw += 2 * dim, codes += dim)
        scales[row] = (uint8_t)encode_row(dtype, dim, raw, codes);
}

VEC_INLINE void decode_rows(uint32_t dtype, uint32_t rows, uint32_t dim, const uint8_t *codes,
                            const uint8_t *scales, uint8_t *raw)
{
    for (uint32_t row = 0; row < rows; row++, raw += 2 * dim, codes += dim)
        if (is_exact(dtype, scales[row]))
            decode_row(dtype, dim, codes, scales[row], true, raw);
        else
            decode_row(dtype, dim, codes, scales[row], false, raw);
}

FORM(fp8_encode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t rows = encoding_rows(s);
    uint64_t elements = encoding_elements(s), scales = encoding_align(elements);

    if (spec->dtype == UCM_ENCODING_F16)
        encode_rows(UCM_ENCODING_F16, rows, s->dim, from, to, to + scales);
    else
        encode_rows(UCM_ENCODING_BF16, rows, s->dim, from, to, to + scales);
    encoding_pad(to, elements, scales);
    encoding_pad(to, scales + rows, scales + encoding_align(rows));
}

FORM(fp8_decode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    const uint8_t *scales = from + encoding_align(encoding_elements(s));

    if (spec->dtype == UCM_ENCODING_F16)
        decode_rows(UCM_ENCODING_F16, encoding_rows(s), s->dim, from, scales, to);
    else
        decode_rows(UCM_ENCODING_BF16, encoding_rows(s), s->dim, from, scales, to);
}
