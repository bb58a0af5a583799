/* docs/metrics.md against the tables, in both directions: each metric has its item, and each item
 * its metric. A failure says what the page should hold. */
#include "proto/metrics/exposition.h"
#include "tests/unit/proto/docs_page.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define PAGE "docs/metrics.md"
static char *page;

static void page_read(void)
{
    page = docs_page_read(PAGE);
}

static void page_free(void)
{
    free(page);
}

TestSuite(metrics_docs, .init = page_read, .fini = page_free);

static uint32_t count(const char *line)
{
    uint32_t n = 0;

    for (const char *p = page; (p = strstr(p, line)) != NULL; p++)
        n++;
    return n;
}

/* The beginning of a metric's item. If the introduction does not say its name in `stats`: also its
 * end. */
static void item_of(const struct metric_list *l, const struct metric_info *m, char *out, size_t n,
                    char *end, size_t end_n)
{
    char name[EXPOSITION_NAME_BYTES];

    exposition_name(l, m, name);
    snprintf(out, n, "\n- `%s%s`: ", name, strcmp(m->kind, "counter") == 0 ? "_total" : "");
    end[0] = '\0';
    if (strcmp(name + strlen("ucmd_") + strlen(l->prefix), m->name) != 0)
        snprintf(end, end_n, "`stats`: `%s`\n", m->name);
}

Test(metrics_docs, each_metric_has_one_item_and_each_item_its_metric)
{
    uint32_t items = 0;
    char item[256], end[256];

    for (size_t k = 0; k < METRIC_LISTS; k++)
        for (size_t i = 0; i < metric_lists[k].n_metrics; i++, items++) {
            item_of(&metric_lists[k], &metric_lists[k].metric[i], item, sizeof(item), end,
                    sizeof(end));
            cr_expect_eq(count(item), 1, "%u times in %s:%s", count(item), PAGE, item);
            cr_expect(strstr(page, end), "%s lacks %s", PAGE, end);
        }
    for (size_t i = 0; i < histogram_infos_n; i++, items++) {
        const struct histogram_info *h = &histogram_infos[i];
        bool labels = h->tiers > 1 || h->sizes > 1;

        snprintf(item, sizeof(item), "\n- `ucmd_%s_seconds`%s%s%s%s%s: ", h->name,
                 labels ? " (" : "", h->tiers > 1 ? "`tier`" : "",
                 h->tiers > 1 && h->sizes > 1 ? ", " : "", h->sizes > 1 ? "`size`" : "",
                 labels ? ")" : "");
        cr_expect_eq(count(item), 1, "%u times in %s:%s", count(item), PAGE, item);
    }
    items += 2; /* of reuse */
    cr_assert_eq(count("\n- `ucmd_"), items, "%s has %u items, the tables have %u metrics", PAGE,
                 count("\n- `ucmd_"), items);
}

Test(metrics_docs, each_family_of_the_text_is_on_the_page)
{
    static struct exposition x = {.n_tiers = 1,
                                  .n_roots = 1,
                                  .n_devices = 1,
                                  .n_nodes = 1,
                                  .n_tenants = 1,
                                  .reuse = {.bytes = {1, 1}}};
    char *text, *line, *rest;
    size_t n;
    FILE *f = open_memstream(&text, &n);

    exposition_write(&x, EXPOSITION_PROMETHEUS, f);
    fclose(f);
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char name[EXPOSITION_NAME_BYTES];

        if (sscanf(line, "# TYPE %95s", name) == 1)
            cr_expect(strstr(page, name), "%s lacks %s", PAGE, name);
    }
    free(text);
}
