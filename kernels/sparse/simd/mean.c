/* mean: one vector a head: the mean of its keys, their largest values, or the normalised mean. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->kind > UCM_MEAN_NORMALISED)
        return sparse_refuse(why, "kind %u is none of 0 (mean), 1 (max), 2 (normalised mean)",
                             spec->kind);
    return 0;
}

static void plan_mean(struct ucm_summary_plan *plan)
{
    plan->scale[0] = plan->spec.shape.kv_heads * plan->channels;
    plan->bytes = plan->scale[0] + 2 * plan->spec.shape.kv_heads;
}

static bool reduce(const struct ucm_summary_spec *spec, const struct rows *r, float *x)
{
    _Alignas(64) float low[ROW_MAX];
    float length;
    bool good;

    if (spec->kind == UCM_MEAN_MAX)
        return rows_bounds(r, low, x);
    good = rows_mean(r, x);
    if (spec->kind == UCM_MEAN_NORMALISED) {
        length = ucm_sqrt(rows_dot(x, x, r->channels));
        good = good && !ucm_not_finite(length);
        if (length > 0)
            rows_divide(x, r->channels, length);
    }
    return good;
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    uint32_t d = plan->channels;
    _Alignas(64) float x[ROW_MAX];

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++) {
        struct rows r = rows_of_k(&plan->spec.shape, layer, g);
        bool good = reduce(&plan->spec, &r, x);

        rows_put(x, d, !good, out + g * d, out + plan->scale[0] + 2 * g);
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    memcpy(out, q, plan->channels * sizeof(*out));
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *q, const uint8_t *summary, uint32_t g)
{
    uint32_t d = plan->channels;

    return rows_score(metric, q, (const int8_t *)summary + g * d,
                      rows_scale(summary + plan->scale[0] + 2 * g), d);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_mean) = {
    .number = UCM_SUMMARY_MEAN,
    .name = "mean",
    .check = check,
    .plan = plan_mean,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT | 1u << UCM_METRIC_L2 | 1u << UCM_METRIC_ROUNDED,
};
