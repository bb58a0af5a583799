/* Specs and identities of encodings; elements of 16 bits and of 8.
 * tests/integration/test_encoding_numpy.py compares encoded and decoded bytes, and proves the stated
 * errors. */
#include "kernels/encoding/encoding.h"

#include "tests/unit/encoding/encoding_rig.h"

#include <errno.h>
#include <math.h>

static struct ucm_encoding_spec good(void)
{
    return rig_spec(UCM_ENCODING_FP8, UCM_ENCODING_BF16, 16, 8, 128);
}

#define REFUSED(spec, sentence)                                                                    \
    do {                                                                                           \
        char why_[UCM_ENCODING_WHY] = "";                                                          \
                                                                                                   \
        cr_assert_eq(ucm_encoding_check(&(spec), why_), -EINVAL);                                  \
        cr_assert_str_eq(why_, sentence);                                                          \
    } while (0)

Test(encoding, refuses_with_a_sentence)
{
    struct ucm_encoding_spec s = good();
    char why[UCM_ENCODING_WHY];

    cr_assert_eq(ucm_encoding_check(&s, why), 0);
    s.encoding = 77;
    REFUSED(s, "there is no encoding 77");
    s.encoding = UCM_ENCODING_NONE;
    REFUSED(s, "there is no encoding 0");
    s = good();
    s.version = 2;
    REFUSED(s, "version 2 of fp8 is not known here; 1 is");
    s = rig_spec(UCM_ENCODING_Q4, UCM_ENCODING_BF16, 16, 8, 128);
    s.version = 1;
    REFUSED(s, "version 1 of q4 is not known here; 2 is");
    s = good();
    s.dtype = UCM_ENCODING_F32;
    REFUSED(s, "dtype 0 (f32) can't be encoded as fp8; f16 or bf16 can");
    s.dtype = 9;
    REFUSED(s, "dtype 9 (unknown) can't be encoded as fp8; f16 or bf16 can");
    s = rig_spec(UCM_ENCODING_LOSSLESS, UCM_ENCODING_FP8_E4M3, 16, 8, 128);
    REFUSED(s, "dtype 3 (fp8_e4m3) can't be encoded as lossless; bf16 can");
    s = good();
    s.n_tensors = 3;
    REFUSED(s, "3 tensors; 1 (MLA) and 2 (K, V) are allowed");
}

Test(encoding, refuses_tensors_with_a_sentence)
{
    struct ucm_encoding_spec s = good();

    s.tensor[1].kind = UCM_ENCODING_K;
    REFUSED(s, "tensor 1 has kind 0; tensor 0 is K (0), tensor 1 V (1)");
    s = good();
    s.tensor[0].order = 2;
    REFUSED(s, "order of tensor 0 is 2; 0 (token after token) and 1 (head after head) are allowed");
    s = good();
    s.tensor[1].tokens = 0;
    REFUSED(s, "tokens of tensor 1 (V) is 0; 1 to 65536 are allowed");
    s = good();
    s.tensor[0].dim = 1025;
    REFUSED(s, "dim of tensor 0 (K) is 1025; 1 to 1024 are allowed");
    s = good();
    s.tensor[0].tokens = s.tensor[0].heads = 1024;
    REFUSED(s, "1024 tokens of 1024 heads of 128 are more than 4194304 elements");
    s = rig_spec(UCM_ENCODING_INT8, UCM_ENCODING_BF16, 16, 8, 128);
    s.axis = 2;
    REFUSED(s, "axis is 2; 0 (a scale a row) and 1 (a scale a channel of K) are allowed");
    s.axis = UCM_ENCODING_AXIS_CHANNEL;
    s.run = 17;
    REFUSED(s, "run is 17 tokens; tensor 0 (K) has 16 (0: all)");
}

Test(encoding, the_table_has_each_name_once)
{
    for (const struct ucm_encoding_method *const *m = ucm_encoding_methods; *m != NULL; m++) {
        cr_assert_eq(ucm_encoding_method((*m)->number), *m);
        cr_assert_eq(ucm_encoding_method_named((*m)->name), *m);
    }
    cr_assert_null(ucm_encoding_method_named("none"));
}

static bool same_identity(const struct ucm_encoding_spec *a, const struct ucm_encoding_spec *b)
{
    uint8_t x[UCM_ENCODING_IDENTITY_BYTES], y[UCM_ENCODING_IDENTITY_BYTES];

    ucm_encoding_identity(a, x);
    ucm_encoding_identity(b, y);
    return memcmp(x, y, sizeof(x)) == 0;
}

Test(encoding, identity_is_of_what_changes_the_bytes)
{
    struct ucm_encoding_spec a = good(), b;
    uint32_t *matters[] = {&b.dtype, &b.n_tensors, &b.tensor[0].tokens, &b.tensor[0].dim,
                           &b.tensor[1].heads};

    for (size_t i = 0; i < sizeof(matters) / sizeof(matters[0]); i++) {
        b = a;
        *matters[i] = *matters[i] == 2 ? 1 : 2;
        cr_assert_not(same_identity(&a, &b), "field %zu", i);
    }
    b = a;
    b.axis = 1;
    b.seed = 7;
    b.tensor[0].order = UCM_ENCODING_HND;
    cr_assert(same_identity(&a, &b), "fp8 has no axis, seed or order");
    b = a;
    a.n_tensors = b.n_tensors = 1;
    b.tensor[1].dim = 64;
    cr_assert(same_identity(&a, &b), "a tensor that is not there");
}

/* Against the nearest of all finite values, found by looking at each. */
Test(encoding, elements_round_to_the_nearest)
{
    for (uint32_t dtype = UCM_ENCODING_F16; dtype <= UCM_ENCODING_BF16; dtype++) {
        uint32_t inf = ucm_element_inf(dtype);

        for (uint32_t h = 0; h < inf; h++) {
            float x = ucm_element_decode(dtype, h), above = ucm_element_decode(dtype, h + 1);
            double middle = h + 1 < inf ? ((double)x + (double)above) / 2 : 0;

            cr_assert_eq(ucm_element_encode(dtype, x), h);
            cr_assert_eq(ucm_element_encode(dtype, -x), h | 0x8000);
            if (h + 1 == inf || (double)(float)middle != middle)
                continue;
            cr_assert_eq(ucm_element_encode(dtype, (float)middle), h + (h & 1));
            cr_assert_eq(ucm_element_encode(dtype, nextafterf((float)middle, 0)), h);
            cr_assert_eq(ucm_element_encode(dtype, nextafterf((float)middle, INFINITY)), h + 1);
        }
        cr_assert_eq(ucm_element_encode(dtype, INFINITY), inf - 1);
        cr_assert_eq(ucm_element_encode(dtype, -3.4e38f), (inf - 1) | 0x8000);
        cr_assert_eq(ucm_element_encode(dtype, NAN), ucm_element_nan(dtype));
    }
}

/* Each positive code of fp8 stays. A value between two codes goes to the nearest. */
Test(encoding, fp8_codes_are_the_nearest)
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

static struct ucm_encoding_spec any_spec(void)
{
    struct ucm_encoding_spec s =
        rig_spec(1 + below(4), UCM_ENCODING_BF16, 1 + below(32), 1 + below(4), 64 * (1 + below(3)));

    s.n_tensors = 1 + below(2);
    if (s.n_tensors == 1)
        s.tensor[1] = (struct ucm_encoding_tensor){0};
    s.tensor[0].order = s.tensor[1].order = s.n_tensors == 2 ? below(2) : 0;
    s.axis = below(2);
    s.run = s.axis ? below(s.tensor[0].tokens + 1) : 0;
    s.seed = (uint64_t)below(UINT32_MAX) << 32 | below(UINT32_MAX);
    return s;
}

/* A spec that is read back gives the same bytes, and no other identity gives it. */
Test(encoding, an_identity_is_read_back)
{
    for (uint32_t shift = 0; shift < 2000; shift++) {
        struct ucm_encoding_spec s = any_spec(), back;
        uint8_t bytes[UCM_ENCODING_IDENTITY_BYTES], again[UCM_ENCODING_IDENTITY_BYTES];
        char why[UCM_ENCODING_WHY];
        uint32_t at;

        cr_assert_eq(ucm_encoding_check(&s, why), 0, "%s", why);
        ucm_encoding_identity(&s, bytes);
        cr_assert_eq(ucm_encoding_parse(bytes, &back), 0, "encoding %u", s.encoding);
        ucm_encoding_identity(&back, again);
        cr_assert_eq(memcmp(bytes, again, sizeof(bytes)), 0);
        cr_assert_eq(ucm_encoding_layer_bytes(&back), ucm_encoding_layer_bytes(&s));
        at = below(sizeof(bytes));
        bytes[at] ^= (uint8_t)(1 + below(255));
        if (ucm_encoding_parse(bytes, &back) == 0) {
            cr_assert_eq(ucm_encoding_check(&back, why), 0, "%s", why);
            ucm_encoding_identity(&back, again);
            cr_assert_eq(memcmp(bytes, again, sizeof(bytes)), 0, "byte %u", at);
        }
    }
}
