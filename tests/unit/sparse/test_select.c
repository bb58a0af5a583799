/* Scores: every form of an instruction set gives the reference's bits, for every method, metric and
 * reduce, however the blocks are split among threads. The reference is tested against numpy by
 * tests/integration/test_select_numpy.py. */
#include "kernels/sparse/select.h"

#include "tests/unit/sparse/select_rig.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>

static void expect_equal(const struct rig *r, const float *a, const float *b, const char *what)
{
    for (size_t i = 0; i < rig_scores(r); i++)
        cr_assert(memcmp(&a[i], &b[i], sizeof(a[i])) == 0,
                  "%s: %s, metric %u, reduce %u, heads %u: score %zu is %a, the reference has %a",
                  what, r->plan.method->name, r->spec.metric, r->spec.reduce, r->spec.heads, i,
                  (double)b[i], (double)a[i]);
}

static void compare_forms(const struct rig *r)
{
    float *reference = rig_score(r, UCM_ISA_BASE, 0);

    for (size_t i = 0; i < rig_scores(r); i++)
        cr_assert_not(isnan(reference[i]));
    for (enum ucm_isa isa = UCM_ISA_AVX2; isa < UCM_ISA_COUNT; isa++) {
        float *scores = rig_score(r, isa, below(r->n + 1));

        expect_equal(r, reference, scores, isa == UCM_ISA_AVX2 ? "avx2" : "avx512");
        free(scores);
    }
    free(reference);
}

/* Every metric, reduce and way of joining heads. */
static void compare_modes(const struct ucm_summary_spec *spec, uint32_t rows, uint32_t group,
                          uint32_t n, bool hard)
{
    struct ucm_summary_plan plan;
    char why[UCM_SPARSE_WHY];

    cr_assert_eq(ucm_summary_plan_init(&plan, spec, why), 0, "%s", why);
    for (uint32_t mode = 0; mode < 3 * 3 * 3; mode++) {
        struct ucm_score_spec score = {.metric = mode % 3,
                                       .reduce = mode / 3 % 3,
                                       .heads = mode / 9,
                                       .rows = rows,
                                       .q_heads = group * spec->shape.kv_heads};
        struct rig r;

        if ((plan.metrics >> score.metric & 1) == 0)
            continue;
        rig_init(&r, spec, &score, n, hard);
        compare_forms(&r);
        rig_close(&r);
    }
}

static void compare_method(uint32_t method)
{
    for (int hard = 0; hard < 2; hard++) {
        struct ucm_summary_spec plain = rig_spec(method, 16, 2, 128);
        struct ucm_summary_spec odd = rig_spec(method, 12, 3, 80);
        struct ucm_summary_spec small = rig_spec(method, 4, 1, 4);
        struct ucm_summary_spec latent = rig_spec(method, 8, 1, 576);

        latent.shape.rope_dim = 64;
        latent.rope_bits = 64;
        compare_modes(&plain, 1, 4, 37, hard);
        compare_modes(&odd, 2, 3, 21, hard);
        if (method != UCM_SUMMARY_HASH) /* which needs more channels */
            compare_modes(&small, 1, 1, 16, hard);
        compare_modes(&latent, 1, 9, 33, hard);
    }
}

Test(select, forms_of_every_method_are_equal)
{
    for (uint32_t method = UCM_SUMMARY_MEAN; method <= UCM_SUMMARY_TOKENS; method++)
        compare_method(method);
}

Test(select, forms_of_pruned_submean_are_equal)
{
    struct ucm_summary_spec pruned = rig_spec(UCM_SUMMARY_SUBMEAN, 16, 2, 96);

    pruned.keep_bytes = 96 / 16;
    for (uint32_t i = 0; i < pruned.keep_bytes; i++)
        pruned.keep[i] = (uint8_t)(i == 0 ? 0xff : 0x15);
    compare_modes(&pruned, 3, 2, 40, false);
    compare_modes(&pruned, 3, 2, 40, true);
}

Test(select, forms_of_hash_are_equal)
{
    for (uint32_t bits = 64; bits <= 256; bits *= 2) {
        struct ucm_summary_spec spec = rig_spec(UCM_SUMMARY_HASH, 16, 2, 128);
        struct ucm_summary_spec odd = rig_spec(UCM_SUMMARY_HASH, 13, 2, 64);

        spec.bits = odd.bits = bits;
        compare_modes(&spec, 1, 4, 37, true);
        compare_modes(&odd, 1, 5, 19, false);
    }
}

Test(select, forms_of_tokens_with_rest_are_equal)
{
    static const uint32_t dims[] = {4, 32, 36, 64, 76, 128, 132};

    for (size_t i = 0; i < sizeof(dims) / sizeof(*dims); i++) {
        struct ucm_summary_spec spec = rig_spec(UCM_SUMMARY_TOKENS, 16, 1 + i % 3, dims[i]);

        spec.rest = UCM_REST_MEAN;
        spec.chosen = i == 0 ? 15 : 1 + (uint32_t)i;
        compare_modes(&spec, 1 + i % 2, 1 + (uint32_t)i, 37, i % 2 == 0);
        compare_modes(&spec, 1, 4, 19, i % 2 != 0);
    }
}

/* q in some magnitudes, some of it much larger, or tiny. */
static void odd_query(float *q, uint32_t d, uint32_t kind)
{
    for (uint32_t c = 0; c < d; c++) {
        q[c] = ldexpf(rig_normal(), (int)below(kind % 5 * 8 + 1) - (int)(kind % 3 * 30));
        if (kind % 7 == 0 && below(10) == 0)
            q[c] = 0;
        if (kind % 11 == 0)
            q[c] = 1;
    }
}

static float lowest_bit(float x)
{
    int e;
    long bits = lrintf(ldexpf(frexpf(x, &e), 24));

    return x == 0 ? INFINITY : ldexpf((float)(bits & -bits), e - 24);
}

/* The largest sum of values of up to 2^top is exact, and so is each partial sum. */
Test(select, sums_of_rounded_queries_are_exact_in_any_order)
{
    for (uint32_t i = 0; i < 400; i++) {
        uint32_t d = 4 * (1 + below(256)), rest = i % 2, top = rest ? 3 : 7;
        struct ucm_summary_spec spec =
            rig_spec(rest ? UCM_SUMMARY_TOKENS : UCM_SUMMARY_MEAN, 4, 1, d);
        float q[1024], rounded[1024], step = INFINITY, most = 0;
        struct ucm_summary_plan plan;
        char why[UCM_SPARSE_WHY];
        double sum = 0;

        spec.rest = rest ? UCM_REST_MEAN : UCM_REST_NONE;
        spec.chosen = 1;
        cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
        odd_query(q, d, i);
        ucm_summary_round(&plan, q, rounded);
        for (uint32_t c = 0; c < d; c++) {
            most = fmaxf(most, fabsf(q[c]));
            sum += fabs((double)rounded[c]);
            step = fminf(step, lowest_bit(rounded[c]));
        }
        cr_assert(sum == 0 || sum * (1 << top) <= step * 0x1p24, "%u channels, kind %u", d, i);
        for (uint32_t c = 0; c < d; c++) /* 7 bits, and with few channels 14 */
            cr_assert_leq(fabsf(rounded[c] - q[c]), most * (d <= 128 ? 0x1p-10f : 0x1p-7f));
    }
}

Test(select, a_query_that_is_no_number_rounds_to_none)
{
    struct ucm_summary_spec spec = rig_spec(UCM_SUMMARY_MEAN, 4, 1, 4);
    const float bad[] = {NAN, INFINITY, -INFINITY, 0x1p100f};
    struct ucm_summary_plan plan;
    char why[UCM_SPARSE_WHY];
    float zero[4] = {0};

    cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        float q[4] = {1, 2, bad[i], 3};

        ucm_summary_round(&plan, q, q);
        for (int c = 0; c < 4; c++)
            cr_assert(isnan(q[c]));
    }
    ucm_summary_round(&plan, zero, zero);
    cr_assert_eq(zero[0], 0);
}

Test(select, blocks_at_a_stride_score_as_those_that_are_listed)
{
    struct ucm_summary_spec spec = rig_spec(UCM_SUMMARY_MEAN, 16, 2, 64);
    struct ucm_score_spec score = {.rows = 1, .q_heads = 4};
    struct ucm_score_blocks blocks = {.stride = 4096, .offset = 128, .n = 50};
    struct ucm_score_job job;
    struct rig r;
    float *listed, scores[2 * 50];
    uint8_t *base = malloc(50 * 4096), *scratch;

    rig_init(&r, &spec, &score, 50, false);
    listed = rig_score(&r, UCM_ISA_COUNT - 1, 0);
    for (uint32_t b = 0; b < 50; b++)
        memcpy(base + b * 4096 + 128, r.at[b], r.plan.bytes);
    blocks.base = base;
    for (enum ucm_isa isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit(isa);
        scratch = aligned_alloc(64, ucm_score_scratch_bytes(&r.plan, &score, 50));
        ucm_score_begin(&job, &r.plan, &score, &blocks, r.q, scratch, scores);
        ucm_score_all(&job);
        expect_equal(&r, listed, scores, "stride");
        free(scratch);
    }
    free(base);
    free(listed);
    rig_close(&r);
}

/* As many as are scored at once, between others and at the end. */
Test(select, many_blocks_in_a_row_without_a_summary)
{
    for (enum ucm_isa isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        struct ucm_summary_spec spec = rig_spec(UCM_SUMMARY_BOX, 16, 2, 32);
        struct ucm_score_spec score = {.rows = 1, .q_heads = 4};
        struct rig r;
        float *scores;

        rig_init(&r, &spec, &score, 128, false);
        for (uint32_t b = 0; b < r.n; b++)
            if (b < 32 || (b >= 64 && b < 96)) {
                memset(r.at[b] + r.plan.scale[0], 0x3c, 4);
            } else {
                free(r.at[b]);
                r.at[b] = NULL;
            }
        scores = rig_score(&r, isa, 0);
        for (uint32_t b = 0; b < r.n; b++)
            cr_assert_eq(isinf(scores[b]) != 0, r.at[b] == NULL);
        free(scores);
        rig_close(&r);
    }
}

static void refused(const struct ucm_summary_plan *plan, struct ucm_score_spec spec,
                    const char *word)
{
    char why[UCM_SPARSE_WHY] = "";

    cr_assert_eq(ucm_score_check(plan, &spec, why), -EINVAL);
    cr_assert_not_null(strstr(why, word), "\"%s\" says nothing of %s", why, word);
}

Test(select, wrong_specs_are_refused_with_a_sentence)
{
    struct ucm_summary_spec summary = rig_spec(UCM_SUMMARY_BOX, 16, 8, 128);
    struct ucm_score_spec good = {.rows = 1, .q_heads = 32}, bad;
    struct ucm_summary_plan plan;
    char why[UCM_SPARSE_WHY];

    cr_assert_eq(ucm_summary_plan_init(&plan, &summary, why), 0);
    cr_assert_eq(ucm_score_check(&plan, &good, why), 0);
    refused(&plan, (bad = good, bad.metric = UCM_METRIC_L2, bad), "metric");
    refused(&plan, (bad = good, bad.metric = 99, bad), "metric");
    refused(&plan, (bad = good, bad.reduce = 3, bad), "reduce");
    refused(&plan, (bad = good, bad.heads = 3, bad), "heads");
    refused(&plan, (bad = good, bad.rows = 0, bad), "rows");
    refused(&plan, (bad = good, bad.rows = 65, bad), "rows");
    refused(&plan, (bad = good, bad.q_heads = 0, bad), "q_heads");
    refused(&plan, (bad = good, bad.q_heads = 12, bad), "q_heads");
    refused(&plan, (bad = good, bad.q_heads = 8 * 1025, bad), "q_heads");
    refused(&plan, (bad = good, bad.beta = -1, bad), "beta");
    refused(&plan, (bad = good, bad.beta = NAN, bad), "beta");
    refused(&plan, (bad = good, bad.beta = INFINITY, bad), "beta");
}
