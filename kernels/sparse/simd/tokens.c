/* tokens: a few keys stand for the block: the one farthest from the mean, then each time the one
 * farthest from those already chosen. */
#include "kernels/sparse/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static int check(const struct ucm_digest_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->chosen < 1 || spec->chosen > spec->shape.tokens)
        return sparse_refuse(why, "chosen is %u; 1 to the block's %u tokens are allowed",
                             spec->chosen, spec->shape.tokens);
    return 0;
}

static void plan_tokens(struct ucm_digest_plan *plan)
{
    uint32_t vectors = plan->spec.shape.kv_heads * plan->spec.chosen;

    plan->vectors = plan->spec.chosen;
    plan->scale[0] = vectors * plan->channels;
    plan->bytes = plan->scale[0] + 2 * vectors;
}

static bool mean_of(const struct ucm_kv_shape *shape, const uint8_t *shard, uint32_t g, float *x)
{
    uint32_t d = shape->head_dim;
    float row[ROW_MAX];
    bool bad;

    rows_k(shape, shard, g, 0, x);
    bad = rows_bad(x, d);
    for (uint32_t t = 1; t < shape->tokens; t++) {
        rows_k(shape, shard, g, t, row);
        bad |= rows_bad(row, d);
        for (uint32_t c = 0; c < d; c++)
            x[c] += row[c];
    }
    for (uint32_t c = 0; c < d; c++)
        x[c] /= (float)shape->tokens;
    return !bad;
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

/* Lowers each token's distance to that from one more key. */
static void measure(const struct ucm_kv_shape *shape, const uint8_t *shard, uint32_t g,
                    const float *from, float *distance)
{
    float row[ROW_MAX];

    for (uint32_t t = 0; t < shape->tokens; t++) {
        rows_k(shape, shard, g, t, row);
        distance[t] = ucm_min(rows_distance(row, from, shape->head_dim), distance[t]);
    }
}

static void build_head(const struct ucm_digest_plan *plan, const uint8_t *shard, uint32_t g,
                       uint8_t *data, uint8_t *scale)
{
    const struct ucm_kv_shape *shape = &plan->spec.shape;
    uint32_t d = plan->channels, at;
    float from[ROW_MAX], distance[UCM_KV_TOKENS_MAX];

    for (uint32_t t = 0; t < shape->tokens; t++)
        distance[t] = ucm_inf();
    if (!mean_of(shape, shard, g, from)) {
        rows_poison(data, plan->vectors * d, scale, plan->vectors);
        return;
    }
    measure(shape, shard, g, from, distance);
    for (uint32_t i = 0;;) {
        at = farthest(distance, shape->tokens);
        rows_k(shape, shard, g, at, from);
        rows_put(from, d, false, data + i * d, scale + 2 * i);
        if (++i == plan->vectors)
            return;
        /* Distances from the mean chose the first token only. */
        for (uint32_t t = 0; i == 1 && t < shape->tokens; t++)
            distance[t] = ucm_inf();
        distance[at] = CHOSEN;
        measure(shape, shard, g, from, distance);
    }
}

static void build(const struct ucm_digest_plan *plan, const uint8_t *shard, uint8_t *out)
{
    uint32_t bytes = plan->vectors * plan->channels;

    for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++)
        build_head(plan, shard, g, out + g * bytes, out + plan->scale[0] + 2 * g * plan->vectors);
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
