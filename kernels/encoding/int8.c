/* int8: codes of all rows, then bf16 scales. There is one for each row, or in K one for each run,
 * head and channel. */
#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"

static uint64_t scales_at(const struct ucm_encoding_tensor *s)
{
    return encoding_align(encoding_elements(s));
}

static uint32_t scales(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t run = ucm_int8_run(spec, tensor);

    return run > 0 ? (s->tokens + run - 1) / run * s->heads * s->dim : encoding_rows(s);
}

static uint64_t bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return scales_at(&spec->tensor[tensor]) + encoding_align(UINT64_C(2) * scales(spec, tensor));
}

static bool uses_order(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return ucm_int8_run(spec, tensor) > 0 && encoding_order_matters(&spec->tensor[tensor]);
}

static int check(const struct ucm_encoding_spec *spec, char why[UCM_ENCODING_WHY])
{
    if (spec->axis > UCM_ENCODING_AXIS_CHANNEL)
        return encoding_refuse(
            why, "axis is %u; 0 (a scale a row) and 1 (a scale a channel of K) are allowed",
            spec->axis);
    if (spec->axis == UCM_ENCODING_AXIS_CHANNEL && spec->run > spec->tensor[0].tokens)
        return encoding_refuse(why, "run is %u tokens; tensor 0 (K) has %u (0: all)", spec->run,
                               spec->tensor[0].tokens);
    return 0;
}

/* Elements that share a scale: n of them, the first at `first`, then `step` on. */
struct group {
    uint64_t first, step;
    uint32_t n;
};

static struct group group_of(const struct ucm_encoding_spec *spec, uint32_t tensor, uint32_t i)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t run = ucm_int8_run(spec, tensor), channel = i % s->dim, head, token;

    if (run == 0)
        return (struct group){(uint64_t)i * s->dim, 1, s->dim};
    head = i / s->dim % s->heads;
    token = i / s->dim / s->heads * run;
    return (struct group){(uint64_t)encoding_row(s, token, head) * s->dim + channel,
                          encoding_token_step(s),
                          run < s->tokens - token ? run : s->tokens - token};
}

static uint32_t encode_group(uint32_t dtype, const struct group *g, const uint8_t *raw,
                             uint8_t *codes)
{
    uint64_t end = g->first + g->n * g->step;
    uint32_t largest = 0, scale;
    float reciprocal;

    for (uint64_t i = g->first; i < end; i += g->step) {
        uint32_t magnitude = ucm_magnitude(ucm_element_decode(dtype, encoding_get16(raw + 2 * i)));

        largest = magnitude > largest ? magnitude : largest;
    }
    scale = ucm_int8_scale(largest);
    reciprocal = 1.0f / ucm_bf16_decode(scale);
    for (uint64_t i = g->first; i < end; i += g->step)
        codes[i] = (uint8_t)ucm_int8_encode(ucm_element_decode(dtype, encoding_get16(raw + 2 * i)),
                                            reciprocal);
    return scale;
}

static void encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t n = scales(spec, tensor);
    uint64_t at = scales_at(s);

    for (uint32_t i = 0; i < n; i++) {
        struct group g = group_of(spec, tensor, i);

        encoding_put16(encoded + at + 2 * i, encode_group(spec->dtype, &g, raw, encoded));
    }
    encoding_pad(encoded, encoding_elements(s), at);
    encoding_pad(encoded, at + UINT64_C(2) * n, bytes(spec, tensor));
}

static void decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw)
{
    uint32_t n = scales(spec, tensor);
    uint64_t at = scales_at(&spec->tensor[tensor]);

    for (uint32_t i = 0; i < n; i++) {
        struct group g = group_of(spec, tensor, i);
        float scale = ucm_bf16_decode(encoding_get16(encoded + at + 2 * i));

        for (uint64_t e = g.first; e < g.first + g.n * g.step; e += g.step)
            encoding_put16(raw + 2 * e, ucm_int8_decode(spec->dtype, (int8_t)encoded[e], scale));
    }
}

const struct ucm_encoding_method encoding_int8 = {
    .number = UCM_ENCODING_INT8,
    .version = 1,
    .name = "int8",
    .dtypes = 1u << UCM_ENCODING_F16 | 1u << UCM_ENCODING_BF16,
    .uses_order = uses_order,
    .uses_axis = true,
    .check = check,
    .bytes = bytes,
    .encode = encode,
    .decode = decode,
};
