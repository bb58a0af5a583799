/* What the daemon counts, as text for Prometheus: the same families for `/metrics` of the daemon
 * and for `ucmctl stats --prometheus`.
 *
 * Names: `ucmd_`, the metric's name, its unit (bytes, seconds, ratio), and `_total` for a counter
 * alone. Every family has HELP and TYPE, and its samples stand together.
 * Promise: `promtool check metrics` has no complaint. No state, no clock: equal structs give equal
 * text.
 * Threads: any, one struct at a time. */
#ifndef UCM_PROTO_METRICS_EXPOSITION_H
#define UCM_PROTO_METRICS_EXPOSITION_H

#include "proto/limits.h"
#include "proto/metrics/metrics.h"

#include <stddef.h>
#include <stdio.h>

#define EXPOSITION_TIERS 4
#define EXPOSITION_DEVICES 33
#define EXPOSITION_NODES 64
#define EXPOSITION_TENANTS 65 /* with "other" */
#define EXPOSITION_LABEL_BYTES 160

enum health { HEALTH_OK, HEALTH_RECOVERING, HEALTH_DEGRADED, HEALTH_FAILING, HEALTH_STATES };
extern const char *const health_names[HEALTH_STATES];
/* States of a shared root, in the order of enum shared_health. */
#define ROOT_STATES 4
extern const char *const root_state_names[ROOT_STATES];

extern const char *const metric_tier_names[METRIC_TIERS];
extern const char *const metric_size_names[METRIC_SIZES];
extern const char *const reuse_tiers_names[REUSE_TIERS];

/* One of several; `name` is its label. */
#define X(field, kind, unit, help) uint64_t field;
struct metrics_tier {
    char name[EXPOSITION_LABEL_BYTES];
    UCMD_TIER_METRICS(X)
};
struct metrics_root {
    char name[EXPOSITION_LABEL_BYTES];
    uint64_t state; /* of root_state_names */
    UCMD_ROOT_METRICS(X)
};
struct metrics_device {
    char name[EXPOSITION_LABEL_BYTES];
    UCMD_DEVICE_METRICS(X)
};
struct metrics_node {
    char name[24];
    UCMD_NODE_METRICS(X)
};
struct metrics_tenant {
    char name[UCM_MAX_NAME_BYTES + 1];
    UCMD_TENANT_METRICS(X)
};
#undef X

/* All that the text shows: plain data, some 60 KiB. */
struct exposition {
    char version[64], commit[64], options[128], policy[32]; /* of the build; "": not shown */
    uint64_t uptime_ms;
    enum health health;
    struct metrics metrics;
    struct metrics_reuse reuse;
    uint32_t n_tiers, n_roots, n_devices, n_nodes, n_tenants;
    struct metrics_tier tier[EXPOSITION_TIERS];
    struct metrics_root root[UCM_MAX_ROOTS];
    struct metrics_device device[EXPOSITION_DEVICES];
    struct metrics_node node[EXPOSITION_NODES];
    struct metrics_tenant tenant[EXPOSITION_TENANTS];
};

enum exposition_format { EXPOSITION_PROMETHEUS, EXPOSITION_OPENMETRICS };
/* The value of Content-Type. */
const char *exposition_content_type(enum exposition_format format);
/* Writes all of it; the caller looks at ferror. */
void exposition_write(const struct exposition *x, enum exposition_format format, FILE *out);

/* ---- the tables behind it ---- */

struct metric_info {
    const char *name, *kind, *unit, *help;
    size_t offset; /* of a uint64_t in the struct of its list */
};
/* The unlabelled ones, and those of what there are several. */
struct metric_list {
    const char *wire;   /* the array in `stats`; "metrics" for the unlabelled, a map */
    const char *prefix; /* of names in the text, after "ucmd_" */
    const char *label;
    /* Where the array and its count lie in struct exposition; sizes of one element, of its name. */
    size_t offset, offset_n, size, label_bytes;
    const struct metric_info *metric;
    size_t n_metrics;
};
enum {
    METRIC_LIST_PLAIN,
    METRIC_LIST_TIERS,
    METRIC_LIST_ROOTS,
    METRIC_LIST_DEVICES,
    METRIC_LIST_NODES,
    METRIC_LIST_TENANTS,
    METRIC_LISTS
};
extern const struct metric_list metric_lists[METRIC_LISTS];

struct histogram_info {
    const char *name, *help;
    uint32_t tiers, sizes;
    size_t offset; /* in struct histograms */
};
extern const struct histogram_info histogram_infos[];
extern const size_t histogram_infos_n;

#define EXPOSITION_NAME_BYTES 96
/* The family's name in the text, without `_total`. */
void exposition_name(const struct metric_list *list, const struct metric_info *m,
                     char out[EXPOSITION_NAME_BYTES]);

#endif
