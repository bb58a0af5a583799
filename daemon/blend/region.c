/* What a registration says of K, checked once, so that a load finds each K by an offset. */
#include "daemon/device/work.h"
#include "proto/proto.h"

#include <stdlib.h>
#include <string.h>

#define REFUSE(e, ...) ucm_error_set(e, UCM_WIRE_INVALID, __VA_ARGS__)

static int dtype_take(struct proto_str name, uint32_t *out, struct ucm_error *e)
{
    static const char *const names[] = {[UCM_ROPE_F32] = "f32",
                                        [UCM_ROPE_F16] = "f16",
                                        [UCM_ROPE_BF16] = "bf16",
                                        [UCM_ROPE_FP8_E4M3] = "fp8_e4m3"};
    char quoted[40];

    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++)
        if (proto_str_is(name, names[i])) {
            *out = i;
            return 0;
        }
    proto_quote(name, quoted, sizeof quoted);
    return REFUSE(e, "rope_dtype is \"%s\"; f32, f16, bf16 and fp8_e4m3 can be re-rotated", quoted);
}

static int spec_take(const struct msg_region_register *m, struct ucm_rope_spec *out,
                     struct ucm_error *e)
{
    char why[UCM_ROPE_WHY], quoted[40];
    int rc;

    if (m->rope.n < UCM_ROPE_NUMBERS - 1)
        return REFUSE(
            e,
            "rope has %u numbers; it has %d: K's first byte in a layer, rows, channels of "
            "a row, the first that is rotated, how many are, and tokens of a row, if more than one",
            m->rope.n, UCM_ROPE_NUMBERS);
    *out = (struct ucm_rope_spec){
        .rows = m->rope.p[1],
        .dim = m->rope.p[2],
        .first = m->rope.p[3],
        .rotary = m->rope.p[4],
        .pairs = m->rope_interleaved ? UCM_ROPE_NEIGHBOURS : UCM_ROPE_HALVES,
        .trained = (uint32_t)m->rope_trained,
        .base = m->rope_base,
        .factor = m->rope_factor,
        .fast = m->rope_fast,
        .slow = m->rope_slow,
        .whole = m->rope_whole,
        .run = m->rope.n == UCM_ROPE_NUMBERS ? m->rope.p[UCM_ROPE_NUMBERS - 1] : 1,
    };
    rc = dtype_take(m->rope_dtype, &out->dtype, e);
    if (rc < 0)
        return rc;
    if (ucm_rope_scaling_named(m->rope_scaling.p, m->rope_scaling.n, &out->scaling) < 0) {
        proto_quote(m->rope_scaling, quoted, sizeof quoted);
        return REFUSE(
            e,
            "rope_scaling is \"%s\"; default, linear, dynamic, yarn and llama3 are known: "
            "fragments of a model of another kind can't be re-rotated",
            quoted);
    }
    if (ucm_rope_check(out, why) < 0)
        return REFUSE(e, "rope: %s", why);
    return 0;
}

/* Finds the plane of a layer that K lies in, which begins `at` bytes after the layer's. */
static int layer_find(const struct device_region *r, struct device_rope *rope, uint32_t layer,
                      uint64_t at, struct ucm_error *e)
{
    uint64_t bytes = ucm_rope_bytes(&rope->spec), begin = 0;

    for (uint32_t p = r->layer_first[layer]; p < r->layer_first[layer + 1]; p++) {
        uint64_t end = begin + r->planes[p].block_bytes;

        if (at >= begin && at + bytes <= end) {
            rope->at[p] = (uint32_t)(at - begin);
            return 0;
        }
        if (at < end)
            return REFUSE(
                e,
                "rope: K is bytes %llu to %llu of a layer, but the fragment of plane %u ends "
                "at %llu; K must lie in one plane",
                (unsigned long long)at, (unsigned long long)(at + bytes), p,
                (unsigned long long)end);
        begin = end;
    }
    return REFUSE(e, "rope: K begins at byte %llu of a layer, which has %llu",
                  (unsigned long long)at, (unsigned long long)begin);
}

static int rope_allowed(const struct msg_region_register *m, struct ucm_error *e)
{
    if (m->block_pool)
        return REFUSE(
            e,
            "rope: the entries of a block pool are filled by gather, which does not re-rotate K");
    if (m->rope.n == UCM_ROPE_NUMBERS && m->rope.p[UCM_ROPE_NUMBERS - 1] > 1 &&
        !proto_str_is(m->device, "cpu"))
        return REFUSE(e, "rope: a row holds %u tokens of each channel; on a GPU a row is one token",
                      m->rope.p[UCM_ROPE_NUMBERS - 1]);
    return 0;
}

int region_rope(const struct msg_region_register *m, const struct device_region *r,
                struct device_rope **out, struct ucm_error *e)
{
    struct device_rope *rope;
    struct ucm_rope_spec spec;
    int rc;

    *out = NULL;
    if (m->rope.n == 0)
        return 0;
    rc = rope_allowed(m, e);
    if (rc == 0)
        rc = spec_take(m, &spec, e);
    if (rc < 0)
        return rc;
    rope = malloc(sizeof(*rope) + r->n_planes * sizeof(rope->at[0]));
    if (!rope)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a region of %u planes",
                             r->n_planes);
    rope->spec = spec;
    memset(rope->at, 0xff, r->n_planes * sizeof(rope->at[0]));
    for (uint32_t s = 0; rc == 0 && s < r->pages.layers; s++)
        if (r->layer_first[s] < r->layer_first[s + 1])
            rc = layer_find(r, rope, s, m->rope.p[0], e);
    if (rc < 0)
        free(rope);
    else
        *out = rope;
    return rc;
}
