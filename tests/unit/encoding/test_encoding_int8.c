/* int8, a scale a row or a channel: the stated error, identities. test_encoding_numpy.py compares
 * scales and runs. */
#include "tests/unit/encoding/encoding_rig.h"

#include <errno.h>
#include <math.h>

static float scale_of(const struct rig_tensor *r, uint64_t element)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[r->tensor];
    uint64_t at = ((uint64_t)s->tokens * s->heads * s->dim + 15) / 16 * 16;
    uint64_t row = element / s->dim, i = row;

    if (r->spec.axis == UCM_ENCODING_AXIS_CHANNEL && r->tensor == 0) {
        bool nhd = s->order == UCM_ENCODING_NHD;
        uint64_t head = nhd ? row % s->heads : row / s->tokens;
        uint64_t token = nhd ? row / s->heads : row % s->tokens;
        uint64_t run = r->spec.run > 0 ? token / r->spec.run : 0;

        i = (run * s->heads + head) * s->dim + element % s->dim;
    }
    return ucm_bf16_decode(rig_get(r->encoded + at, i));
}

static void check_tensor(const struct rig_tensor *r)
{
    bool f16 = r->spec.dtype == UCM_ENCODING_F16;

    for (uint64_t i = 0; i < r->raw_bytes / 2; i++) {
        float x = rig_value(&r->spec, r->raw, i), y = rig_value(&r->spec, r->again, i);
        float bound =
            0.51f * scale_of(r, i) + fabsf(y) * (f16 ? 0x1p-11f : 0x1p-8f) + (f16 ? 0x1p-25f : 0);

        if (ucm_is_nan(x))
            cr_assert_eq(rig_get(r->again, i), ucm_element_nan(r->spec.dtype));
        else if (ucm_not_finite(x))
            cr_assert_eq(rig_get(r->again, i), rig_get(r->raw, i));
        else
            cr_assert_leq(fabsf(x - y), bound, "%a became %a", (double)x, (double)y);
    }
}

static void round_trip(const struct ucm_encoding_spec *spec, uint32_t tensor,
                       enum rig_values values, uint32_t odd)
{
    struct rig_tensor r = rig_encoded(spec, tensor, odd, values);

    check_tensor(&r);
    rig_free(&r);
}

Test(encoding_int8, the_stated_error_holds)
{
    static const uint32_t dims[] = {1, 3, 64, 80, 127, 128, 129, 576};

    for (uint32_t i = 0; i < 8 * sizeof(dims) / sizeof(dims[0]); i++)
        for (uint32_t values = 0; values <= RIG_VALUES; values++) {
            struct ucm_encoding_spec spec =
                rig_spec(UCM_ENCODING_INT8, rig_dtypes[i % 2], 5, 3, dims[i / 8]);

            spec.axis = i / 2 % 2;
            spec.run = values % 4;
            spec.tensor[0].order = i / 4 % 2;
            round_trip(&spec, 0, (enum rig_values)values, i % 3);
            round_trip(&spec, 1, (enum rig_values)values, i % 3);
        }
}

/* A run of all tokens is the same as 0, and axis 0 has no runs. */
Test(encoding_int8, identity_of_runs)
{
    struct ucm_encoding_spec a = rig_spec(UCM_ENCODING_INT8, UCM_ENCODING_BF16, 16, 8, 128), b;
    uint8_t x[UCM_ENCODING_IDENTITY_BYTES], y[UCM_ENCODING_IDENTITY_BYTES];
    char why[UCM_ENCODING_WHY];

    for (uint32_t axis = 0; axis < 2; axis++)
        for (uint32_t run = 1; run <= 16; run++) {
            a.axis = axis;
            b = a;
            b.run = run;
            ucm_encoding_identity(&a, x);
            ucm_encoding_identity(&b, y);
            cr_assert_eq(memcmp(x, y, sizeof(x)) == 0, axis == 0 || run == 16);
            cr_assert_eq(y[72], axis == 0 || run == 16 ? 0 : run);
        }
    a.run = 17;
    cr_assert_eq(ucm_encoding_check(&a, why), -EINVAL);
    cr_assert_str_eq(why, "run is 17 tokens; tensor 0 (K) has 16 (0: all)");
}

Test(encoding_int8, axis_and_order)
{
    struct ucm_encoding_spec a = rig_spec(UCM_ENCODING_INT8, UCM_ENCODING_BF16, 16, 8, 128), b = a;
    uint8_t x[UCM_ENCODING_IDENTITY_BYTES], y[UCM_ENCODING_IDENTITY_BYTES];
    char why[UCM_ENCODING_WHY];

    cr_assert_eq(ucm_encoding_bytes(&a, 0), 16 * 8 * 128 + 2 * 16 * 8);
    a.axis = UCM_ENCODING_AXIS_CHANNEL;
    cr_assert_eq(ucm_encoding_bytes(&a, 0), 16 * 8 * 128 + 2 * 8 * 128);
    cr_assert_eq(ucm_encoding_bytes(&a, 1), 16 * 8 * 128 + 2 * 16 * 8);
    ucm_encoding_identity(&a, x);
    ucm_encoding_identity(&b, y);
    cr_assert_arr_neq(x, y, sizeof(x));
    b = a;
    b.tensor[0].order = b.tensor[1].order = UCM_ENCODING_HND;
    ucm_encoding_identity(&b, y);
    cr_assert_eq(y[48], 1, "K's order");
    cr_assert_eq(y[68], 0, "V has a scale a row");
    a.axis = 2;
    cr_assert_eq(ucm_encoding_check(&a, why), -EINVAL);
    cr_assert_str_eq(why,
                     "axis is 2; 0 (a scale a row) and 1 (a scale a channel of K) are allowed");
}
