/* YAML to configuration. A configuration needs little of YAML, and nothing else is taken: one
 * document, sections of keys, scalars and lists of scalars; no anchors, aliases or tags. */
#include "daemon/base/config_table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define FILE_BYTES (1u << 20)
#define NAME_BYTES 64
#define BOM "\xef\xbb\xbf"
#define DEPTH 16 /* a configuration needs 3 */

struct reader {
    const char *path;
    char *text;
    size_t n;
    yaml_document_t document;
    struct config *c;
    struct config_error *e;
    uint32_t key_line[CONFIG_MAX_KEYS]; /* where this file set the key, 0: not yet */
    uint32_t section_line[CONFIG_MAX_KEYS];
};

/* Line 0: of the file as a whole. -EINVAL. */
#define FAIL(r, line, ...) config_error_at((r)->e, (r)->path, line, __VA_ARGS__)

static int fail_memory(struct reader *r)
{
    FAIL(r, 0, "memory ran out");
    return -ENOMEM;
}

static int load(struct reader *r)
{
    FILE *f = fopen(r->path, "re");
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
        return fail_memory(r);
    if (rc < 0)
        FAIL(r, 0, "can't be read: %s", strerror(-rc));
    else if (r->n > FILE_BYTES)
        rc = FAIL(r, 0, "is larger than 1 MiB; a configuration is a page or two");
    return rc;
}

/* ---- from text to a document ---- */

static uint32_t line_of(yaml_mark_t mark)
{
    return (uint32_t)mark.line + 1;
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

static int fail_parser(struct reader *r, const yaml_parser_t *p)
{
    const char *problem = p->problem ? p->problem : "not YAML";
    /* A quote or bracket that is never closed is found out at the end of the file. */
    bool open = p->context && (strstr(p->context, "quoted") || strstr(p->context, "flow"));
    uint32_t line = line_of(open ? p->context_mark : p->problem_mark);

    if (p->error == YAML_MEMORY_ERROR)
        return fail_memory(r);
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

static void parser_init(struct reader *r, yaml_parser_t *p)
{
    size_t skip = r->n >= strlen(BOM) && memcmp(r->text, BOM, strlen(BOM)) == 0 ? strlen(BOM) : 0;

    if (!yaml_parser_initialize(p))
        return;
    yaml_parser_set_encoding(p, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(p, (unsigned char *)r->text + skip, r->n - skip);
}

/* One word or sign of the file; *depth: how many lists and sections it lies in. */
static int check_token(struct reader *r, const yaml_token_t *t, int *depth)
{
    uint32_t line = line_of(t->start_mark);

    switch (t->type) {
    case YAML_ANCHOR_TOKEN:
    case YAML_ALIAS_TOKEN:
        return FAIL(r, line,
                    "anchors and aliases (& and *) are not taken here; write the value itself, in "
                    "quotes if it begins with one of them");
    case YAML_TAG_TOKEN:
        return FAIL(r, line,
                    "tags (!) are not taken here; write the value itself, in quotes if it begins "
                    "with one");
    case YAML_SCALAR_TOKEN:
        if (t->data.scalar.style != YAML_PLAIN_SCALAR_STYLE && line_of(t->end_mark) != line)
            return FAIL(r, line,
                        "a value of several lines, or a quote that is not closed; write "
                        "plain text in one line");
        for (size_t i = 0; i < t->data.scalar.length; i++)
            if (t->data.scalar.value[i] < ' ' || t->data.scalar.value[i] == 0x7f)
                return FAIL(r, line,
                            "a control character in a value; write plain text in one line");
        return 0;
    case YAML_BLOCK_SEQUENCE_START_TOKEN:
    case YAML_BLOCK_MAPPING_START_TOKEN:
    case YAML_FLOW_SEQUENCE_START_TOKEN:
    case YAML_FLOW_MAPPING_START_TOKEN:
        return ++*depth > DEPTH ? FAIL(r, line, "lists and sections too deep in each other") : 0;
    case YAML_BLOCK_END_TOKEN:
    case YAML_FLOW_SEQUENCE_END_TOKEN:
    case YAML_FLOW_MAPPING_END_TOKEN:
        --*depth;
        return 0;
    default:
        return 0;
    }
}

/* Goes through the text for what yaml_parser_load would take, and no configuration needs. */
static int check_tokens(struct reader *r)
{
    yaml_parser_t parser;
    yaml_token_t token = {.type = YAML_NO_TOKEN};
    int depth = 0, rc = 0;

    parser_init(r, &parser);
    while (rc == 0 && token.type != YAML_STREAM_END_TOKEN) {
        yaml_token_delete(&token);
        rc = yaml_parser_scan(&parser, &token) ? check_token(r, &token, &depth)
                                               : fail_parser(r, &parser);
    }
    yaml_token_delete(&token);
    yaml_parser_delete(&parser);
    return rc;
}

static int parse(struct reader *r)
{
    yaml_document_t next = {0};
    yaml_parser_t parser;
    int rc = 0;

    parser_init(r, &parser);
    if (!yaml_parser_load(&parser, &r->document))
        rc = fail_parser(r, &parser);
    else if (!yaml_parser_load(&parser, &next))
        rc = fail_parser(r, &parser);
    else if (yaml_document_get_root_node(&next))
        rc = FAIL(r, line_of(next.start_mark), "a second document (---); write all keys into one");
    yaml_document_delete(&next);
    yaml_parser_delete(&parser);
    return rc;
}

/* ---- from the document to values ---- */

static yaml_node_t *node(struct reader *r, int number)
{
    return yaml_document_get_node(&r->document, number);
}

static uint32_t line_of_node(const yaml_node_t *n)
{
    return line_of(n->start_mark);
}

static const char *scalar(const yaml_node_t *n)
{
    return (const char *)n->data.scalar.value;
}

/* "key:" with nothing behind it, or YAML's words for nothing. */
static bool is_null(const yaml_node_t *n)
{
    return n->type == YAML_SCALAR_NODE && n->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (scalar(n)[0] == '\0' || strcmp(scalar(n), "~") == 0 || strcmp(scalar(n), "null") == 0);
}

static int read_list(struct reader *r, const struct config_key *k, const yaml_node_t *n)
{
    struct config_list list = {0};
    char why[CONFIG_WHY_BYTES];
    int rc = 0;

    for (yaml_node_item_t *i = n->data.sequence.items.start;
         rc == 0 && i < n->data.sequence.items.top; i++) {
        const yaml_node_t *item = node(r, *i);

        if (item->type != YAML_SCALAR_NODE || is_null(item))
            rc = FAIL(r, line_of_node(item),
                      "%s: an item is no plain text; write one value an item", k->name);
        else if (list.n > k->max) /* config_list_set says how many there may be */
            break;
        else if (config_list_add(&list, scalar(item)) < 0)
            rc = fail_memory(r);
    }
    if (rc == 0) {
        rc = config_list_set(r->c, k, &list, why);
        if (rc < 0)
            FAIL(r, line_of_node(n), "%s", why);
    }
    config_list_free(&list);
    return rc;
}

static int read_scalar(struct reader *r, const struct config_key *k, const yaml_node_t *n)
{
    const char *text = scalar(n);
    char why[CONFIG_WHY_BYTES], at[256];
    int rc;

    if (is_null(n))
        return FAIL(r, line_of_node(n),
                    "%s has no value; write one, or remove the line for the default (%s)", k->name,
                    k->initial[0]            ? k->initial
                    : k->kind == CONFIG_LIST ? "[]"
                                             : "\"\"");
    if (k->kind == CONFIG_LIST)
        return FAIL(r, line_of_node(n), "%s takes a list; write it in brackets: [%.80s]", k->name,
                    scalar(n));
    snprintf(at, sizeof(at), "%.200s:%u", r->path, line_of_node(n));
    if (config_value_renew(r->c, k, at, &text) < 0)
        return fail_memory(r);
    rc = config_value_set(r->c, k, text, why);
    if (rc < 0)
        FAIL(r, line_of_node(n), "%s", why);
    return rc;
}

static int read_value(struct reader *r, const struct config_key *k, uint32_t line,
                      const yaml_node_t *n)
{
    uint32_t *seen = &r->key_line[config_key_place(k)];
    int rc;

    if (*seen)
        return FAIL(r, line, "%s is set twice, in line %u too; remove one", k->name, *seen);
    if (n->type == YAML_SCALAR_NODE)
        rc = read_scalar(r, k, n);
    else if (n->type == YAML_SEQUENCE_NODE && k->kind == CONFIG_LIST)
        rc = read_list(r, k, n);
    else
        return FAIL(r, line_of_node(n), "%s takes %s", k->name,
                    k->kind == CONFIG_LIST ? "a list, not a section; write [item, item]"
                                           : "one value, neither a list nor a section");
    if (rc == 0)
        r->c->origin.line[config_key_place(k)] = *seen = line;
    return rc;
}

/* ---- keys ---- */

static int read_unknown(struct reader *r, uint32_t line, const char *name, const yaml_node_t *n)
{
    const struct config_key *k = config_key_find(name);
    const struct config_retired *retired = config_retired_find(name);
    const char *near = config_key_nearest(name);
    size_t section = config_section_length(name);
    char at[256];

    if (k) /* written with its dot at the top */
        return FAIL(r, line, "\"%s\" in one word; write \"%.*s:\", and below it, indented, \"%s:\"",
                    name, (int)section, name, name + section + 1);
    if (retired) {
        snprintf(at, sizeof(at), "%.200s:%u", r->path, line);
        return config_warn_retired(r->c, retired, at,
                                   n->type == YAML_SCALAR_NODE ? scalar(n) : "") < 0
                   ? fail_memory(r)
                   : 0;
    }
    if (near)
        return FAIL(r, line, "unknown key \"%s\"; did you mean \"%s\"?", name, near);
    return FAIL(r, line, "unknown key \"%s\"; the ucmd.yaml that ships lists all keys", name);
}

static size_t section_find(const char *name)
{
    for (size_t i = 1; i < config_section_count; i++)
        if (strcmp(config_sections[i].name, name) == 0)
            return i;
    return 0;
}

static int read_mapping(struct reader *r, const char *section, const yaml_node_t *n);

static int read_section(struct reader *r, size_t place, uint32_t line, const yaml_node_t *n)
{
    const char *name = config_sections[place].name;
    uint32_t *seen = &r->section_line[place];

    if (*seen)
        return FAIL(r, line, "section %s is there twice, in line %u too; put its keys together",
                    name, *seen);
    *seen = line;
    if (n->type == YAML_MAPPING_NODE)
        return read_mapping(r, name, n);
    if (is_null(n))
        return 0; /* all its keys are commented out */
    return FAIL(r, line_of_node(n),
                "%s is a section; write its keys below it, indented, one a line", name);
}

/* One "key: value" of the section, "" at the top. */
static int read_pair(struct reader *r, const char *section, const yaml_node_t *key,
                     const yaml_node_t *value)
{
    uint32_t line = line_of_node(key);
    const struct config_key *k;
    char name[2 * NAME_BYTES];

    if (key->type != YAML_SCALAR_NODE)
        return FAIL(r, line, "a key must be a plain word; write \"key: value\"");
    if (key->data.scalar.length >= NAME_BYTES)
        return FAIL(r, line, "unknown key \"%.60s...\"; the ucmd.yaml that ships lists all keys",
                    scalar(key));
    snprintf(name, sizeof(name), "%s%s%s", section, section[0] ? "." : "", scalar(key));
    if (!section[0] && section_find(name) > 0)
        return read_section(r, section_find(name), line, value);
    k = config_key_find(name);
    if (!k || config_section_length(name) != strlen(section))
        return read_unknown(r, line, name, value);
    return read_value(r, k, line, value);
}

static int read_mapping(struct reader *r, const char *section, const yaml_node_t *n)
{
    int rc = 0;

    for (yaml_node_pair_t *p = n->data.mapping.pairs.start;
         rc == 0 && p < n->data.mapping.pairs.top; p++)
        rc = read_pair(r, section, node(r, p->key), node(r, p->value));
    return rc;
}

static int read_document(struct reader *r)
{
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);

    if (!root || is_null(root))
        return 0;
    if (root->type != YAML_MAPPING_NODE)
        return FAIL(r, line_of_node(root), "no keys here; write \"key: value\", one a line");
    return read_mapping(r, "", root);
}

int config_read(struct config *c, const char *path, struct config_error *e)
{
    struct reader r = {.path = path, .c = c, .e = e};
    char *file = strdup(path);
    int rc;

    if (!file)
        return fail_memory(&r);
    free(c->origin.file);
    c->origin.file = file;
    rc = load(&r);
    if (rc == 0)
        rc = check_tokens(&r);
    if (rc == 0)
        rc = parse(&r);
    if (rc == 0)
        rc = read_document(&r);
    yaml_document_delete(&r.document);
    free(r.text);
    return rc;
}
