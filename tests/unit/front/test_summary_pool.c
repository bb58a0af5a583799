/* The pool's threads: every piece runs once, phases in order, jobs take turns, and stops work.
 * Selections choose the same on any number of threads as the raw functions do on one. */
/* Sanitizers: thread */
#include "daemon/retrieval/part_build.h"
#include "daemon/retrieval/pool.h"
#include "daemon/retrieval/selection.h"
#include "kernels/sparse/arith.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

static uv_loop_t loop;
static struct summary_pool *pool;
/* 0 and 1 are of two tenants; 2 is of the first, too. */
static struct summary_turns tenants[2];
static struct summary_queue queues[3];

/* The order in which jobs ran, and a job that holds a thread until all others wait. */
static char order[64];
static unsigned order_n, ordered_done;
static uv_sem_t holds, held;

static void open_pool(unsigned threads)
{
    order_n = ordered_done = 0;
    memset(order, 0, sizeof(order));
    cr_assert_eq(uv_sem_init(&holds, 0), 0);
    cr_assert_eq(uv_sem_init(&held, 0), 0);
    for (unsigned i = 0; i < 2; i++)
        summary_turns_init(&tenants[i]);
    for (unsigned i = 0; i < 3; i++)
        summary_queue_init(&queues[i], &tenants[i % 2]);
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(summary_pool_new(&loop, threads, &pool), 0);
    cr_assert_eq(summary_pool_threads(pool), threads);
}

static void close_pool(void)
{
    summary_pool_free(pool);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&loop), 0);
    uv_sem_destroy(&holds);
    uv_sem_destroy(&held);
}

/* ---- jobs ---- */

#define PIECES 500u
#define PHASES 4u

struct counted {
    struct summary_job job;
    atomic_uint ran[PIECES];
    atomic_uint running;
    unsigned phase, done;
    uv_thread_t loop_thread;
};

static void counted_run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    struct counted *c = LIST_ENTRY(job, struct counted, job);

    cr_assert_lt(piece, PIECES);
    cr_assert_lt(thread, summary_pool_threads(pool));
    atomic_fetch_add(&c->running, 1);
    atomic_fetch_add(&c->ran[piece], 1);
    atomic_fetch_sub(&c->running, 1);
}

static uint32_t counted_phase_cb(struct summary_job *job)
{
    struct counted *c = LIST_ENTRY(job, struct counted, job);

    cr_assert_eq(atomic_load(&c->running), 0u, "no piece runs");
    return ++c->phase < PHASES ? PIECES : 0;
}

static void counted_done_cb(struct summary_job *job)
{
    struct counted *c = LIST_ENTRY(job, struct counted, job);
    uv_thread_t self = uv_thread_self();

    cr_assert(uv_thread_equal(&c->loop_thread, &self));
    c->done++;
}

static void counted_init(struct counted *c, struct summary_queue *queue)
{
    memset(c, 0, sizeof(*c));
    c->loop_thread = uv_thread_self();
    c->job = (struct summary_job){.run_cb = counted_run_cb,
                                  .phase_cb = counted_phase_cb,
                                  .done_cb = counted_done_cb,
                                  .queue = queue};
}

/* Slow ones, too, even if there is no other thread. */
static void expect_each_piece_once(unsigned threads)
{
    enum { JOBS = 8 };
    static struct counted jobs[JOBS];

    open_pool(threads);
    for (unsigned i = 0; i < JOBS; i++) {
        counted_init(&jobs[i], i % 3 ? &queues[i % 2] : NULL);
        jobs[i].job.slow = i == 1;
        summary_pool_submit(pool, &jobs[i].job, PIECES);
    }
    for (unsigned i = 0; i < JOBS; i++) {
        while (!jobs[i].done)
            uv_run(&loop, UV_RUN_ONCE);
        cr_expect_eq(jobs[i].phase, PHASES);
        for (unsigned piece = 0; piece < PIECES; piece++)
            cr_assert_eq(atomic_load(&jobs[i].ran[piece]), PHASES);
    }
    close_pool();
}

Test(summary_pool, every_piece_of_every_phase_runs_once)
{
    expect_each_piece_once(4);
    expect_each_piece_once(1);
}

struct ordered {
    struct summary_job job;
    char name;
};

static void held_run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    (void)job;
    (void)piece;
    (void)thread;
    uv_sem_post(&holds);
    uv_sem_wait(&held);
}

static void ordered_run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    (void)piece;
    (void)thread;
    order[order_n++] = LIST_ENTRY(job, struct ordered, job)->name;
}

static void ordered_done_cb(struct summary_job *job)
{
    (void)job;
    ordered_done++;
}

static void submit_ordered(struct ordered *o, char name, struct summary_queue *queue,
                           uint32_t pieces)
{
    *o = (struct ordered){.job = {.run_cb = name == '-' ? held_run_cb : ordered_run_cb,
                                  .done_cb = ordered_done_cb,
                                  .queue = queue},
                          .name = name};
    summary_pool_submit(pool, &o->job, pieces);
    if (name == '-')
        uv_sem_wait(&holds);
}

/* The order in which one thread runs these jobs. "A0x3 ...": a name, the queue ('-': none), the
 * number of pieces. */
static void expect_order(const char *jobs, const char *right)
{
    struct ordered o[8];
    unsigned n = 0;

    open_pool(1);
    submit_ordered(&o[n++], '-', NULL, 1);
    for (const char *job = jobs; *job; job += 4 + (job[4] == ' '))
        submit_ordered(&o[n++], job[0], job[1] == '-' ? NULL : &queues[job[1] - '0'],
                       (uint32_t)(job[3] - '0'));
    uv_sem_post(&held);
    while (ordered_done < n)
        uv_run(&loop, UV_RUN_ONCE);
    cr_expect_str_eq(order, right);
    close_pool();
}

Test(summary_pool, urgent_jobs_first_and_in_turns)
{
    expect_order("x-x2 y-x2 A0x3 B0x1", "ABAAxyxy");
}

/* A queue with many jobs takes as many turns as one with a single job. */
Test(summary_pool, queues_take_turns)
{
    expect_order("A0x2 B0x2 C0x2 D1x3", "ADBDCDABC");
}

/* A tenant with many users has no more turns than one with a single user. */
Test(summary_pool, tenants_take_turns)
{
    expect_order("A0x2 B2x2 C1x4 D2x1", "ACBCACDCB");
}

Test(summary_pool, others_are_not_starved)
{
    expect_order("A0x9 B1x8 x-x3", "ABABABAxBABABABxABAx");
}

/* Three slow pieces of one user on two threads: one of them runs, and others' jobs pass by. */
Test(summary_pool, slow_pieces_leave_a_thread_to_the_others)
{
    struct ordered slow = {
        .job = {
            .run_cb = held_run_cb, .done_cb = ordered_done_cb, .queue = &queues[0], .slow = true}};
    struct ordered o[3];

    open_pool(2);
    summary_pool_submit(pool, &slow.job, 3);
    uv_sem_wait(&holds);
    for (unsigned i = 0; i < 3; i++) {
        submit_ordered(&o[i], (char)('A' + i), i == 2 ? NULL : &queues[i], 2);
        while (ordered_done <= i)
            uv_run(&loop, UV_RUN_ONCE);
    }
    cr_expect_str_eq(order, "AABBCC");
    cr_expect_eq(uv_sem_trywait(&holds), UV_EAGAIN, "no second slow piece has begun");
    for (unsigned i = 0; i < 3; i++) {
        uv_sem_post(&held);
        if (i < 2)
            uv_sem_wait(&holds); /* each begins when the one before has ended */
    }
    while (ordered_done < 4)
        uv_run(&loop, UV_RUN_ONCE);
    close_pool();
}

Test(summary_pool, what_was_stopped_does_no_more)
{
    struct ordered first;
    static struct counted c;

    open_pool(1);
    submit_ordered(&first, '-', NULL, 1);
    counted_init(&c, &queues[0]);
    summary_pool_submit(pool, &c.job, PIECES);
    summary_job_stop(&c.job);
    uv_sem_post(&held);
    while (!c.done)
        uv_run(&loop, UV_RUN_ONCE);
    cr_expect_eq(c.phase, 0u);
    for (unsigned piece = 0; piece < PIECES; piece++)
        cr_assert_eq(atomic_load(&c.ran[piece]), 0u);
    close_pool();
}

/* ---- selections ---- */

#define LAYERS 3u
#define BLOCKS 700u
#define ROWS 9u
#define Q_HEADS 4u
#define DIM 32u

static uint64_t state = 1;

static float noise(void)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

static const uint32_t blocks_of[ROWS] = {BLOCKS, 0, 1, 13, BLOCKS, 2, 0, 400, 64};

static const struct ucm_summary_spec spec = {.method = UCM_SUMMARY_BOX,
                                             .shape = {.tokens = 4,
                                                       .kv_heads = 2,
                                                       .head_dim = DIM,
                                                       .k_token_stride = 2 * DIM * 4,
                                                       .k_head_stride = DIM * 4}};
static struct ucm_summary_plan plan;
static const void *summaries[BLOCKS];
static float q[ROWS * Q_HEADS * DIM];

static void part_built_cb(struct summary_job *job)
{
    *(bool *)(LIST_ENTRY(job, struct part_build, job) + 1) = true;
}

/* Summaries of BLOCKS parts, built on the pool; each ninth block has none. */
static void summaries_build(void)
{
    struct {
        struct part_build build;
        bool done;
    } b;
    char why[UCM_SPARSE_WHY];
    float kv[LAYERS][4 * 2 * DIM];
    struct form from = {.layer_bytes = sizeof(kv[0]), .layers = LAYERS}, built;
    struct span base, summary;

    cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
    built = (struct form){.layer_bytes = plan.bytes, .layers = LAYERS};
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint8_t *to = calloc(LAYERS, plan.bytes), right[4096];

        for (uint32_t k = 0; k < sizeof(kv) / sizeof(float); k++)
            (&kv[0][0])[k] = noise();
        memset(&b, 0, sizeof(b));
        base = (struct span){.form = &from, .n = LAYERS, .origin = (uint8_t *)kv};
        summary = (struct span){.form = &built, .n = LAYERS, .origin = to, .pending = true};
        cr_assert_eq(part_build_init(&b.build, &plan, &from, &built), 0);
        b.build.job.done_cb = part_built_cb;
        cr_assert_eq(part_build_submit(pool, &b.build, &base, &summary), 0);
        while (!b.done)
            uv_run(&loop, UV_RUN_ONCE);
        ucm_summary_build(&plan, kv[2], right);
        cr_assert_eq(memcmp(to + 2 * plan.bytes, right, plan.bytes), 0);
        summaries[i] = to;
        if (i % 9 == 8) {
            free(to);
            summaries[i] = NULL;
        }
    }
    for (size_t i = 0; i < sizeof(q) / sizeof(q[0]); i++)
        q[i] = noise();
}

/* A build may read and write two whole parts, of the forms that it was begun with. A plan stays
 * within the first. */
Test(summary_pool, a_build_takes_its_own_forms_only)
{
    static const struct ucm_encoding_spec fp8 = {.encoding = UCM_ENCODING_FP8,
                                                 .version = 1,
                                                 .dtype = UCM_ENCODING_BF16,
                                                 .n_tensors = 1,
                                                 .tensor = {{.tokens = 4, .heads = 2, .dim = DIM}}};
    struct part_build b = {0};
    char why[UCM_SPARSE_WHY];
    uint8_t memory[1];
    struct codec codec;
    struct form raw, built, encoded, half;
    struct span from, to, odd;

    cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
    codec_init(&codec, &fp8);
    raw = (struct form){.layer_bytes = 4 * 2 * DIM * 4, .layers = 2};
    built = (struct form){.layer_bytes = plan.bytes, .layers = 2};
    encoded =
        (struct form){.layer_bytes = ucm_encoding_layer_bytes(&fp8), .layers = 2, .codec = &codec};
    half = (struct form){.layer_bytes = codec.raw_layer_bytes, .layers = 2};
    cr_expect_eq(part_build_init(&b, &plan, &half, &built), -EINVAL, "the plan reaches after it");
    cr_expect_eq(part_build_init(&b, &plan, &encoded, &built), -EINVAL, "it lost something");
    cr_expect_eq(part_build_init(&b, &plan, &raw, &half), -EINVAL, "no summary's length");
    cr_expect_eq(part_build_init(&b, NULL, &encoded, &raw), -EINVAL, "other sizes");
    cr_expect_eq(part_build_init(&b, NULL, &half, &half), -EINVAL, "neither is encoded");
    cr_expect_eq(part_build_init(&b, NULL, &half, &encoded), -EINVAL, "nobody asks for it");
    cr_expect_eq(part_build_init(&b, NULL, &encoded, &half), 0);
    half.layers = 3;
    cr_expect_eq(part_build_init(&b, NULL, &encoded, &half), -EINVAL, "more layers");
    cr_expect_eq(part_build_init(&b, &plan, &raw, &built), 0);
    from = (struct span){.form = &raw, .n = 2, .origin = memory};
    to = (struct span){.form = &built, .n = 2, .origin = memory, .pending = true};
    odd = from;
    odd.form = &half;
    cr_expect_eq(part_build_submit(pool, &b, &odd, &to), -EINVAL);
    odd = from;
    odd.n = 1;
    cr_expect_eq(part_build_submit(pool, &b, &odd, &to), -EINVAL);
    odd = to;
    odd.pending = false;
    cr_expect_eq(part_build_submit(pool, &b, &from, &odd), -EINVAL, "others read it");
    cr_expect_eq(part_build_submit(pool, &b, &to, &from), -EINVAL);
}

struct run {
    struct selection s;
    struct select_row rows[ROWS];
    struct select_list lists[ROWS * 2];
    uint32_t index[ROWS * 2 * BLOCKS];
    float chosen[ROWS * 2 * BLOCKS];
    bool done;
};

static void selected_cb(struct summary_job *job)
{
    LIST_ENTRY(job, struct run, s.job)->done = true;
}

static void run_init(struct run *r, uint32_t reduce, uint32_t heads)
{
    memset(r, 0, sizeof(*r));
    r->s = (struct selection){
        .job.done_cb = selected_cb,
        .plan = &plan,
        .score = {.reduce = reduce, .heads = heads, .rows = 1, .q_heads = Q_HEADS},
        .choose = {.min_blocks = 5, .sparse_ratio = 0.1, .sink_blocks = 1, .recent_blocks = 2},
        .q_dtype = SELECT_F32,
        .q = q,
        .n_rows = ROWS,
        .blocks = blocks_of,
        .rows = r->rows,
        .lists = r->lists,
        .index = r->index,
        .chosen = r->chosen,
    };
    for (uint32_t i = 0; i < ROWS; i++) {
        r->rows[i].summaries = summaries;
        r->rows[i].offset = i % LAYERS * (uint64_t)plan.bytes;
    }
    for (uint32_t i = 0; i < ROWS * selection_lists(&r->s); i++) {
        r->lists[i].cap = blocks_of[i / selection_lists(&r->s)];
        r->lists[i].first = i * BLOCKS;
    }
}

static void run_select(struct run *r)
{
    size_t bytes = (selection_bytes(&r->s, summary_pool_threads(pool)) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes);

    cr_assert(memory);
    memset(memory, 0xcc, bytes); /* it need not be zero */
    selection_submit(pool, &queues[0], &r->s, memory);
    while (!r->done)
        uv_run(&loop, UV_RUN_ONCE);
    free(memory);
}

/* Row i as the raw functions have it. */
static void expect_row(struct run *r, uint32_t i)
{
    struct selection *s = &r->s;
    uint32_t n = s->blocks[i], lists = selection_lists(s), *index = malloc(4 * (size_t)n + 4);
    size_t scratch_bytes = ucm_score_scratch_bytes(&plan, &s->score, n) + 64;
    uint8_t *scratch = aligned_alloc(64, scratch_bytes / 64 * 64 + 64);
    void *choosing = malloc(ucm_choose_scratch_bytes(&s->choose, n));
    float *scores = calloc(lists * (n + 1), sizeof(float));
    struct ucm_score_blocks blocks = {
        .at = s->rows[i].summaries, .offset = s->rows[i].offset, .n = n};
    struct ucm_score_job job;

    ucm_score_begin(&job, &plan, &s->score, &blocks, q + (size_t)i * Q_HEADS * DIM, scratch,
                    scores);
    if (n > 0)
        ucm_score_all(&job);
    for (uint32_t l = 0; l < lists; l++) {
        const struct select_list *got = &s->lists[i * lists + l];
        uint32_t k =
            n > 0 ? ucm_choose(&s->choose, scores + (size_t)l * n, n, choosing, index, NULL, n) : 0;

        cr_assert_eq(got->n, k, "row %u, list %u", i, l);
        cr_assert_eq(memcmp(s->index + got->first, index, k * sizeof(*index)), 0);
        for (uint32_t c = 0; c < k; c++)
            cr_assert_eq(ucm_f32_bits(s->chosen[got->first + c]),
                         ucm_f32_bits(scores[(size_t)l * n + index[c]]));
    }
    free(index);
    free(scores);
    free(choosing);
    free(scratch);
}

Test(summary_pool, selections_do_not_depend_on_threads)
{
    static struct run r;

    for (unsigned threads = 1; threads <= 5; threads += 2) {
        open_pool(threads);
        if (!summaries[0])
            summaries_build();
        for (uint32_t reduce = 0; reduce < 3; reduce++)
            for (uint32_t heads = 0; heads < 3; heads++) {
                run_init(&r, reduce, heads);
                run_select(&r);
                cr_assert_eq(atomic_load(&r.s.bad), UINT64_MAX);
                for (uint32_t i = 0; i < ROWS; i++)
                    expect_row(&r, i);
            }
        close_pool();
    }
}

Test(summary_pool, the_first_value_that_is_not_finite_is_told)
{
    static struct run r;

    open_pool(3);
    summaries_build();
    run_init(&r, 0, 0);
    q[5 * Q_HEADS * DIM + 7] = ucm_inf();
    q[3 * Q_HEADS * DIM + 9] = -ucm_inf();
    run_select(&r);
    cr_expect_eq(atomic_load(&r.s.bad), 3u * Q_HEADS * DIM + 9);
    close_pool();
}

/* Rows whose choices are cut into pieces, between others: 0 blocks, few, and just as many as one piece
 * takes. */
static const uint32_t long_rows[] = {70000, 0, 150000, 300, 65536, 65537};
#define LONG_ROWS (sizeof(long_rows) / sizeof(long_rows[0]))
#define LONG_MOST 150000u

static void long_select(struct run *r, uint32_t heads, uint32_t policy)
{
    static const void *at[LONG_MOST];
    uint32_t first = 0;

    for (uint32_t b = 0; b < LONG_MOST; b++)
        at[b] = summaries[b % BLOCKS];
    run_init(r, UCM_REDUCE_MAX, heads);
    r->s.choose.policy = policy;
    r->s.choose.eps = 0.7;
    r->s.choose.beta = 1;
    r->s.n_rows = LONG_ROWS;
    r->s.blocks = long_rows;
    for (uint32_t i = 0; i < LONG_ROWS; i++) {
        r->rows[i].summaries = at;
        for (uint32_t l = 0; l < selection_lists(&r->s); l++) {
            struct select_list *list = &r->lists[i * selection_lists(&r->s) + l];

            *list = (struct select_list){.cap = long_rows[i], .first = first};
            first += long_rows[i];
        }
    }
    r->s.index = malloc(first * sizeof(*r->s.index));
    r->s.chosen = malloc(first * sizeof(*r->s.chosen));
    run_select(r);
    for (uint32_t i = 0; i < LONG_ROWS; i++)
        expect_row(r, i);
    free(r->s.index);
    free(r->s.chosen);
}

/* ThreadSanitizer has nothing to find on one thread. It sees each value of heads and policy once,
 * and not all pairs. */
#ifdef __SANITIZE_THREAD__
#define FEWEST 4
#else
#define FEWEST 1
#endif

Test(summary_pool, long_choices_are_those_of_one_piece)
{
    static struct run r;

    for (unsigned threads = FEWEST; threads <= 4; threads += 3) {
        open_pool(threads);
        if (!summaries[0])
            summaries_build();
        for (uint32_t heads = UCM_HEADS_EACH; heads <= UCM_HEADS_SUM; heads++)
            for (uint32_t policy = UCM_CHOOSE_TOPK; policy <= UCM_CHOOSE_MASS; policy++)
                if (FEWEST == 1 || heads - UCM_HEADS_EACH == policy - UCM_CHOOSE_TOPK)
                    long_select(&r, heads, policy);
        close_pool();
    }
}
