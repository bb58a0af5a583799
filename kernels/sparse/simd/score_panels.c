/* Panels of the methods that score by dot products; with the bits of the reference in rows.h.
 *
 * A dot product's 32 lanes lie in DOT_VECS vectors. 16 blocks' sums are folded together, so that one
 * sum costs few shuffles. Channels are padded to 32 in queries: with -0, because x + -0 * 0 is x for
 * every x, -0 included. */
#include "kernels/sparse/simd/score_tile.h"

#ifdef UCM_LANES

#include <string.h>

static uint32_t padded(uint32_t channels)
{
    return (channels + UCM_DOT_LANES - 1) / UCM_DOT_LANES * UCM_DOT_LANES;
}

/* ---- queries ---- */

/* box: q where it is not negative, q where it is, the sum of |q|. stats: q, its squares. */
uint32_t UCM_ISA_NAME(score_query_floats)(const struct ucm_summary_plan *plan)
{
    uint32_t n = padded(plan->channels);

    switch (plan->spec.method) {
    case UCM_SUMMARY_HASH:
        return plan->query_floats;
    case UCM_SUMMARY_BOX:
        return 2 * n + UCM_DOT_LANES;
    case UCM_SUMMARY_STATS:
        return 2 * n;
    default:
        return n;
    }
}

/* A query head in that form. */
static void arrange(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    float plain[2 * UCM_KV_HEAD_DIM_MAX + 16];
    uint32_t d = plan->channels, n = padded(d);

    ucm_summary_query(plan, q, plain);
    for (uint32_t i = 0; i < UCM_ISA_NAME(score_query_floats)(plan); i++)
        out[i] = -0.0f;
    switch (plan->spec.method) {
    case UCM_SUMMARY_BOX:
        for (uint32_t c = 0; c < d; c++)
            out[plain[c] >= 0 ? c : n + c] = plain[c];
        out[2 * n] = plain[d];
        break;
    case UCM_SUMMARY_STATS:
        memcpy(out + n, plain + d, d * sizeof(*out));
        memcpy(out, plain, d * sizeof(*out));
        break;
    default:
        memcpy(out, plain, d * sizeof(*out));
    }
}

/* The query heads of a panel lie interleaved, 32 floats of each in turn. */
void UCM_ISA_NAME(score_prepare)(const struct ucm_summary_plan *plan, const float *q, uint32_t i,
                                 uint32_t group, float *queries)
{
    uint32_t floats = UCM_ISA_NAME(score_query_floats)(plan), at = i % PANEL;
    uint32_t n = group - (i - at) < PANEL ? group - (i - at) : PANEL;
    float one[2 * UCM_KV_HEAD_DIM_MAX + UCM_DOT_LANES], *panel = queries + (i - at) * floats;

    if (plan->spec.method == UCM_SUMMARY_HASH) {
        ucm_summary_query(plan, q, panel + at * floats);
        return;
    }
    arrange(plan, q, one);
    for (uint32_t c = 0; c < floats; c += UCM_DOT_LANES)
        memcpy(panel + (size_t)c * n + at * UCM_DOT_LANES, one + c, UCM_DOT_LANES * sizeof(*one));
}

/* ---- sums over channels ---- */

enum term {          /* what is summed */
            TERM_I8, /* q * r */
            TERM_U8, /* q * r */
            TERM_L2, /* (q - s * r)^2 */
};

/* Channels c + [0, left) of a vector, at most 32, as floats. */
LANES_INLINE void row_load(const uint8_t *row, uint32_t left, enum term term, vec x[DOT_VECS])
{
    LANES_UNROLL
    for (uint32_t v = 0; v < DOT_VECS; v++) {
        const uint8_t *p = row + v * UCM_LANES;

        if (left >= (v + 1) * UCM_LANES)
            x[v] = term == TERM_U8 ? v_u8(p) : v_i8(p);
        else if (left > v * UCM_LANES)
            x[v] = term == TERM_U8 ? v_u8_part(p, left - v * UCM_LANES)
                                   : v_i8_part(p, left - v * UCM_LANES);
        else
            x[v] = v_set(0);
    }
}

/* q: the same channels of n query heads. */
LANES_INLINE void row_add(const float *q, uint32_t n, enum term term, vec scale, vec x[DOT_VECS],
                          vec acc[][DOT_VECS])
{
    if (term == TERM_L2)
        LANES_UNROLL
    for (uint32_t v = 0; v < DOT_VECS; v++)
        x[v] = v_mul(scale, x[v]);
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < DOT_VECS; v++) {
        vec a = v_load(q + i * UCM_DOT_LANES + v * UCM_LANES);

        if (term == TERM_L2) {
            a = v_sub(a, x[v]);
            acc[i][v] = v_fma(a, a, acc[i][v]);
        } else {
            acc[i][v] = v_fma(a, x[v], acc[i][v]);
        }
    }
}

LANES_INLINE void clear(vec acc[][DOT_VECS], uint32_t n)
{
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < DOT_VECS; v++)
        acc[i][v] = v_set(0);
}

/* Sums of n query heads with the rows at byte `from` of the summaries. scales: TERM_L2's, by block. */
LANES_INLINE void tile_sums(const struct score_tile *t, uint32_t from, const float *q, uint32_t n,
                            enum term term, const float *scales, vec out[][TILE_VECS])
{
    uint32_t channels = t->plan->channels;
    vec folds[PANEL][TILE];

    for (uint32_t b = 0; b < TILE; b++) {
        const uint8_t *row = t->at[b] + from, *end = row + channels / UCM_DOT_LANES * UCM_DOT_LANES;
        const float *query = q;
        vec acc[PANEL][DOT_VECS], x[DOT_VECS];
        vec scale = v_set(term == TERM_L2 ? scales[b] : 0);

        clear(acc, n);
        tile_prefetch(t, b, from, channels);
        for (; row < end; row += UCM_DOT_LANES, query += n * UCM_DOT_LANES) {
            row_load(row, UCM_DOT_LANES, term, x);
            row_add(query, n, term, scale, x, acc);
        }
        if (channels % UCM_DOT_LANES != 0) {
            row_load(row, channels % UCM_DOT_LANES, term, x);
            row_add(query, n, term, scale, x, acc);
        }
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            folds[i][v_fold_place(b)] = v_dot_fold(acc[i]);
    }
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        v_tile_dots(folds[i], out[i]);
}

/* The same of rows of 4 bits. */
LANES_INLINE void tile_sums_4(const struct score_tile *t, uint32_t from, const float *q, uint32_t n,
                              vec out[][TILE_VECS])
{
    uint32_t bytes = t->plan->vector_bytes;
    vec folds[PANEL][TILE];

    for (uint32_t b = 0; b < TILE; b++) {
        const uint8_t *row = t->at[b] + from, *end = row + bytes;
        const float *query = q;
        vec acc[PANEL][DOT_VECS], x[DOT_VECS];

        clear(acc, n);
        tile_prefetch(t, b, from, bytes);
        for (; row < end; row += UCM_DOT_LANES / 2, query += n * UCM_DOT_LANES) {
            v_i4(row, x);
            row_add(query, n, TERM_I8, v_set(0), x, acc);
        }
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            folds[i][v_fold_place(b)] = v_dot_fold(acc[i]);
    }
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        v_tile_dots(folds[i], out[i]);
}

/* box: of q with hi where q >= 0 and with lo elsewhere, one of two products being 0 each time. */
LANES_INLINE void tile_box_sums(const struct score_tile *t, uint32_t from, const float *q,
                                uint32_t n, vec out[][TILE_VECS])
{
    uint32_t channels = t->plan->channels, hi = from + t->plan->array[1];
    vec folds[PANEL][TILE];

    for (uint32_t b = 0; b < TILE; b++) {
        const uint8_t *row = t->at[b];
        const float *query = q, *negative = q + padded(channels) * n;
        vec acc[PANEL][DOT_VECS], x[DOT_VECS], y[DOT_VECS];

        clear(acc, n);
        tile_prefetch(t, b, from, channels);
        tile_prefetch(t, b, hi, channels);
        for (uint32_t c = 0; c < channels; c += UCM_DOT_LANES) {
            uint32_t left = channels - c < UCM_DOT_LANES ? channels - c : UCM_DOT_LANES;

            row_load(row + hi + c, left, TERM_I8, x);
            row_load(row + from + c, left, TERM_I8, y);
            row_add(query, n, TERM_I8, v_set(0), x, acc);
            row_add(negative, n, TERM_I8, v_set(0), y, acc);
            query += n * UCM_DOT_LANES;
            negative += n * UCM_DOT_LANES;
        }
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            folds[i][v_fold_place(b)] = v_dot_fold(acc[i]);
    }
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        v_tile_dots(folds[i], out[i]);
}

/* ---- methods ---- */

/* The bf16 at byte `from` of each summary, as floats. */
LANES_INLINE void tile_scales(const struct score_tile *t, uint32_t from, float out[TILE])
{
    uint16_t s[TILE];

    for (uint32_t b = 0; b < TILE; b++)
        memcpy(&s[b], t->at[b] + from, sizeof(s[b]));
    for (uint32_t v = 0; v < TILE_VECS; v++)
        v_store(out + v * UCM_LANES, v_bf16(s + v * UCM_LANES));
}

/* Where the scale is NaN the head is poisoned. */
LANES_INLINE vec unless_poisoned(vec score, vec scale)
{
    return v_if_equal(scale, scale, score, v_set(ucm_inf()));
}

/* mean, submean, tokens: the best of a head's vectors. */
LANES_INLINE void rows_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                             enum term term, vec out[][TILE_VECS])
{
    const struct ucm_summary_plan *plan = t->plan;
    vec sums[PANEL][TILE_VECS];
    float scales[TILE];

    for (uint32_t j = 0; j < plan->vectors; j++) {
        uint32_t at = g * plan->vectors + j;

        tile_scales(t, plan->scale[0] + 2 * at, scales);
        tile_sums(t, at * plan->channels, q, n, term, scales, sums);
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            LANES_UNROLL
        for (uint32_t v = 0; v < TILE_VECS; v++) {
            vec s = v_load(scales + v * UCM_LANES), x = sums[i][v];

            x = term == TERM_L2 ? v_sub(v_set(-0.0f), x) : v_mul(s, x);
            x = unless_poisoned(x, s);
            out[i][v] = v_max(x, j == 0 ? v_set(-ucm_inf()) : out[i][v]);
        }
    }
}

LANES_INLINE void dot_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                            vec out[][TILE_VECS])
{
    rows_panel(t, g, q, n, TERM_I8, out);
}

LANES_INLINE void l2_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                           vec out[][TILE_VECS])
{
    rows_panel(t, g, q, n, TERM_L2, out);
}

LANES_INLINE void clear_sums(vec top[][TILE_VECS], vec sum[][TILE_VECS], uint32_t n)
{
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        top[i][v] = v_set(-ucm_inf());
        sum[i][v] = v_set(0);
    }
}

/* tokens with rest: ucm_rest_score of each vector, ucm_log_sum of them. */
LANES_INLINE void rest_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                             vec out[][TILE_VECS])
{
    const struct ucm_summary_plan *plan = t->plan;
    vec beta = v_set(plan->spec.beta), sum[PANEL][TILE_VECS], dots[PANEL][TILE_VECS];
    float scales[TILE];

    clear_sums(out, sum, n);
    for (uint32_t j = 0; j < plan->vectors; j++) {
        uint32_t at = g * plan->vectors + j;
        vec ln = v_set(j < plan->spec.chosen ? 0.0f : plan->ln_count);

        tile_scales(t, plan->scale[0] + 2 * at, scales);
        tile_sums_4(t, at * plan->vector_bytes, q, n, dots);
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            LANES_UNROLL
        for (uint32_t v = 0; v < TILE_VECS; v++) {
            vec s = v_load(scales + v * UCM_LANES);
            vec x = v_add(v_mul(v_mul(beta, s), dots[i][v]), ln);

            v_log_sum_add(&out[i][v], &sum[i][v], unless_poisoned(x, s));
        }
    }
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < TILE_VECS; v++)
        out[i][v] = v_add(out[i][v], v_log(sum[i][v]));
}

/* ucm_box_score */
LANES_INLINE void box_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                            vec out[][TILE_VECS])
{
    const float *abs_sums = q + 2 * padded(t->plan->channels) * n;
    float scales[TILE];

    tile_scales(t, t->plan->scale[0] + 2 * g, scales);
    tile_box_sums(t, g * t->plan->channels, q, n, out);
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        vec slack = v_set(abs_sums[i * UCM_DOT_LANES]);
        vec x = v_fma(v_set(0x1p-11f), slack, out[i][v]);

        x = v_fma(v_load(scales + v * UCM_LANES), x, v_set(0x1p-149f));
        out[i][v] = v_if_finite(x, v_set(ucm_inf()));
    }
}

/* ucm_stats_score */
LANES_INLINE void stats_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                              vec out[][TILE_VECS])
{
    const struct ucm_summary_plan *plan = t->plan;
    uint32_t d = plan->channels;
    float beta = plan->spec.beta;
    vec vars[PANEL][TILE_VECS];
    float mean[TILE], var[TILE];

    tile_scales(t, plan->scale[0] + 2 * g, mean);
    tile_scales(t, plan->scale[1] + 2 * g, var);
    tile_sums(t, g * d, q, n, TERM_I8, NULL, out);
    tile_sums(t, plan->array[1] + g * d, q + padded(d) * n, n, TERM_U8, NULL, vars);
    LANES_UNROLL
    for (uint32_t i = 0; i < n; i++)
        LANES_UNROLL
    for (uint32_t v = 0; v < TILE_VECS; v++) {
        vec s = v_load(mean + v * UCM_LANES);
        vec b = v_mul(v_set(beta * beta / 2.0f), v_load(var + v * UCM_LANES));
        vec x = v_mul(v_mul(v_set(beta), s), out[i][v]);

        x = v_add(v_add(x, v_mul(b, vars[i][v])), v_set(plan->ln_count));
        out[i][v] = unless_poisoned(x, s);
    }
}

static PANEL_BY_COUNT(panel_dot, dot_panel) static PANEL_BY_COUNT(panel_l2, l2_panel) static PANEL_BY_COUNT(
    panel_box, box_panel) static PANEL_BY_COUNT(panel_stats,
                                                stats_panel) static PANEL_BY_COUNT(panel_rest,
                                                                                   rest_panel)

    score_panel *UCM_ISA_NAME(score_panel_of)(const struct ucm_summary_plan *plan, uint32_t metric)
{
    switch (plan->spec.method) {
    case UCM_SUMMARY_BOX:
        return panel_box;
    case UCM_SUMMARY_HASH:
        return UCM_ISA_NAME(score_panel_hash);
    case UCM_SUMMARY_STATS:
        return panel_stats;
    case UCM_SUMMARY_TOKENS:
        if (plan->spec.rest != UCM_REST_NONE)
            return panel_rest;
        /* fall through */
    default:
        return metric == UCM_METRIC_L2 ? panel_l2 : panel_dot;
    }
}

#else
typedef int score_panels_unused;
#endif
