/* Rounds, captured in a graph: the order of lists, where they stop, what is covered then, and what is reported. */
#include "tests/gpu/attend.h"

#include "kernels/sparse/arith.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 6u

struct rounds {
    struct problem p;
    struct ucm_stop_spec stop;
    float *estimate, *box; /* of the lists' entries */
    float *exact;          /* [kv_heads * group][room]: logarithms of weights, of one list */
    int32_t *order;        /* [lists][room]: places in the list */
    struct ucm_attend_cuda_order args;
    CUgraphExec graph;
    struct ucm_stop_report *report;
    float *out, *lse;
    uint64_t lists;
};

/* ---- scores ---- */

static const uint8_t *key_at(const struct rounds *r, int32_t slot, uint32_t g, uint32_t t)
{
    const struct ucm_kv_shape *s = &r->p.pool_plan.spec.shape;

    return r->p.pool + (uint32_t)slot * r->p.slot + s->k_offset +
           problem_head(&r->p, g) * s->k_head_stride + t * s->k_token_stride;
}

static double logit(const struct rounds *r, const float *q, const uint8_t *k)
{
    double x = 0;
    uint16_t h;

    for (uint32_t c = 0; c < r->p.shape.d; c++) {
        if (r->p.shape.narrow) {
            x += (double)q[c] * (double)ucm_fp8_e4m3_decode(k[c]);
            continue;
        }
        memcpy(&h, k + 2 * c, 2);
        x += (double)q[c] *
             (double)(r->p.shape.dtype == UCM_KV_F16 ? ucm_f16_decode(h) : ucm_bf16_decode(h));
    }
    return x;
}

/* Of one entry of a list, over its query heads: the largest q . k, and the largest logarithm of a weight. */
static void judge(const struct rounds *r, uint64_t list, uint32_t entry, float *box,
                  float *estimate)
{
    const struct attend_shape *s = &r->p.shape;
    uint32_t chain = (uint32_t)(list / s->lists),
             first = s->lists > 1 ? (uint32_t)(list % s->lists) : 0;
    uint32_t heads = s->lists > 1 ? 1 : s->kv_heads;
    int32_t slot = problem_slot(&r->p, list, r->p.list[list * s->room + entry]);
    double scale = (double)r->p.plan.logit_scale, most = -INFINITY, weight = -INFINITY;

    for (uint32_t g = first; g < first + heads; g++)
        for (uint32_t h = 0; h < s->group; h++) {
            const float *q = r->p.q + (((uint64_t)chain * s->kv_heads + g) * s->group + h) * s->d;
            double sum = 0;

            for (uint32_t t = 0; t < s->tokens; t++) {
                double x = logit(r, q, key_at(r, slot, g, t));

                most = fmax(most, x);
                sum += exp(x * scale);
            }
            weight = fmax(weight, log(sum));
        }
    *box = (float)most + fabsf((float)most) * 1e-6f;
    *estimate = (float)weight + 0.2f * rnd_normal();
}

static int by_score(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

static void draw_scores(struct rounds *r)
{
    uint32_t room = r->p.shape.room;
    uint64_t *key = fresh(room * 8);

    for (uint64_t l = 0; l < r->lists; l++) {
        uint32_t n = r->p.count[l];

        for (uint32_t i = 0; i < n; i++) {
            judge(r, l, i, &r->box[l * room + i], &r->estimate[l * room + i]);
            if (rnd_below(40) == 0 && i > 0) /* ties */
                r->estimate[l * room + i] = r->estimate[l * room + i - 1];
            if (rnd_below(300) == 0)
                r->estimate[l * room + i] = r->box[l * room + i] = INFINITY;
            key[i] = (uint64_t)~ucm_score_key(r->estimate[l * room + i]) << 32 | i;
        }
        qsort(key, n, 8, by_score);
        for (uint32_t i = 0; i < n; i++)
            r->order[l * room + i] = (int32_t)(uint32_t)key[i];
    }
    gpu_put(r->args.score, r->estimate, r->lists * room * 4);
    gpu_put(r->args.box_score, r->box, r->lists * room * 4);
    free(key);
}

/* ---- the launches ---- */

static void left_open(struct ucm_attend_cuda_left *left, uint64_t lists, uint32_t room)
{
    *left = (struct ucm_attend_cuda_left){.top = gpu_new(lists * 4),
                                          .units = gpu_new(lists * (room + 1) * 8)};
}

static void capture(struct rounds *r)
{
    struct ucm_attend_cuda a = r->p.args;
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    order_launch(&r->args, (uint32_t)r->lists);
    a.list = r->args.to;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        a.round = round;
        a.begin = round * r->stop.every;
        a.end = round + 1 < ROUNDS ? a.begin + r->stop.every : a.room; /* the last takes the rest */
        attend_launch(&a, r->p.shape.dtype, r->p.shape.d, r->p.shape.narrow);
    }
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&r->graph, graph, 0), "the graph");
    must(cuGraphDestroy(graph), "the graph");
}

static void rounds_open(struct rounds *r, const struct attend_shape *shape,
                        struct ucm_stop_spec stop)
{
    struct ucm_attend_cuda *a = &r->p.args;

    memset(r, 0, sizeof(*r));
    problem_open(&r->p, shape);
    problem_cut(&r->p, 3);
    r->stop = stop;
    r->lists = (uint64_t)shape->chains * shape->lists;
    r->estimate = fresh(r->lists * shape->room * 4);
    r->box = fresh(r->lists * shape->room * 4);
    r->order = fresh(r->lists * shape->room * 4);
    r->report = fresh(r->lists * sizeof(*r->report));
    r->out = fresh(r->p.rows * shape->d * 4);
    r->lse = fresh(r->p.rows * 4);
    a->state = gpu_new(r->p.rows * shape->d * 4);
    a->state_sum = gpu_new(r->p.rows * sizeof(struct ucm_attend_cuda_sum));
    a->stop = (struct ucm_attend_cuda_stop){.rule = stop.rule,
                                            .eps = stop.eps,
                                            .logit_scale = r->p.plan.logit_scale,
                                            .certify = 1,
                                            .stopped = gpu_new(r->lists * 4),
                                            .least = gpu_new(r->lists * 8),
                                            .heads = gpu_new(r->lists * 4),
                                            .report = gpu_new(r->lists * sizeof(*r->report))};
    gpu_clear(a->stop.heads, r->lists * 4);
    left_open(&a->stop.estimate, r->lists, shape->room);
    left_open(&a->stop.bound, r->lists, shape->room);
    r->args = (struct ucm_attend_cuda_order){.lists = (uint32_t)r->lists,
                                             .room = shape->room,
                                             .logit_scale = r->p.plan.logit_scale,
                                             .ln_tokens = logf((float)shape->tokens),
                                             .count = a->count,
                                             .list = a->list,
                                             .to = gpu_new(r->lists * shape->room * 4),
                                             .score = gpu_new(r->lists * shape->room * 4),
                                             .box_score = gpu_new(r->lists * shape->room * 4),
                                             .estimate = a->stop.estimate,
                                             .bound = a->stop.bound,
                                             .stopped = a->stop.stopped,
                                             .least = a->stop.least};
    r->args.estimate_score = r->args.score;
    capture(r);
}

static void rounds_close(struct rounds *r)
{
    struct ucm_attend_cuda_stop *s = &r->p.args.stop;
    CUdeviceptr mine[] = {r->p.args.state,  r->p.args.state_sum, s->stopped,      s->least,
                          s->heads,         s->report,           s->estimate.top, s->estimate.units,
                          s->bound.top,     s->bound.units,      r->args.to,      r->args.score,
                          r->args.box_score};

    must(cuGraphExecDestroy(r->graph), "the graph");
    for (size_t i = 0; i < sizeof(mine) / sizeof(mine[0]); i++)
        gpu_free(mine[i]);
    free(r->estimate);
    free(r->box);
    free(r->order);
    free(r->report);
    free(r->out);
    free(r->lse);
    problem_close(&r->p);
}

/* ---- one list beside the C ---- */

static void compare_order(const struct rounds *r)
{
    uint64_t entries = r->lists * r->p.shape.room, wrong = 0;
    int32_t *got = fresh(entries * 4);

    gpu_get(got, r->args.to, entries * 4);
    for (uint64_t l = 0; l < r->lists; l++)
        for (uint32_t i = 0; i < r->p.count[l]; i++) {
            uint64_t at = l * r->p.shape.room;

            wrong += got[at + i] != r->p.list[at + (uint32_t)r->order[at + i]];
        }
    check(wrong == 0, "%lu entries are in another order", (unsigned long)wrong);
    free(got);
}

/* The C's states of a list's KV heads after the window and its first n blocks, and its report of them. */
static struct ucm_stop_report reference(const struct rounds *r, uint64_t l, uint32_t n,
                                        uint32_t rule, float *out, float *lse)
{
    const struct attend_shape *s = &r->p.shape;
    const struct ucm_attend_plan *plan = &r->p.plan;
    uint32_t heads = s->lists > 1 ? 1 : s->kv_heads,
             first = s->lists > 1 ? (uint32_t)(l % s->lists) : 0;
    uint32_t chain = (uint32_t)(l / s->lists), count = r->p.count[l], rows = heads * s->group;
    struct ucm_stop_spec stop = {rule, n > 0 ? n : 1, 0};
    int32_t *slots = fresh(count * 4 + 4);
    float *bound = fresh(count * 4 + 4), *estimate = fresh(count * 4 + 4);
    float *query = fresh((uint64_t)heads * plan->query_floats * 4);
    float *floats = fresh((uint64_t)heads * plan->state_floats * 4);
    struct ucm_attend_state *states = fresh(heads * sizeof(*states));
    struct ucm_stop_row *scratch = fresh(rows * sizeof(*scratch));
    struct ucm_attend_memory pages = {r->p.pages, r->p.page, s->pages};
    struct ucm_stop_report report = {0};
    struct ucm_stop_list list = {.first = problem_head(&r->p, first),
                                 .heads = heads,
                                 .query = query,
                                 .memory = {r->p.pool, r->p.slot, s->slots},
                                 .blocks = slots,
                                 .n = count,
                                 .estimate = estimate,
                                 .bound = bound};

    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = l * s->room + (uint32_t)r->order[l * s->room + i];

        slots[i] = problem_slot(&r->p, l, r->p.list[at]);
        estimate[i] = r->estimate[at];
        bound[i] = ucm_left_bound(plan, r->box[at], s->tokens);
    }
    for (uint32_t g = 0; g < heads; g++) {
        uint64_t row = ((uint64_t)chain * s->kv_heads + first + g) * s->group;
        uint32_t length = r->p.length[chain], blocks = (length + s->tokens - 1) / s->tokens;

        ucm_attend_query(plan, r->p.q + row * s->d, query + g * plan->query_floats);
        ucm_attend_begin(plan, &states[g], floats + g * plan->state_floats);
        states[g].measure = true;
        if (s->window > 0 && blocks > r->p.first[chain])
            ucm_attend_add(plan, &pages, first + g, query + g * plan->query_floats,
                           r->p.table + (uint64_t)chain * s->window + r->p.first[chain],
                           blocks - r->p.first[chain], length % s->tokens, &states[g], NULL, 0);
    }
    check(ucm_attend_rounds(&r->p.pool_plan, &stop, &list, states, scratch, &report) == 0,
          "the reference");
    for (uint32_t g = 0; g < heads; g++)
        ucm_attend_end(plan, &states[g], out + (uint64_t)g * s->group * s->d, lse + g * s->group);
    free(slots);
    free(bound);
    free(estimate);
    free(query);
    free(floats);
    free(states);
    free(scratch);
    return report;
}

static void compare_list(const struct rounds *r, uint64_t l)
{
    const struct attend_shape *s = &r->p.shape;
    uint32_t heads = s->lists > 1 ? 1 : s->kv_heads, rows = heads * s->group,
             n = r->report[l].blocks;
    uint64_t row = s->lists > 1 ? l * s->group : l * rows;
    const struct ucm_stop_report *got = &r->report[l];
    float *out = fresh((uint64_t)rows * s->d * 4), *lse = fresh(rows * 4);
    float by = 6 * r->p.plan.spec.v_scale * (s->dtype == UCM_KV_F16 ? 0x1p-10f : 0x1p-8f);
    struct ucm_stop_report want = reference(r, l, n, r->stop.rule, out, lse);
    bool last = n == r->p.count[l];
    uint64_t wrong = 0;

    check(n <= r->p.count[l] && (last || n % r->stop.every == 0), "list %lu: %u of %u blocks",
          (unsigned long)l, n, r->p.count[l]);
    for (uint64_t i = 0; i < (uint64_t)rows * s->d; i++)
        wrong += !(fabsf(out[i] - r->out[row * s->d + i]) <= by);
    for (uint32_t i = 0; i < rows; i++)
        wrong += !(lse[i] == r->lse[row + i] || fabsf(lse[i] - r->lse[row + i]) <= 2e-4f);
    check(wrong == 0, "list %lu, rule %u, %u blocks: %lu channels or lse", (unsigned long)l,
          r->stop.rule, n, (unsigned long)wrong);
    if (r->stop.rule == UCM_STOP_CERTIFIED) /* its slack is larger than the C's */
        check(got->share <= want.share + 1e-5f && got->share >= want.share - 0.03f,
              "list %lu: share %g, not %g", (unsigned long)l, (double)got->share,
              (double)want.share);
    else
        check(fabsf(got->share - want.share) < 2e-3f, "list %lu, rule %u: share %g, not %g",
              (unsigned long)l, r->stop.rule, (double)got->share, (double)want.share);
    check(got->certificate <= want.certificate + 1e-5f &&
              got->certificate >= want.certificate - 0.03f,
          "list %lu: certificate %g, not %g", (unsigned long)l, (double)got->certificate,
          (double)want.certificate);
    check(last || got->share >= r->stop.eps, "list %lu stopped at %g", (unsigned long)l,
          (double)got->share);
    if (r->stop.rule != UCM_STOP_NEVER && got->rounds > 1 && got->rounds < ROUNDS) {
        want = reference(r, l, (got->rounds - 1) * r->stop.every, r->stop.rule, out, lse);
        check(want.share < r->stop.eps + 0.03f, "list %lu, rule %u: it did not stop at %g",
              (unsigned long)l, r->stop.rule, (double)want.share);
    }
    free(out);
    free(lse);
}

static void replay(struct rounds *r)
{
    problem_draw(&r->p);
    draw_scores(r);
    must(cuGraphLaunch(r->graph, gpu_stream), "the graph");
    gpu_sync();
    problem_get(&r->p, r->out, r->lse);
    gpu_get(r->report, r->p.args.stop.report, r->lists * sizeof(*r->report));
    compare_order(r);
    for (uint64_t l = 0; l < r->lists; l++)
        compare_list(r, l);
}

void test_rounds(void)
{
    static const struct attend_shape shapes[] = {
        {UCM_KV_BF16, 16, 4, 4, 128, 3, 4, 41, 60, 20, 5, 1, 0, 0},
        {UCM_KV_F16, 16, 2, 3, 64, 2, 1, 33, 50, 9, 3, 0, 0, 0},
        {UCM_KV_BF16, 16, 1, 16, 64, 2, 1, 300, 320, 9, 0, 0, 0, 0},
        {UCM_KV_BF16, 16, 2, 4, 128, 2, 2, 41, 60, 20, 5, 1, 1, 0},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (uint32_t rule = UCM_STOP_NEVER; rule <= UCM_STOP_CERTIFIED; rule++) {
            struct rounds r;

            rounds_open(&r, &shapes[i], (struct ucm_stop_spec){rule, shapes[i].room / 8, 0.8f});
            for (uint32_t n = few ? 1 : 4; n > 0; n--)
                replay(&r);
            rounds_close(&r);
        }
}
