#include "daemon/config/tenants.h"

#include "daemon/config/roots.h"
#include "daemon/config/table.h"
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

/* ---- what holds together ---- */

static int most_check(const char *tier, uint64_t guaranteed, uint64_t most,
                      char why[TENANT_WHY_BYTES])
{
    char text[UNITS_TEXT_BYTES], bound[UNITS_TEXT_BYTES];

    if (most == 0 || guaranteed <= most)
        return 0;
    return refuse(why, "%s.min (%s) is more than %s.max (%s); lower it, or raise %s.max", tier,
                  units_size_text(text, guaranteed), tier, units_size_text(bound, most), tier);
}

int tenant_settings_check(const struct tenant_settings *s, char why[TENANT_WHY_BYTES])
{
    int rc = most_check("dram", s->dram_min, s->dram_max, why);

    if (rc == 0)
        rc = most_check("nvme", s->nvme_min, s->nvme_max, why);
    return rc != 0 ? rc : most_check("shared", s->shared_min, s->shared_max, why);
}

bool tenant_gives_guarantee(const struct tenant_settings *s)
{
    return s->dram_min > 0 || s->nvme_min > 0 || s->shared_min > 0;
}

void tenant_guarantees_add(struct tenant_settings *sum, const struct tenant_settings *s)
{
    sum->dram_min += s->dram_min;
    sum->nvme_min += s->nvme_min;
    sum->shared_min += s->shared_min;
}

static int sum_check(const char *key, uint64_t sum, const char *of, uint64_t size,
                     char why[TENANT_WHY_BYTES])
{
    char text[UNITS_TEXT_BYTES], bound[UNITS_TEXT_BYTES];

    if (sum <= size)
        return 0;
    return refuse(why, "all tenants' %s are %s in sum, and %s is %s; guarantee less", key,
                  units_size_text(text, sum), of, units_size_text(bound, size));
}

/* The least capacity of the roots; UINT64_MAX: none has one. 0: there are no roots. */
static uint64_t root_least(const struct config *c)
{
    struct config_root roots[UCM_MAX_ROOTS];
    struct config_error e;
    uint64_t least = UINT64_MAX;
    uint32_t n = 0;

    if (config_roots(c, roots, &n, &e) != 0)
        return UINT64_MAX; /* reported elsewhere */
    for (uint32_t i = 0; i < n; i++)
        if (roots[i].capacity_bytes > 0 && roots[i].capacity_bytes < least)
            least = roots[i].capacity_bytes;
    return n == 0 ? 0 : least == UINT64_MAX ? least : least / 100 * CONFIG_SHARED_LOW;
}

int tenant_guarantees_check(const struct config *c, const struct tenant_settings *sum,
                            char why[TENANT_WHY_BYTES])
{
    uint64_t half = c->nvme_paths.n * c->nvme_size / 2;
    int rc = sum_check("dram.min", sum->dram_min, "arena.size", c->arena_size, why);

    if (rc == 0 && sum->nvme_min > 0 && c->nvme_rewrite == 0)
        return refuse(why, "nvme.min is kept by writing parts again, and nvme.rewrite is 0; "
                           "raise it, or guarantee nothing of NVMe");
    if (rc == 0)
        rc = sum_check("nvme.min", sum->nvme_min,
                       "half of the NVMe tier, the rest of which it needs to write,", half, why);
    return rc != 0 ? rc
                   : sum_check("shared.min", sum->shared_min,
                               "what garbage collection leaves on the smallest shared root",
                               root_least(c), why);
}

/* ---- names ---- */

bool tenant_name_possible(const char *name)
{
    size_t n = strlen(name);
    char written[32];
    bool is_gid;
    uint32_t id;

    if (config_principal(name, n, &is_gid, &id)) {
        snprintf(written, sizeof(written), "uid:%u", (unsigned)id);
        return !is_gid && strcmp(written, name) == 0; /* "uid:007" is nobody's */
    }
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
    if (tenant_settings_parse(item + n, s, why) != 0)
        return -EINVAL;
    if (strcmp(name, TENANT_ALL) == 0 && tenant_gives_guarantee(s))
        return refuse(why, "a guarantee is one tenant's; give it by name, not to " TENANT_ALL);
    return 0;
}

/* ---- the list ---- */

/* Whether an entry before the i-th has its name. */
static bool named_before(const struct config_list *list, size_t i, const char *name)
{
    size_t n = strlen(name);

    for (size_t j = 0; j < i; j++)
        if (strncmp(list->item[j], name, n) == 0 && list->item[j][n] == ' ')
            return true;
    return false;
}

int config_tenants_check(const struct config *c, struct config_error *e)
{
    const struct config_list *list = &c->tenant_settings;
    char name[UCM_MAX_NAME_BYTES + 1], why[TENANT_WHY_BYTES];
    struct tenant_settings sum = {.given = 0}, all = tenant_settings_initial(c), own;

    for (size_t i = 0; i < list->n; i++) {
        own = (struct tenant_settings){.given = 0};
        if (config_tenant(list->item[i], name, &own, why) != 0)
            return config_fail(c, e, LIST, LIST ": %s", why);
        if (named_before(list, i, name))
            return config_fail(c, e, LIST,
                               LIST ": \"%s\" is there twice; write all it is given after one name",
                               name);
        tenant_guarantees_add(&sum, &own);
        if (strcmp(name, TENANT_ALL) == 0)
            tenant_settings_over(&all, &own);
    }
    for (size_t i = 0; i < list->n; i++) {
        struct tenant_settings s = all;

        own = (struct tenant_settings){.given = 0};
        (void)config_tenant(list->item[i], name, &own, why);
        tenant_settings_over(&s, &own);
        if (tenant_settings_check(&s, why) != 0)
            return config_fail(c, e, LIST, LIST ": %s: %s", name, why);
    }
    if (tenant_guarantees_check(c, &sum, why) != 0)
        return config_fail(c, e, LIST, LIST ": %s", why);
    return 0;
}
