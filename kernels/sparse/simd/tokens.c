/* tokens: a few keys stand for the block. The first is the one farthest from the mean. Each next
 * one is the farthest from those already chosen. With `rest`, the mean of the others is stored,
 * too. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static bool with_rest(const struct ucm_summary_spec *spec)
{
    return spec->rest != UCM_REST_NONE;
}

static int check_rest(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->rest > UCM_REST_MEAN)
        return sparse_refuse(why, "rest %u is neither 0 (nothing) nor 1 (the mean)", spec->rest);
    if (spec->chosen == spec->shape.tokens)
        return sparse_refuse(why, "chosen is %u, all of the block's tokens; none is left for rest",
                             spec->chosen);
    if (ucm_not_finite(spec->beta) || spec->beta < 0)
        return sparse_refuse(why, "beta is neither 0 (1 / sqrt(head_dim)) nor a positive number");
    return 0;
}

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    uint32_t most = spec->shape.tokens;

    most = most < UCM_SUMMARY_CHOSEN_MAX ? most : UCM_SUMMARY_CHOSEN_MAX;
    if (spec->chosen < 1 || spec->chosen > most)
        return sparse_refuse(why, "chosen is %u; 1 to %u of the block's tokens are allowed",
                             spec->chosen, most);
    return with_rest(spec) ? check_rest(spec, why) : 0;
}

static void plan_rest(struct ucm_summary_plan *plan)
{
    const struct ucm_summary_spec *spec = &plan->spec;

    plan->vectors++;
    plan->vector_bytes = ROWS_BYTES_4(plan->channels);
    plan->metrics = 1u << UCM_METRIC_DOT | 1u << UCM_METRIC_ROUNDED;
    plan->ln_count = sparse_ln(spec->shape.tokens - spec->chosen);
    if (spec->beta == 0)
        plan->spec.beta = 1.0f / ucm_sqrt((float)plan->channels);
}

static void plan_tokens(struct ucm_summary_plan *plan)
{
    plan->vectors = plan->spec.chosen;
    plan->vector_bytes = plan->channels;
    if (with_rest(&plan->spec))
        plan_rest(plan);
    plan->scale[0] = plan->spec.shape.kv_heads * plan->vectors * plan->vector_bytes;
    plan->bytes = plan->scale[0] + 2 * plan->spec.shape.kv_heads * plan->vectors;
}

#define CHOSEN -1.0f /* in place of a distance */

/* The token not chosen yet that is farthest; the lowest of equals. */
static uint32_t farthest(const float *distance, uint32_t n)
{
    float most = CHOSEN;
    uint32_t at = 0;

    for (uint32_t t = 0; t < n; t++) {
        if (distance[t] > most) {
            most = distance[t];
            at = t;
        }
    }
    return at;
}

/* Puts the chosen tokens' vectors. Afterwards chosen tokens have CHOSEN in place of a distance. */
static void put_chosen(const struct ucm_summary_plan *plan, const struct rows *r, float *from,
                       float *distance, uint8_t *data, uint8_t *scale)
{
    bool rest = with_rest(&plan->spec);

    for (uint32_t t = 0; t < r->count; t++)
        distance[t] = ucm_inf();
    rows_distances(r, from, distance);
    for (uint32_t i = 0; i < plan->spec.chosen; i++) {
        uint32_t at = farthest(distance, r->count);

        rows_decode(r, at, from);
        if (rest)
            rows_put_4(from, plan->channels, data, scale);
        else
            rows_put(from, plan->channels, false, data, scale);
        data += plan->vector_bytes;
        scale += 2;
        /* Distances from the mean were for the first token only. */
        for (uint32_t t = 0; i == 0 && t < r->count; t++)
            distance[t] = ucm_inf();
        distance[at] = CHOSEN;
        if (i + 1 < plan->spec.chosen)
            rows_distances(r, from, distance);
    }
}

/* The mean of the tokens that were not chosen. Returns whether it is finite. */
static bool put_rest(const struct ucm_summary_plan *plan, const struct rows *r,
                     const float *distance, uint8_t *data, uint8_t *scale)
{
    uint32_t d = plan->channels, count = r->count - plan->spec.chosen;
    _Alignas(64) float sum[ROW_MAX], row[ROW_MAX] = {0};
    bool first = true;

    for (uint32_t t = 0; t < r->count; t++) {
        if (distance[t] == CHOSEN)
            continue;
        rows_decode(r, t, first ? sum : row);
        for (uint32_t c = 0; !first && c < d; c++)
            sum[c] += row[c];
        first = false;
    }
    rows_divide(sum, d, (float)count);
    if (rows_bad(sum, d))
        return false;
    rows_put_4(sum, d, data, scale);
    return true;
}

static void build_head(const struct ucm_summary_plan *plan, const struct rows *r, uint8_t *data,
                       uint8_t *scale)
{
    uint32_t chosen = plan->spec.chosen, bytes = plan->vector_bytes;
    _Alignas(64) float from[ROW_MAX] = {0};
    float distance[UCM_KV_TOKENS_MAX];
    bool good = rows_mean(r, from);

    if (good)
        put_chosen(plan, r, from, distance, data, scale);
    if (good && with_rest(&plan->spec))
        good = put_rest(plan, r, distance, data + (size_t)chosen * bytes, scale + 2 * chosen);
    if (!good)
        rows_poison(data, plan->vectors * bytes, scale, plan->vectors);
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    uint32_t bytes = plan->vectors * plan->vector_bytes;

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++) {
        struct rows r = rows_of_k(&plan->spec.shape, layer, g);

        build_head(plan, &r, out + g * bytes, out + plan->scale[0] + 2 * g * plan->vectors);
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    memcpy(out, q, plan->channels * sizeof(*out));
}

/* The logarithm of what the block weighs if its other tokens equal their mean. */
static float score_sum(const struct ucm_summary_plan *plan, const float *q, const uint8_t *summary,
                       uint32_t g)
{
    struct ucm_log_sum sum = {-ucm_inf(), 0.0f};
    int8_t row[ROW_MAX];

    for (uint32_t j = 0; j < plan->vectors; j++) {
        uint32_t v = g * plan->vectors + j;
        float s = rows_scale(summary + plan->scale[0] + 2 * v);

        rows_take_4(summary + (size_t)v * plan->vector_bytes, plan->channels, row);
        ucm_log_sum_add(&sum,
                        ucm_rest_score(s, rows_dot_i8(q, row, plan->channels), plan->spec.beta,
                                       j < plan->spec.chosen ? 0.0f : plan->ln_count));
    }
    return ucm_log_sum(&sum);
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *q, const uint8_t *summary, uint32_t g)
{
    if (with_rest(&plan->spec))
        return score_sum(plan, q, summary, g);
    return rows_score_best(plan, metric, q, summary, g);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_tokens) = {
    .number = UCM_SUMMARY_TOKENS,
    .name = "tokens",
    .check = check,
    .plan = plan_tokens,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT | 1u << UCM_METRIC_L2 | 1u << UCM_METRIC_ROUNDED,
};
