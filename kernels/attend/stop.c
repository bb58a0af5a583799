#include "kernels/attend/stop.h"

#include "kernels/sparse/spec.h"

#include <errno.h>

/* ---- what is left ---- */

struct ucm_left ucm_left_of(const float *log_weight, uint32_t n)
{
    struct ucm_left left = {.top = -ucm_inf()};

    for (uint32_t i = 0; i < n; i++)
        if (ucm_left_is_known(log_weight[i]))
            left.top = ucm_max(log_weight[i], left.top);
        else
            left.unknown++;
    for (uint32_t i = 0; i < n; i++)
        if (ucm_left_is_known(log_weight[i]))
            left.units += ucm_left_units(left.top, log_weight[i]);
    return left;
}

void ucm_left_take(struct ucm_left *left, float log_weight)
{
    if (ucm_left_is_known(log_weight))
        left->units -= ucm_left_units(left->top, log_weight);
    else
        left->unknown--;
}

float ucm_left_bound(const struct ucm_attend_plan *plan, float box_score, uint32_t tokens)
{
    return ucm_left_of_box(plan->logit_scale, box_score, sparse_ln(tokens));
}

float ucm_left_share(float top, float sum, float slack, const struct ucm_left *left, uint32_t n)
{
    float ratio = 0.0f;

    for (uint32_t i = 0; i < n; i++)
        ratio += ucm_left_ratio(top, sum, slack, &left[i]);
    return ucm_left_share_of(ratio);
}

/* ---- rounds ---- */

static int check_list(const struct ucm_stop_spec *stop, const struct ucm_stop_list *list)
{
    const struct ucm_attend_memory *m = &list->memory;
    bool estimated = stop->rule == UCM_STOP_ESTIMATED, certified = stop->rule == UCM_STOP_CERTIFIED;

    if (stop->every == 0 || (estimated && list->estimate == NULL) ||
        (certified && list->bound == NULL))
        return -EINVAL;
    if (list->beyond > 0 && ((estimated && list->estimate_beyond == NULL) ||
                             (list->bound != NULL && list->bound_beyond == NULL)))
        return -EINVAL;
    for (uint32_t i = 0; i < list->n; i++)
        if (list->blocks[i] < 0 || (uint32_t)list->blocks[i] >= m->blocks)
            return -ENOENT;
    return 0;
}

static float abs_sum(const struct ucm_attend_plan *plan, const float *q)
{
    float sum = 0.0f;

    for (uint32_t c = 0; c < plan->spec.shape.head_dim; c++)
        sum += ucm_abs(q[c]);
    return sum;
}

static void begin_rows(const struct ucm_attend_plan *plan, const struct ucm_stop_list *list,
                       struct ucm_stop_row *rows)
{
    uint32_t group = plan->spec.group;

    for (uint32_t r = 0; r < list->heads * group; r++) {
        uint64_t at = (uint64_t)r * list->pitch;

        rows[r] = (struct ucm_stop_row){.lightest = ucm_inf()};
        if (list->estimate != NULL)
            rows[r].estimate = ucm_left_of(list->estimate + at, list->n);
        if (list->bound == NULL)
            continue;
        rows[r].bound = ucm_left_of(list->bound + at, list->n);
        rows[r].abs_sum = abs_sum(plan, list->query + (uint64_t)(r / group) * plan->query_floats +
                                            (uint64_t)(r % group) * plan->k_floats);
    }
}

static void attend_block(const struct ucm_attend_plan *plan, const struct ucm_stop_list *list,
                         uint32_t i, struct ucm_attend_state *states, struct ucm_stop_row *rows)
{
    uint32_t group = plan->spec.group;
    float weight[UCM_ATTEND_GROUP_MAX];

    for (uint32_t g = 0; g < list->heads; g++) {
        ucm_attend_add(plan, &list->memory, list->first + g,
                       list->query + (uint64_t)g * plan->query_floats, &list->blocks[i], 1, 0,
                       &states[g], weight, 1);
        for (uint32_t h = 0; h < group; h++) {
            struct ucm_stop_row *row = &rows[g * group + h];
            uint64_t at = (uint64_t)(g * group + h) * list->pitch + i;

            row->lightest = ucm_min(weight[h], row->lightest);
            if (list->estimate != NULL)
                ucm_left_take(&row->estimate, list->estimate[at]);
            if (list->bound != NULL)
                ucm_left_take(&row->bound, list->bound[at]);
        }
    }
}

static float certificate(const struct ucm_attend_plan *plan, const struct ucm_stop_list *list,
                         const struct ucm_attend_state *state, uint32_t r,
                         const struct ucm_stop_row *row)
{
    struct ucm_left left[2] = {row->bound};
    uint32_t h = r % plan->spec.group;
    float slack = ucm_attend_slack(plan, state, row->abs_sum);

    if (list->bound == NULL || !state->measure)
        return 0.0f;
    if (list->beyond > 0)
        left[1] = list->bound_beyond[r];
    return ucm_left_share(state->top[h], state->sum[h], slack, left, 2);
}

static float rule_share(const struct ucm_attend_plan *plan, const struct ucm_stop_spec *stop,
                        const struct ucm_stop_list *list, const struct ucm_attend_state *state,
                        uint32_t r, const struct ucm_stop_row *row, uint32_t blocks)
{
    struct ucm_left left[2] = {row->estimate};
    uint32_t h = r % plan->spec.group, rest = list->n - blocks + list->beyond;
    float top = state->top[h], sum = state->sum[h];

    if (rest == 0)
        return 1.0f;
    if (ucm_is_nan(sum))
        return 0.0f;
    switch (stop->rule) {
    case UCM_STOP_PSA:
        left[0] = ucm_left_alike(row->lightest, rest);
        return ucm_left_share(top, sum, 0.0f, left, 1);
    case UCM_STOP_ESTIMATED:
        if (list->beyond > 0)
            left[1] = list->estimate_beyond[r];
        return ucm_left_share(top, sum, 0.0f, left, 2);
    case UCM_STOP_CERTIFIED:
        return certificate(plan, list, state, r, row);
    default:
        return 0.0f;
    }
}

static float least_share(const struct ucm_attend_plan *plan, const struct ucm_stop_spec *stop,
                         const struct ucm_stop_list *list, const struct ucm_attend_state *states,
                         const struct ucm_stop_row *rows, uint32_t blocks)
{
    float least = 1.0f;

    for (uint32_t r = 0; r < list->heads * plan->spec.group; r++)
        least = ucm_min(
            rule_share(plan, stop, list, &states[r / plan->spec.group], r, &rows[r], blocks),
            least);
    return least;
}

static float least_certificate(const struct ucm_attend_plan *plan, const struct ucm_stop_list *list,
                               const struct ucm_attend_state *states,
                               const struct ucm_stop_row *rows, uint32_t blocks)
{
    float least = 1.0f;

    if (list->n + list->beyond == blocks)
        return 1.0f;
    for (uint32_t r = 0; r < list->heads * plan->spec.group; r++)
        least = ucm_min(certificate(plan, list, &states[r / plan->spec.group], r, &rows[r]), least);
    return least;
}

int ucm_attend_rounds(const struct ucm_attend_plan *plan, const struct ucm_stop_spec *stop,
                      const struct ucm_stop_list *list, struct ucm_attend_state *states,
                      struct ucm_stop_row *rows, struct ucm_stop_report *report)
{
    uint32_t blocks = 0, rounds = 0;
    int r = check_list(stop, list);
    float share;

    if (r < 0)
        return r;
    begin_rows(plan, list, rows);
    share = least_share(plan, stop, list, states, rows, 0);
    while (blocks < list->n) {
        uint32_t end = list->n - blocks < stop->every ? list->n : blocks + stop->every;

        for (; blocks < end; blocks++)
            attend_block(plan, list, blocks, states, rows);
        rounds++;
        share = least_share(plan, stop, list, states, rows, blocks);
        if (stop->rule != UCM_STOP_NEVER && share >= stop->eps)
            break;
    }
    *report = (struct ucm_stop_report){
        .blocks = blocks,
        .rounds = rounds,
        .share = share,
        .certificate = least_certificate(plan, list, states, rows, blocks),
    };
    return 0;
}
