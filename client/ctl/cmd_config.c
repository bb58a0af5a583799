/* config: what the daemon runs with, and what a changed file changes of that. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void print_changes(const msgpack_object *result, const char *array, const char *title)
{
    uint32_t n = answer_count(result, array);
    char key[64], from[512], to[512];

    if (n > 0)
        printf("%s\n", title);
    for (uint32_t i = 0; i < n; i++) {
        const msgpack_object *o = answer_at(result, array, i);

        answer_text(o, "from", from, sizeof from);
        answer_text(o, "to", to, sizeof to);
        printf("  %s: %s -> %s\n", answer_text(o, "key", key, sizeof key),
               from[0] != '\0' ? from : "\"\"", to[0] != '\0' ? to : "\"\"");
    }
}

static int reload_failed(const msgpack_object *result)
{
    char why[512], file[256], line[24] = "";

    answer_text(result, "refused", why, sizeof why);
    answer_text(result, "file", file, sizeof file);
    if (answer_u64(result, "line") > 0)
        snprintf(line, sizeof line, ":%" PRIu64, answer_u64(result, "line"));
    return program_fail(CTL_ERROR, "refused, and nothing changed: %s%s%s%s", file, line,
                        file[0] != '\0' ? ": " : "", why);
}

static int print_reload(const struct args *a, const msgpack_object *result)
{
    int rc = CTL_OK;

    if (args_given(a, "json"))
        rc = ctl_print_json(answer_json(result), false);
    if (answer_get(result, "refused") != NULL)
        return reload_failed(result);
    if (args_given(a, "json"))
        return rc;
    print_changes(result, "changes", "changed:");
    print_changes(result, "restarts", "needs a restart (runs -> configured):");
    if (answer_count(result, "changes") + answer_count(result, "restarts") == 0)
        printf("nothing has changed\n");
    return CTL_OK;
}

/* ---- config ---- */

static bool is_wanted(const struct args *a, const msgpack_object *key)
{
    return !args_given(a, "changed") || answer_flag(key, "changed") ||
           answer_get(key, "next") != NULL;
}

static int print_config_json(const struct args *a, const msgpack_object *result)
{
    cJSON *j = cJSON_CreateObject(), *keys = cJSON_AddArrayToObject(j, "keys");

    for (uint32_t i = 0; i < answer_count(result, "keys"); i++)
        if (is_wanted(a, answer_at(result, "keys", i)))
            cJSON_AddItemToArray(keys, answer_json(answer_at(result, "keys", i)));
    return ctl_print_json(j, false);
}

static int print_config(const struct args *a, const msgpack_object *result)
{
    static const char *const titles[] = {"KEY", "VALUE", "SOURCE", NULL};
    char key[64], value[512], where[256];
    struct table t;

    if (args_given(a, "json"))
        return print_config_json(a, result);
    table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(result, "keys"); i++) {
        const msgpack_object *o = answer_at(result, "keys", i);

        if (!is_wanted(a, o))
            continue;
        answer_text(o, "value", value, sizeof value);
        answer_text(o, "where", where, sizeof where);
        if (where[0] == '\0')
            answer_text(o, "source", where, sizeof where);
        table_cell(&t, "%s", answer_text(o, "key", key, sizeof key));
        table_cell(&t, "%s", value[0] != '\0' ? value : "\"\"");
        if (answer_get(o, "next") != NULL)
            table_cell(&t, "%s; %s at the next start", where,
                       answer_text(o, "next", value, sizeof value));
        else
            table_cell(&t, "%s", where);
    }
    return ctl_table_end(&t);
}

int cmd_config(const struct args *a)
{
    if (a->n_words > 0 && strcmp(a->word[0], "reload") != 0)
        return program_usage_error(a, "'config' wants nothing, or reload, not '%s'", a->word[0]);
    if (a->n_words > 0 && (args_given(a, "import") || args_given(a, "changed")))
        return program_usage_error(a, "'config reload' takes neither --import nor --changed");
    if (a->n_words > 0)
        return ctl_show(a, UCM_METHOD_CONFIG_RELOAD, NULL, print_reload);
    if (args_given(a, "import") && (args_given(a, "json") || args_given(a, "changed")))
        return program_usage_error(a, "--import prints a configuration file, and takes neither "
                                      "--json nor --changed");
    if (args_given(a, "import"))
        return program_script(a, "ucmctl-import");
    return ctl_show(a, UCM_METHOD_CONFIG_GET, NULL, print_config);
}

int cmd_plan(const struct args *a)
{
    if (!args_given(a, "length") && (args_given(a, "requests") || args_given(a, "history")))
        return program_usage_error(a, "--requests and --history go with --length");
    return program_script(a, "ucmctl-plan");
}
