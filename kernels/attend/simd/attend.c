/* The arithmetic of a tile. attend.h defines it; every form has the same bits. */
#include "kernels/attend/ops.h"

#include "kernels/isa.h"
#include "kernels/sparse/simd/vec.h"

#define DOT_VECS (UCM_DOT_LANES / VEC)
#define TILE_VECS (UCM_ATTEND_TILE / VEC)
#define WIDE (2 * VEC)              /* channels of V at once */
#define HEADS (VEC == 16 ? 4u : 2u) /* whose sums fit the registers */
_Static_assert(ATTEND_HEADS % HEADS == 0, "rows are there for all of them");

/* name(dtype, heads at once, ...) with constants for both. */
#define HEADS_OF(name, dtype, one, ...)                                                            \
    do {                                                                                           \
        if (one)                                                                                   \
            name(dtype, 1, __VA_ARGS__);                                                           \
        else                                                                                       \
            name(dtype, HEADS, __VA_ARGS__);                                                       \
    } while (0)
#define BY_DTYPE(name, one, ...)                                                                   \
    switch (plan->spec.shape.dtype) {                                                              \
    case UCM_KV_F16:                                                                               \
        HEADS_OF(name, UCM_KV_F16, one, __VA_ARGS__);                                              \
        break;                                                                                     \
    case UCM_KV_BF16:                                                                              \
        HEADS_OF(name, UCM_KV_BF16, one, __VA_ARGS__);                                             \
        break;                                                                                     \
    case UCM_KV_FP8_E4M3:                                                                          \
        HEADS_OF(name, UCM_KV_FP8_E4M3, one, __VA_ARGS__);                                         \
        break;                                                                                     \
    default:                                                                                       \
        HEADS_OF(name, UCM_KV_F32, one, __VA_ARGS__);                                              \
    }

/* ---- logits ---- */

/* One token and `heads` query heads, k_floats from each other. */
VEC_INLINE void dots_as(uint32_t dtype, uint32_t heads, const uint8_t *k, uint32_t n,
                        const float *q, uint32_t k_floats, float *to)
{
    vec_f lane[HEADS][DOT_VECS] = {0};
    uint32_t size = vec_element_bytes(dtype), c = 0;

    for (; c + UCM_DOT_LANES <= n; c += UCM_DOT_LANES)
        for (uint32_t i = 0; i < DOT_VECS; i++) {
            vec_f x = vec_decode(dtype, k + (c + i * VEC) * size);

            for (uint32_t h = 0; h < heads; h++)
                lane[h][i] = vec_fma(vec_load(q + h * k_floats + c + i * VEC), x, lane[h][i]);
        }
    for (uint32_t i = 0; c + i * VEC < n; i++) {
        vec_f x = vec_part(dtype, k, c + i * VEC, n);

        for (uint32_t h = 0; h < heads; h++)
            lane[h][i] = vec_fma(vec_load(q + h * k_floats + c + i * VEC), x, lane[h][i]);
    }
    for (uint32_t h = 0; h < heads; h++)
        to[h * UCM_ATTEND_TILE] = vec_fold(lane[h]);
}

VEC_INLINE void logits_as(uint32_t dtype, uint32_t heads, const struct ucm_attend_plan *plan,
                          const struct attend_rows *k, const float *q, float *to)
{
    for (uint32_t t = 0; t < k->count; t++) {
        dots_as(dtype, heads, k->at + t * k->stride, plan->spec.shape.head_dim, q, plan->k_floats,
                to + t);
        for (uint32_t h = 0; h < heads; h++)
            to[h * UCM_ATTEND_TILE + t] *= plan->logit_scale;
    }
}

static void logits(const struct ucm_attend_plan *plan, const struct attend_rows *k,
                   const float *query, struct attend_tile *tile)
{
    for (uint32_t h = 0; h < plan->spec.group; h += HEADS)
        BY_DTYPE(logits_as, h + 1 == plan->spec.group, plan, k, query + h * plan->k_floats,
                 tile->e[h])
}

/* ---- weights ---- */

/* ucm_exp of each lane. */
static vec_f vec_exp(vec_f x)
{
    vec_i in = x >= -87.0f; /* where not, also for NaN: 0 */
    vec_f n, r, p;

    x = (vec_f)((vec_i)x & in);
    n = (x * 0x1.715476p+0f + 0x1.8p23f) - 0x1.8p23f;
    r = vec_fma(n, vec_all_f(-0x1.62e4p-1f), x);
    r = vec_fma(n, vec_all_f(-0x1.7f7d1cp-20f), r);
    p = vec_fma(r, vec_all_f(0x1.a01a02p-13f), vec_all_f(0x1.6c16c2p-10f));
    p = vec_fma(p, r, vec_all_f(0x1.111112p-7f));
    p = vec_fma(p, r, vec_all_f(0x1.555556p-5f));
    p = vec_fma(p, r, vec_all_f(0x1.555556p-3f));
    p = vec_fma(p, r, vec_all_f(0.5f));
    p = vec_fma(p, r, vec_all_f(1.0f));
    p = vec_fma(p, r, vec_all_f(1.0f));
    p *= (vec_f)((__builtin_convertvector(n, vec_i) + 127) << 23);
    return (vec_f)((vec_i)p & in);
}

static float weigh_head(float e[UCM_ATTEND_TILE], uint32_t count, float *sum)
{
    vec_f x[TILE_VECS], most[TILE_VECS];
    vec_i bad = {0};

    for (uint32_t t = count; t < UCM_ATTEND_TILE; t++)
        e[t] = -ucm_inf();
    for (uint32_t i = 0; i < TILE_VECS; i++) {
        x[i] = most[i] = vec_load(e + i * VEC);
        bad |= ~(x[i] < ucm_inf()); /* NaN is not */
    }
    for (uint32_t half = TILE_VECS / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            most[i] = vec_max(most[i], most[i + half]);
    for (int h = VEC / 2; h > 0; h /= 2)
        most[0] = vec_max(most[0], vec_swap(most[0], h));
    for (uint32_t i = 0; i < TILE_VECS; i++) {
        x[i] = vec_exp(x[i] - vec_all_f(most[0][0]));
        vec_store(e + i * VEC, x[i]);
    }
    for (uint32_t half = TILE_VECS / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            x[i] += x[i + half];
    for (int h = VEC / 2; h > 0; h /= 2)
        x[0] += vec_swap(x[0], h);
    *sum = vec_any_sign(bad) ? ucm_f32(0x7fc00000u) : x[0][0];
    return most[0][0];
}

static void weigh(const struct ucm_attend_plan *plan, uint32_t count, struct attend_tile *tile)
{
    for (uint32_t h = 0; h < plan->spec.group; h++)
        tile->top[h] = weigh_head(tile->e[h], count, &tile->sum[h]);
}

/* ---- values ---- */

/* `vecs` vectors of channels from c on. */
VEC_INLINE void channels_as(uint32_t dtype, uint32_t heads, uint32_t vecs,
                            const struct ucm_attend_plan *plan, const struct attend_rows *v,
                            const struct attend_tile *tile, uint32_t first, uint32_t c, float *out)
{
    uint32_t n = plan->spec.shape.v_head_dim, size = vec_element_bytes(dtype);
    vec_f sum[HEADS][2] = {0};

    for (uint32_t t = 0; t < v->count; t++) {
        const uint8_t *row = v->at + t * v->stride;
        vec_f x[2];

        for (uint32_t i = 0; i < vecs; i++)
            x[i] = c + (i + 1) * VEC <= n ? vec_decode(dtype, row + (c + i * VEC) * size)
                                          : vec_part(dtype, row, c + i * VEC, n);
        for (uint32_t h = 0; h < heads; h++)
            for (uint32_t i = 0; i < vecs; i++)
                sum[h][i] = vec_fma(vec_all_f(tile->e[first + h][t]), x[i], sum[h][i]);
    }
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t i = 0; i < vecs; i++) {
            float *at = out + h * plan->v_floats + c + i * VEC;
            vec_f kept = vec_load(at) * vec_all_f(tile->keep[first + h]);

            vec_store(at, vec_fma(sum[h][i], vec_all_f(tile->more[first + h]), kept));
        }
}

VEC_INLINE void values_as(uint32_t dtype, uint32_t heads, const struct ucm_attend_plan *plan,
                          const struct attend_rows *v, const struct attend_tile *tile,
                          uint32_t first, float *out)
{
    uint32_t n = plan->spec.shape.v_head_dim, c = 0;

    for (; c + WIDE <= n; c += WIDE)
        channels_as(dtype, heads, 2, plan, v, tile, first, c, out);
    for (; c < n; c += VEC)
        channels_as(dtype, heads, 1, plan, v, tile, first, c, out);
}

static void values(const struct ucm_attend_plan *plan, const struct attend_rows *v,
                   const struct attend_tile *tile, float *out)
{
    for (uint32_t h = 0; h < plan->spec.group; h += HEADS)
        BY_DTYPE(values_as, h + 1 == plan->spec.group, plan, v, tile, h, out + h * plan->v_floats)
}

/* ---- bounds ---- */

VEC_INLINE void key_max_as(uint32_t dtype, uint32_t heads, const struct attend_rows *k, uint32_t n,
                           float *to)
{
    uint32_t size = vec_element_bytes(dtype);
    vec_f most = vec_all_f(*to);

    (void)heads;
    for (uint32_t t = 0; t < k->count; t++)
        for (uint32_t c = 0; c < n; c += VEC) {
            const uint8_t *row = k->at + t * k->stride;
            vec_f x = c + VEC <= n ? vec_decode(dtype, row + c * size) : vec_part(dtype, row, c, n);

            most = vec_max((vec_f)((vec_i)x & INT32_MAX), most);
        }
    for (int h = VEC / 2; h > 0; h /= 2)
        most = vec_max(most, vec_swap(most, h));
    *to = most[0];
}

static float key_max(const struct ucm_attend_plan *plan, const struct attend_rows *k, float most)
{
    BY_DTYPE(key_max_as, true, k, plan->spec.shape.head_dim, &most)
    return most;
}

const struct ucm_attend_ops UCM_ISA_NAME(attend_ops) = {
    .logits = logits, .weigh = weigh, .values = values, .key_max = key_max};
