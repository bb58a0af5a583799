/* q4: codes, rotation, centres, the stated error, what is not finite. test_encoding_numpy.py
 * compares scales, shifts and sizes. */
#include "kernels/encoding/q4_layout.h"
#include "tests/unit/encoding/encoding_rig.h"

#include <errno.h>
#include <math.h>

Test(encoding_q4, rotates_the_largest_power_of_two)
{
    static const uint32_t dims[][2] = {{16, 16},  {48, 16},   {64, 64},   {80, 16},
                                       {96, 32},  {128, 128}, {256, 128}, {576, 64},
                                       {192, 64}, {1008, 16}, {1024, 128}};
    struct ucm_encoding_spec spec;
    char why[UCM_ENCODING_WHY];

    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
        cr_assert_eq(ucm_q4_rotation(dims[i][0]), dims[i][1]);
    spec = rig_spec(UCM_ENCODING_Q4, UCM_ENCODING_BF16, 16, 8, 72);
    cr_assert_eq(ucm_encoding_check(&spec, why), -EINVAL);
    cr_assert_str_eq(why, "dim of tensor 0 is 72; q4 rotates multiples of 16");
}

/* Each code's level is a value for which that code is chosen. The largest error is 15 scales. */
Test(encoding_q4, levels_lie_between_their_thresholds)
{
    for (int32_t i = 0; i <= 13552; i++) {
        float x = (float)i * 0.01f; /* 135 * (1 + 2^-8) is 135.52 */
        uint32_t code = ucm_q4_code(x, 1.0f);

        cr_assert_leq(fabsf((float)ucm_q4_level(code) - x), 15.0f);
        cr_assert_lt(code, 8);
        if (i > 0)
            cr_assert_eq(ucm_q4_code(-x, 1.0f), code | 8);
    }
    for (uint32_t code = 0; code < 16; code++)
        cr_assert_eq(ucm_q4_code((float)ucm_q4_level(code), 1.0f), code);
    cr_assert_eq(ucm_q4_scale(135.0f), ucm_bf16_encode(1.0f));
    cr_assert_eq(ucm_q4_scale(0x1p-94f), 0, "too small to matter");
}

static double norm(const float *x, uint32_t n)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* The shift of a channel of the group that begins with element `first`; that group is of one tile. */
static uint32_t shift_of(const struct rig_tensor *r, uint64_t first, uint32_t channel)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[r->tensor];
    struct q4_layout l = q4_layout(s);
    uint64_t tile = encoding_tile_of(s, (uint32_t)(first / s->dim));
    uint64_t at = tile * s->dim + first % s->dim + channel;

    if (s->kind == UCM_ENCODING_V)
        return 0;
    return r->encoded[l.shifts + at / 2] >> 4 * (at % 2) & 15u;
}

struct found { /* of a group of a row: values as they are levelled */
    float x[128], y[128], error[128];
    bool finite, nan; /* all of x are; all of y are NaN */
};

static struct found find(const struct rig_tensor *r, uint64_t first, uint32_t n)
{
    struct found f = {.finite = true, .nan = true};

    for (uint32_t i = 0; i < n; i++) {
        float divisor = ucm_q4_divisor(shift_of(r, first, i), 0);

        f.x[i] = rig_value(&r->spec, r->raw, first + i) * divisor;
        f.y[i] = rig_value(&r->spec, r->again, first + i) * divisor;
        f.error[i] = f.x[i] - f.y[i];
        f.finite = f.finite && !ucm_not_finite(f.x[i]);
        f.nan = f.nan && ucm_is_nan(f.y[i]);
    }
    return f;
}

/* A group with NaN or an infinity is NaN throughout, and so is one whose sums overflow. In any
 * other, the error's length is at most 15.2 scales plus the rounding to the dtype. */
static void check_tensor(const struct rig_tensor *r)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[r->tensor];
    struct q4_layout l = q4_layout(s);

    for (uint32_t row = 0; row < s->tokens * s->heads; row++)
        for (uint32_t g = 0; g < l.groups; g++) {
            uint64_t first = (uint64_t)row * s->dim + g * l.rotation;
            struct found f = find(r, first, l.rotation);
            uint32_t bits = rig_get(r->encoded + l.scales, (uint64_t)row * l.groups + g);
            double scale = (double)ucm_bf16_decode(bits), bound;

            cr_assert_eq(bits == UCM_BF16_NAN, f.nan);
            if (!f.finite)
                cr_assert(f.nan);
            if (f.nan)
                continue;
            bound = 15.2 * scale + norm(f.y, l.rotation) * 0x1p-8 + 0x1p-91;
            cr_assert(norm(f.error, l.rotation) <= bound, "row %u: %g of %g, scale %g", row,
                      norm(f.error, l.rotation), norm(f.x, l.rotation), scale);
        }
}

Test(encoding_q4, the_stated_error_holds)
{
    static const uint32_t dims[] = {16, 64, 80, 96, 128, 256, 576};
    static const uint32_t tokens[] = {1, 5, 16, 17, 40};

    for (uint32_t i = 0; i < 8 * sizeof(dims) / sizeof(dims[0]); i++)
        for (uint32_t values = 0; values <= RIG_VALUES; values++) {
            struct ucm_encoding_spec spec = rig_spec(UCM_ENCODING_Q4, rig_dtypes[i % 2],
                                                     tokens[(i + values) % 5], 3, dims[i / 8]);
            struct rig_tensor r;

            spec.seed = i;
            spec.tensor[0].order = spec.tensor[1].order = i / 2 % 2;
            r = rig_encoded(&spec, i / 4 % 2, i % 3, (enum rig_values)values);
            check_tensor(&r);
            rig_free(&r);
        }
}

/* Normal values lose about a tenth of their length; keys that have a direction in common lose less,
 * because it becomes the centre. */
Test(encoding_q4, centres_make_keys_better)
{
    double lost[2] = {0, 0}, length = 0;

    for (uint32_t tensor = 0; tensor < 2; tensor++) {
        struct ucm_encoding_spec spec = rig_spec(UCM_ENCODING_Q4, UCM_ENCODING_BF16, 32, 2, 128);
        struct rig_tensor r = rig_tensor(&spec, tensor, 0);

        random_state = 5;
        for (uint32_t i = 0; i < 32 * 2 * 128; i++) {
            float direction = (float)(i % 256 * 37 % 17) - 8.0f;

            rig_put(r.raw, i, ucm_bf16_encode(direction + rig_normal() * 0.5f));
        }
        rig_round_trip(&r);
        for (uint32_t row = 0; row < 64; row++) {
            struct found f = find(&r, (uint64_t)row * 128, 128);

            lost[tensor] += norm(f.error, 128);
            length += norm(f.x, 128);
        }
        rig_free(&r);
    }
    cr_assert_lt(lost[1], 0.12 * length / 2);
    cr_assert_lt(lost[0], 0.3 * lost[1]);
}

static void put(const struct rig_tensor *r, uint64_t i, float x)
{
    rig_put(r->raw, i, ucm_element_encode(r->spec.dtype, x));
}

/* One channel pair's values don't change the loss in the others. */
Test(encoding_q4, outliers_do_not_set_the_scale)
{
    double lost[4];

    for (uint32_t i = 0; i < 4; i++) {
        struct ucm_encoding_spec spec = rig_spec(UCM_ENCODING_Q4, UCM_ENCODING_BF16, 64, 2, 128);
        struct rig_tensor r = rig_tensor(&spec, 0, 0);
        float larger = ldexpf(1, (int)(5 * i));

        random_state = 9;
        for (uint32_t e = 0; e < 64 * 2 * 128; e++)
            put(&r, e, rig_normal() * (e % 64 == 17 ? larger : 1.0f));
        rig_round_trip(&r);
        lost[i] = 0;
        for (uint32_t e = 0; e < 64 * 2 * 128; e++)
            if (e % 64 != 17)
                lost[i] +=
                    fabs((double)(rig_value(&spec, r.raw, e) - rig_value(&spec, r.again, e)));
        rig_free(&r);
    }
    for (uint32_t i = 1; i < 4; i++)
        cr_assert(lost[i] < 1.15 * lost[0], "2^%u: %g, not %g", 5 * i, lost[i], lost[0]);
}
