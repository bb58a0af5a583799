/* YAML to configuration, in one pass over the parser's events. A configuration needs little of
 * YAML, and nothing else is taken: one document, sections of keys, scalars and lists of scalars; no
 * anchors, aliases or tags. */
#include "daemon/config/table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define FILE_BYTES (1u << 20)
#define NAME_BYTES 64
#define BOM "\xef\xbb\xbf"

struct reader {
    char *text;
    size_t n;
    yaml_parser_t parser;
    yaml_event_t event; /* the present one */
    struct config *c;
    struct config_error *e;
    uint32_t section_line[CONFIG_MAX_KEYS]; /* where the file begins the section, 0: not yet */
};

/* Line 0: of the file as a whole. -EINVAL. */
#define FAIL(r, at, ...) ((r)->e->line = (at), config_refuse((r)->e, __VA_ARGS__))

static int load(struct reader *r, const char *path)
{
    FILE *f = fopen(path, "re");
    int rc = 0;

    if (!f) {
        rc = -errno;
        FAIL(r, 0, "can't be opened: %s", strerror(errno));
        return rc;
    }
    r->text = malloc(FILE_BYTES + 1);
    if (r->text) {
        r->n = fread(r->text, 1, FILE_BYTES + 1, f);
        rc = ferror(f) ? -errno : 0;
    }
    fclose(f);
    if (!r->text)
        return config_no_memory(r->e);
    if (rc < 0)
        FAIL(r, 0, "can't be read: %s", strerror(-rc));
    else if (r->n > FILE_BYTES)
        rc = FAIL(r, 0, "is larger than 1 MiB; a configuration is a page or two");
    return rc;
}

/* ---- events ---- */

static uint32_t line_of(yaml_mark_t mark)
{
    return (uint32_t)mark.line + 1;
}

/* The line of the current event. */
static uint32_t line_now(const struct reader *r)
{
    return line_of(r->event.start_mark);
}

static uint32_t line_of_offset(const struct reader *r, size_t offset)
{
    uint32_t line = 1;

    for (size_t i = 0; i < offset && i < r->n; i++)
        line += r->text[i] == '\n';
    return line;
}

/* Does the line begin with a tab? The parser's own words don't say so. */
static bool begins_with_tab(const struct reader *r, uint32_t line)
{
    size_t at = 0;

    for (uint32_t i = 1; i < line && at < r->n; at++)
        i += r->text[at] == '\n';
    while (at < r->n && r->text[at] == ' ')
        at++;
    return at < r->n && r->text[at] == '\t';
}

static int fail_parser(struct reader *r)
{
    const yaml_parser_t *p = &r->parser;
    const char *problem = p->problem ? p->problem : "not YAML";
    /* A quote or bracket that is never closed is found out at the end of the file. */
    bool open = p->context && (strstr(p->context, "quoted") || strstr(p->context, "flow"));
    uint32_t line = line_of(open ? p->context_mark : p->problem_mark);

    if (p->error == YAML_MEMORY_ERROR)
        return config_no_memory(r->e);
    if (p->error == YAML_READER_ERROR)
        return FAIL(r, line_of_offset(r, p->problem_offset),
                    "%s; save the file as plain UTF-8 text", problem);
    if (open)
        return FAIL(r, line, "%s, %s; close what begins here", p->context, problem);
    if (begins_with_tab(r, line))
        return FAIL(r, line, "a tab; indent with spaces");
    return FAIL(r, line, "%s; write \"key: value\", and keys of a section indented below it",
                problem);
}

static int check_scalar(struct reader *r)
{
    const yaml_event_t *v = &r->event;

    if (v->data.scalar.style != YAML_PLAIN_SCALAR_STYLE && line_of(v->end_mark) != line_now(r))
        return FAIL(r, line_now(r),
                    "a value of several lines, or a quote that is not closed; write "
                    "plain text in one line");
    for (size_t i = 0; i < v->data.scalar.length; i++)
        if (v->data.scalar.value[i] < ' ' || v->data.scalar.value[i] == 0x7f)
            return FAIL(r, line_now(r),
                        "a control character in a value; write plain text in one line");
    return 0;
}

static int check_names(struct reader *r, bool anchor, bool tag)
{
    if (anchor)
        return FAIL(r, line_now(r),
                    "anchors and aliases (& and *) are not supported; write the value itself, in "
                    "quotes if it begins with one of them");
    if (tag)
        return FAIL(r, line_now(r),
                    "tags (!) are not supported; write the value itself, in quotes if it begins "
                    "with one");
    return 0;
}

/* Goes to the next event. Refuses what is YAML, and no configuration needs. */
static int next(struct reader *r)
{
    const yaml_event_t *v = &r->event;
    int rc;

    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event))
        return fail_parser(r);
    switch (v->type) {
    case YAML_ALIAS_EVENT:
        return check_names(r, true, false);
    case YAML_SCALAR_EVENT:
        rc = check_names(r, v->data.scalar.anchor, v->data.scalar.tag);
        return rc == 0 ? check_scalar(r) : rc;
    case YAML_SEQUENCE_START_EVENT:
        return check_names(r, v->data.sequence_start.anchor, v->data.sequence_start.tag);
    case YAML_MAPPING_START_EVENT:
        return check_names(r, v->data.mapping_start.anchor, v->data.mapping_start.tag);
    default:
        return 0;
    }
}

/* ---- values ---- */

static bool is(const struct reader *r, yaml_event_type_t type)
{
    return r->event.type == type;
}

static const char *scalar(const struct reader *r)
{
    return (const char *)r->event.data.scalar.value;
}

/* "key:" with nothing after it, or YAML's words for nothing. */
static bool is_null(const struct reader *r)
{
    return is(r, YAML_SCALAR_EVENT) && r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (scalar(r)[0] == '\0' || strcmp(scalar(r), "~") == 0 || strcmp(scalar(r), "null") == 0);
}

static int read_list(struct reader *r, const struct config_key *k)
{
    struct config_list list = {0};
    uint32_t line = line_now(r);
    int rc = next(r);

    while (rc == 0 && !is(r, YAML_SEQUENCE_END_EVENT)) {
        if (!is(r, YAML_SCALAR_EVENT) || is_null(r))
            rc = FAIL(r, line_now(r), "%s: an item is no plain text; write one value an item",
                      k->name);
        else if (config_list_add(&list, scalar(r)) < 0)
            rc = config_no_memory(r->e);
        else
            rc = next(r);
    }
    if (rc == 0) {
        r->e->line = line;
        rc = config_list_set(r->c, k, &list, r->e);
    }
    config_list_free(&list);
    return rc;
}

static int read_scalar(struct reader *r, const struct config_key *k)
{
    if (is_null(r))
        return FAIL(r, line_now(r),
                    "%s has no value; write one, or remove the line for the default (%s)", k->name,
                    config_initial_text(k));
    if (k->kind == CONFIG_LIST)
        return FAIL(r, line_now(r), "%s takes a list; write it in brackets: [%.80s]", k->name,
                    scalar(r));
    r->e->line = line_now(r);
    return config_value_set(r->c, k, scalar(r), r->e);
}

static int read_value(struct reader *r, const struct config_key *k, uint32_t line)
{
    uint32_t *seen = &r->c->origin.line[config_key_index(k)];
    int rc;

    if (*seen)
        return FAIL(r, line, "%s is set twice, in line %u too; remove one", k->name, *seen);
    if (is(r, YAML_SCALAR_EVENT))
        rc = read_scalar(r, k);
    else if (is(r, YAML_SEQUENCE_START_EVENT) && k->kind == CONFIG_LIST)
        rc = read_list(r, k);
    else
        return FAIL(r, line_now(r), "%s takes %s", k->name,
                    k->kind == CONFIG_LIST ? "a list, not a section; write [item, item]"
                                           : "one value, neither a list nor a section");
    if (rc == 0)
        *seen = line;
    return rc;
}

/* ---- keys ---- */

static int read_unknown(struct reader *r, uint32_t line, const char *name)
{
    size_t section = config_section_length(name);

    r->e->line = line;
    if (config_key_find(name)) /* written with its dot at the top */
        return config_refuse(r->e,
                             "\"%s\" in one word; write \"%.*s:\", and below it, indented, \"%s:\"",
                             name, (int)section, name, name + section + 1);
    return config_unknown(r->e, name);
}

static size_t section_find(const char *name)
{
    for (size_t i = 1; i < config_section_count; i++)
        if (strcmp(config_sections[i].name, name) == 0)
            return i;
    return 0;
}

static int read_mapping(struct reader *r, const char *section);

static int read_section(struct reader *r, size_t index, uint32_t line)
{
    const char *name = config_sections[index].name;
    uint32_t *seen = &r->section_line[index];

    if (*seen)
        return FAIL(r, line, "section %s is there twice, in line %u too; put its keys together",
                    name, *seen);
    *seen = line;
    if (is(r, YAML_MAPPING_START_EVENT))
        return read_mapping(r, name);
    if (is_null(r))
        return 0; /* all its keys are commented out */
    return FAIL(r, line_now(r), "%s is a section; write its keys below it, indented, one a line",
                name);
}

/* One "key: value" of the section, "" at the top. The present event is the key. */
static int read_pair(struct reader *r, const char *section)
{
    uint32_t line = line_now(r);
    const struct config_key *k;
    char name[2 * NAME_BYTES];
    int rc;

    if (!is(r, YAML_SCALAR_EVENT))
        return FAIL(r, line, "a key must be a plain word; write \"key: value\"");
    if (r->event.data.scalar.length >= NAME_BYTES)
        return FAIL(r, line, "unknown key \"%.60s...\"; the ucmd.yaml that ships lists all keys",
                    scalar(r));
    snprintf(name, sizeof(name), "%s%s%s", section, section[0] ? "." : "", scalar(r));
    rc = next(r);
    if (rc < 0)
        return rc;
    if (!section[0] && section_find(name) > 0)
        return read_section(r, section_find(name), line);
    k = config_key_find(name);
    if (!k || config_section_length(name) != strlen(section))
        return read_unknown(r, line, name);
    return read_value(r, k, line);
}

/* This recurses once: sections have no sections. */
static int read_mapping(struct reader *r, const char *section)
{
    int rc = next(r);

    while (rc == 0 && !is(r, YAML_MAPPING_END_EVENT)) {
        rc = read_pair(r, section);
        if (rc == 0)
            rc = next(r);
    }
    return rc;
}

static int read_document(struct reader *r)
{
    int rc = next(r); /* what begins the document, or nothing */

    if (rc < 0 || is(r, YAML_STREAM_END_EVENT))
        return rc;
    rc = next(r);
    if (rc == 0 && is(r, YAML_MAPPING_START_EVENT))
        rc = read_mapping(r, "");
    else if (rc == 0 && !is_null(r))
        rc = FAIL(r, line_now(r), "the file has no keys; write \"key: value\", one a line");
    if (rc == 0)
        rc = next(r); /* the document's end */
    if (rc == 0)
        rc = next(r);
    if (rc == 0 && !is(r, YAML_STREAM_END_EVENT))
        rc = FAIL(r, line_now(r), "a second document (---); write all keys into one");
    return rc;
}

static int parse(struct reader *r)
{
    size_t skip = r->n >= strlen(BOM) && memcmp(r->text, BOM, strlen(BOM)) == 0 ? strlen(BOM) : 0;
    int rc;

    if (!yaml_parser_initialize(&r->parser))
        return config_no_memory(r->e);
    yaml_parser_set_encoding(&r->parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r->parser, (unsigned char *)r->text + skip, r->n - skip);
    rc = next(r); /* the stream's start */
    if (rc == 0)
        rc = read_document(r);
    yaml_event_delete(&r->event);
    yaml_parser_delete(&r->parser);
    return rc;
}

int config_read(struct config *c, const char *path, struct config_error *e)
{
    struct reader r = {.c = c, .e = e};
    char *file = strdup(path);
    int rc;

    *e = (struct config_error){.file = path};
    if (!file)
        return config_no_memory(e);
    free(c->origin.file);
    c->origin = (struct config_origin){.file = file};
    rc = load(&r, path);
    if (rc == 0)
        rc = parse(&r);
    free(r.text);
    return rc;
}
