/* The messages of operators, and of those that follow cache events. The form is that of messages.h,
 * which includes this. */
#ifndef UCM_PROTO_FEATURES_OPERATORS_H
#define UCM_PROTO_FEATURES_OPERATORS_H

#include "proto/limits.h"

/* Method pin. Keeps blocks from being evicted.
 * Callers: operators.
 * Errors: CANCELLED, DEADLINE, SHUTDOWN: some may have changed. */

/* Method unpin. Lets pinned blocks be evicted again. Errors of `pin` apply.
 * Callers: operators. */

/* Method namespace.purge. Drops blocks, pinned ones too, from every tier; from the shared tier for
 * all hosts. Blocks in use count as busy: no later request finds them, and their last reference
 * frees them. Blocks purged by key may come back after a restart; those of a purged namespace do
 * not. Purge namespaces of block summaries separately.
 * Callers: the namespace's tenant.
 * Errors: IO: storage failed, or a root is down or lists no files: blocks may come back; CANCELLED,
 *   DEADLINE, SHUTDOWN: some may be dropped. */

/* keys: absent: all. */
#define UCM_MSG_KEYS(F, m)                                                                         \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)

/* Method evict. Drops blocks from one tier, or from all. From the shared tier it drops them for all
 * hosts, also blocks that this host does not know. It answers when every writable root has dropped
 * their files. Blocks pinned or in use count as busy and stay. But with `tier` 0, no later
 * request finds blocks in use, and their last reference or lease frees them. A block without a
 * published part stays, and its dump goes on.
 * Callers: the namespace's tenant.
 * Errors: IO: some files of the shared tier may be left; CANCELLED, DEADLINE, SHUTDOWN: some may be
 *   dropped.
 * keys: absent: all.
 * tier: 0 all; 1 DRAM (what is nowhere else stays, busy); 2 NVMe; 3 shared tier. */
#define UCM_MSG_EVICT(F, m)                                                                        \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, u64, tier, OPT, 0, 3)

/* blocks: that changed.
 * busy: blocks that are pinned or in use.
 * missing: keys not here. */
#define UCM_MSG_COUNT_R(F, m)                                                                      \
    F(m, u64, blocks, REQ, 0, UINT64_MAX)                                                          \
    F(m, u64, busy, OPT, 0, UINT64_MAX)                                                            \
    F(m, u64, missing, OPT, 0, UINT64_MAX)

/* Method ls. Answers a page of a namespace's blocks, complete or not; at most 1,024. The pages may
 * miss blocks that change meanwhile; none comes twice.
 * Callers: the namespace's tenant. */

/* Result of ls.
 * blocks, array of map: plain.
 * next, uint: common.
 * In blocks:
 * key, bin: common.
 * dram, nvme, shared, uint: parts in the tier.
 * ready, uint: common.
 * complete, pinned, bool: common.
 * leases, uint: common. */

/* Pages of blocks. */
#define UCM_MSG_LS(F, m)                                                                           \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)

/* Method inspect. Answers everything about one block.
 * Callers: the namespace's tenant.
 * Errors: NOT_FOUND: there is no such block. */

/* Result of inspect.
 * key, bin: common.
 * complete, pinned, bool: common.
 * ready, uint: common.
 * deleting, bool: evicted while in use.
 * leases, uint: common.
 * heat, uint: 0 (seen once) to 3.
 * parts, array of map: plain.
 * In parts:
 * part, uint: from 0.
 * dram, str: `none`, `pending_write` (by a dump), `pending_read` or `ready`.
 * nvme, str: `none`, `writing` or `ready`.
 * shared, str: `none`, `unverified` (a lookup assumes it), `writing` or `ready`.
 * root, uint: of the shared tier, from 1; 0: not known.
 * users, uint: operations under way.
 * loc, uint: place on NVMe; opaque.
 * checksum, uint: XXH3-64, if on NVMe. */

/* A block. */
#define UCM_MSG_KEY(F, m)                                                                          \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, key, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES)

/* Method verify. Reads a page's parts on NVMe, at most 8,192, and drops copies that disagree with
 * their checksum.
 * Callers: the namespace's tenant. */

/* checked: parts that agreed.
 * corrupt: parts that did not.
 * failed: parts not readable.
 * skipped: parts not on NVMe, or in use. */
#define UCM_MSG_VERIFY_R(F, m)                                                                     \
    F(m, u64, checked, REQ, 0, UINT64_MAX)                                                         \
    F(m, u64, corrupt, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, failed, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, skipped, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, next, OPT, 0, UINT64_MAX)

/* Method shared.gc. Starts garbage collection of the shared tier's roots, which removes the coldest
 * files above `capacity`, and temporary files of dead hosts.
 * Callers: operators.
 * Errors: UNSUPPORTED: no shared tier, or the root is read-only; NOT_FOUND: no such root.
 * root: from 1, in the order of `stats`; 0: each that takes writes. */
#define UCM_MSG_COLLECT(F, m) F(m, u64, root, OPT, 0, UCM_MAX_ROOTS)

/* roots: that begin a collection.
 * busy: that had one under way. */
#define UCM_MSG_COLLECT_R(F, m)                                                                    \
    F(m, u64, roots, REQ, 0, UCM_MAX_ROOTS)                                                        \
    F(m, u64, busy, OPT, 0, UCM_MAX_ROOTS)

/* Method bypass. Bypasses the cache until a call ends that, or the daemon ends. With loads
 * bypassed, lookups, loads, gathers and prefetches are misses. With stores bypassed, `dump` answers
 * status 3, but finishes parts that it has begun. Without `load` and `store` the call only lists.
 * Callers: operators.
 * Errors: BUSY: there are 64; NOT_FOUND: no such tenant. */

/* Result of bypass.
 * bypassed, array of map: now on.
 * In bypassed:
 * tenant, str: empty: all.
 * ns, uint: 0: all of the tenant's, or one not known now.
 * fingerprint, bin: only of a namespace.
 * load, store, bool: plain.
 * ms, uint: since it began. */

/* ns: 0: see `tenant`.
 * tenant: empty, without `ns`: all.
 * load: 0 as it is, 1 bypass, 2 no longer.
 * store: as `load`. */
#define UCM_MSG_BYPASS(F, m)                                                                       \
    F(m, u64, ns, OPT, 0, UCM_U32)                                                                 \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, load, OPT, 0, 2)                                                                     \
    F(m, u64, store, OPT, 0, 2)

/* Method encryption_key.list. Lists sources of encryption keys; never a key.
 * Callers: operators. */

/* Method encryption_key.reload. Reads sources of encryption keys again, within 10 s. Keys that the
 * source lacks are forgotten at once; a source that fails changes nothing.
 * Callers: operators.
 * Errors: NOT_FOUND: `encryption.tenants` has no such name. */

/* Result of encryption_key.list, encryption_key.reload.
 * keys, array of map: sources, by tenant.
 * In keys:
 * tenant, str: `*`: all others.
 * source, str: as configured.
 * ids, array of str: of keys, 16 hexadecimal digits; the last is current.
 * nvme_parts, array of uint: for each id: parts that it encrypted.
 * nvme_bytes, array of uint: the same in bytes.
 * reading, bool: still under way.
 * error, str: of the last read; empty: none. */

/* tenant: this source only; empty: all. */
#define UCM_MSG_KEY_RELOAD(F, m) F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)

/* Method tenant.set. Gives a tenant settings that override `tenant_settings` of the configuration,
 * also after restarts, until `tenant.reset`.
 * Callers: operators.
 * Errors: INVALID: a setting is unknown, or does not fit its or others' guarantees; NOT_FOUND: no
 *   such tenant; BUSY: another change is under way; IO: in force, but not kept.
 * tenant: `*`: all, where their own settings say nothing.
 * settings: `KEY=VALUE`, separated by spaces; others stay. */
#define UCM_MSG_TENANT_SET(F, m)                                                                   \
    F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, str, settings, REQ, 1, UCM_MAX_SETTINGS_BYTES)

/* Method tenant.reset. Undoes each `tenant.set`, with the same errors.
 * Callers: operators.
 * tenant: or `*`. */
#define UCM_MSG_TENANT(F, m) F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)

/* Method events. Answers the tenant's cache events after number `since` (docs/events.md). Numbering
 * begins at the tenant's first request and uses no number twice. Without later events the daemon
 * waits for one, unless `since` is beyond the last.
 * Errors: BUSY: this connection waits already, or no memory for another tenant; UNSUPPORTED: no
 *   `events.memory`; DENIED: only operators read another tenant's; NOT_FOUND: no such tenant. */

/* Result of events.
 * instance, bin: common.
 * last, uint: the latest event's number; 0: none.
 * next, uint: `since` of the next request.
 * lost, uint: events after `since` that are gone.
 * events, array of map: as many as fit, oldest first.
 * In events:
 * number, ns, uint: plain.
 * key, bin: common.
 * was, is, uint: status before and after, enum ucm_lookup_status. If equal, metadata came.
 * parent, bin: only with metadata: the key before; empty: it begins a sequence.
 * tokens, bin: with `parent`: `block_tokens` token ids, u32 each.
 * lora, str: with `parent`: the adapter. */

/* since: last number that the client has; 0: from the oldest.
 * limit: events at most; 0: 512.
 * wait_ms: 0: answer at once.
 * tenant: for operators; empty: the caller's.
 * tokens: with block metadata. */
#define UCM_MSG_EVENTS(F, m)                                                                       \
    F(m, u64, since, OPT, 0, UINT64_MAX)                                                           \
    F(m, u64, limit, OPT, 0, 2048)                                                                 \
    F(m, u64, wait_ms, OPT, 0, UCM_TIMEOUT_MS)                                                     \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, flag, tokens, OPT, 0, 0)

/* Method events.list. Answers a page of blocks that a lookup would find, with metadata. Blocks that
 * change between pages have events after the first page's `last`.
 * Callers: the namespace's tenant. */

/* Result of events.list.
 * instance, bin: common.
 * last, uint: as in `events`.
 * next, uint: common.
 * blocks, array of map: plain.
 * In blocks:
 * key, bin: common.
 * is, uint: status, 1 to 3.
 * parent, tokens, bin: as in `events`.
 * lora, str: plain. */

/* Method events.metadata. Gives metadata of consecutive blocks of one sequence, stored or not.
 * `events_metadata_dropped` counts blocks whose metadata found no memory.
 * Errors: UNSUPPORTED: no `events.memory`.
 * keys: in the sequence's order; 1024 at most.
 * tokens: `block_tokens` token ids a key, u32 each.
 * parent: the key before the first; empty: it begins the sequence.
 * lora: the adapter. */
#define UCM_MSG_EVENTS_METADATA(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_METADATA_KEYS *UCM_MAX_KEY_BYTES)              \
    F(m, bin, tokens, REQ, 4, UCM_MAX_FRAME_BYTES / 2)                                             \
    F(m, bin, parent, OPT, 0, UCM_MAX_KEY_BYTES)                                                   \
    F(m, str, lora, OPT, 0, UCM_MAX_NAME_BYTES)

/* `load` and `store` in `bypass`. */
enum ucm_bypass {
    UCM_BYPASS_KEEP = 0, /* as it is */
    UCM_BYPASS_ON = 1,   /* bypass */
    UCM_BYPASS_OFF = 2,  /* bypass no longer */
};

/* Method namespace.list. Answers a page of namespaces: those of the caller's tenant, or all for
 * operators. */

/* Result of namespace.list.
 * namespaces, array of map: plain.
 * next, uint: common.
 * In namespaces:
 * ns, uint: its number.
 * fingerprint, bin: common.
 * tenant, model, revision, dtype, layout, str: as in `namespace.open`.
 * block_tokens, key_bytes, parts, layer_bytes, uint: as in `namespace.open`.
 * layers, array of uint: of each part.
 * blocks, uint: complete or not.
 * dram_bytes, nvme_bytes, uint: of its parts.
 * shared_bytes, uint: with unverified parts.
 * lookups, lookup_keys, lookup_hits, uint: since it was opened in this run.
 * loads, load_bytes, dumps, dump_bytes, uint: of requests that copied something.
 * evicted_blocks, uint: evicted from DRAM to make space.
 * encoding, str: empty: not encoded.
 * encoding_version, raw_layer_bytes, uint: of an encoded one.
 * base, uint: its number; 0: unknown or none.
 * base_fingerprint, bin: of an encoded one. */

/* Method tenant.list. Answers a page of tenants: the caller's own, or for operators all that have a
 * namespace or settings. */

/* Result of tenant.list.
 * tenants, array of map: with numbers of docs/metrics.md, "By tenant".
 * next, uint: common.
 * In tenants:
 * tenant, str: common.
 * given_weight, given_namespaces, uint: its `tenant_settings` in force.
 * given_dram_min, given_dram_max, given_nvme_min, given_nvme_max, given_shared_min,
 *   given_shared_max, uint: the same; 0: none.
 * given_connections, given_requests, given_memory, given_leased, uint: the same; 0: those of
 *   `limits`.
 * kept, str: what `tenant.set` gave it. */

/* Pages of namespaces and tenants. */
#define UCM_MSG_PAGE(F, m)                                                                         \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)

/* Method trace. Records what all connections' requests wait for. A trace ends when a call or
 * `limit_ms` ends it, or with its connection. Each record is read once; what the ring can't hold is
 * lost. Times are microseconds since the trace began.
 *
 * docs/troubleshooting.md, "A request was slow" explains the spans: `queue`, `lookup` (of the
 * index), `shared lookup`, `slot wait`, `NVMe read`, `shared read`, `read turn`, `copy`, `durable`,
 * `back-pressure` and `answer` (to the socket).
 * Callers: operators.
 * Errors: BUSY: another connection traces; NOT_FOUND: this connection began none. */

/* Result of trace.
 * on, bool: the trace goes on.
 * more, bool: ask for another page.
 * written, lost, uint: records in all.
 * records, array of map: the oldest unread.
 * In records:
 * number, uint: from 1.
 * lost, uint: since the record before.
 * method, request, tenant, str: plain.
 * uid, pid, uint: of the client.
 * ns, part, n_keys, uint: asked for; `gather`: items, not keys.
 * start_us, us, uint: when the frame was found; until the answer was queued.
 * code, uint: 0, or the error's.
 * ok, bytes, uint: keys found or moved; bytes moved.
 * spans, array of map: plain.
 * keys, bin: with `keys`: all keys.
 * per_key, bool: with `keys`: keys are no sequence.
 * block_bytes, block_tokens, uint: with `keys`; all parts.
 * In spans:
 * name, str: plain.
 * start_us, us, uint: from the first to the last that overlapped.
 * count, uint: reads, copies or waits. */

/* op: 0 read, 1 begin, with the fields below, 2 end.
 * keys: keys, not spans; takes only `tenant`, `limit_ms` and `bytes`.
 * slower_us: only requests that took this long.
 * request: only requests whose id begins so.
 * tenant: only its requests.
 * sample: one in this many of those; 0: each.
 * limit_ms: 0: a minute.
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

/* `op` in `trace`. */
enum ucm_trace_op {
    UCM_TRACE_READ = 0,  /* a page of records, each once */
    UCM_TRACE_START = 1, /* begin */
    UCM_TRACE_STOP = 2,  /* end */
};

/* Method stats. Answers what the daemon is, and has counted since its start. docs/metrics.md lists
 * the numbers of `metrics`, `tiers`, `shared_roots`, `devices`, `nodes` and `tenants`; arrays have
 * bools for what is 0 or 1 there. */

/* Result of stats.
 * version, commit, options, str: of the build.
 * instance, bin: common.
 * uptime_ms, pid, uint: plain.
 * health, str: `status` of `health`.
 * recovering, bool: as in `health`.
 * metrics, map: uint by name.
 * tiers, array of map: the NVMe tier.
 * shared_roots, array of map: plain.
 * devices, array of map: GPUs and the CPU.
 * nodes, array of map: NUMA nodes, if several hold DRAM.
 * tenants, array of map: the caller's; for operators, 64 tenants and `other`.
 * histograms, array of map: of durations.
 * reuse, map: docs/metrics.md, "Reuse": `references`, `sampled`, `factor_permille`; `curves`:
 *   `tiers`, `bytes` today, `hit_permille` by size.
 * policy, str: of eviction.
 * bypassed, array of map: as in `bypass`; the caller's tenant's, or all for operators.
 * In tiers:
 * name, str: `nvme`.
 * engine, str: `io_uring` or `threads`.
 * reason, str: why it is degraded.
 * In shared_roots:
 * name, str: directory or URL.
 * backend, str: `directory`, `nfs`, `s3`, `mooncake` or `process`.
 * health, str: `up`, `read-only`, `full` or `down`.
 * reason, str: of its last failure.
 * pid, uint: of its process; 0: none.
 * program, str: as the process names itself.
 * In devices:
 * name, str: `cpu`, or the GPU's name.
 * uuid, bin: zeros for `cpu`.
 * cuda, bool: plain.
 * In nodes:
 * node, uint: plain.
 * In tenants:
 * name, str: `other`: those beyond 64 together.
 * lookup_times, load_times, map: `count` to `buckets` of a histogram.
 * In histograms:
 * name, str: `lookup`, `load`, `gather`, `dump`, `slot_wait`, `nvme_read` or `loop_iteration`.
 * tier, str: `dram`, `nvme` or `shared`; empty: all.
 * size, str: `le1MiB`, `le64MiB` or `gt64MiB`; empty: all.
 * count, sum_ns, uint: plain.
 * p50_us, p99_us, uint: to within an eighth.
 * buckets, array of uint: of each that is not empty: upper bound in microseconds (2^64-1: none),
 *   count. */

/* Method health. Answers whether the daemon does its job. */

/* Result of health.
 * status, str: `ok`, `recovering`, `degraded` (slower, or less cache) or `failing`.
 * reasons, array of str: sentences, also with `ok`.
 * recovering, bool: blocks of an earlier run may still be found. */

/* Method config.get. Lists the keys of the configuration and where their values came from. It lists
 * internal keys only if they are set.
 * Callers: operators. */

/* Result of config.get.
 * keys, array of map: plain.
 * In keys:
 * key, str: e.g. `log.level`.
 * value, default, str: for people to read; long lists are cut.
 * changed, bool: not the default.
 * reloadable, bool: plain.
 * source, str: `default`, `file`, `environment` or `command line`.
 * where, str: FILE:LINE, variable, `--set`, or empty.
 * next, str: value at the next start, if another. */

/* Method config.reload. Reads the configuration again, as SIGHUP does. A mistake anywhere changes
 * nothing, and the answer has `refused`. Open connections keep their tenant and rights.
 * Callers: operators.
 * Errors: UNSUPPORTED: the daemon was started without a file. */

/* Result of config.reload.
 * changes, array of map: in force now.
 * restarts, array of map: as in `changes`, at the next start.
 * refused, str: what is wrong, and what would be right.
 * file, str: path, variable or `--set`.
 * line, uint: 0: the file as a whole.
 * In changes:
 * key, from, to, str: as in `config.get`. */

#endif
