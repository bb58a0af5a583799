/* Streamed completions of an OpenAI-compatible endpoint, many at once in one thread, by libcurl.
 *
 * Promise: a completion counts only if its stream was whole: HTTP 200, at least one piece of text,
 * and [DONE] at its end. Anything else is an error with a sentence, never a figure.
 * Threads: one. */
#ifndef UCM_BENCH_COMPLETIONS_H
#define UCM_BENCH_COMPLETIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum completion_outcome {
    COMPLETION_OK,
    COMPLETION_TIMEOUT,
    COMPLETION_REFUSED, /* not connected, an HTTP status, an error in the stream */
    COMPLETION_BROKEN,  /* the stream ended early or made no sense */
};

struct completion {
    enum completion_outcome outcome;
    uint64_t start_ns, first_ns, last_ns; /* sent; first and last text */
    uint32_t tokens;                      /* by `usage`, else pieces of text */
    uint32_t prompt_tokens;               /* by `usage`; 0: not told */
    char error[160];
};

struct completions;

/* timeout_ms: of one request as a whole. key: a bearer token, or NULL. NULL: no memory. */
struct completions *completions_new(uint32_t at_once, uint64_t timeout_ms, const char *key);
void completions_free(
    struct completions *h); /* requests that are under way are given up; NULL is allowed */

/* The first model that GET URL/v1/models names. 0, or -1 with a sentence in error. */
int completions_model(struct completions *h, const char *url, char *model, size_t n, char *error,
                      size_t error_bytes);

/* Begins POST URL/v1/completions with a JSON body, which it copies. 0; -1: no memory, or at_once are
 * under way. */
int completions_begin(struct completions *h, const char *url, const char *body);
/* Waits for the next completion to end. 1 with *out; 0: none is under way. */
int completions_next(struct completions *h, struct completion *out);

#endif
