/* The messages of workers that decode sparsely: gathers into GPU block pools, and shared mappings;
 * and of advisory lookup tables. The form is that of messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_SPARSE_H
#define UCM_PROTO_FEATURES_SPARSE_H

#include "proto/limits.h"

#include <stdint.h>

#define UCM_PLACES_BYTES ((uint64_t)UCM_MAX_KEYS * UCM_PLACE_BYTES)

/* ---- gathers ---- */

/* Method gather. Gathers single layers of blocks into entries of a GPU block pool, and answers when
 * every item has its status. No entry may be named twice; a layer may go to several. Until the
 * answer neither read nor write these entries; afterwards only those with status 0 hold what was
 * asked for.
 *
 * The blocks are those of a sequence of the pool's namespace and part or, without `sequence`,
 * `keys`, which may be of several sequences. A block of a sequence that was evicted by name is a
 * MISS. Closing the sequence does not end the gather.
 *
 * What is not in DRAM is read once. If only NVMe has a part, and the layers from the first to the
 * last named are less than half of it, only these are read, and the part stays below. Otherwise,
 * and once gathers have read as many bytes as it has, it is read whole and stays in DRAM.
 * Errors: INVALID: there is no such index, layer or entry, or more than 16384 different blocks.
 * region: a GPU block pool, from `region.register`.
 * sequence: from `sequence.open`; 0: none.
 * keys: `key_bytes` each, concatenated.
 * items: three u32, little-endian, an item: index (in the sequence or in `keys`), layer, entry.
 * priority: higher first.
 * timeout_ms: as in `load`. */
#define UCM_MSG_GATHER(F, m)                                                                       \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, u64, sequence, OPT, 0, UCM_U32)                                                           \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, bin, items, REQ, UCM_GATHER_ITEM_BYTES, UCM_MAX_GATHER_ITEMS *UCM_GATHER_ITEM_BYTES)      \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* status: one byte an item: enum ucm_block_status.
 * bytes: copied for this request; of encoded blocks, as stored. */
#define UCM_MSG_GATHER_R(F, m)                                                                     \
    F(m, bin, status, REQ, 1, UCM_MAX_GATHER_ITEMS)                                                \
    F(m, u64, bytes, OPT, 0, UINT64_MAX)

/* ---- mappings ---- */

/* Method mapping.open. Opens a shared mapping of a part of a namespace (docs/design/mappings.md,
 * "Shared mappings"). The answer brings one descriptor: the table of sequence numbers.
 * Errors: INVALID: the connection has one already; UNSUPPORTED: `mapping.size` is 0, or the
 *   namespace is encoded; DENIED: another tenant's namespace; BUSY: the connection has 256.
 * ns: from `namespace.open`.
 * part: the rank's part of each block. */
#define UCM_MSG_MAPPING_OPEN(F, m)                                                                 \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)

/* mapping: the shared mapping's number.
 * slab_bytes: of each slab: the size of its memfd.
 * slot_bytes: from a slot to the next: the part's bytes, padded to 4096.
 * slabs: slabs' numbers are below this.
 * budget: `mapping.size` now, for all tenants. */
#define UCM_MSG_MAPPING_OPEN_R(F, m)                                                               \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, slab_bytes, REQ, 4096, 1ull << 40)                                                   \
    F(m, u64, slot_bytes, REQ, 4096, 1ull << 40)                                                   \
    F(m, u64, slabs, REQ, 1, UCM_MAX_MAPPING_SLABS)                                                \
    F(m, u64, budget, OPT, 0, UINT64_MAX)

/* Method mapping.close. Ends a shared mapping with its references. Unmap it first. */

/* mapping: from `mapping.open`. */
#define UCM_MSG_MAPPING(F, m) F(m, u64, mapping, REQ, 1, UCM_U32)

/* Method mapping.ref. Brings blocks `first` to `first` + `n` - 1 of a sequence into the shared
 * mapping and keeps them there. It answers when each has a place or can't get one. A block that
 * does not fit, that the uid may not reference, or that has not come by the timeout has slab
 * 0xffffffff; that is no error.
 *
 * The answer brings a descriptor for each of `granted`: slabs that this mapping has not got yet, or
 * has released. With more than 64, `more` says that the answer covers only as many blocks as
 * `places` has.
 * Errors: INVALID: the sequence is not of the mapping's namespace and part, or has no such blocks.
 * mapping: from `mapping.open`.
 * sequence: from `sequence.open`.
 * first: a block's place in the sequence.
 * n: number of blocks, all of them in the sequence.
 * priority: of reads; higher first.
 * timeout_ms: as in `load`. */
#define UCM_MSG_MAPPING_REF(F, m)                                                                  \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, u64, first, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS - 1)                                          \
    F(m, u64, n, REQ, 1, UCM_MAX_KEYS)                                                             \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)

/* places: 16 bytes for each block: docs/design/mappings.md, "Shared mappings".
 * granted: slabs whose descriptors come with the answer, in this order.
 * more: ask for the rest again.
 * moved: blocks that were copied within DRAM.
 * read: blocks that were read from a lower tier.
 * missing: blocks that are not cached any more, or can't be read. */
#define UCM_MSG_MAPPING_REF_R(F, m)                                                                \
    F(m, bin, places, REQ, 0, UCM_PLACES_BYTES)                                                    \
    F(m, u32s, granted, OPT, 0, UCM_MAX_FRAME_FDS)                                                 \
    F(m, flag, more, OPT, 0, 0)                                                                    \
    F(m, u64, moved, OPT, 0, UCM_MAX_KEYS)                                                         \
    F(m, u64, read, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, missing, OPT, 0, UCM_MAX_KEYS)

/* Method mapping.unref. Ends references. Blocks of the range that are not referenced are passed
 * over.
 * mapping: from `mapping.open`.
 * sequence: from `sequence.open`.
 * first: a block's place in the sequence.
 * n: number of blocks; those beyond the sequence's end are passed over. */
#define UCM_MSG_MAPPING_UNREF(F, m)                                                                \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u64, sequence, REQ, 1, UCM_U32)                                                           \
    F(m, u64, first, OPT, 0, UCM_MAX_SEQUENCE_BLOCKS - 1)                                          \
    F(m, u64, n, REQ, 1, UCM_MAX_SEQUENCE_BLOCKS)

/* Method mapping.release. Says that the client has unmapped these slabs, so that they no longer
 * count as granted to it. A later reference may bring a descriptor again.
 * Errors: INVALID: one of them was not granted to this mapping, or was released before; nothing is
 *   released.
 * mapping: from `mapping.open`.
 * slabs: slabs, each once. */
#define UCM_MSG_MAPPING_RELEASE(F, m)                                                              \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u32s, slabs, REQ, 1, UCM_MAX_REVOKED)

/* Notification mapping.revoke of mapping.release. The daemon wants slabs back. It has ended their
 * references, and readers miss their blocks. Unmap them, then call `mapping.release`. After the
 * timeout, `mapping_overdue_bytes` counts them, and the daemon ends the connection.
 * mapping: from `mapping.open`.
 * slabs: the slabs.
 * timeout_ms: so much time is left. */
#define UCM_MSG_MAPPING_REVOKE(F, m)                                                               \
    F(m, u64, mapping, REQ, 1, UCM_U32)                                                            \
    F(m, u32s, slabs, REQ, 1, UCM_MAX_REVOKED)                                                     \
    F(m, u64, timeout_ms, REQ, 1, UCM_TIMEOUT_MS)
#define UCM_MAPPING_REVOKE "mapping.revoke"

/* ---- lookup tables ---- */

/* Method lookup_table.open. Opens a namespace's advisory lookup table (docs/design/mappings.md,
 * "Lookup tables"). The answer brings one descriptor: the table. The first request has it filled;
 * it is live some milliseconds later, a second for millions of blocks. Ask again when it is
 * superseded. An encoded namespace's table has its encoded blocks; raw ones are in the base's.
 * Errors: DENIED: another tenant's namespace; BUSY: 1024 namespaces have tables, or a quarter as
 *   many as the daemon may have descriptors.
 * ns: from `namespace.open`, `encoding.open` or `summary.open`. */
#define UCM_MSG_LOOKUP_TABLE_OPEN(F, m) F(m, u64, ns, REQ, 1, UCM_U32)

/* bytes: of the file.
 * shared: the daemon has a shared tier, where blocks may lie that are not in the table. */
#define UCM_MSG_LOOKUP_TABLE_OPEN_R(F, m)                                                          \
    F(m, u64, bytes, REQ, 4096, 1ull << 40)                                                        \
    F(m, flag, shared, OPT, 0, 0)

#endif
