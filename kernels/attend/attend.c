/* Plans, lists, steps and merges. */
#include "kernels/attend/attend.h"

#include "kernels/attend/ops.h"
#include "kernels/isa.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/spec.h"

#include <errno.h>
#include <string.h>

#define NAN_BITS 0x7fc00000u
#define ALIGN_FLOATS 16u /* 64 bytes */

/* ---- plans ---- */

static const struct ucm_attend_ops *ops_of_host(void)
{
#ifdef UCM_ISA_X86
    if (ucm_isa() >= UCM_ISA_AVX2)
        return &attend_ops_avx2;
#endif
    return &attend_ops_base;
}

static int check_scale(const char *name, float scale, char why[UCM_SPARSE_WHY])
{
    if (scale >= 0 && !ucm_not_finite(scale))
        return 0;
    return sparse_refuse(why, "%s is %g; it must be finite and not negative", name, (double)scale);
}

static int check_spec(const struct ucm_attend_spec *s, char why[UCM_SPARSE_WHY])
{
    int r = ucm_kv_shape_check(&s->shape, why);

    if (r == 0)
        r = check_scale("scale", s->scale, why);
    if (r == 0)
        r = check_scale("k_scale", s->k_scale, why);
    if (r == 0)
        r = check_scale("v_scale", s->v_scale, why);
    if (r < 0)
        return r;
    if (s->shape.v_head_dim == 0)
        return sparse_refuse(why, "v_head_dim is 0; for MLA give the channels of K that V is");
    if (s->group < 1 || s->group > UCM_ATTEND_GROUP_MAX)
        return sparse_refuse(why, "group is %u; 1 to %u query heads of a KV head are allowed",
                             s->group, UCM_ATTEND_GROUP_MAX);
    if (s->shape.rope_dim > 0 && s->scale == 0)
        return sparse_refuse(why, "scale is 0; with rope_dim (MLA) it must be given, since "
                                  "1 / sqrt(head_dim) is not the model's");
    if (s->soft_cap > 0 || s->soft_cap < 0 || ucm_is_nan(s->soft_cap))
        return sparse_refuse(why, "soft_cap is %g; logits that are capped are not supported",
                             (double)s->soft_cap);
    return 0;
}

static uint32_t round_up(uint32_t n, uint32_t to)
{
    return (n + to - 1) / to * to;
}

int ucm_attend_plan_init(struct ucm_attend_plan *plan, const struct ucm_attend_spec *spec,
                         char why[UCM_SPARSE_WHY])
{
    int r = check_spec(spec, why);
    struct ucm_attend_spec *s;
    uint32_t rows;

    if (r < 0)
        return r;
    *plan = (struct ucm_attend_plan){.spec = *spec, .ops = ops_of_host()};
    s = &plan->spec;
    if (s->scale == 0)
        s->scale = 1.0f / ucm_sqrt((float)s->shape.head_dim);
    s->k_scale = s->k_scale == 0 ? 1.0f : s->k_scale;
    s->v_scale = s->v_scale == 0 ? 1.0f : s->v_scale;
    plan->logit_scale = s->scale * s->k_scale;
    plan->k_floats = round_up(s->shape.head_dim, UCM_DOT_LANES);
    plan->v_floats = round_up(s->shape.v_head_dim, ALIGN_FLOATS);
    rows = round_up(s->group, ATTEND_HEADS);
    plan->query_floats = rows * plan->k_floats;
    plan->state_floats = round_up(2 * s->group, ALIGN_FLOATS) + rows * plan->v_floats;
    return 0;
}

/* ---- one list ---- */

void ucm_attend_query(const struct ucm_attend_plan *plan, const float *q, float *out)
{
    uint32_t d = plan->spec.shape.head_dim;

    memset(out, 0, plan->query_floats * sizeof(*out));
    for (uint32_t h = 0; h < plan->spec.group; h++)
        memcpy(out + h * plan->k_floats, q + h * d, d * sizeof(*out));
}

void ucm_attend_begin(const struct ucm_attend_plan *plan, struct ucm_attend_state *state,
                      float *floats)
{
    uint32_t group = plan->spec.group;

    *state = (struct ucm_attend_state){
        .top = floats,
        .sum = floats + group,
        .out = floats + round_up(2 * group, ALIGN_FLOATS),
    };
    memset(floats, 0, plan->state_floats * sizeof(*floats));
    for (uint32_t h = 0; h < group; h++)
        state->top[h] = -ucm_inf();
}

static bool is_there(const struct ucm_attend_memory *memory, int32_t block)
{
    return block >= 0 && (uint32_t)block < memory->blocks;
}

/* Both are {top, sum}. How much the first is kept, and how much of the second is added. */
static void join(float *top, float *sum, float tile_top, float tile_sum, float *keep, float *more)
{
    float most = ucm_max(tile_top, *top);

    if (ucm_is_nan(tile_sum) || ucm_is_nan(*sum)) { /* for good: the row will be NaN */
        *keep = *more = *sum = *top = ucm_f32(NAN_BITS);
        return;
    }
    *keep = ucm_exp(*top - most);
    *more = ucm_exp(tile_top - most);
    *sum = ucm_fma(tile_sum, *more, *sum * *keep);
    *top = most;
}

static void add_tile(const struct ucm_attend_plan *plan, const struct attend_rows *k,
                     const struct attend_rows *v, const float *query,
                     struct ucm_attend_state *state, struct attend_tile *tile)
{
    plan->ops->logits(plan, k, query, tile);
    plan->ops->weigh(plan, k->count, tile);
    for (uint32_t h = 0; h < plan->spec.group; h++)
        join(&state->top[h], &state->sum[h], tile->top[h], tile->sum[h], &tile->keep[h],
             &tile->more[h]);
    plan->ops->values(plan, v, tile, state->out);
    if (state->measure)
        state->key_max = plan->ops->key_max(plan, k, state->key_max);
    state->tiles++;
}

/* A block's own weights: the same joins, from nothing. */
struct block_sum {
    float top[ATTEND_ROWS], sum[ATTEND_ROWS];
};

static void block_begin(const struct ucm_attend_plan *plan, struct block_sum *b)
{
    for (uint32_t h = 0; h < plan->spec.group; h++) {
        b->top[h] = -ucm_inf();
        b->sum[h] = 0.0f;
    }
}

static void block_add(const struct ucm_attend_plan *plan, struct block_sum *b,
                      const struct attend_tile *tile)
{
    float keep, more;

    for (uint32_t h = 0; h < plan->spec.group; h++)
        join(&b->top[h], &b->sum[h], tile->top[h], tile->sum[h], &keep, &more);
}

static float log_sum(float top, float sum)
{
    return sum == 0 ? -ucm_inf() : ucm_is_nan(sum) ? sum : top + ucm_log(sum);
}

static void add_block(const struct ucm_attend_plan *plan, const uint8_t *block, uint32_t g,
                      uint32_t tokens, const float *query, struct ucm_attend_state *state,
                      float *log_weight, uint32_t pitch)
{
    const struct ucm_kv_shape *s = &plan->spec.shape;
    const uint8_t *k = block + s->k_offset + g * s->k_head_stride;
    const uint8_t *v = block + s->v_offset + g * s->v_head_stride;
    struct attend_tile tile;
    struct block_sum sum;

    memset(&tile, 0, sizeof(tile)); /* rows past the group are computed too */
    block_begin(plan, &sum);
    for (uint32_t t = 0; t < tokens; t += UCM_ATTEND_TILE) {
        uint32_t n = tokens - t < UCM_ATTEND_TILE ? tokens - t : UCM_ATTEND_TILE;
        struct attend_rows key = {k + t * s->k_token_stride, s->k_token_stride, n};
        struct attend_rows value = {v + t * s->v_token_stride, s->v_token_stride, n};

        add_tile(plan, &key, &value, query, state, &tile);
        if (log_weight != NULL)
            block_add(plan, &sum, &tile);
    }
    for (uint32_t h = 0; log_weight != NULL && h < plan->spec.group; h++)
        log_weight[(uint64_t)h * pitch] = log_sum(sum.top[h], sum.sum[h]);
}

int ucm_attend_add(const struct ucm_attend_plan *plan, const struct ucm_attend_memory *memory,
                   uint32_t g, const float *query, const int32_t *blocks, uint32_t n, uint32_t tail,
                   struct ucm_attend_state *state, float *log_weight, uint32_t pitch)
{
    uint32_t tokens = plan->spec.shape.tokens;

    for (uint32_t i = 0; i < n; i++)
        if (!is_there(memory, blocks[i]))
            return -ENOENT;
    for (uint32_t i = 0; i < n; i++)
        add_block(plan, (const uint8_t *)memory->base + (uint32_t)blocks[i] * memory->stride, g,
                  i + 1 == n && tail > 0 && tail < tokens ? tail : tokens, query, state,
                  log_weight == NULL ? NULL : log_weight + i, pitch);
    return 0;
}

void ucm_attend_end(const struct ucm_attend_plan *plan, const struct ucm_attend_state *state,
                    float *out, float *lse)
{
    uint32_t n = plan->spec.shape.v_head_dim;

    for (uint32_t h = 0; h < plan->spec.group; h++) {
        const float *from = state->out + (uint64_t)h * plan->v_floats;
        float sum = state->sum[h];

        for (uint32_t c = 0; c < n; c++) {
            float x = from[c] / sum * plan->spec.v_scale;

            out[h * n + c] = sum == 0 ? 0.0f : x;
        }
        if (lse != NULL)
            lse[h] = log_sum(state->top[h], sum);
    }
}

/* ---- a step ---- */

uint32_t ucm_attend_scratch_floats(const struct ucm_attend_plan *plan)
{
    return round_up(plan->state_floats, ALIGN_FLOATS) + plan->query_floats;
}

static uint32_t window_blocks(const struct ucm_attend_plan *plan, const struct ucm_attend_batch *b,
                              uint32_t chain)
{
    uint32_t tokens = plan->spec.shape.tokens, blocks;

    if (b->length == NULL)
        return 0;
    blocks = b->length[chain] / tokens + (b->length[chain] % tokens > 0);
    return blocks > b->first[chain] ? blocks - b->first[chain] : 0;
}

static bool all_there(const struct ucm_attend_memory *memory, const int32_t *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!is_there(memory, blocks[i]))
            return false;
    return true;
}

static int check_chain(const struct ucm_attend_plan *plan, const struct ucm_attend_batch *b,
                       uint32_t chain)
{
    uint32_t window = window_blocks(plan, b, chain);

    for (uint64_t l = (uint64_t)chain * b->lists, end = l + b->lists; l < end; l++) {
        if (b->count[l] > b->room)
            return -EINVAL;
        if (!all_there(&b->pool, b->slots + l * b->room, b->count[l]))
            return -ENOENT;
    }
    if (window == 0)
        return 0;
    if ((uint64_t)b->first[chain] + window > b->table_stride)
        return -EINVAL;
    return all_there(&b->pages, b->table + (uint64_t)chain * b->table_stride + b->first[chain],
                     window)
               ? 0
               : -ENOENT;
}

/* 0, or what ucm_attend refuses. */
static int check_batch(const struct ucm_attend_plan *plan, const struct ucm_attend_batch *batch)
{
    int r = batch->lists == 1 || batch->lists == plan->spec.shape.kv_heads ? 0 : -EINVAL;

    for (uint32_t chain = 0; r == 0 && chain < batch->chains; chain++)
        r = check_chain(plan, batch, chain);
    return r;
}

/* One KV head of one chain, of a batch that was checked. */
static void attend_one(const struct ucm_attend_plan *plan, const struct ucm_attend_batch *b,
                       uint32_t chain, uint32_t g, float *scratch)
{
    const struct ucm_kv_shape *s = &plan->spec.shape;
    uint64_t list = (uint64_t)chain * b->lists + (b->lists > 1 ? g : 0);
    uint64_t row = ((uint64_t)chain * s->kv_heads + g) * plan->spec.group;
    float *query = scratch + round_up(plan->state_floats, ALIGN_FLOATS);
    uint32_t window = window_blocks(plan, b, chain);
    struct ucm_attend_state state;

    ucm_attend_query(plan, b->q + row * s->head_dim, query);
    ucm_attend_begin(plan, &state, scratch);
    ucm_attend_add(plan, &b->pool, g, query, b->slots + list * b->room, b->count[list], 0, &state,
                   NULL, 0);
    if (window > 0)
        ucm_attend_add(plan, &b->pages, g, query,
                       b->table + (uint64_t)chain * b->table_stride + b->first[chain], window,
                       b->length[chain] % s->tokens, &state, NULL, 0);
    ucm_attend_end(plan, &state, b->out + row * s->v_head_dim,
                   b->lse == NULL ? NULL : b->lse + row);
}

int ucm_attend(const struct ucm_attend_plan *plan, const struct ucm_attend_batch *batch,
               float *scratch)
{
    int r = check_batch(plan, batch);

    for (uint32_t chain = 0; r == 0 && chain < batch->chains; chain++)
        for (uint32_t g = 0; g < plan->spec.shape.kv_heads; g++)
            attend_one(plan, batch, chain, g, scratch);
    return r;
}

/* ---- merging ---- */

static void fill(float *out, uint32_t n, float x)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = x;
}

/* The largest lse of a row; NaN if one is NaN or +inf. */
static float merge_top(const struct ucm_attend_part *parts, uint32_t n, uint32_t row)
{
    float top = -ucm_inf();

    for (uint32_t p = 0; p < n; p++) {
        float lse = parts[p].lse[row];

        if (!(lse < ucm_inf()))
            return ucm_f32(NAN_BITS);
        top = ucm_max(lse, top);
    }
    return top;
}

#define CHUNK 64u /* channels at once: out may be a part's */

static void merge_chunk(const struct ucm_attend_part *parts, uint32_t n, uint32_t row, uint64_t at,
                        uint32_t channels, float top, float sum, float *out)
{
    float x[CHUNK] = {0};

    for (uint32_t p = 0; p < n; p++) {
        float lse = parts[p].lse[row], w = ucm_exp(lse - top);

        if (lse == -ucm_inf())
            continue;
        for (uint32_t c = 0; c < channels; c++)
            x[c] = ucm_fma(w, parts[p].out[at + c], x[c]);
    }
    for (uint32_t c = 0; c < channels; c++)
        out[at + c] = x[c] / sum;
}

static void merge_row(const struct ucm_attend_part *parts, uint32_t n, uint32_t row,
                      uint32_t channels, float *out, float *lse)
{
    float top = merge_top(parts, n, row), sum = 0.0f;
    uint64_t at = (uint64_t)row * channels;

    if (ucm_not_finite(top)) {
        fill(out + at, channels, ucm_is_nan(top) ? top : 0.0f);
        *lse = top;
        return;
    }
    for (uint32_t p = 0; p < n; p++)
        sum += ucm_exp(parts[p].lse[row] - top);
    for (uint32_t c = 0; c < channels; c += CHUNK)
        merge_chunk(parts, n, row, at + c, channels - c < CHUNK ? channels - c : CHUNK, top, sum,
                    out);
    *lse = top + ucm_log(sum);
}

void ucm_attend_merge(const struct ucm_attend_part *parts, uint32_t n, uint32_t rows,
                      uint32_t channels, float *out, float *lse)
{
    for (uint32_t row = 0; row < rows; row++)
        merge_row(parts, n, row, channels, out, &lse[row]);
}

/* ---- bounds ---- */

float ucm_attend_slack(const struct ucm_attend_plan *plan, const struct ucm_attend_state *state,
                       float abs_sum)
{
    /* A lane adds d / 32 products, the lanes 5 times; the scale rounds once; three are in reserve. */
    float roundings = (float)(plan->spec.shape.head_dim / UCM_DOT_LANES + 10);
    float logits = roundings * 0x1p-24f * (abs_sum * state->key_max) + 0x1p-130f; /* denormals */
    /* Of a tile: 16 exponentials of 2 units each, whose arguments are rounded, and 4 additions. Of a
     * join: two exponentials, products and a sum. Together less than 2^-20. */
    float sums = (float)state->tiles * 0x1p-20f + 0x1p-17f;
    float slack = (logits * plan->logit_scale + sums) * 1.125f;

    return slack < 0.25f ? slack : ucm_inf();
}
