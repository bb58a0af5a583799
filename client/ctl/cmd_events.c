/* events: what became of blocks, as the daemon tells routers. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One request waits so long, and the next goes on after it. */
#define WAIT_MS 1000

struct reader {
    const struct args *a;
    struct msg_events asked;
    char instance[40]; /* of the daemon that numbered them; "": none yet */
    uint64_t shown, count;
};

static const char *status_name(uint64_t status)
{
    static const char *const names[] = {"none", "dram", "nvme", "shared"};

    return status < sizeof(names) / sizeof(names[0]) ? names[status] : "?";
}

static int event_show(const struct reader *r, const msgpack_object *e)
{
    uint64_t was = answer_u64(e, "was"), is = answer_u64(e, "is");
    char key[80], tokens[64] = "";

    if (args_given(r->a, "json"))
        return ctl_print_json(answer_json(e), true);
    if (answer_get(e, "tokens"))
        snprintf(tokens, sizeof tokens, "  %u tokens",
                 (unsigned)answer_get(e, "tokens")->via.bin.size / 4);
    printf("%" PRIu64 "  %" PRIu64 "  %s  %s -> %s%s\n", answer_u64(e, "number"),
           answer_u64(e, "ns"), answer_text(e, "key", key, sizeof key), status_name(was),
           was == is ? "metadata" : status_name(is), tokens);
    return CTL_OK;
}

static int lost_show(const struct reader *r, uint64_t lost)
{
    cJSON *j;

    if (lost == 0)
        return CTL_OK;
    if (!args_given(r->a, "json")) {
        printf("%" PRIu64 " events lost\n", lost);
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    ctl_json_u64(j, "lost", lost);
    return ctl_print_json(j, true);
}

/* Another daemon renumbers everything: all that it has is after what was read. */
static bool renewed(struct reader *r, const msgpack_object *page)
{
    char instance[40];
    bool first = r->instance[0] == '\0', same;

    answer_text(page, "instance", instance, sizeof instance);
    same = strcmp(instance, r->instance) == 0;
    memcpy(r->instance, instance, sizeof instance);
    if (first || same)
        return false;
    r->asked.since = 0;
    return true;
}

static int page_show(struct reader *r, const msgpack_object *page)
{
    int rc;

    if (renewed(r, page)) {
        fprintf(stderr, "ucmctl: the daemon has started again\n");
        return CTL_OK;
    }
    rc = r->asked.since > 0 ? lost_show(r, answer_u64(page, "lost")) : CTL_OK;
    for (uint32_t i = 0; rc == CTL_OK && i < answer_count(page, "events") && r->shown < r->count;
         i++, r->shown++)
        rc = event_show(r, answer_at(page, "events", i));
    fflush(stdout);
    r->asked.since = answer_u64(page, "next");
    return rc;
}

int cmd_events(const struct args *a)
{
    bool follow = args_given(a, "follow"), more = true;
    const char *tenant = args_text(a, "tenant");
    struct reader r = {.a = a,
                       .asked = {.since = args_number(a, "since"),
                                 .tokens = args_given(a, "tokens"),
                                 .tenant = {tenant, tenant ? (uint32_t)strlen(tenant) : 0}},
                       .count = args_given(a, "count") ? args_number(a, "count") : UINT64_MAX};
    int rc = CTL_OK;

    signal(SIGINT, program_interrupt);
    if (follow && !args_given(a, "since"))
        r.asked.since = UINT64_MAX; /* tells where the events end */
    while (rc == CTL_OK && more && !program_interrupted && r.shown < r.count) {
        struct answer page;

        rc = ctl_call(a, UCM_METHOD_EVENTS, &r.asked, &page);
        if (rc != CTL_OK)
            return program_interrupted ? CTL_OK : rc;
        rc = page_show(&r, page.root);
        more = follow || answer_u64(page.root, "next") < answer_u64(page.root, "last");
        r.asked.wait_ms = follow ? WAIT_MS : 0;
        answer_close(&page);
    }
    return rc;
}
