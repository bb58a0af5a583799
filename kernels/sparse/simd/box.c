/* box: the smallest and the largest value of each channel, rounded outward. So no key of the block
 * has a larger product with a query than the box's score. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    (void)spec;
    (void)why;
    return 0;
}

static void plan_box(struct ucm_summary_plan *plan)
{
    plan->array[1] = plan->spec.shape.kv_heads * plan->channels;
    plan->scale[0] = 2 * plan->array[1];
    plan->bytes = plan->scale[0] + 2 * plan->spec.shape.kv_heads;
    plan->query_floats = plan->channels + 1;
}

static void put(const float *low, const float *high, uint32_t n, int8_t *lo, int8_t *hi,
                uint8_t *scale)
{
    uint32_t bits = ucm_scale(ucm_max(rows_largest(low, n), rows_largest(high, n)), 127.0f);
    float s = ucm_bf16_decode(bits);

    rows_put_scale(scale, bits);
    if (bits == 0) {
        memset(lo, 0, n);
        memset(hi, 0, n);
        return;
    }
    for (uint32_t c = 0; c < n; c++)
        lo[c] = (int8_t)ucm_box_low(low[c], s);
    for (uint32_t c = 0; c < n; c++)
        hi[c] = (int8_t)ucm_box_high(high[c], s);
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    uint32_t d = plan->channels;
    _Alignas(64) float low[ROW_MAX], high[ROW_MAX];

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++) {
        struct rows r = rows_of_k(&plan->spec.shape, layer, g);
        uint8_t *lo = out + g * d, *hi = lo + plan->array[1];
        uint8_t *scale = out + plan->scale[0] + 2 * g;

        if (rows_bounds(&r, low, high)) {
            put(low, high, d, (int8_t *)lo, (int8_t *)hi, scale);
        } else {
            rows_poison(lo, d, scale, 1);
            memset(hi, 0, d);
        }
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    uint32_t d = plan->channels;

    memcpy(out, q, d * sizeof(*out));
#define ADD(c, acc) ((acc) + ucm_abs(q[c]))
    ROWS_SUM(out[d], d, ADD);
#undef ADD
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *q, const uint8_t *summary, uint32_t g)
{
    uint32_t d = plan->channels;
    const int8_t *lo = (const int8_t *)summary + g * d, *hi = lo + plan->array[1];
    float dot;

    (void)metric;
#define ADD(c, acc) ucm_fma(q[c], (float)(q[c] >= 0 ? hi[c] : lo[c]), acc)
    ROWS_SUM(dot, d, ADD);
#undef ADD
    return ucm_box_score(rows_scale(summary + plan->scale[0] + 2 * g), dot, q[d]);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_box) = {
    .number = UCM_SUMMARY_BOX,
    .name = "box",
    .check = check,
    .plan = plan_box,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT,
};
