/* Counters, gauges and histograms, declared once: the structs, `stats`, `ucmctl stats`, and the
 * text for Prometheus (proto/metrics/exposition.h) come from these tables. The names are part of
 * the wire. The server has one struct metrics; only the loop writes to it. */
#ifndef UCM_PROTO_METRICS_METRICS_H
#define UCM_PROTO_METRICS_METRICS_H

#include "proto/histogram.h"

#include <stdint.h>

/* X(name, kind, unit, help): kind is counter (only grows) or gauge. help is read alone. */
#define UCMD_METRICS(X)                                                                            \
    X(connections, gauge, "connections", "clients connected now")                                  \
    X(connections_total, counter, "connections", "clients accepted since start")                   \
    X(connections_refused, counter, "connections", "clients refused at a limit of connections")    \
    X(connections_dropped, counter, "connections",                                                 \
      "connections that the daemon ended: protocol broken, or no memory")                          \
    X(limit_refusals, counter, "refusals",                                                         \
      "what a uid or tenant did not get since it had its share, or nothing was left")              \
    X(client_descriptors, gauge, "descriptors", "descriptors that clients take")                   \
    X(frame_bytes, gauge, "bytes", "bytes of frames that arrive and of unread answers")            \
    X(request_bytes, gauge, "bytes", "memory of requests under way and of chains")                 \
    X(requests_total, counter, "requests", "requests received")                                    \
    X(requests_active, gauge, "requests", "requests under way")                                    \
    X(requests_busy, counter, "requests", "requests answered BUSY")                                \
    X(requests_failed, counter, "requests", "requests answered with an error, BUSY included")      \
    X(requests_deadline, counter, "requests", "requests that passed their deadline")               \
    X(lookups, counter, "requests", "lookups")                                                     \
    X(lookup_keys, counter, "blocks", "keys looked up")                                            \
    X(lookup_hits, counter, "blocks", "keys of lookups found complete")                            \
    X(lookup_hits_dram, counter, "blocks", "keys of lookups found complete in DRAM")               \
    X(bypasses, gauge, "bypasses", "bypasses that operators have turned on now")                   \
    X(bypass_lookup_keys, counter, "blocks", "keys of lookups that a bypass made misses")          \
    X(bypass_load_blocks, counter, "blocks",                                                       \
      "blocks of loads and prefetches that a bypass made misses")                                  \
    X(bypass_dump_blocks, counter, "blocks", "blocks of dumps that a bypass skipped")              \
    X(leases, gauge, "leases", "leases held now")                                                  \
    X(leases_expired, counter, "leases", "leases whose time ran out")                              \
    X(load_blocks_dram, counter, "blocks", "parts loaded that lay in DRAM")                        \
    X(load_blocks_nvme, counter, "blocks", "parts loaded that were read from NVMe")                \
    X(load_blocks_missed, counter, "blocks", "parts that a load named and that were not cached")   \
    X(load_bytes, counter, "bytes", "bytes copied into workers' memory")                           \
    X(dump_blocks, counter, "blocks", "parts stored")                                              \
    X(dump_blocks_existing, counter, "blocks", "parts of dumps that were stored already")          \
    X(dump_blocks_skipped, counter, "blocks",                                                      \
      "parts of dumps not stored because no slot was free")                                        \
    X(dump_blocks_dropped, counter, "blocks",                                                      \
      "unfinished parts dropped: worker gone, or copy failed")                                     \
    X(dump_blocks_durable, counter, "blocks", "parts that a dump awaited on stable storage")       \
    X(dumps_slowed, counter, "requests", "dumps answered late because of back-pressure")           \
    X(dump_bytes, counter, "bytes", "bytes copied out of workers' memory")                         \
    X(prefetch_blocks, counter, "blocks", "parts brought into DRAM by prefetch")                   \
    X(fetches, counter, "requests", "fetches of single layers of blocks")                          \
    X(fetch_items, counter, "items", "layers of blocks that fetches copied into workers' pools")   \
    X(fetch_items_missed, counter, "items",                                                        \
      "items of fetches whose block was not cached or could not be read")                          \
    X(fetch_reads, counter, "blocks", "parts that fetches read from NVMe or the shared tier")      \
    X(fetch_reads_partial, counter, "blocks",                                                      \
      "of those, some shards of which were read from NVMe")                                        \
    X(fetch_bytes, counter, "bytes", "bytes of load_bytes that fetches copied")                    \
    X(span_refused, counter, "refusals",                                                           \
      "copies, reads, writes and builds that would have left their part's bytes in DRAM")          \
    X(single_flight, counter, "blocks", "reads saved because the part was being read already")     \
    X(blocks, gauge, "blocks", "complete blocks, in any tier")                                     \
    X(blocks_partial, gauge, "blocks", "blocks with missing parts")                                \
    X(blocks_pinned, gauge, "blocks", "blocks pinned by operators")                                \
    X(index_bytes, gauge, "bytes", "memory of the index")                                          \
    X(index_evicted, counter, "blocks", "blocks dropped because the index was full")               \
    X(arena_bytes_total, gauge, "bytes", "DRAM ready for slots")                                   \
    X(arena_bytes_configured, gauge, "bytes", "DRAM configured")                                   \
    X(arena_bytes_used, gauge, "bytes", "DRAM in slots that hold a part")                          \
    X(arena_evicted_blocks, counter, "blocks", "blocks evicted from DRAM")                         \
    X(arena_evicted_lost, counter, "blocks",                                                       \
      "blocks evicted from DRAM that were in no other tier")                                       \
    X(arena_candidates, counter, "blocks", "blocks looked at for eviction from DRAM")              \
    X(arena_parts_moved, counter, "parts",                                                         \
      "guaranteed parts moved to another slot, so that their extent could change its slot size")   \
    X(arena_extents_moved, counter, "extents", "extents moved between slot sizes")                 \
    X(arena_full, counter, "times", "times a slot was needed and all were in use")                 \
    X(arena_slots_near, counter, "slots", "slots on the NUMA node of the GPU that needed them")    \
    X(arena_slots_far, counter, "slots", "slots on another NUMA node than that of the GPU")        \
    X(arena_kept_parts, counter, "parts", "parts in DRAM taken over from the last run")            \
    X(arena_kept_refused, counter, "parts",                                                        \
      "parts of the last run not taken over: damaged, or not wanted")                              \
    X(nvme_bytes_capacity, gauge, "bytes", "capacity of the NVMe tier")                            \
    X(nvme_bytes_used, gauge, "bytes", "bytes of live parts on NVMe")                              \
    X(nvme_read_bytes, counter, "bytes", "bytes read from NVMe")                                   \
    X(nvme_reads, counter, "parts", "parts read from NVMe")                                        \
    X(nvme_stored_bytes, counter, "bytes", "bytes of parts that the cache gave and NVMe stored")   \
    X(nvme_written_bytes, counter, "bytes",                                                        \
      "bytes written to NVMe: parts, headers, padding, rewrites")                                  \
    X(nvme_rewritten, counter, "parts", "parts rewritten when their segment was reused")           \
    X(nvme_checkpoint_bytes, counter, "bytes", "bytes of checkpoints written to NVMe")             \
    X(nvme_write_amplification, gauge, "1/1000", "bytes written to NVMe for each byte stored")     \
    X(nvme_writes, counter, "parts", "parts written to NVMe")                                      \
    X(nvme_write_dropped, counter, "parts", "parts not written: backlog or tier full, or failed")  \
    X(nvme_most_dropped, counter, "parts",                                                         \
      "parts dropped from NVMe because their tenant gets no more there")                           \
    X(nvme_write_refused, counter, "parts",                                                        \
      "parts not admitted to NVMe until they are used again")                                      \
    X(nvme_write_waits, counter, "times", "writes postponed because the tier's queue was full")    \
    X(nvme_read_errors, counter, "parts", "reads that failed after their retries")                 \
    X(nvme_write_errors, counter, "parts", "writes that failed after their retries")               \
    X(nvme_corrupt, counter, "parts", "parts whose checksum disagreed")                            \
    X(nvme_reclaimed_segments, counter, "segments", "segments reclaimed for new writes")           \
    X(nvme_reclaimed_blocks, counter, "blocks", "blocks dropped with their reclaimed segment")     \
    X(nvme_recovering, gauge, "segments",                                                          \
      "segments of earlier runs that recovery has not read yet")                                   \
    X(nvme_recovered_parts, counter, "parts", "parts of earlier runs found by recovery")           \
    X(nvme_syncs, counter, "syncs", "syncs of cache files for durable dumps")                      \
    X(nvme_sync_errors, counter, "parts", "parts that may be lost because a sync failed")          \
    X(nvme_checkpoints, counter, "checkpoints", "checkpoints written")                             \
    X(nvme_damaged_pages, counter, "pages", "damaged headers and records found at the start")      \
    X(nvme_scrub_passes, counter, "passes", "scrubs of all of NVMe that ended")                    \
    X(nvme_scrub_segments, gauge, "segments", "segments that the present scrub has read")          \
    X(nvme_scrub_bad, counter, "parts", "parts that the scrub found damaged or unreadable")        \
    X(seal_key_missing, counter, "parts",                                                          \
      "reads and writes of encrypted parts without the key for them")                              \
    X(seal_bytes_current, gauge, "bytes",                                                          \
      "bytes on NVMe that are encrypted with a tenant's current key")                              \
    X(seal_bytes_older, gauge, "bytes",                                                            \
      "bytes on NVMe that are encrypted with a key that is there and no tenant's current one")     \
    X(seal_bytes_unknown, gauge, "bytes",                                                          \
      "bytes on NVMe that are encrypted with a key that no source has")                            \
    X(nvme_bad_headers, counter, "pages", "damaged headers of sound parts, found while running")   \
    X(nvme_quarantined_bytes, gauge, "bytes", "bytes of segments in quarantine")                   \
    X(nvme_files_lost, gauge, "files",                                                             \
      "files of nvme.paths that could not be opened at the start")                                 \
    X(nvme_returned, counter, "files", "files that failed and take writes again")                  \
    X(blocks_shared, gauge, "blocks", "complete blocks that only the shared tier has")             \
    X(lookup_hits_shared, counter, "blocks",                                                       \
      "keys of lookups with a part that only the shared tier has")                                 \
    X(lookups_waited, counter, "requests", "lookups that waited for the shared tier")              \
    X(lookups_pending, counter, "requests",                                                        \
      "lookups that were answered while the shared tier was asked: their clients asked again")     \
    X(load_blocks_shared, counter, "blocks", "parts loaded that were read from the shared tier")   \
    X(share_forgotten, counter, "blocks",                                                          \
      "blocks presumed on the shared tier that a read did not find")                               \
    X(share_write_dropped, counter, "parts",                                                       \
      "parts not written to the shared tier: evicted, or failed")                                  \
    X(share_write_refused, counter, "parts",                                                       \
      "parts not admitted to the shared tier until they are used again")                           \
    X(share_write_waits, counter, "times", "writes postponed because a root took none")            \
    X(share_remove_dropped, counter, "parts",                                                      \
      "parts written while evicted by name, whose files stay")                                     \
    X(share_writes, counter, "parts", "parts written to shared roots")                             \
    X(share_damaged, counter, "parts", "damaged files found on shared roots")                      \
    X(share_roots_down, gauge, "roots", "shared roots that are down")                              \
    X(share_probes, counter, "requests", "shared lookups: searches for keys on shared roots")      \
    X(share_gc_passes, counter, "passes", "garbage collections of shared roots that ended")        \
    X(share_gc_failed, counter, "passes", "garbage collections given up because the root failed")  \
    X(share_gc_removed, counter, "files", "files that garbage collection removed from a root")     \
    X(share_gc_demoted, counter, "files", "files copied to the next root before their removal")    \
    X(lookup_hits_plain, counter, "blocks",                                                        \
      "keys of lookups in encoded namespaces whose block is in the base")                          \
    X(encode_plain_bytes, counter, "bytes", "bytes of dumped blocks before they were encoded")     \
    X(encode_bytes, counter, "bytes", "bytes of dumped blocks as they were encoded")               \
    X(encode_unfit, counter, "parts", "dumped parts whose bytes their encoding could not hold")    \
    X(unfit_decoded, counter, "parts",                                                             \
      "stored parts that were decoded because another part of their block did not fit")            \
    X(unfit_decode_failed, counter, "parts",                                                       \
      "such parts that were not: no space, or evicted before; their block is a miss")              \
    X(decode_plain_bytes, counter, "bytes", "bytes of loaded blocks after they were decoded")      \
    X(decode_bytes, counter, "bytes", "bytes of loaded blocks as they were encoded")               \
    X(digest_builds, counter, "parts", "digests that the daemon built")                            \
    X(digest_bytes, counter, "bytes", "bytes of digests that the daemon built")                    \
    X(digest_build_failed, counter, "parts", "digests not built because their block was not read") \
    X(digest_build_skipped, counter, "parts",                                                      \
      "stored parts whose digest was not built: queue or DRAM full, or evicted before")            \
    X(digest_missing, counter, "blocks", "blocks appended to a chain without a digest")            \
    X(digest_orphans, counter, "blocks", "digests met whose block is not cached")                  \
    X(digest_held_bytes, gauge, "bytes", "DRAM of digests that chains hold")                       \
    X(chains, gauge, "chains", "chains open now")                                                  \
    X(chain_blocks, gauge, "blocks", "blocks in chains")                                           \
    X(chains_expired, counter, "chains", "chains that were not used for their lease's time")       \
    X(selects, counter, "requests", "selections")                                                  \
    X(select_blocks, counter, "blocks", "blocks that selections scored, each KV head's apart")     \
    X(prefetch_useful, counter, "blocks", "blocks brought into DRAM for a chain and then loaded")  \
    X(prefetch_useless, counter, "blocks", "blocks brought into DRAM for a chain, evicted unused") \
    X(hint_tables, gauge, "tables", "namespaces whose blocks workers look up in a table of hints") \
    X(hint_bytes, gauge, "bytes", "memory of tables of hints")                                     \
    X(hint_left_out, gauge, "blocks", "blocks for which such a table has no room")                 \
    X(events_lost, counter, "events", "events that a reader asked for too late")                   \
    X(events_subscribers, gauge, "connections", "connections that have asked for events")          \
    X(events_bytes, gauge, "bytes", "memory of events and of what they tell of blocks")            \
    X(events_described, gauge, "blocks", "blocks whose tokens are kept for events")                \
    X(events_undescribed, counter, "blocks", "descriptions that were not kept for want of memory") \
    X(windows, gauge, "windows", "windows open now")                                               \
    X(window_bytes_configured, gauge, "bytes", "`window.size`: the most that is lent to windows")  \
    X(window_bytes, gauge, "bytes", "DRAM lent to windows, also what workers still have mapped")   \
    X(window_pins, gauge, "blocks", "blocks pinned in windows, those of each window apart")        \
    X(window_pinned_bytes, gauge, "bytes", "bytes of the slots of these")                          \
    X(window_moves, counter, "blocks", "blocks copied within DRAM into a window")                  \
    X(window_full, counter, "blocks",                                                              \
      "blocks that a pin left out: no space in the window, or not in time")                        \
    X(window_revocations, counter, "extents", "extents of windows that the daemon wanted back")    \
    X(window_overdue_bytes, counter, "bytes",                                                      \
      "bytes that clients did not release in time; their connections were ended")                  \
    X(slot_waiters, gauge, "requests", "transfers that wait for a free slot in DRAM now")          \
    X(slot_wait_oldest_us, gauge, "us",                                                            \
      "time that the oldest of the waiting transfers has waited for a slot")                       \
    X(regions, gauge, "regions", "regions registered now")                                         \
    X(device_errors, counter, "jobs", "copy jobs that failed")                                     \
    X(device_event_timeouts, counter, "jobs", "dumps whose event was not signalled in time")

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
    X(lookup, 1, 1, "time from a lookup's frame to its answer")                                    \
    X(load, METRIC_TIERS, METRIC_SIZES, "time from a load's frame to its answer")                  \
    X(fetch, METRIC_TIERS, 1, "time from a fetch's frame to its answer")                           \
    X(dump, 1, METRIC_SIZES, "time from a dump's frame to its answer")                             \
    X(slot_wait, 1, 1, "time that a transfer waited for a free slot in DRAM, if it had to")        \
    X(nvme_read, 1, 1, "time from asking NVMe for a part to its verified bytes")                   \
    X(loop_turn, 1, 1, "time of one turn of the loop that serves all, without its sleep")

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

/* ---- of what there are several: the same columns, and the kind `flag`, a bool on the wire ---- */

#define UCMD_TIER_METRICS(X)                                                                       \
    X(capacity_bytes, gauge, "bytes", "bytes that a tier can hold")                                \
    X(used_bytes, gauge, "bytes", "bytes of live parts in a tier")                                 \
    X(queued, gauge, "operations", "operations that wait for a tier")                              \
    X(in_flight, gauge, "operations", "operations given to a tier's device")                       \
    X(recovering, flag, "", "1: a tier may still find parts of an earlier run")                    \
    X(degraded, flag, "", "1: a file of a tier, or its list of namespaces, refuses writes")

#define UCMD_ROOT_METRICS(X)                                                                       \
    X(capacity_bytes, gauge, "bytes", "bytes that a root may hold, 0: no bound")                   \
    X(used_bytes, gauge, "bytes", "bytes that a root held at the last garbage collection")         \
    X(files, gauge, "files", "files that a root held at the last garbage collection")              \
    X(in_flight, gauge, "operations", "operations given to a root")                                \
    X(queued, gauge, "operations", "operations that wait for a root")                              \
    X(reads, counter, "parts", "parts read from a root")                                           \
    X(read_bytes, counter, "bytes", "bytes read from a root")                                      \
    X(writes, counter, "parts", "parts written to a root")                                         \
    X(write_bytes, counter, "bytes", "bytes written to a root")                                    \
    X(failures, counter, "operations", "operations that failed on a root")                         \
    X(timeouts, counter, "operations", "operations given up at their deadline on a root")          \
    X(breaks, counter, "times", "times that a root went down after failures in a row")             \
    X(backend_starts, counter, "times", "processes of a root that were started")                   \
    X(backend_ends, counter, "times", "processes of a root that ended, and nobody had asked")      \
    X(backend_kills, counter, "times", "of these, killed: they hung or broke the protocol")        \
    X(latency_us, gauge, "us", "time that a lookup's operation takes on a root, smoothed")

#define UCMD_DEVICE_METRICS(X)                                                                     \
    X(failed, flag, "", "1: the device has failed for good")                                       \
    X(jobs, counter, "jobs", "copy jobs done by a device")                                         \
    X(load_bytes, counter, "bytes", "bytes that a device copied into workers' memory")             \
    X(dump_bytes, counter, "bytes", "bytes that a device copied out of workers' memory")           \
    X(regions, gauge, "regions", "regions registered on a device")                                 \
    X(context_bytes, gauge, "bytes", "device memory that the daemon itself takes")                 \
    X(dma_launches, counter, "copies", "copies given to the copy engines")                         \
    X(dma_bytes, counter, "bytes", "bytes moved by the copy engines")                              \
    X(sm_launches, counter, "launches", "launches of the copy kernel")                             \
    X(sm_bytes, counter, "bytes", "bytes moved by the copy kernel")                                \
    X(staged_launches, counter, "slices", "slices of staging rings that copies went through")      \
    X(staged_bytes, counter, "bytes", "bytes moved through staging rings")                         \
    X(rings, gauge, "rings", "staging rings registered on a device")

/* Only where the arena is spread over several NUMA nodes. */
#define UCMD_NODE_METRICS(X)                                                                       \
    X(total_bytes, gauge, "bytes", "DRAM ready for slots on a NUMA node")                          \
    X(used_bytes, gauge, "bytes", "DRAM in slots that hold a part on a NUMA node")

/* Blocks and bytes are of the namespaces that exist now; the counters also of those that are
 * gone. */
#define UCMD_TENANT_METRICS(X)                                                                     \
    X(lookups, counter, "requests", "lookups of a tenant")                                         \
    X(lookup_keys, counter, "blocks", "keys that a tenant looked up")                              \
    X(lookup_hits, counter, "blocks", "keys of a tenant's lookups found complete")                 \
    X(lookup_hits_dram, counter, "blocks", "keys of a tenant's lookups found complete in DRAM")    \
    X(lookup_hits_shared, counter, "blocks",                                                       \
      "keys of a tenant's lookups with a part that only the shared tier has")                      \
    X(loads, counter, "requests", "loads of a tenant")                                             \
    X(load_bytes, counter, "bytes", "bytes copied into the memory of a tenant's workers")          \
    X(dumps, counter, "requests", "dumps of a tenant")                                             \
    X(dump_bytes, counter, "bytes", "bytes copied out of the memory of a tenant's workers")        \
    X(evicted_blocks, counter, "blocks", "blocks of a tenant evicted from DRAM to make space")     \
    X(nvme_read_bytes, counter, "bytes", "bytes read from NVMe for a tenant")                      \
    X(shared_read_bytes, counter, "bytes", "bytes read from shared roots for a tenant")            \
    X(bus_contended_bytes, counter, "bytes",                                                       \
      "bytes of a tenant that copies moved while other tenants' copies waited, too")               \
    X(bus_due_bytes, counter, "bytes",                                                             \
      "its weight's part of all that was copied while copies of a tenant and of others waited")    \
    X(nvme_contended_bytes, counter, "bytes",                                                      \
      "bytes read from NVMe for a tenant while other tenants' reads waited, too")                  \
    X(nvme_due_bytes, counter, "bytes",                                                            \
      "its weight's part of all that was read from NVMe while reads of a tenant and of others "    \
      "waited")                                                                                    \
    X(shared_contended_bytes, counter, "bytes",                                                    \
      "bytes read from a root for a tenant while other tenants' reads waited, too")                \
    X(shared_due_bytes, counter, "bytes",                                                          \
      "its weight's part of all that was read from roots while reads of a tenant and of others "   \
      "waited")                                                                                    \
    X(namespaces, gauge, "namespaces", "namespaces of a tenant")                                   \
    X(blocks, gauge, "blocks", "blocks of a tenant, complete or not")                              \
    X(dram_bytes, gauge, "bytes", "bytes of a tenant's parts in DRAM")                             \
    X(nvme_bytes, gauge, "bytes", "bytes of a tenant's parts on NVMe")                             \
    X(shared_bytes, gauge, "bytes", "bytes of a tenant's parts on the shared tier")                \
    X(dram_guaranteed_bytes, gauge, "bytes", "what a tenant is guaranteed of DRAM")                \
    X(dram_most_bytes, gauge, "bytes", "what a tenant gets of DRAM at most; 0: no bound")          \
    X(nvme_guaranteed_bytes, gauge, "bytes", "what a tenant is guaranteed of NVMe")                \
    X(nvme_most_bytes, gauge, "bytes", "what a tenant gets of NVMe at most; 0: no bound")          \
    X(shared_guaranteed_bytes, gauge, "bytes", "what a tenant is guaranteed of each shared root")  \
    X(shared_most_bytes, gauge, "bytes",                                                           \
      "what a tenant gets of each shared root at most; 0: no bound")

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
