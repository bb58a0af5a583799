#include "daemon/base/config.h"

#include "daemon/base/config_table.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int key_set(struct config *c, const struct config_key *k, const char *text,
                   char why[CONFIG_WHY_BYTES])
{
    struct config_list list;
    int rc;

    if (k->kind != CONFIG_LIST)
        return config_value_set(c, k, text, why);
    rc = config_list_split(&list, text);
    if (rc < 0) {
        snprintf(why, CONFIG_WHY_BYTES, "%s: memory ran out", k->name);
        return rc;
    }
    rc = config_list_set(c, k, &list, why);
    config_list_free(&list);
    return rc;
}

void config_init(struct config *c)
{
    char why[CONFIG_WHY_BYTES];

    *c = (struct config){0};
    for (size_t i = 0; i < config_key_count; i++) {
        int rc = key_set(c, &config_keys[i], config_keys[i].initial, why);

        /* The table is the programmer's; only memory can be missing, and so early that nothing but
         * giving up is left. */
        assert(rc == 0 || rc == -ENOMEM);
        if (rc < 0)
            abort();
    }
}

void config_free(struct config *c)
{
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        if (k->kind == CONFIG_LIST)
            config_list_free(config_field(c, k));
        else if (k->kind == CONFIG_STRING || k->kind == CONFIG_PATH)
            free(*(char **)config_field(c, k));
    }
    free(c->origin.file);
    *c = (struct config){0};
}

int config_set(struct config *c, const char *assignment, struct config_error *e)
{
    const char *equals = strchr(assignment, '='), *near;
    const struct config_key *k;
    char name[64], why[CONFIG_WHY_BYTES];
    int rc;

    if (!equals || equals == assignment) {
        snprintf(e->text, sizeof(e->text),
                 "--set: \"%.80s\" is not an assignment; write key=value, "
                 "e.g. arena.size=4GiB",
                 assignment);
        return -EINVAL;
    }
    snprintf(name, sizeof(name), "%.*s", (int)(equals - assignment < 63 ? equals - assignment : 63),
             assignment);
    k = config_key_find(name);
    if (!k) {
        near = config_key_nearest(name);
        snprintf(e->text, sizeof(e->text), "--set: unknown key \"%s\"%s%s%s", name,
                 near ? "; did you mean \"" : "; the ucmd.yaml that ships lists all keys",
                 near ? near : "", near ? "\"?" : "");
        return -EINVAL;
    }
    rc = key_set(c, k, equals + 1, why);
    if (rc < 0) {
        snprintf(e->text, sizeof(e->text), "--set: %s", why);
        return rc;
    }
    c->origin.line[config_key_place(k)] = CONFIG_LINE_SET;
    return 0;
}

int config_reload(struct config *c, const struct config *fresh, struct config_error *e)
{
    char text[CONFIG_TEXT_BYTES], why[CONFIG_WHY_BYTES];
    int differ = 0;

    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        if (config_value_equal(c, fresh, k) || c->origin.line[i] == CONFIG_LINE_SET)
            continue;
        if (k->reloadable) {
            assert(k->kind != CONFIG_LIST);
            /* Equal bounds on both sides: this can fail by want of memory only, for a string. */
            if (config_value_set(c, k, config_value_text(fresh, k, text), why) == 0)
                continue;
        }
        if (differ++ == 0)
            snprintf(e->text, sizeof(e->text), "%s differs; it takes effect at the next start",
                     k->name);
    }
    return differ;
}
