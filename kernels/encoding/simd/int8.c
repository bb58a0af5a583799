/* int8, VEC elements at a time: kernels/encoding/int8.c is the reference. */
#include "kernels/encoding/simd/lanes.h"

VEC_INLINE vec_u encode_lanes(vec_f x, vec_f reciprocal)
{
    vec_u u = (vec_u)x, rest = u & 0x7fffffff, negative = (vec_u)((vec_i)u < 0);
    vec_u code = (vec_u)(x * reciprocal + 0x1.8p23f) - 0x4b400000;
    vec_u inf = (vec_all(UCM_INT8_INF) ^ negative) - negative;

    code = vec_select(vec_less(rest, UCM_F32_INF), code, inf);
    return vec_select(vec_less(rest, UCM_F32_INF + 1), code, vec_all((uint32_t)UCM_INT8_NAN));
}

/* clean: codes times scale are neither NaN nor past the dtype's largest. */
VEC_INLINE vec_u decode_lanes(uint32_t dtype, vec_f code, vec_f scale, bool clean)
{
    vec_f y = code * scale;
    vec_u h = (clean ? element_round(dtype, y) : element_encode(dtype, y));
    vec_u inf = vec_all(ucm_element_inf(dtype)) | (((vec_u)code >> 16) & 0x8000);
    vec_u special = ((vec_u)code & 0x7fffffff);

    h = vec_select(vec_less(special, 0x42fe0000), h, inf); /* 127 */
    return vec_select((vec_u)(code == -128.0f), vec_all(ucm_element_nan(dtype)), h);
}

VEC_INLINE bool is_clean(uint32_t dtype, uint32_t scale)
{
    return scale >= 0x80 && scale <= (dtype == UCM_ENCODING_F16 ? 0x4400u : 0x7c00u);
}

/* ---- a scale a row ---- */

VEC_INLINE void encode_rows(uint32_t dtype, uint32_t rows, uint32_t dim, const uint8_t *raw,
                            uint8_t *codes, uint8_t *scales)
{
    for (uint32_t row = 0; row < rows; row++, raw += 2 * dim, codes += dim) {
        uint32_t scale = ucm_int8_scale(row_largest(dtype, dim, raw));
        vec_f reciprocal = vec_all_f(1.0f / ucm_bf16_decode(scale));

        encoding_put16(scales + 2 * row, scale);
#define STEP(c, in, out) vec_store_u8(out, encode_lanes(element_load(dtype, in), reciprocal))
        ROW_EACH(dim, raw, 2, codes, 1, STEP);
#undef STEP
    }
}

VEC_INLINE void decode_row(uint32_t dtype, uint32_t dim, const uint8_t *codes, uint32_t scale,
                           bool clean, uint8_t *raw)
{
    vec_f s = vec_all_f(ucm_bf16_decode(scale));

#define STEP(c, in, out) vec_store_u16(out, decode_lanes(dtype, vec_load_i8(in), s, clean))
    ROW_EACH(dim, codes, 1, raw, 2, STEP);
#undef STEP
}

VEC_INLINE void decode_rows(uint32_t dtype, uint32_t rows, uint32_t dim, const uint8_t *codes,
                            const uint8_t *scales, uint8_t *raw)
{
    for (uint32_t row = 0; row < rows; row++, raw += 2 * dim, codes += dim) {
        uint32_t scale = encoding_get16(scales + 2 * row);

        if (is_clean(dtype, scale))
            decode_row(dtype, dim, codes, scale, true, raw);
        else
            decode_row(dtype, dim, codes, scale, false, raw);
    }
}

/* ---- a scale a channel ---- */

#define CHANNELS (UCM_ENCODING_DIM_MAX + VEC)

/* A head in a run of tokens: its first row, and the distance from a token's row to the next. */
struct head {
    uint32_t tokens, dim;
    uint64_t first, step; /* in elements */
};

/* Heads of all runs are numbered one run after the other. */
static struct head head_of(const struct ucm_encoding_tensor *s, uint32_t run, uint32_t i)
{
    uint32_t token = i / s->heads * run, left = s->tokens - token;

    return (struct head){run < left ? run : left, s->dim,
                         (uint64_t)encoding_row(s, token, i % s->heads) * s->dim,
                         encoding_token_step(s)};
}

static uint32_t heads_of(const struct ucm_encoding_tensor *s, uint32_t run)
{
    return (s->tokens + run - 1) / run * s->heads;
}

VEC_INLINE void channels_largest(uint32_t dtype, const struct head *h, const uint8_t *raw,
                                 float *most)
{
    memset(most, 0, CHANNELS * sizeof(*most));
    for (uint32_t t = 0; t < h->tokens; t++) {
        const uint8_t *row = raw + 2 * (h->first + t * h->step);
        uint8_t part[2 * VEC];

#define STEP(c, in)                                                                                \
    vec_store(most + (c),                                                                          \
              vec_max(vec_load(most + (c)), (vec_f)element_magnitude(element_load(dtype, in))))
        uint32_t c = 0;

        for (; c + VEC <= h->dim; c += VEC)
            STEP(c, row + 2 * c);
        if (c < h->dim)
            STEP(c, row_part(part, row + 2 * c, h->dim - c, 2));
#undef STEP
    }
}

VEC_INLINE void encode_head(uint32_t dtype, const struct head *h, const uint8_t *raw,
                            uint8_t *codes, uint8_t *scales)
{
    float reciprocal[CHANNELS];

    channels_largest(dtype, h, raw, reciprocal);
    for (uint32_t c = 0; c < h->dim; c++) {
        uint32_t scale = ucm_int8_scale(ucm_f32_bits(reciprocal[c]));

        encoding_put16(scales + 2 * c, scale);
        reciprocal[c] = 1.0f / ucm_bf16_decode(scale);
    }
    for (uint32_t t = 0; t < h->tokens; t++) {
        uint64_t row = h->first + t * h->step;

#define STEP(c, in, out)                                                                           \
    vec_store_u8(out, encode_lanes(element_load(dtype, in), vec_load(reciprocal + (c))))
        ROW_EACH(h->dim, raw + 2 * row, 2, codes + row, 1, STEP);
#undef STEP
    }
}

VEC_INLINE void decode_head(uint32_t dtype, const struct head *h, const uint8_t *codes,
                            const float *scales, bool clean, uint8_t *raw)
{
    for (uint32_t t = 0; t < h->tokens; t++) {
        uint64_t row = h->first + t * h->step;

#define STEP(c, in, out)                                                                           \
    vec_store_u16(out, decode_lanes(dtype, vec_load_i8(in), vec_load(scales + (c)), clean))
        ROW_EACH(h->dim, codes + row, 1, raw + 2 * row, 2, STEP);
#undef STEP
    }
}

VEC_INLINE void encode_heads(uint32_t dtype, const struct ucm_encoding_tensor *s, uint32_t run,
                             const uint8_t *raw, uint8_t *codes, uint8_t *scales)
{
    for (uint32_t i = 0; i < heads_of(s, run); i++) {
        struct head h = head_of(s, run, i);

        encode_head(dtype, &h, raw, codes, scales + 2 * (size_t)i * s->dim);
    }
}

VEC_INLINE void decode_heads(uint32_t dtype, const struct ucm_encoding_tensor *s, uint32_t run,
                             const uint8_t *codes, const uint8_t *scales, uint8_t *raw)
{
    for (uint32_t i = 0; i < heads_of(s, run); i++, scales += 2 * (size_t)s->dim) {
        struct head h = head_of(s, run, i);
        float scale[CHANNELS] = {0};
        bool clean = true;

        for (uint32_t c = 0; c < s->dim; c++) {
            uint32_t bits = encoding_get16(scales + 2 * c);

            scale[c] = ucm_bf16_decode(bits);
            clean &= is_clean(dtype, bits);
        }
        if (clean)
            decode_head(dtype, &h, codes, scale, true, raw);
        else
            decode_head(dtype, &h, codes, scale, false, raw);
    }
}

/* ---- tensors ---- */

/* run: of ucm_int8_run. */
VEC_INLINE void encode_tensor(uint32_t dtype, const struct ucm_encoding_tensor *s, uint32_t run,
                              const uint8_t *raw, uint8_t *codes, uint8_t *scales)
{
    if (run > 0)
        encode_heads(dtype, s, run, raw, codes, scales);
    else
        encode_rows(dtype, encoding_rows(s), s->dim, raw, codes, scales);
}

VEC_INLINE void decode_tensor(uint32_t dtype, const struct ucm_encoding_tensor *s, uint32_t run,
                              const uint8_t *codes, const uint8_t *scales, uint8_t *raw)
{
    if (run > 0)
        decode_heads(dtype, s, run, codes, scales, raw);
    else
        decode_rows(dtype, encoding_rows(s), s->dim, codes, scales, raw);
}

FORM(int8_encode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t run = ucm_int8_run(spec, tensor);
    uint64_t elements = encoding_elements(s), scales = encoding_align(elements);
    uint64_t end = scales + UINT64_C(2) * (run > 0 ? heads_of(s, run) * s->dim : encoding_rows(s));

    if (spec->dtype == UCM_ENCODING_F16)
        encode_tensor(UCM_ENCODING_F16, s, run, from, to, to + scales);
    else
        encode_tensor(UCM_ENCODING_BF16, s, run, from, to, to + scales);
    encoding_pad(to, elements, scales);
    encoding_pad(to, end, encoding_align(end));
}

FORM(int8_decode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    const uint8_t *scales = from + encoding_align(encoding_elements(s));
    uint32_t run = ucm_int8_run(spec, tensor);

    if (spec->dtype == UCM_ENCODING_F16)
        decode_tensor(UCM_ENCODING_F16, s, run, from, scales, to);
    else
        decode_tensor(UCM_ENCODING_BF16, s, run, from, scales, to);
}
