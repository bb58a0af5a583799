/* The messages of operators, and of those that follow cache events. The form is that of messages.h,
 * which includes this. */
#ifndef UCM_PROTO_FEATURES_OPERATORS_H
#define UCM_PROTO_FEATURES_OPERATORS_H

#include "proto/limits.h"

/* Method pin. Keeps blocks from being evicted.
 * Callers: operators.
 * Errors: CANCELLED, DEADLINE, SHUTDOWN: it was stopped, and may have changed some. */

/* Method unpin. Lets pinned blocks be evicted again.
 * Callers: operators.
 * Errors: as of `pin`. */

/* Method namespace.purge. Drops blocks from every tier, pinned ones too; from the shared tier for
 * all hosts. Blocks in use count as busy: no later request gets them, and they go with their last
 * reference. Without `keys` none comes back after a restart; blocks purged by key may. Block
 * summaries lie in namespaces of their own: purge these too.
 * Callers: the namespace's tenant.
 * Errors: IO: storage failed to record it, or a root is down or lists no files: blocks may come
 *   back; CANCELLED, DEADLINE, SHUTDOWN: it was stopped, and may have dropped some. */

/* ns: from `namespace.open` or `namespace.list`.
 * keys: `key_bytes` each, concatenated; absent: every block of the namespace. */
#define UCM_MSG_KEYS(F, m)                                                                         \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)

/* Method evict. Drops blocks from one tier, or from all. From the shared tier it drops them for all
 * hosts, also blocks that this host does not know, and answers when their files are gone from every
 * writable root. Pinned blocks stay, and count as busy. So do blocks that are leased, read or
 * written, with one exception: with `tier` 0 no later request finds them, and they go with their
 * last reference or lease. A block of which no part is published yet stays, and its dump goes on.
 * Callers: the namespace's tenant.
 * Errors: IO: blocks are gone from this host, but some files may be left; CANCELLED, DEADLINE,
 *   SHUTDOWN: it was stopped, and may have dropped some.
 * ns: from `namespace.open` or `namespace.list`.
 * keys: `key_bytes` each, concatenated; absent: every block of the namespace.
 * tier: 0: all; 1: DRAM (a block that lies nowhere else stays, busy); 2: NVMe; 3: shared tier. */
#define UCM_MSG_EVICT(F, m)                                                                        \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, u64, tier, OPT, 0, 3)

/* blocks: how many changed.
 * busy: how many did not: pinned, read, written or leased.
 * missing: how many of the keys are not here. */
#define UCM_MSG_COUNT_R(F, m)                                                                      \
    F(m, u64, blocks, REQ, 0, UINT64_MAX)                                                          \
    F(m, u64, busy, OPT, 0, UINT64_MAX)                                                            \
    F(m, u64, missing, OPT, 0, UINT64_MAX)

/* Method ls. Answers a page of a namespace's blocks, complete or not; at most 1,024. Blocks
 * that are stored or evicted between pages may be missed; none is listed twice.
 * Callers: the namespace's tenant. */

/* Result of ls.
 * blocks, array of map: the page's blocks.
 * next, uint: cursor of the next page; 0 at the end.
 * In blocks:
 * key, bin: the block's key.
 * dram, nvme, shared, uint: how many parts lie in the tier.
 * ready, uint: how many parts are published.
 * complete, bool: all parts are published.
 * pinned, bool: an operator pinned it.
 * leases, uint: leases and requests that keep it. */

/* ns: from `namespace.open` or `namespace.list`.
 * cursor: 0: from the start; else `next` of the page before.
 * limit: blocks of the page at most; 0: the daemon's choice. */
#define UCM_MSG_LS(F, m)                                                                           \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)

/* Method inspect. Answers everything about one block.
 * Callers: the namespace's tenant.
 * Errors: NOT_FOUND: there is no such block. */

/* Result of inspect.
 * key, bin: the block's key.
 * complete, bool: all parts are published.
 * ready, uint: how many parts are published.
 * pinned, bool: an operator pinned it.
 * deleting, bool: evicted while in use: not found any more, goes with its last reference.
 * leases, uint: leases and requests that keep it.
 * heat, uint: 0 (seen once) to 3: how much it deserves to stay.
 * parts, array of map: one for each part.
 * In parts:
 * part, uint: number, from 0.
 * dram, str: `none`, `pending_write` (by a dump), `pending_read` (by a read) or `ready`.
 * nvme, str: `none`, `writing` or `ready`.
 * shared, str: `none`, `unverified` (a lookup took it to be there), `writing` or `ready`.
 * root, uint: of the shared tier, from 1; 0: not known.
 * users, uint: copies, reads and writes under way.
 * loc, uint: where it lies on NVMe; opaque.
 * checksum, uint: XXH3-64 of its bytes, if on NVMe. */

/* ns: from `namespace.open` or `namespace.list`.
 * key: `key_bytes` bytes. */
#define UCM_MSG_KEY(F, m)                                                                          \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, key, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES)

/* Method verify. Reads the parts of a page of blocks from NVMe, at most 8,192, and drops copies
 * that disagree with their checksum.
 * Callers: the namespace's tenant. */

/* checked: parts that were read and agreed.
 * corrupt: parts that did not agree, and were dropped.
 * failed: parts that could not be read.
 * skipped: parts not read: not on NVMe, or in use.
 * next: cursor of the next page; 0 or absent at the end. */
#define UCM_MSG_VERIFY_R(F, m)                                                                     \
    F(m, u64, checked, REQ, 0, UINT64_MAX)                                                         \
    F(m, u64, corrupt, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, failed, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, skipped, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, next, OPT, 0, UINT64_MAX)

/* Method shared.gc. Starts garbage collection of the shared tier's roots: it removes the
 * coldest files of roots above their `capacity`, and temporary files of dead hosts. `stats` shows
 * the outcome.
 * Callers: operators.
 * Errors: UNSUPPORTED: no shared tier, or the root is read-only; NOT_FOUND: no such root.
 * root: from 1, in the order of `stats`; 0: each that takes writes. */
#define UCM_MSG_COLLECT(F, m) F(m, u64, root, OPT, 0, UCM_MAX_ROOTS)

/* roots: how many begin a collection.
 * busy: how many had one under way. */
#define UCM_MSG_COLLECT_R(F, m)                                                                    \
    F(m, u64, roots, REQ, 0, UCM_MAX_ROOTS)                                                        \
    F(m, u64, busy, OPT, 0, UCM_MAX_ROOTS)

/* Method bypass. Takes the cache out of the way in an incident. With loads bypassed, lookups,
 * loads, gathers and prefetches are misses. With stores bypassed, `dump` answers status 3; parts
 * that it has begun are finished. Cached blocks stay. It holds for every connection until it is
 * turned off or the daemon ends. Without `load` and `store` it only lists.
 * Callers: operators.
 * Errors: BUSY: there are 64; NOT_FOUND: nobody is or could be this tenant. */

/* Result of bypass.
 * bypassed, array of map: all that is on now.
 * In bypassed:
 * tenant, str: whose; empty: all.
 * ns, uint: the namespace's number; 0: all of the tenant's, or one that is not known now.
 * fingerprint, bin: only of a namespace.
 * load, store, bool: what is bypassed.
 * ms, uint: for how long. */

/* ns: of this namespace; 0: see `tenant`.
 * tenant: of this tenant; neither: of all.
 * load: enum ucm_bypass.
 * store: enum ucm_bypass. */
#define UCM_MSG_BYPASS(F, m)                                                                       \
    F(m, u64, ns, OPT, 0, UCM_U32)                                                                 \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, load, OPT, 0, 2)                                                                     \
    F(m, u64, store, OPT, 0, 2)

/* Method encryption_key.list. Lists the sources of encryption keys and what they brought; never a
 * key.
 * Callers: operators. */

/* Method encryption_key.reload. Begins to read sources of encryption keys again; `reading` says
 * when that has ended, within 10 s. Keys that the source lacks are forgotten at
 * once; a source that fails changes nothing.
 * Callers: operators.
 * Errors: NOT_FOUND: `encryption.tenants` has no such name. */

/* Result of encryption_key.list, encryption_key.reload.
 * keys, array of map: the sources, in the order of the tenants' names.
 * In keys:
 * tenant, str: whose; `*`: all others'.
 * source, str: as the configuration has it.
 * ids, array of str: the keys' ids, 16 hexadecimal digits each; the last is current. Empty: none.
 * nvme_parts, array of uint: for each of `ids`: parts on NVMe that this key encrypted.
 * nvme_bytes, array of uint: the same in bytes.
 * reading, bool: it is being read.
 * error, str: why the last read failed; empty: it did not. */

/* tenant: this source only; empty: all. */
#define UCM_MSG_KEY_RELOAD(F, m) F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)

/* Method tenant.set. Gives a tenant settings over `tenant_settings` of the configuration, and keeps
 * them over restarts until `tenant.reset`. It answers when they are kept.
 * Callers: operators.
 * Errors: INVALID: a setting is unknown or does not fit, also with what others are guaranteed;
 *   NOT_FOUND: nobody is or could be this tenant; BUSY: another change is being written; IO: in
 *   force, but not kept.
 * tenant: its name; `*`: all, where their own settings say nothing.
 * settings: `KEY=VALUE`, separated by spaces; settings that are not named stay. */
#define UCM_MSG_TENANT_SET(F, m)                                                                   \
    F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, str, settings, REQ, 1, UCM_MAX_SETTINGS_BYTES)

/* Method tenant.reset. Takes back all that `tenant.set` gave the tenant, with the same errors.
 * Callers: operators.
 * tenant: its name, or `*`. */
#define UCM_MSG_TENANT(F, m) F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)

/* Method events. Answers cache events of the tenant after number `since` (docs/events.md). Numbers
 * begin with 1, when somebody first asks. Without later events it waits for one, at most `wait_ms`;
 * not if `since` is beyond the last number.
 * Errors: BUSY: this connection waits already, or there is no memory for another tenant's events;
 *   UNSUPPORTED: no `events.memory`; DENIED: another tenant's, but for operators; NOT_FOUND: no
 *   such tenant. */

/* Result of events.
 * instance, bin: that of `hello`; another instance has other numbers.
 * last, uint: number of the latest event; 0: none.
 * next, uint: `since` of the next request.
 * lost, uint: how many events after `since` are not kept any more.
 * events, array of map: as many as fit, oldest first.
 * In events:
 * number, uint: the event's number.
 * ns, uint: the namespace, as in `namespace.list`.
 * key, bin: the block's key.
 * was, is, uint: status before and after, enum ucm_lookup_status. Equal: metadata came.
 * parent, bin: with `tokens`, of a block with metadata that is found: the key before it; empty: it
 *   begins a sequence.
 * tokens, bin: with `parent`: `block_tokens` token ids, u32 each.
 * lora, str: with `parent`: the adapter; empty: none. */

/* since: last number that the client has; 0: from the oldest that is kept.
 * limit: events at most; 0: 512.
 * wait_ms: 0: answer at once.
 * tenant: for operators; empty: the caller's own.
 * tokens: with block metadata. */
#define UCM_MSG_EVENTS(F, m)                                                                       \
    F(m, u64, since, OPT, 0, UINT64_MAX)                                                           \
    F(m, u64, limit, OPT, 0, 2048)                                                                 \
    F(m, u64, wait_ms, OPT, 0, UCM_TIMEOUT_MS)                                                     \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, flag, tokens, OPT, 0, 0)

/* Method events.list. Answers a page of the namespace's blocks that a lookup would find, with their
 * metadata. A block that is stored or evicted between pages has an event after `last` of the first
 * page.
 * Callers: the namespace's tenant. */

/* Result of events.list.
 * instance, bin: as in `events`.
 * last, uint: as in `events`.
 * next, uint: cursor of the next page; 0 at the end.
 * blocks, array of map: the page's blocks.
 * In blocks:
 * key, bin: the block's key.
 * is, uint: its status, 1 to 3.
 * parent, tokens, bin: of a block with metadata, as in `events`.
 * lora, str: as in `events`. */

/* Method events.metadata. Gives metadata of consecutive blocks of one sequence. They need not be
 * stored yet. `events_metadata_dropped` counts blocks for which there is no memory.
 * Errors: UNSUPPORTED: no `events.memory`.
 * ns: open on this connection.
 * keys: `key_bytes` each, in the order of the sequence; 1024 at most.
 * tokens: `block_tokens` token ids for each key, u32 each, little-endian.
 * parent: the key before the first; empty: the first begins the sequence.
 * lora: the adapter. */
#define UCM_MSG_EVENTS_METADATA(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_METADATA_KEYS *UCM_MAX_KEY_BYTES)              \
    F(m, bin, tokens, REQ, 4, UCM_MAX_FRAME_BYTES / 2)                                             \
    F(m, bin, parent, OPT, 0, UCM_MAX_KEY_BYTES)                                                   \
    F(m, str, lora, OPT, 0, UCM_MAX_NAME_BYTES)

/* Values of `load` and `store` in `bypass`. */
enum ucm_bypass {
    UCM_BYPASS_KEEP = 0, /* as it is */
    UCM_BYPASS_ON = 1,   /* bypass */
    UCM_BYPASS_OFF = 2,  /* bypass no longer */
};

/* Method namespace.list. Answers a page of namespaces: those of the caller's tenant, or all for
 * operators. */

/* Result of namespace.list.
 * namespaces, array of map: the page's namespaces.
 * next, uint: cursor of the next page; 0 or absent at the end.
 * In namespaces:
 * ns, uint: its number.
 * fingerprint, bin: 32 bytes.
 * tenant, model, revision, dtype, layout, str: its identity.
 * block_tokens, key_bytes, parts, layer_bytes, uint: its identity.
 * layers, array of uint: layers of each part.
 * blocks, uint: blocks known, complete or not.
 * dram_bytes, nvme_bytes, uint: what its parts take in each tier.
 * shared_bytes, uint: of parts on the shared tier, known or unverified.
 * lookups, lookup_keys, lookup_hits, uint: counted since the namespace was made in this run.
 * loads, load_bytes, dumps, dump_bytes, uint: of requests that copied something.
 * evicted_blocks, uint: evicted from DRAM to make space.
 * encoding, str: of an encoded namespace; else empty.
 * encoding_version, uint: its version; 0: not encoded.
 * raw_layer_bytes, uint: `layer_bytes` of the raw form.
 * base, uint: its base's number; 0: not known, or not encoded.
 * base_fingerprint, bin: its base's; empty: not encoded. */

/* Method tenant.list. Answers a page of tenants: the caller's own, or for operators all that have a
 * namespace or settings. */

/* Result of tenant.list.
 * tenants, array of map: the page's tenants.
 * next, uint: cursor of the next page; 0 or absent at the end.
 * In tenants:
 * tenant, str: its name.
 * namespaces, blocks, uint: number of each.
 * dram_bytes, uint: slots of its blocks, pending ones too; without shared mappings.
 * nvme_bytes, shared_bytes, uint: of its parts there, the shared tier's as far as this host knows.
 * given_weight, given_namespaces, uint: its `tenant_settings` in force.
 * given_dram_min, given_dram_max, given_nvme_min, given_nvme_max,
 *   given_shared_min, given_shared_max, uint: bytes; 0: none.
 * given_connections, given_requests, given_memory, given_leased, uint: its own bounds; 0: those of
 *   `limits`.
 * bus_contended_bytes, nvme_contended_bytes, shared_contended_bytes, uint: what it was served while
 *   others waited too.
 * bus_fair_share_bytes, nvme_fair_share_bytes, shared_fair_share_bytes, uint: bytes that its weight
 *   entitled it to meanwhile.
 * kept, str: what `tenant.set` gave it. */

/* cursor: 0: from the start; else `next` of the page before.
 * limit: entries of the page at most; 0: the daemon's choice. */
#define UCM_MSG_PAGE(F, m)                                                                         \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)

/* Method trace. Records what requests of all connections wait for. A connection begins a trace,
 * reads its records, each once, and ends it. A trace ends by itself after `limit_ms`, and with its
 * connection. Records wait in a ring of `bytes`; one that does not fit is lost. Times are
 * microseconds since the trace began.
 *
 * Spans are waits: `queue` for the event loop, `lookup` for the index, `shared lookup` for the
 * roots, `slot wait` for DRAM or the device's queue, `read turn` for smaller reads. `NVMe read` and
 * `shared read` include the checksum, `copy` a dump's CUDA event. `durable` ends on stable storage,
 * `back-pressure` with write-back, `answer` at the socket.
 * Callers: operators.
 * Errors: BUSY: another connection traces; NOT_FOUND: this connection began none. */

/* Result of trace.
 * on, bool: records are still being written.
 * more, bool: records are left for another page.
 * written, lost, uint: records since the beginning.
 * records, array of map: the oldest that were not read yet, as many as fit.
 * In records:
 * number, uint: from 1.
 * lost, uint: how many were lost since the record before.
 * method, str: of the request.
 * request, tenant, str: the engine's id, if it sent one; the tenant.
 * uid, pid, uint: of the process that connected.
 * ns, part, n_keys, uint: what it asked for; `gather` counts items in place of keys.
 * start_us, us, uint: when the daemon found the frame; how long until the answer was queued.
 * code, uint: 0, or the error's.
 * ok, bytes, uint: keys found or moved; bytes moved.
 * spans, array of map: what it waited for.
 * keys, bin: with `keys`: all keys, concatenated.
 * per_key, bool: with `keys`: a lookup of keys that are no sequence.
 * block_bytes, block_tokens, uint: with `keys`: of a block of the namespace, all parts.
 * In spans:
 * name, str: one of the spans above.
 * start_us, us, uint: from the first to the last of those that overlapped.
 * count, uint: reads, copies or waits that it stands for. */

/* op: enum ucm_trace_op; the other fields are for a start.
 * keys: keys instead of spans; then only `tenant`, `limit_ms` and `bytes` may be set.
 * slower_us: only requests that took at least this long.
 * request: only requests whose id begins with this.
 * tenant: only requests of this tenant.
 * sample: one in this many of those; 0: each.
 * limit_ms: ends after this long; 0: a minute.
 * bytes: of the ring, at least 65536; 0: 4194304. */
#define UCM_MSG_TRACE(F, m)                                                                        \
    F(m, u64, op, OPT, 0, 2)                                                                       \
    F(m, flag, keys, OPT, 0, 0)                                                                    \
    F(m, u64, slower_us, OPT, 0, UCM_U32)                                                          \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, sample, OPT, 0, UCM_U32)                                                             \
    F(m, u64, limit_ms, OPT, 0, UCM_TRACE_MS)                                                      \
    F(m, u64, bytes, OPT, 0, 1u << 28)

/* Values of `op` in `trace`. */
enum ucm_trace_op {
    UCM_TRACE_READ = 0,  /* a page of records, each once */
    UCM_TRACE_START = 1, /* begin */
    UCM_TRACE_STOP = 2,  /* end */
};

/* Method stats. Answers what the daemon is, and what it has counted since its start. */

/* Result of stats.
 * version, str: of the daemon, e.g. `0.1.0`.
 * instance, bin: 16 bytes, random at each start.
 * commit, options, str: what it was built from, and how.
 * uptime_ms, uint: since the start.
 * pid, uint: of the daemon.
 * health, str: `status` of `health`.
 * recovering, bool: as in `health`.
 * metrics, map: counters and gauges, uint by name (docs/metrics.md).
 * tiers, array of map: the NVMe tier.
 * shared_roots, array of map: roots of the shared tier.
 * devices, array of map: GPUs and the CPU.
 * nodes, array of map: NUMA nodes, where DRAM is spread over them.
 * tenants, array of map: counters of the caller's tenant; for operators, of 64 tenants and `other`.
 * histograms, array of map: durations.
 * reuse, map: hits at other sizes: keys looked up (`references`) and `sampled`; sizes
 *   (`factor_permille`, 1000: today's); `curves`: `tiers` (`dram`, `dram_nvme`), `bytes` today,
 *   `hit_permille` at each size.
 * policy, str: how blocks are chosen for eviction.
 * bypassed, array of map: for the caller's tenant; for operators, all. As in `bypass`.
 * In tiers:
 * name, str: `nvme`.
 * engine, str: how it does I/O: `io_uring` or `threads`.
 * capacity_bytes, used_bytes, uint: its size, and what live parts take.
 * queued, in_flight, uint: operations that wait, and that the device has.
 * recovering, bool: parts of an earlier run may still be found.
 * degraded, bool: it refuses writes, or everything.
 * reason, str: why it is degraded.
 * In shared_roots:
 * name, str: directory or URL, without secrets.
 * backend, str: `directory`, `nfs`, `s3`, `mooncake` or `process`.
 * health, str: `up`; `read-only` or `full`: takes no writes; `down`: not used, checks go on.
 * reason, str: of its last failure.
 * capacity_bytes, uint: what it may hold; 0: no bound.
 * used_bytes, files, uint: as of the last garbage collection.
 * in_flight, queued, uint: operations given to it, and waiting.
 * reads, read_bytes, writes, write_bytes, uint: of parts.
 * failures, timeouts, uint: operations that failed, and that were given up.
 * breaks, uint: how often it went down.
 * backend_starts, backend_ends, backend_kills, uint: of a process: started, ended unasked, and
 *   killed because they hung or broke the protocol.
 * pid, uint: of a process; 0: none now.
 * program, str: of a process: what it says it is.
 * latency_us, uint: of a small operation, smoothed.
 * In devices:
 * name, str: `cpu`, or the GPU's name.
 * uuid, bin: 16 bytes; zeros for `cpu`.
 * cuda, bool: it is a GPU.
 * failed, bool: it has failed for good; the daemon will stop.
 * copy_jobs, uint: copy jobs done.
 * load_bytes, dump_bytes, uint: copied into and out of workers' memory.
 * regions, rings, uint: registered now.
 * context_bytes, uint: GPU memory of the daemon's own context.
 * dma_launches, dma_bytes, uint: copies by copy engines.
 * sm_launches, sm_bytes, uint: copies by the copy kernel.
 * staged_launches, staged_bytes, uint: copies by staging rings.
 * In nodes:
 * node, uint: the kernel's number.
 * total_bytes, used_bytes, uint: DRAM of the arena there.
 * In tenants:
 * name, str: the tenant's; `other`: those beyond 64 together. The entry also has the counters of
 *   docs/metrics.md, "By tenant", uint by name.
 * lookup_times, load_times, map: durations: `count` to `buckets` of a histogram.
 * In histograms:
 * name, str: `lookup`, `load`, `gather`, `dump`, `slot_wait`, `nvme_read` or `loop_iteration`.
 * tier, str: `dram`, `nvme` or `shared`; empty: one for all.
 * size, str: `le1MiB`, `le64MiB` or `gt64MiB`; empty: one for all.
 * count, sum_ns, uint: number of durations, and their sum.
 * p50_us, p99_us, uint: percentiles, to within an eighth.
 * buckets, array of uint: of each that is not empty, its upper bound in microseconds (2^64-1: none)
 *   and its count. */

/* Method health. Answers whether the daemon does its job, for monitoring. */

/* Result of health.
 * status, str: `ok`; `recovering`; `degraded`: slower, or with less cache; `failing`: does not do
 *   its job.
 * reasons, array of str: one sentence each, also with `ok`; without names of other tenants for
 *   non-operators.
 * recovering, bool: not all blocks of an earlier run are found yet. */

/* Method config.get. Lists every key of the daemon's configuration, and where its value came from.
 * Keys for tests are listed where they are set.
 * Callers: operators. */

/* Result of config.get.
 * keys, array of map: the configuration's keys.
 * In keys:
 * key, str: with its section: `log.level`.
 * value, default, str: for people to read; long lists are cut.
 * changed, bool: the value is not the default.
 * reloadable, bool: a reload changes it.
 * source, str: `default`, `file`, `environment` or `command line`.
 * where, str: FILE:LINE, a variable's name, `--set`, or empty.
 * next, str: only where the last reload found another value, for the next start. */

/* Method config.reload. Reads the configuration again, as SIGHUP does. A mistake anywhere changes
 * nothing; then the answer has `refused` and no lists. Open connections keep their tenant and
 * rights.
 * Callers: operators.
 * Errors: UNSUPPORTED: the daemon was started without a file. */

/* Result of config.reload.
 * changes, array of map: keys that have a new value now.
 * restarts, array of map: keys whose new value takes effect at the next start.
 * refused, str: what is wrong, and what would be right.
 * file, str: where: a path, a variable's name, or `--set`.
 * line, uint: 0: the file as a whole.
 * In changes:
 * key, str: with its section: `log.level`.
 * from, to, str: values for people to read; long lists are cut.
 * In restarts:
 * key, str: with its section.
 * from, to, str: what runs, and what the file has. */

#endif
