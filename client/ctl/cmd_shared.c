/* shared: the roots of the shared tier, and a garbage collection of them now. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int print_roots(const struct args *a, const msgpack_object *stats)
{
    static const struct ctl_column columns[] = {{"ROOT", "name", SHOW_TEXT},
                                                {"KIND", "backend", SHOW_TEXT},
                                                {"HEALTH", "health", SHOW_TEXT},
                                                {">USED", "used_bytes", SHOW_BYTES},
                                                {">CAPACITY", "capacity_bytes", SHOW_BOUND},
                                                {">FILES", "files", SHOW_NUMBER},
                                                {">READ", "read_bytes", SHOW_BYTES},
                                                {">WRITTEN", "write_bytes", SHOW_BYTES},
                                                {">MS", "latency_us", SHOW_US},
                                                {">PID", "pid", SHOW_NUMBER},
                                                {">FAILURES", "failures", SHOW_NUMBER},
                                                {">TIMED OUT", "timeouts", SHOW_NUMBER},
                                                {"REASON", "reason", SHOW_TEXT},
                                                {0}};
    const msgpack_object *roots = answer_get(stats, "shared_roots");
    cJSON *j;

    if (args_given(a, "json")) {
        j = cJSON_CreateObject();
        cJSON_AddItemToObject(j, "shared_roots", roots ? answer_json(roots) : cJSON_CreateArray());
        return ctl_print_json(j, false);
    }
    if (answer_count(stats, "shared_roots") > 0)
        return ctl_table(stats, "shared_roots", columns);
    printf("no shared tier: see shared.roots in the configuration\n");
    return CTL_OK;
}

/* ---- gc ---- */

/* Finds a root by its number, or by its name in the list of `ucmctl shared`. */
static int root_find(const struct args *a, const char *word, uint64_t *root)
{
    char *end, name[256];
    struct answer stats;
    int rc;

    *root = strtoul(word, &end, 10);
    if (*root > 0 && *root <= UCM_MAX_ROOTS && *end == '\0')
        return CTL_OK;
    rc = ctl_call(a, UCM_METHOD_STATS, NULL, &stats);
    if (rc != CTL_OK)
        return rc;
    *root = 0;
    for (uint32_t i = 0; *root == 0 && i < answer_count(stats.root, "shared_roots"); i++)
        if (strcmp(answer_text(answer_at(stats.root, "shared_roots", i), "name", name, sizeof name),
                   word) == 0)
            *root = i + 1;
    answer_close(&stats);
    return *root > 0 ? CTL_OK
                     : program_fail(CTL_ERROR, "no root is called %s: see ucmctl shared", word);
}

static int collect_print(const struct args *a, const msgpack_object *counts)
{
    static const char *const fields[] = {"roots", "busy", NULL};
    uint64_t roots = answer_u64(counts, "roots"), busy = answer_u64(counts, "busy");
    cJSON *j;

    if (!args_given(a, "json")) {
        printf("garbage collection begins on %" PRIu64 " root%s", roots, roots == 1 ? "" : "s");
        if (busy > 0)
            printf("; it runs on %" PRIu64 " already", busy);
        printf("\n");
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    ctl_json_counts(j, counts, fields);
    return ctl_print_json(j, false);
}

static int collect(const struct args *a)
{
    struct msg_collect params = {.root = 0}; /* all */
    int rc = a->n_words > 1 ? root_find(a, a->word[1], &params.root) : CTL_OK;

    return rc == CTL_OK ? ctl_show(a, UCM_METHOD_SHARED_GC, &params, collect_print) : rc;
}

int cmd_shared(const struct args *a)
{
    if (a->n_words > 0 && strcmp(a->word[0], "gc") != 0)
        return program_usage_error(a, "%s: wanted nothing, or gc", a->word[0]);
    return a->n_words > 0 ? collect(a) : ctl_show(a, UCM_METHOD_STATS, NULL, print_roots);
}
