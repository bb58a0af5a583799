/* Every message of the wire, declared once, here and in proto/features/. From each list come a C
 * struct, an encoder and a decoder (proto.h), so client and daemon cannot disagree. From the
 * comments in front of the lists `make docs` writes docs/methods.md, and fails where a method,
 * field or value has no meaning. Their form:
 *
 * - "Method NAME." and what it does: sentences, in paragraphs. It stands in front of the method's
 *   parameters, or alone. "Callers:" names who may call it, if not every client may; "Errors:" what
 *   it answers besides the errors that every method may give.
 * - "NAME: meaning." for each field of the list that follows, but those to which "Common fields."
 *   gives a meaning that fits. "plain" for a meaning: the name and the type say it.
 * - "Result of METHOD." describes a result that no list has: "NAME, TYPE: meaning." for each field
 *   ("common" for that of "Common fields."), and below "In NAME:" for each field of a map in the
 *   array NAME.
 * - "Notification NAME of METHOD." and "Values of FIELD." before a notification and an enum.
 *
 * A meaning goes on in indented lines.
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
#include <string.h>

#define UCM_KEYS_BYTES ((uint64_t)UCM_MAX_KEYS * UCM_MAX_KEY_BYTES)
#define UCM_BLOCKS_BYTES ((uint64_t)UCM_MAX_KEYS * 4)
#define UCM_U32 UINT32_MAX
#define UCM_TIMEOUT_MS 3600000 /* an hour */
#define UCM_TRACE_MS 86400000  /* a day */

/* ---- parts of messages ---- */

/* Common fields. A field without a meaning of its own has this one.
 * ns: from `namespace.open`, `encoding.open` or `summary.open`.
 * fingerprint: docs/protocol.md, "Fingerprint".
 * instance: random at each start of the daemon. A change voids all numbers.
 * region: from `region.register`.
 * sequence: from `sequence.open`.
 * mapping: from `mapping.open`.
 * keys: `key_bytes` each, concatenated.
 * key: of `key_bytes`.
 * layer: first layer, from 0.
 * layers: how many; 0: all from `layer` on.
 * part: the first.
 * parts: how many; 0: all from `part` on.
 * first: a block's place in the sequence.
 * priority: higher first.
 * timeout_ms: since the daemon read the request; 0: its default (30 s).
 * gpu_busy: the GPU computes, so copies leave gaps for 0.3 s, or until the region's next load or
 *   dump.
 * request: the engine's id of its request, for `trace`.
 * tenant: its name.
 * cursor: 0: the first page.
 * next: `cursor` of the next page.
 * limit: entries of a page; 0: the daemon's choice.
 * ready: published parts.
 * complete: all parts are published.
 * pinned: an operator pinned it.
 * leases: leases and requests that keep the block. */

/* In handles:
 * kind: 0 (cpu): `fd` is a memfd; 1: `ipc`, proven by `region.challenge`; 2: `fd` is of
 *   `cuMemExportToShareableHandle`.
 * bytes: how far planes may reach; kind 1: at least 16.
 * offset: of the start; kind 1: from the allocation's base.
 * ipc: a `cudaIpcMemHandle_t`.
 * fd: place among the frame's descriptors. */
#define UCM_MSG_HANDLE(F, m)                                                                       \
    F(m, u64, kind, REQ, 0, 2)                                                                     \
    F(m, u64, bytes, REQ, 1, UINT64_MAX / 2)                                                       \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, bin, ipc, OPT, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                                \
    F(m, u64, fd, OPT, 0, UCM_MAX_FRAME_FDS - 1)

/* `kind` in `handles`. */
enum ucm_handle_kind {
    /* cpu: `fd` is a memfd with `F_SEAL_SHRINK`. */
    UCM_HANDLE_MEMFD = 0,
    /* cuda: `ipc` is from `cudaIpcGetMemHandle`, and proven (`region.challenge`). It leads to the
     * base of the allocation, from which `offset` counts. */
    UCM_HANDLE_CUDA_IPC = 1,
    /* cuda: `fd` is a POSIX descriptor of `cuMemExportToShareableHandle`. */
    UCM_HANDLE_CUDA_FD = 2,
};

/* In planes: block b is the `block_bytes` bytes at handle + `offset` + b * `stride`.
 * handle: index in `handles`.
 * offset: from the handle's start to block 0.
 * stride: from a block to the next; at least `block_bytes`.
 * block_bytes: of this plane in one block.
 * layer: from 0. */
#define UCM_MSG_PLANE(F, m)                                                                        \
    F(m, u64, handle, OPT, 0, UCM_MAX_HANDLES - 1)                                                 \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, u64, stride, REQ, 1, UINT64_MAX / 2)                                                      \
    F(m, u64, block_bytes, REQ, 1, UINT32_MAX)                                                     \
    F(m, u64, layer, OPT, 0, UCM_MAX_LAYERS - 1)

/* ---- requests and their results ---- */

/* Method hello. Agrees on the highest common version, and answers the connection's limits. It is
 * the first request, and may be repeated.
 * Errors: UNSUPPORTED: no common version.
 * version_min: plain.
 * version_max: not below `version_min`.
 * client: for operators, e.g. `vllm-0`. */
#define UCM_MSG_HELLO(F, m)                                                                        \
    F(m, u64, version_min, REQ, 1, UCM_U32)                                                        \
    F(m, u64, version_max, REQ, 1, UCM_U32)                                                        \
    F(m, str, client, REQ, 1, UCM_MAX_NAME_BYTES)

/* version: spoken from now on.
 * server: its name and version.
 * tenant: the caller's.
 * admin: the caller is an operator.
 * max_frame_bytes: of a body.
 * max_keys: of a request.
 * max_requests: under way.
 * max_regions: plain.
 * max_leases: plain.
 * max_lease_ms: cuts longer leases.
 * max_timeout_ms: bounds `timeout_ms`. */
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
    F(m, u64, max_timeout_ms, REQ, 1, UCM_U32)

/* Method namespace.open. Opens a namespace for this connection. At a limit, it replaces the least
 * recently used namespace that is not open and holds no blocks.
 * Errors: INVALID: a part is too large for the arena; DENIED: the tenant is not the caller's; BUSY:
 *   too many are open or exist.
 * tenant: absent: the caller's.
 * model: plain.
 * revision: of weights, adapters.
 * dtype: of the KV, e.g. `bf16`, `fp8_e4m3`.
 * layout: order of a block's bytes, with a version: `nhd/1`.
 * block_tokens: plain.
 * key_bytes: plain.
 * parts: ranks with a slice of each block; MLA: 1.
 * layers: of each part, 1 to 1024: one number, or `parts` numbers.
 * layer_bytes: of one layer of one part.
 * salt: anything else that separates namespaces.
 * durability: of dumps that name none: 0 DRAM, 1 NVMe. Each open sets it. */
#define UCM_MSG_NS_OPEN(F, m)                                                                      \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, str, model, REQ, 1, UCM_MAX_NAME_BYTES)                                                   \
    F(m, str, revision, OPT, 0, UCM_MAX_NAME_BYTES)                                                \
    F(m, str, dtype, REQ, 1, UCM_MAX_NAME_BYTES)                                                   \
    F(m, str, layout, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, block_tokens, REQ, 1, 1u << 20)                                                      \
    F(m, u64, key_bytes, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES)                                \
    F(m, u64, parts, REQ, 1, UCM_MAX_PARTS)                                                        \
    F(m, u32s, layers, REQ, 1, UCM_MAX_PARTS)                                                      \
    F(m, u64, layer_bytes, REQ, 1, 1u << 28)                                                       \
    F(m, bin, salt, OPT, 0, UCM_MAX_SALT_BYTES)                                                    \
    F(m, u64, durability, OPT, 0, 1)

/* A namespace. */
#define UCM_MSG_NS_OPEN_R(F, m)                                                                    \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, fingerprint, REQ, UCM_FINGERPRINT_BYTES, UCM_FINGERPRINT_BYTES)

/* Method region.register. Registers memory for one part of each block, to load into and dump from.
 *
 * Planes are sorted by layer. The bytes of a layer are the fragments of its planes, in list order;
 * they add up to `layer_bytes`. Blocks end inside their handle; no two fragments share a byte. A
 * region may leave layers out; then `load` and `dump` name the layers that it has. Planes of an
 * encoded namespace hold raw KV.
 *
 * With `block_pool` the region is a GPU block pool for `gather` alone: each of `blocks` entries
 * takes one layer of any block. The planes are those of one layer, with `layer` 0.
 * Errors: INVALID: handles or planes are wrong; DEVICE: a handle can't be opened; DENIED: a handle
 *   of kind 1 without its proof (`region.challenge`); BUSY: the connection has `max_regions`.
 * part: the worker's, from 0.
 * blocks: block ids are below this.
 * device: `cpu` or `cuda`.
 * gpu: with `cuda`: the GPU's UUID (`cuDeviceGetUuid`).
 * handles: plain.
 * planes: plain.
 * ring_region: its number in the staging ring's orders; 0: never staged.
 * block_pool: plain.
 * rope: of K in a layer: offset of its first byte; rows; channels of a row; first rotary channel;
 *   how many rotary channels; tokens of a head in a row (absent: 1).
 * rope_dtype: `f32`, `f16`, `bf16` or `fp8_e4m3`.
 * rope_interleaved: pairs are neighbours; else one of each half of the rotary part.
 * rope_base: the rotary base, above 1.
 * rope_scaling: `default` (or absent), `linear`, `dynamic`, `yarn`, `llama3`.
 * rope_factor: all scaling but `default`: at least 1.
 * rope_trained: `dynamic`, `yarn`, `llama3`: tokens trained for before scaling.
 * rope_fast: `yarn`: beta_fast; `llama3`: high_freq_factor.
 * rope_slow: `yarn`: beta_slow; `llama3`: low_freq_factor.
 * rope_whole: `yarn`: round the ramp's ends to whole pairs. */
#define UCM_MSG_REGION_REGISTER(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, blocks, REQ, 1, UCM_U32)                                                             \
    F(m, str, device, REQ, 3, 16)                                                                  \
    F(m, bin, gpu, OPT, UCM_UUID_BYTES, UCM_UUID_BYTES)                                            \
    F(m, handles, handles, REQ, 1, UCM_MAX_HANDLES)                                                \
    F(m, planes, planes, REQ, 1, UCM_MAX_PLANES)                                                   \
    F(m, u64, ring_region, OPT, 0, UCM_U32)                                                        \
    F(m, flag, block_pool, OPT, 0, 0)                                                              \
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

/* Method region.unregister. Ends a region and its loads, dumps and gathers. Free the memory only
 * after the answer.
 * Errors: NOT_FOUND: no such region. */
#define UCM_MSG_REGION(F, m) F(m, u64, region, REQ, 1, UCM_U32)

/* Method region.challenge. Answers a nonce to prove that CUDA memory is the client's own. Before
 * each `region.register` with handles of kind 1 and each `ring.register`:
 *
 * 1. Call `region.challenge`.
 * 2. Save the 16 bytes at each such handle's `offset`. Write the nonce over them, and wait until it
 *    is in GPU memory.
 * 3. Send the registration.
 * 4. After its answer restore the bytes, in reverse order.
 *
 * A nonce serves the connection's next such registration, within 10 s. Begin handles at unused
 * blocks, so that no copy sees the nonce.
 * nonce: random. */
#define UCM_MSG_CHALLENGE_R(F, m) F(m, bin, nonce, REQ, UCM_NONCE_BYTES, UCM_NONCE_BYTES)

/* Method ring.register. Registers a staging ring: entries of GPU memory that copies pass through,
 * and shared memory for orders (docs/design/mappings.md, "Staging rings"). A connection has one
 * ring for each GPU, for regions whose `ring_region` is not 0.
 * Errors: DEVICE: the memory can't be mapped, or the worker's process is invisible; BUSY: there is
 *   a ring on that GPU, or in that memory; DENIED: no proof (`region.challenge`).
 * gpu: as in `region.register`.
 * ipc: a `cudaIpcMemHandle_t`.
 * offset: of the first entry in the allocation.
 * entry_bytes: a multiple of 4096.
 * entries: one after another.
 * fd: place among the frame's descriptors: a memfd of 139,264 zero bytes, with `F_SEAL_SHRINK` and
 *   `F_SEAL_GROW`. */
#define UCM_MSG_RING_REGISTER(F, m)                                                                \
    F(m, bin, gpu, REQ, UCM_UUID_BYTES, UCM_UUID_BYTES)                                            \
    F(m, bin, ipc, REQ, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                                \
    F(m, u64, offset, OPT, 0, UINT64_MAX / 2)                                                      \
    F(m, u64, entry_bytes, REQ, 1u << 16, 1u << 26)                                                \
    F(m, u64, entries, REQ, 2, UCM_MAX_STAGING_ENTRIES)                                            \
    F(m, u64, fd, OPT, 0, UCM_MAX_FRAME_FDS - 1)

/* Method ring.unregister. Ends a staging ring. Serve orders until the answer.
 * ring: from `ring.register`. */
#define UCM_MSG_RING(F, m) F(m, u64, ring, REQ, 1, UCM_U32)

/* Method lookup. Says which blocks are complete. Without `per_key` it counts hits from the first
 * key to the first miss: the cached prefix.
 *
 * The daemon asks the shared tier for keys that this host lacks. What is unknown after `wait_ms`,
 * or after a cancel, is a miss. For a prefix it asks for some keys only, and takes keys between two
 * found ones as found. It does not ask if the connection has `max_requests` under way.
 *
 * With `wait_mode` 1 the daemon answers at once, with `pending` while it asks the shared tier.
 * Repeat the same keys in order until `pending` is absent. The daemon keeps the shared tier's
 * answer for a second. An answer with `pending` takes no lease and counts in no hit rate. Beyond 64
 * such searches of a connection, the daemon does not ask.
 * Errors: BUSY: the connection has `max_leases`.
 * keys: `key_bytes` each, in the sequence's order.
 * per_key: look at each key by itself.
 * lease_ms: lease hits for so long; 0: no lease.
 * shared: tell apart what only the shared tier has.
 * wait_ms: 0: `shared.lookup_timeout`, with `wait_mode` 1 `shared.timeout`.
 * wait_mode: 0 wait for the shared tier, 1 see above, 2 don't ask it. */
#define UCM_MSG_LOOKUP(F, m)                                                                       \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, flag, per_key, OPT, 0, 0)                                                                 \
    F(m, u64, lease_ms, OPT, 0, UCM_U32)                                                           \
    F(m, flag, shared, OPT, 0, 0)                                                                  \
    F(m, u64, wait_ms, OPT, 0, UCM_TIMEOUT_MS)                                                     \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, u64, wait_mode, OPT, 0, UCM_LOOKUP_HERE)

/* hits: blocks found.
 * dram: of these, wholly in DRAM.
 * lease: absent: not asked for, or no hits.
 * status: with `per_key`: one byte a key, enum ucm_lookup_status.
 * shared: with `shared`: hits of status 3.
 * pending: look the same keys up again. */
#define UCM_MSG_LOOKUP_R(F, m)                                                                     \
    F(m, u64, hits, REQ, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, dram, OPT, 0, UCM_MAX_KEYS)                                                          \
    F(m, u64, lease, OPT, 0, UCM_U32)                                                              \
    F(m, bin, status, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, u64, shared, OPT, 0, UCM_MAX_KEYS)                                                        \
    F(m, flag, pending, OPT, 0, 0)

/* Method release. Ends a lease early. An unknown lease is no error.
 * lease: from `lookup`. */
#define UCM_MSG_RELEASE(F, m) F(m, u64, lease, REQ, 1, UCM_U32)

/* keys: `key_bytes` each, in the sequence's order.
 * blocks: u32 a key: its block of the region, each at most once.
 * progress_interval: `progress` after every so many layers; 0: never. */
#define UCM_LOADED_FIELDS(F, m)                                                                    \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, bin, blocks, REQ, 4, UCM_BLOCKS_BYTES)                                                    \
    F(m, u64, layer, OPT, 0, UCM_MAX_LAYERS - 1)                                                   \
    F(m, u64, layers, OPT, 0, UCM_MAX_LAYERS)                                                      \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)                                                  \
    F(m, u64, progress_interval, OPT, 0, UCM_MAX_LAYERS)                                           \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, flag, gpu_busy, OPT, 0, 0)

/* Method load. Copies blocks into a region, key i to block `blocks[i]`, and answers when every key
 * has its status. Until then do not touch these blocks. Afterwards only those with status 0 hold
 * the requested bytes.
 *
 * With `progress_interval` the daemon copies that many layers of all blocks at a time, and sends
 * `progress` after each step. The first comes when all blocks are in DRAM, or later if they exceed
 * half of the daemon's DRAM.
 * lease: ends with this load; 0: none.
 * shifts: five numbers a run of keys (docs/protocol.md, "Position shifts"); absent: K stays. */
#define UCM_MSG_LOAD(F, m)                                                                         \
    UCM_LOADED_FIELDS(F, m)                                                                        \
    F(m, u64, lease, OPT, 0, UCM_U32)                                                              \
    F(m, u32s, shifts, OPT, 0, UCM_MAX_SHIFTS *UCM_SHIFT_NUMBERS)

/* Method load_prefix. Looks up without `per_key`, leases and loads in one request. Keys from the
 * first miss on have status 1. The request counts as a load and, for part 0, as a lookup.
 * wait_ms: as in `lookup`. */
#define UCM_MSG_LOAD_PREFIX(F, m)                                                                  \
    UCM_LOADED_FIELDS(F, m)                                                                        \
    F(m, u64, wait_ms, OPT, 0, UCM_TIMEOUT_MS)

/* Notification progress of load. Layers have arrived. A notification may report several steps; only
 * the answer reports the last.
 * msgid: plain.
 * layers: from `layer` on, in every block with status 0.
 * status: one byte a key; absent: unchanged, at first all 0. */
#define UCM_MSG_PROGRESS(F, m)                                                                     \
    F(m, u64, msgid, REQ, 0, UCM_U32)                                                              \
    F(m, u64, layers, REQ, 1, UCM_MAX_LAYERS)                                                      \
    F(m, bin, status, OPT, 0, UCM_MAX_KEYS)
#define UCM_PROGRESS "progress"

/* Method dump. Stores blocks of a region, and answers when every key has its status. Until then do
 * not write to them. OK means in DRAM. With durability 1, OK and EXISTS mean on stable storage;
 * else the status is 8. The dump of a part's last layer answers for the whole part.
 *
 * Dump after the worker's writes are done, or record `cuda_event` after the last write: the daemon
 * waits for it. If the daemon can't open the event, or the worker has another user, PID namespace
 * or `/dev/shm`, the status is 7: wait for the event, then dump without it. An event that was never
 * recorded counts as signalled.
 *
 * Dump each layer once, in any order, on one connection; the last publishes the part. A dump of all
 * layers begins the part again unless some of it is being copied.
 * blocks: u32 a key: its block of the region.
 * cuda_event: a `cudaIpcEventHandle_t`; on `cpu`: status 7.
 * priority: higher first; at the same priority, loads before dumps.
 * durability: 0 as in `namespace.open`, 1 on stable storage, 2 in DRAM.
 * raw: store raw, in the encoded namespace's base. */
#define UCM_MSG_DUMP(F, m)                                                                         \
    F(m, u64, region, REQ, 1, UCM_U32)                                                             \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, bin, blocks, REQ, 4, UCM_BLOCKS_BYTES)                                                    \
    F(m, u64, layer, OPT, 0, UCM_MAX_LAYERS - 1)                                                   \
    F(m, u64, layers, OPT, 0, UCM_MAX_LAYERS)                                                      \
    F(m, bin, cuda_event, OPT, UCM_MAX_HANDLE_BYTES, UCM_MAX_HANDLE_BYTES)                         \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)                                                  \
    F(m, u64, durability, OPT, 0, 2)                                                               \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, flag, raw, OPT, 0, 0)                                                                     \
    F(m, flag, gpu_busy, OPT, 0, 0)

/* `durability` in `dump`. */
enum ucm_dump_durability {
    UCM_DURABILITY_DEFAULT = 0, /* as this connection opened the namespace */
    UCM_DURABILITY_NVME = 1,    /* answered when the bytes are on stable storage */
    UCM_DURABILITY_DRAM = 2,    /* answered when they are in DRAM */
};

/* Method prefetch. Brings complete blocks into DRAM, where they may be evicted again. */
#define UCM_MSG_PREFETCH(F, m)                                                                     \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_KEYS_BYTES)                                        \
    F(m, u64, part, OPT, 0, UCM_MAX_PARTS - 1)                                                     \
    F(m, u64, parts, OPT, 0, UCM_MAX_PARTS)                                                        \
    F(m, u64, priority, OPT, 0, 7)                                                                 \
    F(m, u64, timeout_ms, OPT, 0, UCM_TIMEOUT_MS)                                                  \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)

/* status: one byte a key: enum ucm_block_status.
 * bytes: plain. */
#define UCM_MSG_BLOCKS_R(F, m)                                                                     \
    F(m, bin, status, REQ, 1, UCM_MAX_KEYS)                                                        \
    F(m, u64, bytes, OPT, 0, UINT64_MAX)

/* Method cancel. Stops a request of this connection: a waiting `lookup`, or one that moves, builds
 * or selects blocks. Blocks not moved have status 6; a `select` answers CANCELLED. Copies that have
 * begun finish.
 * msgid: of that request. */
#define UCM_MSG_CANCEL(F, m) F(m, u64, msgid, REQ, 0, UCM_U32)

/* cancelled: false: no such request. */
#define UCM_MSG_CANCEL_R(F, m) F(m, flag, cancelled, OPT, 0, 0)

/* M(NAME, name, "method", params, result): the last two by the suffix that UCM_MESSAGES gives them,
 * or none. free_map: any map; the comment "Result of METHOD." lists its fields, which may become
 * more within a protocol version. */
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
    M(SHARED_GC, shared_gc, "shared.gc", collect, collect_r)                                       \
    M(TRACE, trace, "trace", trace, free_map)                                                      \
    M(SUMMARY_OPEN, summary_open, "summary.open", summary_open, summary_open_r)                    \
    M(SUMMARY_BUILD, summary_build, "summary.build", summary_build, blocks_r)                      \
    M(SEQUENCE_OPEN, sequence_open, "sequence.open", sequence_open, sequence)                      \
    M(SEQUENCE_APPEND, sequence_append, "sequence.append", sequence_append, sequence_append_r)     \
    M(SEQUENCE_CLOSE, sequence_close, "sequence.close", sequence, none)                            \
    M(SELECT, select, "select", select, select_r)                                                  \
    M(SEQUENCE_PREFETCH, sequence_prefetch, "sequence.prefetch", sequence_prefetch, blocks_r)      \
    M(ENCODING_OPEN, encoding_open, "encoding.open", encoding_open, encoding_open_r)               \
    M(MAPPING_OPEN, mapping_open, "mapping.open", mapping_open, mapping_open_r)                    \
    M(MAPPING_REF, mapping_ref, "mapping.ref", mapping_ref, mapping_ref_r)                         \
    M(MAPPING_UNREF, mapping_unref, "mapping.unref", mapping_unref, none)                          \
    M(MAPPING_RELEASE, mapping_release, "mapping.release", mapping_release, none)                  \
    M(MAPPING_CLOSE, mapping_close, "mapping.close", mapping, none)                                \
    M(CONFIG_RELOAD, config_reload, "config.reload", none, free_map)                               \
    M(CONFIG_GET, config_get, "config.get", none, free_map)                                        \
    M(BYPASS, bypass, "bypass", bypass, free_map)                                                  \
    M(GATHER, gather, "gather", gather, gather_r)                                                  \
    M(LOOKUP_TABLE_OPEN, lookup_table_open, "lookup_table.open", lookup_table_open,                \
      lookup_table_open_r)                                                                         \
    M(LOAD_PREFIX, load_prefix, "load_prefix", load_prefix, blocks_r)                              \
    M(ENCRYPTION_KEY_LIST, encryption_key_list, "encryption_key.list", none, free_map)             \
    M(ENCRYPTION_KEY_RELOAD, encryption_key_reload, "encryption_key.reload", key_reload, free_map) \
    M(TENANT_LIST, tenant_list, "tenant.list", page, free_map)                                     \
    M(TENANT_SET, tenant_set, "tenant.set", tenant_set, none)                                      \
    M(TENANT_RESET, tenant_reset, "tenant.reset", tenant, none)                                    \
    M(EVENTS, events, "events", events, free_map)                                                  \
    M(EVENTS_LIST, events_list, "events.list", ls, free_map)                                       \
    M(EVENTS_METADATA, events_metadata, "events.metadata", events_metadata, none)                  \
    M(REGION_CHALLENGE, region_challenge, "region.challenge", none, challenge_r)

enum ucm_method {
#define M(NAME, name, text, params, result) UCM_METHOD_##NAME,
    UCM_METHODS(M)
#undef M
        UCM_METHOD_COUNT
};

/* `wait_mode` in `lookup`. */
enum ucm_lookup_wait_mode {
    UCM_LOOKUP_WAIT = 0,  /* answer when the shared tier has answered */
    UCM_LOOKUP_LATER = 1, /* answer at once; `pending` says that the shared tier is being asked */
    UCM_LOOKUP_HERE = 2,  /* answer at once, and don't ask the shared tier: the client gives up */
};

/* Values of `status` in `lookup`. */
enum ucm_lookup_status {
    UCM_LOOKUP_MISS = 0, /* not cached, or not complete */
    UCM_LOOKUP_DRAM = 1, /* every part lies in DRAM */
    UCM_LOOKUP_NVME = 2, /* a part must be read from NVMe */
    /* a part must be read from the shared tier; 2 without `shared` */
    UCM_LOOKUP_SHARED = 3,
};

/* Values of `status` of requests that move blocks. */
enum ucm_block_status {
    UCM_BLOCK_OK = 0,   /* moved */
    UCM_BLOCK_MISS = 1, /* not cached, not complete, or the shared tier was late */
    /* The read or the checksum failed, and that copy is gone: treat it as a miss. */
    UCM_BLOCK_FAILED = 2,
    /* DRAM is full of blocks in use, an encryption key is still being read, a prefetch has read
     * half of DRAM, or stores are bypassed. */
    UCM_BLOCK_NO_ROOM = 3,
    UCM_BLOCK_EXISTS = 4, /* dump: stored already */
    /* Dump: another connection stores this part, one of these layers was dumped before, or the
     * block was evicted and is still in use. */
    UCM_BLOCK_IN_PROGRESS = 5,
    UCM_BLOCK_CANCELLED = 6, /* not moved before the cancel or the timeout */
    UCM_BLOCK_DEVICE = 7,    /* the copy failed; a dumped block is not stored */
    /* Durable dump: stored, but not known to be on stable storage, or an earlier run's copy was
     * damaged and is gone. */
    UCM_BLOCK_NOT_DURABLE = 8,
    UCM_BLOCK_UNFIT = 9, /* dump: `lossless` can't hold these bytes; dump again with `raw` */
};

/* ---- the structs ---- */

/* Views into the frame they were decoded from (or the caller's memory, when encoding). */
struct proto_str {
    const char *p;
    uint32_t n;
};
static inline bool proto_str_is(struct proto_str s, const char *text)
{
    return s.n == strlen(text) && memcmp(s.p, text, s.n) == 0;
}
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
    S(gather, UCM_MSG_GATHER)                                                                      \
    S(gather_r, UCM_MSG_GATHER_R)                                                                  \
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
    S(summary_open, UCM_MSG_SUMMARY_OPEN)                                                          \
    S(summary_open_r, UCM_MSG_SUMMARY_OPEN_R)                                                      \
    S(summary_build, UCM_MSG_SUMMARY_BUILD)                                                        \
    S(sequence_open, UCM_MSG_SEQUENCE_OPEN)                                                        \
    S(sequence, UCM_MSG_SEQUENCE)                                                                  \
    S(sequence_append, UCM_MSG_SEQUENCE_APPEND)                                                    \
    S(sequence_append_r, UCM_MSG_SEQUENCE_APPEND_R)                                                \
    S(select, UCM_MSG_SELECT)                                                                      \
    S(select_r, UCM_MSG_SELECT_R)                                                                  \
    S(sequence_prefetch, UCM_MSG_SEQUENCE_PREFETCH)                                                \
    S(encoding_open, UCM_MSG_ENCODING_OPEN)                                                        \
    S(encoding_open_r, UCM_MSG_ENCODING_OPEN_R)                                                    \
    S(mapping_open, UCM_MSG_MAPPING_OPEN)                                                          \
    S(mapping_open_r, UCM_MSG_MAPPING_OPEN_R)                                                      \
    S(mapping, UCM_MSG_MAPPING)                                                                    \
    S(mapping_ref, UCM_MSG_MAPPING_REF)                                                            \
    S(mapping_ref_r, UCM_MSG_MAPPING_REF_R)                                                        \
    S(mapping_unref, UCM_MSG_MAPPING_UNREF)                                                        \
    S(mapping_release, UCM_MSG_MAPPING_RELEASE)                                                    \
    S(mapping_revoke, UCM_MSG_MAPPING_REVOKE)                                                      \
    S(lookup_table_open, UCM_MSG_LOOKUP_TABLE_OPEN)                                                \
    S(lookup_table_open_r, UCM_MSG_LOOKUP_TABLE_OPEN_R)                                            \
    S(load_prefix, UCM_MSG_LOAD_PREFIX)                                                            \
    S(events, UCM_MSG_EVENTS)                                                                      \
    S(events_metadata, UCM_MSG_EVENTS_METADATA)

#define S(suffix, list)                                                                            \
    struct msg_##suffix {                                                                          \
        list(UCM_FIELD, suffix)                                                                    \
    };
UCM_MESSAGES(S)
#undef S
#undef UCM_FIELD

#endif
