/* A process of test_churn: workers of one namespace, one for each part. They do everything that a
 * worker may do, and check each byte that they get. */
#ifndef UCMD_TESTS_CHURN_WORKER_H
#define UCMD_TESTS_CHURN_WORKER_H

#include "tests/integration/harness.h"

#define CHURN_WAIT_MS 60000 /* more than any deadline: a call that takes so long hangs */
#define CHURN_SPACES 4u

struct churn_space {
    const char *model;
    uint32_t parts, layers, keys;
    uint64_t layer_bytes;
};
extern const struct churn_space churn_spaces[CHURN_SPACES];

/* Chance, as the seed decides. */
void churn_seed(uint64_t seed);
uint64_t churn_random(void);
uint32_t churn_below(uint32_t n);
bool churn_chance(uint32_t percent);

/* SIGTERM ends the process after its present work. Set before the fork, so that SIGTERM does not
 * kill a child that has not run yet. */
void churn_leave_on_sigterm(void);
/* Forgets which keys were evicted. To be called before the first fork, and whenever all processes
 * are gone. */
void churn_round(void);
/* In a child: works until SIGTERM. Exits with 0, or says what was wrong. */
_Noreturn void churn_process(struct host *host, uint64_t seed);

#endif
