/* q4: each group of channels is rotated and quantised to 4 bits. K's channels are levelled before
 * the rotation, and the centre of their tile is subtracted after it. */
#include "kernels/encoding/q4_layout.h"

#define GROUP UCM_Q4_ROTATION_MAX

_Static_assert(ENCODING_TILE == UCM_Q4_TILE, "a tile is a tile");

static int check(const struct ucm_encoding_spec *spec, char why[UCM_ENCODING_WHY])
{
    for (uint32_t i = 0; i < spec->n_tensors; i++)
        if (spec->tensor[i].dim % UCM_Q4_ROTATION_MIN != 0)
            return encoding_refuse(why, "dim of tensor %u is %u; q4 rotates multiples of %u", i,
                                   spec->tensor[i].dim, UCM_Q4_ROTATION_MIN);
    return 0;
}

static uint64_t bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return encoding_align(q4_layout(&spec->tensor[tensor]).end);
}

static bool uses_order(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];

    return s->kind == UCM_ENCODING_K && encoding_order_matters(s);
}

/* One group: its first channel, the number of channels, and what each is divided by before the
 * rotation (2^shift, or its negative). */
struct group {
    uint32_t first, n;
    float factor[GROUP];
};

static uint32_t nibble(const uint8_t *bytes, uint32_t i)
{
    return bytes[i / 2] >> 4 * (i % 2) & 15u;
}

/* shifts: those of the group's channels; NULL: all 0. */
static struct group group_of(const struct ucm_encoding_spec *spec, uint32_t first, uint32_t n,
                             const uint8_t *shifts)
{
    struct group g = {.first = first, .n = n};

    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = first + i, negated = ucm_q4_signs(spec->seed, c / 64) >> c % 64 & 1;

        g.factor[i] = ucm_q4_factor(shifts != NULL ? nibble(shifts, i) : 0, negated);
    }
    return g;
}

/* ---- encoding ---- */

static float element(uint32_t dtype, const uint8_t *raw, uint32_t i)
{
    return ucm_element_decode(dtype, encoding_get16(raw + 2 * i));
}

/* The least number that at least half of n do not exceed. */
static uint32_t median(const uint32_t *x, uint32_t n)
{
    uint32_t m = 0;

    for (uint32_t bit = 128; bit > 0; bit /= 2) {
        uint32_t below = 0;

        for (uint32_t i = 0; i < n; i++)
            below += x[i] < (m | bit);
        if (below < n / 2)
            m |= bit;
    }
    return m;
}

/* Finds the shifts of n channels of a tile's rows. */
static void find_shifts(uint32_t dtype, const uint8_t *const *row, uint32_t rows, uint32_t n,
                        uint8_t *shifts)
{
    uint32_t exponent[GROUP], m;

    for (uint32_t i = 0; i < n; i++) {
        exponent[i] = 0;
        for (uint32_t t = 0; t < rows; t++) {
            uint32_t e = ucm_magnitude(element(dtype, row[t], i)) >> 23;

            exponent[i] = e > exponent[i] ? e : exponent[i];
        }
    }
    m = median(exponent, n);
    memset(shifts, 0, n / 2);
    for (uint32_t i = 0; i < n; i++)
        shifts[i / 2] |= (uint8_t)(ucm_q4_shift(exponent[i], m) << 4 * (i % 2));
}

static void rotate(const struct group *g, uint32_t dtype, const uint8_t *raw, float *y)
{
    for (uint32_t i = 0; i < g->n; i++)
        y[i] = element(dtype, raw, i) / g->factor[i];
    for (uint32_t stride = 1; stride < g->n; stride *= 2)
        for (uint32_t i = 0; i < g->n; i++)
            if ((i & stride) == 0) {
                float a = y[i], b = y[i + stride];

                y[i] = a + b;
                y[i + stride] = a - b;
            }
}

/* The largest magnitude; NaN or infinite if any of them is. */
static float largest(const float *y, uint32_t n)
{
    float most = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (ucm_not_finite(y[i]))
            return ucm_f32(0x7fc00000u);
        most = ucm_max(most, ucm_abs(y[i]));
    }
    return most;
}

/* Turns n values into codes, two a byte. Returns the scale. */
static uint32_t quantise(const float *y, uint32_t n, uint8_t *codes)
{
    float a = largest(y, n), reciprocal;
    uint32_t scale = ucm_not_finite(a) ? UCM_BF16_NAN : ucm_q4_scale(a);

    memset(codes, 0, n / 2);
    if (scale == 0 || scale == UCM_BF16_NAN)
        return scale;
    reciprocal = 1.0f / ucm_bf16_decode(scale);
    for (uint32_t i = 0; i < n; i++)
        codes[i / 2] |= (uint8_t)(ucm_q4_code(y[i], reciprocal) << 4 * (i % 2));
    return scale;
}

static int32_t level_at(const uint8_t *codes, uint32_t i)
{
    return ucm_q4_level(nibble(codes, i));
}

/* r = y - the decoded centre. Whether no row becomes much larger by it. */
static bool subtract_centre(float y[][GROUP], uint32_t rows, uint32_t n, const uint8_t *codes,
                            float scale, float r[][GROUP])
{
    for (uint32_t t = 0; t < rows; t++) {
        for (uint32_t i = 0; i < n; i++)
            r[t][i] = y[t][i] - (float)level_at(codes, i) * scale;
        if (!(largest(r[t], n) <= UCM_Q4_CENTRE_MOST * largest(y[t], n)))
            return false;
    }
    return true;
}

/* Finds the centre of a group's rows and subtracts it from them, or leaves them if there is none.
 * Returns the centre's scale. */
static uint32_t centre(float y[][GROUP], uint32_t rows, uint32_t n, uint8_t *codes)
{
    float c[GROUP], r[UCM_Q4_TILE][GROUP], part = 1.0f / (float)rows;
    uint32_t scale;

    for (uint32_t i = 0; i < n; i++) {
        c[i] = y[0][i];
        for (uint32_t t = 1; t < rows; t++)
            c[i] += y[t][i];
        c[i] *= part;
    }
    scale = quantise(c, n, codes);
    if (scale != UCM_BF16_NAN && subtract_centre(y, rows, n, codes, ucm_bf16_decode(scale), r)) {
        memcpy(y, r, rows * sizeof(r[0]));
        return scale;
    }
    memset(codes, 0, n / 2);
    return 0;
}

static void encode_v(const struct ucm_encoding_spec *spec, const struct q4_layout *l,
                     const struct ucm_encoding_tensor *s, const uint8_t *raw, uint8_t *encoded)
{
    float y[GROUP];

    for (uint32_t row = 0; row < encoding_rows(s); row++)
        for (uint32_t g = 0; g < l->groups; g++) {
            struct group group = group_of(spec, g * l->rotation, l->rotation, NULL);
            uint64_t at = (uint64_t)row * s->dim + group.first;

            rotate(&group, spec->dtype, raw + 2 * at, y);
            encoding_put16(encoded + l->scales + UINT64_C(2) * (row * l->groups + g),
                           quantise(y, group.n, encoded + at / 2));
        }
}

static void encode_tile(const struct ucm_encoding_spec *spec, const struct q4_layout *l,
                        const struct ucm_encoding_tensor *s, uint32_t tile, uint32_t head,
                        uint32_t g, const uint8_t *raw, uint8_t *encoded)
{
    uint32_t n = l->rotation, first = g * n, tokens = encoding_tile_tokens(s, tile);
    uint64_t c = (uint64_t)tile * s->heads + head, number[UCM_Q4_TILE];
    uint8_t *shifts = encoded + l->shifts + c * l->row_bytes + first / 2;
    const uint8_t *row[UCM_Q4_TILE];
    float y[UCM_Q4_TILE][GROUP];
    struct group group;

    for (uint32_t t = 0; t < tokens; t++) {
        number[t] = encoding_row(s, tile * UCM_Q4_TILE + t, head);
        row[t] = raw + 2 * (number[t] * s->dim + first);
    }
    find_shifts(spec->dtype, row, tokens, n, shifts);
    group = group_of(spec, first, n, shifts);
    for (uint32_t t = 0; t < tokens; t++)
        rotate(&group, spec->dtype, row[t], y[t]);
    encoding_put16(encoded + l->centre_scales + 2 * (c * l->groups + g),
                   centre(y, tokens, n, encoded + l->centres + c * l->row_bytes + first / 2));
    for (uint32_t t = 0; t < tokens; t++)
        encoding_put16(encoded + l->scales + 2 * (number[t] * l->groups + g),
                       quantise(y[t], n, encoded + (number[t] * s->dim + first) / 2));
}

static void encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct q4_layout l = q4_layout(s);

    if (s->kind == UCM_ENCODING_V)
        encode_v(spec, &l, s, raw, encoded);
    else
        for (uint32_t tile = 0; tile < encoding_tiles(s); tile++)
            for (uint32_t head = 0; head < s->heads; head++)
                for (uint32_t g = 0; g < l.groups; g++)
                    encode_tile(spec, &l, s, tile, head, g, raw, encoded);
    q4_pad(&l, encoded);
}

/* ---- decoding ---- */

/* The group's levels, rotated back, times scale / n. Sums are integers below 2^14, so their order
 * does not matter. */
static void rotate_back(const uint8_t *codes, uint32_t n, float scale, float *u)
{
    float part = scale * (1.0f / (float)n);
    int32_t sums[GROUP];

    for (uint32_t i = 0; i < n; i++)
        sums[i] = level_at(codes, i);
    for (uint32_t stride = 1; stride < n; stride *= 2)
        for (uint32_t i = 0; i < n; i++)
            if ((i & stride) == 0) {
                int32_t a = sums[i], b = sums[i + stride];

                sums[i] = a + b;
                sums[i + stride] = a - b;
            }
    for (uint32_t i = 0; i < n; i++)
        u[i] = (float)sums[i] * part;
}

static float scale_at(const uint8_t *scales, uint64_t i)
{
    return ucm_bf16_decode(encoding_get16(scales + 2 * i));
}

/* tile: the number of the row's tile and head. */
static void decode_group(const struct ucm_encoding_spec *spec, uint32_t tensor,
                         const struct q4_layout *l, uint32_t row, uint64_t tile, uint32_t g,
                         const uint8_t *encoded, uint8_t *raw)
{
    uint32_t n = l->rotation, first = g * n, dim = spec->tensor[tensor].dim;
    uint64_t at = (uint64_t)row * dim + first, of_tile = tile * l->row_bytes + first / 2;
    bool k = spec->tensor[tensor].kind == UCM_ENCODING_K;
    struct group group = group_of(spec, first, n, k ? encoded + l->shifts + of_tile : NULL);
    float u[GROUP], w[GROUP];

    rotate_back(encoded + at / 2, n, scale_at(encoded + l->scales, (uint64_t)row * l->groups + g),
                u);
    if (k)
        rotate_back(encoded + l->centres + of_tile, n,
                    scale_at(encoded + l->centre_scales, tile * l->groups + g), w);
    for (uint32_t i = 0; i < n; i++) {
        float x = (k ? u[i] + w[i] : u[i]) * group.factor[i];

        encoding_put16(raw + 2 * (at + i), ucm_element_encode(spec->dtype, x));
    }
}

static void decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct q4_layout l = q4_layout(s);

    for (uint32_t row = 0; row < encoding_rows(s); row++)
        for (uint32_t g = 0; g < l.groups; g++)
            decode_group(spec, tensor, &l, row, encoding_tile_of(s, row), g, encoded, raw);
}

const struct ucm_encoding_method encoding_q4 = {
    .number = UCM_ENCODING_Q4,
    .version = 2,
    .name = "q4",
    .dtypes = 1u << UCM_ENCODING_F16 | 1u << UCM_ENCODING_BF16,
    .uses_order = uses_order,
    .uses_seed = true,
    .check = check,
    .bytes = bytes,
    .encode = encode,
    .decode = decode,
};
