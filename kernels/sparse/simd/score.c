/* Scores of many blocks, and the reduces over query heads and KV heads. They go in tiles of 16
 * blocks, a lane each, with the bits of ../score_plain.c. */
#include "kernels/sparse/simd/score_tile.h"

#ifdef UCM_LANES

#include <string.h>

/* ---- tiles ---- */

static uintptr_t summary_at(const struct ucm_score_blocks *blocks, uint32_t b)
{
    if (blocks->at == NULL)
        return (uintptr_t)blocks->base + blocks->offset + b * blocks->stride;
    return blocks->at[b] == NULL ? 0 : (uintptr_t)blocks->at[b] + blocks->offset;
}

/* Summaries of the n blocks from `first` on. Blocks without one, and places past the end, get
 * another block's. lack[] is 1 for blocks without one, else 0. Returns how many have one. */
static uint32_t tile_find(const struct ucm_score_blocks *blocks, uint32_t first, uint32_t n,
                          const uint8_t *at[TILE], float lack[TILE])
{
    uintptr_t any = 0;
    uint32_t found = 0;

    for (uint32_t i = 0; i < TILE; i++) {
        uintptr_t p = i < n ? summary_at(blocks, first + i) : 0;

        lack[i] = i < n && p == 0;
        found += p != 0;
        any = p != 0 ? p : any;
        at[i] = (const uint8_t *)p;
    }
    for (uint32_t i = 0; i < TILE; i++)
        at[i] = at[i] != NULL ? at[i] : (const uint8_t *)any;
    return found;
}

static void store(float *to, const vec x[TILE_VECS], uint32_t n)
{
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        uint32_t first = v * UCM_LANES;

        if (n >= first + UCM_LANES)
            v_store(to + first, x[v]);
        else if (n > first)
            v_store_part(to + first, x[v], n - first);
    }
}

static uint32_t tile_blocks(uint32_t first, uint32_t end)
{
    return end - first < TILE ? end - first : TILE;
}

/* ---- reduces ---- */

/* The values so far of a tile, over heads. */
struct many {
    vec sum[TILE_VECS], top[TILE_VECS];
    uint32_t n;
};

static void many_add(struct many *m, const vec x[TILE_VECS])
{
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        m->sum[v] = m->n == 0 ? x[v] : v_add(m->sum[v], x[v]);
        m->top[v] = v_max(x[v], m->n == 0 ? v_set(-ucm_inf()) : m->top[v]);
    }
    m->n++;
}

static void many_max(const struct many *m, vec out[TILE_VECS])
{
    for (uint32_t v = 0; v < TILE_VECS; v++)
        out[v] = m->top[v];
}

/* +inf if any value is, else the sum divided by `by`. */
static void many_sum(const struct many *m, float by, vec out[TILE_VECS])
{
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        vec x = v_div(m->sum[v], v_set(by));

        x = v_if_equal(m->top[v], v_set(ucm_inf()), m->top[v], x);
        out[v] = v_unless_nan(x, v_set(-ucm_inf()));
    }
}

/* Writes to the lists: that of KV head g, or when g is the last, the reduce of all heads. */
static void put_head(const struct ucm_score_job *job, struct many *heads, uint32_t g,
                     uint32_t first, uint32_t n, const vec x[TILE_VECS])
{
    vec all[TILE_VECS];

    if (job->spec.heads == UCM_HEADS_EACH) {
        store(job->scores + (size_t)g * job->blocks.n + first, x, n);
        return;
    }
    many_add(heads, x);
    if (g + 1 < job->plan->spec.shape.kv_heads)
        return;
    if (job->spec.heads == UCM_HEADS_SUM)
        many_sum(heads, 1.0f, all);
    else
        many_max(heads, all);
    store(job->scores + first, all, n);
}

/* ---- blocks ---- */

struct walk {
    const struct ucm_score_job *job;
    score_panel *panel;
    struct score_tile tile;
    float lack[TILE];
    uint32_t first, n; /* the tile's blocks */
    bool whole;        /* none of them lacks a summary */
};

static void clean(const struct walk *w, vec x[TILE_VECS])
{
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        x[v] = v_unless_nan(x[v], v_set(-ucm_inf()));
        if (!w->whole)
            x[v] = v_if_equal(v_load(w->lack + v * UCM_LANES), v_set(1), v_set(ucm_inf()), x[v]);
    }
}

/* Scores the tile with the queries of KV head g, to the raw lists for softmax, else into
 * `group`. */
static void score_head(struct walk *w, uint32_t g, struct many *group)
{
    const struct ucm_score_job *job = w->job;
    size_t head = (size_t)g * job->group;
    vec out[PANEL][TILE_VECS];

    for (uint32_t q = 0; q < job->group; q += PANEL) {
        uint32_t n = job->group - q < PANEL ? job->group - q : PANEL;

        w->tile.lead = q == 0;
        w->panel(&w->tile, g, job->queries + (head + q) * job->query_floats, n, out);
        for (uint32_t i = 0; i < n; i++) {
            clean(w, out[i]);
            if (job->spec.reduce == UCM_REDUCE_SOFTMAX)
                store(job->raw + (head + q + i) * job->raw_floats + w->first, out[i], w->n);
            else
                many_add(group, out[i]);
        }
    }
}

static void score_tile_blocks(struct walk *w)
{
    const struct ucm_score_job *job = w->job;
    struct many heads = {.n = 0};
    vec x[TILE_VECS];

    for (uint32_t g = 0; g < job->plan->spec.shape.kv_heads; g++) {
        struct many group = {.n = 0};

        score_head(w, g, &group);
        if (job->spec.reduce == UCM_REDUCE_SOFTMAX)
            continue;
        if (job->spec.reduce == UCM_REDUCE_MEAN)
            many_sum(&group, (float)job->group, x);
        else
            many_max(&group, x);
        put_head(job, &heads, g, w->first, w->n, x);
    }
}

/* No block of the tile has a summary. */
static void fill_tile(const struct walk *w)
{
    const struct ucm_score_job *job = w->job;
    bool raw = job->spec.reduce == UCM_REDUCE_SOFTMAX;
    uint32_t kv_heads = job->plan->spec.shape.kv_heads;
    uint32_t lists = raw ? kv_heads * job->group : ucm_score_lists(job->plan, &job->spec);

    for (uint32_t list = 0; list < lists; list++) {
        float *to =
            raw ? job->raw + list * job->raw_floats : job->scores + (size_t)list * job->blocks.n;

        for (uint32_t i = 0; i < w->n; i++)
            to[w->first + i] = ucm_inf();
    }
}

static void range(const struct ucm_score_job *job, uint32_t first, uint32_t end)
{
    struct walk w = {.job = job,
                     .panel = UCM_ISA_NAME(score_panel_of)(job->plan, job->spec.metric)};
    float lack[TILE];
    uint32_t found, next_found;

    if (first >= end)
        return;
    w.tile.plan = job->plan;
    w.tile.query_floats = job->query_floats;
    w.n = tile_blocks(first, end);
    next_found = tile_find(&job->blocks, first, w.n, w.tile.ahead, lack);
    for (w.first = first; w.first < end; w.first += w.n) {
        uint32_t next;

        w.n = tile_blocks(w.first, end);
        next = w.first + w.n;
        memcpy(w.tile.at, w.tile.ahead, sizeof(w.tile.at));
        memcpy(w.lack, lack, sizeof(lack));
        found = next_found;
        w.whole = found == w.n;
        next_found = tile_find(&job->blocks, next, tile_blocks(next, end), w.tile.ahead, lack);
        if (found > 0)
            score_tile_blocks(&w);
        else
            fill_tile(&w);
    }
}

/* ---- softmax ---- */

/* ucm_weight, which is an integer up to 2^24 and so a float too */
LANES_INLINE vec v_weight(vec s, vec top, vec beta)
{
    vec w = v_mul(v_exp(v_mul(beta, v_sub(s, top))), v_set(0x1p24f));
    vec rounded = v_sub(v_add(w, v_set(0x1p23f)), v_set(0x1p23f));

    w = v_if_less(w, v_set(0x1p23f), rounded, w);
    return v_if_equal(s, v_set(ucm_inf()), v_set(0), w);
}

/* A vector of a list of n from i on; -inf past the list's end. */
LANES_INLINE vec list_load(const float *list, uint32_t i, uint32_t n)
{
    float part[UCM_LANES];

    if (n - i >= UCM_LANES)
        return v_load(list + i);
    v_store(part, v_set(-ucm_inf()));
    memcpy(part, list + i, (n - i) * sizeof(*part));
    return v_load(part);
}

LANES_INLINE void list_store(float *list, uint32_t i, uint32_t n, vec x)
{
    if (n - i >= UCM_LANES)
        v_store(list + i, x);
    else
        v_store_part(list + i, x, n - i);
}

/* The largest that is neither NaN nor +inf; -inf if there is none. */
static float list_top(const float *list, uint32_t n)
{
    vec top = v_set(-ucm_inf());
    float lane[UCM_LANES], best = -ucm_inf();

    for (uint32_t i = 0; i < n; i += UCM_LANES) {
        vec x = list_load(list, i, n);

        x = v_if_equal(x, v_set(ucm_inf()), v_set(-ucm_inf()), x);
        top = v_max(x, top);
    }
    v_store(lane, top);
    for (uint32_t i = 0; i < UCM_LANES; i++)
        best = ucm_max(lane[i], best);
    return best;
}

static void softmax(float *list, uint32_t n, float beta)
{
    vec inf = v_set(ucm_inf()), top = v_set(list_top(list, n)), scale = v_set(beta);
    vec_sum sum = v_sum_zero();
    float total;

    for (uint32_t i = 0; i < n; i += UCM_LANES) {
        vec s = list_load(list, i, n), w = v_weight(s, top, scale);

        sum = v_sum_add(sum, w);
        list_store(list, i, n, v_if_equal(s, inf, inf, w));
    }
    total = ucm_max(1.0f, (float)v_sum(sum));
    for (uint32_t i = 0; i < n; i += UCM_LANES)
        list_store(list, i, n, v_div(list_load(list, i, n), v_set(total)));
}

static void sum(const struct ucm_score_job *job, uint32_t first, uint32_t end)
{
    vec x[TILE_VECS];

    for (uint32_t b = first; b < end; b += TILE) {
        uint32_t n = tile_blocks(b, end);
        struct many heads = {.n = 0};

        for (uint32_t g = 0; g < job->plan->spec.shape.kv_heads; g++) {
            struct many group = {.n = 0};

            for (uint32_t q = 0; q < job->group; q++) {
                const float *list = job->raw + ((size_t)g * job->group + q) * job->raw_floats;

                for (uint32_t v = 0; v < TILE_VECS; v++)
                    x[v] = v * UCM_LANES < n ? list_load(list + b, v * UCM_LANES, n) : v_set(0);
                many_add(&group, x);
            }
            many_sum(&group, 1.0f, x);
            put_head(job, &heads, g, b, n, x);
        }
    }
}

static uint64_t weigh(const float *scores, uint32_t n, float most, float beta, uint32_t *weights)
{
    vec top = v_set(most), scale = v_set(beta);
    vec_sum sum = v_sum_zero();
    uint32_t part[UCM_LANES];

    for (uint32_t i = 0; i < n; i += UCM_LANES) {
        vec w = v_weight(list_load(scores, i, n), top, scale);

        sum = v_sum_add(sum, w);
        if (n - i >= UCM_LANES) {
            v_store_u32(weights + i, w);
        } else {
            v_store_u32(part, w);
            memcpy(weights + i, part, (n - i) * sizeof(*part));
        }
    }
    return (uint64_t)v_sum(sum);
}

const struct ucm_score_ops UCM_ISA_NAME(score_ops) = {
    .query_floats = UCM_ISA_NAME(score_query_floats),
    .prepare = UCM_ISA_NAME(score_prepare),
    .range = range,
    .softmax = softmax,
    .sum = sum,
    .top = list_top,
    .weigh = weigh,
    .count = UCM_ISA_NAME(choose_count),
    .put = UCM_ISA_NAME(choose_put),
};

#else
typedef int score_unused;
#endif
