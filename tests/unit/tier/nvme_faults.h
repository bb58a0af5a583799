/* A device, a file system and a ring that fail when a test says so. nvme_faults.c replaces libc's
 * and liburing's functions in this program. */
#ifndef UCMD_TESTS_NVME_FAULTS_H
#define UCMD_TESTS_NVME_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

/* How often and with which errors the next calls fail. Threads of the pool call them. */
struct nvme_faults {
    int write_error, open_error, allocate_error, sync_error;
    atomic_int writes_fail; /* so many fail, later ones succeed */
    bool headers_fail;      /* writes that begin with a segment's header */
    int ring_submit_error, ring_error;
    const char *open_path;
    off_t late_from, late_to; /* the first page in this range is read only after some others */
    atomic_int late_reads;    /* those others, counted */
    atomic_int syncs;         /* counted */
};

extern struct nvme_faults fault;

#endif
