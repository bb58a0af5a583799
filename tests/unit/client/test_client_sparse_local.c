/* Summaries, scores and choices of the client library on the caller's memory. Other tests show that
 * the kernels are right. Here they get what callers pass. */
#include "client/include/ucmclient_sparse.h"
#include "kernels/sparse/select.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 4, HEADS = 2, DIM = 8, Q_HEADS = 4, BLOCKS = 50 };

static float kv[BLOCKS][TOKENS][HEADS][DIM], q[2][Q_HEADS][DIM];
static _Alignas(8) uint8_t summaries[BLOCKS * 80];
static uint64_t bytes;

static struct ucm_sparse_summary summary_of(uint32_t method)
{
    return (struct ucm_sparse_summary){
        .method = method,
        .run = method == UCM_SPARSE_SUBMEAN ? 2 : 0,
        .bits = method == UCM_SPARSE_HASH ? 64 : 0,
        .chosen = method == UCM_SPARSE_TOKENS ? 1 : 0,
        .shape = {.dtype = UCM_SPARSE_F32,
                  .tokens = TOKENS,
                  .kv_heads = HEADS,
                  .head_dim = DIM,
                  .k_token_stride = HEADS * DIM * 4,
                  .k_head_stride = DIM * 4},
    };
}

static void fill(void)
{
    unsigned seed = 3;

    for (size_t i = 0; i < sizeof kv / 4; i++)
        ((float *)kv)[i] = (float)rand_r(&seed) / (float)RAND_MAX - 0.5f;
    for (size_t i = 0; i < sizeof q / 4; i++)
        ((float *)q)[i] = (float)rand_r(&seed) / (float)RAND_MAX - 0.5f;
}

static struct ucm_sparse_summaries compute(const struct ucm_sparse_summary *d)
{
    cr_assert_eq(ucm_sparse_summary_bytes(d, &bytes), 0, "%s", ucm_errmsg());
    cr_assert(bytes % 4 == 0 && bytes * BLOCKS <= sizeof summaries);
    cr_assert_eq(ucm_sparse_summary_local(d, kv, sizeof kv, sizeof kv[0], BLOCKS, summaries,
                                          bytes * BLOCKS, bytes),
                 0, "%s", ucm_errmsg());
    return (struct ucm_sparse_summaries){
        .p = summaries, .bytes = bytes * BLOCKS, .stride = bytes, .n = BLOCKS};
}

TestSuite(sparse_local, .init = fill);

Test(sparse_local, the_bytes_are_the_kernels)
{
    /* The last round: tokens with rest. */
    for (uint32_t round = UCM_SPARSE_MEAN; round <= UCM_SPARSE_TOKENS + 1; round++) {
        uint32_t method = round <= UCM_SPARSE_TOKENS ? round : UCM_SPARSE_TOKENS;
        struct ucm_sparse_summary d = summary_of(method);
        struct ucm_summary_spec spec = {
            .method = method,
            .run = d.run,
            .bits = d.bits,
            .chosen = d.chosen,
            .rest = round > UCM_SPARSE_TOKENS,
            .shape = {.tokens = TOKENS,
                      .kv_heads = HEADS,
                      .head_dim = DIM,
                      .k_token_stride = HEADS * DIM * 4,
                      .k_head_stride = DIM * 4},
        };
        struct ucm_summary_plan plan;
        char why[UCM_SPARSE_WHY];
        _Alignas(8) uint8_t one[256];

        d.rest = spec.rest;
        (void)compute(&d);
        cr_assert_eq(ucm_summary_plan_init(&plan, &spec, why), 0, "%s", why);
        cr_assert_eq(plan.bytes, bytes);
        for (uint32_t b = 0; b < BLOCKS; b++) {
            ucm_summary_build(&plan, kv[b], one);
            cr_assert_arr_eq(one, summaries + b * bytes, bytes, "method %u, block %u", method, b);
        }
    }
}

Test(sparse_local, softmax_is_best_for_logits)
{
    for (uint32_t method = UCM_SPARSE_MEAN; method <= UCM_SPARSE_TOKENS; method++) {
        struct ucm_sparse_summary d = summary_of(method);
        struct ucm_sparse_score score = {.reduce = 7, .rows = 7};

        ucm_sparse_score_defaults(&d, &score);
        cr_expect_eq(score.reduce,
                     method == UCM_SPARSE_HASH ? UCM_SPARSE_REDUCE_MAX : UCM_SPARSE_REDUCE_SOFTMAX);
        cr_expect_eq(score.rows, 0u);
        d.kind = UCM_SPARSE_MEAN_NORMALISED;
        ucm_sparse_score_defaults(&d, &score);
        if (method == UCM_SPARSE_MEAN)
            cr_expect_eq(score.reduce, UCM_SPARSE_REDUCE_MAX);
    }
}

static struct ucm_sparse_score score_of(uint32_t heads)
{
    return (struct ucm_sparse_score){.heads = heads, .rows = 2, .q_heads = Q_HEADS};
}

/* The top k of the seeds, in the plainest way. */
static uint32_t top_k(const float *scores, uint32_t n, uint32_t k, bool *in)
{
    memset(in, 0, n);
    in[0] = in[n - 1] = in[n - 2] = true;
    for (uint32_t taken = 3; taken < k; taken++) {
        uint32_t best = n;

        for (uint32_t b = 0; b < n; b++)
            if (!in[b] && (best == n || scores[b] > scores[best]))
                best = b;
        in[best] = true;
    }
    return k;
}

Test(sparse_local, a_selection_is_scores_and_a_choice)
{
    struct ucm_sparse_summary d = summary_of(UCM_SPARSE_MEAN);
    struct ucm_sparse_summaries blocks = compute(&d);
    struct ucm_sparse_score score = score_of(UCM_SPARSE_HEADS_EACH);
    struct ucm_sparse_choose choose;
    float scores[HEADS][BLOCKS], chosen[HEADS * BLOCKS];
    uint32_t counts[HEADS], index[HEADS * BLOCKS], one[BLOCKS], count;
    struct ucm_sparse_selected out = {.counts = counts,
                                      .index = index,
                                      .scores = chosen,
                                      .counts_room = HEADS,
                                      .index_room = HEADS * BLOCKS};
    bool in[BLOCKS];

    ucm_sparse_choose_defaults(&choose);
    cr_expect_eq(choose.sparse_ratio, 0.3);
    cr_assert_eq(
        ucm_sparse_score_local(&d, &score, &blocks, q, UCM_SPARSE_F32, scores[0], HEADS * BLOCKS),
        0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_sparse_select_local(&d, &score, &choose, &blocks, q, UCM_SPARSE_F32, &out), 0,
                 "%s", ucm_errmsg());
    cr_assert_eq(out.n_lists, HEADS);
    cr_assert_eq(out.n_blocks, 2 * 15);
    for (uint32_t g = 0; g < HEADS; g++) {
        uint32_t k = top_k(scores[g], BLOCKS, 15, in);

        cr_assert_eq(counts[g], k);
        for (uint32_t i = 0; i < k; i++) {
            cr_expect(in[index[15 * g + i]]);
            cr_expect_eq(chosen[15 * g + i], scores[g][index[15 * g + i]]);
        }
        cr_assert_eq(
            ucm_sparse_choose_local(&choose, TOKENS, scores[g], BLOCKS, one, BLOCKS, &count), 0);
        cr_assert_eq(count, k);
        cr_expect_arr_eq(one, index + 15 * g, k * sizeof *one);
    }
}

/* As over the wire: docs/methods.md, select. */
Test(sparse_local, mass_without_a_beta_takes_the_summaries)
{
    struct ucm_sparse_score score = score_of(UCM_SPARSE_HEADS_SUM);
    struct ucm_sparse_choose choose;
    uint32_t counts[2], index[2][BLOCKS];
    struct ucm_sparse_selected out = {.counts_room = 1, .index_room = BLOCKS};

    ucm_sparse_choose_defaults(&choose);
    choose.policy = UCM_SPARSE_MASS;
    choose.eps = 0.7;
    for (int stats = 0; stats < 2; stats++) {
        struct ucm_sparse_summary d = summary_of(stats ? UCM_SPARSE_STATS : UCM_SPARSE_BOX);
        struct ucm_sparse_summaries blocks = compute(&d);
        const double beta[2] = {0, stats ? 1 : (double)(1 / sqrtf(DIM))};

        for (int given = 0; given < 2; given++) {
            choose.beta_m = beta[given];
            out.counts = &counts[given];
            out.index = index[given];
            cr_assert_eq(
                ucm_sparse_select_local(&d, &score, &choose, &blocks, q, UCM_SPARSE_F32, &out), 0,
                "%s", ucm_errmsg());
        }
        cr_expect_eq(counts[0], counts[1]);
        cr_expect_arr_eq(index[0], index[1], counts[0] * sizeof **index);
    }
}

Test(sparse_local, a_query_of_16_bits_at_any_address)
{
    struct ucm_sparse_summary d = summary_of(UCM_SPARSE_BOX);
    struct ucm_sparse_summaries blocks = compute(&d);
    struct ucm_sparse_score score = score_of(UCM_SPARSE_HEADS_SUM);
    float wide[2 * Q_HEADS * DIM], a[BLOCKS], b[BLOCKS];
    uint8_t half[2 * Q_HEADS * DIM * 2 + 1];

    for (int i = 0; i < 2 * Q_HEADS * DIM; i++) {
        uint32_t u;

        memcpy(&u, (float *)q + i, 4);
        memcpy(half + 1 + 2 * i, (uint8_t *)&u + 2, 2); /* the upper half is bf16 */
        u &= 0xffff0000;
        memcpy(&wide[i], &u, 4);
    }
    cr_assert_eq(ucm_sparse_score_local(&d, &score, &blocks, half + 1, UCM_SPARSE_BF16, a, BLOCKS),
                 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_sparse_score_local(&d, &score, &blocks, wide, UCM_SPARSE_F32, b, BLOCKS), 0);
    cr_expect_arr_eq(a, b, sizeof a);
}

Test(sparse_local, blocks_without_a_summary_and_poisoned_ones_are_always_in)
{
    struct ucm_sparse_summary d = summary_of(UCM_SPARSE_MEAN);
    struct ucm_sparse_score score = score_of(UCM_SPARSE_HEADS_MAX);
    struct ucm_sparse_choose choose = {.min_blocks = 1, .sparse_ratio = 0};
    uint8_t missing[BLOCKS] = {[7] = 1, [30] = 1};
    uint32_t counts[1], index[BLOCKS];
    struct ucm_sparse_selected out = {
        .counts = counts, .index = index, .counts_room = 1, .index_room = BLOCKS};
    struct ucm_sparse_summaries blocks;

    kv[12][1][1][3] = NAN;
    blocks = compute(&d);
    blocks.missing = missing;
    cr_assert_eq(ucm_sparse_select_local(&d, &score, &choose, &blocks, q, UCM_SPARSE_F32, &out), 0,
                 "%s", ucm_errmsg());
    cr_assert_eq(out.n_blocks, 3);
    cr_expect(index[0] == 7 && index[1] == 12 && index[2] == 30);
    cr_expect_eq(out.no_summary, 2);
    choose.limit = 2;
    cr_assert_eq(ucm_sparse_select_local(&d, &score, &choose, &blocks, q, UCM_SPARSE_F32, &out), 0);
    cr_assert_eq(out.n_blocks, 2);
    cr_expect(index[0] == 7 && index[1] == 12, "the lowest");
    out.index_room = 1;
    cr_expect_eq(ucm_sparse_select_local(&d, &score, &choose, &blocks, q, UCM_SPARSE_F32, &out),
                 -UCM_EINVALID);
}

Test(sparse_local, history_needs_no_summaries)
{
    uint32_t uses[4] = {0, 2, 0, 0};
    float scores[4];

    cr_assert_eq(ucm_sparse_score_history(uses, 4, scores), 0);
    cr_expect(scores[1] > scores[3] && scores[3] > scores[2] && scores[2] > scores[0]);
    cr_expect_eq(ucm_sparse_score_history(NULL, 4, scores), -UCM_EINVALID);
    cr_expect_eq(ucm_sparse_score_history(uses, 0, scores), -UCM_EINVALID);
}

#define INVALID(call)                                                                              \
    do {                                                                                           \
        cr_expect_eq(call, -UCM_EINVALID, #call);                                                  \
        cr_expect(strlen(ucm_errmsg()) > 10, #call);                                               \
    } while (0)

Test(sparse_local, wrong_arrays_of_summaries)
{
    struct ucm_sparse_summary d = summary_of(UCM_SPARSE_MEAN);
    size_t step = sizeof kv[0];

    (void)compute(&d);
#define LOCAL(kv_bytes, kv_stride, n, out_bytes, out_stride)                                       \
    ucm_sparse_summary_local(&d, kv, kv_bytes, kv_stride, n, summaries, out_bytes, out_stride)
    INVALID(LOCAL(sizeof kv - 1, step, BLOCKS, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, step + 4, BLOCKS, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, SIZE_MAX, BLOCKS, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, 4, BLOCKS, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, step, 0, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, step, UINT32_MAX, sizeof summaries, bytes));
    INVALID(LOCAL(sizeof kv, step, BLOCKS, bytes * BLOCKS - 1, bytes));
    INVALID(LOCAL(sizeof kv, step, BLOCKS, sizeof summaries, bytes - 1));
    INVALID(LOCAL(0, step, 1, sizeof summaries, bytes));
#undef LOCAL
    cr_expect_eq(
        ucm_sparse_summary_local(&d, (uint8_t *)kv + 1, step, 0, 1, summaries + 1, bytes, 0), 0,
        "any address will do: %s", ucm_errmsg());
    INVALID(ucm_sparse_summary_local(&d, NULL, 0, 0, 1, summaries, bytes, bytes));
    INVALID(ucm_sparse_summary_local(NULL, kv, sizeof kv, step, 1, summaries, bytes, bytes));
    d.shape.head_dim = 6;
    INVALID(ucm_sparse_summary_bytes(&d, &bytes));
    INVALID(ucm_sparse_summary_bytes(NULL, &bytes));
}

Test(sparse_local, wrong_scores)
{
    struct ucm_sparse_summary d = summary_of(UCM_SPARSE_MEAN);
    struct ucm_sparse_summaries good = compute(&d), b;
    struct ucm_sparse_score one = score_of(UCM_SPARSE_HEADS_SUM), s;
    float scores[BLOCKS];

#define SCORE(change)                                                                              \
    do {                                                                                           \
        b = good;                                                                                  \
        s = one;                                                                                   \
        change;                                                                                    \
        INVALID(ucm_sparse_score_local(&d, &s, &b, q, UCM_SPARSE_F32, scores, BLOCKS));            \
    } while (0)
    SCORE(s.q_heads = 3);
    SCORE(s.q_heads = 0);
    SCORE(s.rows = 65);
    SCORE(s.rows = UINT32_MAX);
    SCORE(s.metric = 3);
    SCORE(s.reduce = 3);
    SCORE(s.heads = 3);
    SCORE(s.heads = UCM_SPARSE_HEADS_EACH); /* twice as many scores */
    SCORE(s.beta = NAN);
    SCORE(b.n = 0);
    SCORE(b.n = BLOCKS + 1);
    SCORE(b.n = UINT32_MAX);
    SCORE(b.p = NULL);
    SCORE(b.p = summaries + 1);
    SCORE(b.stride = bytes + 2);
    SCORE(b.stride = 4);
    SCORE(b.bytes = 7);
    SCORE(q[1][2][3] = NAN);
    cr_expect_str_eq(ucm_errmsg(), "element 51 of q is not finite");
    SCORE(q[1][2][3] = INFINITY);
#undef SCORE
    INVALID(ucm_sparse_score_local(&d, &one, &good, q, UCM_SPARSE_FP8_E4M3, scores, BLOCKS));
    INVALID(ucm_sparse_score_local(&d, &one, &good, NULL, UCM_SPARSE_F32, scores, BLOCKS));
    d = summary_of(UCM_SPARSE_BOX);
    one.metric = UCM_SPARSE_L2;
    good = compute(&d);
    INVALID(ucm_sparse_score_local(&d, &one, &good, q, UCM_SPARSE_F32, scores, BLOCKS));
}

Test(sparse_local, wrong_choices)
{
    float scores[BLOCKS] = {0};
    uint32_t index[BLOCKS], count;
    struct ucm_sparse_choose good, c;

    ucm_sparse_choose_defaults(&good);
#define CHOOSE(change)                                                                             \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        INVALID(ucm_sparse_choose_local(&c, TOKENS, scores, BLOCKS, index, BLOCKS, &count));       \
    } while (0)
    CHOOSE(c.policy = 2);
    CHOOSE(c.sparse_ratio = 1.1);
    CHOOSE(c.sparse_ratio = NAN);
    CHOOSE(c.sink_blocks = UINT32_MAX);
    CHOOSE(c.policy = UCM_SPARSE_MASS; c.eps = 2);
    CHOOSE(c.policy = UCM_SPARSE_MASS; c.beta_m = 0);
#undef CHOOSE
    INVALID(ucm_sparse_choose_local(&good, TOKENS, scores, 0, index, BLOCKS, &count));
    INVALID(ucm_sparse_choose_local(&good, TOKENS, scores, UINT32_MAX, index, BLOCKS, &count));
    INVALID(ucm_sparse_choose_local(&good, TOKENS, scores, BLOCKS, index, 14, &count));
    cr_expect_eq(ucm_sparse_choose_local(&good, TOKENS, scores, BLOCKS, index, 15, &count), 0);
    cr_expect_eq(count, 15);
}
