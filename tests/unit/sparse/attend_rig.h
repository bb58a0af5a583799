/* For the tests of attention: random entries of any dtype, and exact arithmetic. */
#ifndef UCM_TESTS_UNIT_ATTEND_RIG_H
#define UCM_TESTS_UNIT_ATTEND_RIG_H

#include "kernels/attend/attend.h"
#include "kernels/sparse/arith.h"
#include "tests/unit/sparse/select_rig.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- elements ---- */

static inline uint32_t rig_element(uint32_t dtype)
{
    return dtype == UCM_KV_F32 ? 4 : dtype == UCM_KV_FP8_E4M3 ? 1 : 2;
}

static inline float rig_decode(uint32_t dtype, const uint8_t *p)
{
    uint16_t h;
    float x;

    if (dtype == UCM_KV_F32) {
        memcpy(&x, p, 4);
        return x;
    }
    if (dtype == UCM_KV_FP8_E4M3)
        return ucm_fp8_e4m3_decode(*p);
    memcpy(&h, p, 2);
    return dtype == UCM_KV_F16 ? ucm_f16_decode(h) : ucm_bf16_decode(h);
}

/* An element near x, rounded towards zero. |x| below 60,000. */
static inline void rig_encode(uint32_t dtype, float x, uint8_t *p)
{
    uint32_t u, sign, e, m;
    uint16_t h;

    memcpy(&u, &x, 4);
    sign = u >> 31;
    e = u >> 23 & 0xff;
    m = u & 0x7fffff;
    switch (dtype) {
    case UCM_KV_F32:
        memcpy(p, &x, 4);
        return;
    case UCM_KV_BF16:
        h = (uint16_t)(u >> 16);
        break;
    case UCM_KV_F16:
        h = (uint16_t)(sign << 15 | (e < 113 ? 0 : (e - 112) << 10 | m >> 13));
        break;
    default:
        *p = (uint8_t)(sign << 7 | (e < 121 ? 0 : e > 134 ? 0x7e : (e - 120) << 3 | m >> 20));
        return;
    }
    memcpy(p, &h, 2);
}

/* ---- memory ---- */

static void **rig_taken;
static size_t rig_n_taken;

/* Memory that lasts until rig_give_back, which a suite calls when a test has ended. */
static inline void *rig_take(size_t bytes)
{
    void *p = malloc(bytes);

    rig_taken = realloc(rig_taken, (rig_n_taken + 1) * sizeof(*rig_taken));
    cr_assert(p && rig_taken);
    rig_taken[rig_n_taken++] = p;
    return p;
}

static inline void rig_give_back(void)
{
    while (rig_n_taken > 0)
        free(rig_taken[--rig_n_taken]);
    free(rig_taken);
    rig_taken = NULL;
}

/* ---- entries ---- */

struct rig_pool {
    struct ucm_attend_plan plan;
    struct ucm_attend_memory memory;
    uint8_t *bytes;
};

/* K, V or K next to V of a token and head, with `gap` elements between rows. */
static inline struct ucm_attend_spec rig_attend(uint32_t dtype, uint32_t tokens, uint32_t kv_heads,
                                                uint32_t group, uint32_t d, uint32_t v_d,
                                                uint32_t gap)
{
    uint32_t size = rig_element(dtype);
    struct ucm_attend_spec spec = {.group = group};
    struct ucm_kv_shape *s = &spec.shape;

    *s = (struct ucm_kv_shape){.dtype = dtype,
                               .tokens = tokens,
                               .kv_heads = kv_heads,
                               .head_dim = d,
                               .v_head_dim = v_d,
                               .k_offset = gap * size};
    s->k_head_stride = (uint64_t)(d + gap) * size;
    s->k_token_stride = kv_heads * s->k_head_stride + gap * size;
    s->v_offset = s->k_offset + tokens * s->k_token_stride;
    s->v_head_stride = (uint64_t)(v_d + gap) * size;
    s->v_token_stride = kv_heads * s->v_head_stride;
    return spec;
}

static inline void rig_pool_open(struct rig_pool *p, const struct ucm_attend_spec *spec, uint32_t n)
{
    char why[UCM_SPARSE_WHY] = "";
    uint64_t extent = ucm_kv_shape_extent(&spec->shape, true);

    cr_assert_eq(ucm_attend_plan_init(&p->plan, spec, why), 0, "%s", why);
    /* The last entry ends where its shape does: a sanitizer reports reads past it. */
    p->memory = (struct ucm_attend_memory){.stride = extent + 64, .blocks = n};
    p->bytes = rig_take((n - 1) * p->memory.stride + extent);
    /* NaN in entries that no list names */
    memset(p->bytes, 0xff, (n - 1) * p->memory.stride + extent);
    p->memory.base = p->bytes;
}

static inline uint8_t *rig_at(const struct rig_pool *p, int32_t entry, uint32_t g, uint32_t t,
                              bool value, uint32_t c)
{
    const struct ucm_kv_shape *s = &p->plan.spec.shape;
    uint64_t at = value ? s->v_offset + t * s->v_token_stride + g * s->v_head_stride
                        : s->k_offset + t * s->k_token_stride + g * s->k_head_stride;

    return p->bytes + (uint32_t)entry * p->memory.stride + at + (uint64_t)c * rig_element(s->dtype);
}

static inline void rig_pool_fill(const struct rig_pool *p, float size)
{
    const struct ucm_kv_shape *s = &p->plan.spec.shape;

    for (uint32_t b = 0; b < p->memory.blocks; b++)
        for (uint32_t g = 0; g < s->kv_heads; g++)
            for (uint32_t t = 0; t < s->tokens; t++) {
                for (uint32_t c = 0; c < s->head_dim; c++)
                    rig_encode(s->dtype, size * rig_normal(),
                               rig_at(p, (int32_t)b, g, t, false, c));
                for (uint32_t c = 0; c < s->v_head_dim; c++)
                    rig_encode(s->dtype, rig_normal(), rig_at(p, (int32_t)b, g, t, true, c));
            }
}

/* ---- exact arithmetic ---- */

#define RIG_CHANNELS 640

struct rig_exact {
    double out[RIG_CHANNELS], top, sum, largest; /* largest: of |v| */
};

static inline double rig_exact_logit(const struct rig_pool *p, const float *q, int32_t entry,
                                     uint32_t g, uint32_t t)
{
    const struct ucm_kv_shape *s = &p->plan.spec.shape;
    double x = 0;

    for (uint32_t c = 0; c < s->head_dim; c++)
        x += (double)q[c] * (double)rig_decode(s->dtype, rig_at(p, entry, g, t, false, c));
    return x * (double)p->plan.logit_scale;
}

static inline void rig_exact_add(const struct rig_pool *p, const float *q, int32_t entry,
                                 uint32_t g, uint32_t tokens, struct rig_exact *r)
{
    const struct ucm_kv_shape *s = &p->plan.spec.shape;

    for (uint32_t t = 0; t < tokens; t++) {
        double x = rig_exact_logit(p, q, entry, g, t), top = fmax(x, r->top);
        double keep = exp(r->top - top), w = exp(x - top);

        r->sum = r->sum * keep + w;
        r->top = top;
        for (uint32_t c = 0; c < s->v_head_dim; c++) {
            double v = (double)rig_decode(s->dtype, rig_at(p, entry, g, t, true, c));

            r->out[c] = r->out[c] * keep + w * v;
            r->largest = fmax(r->largest, fabs(v));
        }
    }
}

static inline float *rig_floats(uint64_t n)
{
    return rig_take(n * sizeof(float) + 4);
}

static inline float *rig_normals(uint64_t n, float size)
{
    float *x = rig_floats(n);

    for (uint64_t i = 0; i < n; i++)
        x[i] = size * rig_normal();
    return x;
}

#endif
