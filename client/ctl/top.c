#include "client/ctl/top.h"

#include <stdlib.h>
#include <string.h>

static const char *const count_fields[TOP_COUNTS] = {"lookup_keys", "lookup_hits",    "load_bytes",
                                                     "dump_bytes",  "evicted_blocks", "dram_bytes",
                                                     "nvme_bytes",  "shared_bytes"};

/* ---- samples ---- */

void top_close(struct top_sample *s)
{
    for (uint32_t i = 0; i < s->tenants.n; i++)
        free(s->tenants.row[i].histograms);
    free(s->x);
    free(s->tenants.row);
    free(s->namespaces.row);
    memset(s, 0, sizeof *s);
}

static int row_add(struct top_rows *rows, const msgpack_object *o, const char *name,
                   const char *number)
{
    struct top_row *row;

    if (rows->n == rows->cap) {
        uint32_t cap = rows->cap > 0 ? 2 * rows->cap : 16;

        row = realloc(rows->row, cap * sizeof *row);
        if (row == NULL)
            return -UCM_ENOMEMORY;
        rows->row = row;
        rows->cap = cap;
    }
    row = &rows->row[rows->n++];
    memset(row, 0, sizeof *row);
    answer_text(o, name, row->name, sizeof row->name);
    answer_text(o, "tenant", row->tenant, sizeof row->tenant);
    row->ns = number != NULL ? answer_u64(o, number) : 0;
    for (int i = 0; i < TOP_COUNTS; i++)
        row->count[i] = answer_u64(o, count_fields[i]);
    if (answer_get(o, "lookup_times") == NULL)
        return 0;
    row->histograms = calloc(1, sizeof *row->histograms);
    if (row->histograms == NULL)
        return -UCM_ENOMEMORY;
    answer_histogram(answer_get(o, "lookup_times"), &row->histograms->lookup);
    answer_histogram(answer_get(o, "load_times"), &row->histograms->load);
    return 0;
}

int top_read_stats(struct top_sample *s, const msgpack_object *stats)
{
    int rc = 0;

    s->x = calloc(1, sizeof *s->x);
    if (s->x == NULL)
        return -UCM_ENOMEMORY;
    answer_exposition(stats, s->x);
    answer_text(stats, "instance", s->instance, sizeof s->instance);
    for (uint32_t i = 0; rc == 0 && i < answer_count(stats, "tenants"); i++)
        rc = row_add(&s->tenants, answer_at(stats, "tenants", i), "name", NULL);
    return rc;
}

int top_read_namespaces(struct top_sample *s, const msgpack_object *page)
{
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < answer_count(page, "namespaces"); i++) {
        s->namespaces.more = s->namespaces.n == TOP_MAX_NAMESPACES;
        if (s->namespaces.more)
            break;
        rc = row_add(&s->namespaces, answer_at(page, "namespaces", i), "model", "ns");
    }
    return rc;
}

int top_read(struct ucm_client *client, int timeout_ms, struct top_sample *out)
{
    struct top_sample s = {.x = NULL};
    struct answer answer;
    uint64_t cursor = 0;
    int rc = answer_call(client, UCM_METHOD_STATS, NULL, timeout_ms, &answer);

    if (rc != 0)
        return rc;
    rc = top_read_stats(&s, answer.root);
    answer_close(&answer);
    while (rc == 0) {
        rc = answer_page(client, UCM_METHOD_NS_LIST, 0, 0, &cursor, timeout_ms, &answer);
        if (rc != 0)
            break;
        rc = top_read_namespaces(&s, answer.root);
        answer_close(&answer);
        if (cursor == 0 || s.namespaces.more)
            break;
    }
    if (rc != 0)
        top_close(&s);
    else
        *out = s;
    return rc;
}

/* ---- rates ---- */

/* Counters never go back while a daemon runs. */
static double grown(uint64_t from, uint64_t to)
{
    return to >= from ? (double)(to - from) : 0;
}

static const struct top_times no_times = {0, TOP_UNKNOWN, TOP_UNKNOWN};

/* What n histograms, in sum, counted between the samples. a NULL: all that b has. */
static struct top_times times(const struct histogram *a, const struct histogram *b, uint32_t n)
{
    struct top_times t = no_times;
    struct histogram sum;

    memset(&sum, 0, sizeof sum);
    for (uint32_t k = 0; k < n; k++)
        for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++)
            sum.bucket[i] += (uint64_t)grown(a != NULL ? a[k].bucket[i] : 0, b[k].bucket[i]);
    t.n = histogram_total(&sum);
    if (t.n > 0) {
        t.p50_us = (double)histogram_quantile_us(&sum, 500);
        t.p99_us = (double)histogram_quantile_us(&sum, 990);
    }
    return t;
}

#define TIMES(name)                                                                                \
    times(from->x->metrics.histograms.name, to->x->metrics.histograms.name,                        \
          sizeof(((struct histograms *)NULL)->name) / sizeof(struct histogram))
#define RATE(name) (grown(from->x->metrics.name, to->x->metrics.name) / f.seconds)

bool top_frame(const struct top_sample *from, const struct top_sample *to, struct top_frame *out)
{
    struct top_frame f = {.from = from, .to = to};
    double keys;

    if (strcmp(from->instance, to->instance) != 0 || to->x->uptime_ms <= from->x->uptime_ms)
        return false;
    f.seconds = (double)(to->x->uptime_ms - from->x->uptime_ms) / 1000;
    keys = RATE(lookup_keys);
    f.all = (struct top_rates){.load = RATE(load_bytes),
                               .dump = RATE(dump_bytes),
                               .hits = keys > 0 ? RATE(lookup_hits) / keys : TOP_UNKNOWN,
                               .evicted = RATE(arena_evicted_blocks)};
    f.lookups = RATE(lookups);
    f.requests = RATE(requests_total);
    f.busy = RATE(requests_busy);
    f.evicted_lost = RATE(arena_evicted_lost);
    f.nvme_read = RATE(nvme_read_bytes);
    f.nvme_written = RATE(nvme_written_bytes);
    f.lookup = TIMES(lookup);
    f.load = TIMES(load);
    f.dump = TIMES(dump);
    f.slot_wait = TIMES(slot_wait);
    for (uint32_t i = 0; i < METRIC_TIERS; i++)
        f.load_tier[i] = times(&from->x->metrics.histograms.load[i * METRIC_SIZES],
                               &to->x->metrics.histograms.load[i * METRIC_SIZES], METRIC_SIZES);
    *out = f;
    return true;
}

const struct top_row *top_row_before(const struct top_rows *rows, const struct top_row *row)
{
    for (uint32_t i = 0; i < rows->n; i++)
        if (rows->row[i].ns == row->ns &&
            (row->ns != 0 || strcmp(rows->row[i].name, row->name) == 0))
            return &rows->row[i];
    return NULL;
}

struct top_rates top_row_rates(const struct top_frame *f, const struct top_row *row,
                               const struct top_row *before)
{
    const struct top_histograms *then = before != NULL ? before->histograms : NULL;
    struct top_rates r = {.lookup = no_times, .load_times = no_times};
    double by[TOP_COUNTERS];

    for (int i = 0; i < TOP_COUNTERS; i++)
        by[i] = grown(before != NULL ? before->count[i] : 0, row->count[i]) / f->seconds;
    r.load = by[TOP_LOAD];
    r.dump = by[TOP_DUMP];
    r.hits = by[TOP_KEYS] > 0 ? by[TOP_HITS] / by[TOP_KEYS] : TOP_UNKNOWN;
    r.evicted = by[TOP_EVICTED];
    if (row->histograms != NULL) {
        r.lookup = times(then != NULL ? &then->lookup : NULL, &row->histograms->lookup, 1);
        r.load_times = times(then != NULL ? &then->load : NULL, &row->histograms->load, 1);
    }
    return r;
}

/* ---- order ---- */

struct place {
    double busy;
    uint64_t bytes;
    uint32_t at;
};

/* By traffic; by bytes held where there is none. */
static int place_compare(const void *a, const void *b)
{
    const struct place *x = a, *y = b;

    if (x->busy != y->busy)
        return x->busy > y->busy ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

void top_order(const struct top_frame *f, const struct top_rows *from, const struct top_rows *to,
               uint32_t *order)
{
    struct place *place = calloc(to->n > 0 ? to->n : 1, sizeof *place);

    for (uint32_t i = 0; i < to->n; i++) {
        const struct top_row *row = &to->row[i];
        struct top_rates rates = top_row_rates(f, row, top_row_before(from, row));

        order[i] = i;
        if (place != NULL)
            place[i] = (struct place){rates.load + rates.dump,
                                      row->count[TOP_DRAM] + row->count[TOP_NVME], i};
    }
    if (place == NULL)
        return; /* as the daemon has them */
    qsort(place, to->n, sizeof *place, place_compare);
    for (uint32_t i = 0; i < to->n; i++)
        order[i] = place[i].at;
    free(place);
}
