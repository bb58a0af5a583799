/* Tensors of all sizes and rows of hostile values, for the tests of kernels/encoding. */
#ifndef UCM_TESTS_ENCODING_RIG_H
#define UCM_TESTS_ENCODING_RIG_H

#include "kernels/encoding/arith.h"
#include "kernels/encoding/encoding.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RIG_FN static inline __attribute__((unused))

/* About normal: a sum of four uniform values. */
RIG_FN float rig_normal(void)
{
    float sum = 0;

    for (int i = 0; i < 4; i++)
        sum += (float)below(1 << 20) * 0x1p-20f - 0.5f;
    return sum * 1.7f;
}

RIG_FN struct ucm_encoding_spec rig_spec(uint32_t encoding, uint32_t dtype, uint32_t tokens,
                                         uint32_t heads, uint32_t dim)
{
    return (struct ucm_encoding_spec){
        .encoding = encoding,
        .version = ucm_encoding_method(encoding)->version,
        .dtype = dtype,
        .n_tensors = 2,
        .tensor = {{.kind = UCM_ENCODING_K, .tokens = tokens, .heads = heads, .dim = dim},
                   {.kind = UCM_ENCODING_V, .tokens = tokens, .heads = heads, .dim = dim}},
    };
}

enum rig_values {
    RIG_NORMAL,  /* as keys are, one channel stands out */
    RIG_BITS,    /* any bits */
    RIG_FINITE,  /* any finite bits */
    RIG_TINY,    /* denormals and near them */
    RIG_HUGE,    /* near the largest */
    RIG_SPECIAL, /* normal with NaN, infinities, zeros of both signs */
    RIG_ZERO,
    RIG_VALUES,
};

RIG_FN uint32_t rig_element(uint32_t dtype, enum rig_values values, uint32_t channel)
{
    static const uint32_t special[2][8] = {
        {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff, 0x0000, 0x8000, 0x0001},
        {0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff, 0x0000, 0x8000, 0x0001}};
    uint32_t h = below(65536), inf = ucm_element_inf(dtype);

    switch (values) {
    case RIG_BITS:
        return h;
    case RIG_FINITE:
        return (h & inf) == inf ? h & ~(inf & (inf - 1)) : h;
    case RIG_TINY:
        return h & (0x8000 | (dtype == UCM_ENCODING_F16 ? 0xfff : 0x1ff));
    case RIG_HUGE:
        return (h & 0x80ff) | (dtype == UCM_ENCODING_F16 ? 0x7b00 : 0x7f00);
    case RIG_SPECIAL:
        if (below(4) == 0)
            return special[dtype == UCM_ENCODING_BF16][below(8)];
        break;
    case RIG_ZERO:
        return h & 0x8000;
    default:
        break;
    }
    return ucm_element_encode(dtype, rig_normal() * (channel == 3 ? 30.0f : 1.0f));
}

RIG_FN void rig_put(uint8_t *raw, uint64_t i, uint32_t bits)
{
    memcpy(raw + 2 * i, &(uint16_t){(uint16_t)bits}, 2);
}

/* Fills the tensor's elements with the kind `values`; RIG_VALUES: a random kind for each row. */
RIG_FN void rig_fill(const struct ucm_encoding_spec *spec, uint32_t tensor, enum rig_values values,
                     uint8_t *raw)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];

    for (uint32_t row = 0; row < s->tokens * s->heads; row++) {
        enum rig_values kind = values < RIG_VALUES ? values : (enum rig_values)below(RIG_VALUES);

        for (uint32_t c = 0; c < s->dim; c++)
            rig_put(raw, (uint64_t)row * s->dim + c, rig_element(spec->dtype, kind, c));
    }
}

/* A tensor in memory of exactly its size, so that a sanitizer reports accesses past it. The address
 * may be odd on request. */
struct rig_tensor {
    struct ucm_encoding_spec spec;
    uint32_t tensor, odd;
    uint64_t raw_bytes, bytes;
    uint8_t *raw, *encoded, *again; /* again: decoded */
};

RIG_FN struct rig_tensor rig_tensor(const struct ucm_encoding_spec *spec, uint32_t tensor,
                                    uint32_t odd)
{
    struct rig_tensor r = {.spec = *spec, .tensor = tensor, .odd = odd};

    r.raw_bytes = ucm_encoding_raw_bytes(spec, tensor);
    r.bytes = ucm_encoding_bytes(spec, tensor);
    r.raw = (uint8_t *)malloc(r.raw_bytes + odd) + odd;
    r.encoded = (uint8_t *)malloc(r.bytes + odd) + odd;
    r.again = (uint8_t *)malloc(r.raw_bytes + odd) + odd;
    memset(r.encoded, 0xa5, r.bytes);
    memset(r.again, 0xa5, r.raw_bytes);
    return r;
}

/* Encodes the raw bytes, and decodes them again. */
RIG_FN void rig_round_trip(const struct rig_tensor *r)
{
    ucm_encode(&r->spec, r->tensor, r->raw, r->encoded);
    ucm_decode(&r->spec, r->tensor, r->encoded, r->again);
}

RIG_FN void rig_free(struct rig_tensor *r)
{
    free(r->raw - r->odd);
    free(r->encoded - r->odd);
    free(r->again - r->odd);
}

RIG_FN uint32_t rig_get(const uint8_t *raw, uint64_t i)
{
    return (uint32_t)raw[2 * i] | (uint32_t)raw[2 * i + 1] << 8;
}

RIG_FN float rig_value(const struct ucm_encoding_spec *spec, const uint8_t *raw, uint64_t i)
{
    return ucm_element_decode(spec->dtype, rig_get(raw, i));
}

#endif
