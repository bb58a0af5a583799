/* The messages of encoded namespaces. As messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_ENCODING_H
#define UCM_PROTO_FEATURES_ENCODING_H

#include "proto/limits.h"

/* Opens the namespace of the blocks of base namespace ns in another form. version: of the
 * encoding's definition; 0: the daemon's. k, v: tokens, heads and elements of a row; without v a
 * layer is one section. coded_bytes, plain_bytes: of a block with all its parts. */
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
#define UCM_MSG_ENCODING_OPEN_R(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)                      \
    F(m, u64, version, REQ, 1, UCM_U32)                                                            \
    F(m, u64, coded_bytes, REQ, 1, UINT64_MAX)                                                     \
    F(m, u64, plain_bytes, REQ, 1, UINT64_MAX)

#endif
