/* Counters, gauges and histograms, declared once: the structs, `stats`, `ucmctl stats`, and the
 * text for Prometheus (proto/metrics/exposition.h) come from these tables. The names are part of
 * the wire. The server has one struct metrics; only the event loop writes to it. */
#ifndef UCM_PROTO_METRICS_METRICS_H
#define UCM_PROTO_METRICS_METRICS_H

#include "proto/histogram.h"

#include <stdint.h>

/* X(name, kind, unit, help): kind is counter (only grows) or gauge. help is read after the name. */
#define UCMD_METRICS(X)                                                                            \
    X(connections, gauge, "connections", "clients connected")                                      \
    X(connections_accepted, counter, "connections", "clients accepted")                            \
    X(connections_refused, counter, "connections", "clients refused at a limit of connections")    \
    X(connections_dropped, counter, "connections",                                                 \
      "connections ended: protocol broken, or no memory")                                          \
    X(quota_rejections, counter, "rejections",                                                     \
      "requests refused: a user or tenant was over its part of a limit")                           \
    X(client_descriptors, gauge, "descriptors", "file descriptors that clients take")              \
    X(frame_bytes, gauge, "bytes", "frames that arrive, and answers not yet read")                 \
    X(request_bytes, gauge, "bytes", "memory of requests in progress, leases and sequences")       \
    X(requests_total, counter, "requests", "requests received")                                    \
    X(requests_active, gauge, "requests", "requests in progress")                                  \
    X(requests_busy, counter, "requests", "requests answered BUSY; clients try again")             \
    X(requests_failed, counter, "requests", "requests answered with an error, BUSY included")      \
    X(requests_deadline, counter, "requests", "requests past their deadline")                      \
    X(lookups, counter, "requests", "lookups")                                                     \
    X(lookup_keys, counter, "blocks", "keys looked up")                                            \
    X(lookup_hits, counter, "blocks", "keys found complete")                                       \
    X(lookup_hits_dram, counter, "blocks", "keys found complete in DRAM")                          \
    X(bypasses, gauge, "bypasses", "bypasses turned on")                                           \
    X(bypass_lookup_keys, counter, "blocks", "keys of lookups turned into misses")                 \
    X(bypass_load_blocks, counter, "blocks", "blocks of loads and prefetches turned into misses")  \
    X(bypass_dump_blocks, counter, "blocks", "blocks of dumps skipped")                            \
    X(leases, gauge, "leases", "leases held")                                                      \
    X(leases_expired, counter, "leases",                                                           \
      "leases that ended by timeout: clients are slow, or do not release them")                    \
    X(load_blocks_dram, counter, "parts", "parts loaded from DRAM")                                \
    X(load_blocks_nvme, counter, "parts", "parts loaded from NVMe")                                \
    X(load_blocks_missed, counter, "parts", "parts of loads that were not cached")                 \
    X(load_bytes, counter, "bytes", "bytes copied into workers' memory")                           \
    X(dump_blocks, counter, "parts", "parts stored")                                               \
    X(dump_blocks_existing, counter, "parts", "dumped parts that were already stored")             \
    X(dump_blocks_skipped, counter, "parts", "parts of dumps not stored: no slot was free")        \
    X(dump_blocks_dropped, counter, "parts",                                                       \
      "unfinished parts dropped: the worker disconnected, or the copy failed")                     \
    X(dump_blocks_durable, counter, "parts", "parts of durable dumps on stable storage")           \
    X(dumps_slowed, counter, "requests",                                                           \
      "dumps answered late because of back-pressure (nvme.on_write_stall)")                        \
    X(dump_bytes, counter, "bytes", "bytes copied out of workers' memory")                         \
    X(prefetch_blocks, counter, "parts", "parts prefetched into DRAM")                             \
    X(gathers, counter, "requests", "gathers")                                                     \
    X(gather_items, counter, "items", "layers of blocks copied into GPU block pools")              \
    X(gather_items_missed, counter, "items", "items whose block was not cached or not readable")   \
    X(gather_reads, counter, "parts", "parts read from NVMe or the shared tier")                   \
    X(gather_reads_partial, counter, "parts",                                                      \
      "of these, parts of which only some layers were read, from NVMe")                            \
    X(gather_bytes, counter, "bytes", "bytes copied, also counted in load_bytes")                  \
    X(span_refused, counter, "refusals",                                                           \
      "operations refused: beyond their part's bytes; above 0: a bug")                             \
    X(reads_coalesced, counter, "parts", "reads saved: another request was reading the same part") \
    X(blocks, gauge, "blocks", "complete blocks, in any tier")                                     \
    X(blocks_partial, gauge, "blocks", "blocks with missing parts")                                \
    X(blocks_pinned, gauge, "blocks", "blocks pinned by operators")                                \
    X(index_bytes, gauge, "bytes", "memory of the index")                                          \
    X(index_evicted, counter, "blocks", "blocks dropped: the index was full")                      \
    X(arena_bytes_total, gauge, "bytes", "DRAM ready for slots")                                   \
    X(arena_bytes_configured, gauge, "bytes", "DRAM configured")                                   \
    X(arena_bytes_used, gauge, "bytes", "DRAM in slots that hold a part")                          \
    X(arena_evicted_blocks, counter, "blocks", "blocks evicted from DRAM")                         \
    X(arena_evicted_lost, counter, "blocks", "blocks evicted from DRAM that no other tier had")    \
    X(arena_candidates, counter, "blocks", "blocks examined for eviction from DRAM")               \
    X(arena_parts_moved, counter, "parts",                                                         \
      "guaranteed parts moved so that their slab could change its slot size")                      \
    X(arena_slabs_moved, counter, "slabs", "slabs moved between slot sizes")                       \
    X(arena_full, counter, "times", "times that a transfer found no free slot")                    \
    X(arena_slots_numa_local, counter, "slots", "slots taken on their GPU's NUMA node")            \
    X(arena_slots_numa_remote, counter, "slots", "slots taken on another NUMA node")               \
    X(arena_kept_parts, counter, "parts", "parts adopted from the last run (arena.persist_dir)")   \
    X(arena_kept_refused, counter, "parts",                                                        \
      "parts of the last run not adopted: damaged, or not wanted")                                 \
    X(nvme_bytes_capacity, gauge, "bytes", "capacity of the NVMe tier")                            \
    X(nvme_bytes_used, gauge, "bytes", "bytes of live parts on NVMe")                              \
    X(nvme_read_bytes, counter, "bytes", "bytes read from NVMe")                                   \
    X(nvme_reads, counter, "parts", "parts read from NVMe")                                        \
    X(nvme_stored_bytes, counter, "bytes", "bytes of parts stored on NVMe")                        \
    X(nvme_written_bytes, counter, "bytes",                                                        \
      "bytes written to NVMe: parts, headers, padding, rewrites")                                  \
    X(nvme_rewritten, counter, "parts", "parts rewritten when their segment was reused")           \
    X(nvme_checkpoint_bytes, counter, "bytes", "bytes of checkpoints written")                     \
    X(nvme_write_amplification, gauge, "1/1000", "bytes written to NVMe for each byte stored")     \
    X(nvme_writes, counter, "parts", "parts written to NVMe")                                      \
    X(nvme_write_dropped, counter, "parts",                                                        \
      "parts not written: write queue or tier full, or failed")                                    \
    X(nvme_max_dropped, counter, "parts", "parts dropped at their tenant's maximum (nvme.max)")    \
    X(nvme_write_refused, counter, "parts",                                                        \
      "parts not written until they are used again (nvme.admission)")                              \
    X(nvme_write_waits, counter, "times", "writes postponed: the tier's queue was full")           \
    X(nvme_read_errors, counter, "parts", "reads that failed after their retries")                 \
    X(nvme_write_errors, counter, "parts", "writes that failed after their retries")               \
    X(nvme_corrupt, counter, "parts",                                                              \
      "parts whose checksum differed; a load gets the shared tier's copy, or status FAILED")       \
    X(nvme_reclaimed_segments, counter, "segments", "segments reclaimed for new writes")           \
    X(nvme_reclaimed_blocks, counter, "parts", "parts dropped with their reclaimed segment")       \
    X(nvme_recovering, gauge, "segments", "segments of earlier runs still to read")                \
    X(nvme_recovered_parts, counter, "parts", "parts of earlier runs found")                       \
    X(nvme_syncs, counter, "syncs", "syncs of cache files for durable dumps")                      \
    X(nvme_sync_errors, counter, "parts", "parts that may be lost: a sync failed")                 \
    X(nvme_checkpoints, counter, "checkpoints", "checkpoints written")                             \
    X(nvme_damaged_pages, counter, "pages",                                                        \
      "damaged headers and records found at the start; a power failure leaves a few")              \
    X(nvme_scrub_passes, counter, "passes", "scrubs of NVMe that ended")                           \
    X(nvme_scrub_segments, gauge, "segments", "segments that the running scrub has read")          \
    X(nvme_scrub_bad, counter, "parts", "parts that the scrub found damaged or unreadable")        \
    X(encryption_key_missing, counter, "parts",                                                    \
      "reads and writes of encrypted parts whose key is missing")                                  \
    X(encryption_bytes_current, gauge, "bytes",                                                    \
      "bytes on NVMe encrypted with a tenant's current key")                                       \
    X(encryption_bytes_older, gauge, "bytes",                                                      \
      "bytes on NVMe encrypted with an older key; 0: no older key is needed")                      \
    X(encryption_bytes_unknown, gauge, "bytes",                                                    \
      "bytes on NVMe encrypted with a key that no source has")                                     \
    X(nvme_bad_headers, counter, "pages", "damaged headers of intact parts, found while running")  \
    X(nvme_quarantined_bytes, gauge, "bytes", "bytes of segments in quarantine")                   \
    X(nvme_files_lost, gauge, "files", "files of nvme.paths left out at the start or gone since")  \
    X(nvme_returned, counter, "files", "files that failed and take writes again")                  \
    X(blocks_shared, gauge, "blocks", "complete blocks that only the shared tier has")             \
    X(lookup_hits_shared, counter, "blocks", "keys with a part that only the shared tier has")     \
    X(lookups_waited, counter, "requests", "lookups that waited for the shared tier")              \
    X(lookups_pending, counter, "requests",                                                        \
      "lookups answered before the shared tier answered; clients ask again")                       \
    X(load_blocks_shared, counter, "parts", "parts loaded from the shared tier")                   \
    X(shared_stale_lookups, counter, "blocks", "unverified blocks that a read did not find")       \
    X(shared_write_dropped, counter, "parts", "parts not written: evicted, or failed")             \
    X(shared_write_refused, counter, "parts",                                                      \
      "parts not written until they are used again (shared.admission)")                            \
    X(shared_write_waits, counter, "times", "writes postponed because no root took them")          \
    X(shared_remove_dropped, counter, "parts",                                                     \
      "files left on a root: their block was evicted by name during the write")                    \
    X(shared_writes, counter, "parts", "parts written to shared roots")                            \
    X(shared_damaged, counter, "parts", "damaged files found on shared roots; each is a miss")     \
    X(shared_roots_down, gauge, "roots", "shared roots that are down")                             \
    X(shared_probes, counter, "requests", "searches for keys on shared roots")                     \
    X(shared_gc_passes, counter, "passes", "garbage collections that ended")                       \
    X(shared_gc_failed, counter, "passes", "garbage collections given up: the root failed")        \
    X(shared_gc_removed, counter, "files", "files that garbage collection removed")                \
    X(shared_gc_demoted, counter, "files", "files copied to the next root before their removal")   \
    X(lookup_hits_raw, counter, "blocks",                                                          \
      "keys of encoded namespaces whose block is in the raw namespace")                            \
    X(encode_raw_bytes, counter, "bytes", "bytes of dumped blocks, raw")                           \
    X(encode_bytes, counter, "bytes", "bytes of dumped blocks, encoded")                           \
    X(encode_unfit, counter, "parts",                                                              \
      "dumped parts whose bytes their encoding cannot hold; the worker dumps them raw")            \
    X(unfit_decoded, counter, "parts",                                                             \
      "stored parts decoded: another part of their block stayed raw")                              \
    X(unfit_decode_failed, counter, "parts",                                                       \
      "parts not decoded: no space, or evicted before; their block is a miss")                     \
    X(decode_raw_bytes, counter, "bytes", "bytes of loaded blocks, raw")                           \
    X(decode_bytes, counter, "bytes", "bytes of loaded blocks, encoded")                           \
    X(summaries_built, counter, "parts", "block summaries built")                                  \
    X(summaries_built_bytes, counter, "bytes", "bytes of block summaries built")                   \
    X(summaries_failed, counter, "parts",                                                          \
      "block summaries not built: their block could not be read")                                  \
    X(summaries_skipped, counter, "parts",                                                         \
      "stored parts without a block summary: queue or DRAM full, or evicted before")               \
    X(summaries_missing, counter, "blocks",                                                        \
      "blocks appended to a sequence without a block summary")                                     \
    X(summaries_orphaned, counter, "blocks", "block summaries found whose block is not cached")    \
    X(summaries_held_bytes, gauge, "bytes",                                                        \
      "DRAM of block summaries that sequences keep, up to a quarter of the arena")                 \
    X(sequences, gauge, "sequences", "sequences open")                                             \
    X(sequence_blocks, gauge, "blocks", "blocks in sequences")                                     \
    X(sequences_expired, counter, "sequences", "sequences that ended by timeout")                  \
    X(selects, counter, "requests", "selections")                                                  \
    X(select_blocks, counter, "blocks", "blocks scored, counted for each KV head")                 \
    X(prefetch_useful, counter, "blocks", "blocks prefetched for a sequence and then loaded")      \
    X(prefetch_useless, counter, "blocks", "blocks prefetched for a sequence and evicted unused")  \
    X(lookup_tables, gauge, "tables", "namespaces with a lookup table")                            \
    X(lookup_table_bytes, gauge, "bytes", "memory of lookup tables")                               \
    X(lookup_table_left_out, gauge, "blocks", "blocks for which a lookup table has no space")      \
    X(events_lost, counter, "events", "cache events that a reader asked for too late")             \
    X(events_subscribers, gauge, "connections", "connections that have asked for cache events")    \
    X(events_bytes, gauge, "bytes", "memory of cache events and of block metadata")                \
    X(events_metadata, gauge, "blocks", "blocks whose metadata is kept")                           \
    X(events_metadata_dropped, counter, "blocks",                                                  \
      "blocks whose metadata was not kept: no memory (events.memory)")                             \
    X(mappings, gauge, "mappings", "shared mappings open")                                         \
    X(mapping_bytes_configured, gauge, "bytes",                                                    \
      "the most that shared mappings may take (mapping.size)")                                     \
    X(mapping_bytes, gauge, "bytes",                                                               \
      "DRAM granted to shared mappings, including what workers still map")                         \
    X(mapping_refs, gauge, "blocks", "blocks referenced, counted for each mapping")                \
    X(mapping_referenced_bytes, gauge, "bytes", "bytes of the slots of referenced blocks")         \
    X(mapping_moves, counter, "blocks", "blocks copied within DRAM into a shared mapping")         \
    X(mapping_full, counter, "blocks",                                                             \
      "referenced blocks that got no place: no space, or not in time")                             \
    X(mapping_revocations, counter, "slabs", "slabs that the daemon asked back")                   \
    X(mapping_overdue_bytes, counter, "bytes",                                                     \
      "bytes not released in time; the client's connection was ended")                             \
    X(slot_waiters, gauge, "requests", "transfers that wait for a slot")                           \
    X(slot_wait_oldest_us, gauge, "us", "time that the oldest transfer has waited for a slot")     \
    X(regions, gauge, "regions", "regions registered")                                             \
    X(device_errors, counter, "jobs", "copy jobs that failed")                                     \
    X(device_event_timeouts, counter, "jobs", "dumps whose CUDA event was not signalled in time")

/* ---- histograms of seconds ---- */

/* The slowest tier that a request needed; its bytes. */
enum metric_tier { METRIC_DRAM, METRIC_NVME, METRIC_SHARED, METRIC_TIERS };
#define METRIC_TIER_NAMES                                                                          \
    {                                                                                              \
        "dram", "nvme", "shared"                                                                   \
    }
enum metric_size { METRIC_LE_1MIB, METRIC_LE_64MIB, METRIC_GT_64MIB, METRIC_SIZES };
#define METRIC_SIZE_NAMES                                                                          \
    {                                                                                              \
        "le1MiB", "le64MiB", "gt64MiB"                                                             \
    }

/* X(name, tiers, sizes, help): one histogram, or one for each tier, for each size. */
#define UCMD_HISTOGRAMS(X)                                                                         \
    X(lookup, 1, 1, "lookups, from frame to answer")                                               \
    X(load, METRIC_TIERS, METRIC_SIZES, "loads, from frame to answer")                             \
    X(gather, METRIC_TIERS, 1, "gathers, from frame to answer")                                    \
    X(dump, 1, METRIC_SIZES, "dumps, from frame to answer")                                        \
    X(slot_wait, 1, 1, "transfers that waited for a free slot")                                    \
    X(nvme_read, 1, 1, "reads of parts from NVMe, from request to verified bytes")                 \
    X(loop_iteration, 1, 1, "iterations of the event loop, without their sleep")

struct histograms {
#define X(name, tiers, sizes, help) struct histogram name[(tiers) * (sizes)];
    UCMD_HISTOGRAMS(X)
#undef X
};

struct metrics {
#define X(name, kind, unit, help) uint64_t name;
    UCMD_METRICS(X)
#undef X
    struct histograms histograms;
};

/* ---- of what there are several: the same columns, and the kind `flag`, a bool on the wire ----
 * help does not repeat whose they are: the name on Prometheus begins with that. */

#define UCMD_TIER_METRICS(X)                                                                       \
    X(capacity_bytes, gauge, "bytes", "bytes that it can hold")                                    \
    X(used_bytes, gauge, "bytes", "bytes of live parts")                                           \
    X(queued, gauge, "operations", "operations that wait")                                         \
    X(in_flight, gauge, "operations", "operations given to the device")                            \
    X(recovering, flag, "", "1: it may still find parts of an earlier run")                        \
    X(degraded, flag, "", "1: a file, or the list of namespaces, refuses writes")

#define UCMD_ROOT_METRICS(X)                                                                       \
    X(capacity_bytes, gauge, "bytes", "bytes that it may hold; 0: no bound")                       \
    X(used_bytes, gauge, "bytes", "bytes at the last garbage collection")                          \
    X(files, gauge, "files", "files at the last garbage collection")                               \
    X(in_flight, gauge, "operations", "operations given to it")                                    \
    X(queued, gauge, "operations", "operations that wait")                                         \
    X(reads, counter, "parts", "parts read")                                                       \
    X(read_bytes, counter, "bytes", "bytes read")                                                  \
    X(writes, counter, "parts", "parts written")                                                   \
    X(write_bytes, counter, "bytes", "bytes written")                                              \
    X(failures, counter, "operations", "operations that failed")                                   \
    X(timeouts, counter, "operations", "operations that ended by timeout")                         \
    X(breaks, counter, "times", "times that it went down")                                         \
    X(backend_starts, counter, "times", "processes started")                                       \
    X(backend_ends, counter, "times", "processes that ended unasked")                              \
    X(backend_kills, counter, "times",                                                             \
      "of these, processes killed: they hung or broke the protocol")                               \
    X(latency_us, gauge, "us", "smoothed time of a lookup's operation")

#define UCMD_DEVICE_METRICS(X)                                                                     \
    X(failed, flag, "", "1: it has failed permanently")                                            \
    X(copy_jobs, counter, "jobs", "copy jobs done")                                                \
    X(load_bytes, counter, "bytes", "bytes copied into workers' memory")                           \
    X(dump_bytes, counter, "bytes", "bytes copied out of workers' memory")                         \
    X(regions, gauge, "regions", "regions registered")                                             \
    X(context_bytes, gauge, "bytes", "device memory that the daemon itself takes")                 \
    X(dma_launches, counter, "copies", "copies given to the copy engines")                         \
    X(dma_bytes, counter, "bytes", "bytes moved by the copy engines")                              \
    X(sm_launches, counter, "launches", "launches of the copy kernel")                             \
    X(sm_bytes, counter, "bytes", "bytes moved by the copy kernel")                                \
    X(staged_launches, counter, "entries", "staging-ring entries that copies went through")        \
    X(staged_bytes, counter, "bytes", "bytes moved through staging rings")                         \
    X(rings, gauge, "rings", "staging rings registered")

/* Only where the arena is spread over several NUMA nodes. */
#define UCMD_NODE_METRICS(X)                                                                       \
    X(total_bytes, gauge, "bytes", "DRAM ready for slots")                                         \
    X(used_bytes, gauge, "bytes", "DRAM in slots that hold a part")

/* Blocks and bytes are of the namespaces that exist now; the counters also of those that are
 * gone. */
#define UCMD_TENANT_METRICS(X)                                                                     \
    X(lookups, counter, "requests", "lookups")                                                     \
    X(lookup_keys, counter, "blocks", "keys looked up")                                            \
    X(lookup_hits, counter, "blocks", "keys found complete")                                       \
    X(lookup_hits_dram, counter, "blocks", "keys found complete in DRAM")                          \
    X(lookup_hits_shared, counter, "blocks", "keys with a part that only the shared tier has")     \
    X(loads, counter, "requests", "loads")                                                         \
    X(load_bytes, counter, "bytes", "bytes copied into workers' memory")                           \
    X(dumps, counter, "requests", "dumps")                                                         \
    X(dump_bytes, counter, "bytes", "bytes copied out of workers' memory")                         \
    X(evicted_blocks, counter, "blocks", "blocks evicted from DRAM to make space")                 \
    X(nvme_read_bytes, counter, "bytes", "bytes read from NVMe")                                   \
    X(shared_read_bytes, counter, "bytes", "bytes read from shared roots")                         \
    X(bus_contended_bytes, counter, "bytes", "bytes copied while several tenants were queued")     \
    X(bus_fair_share_bytes, counter, "bytes",                                                      \
      "bytes that its weight entitled it to copy while several tenants were queued")               \
    X(nvme_contended_bytes, counter, "bytes",                                                      \
      "bytes read from NVMe while several tenants were queued")                                    \
    X(nvme_fair_share_bytes, counter, "bytes",                                                     \
      "bytes that its weight entitled it to read from NVMe while several tenants were queued")     \
    X(shared_contended_bytes, counter, "bytes",                                                    \
      "bytes read from a root while several tenants were queued")                                  \
    X(shared_fair_share_bytes, counter, "bytes",                                                   \
      "bytes that its weight entitled it to read from roots while several tenants were queued")    \
    X(namespaces, gauge, "namespaces", "namespaces")                                               \
    X(blocks, gauge, "blocks", "blocks, complete or not")                                          \
    X(dram_bytes, gauge, "bytes", "bytes of parts in DRAM")                                        \
    X(nvme_bytes, gauge, "bytes", "bytes of parts on NVMe")                                        \
    X(shared_bytes, gauge, "bytes", "bytes of parts on the shared tier")                           \
    X(dram_min_bytes, gauge, "bytes", "DRAM guaranteed")                                           \
    X(dram_max_bytes, gauge, "bytes", "maximum in DRAM; 0: no bound")                              \
    X(nvme_min_bytes, gauge, "bytes", "NVMe guaranteed")                                           \
    X(nvme_max_bytes, gauge, "bytes", "maximum on NVMe; 0: no bound")                              \
    X(shared_min_bytes, gauge, "bytes", "bytes guaranteed on each shared root")                    \
    X(shared_max_bytes, gauge, "bytes", "maximum on each shared root; 0: no bound")

/* ---- reuse: the hit rate of lookups that other sizes would give ---- */

enum reuse_tiers { REUSE_DRAM, REUSE_DRAM_NVME, REUSE_TIERS };
#define REUSE_TIERS_NAMES                                                                          \
    {                                                                                              \
        "dram", "dram_nvme"                                                                        \
    }
/* Sizes, in halves of today's. */
#define REUSE_POINTS 4
#define REUSE_HALVES                                                                               \
    {                                                                                              \
        1, 2, 4, 8                                                                                 \
    }
#define REUSE_FACTOR_NAMES                                                                         \
    {                                                                                              \
        "0.5", "1", "2", "4"                                                                       \
    }

struct metrics_reuse {
    uint64_t references;         /* keys looked up, since the start */
    uint64_t sampled;            /* of these */
    uint64_t bytes[REUSE_TIERS]; /* today's size; 0: there is none, or it is not known yet */
    uint32_t hit_permille[REUSE_TIERS][REUSE_POINTS];
};

#endif
