/* What tests/fault/test_kill.c knows of the daemon's promises, and the damage that it does to the
 * files between two runs. */
#ifndef UCM_TESTS_KILL_ORACLE_H
#define UCM_TESTS_KILL_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#define ORACLE_KEYS 4096u /* and some more that nobody dumps */

/* What may be found under a key, always with the right bytes: */
enum oracle_state {
    ORACLE_NOTHING, /* was never dumped: a miss */
    ORACLE_DOUBTED, /* there or not; an earlier run's copy may be damaged */
    ORACLE_MAYBE,   /* there or not */
    ORACLE_DURABLE, /* there */
};

struct oracle {
    uint8_t state[ORACLE_KEYS + 8];
    bool held[ORACLE_KEYS + 8]; /* the present run answered OK, so it has the block */
    bool keeps;                 /* DRAM, over an orderly stop */
    bool warm;                  /* the present run may have begun with DRAM that was kept */
    bool cache_damaged;         /* a checkpoint may be all that still knows of some slots */
    uint32_t keys;              /* from this key on: nothing */
    uint64_t seed;              /* of the random numbers */
};

uint64_t oracle_random(struct oracle *o);
uint32_t oracle_below(struct oracle *o, uint32_t n);
/* Nothing that was stored is certain any more. */
void oracle_doubt(struct oracle *o);
/* Whether a load's success proves that the part is stored. DRAM kept over an orderly stop has it,
 * too. Then the stored copy may be damaged, and the part may be gone with the next kill. */
bool oracle_load_proves(const struct oracle *o, uint32_t key);
/* The run has ended. in_order: it has kept what DRAM held. */
void oracle_run_ended(struct oracle *o, bool in_order);

/* Damages one of the daemon's files in `directory`, while it does not run, and says how. Returns
 * whether parts may be lost by it. */
bool damage(struct oracle *o, const char *directory, const char **what);

#endif
