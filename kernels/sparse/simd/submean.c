/* submean: a mean for each run of tokens, of the channels that the namespace keeps. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static bool kept(const struct ucm_summary_spec *spec, uint32_t channel)
{
    uint32_t pair =
        spec->pairs == UCM_PAIRS_NEOX ? channel % (spec->shape.head_dim / 2) : channel / 2;

    return spec->keep_bytes == 0 || (spec->keep[pair / 8] >> pair % 8 & 1) != 0;
}

static int check_keep(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    uint32_t n = spec->shape.head_dim / 2, bytes = (n + 7) / 8, any = 0;

    if (spec->pairs > UCM_PAIRS_INTERLEAVED)
        return sparse_refuse(why, "pairs %u is neither 0 (neox) nor 1 (interleaved)", spec->pairs);
    if (spec->keep_bytes != bytes)
        return sparse_refuse(why, "keep has %u bytes; %u are needed, or none", spec->keep_bytes,
                             bytes);
    if (n % 8 != 0 && spec->keep[bytes - 1] >> n % 8 != 0)
        return sparse_refuse(why, "keep names a pair after the last, %u", n - 1);
    for (uint32_t i = 0; i < bytes; i++)
        any |= spec->keep[i];
    return any != 0 ? 0 : sparse_refuse(why, "keep keeps no pair of channels");
}

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->run < 1 || spec->shape.tokens % spec->run != 0)
        return sparse_refuse(why, "run %u does not divide the block's %u tokens", spec->run,
                             spec->shape.tokens);
    return spec->keep_bytes == 0 ? 0 : check_keep(spec, why);
}

static void plan_submean(struct ucm_summary_plan *plan)
{
    const struct ucm_summary_spec *spec = &plan->spec;
    uint32_t vectors;

    plan->channels = 0;
    for (uint32_t c = 0; c < spec->shape.head_dim; c++)
        if (kept(spec, c))
            plan->channel[plan->channels++] = (uint16_t)c;
    plan->vectors = spec->shape.tokens / spec->run;
    plan->query_floats = plan->channels;
    vectors = spec->shape.kv_heads * plan->vectors;
    plan->scale[0] = vectors * plan->channels;
    plan->bytes = plan->scale[0] + 2 * vectors;
}

static void gather(const struct ucm_summary_plan *plan, const float *x, float *out)
{
    if (plan->channels == plan->spec.shape.head_dim) {
        memcpy(out, x, plan->channels * sizeof(*out));
        return;
    }
    for (uint32_t i = 0; i < plan->channels; i++)
        out[i] = x[plan->channel[i]];
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    uint32_t n = plan->channels, vectors = plan->vectors;
    _Alignas(64) float x[ROW_MAX], few[ROW_MAX];

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++) {
        uint8_t *data = out + g * vectors * n, *scale = out + plan->scale[0] + 2 * g * vectors;
        struct rows r = rows_of_k(&plan->spec.shape, layer, g);
        bool good = true;

        r.count = plan->spec.run;
        for (uint32_t j = 0; j < vectors && good; j++, r.at += r.count * r.stride) {
            good = rows_mean(&r, x);
            gather(plan, x, few);
            good = good && !rows_bad(few, n);
            rows_put(few, n, !good, data + j * n, scale + 2 * j);
        }
        if (!good)
            rows_poison(data, vectors * n, scale, vectors);
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    gather(plan, q, out);
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *q, const uint8_t *summary, uint32_t g)
{
    return rows_score_best(plan, metric, q, summary, g);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_submean) = {
    .number = UCM_SUMMARY_SUBMEAN,
    .name = "submean",
    .check = check,
    .plan = plan_submean,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT | 1u << UCM_METRIC_L2 | 1u << UCM_METRIC_ROUNDED,
};
