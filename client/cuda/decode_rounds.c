/* Layers that are attended in rounds: their options, their part of the workspace, and their launches. */
#include "client/cuda/decode.h"

#include "client/cuda/error.h"
#include "kernels/attend/stop.h"
#include "kernels/sparse/spec.h"

#define DEFAULT_ROUNDS 3u
#define DEFAULT_PSA_ROUNDS 6u /* they double: 32 blocks to 1,024 */
#define DEFAULT_EVERY 4u
#define DEFAULT_FIRST 32u

_Static_assert((int)UCM_CUDA_DECODE_PSA == (int)UCM_STOP_PSA &&
                   (int)UCM_CUDA_DECODE_ESTIMATED == (int)UCM_STOP_ESTIMATED &&
                   (int)UCM_CUDA_DECODE_CERTIFIED == (int)UCM_STOP_CERTIFIED,
               "rules are the kernels'");
_Static_assert((int)UCM_CUDA_DECODE_ESTIMATES == (int)UCM_ATTEND_CUDA_ESTIMATES &&
                   (int)UCM_CUDA_DECODE_BOUNDS == (int)UCM_ATTEND_CUDA_BOUNDS,
               "estimates and bounds have the kernels' numbers");
_Static_assert(sizeof(struct ucm_cuda_decode_report) == sizeof(struct ucm_stop_report),
               "the report is the kernels'");
_Static_assert(sizeof(struct ucm_entries_attended) == sizeof(struct ucm_attend_cuda_told),
               "what steps tell is the kernels'");
_Static_assert(UCM_CUDA_DECODE_ORDER == UCM_ATTEND_CUDA_ORDER, "limits are the kernels'");

/* ---- options ---- */

static void defaults(struct ucm_cuda_decode_options *o)
{
    if (o->rounds == 0)
        o->rounds = o->rule == UCM_CUDA_DECODE_PSA ? DEFAULT_PSA_ROUNDS : DEFAULT_ROUNDS;
    o->every = o->every ? o->every : DEFAULT_EVERY;
    o->first = o->first ? o->first : DEFAULT_FIRST;
}

int decode_rounds_check(struct ucm_cuda_decode_options *o)
{
    if (o->rule > UCM_CUDA_DECODE_CERTIFIED)
        return cuda_fail(UCM_EINVALID, "rule is %u, which is no enum ucm_cuda_decode_rule",
                         o->rule);
    if (o->rule == UCM_CUDA_DECODE_ALL)
        return 0;
    defaults(o);
    if (o->known > UCM_CUDA_DECODE_BOUNDS)
        return cuda_fail(UCM_EINVALID, "known is %u, which is no enum ucm_cuda_decode_known",
                         o->known);
    if ((o->rule == UCM_CUDA_DECODE_ESTIMATED && o->known != UCM_CUDA_DECODE_ESTIMATES) ||
        (o->rule == UCM_CUDA_DECODE_CERTIFIED && o->known != UCM_CUDA_DECODE_BOUNDS))
        return cuda_fail(UCM_EINVALID, "known is %u; rule %u wants %u", o->known, o->rule,
                         o->rule == UCM_CUDA_DECODE_ESTIMATED ? UCM_CUDA_DECODE_ESTIMATES
                                                              : UCM_CUDA_DECODE_BOUNDS);
    if (!(o->eps >= 0 && o->eps <= 1))
        return cuda_fail(UCM_EINVALID, "eps is %g; 0 to 1 are right", (double)o->eps);
    if (o->rounds > UCM_CUDA_DECODE_ROUNDS)
        return cuda_fail(UCM_EINVALID, "rounds is %u; 1 to %d are right", o->rounds,
                         UCM_CUDA_DECODE_ROUNDS);
    if (o->every > UCM_CUDA_SELECT_BLOCKS || o->first > UCM_CUDA_SELECT_BLOCKS)
        return cuda_fail(UCM_EINVALID, "every is %u and first %u blocks; at most %d are right",
                         o->every, o->first, UCM_CUDA_SELECT_BLOCKS);
    if (o->rounds > 1 && o->room > UCM_CUDA_DECODE_ORDER)
        return cuda_fail(UCM_EINVALID,
                         "room is %u; lists of more than one round have at most %d blocks", o->room,
                         UCM_CUDA_DECODE_ORDER);
    return 0;
}

/* ---- the workspace ---- */

void decode_rounds_plan(struct decode_plan *p, uint64_t *end)
{
    const struct ucm_cuda_decode_options *o = &p->options;
    struct ucm_attend_cuda *a = &p->attend;
    struct ucm_attend_cuda_stop *s = &a->stop;
    struct ucm_attend_cuda_order *order = &p->order;
    uint64_t lists = (uint64_t)o->sequences * o->lists, rows = (uint64_t)o->sequences * o->q_heads;

    if (o->rule == UCM_CUDA_DECODE_ALL)
        return;
    s->rule = o->rule;
    s->eps = o->eps;
    s->logit_scale = p->logit_scale;
    s->known = o->known;
    s->every = o->every;
    s->rounds = o->rounds;
    s->ends = decode_plan_place(end, (o->rounds + 1) * lists * sizeof(uint32_t));
    s->least = decode_plan_place(end, 2 * lists * sizeof(float));
    s->next = decode_plan_place(end, lists * sizeof(uint32_t));
    s->heads = decode_plan_place(end, lists * sizeof(uint32_t));
    a->state = decode_plan_place(end, rows * o->head_dim * sizeof(float));
    a->state_sum = decode_plan_place(end, rows * sizeof(struct ucm_attend_cuda_sum));
    order->to = decode_plan_place(end, lists * o->room * sizeof(int32_t));
    if (o->known != UCM_CUDA_DECODE_NOTHING) {
        s->left.top = decode_plan_place(end, rows * sizeof(float));
        s->left.units = decode_plan_place(end, rows * (o->room + 1) * sizeof(uint64_t));
    }
    order->lists = o->lists;
    order->room = o->room;
    order->rows = o->q_heads / o->lists;
    order->windows = o->sink_blocks;
    order->first = o->first;
    order->logit_scale = p->logit_scale;
    order->ln_tokens = sparse_ln(o->tokens);
}

void decode_rounds_place(struct decode_plan *p, CUdeviceptr workspace)
{
    struct ucm_attend_cuda *a = &p->attend;
    struct ucm_attend_cuda_stop *s = &a->stop;

    if (p->options.rule == UCM_CUDA_DECODE_ALL)
        return;
    s->ends += workspace;
    s->least += workspace;
    s->next += workspace;
    s->heads += workspace;
    a->state += workspace;
    a->state_sum += workspace;
    p->order.to += workspace;
    s->left.top += workspace;
    s->left.units += workspace;
    s->told = a->flags;
}

/* ---- launches ---- */

int decode_rounds_layer_check(const struct ucm_cuda_decode_options *o,
                              const struct ucm_cuda_decode_layer *l)
{
    if (o->rule == UCM_CUDA_DECODE_ALL)
        return 0;
    if (l->candidates == 0 || (o->rounds > 1 && l->score == 0))
        return cuda_fail(UCM_EINVALID, "candidates or score is 0; rounds want both");
    if (o->known != UCM_CUDA_DECODE_NOTHING && (l->head_scores == 0 || l->head_pitch == 0))
        return cuda_fail(UCM_EINVALID, "head_scores or head_pitch is 0; name those of a selection "
                                       "with softmax, which estimates and bounds come from");
    return 0;
}

CUresult decode_rounds_launch(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                              uint32_t layer_head, CUstream stream)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    struct ucm_attend_cuda_order order = d->plan.order;
    struct ucm_cuda_decode_layer ordered = *l;
    struct decode_round round = {.stop = d->plan.attend.stop};
    uint32_t lists = l->sequences * o->lists;
    CUresult r;

    round.stop.candidates = l->candidates;
    round.stop.report = l->report;
    order.stop = round.stop;
    order.sequences = l->sequences;
    order.count = l->count;
    order.list = l->index;
    order.score = o->rounds > 1 ? l->score : 0;
    order.least = l->least;
    if (o->known != UCM_CUDA_DECODE_NOTHING) {
        order.row_score = l->head_scores;
        order.pitch = l->head_pitch;
    }
    r = decode_launch_grid(d, DECODE_ORDER,
                           (uint32_t[]){order.row_score ? order.rows : 1, lists, 1},
                           UCM_ATTEND_CUDA_ORDER_THREADS, (void *[]){&order}, stream);
    ordered.index = order.to;
    for (; r == CUDA_SUCCESS && round.number < o->rounds; round.number++) {
        round.begin = round.stop.ends + (uint64_t)round.number * lists * sizeof(uint32_t);
        round.end = round.begin + lists * sizeof(uint32_t);
        r = decode_launch_lists(d, &ordered, layer_head, &round, stream);
    }
    return r;
}
