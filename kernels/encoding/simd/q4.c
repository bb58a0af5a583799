/* q4, VEC values at a time. kernels/encoding/q4.c is the reference. The rows of a tile and head are
 * encoded together, one group of channels after the other. V is encoded like K, with shifts of 0
 * and no centre. */
#include "kernels/encoding/q4_layout.h"
#include "kernels/encoding/simd/nibbles.h"

#define GROUP UCM_Q4_ROTATION_MAX
#define SIGN 0x80000000u
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* For a row's channels: the sign bit if the rotation negates the channel, else 0; and 1 with that
 * sign. */
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

/* The rows of a tile and head, one group of them. */
struct tile {
    uint32_t rows, n;
    uint64_t row[UCM_Q4_TILE];      /* their numbers in the tensor */
    uint64_t codes[UCM_Q4_TILE];    /* and where their group is in it: bytes of codes */
    uint32_t most[UCM_Q4_TILE];     /* the bits of the largest magnitude of what is quantised */
    float factor[GROUP];            /* encoding: what undoes it */
    float y[UCM_Q4_TILE][GROUP];    /* rotated */
    float less[UCM_Q4_TILE][GROUP]; /* and less the centre */
};

static void find_rows(struct tile *t, const struct ucm_encoding_tensor *s, uint32_t tile,
                      uint32_t head, uint32_t first)
{
    t->rows = encoding_tile_tokens(s, tile);
    for (uint32_t i = 0; i < t->rows; i++) {
        t->row[i] = encoding_row(s, tile * UCM_Q4_TILE + i, head);
        t->codes[i] = (t->row[i] * s->dim + first) / 2;
    }
}

/* ---- the rotation ---- */

/* The transform of n values in registers; n is a constant. A pair's sum and difference have one
 * rounding each, so the order of independent pairs does not matter. */
VEC_INLINE void hadamard(vec_f *v, uint32_t n)
{
    UNROLL for (uint32_t i = 0; i < n / VEC; i++) v[i] = vec_hadamard(v[i]);
    UNROLL for (uint32_t h = 1; h < n / VEC; h *= 2)
    {
        UNROLL for (uint32_t i = 0; i < n / VEC; i++) if ((i & h) == 0)
        {
            vec_f a = v[i], b = v[i + h];

            v[i] = a + b;
            v[i + h] = a - b;
        }
    }
}

VEC_INLINE void rotate(uint32_t dtype, uint32_t n, struct tile *t, const uint8_t *raw)
{
    for (uint32_t row = 0; row < t->rows; row++) {
        const uint8_t *from = raw + 4 * t->codes[row];
        vec_u most = vec_all(0);
        vec_f v[GROUP / VEC];

        UNROLL for (uint32_t i = 0; i < n / VEC; i++) v[i] =
            element_load(dtype, from + 2 * i * VEC) * vec_load(t->factor + i * VEC);
        hadamard(v, n);
        UNROLL for (uint32_t i = 0; i < n / VEC; i++)
        {
            most = vec_max_u(most, (vec_u)v[i] & ~SIGN);
            vec_store(t->y[row] + i * VEC, v[i]);
        }
        t->most[row] = vec_largest(most);
    }
}

/* Turns a group of codes into values times the scale, before levelling is undone. All sums are
 * integers below 2^24, so floats hold them. */
VEC_INLINE void rotate_back(uint32_t n, const uint8_t *codes, float part, vec_f *v)
{
    UNROLL for (uint32_t i = 0; i < n / VEC; i++) v[i] = q4_levels(nibbles(codes + i * VEC / 2));
    hadamard(v, n);
    UNROLL for (uint32_t i = 0; i < n / VEC; i++) v[i] *= vec_all_f(part);
}

VEC_INLINE void restore_centre(uint32_t n, const uint8_t *codes, float part, float *w)
{
    vec_f v[GROUP / VEC];

    rotate_back(n, codes, part, v);
    UNROLL for (uint32_t i = 0; i < n / VEC; i++) vec_store(w + i * VEC, v[i]);
}

/* w: what the centre adds, or -0, which adds nothing. clean: results are neither NaN nor past the
 * dtype's largest. */
VEC_INLINE void restore(uint32_t dtype, uint32_t n, const uint8_t *codes, float part,
                        const float *w, const float *factor, bool clean, uint8_t *raw)
{
    vec_f v[GROUP / VEC];

    rotate_back(n, codes, part, v);
    UNROLL for (uint32_t i = 0; i < n / VEC; i++) v[i] =
        (v[i] + vec_load(w + i * VEC)) * vec_load(factor + i * VEC);
    if (clean) {
        UNROLL for (uint32_t i = 0; i < n / VEC; i++)
            vec_store_u16(raw + 2 * i * VEC, element_round(dtype, v[i]));
    } else {
        UNROLL for (uint32_t i = 0; i < n / VEC; i++)
            vec_store_u16(raw + 2 * i * VEC, element_encode(dtype, v[i]));
    }
}

/* One function for each size and type. */
#define SIZE(N)                                                                                    \
    static void rotate_f16_##N(struct tile *t, const uint8_t *raw)                                 \
    {                                                                                              \
        rotate(UCM_ENCODING_F16, N, t, raw);                                                       \
    }                                                                                              \
    static void rotate_bf16_##N(struct tile *t, const uint8_t *raw)                                \
    {                                                                                              \
        rotate(UCM_ENCODING_BF16, N, t, raw);                                                      \
    }                                                                                              \
    static void restore_centre_##N(const uint8_t *codes, float part, float *w)                     \
    {                                                                                              \
        restore_centre(N, codes, part, w);                                                         \
    }                                                                                              \
    static void restore_f16_##N(const uint8_t *codes, float part, const float *w,                  \
                                const float *factor, bool clean, uint8_t *raw)                     \
    {                                                                                              \
        restore(UCM_ENCODING_F16, N, codes, part, w, factor, clean, raw);                          \
    }                                                                                              \
    static void restore_bf16_##N(const uint8_t *codes, float part, const float *w,                 \
                                 const float *factor, bool clean, uint8_t *raw)                    \
    {                                                                                              \
        restore(UCM_ENCODING_BF16, N, codes, part, w, factor, clean, raw);                         \
    }

SIZE(16)
SIZE(32)
SIZE(64)
SIZE(128)

struct size {
    void (*rotate[2])(struct tile *t, const uint8_t *raw); /* F16, BF16 */
    void (*restore[2])(const uint8_t *codes, float part, const float *w, const float *factor,
                       bool clean, uint8_t *raw);
    void (*restore_centre)(const uint8_t *codes, float part, float *w);
};

#define SIZE_OF(N)                                                                                 \
    {                                                                                              \
        {rotate_f16_##N, rotate_bf16_##N}, {restore_f16_##N, restore_bf16_##N}, restore_centre_##N \
    }

static const struct size *size_of(uint32_t n)
{
    static const struct size sizes[] = {SIZE_OF(16), SIZE_OF(32), SIZE_OF(64), SIZE_OF(128)};

    return &sizes[n == 16 ? 0 : n == 32 ? 1 : n == 64 ? 2 : 3];
}

/* ---- quantising ---- */

/* The largest magnitude's bits: not below UCM_F32_INF if a value is not finite. */
VEC_INLINE uint32_t largest(const float *y, uint32_t n)
{
    vec_u most = vec_all(0);

    for (uint32_t i = 0; i < n; i += VEC)
        most = vec_max_u(most, (vec_u)vec_load(y + i) & ~SIGN);
    return vec_largest(most);
}

/* a: `largest` of y. Thresholds are multiples of a half, so 2 |y| / scale, rounded down, determines
 * the code. */
static uint32_t quantise(const float *y, uint32_t n, uint32_t a, uint8_t *codes)
{
    uint32_t scale = UCM_BF16_NAN, i = 0;
    float part[NIBBLES] = {0};
    uint8_t bytes[NIBBLES / 2];
    vec_f twice;

    if (a < UCM_F32_INF)
        scale = ucm_q4_scale(ucm_f32(a));
    if (scale == 0 || scale == UCM_BF16_NAN) {
        memset(codes, 0, n / 2);
        return scale;
    }
    twice = vec_all_f(2.0f * (1.0f / ucm_bf16_decode(scale)));
    for (; i + NIBBLES <= n; i += NIBBLES)
        q4_codes(y + i, twice, codes + i / 2);
    if (i < n) {
        memcpy(part, y + i, (n - i) * sizeof(*y));
        q4_codes(part, twice, bytes);
        memcpy(codes + i / 2, bytes, (n - i) / 2);
    }
    return scale;
}

/* ---- the centre ---- */

/* less = y - the decoded centre. Whether no row becomes much larger by it. */
static bool subtract_centre(struct tile *t, const uint8_t *codes, float scale)
{
    uint32_t most[UCM_Q4_TILE];
    float z[GROUP];

    for (uint32_t i = 0; i < t->n; i += VEC)
        vec_store(z + i, q4_levels(nibbles(codes + i / 2)) * vec_all_f(scale));
    for (uint32_t row = 0; row < t->rows; row++) {
        float before = ucm_f32(t->most[row]);
        vec_u after = vec_all(0);

        for (uint32_t i = 0; i < t->n; i += VEC) {
            vec_f rest = vec_load(t->y[row] + i) - vec_load(z + i);

            after = vec_max_u(after, (vec_u)rest & ~SIGN);
            vec_store(t->less[row] + i, rest);
        }
        most[row] = vec_largest(after);
        if (most[row] >= UCM_F32_INF || !(ucm_f32(most[row]) <= UCM_Q4_CENTRE_MOST * before))
            return false;
    }
    memcpy(t->most, most, t->rows * sizeof(*most));
    return true;
}

/* Returns the centre's scale. *has: rows are to be taken from `less`. */
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

/* ---- levelling ---- */

/* The number of n bytes that are below `bound`, which is 1 to 255. */
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

/* The largest finite magnitudes of the group's channels, elements of 16 bits. */
static void channels_largest(const struct tile *t, uint32_t inf, const uint8_t *raw, uint8_t *out)
{
    const __m256i rest = _mm256_set1_epi16(0x7fff), first = _mm256_set1_epi16((short)inf);

    for (uint32_t i = 0; i < 2 * t->n; i += 32) {
        __m256i most = _mm256_setzero_si256();

        for (uint32_t row = 0; row < t->rows; row++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(raw + 4 * t->codes[row] + i)) & rest;

            most = _mm256_max_epi16(most, _mm256_cmpgt_epi16(first, x) & x);
        }
        _mm256_storeu_si256((__m256i *)(out + i), most);
    }
}

/* The shifts of the group's channels, and the factors that undo them. */
VEC_INLINE void level(uint32_t dtype, struct tile *t, const uint32_t *signs, const uint8_t *raw,
                      uint8_t *shifts)
{
    uint8_t most[2 * GROUP], exponents[GROUP], bytes[GROUP];
    vec_u above;

    channels_largest(t, ucm_element_inf(dtype), raw, most);
    for (uint32_t i = 0; i < t->n; i += VEC)
        vec_store_u8(exponents + i, (vec_u)element_load(dtype, most + 2 * i) >> 23);
    above = vec_all(median(exponents, t->n) + 2);
    for (uint32_t i = 0; i < t->n; i += VEC) {
        vec_u shift = vec_max_u(vec_load_u8(exponents + i), above) - above;

        shift = vec_select(vec_less(shift, 15), shift, vec_all(15));
        vec_store_u8(bytes + i, shift);
        vec_store(t->factor + i, (vec_f)((127 - shift) << 23 | load_bits(signs + i)));
    }
    for (uint32_t i = 0; i < t->n; i += 16)
        pack_codes(shifts + i / 2, _mm_loadu_si128((const __m128i *)(bytes + i)));
}

VEC_INLINE void unlevel(const uint8_t *shifts, uint32_t n, const uint32_t *signs, float *factor)
{
    for (uint32_t i = 0; i < n; i += VEC) {
        vec_u shift = nibbles(shifts + i / 2) & 15;

        vec_store(factor + i, (vec_f)((127 + shift) << 23 | load_bits(signs + i)));
    }
}

/* ---- tensors ---- */

static void encode_tile(uint32_t dtype, const struct ucm_encoding_tensor *s,
                        const struct q4_layout *l, const struct signs *signs, uint32_t c,
                        uint32_t g, const uint8_t *raw, uint8_t *encoded)
{
    uint32_t first = g * l->rotation;
    uint64_t at = (uint64_t)c * l->row_bytes + first / 2;
    struct tile t;
    bool has = false;

    t.n = l->rotation;
    find_rows(&t, s, c / s->heads, c % s->heads, first);
    if (s->kind == UCM_ENCODING_V)
        memcpy(t.factor, signs->one + first, t.n * sizeof(float));
    else if (dtype == UCM_ENCODING_F16)
        level(UCM_ENCODING_F16, &t, signs->bit + first, raw, encoded + l->shifts + at);
    else
        level(UCM_ENCODING_BF16, &t, signs->bit + first, raw, encoded + l->shifts + at);
    size_of(t.n)->rotate[dtype == UCM_ENCODING_BF16](&t, raw);
    if (s->kind == UCM_ENCODING_K)
        encoding_put16(encoded + l->centre_scales + UINT64_C(2) * (c * l->groups + g),
                       centre(&t, encoded + l->centres + at, &has));
    for (uint32_t i = 0; i < t.rows; i++)
        encoding_put16(encoded + l->scales + 2 * (t.row[i] * l->groups + g),
                       quantise(has ? t.less[i] : t.y[i], t.n, t.most[i], encoded + t.codes[i]));
}

FORM(q4_encode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct q4_layout l = q4_layout(s);
    struct signs signs;

    find_signs(&signs, spec->seed, s->dim);
    for (uint32_t c = 0; c < encoding_tiles(s) * s->heads; c++)
        for (uint32_t g = 0; g < l.groups; g++)
            encode_tile(spec->dtype, s, &l, &signs, c, g, from, to);
    q4_pad(&l, to);
}

static float part_at(const uint8_t *scales, uint64_t i, uint32_t n)
{
    return ucm_bf16_decode(encoding_get16(scales + 2 * i)) * (1.0f / (float)n);
}

/* The most that a row can be times its scale / n. A centre adds as much again. */
static bool is_clean(uint32_t dtype, float part, float centre, float factor)
{
    float most = (ucm_abs(part) + ucm_abs(centre)) * 0x1p14f * factor;

    return most < (dtype == UCM_ENCODING_F16 ? 65504.0f : 0x1p127f);
}

static void decode_tile(uint32_t dtype, const struct ucm_encoding_tensor *s,
                        const struct q4_layout *l, const struct signs *signs, uint32_t c,
                        uint32_t g, const uint8_t *encoded, uint8_t *raw)
{
    uint32_t n = l->rotation, first = g * n;
    uint64_t at = (uint64_t)c * l->row_bytes + first / 2;
    const struct size *size = size_of(n);
    float w[GROUP], factor = 1, part = 0;
    struct tile t;

    find_rows(&t, s, c / s->heads, c % s->heads, first);
    if (s->kind == UCM_ENCODING_K) {
        part = part_at(encoded + l->centre_scales, (uint64_t)c * l->groups + g, n);
        size->restore_centre(encoded + l->centres + at, part, w);
        unlevel(encoded + l->shifts + at, n, signs->bit + first, t.factor);
        factor = ucm_f32(largest(t.factor, n));
    } else {
        memcpy(t.factor, signs->one + first, n * sizeof(float));
        for (uint32_t i = 0; i < n; i += VEC)
            vec_store(w + i, vec_all_f(-0.0f));
    }
    for (uint32_t i = 0; i < t.rows; i++) {
        float of_row = part_at(encoded + l->scales, t.row[i] * l->groups + g, n);

        size->restore[dtype == UCM_ENCODING_BF16](encoded + t.codes[i], of_row, w, t.factor,
                                                  is_clean(dtype, of_row, part, factor),
                                                  raw + 4 * t.codes[i]);
    }
}

FORM(q4_decode)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    struct q4_layout l = q4_layout(s);
    struct signs signs;

    find_signs(&signs, spec->seed, s->dim);
    for (uint32_t c = 0; c < encoding_tiles(s) * s->heads; c++)
        for (uint32_t g = 0; g < l.groups; g++)
            decode_tile(spec->dtype, s, &l, &signs, c, g, from, to);
}
