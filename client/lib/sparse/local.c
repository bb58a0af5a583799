#include "client/lib/sparse/local.h"
#include "client/lib/sparse/spec.h"

#include "client/lib/sparse/internal.h"
#include "kernels/sparse/arith.h"

#include <stdlib.h>
#include <string.h>

#define SCRATCH_ALIGN 64

/* ---- the public structs as those of kernels/sparse ---- */

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " must equal " #b)
SAME(UCM_SPARSE_F32, UCM_KV_F32);
SAME(UCM_SPARSE_F16, UCM_KV_F16);
SAME(UCM_SPARSE_BF16, UCM_KV_BF16);
SAME(UCM_SPARSE_FP8_E4M3, UCM_KV_FP8_E4M3);
SAME(UCM_SPARSE_MEAN, UCM_SUMMARY_MEAN);
SAME(UCM_SPARSE_SUBMEAN, UCM_SUMMARY_SUBMEAN);
SAME(UCM_SPARSE_BOX, UCM_SUMMARY_BOX);
SAME(UCM_SPARSE_HASH, UCM_SUMMARY_HASH);
SAME(UCM_SPARSE_STATS, UCM_SUMMARY_STATS);
SAME(UCM_SPARSE_TOKENS, UCM_SUMMARY_TOKENS);
SAME(UCM_SPARSE_MEAN_MAX, UCM_MEAN_MAX);
SAME(UCM_SPARSE_MEAN_NORMALISED, UCM_MEAN_NORMALISED);
SAME(UCM_SPARSE_PAIRS_INTERLEAVED, UCM_PAIRS_INTERLEAVED);
SAME(UCM_SPARSE_REST_MEAN, UCM_REST_MEAN);
SAME(UCM_SPARSE_L2, UCM_METRIC_L2);
SAME(UCM_SPARSE_ROUNDED, UCM_METRIC_ROUNDED);
SAME(UCM_SPARSE_REDUCE_MEAN, UCM_REDUCE_MEAN);
SAME(UCM_SPARSE_REDUCE_SOFTMAX, UCM_REDUCE_SOFTMAX);
SAME(UCM_SPARSE_HEADS_SUM, UCM_HEADS_SUM);
SAME(UCM_SPARSE_HEADS_MAX, UCM_HEADS_MAX);
SAME(UCM_SPARSE_MASS, UCM_CHOOSE_MASS);

int client_summary_spec(const struct ucm_sparse_summary *d, struct ucm_summary_spec *out)
{
    char why[UCM_SPARSE_WHY];

    return sparse_spec(d, out, why) && ucm_summary_check(out, why) == 0
               ? 0
               : client_fail(UCM_EINVALID, "%s", why);
}

int client_choose_spec(const struct ucm_sparse_choose *choose,
                       const struct ucm_summary_spec *summary, struct ucm_choose_spec *out)
{
    char why[UCM_SPARSE_WHY];

    *out = sparse_choose_spec(choose);
    return ucm_choose_for(summary, out, why) ? client_fail(UCM_EINVALID, "%s", why) : 0;
}

uint32_t client_score_lists(const struct ucm_sparse_summary *summary,
                            const struct ucm_sparse_score *score)
{
    return score->heads == UCM_SPARSE_HEADS_EACH ? summary->shape.kv_heads : 1;
}

uint32_t client_q_element(uint32_t q_dtype)
{
    return q_dtype == UCM_SPARSE_F32                                 ? 4
           : q_dtype == UCM_SPARSE_F16 || q_dtype == UCM_SPARSE_BF16 ? 2
                                                                     : 0;
}

/* ---- summaries ---- */

int ucm_sparse_summary_bytes(const struct ucm_sparse_summary *summary, uint64_t *bytes)
{
    struct ucm_summary_spec spec;
    int r;

    if (!summary)
        return client_fail(UCM_EINVALID, "summary is NULL");
    r = client_summary_spec(summary, &spec);
    if (r == 0 && bytes)
        *bytes = ucm_summary_bytes(&spec);
    return r;
}

/* Whether n pieces of `bytes`, `stride` apart, lie within `whole`. */
static int array_check(const char *what, size_t whole, size_t bytes, size_t stride, uint32_t n)
{
    if (n > 1 && stride < bytes)
        return client_fail(UCM_EINVALID, "%s_stride is %zu; a block takes %zu bytes", what, stride,
                           bytes);
    if (bytes > whole || (n > 1 && (whole - bytes) / (n - 1) < stride))
        return client_fail(UCM_EINVALID,
                           "%s_bytes is %zu: too little for %u blocks of %zu bytes, %zu apart",
                           what, whole, n, bytes, stride);
    return 0;
}

static struct ucm_summary_plan *plan_new(const struct ucm_summary_spec *spec)
{
    struct ucm_summary_plan *plan = malloc(sizeof *plan);
    char why[UCM_SPARSE_WHY];

    if (!plan) {
        client_fail(UCM_ENOMEMORY, "no memory for a summary's plan");
        return NULL;
    }
    (void)ucm_summary_plan_init(plan, spec, why); /* the spec was checked */
    return plan;
}

/* Summaries need an address that is a multiple of 8; the caller's may be any. */
static int build_all(const struct ucm_summary_plan *plan, const uint8_t *kv, size_t kv_stride,
                     uint32_t n, uint8_t *out, size_t out_stride)
{
    void *aligned = aligned_alloc(8, (plan->bytes + 7) / 8 * 8);

    if (!aligned)
        return client_fail(UCM_ENOMEMORY, "no memory for a summary");
    for (uint32_t i = 0; i < n; i++) {
        ucm_summary_build(plan, kv + i * kv_stride, aligned);
        memcpy(out + i * out_stride, aligned, plan->bytes);
    }
    free(aligned);
    return 0;
}

int ucm_sparse_summary_local(const struct ucm_sparse_summary *summary, const void *kv,
                             size_t kv_bytes, size_t kv_stride, uint32_t n, void *out,
                             size_t out_bytes, size_t out_stride)
{
    struct ucm_summary_spec spec;
    struct ucm_summary_plan *plan;
    int r;

    if (!summary || !kv || !out || n == 0)
        return client_fail(UCM_EINVALID, "summary, kv or out is NULL, or n is 0");
    r = client_summary_spec(summary, &spec);
    if (r == 0)
        r = array_check("kv", kv_bytes, ucm_summary_extent(&spec), kv_stride, n);
    if (r == 0)
        r = array_check("out", out_bytes, ucm_summary_bytes(&spec), out_stride, n);
    if (r)
        return r;
    plan = plan_new(&spec);
    if (!plan)
        return -UCM_ENOMEMORY;
    r = build_all(plan, kv, kv_stride, n, out, out_stride);
    free(plan);
    return r;
}

/* ---- scores ---- */

struct scorer {
    struct ucm_summary_plan *plan;
    struct ucm_score_spec spec;
    struct ucm_score_blocks blocks;
    uint32_t lists;
    const void **at; /* blocks.at; NULL: no summary is missing */
    float *q;
    void *scratch;
};

static int summaries_check(const struct ucm_sparse_summaries *d, uint32_t bytes)
{
    if (!d->p || d->n == 0 || d->n > UCM_SCORE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID, "1 to %u summaries can be scored, not %u%s",
                           UCM_SCORE_BLOCKS_MAX, d->n, d->p ? "" : " at NULL");
    if ((uintptr_t)d->p % 4 != 0 || d->stride % 4 != 0)
        return client_fail(UCM_EINVALID,
                           "summaries lie at multiples of 4 bytes; p is %p, stride %zu", d->p,
                           d->stride);
    return array_check("summaries", d->bytes, bytes, d->stride, d->n);
}

static int query_widen(const void *q, uint32_t q_dtype, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint16_t half;

        if (q_dtype == UCM_SPARSE_F32) {
            memcpy(&out[i], (const uint8_t *)q + i * 4, 4);
        } else {
            memcpy(&half, (const uint8_t *)q + i * 2, 2);
            out[i] = q_dtype == UCM_SPARSE_F16 ? ucm_f16_decode(half) : ucm_bf16_decode(half);
        }
        if (ucm_not_finite(out[i]))
            return client_fail(UCM_EINVALID, "element %llu of q is not finite",
                               (unsigned long long)i);
    }
    return 0;
}

static void scorer_close(struct scorer *s)
{
    free(s->plan);
    free(s->at);
    free(s->q);
    free(s->scratch);
}

static int scorer_allocate(struct scorer *s, const struct ucm_sparse_summaries *d,
                           uint64_t q_elements)
{
    size_t scratch = ucm_score_scratch_bytes(s->plan, &s->spec, d->n);

    s->at = d->missing ? malloc(d->n * sizeof *s->at) : NULL;
    s->q = malloc(q_elements * sizeof *s->q);
    s->scratch =
        aligned_alloc(SCRATCH_ALIGN, (scratch + SCRATCH_ALIGN) / SCRATCH_ALIGN * SCRATCH_ALIGN);
    if ((s->at || !d->missing) && s->q && s->scratch)
        return 0;
    return client_fail(UCM_ENOMEMORY, "no memory to score %u blocks", d->n);
}

static void scorer_place(struct scorer *s, const struct ucm_sparse_summaries *d)
{
    s->blocks =
        (struct ucm_score_blocks){.at = s->at, .base = d->p, .stride = d->stride, .n = d->n};
    for (uint32_t b = 0; s->at && b < d->n; b++)
        s->at[b] = d->missing[b] ? NULL : (const uint8_t *)d->p + b * d->stride;
}

static void scorer_run(const struct scorer *s, float *scores)
{
    struct ucm_score_job job;

    ucm_score_begin(&job, s->plan, &s->spec, &s->blocks, s->q, s->scratch, scores);
    ucm_score_all(&job);
}

static int scorer_prepare(struct scorer *s, const struct ucm_sparse_score *score,
                          const struct ucm_sparse_summaries *summaries, const void *q,
                          uint32_t q_dtype)
{
    char why[UCM_SPARSE_WHY];
    uint64_t q_elements;
    int r = summaries_check(summaries, s->plan->bytes);

    if (r)
        return r;
    s->spec = sparse_score_spec(score);
    if (ucm_score_check(s->plan, &s->spec, why) != 0)
        return client_fail(UCM_EINVALID, "%s", why);
    if (client_q_element(q_dtype) == 0)
        return client_fail(UCM_EINVALID, "q_dtype is %u; queries are F32, F16 or BF16", q_dtype);
    s->lists = ucm_score_lists(s->plan, &s->spec);
    q_elements = (uint64_t)s->spec.rows * s->spec.q_heads * s->plan->spec.shape.head_dim;
    r = scorer_allocate(s, summaries, q_elements);
    if (r)
        return r;
    scorer_place(s, summaries);
    return query_widen(q, q_dtype, q_elements, s->q);
}

static int scorer_open(struct scorer *s, const struct ucm_sparse_summary *summary,
                       const struct ucm_sparse_score *score,
                       const struct ucm_sparse_summaries *summaries, const void *q,
                       uint32_t q_dtype)
{
    struct ucm_summary_spec spec;
    int r;

    *s = (struct scorer){0};
    if (!summary || !score || !summaries || !q)
        return client_fail(UCM_EINVALID, "summary, score, summaries or q is NULL");
    r = client_summary_spec(summary, &spec);
    if (r)
        return r;
    s->plan = plan_new(&spec);
    if (!s->plan)
        return -UCM_ENOMEMORY;
    r = scorer_prepare(s, score, summaries, q, q_dtype);
    if (r)
        scorer_close(s);
    return r;
}

int ucm_sparse_score_local(const struct ucm_sparse_summary *summary,
                           const struct ucm_sparse_score *score,
                           const struct ucm_sparse_summaries *summaries, const void *q,
                           uint32_t q_dtype, float *scores, size_t scores_room)
{
    struct scorer s;
    int r;

    if (!scores)
        return client_fail(UCM_EINVALID, "scores is NULL");
    r = scorer_open(&s, summary, score, summaries, q, q_dtype);
    if (r)
        return r;
    if ((size_t)s.lists * summaries->n > scores_room)
        r = client_fail(UCM_EINVALID, "%u lists of %u scores do not fit into scores_room %zu",
                        s.lists, summaries->n, scores_room);
    else
        scorer_run(&s, scores);
    scorer_close(&s);
    return r;
}

int ucm_sparse_score_history(const uint32_t *uses, uint32_t n, float *scores)
{
    if (!uses || !scores || n == 0 || n > UCM_SCORE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID, "uses or scores is NULL, or n is %u: 1 to %u", n,
                           UCM_SCORE_BLOCKS_MAX);
    ucm_score_history(uses, n, scores);
    return 0;
}

/* ---- defaults ---- */

void ucm_sparse_score_defaults(const struct ucm_sparse_summary *d, struct ucm_sparse_score *score)
{
    bool logits = d->method != UCM_SPARSE_HASH &&
                  !(d->method == UCM_SPARSE_MEAN && d->kind == UCM_SPARSE_MEAN_NORMALISED);

    *score = (struct ucm_sparse_score){
        .reduce = logits ? UCM_SPARSE_REDUCE_SOFTMAX : UCM_SPARSE_REDUCE_MAX,
    };
}

void ucm_sparse_choose_defaults(struct ucm_sparse_choose *choose)
{
    struct ucm_choose_spec spec;

    ucm_choose_defaults(&spec);
    *choose = (struct ucm_sparse_choose){
        .policy = spec.policy,
        .min_blocks = spec.min_blocks,
        .sink_blocks = spec.sink_blocks,
        .recent_blocks = spec.recent_blocks,
        .sparse_ratio = spec.sparse_ratio,
        .eps = spec.eps,
        .beta_m = (double)spec.beta,
    };
}

/* Chooses from one list into room for all of it, which it needs while blocks may be poisoned. */
struct chooser {
    struct ucm_choose_spec spec;
    void *scratch;
    uint32_t *index; /* n */
    float *chosen;   /* n, or NULL */
};

static void chooser_close(struct chooser *c)
{
    free(c->scratch);
    free(c->index);
    free(c->chosen);
}

static int chooser_open(struct chooser *c, const struct ucm_choose_spec *spec, uint32_t n,
                        bool scores)
{
    size_t scratch = ucm_choose_scratch_bytes(spec, n);

    *c = (struct chooser){.spec = *spec};
    c->scratch =
        aligned_alloc(SCRATCH_ALIGN, (scratch + SCRATCH_ALIGN) / SCRATCH_ALIGN * SCRATCH_ALIGN);
    c->index = malloc(n * sizeof *c->index);
    c->chosen = scores ? malloc(n * sizeof *c->chosen) : NULL;
    if (c->scratch && c->index && (c->chosen || !scores))
        return 0;
    chooser_close(c);
    return client_fail(UCM_ENOMEMORY, "no memory to choose from %u blocks", n);
}

static int chooser_run(struct chooser *c, const float *scores, uint32_t n, uint32_t *index,
                       float *chosen, uint32_t room, uint32_t *count)
{
    uint32_t k = ucm_choose(&c->spec, scores, n, c->scratch, c->index, c->chosen, n);

    if (k > room)
        return client_fail(UCM_EINVALID, "%u blocks were chosen, and index_room has %u left", k,
                           room);
    if (k > 0)
        memcpy(index, c->index, k * sizeof *index);
    if (k > 0 && chosen)
        memcpy(chosen, c->chosen, k * sizeof *chosen);
    *count = k;
    return 0;
}

int ucm_sparse_choose_local(const struct ucm_sparse_choose *choose, uint32_t block_tokens,
                            const float *scores, uint32_t n, uint32_t *index, uint32_t index_room,
                            uint32_t *count)
{
    struct ucm_choose_spec spec;
    char why[UCM_SPARSE_WHY];
    struct chooser c;
    int r;

    if (!choose || !scores || !index || !count || n == 0 || n > UCM_SCORE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID,
                           "choose, scores, index or count is NULL, or n is %u: 1 to %u", n,
                           UCM_SCORE_BLOCKS_MAX);
    spec = sparse_choose_spec(choose);
    spec.block_tokens = block_tokens;
    if (ucm_choose_check(&spec, why))
        return client_fail(UCM_EINVALID, "%s", why);
    r = chooser_open(&c, &spec, n, false);
    if (r)
        return r;
    r = chooser_run(&c, scores, n, index, NULL, index_room, count);
    chooser_close(&c);
    return r;
}

static int choose_lists(struct chooser *c, const float *scores, uint32_t lists, uint32_t n,
                        struct ucm_sparse_selected *out)
{
    uint32_t at = 0;

    for (uint32_t list = 0; list < lists; list++) {
        int r = chooser_run(c, scores + (size_t)list * n, n, out->index + at,
                            out->scores ? out->scores + at : NULL, out->index_room - at,
                            &out->counts[list]);

        if (r)
            return r;
        at += out->counts[list];
    }
    out->n_lists = lists;
    out->n_blocks = at;
    return 0;
}

static uint64_t count_missing(const struct ucm_sparse_summaries *d)
{
    uint64_t n = 0;

    for (uint32_t b = 0; d->missing && b < d->n; b++)
        n += d->missing[b] != 0;
    return n;
}

int ucm_sparse_select_local(const struct ucm_sparse_summary *summary,
                            const struct ucm_sparse_score *score,
                            const struct ucm_sparse_choose *choose,
                            const struct ucm_sparse_summaries *summaries, const void *q,
                            uint32_t q_dtype, struct ucm_sparse_selected *out)
{
    struct ucm_choose_spec spec;
    struct chooser chooser;
    struct scorer s;
    float *scores;
    int r;

    if (!choose || !out || !out->counts || !out->index)
        return client_fail(UCM_EINVALID, "choose, out, counts or index is NULL");
    r = scorer_open(&s, summary, score, summaries, q, q_dtype);
    if (r)
        return r;
    r = client_choose_spec(choose, &s.plan->spec, &spec);
    if (r == 0)
        r = chooser_open(&chooser, &spec, summaries->n, out->scores != NULL);
    if (r) {
        scorer_close(&s);
        return r;
    }
    scores = malloc((size_t)s.lists * summaries->n * sizeof *scores);
    if (!scores) {
        r = client_fail(UCM_ENOMEMORY, "no memory for %u scores", summaries->n);
    } else if (s.lists > out->counts_room) {
        r = client_fail(UCM_EINVALID, "there are %u lists; counts_room is %u", s.lists,
                        out->counts_room);
    } else {
        scorer_run(&s, scores);
        r = choose_lists(&chooser, scores, s.lists, summaries->n, out);
    }
    if (r == 0) {
        out->evicted = 0;
        out->no_summary = count_missing(summaries);
    }
    free(scores);
    chooser_close(&chooser);
    scorer_close(&s);
    return r;
}
