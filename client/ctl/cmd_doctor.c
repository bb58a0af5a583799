/* doctor: runs all checks and prints what they found. */
#include "client/ctl/doctor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const verdict_names[] = {"ok", "skip", "warn", "fail"};

/* ---- the daemon ---- */

/* The pid that the daemon says is of its own namespace: taken only where /proc agrees. */
static pid_t daemon_pid(const msgpack_object *stats)
{
    uint64_t pid = answer_u64(stats, "pid");
    char path[64], name[32];

    snprintf(path, sizeof path, "/proc/%" PRIu64 "/comm", pid);
    return pid > 0 && doctor_line(path, name, sizeof name) && strncmp(name, "ucmd", 4) == 0
               ? (pid_t)pid
               : 0;
}

static void check_daemon(struct doctor *d)
{
    const struct ctl *c = d->a->ctx;
    char status[32], why[400], up[HUMAN_BYTES];
    struct answer health;
    bool fails;

    if (d->client == NULL) {
        doctor_add(d, DOCTOR_SKIP, "daemon",
                   "systemctl start ucmd, or name its socket with --socket",
                   "none answers at %s: what needs one is left out", program_socket(d->a));
        return;
    }
    if (answer_call(d->client, UCM_METHOD_HEALTH, NULL, (int)args_number(d->a, "timeout"),
                    &health) != 0) {
        doctor_add(d, DOCTOR_FAIL, "daemon", "see its log", "health: %s", ucm_errmsg());
        return;
    }
    answer_text(health.root, "status", status, sizeof status);
    fails = strcmp(status, "failing") == 0;
    if (fails || strcmp(status, "degraded") == 0)
        doctor_add(d, fails ? DOCTOR_FAIL : DOCTOR_WARN, "daemon", "see 'ucmctl health'", "%s: %s",
                   status,
                   answer_object_text(answer_at(health.root, "reasons", 0), why, sizeof why));
    else
        doctor_add(d, DOCTOR_OK, "daemon", NULL, "%s, %s for %s", c->server.server, status,
                   human_duration(up, answer_u64(d->stats, "uptime_ms")));
    answer_close(&health);
    if (answer_count(d->stats, "bypassed") > 0)
        doctor_add(d, DOCTOR_WARN, "bypass", "see 'ucmctl bypass'; 'bypass load off' ends one",
                   "an operator has turned %" PRIu32 " on: engines go on without the cache",
                   answer_count(d->stats, "bypassed"));
}

/* ---- output ---- */

static enum verdict worst(const struct doctor *d)
{
    enum verdict v = DOCTOR_OK;

    for (uint32_t i = 0; i < d->n; i++)
        if (d->finding[i].verdict > v && d->finding[i].verdict != DOCTOR_SKIP)
            v = d->finding[i].verdict;
    return v;
}

static int print_json(const struct doctor *d)
{
    cJSON *j = cJSON_CreateObject(), *list;

    cJSON_AddStringToObject(j, "verdict", verdict_names[worst(d)]);
    list = cJSON_AddArrayToObject(j, "findings");
    for (uint32_t i = 0; i < d->n; i++) {
        const struct finding *f = &d->finding[i];
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "check", f->check);
        cJSON_AddStringToObject(o, "verdict", verdict_names[f->verdict]);
        cJSON_AddStringToObject(o, "text", f->text);
        if (f->remedy != NULL)
            cJSON_AddStringToObject(o, "remedy", f->remedy);
        cJSON_AddItemToArray(list, o);
    }
    return ctl_print_json(j, false);
}

static void print_text(const struct doctor *d, uint32_t from)
{
    for (uint32_t i = from; i < d->n; i++) {
        const struct finding *f = &d->finding[i];

        printf("%-5s %-12s %s\n", verdict_names[f->verdict], f->check, f->text);
        if (f->remedy != NULL)
            printf("%18s %s %s\n", "", "->", f->remedy);
    }
    fflush(stdout);
}

int cmd_doctor(const struct args *a)
{
    static void (*const checks[])(struct doctor * d) = {check_daemon,   doctor_keys,  doctor_host,
                                                        doctor_memory,  doctor_disks, doctor_gpus,
                                                        doctor_trip_cpu};
    static const int status[] = {
        [DOCTOR_OK] = CTL_OK, [DOCTOR_WARN] = CTL_DEGRADED, [DOCTOR_FAIL] = CTL_ERROR};
    static struct doctor d;
    struct ctl *c = a->ctx;
    struct answer stats;
    int rc = CTL_OK;

    d = (struct doctor){.a = a, .measure = !args_given(a, "quick")};
    if (ctl_connect_quietly(a) == 0 && answer_call(c->client, UCM_METHOD_STATS, NULL,
                                                   (int)args_number(a, "timeout"), &stats) == 0) {
        d.client = c->client;
        d.stats = stats.root;
        d.pid = daemon_pid(d.stats);
        d.arena = answer_u64(answer_get(d.stats, "metrics"), "arena_bytes_configured");
    }
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        uint32_t before = d.n;

        checks[i](&d);
        if (!args_given(a, "json"))
            print_text(&d, before);
    }
    if (args_given(a, "json"))
        rc = print_json(&d);
    if (d.client != NULL)
        answer_close(&stats);
    return rc != CTL_OK ? rc : status[worst(&d)];
}
