/* What an entry of nvme.paths is:
 * - a folder: the tier makes a file in it, with its namespace records and checkpoint beside it;
 * - a block device or a file: the tier uses it as it is. The rest lies in a folder of nvme.state
 *   that has its UUID for a name.
 *
 * Promise: before anything is written to a device or file, it was empty or marked by `ucmctl
 * format`. A device that is mounted, or part of something else, is refused.
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
