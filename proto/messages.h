/* Every message of the wire, declared once. From each list come a C struct, an encoder and a
 * decoder (proto.h), so client and daemon cannot disagree. docs/protocol.md has the meaning of
 * methods and fields.
 *
 * F(m, kind, name, need, min, max)
 *
 * m: the message, as in struct msg_m
 * kind:
 * - u64: unsigned integer; min..max are its bounds
 * - str: UTF-8 text; min..max bound its length in bytes
 * - bin: binary; min..max bound its length in bytes
 * - flag: boolean
 * - f64: a finite MessagePack float of 32 or 64 bits; min..max are its bounds
 * - u32s: array of unsigned integers below 2^32; min..max bound its length
 * - handles, planes: arrays of the maps declared below; min..max bound their length
 *
 * need: REQ or OPT. An absent optional field is 0, false or empty; an encoder leaves such a field
 * out.
 *
 * A message is a MessagePack map from field name to value. The decoder refuses a field that the
 * list does not name, so that a misspelled option is an error. */
#ifndef UCM_PROTO_MESSAGES_H
#define UCM_PROTO_MESSAGES_H

#include "proto/features/encoding.h"
#include "proto/features/operators.h"
#include "proto/features/retrieval.h"
#include "proto/features/sparse.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stdint.h>

#define UCM_KEYS_BYTES ((uint64_t)UCM_MAX_KEYS * UCM_MAX_KEY_BYTES)
#define UCM_BLOCKS_BYTES ((uint64_t)UCM_MAX_KEYS * 4)
#define UCM_U32 UINT32_MAX
#define UCM_DEADLINE_MS 3600000 /* an hour */
#define UCM_TRACE_MS 86400000   /* a day */

/* ---- parts of messages ---- */

/* Memory of a worker. kind: enum ucm_handle_kind. fd: the descriptor's position among those that
 * came with the frame. */
#define UCM_MSG_HANDLE(F, m)                                                                       \
    F(m, u64, kind, REQ, 0, 2)                                                                     \
    F(m, u64, bytes, REQ, 1, UINT64_MAX / 2)                                                       \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, bin, ipc, OPT, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                                \
    F(m, u64, fd, OPT, 0, UCM_MAX_FRAME_FDS - 1)

enum ucm_handle_kind {
    UCM_HANDLE_MEMFD = 0,    /* sealed shared memory, by descriptor: device cpu */
    UCM_HANDLE_CUDA_IPC = 1, /* cudaIpcMemHandle_t; offset counts from the allocation's base */
    UCM_HANDLE_CUDA_FD = 2,  /* cuMemExportToShareableHandle, by descriptor */
};

/* Address of block b in a plane = base(handle) + offset + b * stride; chunk bytes are its KV.
 * Planes of one shard follow one another in a block's slot in the order of the list. */
#define UCM_MSG_PLANE(F, m)                                                                        \
    F(m, u64, handle, OPT, 0, UCM_MAX_HANDLES - 1)                                                 \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, u64, stride, REQ, 1, UINT64_MAX / 2)                                                      \
    F(m, u64, chunk, REQ, 1, UINT32_MAX)                                                           \
    F(m, u64, shard, OPT, 0, UCM_MAX_SHARDS - 1)

/* ---- requests and their results ---- */

#define UCM_MSG_HELLO(F, m)                                                                        \
    F(m, u64, version_min, REQ, 1, UCM_U32)                                                        \
    F(m, u64, version_max, REQ, 1, UCM_U32)                                                        \
    F(m, str, client, REQ, 1, UCM_MAX_NAME_BYTES)
#define UCM_MSG_HELLO_R(F, m)                                                                      \
    F(m, u64, version, REQ, 1, UCM_U32)                                                            \
    F(m, str, server, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, bin, instance, REQ, 16, 16)                                                               \
    F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, flag, admin, OPT, 0, 0)                                                                   \
    F(m, u64, max_frame_bytes, REQ, 1024, UCM_U32)                                                 \
    F(m, u64, max_keys, REQ, 1, UCM_U32)                                                           \
    F(m, u64, max_requests, REQ, 1, UCM_U32)                                                       \
    F(m, u64, max_regions, REQ, 1, UCM_U32)                                                        \
    F(m, u64, max_leases, REQ, 1, UCM_U32)                                                         \
    F(m, u64, max_lease_ms, REQ, 1, UCM_U32)                                                       \
    F(m, u64, max_deadline_ms, REQ, 1, UCM_U32)

/* shards: layers of each part; one number means all parts. durability: of this connection's dumps
 * that name none; not part of the identity. */
#define UCM_MSG_NS_OPEN(F, m)                                                                      \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, str, model, REQ, 1, UCM_MAX_NAME_BYTES)                                                   \
    F(m, str, revision, OPT, 0, UCM_MAX_NAME_BYTES)                                                \
    F(m, str, dtype, REQ, 1, UCM_MAX_NAME_BYTES)                                                   \
    F(m, str, layout, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, block_tokens, REQ, 1, 1u << 20)                                                      \
    F(m, u64, key_bytes, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES)                                \
    F(m, u64, parts, REQ, 1, UCM_MAX_PARTS)                                                        \
    F(m, u32s, shards, REQ, 1, UCM_MAX_PARTS)                                                      \
    F(m, u64, shard_bytes, REQ, 1, 1u << 28)                                                       \
    F(m, bin, salt, OPT, 0, UCM_MAX_SALT_BYTES)                                                    \
    F(m, u64, durability, OPT, 0, 1)
#define UCM_MSG_NS_OPEN_R(F, m)                                                                    \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)

/* pool: `blocks` slots, each for one shard of any block, for fetch; planes are those of one shard.
 * rope: K of a shard, which loads may turn: its first byte, rows, elements of a row, and of these
 * the first that turns and how many do. The fields behind it are those of struct ucm_rope_spec
 * (kernels/rope/rope.h). */
#define UCM_MSG_REGION_REGISTER(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, blocks, REQ, 1, UCM_U32)                                                             \
    F(m, str, device, REQ, 3, 16)                                                                  \
    F(m, bin, gpu, OPT, UCM_UUID_BYTES, UCM_UUID_BYTES)                                            \
    F(m, handles, handles, REQ, 1, UCM_MAX_HANDLES)                                                \
    F(m, planes, planes, REQ, 1, UCM_MAX_PLANES)                                                   \
    F(m, u64, ring_region, OPT, 0, UCM_U32)                                                        \
    F(m, flag, pool, OPT, 0, 0)                                                                    \
    F(m, u32s, rope, OPT, 0, UCM_ROPE_NUMBERS)                                                     \
    F(m, str, rope_dtype, OPT, 0, 16)                                                              \
    F(m, flag, rope_interleaved, OPT, 0, 0)                                                        \
    F(m, f64, rope_base, OPT, 0, UINT64_C(1000000000000))                                          \
    F(m, str, rope_scaling, OPT, 0, 16)                                                            \
    F(m, f64, rope_factor, OPT, 0, 1000000)                                                        \
    F(m, u64, rope_trained, OPT, 0, UCM_U32)                                                       \
    F(m, f64, rope_fast, OPT, 0, 1000000)                                                          \
    F(m, f64, rope_slow, OPT, 0, 1000000)                                                          \
    F(m, flag, rope_whole, OPT, 0, 0)
#define UCM_MSG_REGION(F, m) F(m, u64, region, REQ, 1, UCM_U32)

#define UCM_MSG_CHALLENGE_R(F, m) F(m, bin, nonce, REQ, UCM_NONCE_BYTES, UCM_NONCE_BYTES)

/* GPU memory of the worker that copies may pass through, see proto/memory/staging.h. ipc and offset
 * name the first slice; fd is the shared memory. */
#define UCM_MSG_RING_REGISTER(F, m)                                                                \
    F(m, bin, gpu, REQ, UCM_UUID_BYTES, UCM_UUID_BYTES)                                            \
    F(m, bin, ipc, REQ, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                                \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, u64, slice_bytes, REQ, 1u << 16, 1u << 26)                                                \
    F(m, u64, slices, REQ, 2, UCM_MAX_SLICES)                                                      \
    F(m, u64, fd, OPT, 0, UCM_MAX_FRAME_FDS - 1)
#define UCM_MSG_RING(F, m) F(m, u64, ring, REQ, 1, UCM_U32)

/* request, here and in load, dump and prefetch: the engine's id of the request on whose behalf this
 * one is; for tracing only. */
/* keys: key_bytes each, the chain's head first. shared: report what only the shared tier has by a
 * status of its own. wait_ms: for the shared tier at most; 0: share.lookup_deadline. nowait: enum
 * ucm_lookup_nowait; with UCM_LOOKUP_LATER, 0 is share.deadline. */
#define UCM_MSG_LOOKUP(F, m)                                                                       \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, flag, each, OPT, 0, 0)                                                                    \
    F(m, u64, lease_ms, OPT, 0, UCM_U32)                                                           \
    F(m, flag, shared, OPT, 0, 0)                                                                  \
    F(m, u64, wait_ms, OPT, 0, UCM_DEADLINE_MS)                                                    \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, u64, nowait, OPT, 0, UCM_LOOKUP_HERE)
#define UCM_MSG_LOOKUP_R(F, m)                                                                     \
    F(m, u64, hits, REQ, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, dram, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, lease, OPT, 0, UCM_U32)                                                              \
    F(m, bin, status, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, u64, shared, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, flag, pending, OPT, 0, 0)

#define UCM_MSG_RELEASE(F, m) F(m, u64, lease, REQ, 1, UCM_U32)

/* A load or a dump. keys[i] goes to or comes from block blocks[i] of the region (u32 each,
 * little-endian). shards: 0 means all from `shard` on. step: report progress every so many layers.
 * computes: the worker's GPU computes meanwhile, and copies give way to its own. The first list is
 * what both kinds of load have. */
#define UCM_LOADED_FIELDS(F, m)                                                                    \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, bin, blocks, REQ, 4, UCM_BLOCKS_BYTES)                                                    \
    F(m, u64, shard, OPT, 0, UCM_MAX_SHARDS - 1)                                                   \
    F(m, u64, shards, OPT, 0, UCM_MAX_SHARDS)                                                      \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)                                                \
    F(m, u64, step, OPT, 0, UCM_MAX_SHARDS)                                                        \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, flag, computes, OPT, 0, 0)
/* turns: runs of keys whose K turns, UCM_TURN_NUMBERS each: keys, old position, new position, old
 * length, new length. */
#define UCM_MSG_LOAD(F, m)                                                                         \
    UCM_LOADED_FIELDS(F, m)                                                                        \
    F(m, u64, lease, OPT, 0, UCM_U32)                                                              \
    F(m, u32s, turns, OPT, 0, UCM_MAX_TURNS *UCM_TURN_NUMBERS)
/* A lookup, its lease and a load in one: of the keys' prefix that is found. wait_ms: as in
 * lookup. */
#define UCM_MSG_LOAD_PREFIX(F, m)                                                                  \
    UCM_LOADED_FIELDS(F, m)                                                                        \
    F(m, u64, wait_ms, OPT, 0, UCM_DEADLINE_MS)
/* The notification of a load with `step`: so many of its layers are loaded. status: as in the
 * result; left out while it has not changed since the last one (at first all OK). */
#define UCM_MSG_PROGRESS(F, m)                                                                     \
    F(m, u64, msgid, REQ, 0, UCM_U32)                                                              \
    F(m, u64, shards, REQ, 1, UCM_MAX_SHARDS)                                                      \
    F(m, bin, status, OPT, 0, UCM_MAX_KEYS)
#define UCM_PROGRESS "progress"
#define UCM_MSG_DUMP(F, m)                                                                         \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, bin, blocks, REQ, 4, UCM_BLOCKS_BYTES)                                                    \
    F(m, u64, shard, OPT, 0, UCM_MAX_SHARDS - 1)                                                   \
    F(m, u64, shards, OPT, 0, UCM_MAX_SHARDS)                                                      \
    F(m, bin, event, OPT, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                              \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)                                                \
    F(m, u64, durability, OPT, 0, 2)                                                               \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, flag, plain, OPT, 0, 0)                                                                   \
    F(m, flag, computes, OPT, 0, 0)

enum ucm_durability {
    UCM_DURABILITY_DEFAULT = 0, /* as the connection opened the namespace; there 0 is DRAM */
    UCM_DURABILITY_NVME = 1,    /* answered when the bytes are on stable storage */
    UCM_DURABILITY_DRAM = 2,    /* answered when they are in DRAM */
};

/* part: 0 means all, else part - 1. */
#define UCM_MSG_PREFETCH(F, m)                                                                     \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS)                                                         \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, deadline_ms, OPT, 0, UCM_DEADLINE_MS)                                                \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)
/* status: one byte a key, enum ucm_block_status. bytes: copied or read for this request. */
#define UCM_MSG_BLOCKS_R(F, m)                                                                     \
    F(m, bin, status, REQ, 1, UCM_MAX_KEYS)                                                        \
    F(m, u64, bytes, OPT, 0, UINT64_MAX)

#define UCM_MSG_CANCEL(F, m) F(m, u64, msgid, REQ, 0, UCM_U32)
#define UCM_MSG_CANCEL_R(F, m) F(m, flag, cancelled, OPT, 0, 0)

/* M(NAME, name, "method", params, result): the last two by the suffix that UCM_MESSAGES gives them,
 * or none. Results that are free_map are maps whose fields docs/protocol.md lists and which grow
 * from version to version (stats and what operators read). */
#define UCM_METHODS(M)                                                                             \
    M(HELLO, hello, "hello", hello, hello_r)                                                       \
    M(NS_OPEN, ns_open, "namespace.open", ns_open, ns_open_r)                                      \
    M(REGION_REGISTER, region_register, "region.register", region_register, region)                \
    M(REGION_UNREGISTER, region_unregister, "region.unregister", region, none)                     \
    M(RING_REGISTER, ring_register, "ring.register", ring_register, ring)                          \
    M(RING_UNREGISTER, ring_unregister, "ring.unregister", ring, none)                             \
    M(LOOKUP, lookup, "lookup", lookup, lookup_r)                                                  \
    M(RELEASE, release, "release", release, none)                                                  \
    M(PREFETCH, prefetch, "prefetch", prefetch, blocks_r)                                          \
    M(LOAD, load, "load", load, blocks_r)                                                          \
    M(DUMP, dump, "dump", dump, blocks_r)                                                          \
    M(CANCEL, cancel, "cancel", cancel, cancel_r)                                                  \
    M(PIN, pin, "pin", keys, count_r)                                                              \
    M(UNPIN, unpin, "unpin", keys, count_r)                                                        \
    M(EVICT, evict, "evict", evict, count_r)                                                       \
    M(STATS, stats, "stats", none, free_map)                                                       \
    M(HEALTH, health, "health", none, free_map)                                                    \
    M(NS_LIST, ns_list, "namespace.list", page, free_map)                                          \
    M(NS_PURGE, ns_purge, "namespace.purge", keys, count_r)                                        \
    M(LS, ls, "ls", ls, free_map)                                                                  \
    M(INSPECT, inspect, "inspect", key, free_map)                                                  \
    M(VERIFY, verify, "verify", ls, verify_r)                                                      \
    M(SHARE_COLLECT, share_collect, "share.collect", collect, collect_r)                           \
    M(TRACE, trace, "trace", trace, free_map)                                                      \
    M(DIGEST_OPEN, digest_open, "digest.open", digest_open, digest_open_r)                         \
    M(DIGEST_BUILD, digest_build, "digest.build", digest_build, blocks_r)                          \
    M(CHAIN_OPEN, chain_open, "chain.open", chain_open, chain)                                     \
    M(CHAIN_APPEND, chain_append, "chain.append", chain_append, chain_append_r)                    \
    M(CHAIN_CLOSE, chain_close, "chain.close", chain, none)                                        \
    M(SELECT, select, "select", select, select_r)                                                  \
    M(CHAIN_PREFETCH, chain_prefetch, "chain.prefetch", chain_prefetch, blocks_r)                  \
    M(ENCODING_OPEN, encoding_open, "encoding.open", encoding_open, encoding_open_r)               \
    M(WINDOW_OPEN, window_open, "window.open", window_open, window_open_r)                         \
    M(WINDOW_PIN, window_pin, "window.pin", window_pin, window_pin_r)                              \
    M(WINDOW_UNPIN, window_unpin, "window.unpin", window_unpin, none)                              \
    M(WINDOW_RELEASE, window_release, "window.release", window_release, none)                      \
    M(WINDOW_CLOSE, window_close, "window.close", window, none)                                    \
    M(CONFIG_RELOAD, config_reload, "config.reload", none, free_map)                               \
    M(CONFIG_GET, config_get, "config.get", none, free_map)                                        \
    M(BYPASS, bypass, "bypass", bypass, free_map)                                                  \
    M(FETCH, fetch, "fetch", fetch, fetch_r)                                                       \
    M(HINTS_OPEN, hints_open, "hints.open", hints_open, hints_open_r)                              \
    M(LOAD_PREFIX, load_prefix, "load_prefix", load_prefix, blocks_r)                              \
    M(KEY_LIST, key_list, "key.list", none, free_map)                                              \
    M(KEY_RELOAD, key_reload, "key.reload", key_reload, free_map)                                  \
    M(TENANT_LIST, tenant_list, "tenant.list", page, free_map)                                     \
    M(TENANT_SET, tenant_set, "tenant.set", tenant_set, none)                                      \
    M(TENANT_RESET, tenant_reset, "tenant.reset", tenant, none)                                    \
    M(EVENTS, events, "events", events, free_map)                                                  \
    M(EVENTS_LIST, events_list, "events.list", ls, free_map)                                       \
    M(EVENTS_DESCRIBE, events_describe, "events.describe", events_describe, none)                  \
    M(REGION_CHALLENGE, region_challenge, "region.challenge", none, challenge_r)

enum ucm_method {
#define M(NAME, name, text, params, result) UCM_METHOD_##NAME,
    UCM_METHODS(M)
#undef M
        UCM_METHOD_COUNT
};

/* What a lookup does where the shared tier may have what this host lacks. */
enum ucm_lookup_nowait {
    UCM_LOOKUP_WAIT = 0,  /* it is answered when the shared tier has answered */
    UCM_LOOKUP_LATER = 1, /* at once; `pending` says that the shared tier is being asked */
    UCM_LOOKUP_HERE = 2,  /* at once; the shared tier is not asked */
};

/* One byte a key in lookup's status. */
enum ucm_lookup_status {
    UCM_LOOKUP_MISS = 0,
    UCM_LOOKUP_DRAM = 1,   /* every part lies in DRAM */
    UCM_LOOKUP_NVME = 2,   /* every part is complete, at least one must be read from NVMe */
    UCM_LOOKUP_SHARED = 3, /* or from the shared tier; 2 for clients that did not set `shared` */
};

/* One byte a key in the status of load, dump and prefetch, one an item in that of fetch. */
enum ucm_block_status {
    UCM_BLOCK_OK = 0,
    UCM_BLOCK_MISS = 1,        /* load, prefetch, fetch: not cached, or not whole */
    UCM_BLOCK_FAILED = 2,      /* its read or its checksum failed: a miss, and the copy is gone */
    UCM_BLOCK_NO_ROOM = 3,     /* DRAM is full of blocks in use, or a prefetch has read enough */
    UCM_BLOCK_EXISTS = 4,      /* dump: complete already, nothing was copied */
    UCM_BLOCK_IN_PROGRESS = 5, /* dump: another worker is storing this part; nothing was copied */
    UCM_BLOCK_CANCELLED = 6,   /* cancelled or past its deadline before it was moved */
    UCM_BLOCK_DEVICE = 7,      /* the copy failed on the device; a dumped block is not stored */
    UCM_BLOCK_NOT_DURABLE = 8, /* dump: stored, but not known to be on stable storage as asked */
    UCM_BLOCK_UNFIT = 9,       /* dump: the encoding can't hold these bytes; nothing is stored */
};

/* ---- the structs ---- */

/* Views into the frame they were decoded from (or the caller's memory, when encoding). */
struct proto_str {
    const char *p;
    uint32_t n;
};
struct proto_bin {
    const uint8_t *p;
    uint32_t n;
};
/* Views into the decoder's scratch memory (or the caller's, when encoding). */
struct proto_u32s {
    const uint32_t *p;
    uint32_t n;
};

#define UCM_FIELD_u64(name) uint64_t name;
#define UCM_FIELD_str(name) struct proto_str name;
#define UCM_FIELD_bin(name) struct proto_bin name;
#define UCM_FIELD_flag(name) bool name;
#define UCM_FIELD_f64(name) double name;
#define UCM_FIELD_u32s(name) struct proto_u32s name;
#define UCM_FIELD_handles(name) struct proto_handles name;
#define UCM_FIELD_planes(name) struct proto_planes name;
#define UCM_FIELD(m, kind, name, need, min, max) UCM_FIELD_##kind(name)

struct msg_handle {
    UCM_MSG_HANDLE(UCM_FIELD, handle)
};
struct msg_plane {
    UCM_MSG_PLANE(UCM_FIELD, plane)
};
struct proto_handles {
    const struct msg_handle *p;
    uint32_t n;
};
struct proto_planes {
    const struct msg_plane *p;
    uint32_t n;
};

/* S(struct suffix, list): every message that a method table names. */
#define UCM_MESSAGES(S)                                                                            \
    S(hello, UCM_MSG_HELLO)                                                                        \
    S(hello_r, UCM_MSG_HELLO_R)                                                                    \
    S(ns_open, UCM_MSG_NS_OPEN)                                                                    \
    S(ns_open_r, UCM_MSG_NS_OPEN_R)                                                                \
    S(region_register, UCM_MSG_REGION_REGISTER)                                                    \
    S(region, UCM_MSG_REGION)                                                                      \
    S(challenge_r, UCM_MSG_CHALLENGE_R)                                                            \
    S(ring_register, UCM_MSG_RING_REGISTER)                                                        \
    S(ring, UCM_MSG_RING)                                                                          \
    S(lookup, UCM_MSG_LOOKUP)                                                                      \
    S(lookup_r, UCM_MSG_LOOKUP_R)                                                                  \
    S(release, UCM_MSG_RELEASE)                                                                    \
    S(load, UCM_MSG_LOAD)                                                                          \
    S(progress, UCM_MSG_PROGRESS)                                                                  \
    S(dump, UCM_MSG_DUMP)                                                                          \
    S(prefetch, UCM_MSG_PREFETCH)                                                                  \
    S(blocks_r, UCM_MSG_BLOCKS_R)                                                                  \
    S(fetch, UCM_MSG_FETCH)                                                                        \
    S(fetch_r, UCM_MSG_FETCH_R)                                                                    \
    S(cancel, UCM_MSG_CANCEL)                                                                      \
    S(cancel_r, UCM_MSG_CANCEL_R)                                                                  \
    S(keys, UCM_MSG_KEYS)                                                                          \
    S(evict, UCM_MSG_EVICT)                                                                        \
    S(count_r, UCM_MSG_COUNT_R)                                                                    \
    S(ls, UCM_MSG_LS)                                                                              \
    S(key, UCM_MSG_KEY)                                                                            \
    S(verify_r, UCM_MSG_VERIFY_R)                                                                  \
    S(collect, UCM_MSG_COLLECT)                                                                    \
    S(collect_r, UCM_MSG_COLLECT_R)                                                                \
    S(bypass, UCM_MSG_BYPASS)                                                                      \
    S(key_reload, UCM_MSG_KEY_RELOAD)                                                              \
    S(tenant_set, UCM_MSG_TENANT_SET)                                                              \
    S(tenant, UCM_MSG_TENANT)                                                                      \
    S(page, UCM_MSG_PAGE)                                                                          \
    S(trace, UCM_MSG_TRACE)                                                                        \
    S(digest_open, UCM_MSG_DIGEST_OPEN)                                                            \
    S(digest_open_r, UCM_MSG_DIGEST_OPEN_R)                                                        \
    S(digest_build, UCM_MSG_DIGEST_BUILD)                                                          \
    S(chain_open, UCM_MSG_CHAIN_OPEN)                                                              \
    S(chain, UCM_MSG_CHAIN)                                                                        \
    S(chain_append, UCM_MSG_CHAIN_APPEND)                                                          \
    S(chain_append_r, UCM_MSG_CHAIN_APPEND_R)                                                      \
    S(select, UCM_MSG_SELECT)                                                                      \
    S(select_r, UCM_MSG_SELECT_R)                                                                  \
    S(chain_prefetch, UCM_MSG_CHAIN_PREFETCH)                                                      \
    S(encoding_open, UCM_MSG_ENCODING_OPEN)                                                        \
    S(encoding_open_r, UCM_MSG_ENCODING_OPEN_R)                                                    \
    S(window_open, UCM_MSG_WINDOW_OPEN)                                                            \
    S(window_open_r, UCM_MSG_WINDOW_OPEN_R)                                                        \
    S(window, UCM_MSG_WINDOW)                                                                      \
    S(window_pin, UCM_MSG_WINDOW_PIN)                                                              \
    S(window_pin_r, UCM_MSG_WINDOW_PIN_R)                                                          \
    S(window_unpin, UCM_MSG_WINDOW_UNPIN)                                                          \
    S(window_release, UCM_MSG_WINDOW_RELEASE)                                                      \
    S(window_revoke, UCM_MSG_WINDOW_REVOKE)                                                        \
    S(hints_open, UCM_MSG_HINTS_OPEN)                                                              \
    S(hints_open_r, UCM_MSG_HINTS_OPEN_R)                                                          \
    S(load_prefix, UCM_MSG_LOAD_PREFIX)                                                            \
    S(events, UCM_MSG_EVENTS)                                                                      \
    S(events_describe, UCM_MSG_EVENTS_DESCRIBE)

#define S(suffix, list)                                                                            \
    struct msg_##suffix {                                                                          \
        list(UCM_FIELD, suffix)                                                                    \
    };
UCM_MESSAGES(S)
#undef S
#undef UCM_FIELD

#endif
