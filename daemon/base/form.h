/* What the bytes of a part are. The namespace that holds a block says so (index.h), from its birth
 * on; nobody else keeps a word about it that could age.
 *
 * Thread: any; forms don't change. */
#ifndef UCMD_BASE_FORM_H
#define UCMD_BASE_FORM_H

#include "kernels/encoding/encoding.h"

#include <string.h>

/* How KV was encoded. */
struct codec {
    struct ucm_encoding_spec spec;
    /* Identifies spec: equal for all specs that give the same bytes. */
    uint8_t identity[UCM_ENCODING_IDENTITY_BYTES];
    uint64_t raw_layer_bytes;
};

/* spec: one that ucm_encoding_check accepts. */
static inline void codec_init(struct codec *c, const struct ucm_encoding_spec *spec)
{
    c->spec = *spec;
    ucm_encoding_identity(spec, c->identity);
    c->raw_layer_bytes = ucm_encoding_raw_layer_bytes(spec);
}

struct form {
    uint64_t layer_bytes;
    uint32_t layers;           /* of the part */
    const struct codec *codec; /* NULL: bytes as their writers have them */
};

/* Neither is NULL. */
static inline bool codec_same(const struct codec *a, const struct codec *b)
{
    return a == b || memcmp(a->identity, b->identity, sizeof(a->identity)) == 0;
}

/* Bytes of a layer as KV was computed. */
static inline uint64_t form_raw_layer_bytes(const struct form *f)
{
    return f->codec ? f->codec->raw_layer_bytes : f->layer_bytes;
}

/* A reader gets what the engine computed, bit for bit. */
static inline bool form_exact(const struct form *f)
{
    return !f->codec || f->codec->spec.encoding == UCM_ENCODING_LOSSLESS;
}

/* Whether it may refuse bytes (ucm_encoding_fits). */
static inline bool form_refuses(const struct form *f)
{
    return f->codec && ucm_encoding_method(f->codec->spec.encoding)->fits != NULL;
}

#endif
