/* tokens: a few keys stand for the block: the one farthest from the mean, then each time the one
 * farthest from those already chosen. */
#include "kernels/sparse/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static int check(const struct ucm_digest_spec *spec, char why[UCM_SPARSE_WHY])
{
    uint32_t most = spec->shape.tokens;

    most = most < UCM_DIGEST_CHOSEN_MAX ? most : UCM_DIGEST_CHOSEN_MAX;
    if (spec->chosen < 1 || spec->chosen > most)
        return sparse_refuse(why, "chosen is %u; 1 to %u of the block's tokens are allowed",
                             spec->chosen, most);
    return 0;
}

static void plan_tokens(struct ucm_digest_plan *plan)
{
    uint32_t vectors = plan->spec.shape.kv_heads * plan->spec.chosen;

    plan->vectors = plan->spec.chosen;
    plan->scale[0] = vectors * plan->channels;
    plan->bytes = plan->scale[0] + 2 * vectors;
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

static void build_head(const struct ucm_digest_plan *plan, const struct rows *r, uint8_t *data,
                       uint8_t *scale)
{
    uint32_t d = plan->channels, at;
    _Alignas(64) float from[ROW_MAX] = {0};
    float distance[UCM_KV_TOKENS_MAX];

    if (!rows_mean(r, from)) {
        rows_poison(data, plan->vectors * d, scale, plan->vectors);
        return;
    }
    for (uint32_t t = 0; t < r->count; t++)
        distance[t] = ucm_inf();
    rows_distances(r, from, distance);
    for (uint32_t i = 0;;) {
        at = farthest(distance, r->count);
        rows_decode(r, at, from);
        rows_put(from, d, false, data + i * d, scale + 2 * i);
        if (++i == plan->vectors)
            return;
        /* Distances from the mean chose the first token only. */
        for (uint32_t t = 0; i == 1 && t < r->count; t++)
            distance[t] = ucm_inf();
        distance[at] = CHOSEN;
        rows_distances(r, from, distance);
    }
}

static void build(const struct ucm_digest_plan *plan, const uint8_t *shard, uint8_t *out)
{
    uint32_t bytes = plan->vectors * plan->channels;

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++) {
        struct rows r = rows_of_k(&plan->spec.shape, shard, g);

        build_head(plan, &r, out + g * bytes, out + plan->scale[0] + 2 * g * plan->vectors);
    }
}

static void query(const struct ucm_digest_plan *plan, const float *q, float *out)
{
    memcpy(out, q, plan->channels * sizeof(*out));
}

static float score(const struct ucm_digest_plan *plan, enum ucm_score_metric metric, const float *q,
                   const uint8_t *digest, uint32_t g)
{
    return rows_score_best(plan, metric, q, digest, g);
}

const struct ucm_digest_method UCM_ISA_NAME(sparse_tokens) = {
    .number = UCM_DIGEST_TOKENS,
    .name = "tokens",
    .check = check,
    .plan = plan_tokens,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT | 1u << UCM_METRIC_L2,
};
