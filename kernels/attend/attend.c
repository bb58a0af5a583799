/* Plans, lists and bounds. */
#include "kernels/attend/attend.h"

#include "kernels/sparse/arith.h"
#include "kernels/sparse/spec.h"

#include <errno.h>
#include <string.h>

#define NAN_BITS 0x7fc00000u
#define ALIGN_FLOATS 16u /* 64 bytes */
/* Twenty times as fast where the processor fuses; the same bits. */
#ifdef UCM_ISA_X86
#define VECTORS __attribute__((target_clones("arch=haswell", "default")))
#else
#define VECTORS
#endif

/* ---- plans ---- */

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

    if (r < 0)
        return r;
    *plan = (struct ucm_attend_plan){.spec = *spec};
    s = &plan->spec;
    if (s->scale == 0)
        s->scale = 1.0f / ucm_sqrt((float)s->shape.head_dim);
    s->k_scale = s->k_scale == 0 ? 1.0f : s->k_scale;
    s->v_scale = s->v_scale == 0 ? 1.0f : s->v_scale;
    plan->logit_scale = s->scale * s->k_scale;
    plan->k_floats = round_up(s->shape.head_dim, UCM_DOT_LANES);
    plan->v_floats = round_up(s->shape.v_head_dim, ALIGN_FLOATS);
    plan->query_floats = s->group * plan->k_floats;
    plan->state_floats = round_up(2 * s->group, ALIGN_FLOATS) + s->group * plan->v_floats;
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

/* Both are {top, sum}. Returns how much of the first is kept, and how much of the second is
 * added. */
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

UCM_HD float element(uint32_t dtype, const uint8_t *row, uint32_t c)
{
    uint16_t half;
    float x;

    if (dtype == UCM_KV_FP8_E4M3)
        return ucm_fp8_e4m3_decode(row[c]);
    if (dtype == UCM_KV_F32) {
        memcpy(&x, row + 4 * c, sizeof(x));
        return x;
    }
    memcpy(&half, row + 2 * c, sizeof(half));
    return dtype == UCM_KV_F16 ? ucm_f16_decode(half) : ucm_bf16_decode(half);
}

/* Rows of K or V, decoded; channels past the last are 0. */
static void decode_rows(uint32_t dtype, const uint8_t *at, uint64_t stride, uint32_t n,
                        uint32_t channels, float to[UCM_ATTEND_TILE][UCM_KV_HEAD_DIM_MAX])
{
    for (uint32_t t = 0; t < n; t++, at += stride) {
        memset(to[t] + channels, 0, (round_up(channels, UCM_DOT_LANES) - channels) * sizeof(float));
        for (uint32_t c = 0; c < channels; c++)
            to[t][c] = element(dtype, at, c);
    }
}

static float fold(float *x, uint32_t n)
{
    for (uint32_t half = n / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
}

VECTORS static float dot(const float *q, const float *k, uint32_t n)
{
    float lane[UCM_DOT_LANES] = {0};

    for (uint32_t c = 0; c < n; c += UCM_DOT_LANES)
        for (uint32_t i = 0; i < UCM_DOT_LANES; i++)
            lane[i] = __builtin_fmaf(q[c + i], k[c + i], lane[i]);
    return fold(lane, UCM_DOT_LANES);
}

/* What a tile does to its list: by query heads. */
struct tile {
    uint32_t n; /* tokens, 1 to UCM_ATTEND_TILE */
    float k[UCM_ATTEND_TILE][UCM_KV_HEAD_DIM_MAX], v[UCM_ATTEND_TILE][UCM_KV_HEAD_DIM_MAX];
    float top[UCM_ATTEND_GROUP_MAX], sum[UCM_ATTEND_GROUP_MAX];
};

/* Weights of the tile's tokens for query head h; sum is NaN if a logit is NaN or +inf. */
static void weigh(const struct ucm_attend_plan *plan, const float *query, uint32_t h,
                  struct tile *tile, float e[UCM_ATTEND_TILE])
{
    float sums[UCM_ATTEND_TILE] = {0}, top = -ucm_inf();
    bool bad = false;

    for (uint32_t t = 0; t < tile->n; t++) {
        e[t] = dot(query + h * plan->k_floats, tile->k[t], plan->k_floats) * plan->logit_scale;
        bad |= !(e[t] < ucm_inf());
        top = ucm_max(e[t], top);
    }
    for (uint32_t t = 0; t < tile->n; t++)
        sums[t] = e[t] = ucm_exp(e[t] - top);
    tile->top[h] = top;
    tile->sum[h] = bad ? ucm_f32(NAN_BITS) : fold(sums, UCM_ATTEND_TILE);
}

/* out = tile's * more + out * keep. */
VECTORS static void values(const struct tile *tile, uint32_t channels,
                           const float e[UCM_ATTEND_TILE], float keep, float more, float *out)
{
    float x[UCM_KV_HEAD_DIM_MAX] = {0};

    for (uint32_t t = 0; t < tile->n; t++)
        for (uint32_t c = 0; c < channels; c++)
            x[c] = __builtin_fmaf(e[t], tile->v[t][c], x[c]);
    for (uint32_t c = 0; c < channels; c++)
        out[c] = __builtin_fmaf(x[c], more, out[c] * keep);
}

static void add_tile(const struct ucm_attend_plan *plan, const float *query,
                     struct ucm_attend_state *state, struct tile *tile)
{
    for (uint32_t h = 0; h < plan->spec.group; h++) {
        float e[UCM_ATTEND_TILE], keep, more;

        weigh(plan, query, h, tile, e);
        join(&state->top[h], &state->sum[h], tile->top[h], tile->sum[h], &keep, &more);
        values(tile, plan->spec.shape.v_head_dim, e, keep, more,
               state->out + (uint64_t)h * plan->v_floats);
    }
    for (uint32_t t = 0; state->measure && t < tile->n; t++)
        for (uint32_t c = 0; c < plan->spec.shape.head_dim; c++)
            state->key_max = ucm_max(ucm_abs(tile->k[t][c]), state->key_max);
    state->tiles++;
}

/* A block's own weights: the same joins, beginning with nothing. */
struct block_sum {
    float top[UCM_ATTEND_GROUP_MAX], sum[UCM_ATTEND_GROUP_MAX];
};

static void block_begin(const struct ucm_attend_plan *plan, struct block_sum *b)
{
    for (uint32_t h = 0; h < plan->spec.group; h++) {
        b->top[h] = -ucm_inf();
        b->sum[h] = 0.0f;
    }
}

static void block_add(const struct ucm_attend_plan *plan, struct block_sum *b,
                      const struct tile *tile)
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
    struct block_sum sum;
    struct tile tile;

    block_begin(plan, &sum);
    for (uint32_t t = 0; t < tokens; t += UCM_ATTEND_TILE) {
        tile.n = tokens - t < UCM_ATTEND_TILE ? tokens - t : UCM_ATTEND_TILE;
        decode_rows(s->dtype, k + t * s->k_token_stride, s->k_token_stride, tile.n, s->head_dim,
                    tile.k);
        decode_rows(s->dtype, v + t * s->v_token_stride, s->v_token_stride, tile.n, s->v_head_dim,
                    tile.v);
        add_tile(plan, query, state, &tile);
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

uint32_t ucm_attend_scratch_floats(const struct ucm_attend_plan *plan)
{
    return round_up(plan->state_floats, ALIGN_FLOATS) + plan->query_floats;
}

/* ---- bounds ---- */

float ucm_attend_slack(const struct ucm_attend_plan *plan, const struct ucm_attend_state *state,
                       float abs_sum)
{
    /* A lane adds d / 32 products; adding the lanes takes 5 steps; the scale rounds once; three are
     * in reserve. */
    float roundings = (float)(plan->spec.shape.head_dim / UCM_DOT_LANES + 10);
    float logits = roundings * 0x1p-24f * (abs_sum * state->key_max) + 0x1p-130f; /* denormals */
    /* A tile has 16 exponentials of 2 units each, whose arguments are rounded, and 4 additions. A
     * join has two exponentials, products and a sum. Together they err by less than 2^-20. */
    float sums = (float)state->tiles * 0x1p-20f + 0x1p-17f;
    float slack = (logits * plan->logit_scale + sums) * 1.125f;

    return slack < 0.25f ? slack : ucm_inf();
}
