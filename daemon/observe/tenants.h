/* Counters by tenant, for as many tenants as a scraper should get labels for. Loop only.
 *
 * A tenant keeps its place for good, since counters must not go back. What comes when all places
 * are taken is counted together, as UCM_TENANTS_OTHER, which the configuration lets no tenant be
 * called. */
#ifndef UCMD_OBSERVE_TENANTS_H
#define UCMD_OBSERVE_TENANTS_H

#include "proto/histogram.h"
#include "proto/metrics/exposition.h"

#define TENANTS_MAX (EXPOSITION_TENANTS - 1)

/* Durations of a tenant's requests. Not among the metrics: a scraper would get some hundred series
 * of each. */
struct tenant_times {
    struct histogram lookup, load;
};

struct tenants {
    uint32_t n;
    struct metrics_tenant at[EXPOSITION_TENANTS];
    struct tenant_times times[EXPOSITION_TENANTS]; /* of at[] */
};

/* Never NULL; it stays where it is. */
struct metrics_tenant *tenants_find(struct tenants *t, const char *name);
/* The times of a tenant that tenants_find returned; their address does not change, either. */
struct tenant_times *tenants_times(struct tenants *t, const struct metrics_tenant *of);
/* Sets what was summed up of namespaces to 0, for another sum. */
void tenants_gauges_clear(struct tenants *t);

#endif
