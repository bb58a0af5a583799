/* q4: codes, rotation, centres, outliers. */
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
            double error = 0, all = 0;

            for (uint32_t e = row * 128; e < (row + 1) * 128; e++) {
                double x = (double)rig_value(&spec, r.raw, e);
                double y = (double)rig_value(&spec, r.again, e);

                error += (x - y) * (x - y);
                all += x * x;
            }
            lost[tensor] += sqrt(error);
            length += sqrt(all);
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
