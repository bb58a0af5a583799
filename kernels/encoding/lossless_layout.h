/* Where the arrays of a tensor's lossless form begin. For lossless.c and its SIMD form. */
#ifndef UCM_KERNELS_ENCODING_LOSSLESS_LAYOUT_H
#define UCM_KERNELS_ENCODING_LOSSLESS_LAYOUT_H

#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"

struct lossless_layout {
    uint32_t elements, room; /* room: entries of the list of escapes */
    uint64_t codes, codes_end, bases, bases_end, list, end;
};

static inline struct lossless_layout lossless_layout(const struct ucm_encoding_tensor *s)
{
    struct lossless_layout l = {.elements = encoding_elements(s)};

    l.room = (l.elements + 127) / 128;
    l.codes = encoding_align(l.elements);
    l.codes_end = l.codes + (l.elements + 1) / 2;
    l.bases = encoding_align(l.codes_end);
    l.bases_end = l.bases + encoding_tiles(s) * s->heads;
    l.list = encoding_align(l.bases_end);
    l.end = l.list + 4 + UINT64_C(4) * l.room;
    return l;
}

/* What an encoder did not write: between the arrays, and after `count` entries of the list. */
static inline void lossless_pad(const struct lossless_layout *l, uint32_t count, uint8_t *encoded)
{
    uint64_t used = l->list + 4 + UINT64_C(4) * count;

    encoding_pad(encoded, l->elements, l->codes);
    encoding_pad(encoded, l->codes_end, l->bases);
    encoding_pad(encoded, l->bases_end, l->list);
    encoding_pad(encoded, used, encoding_align(l->end));
    encoding_put32(encoded + l->list, count);
}

/* The tensor has more escapes than fit. */
static inline void lossless_unfit(const struct lossless_layout *l, uint8_t *encoded)
{
    memset(encoded, 0, encoding_align(l->end));
    encoding_put32(encoded + l->list, UCM_LOSSLESS_UNFIT);
}

/* Writes the exponents of escapes over what their codes gave. */
static inline void lossless_apply(const struct lossless_layout *l, const uint8_t *encoded,
                                  uint8_t *raw)
{
    uint32_t count = encoding_get32(encoded + l->list);

    if (count == UCM_LOSSLESS_UNFIT)
        return;
    for (uint32_t i = 0; i < count && i < l->room; i++) {
        uint32_t entry = encoding_get32(encoded + l->list + 4 + UINT64_C(4) * i);
        uint8_t *element = raw + UINT64_C(2) * (entry >> 8);

        if (entry >> 8 < l->elements)
            encoding_put16(element, ucm_lossless_element(
                                        entry & 0xff, ucm_lossless_rest(encoding_get16(element))));
    }
}

#endif
