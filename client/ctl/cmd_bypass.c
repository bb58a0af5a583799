/* bypass: the incident switch, and its list. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void print_bypasses(const msgpack_object *map, const char *before)
{
    char tenant[257], since[HUMAN_BYTES];

    for (uint32_t i = 0; i < answer_count(map, "bypassed"); i++) {
        const msgpack_object *o = answer_at(map, "bypassed", i);
        bool load = answer_flag(o, "load"), store = answer_flag(o, "store");
        bool of_ns = answer_get(o, "fingerprint") != NULL;

        answer_text(o, "tenant", tenant, sizeof tenant);
        printf("%s%s%s%s of ", before, load ? "loads" : "", load && store ? " and " : "",
               store ? "stores" : "");
        if (of_ns && answer_u64(o, "ns") > 0)
            printf("namespace %" PRIu64 " (tenant %s)", answer_u64(o, "ns"), tenant);
        else if (of_ns)
            printf("a namespace that is not known now (tenant %s)", tenant);
        else if (tenant[0] != '\0')
            printf("tenant %s", tenant);
        else
            printf("all tenants");
        printf(", for %s\n", human_duration(since, answer_u64(o, "ms")));
    }
}

static int print_list(const struct args *a, const msgpack_object *result)
{
    if (args_given(a, "json"))
        return ctl_print_json(answer_json(result), false);
    if (answer_count(result, "bypassed") == 0)
        printf("nothing is bypassed\n");
    print_bypasses(result, "");
    return CTL_OK;
}

/* "load on": what the words ask for. CTL_OK or CTL_USAGE. */
static int words_read(const struct args *a, struct msg_bypass *m)
{
    bool on;

    if (a->n_words == 0)
        return CTL_OK;
    if (a->n_words == 1)
        return program_usage_error(a, "'bypass %s' wants on or off", a->word[0]);
    on = strcmp(a->word[1], "on") == 0;
    if (!on && strcmp(a->word[1], "off") != 0)
        return program_usage_error(a, "'bypass %s' wants on or off, not '%s'", a->word[0],
                                   a->word[1]);
    if (strcmp(a->word[0], "load") == 0)
        m->load = on ? UCM_BYPASS_ON : UCM_BYPASS_OFF;
    else if (strcmp(a->word[0], "store") == 0)
        m->store = on ? UCM_BYPASS_ON : UCM_BYPASS_OFF;
    else
        return program_usage_error(a, "'bypass' wants load or store, not '%s'", a->word[0]);
    return CTL_OK;
}

int cmd_bypass(const struct args *a)
{
    const char *tenant = args_text(a, "tenant"), *name = args_text(a, "ns");
    struct msg_bypass m = {.ns = 0};
    struct ctl_namespace ns;
    int rc = words_read(a, &m);

    if (rc == CTL_OK && (tenant || name) && a->n_words == 0)
        rc = program_usage_error(a, "--%s goes with load or store", tenant ? "tenant" : "ns");
    if (rc == CTL_OK && tenant && name)
        rc = program_usage_error(a, "--tenant and --ns exclude each other");
    if (rc == CTL_OK && tenant && (tenant[0] == '\0' || strlen(tenant) > UCM_MAX_NAME_BYTES))
        rc = program_usage_error(a, "--tenant wants a name of 1 to %d bytes", UCM_MAX_NAME_BYTES);
    if (rc == CTL_OK && tenant)
        m.tenant = (struct proto_str){tenant, (uint32_t)strlen(tenant)};
    if (rc == CTL_OK && name) {
        rc = ctl_namespace_find(a, name, &ns);
        m.ns = rc == CTL_OK ? ns.ns : 0;
    }
    return rc == CTL_OK ? ctl_show(a, UCM_METHOD_BYPASS, &m, print_list) : rc;
}
