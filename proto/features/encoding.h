/* The messages of encoded namespaces. The form is that of messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_ENCODING_H
#define UCM_PROTO_FEATURES_ENCODING_H

#include "proto/limits.h"

/* Method encoding.open. Opens the encoded namespace of a base namespace and answers its number
 * (docs/protocol.md, "Encoded namespaces"). Dumps that name no durability are as durable as the
 * base was opened when this was first called. Errors of `namespace.open` apply.
 * Errors: UNSUPPORTED: the daemon lacks the encoding or this version: go on with the base; INVALID:
 *   sizes or dtype do not fit the encoding or the base, the base is encoded or holds summaries, or
 *   an encoded part is too large for the arena.
 * ns: the base, from `namespace.open`.
 * encoding: `fp8`, `int8`, `q4` or `lossless`.
 * version: of the encoding's definition; 0: the daemon's.
 * dtype: of the raw form: `f16`, `bf16` or `fp8_e4m3`.
 * k: of K in a layer: tokens, heads, elements of a row; MLA: the latent.
 * v: the same of V; absent: a layer is one tensor.
 * order: of rows: 0: token after token, 1: head after head.
 * axis: int8: 0: K has a scale for each row, 1: for each channel of a head.
 * seed: q4: of its rotation.
 * run: int8 with `axis` 1: tokens of K that share a scale; 0: all. */
#define UCM_MSG_ENCODING_OPEN(F, m)                                                                \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, str, encoding, REQ, 1, 16)                                                                \
    F(m, u64, version, OPT, 0, UCM_U32)                                                            \
    F(m, str, dtype, REQ, 1, 16)                                                                   \
    F(m, u32s, k, REQ, 3, 3)                                                                       \
    F(m, u32s, v, OPT, 0, 3)                                                                       \
    F(m, u64, order, OPT, 0, 1)                                                                    \
    F(m, u64, axis, OPT, 0, 1)                                                                     \
    F(m, u64, seed, OPT, 0, UINT64_MAX)                                                            \
    F(m, u64, run, OPT, 0, UCM_U32)

/* ns: the encoded namespace's number.
 * fingerprint: docs/protocol.md, "Fingerprint".
 * version: of the encoding.
 * encoded_bytes: of an encoded block, all parts.
 * raw_bytes: of a block of the base, all parts. */
#define UCM_MSG_ENCODING_OPEN_R(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)                      \
    F(m, u64, version, REQ, 1, UCM_U32)                                                            \
    F(m, u64, encoded_bytes, REQ, 1, UINT64_MAX)                                                   \
    F(m, u64, raw_bytes, REQ, 1, UINT64_MAX)

#endif
