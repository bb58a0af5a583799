/* Jobs: what a score needs, its steps, and which form of simd/score.c runs them. */
#include "kernels/sparse/select.h"

#include "kernels/simd/isa.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/score_ops.h"
#include "kernels/sparse/spec.h"

#include <string.h>

#define ALIGN_FLOATS 16u /* 64 bytes */

enum step { STEP_RANGE = 0, STEP_SOFTMAX = 1, STEP_SUM = 2 };

const struct ucm_score_ops *score_ops(void)
{
    switch (ucm_isa()) {
#ifdef UCM_ISA_X86
    case UCM_ISA_AVX512:
        return &score_ops_avx512;
    case UCM_ISA_AVX2:
        return &score_ops_avx2;
#endif
    default:
        return &score_ops_base;
    }
}

int ucm_score_check(const struct ucm_summary_plan *plan, const struct ucm_score_spec *spec,
                    char why[UCM_SPARSE_WHY])
{
    uint32_t kv_heads = plan->spec.shape.kv_heads;

    if (spec->metric > UCM_METRIC_ROUNDED || (plan->metrics >> spec->metric & 1) == 0)
        return sparse_refuse(why, "metric %u is not defined for %s summaries", spec->metric,
                             plan->method->name);
    if (spec->reduce > UCM_REDUCE_SOFTMAX)
        return sparse_refuse(why, "reduce %u is none of 0 (max), 1 (mean), 2 (softmax)",
                             spec->reduce);
    if (spec->heads > UCM_HEADS_MAX)
        return sparse_refuse(why, "heads %u is none of 0 (each), 1 (sum), 2 (max)", spec->heads);
    if (spec->rows < 1 || spec->rows > UCM_SCORE_ROWS_MAX)
        return sparse_refuse(why, "rows is %u; 1 to %u are allowed", spec->rows,
                             UCM_SCORE_ROWS_MAX);
    if (spec->q_heads < kv_heads || spec->q_heads % kv_heads != 0 ||
        spec->q_heads / kv_heads > UCM_SCORE_GROUP_MAX)
        return sparse_refuse(why,
                             "q_heads is %u; multiples of the %u KV heads up to %u are allowed",
                             spec->q_heads, kv_heads, kv_heads * UCM_SCORE_GROUP_MAX);
    if (!(spec->beta >= 0) || ucm_not_finite(spec->beta))
        return sparse_refuse(why, "beta is %g; it must be finite and not negative",
                             (double)spec->beta);
    return 0;
}

static uint32_t query_heads(const struct ucm_score_spec *spec)
{
    return spec->rows * spec->q_heads;
}

static size_t raw_floats(const struct ucm_score_spec *spec, uint32_t n)
{
    if (spec->reduce != UCM_REDUCE_SOFTMAX)
        return 0;
    return ((size_t)n + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

size_t ucm_score_scratch_bytes(const struct ucm_summary_plan *plan,
                               const struct ucm_score_spec *spec, uint32_t n)
{
    size_t list = score_ops()->query_floats(plan) + raw_floats(spec, n);

    return query_heads(spec) * list * sizeof(float);
}

float ucm_score_beta(const struct ucm_summary_spec *summary, float given)
{
    if (given != 0)
        return given;
    if (summary->method == UCM_SUMMARY_STATS ||
        (summary->method == UCM_SUMMARY_TOKENS && summary->rest != UCM_REST_NONE))
        return 1.0f; /* it is in the score */
    return 1.0f / ucm_sqrt((float)summary->shape.head_dim);
}

static uint32_t scored_channel(const struct ucm_summary_plan *plan, uint32_t i)
{
    return plan->spec.method == UCM_SUMMARY_SUBMEAN ? plan->channel[i] : i;
}

void ucm_summary_round(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    uint32_t largest = 0, units = 0, n = plan->channels, top = 7;
    float step;
    int32_t e;

    if (plan->spec.method == UCM_SUMMARY_TOKENS && plan->spec.rest != UCM_REST_NONE)
        top = 3;
    if (out != q)
        memcpy(out, q, plan->spec.shape.head_dim * sizeof(*out));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = ucm_f32_bits(q[scored_channel(plan, i)]) & 0x7fffffffu;

        largest = bits > largest ? bits : largest;
    }
    if (largest >= UCM_GRID_TOP) {
        for (uint32_t i = 0; i < n; i++)
            out[scored_channel(plan, i)] = ucm_f32(0x7fc00000u);
        return;
    }
    e = ucm_grid_first(largest);
    for (uint32_t i = 0; i < n; i++)
        units += (uint32_t)ucm_rint(ucm_abs(q[scored_channel(plan, i)]) * ucm_power(-e));
    e += (int32_t)ucm_grid_coarser(units, n, top);
    step = ucm_power(e);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = scored_channel(plan, i);

        out[c] = ucm_rint(q[c] * ucm_power(-e)) * step;
    }
}

/* Puts queries in the order of KV heads, so that those of one lie together. */
static void prepare_queries(struct ucm_score_job *job, const float *q)
{
    uint32_t kv_heads = job->plan->spec.shape.kv_heads, of_head = job->spec.q_heads / kv_heads;
    uint32_t d = job->plan->spec.shape.head_dim;
    float rounded[UCM_KV_HEAD_DIM_MAX];

    for (uint32_t g = 0; g < kv_heads; g++)
        for (uint32_t row = 0; row < job->spec.rows; row++)
            for (uint32_t h = 0; h < of_head; h++) {
                const float *of = q + ((size_t)row * job->spec.q_heads + g * of_head + h) * d;

                if (job->spec.metric == UCM_METRIC_ROUNDED) {
                    ucm_summary_round(job->plan, of, rounded);
                    of = rounded;
                }
                job->ops->prepare(job->plan, of, row * of_head + h, job->group,
                                  job->queries + (size_t)g * job->group * job->query_floats);
            }
}

void ucm_score_begin(struct ucm_score_job *job, const struct ucm_summary_plan *plan,
                     const struct ucm_score_spec *spec, const struct ucm_score_blocks *blocks,
                     const float *q, void *scratch, float *scores)
{
    const struct ucm_score_ops *ops = score_ops();

    *job = (struct ucm_score_job){
        .plan = plan,
        .spec = *spec,
        .blocks = *blocks,
        .scores = scores,
        .ops = ops,
        .queries = scratch,
        .group = query_heads(spec) / plan->spec.shape.kv_heads,
        .query_floats = ops->query_floats(plan),
        .raw_floats = raw_floats(spec, blocks->n),
    };
    job->spec.beta = ucm_score_beta(&plan->spec, spec->beta);
    job->raw = job->queries + (size_t)query_heads(spec) * job->query_floats;
    prepare_queries(job, q);
}

uint32_t ucm_score_steps(const struct ucm_score_job *job)
{
    return job->spec.reduce == UCM_REDUCE_SOFTMAX ? 3 : 1;
}

uint32_t ucm_score_units(const struct ucm_score_job *job, uint32_t step)
{
    return step == STEP_SOFTMAX ? query_heads(&job->spec) : job->blocks.n;
}

void ucm_score_run(const struct ucm_score_job *job, uint32_t step, uint32_t first, uint32_t end)
{
    switch (step) {
    case STEP_RANGE:
        job->ops->range(job, first, end);
        break;
    case STEP_SOFTMAX:
        for (uint32_t list = first; list < end; list++)
            job->ops->softmax(job->raw + list * job->raw_floats, job->blocks.n, job->spec.beta);
        break;
    default:
        job->ops->sum(job, first, end);
    }
}

void ucm_score_all(const struct ucm_score_job *job)
{
    for (uint32_t step = 0; step < ucm_score_steps(job); step++)
        ucm_score_run(job, step, 0, ucm_score_units(job, step));
}
