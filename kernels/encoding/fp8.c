/* fp8: E4M3 codes of all rows, then a scale byte for each row. */
#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"

static uint64_t scales_at(const struct ucm_encoding_tensor *s)
{
    return encoding_align(encoding_elements(s));
}

static uint64_t bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];

    return scales_at(s) + encoding_align(encoding_rows(s));
}

static uint32_t encode_row(uint32_t dtype, uint32_t dim, const uint8_t *raw, uint8_t *codes)
{
    uint32_t largest = 0, scale;
    float multiplier;

    for (uint32_t c = 0; c < dim; c++) {
        float x = ucm_element_decode(dtype, encoding_get16(raw + 2 * c));
        uint32_t magnitude = ucm_magnitude(x);

        largest = magnitude > largest ? magnitude : largest;
    }
    scale = ucm_fp8_scale(dtype, largest);
    multiplier = ucm_fp8_multiplier(scale);
    for (uint32_t c = 0; c < dim; c++) {
        float x = ucm_element_decode(dtype, encoding_get16(raw + 2 * c));

        codes[c] = (uint8_t)ucm_fp8_encode(x, multiplier);
    }
    return scale;
}

static void encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t rows = encoding_rows(s);
    uint64_t scales = scales_at(s);

    for (uint32_t row = 0; row < rows; row++) {
        uint64_t first = (uint64_t)row * s->dim;

        encoded[scales + row] =
            (uint8_t)encode_row(spec->dtype, s->dim, raw + 2 * first, encoded + first);
    }
    encoding_pad(encoded, encoding_elements(s), scales);
    encoding_pad(encoded, scales + rows, bytes(spec, tensor));
}

static void decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t rows = encoding_rows(s);
    uint64_t scales = scales_at(s);

    for (uint32_t row = 0; row < rows; row++) {
        float power = ucm_fp8_power(encoded[scales + row]);
        uint64_t first = (uint64_t)row * s->dim;

        for (uint64_t i = first; i < first + s->dim; i++)
            encoding_put16(raw + 2 * i, ucm_fp8_decode(spec->dtype, encoded[i], power));
    }
}

const struct ucm_encoding_method encoding_fp8 = {
    .number = UCM_ENCODING_FP8,
    .version = 1,
    .name = "fp8",
    .dtypes = 1u << UCM_ENCODING_F16 | 1u << UCM_ENCODING_BF16,
    .bytes = bytes,
    .encode = encode,
    .decode = decode,
};
