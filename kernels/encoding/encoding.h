/* Encodings: smaller forms of KV, a K/V tensor of a layer at a time.
 *
 * A layer is one or two K/V tensors, K then V (MLA: one). A K/V tensor is tokens x heads rows of
 * dim elements, contiguous. Its encoded form is contiguous, has the same length for any contents,
 * and is a multiple of 16 bytes. The forms of a layer's tensors follow one another.
 * docs/design/encodings.md defines every byte and every rounding, so that this code, its SIMD and
 * CUDA forms and implementations by others give the same bits. The scalar arithmetic that C and
 * CUDA share is in kernels/encoding/arith.h.
 *
 * Promise: nothing here allocates, locks, keeps state or fails, so any number of threads may encode
 * and decode. Encoding reads the tensor's raw bytes and writes all of its encoded bytes; any
 * value is allowed, NaN and infinities too. Decoding writes all of the raw bytes whatever the
 * encoded bytes are, and reads and writes nothing else. Any alignment. */
#ifndef UCM_KERNELS_ENCODING_H
#define UCM_KERNELS_ENCODING_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what is encoded, and how ---- */

#define UCM_ENCODING_TOKENS_MAX 65536 /* several layers side by side can be one tensor */
#define UCM_ENCODING_HEADS_MAX 1024
#define UCM_ENCODING_DIM_MAX 1024
#define UCM_ENCODING_ELEMENTS_MAX (UINT64_C(1) << 22) /* of a tensor: some ms of a thread */

/* On the wire and in identities: numbers keep their meaning. */
enum ucm_encoding {
    UCM_ENCODING_NONE = 0,
    UCM_ENCODING_FP8 = 1,
    UCM_ENCODING_INT8 = 2,
    UCM_ENCODING_Q4 = 3,
    UCM_ENCODING_LOSSLESS = 4,
};

enum ucm_encoding_dtype { /* the numbers of enum ucm_kv_dtype */
                          UCM_ENCODING_F32 = 0,
                          UCM_ENCODING_F16 = 1,
                          UCM_ENCODING_BF16 = 2,
                          UCM_ENCODING_FP8_E4M3 = 3,
};

enum ucm_encoding_kind { UCM_ENCODING_K = 0, UCM_ENCODING_V = 1 };

enum ucm_encoding_order {
    UCM_ENCODING_NHD = 0, /* row t * heads + h is token t of head h */
    UCM_ENCODING_HND = 1, /* row h * tokens + t is */
};

enum ucm_encoding_axis { /* int8: what has a scale of its own in K */
                         UCM_ENCODING_AXIS_ROW = 0,
                         UCM_ENCODING_AXIS_CHANNEL =
                             1, /* a channel of a head, over a run of tokens */
};

#define UCM_ENCODING_TENSORS_MAX 2

struct ucm_encoding_tensor {
    uint32_t kind; /* enum ucm_encoding_kind; tensor 0 is K, tensor 1 is V */
    uint32_t tokens, heads, dim;
    uint32_t order; /* enum ucm_encoding_order */
};

/* Fields that the encoding does not use are ignored; zero them. */
struct ucm_encoding_spec {
    uint32_t encoding;  /* enum ucm_encoding */
    uint32_t version;   /* of that encoding's definition */
    uint32_t dtype;     /* enum ucm_encoding_dtype, of the raw form */
    uint32_t n_tensors; /* 1 or 2 */
    struct ucm_encoding_tensor tensor[UCM_ENCODING_TENSORS_MAX];
    uint32_t axis; /* int8: enum ucm_encoding_axis */
    uint32_t run;  /* int8 with a scale a channel: tokens of K that share it. Where a tensor has
                    * several layers, these are a layer's; the last run can be shorter. 0: all of
                    * the tensor's */
    uint64_t seed; /* q4: of the signs */
};

#define UCM_ENCODING_WHY 200 /* bytes of a refusal's sentence */

/* 0; or -EINVAL, and why says in a sentence which field is wrong and what would be right. All other
 * functions take a spec that it accepts. */
int ucm_encoding_check(const struct ucm_encoding_spec *spec, char why[UCM_ENCODING_WHY]);

/* ---- bytes ---- */

uint64_t ucm_encoding_raw_bytes(const struct ucm_encoding_spec *spec, uint32_t tensor);
uint64_t ucm_encoding_bytes(const struct ucm_encoding_spec *spec, uint32_t tensor); /* encoded */

/* Bytes of all tensors. */
uint64_t ucm_encoding_raw_layer_bytes(const struct ucm_encoding_spec *spec);
uint64_t ucm_encoding_layer_bytes(const struct ucm_encoding_spec *spec);

/* The spec in fixed-width little-endian fields, which encoding.open hashes into a namespace's
 * fingerprint. Fields that do not change the encoded bytes are 0, so specs that mean the same have
 * the same form. By offset; u32 unless noted:
 *   0   1, the version of this list
 *   4   number of the encoding, and 8 its version
 *   12  dtype of raw elements
 *   16  tensors: 1 or 2
 *   20  axis (int8)
 *   24  u64 seed (q4)
 *   32  tensor 0: kind, tokens, heads, dim, order (5 fields)
 *   52  tensor 1: the same, or 0
 *   72  run (int8 with axis 1), if it is less than K's tokens
 *   76  0 up to the end */
#define UCM_ENCODING_IDENTITY_BYTES 96
void ucm_encoding_identity(const struct ucm_encoding_spec *spec,
                           uint8_t out[UCM_ENCODING_IDENTITY_BYTES]);
/* The inverse, for any bytes. 0 and a spec that ucm_encoding_check accepts and that has these bytes
 * as its identity; or -EINVAL. */
int ucm_encoding_parse(const uint8_t bytes[UCM_ENCODING_IDENTITY_BYTES],
                       struct ucm_encoding_spec *out);

/* ---- encoding and decoding ---- */

/* One tensor. Memory of raw and encoded does not overlap. */
void ucm_encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *raw,
                void *encoded);
void ucm_decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *encoded,
                void *raw);

/* Whether the encoding could hold what was encoded. Only lossless can say no, for contents that it
 * would not make smaller. Such a tensor does not decode to what was encoded. */
bool ucm_encoding_fits(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *encoded);

/* ---- encodings ---- */

/* Each has one file, and one line in spec.c. These functions are the reference. ucm_encode and
 * ucm_decode may run a faster form, which gives the same bits. */
struct ucm_encoding_method {
    uint32_t number, version;
    const char *name;
    uint32_t dtypes; /* bit d: raw elements may be of enum ucm_encoding_dtype d */
    /* Which fields of a spec change the encoded bytes, besides the sizes. */
    bool (*uses_order)(const struct ucm_encoding_spec *spec, uint32_t tensor);
    bool uses_axis, uses_seed;
    /* Refuses parameters; NULL: none to refuse. Fills in why as ucm_encoding_check does. */
    int (*check)(const struct ucm_encoding_spec *spec, char why[UCM_ENCODING_WHY]);
    uint64_t (*bytes)(const struct ucm_encoding_spec *spec, uint32_t tensor);
    void (*encode)(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded);
    void (*decode)(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw);
    bool (*fits)(const struct ucm_encoding_spec *spec, uint32_t tensor,
                 const uint8_t *encoded); /* NULL: always */
};

/* Ends with NULL. */
extern const struct ucm_encoding_method *const ucm_encoding_methods[];

/* NULL: no such encoding. */
const struct ucm_encoding_method *ucm_encoding_method(uint32_t number);
const struct ucm_encoding_method *ucm_encoding_method_named(const char *name);

/* ---- planes ---- */

/* A tensor in the pages of a region, and in the slots of its namespace. Block b's raw form is at
 * base + b * stride, its encoded form at slot_offset in the slot. */
struct ucm_encoding_plane {
    uint64_t base, stride, slot_offset;
    uint32_t bytes;  /* encoded */
    uint32_t tensor; /* of the spec */
};

#ifdef __cplusplus
}
#endif

#endif
