/* lossless: BF16's exponents as 4-bit distances below their head's base; the rest as it is. */
#include "kernels/encoding/lossless_layout.h"

_Static_assert(ENCODING_TILE == UCM_LOSSLESS_TILE, "a tile is a tile");

static uint64_t bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return encoding_align(lossless_layout(&spec->tensor[tensor]).end);
}

static bool uses_order(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return encoding_order_matters(&spec->tensor[tensor]);
}

static uint32_t base_of(const struct ucm_encoding_tensor *s, uint32_t tile, uint32_t head,
                        const uint8_t *raw)
{
    uint32_t base = 0;

    for (uint32_t t = 0; t < encoding_tile_tokens(s, tile); t++) {
        uint64_t row = encoding_row(s, tile * ENCODING_TILE + t, head);

        for (uint64_t i = row * s->dim; i < (row + 1) * s->dim; i++) {
            uint32_t e = ucm_lossless_exponent(encoding_get16(raw + 2 * i));

            if (e != 255 && e > base)
                base = e;
        }
    }
    return base;
}

static void encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct lossless_layout l = lossless_layout(s);
    uint32_t count = 0;

    for (uint32_t tile = 0; tile < encoding_tiles(s); tile++)
        for (uint32_t head = 0; head < s->heads; head++)
            encoded[l.bases + tile * s->heads + head] = (uint8_t)base_of(s, tile, head, raw);
    memset(encoded + l.codes, 0, l.codes_end - l.codes);
    for (uint32_t i = 0; i < l.elements; i++) {
        uint32_t h = encoding_get16(raw + UINT64_C(2) * i), e = ucm_lossless_exponent(h);
        uint32_t code = ucm_lossless_code(e, encoded[l.bases + encoding_tile_of(s, i / s->dim)]);

        encoded[i] = (uint8_t)ucm_lossless_rest(h);
        encoded[l.codes + i / 2] |= (uint8_t)(code << 4 * (i % 2));
        if (code != UCM_LOSSLESS_ESCAPE)
            continue;
        if (count == l.room) {
            lossless_unfit(&l, encoded);
            return;
        }
        encoding_put32(encoded + l.list + 4 + UINT64_C(4) * count++, i << 8 | e);
    }
    lossless_pad(&l, count, encoded);
}

static void decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct lossless_layout l = lossless_layout(s);

    for (uint32_t i = 0; i < l.elements; i++) {
        uint32_t code = encoded[l.codes + i / 2] >> 4 * (i % 2) & 15u;
        uint32_t e = ucm_lossless_decode(code, encoded[l.bases + encoding_tile_of(s, i / s->dim)]);

        encoding_put16(raw + UINT64_C(2) * i, ucm_lossless_element(e, encoded[i]));
    }
    lossless_apply(&l, encoded, raw);
}

static bool fits(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded)
{
    struct lossless_layout l = lossless_layout(&spec->tensor[tensor]);

    return encoding_get32(encoded + l.list) != UCM_LOSSLESS_UNFIT;
}

const struct ucm_encoding_method encoding_lossless = {
    .number = UCM_ENCODING_LOSSLESS,
    .version = 1,
    .name = "lossless",
    .dtypes = 1u << UCM_ENCODING_BF16,
    .uses_order = uses_order,
    .bytes = bytes,
    .encode = encode,
    .decode = decode,
    .fits = fits,
};
