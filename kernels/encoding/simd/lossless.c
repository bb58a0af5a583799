/* lossless, 2 * VEC elements at a time. kernels/encoding/lossless.c is the reference. It also does
 * tensors of an odd dim, whose rows begin within a byte of codes. */
#include "kernels/encoding/lossless_layout.h"
#include "kernels/encoding/simd/words.h"

/* ---- bases ---- */

/* Exponents of 255 count as 0. The result is an exponent at its place in an element. */
VEC_INLINE words step_exponents(words most, words h)
{
    words e = WORDS_OP(and)(h, words_all(0x7f80));

    return words_max(most, words_if_equal(e, words_all(0x7f80), words_all(0), e));
}

static uint32_t row_base(const uint8_t *raw, uint32_t dim)
{
    words most = words_all(0);
    uint8_t part[2 * WORDS] = {0};
    uint32_t c = 0;

    for (; c + WORDS <= dim; c += WORDS)
        most = step_exponents(most, words_load(raw + 2 * c));
    if (c < dim) {
        memcpy(part, raw + 2 * c, 2 * (size_t)(dim - c));
        most = step_exponents(most, words_load(part));
    }
    return words_largest(most) >> 7;
}

static void find_bases(const struct ucm_encoding_tensor *s, const uint8_t *raw, uint8_t *bases)
{
    memset(bases, 0, (size_t)encoding_tiles(s) * s->heads);
    for (uint32_t row = 0; row < encoding_rows(s); row++) {
        uint32_t base = row_base(raw + UINT64_C(2) * row * s->dim, s->dim);
        uint8_t *at = bases + encoding_tile_of(s, row);

        *at = (uint8_t)(base > *at ? base : *at);
    }
}

/* ---- encoding ---- */

/* Bit i of the result: element i is an escape. */
VEC_INLINE uint32_t encode_step(words h, uint32_t base, uint8_t *rests, uint8_t *codes)
{
    words e = WORDS_OP(and)(WORDS_SHIFT(srli)(h, 7), words_all(0xff));
    words d = WORDS_SUB(words_all(base), e), small = WORDS_MIN(d, words_all(14));
    words c = words_if_equal(small, words_all(14), words_all(15), small);
    words rest = WORDS_OP(or)(WORDS_OP(and)(WORDS_SHIFT(srli)(h, 8), words_all(0x80)),
                              WORDS_OP(and)(h, words_all(0x7f)));
    codes_t bytes = words_bytes(words_if_equal(e, words_all(0), words_all(14), c));

    codes_store_bytes(rests, words_bytes(rest));
    codes_store(codes, bytes);
    return codes_escapes(bytes);
}

/* The list so far. */
struct list {
    uint8_t *entries;
    uint32_t count, room;
};

/* False: there is no room. */
static bool list_add(struct list *l, uint32_t escapes, uint32_t first, const uint8_t *raw)
{
    for (; escapes != 0; escapes &= escapes - 1) {
        uint32_t i = (uint32_t)__builtin_ctz(escapes);

        if (l->count == l->room)
            return false;
        encoding_put32(l->entries + 4 * (size_t)l->count++,
                       (first + i) << 8 | ucm_lossless_exponent(encoding_get16(raw + 2 * i)));
    }
    return true;
}

static bool encode_row(uint32_t base, uint32_t first, uint32_t dim, const uint8_t *raw,
                       uint8_t *rests, uint8_t *codes, struct list *l)
{
    uint8_t part[2 * WORDS] = {0}, part_rests[WORDS], part_codes[WORDS / 2];
    uint32_t c = 0, escapes;

    for (; c + WORDS <= dim; c += WORDS) {
        escapes = encode_step(words_load(raw + 2 * c), base, rests + c, codes + c / 2);
        if (escapes != 0 && !list_add(l, escapes, first + c, raw + 2 * c))
            return false;
    }
    if (c == dim)
        return true;
    memcpy(part, raw + 2 * c, 2 * (size_t)(dim - c));
    escapes = encode_step(words_load(part), base, part_rests, part_codes);
    memcpy(rests + c, part_rests, dim - c);
    memcpy(codes + c / 2, part_codes, (dim - c) / 2);
    return list_add(l, escapes, first + c, raw + 2 * c);
}

FORM(lossless_encode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct lossless_layout l = lossless_layout(s);
    struct list list = {to + l.list + 4, 0, l.room};

    if (s->dim % 2 != 0) {
        encoding_lossless.encode(spec, tensor, from, to);
        return;
    }
    find_bases(s, from, to + l.bases);
    for (uint32_t row = 0; row < encoding_rows(s); row++) {
        uint32_t first = row * s->dim;

        if (!encode_row(to[l.bases + encoding_tile_of(s, row)], first, s->dim,
                        from + UINT64_C(2) * first, to + first, to + l.codes + first / 2, &list)) {
            lossless_unfit(&l, to);
            return;
        }
    }
    lossless_pad(&l, list.count, to);
}

/* ---- decoding ---- */

VEC_INLINE words decode_step(codes_t codes, codes_t rests, __m128i exponents)
{
    words e = words_of_bytes(codes_look_up(exponents, codes)), rest = words_of_bytes(rests);
    words sign = WORDS_SHIFT(slli)(WORDS_OP(and)(rest, words_all(0x80)), 8);

    rest = WORDS_OP(and)(rest, words_all(0x7f));
    return WORDS_OP(or)(WORDS_OP(or)(sign, rest), WORDS_SHIFT(slli)(e, 7));
}

static void decode_row(uint32_t base, uint32_t dim, const uint8_t *rests, const uint8_t *codes,
                       uint8_t *raw)
{
    uint8_t table[16], part[2 * WORDS], part_rests[WORDS] = {0}, part_codes[WORDS / 2] = {0};
    uint32_t c = 0;
    __m128i exponents;

    for (uint32_t code = 0; code < 16; code++)
        table[code] = (uint8_t)ucm_lossless_decode(code, base);
    exponents = _mm_loadu_si128((const __m128i *)table);
    for (; c + WORDS <= dim; c += WORDS)
        words_store(raw + 2 * c,
                    decode_step(codes_load(codes + c / 2), codes_load_bytes(rests + c), exponents));
    if (c == dim)
        return;
    memcpy(part_rests, rests + c, dim - c);
    memcpy(part_codes, codes + c / 2, (dim - c) / 2);
    words_store(part, decode_step(codes_load(part_codes), codes_load_bytes(part_rests), exponents));
    memcpy(raw + 2 * c, part, 2 * (size_t)(dim - c));
}

FORM(lossless_decode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct lossless_layout l = lossless_layout(s);

    if (s->dim % 2 != 0) {
        encoding_lossless.decode(spec, tensor, from, to);
        return;
    }
    for (uint32_t row = 0; row < encoding_rows(s); row++) {
        uint32_t first = row * s->dim;

        decode_row(from[l.bases + encoding_tile_of(s, row)], s->dim, from + first,
                   from + l.codes + first / 2, to + UINT64_C(2) * first);
    }
    lossless_apply(&l, from, to);
}
