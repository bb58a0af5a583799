#include "daemon/observe/tenants.h"

#include <stdio.h>
#include <string.h>

struct metrics_tenant *tenants_find(struct tenants *t, const char *name)
{
    uint32_t i = 0;

    while (i < t->n && strcmp(t->at[i].name, name) != 0)
        i++;
    if (i == t->n && i >= TENANTS_MAX && strcmp(name, UCM_TENANTS_OTHER) != 0)
        return tenants_find(t, UCM_TENANTS_OTHER);
    if (i == t->n) {
        snprintf(t->at[i].name, sizeof(t->at[i].name), "%s", name);
        t->n++;
    }
    return &t->at[i];
}

struct tenant_times *tenants_times(struct tenants *t, const struct metrics_tenant *of)
{
    return &t->times[of - t->at];
}

void tenants_gauges_clear(struct tenants *t)
{
    const struct metric_list *list = &metric_lists[METRIC_LIST_TENANTS];

    for (uint32_t i = 0; i < t->n; i++)
        for (size_t m = 0; m < list->n_metrics; m++)
            if (strcmp(list->metric[m].kind, "gauge") == 0)
                memset((char *)&t->at[i] + list->metric[m].offset, 0, sizeof(uint64_t));
}
