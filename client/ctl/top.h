/* What `ucmctl top` shows: two samples of a daemon's counters, and what happened between them.
 *
 * Promise: a ratio of nothing and a time of no request are unknown, and not 0. One thread. */
#ifndef UCM_CTL_TOP_H
#define UCM_CTL_TOP_H

#include "client/ctl/answer.h"
#include "proto/exposition.h"

#define TOP_MAX_NAMESPACES 1024 /* that a sample reads; the rest is left out, and `more` says so */

/* Counters, then gauges, of a tenant or a namespace. */
enum top_count {
    TOP_KEYS,
    TOP_HITS,
    TOP_LOAD,
    TOP_DUMP,
    TOP_EVICTED,
    TOP_COUNTERS,
    TOP_DRAM = TOP_COUNTERS,
    TOP_NVME,
    TOP_SHARED,
    TOP_COUNTS
};

/* Of a tenant. */
struct top_histograms {
    struct histogram lookup, load;
};

struct top_row {
    char name[160];  /* the tenant, or the namespace's model */
    char tenant[64]; /* of a namespace */
    uint64_t ns;     /* its number; 0: a tenant */
    uint64_t count[TOP_COUNTS];
    struct top_histograms *histograms; /* of a tenant; else NULL */
};

struct top_rows {
    struct top_row *row;
    uint32_t n, cap;
    bool more;
};

struct top_sample {
    char instance[33];
    struct exposition *x;
    struct top_rows tenants, namespaces;
};

/* Zeros are a closed sample. */
void top_close(struct top_sample *s);
/* Reads stats and the namespaces. 0, or a negative enum ucm_status as answer_call has it; then the
 * sample is closed. */
int top_read(struct ucm_client *client, int timeout_ms, struct top_sample *out);
/* The same from results that are there; more pages of namespaces may follow. -UCM_ENOMEMORY. */
int top_read_stats(struct top_sample *s, const msgpack_object *stats);
int top_read_namespaces(struct top_sample *s, const msgpack_object *page);

/* ---- between two samples ---- */

#define TOP_UNKNOWN (-1.0)

struct top_times {
    uint64_t n;            /* requests */
    double p50_us, p99_us; /* TOP_UNKNOWN without requests */
};

/* Of the whole daemon, or of one row. Rates are per second; hits: TOP_UNKNOWN without lookups. */
struct top_rates {
    double load, dump;                   /* bytes */
    double hits;                         /* 0 to 1 */
    double evicted;                      /* blocks */
    struct top_times lookup, load_times; /* of a tenant */
};

struct top_frame {
    const struct top_sample *from, *to;
    double seconds;
    struct top_rates all;
    double lookups, requests, busy, evicted_lost, nvme_read, nvme_written;
    struct top_times lookup, load, dump, slot_wait;
    struct top_times load_tier[METRIC_TIERS];
};

/* false: no time lies between the samples, or the daemon was restarted. */
bool top_frame(const struct top_sample *from, const struct top_sample *to, struct top_frame *out);
/* A row of the later sample, by its row of the earlier one: NULL when it is new. */
struct top_rates top_row_rates(const struct top_frame *f, const struct top_row *row,
                               const struct top_row *before);
/* The row of the same tenant or namespace, or NULL. */
const struct top_row *top_row_before(const struct top_rows *rows, const struct top_row *row);
/* Busiest first: places of rows.row in order[rows.n]. */
void top_order(const struct top_frame *f, const struct top_rows *from, const struct top_rows *to,
               uint32_t *order);

/* ---- shown ---- */

/* A screen of text. Lines may be wider than the terminal. 0 or -ENOMEM. */
int top_print(const struct top_frame *f, FILE *out);
/* NULL when memory ran out. */
cJSON *top_json(const struct top_frame *f);

#endif
