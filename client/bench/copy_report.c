/* copy: the table by strategy and fragment, and what of it is held against the aims. */
#include "client/bench/copy.h"

#include <string.h>

/* ---- tables ---- */

void copy_report_head(const struct copy_bench *b)
{
    if (b->report.json)
        return;
    printf("\nGB/s, and the share of one large DMA transfer; what the worker keeps of its speed; "
           "short kernels' p99 to alone\n");
    printf("%-9s %8s  %13s %13s %14s  %13s %6s %13s %6s %7s\n", "strategy", "fragment", "idle load",
           "idle dump", "both at once", "busy load", "keeps", "busy dump", "keeps", "p99");
}

static void print_row(const struct copy_bench *b, const struct copy_row *r)
{
    printf("%-9s %4llu KiB  %6.1f (%.2f) %6.1f (%.2f) %7.1f (%.2f)", b->strategy,
           (unsigned long long)r->fragment >> 10, r->idle[0].rate / 1e9, r->idle[0].ratio,
           r->idle[1].rate / 1e9, r->idle[1].ratio, r->both / 1e9, r->both_ratio);
    if (gpu_work_kernels(&b->work))
        printf("  %6.1f (%.2f) %6.2f %6.1f (%.2f) %6.2f %7.2f", r->busy[0].rate / 1e9,
               r->busy[0].ratio, r->busy[0].keeps, r->busy[1].rate / 1e9, r->busy[1].ratio,
               r->busy[1].keeps, r->chain_p99);
    printf("\n");
    fflush(stdout);
}

static void json_rate(cJSON *row, const char *name, const struct copy_rate *rate, bool busy)
{
    cJSON *j = cJSON_AddObjectToObject(row, name);

    cJSON_AddNumberToObject(j, "bytes_per_second", rate->rate);
    cJSON_AddNumberToObject(j, "ratio", rate->ratio);
    if (busy)
        cJSON_AddNumberToObject(j, "worker_keeps", rate->keeps);
}

static void json_row(struct copy_bench *b, const struct copy_row *r)
{
    cJSON *rows = cJSON_GetObjectItem(b->report.document, "rows"), *row = cJSON_CreateObject();

    if (!rows)
        rows = cJSON_AddArrayToObject(b->report.document, "rows");
    cJSON_AddStringToObject(row, "strategy", b->strategy);
    cJSON_AddNumberToObject(row, "fragment", (double)r->fragment);
    json_rate(row, "idle_load", &r->idle[0], false);
    json_rate(row, "idle_dump", &r->idle[1], false);
    cJSON_AddNumberToObject(row, "both_bytes_per_second", r->both);
    cJSON_AddNumberToObject(row, "both_ratio", r->both_ratio);
    if (gpu_work_kernels(&b->work)) {
        json_rate(row, "busy_load", &r->busy[0], true);
        json_rate(row, "busy_dump", &r->busy[1], true);
        cJSON_AddNumberToObject(row, "chain_p50_ratio", r->chain_p50);
        cJSON_AddNumberToObject(row, "chain_p99_ratio", r->chain_p99);
    }
    cJSON_AddItemToArray(rows, row);
}

void copy_report_row(struct copy_bench *b, const struct copy_row *r)
{
    if (b->report.json)
        json_row(b, r);
    else
        print_row(b, r);
}

/* ---- against the aims ---- */

/* The worst over the fragments from..to of the double that lies at `offset` of a row. */
static void aim(struct copy_bench *b, const struct copy_row *rows, const char *name, uint64_t from,
                uint64_t to, double target, bool more, size_t offset)
{
    double worst = 0;
    bool any = false;

    for (unsigned i = 0; i < b->n_rows; i++) {
        double v;

        memcpy(&v, (const char *)&rows[i] + offset, sizeof v);
        if (rows[i].fragment < from || rows[i].fragment > to)
            continue;
        if (!any || (more ? v < worst : v > worst))
            worst = v;
        any = true;
    }
    if (any)
        report_figure(&b->report, &(struct figure){.name = name,
                                                   .unit = "",
                                                   .value = worst,
                                                   .target = target,
                                                   .target_is_value = true,
                                                   .more_is_better = more});
}

enum {
    IDLE_LOAD = offsetof(struct copy_row, idle[0].ratio),
    IDLE_DUMP = offsetof(struct copy_row, idle[1].ratio),
    BUSY_LOAD = offsetof(struct copy_row, busy[0].ratio),
    BUSY_DUMP = offsetof(struct copy_row, busy[1].ratio),
    BUSY_KEEPS = offsetof(struct copy_row, busy_keeps),
    BOTH = offsetof(struct copy_row, both_ratio),
    CHAIN = offsetof(struct copy_row, chain_p99),
};

static void report_aims_alone(struct copy_bench *b)
{
    const uint64_t kib = 1024, all = UINT64_MAX;
    const struct copy_row *r = b->alone;

    if (r->fragment == 0 || !gpu_work_kernels(&b->work))
        return;
    aim(b, r, "busy load, 512 KiB up", 512 * kib, all, 0.93, true, BUSY_LOAD);
    aim(b, r, "busy dump, 512 KiB up", 512 * kib, all, 0.93, true, BUSY_DUMP);
    aim(b, r, "busy keeps, 512 KiB up", 512 * kib, all, 0.98, true, BUSY_KEEPS);
    aim(b, r, "busy load, 64 KiB", 64 * kib, 64 * kib, 0.80, true, BUSY_LOAD);
    aim(b, r, "busy dump, 64 KiB", 64 * kib, 64 * kib, 0.80, true, BUSY_DUMP);
    aim(b, r, "busy keeps, 64 KiB", 64 * kib, 64 * kib, 0.93, true, BUSY_KEEPS);
}

void copy_report_aims(struct copy_bench *b)
{
    const uint64_t all = UINT64_MAX;
    const struct copy_row *r = b->rows;

    if (!b->report.json)
        printf("\nThe worst of the fragments of each case, strategy %s; what is aimed at for some "
               "fragments, without a copy agent\n",
               b->strategy);
    aim(b, r, "idle load", 0, all, 0.97, true, IDLE_LOAD);
    aim(b, r, "idle dump", 0, all, 0.97, true, IDLE_DUMP);
    aim(b, r, "both directions", 0, all, 0.90, true, BOTH);
    if (gpu_work_kernels(&b->work)) {
        aim(b, r, "busy load", 0, all, 0.96, true, BUSY_LOAD);
        aim(b, r, "busy dump", 0, all, 0.96, true, BUSY_DUMP);
        aim(b, r, "busy, worker keeps", 0, all, 0.95, true, BUSY_KEEPS);
        aim(b, r, "chain's p99", 0, all, 1.10, false, CHAIN);
    }
    report_aims_alone(b);
}
