/* Text to value and back, by kind. */
#include "daemon/config/table.h"
#include "proto/units.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void number_text(const struct config_key *k, uint64_t value, char buf[CONFIG_TEXT_BYTES])
{
    if (k->kind == CONFIG_SIZE)
        units_size_text(buf, value);
    else if (k->kind == CONFIG_DURATION)
        units_duration_text(buf, value);
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
    char why[UNITS_WHY_BYTES];
    int rc;

    if (k->kind == CONFIG_BOOL || k->kind == CONFIG_ENUM)
        return parse_enum(k, text, out, e);
    if (k->kind == CONFIG_OCTAL)
        return parse_octal(k, text, out, e);
    if (k->kind == CONFIG_SIZE)
        rc = units_parse_size(text, out, why);
    else if (k->kind == CONFIG_DURATION)
        rc = units_parse_duration(text, out, why);
    else
        rc = units_parse_count(text, out, why);
    return rc == 0 ? in_bounds(k, *out, e) : config_refuse(e, "%s: %s", k->name, why);
}

static int set_string(struct config *c, const struct config_key *k, const char *text,
                      struct config_error *e)
{
    const char *right = k->item_cb ? k->item_cb(text) : NULL;
    char **field = config_field(c, k);
    size_t n = strlen(text);
    char *copy;

    if (right)
        return config_refuse(e, "%s: \"%.80s\" is wrong; %s", k->name, text, right);
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
        const char *right = k->item_cb ? k->item_cb(list->item[i]) : NULL;

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
    uint64_t value;
    int rc;

    if (k->kind == CONFIG_LIST)
        return list_from_text(c, k, text, e);
    if (k->kind == CONFIG_STRING)
        return set_string(c, k, text, e);
    rc = parse_number(k, text, &value, e);
    if (rc < 0)
        return rc;
    if (k->kind == CONFIG_SIZE || k->kind == CONFIG_DURATION)
        memcpy(config_field(c, k), &value, sizeof(value));
    else if (k->kind == CONFIG_BOOL)
        memcpy(config_field(c, k), &(bool){value != 0}, sizeof(bool));
    else
        memcpy(config_field(c, k), &(unsigned){(unsigned)value}, sizeof(unsigned));
    return 0;
}

uint64_t config_number(const struct config *c, const struct config_key *k)
{
    const void *field = config_field_const(c, k);
    uint64_t wide;
    unsigned narrow;

    switch (k->kind) {
    case CONFIG_SIZE:
    case CONFIG_DURATION:
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
    if (k->kind == CONFIG_STRING)
        return *(char *const *)config_field_const(c, k);
    if (k->kind == CONFIG_BOOL || k->kind == CONFIG_ENUM)
        return k->names[config_number(c, k)];
    number_text(k, config_number(c, k), buf);
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
