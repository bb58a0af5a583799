/* For the files of this module only. */
#ifndef UCM_KERNELS_ENCODING_METHOD_H
#define UCM_KERNELS_ENCODING_METHOD_H

#include "kernels/encoding/encoding.h"

#include <string.h>

/* Writes the sentence and returns -EINVAL. */
int encoding_refuse(char why[UCM_ENCODING_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Each array of a tensor's encoded form begins at a multiple of this. Bytes between arrays are
 * 0. */
#define ENCODING_ALIGN 16u

static inline uint64_t encoding_align(uint64_t bytes)
{
    return (bytes + ENCODING_ALIGN - 1) / ENCODING_ALIGN * ENCODING_ALIGN;
}

static inline uint32_t encoding_rows(const struct ucm_encoding_tensor *s)
{
    return s->tokens * s->heads;
}

static inline uint32_t encoding_elements(const struct ucm_encoding_tensor *s)
{
    return encoding_rows(s) * s->dim;
}

/* Zeroes [from, to) of the encoded form, which is less than ENCODING_ALIGN bytes. */
static inline void encoding_pad(uint8_t *encoded, uint64_t from, uint64_t to)
{
    memset(encoded + from, 0, to - from);
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

static inline uint32_t encoding_get32(const uint8_t *p)
{
    return encoding_get16(p) | encoding_get16(p + 2) << 16;
}

static inline void encoding_put32(uint8_t *p, uint32_t x)
{
    encoding_put16(p, x & 0xffff);
    encoding_put16(p + 2, x >> 16);
}

/* ---- tiles: up to 16 tokens of one head ---- */

#define ENCODING_TILE 16u

static inline uint32_t encoding_tiles(const struct ucm_encoding_tensor *s)
{
    return (s->tokens + ENCODING_TILE - 1) / ENCODING_TILE;
}

static inline uint32_t encoding_tile_tokens(const struct ucm_encoding_tensor *s, uint32_t tile)
{
    uint32_t left = s->tokens - tile * ENCODING_TILE;

    return left < ENCODING_TILE ? left : ENCODING_TILE;
}

/* The row of a token of a head. */
static inline uint32_t encoding_row(const struct ucm_encoding_tensor *s, uint32_t token,
                                    uint32_t head)
{
    return s->order == UCM_ENCODING_NHD ? token * s->heads + head : head * s->tokens + token;
}

/* Elements from a token to the next of the same head. */
static inline uint64_t encoding_token_step(const struct ucm_encoding_tensor *s)
{
    return (uint64_t)s->dim * (s->order == UCM_ENCODING_NHD ? s->heads : 1);
}

/* The number of a row's tile and head, tiles first. */
static inline uint32_t encoding_tile_of(const struct ucm_encoding_tensor *s, uint32_t row)
{
    bool nhd = s->order == UCM_ENCODING_NHD;
    uint32_t token = nhd ? row / s->heads : row % s->tokens;

    return token / ENCODING_TILE * s->heads + (nhd ? row % s->heads : row / s->tokens);
}

/* Whether it matters which rows are of one head. */
static inline bool encoding_order_matters(const struct ucm_encoding_tensor *s)
{
    return s->tokens > 1 && s->heads > 1;
}

extern const struct ucm_encoding_method encoding_fp8, encoding_int8, encoding_q4, encoding_lossless;

#endif
