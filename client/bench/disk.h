/* What a disk does without us: one file of it read at random places, or written from its beginning
 * to its end, with O_DIRECT at a given depth, by a bare io_uring loop with registered buffers and
 * files, for a given time.
 * Threads: one. */
#ifndef UCM_BENCH_DISK_H
#define UCM_BENCH_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DISK_PATH_BYTES 512

struct disk {
    char path[DISK_PATH_BYTES];
    uint64_t bytes;
    uint64_t block_bytes; /* a multiple of 4096 */
    unsigned depth; /* so many blocks are a GiB at most: what the kernel registers in one piece */
    char why[DISK_PATH_BYTES + 128]; /* of a failure */
};

/* Makes a file of `bytes` in `directory`, every byte of it written. 0 or -errno with d->why. */
int disk_make(struct disk *d, const char *directory, const char *name);
/* 0 and bytes a second, or -errno with d->why. */
int disk_run(struct disk *d, bool write, double seconds, double *rate);

#endif
