#include "proto/metrics/exposition.h"

#include "proto/proto.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#define LABEL_BYTES (UCM_MAX_NAME_BYTES + 1) /* the longest there is */
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

const char *const health_names[HEALTH_STATES] = {"ok", "recovering", "degraded", "failing"};
const char *const root_state_names[ROOT_STATES] = {"up", "read-only", "full", "down"};
const char *const metric_tier_names[METRIC_TIERS] = METRIC_TIER_NAMES;
const char *const metric_size_names[METRIC_SIZES] = METRIC_SIZE_NAMES;
const char *const reuse_tiers_names[REUSE_TIERS] = REUSE_TIERS_NAMES;
static const char *const reuse_factors[] = REUSE_FACTOR_NAMES;

#define T struct metrics
#define X(name, kind, unit, help) {#name, #kind, unit, help, offsetof(T, name)},
static const struct metric_info plain[] = {UCMD_METRICS(X)};
#undef T
#define T struct metrics_tier
static const struct metric_info tiers[] = {UCMD_TIER_METRICS(X)};
#undef T
#define T struct metrics_root
static const struct metric_info roots[] = {UCMD_ROOT_METRICS(X)};
#undef T
#define T struct metrics_device
static const struct metric_info devices[] = {UCMD_DEVICE_METRICS(X)};
#undef T
#define T struct metrics_node
static const struct metric_info nodes[] = {UCMD_NODE_METRICS(X)};
#undef T
#define T struct metrics_tenant
static const struct metric_info tenants[] = {UCMD_TENANT_METRICS(X)};
#undef T
#undef X

#define LIST(wire, prefix, label, array)                                                           \
    {                                                                                              \
        wire, prefix, label, offsetof(struct exposition, array),                                   \
            offsetof(struct exposition, n_##array##s), sizeof(struct metrics_##array),             \
            sizeof(((struct metrics_##array *)0)->name), array##s, COUNT(array##s)                 \
    }
const struct metric_list metric_lists[METRIC_LISTS] = {
    [METRIC_LIST_PLAIN] = {"metrics", "", NULL, offsetof(struct exposition, metrics), 0,
                           sizeof(struct metrics), 0, plain, COUNT(plain)},
    [METRIC_LIST_TIERS] = LIST("tiers", "tier_", "tier", tier),
    [METRIC_LIST_ROOTS] = LIST("shared_roots", "shared_root_", "root", root),
    [METRIC_LIST_DEVICES] = LIST("devices", "device_", "device", device),
    [METRIC_LIST_NODES] = LIST("nodes", "arena_node_", "node", node),
    [METRIC_LIST_TENANTS] = LIST("tenants", "tenant_", "tenant", tenant),
};

const struct histogram_info histogram_infos[] = {
#define X(name, tiers, sizes, help) {#name, help, tiers, sizes, offsetof(struct histograms, name)},
    UCMD_HISTOGRAMS(X)
#undef X
};
const size_t histogram_infos_n = COUNT(histogram_infos);

/* ---- names ---- */

static bool ends_in(const char *s, size_t n, const char *end)
{
    size_t m = strlen(end);

    return n >= m && memcmp(s + n - m, end, m) == 0;
}

static bool is(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

/* Divisor and name of the base unit; NULL: it has none. */
static const char *base_unit(const char *unit, double *per)
{
    *per = is(unit, "us") ? 1e6 : is(unit, "1/1000") ? 1e3 : 1;
    return is(unit, "us")       ? "seconds"
           : is(unit, "1/1000") ? "ratio"
           : is(unit, "bytes")  ? "bytes"
                                : NULL;
}

void exposition_name(const struct metric_list *list, const struct metric_info *m,
                     char out[EXPOSITION_NAME_BYTES])
{
    const char *name = m->name, *at;
    double per;
    const char *unit = base_unit(m->unit, &per);
    size_t n = strlen(name), unit_n = unit ? strlen(unit) : 0;
    int before;

    if (is(m->kind, "counter") && ends_in(name, n, "_total"))
        n -= strlen("_total");
    if (is(m->unit, "us") && ends_in(name, n, "_us"))
        n -= strlen("_us");
    at = unit ? strstr(name, unit) : NULL;
    if (!unit || ends_in(name, n, unit)) {
        snprintf(out, EXPOSITION_NAME_BYTES, "ucmd_%s%.*s", list->prefix, (int)n, name);
        return;
    }
    /* arena_bytes_used: the unit goes to the end. */
    before = at ? (int)(at - name) : (int)n;
    snprintf(out, EXPOSITION_NAME_BYTES, "ucmd_%s%.*s%s_%s", list->prefix, before, name,
             at ? at + unit_n + 1 : "", unit);
}

/* ---- lines ---- */

struct writer {
    FILE *f;
    bool open; /* OpenMetrics */
};

static void put_escaped(const struct writer *w, const char *text, bool quotes)
{
    for (; *text != '\0'; text++) {
        if (*text == '\n') {
            fputs("\\n", w->f);
            continue;
        }
        if (*text == '\\' || (quotes && *text == '"'))
            fputc('\\', w->f);
        fputc(*text, w->f);
    }
}

/* `name` is without `_total` and `_info`: OpenMetrics has these in samples only. */
static void put_head(const struct writer *w, const char *name, const char *kind, const char *unit,
                     const char *help)
{
    bool info = is(kind, "info"), gauge = is(kind, "flag") || (info && !w->open);
    const char *suffix = w->open ? "" : is(kind, "counter") ? "_total" : info ? "_info" : "";

    fprintf(w->f, "# HELP %s%s ", name, suffix);
    put_escaped(w, help, w->open);
    fprintf(w->f, "\n# TYPE %s%s %s\n", name, suffix, gauge ? "gauge" : kind);
    if (w->open && unit)
        fprintf(w->f, "# UNIT %s %s\n", name, unit);
}

/* One value that is no UTF-8, as of a path that was cut, would have the scraper refuse the whole
 * page. */
static void put_label(const struct writer *w, bool first, const char *label, const char *value)
{
    char clean[LABEL_BYTES];

    snprintf(clean, sizeof(clean), "%s", value);
    proto_clean(clean);
    fprintf(w->f, "%s%s=\"", first ? "{" : ",", label);
    put_escaped(w, clean, true);
    fputc('"', w->f);
}

static void put_value(const struct writer *w, uint64_t v, double per)
{
    if (per == 1)
        fprintf(w->f, " %" PRIu64 "\n", v);
    else
        fprintf(w->f, " %.9g\n", (double)v / per);
}

/* ---- families ---- */

static uint64_t value_at(const void *p, size_t offset)
{
    uint64_t v;

    memcpy(&v, (const char *)p + offset, sizeof(v));
    return v;
}

static void put_metric(const struct writer *w, const struct exposition *x,
                       const struct metric_list *list, uint32_t n, const struct metric_info *m)
{
    char name[EXPOSITION_NAME_BYTES], index[16];
    const char *at = (const char *)x + list->offset;
    double per;
    const char *unit = base_unit(m->unit, &per);

    exposition_name(list, m, name);
    put_head(w, name, m->kind, unit, m->help);
    for (uint32_t i = 0; i < n; i++, at += list->size) {
        fprintf(w->f, "%s%s", name, is(m->kind, "counter") ? "_total" : "");
        if (list->label) {
            put_label(w, true, list->label, at); /* the name comes first in each struct */
            if (list == &metric_lists[METRIC_LIST_ROOTS] ||
                list == &metric_lists[METRIC_LIST_DEVICES]) {
                snprintf(index, sizeof(index), "%" PRIu32, i);
                put_label(w, false, "index", index);
            }
            fputc('}', w->f);
        }
        put_value(w, value_at(at, m->offset), per);
    }
}

static void put_lists(const struct writer *w, const struct exposition *x)
{
    for (size_t l = 0; l < METRIC_LISTS; l++) {
        const struct metric_list *list = &metric_lists[l];
        uint32_t n = 1;

        if (list->label)
            memcpy(&n, (const char *)x + list->offset_n, sizeof(n));
        for (size_t i = 0; n > 0 && i < list->n_metrics; i++)
            put_metric(w, x, list, n, &list->metric[i]);
    }
}

static void put_build(const struct writer *w, const struct exposition *x)
{
    const char *const label[][2] = {{"version", x->version},
                                    {"commit", x->commit},
                                    {"options", x->options},
                                    {"policy", x->policy}};
    bool first = true;

    put_head(w, "ucmd_build", "info", NULL, "what runs; always 1");
    fputs("ucmd_build_info", w->f);
    for (size_t i = 0; i < COUNT(label); i++)
        if (label[i][1][0] != '\0') {
            put_label(w, first, label[i][0], label[i][1]);
            first = false;
        }
    fputs(first ? " 1\n" : "} 1\n", w->f);
    put_head(w, "ucmd_uptime_seconds", "gauge", "seconds", "time since the daemon started");
    fprintf(w->f, "ucmd_uptime_seconds %.3f\n", (double)x->uptime_ms / 1e3);
}

static void put_states(const struct writer *w, const struct exposition *x)
{
    char index[16];

    put_head(w, "ucmd_health", "gauge", NULL, "1 for the state that the daemon is in");
    for (unsigned i = 0; i < HEALTH_STATES; i++)
        fprintf(w->f, "ucmd_health{state=\"%s\"} %d\n", health_names[i], i == x->health);
    if (x->n_roots > 0)
        put_head(w, "ucmd_shared_root_health", "gauge", NULL, "1 for the state that a root is in");
    for (uint32_t r = 0; r < x->n_roots; r++)
        for (unsigned i = 0; i < ROOT_STATES; i++) {
            snprintf(index, sizeof(index), "%" PRIu32, r);
            fputs("ucmd_shared_root_health", w->f);
            put_label(w, true, "root", x->root[r].name);
            put_label(w, false, "index", index);
            put_label(w, false, "state", root_state_names[i]);
            fprintf(w->f, "} %d\n", i == x->root[r].state);
        }
}

/* ---- histograms ---- */

/* The text has only those buckets that end at a power of two. */
#define TEXT_LOG2_FIRST 2

static void put_buckets(const struct writer *w, const char *name, const char *labels,
                        const struct histogram *h)
{
    const char *comma = labels[0] != '\0' ? "," : "";
    char braced[72] = "";
    uint64_t n = 0;
    uint32_t at = 0;

    for (uint32_t log2 = TEXT_LOG2_FIRST; log2 <= HISTOGRAM_DOUBLINGS; log2++) {
        for (; at <= histogram_bucket_below(log2); at++)
            n += h->bucket[at];
        fprintf(w->f, "%s_bucket{%s%sle=\"%.9g\"} %" PRIu64 "\n", name, labels, comma,
                (double)(UINT64_C(1) << log2) / 1e6, n);
    }
    n += h->bucket[HISTOGRAM_BUCKETS - 1];
    fprintf(w->f, "%s_bucket{%s%sle=\"+Inf\"} %" PRIu64 "\n", name, labels, comma, n);
    if (labels[0] != '\0')
        snprintf(braced, sizeof(braced), "{%s}", labels);
    fprintf(w->f, "%s_sum%s %.9f\n", name, braced, (double)h->sum_ns / 1e9);
    fprintf(w->f, "%s_count%s %" PRIu64 "\n", name, braced, n);
}

static void put_histogram(const struct writer *w, const struct histogram_info *info,
                          const struct histogram *h)
{
    char name[EXPOSITION_NAME_BYTES], labels[64];

    snprintf(name, sizeof(name), "ucmd_%s_seconds", info->name);
    put_head(w, name, "histogram", "seconds", info->help);
    for (uint32_t t = 0; t < info->tiers; t++)
        for (uint32_t s = 0; s < info->sizes; s++) {
            int n = 0;

            labels[0] = '\0';
            if (info->tiers > 1)
                n = snprintf(labels, sizeof(labels), "tier=\"%s\"%s", metric_tier_names[t],
                             info->sizes > 1 ? "," : "");
            if (info->sizes > 1)
                snprintf(labels + n, sizeof(labels) - (size_t)n, "size=\"%s\"",
                         metric_size_names[s]);
            put_buckets(w, name, labels, &h[t * info->sizes + s]);
        }
}

/* ---- reuse ---- */

static void put_reuse(const struct writer *w, const struct metrics_reuse *r)
{
    put_head(w, "ucmd_reuse_references", "counter", NULL, "keys looked up that count in the curve");
    fprintf(w->f, "ucmd_reuse_references_total %" PRIu64 "\n", r->references);
    if (r->bytes[REUSE_DRAM] == 0 && r->bytes[REUSE_DRAM_NVME] == 0)
        return;
    put_head(w, "ucmd_reuse_hit_ratio", "gauge", "ratio",
             "hit rate of lookups that so many times today's size would give, estimated");
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        for (unsigned i = 0; i < REUSE_POINTS && r->bytes[t] > 0; i++)
            fprintf(w->f, "ucmd_reuse_hit_ratio{tiers=\"%s\",factor=\"%s\"} %.3f\n",
                    reuse_tiers_names[t], reuse_factors[i], r->hit_permille[t][i] / 1e3);
}

const char *exposition_content_type(enum exposition_format format)
{
    return format == EXPOSITION_OPENMETRICS
               ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
               : "text/plain; version=0.0.4; charset=utf-8";
}

void exposition_write(const struct exposition *x, enum exposition_format format, FILE *out)
{
    const struct writer w = {out, format == EXPOSITION_OPENMETRICS};

    put_build(&w, x);
    put_states(&w, x);
    put_lists(&w, x);
    for (size_t i = 0; i < histogram_infos_n; i++)
        put_histogram(&w, &histogram_infos[i],
                      (const struct histogram *)((const char *)&x->metrics.histograms +
                                                 histogram_infos[i].offset));
    put_reuse(&w, &x->reuse);
    if (w.open)
        fputs("# EOF\n", out);
}
