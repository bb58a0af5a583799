/* The configuration as YAML with its documentation; see config_print. */
#include "daemon/config/table.h"
#include "proto/units.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define COLUMNS 100

/* A comment of whole words, in lines of at most COLUMNS. */
static void print_comment(const char *indent, const char *text)
{
    size_t width = COLUMNS - strlen(indent) - 2;

    while (*text) {
        size_t n = strlen(text);

        if (n > width)
            for (n = width; text[n] != ' ' && n > 1; n--)
                ;
        printf("%s# %.*s\n", indent, (int)n, text);
        text += n + (text[n] == ' ');
    }
}

/* Double quotes take any text; what config_read lets in has no control characters. */
static void print_quoted(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            putchar('\\');
        putchar(*text);
    }
    putchar('"');
}

/* Plain where YAML can't take it for anything else. */
static void print_scalar(const char *text)
{
    bool plain = *text == '/';

    for (const char *p = text; *p && plain; p++)
        plain = isalnum((unsigned char)*p) || strchr("/._-+", *p);
    if (plain)
        fputs(text, stdout);
    else
        print_quoted(text);
}

static void print_list(const struct config_list *list)
{
    putchar('[');
    for (size_t i = 0; i < list->n; i++) {
        if (i > 0)
            fputs(", ", stdout);
        print_scalar(list->item[i]);
    }
    putchar(']');
}

static const char *bound_text(const struct config_key *k, uint64_t v, char buf[UNITS_TEXT_BYTES])
{
    if (k->kind == CONFIG_SIZE)
        return units_size_text(buf, v);
    if (k->kind == CONFIG_DURATION)
        return units_duration_text(buf, v);
    snprintf(buf, UNITS_TEXT_BYTES, k->kind == CONFIG_OCTAL ? "%04" PRIo64 : "%" PRIu64, v);
    return buf;
}

/* What the key takes. */
static void print_bounds(const struct config_key *k)
{
    char min[UNITS_TEXT_BYTES], max[UNITS_TEXT_BYTES];

    for (size_t i = 0; k->names && k->names[i]; i++)
        printf("%s %s", i == 0 ? "; one of" : ",", k->names[i]);
    if (k->kind == CONFIG_LIST)
        printf("; at most %" PRIu64 " items", k->max);
    else if (!k->names && k->kind != CONFIG_STRING)
        printf("; from %s to %s", bound_text(k, k->min, min), bound_text(k, k->max, max));
}

static void print_key_comment(const char *indent, const struct config_key *k)
{
    print_comment(indent, k->help);
    printf("%s# Default: %s", indent, config_initial_text(k));
    print_bounds(k);
    printf(".%s\n", k->reloadable ? " (reloadable)" : "");
}

static void print_key(const struct config *c, const struct config_key *k)
{
    size_t section = config_section_length(k->name);
    const char *indent = section > 0 ? "  " : "";
    char text[CONFIG_TEXT_BYTES];

    print_key_comment(indent, k);
    printf("%s%s: ", indent, k->name + (section > 0 ? section + 1 : 0));
    if (k->kind == CONFIG_LIST)
        print_list(config_field_const(c, k));
    else if (k->kind == CONFIG_STRING)
        print_scalar(config_value_text(c, k, text));
    else
        fputs(config_value_text(c, k, text), stdout);
    putchar('\n');
}

static void print_section(const struct config_section *s)
{
    print_comment("", s->help);
    if (s->name[0])
        printf("%s:\n", s->name);
    else
        putchar('\n');
}

/* Sections have the keys' order, and each key has its section. */
void config_print(const struct config *c)
{
    const struct config_section *s = config_sections, *last = NULL;
    struct config defaults;

    config_init(&defaults);
    for (const struct config_key *k = config_keys; k < config_keys + config_key_count; k++) {
        size_t n = config_section_length(k->name);

        if (k->internal && config_value_equal(c, &defaults, k))
            continue;
        while (strlen(s->name) != n || memcmp(s->name, k->name, n) != 0)
            s++;
        if (last)
            putchar('\n');
        if (s != last)
            print_section(s);
        print_key(c, k);
        last = s;
    }
    config_free(&defaults);
    fflush(stdout);
}
