/* share: the roots of the shared tier, and a collection of them now. */
#include "client/ctl/ctl.h"
#include "client/ctl/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void root_row(struct table *t, const msgpack_object *o)
{
    char text[256], human[HUMAN_BYTES];
    uint64_t capacity = answer_u64(o, "capacity_bytes");

    table_cell(t, "%s", answer_text(o, "name", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "backend", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "health", text, sizeof text));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "used_bytes")));
    table_cell(t, "%s", capacity ? human_bytes(human, capacity) : "-");
    table_cell(t, "%" PRIu64, answer_u64(o, "files"));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "read_bytes")));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "write_bytes")));
    table_cell(t, "%.1f", (double)answer_u64(o, "latency_us") / 1000);
    table_cell(t, "%" PRIu64, answer_u64(o, "failures"));
    table_cell(t, "%" PRIu64, answer_u64(o, "timeouts"));
    table_cell(t, "%s", answer_text(o, "reason", text, sizeof text));
}

static int roots_print(const msgpack_object *stats)
{
    static const char *const titles[] = {"ROOT",       "KIND",   "HEALTH",   ">USED", ">CAPACITY",
                                         ">FILES",     ">READ",  ">WRITTEN", ">MS",   ">FAILURES",
                                         ">TIMED OUT", "REASON", NULL};
    struct table t;

    if (answer_count(stats, "shares") == 0) {
        printf("no shared tier: see share.roots in the configuration\n");
        return CTL_OK;
    }
    table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(stats, "shares"); i++)
        root_row(&t, answer_at(stats, "shares", i));
    return table_end(&t, stdout) < 0 ? ctl_fail(CTL_ERROR, "memory ran out") : CTL_OK;
}

static int roots_print_json(const msgpack_object *stats)
{
    const msgpack_object *shares = answer_get(stats, "shares");
    cJSON *j = cJSON_CreateObject();

    cJSON_AddItemToObject(j, "shares", shares ? answer_json(shares) : cJSON_CreateArray());
    return ctl_print_json(j, false);
}

/* ---- collect ---- */

/* By its number, or as `ucmctl share` names it. 0: there is none. */
static int root_find(struct ctl *c, const char *word, uint64_t *root)
{
    char *end, name[256];
    struct answer stats;
    int rc;

    *root = strtoul(word, &end, 10);
    if (*root > 0 && *root <= UINT8_MAX && *end == '\0')
        return CTL_OK;
    rc = ctl_call(c, "stats", NULL, &stats);
    if (rc != CTL_OK)
        return rc;
    *root = 0;
    for (uint32_t i = 0; *root == 0 && i < answer_count(stats.root, "shares"); i++)
        if (strcmp(answer_text(answer_at(stats.root, "shares", i), "name", name, sizeof name),
                   word) == 0)
            *root = i + 1;
    answer_close(&stats);
    return *root > 0 ? CTL_OK : ctl_fail(CTL_ERROR, "no root is called %s: see ucmctl share", word);
}

static int collect_print(const struct ctl *c, const msgpack_object *counts)
{
    uint64_t roots = answer_u64(counts, "roots"), busy = answer_u64(counts, "busy");
    cJSON *j;

    if (!c->json) {
        printf("a collection begins of %" PRIu64 " roots", roots);
        if (busy > 0)
            printf(", of %" PRIu64 " one is under way", busy);
        printf("\n");
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    cJSON_AddItemToObject(j, "roots", answer_json_u64(roots));
    cJSON_AddItemToObject(j, "busy", answer_json_u64(busy));
    return ctl_print_json(j, false);
}

static int collect(struct ctl *c, const char *word)
{
    msgpack_packer pk;
    msgpack_sbuffer params;
    struct answer counts;
    uint64_t root = 0;
    int rc = word ? root_find(c, word, &root) : CTL_OK;

    if (rc != CTL_OK)
        return rc;
    answer_map(&pk, &params, 1);
    answer_put_u64(&pk, "root", root);
    rc = ctl_call(c, "share.collect", &params, &counts);
    if (rc != CTL_OK)
        return rc;
    rc = collect_print(c, counts.root);
    answer_close(&counts);
    return rc;
}

static int show(struct ctl *c)
{
    struct answer stats;
    int rc = ctl_call(c, "stats", NULL, &stats);

    if (rc != CTL_OK)
        return rc;
    rc = c->json ? roots_print_json(stats.root) : roots_print(stats.root);
    answer_close(&stats);
    return rc;
}

int cmd_share(const struct args *a)
{
    struct ctl c;
    int rc;

    if (a->n_words > 0 && strcmp(a->word[0], "collect") != 0)
        return program_usage_error(a, "%s: wanted nothing, or collect", a->word[0]);
    rc = ctl_open(&c, a);
    if (rc != CTL_OK)
        return rc;
    rc = a->n_words > 0 ? collect(&c, a->n_words > 1 ? a->word[1] : NULL) : show(&c);
    ctl_close(&c);
    return rc;
}
