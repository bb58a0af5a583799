/* Scores one block after the other: for hosts without vectors, and the reference for
 * simd/score.c. */
#include "kernels/sparse/score_ops.h"

#include "kernels/sparse/arith.h"

#include <stdbool.h>

/* The values so far of one block, over heads. */
struct many {
    float sum, top;
    uint32_t n;
};

static void many_add(struct many *m, float x)
{
    m->sum = m->n == 0 ? x : m->sum + x;
    m->top = ucm_max(x, m->n == 0 ? -ucm_inf() : m->top);
    m->n++;
}

static float unless_nan(float x)
{
    return ucm_is_nan(x) ? -ucm_inf() : x;
}

/* +inf if any value is, else the sum divided by `by`. */
static float many_sum(const struct many *m, float by)
{
    return m->top == ucm_inf() ? m->top : unless_nan(m->sum / by);
}

static void put_head(const struct ucm_score_job *job, struct many *heads, uint32_t g, uint32_t b,
                     float x)
{
    if (job->spec.heads == UCM_HEADS_EACH) {
        job->scores[(size_t)g * job->blocks.n + b] = x;
        return;
    }
    many_add(heads, x);
    if (g + 1 == job->plan->spec.shape.kv_heads)
        job->scores[b] = job->spec.heads == UCM_HEADS_SUM ? many_sum(heads, 1.0f) : heads->top;
}

static uint32_t query_floats(const struct ucm_summary_plan *plan)
{
    return plan->query_floats;
}

static void prepare(const struct ucm_summary_plan *plan, const float *q, uint32_t i, uint32_t group,
                    float *queries)
{
    (void)group;
    ucm_summary_query(plan, q, queries + (size_t)i * plan->query_floats);
}

static const uint8_t *summary_at(const struct ucm_score_blocks *blocks, uint32_t b)
{
    if (blocks->at == NULL)
        return (const uint8_t *)blocks->base + blocks->offset + b * blocks->stride;
    return blocks->at[b] == NULL ? NULL : (const uint8_t *)blocks->at[b] + blocks->offset;
}

static void score_block(const struct ucm_score_job *job, uint32_t b)
{
    const uint8_t *summary = summary_at(&job->blocks, b);
    struct many heads = {.n = 0};

    for (uint32_t g = 0; g < job->plan->spec.shape.kv_heads; g++) {
        size_t head = (size_t)g * job->group;
        struct many group = {.n = 0};

        for (uint32_t i = 0; i < job->group; i++) {
            const float *q = job->queries + (head + i) * job->query_floats;
            float x = ucm_inf();

            if (summary != NULL)
                x = unless_nan(ucm_summary_score(job->plan, job->spec.metric, q, summary, g));
            if (job->spec.reduce == UCM_REDUCE_SOFTMAX)
                job->raw[(head + i) * job->raw_floats + b] = x;
            else
                many_add(&group, x);
        }
        if (job->spec.reduce != UCM_REDUCE_SOFTMAX)
            put_head(job, &heads, g, b,
                     job->spec.reduce == UCM_REDUCE_MEAN ? many_sum(&group, (float)job->group)
                                                         : group.top);
    }
}

static void range(const struct ucm_score_job *job, uint32_t first, uint32_t end)
{
    for (uint32_t b = first; b < end; b++)
        score_block(job, b);
}

static float list_top(const float *list, uint32_t n)
{
    float top = -ucm_inf();

    for (uint32_t b = 0; b < n; b++)
        if (list[b] != ucm_inf())
            top = ucm_max(list[b], top);
    return top;
}

static uint32_t weight(float score, float top, float beta)
{
    return score == ucm_inf() ? 0 : ucm_weight(ucm_exp(beta * (score - top)));
}

static void softmax(float *list, uint32_t n, float beta)
{
    float top = list_top(list, n), total;
    uint64_t sum = 0;

    for (uint32_t b = 0; b < n; b++) {
        uint32_t w = weight(list[b], top, beta);

        sum += w;
        list[b] = list[b] == ucm_inf() ? list[b] : (float)w;
    }
    total = ucm_max(1.0f, (float)sum);
    for (uint32_t b = 0; b < n; b++)
        list[b] /= total;
}

static void sum_shares(const struct ucm_score_job *job, uint32_t first, uint32_t end)
{
    for (uint32_t b = first; b < end; b++) {
        struct many heads = {.n = 0};

        for (uint32_t g = 0; g < job->plan->spec.shape.kv_heads; g++) {
            struct many group = {.n = 0};

            for (uint32_t i = 0; i < job->group; i++)
                many_add(&group, job->raw[((size_t)g * job->group + i) * job->raw_floats + b]);
            put_head(job, &heads, g, b, many_sum(&group, 1.0f));
        }
    }
}

static uint64_t weigh(const float *scores, uint32_t n, float top, float beta, uint32_t *weights)
{
    uint64_t sum = 0;

    for (uint32_t b = 0; b < n; b++)
        sum += weights[b] = weight(scores[b], top, beta);
    return sum;
}

/* Without branches that depend on scores. */
uint32_t choose_put_plain(const uint32_t *restrict keys, uint32_t n, uint32_t above, uint32_t ties,
                          uint32_t base, uint32_t *restrict index, uint32_t room)
{
    uint32_t put = 0, i = 0;

    for (; ties > 0 && i < n && put < room; i++) {
        uint32_t tie = keys[i] == above;

        index[put] = base + i;
        put += (keys[i] > above) | tie;
        ties -= tie;
    }
    for (; i < n && put < room; i++) {
        index[put] = base + i;
        put += keys[i] > above;
    }
    return put;
}

const struct ucm_score_ops score_ops_base = {
    .query_floats = query_floats,
    .prepare = prepare,
    .range = range,
    .softmax = softmax,
    .sum = sum_shares,
    .top = list_top,
    .weigh = weigh,
    .put = choose_put_plain,
};
