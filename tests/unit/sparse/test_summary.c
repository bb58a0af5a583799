/* Summary specs: refusals with their sentences, byte ranges, the canonical form. A build
 * stays in its memory. test_summary_numpy.py compares values with numpy. */
#include "kernels/sparse/arith.h"
#include "kernels/sparse/sparse.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct ucm_summary_spec spec_of(uint32_t method)
{
    return (struct ucm_summary_spec){
        .method = method,
        .run = 4,
        .bits = 128,
        .seed = 9,
        .chosen = 2,
        .shape = {.dtype = UCM_KV_F16,
                  .tokens = 16,
                  .kv_heads = 2,
                  .head_dim = 64,
                  .v_head_dim = 64,
                  .k_token_stride = 256,
                  .k_head_stride = 128,
                  .v_offset = 4096,
                  .v_token_stride = 256,
                  .v_head_stride = 128},
    };
}

static void refused(struct ucm_summary_spec spec, const char *says)
{
    struct ucm_summary_plan plan;
    char why[UCM_SPARSE_WHY] = "";

    cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), -EINVAL, "taken, not: %s", says);
    cr_assert_not_null(strstr(why, says), "\"%s\" does not say \"%s\"", why, says);
}

static void taken(struct ucm_summary_spec spec, uint32_t bytes)
{
    char why[UCM_SPARSE_WHY] = "";

    cr_assert_eq(ucm_summary_check(&spec, why), 0, "%s", why);
    cr_assert_eq(ucm_summary_bytes(&spec), bytes, "%u", ucm_summary_bytes(&spec));
}

/* refused(), with one field of a good spec changed. */
#define REFUSED(method_, field, value, says)                                                       \
    do {                                                                                           \
        struct ucm_summary_spec s_ = spec_of(method_);                                             \
        s_.field = (value);                                                                        \
        refused(s_, says);                                                                         \
    } while (0)

Test(summary, every_bound_of_a_shape_is_refused_with_a_sentence)
{
    REFUSED(UCM_SUMMARY_MEAN, method, 0, "no summary method 0");
    REFUSED(UCM_SUMMARY_MEAN, method, 7, "no summary method 7");
    REFUSED(UCM_SUMMARY_MEAN, shape.dtype, 4, "dtype 4");
    REFUSED(UCM_SUMMARY_MEAN, shape.tokens, 0, "tokens is 0");
    REFUSED(UCM_SUMMARY_MEAN, shape.tokens, UCM_KV_TOKENS_MAX + 1, "tokens is 1025");
    REFUSED(UCM_SUMMARY_MEAN, shape.kv_heads, 0, "kv_heads is 0");
    REFUSED(UCM_SUMMARY_MEAN, shape.kv_heads, UINT32_MAX, "kv_heads is 4294967295");
    REFUSED(UCM_SUMMARY_MEAN, shape.head_dim, 0, "head_dim is 0");
    REFUSED(UCM_SUMMARY_MEAN, shape.head_dim, 66, "head_dim is 66");
    REFUSED(UCM_SUMMARY_MEAN, shape.head_dim, 1028, "head_dim is 1028");
    REFUSED(UCM_SUMMARY_MEAN, shape.v_head_dim, 1028, "v_head_dim is 1028");
    REFUSED(UCM_SUMMARY_MEAN, shape.v_head_dim, 3, "v_head_dim is 3");
    REFUSED(UCM_SUMMARY_HASH, shape.rope_dim, 64, "rope_dim is 64");
    REFUSED(UCM_SUMMARY_HASH, shape.rope_dim, 6, "rope_dim is 6");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_offset, 1, "k_offset 1 is no multiple");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_offset, UCM_KV_OFFSET_MAX + 2, "k_offset is above");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_token_stride, 257, "k_token_stride 257 is no multiple");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_token_stride, 126, "less than the 128 bytes");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_token_stride, UINT64_MAX, "k_token_stride is above");
    REFUSED(UCM_SUMMARY_MEAN, shape.k_head_stride, 0, "k_head_stride 0 is less");
    REFUSED(UCM_SUMMARY_MEAN, shape.v_offset, 4097, "v_offset");
    REFUSED(UCM_SUMMARY_MEAN, shape.v_token_stride, 2, "v_token_stride");
    REFUSED(UCM_SUMMARY_MEAN, shape.v_head_stride, UINT64_MAX, "v_head_stride");
}

/* A build can't be stopped half way. */
Test(summary, what_takes_a_thread_long_is_refused)
{
    struct ucm_summary_spec s = spec_of(UCM_SUMMARY_MEAN);

    s.shape.tokens = UCM_KV_TOKENS_MAX;
    s.shape.kv_heads = 16;
    s.shape.head_dim = 256;
    s.shape.v_head_dim = 0;
    s.shape.k_head_stride = 512;
    s.shape.k_token_stride = 16 * 512;
    taken(s, 16 * (256 + 2));
    s.shape.v_head_dim = 260;
    refused(s, "1024 tokens of 16 heads of 260 channels are more than 4194304 elements");
    s.shape.v_head_dim = 0;
    s.shape.kv_heads = 17;
    refused(s, "are more than 4194304 elements");
    s.shape.kv_heads = 1;
    s.method = UCM_SUMMARY_TOKENS;
    s.chosen = UCM_SUMMARY_CHOSEN_MAX;
    taken(s, UCM_SUMMARY_CHOSEN_MAX * (256 + 2));
    s.chosen++;
    refused(s, "chosen is 33; 1 to 32");
}

Test(summary, every_bound_of_a_parameter_is_refused_with_a_sentence)
{
    struct ucm_summary_spec s;

    REFUSED(UCM_SUMMARY_MEAN, kind, 3, "kind 3");
    REFUSED(UCM_SUMMARY_SUBMEAN, run, 0, "run 0 does not divide");
    REFUSED(UCM_SUMMARY_SUBMEAN, run, 5, "run 5 does not divide");
    REFUSED(UCM_SUMMARY_SUBMEAN, run, 32, "run 32 does not divide");
    REFUSED(UCM_SUMMARY_SUBMEAN, keep_bytes, 3, "keep has 3 bytes; 4 are needed");
    REFUSED(UCM_SUMMARY_SUBMEAN, keep_bytes, UINT32_MAX, "keep has");
    REFUSED(UCM_SUMMARY_SUBMEAN, keep_bytes, 4, "keeps no pair");
    s = spec_of(UCM_SUMMARY_SUBMEAN);
    s.keep_bytes = 4;
    s.keep[0] = 1;
    s.pairs = 2;
    refused(s, "pairs 2");
    s.pairs = 0;
    s.shape.head_dim = 56; /* 28 pairs */
    s.keep[3] = 0x10;
    refused(s, "a pair after the last, 27");
    REFUSED(UCM_SUMMARY_HASH, bits, 0, "bits is 0");
    REFUSED(UCM_SUMMARY_HASH, bits, 512, "bits is 512");
    REFUSED(UCM_SUMMARY_HASH, rope_bits, 1, "without a rope_dim");
    s = spec_of(UCM_SUMMARY_HASH);
    s.shape.rope_dim = 16;
    refused(s, "rope_bits is 0");
    s.rope_bits = 128;
    refused(s, "rope_bits is 128");
    s.shape.rope_dim = 4;
    s.rope_bits = 33;
    refused(s, "33 bits are too many for the 4 channels");
    REFUSED(UCM_SUMMARY_STATS, beta, -1, "beta");
    REFUSED(UCM_SUMMARY_STATS, beta, NAN, "beta");
    REFUSED(UCM_SUMMARY_STATS, beta, INFINITY, "beta");
    REFUSED(UCM_SUMMARY_TOKENS, chosen, 0, "chosen is 0");
    REFUSED(UCM_SUMMARY_TOKENS, chosen, 17, "chosen is 17");
    REFUSED(UCM_SUMMARY_TOKENS, rest, 2, "rest 2");
    s = spec_of(UCM_SUMMARY_TOKENS);
    s.rest = UCM_REST_MEAN;
    s.chosen = 16;
    refused(s, "none is left for rest");
    s.chosen = 15;
    taken(s, 2 * 16 * (32 + 2));
    s.beta = -1;
    refused(s, "beta");
}

static void expect_no_overflow(uint32_t method, uint32_t rest, uint32_t tokens, uint32_t kv_heads)
{
    struct ucm_summary_spec s = spec_of(method);
    char why[UCM_SPARSE_WHY] = "";

    s.run = 1;
    s.bits = 256;
    s.rest = rest;
    s.chosen = tokens - rest < UCM_SUMMARY_CHOSEN_MAX ? tokens - rest : UCM_SUMMARY_CHOSEN_MAX;
    s.shape.tokens = tokens;
    s.shape.kv_heads = kv_heads;
    s.shape.head_dim = s.shape.v_head_dim = UCM_KV_HEAD_DIM_MAX;
    s.shape.k_offset = s.shape.k_token_stride = s.shape.k_head_stride = UCM_KV_OFFSET_MAX;
    s.shape.v_offset = s.shape.v_token_stride = s.shape.v_head_stride = UCM_KV_OFFSET_MAX;
    cr_assert_eq(ucm_summary_check(&s, why), 0, "%s", why);
    cr_assert_eq(ucm_summary_extent(&s),
                 (uint64_t)(tokens + kv_heads - 1) * UCM_KV_OFFSET_MAX + 2048);
    cr_assert_leq(ucm_summary_bytes(&s), 16u << 20);
    cr_assert_eq(ucm_summary_bytes(&s) % 4, 0);
}

Test(summary, the_largest_shapes_do_not_overflow)
{
    for (uint32_t method = UCM_SUMMARY_MEAN; method <= UCM_SUMMARY_TOKENS; method++) {
        expect_no_overflow(method, 0, UCM_KV_TOKENS_MAX, 4);
        expect_no_overflow(method, 0, 4, UCM_KV_HEADS_MAX);
    }
    expect_no_overflow(UCM_SUMMARY_TOKENS, UCM_REST_MEAN, UCM_KV_TOKENS_MAX, 4);
    expect_no_overflow(UCM_SUMMARY_TOKENS, UCM_REST_MEAN, 4, UCM_KV_HEADS_MAX);
}

static bool same(const struct ucm_summary_spec *a, const struct ucm_summary_spec *b)
{
    uint8_t one[UCM_SUMMARY_CANONICAL_BYTES], two[UCM_SUMMARY_CANONICAL_BYTES];

    ucm_summary_canonical(a, one);
    ucm_summary_canonical(b, two);
    return memcmp(one, two, sizeof(one)) == 0;
}

Test(summary, the_canonical_form_has_what_changes_bytes_and_nothing_else)
{
    struct ucm_summary_spec one = spec_of(UCM_SUMMARY_SUBMEAN), s = one;
    uint8_t without[UCM_SUMMARY_CANONICAL_BYTES], with[UCM_SUMMARY_CANONICAL_BYTES];

    s.kind = 2;
    s.bits = 64;
    s.seed = 1;
    s.chosen = 7;
    s.rest = UCM_REST_MEAN;
    s.beta = 0.5f;
    s.pairs = UCM_PAIRS_INTERLEAVED;
    s.keep_bytes = 4;
    memset(s.keep, 0xff, 4); /* all pairs */
    s.shape.v_offset = 2;
    s.shape.v_head_dim = 4;
    cr_assert(same(&one, &s));
    s.keep[3] = 0x7f;
    cr_assert_not(same(&one, &s));
    one = s = spec_of(UCM_SUMMARY_STATS);
    s.shape.v_offset += 2;
    cr_assert_not(same(&one, &s));
    one = s = spec_of(UCM_SUMMARY_TOKENS);
    s.kind = 1; /* the mean's */
    cr_assert(same(&one, &s));
    s.rest = UCM_REST_MEAN;
    ucm_summary_canonical(&one, without);
    ucm_summary_canonical(&s, with);
    cr_assert_eq(without[8], 0);
    without[8] = 1;
    cr_assert_arr_eq(without, with, sizeof(with));
}

/* It is stored on disks, so these bytes never change. */
Test(summary, the_canonical_form_is_as_documented)
{
    static const uint8_t head[] = {1,   0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                   128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0};
    static const uint8_t tail[] = {1, 0, 0, 0, 16, 0, 0, 0, 2,   0, 0, 0, 64, 0, 0, 0,
                                   0, 0, 0, 0, 0,  0, 0, 0, 0,   0, 0, 0, 0,  0, 0, 0,
                                   0, 1, 0, 0, 0,  0, 0, 0, 128, 0, 0, 0, 0,  0, 0, 0};
    struct ucm_summary_spec s = spec_of(UCM_SUMMARY_HASH);
    uint8_t got[UCM_SUMMARY_CANONICAL_BYTES];

    ucm_summary_canonical(&s, got);
    cr_assert_arr_eq(got, head, sizeof(head));
    cr_assert_arr_eq(got + sizeof(head) + UCM_SUMMARY_KEEP_MAX, tail, sizeof(tail));
}

Test(summary, methods_have_numbers)
{
    for (uint32_t number = UCM_SUMMARY_MEAN; number <= UCM_SUMMARY_TOKENS; number++)
        cr_assert_eq(ucm_summary_method(number)->number, number);
    cr_assert_null(ucm_summary_method(0));
}

static struct ucm_summary_spec any_spec(void)
{
    struct ucm_summary_spec s = {
        .method = below(8),
        .kind = below(4),
        .run = below(5),
        .pairs = below(3),
        .keep_bytes = below(3) == 0 ? below(9) : 0,
        .bits = 64u << below(4),
        .rope_bits = below(4) == 0 ? below(300) : 0,
        .chosen = below(9),
        .rest = below(4) == 0 ? below(3) : 0,
        .shape = {.dtype = below(5),
                  .tokens = below(9),
                  .kv_heads = below(4),
                  .head_dim = 4 * below(40) + (below(20) == 0),
                  .v_head_dim = 4 * below(20),
                  .rope_dim = below(3) == 0 ? 4 * below(40) : 0,
                  .k_offset = 4 * below(9),
                  .k_token_stride = 4 * below(600),
                  .k_head_stride = 4 * below(200),
                  .v_offset = 4 * below(9),
                  .v_token_stride = 4 * below(300),
                  .v_head_stride = 4 * below(100)},
    };

    for (uint32_t i = 0; i < s.keep_bytes; i++)
        s.keep[i] = (uint8_t)below(256);
    return s;
}

/* A spec that is accepted can be built from exactly the bytes that it names, of any values, so that
 * a sanitizer reports any access past them. The summary of zeros is zero. */
Test(summary, a_spec_that_is_taken_can_be_built)
{
    uint32_t built[UCM_SUMMARY_TOKENS + 2] = {0}; /* the last: tokens with rest */

    for (int round = 0; round < 30000; round++) {
        struct ucm_summary_spec s = any_spec();
        struct ucm_summary_plan plan;
        char why[UCM_SPARSE_WHY] = "";
        uint8_t *layer, *out;

        if (ucm_summary_plan_init(&plan, &s, why) < 0) {
            cr_assert_neq(why[0], '\0');
            continue;
        }
        built[s.method + (s.method == UCM_SUMMARY_TOKENS && s.rest != 0)]++;
        layer = calloc(1, ucm_summary_extent(&s));
        out = malloc(plan.bytes);
        ucm_summary_build(&plan, layer, out);
        for (uint32_t i = 0; i < plan.bytes; i++)
            cr_assert_eq(out[i], 0, "%s", plan.method->name);
        for (uint64_t i = 0; i < ucm_summary_extent(&s); i++)
            layer[i] = (uint8_t)below(256);
        ucm_summary_build(&plan, layer, out);
        free(layer);
        free(out);
    }
    for (uint32_t method = UCM_SUMMARY_MEAN; method <= UCM_SUMMARY_TOKENS + 1; method++)
        cr_assert_gt(built[method], 30u, "%u: %u", method, built[method]);
}
