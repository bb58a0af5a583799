/* What the listener of http.h answers, as text, from what the event loop published last. No state.
 * Threads: any. */
#ifndef UCMD_OBSERVE_PAGES_H
#define UCMD_OBSERVE_PAGES_H

#include "daemon/observe/published.h"

#include <stdbool.h>
#include <stddef.h>

/* The event loop is stuck when it has published nothing for so long. */
#define PAGES_STUCK_MS 10000

enum page_name { PAGE_INDEX, PAGE_METRICS, PAGE_LIVE, PAGE_READY, PAGE_NONE };

struct page {
    unsigned status;  /* of HTTP */
    const char *type; /* of the content; static memory */
    char *text;       /* the caller's, to free */
    size_t n;
};

/* PAGE_NONE for a path that there is not. */
enum page_name page_find(const char *path);
/* Whether a client that sends this header Accept (NULL: none) takes OpenMetrics. */
bool page_openmetrics(const char *accept);
/* 0 or -ENOMEM. openmetrics: for PAGE_METRICS. */
int page_make(enum page_name name, const struct published_view *view, uint64_t now_ms,
              bool openmetrics, struct page *out);

#endif
