/* YAML to configuration. Of YAML only what a configuration needs is let in: one document, sections
 * of keys, scalars and lists of scalars; no anchors, aliases or tags. */
#include "daemon/base/config_table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#define FILE_BYTES (1u << 20)
#define NAME_BYTES 64
#define PATH_TAIL 120 /* of a long path the end is what tells */

struct reader {
    const char *path;
    unsigned char *text;
    size_t n;
    yaml_parser_t parser;
    yaml_event_t event; /* the present one */
    struct config *c;
    struct config_error *e;
    uint32_t key_line[CONFIG_MAX_KEYS]; /* where this file set the key, 0: not yet */
    uint32_t section_line[CONFIG_MAX_KEYS];
};

static int fail(struct reader *r, size_t line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* line 0: of the file as a whole. */
static int fail(struct reader *r, size_t line, const char *format, ...)
{
    size_t length = strlen(r->path), skip = length > PATH_TAIL ? length - PATH_TAIL : 0;
    size_t size = sizeof(r->e->text), n;
    va_list args;

    n = (size_t)snprintf(r->e->text, size, "%s%s:", skip > 0 ? "..." : "", r->path + skip);
    if (line > 0)
        n += (size_t)snprintf(r->e->text + n, size - n, "%zu:", line);
    n += (size_t)snprintf(r->e->text + n, size - n, " ");
    va_start(args, format);
    vsnprintf(r->e->text + n, size - n, format, args);
    va_end(args);
    return -EINVAL;
}

/* ---- the file ---- */

static int load_from(struct reader *r, int fd)
{
    ssize_t got;

    r->text = malloc(FILE_BYTES + 1);
    if (!r->text) {
        fail(r, 0, "memory ran out");
        return -ENOMEM;
    }
    while (r->n <= FILE_BYTES) {
        got = read(fd, r->text + r->n, FILE_BYTES + 1 - r->n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            got = -errno;
            fail(r, 0, "can't be read: %s", strerror(errno));
            return (int)got;
        }
        if (got == 0)
            return 0;
        r->n += (size_t)got;
    }
    return fail(r, 0, "is larger than 1 MiB; a configuration is a page or two");
}

static int load(struct reader *r)
{
    int fd = open(r->path, O_RDONLY | O_CLOEXEC), rc;

    if (fd < 0) {
        rc = -errno;
        fail(r, 0, "can't be opened: %s", strerror(errno));
        return rc;
    }
    rc = load_from(r, fd);
    close(fd);
    return rc;
}

/* ---- events ---- */

static size_t line_of_offset(const struct reader *r, size_t offset)
{
    size_t line = 1;

    for (size_t i = 0; i < offset && i < r->n; i++)
        line += r->text[i] == '\n';
    return line;
}

/* Does the line hold a tab where the parser stopped? Its own words don't say so. */
static bool stopped_at_tab(const struct reader *r, size_t line)
{
    size_t at = 0;

    for (size_t i = 1; i < line && at < r->n; at++)
        i += r->text[at] == '\n';
    while (at < r->n && r->text[at] == ' ')
        at++;
    return at < r->n && r->text[at] == '\t';
}

static int fail_parser(struct reader *r)
{
    const yaml_parser_t *p = &r->parser;
    const char *problem = p->problem ? p->problem : "not YAML";
    size_t line = p->problem_mark.line + 1;

    if (p->error == YAML_MEMORY_ERROR) {
        fail(r, 0, "memory ran out");
        return -ENOMEM;
    }
    if (p->error == YAML_READER_ERROR)
        return fail(r, line_of_offset(r, p->problem_offset),
                    "%s; save the file as plain UTF-8 text", problem);
    if (stopped_at_tab(r, line))
        return fail(r, line, "a tab; indent with spaces");
    return fail(r, line, "%s; write \"key: value\", and keys of a section indented below it",
                problem);
}

static size_t event_line(const struct reader *r)
{
    return r->event.start_mark.line + 1;
}

static int check_scalar(struct reader *r)
{
    const unsigned char *text = r->event.data.scalar.value;

    for (size_t i = 0; i < r->event.data.scalar.length; i++)
        if (text[i] < ' ' || text[i] == 0x7f)
            return fail(r, event_line(r),
                        "a control character in a value; write plain text in one line");
    return 0;
}

/* Makes the next event the present one. Refuses what no configuration needs. */
static int next(struct reader *r)
{
    const yaml_char_t *anchor = NULL, *tag = NULL;

    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event))
        return fail_parser(r);
    switch (r->event.type) {
    case YAML_ALIAS_EVENT:
        anchor = r->event.data.alias.anchor;
        break;
    case YAML_SCALAR_EVENT:
        anchor = r->event.data.scalar.anchor;
        tag = r->event.data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = r->event.data.sequence_start.anchor;
        tag = r->event.data.sequence_start.tag;
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = r->event.data.mapping_start.anchor;
        tag = r->event.data.mapping_start.tag;
        break;
    default:
        break;
    }
    if (anchor)
        return fail(r, event_line(r),
                    "anchors and aliases (& and *) are not taken here; write the value "
                    "itself, in quotes if it begins with one of them");
    if (tag)
        return fail(r, event_line(r),
                    "tags (!) are not taken here; write the value itself, in quotes if "
                    "it begins with one");
    return r->event.type == YAML_SCALAR_EVENT ? check_scalar(r) : 0;
}

static const char *scalar(const struct reader *r)
{
    return (const char *)r->event.data.scalar.value;
}

/* "key:" with nothing behind it, or YAML's word for nothing. */
static bool scalar_is_null(const struct reader *r)
{
    const char *text = scalar(r);

    return r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

/* ---- values ---- */

static int read_items(struct reader *r, const struct config_key *k, struct config_list *list)
{
    for (;;) {
        int rc = next(r);

        if (rc < 0)
            return rc;
        if (r->event.type == YAML_SEQUENCE_END_EVENT)
            return 0;
        if (r->event.type != YAML_SCALAR_EVENT || scalar_is_null(r))
            return fail(r, event_line(r), "%s: an item is no plain text; write one value an item",
                        k->name);
        if (list->n >= k->max)
            return fail(r, event_line(r), "%s: too many items; it may have at most %llu", k->name,
                        (unsigned long long)k->max);
        rc = config_list_add(list, scalar(r));
        if (rc < 0) {
            fail(r, 0, "memory ran out");
            return rc;
        }
    }
}

static int read_list(struct reader *r, const struct config_key *k)
{
    struct config_list list = {0};
    char why[CONFIG_WHY_BYTES];
    size_t line = event_line(r);
    int rc = read_items(r, k, &list);

    if (rc == 0) {
        rc = config_list_set(r->c, k, &list, why);
        if (rc < 0)
            fail(r, line, "%s", why);
    }
    config_list_free(&list);
    return rc;
}

static int read_scalar(struct reader *r, const struct config_key *k)
{
    char why[CONFIG_WHY_BYTES];
    int rc;

    if (scalar_is_null(r))
        return fail(r, event_line(r),
                    "%s has no value; write one, or remove the line for the default (%s)", k->name,
                    k->initial[0]            ? k->initial
                    : k->kind == CONFIG_LIST ? "[]"
                                             : "\"\"");
    if (k->kind == CONFIG_LIST)
        return fail(r, event_line(r), "%s takes a list; write it in brackets: [%.80s]", k->name,
                    scalar(r));
    rc = config_value_set(r->c, k, scalar(r), why);
    if (rc < 0)
        fail(r, event_line(r), "%s", why);
    return rc;
}

/* The present event is the key's value. */
static int read_value(struct reader *r, const struct config_key *k, size_t line)
{
    uint32_t *seen = &r->key_line[config_key_place(k)];
    int rc;

    if (*seen)
        return fail(r, line, "%s is set twice, in line %u too; remove one of the two", k->name,
                    *seen);
    if (r->event.type == YAML_SCALAR_EVENT)
        rc = read_scalar(r, k);
    else if (r->event.type == YAML_SEQUENCE_START_EVENT && k->kind == CONFIG_LIST)
        rc = read_list(r, k);
    else
        return fail(r, event_line(r), "%s takes %s", k->name,
                    k->kind == CONFIG_LIST ? "a list, not a section; write [item, item]"
                                           : "one value, neither a list nor a section");
    if (rc < 0)
        return rc;
    *seen = (uint32_t)line;
    r->c->origin.line[config_key_place(k)] = *seen;
    return 0;
}

/* ---- keys ---- */

static int fail_unknown(struct reader *r, size_t line, const char *name)
{
    const struct config_key *k = config_key_find(name);
    const char *near = config_key_nearest(name);
    size_t n = config_section_length(name);

    if (k) /* written with its dot at the top */
        return fail(r, line, "\"%s\" in one word; write \"%.*s:\", and below it, indented, \"%s:\"",
                    name, (int)n, name, name + n + 1);
    if (near)
        return fail(r, line, "unknown key \"%s\"; did you mean \"%s\"?", name, near);
    return fail(r, line, "unknown key \"%s\"; the ucmd.yaml that ships lists all keys", name);
}

static size_t section_find(const char *name)
{
    for (size_t i = 1; i < config_section_count; i++)
        if (strcmp(config_sections[i].name, name) == 0)
            return i;
    return 0;
}

/* The present event is a key. Copies its full name; refuses what can't be one. */
static int read_name(struct reader *r, const char *section, char name[2 * NAME_BYTES])
{
    if (r->event.type != YAML_SCALAR_EVENT)
        return fail(r, event_line(r), "a key must be a plain word; write \"key: value\"");
    if (strlen(scalar(r)) >= NAME_BYTES)
        return fail(r, event_line(r),
                    "unknown key \"%.60s...\"; the ucmd.yaml that ships lists all keys", scalar(r));
    snprintf(name, 2 * NAME_BYTES, "%s%s%s", section, section[0] ? "." : "", scalar(r));
    return 0;
}

/* From behind a mapping's start to its end; the keys of one section. */
static int read_section(struct reader *r, const char *section)
{
    char name[2 * NAME_BYTES];

    for (;;) {
        int rc = next(r);
        const struct config_key *k;
        size_t line = event_line(r);

        if (rc < 0 || r->event.type == YAML_MAPPING_END_EVENT)
            return rc;
        rc = read_name(r, section, name);
        if (rc < 0)
            return rc;
        k = config_key_find(name);
        if (!k || config_section_length(name) != strlen(section))
            return fail_unknown(r, line, name);
        rc = next(r);
        if (rc == 0)
            rc = read_value(r, k, line);
        if (rc < 0)
            return rc;
    }
}

/* The present event is what follows "section:". */
static int read_section_value(struct reader *r, size_t place, size_t line)
{
    const char *name = config_sections[place].name;
    uint32_t *seen = &r->section_line[place];

    if (*seen)
        return fail(r, line, "section %s is there twice, in line %u too; put its keys together",
                    name, *seen);
    *seen = (uint32_t)line;
    if (r->event.type == YAML_MAPPING_START_EVENT)
        return read_section(r, name);
    if (r->event.type == YAML_SCALAR_EVENT && scalar_is_null(r))
        return 0; /* all its keys are commented out */
    return fail(r, event_line(r), "%s is a section; write its keys below it, indented, one a line",
                name);
}

static int read_top(struct reader *r)
{
    char name[2 * NAME_BYTES];

    for (;;) {
        int rc = next(r);
        const struct config_key *k;
        size_t line = event_line(r), section;

        if (rc < 0 || r->event.type == YAML_MAPPING_END_EVENT)
            return rc;
        rc = read_name(r, "", name);
        if (rc < 0)
            return rc;
        k = config_key_find(name);
        section = section_find(name);
        if (section == 0 && (!k || config_section_length(name) > 0))
            return fail_unknown(r, line, name);
        rc = next(r);
        if (rc == 0)
            rc = section > 0 ? read_section_value(r, section, line) : read_value(r, k, line);
        if (rc < 0)
            return rc;
    }
}

static int read_stream(struct reader *r)
{
    int rc = next(r); /* the stream's start */

    if (rc == 0)
        rc = next(r);
    if (rc < 0 || r->event.type == YAML_STREAM_END_EVENT)
        return rc;
    rc = next(r);
    if (rc < 0)
        return rc;
    if (r->event.type == YAML_MAPPING_START_EVENT)
        rc = read_top(r);
    else if (r->event.type != YAML_SCALAR_EVENT || !scalar_is_null(r))
        return fail(r, event_line(r), "no keys here; write \"key: value\", one a line");
    if (rc == 0)
        rc = next(r); /* the document's end */
    if (rc == 0)
        rc = next(r);
    if (rc == 0 && r->event.type != YAML_STREAM_END_EVENT)
        return fail(r, event_line(r), "a second document (---); write all keys into one");
    return rc;
}

int config_read(struct config *c, const char *path, struct config_error *e)
{
    struct reader r = {.path = path, .c = c, .e = e};
    char *file = strdup(path);
    int rc;

    if (!file) {
        fail(&r, 0, "memory ran out");
        return -ENOMEM;
    }
    free(c->origin.file);
    c->origin.file = file;
    rc = load(&r);
    if (rc < 0)
        goto out;
    if (!yaml_parser_initialize(&r.parser)) {
        fail(&r, 0, "memory ran out");
        rc = -ENOMEM;
        goto out;
    }
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, r.text, r.n);
    rc = read_stream(&r);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
out:
    free(r.text);
    return rc;
}
