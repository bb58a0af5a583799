#include "client/bench/workload.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <openssl/sha.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define LINE_BYTES (1u << 20)
#define MAX_ID 9007199254740992.0 /* 2^53: what JSON numbers carry exactly */
#define MAX_CONVERSATIONS 65536
#define PROMPT_IDS (UINT64_C(1) << 52) /* prompts' ids lie above, conversations' below */
#define IDS_EACH_BITS 20
#define TRACE_VERSION 1
#define NO_REQUEST 2

struct conversation {
    uint64_t number;
    uint32_t prompt, turns_left, blocks;
};

struct workload {
    uint64_t *ids; /* WORKLOAD_MAX_BLOCKS */
    /* a trace */
    FILE *file;
    char *path, *line;
    size_t line_cap;
    uint64_t line_number;
    bool recorded; /* by ucm-bench record: has lines that are no requests */
    /* generated */
    struct workload_shape shape;
    struct conversation *conversation;
    uint64_t random, next_number, now_ms;
};

const struct workload_shape workload_default = {
    .conversations = 32,
    .turns = 8,
    .prompts = 3,
    .prompt_blocks = 12,
    .turn_blocks = 4,
    .seed = 1,
};

static int fail(struct workload_error *e, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int fail(struct workload_error *e, int code, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    vsnprintf(e->text, sizeof e->text, format, ap);
    va_end(ap);
    return code;
}

static struct workload *workload_new(void)
{
    struct workload *w = calloc(1, sizeof *w);

    if (w == NULL)
        return NULL;
    w->ids = calloc(WORKLOAD_MAX_BLOCKS, sizeof *w->ids);
    if (w->ids == NULL) {
        free(w);
        return NULL;
    }
    return w;
}

void workload_free(struct workload *w)
{
    if (w == NULL)
        return;
    if (w->file != NULL)
        fclose(w->file);
    free(w->path);
    free(w->line);
    free(w->conversation);
    free(w->ids);
    free(w);
}

uint64_t workload_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* ---- traces ---- */

int workload_trace(const char *path, struct workload **out, struct workload_error *e)
{
    struct workload *w = workload_new();
    int rc;

    if (w == NULL)
        return fail(e, -ENOMEM, "memory ran out");
    w->path = strdup(path);
    w->file = fopen(path, "re");
    if (w->path == NULL || w->file == NULL) {
        rc = -errno;
        fail(e, rc, "%s: %s", path, strerror(errno));
        workload_free(w);
        return rc;
    }
    *out = w;
    return 0;
}

static int trace_bad(const struct workload *w, struct workload_error *e, const char *what)
{
    return fail(e, -EINVAL, "%s:%" PRIu64 ": %s", w->path, w->line_number, what);
}

static bool whole_number(const cJSON *j, uint64_t *out)
{
    double v;

    if (!cJSON_IsNumber(j))
        return false;
    v = j->valuedouble;
    if (!(v >= 0 && v <= MAX_ID) || floor(v) < v)
        return false;
    *out = (uint64_t)v;
    return true;
}

/* 1: *out is a request; NO_REQUEST; -errno. */
static int trace_parse(struct workload *w, const cJSON *j, struct workload_request *out,
                       struct workload_error *e)
{
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(j, "hash_ids"), *id;
    const cJSON *at = cJSON_GetObjectItemCaseSensitive(j, "timestamp");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(j, "ucm_trace");
    uint64_t timestamp = 0;
    uint32_t n = 0;

    if (cJSON_IsNumber(version)) {
        if (version->valueint != TRACE_VERSION)
            return trace_bad(w, e, "a trace of another version than 1");
        w->recorded = true;
        return NO_REQUEST;
    }
    if (w->recorded && cJSON_IsObject(j) && ids == NULL)
        return NO_REQUEST; /* docs/capacity.md: a definition, a dump, what was lost, the end */
    if (!cJSON_IsArray(ids))
        return trace_bad(w, e, "wanted a JSON object with an array \"hash_ids\"");
    if (at != NULL && !whole_number(at, &timestamp))
        return trace_bad(w, e, "\"timestamp\" must be a whole number of milliseconds");
    cJSON_ArrayForEach(id, ids) {
        if (n == WORKLOAD_MAX_BLOCKS)
            return trace_bad(w, e, "more than 16384 \"hash_ids\"");
        if (!whole_number(id, &w->ids[n]))
            return trace_bad(w, e, "\"hash_ids\" must be whole numbers from 0 to 2^53");
        n++;
    }
    *out = (struct workload_request){.timestamp_ms = timestamp, .n_ids = n, .ids = w->ids};
    return 1;
}

/* The same of the next line; 0: there is none. */
static int trace_line(struct workload *w, struct workload_request *out, struct workload_error *e)
{
    ssize_t n;
    cJSON *j;
    int rc;

    do {
        errno = 0;
        n = getline(&w->line, &w->line_cap, w->file);
        if (n < 0 && (ferror(w->file) || errno == ENOMEM))
            return fail(e, -EIO, "%s: %s", w->path, strerror(errno));
        if (n < 0)
            return 0;
        w->line_number++;
    } while (strspn(w->line, " \t\r\n") == (size_t)n);
    if (n > (ssize_t)LINE_BYTES)
        return trace_bad(w, e, "a line of more than 1 MiB");
    j = cJSON_ParseWithLength(w->line, (size_t)n);
    if (j == NULL)
        return trace_bad(w, e, "not JSON");
    rc = trace_parse(w, j, out, e);
    cJSON_Delete(j);
    return rc;
}

static int trace_next(struct workload *w, struct workload_request *out, struct workload_error *e)
{
    int rc;

    do
        rc = trace_line(w, out, e);
    while (rc == NO_REQUEST);
    return rc;
}

/* ---- generated ---- */

static void conversation_begin(struct workload *w, struct conversation *c)
{
    c->number = w->next_number++;
    c->prompt = (uint32_t)(workload_random(&w->random) % w->shape.prompts);
    c->turns_left = w->shape.turns;
    c->blocks = 0;
}

static int shape_check(const struct workload_shape *s, struct workload_error *e)
{
    uint64_t longest = s->prompt_blocks + (uint64_t)s->turns * 2 * s->turn_blocks;

    if (s->conversations < 1 || s->conversations > MAX_CONVERSATIONS || s->turns < 1 ||
        s->prompts < 1 || s->turn_blocks < 1)
        return fail(
            e, -EINVAL,
            "wanted 1 to 65536 conversations and at least one turn, prompt and block a turn");
    if (s->turns > WORKLOAD_MAX_BLOCKS || longest > WORKLOAD_MAX_BLOCKS)
        return fail(e, -EINVAL, "a conversation could grow to %" PRIu64 " blocks; the most is %d",
                    longest, WORKLOAD_MAX_BLOCKS);
    return 0;
}

int workload_generate(const struct workload_shape *shape, struct workload **out,
                      struct workload_error *e)
{
    int rc = shape_check(shape, e);
    struct workload *w;

    if (rc < 0)
        return rc;
    w = workload_new();
    if (w != NULL)
        w->conversation = calloc(shape->conversations, sizeof *w->conversation);
    if (w == NULL || w->conversation == NULL) {
        workload_free(w);
        return fail(e, -ENOMEM, "memory ran out");
    }
    w->shape = *shape;
    w->random = shape->seed;
    for (uint32_t i = 0; i < shape->conversations; i++)
        conversation_begin(w, &w->conversation[i]);
    *out = w;
    return 0;
}

static void generated_next(struct workload *w, struct workload_request *out)
{
    const struct workload_shape *s = &w->shape;
    struct conversation *c = &w->conversation[workload_random(&w->random) % s->conversations];
    uint32_t n = 0;

    c->blocks += 1 + (uint32_t)(workload_random(&w->random) % (2 * s->turn_blocks - 1));
    for (uint32_t i = 0; i < s->prompt_blocks; i++)
        w->ids[n++] = PROMPT_IDS + ((uint64_t)c->prompt << IDS_EACH_BITS) + i;
    for (uint32_t i = 0; i < c->blocks; i++)
        w->ids[n++] = (c->number << IDS_EACH_BITS) + i;
    w->now_ms += workload_random(&w->random) % 100;
    *out = (struct workload_request){.timestamp_ms = w->now_ms, .n_ids = n, .ids = w->ids};
    if (--c->turns_left == 0)
        conversation_begin(w, c);
}

int workload_next(struct workload *w, struct workload_request *out, struct workload_error *e)
{
    if (w->file != NULL)
        return trace_next(w, out, e);
    generated_next(w, out);
    return 1;
}

/* ---- keys ---- */

void workload_key(uint64_t id, uint8_t key[WORKLOAD_KEY_BYTES])
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(id >> (8 * i));
    SHA256(bytes, sizeof bytes, key);
}

void workload_keys(const uint64_t *ids, uint32_t n, uint8_t *keys)
{
    for (uint32_t i = 0; i < n; i++)
        workload_key(ids[i], keys + (size_t)i * WORKLOAD_KEY_BYTES);
}
