/* Shared by the files of `ucm-bench tier`. */
#ifndef UCM_BENCH_TIER_H
#define UCM_BENCH_TIER_H

#include "client/bench/bench.h"
#include "client/bench/daemon.h"
#include "client/bench/disk.h"

struct tier_bench {
    const struct args *args;
    struct report report;
    struct progress progress;
    char folder[DISK_PATH_BYTES / 2]; /* ours, under --dir */
    struct daemon daemon;
    uint64_t total_bytes;
    unsigned rounds, depth;
    double seconds;
    bool fio;
};

/* What stands against what, over the rounds. */
struct pair {
    struct samples own, base, ratio;
};

int pair_add(struct pair *p, double own, double base);
void pair_free(struct pair *p);
/* GB/s against those of what is named. target: 0 for none. */
void pair_report(struct tier_bench *b, struct pair *p, const char *what, uint64_t block_bytes,
                 const char *against, double target);
#define LOOP_NAME "a plain io_uring loop"
/* Of disk_run. */
const char *disk_name(const struct tier_bench *b);

/* Starts a daemon with these "key=value", NULL at their end, waits until it has its whole arena,
 * and opens a rig on it. 0 or an exit code, everything stopped. */
int tier_daemon_begin(struct tier_bench *b, const char *const *sets, struct rig_options *o,
                      struct rig *rig);
/* Starts a daemon on an empty folder, waits until it has its whole arena, and opens a rig on it. 0
 * or an exit code, everything stopped. */
int tier_daemon_open(struct tier_bench *b, uint64_t arena_bytes, uint64_t file_bytes,
                     struct rig_options *o, struct rig *rig);
/* Its files are gone afterwards. */
int tier_daemon_close(struct tier_bench *b, struct rig *rig);
/* Removes what lies in our folder. */
void tier_folder_empty(struct tier_bench *b);

/* Reads and writes at each block size by the tier alone, and what CPU they cost. */
int tier_alone(struct tier_bench *b);
/* The same through a daemon. */
int tier_through(struct tier_bench *b);
/* Loads of blocks that lie in DRAM while the disk is busy with writes and while it is not. */
int tier_hits(struct tier_bench *b);
/* Reads and writes by the tier alone, encrypted against plain. */
int tier_sealed(struct tier_bench *b);

#endif
