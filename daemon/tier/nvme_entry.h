/* What an entry of nvme.paths is. A folder: a file is made in it, and what belongs to that file
 * lies beside it. A block device, or a file: it is used as it is, and what belongs to it (its
 * names, its checkpoint) lies in a folder of nvme.state that has its UUID for a name.
 *
 * Promise: a device or file that is used as it is was empty or marked by `ucmctl format` before
 * anything was written to it; one that is mounted, or part of something else, is refused.
 * Threads: any; all of it blocks. */
#ifndef UCMD_TIER_NVME_ENTRY_H
#define UCMD_TIER_NVME_ENTRY_H

#include "daemon/format/nvme_format.h"

#include <stdbool.h>
#include <stdint.h>

struct ucm_error;

enum nvme_entry { NVME_ENTRY_FOLDER, NVME_ENTRY_FILE, NVME_ENTRY_DEVICE };

/* 0, or -errno with *e. */
int nvme_entry_kind(const char *path, enum nvme_entry *out, struct ucm_error *e);
/* Opens a device for this process alone, to the exclusion of mounts as well. Its descriptor, or
 * -errno with *e. */
int nvme_entry_open_device(const char *path, struct ucm_error *e);
/* The folder of its own in nvme.state, made if need be; *out from malloc. 0, or -errno with *e. */
int nvme_entry_folder(const char *path, const char *state, const uint8_t uuid[NVME_UUID_BYTES],
                      char **out, struct ucm_error *e);

#endif
