/* serve: what requests to an engine's OpenAI-compatible endpoint wait for, by the length of the
 * prompt, by how many are under way, and by the share of the prompt that was served before.
 *
 * A cell is one of each. In a cell all prompts begin with the same tokens, which a request that is
 * not counted sends first, and end with tokens that nobody else sends. With two endpoints each
 * round measures one after the other, and which goes first changes. */
#include "client/bench/bench.h"
#include "client/bench/completions.h"
#include "client/bench/workload.h"

#include "client/ctl/table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ENDPOINTS 2
#define LIST_MAX 16
#define AT_ONCE_MAX 1024
#define TOKENS_MAX 1000000
#define MODEL_BYTES 256
/* Ids that vocabularies of language models have, beyond special ones. */
#define FIRST_ID 1000
#define IDS 20000

struct list_of {
    uint64_t v[LIST_MAX];
    uint32_t n;
};

/* What one endpoint did in one cell. */
struct served {
    struct samples ttft_ms, tpot_ms;
    uint64_t ok, timeouts, refused, broken, prompt_tokens, tokens;
    double seconds;
    char error[160]; /* the last one */
};

struct cell {
    uint64_t tokens, at_once, hits;
    uint32_t number;
    struct served served[ENDPOINTS];
};

struct serve {
    const struct args *args;
    struct completions *http;
    const char *url[ENDPOINTS];
    char model[ENDPOINTS][MODEL_BYTES];
    uint32_t endpoints;
    uint64_t seed;
    struct list_of tokens, at_once, hits;
    char *body; /* of the present request */
    size_t body_cap;
    struct table table;
    cJSON *cells;
    bool failed; /* a cell without one whole answer */
    struct progress progress;
};

/* ---- lists of numbers ---- */

static int list_read(const struct args *a, const char *name, uint64_t min, uint64_t max,
                     struct list_of *out)
{
    const char *p = args_text(a, name);
    char *end;

    for (out->n = 0; out->n < LIST_MAX; p = end + 1) {
        uint64_t v = strtoull(p, &end, 10);

        if (end == p || (*end != ',' && *end != '\0') || v < min || v > max)
            break;
        out->v[out->n++] = v;
        if (*end == '\0')
            return 0;
    }
    return program_usage_error(a, "--%s: wanted up to %d numbers from %llu to %llu, with commas",
                               name, LIST_MAX, (unsigned long long)min, (unsigned long long)max);
}

/* ---- prompts ---- */

static bool body_room(struct serve *s, uint64_t tokens)
{
    size_t cap = 1024 + MODEL_BYTES * 6 + tokens * 8;
    char *body = cap > s->body_cap ? realloc(s->body, cap) : s->body;

    if (body == NULL)
        return false;
    s->body = body;
    s->body_cap = cap > s->body_cap ? cap : s->body_cap;
    return true;
}

/* As ids, or as words that most vocabularies have as one token each. */
static size_t token_write(char *out, uint64_t random, bool text, bool first)
{
    static const char *const words[] = {
        "time",    "year",    "people",   "way",    "day",        "man",    "thing",   "woman",
        "life",    "child",   "world",    "school", "state",      "family", "student", "group",
        "country", "problem", "hand",     "part",   "place",      "case",   "week",    "company",
        "system",  "program", "question", "work",   "government", "number", "night",   "point"};

    if (text)
        return (size_t)sprintf(out, "%s%.7s", first ? "" : " ", words[random % 32]);
    return (size_t)sprintf(out, "%s%llu", first ? "" : ",",
                           (unsigned long long)(FIRST_ID + random % IDS));
}

/* The first `shared` tokens are the cell's, the others this request's alone. number: 0 for the request
 * before the others, which is not counted. */
static int body_write(struct serve *s, const struct cell *c, uint32_t e, uint64_t number)
{
    bool text = args_given(s->args, "text");
    uint64_t shared = c->tokens * c->hits / 100, random = s->seed;
    uint64_t common = workload_random(&random) ^ ((uint64_t)c->number << 32) ^ e;
    uint64_t own = workload_random(&random) ^ common ^ (number << 16);
    cJSON *model;
    char *quoted;
    size_t n;

    if (!body_room(s, c->tokens))
        return -1;
    model = cJSON_CreateString(s->model[e]);
    quoted = model ? cJSON_PrintUnformatted(model) : NULL;
    cJSON_Delete(model);
    if (quoted == NULL)
        return -1;
    n = (size_t)snprintf(s->body, s->body_cap,
                         "{\"model\":%s,\"max_tokens\":%llu,\"temperature\":0,\"stream\":true,"
                         "\"stream_options\":{\"include_usage\":true}%s,\"prompt\":%s",
                         quoted, (unsigned long long)args_number(s->args, "output"),
                         args_given(s->args, "ignore-eos") ? ",\"ignore_eos\":true" : "",
                         text ? "\"" : "[");
    cJSON_free(quoted);
    for (uint64_t i = 0; i < c->tokens; i++)
        n += token_write(s->body + n, workload_random(i < shared ? &common : &own), text, i == 0);
    strcpy(s->body + n, text ? "\"}" : "]}");
    return 0;
}

/* ---- measuring ---- */

static void completion_count(struct served *v, const struct completion *c)
{
    if (c->outcome != COMPLETION_OK)
        memcpy(v->error, c->error, sizeof v->error);
    switch (c->outcome) {
    case COMPLETION_TIMEOUT:
        v->timeouts++;
        return;
    case COMPLETION_REFUSED:
        v->refused++;
        return;
    case COMPLETION_BROKEN:
        v->broken++;
        return;
    case COMPLETION_OK:
        break;
    }
    v->ok++;
    v->tokens += c->tokens;
    v->prompt_tokens += c->prompt_tokens;
    samples_add(&v->ttft_ms, (double)(c->first_ns - c->start_ns) / 1e6);
    if (c->tokens > 1)
        samples_add(&v->tpot_ms, (double)(c->last_ns - c->first_ns) / 1e6 / (c->tokens - 1));
}

static void progress(struct serve *s, const struct cell *c, uint32_t e)
{
    if (progress_due(&s->progress))
        progress_show(&s->progress, "%llu tokens, %llu at once, %llu %% shared: %llu answers of %s",
                      (unsigned long long)c->tokens, (unsigned long long)c->at_once,
                      (unsigned long long)c->hits, (unsigned long long)c->served[e].ok, s->url[e]);
}

/* One round at one endpoint: at_once requests are under way until `requests` have been sent. */
static int round_run(struct serve *s, struct cell *c, uint32_t e, uint64_t round)
{
    uint64_t requests = args_number(s->args, "requests"), sent = 0, start = clock_ns();
    struct completion done;
    uint64_t under_way = 0;

    while (sent < requests || under_way > 0) {
        if (sent < requests && under_way < c->at_once) {
            if (body_write(s, c, e, 1 + round * requests + sent) != 0 ||
                completions_begin(s->http, s->url[e], s->body) != 0)
                return program_fail(BENCH_FAILED, "memory ran out");
            sent++;
            under_way++;
            continue;
        }
        if (completions_next(s->http, &done) != 1)
            return program_fail(BENCH_FAILED, "libcurl failed");
        under_way--;
        completion_count(&c->served[e], &done);
        progress(s, c, e);
    }
    c->served[e].seconds += (double)(clock_ns() - start) / 1e9;
    return 0;
}

/* Sends what the cell's prompts share, so that it is stored. How it ends does not matter. */
static int cell_warm(struct serve *s, struct cell *c, uint32_t e)
{
    struct completion done;

    if (body_write(s, c, e, 0) != 0 || completions_begin(s->http, s->url[e], s->body) != 0)
        return program_fail(BENCH_FAILED, "memory ran out");
    (void)completions_next(s->http, &done);
    return 0;
}

static int cell_run(struct serve *s, struct cell *c)
{
    int rc = 0;

    for (uint32_t e = 0; rc == 0 && e < s->endpoints; e++)
        rc = cell_warm(s, c, e);
    for (uint64_t round = 0; rc == 0 && round < args_number(s->args, "rounds"); round++)
        for (uint32_t i = 0; rc == 0 && i < s->endpoints; i++)
            rc = round_run(s, c, (uint32_t)((round + i) % s->endpoints), round);
    return rc;
}

/* ---- reporting ---- */

static double mean(const struct samples *v)
{
    double sum = 0;

    for (size_t i = 0; i < v->n; i++)
        sum += v->v[i];
    return v->n > 0 ? sum / (double)v->n : 0;
}

static void json_samples(cJSON *o, const char *name, struct samples *v)
{
    cJSON *j = cJSON_AddObjectToObject(o, name);

    cJSON_AddNumberToObject(j, "mean", mean(v));
    cJSON_AddNumberToObject(j, "p50", samples_at(v, 0.5));
    cJSON_AddNumberToObject(j, "p99", samples_at(v, 0.99));
}

static double rate(const struct served *v)
{
    return v->seconds > 0 ? (double)v->ok / v->seconds : 0;
}

static void cell_json(struct serve *s, struct cell *c, uint32_t e)
{
    struct served *v = &c->served[e];
    cJSON *o = cJSON_CreateObject();

    cJSON_AddStringToObject(o, "endpoint", s->url[e]);
    cJSON_AddNumberToObject(o, "tokens", (double)c->tokens);
    cJSON_AddNumberToObject(o, "concurrency", (double)c->at_once);
    cJSON_AddNumberToObject(o, "hits_percent", (double)c->hits);
    cJSON_AddNumberToObject(o, "ok", (double)v->ok);
    cJSON_AddNumberToObject(o, "timeouts", (double)v->timeouts);
    cJSON_AddNumberToObject(o, "errors", (double)(v->refused + v->broken));
    cJSON_AddNumberToObject(o, "broken_streams", (double)v->broken);
    cJSON_AddStringToObject(o, "last_error", v->error);
    cJSON_AddNumberToObject(o, "seconds", v->seconds);
    cJSON_AddNumberToObject(o, "requests_per_second", rate(v));
    cJSON_AddNumberToObject(o, "prompt_tokens", (double)v->prompt_tokens);
    cJSON_AddNumberToObject(o, "output_tokens", (double)v->tokens);
    json_samples(o, "ttft_ms", &v->ttft_ms);
    json_samples(o, "tpot_ms", &v->tpot_ms);
    cJSON_AddItemToArray(s->cells, o);
}

static void cell_names(struct table *t, const struct cell *c)
{
    table_cell(t, "%llu", (unsigned long long)c->tokens);
    table_cell(t, "%llu", (unsigned long long)c->at_once);
    table_cell(t, "%llu %%", (unsigned long long)c->hits);
}

static void cell_row(struct serve *s, struct cell *c, uint32_t e)
{
    struct served *v = &c->served[e];
    struct samples *both[2] = {&v->ttft_ms, &v->tpot_ms};

    cell_names(&s->table, c);
    table_cell(&s->table, "%c", 'A' + (int)e);
    for (int i = 0; i < 2; i++) {
        table_cell(&s->table, both[i]->n ? "%.1f" : "-", mean(both[i]));
        table_cell(&s->table, both[i]->n ? "%.1f" : "-", samples_at(both[i], 0.5));
        table_cell(&s->table, both[i]->n ? "%.1f" : "-", samples_at(both[i], 0.99));
    }
    table_cell(&s->table, "%.2f", rate(v));
    table_cell(&s->table, "%llu", (unsigned long long)(v->refused + v->broken));
    table_cell(&s->table, "%llu", (unsigned long long)v->timeouts);
}

static void ratio_cell(struct table *t, double a, double b)
{
    table_cell(t, a > 0 && b > 0 ? "%.2f" : "-", a > 0 ? b / a : 0);
}

static void cell_ratio(struct serve *s, struct cell *c)
{
    struct served *a = &c->served[0], *b = &c->served[1];
    struct samples *of_a[2] = {&a->ttft_ms, &a->tpot_ms}, *of_b[2] = {&b->ttft_ms, &b->tpot_ms};

    cell_names(&s->table, c);
    table_cell(&s->table, "B/A");
    for (int i = 0; i < 2; i++) {
        ratio_cell(&s->table, mean(of_a[i]), mean(of_b[i]));
        ratio_cell(&s->table, samples_at(of_a[i], 0.5), samples_at(of_b[i], 0.5));
        ratio_cell(&s->table, samples_at(of_a[i], 0.99), samples_at(of_b[i], 0.99));
    }
    ratio_cell(&s->table, rate(a), rate(b));
    table_cell(&s->table, "%s", "");
    table_cell(&s->table, "%s", "");
}

static void cell_report(struct serve *s, struct cell *c)
{
    for (uint32_t e = 0; e < s->endpoints; e++) {
        struct served *v = &c->served[e];

        if (v->ok == 0)
            s->failed = true;
        if (v->error[0] != '\0')
            fprintf(stderr, "%s: %s: %s\n", program_name(), s->url[e], v->error);
        if (s->cells)
            cell_json(s, c, e);
        else
            cell_row(s, c, e);
    }
    if (s->endpoints == 2 && !s->cells)
        cell_ratio(s, c);
    for (uint32_t e = 0; e < s->endpoints; e++) {
        samples_free(&c->served[e].ttft_ms);
        samples_free(&c->served[e].tpot_ms);
    }
}

static int report_json(struct serve *s)
{
    cJSON *j = cJSON_CreateObject(), *urls;
    char *text;

    cJSON_AddStringToObject(j, "command", "serve");
    cJSON_AddNumberToObject(j, "seed", (double)s->seed);
    urls = cJSON_AddArrayToObject(j, "endpoints");
    for (uint32_t e = 0; e < s->endpoints; e++) {
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "url", s->url[e]);
        cJSON_AddStringToObject(o, "model", s->model[e]);
        cJSON_AddItemToArray(urls, o);
    }
    cJSON_AddItemToObject(j, "cells", s->cells);
    text = cJSON_Print(j);
    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(j);
    return text ? 0 : program_fail(BENCH_FAILED, "memory ran out");
}

static int report(struct serve *s)
{
    int rc;

    if (s->cells)
        return report_json(s);
    for (uint32_t e = 0; e < s->endpoints; e++)
        printf("%c: %s, %s\n", 'A' + (int)e, s->url[e], s->model[e]);
    printf("seed %llu; times in milliseconds: to the first token, and for each further one\n\n",
           (unsigned long long)s->seed);
    rc = table_end(&s->table, stdout);
    return rc == 0 ? 0 : program_fail(BENCH_FAILED, "memory ran out");
}

/* ---- the command ---- */

static int cells_run(struct serve *s)
{
    uint32_t number = 0;
    int rc = 0;

    for (uint32_t t = 0; t < s->tokens.n; t++)
        for (uint32_t n = 0; n < s->at_once.n; n++)
            for (uint32_t h = 0; h < s->hits.n && rc == 0; h++) {
                struct cell *c = calloc(1, sizeof *c);

                if (c == NULL)
                    return program_fail(BENCH_FAILED, "memory ran out");
                c->tokens = s->tokens.v[t];
                c->at_once = s->at_once.v[n];
                c->hits = s->hits.v[h];
                c->number = ++number;
                rc = cell_run(s, c);
                progress_end(&s->progress);
                cell_report(s, c);
                free(c);
            }
    return rc;
}

static int serve_open(struct serve *s)
{
    const char *named = args_text(s->args, "model");
    char error[400];

    s->http =
        completions_new(AT_ONCE_MAX, args_number(s->args, "timeout"), getenv("OPENAI_API_KEY"));
    if (s->http == NULL)
        return program_fail(BENCH_FAILED, "memory ran out");
    for (uint32_t e = 0; e < s->endpoints; e++) {
        if (named)
            snprintf(s->model[e], MODEL_BYTES, "%s", named);
        else if (completions_model(s->http, s->url[e], s->model[e], MODEL_BYTES, error,
                                   sizeof error) != 0)
            return program_fail(BENCH_FAILED, "%s", error);
    }
    return 0;
}

static int serve_run(struct serve *s)
{
    static const char *const titles[] = {">TOKENS", ">AT ONCE", ">SHARED",    "",     ">TTFT MEAN",
                                         ">P50",    ">P99",     ">TPOT MEAN", ">P50", ">P99",
                                         ">REQ/S",  ">ERRORS",  ">TIMEOUTS",  NULL};
    int rc = serve_open(s);

    if (rc != 0)
        return rc;
    if (args_given(s->args, "json"))
        s->cells = cJSON_CreateArray();
    else
        table_begin(&s->table, titles);
    rc = cells_run(s);
    if (rc == 0)
        rc = report(s);
    else if (s->cells)
        cJSON_Delete(s->cells);
    else
        table_end(&s->table, NULL);
    return rc == 0 && s->failed ? program_fail(BENCH_FAILED, "a cell has not one whole answer")
                                : rc;
}

int bench_serve(const struct args *a)
{
    struct serve s = {.args = a, .endpoints = (uint32_t)a->n_words};
    int rc = list_read(a, "tokens", 1, TOKENS_MAX, &s.tokens);

    if (rc == 0)
        rc = list_read(a, "concurrency", 1, AT_ONCE_MAX, &s.at_once);
    if (rc == 0)
        rc = list_read(a, "hits", 0, 100, &s.hits);
    if (rc != 0)
        return rc;
    for (uint32_t e = 0; e < s.endpoints; e++)
        s.url[e] = a->word[e];
    /* The same prompts again would be hits as a whole. */
    s.seed = args_given(a, "seed") ? args_number(a, "seed") : bench_run_id() >> 12;
    progress_begin(&s.progress, args_given(a, "quiet"));
    rc = serve_run(&s);
    completions_free(s.http);
    free(s.body);
    return rc;
}
