/* Text to value and back, by kind. */
#include "daemon/base/config_table.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}, {"B", 1},
    {NULL, 0},
};
static const struct unit duration_units[] = {
    {"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0},
};

/* Digits at the front of text, at least one; *end is what follows. */
static bool digits(const char *text, uint64_t *value, const char **end)
{
    uint64_t v = 0;

    if (!isdigit((unsigned char)*text))
        return false;
    for (; isdigit((unsigned char)*text); text++)
        if (__builtin_mul_overflow(v, 10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*text - '0'), &v))
            return false;
    *value = v;
    *end = text;
    return true;
}

static void with_unit(uint64_t value, const struct unit *units, char buf[CONFIG_TEXT_BYTES])
{
    const struct unit *u = units;

    while (u[1].name && (value % u->factor != 0 || value == 0))
        u++;
    snprintf(buf, CONFIG_TEXT_BYTES, "%llu%s", (unsigned long long)(value / u->factor), u->name);
}

static void number_text(const struct config_key *k, uint64_t value, char buf[CONFIG_TEXT_BYTES])
{
    if (k->kind == CONFIG_SIZE)
        with_unit(value, size_units, buf);
    else if (k->kind == CONFIG_DURATION)
        with_unit(value, duration_units, buf);
    else
        snprintf(buf, CONFIG_TEXT_BYTES, k->kind == CONFIG_OCTAL ? "0%llo" : "%llu",
                 (unsigned long long)value);
}

static int in_bounds(const struct config_key *k, uint64_t value, struct config_error *e)
{
    char is[CONFIG_TEXT_BYTES], min[CONFIG_TEXT_BYTES], max[CONFIG_TEXT_BYTES];

    if (value >= k->min && value <= k->max)
        return 0;
    number_text(k, value, is);
    number_text(k, k->min, min);
    number_text(k, k->max, max);
    return config_refuse(e, "%s is %s; it must be from %s to %s", k->name, is, min, max);
}

/* A number with one of the units; what people write instead gets an answer of its own. */
static int parse_united(const struct config_key *k, const char *text, uint64_t *out,
                        struct config_error *e)
{
    bool is_size = k->kind == CONFIG_SIZE;
    const struct unit *units = is_size ? size_units : duration_units;
    const char *what = is_size ? "size" : "duration";
    const char *right = is_size ? "a whole number with B, KiB, MiB, GiB or TiB, e.g. 4GiB"
                                : "a whole number with ms, s, min or h, e.g. 30s";
    uint64_t n, value;
    const char *rest;

    if (!digits(text, &n, &rest))
        return config_refuse(e, "%s: \"%.40s\" is not a %s; write %s", k->name, text, what, right);
    if (*rest == '\0' && is_size)
        rest = "B";
    else if (*rest == '\0' && n != 0)
        return config_refuse(
            e, "%s: \"%.40s\" has no unit; write ms, s, min or h behind the number", k->name, text);
    else if (*rest == '\0')
        rest = "ms";
    for (const struct unit *u = units; u->name; u++) {
        if (strcmp(rest, u->name) != 0)
            continue;
        if (__builtin_mul_overflow(n, u->factor, &value))
            return config_refuse(e, "%s: \"%.40s\" is too large", k->name, text);
        *out = value;
        return in_bounds(k, value, e);
    }
    if (is_size && strchr("kKmMgGtT", *rest) &&
        (rest[1] == '\0' || !strcasecmp(rest + 1, "b") || !strcasecmp(rest + 1, "ib")))
        return config_refuse(e, "%s: \"%.40s\" may mean powers of 1000 or of 1024; write %llu%ciB",
                             k->name, text, (unsigned long long)n, toupper((unsigned char)*rest));
    if (!is_size && strcmp(rest, "m") == 0)
        return config_refuse(
            e, "%s: \"%.40s\" may mean minutes or milliseconds; write %llumin or %llums", k->name,
            text, (unsigned long long)n, (unsigned long long)n);
    return config_refuse(e, "%s: \"%.40s\" is not a %s; write %s", k->name, text, what, right);
}

static int parse_count(const struct config_key *k, const char *text, uint64_t *out,
                       struct config_error *e)
{
    const char *rest;

    if (!digits(text, out, &rest) || *rest != '\0')
        return config_refuse(e, "%s: \"%.40s\" is not a whole number", k->name, text);
    return in_bounds(k, *out, e);
}

static int parse_octal(const struct config_key *k, const char *text, uint64_t *out,
                       struct config_error *e)
{
    size_t n = strlen(text);

    if (text[0] != '0' || n < 2 || n > 8 || strspn(text, "01234567") != n)
        return config_refuse(
            e, "%s: \"%.40s\" is not an octal number; write it with a leading 0, e.g. 0660",
            k->name, text);
    *out = strtoull(text, NULL, 8);
    return in_bounds(k, *out, e);
}

static int parse_enum(const struct config_key *k, const char *text, uint64_t *out,
                      struct config_error *e)
{
    char list[128] = "";
    size_t n = 0;

    for (uint64_t i = 0; k->names[i]; i++) {
        if (strcmp(k->names[i], text) == 0) {
            *out = i;
            return 0;
        }
        n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s", i > 0 ? ", " : "", k->names[i]);
    }
    return config_refuse(e, "%s: \"%.40s\" is not one of its values; write one of %s", k->name,
                         text, list);
}

static int parse_number(const struct config_key *k, const char *text, uint64_t *out,
                        struct config_error *e)
{
    switch (k->kind) {
    case CONFIG_SIZE:
    case CONFIG_DURATION:
        return parse_united(k, text, out, e);
    case CONFIG_OCTAL:
        return parse_octal(k, text, out, e);
    case CONFIG_BOOL:
    case CONFIG_ENUM:
        return parse_enum(k, text, out, e);
    default:
        return parse_count(k, text, out, e);
    }
}

static int set_string(struct config *c, const struct config_key *k, const char *text,
                      struct config_error *e)
{
    char **field = config_field(c, k);
    size_t n = strlen(text);
    char *copy;

    if (k->kind == CONFIG_PATH && text[0] != '/')
        return config_refuse(e, "%s: \"%.80s\" is not an absolute path; begin it with /", k->name,
                             text);
    if (n < k->min || n > k->max)
        return config_refuse(e, "%s is %zu bytes long; it must be from %llu to %llu", k->name, n,
                             (unsigned long long)k->min, (unsigned long long)k->max);
    copy = strdup(text);
    if (!copy)
        return config_no_memory(e);
    free(*field);
    *field = copy;
    return 0;
}

int config_size_parse(const char *what, const char *text, uint64_t *out, struct config_error *e)
{
    const struct config_key k = {.name = what, .kind = CONFIG_SIZE, .min = 1, .max = UINT64_MAX};

    return parse_united(&k, text, out, e);
}

/* ---- lists ---- */

int config_list_add(struct config_list *list, const char *item)
{
    char *copy = strdup(item);
    char **grown;

    if (!copy)
        return -ENOMEM;
    grown = realloc(list->item, (list->n + 1) * sizeof(*grown));
    if (!grown) {
        free(copy);
        return -ENOMEM;
    }
    grown[list->n++] = copy;
    list->item = grown;
    return 0;
}

void config_list_free(struct config_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        free(list->item[i]);
    free(list->item);
    *list = (struct config_list){0};
}

int config_list_set(struct config *c, const struct config_key *k, struct config_list *list,
                    struct config_error *e)
{
    struct config_list *field = config_field(c, k);

    if (list->n > k->max)
        return config_refuse(e, "%s has %zu items; it may have at most %llu", k->name, list->n,
                             (unsigned long long)k->max);
    for (size_t i = 0; i < list->n; i++) {
        const char *right = k->item ? k->item(list->item[i]) : NULL;

        if (right)
            return config_refuse(e, "%s: \"%.80s\" is wrong; %s", k->name, list->item[i], right);
        if (strlen(list->item[i]) >= CONFIG_ITEM_BYTES)
            return config_refuse(e, "%s: an item is longer than %d bytes", k->name,
                                 CONFIG_ITEM_BYTES - 1);
    }
    config_list_free(field);
    *field = *list;
    *list = (struct config_list){0};
    return 0;
}

/* A list from its comma-separated items. */
static int list_from_text(struct config *c, const struct config_key *k, const char *text,
                          struct config_error *e)
{
    struct config_list list = {0};
    char *copy = strdup(text), *rest = copy, *item;
    int rc = copy ? 0 : -ENOMEM;

    while (rc == 0 && (item = strsep(&rest, ",")))
        if (*item)
            rc = config_list_add(&list, item);
    rc = rc == 0 ? config_list_set(c, k, &list, e) : config_no_memory(e);
    free(copy);
    config_list_free(&list);
    return rc;
}

/* ---- any value ---- */

int config_value_set(struct config *c, const struct config_key *k, const char *text,
                     struct config_error *e)
{
    const struct config_retired_value *retired = config_retired_value_find(k->name, text);
    uint64_t value;
    int rc;

    if (retired) {
        text = retired->instead;
        config_refuse(e, "%s: %s is no value any more, and taken for %s", k->name, retired->text,
                      text);
        if (config_list_add(&c->warnings, e->text) < 0)
            return config_no_memory(e);
    }
    if (k->kind == CONFIG_LIST)
        return list_from_text(c, k, text, e);
    if (k->kind == CONFIG_STRING || k->kind == CONFIG_PATH)
        return set_string(c, k, text, e);
    rc = parse_number(k, text, &value, e);
    if (rc < 0)
        return rc;
    if (k->kind == CONFIG_SIZE || k->kind == CONFIG_DURATION || k->kind == CONFIG_COUNT)
        memcpy(config_field(c, k), &value, sizeof(value));
    else if (k->kind == CONFIG_BOOL)
        memcpy(config_field(c, k), &(bool){value != 0}, sizeof(bool));
    else
        memcpy(config_field(c, k), &(unsigned){(unsigned)value}, sizeof(unsigned));
    return 0;
}

static uint64_t number_get(const struct config *c, const struct config_key *k)
{
    const void *field = config_field_const(c, k);
    uint64_t wide;
    unsigned narrow;

    switch (k->kind) {
    case CONFIG_SIZE:
    case CONFIG_DURATION:
    case CONFIG_COUNT:
        memcpy(&wide, field, sizeof(wide));
        return wide;
    case CONFIG_BOOL:
        return *(const bool *)field;
    default:
        memcpy(&narrow, field, sizeof(narrow));
        return narrow;
    }
}

const char *config_value_text(const struct config *c, const struct config_key *k,
                              char buf[CONFIG_TEXT_BYTES])
{
    if (k->kind == CONFIG_STRING || k->kind == CONFIG_PATH)
        return *(char *const *)config_field_const(c, k);
    if (k->kind == CONFIG_BOOL || k->kind == CONFIG_ENUM)
        return k->names[number_get(c, k)];
    number_text(k, number_get(c, k), buf);
    return buf;
}

const char *config_initial_text(const struct config_key *k)
{
    if (k->initial[0] != '\0')
        return k->initial;
    return k->kind == CONFIG_LIST ? "[]" : "\"\"";
}

static bool list_equal(const struct config_list *a, const struct config_list *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (strcmp(a->item[i], b->item[i]) != 0)
            return false;
    return true;
}

bool config_value_equal(const struct config *a, const struct config *b, const struct config_key *k)
{
    char buf_a[CONFIG_TEXT_BYTES], buf_b[CONFIG_TEXT_BYTES];

    if (k->kind == CONFIG_LIST)
        return list_equal(config_field_const(a, k), config_field_const(b, k));
    return strcmp(config_value_text(a, k, buf_a), config_value_text(b, k, buf_b)) == 0;
}
