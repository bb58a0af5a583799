/* The configuration as YAML with its documentation; see config_print. */
#include "daemon/base/config_table.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define COLUMNS 100

/* The tail goes behind the last line, or on one of its own when that would be too long. */
static void print_comment(const char *indent, const char *text, const char *tail)
{
    size_t n;

    for (; text[n = strcspn(text, "\n")]; text += n + 1)
        printf("%s# %.*s\n", indent, (int)n, text);
    printf("%s# %s", indent, text);
    if (*tail && strlen(indent) + 3 + n + strlen(tail) > COLUMNS)
        printf("\n%s#", indent);
    printf("%s%s\n", *tail ? " " : "", tail);
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

/* "Permissions of the socket. Default: 0660." */
static void print_key_comment(const char *indent, const struct config_key *k)
{
    char tail[256];
    size_t n = (size_t)snprintf(tail, sizeof(tail), "Default: %s",
                                k->kind == CONFIG_LIST  ? "[]"
                                : k->initial[0] == '\0' ? "\"\""
                                                        : k->initial);

    if (k->kind == CONFIG_ENUM) {
        n += (size_t)snprintf(tail + n, sizeof(tail) - n, "; one of");
        for (size_t i = 0; k->names[i]; i++)
            n += (size_t)snprintf(tail + n, sizeof(tail) - n, "%s %s", i > 0 ? "," : "",
                                  k->names[i]);
    }
    snprintf(tail + n, sizeof(tail) - n, ".%s", k->reloadable ? " (reloadable)" : "");
    print_comment(indent, k->help, tail);
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
    else if (k->kind == CONFIG_STRING || k->kind == CONFIG_PATH)
        print_scalar(config_value_text(c, k, text));
    else
        fputs(config_value_text(c, k, text), stdout);
    putchar('\n');
}

static bool in_section(const struct config_key *k, const struct config_section *s)
{
    size_t n = strlen(s->name);

    return config_section_length(k->name) == n && memcmp(k->name, s->name, n) == 0;
}

void config_print(const struct config *c)
{
    const struct config_key *k = config_keys, *end = config_keys + config_key_count;

    for (size_t i = 0; i < config_section_count; i++) {
        const struct config_section *s = &config_sections[i];
        size_t n = strlen(s->name);

        print_comment("", s->help, "");
        if (n > 0)
            printf("%s:\n", s->name);
        for (bool first = n > 0; k < end && in_section(k, s); k++, first = false) {
            if (!first)
                putchar('\n');
            print_key(c, k);
        }
        if (i + 1 < config_section_count)
            putchar('\n');
    }
    fflush(stdout);
}
