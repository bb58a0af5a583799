#include "client/ctl/trace_hits.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IDS_MAX (UINT64_C(1) << 27) /* the recorder numbers without gaps */
#define NAMESPACES_MAX 65536u
#define PLACES_MIN (1u << 16)

/* Blocks by last use. `tree` has the tokens of the places (Fenwick). */
struct stack {
    uint32_t *place; /* of each id: 1 + its place; 0: never used */
    uint32_t ids;
    uint32_t *owner, *tokens; /* of each place; no tokens: a later use has another place */
    uint64_t *tree;
    uint32_t places, end;
    uint64_t all;
    uint32_t used; /* ids that have a place */
    uint32_t block_tokens[NAMESPACES_MAX];
};

static void tree_add(struct stack *s, uint32_t place, uint64_t tokens)
{
    for (uint32_t i = place + 1; i <= s->places; i += i & -i)
        s->tree[i - 1] += tokens; /* modulo 2^64: a negative one subtracts */
    s->all += tokens;
}

static uint64_t tree_until(const struct stack *s, uint32_t place)
{
    uint64_t sum = 0;

    for (uint32_t i = place + 1; i > 0; i &= i - 1)
        sum += s->tree[i - 1];
    return sum;
}

/* Closes the gaps, in at least twice as many places as are taken. */
static int stack_compact(struct stack *s)
{
    uint32_t places = s->used < PLACES_MIN / 2 ? PLACES_MIN : 2 * s->used, from = s->end, to = 0;
    uint32_t *owner = calloc(places, sizeof *owner), *tokens = calloc(places, sizeof *tokens);
    uint64_t *tree = calloc(places, sizeof *tree);

    if (owner == NULL || tokens == NULL || tree == NULL) {
        free(owner);
        free(tokens);
        free(tree);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < from; i++)
        if (s->tokens[i] > 0) {
            owner[to] = s->owner[i];
            tokens[to++] = s->tokens[i];
        }
    free(s->owner);
    free(s->tokens);
    free(s->tree);
    s->owner = owner;
    s->tokens = tokens;
    s->tree = tree;
    s->places = places;
    s->end = to;
    s->all = 0;
    for (uint32_t i = 0; i < to; i++) {
        s->place[owner[i]] = i + 1;
        tree_add(s, i, tokens[i]);
    }
    return 0;
}

static int ids_grow(struct stack *s, uint64_t id)
{
    uint32_t ids = s->ids;
    uint32_t *place;

    if (id < s->ids)
        return 0;
    for (ids = ids == 0 ? 1024 : ids; ids <= id;)
        ids *= 2;
    place = realloc(s->place, ids * sizeof *place);
    if (place == NULL)
        return -ENOMEM;
    memset(place + s->ids, 0, (ids - s->ids) * sizeof *place);
    s->place = place;
    s->ids = ids;
    return 0;
}

/* A use of a block. *distance: tokens used since its last use, with its own; 0 for its first. */
static int stack_use(struct stack *s, uint64_t id, uint32_t tokens, uint64_t *distance)
{
    int rc = ids_grow(s, id);

    if (rc == 0 && s->end == s->places)
        rc = stack_compact(s);
    if (rc != 0)
        return rc;
    *distance = 0;
    if (s->place[id] != 0) {
        uint32_t place = s->place[id] - 1;

        *distance = s->all - tree_until(s, place) + tokens;
        tree_add(s, place, -(uint64_t)s->tokens[place]);
        s->tokens[place] = 0;
    } else {
        s->used++;
    }
    s->owner[s->end] = (uint32_t)id;
    s->tokens[s->end] = tokens;
    s->place[id] = s->end + 1;
    tree_add(s, s->end++, tokens);
    return 0;
}

static int distance_add(struct trace_hits *h, uint64_t distance)
{
    if (h->n == h->cap) {
        size_t cap = h->cap ? 2 * h->cap : 4096;
        uint64_t *grown = realloc(h->distance, cap * sizeof *grown);

        if (grown == NULL)
            return -ENOMEM;
        h->distance = grown;
        h->cap = cap;
    }
    h->distance[h->n++] = distance;
    return 0;
}

/* ---- lines ---- */

static uint64_t number(const cJSON *line, const char *name, uint64_t most)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(line, name);

    return cJSON_IsNumber(v) && v->valuedouble >= 1 && v->valuedouble <= (double)most
               ? (uint64_t)v->valuedouble
               : 0;
}

static uint32_t line_tokens(const struct stack *s, const cJSON *line, int n, uint32_t otherwise)
{
    uint64_t ns = number(line, "namespace", NAMESPACES_MAX), input;

    if (ns > 0 && s->block_tokens[ns - 1] > 0)
        return s->block_tokens[ns - 1];
    input = number(line, "input_length", UINT32_MAX);
    return input > 0 && n > 0 ? (uint32_t)((input + (uint64_t)n - 1) / (uint64_t)n) : otherwise;
}

enum line_kind { LINE_CHAIN, LINE_EACH, LINE_DUMP, LINE_KINDS };

static int line_ids(struct stack *s, const cJSON *line, const cJSON *ids, enum line_kind kind,
                    uint32_t otherwise, struct trace_hits *h)
{
    uint32_t tokens = line_tokens(s, line, cJSON_GetArraySize(ids), otherwise);
    uint64_t deepest = 0;
    bool there = true;
    const cJSON *id;

    h->lookups += kind != LINE_DUMP;
    cJSON_ArrayForEach(id, ids) {
        uint64_t distance;
        int rc;

        if (!cJSON_IsNumber(id) || id->valuedouble < 0 || id->valuedouble >= (double)IDS_MAX)
            return -EINVAL;
        rc = stack_use(s, (uint64_t)id->valuedouble, tokens, &distance);
        if (rc != 0)
            return rc;
        if (distance == 0)
            h->tokens += tokens;
        if (kind == LINE_DUMP)
            continue;
        h->blocks++;
        if (kind == LINE_EACH)
            deepest = distance, there = distance > 0;
        else if (distance > deepest)
            deepest = distance;
        there = there && distance > 0;
        if (there && (rc = distance_add(h, deepest)) != 0)
            return rc;
    }
    return 0;
}

static int line_read(struct stack *s, const char *text, uint32_t otherwise, struct trace_hits *h)
{
    static const char *const names[LINE_KINDS] = {"hash_ids", "each_ids", "dumped_ids"};
    cJSON *line = cJSON_Parse(text);
    int rc = cJSON_IsObject(line) ? 0 : -EINVAL;
    uint64_t ns = number(line, "namespace", NAMESPACES_MAX);

    if (rc == 0 && ns > 0 && cJSON_GetObjectItemCaseSensitive(line, "define") != NULL)
        s->block_tokens[ns - 1] = (uint32_t)number(line, "block_tokens", 1u << 20);
    for (int kind = 0; rc == 0 && kind < LINE_KINDS; kind++) {
        const cJSON *ids = cJSON_GetObjectItemCaseSensitive(line, names[kind]);

        if (cJSON_IsArray(ids))
            rc = line_ids(s, line, ids, (enum line_kind)kind, otherwise, h);
    }
    cJSON_Delete(line);
    return rc;
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static int file_read(FILE *f, struct stack *s, uint32_t block_tokens, struct trace_hits *out,
                     uint64_t *line)
{
    char *text = NULL;
    size_t cap = 0;
    int rc = 0;

    while (rc == 0 && getline(&text, &cap, f) > 0) {
        ++*line;
        if (text[strspn(text, " \t\r\n")] != '\0')
            rc = line_read(s, text, block_tokens, out);
    }
    free(text);
    return rc == 0 && ferror(f) ? -EIO : rc;
}

int trace_hits_read(const char *path, uint32_t block_tokens, struct trace_hits *out,
                    char why[TRACE_WHY_BYTES])
{
    struct stack *s = calloc(1, sizeof *s);
    FILE *f = fopen(path, "re");
    uint64_t line = 0;
    int rc;

    *out = (struct trace_hits){0};
    rc = f == NULL ? -errno : s == NULL ? -ENOMEM : file_read(f, s, block_tokens, out, &line);
    if (rc == -EINVAL)
        snprintf(why, TRACE_WHY_BYTES,
                 "%.160s: line %llu is none of what `ucm-bench record` writes", path,
                 (unsigned long long)line);
    else if (rc != 0)
        snprintf(why, TRACE_WHY_BYTES, "%.160s: %s", path, strerror(-rc));
    else if (out->blocks == 0) {
        snprintf(why, TRACE_WHY_BYTES, "%.160s: it has no lookup", path);
        rc = -EINVAL;
    }
    if (rc == 0 && out->n > 0)
        qsort(out->distance, out->n, sizeof *out->distance, by_size);
    if (f != NULL)
        fclose(f);
    if (s != NULL) {
        free(s->place);
        free(s->owner);
        free(s->tokens);
        free(s->tree);
    }
    free(s);
    return rc;
}

void trace_hits_free(struct trace_hits *h)
{
    free(h->distance);
    *h = (struct trace_hits){0};
}

uint32_t trace_hits_permille(const struct trace_hits *h, uint64_t tokens)
{
    size_t low = 0, high = h->n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (h->distance[middle] <= tokens)
            low = middle + 1;
        else
            high = middle;
    }
    return h->blocks > 0 ? (uint32_t)((low * 1000 + h->blocks / 2) / h->blocks) : 0;
}

uint64_t trace_hits_tokens(const struct trace_hits *h, unsigned percent)
{
    size_t at = (h->n * percent + 99) / 100;

    return h->n > 0 ? h->distance[at > 0 ? at - 1 : 0] : 0;
}
