/* What a root of the shared tier does without us, so many requests of a block each under way: for
 * an NFS server by a bare libnfs client on one connection, for a folder by fio, one thread a
 * request. In two shapes: as the tier does it, a new file for each block, made and written, opened
 * and read, all in one folder; and one file (a thread), rewritten and read again and again, whose
 * room and pages are there already. Nothing is synced.
 * Threads: one. */
#ifndef UCM_BENCH_PLAIN_H
#define UCM_BENCH_PLAIN_H

#include <stdbool.h>
#include <stdint.h>

#define PLAIN_FILE_NAME "ucm-bench-plain"

enum plain_shape { PLAIN_FILES, PLAIN_ONE_FILE };

struct plain {
    const char *target; /* nfs://... or a folder; borrowed */
    uint64_t block_bytes, total_bytes;
    unsigned depth;
    double cpu_s_per_gb; /* of the last run; an NFS server's only */
    char why[256];       /* of a failure */
};

bool plain_is_nfs(const char *target);
/* What does it, for the report. */
const char *plain_name(const char *target, enum plain_shape shape);
/* Goes on for about `seconds` and tells bytes a second; 0 or -errno with p->why. Blocks are in
 * files of theirs: the time between two sets of total_bytes, when the files of the one before are
 * removed, is not counted. What is read has been written before. */
int plain_rate(struct plain *p, enum plain_shape shape, bool write, double seconds, double *rate);
/* Its files, of both shapes. */
void plain_remove(struct plain *p);
/* NFS: how long the server takes to answer the smallest request, median of many, in microseconds.
 */
int plain_round_trip(struct plain *p, double *us);

/* The two kinds of target, for plain.c only. */
int plain_nfs_rate(struct plain *p, enum plain_shape shape, bool write, double seconds,
                   double *rate);
void plain_nfs_remove(struct plain *p);
int plain_fail(struct plain *p, int code, const char *what, const char *detail);

#endif
