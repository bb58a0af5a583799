/* box never scores below the product of a query with any key of its block. test_attend_stop.c tests
 * certificates that rest on this. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/sparse.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define TOKENS 8
#define DIM_MAX 1024

static double uniform(void) /* -1 to 1 */
{
    return (double)below(1u << 31) * 0x1p-30 - 1;
}

static float any_finite(void)
{
    float x;

    do
        x = ucm_f32(below(UINT32_MAX));
    while (!isfinite(x));
    return x;
}

/* Ways to choose a value; a block and its query take one each. */
enum {
    NORMAL,
    ANY_BITS,
    HUGE_ONES,
    TINY,
    DENORMAL,
    OUTLIER,
    CANCELLING,
    INTEGERS,
    ONE_CHANNEL,
    N_WAYS
};

static float value(int way, uint32_t c)
{
    switch (way) {
    case ANY_BITS:
        return any_finite();
    case HUGE_ONES:
        return (float)(uniform() * 3.4e38);
    case TINY:
        return (float)(uniform() * 1e-36);
    case DENORMAL:
        return ucm_f32(below(UINT32_MAX) & 0x8000ffffu);
    case OUTLIER:
        return (float)uniform() * (c % 61 == 7 ? 3000.0f : 1.0f);
    case CANCELLING:
        return (c % 2 ? -1.0f : 1.0f) * (1e6f + (float)uniform());
    case INTEGERS: /* on the grid that quantising makes */
        return (float)((int)below(256) - 128) * 0.0625f;
    case ONE_CHANNEL:
        return c == 3 ? (float)uniform() : 0.0f;
    default:
        return (float)(uniform() + uniform() + uniform());
    }
}

static struct ucm_summary_plan plan;

static void plan_box(uint32_t dim, uint32_t tokens)
{
    struct ucm_summary_spec spec = {
        .method = UCM_SUMMARY_BOX,
        .shape = {.tokens = tokens, .kv_heads = 1, .head_dim = dim, .k_token_stride = 4 * dim},
    };
    char why[UCM_SPARSE_WHY] = "";

    cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
}

static float box_score(const float *k, const float *q)
{
    static float query[DIM_MAX + 16];
    static _Alignas(8) uint8_t summary[2 * DIM_MAX + 4];

    ucm_summary_build(&plan, k, summary);
    ucm_summary_query(&plan, q, query);
    return ucm_summary_score(&plan, UCM_METRIC_DOT, query, summary, 0);
}

static double product(const float *q, const float *k, uint32_t dim)
{
    double sum = 0;

    for (uint32_t c = 0; c < dim; c++)
        sum += (double)q[c] * (double)k[c];
    return sum;
}

static void bounds_all(uint32_t dim, int way_k, int way_q)
{
    static float k[TOKENS * DIM_MAX], q[DIM_MAX];
    float score;

    for (uint32_t i = 0; i < TOKENS * dim; i++)
        k[i] = value(way_k, i % dim);
    for (uint32_t c = 0; c < dim; c++)
        q[c] = value(way_q, c);
    score = box_score(k, q);
    for (uint32_t t = 0; t < TOKENS; t++)
        cr_assert_geq((double)score, product(q, k + t * dim, dim), "dim %u, ways %d %d, token %u",
                      dim, way_k, way_q, t);
}

Test(summary_bound, box_is_never_below_a_product)
{
    static const uint32_t dims[] = {4, 64, 80, 128, 576, 1024};

    for (int isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit((enum ucm_isa)isa);
        for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
            plan_box(dims[i], TOKENS);
            for (int ways = 0; ways < N_WAYS * N_WAYS; ways++)
                for (int round = 0; round < (dims[i] <= 128 ? 12 : 3); round++)
                    bounds_all(dims[i], ways / N_WAYS, ways % N_WAYS);
        }
    }
}

/* All keys equal, and a query along them: the bound is nearly reached, so any rounding shows. */
Test(summary_bound, box_is_not_below_a_product_that_reaches_it)
{
    static float k[TOKENS * DIM_MAX], q[DIM_MAX];

    plan_box(DIM_MAX, TOKENS);
    for (int round = 0; round < 300; round++) {
        float scale = ldexpf(1.0f, (int)below(200) - 100);

        for (uint32_t c = 0; c < DIM_MAX; c++) {
            float x = round % 3 == 0 ? 127.0f : (float)(1 + below(127));

            for (uint32_t t = 0; t < TOKENS; t++)
                k[t * DIM_MAX + c] = x * scale;
            q[c] = (1.0f + (float)below(1u << 23) * 0x1p-23f) / scale;
        }
        k[0] = 127.0f * scale;
        cr_assert_geq((double)box_score(k, q), product(q, k, DIM_MAX));
    }
}

/* Quantised bounds lie outside the value, and as near as possible. The scores' slack would hide it
 * if they did not. */
Test(summary_bound, quantised_bounds_are_outside)
{
    for (int round = 0; round < 300000; round++) {
        float a = fabsf(any_finite()), s = ucm_bf16_decode(ucm_scale(a, 127.0f));
        float x = round % 2 ? (float)uniform() * a : (float)((int)below(128) - 64) * s;
        float lo, hi;

        if (a == 0 || fabsf(x) > a)
            continue;
        if (round % 3 == 0) /* a neighbour of a multiple of s, on either side */
            x = fminf(nextafterf(x, below(2) ? INFINITY : -INFINITY), a);
        lo = ucm_box_low(x, s);
        hi = ucm_box_high(x, s);
        cr_assert((double)lo * (double)s <= (double)x && (double)hi * (double)s >= (double)x);
        cr_assert((lo + 1.0) * (double)s > (double)x && (hi - 1.0) * (double)s < (double)x);
        cr_assert(lo >= -128 && hi <= 127, "%g %g", lo, hi);
    }
}
