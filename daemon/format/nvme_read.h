/* Reading what the NVMe tier's files hold besides records: the daemon's recovery and ucmctl's
 * offline tools share these rules. Any thread; all of it blocks. */
#ifndef UCMD_FORMAT_NVME_READ_H
#define UCMD_FORMAT_NVME_READ_H

#include "daemon/format/nvme_format.h"

/* The state of two copies of a page; bit i is about copy i. */
struct nvme_copies {
    unsigned good, damaged, unreadable;
    unsigned next; /* the copy to write next: not the one that counts */
    int error;     /* -errno of the last that could not be read */
};

/* The copy with the highest epoch, or change, that passes. *out is untouched where none does. A
 * blank page is neither good nor damaged. */
struct nvme_copies nvme_state_read(int fd, const uint8_t uuid[NVME_UUID_BYTES],
                                   struct nvme_state *out);
struct nvme_copies nvme_quarantine_read(int fd, const uint8_t uuid[NVME_UUID_BYTES],
                                        struct nvme_quarantine *out);

#define NVME_NS_RECORDS_MAX 65536u /* that are read of one file */

/* Record i of ucmd.namespaces. 0; -ENODATA: the file ends before it; -EBADMSG: torn, damaged, or
 * the rest of a file that is no whole number of pages; -errno. */
int nvme_ns_record_read(int fd, uint64_t i, struct nvme_ns_record *out);

#endif
