#include "kernels/attend/stop.h"

#include "kernels/sparse/arith.h"
#include "kernels/sparse/spec.h"

#include <errno.h>

/* More than the relative error of anything here whose result must not be too small: an exponential of 2 units,
 * whose argument, at most 88, has a rounding; three products; a quotient. */
#define UP (1.0f + 0x1p-16f)
#define LEAST 0x1p-125f /* more than e^-87 */

/* ---- what is left ---- */

static bool is_known(float log_weight)
{
    return log_weight < ucm_inf();
}

/* e^x, rounded up; x at most 0, and not NaN. */
static float exp_up(float x)
{
    return ucm_max(ucm_exp(x) * UP, LEAST);
}

static uint64_t units_of(float top, float log_weight)
{
    return log_weight == -ucm_inf() ? 0 : (uint64_t)(exp_up(log_weight - top) * 0x1p40f) + 1;
}

struct ucm_left ucm_left_of(const float *log_weight, uint32_t n)
{
    struct ucm_left left = {.top = -ucm_inf()};

    for (uint32_t i = 0; i < n; i++)
        if (is_known(log_weight[i]))
            left.top = ucm_max(log_weight[i], left.top);
        else
            left.unknown++;
    for (uint32_t i = 0; i < n; i++)
        if (is_known(log_weight[i]))
            left.units += units_of(left.top, log_weight[i]);
    return left;
}

void ucm_left_take(struct ucm_left *left, float log_weight)
{
    if (is_known(log_weight))
        left->units -= units_of(left->top, log_weight);
    else
        left->unknown--;
}

/* The next float, or the one behind it. */
static float round_up(float x)
{
    return x + ucm_abs(x) * 0x1p-23f + 0x1p-126f;
}

float ucm_left_bound(const struct ucm_attend_plan *plan, float box_score, uint32_t tokens)
{
    float bound = round_up(round_up(plan->logit_scale * box_score) + round_up(sparse_ln(tokens)));

    return ucm_is_nan(bound) ? ucm_inf() : bound;
}

/* What is left over what is attended, rounded up. */
static float ratio(float top, float sum, float slack, const struct ucm_left *left)
{
    float units = (float)left->units * 0x1p-40f, gap = left->top - top + slack;

    if (left->unknown > 0)
        return ucm_inf();
    if (left->units == 0)
        return 0.0f;
    if (!(sum > 0) || !(gap < 87.0f)) /* nothing is attended, or NaN */
        return ucm_inf();
    if (gap > 0)
        return units / (ucm_exp(-gap) * sum) * UP * UP;
    return ucm_max(units * exp_up(gap) / sum * UP, LEAST);
}

float ucm_left_share(float top, float sum, float slack, const struct ucm_left *left, uint32_t n)
{
    float rest = 0.0f;

    for (uint32_t i = 0; i < n; i++)
        rest += ratio(top, sum, slack, &left[i]);
    return rest == 0 ? 1.0f : 1.0f / (1.0f + rest * UP) * (1.0f - 0x1p-22f);
}

/* ---- rounds ---- */

int ucm_stop_check(const struct ucm_stop_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->rule > UCM_STOP_CERTIFIED)
        return sparse_refuse(why,
                             "rule %u is none of 0 (never), 1 (psa), 2 (estimated), 3 "
                             "(certified)",
                             spec->rule);
    if (spec->every == 0)
        return sparse_refuse(why, "every is 0; a round has at least one block");
    if (!(spec->eps >= 0 && spec->eps <= 1))
        return sparse_refuse(why, "eps is %g; 0 to 1 are allowed", (double)spec->eps);
    return 0;
}

static int check_list(const struct ucm_stop_spec *stop, const struct ucm_stop_list *list)
{
    const struct ucm_attend_memory *m = &list->memory;
    bool estimated = stop->rule == UCM_STOP_ESTIMATED, certified = stop->rule == UCM_STOP_CERTIFIED;

    if ((estimated && list->estimate == NULL) || (certified && list->bound == NULL))
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

static float psa_share(float top, float sum, float lightest, uint32_t left)
{
    struct ucm_left rest = {.top = lightest, .units = (uint64_t)left << 40};

    if (lightest == -ucm_inf()) /* as each of them, the rest weighs nothing */
        rest.units = 0;
    return ucm_left_share(top, sum, 0.0f, &rest, 1);
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
        return psa_share(top, sum, row->lightest, rest);
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
