/* stats: every counter, as a table, as deltas while watching, as JSON or for Prometheus. */
#include "client/ctl/ctl.h"
#include "proto/metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct metric {
    const char *name, *kind, *unit, *help;
};

static const struct metric metrics_known[] = {
#define X(name, kind, unit, help) {#name, #kind, unit, help},
    UCMD_METRICS(X)
#undef X
};

static const struct metric *metric_find(const char *name)
{
    for (size_t i = 0; i < sizeof metrics_known / sizeof metrics_known[0]; i++)
        if (strcmp(metrics_known[i].name, name) == 0)
            return &metrics_known[i];
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
        const struct metric *known;
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

/* ---- Prometheus ---- */

/* A label's value, escaped for the text format. */
static const char *label(const msgpack_object *map, const char *field, char *buf, size_t n)
{
    char plain[160];
    size_t at = 0;

    answer_text(map, field, plain, sizeof plain);
    for (const char *p = plain; *p != '\0' && at + 3 < n; p++) {
        if (*p == '\\' || *p == '"')
            buf[at++] = '\\';
        buf[at++] = *p;
    }
    buf[at] = '\0';
    return buf;
}

static void prometheus_head(const char *name, const char *kind, const char *help)
{
    if (help != NULL)
        printf("# HELP ucmd_%s %s\n", name, help);
    printf("# TYPE ucmd_%s %s\n", name, kind);
}

static void prometheus_metrics(const msgpack_object *m)
{
    char name[96];

    for (uint32_t i = 0; m != NULL && m->type == MSGPACK_OBJECT_MAP && i < m->via.map.size; i++) {
        const struct metric *known;

        answer_object_text(&m->via.map.ptr[i].key, name, sizeof name);
        known = metric_find(name);
        prometheus_head(name, known != NULL ? known->kind : "untyped",
                        known != NULL ? known->help : NULL);
        printf("ucmd_%s %" PRIu64 "\n", name, answer_u64(m, name));
    }
}

struct series {
    const char *field, *name, *kind, *help;
};

static uint64_t series_value(const msgpack_object *o, const char *field)
{
    const msgpack_object *v = answer_get(o, field);

    return v != NULL && v->type == MSGPACK_OBJECT_BOOLEAN ? v->via.boolean : answer_u64(o, field);
}

static void prometheus_list(const msgpack_object *stats, const char *list, const char *label_name,
                            const struct series *s, size_t n)
{
    char who[160];
    uint32_t count = answer_count(stats, list);

    for (size_t i = 0; i < n && count > 0; i++) {
        prometheus_head(s[i].name, s[i].kind, s[i].help);
        for (uint32_t k = 0; k < count; k++) {
            const msgpack_object *o = answer_at(stats, list, k);

            printf("ucmd_%s{%s=\"%s\",index=\"%" PRIu32 "\"} %" PRIu64 "\n", s[i].name, label_name,
                   label(o, "name", who, sizeof who), k, series_value(o, s[i].field));
        }
    }
}

static int print_prometheus(const msgpack_object *stats)
{
    static const struct series tier[] = {
        {"capacity_bytes", "tier_capacity_bytes", "gauge", "bytes a tier can hold"},
        {"used_bytes", "tier_used_bytes", "gauge", "bytes of live parts in a tier"},
        {"queued", "tier_queued", "gauge", "operations waiting for a tier"},
        {"in_flight", "tier_in_flight", "gauge", "operations given to a tier's device"},
        {"degraded", "tier_degraded", "gauge", "1: the tier refuses writes, or everything"},
    };
    static const struct series device[] = {
        {"failed", "device_failed", "gauge", "1: the device has failed for good"},
        {"jobs", "device_copy_jobs", "counter", "copy jobs done by a device"},
        {"load_bytes", "device_load_bytes", "counter", "bytes copied into workers' memory"},
        {"dump_bytes", "device_dump_bytes", "counter", "bytes copied out of workers' memory"},
        {"regions", "device_regions", "gauge", "regions registered on a device"},
        {"context_bytes", "device_context_bytes", "gauge",
         "device memory that the daemon itself takes"},
        {"dma_launches", "device_dma_launches", "counter", "copies given to the copy engines"},
        {"dma_bytes", "device_dma_bytes", "counter", "bytes moved by the copy engines"},
        {"sm_launches", "device_sm_launches", "counter", "launches of the copy kernel"},
        {"sm_bytes", "device_sm_bytes", "counter", "bytes moved by the copy kernel"},
        {"staged_launches", "device_staged_launches", "counter",
         "slices of workers' memory that copies went through"},
        {"staged_bytes", "device_staged_bytes", "counter", "bytes moved through those"},
        {"rings", "device_rings", "gauge", "rings of slices registered on a device"},
    };
    static const struct series root[] = {
        {"capacity_bytes", "share_root_capacity_bytes", "gauge",
         "bytes a root may hold, 0: no bound"},
        {"used_bytes", "share_root_used_bytes", "gauge", "bytes it held at the last collection"},
        {"files", "share_root_files", "gauge", "files it held then"},
        {"queued", "share_root_queued", "gauge", "operations waiting for a root"},
        {"in_flight", "share_root_in_flight", "gauge", "operations given to a root"},
        {"read_bytes", "share_root_read_bytes", "counter", "bytes read from a root"},
        {"write_bytes", "share_root_write_bytes", "counter", "bytes written to a root"},
        {"failures", "share_root_failures", "counter", "operations that failed"},
        {"timeouts", "share_root_timeouts", "counter", "operations given up at their deadline"},
        {"breaks", "share_root_breaks", "counter", "times a root was left alone"},
        {"latency_us", "share_root_latency_us", "gauge", "of a small operation, smoothed"},
    };
    char version[96], instance[96], policy[96];

    prometheus_head("info", "gauge", "what runs; always 1");
    printf("ucmd_info{version=\"%s\",instance=\"%s\",policy=\"%s\"} 1\n",
           label(stats, "version", version, sizeof version),
           label(stats, "instance", instance, sizeof instance),
           label(stats, "policy", policy, sizeof policy));
    prometheus_head("uptime_seconds", "gauge", "since the daemon started");
    printf("ucmd_uptime_seconds %.3f\n", (double)answer_u64(stats, "uptime_ms") / 1000);
    prometheus_metrics(answer_get(stats, "metrics"));
    prometheus_list(stats, "tiers", "tier", tier, sizeof tier / sizeof tier[0]);
    prometheus_list(stats, "shares", "root", root, sizeof root / sizeof root[0]);
    prometheus_list(stats, "devices", "device", device, sizeof device / sizeof device[0]);
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
    cJSON *j = cJSON_CreateObject(), *m;

    cJSON_AddNumberToObject(j, "seconds", seconds);
    m = cJSON_AddObjectToObject(j, "metrics");
    for (size_t i = 0; i < sizeof metrics_known / sizeof metrics_known[0]; i++) {
        const char *name = metrics_known[i].name;
        bool counter = strcmp(metrics_known[i].kind, "counter") == 0;

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
    if (args_given(a, "prometheus"))
        return print_prometheus(stats);
    if (args_given(a, "json"))
        return ctl_print_json(answer_json(stats), false);
    return print_table(stats, args_given(a, "nonzero"));
}

int cmd_stats(const struct args *a)
{
    if (args_given(a, "count") && !args_given(a, "watch"))
        return program_usage_error(a, "--count goes with --watch");
    if (args_given(a, "prometheus") && (args_given(a, "watch") || args_given(a, "json")))
        return program_usage_error(a, "--prometheus goes with neither --watch nor --json");
    return args_given(a, "watch") ? watch(a) : ctl_show(a, UCM_METHOD_STATS, NULL, print_stats);
}
