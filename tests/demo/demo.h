/* The demo: a private ucmd on a temporary directory, two engines of two ranks each, and a multi-turn
 * workload whose every loaded byte is checked.
 *
 * - ucm_demo.c: the order of events
 * - demo_daemon.c: starts and stops the daemon
 * - demo_engine.c: plays the workload
 * - demo_summary.c: prints the summary
 *
 * Processes: main -> engine -> two ranks; each rank has a connection, a region and one part of
 * every block. An engine's rank 0 is its scheduler. It looks up with a lease, tells rank 1 how many
 * blocks to load, and returns the lease when both have loaded. All processes share struct
 * demo_shared, which is mapped before the forks. main writes `stop`, and a rank writes its own
 * counts. */
#ifndef UCM_TESTS_DEMO_DEMO_H
#define UCM_TESTS_DEMO_DEMO_H

#include "client/bench/workload.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define DEMO_ENGINES 2
#define DEMO_RANKS 2
#define DEMO_MAX_LOOKUPS 65536
#define DEMO_PATH 4096

struct demo_options {
    double seconds;
    const char *trace; /* NULL: generated */
    bool keep;         /* the temporary directory */
    bool gpu;          /* the engines keep their blocks on one; found out, not asked for */
    uint64_t arena_bytes, nvme_bytes;
    uint64_t part_bytes, fragment_bytes; /* of one part of a block; of one layer in it */
};

struct demo_rank {
    _Atomic uint64_t requests, looked_up, hit, hit_dram; /* rank 0 */
    _Atomic uint64_t load_bytes, load_ns, lost; /* lost: promised by a lookup, not loaded */
    _Atomic uint64_t dump_bytes, dump_ns, not_stored;
    _Atomic uint64_t differing_bytes, checked_bytes;
    char error[320]; /* written once, before the process exits */
};

struct demo_shared {
    atomic_int stop;
    struct demo_rank rank[DEMO_ENGINES][DEMO_RANKS];
    _Atomic uint32_t n_lookups[DEMO_ENGINES];
    float lookup_us[DEMO_ENGINES][DEMO_MAX_LOOKUPS];
};

struct demo {
    struct demo_options options;
    char directory[DEMO_PATH]; /* temporary */
    char programs[DEMO_PATH];  /* where this program lies, and ucmd and ucmctl next to it */
    char socket[DEMO_PATH + 16], log[DEMO_PATH + 16];
    char device[DEMO_PATH + 256]; /* what the daemon copies with */
    pid_t daemon, engine[DEMO_ENGINES];
    struct demo_shared *shared;
    double played_seconds;
};

/* ---- daemon ---- */

/* Makes the directory, starts ucmd and waits until it answers. 0, or -1 with a sentence printed. */
int demo_daemon_start(struct demo *d);
/* Stops it and removes the directory. */
void demo_daemon_stop(struct demo *d);
/* True when it has exited although it should not have. Prints that. */
bool demo_daemon_died(struct demo *d);
/* Runs ucmctl with these words (the last NULL) against the daemon. 0 or -1. */
int demo_run_ucmctl(const struct demo *d, const char *const *words);

/* ---- engines ---- */

/* Forks; returns in the parent only. 0 or -1. */
int demo_engine_start(struct demo *d, unsigned engine);

/* ---- telling ---- */

void demo_show_progress(const struct demo *d, double seconds, bool terminal);
/* Prints the summary. 0 when all is well: blocks were hit and no byte differed. */
int demo_summary(const struct demo *d);

#endif
