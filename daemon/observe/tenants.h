/* Counters by tenant, for as many tenants as a scraper should get labels for. Loop only.
 *
 * A tenant keeps its place for good, since counters must not go back. What comes when all places are taken
 * is counted together, as "other". */
#ifndef UCMD_OBSERVE_TENANTS_H
#define UCMD_OBSERVE_TENANTS_H

#include "proto/exposition.h"

#define TENANTS_MAX (EXPOSITION_TENANTS - 1)
#define TENANTS_OTHER "other"

struct tenants {
    uint32_t n;
    struct metrics_tenant at[EXPOSITION_TENANTS];
};

/* Never NULL; it stays where it is. */
struct metrics_tenant *tenants_find(struct tenants *t, const char *name);
/* Sets what was summed up of namespaces to 0, for another sum. */
void tenants_gauges_clear(struct tenants *t);

#endif
