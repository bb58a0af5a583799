/* The shared tier's roots as the configuration names them, by shared.roots. Any thread. */
#ifndef UCMD_CONFIG_ROOTS_H
#define UCMD_CONFIG_ROOTS_H

#include "daemon/config/table.h"

#define CONFIG_COMMAND_BYTES (2 * CONFIG_ITEM_BYTES)

/* What serves a root (docs/backends.md). Without a command in the configuration it is one of ucmd's
 * own. */
struct config_process {
    /* Words with single spaces between them. */
    char command[CONFIG_COMMAND_BYTES];
    uint64_t buffer_bytes; /* that daemon and process share */
    uint64_t memory_bytes; /* of its own, at most; 0: no bound */
    bool network;          /* it may use it */
    /* Absolute paths that it may write to and read besides; "": none. */
    char directory[CONFIG_ITEM_BYTES], read[CONFIG_ITEM_BYTES];
    /* Not to be configured; 0: as docs/backends.md says. How long it may be silent beyond what is
     * due; the shortest pause between starts. */
    unsigned patience_ms, pause_ms;
};
struct config_root {
    /* Absolute path of a directory, nfs://SERVER/EXPORT[?OPTIONS], s3://BUCKET[/PREFIX][?OPTIONS],
     * mooncake://MASTER:PORT[/PREFIX][?OPTIONS], or process:NAME. */
    char target[CONFIG_ITEM_BYTES];
    uint64_t capacity_bytes; /* 0: no bound */
    bool read_only;
    struct config_process process;
};

#define CONFIG_PROCESS "process:"
/* Defaults of a process without buffer= and memory=. */
#define CONFIG_BUFFER (128ull << 20)
#define CONFIG_MEMORY (2ull << 30)

/* A sanitizer reserves more memory than any bound allows. gcc says so by macros, clang by
 * __has_feature. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#undef CONFIG_MEMORY
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#undef CONFIG_MEMORY
#endif
#endif
#ifndef CONFIG_MEMORY
#define CONFIG_MEMORY 0ull
#endif

/* All of them, in order. 0 and *n; -EINVAL with *e. No I/O but to find the programs that ucmd
 * brings. */
int config_roots(const struct config *c, struct config_root out[UCM_MAX_ROOTS], uint32_t *n,
                 struct config_error *e);

/* What lies at the path of a directory's root: 0: a directory that this process may read or, with
 * `write`, make files in; -ENOTDIR: something else; -ENOENT: nothing; -EACCES, -EROFS; -ETIMEDOUT:
 * the file system does not answer within 2 s; -errno. Blocks; a thread makes the calls and, after a
 * timeout, stays behind until the file system answers. */
int config_root_look(const char *directory, bool write);

#endif
