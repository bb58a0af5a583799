/* What a root of the shared tier does without us: one file of it written and read in order, so many
 * requests of a block each under way. For an NFS server by a bare libnfs client on one connection;
 * for a folder by fio, one thread a request.
 * Threads: one. */
#ifndef UCM_TESTS_BENCH_PLAIN_H
#define UCM_TESTS_BENCH_PLAIN_H

#include <stdbool.h>
#include <stdint.h>

struct plain {
    const char *target; /* nfs://... or a folder; borrowed */
    uint64_t block_bytes, total_bytes;
    unsigned depth;
    char why[256]; /* of a failure */
};

bool plain_is_nfs(const char *target);
/* What does it, for the report. */
const char *plain_name(const char *target);
/* Goes on for `seconds` and tells bytes a second; 0 or -errno with p->why. The file is made when it
 * is not there; plain_remove takes it away. */
int plain_rate(struct plain *p, bool write, double seconds, double *rate);
void plain_remove(struct plain *p);
/* NFS: how long the server takes to answer the smallest request, median of many, in microseconds.
 */
int plain_round_trip(struct plain *p, double *us);

#endif
