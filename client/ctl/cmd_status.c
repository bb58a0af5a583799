/* status, health, version: is it there, and is it well? */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static cJSON *status_json(const struct args *a, const msgpack_object *stats,
                          const msgpack_object *health)
{
    static const char *const from_stats[] = {"version",    "instance", "pid",     "uptime_ms",
                                             "policy",     "metrics",  "tiers",   "shared_roots",
                                             "devices",    "nodes",    "limits",  "tenants",
                                             "histograms", "reuse",    "bypassed"};
    const msgpack_object *status = answer_get(health, "status"),
                         *reasons = answer_get(health, "reasons");
    const struct ctl *c = a->ctx;
    cJSON *j = cJSON_CreateObject();

    cJSON_AddStringToObject(j, "socket", program_socket(a));
    cJSON_AddStringToObject(j, "tenant", c->server.tenant);
    cJSON_AddBoolToObject(j, "admin", c->server.admin);
    if (status != NULL)
        cJSON_AddItemToObject(j, "status", answer_json(status));
    if (reasons != NULL)
        cJSON_AddItemToObject(j, "reasons", answer_json(reasons));
    for (size_t i = 0; i < sizeof from_stats / sizeof from_stats[0]; i++) {
        const msgpack_object *o = answer_get(stats, from_stats[i]);

        if (o != NULL)
            cJSON_AddItemToObject(j, from_stats[i], answer_json(o));
    }
    return j;
}

/* Blocks of an earlier run may be missing, whatever else there is. */
static const char *recovers_too(const msgpack_object *health, const char *status)
{
    bool recovers = answer_flag(health, "recovering") && strcmp(status, "recovering") != 0;

    return recovers ? ", recovering" : "";
}

static void print_reasons(const msgpack_object *health)
{
    char text[400];

    for (uint32_t i = 0; i < answer_count(health, "reasons"); i++)
        printf("           %s\n",
               answer_object_text(answer_at(health, "reasons", i), text, sizeof text));
}

static void print_cache(const msgpack_object *m)
{
    uint64_t used = answer_u64(m, "arena_bytes_used"), total = answer_u64(m, "arena_bytes_total");
    uint64_t dram = dram_bytes(total, answer_u64(m, "arena_bytes_configured"));
    char a[HUMAN_BYTES], b[HUMAN_BYTES], s[HUMAN_BYTES];

    printf("blocks     %" PRIu64 " complete, %" PRIu64 " partial, %" PRIu64 " pinned\n",
           answer_u64(m, "blocks"), answer_u64(m, "blocks_partial"),
           answer_u64(m, "blocks_pinned"));
    printf("lookups    %" PRIu64 ", %" PRIu64 " of %" PRIu64 " keys found (%s)\n",
           answer_u64(m, "lookups"), answer_u64(m, "lookup_hits"), answer_u64(m, "lookup_keys"),
           human_percent(s, answer_u64(m, "lookup_hits"), answer_u64(m, "lookup_keys")));
    printf("moved      %s loaded, %s dumped\n", human_bytes(a, answer_u64(m, "load_bytes")),
           human_bytes(b, answer_u64(m, "dump_bytes")));
    printf("dram       %s of %s used (%s)", human_bytes(a, used), human_bytes(b, dram),
           human_percent(s, used, dram));
    if (total < dram)
        printf(", growing: %s ready", human_bytes(a, total));
    printf("\n");
}

/* DRAM that workers read by themselves: what they map, and how much of that is referenced. */
static void print_mappings(const msgpack_object *m)
{
    char granted[HUMAN_BYTES], referenced[HUMAN_BYTES], budget[HUMAN_BYTES];

    if (answer_u64(m, "mapping_bytes_configured") == 0 && answer_u64(m, "mappings") == 0)
        return;
    printf("mappings   %" PRIu64 " open, %s of %s granted, %s referenced; %" PRIu64
           " slabs wanted back, %" PRIu64 " blocks left out\n",
           answer_u64(m, "mappings"), human_bytes(granted, answer_u64(m, "mapping_bytes")),
           human_bytes(budget, answer_u64(m, "mapping_bytes_configured")),
           human_bytes(referenced, answer_u64(m, "mapping_referenced_bytes")),
           answer_u64(m, "mapping_revocations"), answer_u64(m, "mapping_full"));
}

/* Where the daemon spreads its memory over NUMA nodes. */
static void print_nodes(const msgpack_object *stats)
{
    char a[HUMAN_BYTES], b[HUMAN_BYTES];

    for (uint32_t i = 0; i < answer_count(stats, "nodes"); i++) {
        const msgpack_object *n = answer_at(stats, "nodes", i);

        printf("           %s of %s used on node %" PRIu64 "\n",
               human_bytes(a, answer_u64(n, "used_bytes")),
               human_bytes(b, answer_u64(n, "total_bytes")), answer_u64(n, "node"));
    }
}

static double permille(const msgpack_object *curve, uint32_t i)
{
    const msgpack_object *v = answer_at(curve, "hit_permille", i);

    return v != NULL && v->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? (double)v->via.u64 / 10 : 0;
}

/* What buys hardware: the hit rate that other sizes would give. */
static void print_reuse(const msgpack_object *stats)
{
    const msgpack_object *reuse = answer_get(stats, "reuse");
    char name[32], half[HUMAN_BYTES], twice[HUMAN_BYTES], four[HUMAN_BYTES];

    for (uint32_t i = 0; i < answer_count(reuse, "curves"); i++) {
        const msgpack_object *c = answer_at(reuse, "curves", i);
        uint64_t bytes = answer_u64(c, "bytes");
        bool both = strcmp(answer_text(c, "tiers", name, sizeof name), "dram_nvme") == 0;

        printf("%-10s %s: %.1f %% of lookups' keys would hit; with half (%s) %.1f %%, "
               "2x (%s) %.1f %%, 4x (%s) %.1f %%\n",
               i == 0 ? "reuse" : "", both ? "dram+nvme" : "dram", permille(c, 1),
               human_bytes(half, bytes / 2), permille(c, 0), human_bytes(twice, 2 * bytes),
               permille(c, 2), human_bytes(four, 4 * bytes), permille(c, 3));
    }
}

static void print_tiers(const msgpack_object *stats)
{
    char a[HUMAN_BYTES], b[HUMAN_BYTES], s[HUMAN_BYTES], name[64], engine[64], reason[256];

    for (uint32_t i = 0; i < answer_count(stats, "tiers"); i++) {
        const msgpack_object *t = answer_at(stats, "tiers", i);
        uint64_t used = answer_u64(t, "used_bytes"), capacity = answer_u64(t, "capacity_bytes");

        printf("%-10s %s of %s used (%s), %s", answer_text(t, "name", name, sizeof name),
               human_bytes(a, used), human_bytes(b, capacity), human_percent(s, used, capacity),
               answer_text(t, "engine", engine, sizeof engine));
        if (answer_flag(t, "recovering"))
            printf(", recovering");
        if (answer_flag(t, "degraded"))
            printf(", DEGRADED: %s", answer_text(t, "reason", reason, sizeof reason));
        printf("\n");
    }
}

/* Prints a root's process. */
static void print_process(const msgpack_object *o)
{
    char program[80], kind[32];

    if (strcmp(answer_text(o, "backend", kind, sizeof kind), "process") != 0)
        return;
    if (answer_u64(o, "pid") == 0)
        printf(", no process");
    else
        printf(", %s with pid %" PRIu64, answer_text(o, "program", program, sizeof program),
               answer_u64(o, "pid"));
    if (answer_u64(o, "backend_ends") > 0)
        printf(", ended %" PRIu64 " times", answer_u64(o, "backend_ends"));
}

static void print_roots(const msgpack_object *stats)
{
    char used[HUMAN_BYTES], name[128], health[32], reason[160];

    for (uint32_t i = 0; i < answer_count(stats, "shared_roots"); i++) {
        const msgpack_object *o = answer_at(stats, "shared_roots", i);
        const char *why = answer_text(o, "reason", reason, sizeof reason);
        bool up = strcmp(answer_text(o, "health", health, sizeof health), "up") == 0;

        printf("shared     %s: %s, %s used, %.1f ms", answer_text(o, "name", name, sizeof name),
               health, human_bytes(used, answer_u64(o, "used_bytes")),
               (double)answer_u64(o, "latency_us") / 1000);
        print_process(o);
        printf("%s%s\n", up ? "" : ": ", up ? "" : why);
    }
}

static void print_devices(const msgpack_object *stats)
{
    char a[HUMAN_BYTES], b[HUMAN_BYTES], staged[HUMAN_BYTES], name[64];

    for (uint32_t i = 0; i < answer_count(stats, "devices"); i++) {
        const msgpack_object *d = answer_at(stats, "devices", i);

        printf("device     %s: %" PRIu64 " regions, %s loaded, %s dumped%s\n",
               answer_text(d, "name", name, sizeof name), answer_u64(d, "regions"),
               human_bytes(a, answer_u64(d, "load_bytes")),
               human_bytes(b, answer_u64(d, "dump_bytes")),
               answer_flag(d, "failed") ? ", FAILED" : "");
        if (answer_flag(d, "cuda"))
            printf("           %s by copy engines, %s by kernels, %s through %" PRIu64
                   " rings of workers\n",
                   human_bytes(a, answer_u64(d, "dma_bytes")),
                   human_bytes(b, answer_u64(d, "sm_bytes")),
                   human_bytes(staged, answer_u64(d, "staged_bytes")), answer_u64(d, "rings"));
    }
}

static void print_status(const struct args *a, const msgpack_object *stats,
                         const msgpack_object *health)
{
    const msgpack_object *m = answer_get(stats, "metrics");
    const struct ctl *c = a->ctx;
    char up[HUMAN_BYTES], text[64];

    printf("daemon     %s at %s, pid %" PRIu64 ", up %s\n", c->server.server, program_socket(a),
           answer_u64(stats, "pid"), human_duration(up, answer_u64(stats, "uptime_ms")));
    answer_text(health, "status", text, sizeof text);
    printf("health     %s%s\n", text, recovers_too(health, text));
    print_reasons(health);
    print_bypasses(stats, "BYPASSED   ");
    printf("you        tenant %s%s\n", c->server.tenant, c->server.admin ? ", operator" : "");
    printf(
        "clients    %" PRIu64 " connected, %" PRIu64 " regions, %" PRIu64 " requests under way\n",
        answer_u64(m, "connections"), answer_u64(m, "regions"), answer_u64(m, "requests_active"));
    print_cache(m);
    print_nodes(stats);
    print_mappings(m);
    print_tiers(stats);
    print_roots(stats);
    print_reuse(stats);
    print_devices(stats);
}

int cmd_status(const struct args *a)
{
    struct answer stats, health;
    int rc = ctl_call(a, UCM_METHOD_STATS, NULL, &stats);

    if (rc != CTL_OK)
        return rc;
    rc = ctl_call(a, UCM_METHOD_HEALTH, NULL, &health);
    if (rc == CTL_OK) {
        if (args_given(a, "json"))
            rc = ctl_print_json(status_json(a, stats.root, health.root), false);
        else
            print_status(a, stats.root, health.root);
        answer_close(&health);
    }
    answer_close(&stats);
    return rc;
}

/* The exit status of what the daemon says of itself. --live: any answer will do. --ready: it
 * serves, with less than all of its cache too. */
static int health_exit(const struct args *a, const char *status)
{
    if (args_given(a, "live"))
        return CTL_OK;
    if (strcmp(status, "ok") == 0 || strcmp(status, "recovering") == 0)
        return CTL_OK;
    if (strcmp(status, "degraded") == 0)
        return args_given(a, "ready") ? CTL_OK : CTL_DEGRADED;
    return CTL_FAILING;
}

static int print_health(const struct args *a, const msgpack_object *health)
{
    int rc = CTL_OK;
    char text[64];

    answer_text(health, "status", text, sizeof text);
    if (args_given(a, "json")) {
        rc = ctl_print_json(answer_json(health), false);
    } else {
        printf("%s%s\n", text, recovers_too(health, text));
        print_reasons(health);
    }
    return rc == CTL_OK ? health_exit(a, text) : rc;
}

int cmd_health(const struct args *a)
{
    int rc;

    if (args_given(a, "live") && args_given(a, "ready"))
        return program_fail(CTL_USAGE, "--live and --ready are two questions; ask one");
    rc = ctl_show(a, UCM_METHOD_HEALTH, NULL, print_health);
    if (rc != CTL_ERROR)
        return rc;
    if (ctl_connect_quietly(a) == -UCM_EDENIED)
        return CTL_ERROR; /* that this user may not connect says nothing of its health */
    return CTL_FAILING;   /* it is there, and does not answer as it should */
}

static int version_json(const char *daemon)
{
    cJSON *j = cJSON_CreateObject();

    cJSON_AddStringToObject(j, "ucmctl", UCM_VERSION);
    cJSON_AddStringToObject(j, "library", ucm_version());
    cJSON_AddItemToObject(j, "daemon", daemon ? cJSON_CreateString(daemon) : cJSON_CreateNull());
    return ctl_print_json(j, false);
}

int cmd_version(const struct args *a)
{
    const struct ctl *c = a->ctx;
    int rc, printed = CTL_OK;

    if (!args_given(a, "json"))
        printf("ucmctl  %s\nlibrary %s\n", UCM_VERSION, ucm_version());
    rc = ctl_connect(a);
    if (args_given(a, "json"))
        printed = version_json(rc == CTL_OK ? c->server.server : NULL);
    else if (rc == CTL_OK)
        printf("daemon  %s\n", c->server.server);
    return printed == CTL_OK ? rc : printed;
}
