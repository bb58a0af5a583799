/* Keys and values for people: what a reload changed, and what `config.get` lists. */
#include "daemon/config/table.h"

#include <stdio.h>
#include <string.h>

/* A list as "[a, b]", cut after an item if it is long. */
static void list_shown(const struct config_list *list, char buf[CONFIG_SHOWN_BYTES])
{
    const size_t most = CONFIG_SHOWN_BYTES - 40; /* room for what a cut list ends with */
    size_t n = 1;

    buf[0] = '[';
    for (size_t i = 0; i < list->n; i++) {
        size_t bytes = strlen(list->item[i]);

        if (n + bytes + 2 > most) {
            snprintf(buf + n, CONFIG_SHOWN_BYTES - n, "%s... %zu more]", i > 0 ? ", " : "",
                     list->n - i);
            return;
        }
        n += (size_t)snprintf(buf + n, CONFIG_SHOWN_BYTES - n, "%s%s", i > 0 ? ", " : "",
                              list->item[i]);
    }
    snprintf(buf + n, CONFIG_SHOWN_BYTES - n, "]");
}

void config_shown(const struct config *c, const struct config_key *k, char buf[CONFIG_SHOWN_BYTES])
{
    char text[CONFIG_TEXT_BYTES];

    if (k->kind == CONFIG_LIST)
        list_shown(config_field_const(c, k), buf);
    else
        snprintf(buf, CONFIG_SHOWN_BYTES, "%s", config_value_text(c, k, text));
}

static void where_shown(const struct config *c, const struct config_key *k, struct config_entry *e)
{
    uint32_t line = c->origin.line[config_key_index(k)];
    const char *file = c->origin.file ? c->origin.file : "";

    e->from = CONFIG_FROM_FILE;
    if (line == 0) {
        e->from = CONFIG_FROM_DEFAULT;
    } else if (line == CONFIG_LINE_SET) {
        e->from = CONFIG_FROM_SET;
        snprintf(e->where, sizeof(e->where), "--set");
    } else if (line == CONFIG_LINE_ENV) {
        e->from = CONFIG_FROM_ENV;
        config_variable(k->name, e->where);
    } else if (line == CONFIG_LINE_EARLIER) {
        snprintf(e->where, sizeof(e->where), "%.120s, before it changed", file);
    } else {
        snprintf(e->where, sizeof(e->where), "%.120s:%u", file, line);
    }
}

void config_entries(const struct config *c, const struct config *next, struct config_entries *out)
{
    struct config defaults;

    config_init(&defaults);
    out->n = 0;
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        struct config_entry *e = &out->entry[out->n];

        if (k->internal && c->origin.line[i] == 0)
            continue;
        *e = (struct config_entry){.key = k->name,
                                   .reloadable = k->reloadable,
                                   .changed = !config_value_equal(c, &defaults, k),
                                   .waits =
                                       next && !k->reloadable && !config_value_equal(c, next, k)};
        where_shown(c, k, e);
        config_shown(c, k, e->value);
        config_shown(&defaults, k, e->initial);
        if (e->waits)
            config_shown(next, k, e->next);
        out->n++;
    }
    config_free(&defaults);
}
