/* share: the roots of the shared tier. */
#include "client/ctl/ctl.h"
#include "client/ctl/table.h"

#include <inttypes.h>
#include <stdio.h>

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

int cmd_share(const struct args *a)
{
    struct answer stats;
    struct ctl c;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    rc = ctl_call(&c, "stats", NULL, &stats);
    ctl_close(&c);
    if (rc != CTL_OK)
        return rc;
    rc = c.json ? roots_print_json(stats.root) : roots_print(stats.root);
    answer_close(&stats);
    return rc;
}
