#include "daemon/config/config.h"

#include "daemon/config/table.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the whole ---- */

void config_init(struct config *c)
{
    struct config_error e = {.file = NULL};

    *c = (struct config){0};
    for (size_t i = 0; i < config_key_count; i++) {
        int rc = config_value_set(c, &config_keys[i], config_keys[i].initial, &e);

        assert(rc == 0 || rc == -ENOMEM);
        if (rc < 0)
            abort(); /* no memory, and nothing has begun */
    }
}

void config_free(struct config *c)
{
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        if (k->kind == CONFIG_LIST)
            config_list_free(config_field(c, k));
        else if (k->kind == CONFIG_STRING)
            free(*(char **)config_field(c, k));
    }
    free(c->origin.file);
    *c = (struct config){0};
}

int config_set(struct config *c, const char *assignment, struct config_error *e)
{
    const char *equals = strchr(assignment, '=');
    const struct config_key *k;
    char name[64];
    int rc;

    *e = (struct config_error){.line = CONFIG_LINE_SET};
    if (!equals || equals == assignment)
        return config_refuse(e,
                             "\"%.80s\" is not an assignment; write key=value, "
                             "e.g. arena.size=4GiB",
                             assignment);
    snprintf(name, sizeof(name), "%.*s", (int)(equals - assignment < 63 ? equals - assignment : 63),
             assignment);
    k = config_key_find(name);
    if (!k)
        return config_unknown(e, name);
    rc = config_value_set(c, k, equals + 1, e);
    if (rc == 0)
        c->origin.line[config_key_index(k)] = CONFIG_LINE_SET;
    return rc;
}

int config_read_all(struct config *c, const struct config_sources *from, struct config_error *e)
{
    int rc = from->path ? config_read(c, from->path, e) : 0;

    if (rc == 0 && from->environment)
        rc = config_environment(c, from->environment, e);
    for (int i = 0; rc == 0 && i < from->n_sets; i++)
        rc = config_set(c, from->sets[i], e);
    return rc;
}
