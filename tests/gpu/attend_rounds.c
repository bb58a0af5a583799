/* Rounds, captured in a graph: the order of lists, where they stop, what they cover then, and what
 * they report. */
#include "tests/gpu/attend.h"

#include "kernels/sparse/arith.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 6u

struct rounds {
    struct problem p;
    struct ucm_stop_spec stop;
    uint32_t known;     /* enum ucm_attend_cuda_known */
    float *row_score;   /* [rows][entries]: lists choose from all blocks */
    float *score;       /* [lists][room] */
    int32_t *order;     /* [lists][room]: places in the list */
    uint32_t *list_end; /* [ROUNDS + 1][lists] */
    struct ucm_attend_cuda_order args;
    CUgraphExec graph;
    struct ucm_stop_report *report;
    struct answer got;
    uint64_t lists, list_rows;
};

/* ---- scores ---- */

static const uint8_t *key_at(const struct rounds *r, int32_t entry, uint32_t g, uint32_t t)
{
    const struct ucm_kv_shape *s = &r->p.pool_plan.spec.shape;

    return r->p.pool + (uint32_t)entry * r->p.entry + s->k_offset +
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

/* A row's figure for a block: the largest q . k, or about the logarithm of its weight. */
static float judge(const struct rounds *r, uint64_t row, uint32_t block)
{
    const struct attend_shape *s = &r->p.shape;
    int32_t entry = problem_entry(&r->p, row / r->list_rows, (int32_t)block);
    double scale = (double)r->p.plan.logit_scale, most = -INFINITY, sum = 0;
    uint32_t g = (uint32_t)(row / s->group % s->kv_heads);

    for (uint32_t t = 0; t < s->tokens; t++) {
        double x = logit(r, r->p.q + row * s->d, key_at(r, entry, g, t));

        most = fmax(most, x);
        sum += exp(x * scale);
    }
    return r->known == UCM_ATTEND_CUDA_BOUNDS ? (float)most + fabsf((float)most) * 1e-6f
                                              : (float)log(sum) + 0.2f * rnd_normal();
}

static int by_score(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

/* Each block once in a list. */
static void draw_list(struct rounds *r, uint64_t l)
{
    const struct attend_shape *s = &r->p.shape;
    int32_t *list = r->p.list + l * s->room, *all = fresh(r->p.shape.entries * 4);

    for (uint32_t i = 0; i < r->p.shape.entries; i++)
        all[i] = (int32_t)i;
    for (uint32_t i = 0; i < s->room; i++) {
        uint32_t j = i + rnd_below(r->p.shape.entries - i);

        list[i] = all[j];
        all[j] = all[i];
    }
}

static void draw_scores(struct rounds *r)
{
    uint32_t n = r->p.shape.entries;

    for (uint64_t row = 0; row < r->p.rows; row++)
        for (uint32_t b = 0; b < n; b++)
            r->row_score[row * n + b] = judge(r, row, b);
    for (uint64_t l = 0; l < r->lists; l++)
        for (uint32_t b = 0; b < n; b++)
            for (uint64_t row = l * r->list_rows;
                 rnd_below(2000) == 0 && row < (l + 1) * r->list_rows; row++)
                r->row_score[row * n + b] = INFINITY;
    gpu_put(r->args.row_score, r->row_score, r->p.rows * n * 4);
}

static void draw_lists(struct rounds *r)
{
    uint32_t room = r->p.shape.room, n = r->p.shape.entries;
    uint64_t *key = fresh(room * 8);

    for (uint64_t l = 0; l < r->lists; l++) {
        float *score = r->score + l * room;

        for (uint32_t i = 0; i < r->p.count[l]; i++) {
            uint32_t block = (uint32_t)r->p.list[l * room + i];

            score[i] = rnd_below(40) == 0 && i > 0 ? score[i - 1] : -INFINITY; /* ties */
            for (uint64_t row = 0; row < r->list_rows; row++)
                score[i] = fmaxf(score[i], r->row_score[(l * r->list_rows + row) * n + block]);
            key[i] = (uint64_t)(block < r->args.windows ? 0 : ~ucm_score_key(score[i])) << 32 | i;
        }
        qsort(key, r->p.count[l], 8, by_score);
        for (uint32_t i = 0; i < r->p.count[l]; i++)
            r->order[l * room + i] = (int32_t)(uint32_t)key[i];
    }
    gpu_put(r->args.score, r->score, r->lists * room * 4);
}

/* ---- the launches ---- */

static void capture(struct rounds *r)
{
    struct ucm_attend_cuda a = r->p.args;
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    order_launch(&r->args);
    a.list = r->args.to;
    for (a.round = 0; a.round < ROUNDS; a.round++)
        problem_launch(&r->p, &a);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&r->graph, graph, 0), "the graph");
    must(cuGraphDestroy(graph), "the graph");
}

static void stop_open(struct rounds *r)
{
    const struct attend_shape *s = &r->p.shape;
    int32_t *candidates = fresh(s->sequences * 4);

    for (uint32_t c = 0; c < s->sequences; c++)
        candidates[c] = (int32_t)r->p.shape.entries;
    r->p.args.stop = (struct ucm_attend_cuda_stop){
        .rule = r->stop.rule,
        .eps = r->stop.eps,
        .logit_scale = r->p.plan.logit_scale,
        .known = r->known,
        .every = r->stop.every,
        .rounds = ROUNDS,
        .candidates = gpu_put(0, candidates, s->sequences * 4),
        .left = {.top = gpu_new(r->p.rows * 4), .units = gpu_new(r->p.rows * (s->room + 1) * 8)},
        .ends = gpu_new((ROUNDS + 1) * r->lists * 4),
        .least = gpu_new(r->lists * 8),
        .next = gpu_new(r->lists * 4),
        .heads = gpu_new(r->lists * 4),
        .report = gpu_new(r->lists * sizeof(*r->report)),
        .told = gpu_new(sizeof(struct ucm_attend_cuda_told))};
}

static void rounds_open(struct rounds *r, const struct attend_shape *shape,
                        struct ucm_stop_spec stop)
{
    struct ucm_attend_cuda *a = &r->p.args;

    memset(r, 0, sizeof(*r));
    problem_open(&r->p, shape);
    problem_cut(&r->p, 3);
    r->stop = stop;
    r->known = stop.rule == UCM_STOP_ESTIMATED ? UCM_ATTEND_CUDA_ESTIMATES : UCM_ATTEND_CUDA_BOUNDS;
    r->lists = (uint64_t)shape->sequences * shape->lists;
    r->list_rows = r->p.rows / r->lists;
    r->row_score = fresh(r->p.rows * r->p.shape.entries * 4);
    r->score = fresh(r->lists * shape->room * 4);
    r->order = fresh(r->lists * shape->room * 4);
    r->list_end = fresh((ROUNDS + 1) * r->lists * 4);
    r->report = fresh(r->lists * sizeof(*r->report));
    r->got = answer_new(&r->p);
    a->state = gpu_new(r->p.rows * shape->d * 4);
    a->state_sum = gpu_new(r->p.rows * sizeof(struct ucm_attend_cuda_sum));
    stop_open(r);
    r->args =
        (struct ucm_attend_cuda_order){.sequences = shape->sequences,
                                       .lists = shape->lists,
                                       .room = shape->room,
                                       .rows = (uint32_t)r->list_rows,
                                       .windows = 2,
                                       .first = stop.every,
                                       .logit_scale = r->p.plan.logit_scale,
                                       .ln_tokens = logf((float)shape->tokens),
                                       .count = a->count,
                                       .list = a->list,
                                       .to = gpu_new(r->lists * shape->room * 4),
                                       .score = gpu_new(r->lists * shape->room * 4),
                                       .row_score = gpu_new(r->p.rows * r->p.shape.entries * 4),
                                       .pitch = r->p.shape.entries,
                                       .stop = a->stop};
    capture(r);
}

static void rounds_close(struct rounds *r)
{
    must(cuGraphExecDestroy(r->graph), "the graph");
    memory_end();
}

/* ---- one list against the C ---- */

static void compare_order(const struct rounds *r)
{
    uint64_t items = r->lists * r->p.shape.room, wrong = 0;
    int32_t *got = fresh(items * 4);

    gpu_get(got, r->args.to, items * 4);
    for (uint64_t l = 0; l < r->lists; l++)
        for (uint32_t i = 0; i < r->p.count[l]; i++) {
            uint64_t at = l * r->p.shape.room;

            wrong += got[at + i] != r->p.list[at + (uint32_t)r->order[at + i]];
        }
    check(wrong == 0, "%lu items are in another order", (unsigned long)wrong);
}

/* For the C: the figures of a list's rows for its blocks, and for the blocks that are not in it. */
struct judged {
    int32_t *entries;
    float *left; /* [rows][count]: estimates or bounds */
    struct ucm_left beyond[UCM_ATTEND_GROUP_MAX];
};

static float left_of(const struct rounds *r, uint64_t row, uint32_t block)
{
    float x = r->row_score[row * r->p.shape.entries + block];

    return r->known == UCM_ATTEND_CUDA_BOUNDS ? ucm_left_bound(&r->p.plan, x, r->p.shape.tokens)
                                              : x;
}

static struct judged judged_new(const struct rounds *r, uint64_t l)
{
    uint32_t n = r->p.count[l], all = r->p.shape.entries, room = r->p.shape.room;
    struct judged j = {.entries = fresh(n * 4 + 4), .left = fresh(r->list_rows * n * 4 + 4)};
    bool *in = fresh(all * sizeof(*in));
    float *out = fresh(all * 4);

    for (uint32_t i = 0; i < n; i++) {
        int32_t block = r->p.list[l * room + (uint32_t)r->order[l * room + i]];

        in[block] = true;
        j.entries[i] = problem_entry(&r->p, l, block);
        for (uint64_t row = 0; row < r->list_rows; row++)
            j.left[row * n + i] = left_of(r, l * r->list_rows + row, (uint32_t)block);
    }
    for (uint64_t row = 0; row < r->list_rows; row++) {
        uint32_t beyond = 0;

        for (uint32_t b = 0; b < all; b++)
            if (!in[b])
                out[beyond++] = left_of(r, l * r->list_rows + row, b);
        j.beyond[row] = ucm_left_of(out, beyond);
    }
    return j;
}

/* The C's states of a list's KV heads after the window and its first n blocks, and its report of them. */
static struct ucm_stop_report reference(const struct rounds *r, uint64_t l, uint32_t n,
                                        uint32_t rule, float *out, float *lse)
{
    const struct attend_shape *s = &r->p.shape;
    const struct ucm_attend_plan *plan = &r->p.plan;
    uint32_t heads = s->lists > 1 ? 1 : s->kv_heads,
             first = s->lists > 1 ? (uint32_t)(l % s->lists) : 0;
    uint32_t sequence = (uint32_t)(l / s->lists), count = r->p.count[l], rows = heads * s->group;
    struct ucm_stop_spec stop = {rule, n > 0 ? n : 1, 0};
    struct judged j = judged_new(r, l);
    float *query = fresh((uint64_t)heads * plan->query_floats * 4);
    float *floats = fresh((uint64_t)heads * plan->state_floats * 4);
    struct ucm_attend_state *states = fresh(heads * sizeof(*states));
    struct ucm_stop_row *scratch = fresh(rows * sizeof(*scratch));
    struct ucm_attend_memory pages = {r->p.pages, r->p.page, s->pages};
    bool bounds = r->known == UCM_ATTEND_CUDA_BOUNDS;
    struct ucm_stop_report report = {0};
    struct ucm_stop_list list = {.first = problem_head(&r->p, first),
                                 .heads = heads,
                                 .query = query,
                                 .memory = {r->p.pool, r->p.entry, s->entries},
                                 .blocks = j.entries,
                                 .n = count,
                                 .beyond = r->p.shape.entries - count,
                                 .estimate = bounds ? NULL : j.left,
                                 .bound = bounds ? j.left : NULL,
                                 .pitch = count,
                                 .estimate_beyond = j.beyond,
                                 .bound_beyond = j.beyond};

    for (uint32_t g = 0; g < heads; g++) {
        uint64_t row = ((uint64_t)sequence * s->kv_heads + first + g) * s->group;
        uint32_t length = r->p.length[sequence], blocks = (length + s->tokens - 1) / s->tokens;

        ucm_attend_query(plan, r->p.q + row * s->d, query + g * plan->query_floats);
        ucm_attend_begin(plan, &states[g], floats + g * plan->state_floats);
        states[g].measure = true;
        if (s->window > 0 && blocks > r->p.first[sequence])
            ucm_attend_add(plan, &pages, first + g, query + g * plan->query_floats,
                           r->p.table + (uint64_t)sequence * s->window + r->p.first[sequence],
                           blocks - r->p.first[sequence], length % s->tokens, &states[g], NULL, 0);
    }
    check(ucm_attend_rounds(&r->p.pool_plan, &stop, &list, states, scratch, &report) == 0,
          "the reference");
    for (uint32_t g = 0; g < heads; g++)
        ucm_attend_end(plan, &states[g], out + (uint64_t)g * s->group * s->d, lse + g * s->group);
    return report;
}

static uint32_t end_of(const struct rounds *r, uint32_t round, uint64_t l)
{
    return r->list_end[round * r->lists + l];
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
        wrong += !(fabsf(out[i] - r->got.out[row * s->d + i]) <= by);
    for (uint32_t i = 0; i < rows; i++)
        wrong += !(lse[i] == r->got.lse[row + i] || fabsf(lse[i] - r->got.lse[row + i]) <= 2e-4f);
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
    for (uint32_t round = 0; round <= ROUNDS; round++)
        check(round < got->rounds ? end_of(r, round, l) < n || n == 0 : end_of(r, round, l) == n,
              "list %lu: round %u ends after %u of %u blocks", (unsigned long)l, round,
              end_of(r, round, l), n);
    if (r->stop.rule != UCM_STOP_NEVER && got->rounds > 1) {
        want = reference(r, l, end_of(r, got->rounds - 1, l), r->stop.rule, out, lse);
        check(want.share < r->stop.eps + 0.03f, "list %lu, rule %u: it did not stop at %g",
              (unsigned long)l, r->stop.rule, (double)want.share);
    }
}

static void compare_told(const struct rounds *r)
{
    struct ucm_attend_cuda_told told, want = {.share = 1};

    gpu_get(&told, r->p.args.stop.told, sizeof(told));
    for (uint64_t l = 0; l < r->lists; l++) {
        want.blocks += r->report[l].blocks;
        want.rounds = r->report[l].rounds > want.rounds ? r->report[l].rounds : want.rounds;
        want.share = fminf(want.share, r->report[l].share);
    }
    check(told.blocks == want.blocks && told.rounds == want.rounds && told.share == want.share,
          "told: %lu blocks, %u rounds, share %g, not %lu, %u, %g", (unsigned long)told.blocks,
          told.rounds, (double)told.share, (unsigned long)want.blocks, want.rounds,
          (double)want.share);
}

static void replay(struct rounds *r)
{
    struct ucm_attend_cuda_told told = {.share = 1};

    problem_draw(&r->p);
    for (uint64_t l = 0; l < r->lists; l++)
        draw_list(r, l);
    gpu_put(r->p.args.list, r->p.list, r->lists * r->p.shape.room * 4);
    gpu_put(r->p.args.stop.told, &told, sizeof(told));
    draw_scores(r);
    draw_lists(r);
    must(cuGraphLaunch(r->graph, gpu_stream), "the graph");
    gpu_sync();
    answer_get(&r->p, &r->got);
    gpu_get(r->report, r->p.args.stop.report, r->lists * sizeof(*r->report));
    gpu_get(r->list_end, r->p.args.stop.ends, (ROUNDS + 1) * r->lists * 4);
    compare_order(r);
    compare_told(r);
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
