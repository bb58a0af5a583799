/* For the files of this room only. */
#ifndef UCM_KERNELS_ENCODING_METHOD_H
#define UCM_KERNELS_ENCODING_METHOD_H

#include "kernels/encoding/encoding.h"

#include <string.h>

/* Writes the sentence and returns -EINVAL. */
int encoding_refuse(char why[UCM_ENCODING_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Each array of a section's coded form begins at a multiple of this; what lies between is 0. */
#define ENCODING_ALIGN 16u

static inline uint64_t encoding_align(uint64_t bytes)
{
    return (bytes + ENCODING_ALIGN - 1) / ENCODING_ALIGN * ENCODING_ALIGN;
}

static inline uint32_t encoding_rows(const struct ucm_encoding_section *s)
{
    return s->tokens * s->heads;
}

static inline uint32_t encoding_elements(const struct ucm_encoding_section *s)
{
    return encoding_rows(s) * s->dim;
}

/* Zeroes [from, to) of the coded form, which is less than ENCODING_ALIGN bytes. */
static inline void encoding_pad(uint8_t *coded, uint64_t from, uint64_t to)
{
    memset(coded + from, 0, to - from);
}

static inline uint32_t encoding_get16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static inline void encoding_put16(uint8_t *p, uint32_t h)
{
    p[0] = (uint8_t)h;
    p[1] = (uint8_t)(h >> 8);
}

extern const struct ucm_encoding_method encoding_fp8, encoding_int8;

#endif
