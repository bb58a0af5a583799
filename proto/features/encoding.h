/* The messages of encoded namespaces. The form is that of messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_ENCODING_H
#define UCM_PROTO_FEATURES_ENCODING_H

#include "proto/limits.h"

/* Method encoding.open. Opens the encoded namespace of a base namespace (docs/protocol.md, "Encoded
 * namespaces"). If the base is durable on this connection, so is the encoded namespace. Errors of
 * `namespace.open` apply.
 * Errors: UNSUPPORTED: unknown encoding or version: use the base; INVALID: sizes or dtype do not
 *   fit, the base is encoded or holds summaries, or a part is too large for the arena.
 * ns: the base.
 * encoding: `fp8`, `int8`, `q4` or `lossless`.
 * version: of the encoding; 0: the daemon's.
 * dtype: of the raw form: `f16` or `bf16`; `lossless`: `bf16`.
 * k: tokens, heads, elements of a row in a layer's K; MLA: of the latent.
 * v: the same of V; absent: a layer is one tensor.
 * order: of rows: 0 token after token, 1 head after head.
 * axis: int8: K has a scale for each row (0), or each channel of a head (1).
 * seed: q4: of its rotation.
 * run: int8, `axis` 1: tokens of K that share a scale; 0: all. */
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

/* version: of the encoding.
 * encoded_bytes: of an encoded block, all parts.
 * raw_bytes: of the base's block, all parts. */
#define UCM_MSG_ENCODING_OPEN_R(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)                      \
    F(m, u64, version, REQ, 1, UCM_U32)                                                            \
    F(m, u64, encoded_bytes, REQ, 1, UINT64_MAX)                                                   \
    F(m, u64, raw_bytes, REQ, 1, UINT64_MAX)

#endif
