/* The shared tier's roots as the configuration names them, by share.roots or, as UCM writes it, by
 * share.storage_backends. Any thread. */
#ifndef UCMD_BASE_CONFIG_ROOTS_H
#define UCMD_BASE_CONFIG_ROOTS_H

#include "daemon/base/config_table.h"

struct config_root {
    char
        target[CONFIG_ITEM_BYTES]; /* absolute path of a folder, or nfs://SERVER/EXPORT[?OPTIONS] */
    uint64_t capacity_bytes;       /* 0: no bound */
    bool read_only;
};

/* All of them, in order. 0 and *n; -EINVAL with *e. No I/O. */
int config_roots(const struct config *c, struct config_root out[UCM_MAX_ROOTS], uint32_t *n,
                 struct config_error *e);

/* What lies at the path of a folder's root: 0: a folder that this process may read or, with `write`,
 * make files in; -ENOTDIR: something else; -ENOENT: nothing; -EACCES, -EROFS; -ETIMEDOUT: the file
 * system does not answer within 2 s; -errno. Blocks; a thread makes the calls and, after a timeout,
 * stays behind until the file system answers. */
int config_root_look(const char *folder, bool write);

#endif
