/* Where the arrays of a tensor's q4 form begin. For q4.c and its SIMD form. */
#ifndef UCM_KERNELS_ENCODING_Q4_LAYOUT_H
#define UCM_KERNELS_ENCODING_Q4_LAYOUT_H

#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"

struct q4_layout {
    uint32_t rotation, groups; /* channels of a group, groups of a row */
    uint32_t row_bytes;        /* of codes */
    uint64_t codes_end, scales, scales_end, centres, centres_end, centre_scales, centre_scales_end,
        shifts, end;
};

/* Centres and shifts are those of K; without them the last three arrays are empty. */
static inline struct q4_layout q4_layout(const struct ucm_encoding_tensor *s)
{
    uint32_t rows = encoding_rows(s), tiles = encoding_tiles(s) * s->heads;
    struct q4_layout l = {.rotation = ucm_q4_rotation(s->dim), .row_bytes = s->dim / 2};

    if (s->kind != UCM_ENCODING_K)
        tiles = 0;
    l.groups = s->dim / l.rotation;
    l.codes_end = (uint64_t)rows * l.row_bytes;
    l.scales = encoding_align(l.codes_end);
    l.scales_end = l.scales + UINT64_C(2) * rows * l.groups;
    l.centres = encoding_align(l.scales_end);
    l.centres_end = l.centres + (uint64_t)tiles * l.row_bytes;
    l.centre_scales = encoding_align(l.centres_end);
    l.centre_scales_end = l.centre_scales + UINT64_C(2) * tiles * l.groups;
    l.shifts = encoding_align(l.centre_scales_end);
    l.end = l.shifts + (uint64_t)tiles * l.row_bytes;
    return l;
}

static inline void q4_pad(const struct q4_layout *l, uint8_t *encoded)
{
    encoding_pad(encoded, l->codes_end, l->scales);
    encoding_pad(encoded, l->scales_end, l->centres);
    encoding_pad(encoded, l->centres_end, l->centre_scales);
    encoding_pad(encoded, l->centre_scales_end, l->shifts);
    encoding_pad(encoded, l->end, encoding_align(l->end));
}

#endif
