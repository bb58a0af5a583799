/* A frame of top as text and as JSON. */
#include "client/ctl/ctl.h"
#include "client/ctl/top.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define BAR 20 /* columns */

/* ---- text ---- */

/* Bytes a second in GB/s, or "-". */
static const char *rate(char buf[HUMAN_BYTES], double bytes)
{
    if (bytes < 0)
        snprintf(buf, HUMAN_BYTES, "-");
    else
        snprintf(buf, HUMAN_BYTES,
                 bytes >= 1e11   ? "%.0f"
                 : bytes >= 1e10 ? "%.1f"
                                 : "%.2f",
                 bytes / 1e9);
    return buf;
}

static const char *number(char buf[HUMAN_BYTES], double v)
{
    snprintf(buf, HUMAN_BYTES, v < 0 ? "-" : "%.0f", v);
    return buf;
}

static const char *ratio(char buf[HUMAN_BYTES], double v)
{
    snprintf(buf, HUMAN_BYTES, v < 0 ? "-" : "%.1f %%", 100 * v);
    return buf;
}

static const char *micros(char buf[HUMAN_BYTES], double us)
{
    if (us < 0)
        snprintf(buf, HUMAN_BYTES, "-");
    else
        human_us(buf, (uint64_t)us);
    return buf;
}

/* "####----", the fraction of it that is used. */
static void print_bar(FILE *out, uint64_t used, uint64_t of)
{
    unsigned n = of > 0 ? (unsigned)((double)used / (double)of * BAR + 0.5) : 0;

    fputc('[', out);
    for (unsigned i = 0; i < BAR; i++)
        fputc(i < n ? '#' : '-', out);
    fputc(']', out);
}

static void print_head(const struct top_frame *f, FILE *out)
{
    const struct exposition *x = f->to->x;
    const struct metrics *m = &x->metrics;
    char up[HUMAN_BYTES];

    fprintf(out, "ucmd %s, up %s, %s; over %.1f s\n", x->version, human_duration(up, x->uptime_ms),
            x->health < HEALTH_STATES ? health_names[x->health] : "health unknown", f->seconds);
    fprintf(out,
            "requests  %8.0f /s, %" PRIu64 " under way, %.0f /s BUSY; %" PRIu64 " clients, %" PRIu64
            " regions\n",
            f->requests, m->requests_active, f->busy, m->connections, m->regions);
}

static void print_times(const struct top_times *t, FILE *out)
{
    char a[HUMAN_BYTES], b[HUMAN_BYTES];

    fprintf(out, "p50 %-8s p99 %s", micros(a, t->p50_us), micros(b, t->p99_us));
}

static void print_work(const struct top_frame *f, FILE *out)
{
    static const char *const tiers[METRIC_TIERS] = {"DRAM", "NVMe", "shared roots"};
    const struct metrics *m = &f->to->x->metrics;
    char a[HUMAN_BYTES], b[HUMAN_BYTES];
    unsigned shown = 0;

    fprintf(out, "lookup    %8.0f /s    ", f->lookups);
    print_times(&f->lookup, out);
    fprintf(out, "; hits %s\nload      %8s GB/s  ", ratio(a, f->all.hits), rate(b, f->all.load));
    print_times(&f->load, out);
    for (int i = 0; i < METRIC_TIERS; i++)
        if (f->load_tier[i].n > 0)
            fprintf(out, "%s %s from %s", shown++ > 0 ? "," : "; p99",
                    micros(a, f->load_tier[i].p99_us), tiers[i]);
    fprintf(out, "\ndump      %8s GB/s  ", rate(a, f->all.dump));
    print_times(&f->dump, out);
    fprintf(out, "\nwaiting   %8" PRIu64 " for DRAM, the longest for %s; ", m->slot_waiters,
            human_us(a, m->slot_wait_oldest_us));
    fprintf(out, "%" PRIu64 " have waited, p99 %s\n", f->slot_wait.n,
            micros(a, f->slot_wait.p99_us));
}

static void print_tiers(const struct top_frame *f, FILE *out)
{
    const struct exposition *x = f->to->x;
    const struct metrics *m = &x->metrics;
    uint64_t dram = dram_bytes(m->arena_bytes_total, m->arena_bytes_configured);
    char a[HUMAN_BYTES], b[HUMAN_BYTES], c[HUMAN_BYTES];

    fprintf(out, "dram      ");
    print_bar(out, m->arena_bytes_used, dram);
    fprintf(out, " %s of %s; %.0f blocks/s evicted, %.0f lost\n",
            human_bytes(a, m->arena_bytes_used), human_bytes(b, dram), f->all.evicted,
            f->evicted_lost);
    if (m->nvme_bytes_capacity > 0) {
        fprintf(out, "nvme      ");
        print_bar(out, m->nvme_bytes_used, m->nvme_bytes_capacity);
        fprintf(out, " %s of %s; %s GB/s read,", human_bytes(a, m->nvme_bytes_used),
                human_bytes(b, m->nvme_bytes_capacity), rate(c, f->nvme_read));
        fprintf(out, " %s written%s\n", rate(a, f->nvme_written),
                x->n_tiers > 0 && x->tier[0].degraded ? "; DEGRADED" : "");
    }
    for (uint32_t i = 0; i < x->n_roots; i++) {
        const struct metrics_root *r = &x->root[i];

        fprintf(out, "share     ");
        print_bar(out, r->used_bytes, r->capacity_bytes);
        fprintf(out, " %s of %s; %.1f ms, %s: %s\n", human_bytes(a, r->used_bytes),
                r->capacity_bytes > 0 ? human_bytes(b, r->capacity_bytes) : "no bound",
                (double)r->latency_us / 1000,
                r->state < ROOT_STATES ? root_state_names[r->state] : "unknown", r->name);
    }
}

/* What larger sizes would hit, over the daemon's life: an estimate from a sample of the keys. */
static void print_reuse(const struct top_frame *f, FILE *out)
{
    static const char *const sizes[REUSE_TIERS] = {"DRAM alone", "DRAM and NVMe"};
    const struct metrics_reuse *r = &f->to->x->reuse;

    for (int t = 0; t < REUSE_TIERS; t++) {
        const uint32_t *hit = r->hit_permille[t];

        if (r->bytes[t] > 0)
            fprintf(out, "reuse     %s: %.1f %% hits, twice as much %.1f %%, four times %.1f %%\n",
                    sizes[t], hit[1] / 10.0, hit[2] / 10.0, hit[3] / 10.0);
    }
}

static void times_cells(struct table *t, const struct top_times *times)
{
    char a[HUMAN_BYTES];

    table_cell(t, "%s", micros(a, times->p50_us));
    table_cell(t, "%s", micros(a, times->p99_us));
}

static void row_cells(struct table *t, const struct top_row *row, const struct top_rates *r)
{
    char a[HUMAN_BYTES];

    table_cell(t, "%s", rate(a, r->load));
    table_cell(t, "%s", rate(a, r->dump));
    table_cell(t, "%s", ratio(a, r->hits));
    if (row->ns == 0) {
        times_cells(t, &r->lookup);
        times_cells(t, &r->load_times);
    }
    table_cell(t, "%s", number(a, r->evicted));
    for (int i = TOP_DRAM; i < TOP_COUNTS; i++)
        table_cell(t, "%s", human_bytes(a, row->count[i]));
}

static int print_rows(const struct top_frame *f, const struct top_rows *from,
                      const struct top_rows *to, bool namespaces, FILE *out)
{
    static const char *const tenant[] = {
        "TENANT", ">LOAD GB/s", ">DUMP GB/s", ">HITS", ">LOOKUP P50", ">P99", ">LOAD P50",
        ">P99",   ">EVICTED/s", ">DRAM",      ">NVME", ">SHARED",     NULL};
    /* The longest last: there a narrow terminal cuts it off. */
    static const char *const ns[] = {">NS",     "TENANT",     ">LOAD GB/s", ">DUMP GB/s",
                                     ">HITS",   ">EVICTED/s", ">DRAM",      ">NVME",
                                     ">SHARED", "MODEL",      NULL};
    uint32_t *order = calloc(to->n + 1, sizeof *order);
    struct table t;
    int rc;

    if (order == NULL)
        return -ENOMEM;
    top_order(f, from, to, order);
    table_begin(&t, namespaces ? ns : tenant);
    for (uint32_t i = 0; i < to->n; i++) {
        const struct top_row *row = &to->row[order[i]];
        struct top_rates r = top_row_rates(f, row, top_row_before(from, row));

        if (namespaces) {
            table_cell(&t, "%" PRIu64, row->ns);
            table_cell(&t, "%.16s", row->tenant);
        }
        if (!namespaces)
            table_cell(&t, "%s", row->name);
        row_cells(&t, row, &r);
        if (namespaces)
            table_cell(&t, "%s", row->name);
    }
    free(order);
    fputc('\n', out);
    rc = table_end(&t, out);
    if (to->more)
        fprintf(out, "and more, which are not counted here\n");
    return rc;
}

int top_print(const struct top_frame *f, FILE *out)
{
    int rc = 0;

    print_head(f, out);
    print_work(f, out);
    print_tiers(f, out);
    print_reuse(f, out);
    if (f->to->tenants.n > 0)
        rc = print_rows(f, &f->from->tenants, &f->to->tenants, false, out);
    if (rc == 0 && f->to->namespaces.n > 0)
        rc = print_rows(f, &f->from->namespaces, &f->to->namespaces, true, out);
    return rc;
}

/* ---- JSON: null is not known ---- */

static void json_number(cJSON *o, const char *name, double v)
{
    cJSON_AddItemToObject(o, name, v < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(v));
}

static cJSON *json_times(cJSON *j, const char *name, const struct top_times *t)
{
    cJSON *o = cJSON_AddObjectToObject(j, name);

    ctl_json_u64(o, "count", t->n);
    json_number(o, "p50_us", t->p50_us);
    json_number(o, "p99_us", t->p99_us);
    return o;
}

static void json_rates(cJSON *o, const struct top_rates *r)
{
    json_number(o, "load_bytes_per_second", r->load);
    json_number(o, "dump_bytes_per_second", r->dump);
    json_number(o, "hit_ratio", r->hits);
    json_number(o, "evicted_blocks_per_second", r->evicted);
}

static void json_rows(cJSON *j, const char *name, const struct top_frame *f,
                      const struct top_rows *from, const struct top_rows *to)
{
    static const char *const gauges[] = {"dram_bytes", "nvme_bytes", "shared_bytes"};
    cJSON *list = cJSON_AddArrayToObject(j, name);

    for (uint32_t i = 0; i < to->n; i++) {
        const struct top_row *row = &to->row[i];
        struct top_rates r = top_row_rates(f, row, top_row_before(from, row));
        cJSON *o = cJSON_CreateObject();

        if (row->ns != 0) {
            ctl_json_u64(o, "ns", row->ns);
            cJSON_AddStringToObject(o, "tenant", row->tenant);
            cJSON_AddStringToObject(o, "model", row->name);
        } else {
            cJSON_AddStringToObject(o, "tenant", row->name);
        }
        json_rates(o, &r);
        if (row->histograms != NULL) {
            json_times(o, "lookup", &r.lookup);
            json_times(o, "load", &r.load_times);
        }
        for (int k = 0; k < TOP_COUNTS - TOP_DRAM; k++)
            ctl_json_u64(o, gauges[k], row->count[TOP_DRAM + k]);
        cJSON_AddItemToArray(list, o);
    }
}

static void json_tier(cJSON *list, const char *name, const char *root, uint64_t used,
                      uint64_t capacity)
{
    cJSON *o = cJSON_CreateObject();

    cJSON_AddStringToObject(o, "tier", name);
    if (root != NULL)
        cJSON_AddStringToObject(o, "root", root);
    ctl_json_u64(o, "used_bytes", used);
    ctl_json_u64(o, "capacity_bytes", capacity);
    cJSON_AddItemToArray(list, o);
}

/* Of each set of tiers whose size is known: hit ratios at today's size, twice and four times. */
static void json_reuse(cJSON *j, const struct metrics_reuse *r)
{
    cJSON *list = cJSON_AddArrayToObject(j, "reuse");

    for (int t = 0; t < REUSE_TIERS; t++) {
        cJSON *o;

        if (r->bytes[t] == 0)
            continue;
        o = cJSON_CreateObject();
        cJSON_AddStringToObject(o, "tiers", reuse_tiers_names[t]);
        ctl_json_u64(o, "bytes", r->bytes[t]);
        json_number(o, "hit_ratio", r->hit_permille[t][1] / 1000.0);
        json_number(o, "hit_ratio_twice", r->hit_permille[t][2] / 1000.0);
        json_number(o, "hit_ratio_four_times", r->hit_permille[t][3] / 1000.0);
        cJSON_AddItemToArray(list, o);
    }
}

cJSON *top_json(const struct top_frame *f)
{
    const struct exposition *x = f->to->x;
    const struct metrics *m = &x->metrics;
    cJSON *j = cJSON_CreateObject(), *o;

    json_number(j, "seconds", f->seconds);
    cJSON_AddStringToObject(j, "instance", f->to->instance);
    ctl_json_u64(j, "uptime_ms", x->uptime_ms);
    cJSON_AddItemToObject(j, "health",
                          x->health < HEALTH_STATES ? cJSON_CreateString(health_names[x->health])
                                                    : cJSON_CreateNull());
    json_number(j, "requests_per_second", f->requests);
    json_number(j, "busy_per_second", f->busy);
    ctl_json_u64(j, "requests_active", m->requests_active);
    json_number(j, "lookups_per_second", f->lookups);
    json_rates(j, &f->all);
    json_number(j, "lost_blocks_per_second", f->evicted_lost);
    json_number(j, "nvme_read_bytes_per_second", f->nvme_read);
    json_number(j, "nvme_written_bytes_per_second", f->nvme_written);
    json_times(j, "lookup", &f->lookup);
    o = json_times(j, "load", &f->load);
    for (int i = 0; i < METRIC_TIERS; i++)
        json_times(o, metric_tier_names[i], &f->load_tier[i]);
    json_times(j, "dump", &f->dump);
    o = json_times(j, "slot_wait", &f->slot_wait);
    ctl_json_u64(o, "waiting", m->slot_waiters);
    ctl_json_u64(o, "oldest_us", m->slot_wait_oldest_us);
    o = cJSON_AddArrayToObject(j, "tiers");
    json_tier(o, "dram", NULL, m->arena_bytes_used,
              dram_bytes(m->arena_bytes_total, m->arena_bytes_configured));
    if (m->nvme_bytes_capacity > 0)
        json_tier(o, "nvme", NULL, m->nvme_bytes_used, m->nvme_bytes_capacity);
    for (uint32_t i = 0; i < x->n_roots; i++)
        json_tier(o, "shared", x->root[i].name, x->root[i].used_bytes, x->root[i].capacity_bytes);
    json_reuse(j, &x->reuse);
    json_rows(j, "tenants", f, &f->from->tenants, &f->to->tenants);
    json_rows(j, "namespaces", f, &f->from->namespaces, &f->to->namespaces);
    return j;
}
