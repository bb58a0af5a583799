/* The messages of retrieval: block summaries, sequences, selections. The form is that of
 * messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_RETRIEVAL_H
#define UCM_PROTO_FEATURES_RETRIEVAL_H

#include "proto/limits.h"

#include <stdint.h>

/* Method summary.open. Opens a namespace of a base's block summaries (docs/protocol.md, "Block
 * summaries"). Fields that the method does not use are ignored. Errors of `namespace.open` apply.
 * Building while parts are stored is best effort; `summaries_skipped` counts parts without a
 * summary.
 * Errors: INVALID: the method refuses a field, the shape exceeds `layer_bytes`, or a part exceeds
 *   the arena.
 * ns: the base.
 * method: 1 `mean`, 2 `submean`, 3 `box`, 4 `hash`, 5 `stats`, 6 `tokens`.
 * kind: mean: 0 mean, 1 largest value, 2 mean of length 1.
 * run: submean: tokens in a mean; divides `block_tokens`.
 * keep: submean: a bit for each RoPE pair, set if it counts; absent: all.
 * pairs: submean: 0 channels i and i + `head_dim` / 2, 1 channels 2i and 2i + 1.
 * bits: hash: 64, 128 or 256 a token and KV head.
 * rope_bits: hash with `rope_dim`: those of `bits` for the rotated part.
 * seed: hash: of its rotation.
 * chosen: tokens: how many stand for the block, at most 32.
 * rest: tokens: 1: also the mean of the others, in 4 bits a channel.
 * dtype: of the KV: 0 float32, 1 float16, 2 bfloat16, 3 float8 e4m3.
 * kv_heads: of a part.
 * head_dim: of K.
 * v_head_dim: 0: no V.
 * rope_dim: MLA: K's last channels that rotate.
 * k_offset: from the layer's start, in bytes.
 * k_token_stride: plain.
 * k_head_stride: plain.
 * v_offset: plain.
 * v_token_stride: plain.
 * v_head_stride: plain.
 * build: while connected, build summaries as parts are stored. */
#define UCM_MSG_SUMMARY_OPEN(F, m)                                                                 \
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

/* layer_bytes: of a summary. */
#define UCM_MSG_SUMMARY_OPEN_R(F, m)                                                               \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)                      \
    F(m, u64, layer_bytes, REQ, 1, 1u << 28)

/* Method summary.build. Builds the summaries of blocks that have none, from any tier. Statuses: OK;
 * EXISTS; MISS; FAILED: a block can't be read; IN_PROGRESS: a dump stores the summary; NO_ROOM:
 * DRAM, or the tenant's `dram.max`, is full of blocks in use; CANCELLED.
 * ns: from `summary.open`. */
#define UCM_MSG_SUMMARY_BUILD(F, m)                                                                \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, parts, OPT, 0, UCM_MAX_PARTS)                                                        \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* Method sequence.open. Opens an empty sequence (docs/protocol.md, "Sequences and selections").
 * Errors: BUSY: the connection has 4096 sequences; NOT_FOUND: `ns` is not of this connection's
 *   `summary.open`.
 * ns: from `summary.open`.
 * part: the one whose layers `select` scores.
 * lease_ms: the sequence ends when unused for this long; 0: `max_lease_ms`. */
#define UCM_MSG_SEQUENCE_OPEN(F, m)                                                                \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, lease_ms, OPT, 0, UCM_U32)

/* Method sequence.close. Ends a sequence, its leases, summaries and append. */

/* A sequence. */
#define UCM_MSG_SEQUENCE(F, m) F(m, u64, sequence, REQ, 1, UCM_U32)

/* Method sequence.append. Appends blocks up to the first key that the base has in no tier, and
 * brings their summaries into DRAM. It answers when each summary is there or can't be. After a
 * cancel or timeout, appended blocks stay. Summaries of sequences take up to a quarter of the
 * daemon's DRAM. Those of one uid, unless it is an operator's, take up to three quarters of that.
 * Errors: BUSY: an append is under way, or the connection's leases and sequences cover 2^20 keys;
 *   INVALID: more than 2^20 blocks.
 * keys: as the sequence goes on.
 * build: build summaries that no tier has. */
#define UCM_MSG_SEQUENCE_APPEND(F, m)                                                              \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, flag, build, OPT, 0, 0)                                                                   \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* blocks: in the sequence now.
 * dram: of the keys, wholly in DRAM.
 * nvme: to read from NVMe.
 * shared: to read from the shared tier.
 * missing: not appended.
 * summaries: keys whose summary the sequence holds.
 * built: of these, built for this request.
 * status: a byte a key: enum ucm_lookup_status; plus 4 if the sequence has its summary. */
#define UCM_MSG_SEQUENCE_APPEND_R(F, m)                                                            \
    F(m, u64, blocks, REQ, 0, UCM_MAX_SEQUENCE_BLOCKS)                                             \
    F(m, u64, dram, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, nvme, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, shared, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, u64, missing, OPT, 0, UCM_MAX_KEYS)                                                       \
    F(m, u64, summaries, OPT, 0, UCM_MAX_KEYS)                                                     \
    F(m, u64, built, OPT, 0, UCM_MAX_KEYS)                                                         \
    F(m, bin, status, REQ, 1, UCM_MAX_KEYS)

/* In sequence.append's status: the sequence holds the block's summary. */
#define UCM_SEQUENCE_SUMMARY 4

/* Method select. Chooses the blocks of sequences that a query wants (docs/protocol.md, "Sequences
 * and selections"). Row i asks for layer `layers[i]` of sequence `sequences[i]`; all are of one
 * namespace. A row has one list with `heads` 1 or 2, else one for each KV head. With all of its
 * fields 0, top k chooses no block.
 * Errors: INVALID: `q` has a wrong length, NaN or infinity; `q_heads` is no multiple of the KV
 *   heads; the answer could exceed a frame; CANCELLED, DEADLINE, SHUTDOWN: stopped.
 * sequences: plain.
 * layers: one for each row.
 * q: of each row, `rows` queries of `q_heads` heads of `head_dim` channels.
 * q_dtype: 0 float32, 1 float16, 2 bfloat16.
 * q_heads: those of a KV head follow one another.
 * rows: queries of a row, one for each of its last tokens; 0: 1.
 * metric: 0 inner product; 1 minus the squared distance; 2 inner product with the rounded query.
 * reduce: over a KV head's queries: 0 max, 1 mean, 2 sum of softmax.
 * heads: over KV heads: 0 a list for each, 1 sum, 2 max.
 * beta: softmax: scale of scores; 0: 1 for `stats` and `tokens` with `rest`, else
 *   1 / sqrt(`head_dim`).
 * policy: 0 top k, 1 mass.
 * sparse_ratio: top k: fraction of the blocks.
 * topk_tokens: top k: this many tokens' blocks, in place of `sparse_ratio`.
 * min_blocks: top k: at least this many.
 * eps: mass: fraction of weights that suffices.
 * beta_m: mass: weights are exp(beta_m score); 0: `beta`.
 * limit: blocks of a list at most; 0: as many as fit.
 * sink_blocks: first blocks, always chosen.
 * recent_blocks: last blocks, always chosen.
 * scores: answer the scores too.
 * prefetch: 0: none; else afterwards prefetch the chosen (16384 at most) with priority `prefetch` -
 *   1; `cancel` stops it. */
#define UCM_MSG_SELECT(F, m)                                                                       \
    F(m, u32s, sequences, REQ, 1, UCM_MAX_SELECT_ROWS)                                             \
    F(m, u32s, layers, REQ, 1, UCM_MAX_SELECT_ROWS)                                                \
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
    F(m, u64, min_blocks, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS)                                         \
    F(m, f64, eps, OPT, 0, 1)                                                                      \
    F(m, f64, beta_m, OPT, 0, 1u << 20)                                                            \
    F(m, u64, limit, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS)                                              \
    F(m, u64, sink_blocks, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS)                                        \
    F(m, u64, recent_blocks, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS)                                      \
    F(m, flag, scores, OPT, 0, 0)                                                                  \
    F(m, u64, prefetch, OPT, 0, 8)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* counts: u32 a list: blocks chosen. By row, then KV head.
 * index: u32 a chosen block: its place, ascending in a list; lists concatenated.
 * scores: float32 for each of `index`.
 * evicted: chosen, but evicted by name or purged.
 * no_summary: without a summary, chosen before others. */
#define UCM_MSG_SELECT_R(F, m)                                                                     \
    F(m, bin, counts, REQ, 4, UCM_MAX_FRAME_BYTES)                                                 \
    F(m, bin, index, REQ, 0, UCM_MAX_FRAME_BYTES)                                                  \
    F(m, bin, scores, OPT, 0, UCM_MAX_FRAME_BYTES)                                                 \
    F(m, u64, evicted, OPT, 0, UCM_U32)                                                            \
    F(m, u64, no_summary, OPT, 0, UINT64_MAX)

/* Method sequence.prefetch. Brings the sequence's part of blocks into DRAM. A block that was
 * evicted by name is a MISS.
 * index: u32 a block: its place in the sequence. */
#define UCM_MSG_SEQUENCE_PREFETCH(F, m)                                                            \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, bin, index, REQ, 4, UCM_BLOCKS_BYTES)                                                     \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

#endif
