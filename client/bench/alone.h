/* The NVMe tier by itself, as the daemon has it: parts written and read with their checksums, a
 * number of them under way all the time, for a given time.
 * Threads: one; the tier has its own. */
#ifndef UCM_BENCH_ALONE_H
#define UCM_BENCH_ALONE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct alone_options {
    const char *folder; /* takes the tier's files; the caller's to empty */
    uint64_t part_bytes, total_bytes;
    unsigned depth; /* at the disk; twice as many are given, so that those being checked are not
                       missing there */
    const char *io; /* as nvme.io */
    bool sealed;    /* with a key, encrypted */
};

struct alone;

/* Writes all parts, and every place of the file at least once. 0, or -errno with a sentence. */
int alone_open(const struct alone_options *o, struct alone **out, char *why, size_t why_bytes);
void alone_close(struct alone *a);

/* 0 and bytes a second, cpu: seconds of this process a GB. -EIO: operations failed. */
int alone_run(struct alone *a, bool write, double seconds, double *rate, double *cpu_s_per_gb);
/* The tier's file, and the stretch of it that holds parts. */
const char *alone_file(const struct alone *a, uint64_t *offset);
const char *alone_engine(struct alone *a);

#endif
