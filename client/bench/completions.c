#include "client/bench/completions.h"

#include "client/bench/figure.h"

#include <cjson/cJSON.h>
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_BYTES (1u << 20) /* of a stream */
#define POLL_MS 1000
#define URL_BYTES 1024

/* One request. */
struct stream {
    struct completions *http;
    CURL *easy; /* NULL: the place is free */
    bool waits; /* for an answer */
    struct completion c;
    bool done, failed;
    char *line;
    size_t line_n, line_cap;
    uint32_t pieces;
};

struct completions {
    CURLM *multi;
    struct curl_slist *headers;
    uint64_t timeout_ms;
    uint32_t at_once;
    struct stream stream[];
};

struct completions *completions_new(uint32_t at_once, uint64_t timeout_ms, const char *key)
{
    struct completions *h = calloc(1, sizeof *h + at_once * sizeof h->stream[0]);
    char bearer[600];

    if (h == NULL)
        return NULL;
    h->at_once = at_once;
    h->timeout_ms = timeout_ms;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) == 0)
        h->multi = curl_multi_init();
    h->headers = curl_slist_append(NULL, "Content-Type: application/json");
    if (key != NULL) {
        snprintf(bearer, sizeof bearer, "Authorization: Bearer %s", key);
        h->headers = curl_slist_append(h->headers, bearer);
    }
    if (h->multi == NULL || h->headers == NULL) {
        completions_free(h);
        return NULL;
    }
    curl_multi_setopt(h->multi, CURLMOPT_MAXCONNECTS, (long)at_once);
    return h;
}

static void stream_end(struct stream *s)
{
    if (s->waits)
        curl_multi_remove_handle(s->http->multi, s->easy);
    s->waits = false;
    curl_easy_cleanup(s->easy);
    s->easy = NULL;
    free(s->line);
    s->line = NULL;
    s->line_n = s->line_cap = 0;
}

void completions_free(struct completions *h)
{
    if (h == NULL)
        return;
    for (uint32_t i = 0; i < h->at_once; i++)
        if (h->stream[i].easy)
            stream_end(&h->stream[i]);
    if (h->multi)
        curl_multi_cleanup(h->multi);
    curl_slist_free_all(h->headers);
    curl_global_cleanup();
    free(h);
}

/* ---- the stream: server-sent events ---- */

static void stream_fail(struct stream *s, enum completion_outcome outcome, const char *text)
{
    if (s->failed)
        return;
    s->failed = true;
    s->c.outcome = outcome;
    snprintf(s->c.error, sizeof s->c.error, "%s", text);
}

static uint32_t number_of(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);

    return cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble < 1e9
               ? (uint32_t)v->valuedouble
               : 0;
}

static void event_take(struct stream *s, const cJSON *event)
{
    const cJSON *error = cJSON_GetObjectItemCaseSensitive(event, "error");
    const cJSON *usage = cJSON_GetObjectItemCaseSensitive(event, "usage");
    const cJSON *choice = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(event, "choices"), 0);
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(choice, "text");
    const cJSON *message = cJSON_GetObjectItemCaseSensitive(error, "message");

    if (error != NULL && !cJSON_IsNull(error)) {
        stream_fail(s, COMPLETION_REFUSED,
                    cJSON_IsString(message) ? message->valuestring : "an error in the stream");
        return;
    }
    if (cJSON_IsObject(usage)) {
        s->c.tokens = number_of(usage, "completion_tokens");
        s->c.prompt_tokens = number_of(usage, "prompt_tokens");
    }
    if (!cJSON_IsString(text) || text->valuestring[0] == '\0')
        return;
    s->c.last_ns = clock_ns();
    if (s->pieces++ == 0)
        s->c.first_ns = s->c.last_ns;
}

static void line_take(struct stream *s, const char *line, size_t n)
{
    cJSON *event;

    if (n > 0 && line[n - 1] == '\r')
        n--;
    if (n < 5 || memcmp(line, "data:", 5) != 0)
        return; /* a comment, another field, or what is between two events */
    line += 5;
    n -= 5;
    while (n > 0 && *line == ' ') {
        line++;
        n--;
    }
    if (n == 6 && memcmp(line, "[DONE]", 6) == 0) {
        s->done = true;
        return;
    }
    event = cJSON_ParseWithLength(line, n);
    if (cJSON_IsObject(event))
        event_take(s, event);
    else
        stream_fail(s, COMPLETION_BROKEN, "an event of the stream is no JSON object");
    cJSON_Delete(event);
}

static bool line_keep(struct stream *s, const char *p, size_t n)
{
    size_t cap = s->line_cap ? s->line_cap : 4096;
    char *line;

    while (cap < s->line_n + n)
        cap *= 2;
    if (cap > LINE_BYTES)
        return false;
    if (cap != s->line_cap) {
        line = realloc(s->line, cap);
        if (line == NULL)
            return false;
        s->line = line;
        s->line_cap = cap;
    }
    memcpy(s->line + s->line_n, p, n);
    s->line_n += n;
    return true;
}

static size_t body_cb(char *p, size_t size, size_t n, void *ctx)
{
    struct stream *s = ctx;
    size_t left = size * n;

    while (left > 0 && !s->failed) {
        const char *end = memchr(p, '\n', left);
        size_t take = end ? (size_t)(end - p) : left;

        if (!line_keep(s, p, take)) {
            stream_fail(s, COMPLETION_BROKEN, "a line of more than 1 MiB");
            break;
        }
        if (end == NULL)
            break;
        line_take(s, s->line, s->line_n);
        s->line_n = 0;
        p += take + 1;
        left -= take + 1;
    }
    return size * n;
}

/* ---- requests ---- */

/* Of a base with or without /v1 at its end. */
static void endpoint(char out[URL_BYTES], const char *url, const char *path)
{
    size_t n = strlen(url);

    while (n > 0 && url[n - 1] == '/')
        n--;
    if (n >= 3 && memcmp(url + n - 3, "/v1", 3) == 0)
        n -= 3;
    snprintf(out, URL_BYTES, "%.*s/v1/%s", (int)(n < 900 ? n : 900), url, path);
}

static CURL *easy_new(struct completions *h, const char *url, const char *path,
                      size_t (*write_cb)(char *, size_t, size_t, void *), void *ctx)
{
    CURL *easy = curl_easy_init();
    char whole[URL_BYTES];

    if (easy == NULL)
        return NULL;
    endpoint(whole, url, path);
    curl_easy_setopt(easy, CURLOPT_URL, whole);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, h->headers);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)h->timeout_ms);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, write_cb);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, ctx);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, ctx);
    return easy;
}

int completions_begin(struct completions *h, const char *url, const char *body)
{
    struct stream *s = NULL;

    for (uint32_t i = 0; i < h->at_once && s == NULL; i++)
        if (h->stream[i].easy == NULL)
            s = &h->stream[i];
    if (s == NULL)
        return -1;
    *s = (struct stream){.http = h};
    s->easy = easy_new(h, url, "completions", body_cb, s);
    if (s->easy == NULL)
        return -1;
    if (curl_easy_setopt(s->easy, CURLOPT_COPYPOSTFIELDS, body) != CURLE_OK ||
        curl_multi_add_handle(h->multi, s->easy) != CURLM_OK) {
        stream_end(s);
        return -1;
    }
    s->waits = true;
    s->c.start_ns = clock_ns();
    return 0;
}

/* Judges a request that has ended. */
static void stream_judge(struct stream *s, CURLcode rc)
{
    long status = 0;
    char text[64];

    curl_easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &status);
    if (rc == CURLE_OPERATION_TIMEDOUT) {
        s->failed = false; /* whatever came until then */
        stream_fail(s, COMPLETION_TIMEOUT, "no whole answer in time");
    } else if (status != 0 && status != 200) {
        snprintf(text, sizeof text, "HTTP status %ld", status);
        stream_fail(s, COMPLETION_REFUSED, text);
    } else if (rc != CURLE_OK) {
        stream_fail(s, status == 200 ? COMPLETION_BROKEN : COMPLETION_REFUSED,
                    curl_easy_strerror(rc));
    } else if (!s->done) {
        stream_fail(s, COMPLETION_BROKEN, "the stream ended without [DONE]");
    } else if (s->pieces == 0) {
        stream_fail(s, COMPLETION_BROKEN, "the stream has no text");
    }
    if (s->c.tokens < s->pieces) /* no usage */
        s->c.tokens = s->pieces;
}

int completions_next(struct completions *h, struct completion *out)
{
    int running = 1, left;
    bool any = false;

    for (uint32_t i = 0; i < h->at_once; i++)
        any = any || h->stream[i].waits;
    while (any) {
        CURLMsg *m;
        struct stream *s;

        if (curl_multi_perform(h->multi, &running) != CURLM_OK)
            return 0;
        while ((m = curl_multi_info_read(h->multi, &left)) != NULL) {
            if (m->msg != CURLMSG_DONE)
                continue;
            curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&s);
            stream_judge(s, m->data.result);
            *out = s->c;
            stream_end(s);
            return 1;
        }
        curl_multi_poll(h->multi, NULL, 0, POLL_MS, NULL);
    }
    return 0;
}

/* ---- the model ---- */

struct text {
    char bytes[1u << 16];
    size_t n;
};

static size_t text_cb(char *p, size_t size, size_t n, void *ctx)
{
    struct text *t = ctx;

    if (size * n > sizeof t->bytes - 1 - t->n)
        return 0;
    memcpy(t->bytes + t->n, p, size * n);
    t->n += size * n;
    return size * n;
}

int completions_model(struct completions *h, const char *url, char *model, size_t n, char *error,
                      size_t error_bytes)
{
    struct text *t = calloc(1, sizeof *t);
    CURL *easy = t ? easy_new(h, url, "models", text_cb, t) : NULL;
    CURLcode rc = easy ? curl_easy_perform(easy) : CURLE_OUT_OF_MEMORY;
    cJSON *answer = rc == CURLE_OK ? cJSON_ParseWithLength(t->bytes, t->n) : NULL;
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(
        cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(answer, "data"), 0), "id");
    int found = cJSON_IsString(id) ? 0 : -1;

    if (found == 0)
        snprintf(model, n, "%s", id->valuestring);
    else
        snprintf(error, error_bytes, "%s: %s", url,
                 rc != CURLE_OK ? curl_easy_strerror(rc) : "/v1/models names no model");
    cJSON_Delete(answer);
    curl_easy_cleanup(easy);
    free(t);
    return found;
}
