/* The messages of retrieval: namespaces of digests, chains, selections. As messages.h, which
 * includes this. */
#ifndef UCM_PROTO_FEATURES_RETRIEVAL_H
#define UCM_PROTO_FEATURES_RETRIEVAL_H

#include "proto/limits.h"

#include <stdint.h>

/* Opens the namespace of the digests that `method` and its parameters make of base namespace ns.
 * The fields behind `method` are its parameters; the last ones are the shape of a layer's KV in its
 * shard (bytes from the shard's start). build: while this connection lives, digests are built of
 * parts that are stored in ns. */
#define UCM_MSG_DIGEST_OPEN(F, m)                                                                  \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, method, REQ, 1, 255)                                                                 \
    F(m, u64, kind, OPT, 0, 2)                                                                     \
    F(m, u64, run, OPT, 0, 1024)                                                                   \
    F(m, bin, keep, OPT, 0, UCM_MAX_HEAD_DIM / 2 / 8)                                              \
    F(m, u64, pairs, OPT, 0, 1)                                                                    \
    F(m, u64, bits, OPT, 0, 256)                                                                   \
    F(m, u64, rope_bits, OPT, 0, 256)                                                              \
    F(m, u64, seed, OPT, 0, UINT64_MAX)                                                            \
    F(m, u64, chosen, OPT, 0, 1024)                                                                \
    F(m, u64, rest, OPT, 0, 1)                                                                     \
    F(m, u64, dtype, OPT, 0, 3)                                                                    \
    F(m, u64, kv_heads, REQ, 1, UCM_MAX_KV_HEADS)                                                  \
    F(m, u64, head_dim, REQ, 1, UCM_MAX_HEAD_DIM)                                                  \
    F(m, u64, v_head_dim, OPT, 0, UCM_MAX_HEAD_DIM)                                                \
    F(m, u64, rope_dim, OPT, 0, UCM_MAX_HEAD_DIM)                                                  \
    F(m, u64, k_offset, OPT, 0, UCM_U32)                                                           \
    F(m, u64, k_token_stride, REQ, 1, UCM_U32)                                                     \
    F(m, u64, k_head_stride, OPT, 0, UCM_U32)                                                      \
    F(m, u64, v_offset, OPT, 0, UCM_U32)                                                           \
    F(m, u64, v_token_stride, OPT, 0, UCM_U32)                                                     \
    F(m, u64, v_head_stride, OPT, 0, UCM_U32)                                                      \
    F(m, flag, build, OPT, 0, 0)
#define UCM_MSG_DIGEST_OPEN_R(F, m)                                                                \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)                      \
    F(m, u64, shard_bytes, REQ, 1, 1u << 28)

/* ns: from digest.open. part: 0 means all, else part - 1. Answers with blocks_r. */
#define UCM_MSG_DIGEST_BUILD(F, m)                                                                 \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS)                                                         \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)

/* ns: from digest.open. A chain that is not used for lease_ms ends; 0: max_lease_ms. */
#define UCM_MSG_CHAIN_OPEN(F, m)                                                                   \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, lease_ms, OPT, 0, UCM_U32)
#define UCM_MSG_CHAIN(F, m) F(m, u64, chain, REQ, 1, UCM_U32)

/* Appends the prefix of the keys whose blocks are found in the base namespace. build: digests that
 * are missing are built. */
#define UCM_MSG_CHAIN_APPEND(F, m)                                                                 \
    F(m, u64, chain, REQ, 1, UCM_U32)                                                              \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, flag, build, OPT, 0, 0)                                                                   \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)
/* blocks: of the chain now. The other counts are of this call's keys; status: one byte a key, as
 * UCM_CHAIN_DIGEST says. */
#define UCM_MSG_CHAIN_APPEND_R(F, m)                                                               \
    F(m, u64, blocks, REQ, 0, UCM_MAX_CHAIN_BLOCKS)                                                \
    F(m, u64, dram, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, nvme, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, shared, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, u64, missing, OPT, 0, UCM_MAX_KEYS)                                                       \
    F(m, u64, digests, OPT, 0, UCM_MAX_KEYS)                                                       \
    F(m, u64, built, OPT, 0, UCM_MAX_KEYS)                                                         \
    F(m, bin, status, REQ, 1, UCM_MAX_KEYS)

/* One byte a key in chain.append's status: enum ucm_lookup_status of its block, UCM_LOOKUP_MISS for
 * one that was not appended, and this bit if the chain holds its digest. */
#define UCM_CHAIN_DIGEST 4

/* Row i asks for layer shards[i] of chain chains[i]. q: of each row `rows` queries of q_heads
 * heads, in the chains' head_dim; q_dtype: F32, F16 or BF16 of enum ucm_kv_dtype. The fields from
 * `metric` to `beta` say how blocks are scored, those from `policy` to `local_window_sz` which are
 * chosen. limit: blocks of a list, at most; 0: no limit. prefetch: 0, or priority + 1, then the
 * chosen blocks are brought into DRAM. */
#define UCM_MSG_SELECT(F, m)                                                                       \
    F(m, u32s, chains, REQ, 1, UCM_MAX_SELECT_ROWS)                                                \
    F(m, u32s, shards, REQ, 1, UCM_MAX_SELECT_ROWS)                                                \
    F(m, bin, q, REQ, 2, UCM_MAX_QUERY_BYTES)                                                      \
    F(m, u64, q_dtype, OPT, 0, 2)                                                                  \
    F(m, u64, q_heads, REQ, 1, UCM_MAX_Q_HEADS)                                                    \
    F(m, u64, rows, OPT, 0, UCM_MAX_Q_ROWS)                                                        \
    F(m, u64, metric, OPT, 0, 2)                                                                   \
    F(m, u64, reduce, OPT, 0, 2)                                                                   \
    F(m, u64, heads, OPT, 0, 2)                                                                    \
    F(m, f64, beta, OPT, 0, 1u << 20)                                                              \
    F(m, u64, policy, OPT, 0, 1)                                                                   \
    F(m, f64, sparse_ratio, OPT, 0, 1)                                                             \
    F(m, u64, topk_tokens, OPT, 0, UCM_U32)                                                        \
    F(m, u64, min_blocks, OPT, 0, UCM_MAX_CHAIN_BLOCKS)                                            \
    F(m, f64, eps, OPT, 0, 1)                                                                      \
    F(m, f64, beta_m, OPT, 0, 1u << 20)                                                            \
    F(m, u64, limit, OPT, 0, UCM_MAX_CHAIN_BLOCKS)                                                 \
    F(m, u64, init_window_sz, OPT, 0, UCM_MAX_CHAIN_BLOCKS)                                        \
    F(m, u64, local_window_sz, OPT, 0, UCM_MAX_CHAIN_BLOCKS)                                       \
    F(m, flag, scores, OPT, 0, 0)                                                                  \
    F(m, u64, prefetch, OPT, 0, 8)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)
/* Lists by row, then by KV head unless `heads` made one of them. counts: u32 a list; index: u32 a
 * chosen block, scores: f32 a chosen block, list behind list. gone: chosen blocks that were left
 * out because they were evicted by name meanwhile. no_digest: blocks of the rows that have no
 * digest. */
#define UCM_MSG_SELECT_R(F, m)                                                                     \
    F(m, bin, counts, REQ, 4, UCM_MAX_FRAME_BYTES)                                                 \
    F(m, bin, index, REQ, 0, UCM_MAX_FRAME_BYTES)                                                  \
    F(m, bin, scores, OPT, 0, UCM_MAX_FRAME_BYTES)                                                 \
    F(m, u64, gone, OPT, 0, UCM_U32)                                                               \
    F(m, u64, no_digest, OPT, 0, UINT64_MAX)

/* Brings these blocks of the chain's base into DRAM. index: u32 each. Answers with blocks_r. */
#define UCM_MSG_CHAIN_PREFETCH(F, m)                                                               \
    F(m, u64, chain, REQ, 1, UCM_U32)                                                              \
    F(m, bin, index, REQ, 4, UCM_BLOCKS_BYTES)                                                     \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)

#endif
