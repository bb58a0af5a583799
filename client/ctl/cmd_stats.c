/* stats: every counter, as a table, as deltas while watching, as JSON or for Prometheus. */
#include "client/ctl/ctl.h"
#include "proto/metrics/exposition.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct metric_info *metric_find(const char *name)
{
    const struct metric_list *l = &metric_lists[METRIC_LIST_PLAIN];

    for (size_t i = 0; i < l->n_metrics; i++)
        if (strcmp(l->metric[i].name, name) == 0)
            return &l->metric[i];
    return NULL;
}

/* ---- table ---- */

static int print_table(const msgpack_object *stats, bool nonzero)
{
    static const char *const titles[] = {"METRIC", ">VALUE", "", "WHAT IT COUNTS", NULL};
    const msgpack_object *m = answer_get(stats, "metrics");
    char name[96], human[HUMAN_BYTES];
    struct table t;

    table_begin(&t, titles);
    for (uint32_t i = 0; m != NULL && m->type == MSGPACK_OBJECT_MAP && i < m->via.map.size; i++) {
        const struct metric_info *known;
        uint64_t v;

        answer_object_text(&m->via.map.ptr[i].key, name, sizeof name);
        known = metric_find(name);
        v = answer_u64(m, name);
        if (nonzero && v == 0)
            continue;
        table_cell(&t, "%s", name);
        if (known != NULL && strcmp(known->unit, "bytes") == 0)
            table_cell(&t, "%s", human_bytes(human, v));
        else
            table_cell(&t, "%" PRIu64, v);
        table_cell(&t, "%s", known != NULL && strcmp(known->unit, "bytes") != 0 ? known->unit : "");
        table_cell(&t, "%s", known != NULL ? known->help : "");
    }
    return ctl_table_end(&t);
}

static int print_histograms(const msgpack_object *stats, bool nonzero)
{
    static const char *const titles[] = {"HISTOGRAM", "TIER", "SIZE", ">COUNT",
                                         ">P50",      ">P99", NULL};
    char text[32], human[HUMAN_BYTES];
    struct table t;

    table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(stats, "histograms"); i++) {
        const msgpack_object *o = answer_at(stats, "histograms", i);
        uint64_t count = answer_u64(o, "count");

        if (nonzero && count == 0)
            continue;
        table_cell(&t, "%s", answer_text(o, "name", text, sizeof text));
        table_cell(&t, "%s", answer_text(o, "tier", text, sizeof text));
        table_cell(&t, "%s", answer_text(o, "size", text, sizeof text));
        table_cell(&t, "%" PRIu64, count);
        table_cell(&t, "%s", count > 0 ? human_us(human, answer_u64(o, "p50_us")) : "-");
        table_cell(&t, "%s", count > 0 ? human_us(human, answer_u64(o, "p99_us")) : "-");
    }
    printf("\n");
    return ctl_table_end(&t);
}

/* ---- Prometheus ---- */

static int print_prometheus(const msgpack_object *stats)
{
    struct exposition *x = calloc(1, sizeof *x);

    if (x == NULL)
        return program_fail(CTL_ERROR, "memory ran out");
    answer_exposition(stats, x);
    exposition_write(x, EXPOSITION_PROMETHEUS, stdout);
    free(x);
    return CTL_OK;
}

/* ---- watching; `from` and `to` are two results of stats ---- */

/* A metric's name; one that the table lacks does not compile. */
#define METRIC(name) (sizeof(((struct metrics *)NULL)->name) ? #name : NULL)

static uint64_t metric(const msgpack_object *stats, const char *name)
{
    return answer_u64(answer_get(stats, "metrics"), name);
}

static uint64_t grown(const msgpack_object *from, const msgpack_object *to, const char *name)
{
    uint64_t before = metric(from, name), after = metric(to, name);

    return after >= before ? after - before : 0;
}

static void watch_line(const msgpack_object *from, const msgpack_object *to, double seconds,
                       bool title)
{
    char dram[HUMAN_BYTES], hits[HUMAN_BYTES];

    if (title)
        printf("%10s %10s %8s %10s %10s %10s %10s %8s %10s\n", "requests/s", "lookups/s", "hit",
               "load GB/s", "dump GB/s", "nvme r", "nvme w", "active", "dram");
    printf("%10.0f %10.0f %8s %10.3f %10.3f %10.3f %10.3f %8" PRIu64 " %10s\n",
           (double)grown(from, to, METRIC(requests_total)) / seconds,
           (double)grown(from, to, METRIC(lookups)) / seconds,
           human_percent(hits, grown(from, to, METRIC(lookup_hits)),
                         grown(from, to, METRIC(lookup_keys))),
           (double)grown(from, to, METRIC(load_bytes)) / seconds / 1e9,
           (double)grown(from, to, METRIC(dump_bytes)) / seconds / 1e9,
           (double)grown(from, to, METRIC(nvme_read_bytes)) / seconds / 1e9,
           (double)grown(from, to, METRIC(nvme_written_bytes)) / seconds / 1e9,
           metric(to, METRIC(requests_active)),
           human_bytes(dram, metric(to, METRIC(arena_bytes_used))));
    fflush(stdout);
}

/* Gauges as they are, counters as their growth. */
static int watch_json(const msgpack_object *from, const msgpack_object *to, double seconds)
{
    const struct metric_list *known = &metric_lists[METRIC_LIST_PLAIN];
    cJSON *j = cJSON_CreateObject(), *m;

    cJSON_AddNumberToObject(j, "seconds", seconds);
    m = cJSON_AddObjectToObject(j, "metrics");
    for (size_t i = 0; i < known->n_metrics; i++) {
        const char *name = known->metric[i].name;
        bool counter = strcmp(known->metric[i].kind, "counter") == 0;

        ctl_json_u64(m, name, counter ? grown(from, to, name) : metric(to, name));
    }
    return ctl_print_json(j, true);
}

static int watch_one(const struct args *a, const msgpack_object *from, const msgpack_object *to,
                     bool title)
{
    uint64_t before_ms = answer_u64(from, "uptime_ms"), after_ms = answer_u64(to, "uptime_ms");
    char before[40], after[40];

    if (strcmp(answer_text(from, "instance", before, sizeof before),
               answer_text(to, "instance", after, sizeof after)) != 0)
        fprintf(stderr, "%s: the daemon was restarted\n", program_name());
    else if (after_ms > before_ms && args_given(a, "json"))
        return watch_json(from, to, (double)(after_ms - before_ms) / 1000);
    else if (after_ms > before_ms)
        watch_line(from, to, (double)(after_ms - before_ms) / 1000, title);
    return CTL_OK;
}

static int watch(const struct args *a)
{
    uint64_t every_ms = args_number(a, "watch"), count = args_number(a, "count");
    struct timespec pause = {.tv_sec = (time_t)(every_ms / 1000),
                             .tv_nsec = (long)(every_ms % 1000) * 1000000};
    struct answer stats[2]; /* the latest ones, in turn */
    int rc = ctl_call(a, UCM_METHOD_STATS, NULL, &stats[0]), last = 0;

    if (rc != CTL_OK)
        return rc;
    for (uint64_t i = 0; rc == CTL_OK && (count == 0 || i < count); i++) {
        nanosleep(&pause, NULL);
        rc = ctl_call(a, UCM_METHOD_STATS, NULL, &stats[!last]);
        if (rc != CTL_OK)
            break;
        rc = watch_one(a, stats[last].root, stats[!last].root, i % 20 == 0);
        answer_close(&stats[last]);
        last = !last;
    }
    answer_close(&stats[last]);
    return rc;
}

static int print_stats(const struct args *a, const msgpack_object *stats)
{
    int rc;

    if (args_given(a, "prometheus"))
        return print_prometheus(stats);
    if (args_given(a, "json"))
        return ctl_print_json(answer_json(stats), false);
    rc = print_table(stats, args_given(a, "nonzero"));
    return rc == CTL_OK ? print_histograms(stats, args_given(a, "nonzero")) : rc;
}

int cmd_stats(const struct args *a)
{
    if (args_given(a, "count") && !args_given(a, "watch"))
        return program_usage_error(a, "--count goes with --watch");
    if (args_given(a, "prometheus") && (args_given(a, "watch") || args_given(a, "json")))
        return program_usage_error(a, "--prometheus goes with neither --watch nor --json");
    return args_given(a, "watch") ? watch(a) : ctl_show(a, UCM_METHOD_STATS, NULL, print_stats);
}

int cmd_top(const struct args *a)
{
    return program_script(a, "ucmctl-top");
}
