/* fp8: codes, the stated error, what a round trip keeps. tests/integration/test_encoding_numpy.py
 * compares every element, and the decoding of any bytes, of every encoding. */
#include "tests/unit/encoding/encoding_rig.h"

#include <math.h>

/* Each positive code stays. A value between two codes goes to the nearest. */
Test(encoding_fp8, codes_are_the_nearest)
{
    for (uint32_t code = 0; code < 0x7d; code++) {
        float x = ucm_fp8_e4m3_decode(code), above = ucm_fp8_e4m3_decode(code + 1),
              middle = (x + above) / 2;

        cr_assert_eq(ucm_fp8_encode(x, 1), code);
        cr_assert_eq(ucm_fp8_encode(-x, 1), code | 0x80);
        cr_assert_eq(ucm_fp8_encode(middle, 1), code + (code & 1));
        cr_assert_eq(ucm_fp8_encode(nextafterf(middle, 0), 1), code);
        cr_assert_eq(ucm_fp8_encode(nextafterf(middle, INFINITY), 1), code + 1);
    }
    cr_assert_eq(ucm_fp8_encode(nextafterf(432, 0), 1), 0x7d);
}

/* The stated error: half of E4M3's step, at least 2^-10 of the scale's power; at most the largest
 * finite value. */
static void check_row(const struct rig_tensor *r, uint32_t row)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[r->tensor];
    uint64_t scales = ((uint64_t)s->tokens * s->heads * s->dim + 15) / 16 * 16;
    float power = ucm_fp8_power(r->encoded[scales + row]);

    for (uint64_t i = (uint64_t)row * s->dim; i < (uint64_t)(row + 1) * s->dim; i++) {
        float x = rig_value(&r->spec, r->raw, i), y = rig_value(&r->spec, r->again, i);
        float bound = fmaxf(fabsf(x) / 16, power * 0x1p-10f);

        if (ucm_is_nan(x))
            cr_assert_eq(rig_get(r->again, i), ucm_element_nan(r->spec.dtype));
        else if (ucm_not_finite(x))
            cr_assert_eq(rig_get(r->again, i), rig_get(r->raw, i));
        else {
            cr_assert_leq(fabsf(x - y), bound, "%a became %a, scale %a", (double)x, (double)y,
                          (double)power);
            cr_assert_eq(signbit(x), signbit(y));
        }
    }
}

Test(encoding_fp8, the_stated_error_holds_and_a_second_round_changes_nothing)
{
    static const uint32_t dims[] = {1, 3, 64, 80, 127, 128, 129, 576};

    for (uint32_t i = 0; i < 2 * sizeof(dims) / sizeof(dims[0]); i++)
        for (uint32_t values = 0; values <= RIG_VALUES; values++) {
            struct ucm_encoding_spec spec =
                rig_spec(UCM_ENCODING_FP8, rig_dtypes[i % 2], 5, 3, dims[i / 2]);
            uint8_t *encoded;
            struct rig_tensor r = rig_encoded(&spec, 1, i % 3, (enum rig_values)values);

            for (uint32_t row = 0; row < 15; row++)
                check_row(&r, row);
            encoded = malloc(r.bytes);
            ucm_encode(&spec, 1, r.again, encoded);
            cr_assert_arr_eq(encoded, r.encoded, r.bytes);
            free(encoded);
            rig_free(&r);
        }
}
