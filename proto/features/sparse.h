/* The messages of workers that decode sparsely: fetches into pools, and windows; and those that
 * tell of memory that the daemon shares: windows and hints. As messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_SPARSE_H
#define UCM_PROTO_FEATURES_SPARSE_H

#include "proto/limits.h"

#include <stdint.h>

#define UCM_PLACES_BYTES ((uint64_t)UCM_MAX_KEYS * UCM_PLACE_BYTES)

/* ---- fetches ---- */

/* Copies shards into slots of a pool. items: u32 index, shard, slot each, little-endian. index
 * counts the chain's blocks or, without a chain, the keys. */
#define UCM_MSG_FETCH(F, m)                                                                        \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, u64, chain, OPT, 0, UCM_U32)                                                              \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, bin, items, REQ, UCM_FETCH_ITEM_BYTES, UCM_MAX_FETCH_ITEMS *UCM_FETCH_ITEM_BYTES)         \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)
/* status: one byte an item, enum ucm_block_status. */
#define UCM_MSG_FETCH_R(F, m)                                                                      \
    F(m, bin, status, REQ, 1, UCM_MAX_FETCH_ITEMS)                                                 \
    F(m, u64, bytes, OPT, 0, UINT64_MAX)

/* ---- windows ---- */

/* Memory of the daemon that holds blocks of part `part` of namespace ns, for the client's process
 * to read. The answer brings one descriptor: the table of generations (proto/memory/window.h).
 * budget: window.size now, of all tenants. */
#define UCM_MSG_WINDOW_OPEN(F, m)                                                                  \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)
#define UCM_MSG_WINDOW_OPEN_R(F, m)                                                                \
    F(m, u64, window, REQ, 1, UCM_U32)                                                             \
    F(m, u64, extent_bytes, REQ, 4096, 1ull << 40)                                                 \
    F(m, u64, slot_bytes, REQ, 4096, 1ull << 40)                                                   \
    F(m, u64, extents, REQ, 1, UCM_MAX_WINDOW_EXTENTS)                                             \
    F(m, u64, budget, OPT, 0, UINT64_MAX)
#define UCM_MSG_WINDOW(F, m) F(m, u64, window, REQ, 1, UCM_U32)

/* Brings blocks [first, first + n) of the chain into the window and keeps them there. */
#define UCM_MSG_WINDOW_PIN(F, m)                                                                   \
    F(m, u64, window, REQ, 1, UCM_U32)                                                             \
    F(m, u64, chain, REQ, 1, UCM_U32)                                                              \
    F(m, u64, first, OPT, 0, UCM_MAX_CHAIN_BLOCKS - 1)                                             \
    F(m, u64, n, REQ, 1, UCM_MAX_KEYS)                                                             \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)
/* places: struct ucm_wire_place for each block. lent: extents of the window whose descriptors come
 * with the answer, in this order. more: the answer covers only the first blocks; ask for the others
 * again. moved, read: blocks that were copied within DRAM, that were read from a lower tier.
 * missing: that are not cached. */
#define UCM_MSG_WINDOW_PIN_R(F, m)                                                                 \
    F(m, bin, places, REQ, 0, UCM_PLACES_BYTES)                                                    \
    F(m, u32s, lent, OPT, 0, UCM_MAX_FRAME_FDS)                                                    \
    F(m, flag, more, OPT, 0, 0)                                                                    \
    F(m, u64, moved, OPT, 0, UCM_MAX_KEYS)                                                         \
    F(m, u64, read, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, missing, OPT, 0, UCM_MAX_KEYS)
#define UCM_MSG_WINDOW_UNPIN(F, m)                                                                 \
    F(m, u64, window, REQ, 1, UCM_U32)                                                             \
    F(m, u64, chain, REQ, 1, UCM_U32)                                                              \
    F(m, u64, first, OPT, 0, UCM_MAX_CHAIN_BLOCKS - 1)                                             \
    F(m, u64, n, REQ, 1, UCM_MAX_CHAIN_BLOCKS)
/* The client has unmapped these. */
#define UCM_MSG_WINDOW_RELEASE(F, m)                                                               \
    F(m, u64, window, REQ, 1, UCM_U32)                                                             \
    F(m, u32s, extents, REQ, 1, UCM_MAX_REVOKED)
/* The notification: the daemon wants these back within deadline_ms. */
#define UCM_MSG_WINDOW_REVOKE(F, m)                                                                \
    F(m, u64, window, REQ, 1, UCM_U32)                                                             \
    F(m, u32s, extents, REQ, 1, UCM_MAX_REVOKED)                                                   \
    F(m, u64, deadline_ms, REQ, 1, UCM_DEADLINE_MS)
#define UCM_WINDOW_REVOKE "window.revoke"

/* ---- hints ---- */

/* The table of a namespace's blocks. The answer brings one descriptor: the table
 * (proto/memory/hint.h), of `bytes` bytes. shared: a block that is not in the table may lie on the
 * shared tier all the same. */
#define UCM_MSG_HINTS_OPEN(F, m) F(m, u64, ns, REQ, 1, UCM_U32)
#define UCM_MSG_HINTS_OPEN_R(F, m)                                                                 \
    F(m, u64, bytes, REQ, 4096, 1ull << 40)                                                        \
    F(m, flag, shared, OPT, 0, 0)

#endif
