/* The messages of workers that decode sparsely: gathers into GPU block pools, and shared mappings;
 * and of advisory lookup tables. The form is that of messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_SPARSE_H
#define UCM_PROTO_FEATURES_SPARSE_H

#include "proto/limits.h"

#include <stdint.h>

#define UCM_PLACES_BYTES ((uint64_t)UCM_MAX_KEYS * UCM_PLACE_BYTES)

/* ---- gathers ---- */

/* Method gather. Gathers single layers of blocks into entries of a GPU block pool, and answers when
 * every item has its status. Until then do not touch these entries. Afterwards only those with
 * status 0 hold what was asked for. No entry may be named twice; a layer may go to several.
 *
 * `items` index a sequence of the pool's namespace and part or, without `sequence`, `keys`. A
 * sequence's block that was evicted by name is a MISS. Closing the sequence does not end the
 * gather.
 *
 * If a part is on NVMe alone, the daemon reads its layers from the first to the last named, if
 * these are less than half of it. Otherwise, and once gathers have read as many bytes as the part
 * has, the daemon reads the whole part and keeps it in DRAM.
 * Errors: INVALID: no such index, layer or entry, or more than 16384 blocks.
 * region: a GPU block pool.
 * items: three u32 an item: index (in the sequence or `keys`), layer, entry. */
#define UCM_MSG_GATHER(F, m)                                                                       \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, u64, sequence, OPT, 0, UCM_U32)                                                           \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, bin, items, REQ, UCM_GATHER_ITEM_BYTES, UCM_MAX_GATHER_ITEMS *UCM_GATHER_ITEM_BYTES)      \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* status: one byte an item: enum ucm_block_status.
 * bytes: copied; of encoded blocks, as stored. */
#define UCM_MSG_GATHER_R(F, m)                                                                     \
    F(m, bin, status, REQ, 1, UCM_MAX_GATHER_ITEMS)                                                \
    F(m, u64, bytes, OPT, 0, UINT64_MAX)

/* ---- mappings ---- */

/* Method mapping.open. Opens a shared mapping of a part of a namespace (docs/design/mappings.md,
 * "Shared mappings"). The answer's descriptor is the table of sequence numbers.
 * Errors: INVALID: there is one already; UNSUPPORTED: `mapping.size` is 0, or the namespace is
 *   encoded; DENIED: an operator asks for another tenant's; BUSY: the connection has 256.
 * part: the rank's. */
#define UCM_MSG_MAPPING_OPEN(F, m)                                                                 \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)

/* slab_bytes: size of its memfd.
 * slot_bytes: of a part, padded to 4096.
 * slabs: numbers are below this.
 * budget: `mapping.size` now, for all tenants. */
#define UCM_MSG_MAPPING_OPEN_R(F, m)                                                               \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, slab_bytes, REQ, 4096, 1ull << 40)                                                   \
    F(m, u64, slot_bytes, REQ, 4096, 1ull << 40)                                                   \
    F(m, u64, slabs, REQ, 1, UCM_MAX_MAPPING_SLABS)                                                \
    F(m, u64, budget, OPT, 0, UINT64_MAX)

/* Method mapping.close. Ends a shared mapping with its references. Unmap the slabs first. */

/* A shared mapping. */
#define UCM_MSG_MAPPING(F, m) F(m, u64, mapping, REQ, 1, UCM_U32)

/* Method mapping.ref. Brings blocks of a sequence into the shared mapping and keeps them there. It
 * answers when each has a place or can't get one. A block that does not fit, that exceeds what
 * the uid may reference, or that is late has slab 0xffffffff.
 *
 * The answer brings a descriptor for each of `granted`: slabs that this mapping lacks. Beyond 64
 * slabs, `more` says that the answer covers only as many blocks as `places` has.
 * Errors: INVALID: the sequence is of another namespace or part, or has no such blocks.
 * n: blocks, all in the sequence. */
#define UCM_MSG_MAPPING_REF(F, m)                                                                  \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, u64, first, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS - 1)                                          \
    F(m, u64, n, REQ, 1, UCM_MAX_KEYS)                                                             \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* places: 16 bytes a block: docs/design/mappings.md, "Shared mappings".
 * granted: slabs, in the order of their descriptors.
 * more: ask for the rest again.
 * moved: copied within DRAM.
 * read: read from a lower tier.
 * missing: not cached any more, or unreadable. */
#define UCM_MSG_MAPPING_REF_R(F, m)                                                                \
    F(m, bin, places, REQ, 0, UCM_PLACES_BYTES)                                                    \
    F(m, u32s, granted, OPT, 0, UCM_MAX_FRAME_FDS)                                                 \
    F(m, flag, more, OPT, 0, 0)                                                                    \
    F(m, u64, moved, OPT, 0, UCM_MAX_KEYS)                                                         \
    F(m, u64, read, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, missing, OPT, 0, UCM_MAX_KEYS)

/* Method mapping.unref. Ends references to a range of blocks. It skips blocks without one.
 * n: may reach past the sequence's end. */
#define UCM_MSG_MAPPING_UNREF(F, m)                                                                \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, u64, first, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS - 1)                                          \
    F(m, u64, n, REQ, 1, UCM_MAX_SEQUENCE_BLOCKS)

/* Method mapping.release. Says that the client has unmapped slabs. A later reference may bring a
 * descriptor again.
 * Errors: INVALID: a slab is not granted to this mapping; none is released.
 * slabs: each once. */
#define UCM_MSG_MAPPING_RELEASE(F, m)                                                              \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u32s, slabs, REQ, 1, UCM_MAX_REVOKED)

/* Notification mapping.revoke of mapping.release. The daemon wants slabs back, and has ended their
 * references. Unmap them, then call `mapping.release`. After the timeout, the daemon ends the
 * connection.
 * slabs: plain.
 * timeout_ms: plain. */
#define UCM_MSG_MAPPING_REVOKE(F, m)                                                               \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u32s, slabs, REQ, 1, UCM_MAX_REVOKED)                                                     \
    F(m, u64, timeout_ms, REQ, 1, UCM_TIMEOUT_MS)
#define UCM_MAPPING_REVOKE "mapping.revoke"

/* ---- lookup tables ---- */

/* Method lookup_table.open. Opens a namespace's advisory lookup table (docs/design/mappings.md,
 * "Lookup tables"). The answer's descriptor is the table. After the first request the daemon fills
 * it within milliseconds, or a second for millions of blocks. Ask again when the table is
 * superseded. An encoded namespace's table lacks raw blocks; the base's has them.
 * Errors: DENIED: an operator asks for another tenant's; BUSY: 1024 namespaces have tables, or
 *   tables use a quarter of the daemon's descriptors. */
#define UCM_MSG_LOOKUP_TABLE_OPEN(F, m) F(m, u64, ns, REQ, 1, UCM_U32)

/* bytes: of the file.
 * shared: a shared tier may have blocks that the table lacks. */
#define UCM_MSG_LOOKUP_TABLE_OPEN_R(F, m)                                                          \
    F(m, u64, bytes, REQ, 4096, 1ull << 40)                                                        \
    F(m, flag, shared, OPT, 0, 0)

#endif
