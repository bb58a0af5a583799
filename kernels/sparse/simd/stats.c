/* stats: mean and variance of each channel of K, and the mean of V. These give what a block would
 * weigh in attention if its logits were normally distributed, and what it would add to the
 * output. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (ucm_not_finite(spec->beta) || spec->beta < 0)
        return sparse_refuse(why, "beta is neither 0 (1 / sqrt(head_dim)) nor a positive number");
    return 0;
}

static void plan_stats(struct ucm_summary_plan *plan)
{
    const struct ucm_kv_shape *shape = &plan->spec.shape;
    uint32_t heads = shape->kv_heads, d = shape->head_dim;

    plan->array[1] = heads * d;
    plan->array[2] = 2 * heads * d;
    plan->scale[0] = plan->array[2] + heads * shape->v_head_dim;
    plan->scale[1] = plan->scale[0] + 2 * heads;
    plan->scale[2] = plan->scale[1] + 2 * heads;
    plan->bytes = plan->scale[2] + 2 * heads;
    plan->query_floats = 2 * d;
    plan->ln_count = sparse_ln(shape->tokens);
    if (plan->spec.beta == 0)
        plan->spec.beta = 1.0f / ucm_sqrt((float)d);
}

struct moments {
    _Alignas(64) float mean[ROW_MAX], var[ROW_MAX], v[ROW_MAX];
};

static bool measure(const struct ucm_kv_shape *shape, const uint8_t *layer, uint32_t g,
                    struct moments *x)
{
    struct rows k = rows_of_k(shape, layer, g), v = rows_of_v(shape, layer, g);

    if (!rows_mean(&k, x->mean) || rows_bad(x->mean, k.channels))
        return false;
    rows_squares(&k, x->mean, x->var);
    rows_divide(x->var, k.channels, (float)k.count);
    if (rows_bad(x->var, k.channels))
        return false;
    return v.channels == 0 || (rows_mean(&v, x->v) && !rows_bad(x->v, v.channels));
}

static void put_u8(const float *x, uint32_t n, uint8_t *out, uint8_t *scale)
{
    uint32_t bits = ucm_scale(rows_largest(x, n), 255.0f);
    float s = ucm_bf16_decode(bits);

    rows_put_scale(scale, bits);
    if (bits == 0) {
        memset(out, 0, n);
        return;
    }
    for (uint32_t c = 0; c < n; c++)
        out[c] = (uint8_t)ucm_quantise_u8(x[c], s);
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    const struct ucm_kv_shape *shape = &plan->spec.shape;
    uint32_t d = shape->head_dim, vd = shape->v_head_dim;
    struct moments x;

    for (uint32_t g = 0; g < shape->kv_heads; g++) {
        uint8_t *m = out + g * d, *var = m + plan->array[1], *v = out + plan->array[2] + g * vd;
        uint8_t *s[3];
        for (int a = 0; a < 3; a++)
            s[a] = out + plan->scale[a] + 2 * g;
        if (measure(shape, layer, g, &x)) {
            rows_put(x.mean, d, false, m, s[0]);
            put_u8(x.var, d, var, s[1]);
            rows_put(x.v, vd, false, v, s[2]);
        } else {
            rows_poison(m, d, s[0], 1);
            rows_poison(var, d, s[1], 1);
            rows_poison(v, vd, s[2], 1);
        }
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    uint32_t d = plan->channels;

    memcpy(out, q, d * sizeof(*out));
    for (uint32_t c = 0; c < d; c++)
        out[d + c] = q[c] * q[c];
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *q, const uint8_t *summary, uint32_t g)
{
    uint32_t d = plan->channels;
    const uint8_t *m = summary + g * d;
    float s_mean = rows_scale(summary + plan->scale[0] + 2 * g);
    float s_var = rows_scale(summary + plan->scale[1] + 2 * g);

    (void)metric;
    if (ucm_is_nan(s_mean))
        return ucm_inf();
    return ucm_stats_score(s_mean, rows_dot_i8(q, (const int8_t *)m, d), s_var,
                           rows_dot_u8(q + d, m + plan->array[1], d), plan->spec.beta,
                           plan->ln_count);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_stats) = {
    .number = UCM_SUMMARY_STATS,
    .name = "stats",
    .check = check,
    .plan = plan_stats,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT,
};
