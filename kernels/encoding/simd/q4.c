/* q4, VEC values at a time: kernels/encoding/q4.c is the reference. */
#include "kernels/encoding/q4_layout.h"
#include "kernels/encoding/simd/words.h"

#define GROUP UCM_Q4_ROTATION_MAX
#define SIGN 0x80000000u
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Of a row's channels: 0, or the sign bit of those that the rotation negates; and 1 with that sign. */
struct signs {
    uint32_t bit[UCM_ENCODING_DIM_MAX];
    float one[UCM_ENCODING_DIM_MAX];
};

static void find_signs(struct signs *s, uint64_t seed, uint32_t dim)
{
    for (uint32_t word = 0; 64 * word < dim; word++) {
        uint64_t bits = ucm_q4_signs(seed, word);

        for (uint32_t c = 64 * word; c < dim && c < 64 * word + 64; c++, bits >>= 1) {
            s->bit[c] = (uint32_t)(bits & 1) << 31;
            s->one[c] = bits & 1 ? -1.0f : 1.0f;
        }
    }
}

VEC_INLINE vec_u load_bits(const uint32_t *p)
{
    vec_u v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* ---- the rotation ---- */

/* The transform of N values that stay in registers. A pair's sum and difference are one rounding
 * each, so the order of what is independent does not matter. */
#define HADAMARD(N)                                                                                \
    static void hadamard_##N(float *y)                                                             \
    {                                                                                              \
        vec_f v[N / VEC];                                                                          \
                                                                                                   \
        UNROLL for (int i = 0; i < N / VEC; i++) v[i] = vec_hadamard(vec_load(y + i * VEC));       \
        UNROLL for (int h = 1; h < N / VEC; h *= 2)                                                \
        {                                                                                          \
            UNROLL for (int i = 0; i < N / VEC; i++) if ((i & h) == 0)                             \
            {                                                                                      \
                vec_f a = v[i], b = v[i + h];                                                      \
                                                                                                   \
                v[i] = a + b;                                                                      \
                v[i + h] = a - b;                                                                  \
            }                                                                                      \
        }                                                                                          \
        UNROLL for (int i = 0; i < N / VEC; i++) vec_store(y + i * VEC, v[i]);                     \
    }

HADAMARD(16)
HADAMARD(32)
HADAMARD(64)
HADAMARD(128)

static void hadamard(float *y, uint32_t n)
{
    switch (n) {
    case 16:
        hadamard_16(y);
        break;
    case 32:
        hadamard_32(y);
        break;
    case 64:
        hadamard_64(y);
        break;
    default:
        hadamard_128(y);
    }
}

/* divisors: what elements are multiplied by before. */
VEC_INLINE void rotate(uint32_t dtype, uint32_t n, const float *divisors, const uint8_t *plain,
                       float *y)
{
    for (uint32_t i = 0; i < n; i += VEC)
        vec_store(y + i, element_load(dtype, plain + 2 * i) * vec_load(divisors + i));
    hadamard(y, n);
}

/* ---- encoding ---- */

/* The largest magnitude's bits: not below UCM_F32_INF if a value is not finite. */
VEC_INLINE uint32_t largest(const float *y, uint32_t n)
{
    vec_u most = vec_all(0);

    for (uint32_t i = 0; i < n; i += VEC)
        most = vec_max_u(most, (vec_u)vec_load(y + i) & ~SIGN);
    return vec_largest(most);
}

VEC_INLINE vec_u code_lanes(vec_f y, vec_f reciprocal)
{
    static const float bounds[] = {12.0f, 24.5f, 37.5f, 51.5f, 67.5f, 86.5f, 112.0f};
    vec_f x = (vec_f)((vec_u)y & ~SIGN) * reciprocal;
    vec_u code = vec_all(0);

    for (int i = 0; i < 7; i++)
        code -= (vec_u)(x >= bounds[i]);
    return code + ((vec_u)(y < 0.0f) & 8);
}

/* a: `largest` of y. */
VEC_INLINE uint32_t quantise(const float *y, uint32_t n, uint32_t a, uint8_t *codes)
{
    uint32_t scale = UCM_BF16_NAN;
    uint8_t bytes[GROUP];
    vec_f reciprocal;

    if (a < UCM_F32_INF)
        scale = ucm_q4_scale(ucm_f32(a));
    if (scale == 0 || scale == UCM_BF16_NAN) {
        memset(codes, 0, n / 2);
        return scale;
    }
    reciprocal = vec_all_f(1.0f / ucm_bf16_decode(scale));
    for (uint32_t i = 0; i < n; i += VEC)
        vec_store_u8(bytes + i, code_lanes(vec_load(y + i), reciprocal));
    for (uint32_t i = 0; i < n; i += 16)
        pack_codes(codes + i / 2, _mm_loadu_si128((const __m128i *)(bytes + i)));
    return scale;
}

/* n codes as floats. */
VEC_INLINE void load_levels(const uint8_t *codes, uint32_t n, float *levels)
{
    const __m128i table =
        _mm_setr_epi8(6, 18, 31, 44, 59, 76, 97, 127, -6, -18, -31, -44, -59, -76, -97, -127);
    uint8_t bytes[16];

    for (uint32_t i = 0; i < n; i += 16) {
        _mm_storeu_si128((__m128i *)bytes, _mm_shuffle_epi8(table, unpack_codes(codes + i / 2)));
        for (uint32_t j = 0; j < 16; j += VEC)
            vec_store(levels + i + j, vec_load_i8(bytes + j));
    }
}

/* ---- levelling ---- */

/* Of n bytes, those that are below `bound`, which is 1 to 255. */
VEC_INLINE uint32_t count_below(const uint8_t *x, uint32_t n, uint32_t bound)
{
    __m128i most = _mm_set1_epi8((char)(bound - 1));
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i += 16) {
        __m128i b = _mm_loadu_si128((const __m128i *)(x + i));

        count += (uint32_t)__builtin_popcount(
            (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(b, most), most)));
    }
    return count;
}

static uint32_t median(const uint8_t *x, uint32_t n)
{
    uint32_t m = 0;

    for (uint32_t bit = 128; bit > 0; bit /= 2)
        if (count_below(x, n, m | bit) < n / 2)
            m |= bit;
    return m;
}

/* The shifts of n channels of a tile's rows; divisors: what that makes of them, with the signs. */
VEC_INLINE void level(uint32_t dtype, const uint8_t *const *row, uint32_t rows, uint32_t n,
                      const uint32_t *signs, uint8_t *shifts, float *divisors)
{
    uint8_t exponents[GROUP], bytes[GROUP];
    vec_u above;

    for (uint32_t i = 0; i < n; i += VEC) {
        vec_u most = vec_all(0);

        for (uint32_t t = 0; t < rows; t++)
            most = vec_max_u(most, element_magnitude(element_load(dtype, row[t] + 2 * i)));
        vec_store_u8(exponents + i, most >> 23);
    }
    above = vec_all(median(exponents, n) + 2);
    for (uint32_t i = 0; i < n; i += VEC) {
        vec_u shift = vec_max_u(vec_load_u8(exponents + i), above) - above;

        shift = vec_select(vec_less(shift, 15), shift, vec_all(15));
        vec_store_u8(bytes + i, shift);
        vec_store(divisors + i, (vec_f)((127 - shift) << 23 | load_bits(signs + i)));
    }
    for (uint32_t i = 0; i < n; i += 16)
        pack_codes(shifts + i / 2, _mm_loadu_si128((const __m128i *)(bytes + i)));
}

/* The factors of n channels. */
VEC_INLINE void unlevel(const uint8_t *shifts, uint32_t n, const uint32_t *signs, float *factors)
{
    uint8_t bytes[16];

    for (uint32_t i = 0; i < n; i += 16) {
        _mm_storeu_si128((__m128i *)bytes, unpack_codes(shifts + i / 2));
        for (uint32_t j = 0; j < 16; j += VEC)
            vec_store(factors + i + j,
                      (vec_f)((vec_load_u8(bytes + j) + 127) << 23 | load_bits(signs + i + j)));
    }
}

/* ---- K and V ---- */

/* The rows of a tile and head, one group of them. */
struct tile {
    uint32_t rows, n;
    uint32_t most[UCM_Q4_TILE]; /* `largest` of what is quantised */
    float y[UCM_Q4_TILE][GROUP], less[UCM_Q4_TILE][GROUP];
};

/* less = y - the decoded centre. Whether no row becomes much larger by it. */
static bool subtract_centre(struct tile *t, const uint8_t *codes, float scale)
{
    uint32_t most[UCM_Q4_TILE] = {0};
    float z[GROUP];

    load_levels(codes, t->n, z);
    for (uint32_t i = 0; i < t->n; i += VEC)
        vec_store(z + i, vec_load(z + i) * vec_all_f(scale));
    for (uint32_t row = 0; row < t->rows; row++) {
        float before = ucm_f32(t->most[row]), after;

        for (uint32_t i = 0; i < t->n; i += VEC)
            vec_store(t->less[row] + i, vec_load(t->y[row] + i) - vec_load(z + i));
        most[row] = largest(t->less[row], t->n);
        after = ucm_f32(most[row]);
        if (most[row] >= UCM_F32_INF || !(after <= UCM_Q4_CENTRE_MOST * before))
            return false;
    }
    memcpy(t->most, most, sizeof(most));
    return true;
}

/* Returns the centre's scale; *has: rows are to be taken from `less`. */
static uint32_t centre(struct tile *t, uint8_t *codes, bool *has)
{
    vec_f part = vec_all_f(1.0f / (float)t->rows);
    float c[GROUP];
    uint32_t scale;

    for (uint32_t i = 0; i < t->n; i += VEC) {
        vec_f sum = vec_load(t->y[0] + i);

        for (uint32_t row = 1; row < t->rows; row++)
            sum += vec_load(t->y[row] + i);
        vec_store(c + i, sum * part);
    }
    scale = quantise(c, t->n, largest(c, t->n), codes);
    *has = scale != UCM_BF16_NAN && subtract_centre(t, codes, ucm_bf16_decode(scale));
    if (*has)
        return scale;
    memset(codes, 0, t->n / 2);
    return 0;
}

VEC_INLINE void encode_v(uint32_t dtype, const struct ucm_encoding_section *s,
                         const struct q4_layout *l, const struct signs *signs, const uint8_t *plain,
                         uint8_t *coded)
{
    uint32_t n = encoding_rows(s) * l->groups;
    float y[GROUP];

    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * l->rotation;

        rotate(dtype, l->rotation, signs->one + at % s->dim, plain + 2 * at, y);
        encoding_put16(coded + l->scales + UINT64_C(2) * i,
                       quantise(y, l->rotation, largest(y, l->rotation), coded + at / 2));
    }
}

VEC_INLINE void encode_tile(uint32_t dtype, const struct ucm_encoding_section *s,
                            const struct q4_layout *l, const struct signs *signs, uint32_t c,
                            uint32_t g, const uint8_t *plain, uint8_t *coded)
{
    uint32_t tile = c / s->heads, head = c % s->heads, first = g * l->rotation;
    struct tile t = {.rows = encoding_tile_tokens(s, tile), .n = l->rotation};
    uint64_t number[UCM_Q4_TILE], at = (uint64_t)c * l->row_bytes + first / 2;
    const uint8_t *row[UCM_Q4_TILE];
    float divisors[GROUP];
    bool has;

    for (uint32_t i = 0; i < t.rows; i++) {
        number[i] = encoding_row(s, tile * UCM_Q4_TILE + i, head);
        row[i] = plain + 2 * (number[i] * s->dim + first);
    }
    level(dtype, row, t.rows, t.n, signs->bit + first, coded + l->shifts + at, divisors);
    for (uint32_t i = 0; i < t.rows; i++) {
        rotate(dtype, t.n, divisors, row[i], t.y[i]);
        t.most[i] = largest(t.y[i], t.n);
    }
    encoding_put16(coded + l->centre_scales + UINT64_C(2) * (c * l->groups + g),
                   centre(&t, coded + l->centres + at, &has));
    for (uint32_t i = 0; i < t.rows; i++)
        encoding_put16(coded + l->scales + 2 * (number[i] * l->groups + g),
                       quantise(has ? t.less[i] : t.y[i], t.n, t.most[i],
                                coded + (number[i] * s->dim + first) / 2));
}

VEC_INLINE void encode_section(uint32_t dtype, const struct ucm_encoding_section *s,
                               const struct signs *signs, const uint8_t *plain, uint8_t *coded)
{
    struct q4_layout l = q4_layout(s);

    if (s->kind == UCM_ENCODING_V)
        encode_v(dtype, s, &l, signs, plain, coded);
    else
        for (uint32_t c = 0; c < encoding_tiles(s) * s->heads; c++)
            for (uint32_t g = 0; g < l.groups; g++)
                encode_tile(dtype, s, &l, signs, c, g, plain, coded);
    q4_pad(&l, coded);
}

FORM(q4_encode)
{
    const struct ucm_encoding_section *s = &spec->section[section];
    struct signs signs;

    find_signs(&signs, spec->seed, s->dim);
    if (spec->dtype == UCM_ENCODING_F16)
        encode_section(UCM_ENCODING_F16, s, &signs, from, to);
    else
        encode_section(UCM_ENCODING_BF16, s, &signs, from, to);
}

/* ---- decoding ---- */

/* A group's values before they are levelled back. All sums are integers below 2^24, so floats hold
 * them. */
VEC_INLINE void rotate_back(const uint8_t *codes, uint32_t n, uint32_t scale, float *x)
{
    vec_f part = vec_all_f(ucm_bf16_decode(scale) * (1.0f / (float)n));

    load_levels(codes, n, x);
    hadamard(x, n);
    for (uint32_t i = 0; i < n; i += VEC)
        vec_store(x + i, vec_load(x + i) * part);
}

VEC_INLINE void decode_v(uint32_t dtype, const struct ucm_encoding_section *s,
                         const struct q4_layout *l, const struct signs *signs, const uint8_t *coded,
                         uint8_t *plain)
{
    uint32_t rows = encoding_rows(s) * l->groups, n = l->rotation;
    float x[GROUP];

    for (uint32_t row = 0; row < rows; row++) {
        uint64_t at = (uint64_t)row * n;
        const float *factors = signs->one + at % s->dim;

        rotate_back(coded + at / 2, n, encoding_get16(coded + l->scales + UINT64_C(2) * row), x);
        for (uint32_t i = 0; i < n; i += VEC)
            vec_store_u16(plain + 2 * (at + i),
                          element_encode(dtype, vec_load(x + i) * vec_load(factors + i)));
    }
}

VEC_INLINE void decode_tile(uint32_t dtype, const struct ucm_encoding_section *s,
                            const struct q4_layout *l, const struct signs *signs, uint32_t c,
                            uint32_t g, const uint8_t *coded, uint8_t *plain)
{
    uint32_t tile = c / s->heads, head = c % s->heads, n = l->rotation, first = g * n;
    uint64_t of_tile = (uint64_t)c * l->row_bytes + first / 2;
    float w[GROUP], factors[GROUP], x[GROUP];

    rotate_back(coded + l->centres + of_tile, n,
                encoding_get16(coded + l->centre_scales + UINT64_C(2) * (c * l->groups + g)), w);
    unlevel(coded + l->shifts + of_tile, n, signs->bit + first, factors);
    for (uint32_t t = 0; t < encoding_tile_tokens(s, tile); t++) {
        uint64_t row = encoding_row(s, tile * UCM_Q4_TILE + t, head), at = row * s->dim + first;

        rotate_back(coded + at / 2, n,
                    encoding_get16(coded + l->scales + 2 * (row * l->groups + g)), x);
        for (uint32_t i = 0; i < n; i += VEC)
            vec_store_u16(
                plain + 2 * (at + i),
                element_encode(dtype, (vec_load(x + i) + vec_load(w + i)) * vec_load(factors + i)));
    }
}

VEC_INLINE void decode_section(uint32_t dtype, const struct ucm_encoding_section *s,
                               const struct signs *signs, const uint8_t *coded, uint8_t *plain)
{
    struct q4_layout l = q4_layout(s);

    if (s->kind == UCM_ENCODING_V)
        decode_v(dtype, s, &l, signs, coded, plain);
    else
        for (uint32_t c = 0; c < encoding_tiles(s) * s->heads; c++)
            for (uint32_t g = 0; g < l.groups; g++)
                decode_tile(dtype, s, &l, signs, c, g, coded, plain);
}

FORM(q4_decode)
{
    const struct ucm_encoding_section *s = &spec->section[section];
    struct signs signs;

    find_signs(&signs, spec->seed, s->dim);
    if (spec->dtype == UCM_ENCODING_F16)
        decode_section(UCM_ENCODING_F16, s, &signs, from, to);
    else
        decode_section(UCM_ENCODING_BF16, s, &signs, from, to);
}
