/* The daemon's configuration. One table in config_table.c carries each key's name, kind, default,
 * bounds and text; defaults, parsing, --set, config_print and config/ucmd.yaml all come from it.
 *
 * A value that is refused names its file and line, what is wrong and what would be right; the
 * configuration is then as it was before that key, and the caller is expected to give up.
 * Threads: read at start by the main thread, then read-only, but for a reload (see config_reload).
 * A struct config owns its strings and lists. */
#ifndef UCMD_BASE_CONFIG_H
#define UCMD_BASE_CONFIG_H

#include "daemon/base/log.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct config_list {
    char **item;
    size_t n;
};

enum config_io { CONFIG_IO_AUTO, CONFIG_IO_URING, CONFIG_IO_THREADS };
/* What happens while more waits to be written than may. */
enum config_pressure { CONFIG_PRESSURE_DROP, CONFIG_PRESSURE_SLOW };
/* Which dumped blocks are written to NVMe. */
enum config_admission { CONFIG_ADMIT_ALL, CONFIG_ADMIT_REUSE };
/* How blocks are spread over several shared roots. */
enum config_spread { CONFIG_SPREAD_TIERED, CONFIG_SPREAD_HASHED };
enum config_probe { CONFIG_PROBE_PREFIX, CONFIG_PROBE_EXACT };
enum config_copy { CONFIG_COPY_AUTO, CONFIG_COPY_DMA, CONFIG_COPY_SM, CONFIG_COPY_STAGED };
enum config_numa { CONFIG_NUMA_AUTO, CONFIG_NUMA_OFF };
enum config_cuda { CONFIG_CUDA_AUTO, CONFIG_CUDA_OFF, CONFIG_CUDA_REQUIRED };

/* The file that the NVMe tier makes in each of nvme.paths. */
#define CONFIG_NVME_FILE "ucmd.cache"
/* What it keeps beside it: the namespaces of the parts in it. */
#define CONFIG_NVME_NAMES "ucmd.namespaces"
#define CONFIG_NVME_INDEX "ucmd.index" /* and its checkpoint */
#define CONFIG_MAX_PATHS 16
#define CONFIG_MAX_ROOTS 8
/* In arena.keep: the arena's memory, and what lies where in it. */
#define CONFIG_KEEP_ARENA "ucmd.arena"
#define CONFIG_KEEP_MANIFEST "ucmd.kept"

#define CONFIG_MAX_KEYS 96

/* Where each key was last set, by its place in the table, so that config_check can name it. */
struct config_origin {
    char *file;                     /* the last file read; NULL: none */
    uint32_t line[CONFIG_MAX_KEYS]; /* 0: still the default */
};
#define CONFIG_LINE_SET UINT32_MAX /* by config_set, on the command line */

struct config {
    struct config_origin origin;

    char *socket;             /* socket: path; default /run/ucmd/ucmd.sock */
    unsigned socket_mode;     /* socket_mode: octal; 0660 */
    char *socket_group;       /* socket_group: name; "" keeps the process's */
    enum log_level log_level; /* log.level: info (reloadable) */

    uint64_t arena_size;   /* arena.size: 4GiB */
    uint64_t arena_extent; /* arena.extent: 64MiB, a power of two, 1MiB to 1GiB */
    bool arena_hugepages;  /* arena.hugepages: true (madvise) */
    bool arena_prefault;   /* arena.prefault: true; false touches pages at first use */
    char *arena_keep;      /* arena.keep: folder on a tmpfs or hugetlbfs; "" keeps nothing */

    enum config_numa arena_numa; /* arena.numa: auto, off */

    uint64_t index_max_blocks; /* index.max_blocks: 16777216 */

    struct config_list nvme_paths; /* nvme.paths: folders, files and devices; empty: no tier */
    char *nvme_state;              /* nvme.state: folder of what belongs to files and devices; "" */
    uint64_t nvme_size;            /* nvme.size: of each path's file; 64GiB */
    uint64_t nvme_segment;         /* nvme.segment: 64MiB, 1MiB to 1GiB */
    unsigned nvme_depth;           /* nvme.depth: requests in flight a path, 1 to 4096; 128 */
    enum config_io nvme_io;        /* nvme.io: auto, uring, threads */
    unsigned nvme_threads;         /* nvme.threads: for checksums and blocking I/O; 4 */
    uint64_t nvme_backlog;         /* nvme.backlog: bytes waiting to be written; 1GiB */
    enum config_pressure nvme_pressure;   /* nvme.pressure: drop, slow */
    enum config_admission nvme_admission; /* nvme.admission: all, reuse */
    unsigned nvme_rewrite;                /* nvme.rewrite: percent of a reclaimed segment; 50 */
    uint64_t nvme_pressure_ms;            /* nvme.pressure_wait: longest wait of a dump; 200ms */
    uint64_t nvme_scrub; /* nvme.scrub: bytes a second that are read to be verified; 0: none */
    uint64_t nvme_scrub_interval_ms; /* nvme.scrub_interval: from pass to pass; 24h */
    unsigned nvme_quarantine;        /* nvme.quarantine: percent of a file's segments at most; 5 */

    struct config_list share_roots;        /* share.roots: "TARGET [capacity=SIZE] [ro]" */
    char *share_backends;                  /* share.storage_backends: targets, colons between */
    enum config_spread share_spread;       /* share.spread: tiered, hashed */
    enum config_probe share_lookup;        /* share.lookup: prefix, exact */
    uint64_t share_lookup_ms;              /* share.lookup_deadline: 50ms */
    uint64_t share_negative_ms;            /* share.negative: 2s */
    uint64_t share_deadline_ms;            /* share.deadline: of one read or write; 5s */
    unsigned share_depth;                  /* share.depth: requests under way an nfs root; 64 */
    unsigned share_threads;                /* share.threads: a posix root; 16 */
    enum config_admission share_admission; /* share.admission: all, reuse */
    bool share_sync;                       /* share.sync: false */
    unsigned share_low;                    /* share.low: percent of the capacity; 90 */
    uint64_t share_collect_ms;             /* share.collect: from pass to pass; 10min */
    uint64_t share_touch_ms;               /* share.touch: 1h */

    enum config_cuda cuda; /* device.cuda: auto, off, required */
    unsigned cpu_threads;  /* device.cpu_threads: copy threads for cpu regions; 2 */

    enum config_copy copy_strategy; /* copy.strategy: auto, dma, sm, staged */
    char *copy_calibration;         /* copy.calibration: folder; "" keeps nothing */

    unsigned max_connections;       /* limits.connections: 1024 */
    unsigned max_requests;          /* limits.requests: under way in all; 4096 */
    unsigned max_requests_conn;     /* limits.requests_per_connection: 256 */
    unsigned max_regions_conn;      /* limits.regions_per_connection: 64 */
    unsigned max_leases_conn;       /* limits.leases_per_connection: 4096 */
    unsigned max_namespaces;        /* limits.namespaces: 4096 */
    unsigned max_namespaces_tenant; /* limits.namespaces_per_tenant: 1024 */
    uint64_t max_frame_memory;      /* limits.frame_memory: of requests under way; 256MiB */

    uint64_t lease_max_ms; /* lease.max: 10min */
    uint64_t deadline_ms;  /* request.deadline: default of a request; 30s (reloadable) */
    uint64_t handshake_ms; /* request.handshake: until hello, and for one frame to arrive; 10s */
    uint64_t drain_ms;     /* shutdown.drain: 10s */

    struct config_list
        tenants; /* tenants: list of "name uid:1000 uid:1001 gid:200"; else "uid:N" */
    struct config_list
        admins; /* admins: list of "uid:0", "gid:5"; uid 0 and the daemon's own always are */
};

/* Where and why a configuration was refused: "FILE:LINE: what is wrong; what would be right", with
 * "--set:" in place of file and line for what came from the command line. */
struct config_error {
    char text[512];
};

void config_init(struct config *c); /* the defaults */
void config_free(struct config *c);

/* Reads a YAML file (at most 1 MiB) over the present values. 0 or -EINVAL, -errno, *e filled. */
int config_read(struct config *c, const char *path, struct config_error *e);
/* One "key=value", as --set takes it; a list is replaced by its comma-separated items. */
int config_set(struct config *c, const char *assignment, struct config_error *e);
/* What no single key can tell: sizes against each other, paths that must exist and be writable,
 * room on the file system. Changes nothing on disk. */
int config_check(const struct config *c, struct config_error *e);
/* What lies at the paths of shared roots, for after config_check: -EINVAL when one is not a folder;
 * warn_cb with where and why for each that is missing or does not answer. Blocks up to 2 s for each
 * root: not for the loop. */
int config_check_roots(const struct config *c, void (*warn_cb)(const char *text),
                       struct config_error *e);
/* Is any entry of nvme.paths there? Then one that is not may be a disk that has died. */
bool config_nvme_there(const struct config *c);
/* Takes the reloadable keys of `fresh` over into c; returns how many of the others differ and names
 * the first of them in *e (they need a restart). What config_set set in c stays, as it went over
 * the file at the start too. */
int config_reload(struct config *c, const struct config *fresh, struct config_error *e);
/* Prints every key with its meaning and value to standard output, as YAML that config_read takes.
 * config/ucmd.yaml is what it prints for the defaults. */
void config_print(const struct config *c);

#endif
