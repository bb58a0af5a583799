/* The fleet while it is replayed, for scale_fleet.c and scale_route.c. */
#ifndef UCM_TESTS_SCALE_FLEET_H
#define UCM_TESTS_SCALE_FLEET_H

#include "tests/bench/scale.h"

enum scale_list { LIST_DRAM, LIST_NVME, LIST_NOTED, LISTS };

/* What one host has of one run: its first `n` blocks, of which the first `d` are in DRAM. n 0: noted only. */
struct entry {
    uint64_t key; /* host and run */
    uint32_t before, behind, chain;
    uint16_t n, d : 15,
        known : 1; /* known: all of it lies on the shared tier, as far as the host knows */
};

/* Each list from the run that was used last to the one that was not for longest. */
struct host {
    uint32_t first[LISTS], last[LISTS];
    uint64_t dram, held, noted; /* blocks */
    uint64_t requests;
    double load; /* blocks that came to it, fading */
    uint32_t load_step;
};

/* Who had a run last, and before that: of what a router knows. */
struct holder {
    uint16_t host, before; /* 1 and up */
    uint32_t since, since_before;
};

struct fleet {
    const struct scale_traffic *t;
    const struct scale_fleet *f;
    struct scale_result *out;
    uint64_t n_runs; /* of all copies */
    struct host *hosts;
    struct entry *entries;                   /* the first is none */
    uint32_t n_entries, cap_entries, unused; /* unused: those that were freed, by `behind` */
    uint32_t *table;                         /* entries by hash; a power of two */
    uint64_t table_mask;
    uint32_t *
        stored; /* of each run: 1 + the step since when it lies on the shared tier; 0: it does not */
    struct holder *holders; /* of each run; NULL: the router wants none */
    uint32_t now;           /* step */
    uint32_t next_host, path_n;
    uint16_t *length; /* blocks of each run of a copy, the common ones first */
    uint64_t *path;   /* runs of the request at hand, the head first */
    uint16_t *blocks; /* of each */
    uint8_t *head;    /* of each: all copies have it */
    uint8_t *knows;   /* of each: the host will know that it lies on the shared tier */
    double load;      /* of all hosts */
    uint32_t load_step;
    uint64_t random, ops[SCALE_OPS]; /* of this second */
};

struct entry *fleet_find(struct fleet *x, uint32_t host, uint64_t run);
/* The host for the request whose path is there. session: a hash. */
uint32_t fleet_route(struct fleet *x, uint64_t session, uint64_t references);
static inline uint64_t fleet_mix(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}
static inline uint64_t fleet_random(struct fleet *x)
{
    return fleet_mix(x->random += UINT64_C(0x9e3779b97f4a7c15));
}

#endif
