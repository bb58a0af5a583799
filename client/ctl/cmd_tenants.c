/* tenant: what each tenant has and is given, and changes of that. */
#include "client/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- tenant list ---- */

static const char *name_of(cJSON *tenant)
{
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(tenant, "tenant"));

    return name ? name : "";
}

static int by_name(const void *a, const void *b)
{
    return strcmp(name_of(*(cJSON *const *)a), name_of(*(cJSON *const *)b));
}

/* Reads all pages into *out, an array from malloc of objects that the caller deletes. */
static int tenants_read(const struct args *a, cJSON ***out, uint32_t *n)
{
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;
        uint32_t more;
        cJSON **grown;

        rc = ctl_page(a, UCM_METHOD_TENANT_LIST, 0, 0, &cursor, &page);
        if (rc != CTL_OK)
            return rc;
        more = answer_count(page.root, "tenants");
        grown = realloc(*out, (*n + more + 1) * sizeof(**out));
        if (grown)
            *out = grown;
        for (uint32_t i = 0; grown && i < more; i++)
            grown[(*n)++] = answer_json(answer_at(page.root, "tenants", i));
        answer_close(&page);
        if (!grown)
            return program_fail(CTL_ERROR, "memory ran out");
    } while (cursor != 0);
    qsort(*out, *n, sizeof(**out), by_name);
    return CTL_OK;
}

static uint64_t number_of(cJSON *tenant, const char *field)
{
    double v = cJSON_GetNumberValue(cJSON_GetObjectItem(tenant, field));

    return v > 0 ? (uint64_t)v : 0;
}

static void bytes_cell(struct table *t, cJSON *tenant, const char *field)
{
    char human[HUMAN_BYTES];

    table_cell(t, "%s", human_bytes(human, number_of(tenant, field)));
}

/* "64 GiB to 200 GiB": min and max. */
static void bounds_cell(struct table *t, cJSON *tenant, const char *guaranteed, const char *most)
{
    uint64_t least = number_of(tenant, guaranteed), bound = number_of(tenant, most);
    char from[HUMAN_BYTES], to[HUMAN_BYTES];

    if (least == 0 && bound == 0)
        table_cell(t, "-");
    else
        table_cell(t, "%s to %s", human_bytes(from, least),
                   bound > 0 ? human_bytes(to, bound) : "all");
}

/* What it had while others waited, too, to what was due to it: 1.00 is its share. */
static void obtained_cell(struct table *t, cJSON *tenant, const char *had, const char *due)
{
    if (number_of(tenant, due) == 0)
        table_cell(t, "-");
    else
        table_cell(t, "%.2f", (double)number_of(tenant, had) / (double)number_of(tenant, due));
}

static int tenants_print(cJSON **all, uint32_t n)
{
    static const char *const titles[] = {
        "TENANT",  ">NAMESPACES", ">BLOCKS", ">DRAM",   ">GIVEN",   ">NVME",      ">GIVEN",
        ">SHARED", ">GIVEN",      ">WEIGHT", ">OF BUS", ">OF NVME", ">OF SHARED", NULL};
    struct table t;

    if (n == 0) {
        printf("no tenant has a namespace\n");
        return CTL_OK;
    }
    table_begin(&t, titles);
    for (uint32_t i = 0; i < n; i++) {
        table_cell(&t, "%s", name_of(all[i]));
        table_cell(&t, "%llu", (unsigned long long)number_of(all[i], "namespaces"));
        table_cell(&t, "%llu", (unsigned long long)number_of(all[i], "blocks"));
        bytes_cell(&t, all[i], "dram_bytes");
        bounds_cell(&t, all[i], "given_dram_min", "given_dram_max");
        bytes_cell(&t, all[i], "nvme_bytes");
        bounds_cell(&t, all[i], "given_nvme_min", "given_nvme_max");
        bytes_cell(&t, all[i], "shared_bytes");
        bounds_cell(&t, all[i], "given_shared_min", "given_shared_max");
        table_cell(&t, "%llu", (unsigned long long)number_of(all[i], "given_weight"));
        obtained_cell(&t, all[i], "bus_contended_bytes", "bus_fair_share_bytes");
        obtained_cell(&t, all[i], "nvme_contended_bytes", "nvme_fair_share_bytes");
        obtained_cell(&t, all[i], "shared_contended_bytes", "shared_fair_share_bytes");
    }
    return ctl_table_end(&t);
}

static int list(const struct args *a)
{
    cJSON **all = NULL, *j = cJSON_CreateObject(), *array = cJSON_AddArrayToObject(j, "tenants");
    uint32_t n = 0;
    int rc = tenants_read(a, &all, &n);

    if (rc == CTL_OK && !args_given(a, "json"))
        rc = tenants_print(all, n);
    for (uint32_t i = 0; i < n; i++)
        if (!array || !cJSON_AddItemToArray(array, all[i]))
            cJSON_Delete(all[i]);
    free(all);
    if (rc == CTL_OK && args_given(a, "json"))
        return ctl_print_json(j, false);
    cJSON_Delete(j);
    return rc;
}

/* ---- tenant set, tenant reset ---- */

static int settings_join(const struct args *a, char text[UCM_MAX_SETTINGS_BYTES + 1])
{
    size_t n = 0;

    for (int i = 2; i < a->n_words && n <= UCM_MAX_SETTINGS_BYTES; i++)
        n += (size_t)snprintf(text + n, UCM_MAX_SETTINGS_BYTES + 1 - n, "%s%s", i > 2 ? " " : "",
                              a->word[i]);
    return n <= UCM_MAX_SETTINGS_BYTES
               ? CTL_OK
               : program_usage_error(a, "the settings are longer than %d bytes",
                                     UCM_MAX_SETTINGS_BYTES);
}

static int changed(const struct args *a, const msgpack_object *result)
{
    (void)result;
    if (args_given(a, "json"))
        return ctl_print_json(cJSON_CreateObject(), false);
    printf("tenant %s %s\n", a->word[1],
           strcmp(a->word[0], "set") == 0 ? "changed" : "has what the configuration gives");
    return CTL_OK;
}

int cmd_tenant(const struct args *a)
{
    const char *what = a->n_words > 0 ? a->word[0] : "list";
    bool set = strcmp(what, "set") == 0, reset = strcmp(what, "reset") == 0;
    char text[UCM_MAX_SETTINGS_BYTES + 1] = "";
    struct proto_str name;
    int rc;

    if (strcmp(what, "list") == 0 && a->n_words <= 1)
        return list(a);
    if ((!set && !reset) || a->n_words < 2)
        return program_usage_error(
            a, "'tenant' wants list, set NAME KEY=VALUE... or reset NAME, not '%s'", what);
    name = (struct proto_str){a->word[1], (uint32_t)strlen(a->word[1])};
    if (reset && a->n_words > 2)
        return program_usage_error(a, "'tenant reset' takes a name only; it resets all settings");
    if (set && a->n_words == 2)
        return program_usage_error(a, "'tenant set' wants KEY=VALUE after the name");
    if (name.n == 0 || name.n > UCM_MAX_NAME_BYTES)
        return program_usage_error(a, "a tenant has a name of 1 to %d bytes", UCM_MAX_NAME_BYTES);
    rc = settings_join(a, text);
    if (rc != CTL_OK)
        return rc;
    if (reset)
        return ctl_show(a, UCM_METHOD_TENANT_RESET, &(struct msg_tenant){.tenant = name}, changed);
    return ctl_show(
        a, UCM_METHOD_TENANT_SET,
        &(struct msg_tenant_set){.tenant = name, .settings = {text, (uint32_t)strlen(text)}},
        changed);
}
