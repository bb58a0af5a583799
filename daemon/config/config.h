/* The daemon's configuration. One table in table.c has each key's name, kind, default,
 * bounds and text; the defaults, the parser, --set, config_print and config/ucmd.yaml all come from
 * it.
 *
 * An error names file and line, what is wrong and what would be right. The key at fault keeps its
 * value, those before it are set; the caller gives up. Threads: the main thread reads it at start;
 * then everybody reads it, and config_reload writes the reloadable keys on the event loop. A struct
 * config owns its strings and lists. */
#ifndef UCMD_CONFIG_CONFIG_H
#define UCMD_CONFIG_CONFIG_H

#include "daemon/base/log.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct config_list {
    char **item;
    size_t n;
};

enum config_io { CONFIG_IO_AUTO, CONFIG_IO_URING, CONFIG_IO_THREADS };
enum config_write_stall { CONFIG_WRITE_STALL_DROP, CONFIG_WRITE_STALL_SLOW };
enum config_admission { CONFIG_ADMIT_ALL, CONFIG_ADMIT_REUSE, CONFIG_ADMIT_LEARNED };
enum config_placement { CONFIG_PLACEMENT_TIERED, CONFIG_PLACEMENT_HASHED };
enum config_copy { CONFIG_COPY_AUTO, CONFIG_COPY_DMA, CONFIG_COPY_SM, CONFIG_COPY_STAGED };
enum config_numa { CONFIG_NUMA_AUTO, CONFIG_NUMA_OFF };
enum config_cuda { CONFIG_CUDA_AUTO, CONFIG_CUDA_OFF, CONFIG_CUDA_REQUIRED };

#define CONFIG_MAX_PATHS 16
/* In arena.persist_dir: the arena's memory, and what lies where in it. */
#define CONFIG_KEEP_ARENA "ucmd.arena"
#define CONFIG_KEEP_SNAPSHOT "ucmd.kept"

/* Bounds that are no keys, since nobody needs others. */
#define CONFIG_MAX_REQUESTS 4096u   /* in progress, of all clients */
#define CONFIG_MAX_REGIONS_CONN 64u /* of one client */
#define CONFIG_MAX_LEASES_CONN 4096u
#define CONFIG_NVME_SUMS_BYTES (16u << 20) /* checksums of layers that the NVMe tier keeps */
#define CONFIG_SHARED_LOW 90u /* percent of a root's capacity that a garbage collection leaves */

#define CONFIG_MAX_KEYS 96

/* Where each key was last set, by its index in the table, so that config_check can name it. */
struct config_origin {
    char *file;                     /* the last file read; NULL: none */
    uint32_t line[CONFIG_MAX_KEYS]; /* 0: still the default */
};
#define CONFIG_LINE_SET UINT32_MAX /* by config_set, on the command line */
/* By the file as it was at the start; a reload found another value there. */
#define CONFIG_LINE_EARLIER (UINT32_MAX - 1)
#define CONFIG_LINE_ENV (UINT32_MAX - 2) /* by config_environment */

/* The fields in the table's order; its texts say what they mean. */
struct config {
    struct config_origin origin;

    char *socket;
    unsigned socket_mode;
    char *socket_group; /* "": the process's */
    struct config_list tenants, tenant_settings, admins;
    char *state; /* "": none */
    bool container_admins;
    struct config_list encryption_tenants;
    bool encryption_read_plaintext;
    bool encryption_allow_persistent_arena;
    char *encryption_secrets; /* "": none */
    uint64_t encryption_timeout_ms;
    enum log_level log_level;

    char *metrics_socket; /* "": none; without a slash: next to `socket` */
    unsigned metrics_socket_mode;
    char *metrics_listen; /* "": none */

    uint64_t arena_size, arena_slab;
    bool arena_prefault;
    char *arena_persist_dir; /* "": none */
    enum config_numa arena_numa;
    uint64_t mapping_size; /* bytes; 0: no shared mappings */

    unsigned index_max_blocks;

    struct config_list nvme_paths; /* empty: no tier */
    char *nvme_state;
    uint64_t nvme_size, nvme_segment;
    unsigned nvme_queue_depth;
    enum config_io nvme_io;
    unsigned nvme_threads;
    uint64_t nvme_write_queue_size;
    uint64_t nvme_scrub; /* bytes a second; 0: none */
    uint64_t nvme_scrub_interval_ms;
    unsigned nvme_quarantine; /* percent */
    enum config_write_stall nvme_on_write_stall;
    uint64_t nvme_write_stall_max_ms;
    enum config_admission nvme_admission;
    unsigned nvme_rewrite; /* percent */

    struct config_list shared_roots; /* see roots.h */
    enum config_placement shared_placement;
    uint64_t shared_lookup_ms, shared_negative_ms, shared_timeout_ms;
    unsigned shared_queue_depth, shared_threads;
    enum config_admission shared_admission;
    bool shared_sync;
    uint64_t shared_gc_interval_ms, shared_touch_ms;

    enum config_cuda cuda;
    unsigned cpu_threads;
    enum config_copy copy_strategy;
    unsigned copy_busy_max_percent;
    char *copy_calibration; /* "": none */

    uint64_t events_memory; /* 0: no events */

    unsigned max_connections, max_requests_conn, max_namespaces, max_namespaces_tenant;
    uint64_t max_frame_memory;

    uint64_t lease_max_ms, request_timeout_ms, handshake_ms, unread_ms, drain_ms;
};

/* "FILE:LINE: what is wrong; what would be right", with "--set:" instead of file and line for what
 * came from the command line, and "UCMD_ARENA_SIZE:" for what came from the environment. */
#define CONFIG_EVENTS_MIN (1u << 20) /* of events.memory, unless it is 0 */

struct config_error {
    char text[512];
    const char *file; /* what the text begins with; the functions below set it */
    const char *key;  /* of a variable */
    uint32_t line;
    uint32_t sentence; /* where in text the sentence begins, after the location */
};

/* A key whose value a reload found changed. The values are for people, and cut if they are long. */
#define CONFIG_SHOWN_BYTES 512
struct config_change {
    const char *key;
    bool restart; /* it takes effect at the next start */
    char from[CONFIG_SHOWN_BYTES], to[CONFIG_SHOWN_BYTES];
};

struct config_changes {
    uint32_t n;
    struct config_change change[CONFIG_MAX_KEYS];
};

void config_init(struct config *c); /* the defaults */
void config_free(struct config *c);

/* Reads a YAML file (at most 1 MiB) over the present values. 0 or -errno with *e; what is wrong in
 * the file is -EINVAL. */
int config_read(struct config *c, const char *path, struct config_error *e);
/* Where a configuration comes from; borrowed. */
struct config_sources {
    const char *path;         /* of the file; NULL: there is none */
    char *const *environment; /* "NAME=value", NULL at the end; goes over the file. NULL: none */
    char *const *sets;        /* "key=value" of each --set, which go over both */
    int n_sets;
};

/* All of them over the present values, each over those before it. As config_read. */
int config_read_all(struct config *c, const struct config_sources *from, struct config_error *e);
/* One "key=value", as --set takes it; a list is replaced by its comma-separated items. */
int config_set(struct config *c, const char *assignment, struct config_error *e);
/* Each "UCMD_SECTION_KEY=value", as config_set takes it; other variables are not looked at. One
 * that belongs to no key is refused, but for those that Kubernetes makes for a service named
 * ucmd. */
int config_environment(struct config *c, char *const *environment, struct config_error *e);
/* The variable of a key: "UCMD_ARENA_SIZE" of "arena.size". Returns buf. */
#define CONFIG_VARIABLE_BYTES 64
const char *config_variable(const char *key, char buf[CONFIG_VARIABLE_BYTES]);
/* What no key shows alone: sizes against each other and against this host, the socket's group,
 * directories that must exist and be writable, space on the file system. Changes nothing on disk. 0
 * or -EINVAL with *e. */
int config_check(const struct config *c, struct config_error *e);
/* The part of config_check that asks nothing of this host: values against each other. For a reload,
 * which must not wait for a disk, and whose daemon holds the memory that a start asks for. */
int config_check_values(const struct config *c, struct config_error *e);
/* What lies at the paths of shared roots, for after config_check: -EINVAL when one is not a
 * directory; warn_cb with where and why for each that is missing or does not answer. Blocks up to 2
 * s for each root: not for the event loop. */
int config_check_roots(const struct config *c, void (*warn_cb)(const char *text),
                       struct config_error *e);
/* Begins *e with the location where the key was set. Returns -EINVAL. For what modules find
 * wrong. */
int config_fail(const struct config *c, struct config_error *e, const char *key, const char *format,
                ...) __attribute__((format(printf, 4, 5)));
/* Whom "uid:N" or "gid:N" names, into *is_gid and *id. false when the n bytes of text are
 * neither. */
bool config_principal(const char *text, size_t n, bool *is_gid, uint32_t *id);
/* Whether the n bytes of text are a name that `tenants` takes. */
bool config_tenant_named(const char *text, size_t n);
/* The path in "cgroup:/PATH", and its length, or NULL when the n bytes of text are none. */
const char *config_cgroup(const char *text, size_t n, size_t *bytes);
/* Whether any entry of nvme.paths exists. Then one that does not may be a disk that has died. */
bool config_nvme_there(const struct config *c);
/* Exchanges the reloadable keys that differ in c and `fresh`, so it can't fail half way. Lists
 * these, and the differing keys that need a restart. Keys that config_set set in c stay as they
 * are. */
void config_reload(struct config *c, struct config *fresh, struct config_changes *changes);
/* Where a key's value comes from. */
enum config_from { CONFIG_FROM_DEFAULT, CONFIG_FROM_FILE, CONFIG_FROM_ENV, CONFIG_FROM_SET };

/* A key for people: values are cut if they are long. */
struct config_entry {
    const char *key;
    bool changed; /* not the default */
    bool reloadable;
    bool waits; /* the next start will have another value, `next` */
    enum config_from from;
    char where[160]; /* "FILE:LINE", a variable, "--set", or "" */
    char value[CONFIG_SHOWN_BYTES], initial[CONFIG_SHOWN_BYTES], next[CONFIG_SHOWN_BYTES];
};

struct config_entries {
    uint32_t n;
    struct config_entry entry[CONFIG_MAX_KEYS];
};

/* Every key, those for tests and measurements only where they are set. next: as of the last reload,
 * or NULL. */
void config_entries(const struct config *c, const struct config *next, struct config_entries *out);
/* Prints every key with its text and value to standard output, as YAML that config_read takes.
 * config/ucmd.yaml is what it prints for the defaults. */
void config_print(const struct config *c);

#endif
