/* What the files of the command `fair` share. */
#ifndef UCM_BENCH_FAIR_H
#define UCM_BENCH_FAIR_H

#include "client/bench/bench.h"
#include "client/bench/daemon.h"

#include <pthread.h>

#define PLAYERS_MAX 128

struct player {
    struct fair_bench *b;
    struct rig rig;
    char name[24];
    unsigned weight;
    uint32_t blocks, batch, in_flight;
    uint64_t pause_ns; /* between two requests */
    uint8_t *keys;
    bool *loaded_once; /* --check: by block, since its region was poisoned; else NULL */
    uint32_t evict_from,
        loaded; /* blocks that are in DRAM again and not under way: where they begin, how many */
    /* Of what ended in the time that is measured. */
    uint64_t bytes;
    struct samples ms;
    int rc;
    pthread_t thread;
};

struct fair_bench {
    const struct args *args;
    struct report report;
    struct daemon daemon;
    char dir[160];
    bool gpu, evicts;
    uint64_t begin_ns, end_ns;
    struct player players[PLAYERS_MAX + 1]; /* the last: the neighbour of who floods */
    unsigned n;
    double alone[2]; /* bytes a second of a tenant alone: of large requests, of small ones */
};

/* Lets them load side by side. Returns all bytes a second, or less than 0. */
double fair_run(struct fair_bench *b, struct player *const *players, unsigned n);

/* ---- fair_check.c: --check ---- */

/* Before the blocks are stored: fills them. */
int fair_check_fill(struct player *p);
/* Lets them load side by side into regions without a byte of what they stored, and compares every block that was loaded. */
int fair_check(struct fair_bench *b, struct player *const *players, unsigned n);

#endif
