/* Counters and gauges, declared once: the struct, `stats` and the docs come from this table. It
 * stands with the wire because the names travel in `stats`. One struct in the server, written by
 * the loop thread only (other threads report through the completion that the loop handles). */
#ifndef UCM_PROTO_METRICS_H
#define UCM_PROTO_METRICS_H

#include <stdint.h>

/* X(name, kind, unit, help): kind is counter (only grows) or gauge */
#define UCMD_METRICS(X)                                                                            \
    X(connections, gauge, "connections", "clients connected now")                                  \
    X(connections_total, counter, "connections", "clients accepted since start")                   \
    X(connections_refused, counter, "connections", "clients turned away at the limit")             \
    X(connections_dropped, counter, "connections", "clients dropped for breaking the protocol")    \
    X(requests_total, counter, "requests", "requests received")                                    \
    X(requests_active, gauge, "requests", "requests under way")                                    \
    X(requests_busy, counter, "requests", "requests answered BUSY")                                \
    X(requests_failed, counter, "requests", "requests answered with an error, BUSY included")      \
    X(requests_deadline, counter, "requests", "requests that passed their deadline")               \
    X(requests_cancelled, counter, "requests", "requests cancelled")                               \
    X(lookups, counter, "requests", "lookups")                                                     \
    X(lookup_keys, counter, "blocks", "keys looked up")                                            \
    X(lookup_hits, counter, "blocks", "keys found complete")                                       \
    X(leases, gauge, "leases", "leases held now")                                                  \
    X(leases_expired, counter, "leases", "leases that ran out")                                    \
    X(load_blocks_dram, counter, "blocks", "parts loaded that lay in DRAM")                        \
    X(load_blocks_nvme, counter, "blocks", "parts loaded that were read from NVMe")                \
    X(load_blocks_missed, counter, "blocks", "parts asked for by a load and not here")             \
    X(load_bytes, counter, "bytes", "copied into workers' memory")                                 \
    X(dump_blocks, counter, "blocks", "parts stored")                                              \
    X(dump_blocks_existing, counter, "blocks", "parts offered that were stored already")           \
    X(dump_blocks_skipped, counter, "blocks", "parts not stored, for want of room")                \
    X(dump_blocks_dropped, counter, "blocks", "parts begun and dropped: worker gone, copy failed") \
    X(dump_blocks_durable, counter, "blocks", "parts that a dump waited for on stable storage")    \
    X(dumps_slowed, counter, "requests", "dumps answered late, the backlog being full")            \
    X(dump_bytes, counter, "bytes", "copied out of workers' memory")                               \
    X(prefetch_blocks, counter, "blocks", "parts brought into DRAM by prefetch")                   \
    X(single_flight, counter, "blocks", "reads saved because the part was being read already")     \
    X(blocks, gauge, "blocks", "complete blocks, in any tier")                                     \
    X(blocks_partial, gauge, "blocks", "blocks with parts still missing")                          \
    X(blocks_pinned, gauge, "blocks", "blocks pinned by operators")                                \
    X(index_bytes, gauge, "bytes", "memory of the index")                                          \
    X(index_evicted, counter, "blocks", "blocks dropped because the index was full")               \
    X(arena_bytes_total, gauge, "bytes", "DRAM ready for slots")                                   \
    X(arena_bytes_configured, gauge, "bytes", "DRAM configured")                                   \
    X(arena_bytes_used, gauge, "bytes", "DRAM in slots that hold a part")                          \
    X(arena_evicted_blocks, counter, "blocks", "blocks evicted from DRAM")                         \
    X(arena_evicted_lost, counter, "blocks", "of these, blocks that lay nowhere else")             \
    X(arena_candidates, counter, "blocks", "blocks looked at for eviction from DRAM")              \
    X(arena_extents_moved, counter, "extents", "extents moved between slot sizes")                 \
    X(arena_full, counter, "times", "a slot was wanted and everything was in use")                 \
    X(arena_slots_near, counter, "slots", "slots had on the NUMA node of the GPU that asked")      \
    X(arena_slots_far, counter, "slots", "slots had on another node")                              \
    X(arena_kept_parts, counter, "parts", "parts in DRAM kept over a restart")                     \
    X(arena_kept_bytes, counter, "bytes", "of these")                                              \
    X(arena_kept_refused, counter, "parts", "kept parts not taken over: damaged, or not wanted")   \
    X(nvme_bytes_capacity, gauge, "bytes", "capacity of the NVMe tier")                            \
    X(nvme_bytes_used, gauge, "bytes", "bytes of live slots on NVMe")                              \
    X(nvme_read_bytes, counter, "bytes", "read from NVMe")                                         \
    X(nvme_reads, counter, "parts", "parts read from NVMe")                                        \
    X(nvme_stored_bytes, counter, "bytes", "of parts that the cache gave and NVMe has stored")     \
    X(nvme_written_bytes, counter, "bytes", "written to NVMe: these, headers, padding, rewrites")  \
    X(nvme_rewritten_bytes, counter, "bytes",                                                      \
      "of these, parts kept when their segment was reused")                                        \
    X(nvme_rewritten, counter, "parts", "parts kept when their segment was reused")                \
    X(nvme_checkpoint_bytes, counter, "bytes", "written to NVMe besides: checkpoints")             \
    X(nvme_write_amplification, gauge, "1/1000", "bytes written to NVMe for 1000 bytes stored")    \
    X(nvme_writes, counter, "parts", "parts written to NVMe")                                      \
    X(nvme_write_dropped, counter, "parts", "parts not written: backlog or tier full, or failed")  \
    X(nvme_write_refused, counter, "parts", "parts not admitted: written when used again")         \
    X(nvme_write_waits, counter, "times", "the tier's queue was full: written later")              \
    X(nvme_read_errors, counter, "parts", "reads that failed after their retries")                 \
    X(nvme_write_errors, counter, "parts", "writes that failed after their retries")               \
    X(nvme_corrupt, counter, "parts", "parts whose checksum did not agree")                        \
    X(nvme_reclaimed_segments, counter, "segments", "segments taken back for new writes")          \
    X(nvme_reclaimed_blocks, counter, "blocks", "blocks that such a segment still held")           \
    X(nvme_recovering, gauge, "segments", "segments of an earlier run still to be looked through") \
    X(nvme_recovered_parts, counter, "parts", "parts of earlier runs found again")                 \
    X(nvme_recovered_bytes, counter, "bytes", "of these")                                          \
    X(nvme_syncs, counter, "syncs", "of the files, for dumps that asked for durability")           \
    X(nvme_sync_errors, counter, "parts", "parts that a failed sync left in doubt")                \
    X(nvme_checkpoints, counter, "checkpoints", "checkpoints of what lies on NVMe, written")       \
    X(nvme_damaged_pages, counter, "pages", "headers and records that did not pass at the start")  \
    X(nvme_scrub_bytes, counter, "bytes", "read in the background to be verified")                 \
    X(nvme_scrub_passes, counter, "passes", "over all that lies on NVMe, ended")                   \
    X(nvme_scrub_segments, gauge, "segments", "that the present pass has done")                    \
    X(nvme_scrub_bad, counter, "parts", "that the scrub found damaged or unreadable")              \
    X(nvme_bad_headers, counter, "pages", "headers of sound parts found damaged while it ran")     \
    X(nvme_quarantined_bytes, gauge, "bytes", "of segments that are not written to any more")      \
    X(nvme_files_lost, gauge, "files",                                                             \
      "of nvme.paths: not opened, or removed or cut while in use")                                 \
    X(nvme_returned, counter, "files", "that take writes again after they had failed")             \
    X(blocks_shared, gauge, "blocks", "of the complete ones, known to lie on a share only")        \
    X(lookup_hits_shared, counter, "blocks", "keys found with a part on a share only")             \
    X(lookups_waited, counter, "requests", "lookups that waited for an answer of a share")         \
    X(load_blocks_shared, counter, "blocks", "parts loaded that were read from a share")           \
    X(share_forgotten, counter, "blocks",                                                          \
      "thought to lie on a share, and a read did not get them")                                    \
    X(share_write_dropped, counter, "parts", "parts not written to a share: evicted, or failed")   \
    X(share_write_refused, counter, "parts", "parts not admitted: written when used again")        \
    X(share_write_waits, counter, "times", "a share took no write then: later")                    \
    X(share_remove_dropped, counter, "parts", "evicted by name, and a share took no removal then") \
    X(share_reads, counter, "parts", "parts read from shared roots")                               \
    X(share_read_bytes, counter, "bytes", "of these")                                              \
    X(share_writes, counter, "parts", "parts written to shared roots")                             \
    X(share_write_bytes, counter, "bytes", "of these")                                             \
    X(share_damaged, counter, "parts", "files of shared roots that were not what they should be")  \
    X(share_failures, counter, "operations", "that a shared root failed")                          \
    X(share_timeouts, counter, "operations", "that a shared root did not end in time")             \
    X(share_breaks, counter, "times", "a shared root was left alone after failures in a row")      \
    X(share_roots_down, gauge, "roots", "shared roots that are left alone now")                    \
    X(share_probes, counter, "requests", "searches for keys on shared roots")                      \
    X(share_probe_finds, counter, "keys", "that these asked a root for")                           \
    X(share_gc_passes, counter, "passes", "of the shared roots' garbage collection, ended")        \
    X(share_gc_failed, counter, "passes", "of these, given up: the root failed")                   \
    X(share_gc_removed, counter, "files", "that they removed from a root, copied or not")          \
    X(share_gc_bytes, counter, "bytes", "of these")                                                \
    X(share_gc_demoted, counter, "files", "that they copied to the next root first")               \
    X(share_gc_temps, counter, "files", "temporary ones that dead writers left and they removed")  \
    X(regions, gauge, "regions", "regions registered now")                                         \
    X(device_jobs, counter, "jobs", "copy jobs given to devices")                                  \
    X(device_errors, counter, "jobs", "copy jobs that failed")                                     \
    X(device_event_timeouts, counter, "jobs", "dumps whose event was not signalled in time")

struct metrics {
#define X(name, kind, unit, help) uint64_t name;
    UCMD_METRICS(X)
#undef X
};

#endif
