#include "client/ctl/import.h"

#include "client/ctl/ctl.h"
#include "proto/proto.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define LINES_MAX 512 /* scalars of a file; it has some twenty */
#define DEPTH_MAX 8
#define NAME_BYTES 128
#define VALUE_BYTES 1024

/* One "key: value" of the file: the key with those around it, but for the two that every file has. */
struct line {
    unsigned number;
    char name[NAME_BYTES], value[VALUE_BYTES];
    bool used;
};

struct import {
    struct line *line; /* LINES_MAX */
    unsigned n;
    bool cut; /* there were more */
};

/* ---- the file ---- */

static void line_add(struct import *im, const char *name, const char *value, size_t number)
{
    struct line *l;

    if (im->n == LINES_MAX) {
        im->cut = true;
        return;
    }
    l = &im->line[im->n++];
    l->number = (unsigned)number + 1;
    snprintf(l->name, sizeof l->name, "%s", name);
    snprintf(l->value, sizeof l->value, "%s", value);
    proto_clean(l->name);
    proto_clean(l->value);
}

static const char *scalar(const yaml_node_t *node)
{
    return node && node->type == YAML_SCALAR_NODE ? (const char *)node->data.scalar.value : NULL;
}

/* A list of texts as one, as UCM itself writes several backends. False: it holds something else. */
static bool list_join(yaml_document_t *d, const yaml_node_t *node, char out[VALUE_BYTES])
{
    size_t n = 0;

    out[0] = '\0';
    for (yaml_node_item_t *i = node->data.sequence.items.start; i < node->data.sequence.items.top;
         i++) {
        const char *text = scalar(yaml_document_get_node(d, *i));

        if (!text)
            return false;
        if (n < VALUE_BYTES)
            n += (size_t)snprintf(out + n, VALUE_BYTES - n, "%s%s", n > 0 ? ":" : "", text);
    }
    return true;
}

static void node_walk(struct import *im, yaml_document_t *d, const yaml_node_t *node,
                      const char *name, unsigned depth);

static void mapping_walk(struct import *im, yaml_document_t *d, const yaml_node_t *node,
                         const char *around, unsigned depth)
{
    for (yaml_node_pair_t *p = node->data.mapping.pairs.start; p < node->data.mapping.pairs.top;
         p++) {
        const yaml_node_t *key = yaml_document_get_node(d, p->key);
        const char *word = scalar(key);
        char name[NAME_BYTES];

        if (!word)
            continue;
        if (strcmp(word, "ucm_connectors") == 0 || strcmp(word, "ucm_connector_config") == 0)
            snprintf(name, sizeof name, "%s", around);
        else
            snprintf(name, sizeof name, "%s%s%s", around, around[0] ? "." : "", word);
        node_walk(im, d, yaml_document_get_node(d, p->value), name, depth);
    }
}

/* Aliases may make a document as deep or as large as they like: both are bounded. */
static void node_walk(struct import *im, yaml_document_t *d, const yaml_node_t *node,
                      const char *name, unsigned depth)
{
    char joined[VALUE_BYTES];

    if (!node || depth == DEPTH_MAX || im->cut) {
        im->cut |= depth == DEPTH_MAX;
        return;
    }
    if (node->type == YAML_MAPPING_NODE) {
        mapping_walk(im, d, node, name, depth + 1);
    } else if (node->type == YAML_SCALAR_NODE) {
        line_add(im, name, scalar(node), node->start_mark.line);
    } else if (list_join(d, node, joined)) {
        line_add(im, name, joined, node->start_mark.line);
    } else {
        for (yaml_node_item_t *i = node->data.sequence.items.start;
             i < node->data.sequence.items.top; i++)
            node_walk(im, d, yaml_document_get_node(d, *i), name, depth + 1);
    }
}

static int file_read(struct import *im, const char *path)
{
    FILE *f = fopen(path, "re");
    yaml_parser_t parser;
    yaml_document_t d;
    int rc = CTL_OK;

    if (!f)
        return ctl_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    if (!yaml_parser_initialize(&parser)) {
        fclose(f);
        return ctl_fail(CTL_ERROR, "memory ran out");
    }
    yaml_parser_set_input_file(&parser, f);
    if (!yaml_parser_load(&parser, &d)) {
        rc = ctl_fail(CTL_ERROR, "%s:%zu: %s", path, parser.problem_mark.line + 1,
                      parser.problem ? parser.problem : "not YAML");
    } else {
        node_walk(im, &d, yaml_document_get_root_node(&d), "", 0);
        yaml_document_delete(&d);
    }
    yaml_parser_delete(&parser);
    fclose(f);
    return rc;
}

/* ---- what has a counterpart ---- */

/* The first line of this name, or NULL; the others stay for the comments. */
static struct line *line_take(struct import *im, const char *name)
{
    for (unsigned i = 0; i < im->n; i++)
        if (strcmp(im->line[i].name, name) == 0 && !im->line[i].used)
            return &im->line[i];
    return NULL;
}

/* A whole number from 1 on; 0: it is none. */
static unsigned long long number_of(const struct line *l)
{
    if (!l || l->value[0] == '\0' || strlen(l->value) > 9 ||
        strspn(l->value, "0123456789") != strlen(l->value))
        return 0;
    return strtoull(l->value, NULL, 10);
}

struct counterpart {
    const char *section, *name, *key, *unit, *why;
    unsigned long long min, max; /* of ucmd's key, which takes the nearest; max 0: no bound */
};

static const struct counterpart numbers[] = {
    {"arena", "cache_buffer_capacity_gb", "size", "GiB",
     "one arena for all engines of the host: where each had a buffer, add them up", 1, 0},
    {"share", "posix_data_trans_concurrency", "threads", "", "for each folder, 2 to 256", 2, 256},
    {"share", "timeout_ms", "deadline", "ms", "of one read or write on a root, 10 ms to 10 min", 10,
     600000},
    {"share", "posix_gc_check_interval_sec", "collect", "s",
     "from one collection to the next, at most a day", 1, 86400},
};
#define NUMBERS (sizeof numbers / sizeof numbers[0])

static unsigned long long within(unsigned long long v, const struct counterpart *c)
{
    if (v < c->min)
        return c->min;
    return c->max > 0 && v > c->max ? c->max : v;
}

static void print_numbers(struct import *im, const char *section)
{
    for (size_t i = 0; i < NUMBERS; i++) {
        const struct counterpart *c = &numbers[i];
        struct line *l = strcmp(c->section, section) == 0 ? line_take(im, c->name) : NULL;

        if (number_of(l) == 0)
            continue;
        printf("  # line %u, %s; %s\n  %s: %llu%s\n", l->number, l->name, c->why, c->key,
               within(number_of(l), c), c->unit);
        l->used = true;
    }
}

static bool has_numbers(struct import *im, const char *section)
{
    for (size_t i = 0; i < NUMBERS; i++)
        if (strcmp(numbers[i].section, section) == 0 &&
            number_of(line_take(im, numbers[i].name)) > 0)
            return true;
    return false;
}

static void print_quoted(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '"' || text[i] == '\\')
            putchar('\\');
        putchar(text[i]);
    }
}

/* "/a:/b" as a list; each gets its part of the capacity. */
static void print_roots(struct line *roots, struct line *capacity)
{
    unsigned long long n = 1, gib = number_of(capacity);

    for (const char *p = roots->value; (p = strchr(p, ':')); p++)
        n++;
    printf("  # line %u, %s%s\n  roots: [", roots->number, roots->name,
           gib > 0 ? ", with posix_capacity_gb" : "");
    for (const char *p = roots->value; *p; p += p[0] == ':') {
        size_t bytes = strcspn(p, ":");

        printf("%s\"", p > roots->value ? ", " : "");
        print_quoted(p, bytes);
        if (gib >= n)
            printf(" capacity=%lluGiB", gib / n);
        printf("\"");
        p += bytes;
    }
    printf("]\n");
    roots->used = true;
    if (gib >= n)
        capacity->used = true;
}

/* ---- what has none ---- */

static const struct {
    const char *name, *why;
} others[] = {
    {"ucm_connector_name",
     "the connector of ucmclient is named in the engine's kv-transfer-config"},
    {"store_pipeline", "DRAM, then NVMe if nvme.paths names a disk, then share.roots"},
    {"io_direct", "NVMe is always read and written directly; a root as its file system does it"},
    {"use_direct", "NVMe is always read and written directly; a root as its file system does it"},
    {"use_gdr", "the daemon copies by the GPU's engines or a kernel, see copy.strategy"},
    {"share_buffer_enable", "all engines share the daemon's DRAM"},
    {"posix_io_engine", "nvme.io is that of local disks; roots have threads"},
    {"posix_capacity_gb", "no number of GiB from 1 on for each root: roots have no bound"},
    {"store_health.enabled", "disks and roots are always checked, and set aside when they fail"},
    {"enable_event_sync", "a dump always waits for the worker's event"},
    {"use_layerwise", "\"layerwise\" in the engine's kv_connector_extra_config"},
    {"load_tokens_threshold", "\"min_load_tokens\" in the engine's kv_connector_extra_config"},
    {"enable_metrics", "always on: see metrics.socket and metrics.listen"},
    {"metrics_config_path", "always on: see metrics.socket and metrics.listen"},
    {"enable_record_traces", "'ucmctl trace' writes what requests wait for"},
    {"load_only_first_rank", "each rank loads its own part; with MLA all load one"},
};

static const char *why_none(const struct line *l)
{
    for (size_t i = 0; i < NUMBERS; i++)
        if (strcmp(numbers[i].name, l->name) == 0)
            return "no whole number from 1 on, or given before";
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strcmp(others[i].name, l->name) == 0)
            return others[i].why;
    if (strcmp(l->name, "storage_backends") == 0)
        return "no absolute path, or given before";
    if (strncmp(l->name, "ucm_sparse_config", strlen("ucm_sparse_config")) == 0)
        return "the engine chooses digests and selections, see docs/retrieval.md";
    return "ucmd has nothing like it";
}

static void print_others(const struct import *im)
{
    bool any = false;

    for (unsigned i = 0; i < im->n; i++) {
        const struct line *l = &im->line[i];

        if (l->used)
            continue;
        if (!any)
            printf("\n# Without a counterpart here:\n");
        any = true;
        printf("# line %u, %s: %.80s: %s\n", l->number, l->name, l->value, why_none(l));
    }
    if (im->cut)
        printf("# and more, which was not read: the file is too long or too deep\n");
}

static void print_all(struct import *im, const char *path)
{
    struct line *roots = line_take(im, "storage_backends");
    char name[256];

    snprintf(name, sizeof name, "%s", path);
    proto_clean(name);
    printf("# From %s, by 'ucmctl config --import'. 'ucmd --check --config FILE' checks it.\n",
           name);
    if (roots && roots->value[0] != '/')
        roots = NULL;
    if (has_numbers(im, "arena")) {
        printf("arena:\n");
        print_numbers(im, "arena");
    }
    if (roots || has_numbers(im, "share"))
        printf("share:\n");
    if (roots)
        print_roots(roots, line_take(im, "posix_capacity_gb"));
    print_numbers(im, "share");
    print_others(im);
}

int import_print(const char *path)
{
    struct import im = {.line = calloc(LINES_MAX, sizeof(struct line))};
    int rc = im.line ? file_read(&im, path) : ctl_fail(CTL_ERROR, "memory ran out");

    if (rc == CTL_OK)
        print_all(&im, path);
    free(im.line);
    return rc;
}
