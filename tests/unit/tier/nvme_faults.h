/* A device, a file system and a ring that fail when a test says so: nvme_faults.c takes the place of libc's and
 * liburing's functions in this program. */
#ifndef UCMD_TESTS_NVME_FAULTS_H
#define UCMD_TESTS_NVME_FAULTS_H

#include <stdbool.h>
#include <sys/types.h>

/* How often the next calls fail, and with what; threads of the pool call these. */
struct nvme_faults {
    int write_error, open_error, allocate_error, sync_error;
    int writes_fail;   /* that many, then well again */
    bool headers_fail; /* writes that begin with a segment's header */
    int ring_submit_error, ring_error;
    const char *open_path;
    off_t late_from, late_to; /* of pages in there, the first is read when some others were */
    int late_reads;           /* those others, counted */
    int syncs;                /* counted */
};

extern struct nvme_faults fault;

#endif
