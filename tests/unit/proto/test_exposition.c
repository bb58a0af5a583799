#include "proto/metrics/exposition.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static struct exposition x;

static char *written(enum exposition_format format)
{
    char *text;
    size_t n;
    FILE *f = open_memstream(&text, &n);

    exposition_write(&x, format, f);
    cr_assert_eq(ferror(f), 0);
    fclose(f);
    return text;
}

static void has(enum exposition_format format, const char *lines)
{
    char *text = written(format);

    cr_assert(strstr(text, lines), "%s\nis not in\n%s", lines, text);
    free(text);
}

static void check_name(const char *metric, const char *expected)
{
    const struct metric_list *l = &metric_lists[METRIC_LIST_PLAIN];
    char name[EXPOSITION_NAME_BYTES];

    for (size_t i = 0; i < l->n_metrics; i++)
        if (strcmp(l->metric[i].name, metric) == 0) {
            exposition_name(l, &l->metric[i], name);
            cr_assert_str_eq(name, expected);
            return;
        }
    cr_assert_fail("%s", metric);
}

Test(exposition, names_end_in_their_unit)
{
    check_name("lookups", "ucmd_lookups");
    check_name("requests_total", "ucmd_requests");
    check_name("connections_accepted", "ucmd_connections_accepted");
    check_name("load_bytes", "ucmd_load_bytes");
    check_name("arena_bytes_used", "ucmd_arena_used_bytes");
    check_name("arena_bytes_total", "ucmd_arena_total_bytes");
    check_name("nvme_write_amplification", "ucmd_nvme_write_amplification_ratio");
}

/* A scraper refuses a page with one label that is no UTF-8. */
Test(exposition, labels_are_utf8_whatever_the_names_hold)
{
    x.n_roots = 2;
    snprintf(x.root[0].name, sizeof(x.root[0].name), "/mnt/r\xc3\xa9/cut\xc3");
    snprintf(x.root[1].name, sizeof(x.root[1].name), "/a\tb\xff\"");
    has(EXPOSITION_PROMETHEUS, "{root=\"/mnt/r\xc3\xa9/cut?\",index=\"0\",state=\"up\"}");
    has(EXPOSITION_PROMETHEUS, "_root_read_bytes_total{root=\"/a?b?\\\"\",index=\"1\"}");
    x.n_roots = 0;
}

Test(exposition, no_two_families_have_one_name)
{
    static char seen[400][EXPOSITION_NAME_BYTES];
    size_t n = 0;

    for (size_t l = 0; l < METRIC_LISTS; l++)
        for (size_t i = 0; i < metric_lists[l].n_metrics; i++) {
            exposition_name(&metric_lists[l], &metric_lists[l].metric[i], seen[n]);
            for (size_t k = 0; k < n; k++)
                cr_assert_str_neq(seen[k], seen[n]);
            for (size_t h = 0; h < histogram_infos_n; h++) {
                char name[EXPOSITION_NAME_BYTES];

                snprintf(name, sizeof(name), "ucmd_%s_seconds", histogram_infos[h].name);
                cr_assert_str_neq(name, seen[n]);
            }
            n++;
            cr_assert_lt(n, 400);
        }
}

Test(exposition, values_are_in_base_units)
{
    x.metrics.nvme_write_amplification = 1250;
    x.n_roots = 1;
    x.root[0].latency_us = 1500;
    strcpy(x.root[0].name, "/r");
    has(EXPOSITION_PROMETHEUS, "\nucmd_nvme_write_amplification_ratio 1.25\n");
    has(EXPOSITION_PROMETHEUS,
        "\nucmd_shared_root_latency_seconds{root=\"/r\",index=\"0\"} 0.0015\n");
}

Test(exposition, a_counter_s_family_has_its_suffix_in_the_old_text_only)
{
    x.metrics.lookups = 7;
    has(EXPOSITION_PROMETHEUS, "# HELP ucmd_lookups_total lookups\n"
                               "# TYPE ucmd_lookups_total counter\nucmd_lookups_total 7\n");
    has(EXPOSITION_OPENMETRICS, "# HELP ucmd_lookups lookups\n"
                                "# TYPE ucmd_lookups counter\nucmd_lookups_total 7\n");
    has(EXPOSITION_OPENMETRICS, "# TYPE ucmd_load_bytes counter\n# UNIT ucmd_load_bytes bytes\n");
    has(EXPOSITION_OPENMETRICS, "# TYPE ucmd_build info\nucmd_build_info ");
    has(EXPOSITION_PROMETHEUS, "# TYPE ucmd_build_info gauge\nucmd_build_info ");
}

Test(exposition, openmetrics_ends_in_its_mark_and_the_old_text_has_none)
{
    char *open = written(EXPOSITION_OPENMETRICS), *old = written(EXPOSITION_PROMETHEUS);

    cr_assert_str_eq(open + strlen(open) - 7, "\n# EOF\n");
    cr_assert_null(strstr(old, "EOF"));
    free(open);
    free(old);
}

Test(exposition, a_label_s_quotes_and_backslashes_are_escaped)
{
    x.n_tenants = 1;
    strcpy(x.tenant[0].name, "a\"b\\c\nd");
    has(EXPOSITION_PROMETHEUS, "ucmd_tenant_lookups_total{tenant=\"a\\\"b\\\\c?d\"} 0\n");
}

Test(exposition, buckets_are_cumulative)
{
    struct histogram *h = &x.metrics.histograms.load[METRIC_NVME * METRIC_SIZES + METRIC_LE_64MIB];

    histogram_add(h, 900, 1);  /* 0.9 us */
    histogram_add(h, 5000, 2); /* 5 us */
    histogram_add(h, UINT64_MAX, 1);
    h->sum_ns = 1500000000;
#define LABELS "tier=\"nvme\",size=\"le64MiB\""
    has(EXPOSITION_PROMETHEUS, "\nucmd_load_seconds_bucket{" LABELS ",le=\"4e-06\"} 1\n"
                               "ucmd_load_seconds_bucket{" LABELS ",le=\"8e-06\"} 3\n");
    has(EXPOSITION_PROMETHEUS, "ucmd_load_seconds_bucket{" LABELS ",le=\"67.108864\"} 3\n"
                               "ucmd_load_seconds_bucket{" LABELS ",le=\"+Inf\"} 4\n"
                               "ucmd_load_seconds_sum{" LABELS "} 1.500000000\n"
                               "ucmd_load_seconds_count{" LABELS "} 4\n");
    has(EXPOSITION_PROMETHEUS, "\nucmd_lookup_seconds_bucket{le=\"4e-06\"} 0\n");
}

Test(exposition, the_curve_is_there_once_a_size_is_known)
{
    char *text = written(EXPOSITION_PROMETHEUS);

    cr_assert_null(strstr(text, "ucmd_reuse_hit_ratio{"));
    free(text);
    x.reuse.bytes[REUSE_DRAM] = 1;
    x.reuse.hit_permille[REUSE_DRAM][2] = 731;
    has(EXPOSITION_PROMETHEUS, "ucmd_reuse_hit_ratio{tiers=\"dram\",factor=\"2\"} 0.731\n");
}
