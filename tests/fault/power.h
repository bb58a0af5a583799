/* The test's side of a volatile disk (volatile_disk.h): the journal, and the power's failing. */
#ifndef UCM_TESTS_POWER_H
#define UCM_TESTS_POWER_H

#include "tests/fault/kill_oracle.h"
#include "tests/fault/volatile_disk.h"

#include <stdbool.h>

#define POWER_DIRECTORIES 3u

struct power {
    struct volatile_journal *journal;
    int fd; /* of the journal; daemons inherit it */
    char directories[POWER_DIRECTORIES][VOLATILE_NAME];
    char saved[VOLATILE_NAME];
    unsigned n;
};

struct power_loss {
    unsigned writes, sectors, kept, sizes, names; /* in doubt; sectors: and lost; kept: and kept */
};

/* Makes n directories below `dir` and has every daemon that is started from now on use them. */
void power_open(struct power *p, const char *dir, unsigned n);
void power_close(struct power *p);

/* The daemon is dead and the power has failed. Changes in doubt are lost or kept, by o's random
 * numbers; o NULL: all are lost. */
void power_fail(struct power *p, struct oracle *o, struct power_loss *loss);

#endif
