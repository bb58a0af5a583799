#include "daemon/base/config_tenants.h"

#include "daemon/base/config_table.h"
#include "proto/units.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LIST "tenant_settings"

enum kind { SIZE, COUNT };

static const struct {
    const char *name;
    enum kind kind;
    size_t offset;
    uint64_t min, max, initial;
} keys[TENANT_KEYS] = {
#define X(field, name, kind, min, max, initial)                                                    \
    {name, kind, offsetof(struct tenant_settings, field), min, max, initial},
    TENANT_SETTINGS(X)
#undef X
};

static uint64_t *value_of(struct tenant_settings *s, unsigned key)
{
    return (uint64_t *)(void *)((char *)s + keys[key].offset);
}

static uint64_t value_in(const struct tenant_settings *s, unsigned key)
{
    uint64_t v;

    memcpy(&v, (const char *)s + keys[key].offset, sizeof(v));
    return v;
}

__attribute__((format(printf, 2, 3))) static int refuse(char why[TENANT_WHY_BYTES],
                                                        const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, TENANT_WHY_BYTES, format, args);
    va_end(args);
    return -EINVAL;
}

struct tenant_settings tenant_settings_initial(const struct config *c)
{
    struct tenant_settings s = {.given = 0};

    for (unsigned k = 0; k < TENANT_KEYS; k++)
        *value_of(&s, k) = keys[k].initial;
    if (c)
        s.namespaces = c->max_namespaces_tenant;
    return s;
}

static void number_text(unsigned key, uint64_t value, char text[UNITS_TEXT_BYTES])
{
    if (keys[key].kind == SIZE)
        units_size_text(text, value);
    else
        snprintf(text, UNITS_TEXT_BYTES, "%llu", (unsigned long long)value);
}

static int unknown(const char *name, char why[TENANT_WHY_BYTES])
{
    char list[200] = "";
    size_t n = 0;

    for (unsigned k = 0; k < TENANT_KEYS && n < sizeof(list); k++)
        n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s", k > 0 ? ", " : "", keys[k].name);
    return refuse(why, "a tenant has no setting \"%.40s\"; there are %s", name, list);
}

static int word_take(char *word, struct tenant_settings *s, char why[TENANT_WHY_BYTES])
{
    char *value = strchr(word, '='), units_why[UNITS_WHY_BYTES], is[UNITS_TEXT_BYTES],
         min[UNITS_TEXT_BYTES], max[UNITS_TEXT_BYTES];
    unsigned k = 0;
    uint64_t v;
    int rc;

    if (!value || value == word || value[1] == '\0')
        return refuse(why, "\"%.60s\" is no setting; write KEY=VALUE, e.g. weight=200", word);
    *value++ = '\0';
    while (k < TENANT_KEYS && strcmp(keys[k].name, word) != 0)
        k++;
    if (k == TENANT_KEYS)
        return unknown(word, why);
    if (s->given >> k & 1)
        return refuse(why, "%s is given twice; leave one out", word);
    rc = keys[k].kind == SIZE ? units_parse_size(value, &v, units_why)
                              : units_parse_count(value, &v, units_why);
    if (rc != 0)
        return refuse(why, "%s: %s", word, units_why);
    number_text(k, v, is);
    number_text(k, keys[k].min, min);
    number_text(k, keys[k].max, max);
    if (v < keys[k].min || v > keys[k].max)
        return refuse(why, "%s is %s; it must be from %s to %s", word, is, min, max);
    *value_of(s, k) = v;
    s->given |= UINT64_C(1) << k;
    return 0;
}

int tenant_settings_parse(const char *text, struct tenant_settings *s, char why[TENANT_WHY_BYTES])
{
    struct tenant_settings fresh = {.given = 0};
    char copy[CONFIG_ITEM_BYTES], *rest = copy, *word;
    int rc = 0;

    if (strlen(text) >= sizeof(copy))
        return refuse(why, "the settings are longer than %zu bytes", sizeof(copy) - 1);
    memcpy(copy, text, strlen(text) + 1);
    while (rc == 0 && (word = strsep(&rest, " ")))
        if (*word)
            rc = word_take(word, &fresh, why);
    if (rc == 0 && fresh.given == 0)
        rc = refuse(why, "no setting is named; write KEY=VALUE, e.g. weight=200");
    if (rc == 0)
        tenant_settings_over(s, &fresh);
    return rc;
}

char *tenant_settings_text(const struct tenant_settings *s, char text[TENANT_TEXT_BYTES])
{
    char number[UNITS_TEXT_BYTES];
    size_t n = 0;

    text[0] = '\0';
    for (unsigned k = 0; k < TENANT_KEYS && n < TENANT_TEXT_BYTES; k++) {
        if (!(s->given >> k & 1))
            continue;
        number_text(k, value_in(s, k), number);
        n += (size_t)snprintf(text + n, TENANT_TEXT_BYTES - n, "%s%s=%s", n > 0 ? " " : "",
                              keys[k].name, number);
    }
    return text;
}

void tenant_settings_over(struct tenant_settings *s, const struct tenant_settings *over)
{
    for (unsigned k = 0; k < TENANT_KEYS; k++)
        if (over->given >> k & 1)
            *value_of(s, k) = value_in(over, k);
    s->given |= over->given;
}

/* ---- names ---- */

bool tenant_name_possible(const char *name)
{
    size_t n = strlen(name);
    bool is_gid;
    uint32_t id;

    if (config_principal(name, n, &is_gid, &id))
        return !is_gid;
    return config_tenant_named(name, n);
}

int config_tenant(const char *item, char name[UCM_MAX_NAME_BYTES + 1], struct tenant_settings *s,
                  char why[TENANT_WHY_BYTES])
{
    size_t n = strcspn(item, " ");

    if (n <= UCM_MAX_NAME_BYTES) {
        memcpy(name, item, n);
        name[n] = '\0';
    }
    if (n > UCM_MAX_NAME_BYTES || (strcmp(name, TENANT_ALL) != 0 && !tenant_name_possible(name)))
        return refuse(why,
                      "\"%.60s\" does not begin with a tenant's name; write one of `tenants`, "
                      "uid:N or " TENANT_ALL " for all",
                      item);
    return tenant_settings_parse(item + n, s, why);
}

/* ---- the list ---- */

int config_tenants_check(const struct config *c, struct config_error *e)
{
    const struct config_list *list = &c->tenant_settings;
    char name[UCM_MAX_NAME_BYTES + 1], why[TENANT_WHY_BYTES];

    for (size_t i = 0; i < list->n; i++) {
        struct tenant_settings s = {.given = 0};

        if (config_tenant(list->item[i], name, &s, why) != 0)
            return config_fail(c, e, LIST, LIST ": %s", why);
        for (size_t j = 0; j < i; j++)
            if (strncmp(list->item[j], name, strlen(name)) == 0 &&
                list->item[j][strlen(name)] == ' ')
                return config_fail(c, e, LIST,
                                   LIST ": \"%s\" is there twice; write all it is given behind "
                                        "one name",
                                   name);
    }
    return 0;
}
