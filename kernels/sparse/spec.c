/* What a shape may be, and the canonical form of a spec. */
#include "kernels/sparse/spec.h"
#include "kernels/sparse/select.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define CANONICAL_VERSION 1

int sparse_refuse(char why[UCM_SPARSE_WHY], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UCM_SPARSE_WHY, format, args);
    va_end(args);
    return -EINVAL;
}

static uint32_t element_bytes(uint32_t dtype)
{
    return dtype == UCM_KV_F32 ? 4 : dtype == UCM_KV_FP8_E4M3 ? 1 : 2;
}

/* ---- for the methods ---- */

/* As 2 atanh((m - 1) / (m + 1)) + e ln 2 with n = m * 2^e. */
float sparse_ln(uint32_t n)
{
    double m = n, e = 0, x, power, sum = 0;

    for (; m > 1.5; m /= 2)
        e++;
    x = (m - 1) / (m + 1); /* at most 1/5 in size: 12 terms give all bits of a double */
    power = x;
    for (int i = 1; i < 24; i += 2, power *= x * x)
        sum += power / i;
    return (float)(2 * sum + e * 0x1.62e42fefa39efp-1);
}

/* ---- the shape ---- */

static int check_dims(const struct ucm_kv_shape *s, char why[UCM_SPARSE_WHY])
{
    uint64_t channels;

    if (s->dtype > UCM_KV_FP8_E4M3)
        return sparse_refuse(why, "dtype %u is none of 0 (f32), 1 (f16), 2 (bf16), 3 (fp8 e4m3)",
                             s->dtype);
    if (s->tokens < 1 || s->tokens > UCM_KV_TOKENS_MAX)
        return sparse_refuse(why, "tokens is %u; 1 to %u are allowed", s->tokens,
                             UCM_KV_TOKENS_MAX);
    if (s->kv_heads < 1 || s->kv_heads > UCM_KV_HEADS_MAX)
        return sparse_refuse(why, "kv_heads is %u; 1 to %u are allowed", s->kv_heads,
                             UCM_KV_HEADS_MAX);
    if (s->head_dim < 4 || s->head_dim > UCM_KV_HEAD_DIM_MAX || s->head_dim % 4 != 0)
        return sparse_refuse(why, "head_dim is %u; multiples of 4 up to %u are allowed",
                             s->head_dim, UCM_KV_HEAD_DIM_MAX);
    if (s->v_head_dim > UCM_KV_HEAD_DIM_MAX || s->v_head_dim % 4 != 0)
        return sparse_refuse(why, "v_head_dim is %u; multiples of 4 up to %u are allowed",
                             s->v_head_dim, UCM_KV_HEAD_DIM_MAX);
    channels = s->head_dim > s->v_head_dim ? s->head_dim : s->v_head_dim;
    if (channels * s->tokens * s->kv_heads > UCM_KV_ELEMENTS_MAX)
        return sparse_refuse(why, "%u tokens of %u heads of %u channels are more than %u elements",
                             s->tokens, s->kv_heads, (unsigned)channels,
                             (unsigned)UCM_KV_ELEMENTS_MAX);
    if (s->rope_dim >= s->head_dim || s->rope_dim % 4 != 0)
        return sparse_refuse(why, "rope_dim is %u; multiples of 4 below head_dim are allowed",
                             s->rope_dim);
    return 0;
}

struct place { /* of K or of V */
    const char *name;
    uint64_t offset, token_stride, head_stride;
    uint32_t channels;
};

static struct place place_k(const struct ucm_kv_shape *s)
{
    return (struct place){"k", s->k_offset, s->k_token_stride, s->k_head_stride, s->head_dim};
}

static struct place place_v(const struct ucm_kv_shape *s)
{
    return (struct place){"v", s->v_offset, s->v_token_stride, s->v_head_stride, s->v_head_dim};
}

static int check_stride(const struct place *p, const char *axis, uint64_t stride, uint32_t count,
                        uint32_t element, char why[UCM_SPARSE_WHY])
{
    if (stride > UCM_KV_OFFSET_MAX)
        return sparse_refuse(why, "%s_%s_stride is above 2^40", p->name, axis);
    if (stride % element != 0)
        return sparse_refuse(why, "%s_%s_stride %llu is no multiple of an element's %u bytes",
                             p->name, axis, (unsigned long long)stride, element);
    if (count > 1 && stride < (uint64_t)p->channels * element)
        return sparse_refuse(why, "%s_%s_stride %llu is less than the %u bytes of a head", p->name,
                             axis, (unsigned long long)stride, p->channels * element);
    return 0;
}

static int check_place(const struct ucm_kv_shape *s, const struct place *p,
                       char why[UCM_SPARSE_WHY])
{
    uint32_t element = element_bytes(s->dtype);
    int r;

    if (p->offset > UCM_KV_OFFSET_MAX)
        return sparse_refuse(why, "%s_offset is above 2^40", p->name);
    if (p->offset % element != 0)
        return sparse_refuse(why, "%s_offset %llu is no multiple of an element's %u bytes", p->name,
                             (unsigned long long)p->offset, element);
    r = check_stride(p, "token", p->token_stride, s->tokens, element, why);
    return r < 0 ? r : check_stride(p, "head", p->head_stride, s->kv_heads, element, why);
}

int ucm_kv_shape_check(const struct ucm_kv_shape *shape, char why[UCM_SPARSE_WHY])
{
    struct place k = place_k(shape), v = place_v(shape);
    int r = check_dims(shape, why);

    if (r == 0)
        r = check_place(shape, &k, why);
    if (r == 0 && shape->v_head_dim > 0)
        r = check_place(shape, &v, why);
    return r;
}

static uint64_t place_end(const struct ucm_kv_shape *s, const struct place *p)
{
    return p->offset + (s->tokens - 1) * p->token_stride + (s->kv_heads - 1) * p->head_stride +
           (uint64_t)p->channels * element_bytes(s->dtype);
}

uint64_t ucm_kv_shape_extent(const struct ucm_kv_shape *shape, bool with_v)
{
    struct place k = place_k(shape), v = place_v(shape);
    uint64_t end = place_end(shape, &k), v_end;

    if (!with_v || shape->v_head_dim == 0)
        return end;
    v_end = place_end(shape, &v);
    return end > v_end ? end : v_end;
}

/* ---- summaries ---- */

static bool reads_v(const struct ucm_summary_spec *spec)
{
    return spec->method == UCM_SUMMARY_STATS && spec->shape.v_head_dim > 0;
}

uint64_t ucm_summary_extent(const struct ucm_summary_spec *spec)
{
    return ucm_kv_shape_extent(&spec->shape, reads_v(spec));
}

/* ---- the canonical form ---- */

static uint8_t *put(uint8_t *to, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        *to++ = (uint8_t)(value >> 8 * i);
    return to;
}

/* A bitmap that keeps every pair means the same as none. */
static bool keeps_all(const struct ucm_summary_spec *spec)
{
    for (uint32_t pair = 0; spec->keep_bytes > 0 && pair < spec->shape.head_dim / 2; pair++)
        if ((spec->keep[pair / 8] >> pair % 8 & 1) == 0)
            return false;
    return true;
}

static uint8_t *put_place(uint8_t *to, const struct place *p, const struct ucm_kv_shape *s)
{
    to = put(to, p->offset, 8);
    to = put(to, s->tokens > 1 ? p->token_stride : 0, 8);
    return put(to, s->kv_heads > 1 ? p->head_stride : 0, 8);
}

void ucm_summary_canonical(const struct ucm_summary_spec *spec,
                           uint8_t out[UCM_SUMMARY_CANONICAL_BYTES])
{
    const struct ucm_kv_shape *s = &spec->shape;
    struct place k = place_k(s), v = place_v(s);
    bool submean = spec->method == UCM_SUMMARY_SUBMEAN, hash = spec->method == UCM_SUMMARY_HASH;
    bool rest = spec->method == UCM_SUMMARY_TOKENS && spec->rest != UCM_REST_NONE;
    bool pruned = submean && !keeps_all(spec);
    uint8_t *to = out;

    memset(out, 0, UCM_SUMMARY_CANONICAL_BYTES);
    to = put(to, CANONICAL_VERSION, 4);
    to = put(to, spec->method, 4);
    to = put(to, spec->method == UCM_SUMMARY_MEAN ? spec->kind : rest ? spec->rest : 0, 4);
    to = put(to, submean ? spec->run : 0, 4);
    to = put(to, pruned ? spec->pairs : 0, 4);
    to = put(to, hash ? spec->bits : 0, 4);
    to = put(to, hash ? spec->rope_bits : 0, 4);
    to = put(to, spec->method == UCM_SUMMARY_TOKENS ? spec->chosen : 0, 4);
    to = put(to, hash ? spec->seed : 0, 8);
    if (pruned)
        memcpy(to, spec->keep, spec->keep_bytes);
    to += UCM_SUMMARY_KEEP_MAX;
    to = put(to, s->dtype, 4);
    to = put(to, s->tokens, 4);
    to = put(to, s->kv_heads, 4);
    to = put(to, s->head_dim, 4);
    to = put(to, reads_v(spec) ? s->v_head_dim : 0, 4);
    to = put(to, hash ? s->rope_dim : 0, 4);
    to = put_place(to, &k, s);
    if (reads_v(spec))
        put_place(to, &v, s);
}

/* ---- scores ---- */

uint32_t ucm_score_lists(const struct ucm_summary_plan *plan, const struct ucm_score_spec *spec)
{
    return spec->heads == UCM_HEADS_EACH ? plan->spec.shape.kv_heads : 1;
}
