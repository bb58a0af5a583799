/* When to stop attending; the certificate never says more than what is covered. */
#include "kernels/sparse/psa.h"

#include "tests/unit/select_rig.h"

#include <criterion/criterion.h>
#include <math.h>

Test(psa, sums_do_not_overflow)
{
    float logits[] = {1000, 999, -1000, 1000};
    struct ucm_weight_sum sum = ucm_weight_of_block(logits, 4), none = ucm_weight_none();

    cr_assert_float_eq(ucm_weight_log(&sum), 1000 + log(2 + exp(-1)), 1e-3);
    cr_assert_eq(ucm_weight_log(&none), -INFINITY);
    ucm_weight_join(&sum, &none);
    cr_assert_eq(ucm_weight_share(&sum, &none), 1.0f);
    cr_assert_eq(ucm_weight_share(&none, &sum), 0.0f);
}

Test(psa, logarithms_are_close)
{
    for (int i = 0; i < 20000; i++) {
        struct ucm_weight_sum sum = {rig_normal() * 20, expf(rig_normal() * 5)};
        double exact = (double)sum.top + log((double)sum.weight);

        cr_assert_float_eq(ucm_weight_log(&sum), exact, 1e-6 * (1 + fabs(exact)));
    }
}

Test(psa, the_share_is_the_quotient_of_the_weights)
{
    for (int i = 0; i < 10000; i++) {
        float a = rig_normal() * 8, b = rig_normal() * 8;
        struct ucm_weight_sum x = ucm_weight_none(), y = ucm_weight_none();

        ucm_weight_add(&x, a, 2);
        ucm_weight_add(&y, b, 3);
        cr_assert_float_eq(ucm_weight_share(&x, &y), 1 / (1 + 1.5 * exp((double)b - (double)a)),
                           2e-6);
    }
}

Test(psa, a_block_that_cannot_be_judged_is_never_covered)
{
    struct ucm_weight_sum covered = ucm_weight_none(), left = ucm_weight_none();

    ucm_weight_add(&covered, 50, 1);
    ucm_weight_add(&left, INFINITY, 1);
    ucm_weight_add(&left, 1, 1);
    cr_assert_eq(ucm_weight_share(&covered, &left), 0.0f);
}

#define BLOCKS 200
#define TOKENS 16

/* Keys in a plane: a block's logits, their bound by the box, and the order of the bounds. */
struct case_ {
    float log_weight[BLOCKS], bound[BLOCKS];
};

static int by_bound(const void *a, const void *b)
{
    const float *x = a, *y = b;

    return x[0] != y[0] ? (x[0] < y[0] ? 1 : -1) : 0;
}

static void make(struct case_ *c)
{
    float pair[BLOCKS][2], q[8];

    for (int i = 0; i < 8; i++)
        q[i] = rig_normal();
    for (int b = 0; b < BLOCKS; b++) {
        float logits[TOKENS] = {0}, middle[8], bound = 0;
        struct ucm_weight_sum sum;

        for (int i = 0; i < 8; i++)
            middle[i] = 2 * rig_normal();
        for (int i = 0; i < 8; i++) {
            float most = -INFINITY;

            for (int t = 0; t < TOKENS; t++) {
                float term = q[i] * (middle[i] + 0.3f * rig_normal());

                logits[t] += term;
                most = fmaxf(most, term);
            }
            bound += most;
        }
        sum = ucm_weight_of_block(logits, TOKENS);
        pair[b][0] = logf(TOKENS) + bound;
        pair[b][1] = ucm_weight_log(&sum);
        cr_assert(pair[b][0] >= pair[b][1] - 1e-4f);
    }
    qsort(pair, BLOCKS, sizeof(pair[0]), by_bound);
    for (int b = 0; b < BLOCKS; b++) {
        c->bound[b] = pair[b][0];
        c->log_weight[b] = pair[b][1];
    }
}

static double covered_by(const struct case_ *c, uint32_t n)
{
    double top = -INFINITY, all = 0, some = 0;

    for (uint32_t b = 0; b < BLOCKS; b++)
        top = fmax(top, (double)c->log_weight[b]);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        double w = exp((double)c->log_weight[b] - top);

        all += w;
        some += b < n ? w : 0;
    }
    return some / all;
}

Test(psa, the_certificate_is_never_above_what_is_covered)
{
    struct ucm_weight_sum suffix[BLOCKS + 1];
    uint32_t stopped = 0;

    for (int round = 0; round < 300; round++) {
        float eps = 0.5f + 0.001f * (float)rig_below(500), share;
        struct case_ c;
        uint32_t n;

        make(&c);
        n = ucm_psa_blocks(UCM_PSA_LEFT, c.log_weight, c.bound, BLOCKS, 1 + rig_below(8), eps,
                           suffix, &share);
        cr_assert_geq(share, eps);
        cr_assert_geq(covered_by(&c, n), (double)share - 1e-5);
        stopped += n < BLOCKS;
    }
    cr_assert_gt(stopped, 150);
}

/* With a perfect ranking what is left weighs at most as much as the lightest that was attended. */
Test(psa, the_rule_holds_where_the_ranking_is_right)
{
    for (int round = 0; round < 300; round++) {
        float pair[BLOCKS][2], share;
        struct case_ c;
        uint32_t n;

        for (int b = 0; b < BLOCKS; b++)
            pair[b][0] = pair[b][1] = 4 * rig_normal();
        qsort(pair, BLOCKS, sizeof(pair[0]), by_bound);
        for (int b = 0; b < BLOCKS; b++)
            c.log_weight[b] = pair[b][1];
        n = ucm_psa_blocks(UCM_PSA_RULE, c.log_weight, NULL, BLOCKS, 4, 0.95f, NULL, &share);
        cr_assert_geq(share, 0.95f);
        cr_assert_geq(covered_by(&c, n), (double)share - 1e-5);
        cr_assert(n % 4 == 0);
    }
}

/* And where it is wrong the rule says more than is covered: the heaviest block comes last. */
Test(psa, the_rule_fails_where_the_ranking_is_wrong)
{
    float share, log_weight[100], left[100];
    struct ucm_weight_sum suffix[101];
    uint32_t n;

    for (int b = 0; b < 100; b++)
        log_weight[b] = b == 99 ? 20.0f : -0.5f * (float)b;
    for (int b = 0; b < 100; b++)
        left[b] = b == 99 ? 21.0f : log_weight[b];
    n = ucm_psa_blocks(UCM_PSA_RULE, log_weight, NULL, 100, 1, 0.95f, NULL, &share);
    cr_assert(n < 100 && share >= 0.95f);
    n = ucm_psa_blocks(UCM_PSA_LEFT, log_weight, left, 100, 1, 0.95f, suffix, &share);
    cr_assert_eq(n, 100);
    cr_assert_eq(share, 1.0f);
}

Test(psa, nothing_to_attend)
{
    float share;

    cr_assert_eq(ucm_psa_blocks(UCM_PSA_RULE, NULL, NULL, 0, 1, 0.9f, NULL, &share), 0);
    cr_assert_eq(share, 1.0f);
}
