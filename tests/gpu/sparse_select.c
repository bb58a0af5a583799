/* Selections: every method, reduce and policy. Sequences of many lengths in a launch; blocks
 * without summaries, poisoned blocks, and many with the same score. Launches of a graph whose
 * inputs change. */
#include "client/lib/sparse/spec.h"
#include "tests/gpu/sparse.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SEQUENCES 6u

struct problem {
    struct ucm_sparse_summary summary;
    struct ucm_cuda_select_options options;
    struct ucm_summary_plan *plan;
    struct ucm_cuda_select_info info;
    uint32_t region; /* blocks */
    size_t stride;
    uint8_t *summaries;
    int32_t *table, n_blocks[SEQUENCES];
    float *q; /* widened */
    uint8_t *q_raw;
    size_t q_values, q_bytes;
    struct ucm_cuda_select_layer layer;
};

/* ---- inputs ---- */

static void put_scale(uint8_t *at, bool poison)
{
    uint16_t s = poison ? 0x7fc0 : (uint16_t)(0x3a00 + rnd_below(0x200));

    memcpy(at, &s, sizeof(s));
}

/* Any bytes are a summary, except scales and poison. */
static void random_summary(const struct ucm_summary_plan *p, uint8_t *out)
{
    uint32_t heads = p->spec.shape.kv_heads, arrays = p->spec.method == UCM_SUMMARY_STATS ? 3 : 1;

    for (uint32_t i = 0; i < p->bytes; i++)
        out[i] = (uint8_t)rnd();
    for (uint32_t g = 0; g < heads; g++) {
        uint32_t poison = rnd_below(300) == 0;

        if (p->spec.method == UCM_SUMMARY_HASH)
            memcpy(out + p->array[1] + 4 * g, &poison, sizeof(poison));
        else
            for (uint32_t a = 0; a < arrays; a++)
                for (uint32_t j = 0; j < p->vectors; j++)
                    put_scale(out + p->scale[a] + 2 * (g * p->vectors + j), poison);
    }
}

static void random_queries(struct problem *p)
{
    uint32_t dtype = p->options.q_dtype;

    for (size_t i = 0; i < p->q_values; i++) {
        float size = rnd_below(50) > 0 ? 1 : rnd_below(2) ? 0 : 20;
        uint16_t h;

        if (dtype == UCM_SPARSE_BF16 || dtype == UCM_SPARSE_F16) {
            p->q[i] = rnd_element(dtype == UCM_SPARSE_BF16, size, &h);
            memcpy(p->q_raw + 2 * i, &h, sizeof(h));
            continue;
        }
        p->q[i] = size * rnd_normal() + 0.0f;
        if (rnd_below(20000) == 0)
            p->q[i] = NAN; /* the daemon refuses this; here it only loses */
        memcpy(p->q_raw + 4 * i, &p->q[i], sizeof(p->q[i]));
    }
}

static void random_table(struct problem *p)
{
    uint32_t max = p->options.max_blocks;

    for (size_t i = 0; i < (size_t)SEQUENCES * max; i++) {
        uint32_t kind = rnd_below(200);

        p->table[i] = kind == 0   ? -1
                      : kind == 1 ? (int32_t)p->region
                                  : (int32_t)rnd_below(p->region); /* some often: ties */
    }
}

static void random_inputs(struct problem *p)
{
    for (uint32_t b = 0; b < p->region; b++)
        random_summary(p->plan, p->summaries + b * p->stride);
    random_queries(p);
    random_table(p);
    for (uint32_t c = 0; c < SEQUENCES; c++)
        p->n_blocks[c] = (int32_t)rnd_below(
            (rnd_below(3) || p->options.max_blocks < 12 ? p->options.max_blocks : 11) + 1);
    p->n_blocks[0] = (int32_t)p->options.max_blocks;
    p->n_blocks[1] = 0;
    gpu_put(p->layer.summaries, p->summaries, p->region * p->stride);
    gpu_put(p->layer.q, p->q_raw, p->q_bytes);
    gpu_put(p->layer.table, p->table,
            (size_t)SEQUENCES * p->options.max_blocks * sizeof(*p->table));
    gpu_put(p->layer.n_blocks, p->n_blocks, sizeof(p->n_blocks));
}

static void problem_init(struct problem *p)
{
    const struct ucm_sparse_score *s = &p->options.score;

    p->plan = plan_of(&p->summary);
    p->stride = p->plan->bytes + 4 * rnd_below(3);
    if (rnd_below(2))
        p->stride = (p->stride + 15) / 16 * 16;
    p->summaries = fresh(p->region * p->stride);
    p->table = fresh((size_t)SEQUENCES * p->options.max_blocks * sizeof(*p->table));
    p->q_values = (size_t)SEQUENCES * s->rows * s->q_heads * p->summary.shape.head_dim;
    p->q_bytes = p->q_values * (p->options.q_dtype == UCM_SPARSE_F32 ? 4 : 2);
    p->q = fresh(p->q_values * sizeof(*p->q));
    p->q_raw = fresh(p->q_bytes);
    p->options.sequences = SEQUENCES;
    p->layer = (struct ucm_cuda_select_layer){
        .summaries = gpu_new(p->region * p->stride),
        .stride = p->stride,
        .bound = p->region,
        .sequences = SEQUENCES,
        .table = gpu_new((size_t)SEQUENCES * p->options.max_blocks * sizeof(*p->table)),
        .table_stride = p->options.max_blocks,
        .n_blocks = gpu_new(sizeof(p->n_blocks)),
        .q = gpu_new(p->q_bytes)};
}

/* ---- the reference ---- */

static struct ucm_choose_spec choose_of(const struct problem *p)
{
    struct ucm_choose_spec spec = sparse_choose_spec(&p->options.choose);
    char why[UCM_SPARSE_WHY];

    check(ucm_choose_for(&p->plan->spec, &spec, why) == 0, "the choice: %s", why);
    return spec;
}

struct lists {
    uint32_t *count, *index;
    float *score;
};

static void lists_init(struct lists *l, const struct problem *p)
{
    size_t lists = (size_t)SEQUENCES * p->info.lists;

    l->count = fresh(lists * sizeof(*l->count));
    l->index = fresh(lists * p->info.room * sizeof(*l->index));
    l->score = fresh(lists * p->info.room * sizeof(*l->score));
}

/* How many blocks each sequence may choose, if the launch says it: one sequence none, and one more
 * than there are. */
static uint32_t most_of(const struct problem *p, uint32_t sequence)
{
    return sequence == 1 ? 0 : sequence == 2 ? UINT32_MAX : p->info.room * sequence / SEQUENCES;
}

/* The same in the words of a spec. */
static struct ucm_choose_spec choose_most(const struct problem *p, uint32_t sequence)
{
    struct ucm_choose_spec choose = choose_of(p);

    choose.topk_tokens = 0;
    choose.sparse_ratio = 0;
    choose.min_blocks = most_of(p, sequence);
    return choose;
}

static void most_put(struct problem *p)
{
    uint32_t most[SEQUENCES];

    for (uint32_t i = 0; i < SEQUENCES; i++)
        most[i] = most_of(p, i);
    if (p->options.choose.policy == UCM_SPARSE_TOPK)
        p->layer.most = gpu_put(0, most, sizeof(most));
}

static void reference_sequence(const struct problem *p, uint32_t sequence, struct lists *out)
{
    const struct ucm_sparse_score *s = &p->options.score;
    struct ucm_score_spec score = {s->metric, s->reduce, s->heads, s->rows, s->q_heads, s->beta};
    uint32_t n = (uint32_t)p->n_blocks[sequence], room = p->info.room;
    struct ucm_choose_spec choose = p->layer.most ? choose_most(p, sequence) : choose_of(p);
    const void **at = fresh(n * sizeof(*at));
    struct ucm_score_blocks blocks = {.at = at, .n = n};
    float *scores = fresh((size_t)p->info.lists * n * sizeof(*scores));
    void *scratch = fresh(ucm_score_scratch_bytes(p->plan, &score, n));
    void *choosing = fresh(ucm_choose_scratch_bytes(&choose, n));
    struct ucm_score_job job;

    for (uint32_t b = 0; b < n; b++) {
        int32_t number = p->table[(size_t)sequence * p->options.max_blocks + b];

        at[b] = number >= 0 && number < (int32_t)p->region
                    ? p->summaries + (size_t)number * p->stride
                    : NULL;
    }
    ucm_score_begin(&job, p->plan, &score, &blocks, p->q + sequence * (p->q_values / SEQUENCES),
                    scratch, scores);
    ucm_score_all(&job);
    for (uint32_t l = 0; l < p->info.lists; l++) {
        size_t list = (size_t)sequence * p->info.lists + l;

        out->count[list] = ucm_choose(&choose, scores + (size_t)l * n, n, choosing,
                                      out->index + list * room, out->score + list * room, room);
    }
}

/* ---- comparing ---- */

static const char *problem_name(const struct problem *p)
{
    static char name[200];
    const struct ucm_sparse_score *s = &p->options.score;

    snprintf(
        name, sizeof(name),
        "%s, %u heads of %u, q %u x %u, metric %u, reduce %u, heads %u, policy %u, q dtype %u, "
        "%u blocks",
        method_name(p->summary.method), p->summary.shape.kv_heads, p->summary.shape.head_dim,
        s->rows, s->q_heads, s->metric, s->reduce, s->heads, p->options.choose.policy,
        p->options.q_dtype, p->options.max_blocks);
    return name;
}

static bool list_equal(const struct problem *p, const struct lists *want, const struct lists *got,
                       size_t list)
{
    size_t first = list * p->info.room, n = want->count[list];

    if (!check(got->count[list] == n, "%s: list %zu has %u blocks, not %zu", problem_name(p), list,
               got->count[list], n))
        return false;
    for (size_t i = 0; i < n; i++)
        if (got->index[first + i] != want->index[first + i] ||
            memcmp(&got->score[first + i], &want->score[first + i], sizeof(float)) != 0)
            return check(false, "%s: list %zu, place %zu of %zu: block %u with %a, not %u with %a",
                         problem_name(p), list, i, n, got->index[first + i],
                         (double)got->score[first + i], want->index[first + i],
                         (double)want->score[first + i]);
    for (size_t i = n; i < p->info.room; i++)
        if (got->index[first + i] != UCM_CUDA_SELECT_NONE)
            return check(false, "%s: list %zu has %u past its end", problem_name(p), list,
                         got->index[first + i]);
    return true;
}

static void answers_new(struct problem *p)
{
    size_t lists = (size_t)SEQUENCES * p->info.lists;

    p->layer.count = gpu_new(lists * sizeof(uint32_t));
    p->layer.index = gpu_new(lists * p->info.room * sizeof(uint32_t));
    p->layer.score = gpu_new(lists * p->info.room * sizeof(float));
}

static void answers_compare(struct problem *p)
{
    size_t lists = (size_t)SEQUENCES * p->info.lists;
    struct lists want, got;
    bool equal = true;

    lists_init(&want, p);
    lists_init(&got, p);
    for (uint32_t c = 0; c < SEQUENCES; c++)
        reference_sequence(p, c, &want);
    gpu_get(got.count, p->layer.count, lists * sizeof(uint32_t));
    gpu_get(got.index, p->layer.index, lists * p->info.room * sizeof(uint32_t));
    gpu_get(got.score, p->layer.score, lists * p->info.room * sizeof(float));
    for (size_t list = 0; list < lists && equal; list++)
        equal = list_equal(p, &want, &got, list);
    check(equal, "%s", problem_name(p));
}

static void compare(struct problem *p)
{
    struct ucm_cuda_select *s;

    problem_init(p);
    if (check(ucm_cuda_select_open(gpu_uuid, &p->summary, &p->options, &s) == 0, "%s: open: %s",
              problem_name(p), ucm_cuda_errmsg())) {
        (void)ucm_cuda_select_info(s, &p->info);
        answers_new(p);
        for (int round = 0; round < 2; round++) {
            if (round == 1 && rnd_below(2))
                most_put(p);
            random_inputs(p);
            check(ucm_cuda_select(s, &p->layer, gpu_stream) == 0, "%s: launch: %s", problem_name(p),
                  ucm_cuda_errmsg());
            gpu_sync();
            answers_compare(p);
        }
        ucm_cuda_select_close(s);
    }
    memory_end();
}

/* ---- cases ---- */

static void random_choose(struct ucm_sparse_choose *c, uint32_t policy, uint32_t max_blocks)
{
    *c = (struct ucm_sparse_choose){.policy = policy,
                                    .topk_tokens = rnd_below(2) * rnd_below(max_blocks * 8),
                                    .min_blocks = rnd_below(8),
                                    .sink_blocks = rnd_below(4),
                                    .recent_blocks = rnd_below(5),
                                    .limit = rnd_below(3) == 0 ? 1 + rnd_below(max_blocks) : 0,
                                    .sparse_ratio = rnd_below(101) / 100.0,
                                    .eps = rnd_below(101) / 100.0,
                                    .beta_m = 0.02 + rnd_below(100) / 50.0};
}

struct shape {
    uint32_t heads, group, d, tokens, rope;
};

/* One that the method has. */
static uint32_t random_metric(uint32_t method)
{
    switch (method) {
    case UCM_SPARSE_MEAN:
    case UCM_SPARSE_SUBMEAN:
    case UCM_SPARSE_TOKENS:
        return rnd_below(3);
    case TOKENS_REST:
        return rnd_below(2) * UCM_SPARSE_ROUNDED;
    default:
        return UCM_SPARSE_DOT;
    }
}

static void one_by(uint32_t metric, uint32_t policy, uint32_t method, const struct shape *s,
                   uint32_t reduce, uint32_t heads, uint32_t max_blocks)
{
    struct problem p = {.region = 40 + rnd_below(400)};

    if (!summary_of(&p.summary, method, UCM_SPARSE_F16, s->tokens, s->heads, s->d, s->rope))
        return;
    p.options.score = (struct ucm_sparse_score){.metric = metric,
                                                .reduce = reduce,
                                                .heads = heads,
                                                .rows = rnd_below(2) ? 1 : 1 + rnd_below(3),
                                                .q_heads = s->heads * s->group,
                                                .beta = rnd_below(2) ? 0 : 0.1f};
    p.options.q_dtype = rnd_below(3);
    p.options.max_blocks = max_blocks;
    random_choose(&p.options.choose, policy, max_blocks);
    compare(&p);
}

static void one(uint32_t method, const struct shape *s, uint32_t reduce, uint32_t heads,
                uint32_t max_blocks)
{
    one_by(random_metric(method), rnd_below(2), method, s, reduce, heads, max_blocks);
}

static const struct shape shapes[] = {{8, 4, 128, 16, 0}, {1, 128, 576, 16, 64}, {3, 3, 64, 16, 0},
                                      {2, 1, 128, 16, 0}, {5, 7, 100, 8, 0},     {1, 1, 4, 1, 0},
                                      {2, 8, 256, 4, 0},  {17, 2, 64, 4, 0},     {4, 1, 64, 8, 0},
                                      {1, 16, 68, 4, 20}, {2, 5, 36, 12, 0},     {4, 8, 128, 16, 0},
                                      {3, 17, 64, 8, 0},  {20, 1, 128, 4, 0}};

/* Very many scores of their own that begin alike: more candidates than shared memory has room for. */
static void many_candidates(double sparse_ratio)
{
    struct problem p = {.region = 60000};

    if (!summary_of(&p.summary, UCM_SPARSE_MEAN, UCM_SPARSE_F16, 8, 4, 64, 0))
        return;
    p.options.score =
        (struct ucm_sparse_score){.heads = UCM_SPARSE_HEADS_SUM, .rows = 1, .q_heads = 4};
    p.options.max_blocks = 120000;
    p.options.choose = (struct ucm_sparse_choose){
        .sparse_ratio = sparse_ratio, .min_blocks = 4, .sink_blocks = 1, .recent_blocks = 2};
    compare(&p);
}

/* Clusters of thread blocks choose from lists of KV heads, of tokens with rest by the metric
 * `rounded`. There are as many lists as the GPU has room for at once. Query heads are few and many,
 * lists short and long. */
static void clusters(void)
{
    static const struct shape of[] = {{2, 4, 128, 16, 0}, {1, 8, 128, 4, 0},  {2, 1, 128, 16, 0},
                                      {1, 5, 128, 16, 0}, {1, 16, 128, 8, 0}, {2, 3, 128, 33, 0}};
    static const uint32_t blocks[] = {9, 150, 700, 2500, 9000};

    for (uint32_t i = 0; i < (few ? 1 : sizeof(of) / sizeof(*of)); i++)
        for (uint32_t k = 0; k < (few ? 2 : sizeof(blocks) / sizeof(*blocks)); k++)
            for (uint32_t reduce = 0; reduce < 3; reduce++)
                one_by(UCM_SPARSE_ROUNDED, UCM_SPARSE_TOPK, TOKENS_REST, &of[i], reduce,
                       UCM_SPARSE_HEADS_EACH, 1 + rnd_below(blocks[k]));
    if (!few)
        one_by(UCM_SPARSE_ROUNDED, UCM_SPARSE_TOPK, TOKENS_REST, &of[0], UCM_SPARSE_REDUCE_SOFTMAX,
               UCM_SPARSE_HEADS_EACH, 66000);
}

/* The same with more lists than clusters at once. Tiles of summaries stream to warps that score,
 * while other warps choose. */
static void streams(void)
{
    static const struct shape of[] = {{8, 4, 128, 16, 0}, {4, 7, 128, 16, 0}, {8, 1, 128, 33, 0}};
    static const uint32_t blocks[] = {20, 700, 9000};

    for (uint32_t i = 0; i < (few ? 1 : sizeof(of) / sizeof(*of)); i++)
        for (uint32_t k = 0; k < (few ? 2 : sizeof(blocks) / sizeof(*blocks)); k++)
            one_by(UCM_SPARSE_ROUNDED, UCM_SPARSE_TOPK, TOKENS_REST, &of[i],
                   UCM_SPARSE_REDUCE_SOFTMAX, UCM_SPARSE_HEADS_EACH, 1 + rnd_below(blocks[k]));
}

void test_selections(void)
{
    clusters();
    streams();
    for (uint32_t method = UCM_SPARSE_MEAN; method <= TOKENS_REST; method++) {
        for (uint32_t reduce = 0; reduce < 3; reduce++)
            for (uint32_t heads = 0; heads < 3; heads++)
                one(method, &shapes[few ? 2 : 0], reduce, heads, few ? 100 : 700);
        if (few)
            continue;
        for (uint32_t i = 1; i < sizeof(shapes) / sizeof(*shapes); i++)
            for (int k = 0; k < 2; k++)
                one(method, &shapes[i], rnd_below(3), rnd_below(3), 1 + rnd_below(600));
        one(method, &shapes[0], UCM_SPARSE_REDUCE_MAX, UCM_SPARSE_HEADS_EACH, 17000);
    }
    if (few) {
        one(UCM_SPARSE_MEAN, &shapes[8], UCM_SPARSE_REDUCE_MAX, UCM_SPARSE_HEADS_SUM, 17000);
        return;
    }
    for (uint32_t i = 0; i < 6; i++) /* longer than what is held */
        one(UCM_SPARSE_BOX, &shapes[2], i % 3, i % 3, 66000);
    one(UCM_SPARSE_MEAN, &shapes[8], UCM_SPARSE_REDUCE_MAX, UCM_SPARSE_HEADS_SUM, 300000);
    many_candidates(0.1);
    many_candidates(0.4);
}

/* A captured launch is replayed with other contents, and alongside another launch that takes the
 * whole GPU. */
void test_graphs(void)
{
    struct problem p = {.region = 500};
    struct ucm_cuda_select *s, *other;
    CUgraphExec exec;
    CUstream beside;
    CUgraph graph;

    summary_of(&p.summary, UCM_SPARSE_BOX, UCM_SPARSE_BF16, 16, 8, 128, 0);
    p.options.score = (struct ucm_sparse_score){.reduce = UCM_SPARSE_REDUCE_SOFTMAX,
                                                .heads = UCM_SPARSE_HEADS_SUM,
                                                .rows = 1,
                                                .q_heads = 32};
    p.options.q_dtype = UCM_SPARSE_BF16;
    p.options.max_blocks = 3000;
    p.options.choose = (struct ucm_sparse_choose){
        .sparse_ratio = 0.1, .min_blocks = 4, .sink_blocks = 1, .recent_blocks = 2};
    problem_init(&p);
    check(ucm_cuda_select_open(gpu_uuid, &p.summary, &p.options, &s) == 0 &&
              ucm_cuda_select_open(gpu_uuid, &p.summary, &p.options, &other) == 0,
          "graph: open: %s", ucm_cuda_errmsg());
    (void)ucm_cuda_select_info(s, &p.info);
    answers_new(&p);
    must(cuStreamCreate(&beside, CU_STREAM_NON_BLOCKING), "a stream");
    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    check(ucm_cuda_select(s, &p.layer, gpu_stream) == 0, "captured launch: %s", ucm_cuda_errmsg());
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&exec, graph, 0), "a graph");
    for (int round = 0; round < 20; round++) {
        struct problem twin;

        random_inputs(&p);
        twin = p;
        answers_new(&twin);
        check(ucm_cuda_select(other, &twin.layer, beside) == 0, "alongside: %s", ucm_cuda_errmsg());
        must(cuGraphLaunch(exec, gpu_stream), "a graph");
        gpu_sync();
        must(cuStreamSynchronize(beside), "the kernel alongside");
        answers_compare(&p);
        answers_compare(&twin);
    }
    must(cuGraphExecDestroy(exec), "a graph");
    must(cuGraphDestroy(graph), "a graph");
    must(cuStreamDestroy(beside), "a stream");
    ucm_cuda_select_close(s);
    ucm_cuda_select_close(other);
    memory_end();
}
