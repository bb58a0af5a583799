/* One file of the NVMe tier: made, checked, locked, prepared. Its segments are not this file's
 * matter.
 *
 * An entry of nvme.paths is:
 * - a directory: the tier makes a file in it, with its namespace records and checkpoint next to it;
 * - a block device or a file: the tier uses it as it is. The rest lies in a directory of nvme.state
 *   that has its UUID for a name. Before anything is written to it, it was empty or marked by
 *   `ucmctl format`. A device that is mounted, or part of something else, is refused.
 *
 * Promises:
 * - A file of somebody else, of another version or another layout is refused and not touched.
 * - A file is never truncated.
 * - Two processes never have one open.
 * - A file has its name only once it is whole.
 *
 * Threads: one at a time; all of it blocks, for a few milliseconds where nothing is wrong. */
#ifndef UCMD_TIER_NVME_FILE_H
#define UCMD_TIER_NVME_FILE_H

#include "daemon/format/nvme_format.h"

#include <stdbool.h>
#include <stdint.h>

struct ucm_error;

struct nvme_file {
    int fd; /* O_DIRECT where the file system has it */
    char *path;
    char *directory; /* of what belongs to it: its names, its checkpoint */
    bool as_it_is;   /* a device, or a file that was named itself */
    bool device;
    uint8_t uuid[NVME_UUID_BYTES];
    uint64_t segments; /* to be used now, by the configured size */
    uint64_t bytes;    /* of these and what lies before them */
    /* The state page: the epoch of its last opening, 0 when it is new; all segments it has. */
    struct nvme_state state;
    unsigned state_next; /* copy to write next */
    unsigned damaged;    /* of its own pages, and 1 for a cut file: found at the opening */
};

/* Opens an entry of nvme.paths for segments of segment_bytes in size_bytes: makes NVME_CACHE_FILE
 * in a directory, or takes a file or device as it is (`state` is nvme.state, and a device may be
 * smaller than size_bytes). 0, or -errno with *e saying what would be right; see
 * take_failed for what speaks of a failing device. */
int nvme_file_open(const char *entry, const char *state, uint64_t size_bytes,
                   uint64_t segment_bytes, struct nvme_file *out, struct ucm_error *e);
/* What nvme_file_open would refuse of what lies at the entry now; opens it for reading, and takes
 * no lock. 0, also where nothing lies yet; or -errno with *e, as there. */
int nvme_file_check(const char *entry, uint64_t segment_bytes, struct ucm_error *e);
/* Makes `epoch` durable: to be called before anything else is written. */
int nvme_file_start(struct nvme_file *f, uint64_t epoch);
/* 0; -ENOENT when the file has no name any more (removed, or another was renamed over it), -ENXIO
 * when it was cut: a later start would not find what lies in it. Cheap. */
int nvme_file_intact(const struct nvme_file *f);
/* A sentence for an error of the file, or of nvme_file_intact. */
const char *nvme_file_trouble(int status);
/* Unlocks and closes. */
void nvme_file_close(struct nvme_file *f);

#endif
