/* Re-rotating K, compared with rotations from scratch in long double; and values that never change.
 */
#include "kernels/rope/arith.h"
#include "kernels/simd/isa.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static float unit(void)
{
    return (float)below(1u << 24) * 0x1p-23f - 1.0f;
}

static const struct ucm_rope_spec shapes[] = {
    {.rows = 6, .dim = 128, .rotary = 128},              /* a head */
    {.rows = 6, .dim = 96, .rotary = 24},                /* partial rotary */
    {.rows = 5, .dim = 576, .first = 512, .rotary = 64}, /* MLA: latent, then the rotary part */
    {.rows = 6, .dim = 128, .rotary = 64},               /* K and V of a token side by side */
    {.rows = 3, .dim = 64, .rotary = 64, .pairs = UCM_ROPE_NEIGHBOURS},
    {.rows = 3, .dim = 576, .first = 512, .rotary = 64, .pairs = UCM_ROPE_NEIGHBOURS},
};

static const struct ucm_rope_spec scalings[] = {
    {.base = 10000},
    {.base = 10000, .scaling = UCM_ROPE_LINEAR, .factor = 4},
    {.base = 10000, .scaling = UCM_ROPE_DYNAMIC, .factor = 2, .trained = 4096},
    {.base = 1e6,
     .scaling = UCM_ROPE_YARN,
     .factor = 4,
     .trained = 32768,
     .fast = 32,
     .slow = 1,
     .whole = true},
    {.base = 150000,
     .scaling = UCM_ROPE_YARN,
     .factor = 32,
     .trained = 4096,
     .fast = 32,
     .slow = 1},
    {.base = 5e5, .scaling = UCM_ROPE_LLAMA3, .factor = 8, .trained = 8192, .fast = 4, .slow = 1},
};

#define COUNT(a) (sizeof(a) / sizeof *(a))

static struct ucm_rope_spec join(const struct ucm_rope_spec *shape,
                                 const struct ucm_rope_spec *scaling, uint32_t dtype)
{
    struct ucm_rope_spec s = *scaling;
    char why[UCM_ROPE_WHY];

    s.dtype = dtype;
    s.rows = shape->rows;
    s.dim = shape->dim;
    s.first = shape->first;
    s.rotary = shape->rotary;
    s.pairs = shape->pairs;
    cr_assert_eq(ucm_rope_check(&s, why), 0, "%s", why);
    return s;
}

/* ---- elements ---- */

static float element(const struct ucm_rope_spec *s, const uint8_t *at, uint64_t i)
{
    uint32_t word = 0, bytes = ucm_rope_element_bytes(s);

    memcpy(&word, at + i * bytes, bytes);
    return ucm_rope_decode(s->dtype, word);
}

static void element_put(const struct ucm_rope_spec *s, uint8_t *at, uint64_t i, float x)
{
    uint32_t word = ucm_rope_encode(s->dtype, x), bytes = ucm_rope_element_bytes(s);

    memcpy(at + i * bytes, &word, bytes);
}

/* Half of the step between values of the dtype near x, for |x| of at most 448. */
static long double half_step(uint32_t dtype, long double x)
{
    static const int bits[] = {24, 11, 8, 4}, least[] = {-150, -25, -134, -10};
    int exponent;

    frexpl(x, &exponent);
    return fmaxl(ldexpl(1, exponent - bits[dtype] - 1), ldexpl(1, least[dtype]));
}

/* ---- against a rotation from scratch ---- */

static long double angle(const struct ucm_rope_spec *s, uint32_t pair, uint64_t position,
                         uint64_t length)
{
    float f[UCM_ROPE_PAIRS_MAX];

    ucm_rope_frequencies(s, length, f);
    return (long double)f[pair] * (long double)position;
}

struct pair {
    long double x, y;
};

static struct pair rotated(struct pair raw, long double angle)
{
    return (struct pair){raw.x * cosl(angle) - raw.y * sinl(angle),
                         raw.x * sinl(angle) + raw.y * cosl(angle)};
}

/* docs/design/blend.md, "Error": the rounding of storing, and of the shift. */
static void check_pair(const struct ucm_rope_spec *s, struct pair raw, struct pair want, float x,
                       float y)
{
    long double radius = hypotl(raw.x, raw.y), stored = half_step(s->dtype, radius);
    long double bound =
        sqrtl(2) * stored + half_step(s->dtype, radius + 2 * stored) + radius * 0x1p-22L;

    cr_assert_leq(fabsl(want.x - (long double)x), bound, "%Lg became %g; at most %Lg", want.x,
                  (double)x, bound);
    cr_assert_leq(fabsl(want.y - (long double)y), bound, "%Lg became %g; at most %Lg", want.y,
                  (double)y, bound);
}

static void check_shift(const struct ucm_rope_spec *s, const struct ucm_rope_shift *t)
{
    uint64_t bytes = ucm_rope_bytes(s);
    uint8_t *k = malloc(bytes), *out = malloc(bytes);
    struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];
    struct pair *raw = calloc((uint64_t)s->rows * s->rotary / 2, sizeof *raw);

    for (uint64_t i = 0; i < (uint64_t)s->rows * s->dim; i++)
        element_put(s, k, i, unit());
    for (uint32_t i = 0; i < s->rotary / 2; i++)
        for (uint32_t row = 0; row < s->rows; row++) {
            struct pair *p = &raw[row * (s->rotary / 2) + i], old;

            *p = (struct pair){unit(), unit()};
            old = rotated(*p, angle(s, i, t->old_position, t->old_length));
            element_put(s, k, row * s->dim + ucm_rope_channel_x(s, i), (float)old.x);
            element_put(s, k, row * s->dim + ucm_rope_channel_y(s, i), (float)old.y);
        }
    cr_assert(ucm_rope_table(s, t, table));
    ucm_rope_apply(s, table, k, out);
    for (uint32_t i = 0; i < s->rotary / 2; i++)
        for (uint32_t row = 0; row < s->rows; row++) {
            struct pair p = raw[row * (s->rotary / 2) + i];

            check_pair(s, p, rotated(p, angle(s, i, t->new_position, t->new_length)),
                       element(s, out, row * s->dim + ucm_rope_channel_x(s, i)),
                       element(s, out, row * s->dim + ucm_rope_channel_y(s, i)));
        }
    for (uint32_t row = 0; row < s->rows; row++)
        for (uint32_t c = 0; c < s->dim; c++)
            if (c < s->first || c >= s->first + s->rotary)
                cr_assert_eq(element(s, out, row * s->dim + c), element(s, k, row * s->dim + c));
    ucm_rope_apply(s, table, k, k);
    cr_assert_arr_eq(k, out, bytes, "in place");
    free(raw);
    free(k);
    free(out);
}

/* Each dtype, shape and scaling, at positions up to the last one that there is. */
Test(rope, a_turn_is_a_rotation_from_scratch)
{
    static const struct ucm_rope_shift shifts[] = {
        {0, 1, 0, 0},
        {0, 512, 0, 3000},
        {4096, 16, 5000, 0},
        {0, 1000000, 0, 1000512},
        {1048576, 999999, 1050000, 1000000},
        {0, UCM_ROPE_POSITION_MAX, 0, UCM_ROPE_POSITION_MAX},
        {UCM_ROPE_POSITION_MAX, 7, 0, 0},
    };

    for (uint32_t dtype = 0; dtype <= UCM_ROPE_FP8_E4M3; dtype++)
        for (size_t shape = 0; shape < COUNT(shapes); shape++)
            for (size_t scaling = 0; scaling < COUNT(scalings); scaling++)
                for (size_t t = 0; t < COUNT(shifts); t++) {
                    struct ucm_rope_spec s = join(&shapes[shape], &scalings[scaling], dtype);

                    check_shift(&s, &shifts[t]);
                }
}

/* Rows of several tokens are rotated like rows of one, wherever their tokens lie. */
static void check_columns(const struct ucm_rope_spec *s, uint32_t run, bool in_place)
{
    struct ucm_rope_spec rows = *s, columns = *s;
    struct ucm_rope_shift shift = {.old_position = 48, .new_position = 7000};
    struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];
    uint64_t bytes = ucm_rope_bytes(s) * run, n = bytes / ucm_rope_element_bytes(s);
    uint8_t *k = malloc(bytes), *t = malloc(bytes), *out = malloc(bytes);

    rows.rows *= run;
    columns.run = run;
    cr_assert_eq(ucm_rope_bytes(&columns), bytes);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t token = i / s->dim, place = token / run * run * s->dim + i % s->dim * run;
        float x = unit();

        element_put(s, k, i, x);
        element_put(s, t, place + token % run, x);
    }
    cr_assert(ucm_rope_table(s, &shift, table));
    ucm_rope_apply(&rows, table, k, k);
    ucm_rope_apply(&columns, table, t, in_place ? t : out);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t token = i / s->dim, place = token / run * run * s->dim + i % s->dim * run;

        cr_assert_eq(element(s, k, i), element(s, in_place ? t : out, place + token % run));
    }
    free(k);
    free(t);
    free(out);
}

Test(rope, rows_of_several_tokens)
{
    static const uint32_t runs[] = {2, 16, 700};

    for (uint32_t dtype = 0; dtype <= UCM_ROPE_FP8_E4M3; dtype++)
        for (size_t i = 0; i < COUNT(shapes); i++)
            for (size_t r = 0; r < COUNT(runs); r++) {
                struct ucm_rope_spec s = join(&shapes[i], &scalings[0], dtype);

                check_columns(&s, runs[r], r % 2 == 0);
            }
}

/* The error is half a step of float32 below 1, wherever the positions are. */
Test(rope, angles_are_exact_at_a_million)
{
    for (int n = 0; n < 2000; n++) {
        struct ucm_rope_spec s = join(&shapes[0], &scalings[(size_t)n % COUNT(scalings)], 0);
        struct ucm_rope_shift t = {below(2000000), below(2000000), 0, 0};
        struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];

        ucm_rope_table(&s, &t, table);
        for (uint32_t i = 0; i < s.rotary / 2; i++) {
            long double a = angle(&s, i, t.new_position, 0) - angle(&s, i, t.old_position, 0);

            cr_assert_leq(fabsl((long double)table[i].cos - cosl(a)), 0x1.01p-25L);
            cr_assert_leq(fabsl((long double)table[i].sin - sinl(a)), 0x1.01p-25L);
        }
    }
}

/* What engines compute: transformers 5.19's of these settings, which are of known models. */
Test(rope, frequencies_are_those_of_engines)
{
    static const uint32_t pairs[] = {1, 20, 30, 35, 40, 63};
    static const struct {
        uint32_t scaling;
        uint64_t length;
        double f[COUNT(pairs)];
    } known[] = {
        {1,
         0,
         {0.21649108827114105, 0.014058532193303108, 0.0033338037319481373, 0.0016234541544690728,
          0.0007905694656074047, 2.8869548259535804e-05}},
        {2,
         16384,
         {0.8396257758140564, 0.030319001525640488, 0.005279251374304295, 0.0022029320243746042,
          0.0009192419238388538, 1.649688601901289e-05}},
        {3,
         0,
         {0.8058422207832336, 0.01333521492779255, 0.0010643609566614032, 0.0002462583943270147,
          4.4456985051510856e-05, 3.102344408034696e-07}},
        {4,
         0,
         {0.8300869464874268, 0.019334999844431877, 0.00105260219424963, 4.615036232280545e-05,
          1.818833698052913e-05, 2.50977734594926e-07}},
        {5,
         0,
         {0.8146172165870667, 0.016560440883040428, 0.0013718936825171113, 9.556212171446532e-05,
          3.428102354519069e-05, 3.068925877869333e-07}},
    };

    for (size_t n = 0; n < COUNT(known); n++) {
        struct ucm_rope_spec s = join(&shapes[0], &scalings[known[n].scaling], 0);
        float f[UCM_ROPE_PAIRS_MAX];

        ucm_rope_frequencies(&s, known[n].length, f);
        for (size_t i = 0; i < COUNT(pairs); i++)
            cr_assert_float_eq((double)f[pairs[i]], known[n].f[i], known[n].f[i] * 1e-6,
                               "scaling %zu, pair %u: %.9g", n, pairs[i], (double)f[pairs[i]]);
    }
}

Test(rope, a_rerotate_by_nothing_is_told)
{
    struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];
    struct ucm_rope_spec s = join(&shapes[0], &scalings[5], 0);
    struct ucm_rope_spec dynamic = join(&shapes[0], &scalings[2], 0);

    cr_assert_not(ucm_rope_table(&s, &(struct ucm_rope_shift){77, 77, 100, 9000}, table));
    cr_assert_not(ucm_rope_table(&dynamic, &(struct ucm_rope_shift){77, 77, 100, 4096}, table));
    cr_assert(ucm_rope_table(&dynamic, &(struct ucm_rope_shift){77, 77, 100, 4097}, table));
    cr_assert(ucm_rope_table(&s, &(struct ucm_rope_shift){77, 78, 0, 0}, table));
}

/* Each instruction set's form of a tensor, and the definition in kernels/rope/arith.h. */
static void check_bits(const struct ucm_rope_spec *s, const struct ucm_rope_angle *table,
                       const uint8_t *k, const uint8_t *out)
{
    uint32_t bytes = ucm_rope_element_bytes(s);

    for (uint32_t row = 0; row < s->rows; row++)
        for (uint32_t i = 0; i < s->rotary / 2; i++) {
            uint64_t a = (uint64_t)row * s->dim + ucm_rope_channel_x(s, i);
            uint64_t b = (uint64_t)row * s->dim + ucm_rope_channel_y(s, i);
            float x = element(s, k, a), y = element(s, k, b);
            uint32_t want_x = ucm_rope_encode(s->dtype, ucm_rope_x(x, y, table[i]));
            uint32_t want_y = ucm_rope_encode(s->dtype, ucm_rope_y(x, y, table[i]));

            cr_assert_eq(memcmp(out + a * bytes, &want_x, bytes), 0, "dtype %u, pair %u", s->dtype,
                         i);
            cr_assert_eq(memcmp(out + b * bytes, &want_y, bytes), 0, "dtype %u, pair %u", s->dtype,
                         i);
        }
}

/* NaN stays NaN. A value that overflows becomes the largest one, never infinity. Nothing else is
 * touched. */
Test(rope, any_bits_can_be_shifted)
{
    for (uint32_t dtype = UCM_ROPE_F32; dtype <= UCM_ROPE_FP8_E4M3; dtype++)
        for (int n = 0; n < 400; n++) {
            struct ucm_rope_spec s = join(&shapes[(size_t)n % COUNT(shapes)], &scalings[0], dtype);
            uint64_t bytes = ucm_rope_bytes(&s);
            uint8_t *k = malloc(bytes), *out = malloc(bytes + 2);
            struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];

            for (uint64_t i = 0; i < bytes; i++)
                k[i] = (uint8_t)below(256);
            out[0] = out[bytes + 1] = 0xa5;
            ucm_rope_table(&s, &(struct ucm_rope_shift){0, 1 + (uint64_t)n, 0, 0}, table);
            ucm_isa_limit(n % 2 ? UCM_ISA_AVX512 : UCM_ISA_BASE);
            ucm_rope_apply(&s, table, k, out + 1);
            check_bits(&s, table, k, out + 1);
            cr_assert_eq(out[0], 0xa5);
            cr_assert_eq(out[bytes + 1], 0xa5);
            for (uint32_t i = 0; i < s.rotary / 2; i++) {
                float x = element(&s, k, ucm_rope_channel_x(&s, i)),
                      y = element(&s, k, ucm_rope_channel_y(&s, i));
                float after = element(&s, out + 1, ucm_rope_channel_x(&s, i));

                if (ucm_is_nan(x) || ucm_is_nan(y))
                    cr_assert(ucm_is_nan(after));
                else if (dtype != UCM_ROPE_F32 && !ucm_not_finite(x) && !ucm_not_finite(y))
                    cr_assert_not(ucm_not_finite(after));
            }
            free(k);
            free(out);
        }
}

/* ---- refusals ---- */

static void refused(const struct ucm_rope_spec *s, const char *words)
{
    char why[UCM_ROPE_WHY] = "";

    cr_assert_lt(ucm_rope_check(s, why), 0, "accepted what should be refused: %s", words);
    cr_assert(strstr(why, words), "\"%s\" does not say \"%s\"", why, words);
}

/* Refuses a spec of which one field is wrong. */
#define REFUSED(field, value, words)                                                               \
    do {                                                                                           \
        struct ucm_rope_spec spec = right;                                                         \
                                                                                                   \
        spec.field = (value);                                                                      \
        refused(&spec, words);                                                                     \
    } while (0)

Test(rope, refuses_with_a_sentence)
{
    struct ucm_rope_spec right =
        join(&(struct ucm_rope_spec){.rows = 1, .dim = 64, .rotary = 64}, &scalings[3], 0);
    char why[UCM_ROPE_WHY];
    uint32_t scaling;

    REFUSED(dtype, 4, "fp8_e4m3 (3) can be re-rotated");
    REFUSED(rotary, 63, "an even number");
    REFUSED(rotary, 0, "an even number");
    REFUSED(first, 8, "channels 8 to 71 turn, but a row has 64");
    REFUSED(first, UINT32_MAX, "but a row has 64");
    REFUSED(dim, 0, "a row has 0 channels");
    REFUSED(rows, 0, "0 rows");
    REFUSED(run, 65537, "at most 65536 are allowed");
    REFUSED(pairs, 2, "neox");
    REFUSED(scaling, 5, "llama3 (4) are known");
    REFUSED(base, 1, "the base is 1;");
    REFUSED(base, (double)NAN, "the base is nan");
    REFUSED(factor, 0.5, "the factor is 0.5");
    REFUSED(trained, 0, "needs the trained length");
    REFUSED(slow, 32, "fast above slow");
    right.scaling = UCM_ROPE_DYNAMIC;
    right.rotary = 2;
    refused(&right, "more than 2 rotary channels");
    cr_assert_lt(ucm_rope_check_shift(&(struct ucm_rope_shift){0, UINT64_C(1) << 31, 0, 0}, why),
                 0);
    cr_assert(strstr(why, "the new position is 2147483648; 0 to 2147483647 are allowed"), "%s",
              why);
    cr_assert_eq(ucm_rope_scaling_named("llama3", 6, &scaling), 0);
    cr_assert_eq(scaling, UCM_ROPE_LLAMA3);
    cr_assert_eq(ucm_rope_scaling_named(NULL, 0, &scaling), 0, "an absent field");
    cr_assert_eq(scaling, UCM_ROPE_PLAIN);
    cr_assert_lt(ucm_rope_scaling_named("longrope", 8, &scaling), 0);
}
