#include "daemon/observe/pages.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT "text/plain; charset=utf-8"

static const char *const paths[PAGE_NONE] = {
    [PAGE_INDEX] = "/",
    [PAGE_METRICS] = "/metrics",
    [PAGE_LIVE] = "/live",
    [PAGE_READY] = "/ready",
};

enum page_name page_find(const char *path)
{
    int i = 0;

    while (i < PAGE_NONE && strcmp(paths[i], path) != 0)
        i++;
    return (enum page_name)i;
}

bool page_openmetrics(const char *accept)
{
    return accept && strstr(accept, "application/openmetrics-text") != NULL;
}

static void index_write(FILE *out)
{
    fputs("/metrics  counters, gauges and histograms, for Prometheus\n"
          "/live     200 while the daemon's event loop runs: restart on 503\n"
          "/ready    200 while the daemon takes requests, with why not otherwise\n",
          out);
}

/* NULL: the event loop runs. */
static const char *why_dead(const struct published_view *view, uint64_t now_ms, char *buf, size_t n)
{
    uint64_t age_ms = now_ms > view->at_ms ? now_ms - view->at_ms : 0;

    if (age_ms < PAGES_STUCK_MS)
        return NULL;
    snprintf(buf, n, "the event loop has not run for %" PRIu64 " s\n", age_ms / 1000);
    return buf;
}

/* Ready is who takes requests: slower storage is no reason to send an engine elsewhere. */
static unsigned ready_write(const struct published_view *view, uint64_t now_ms, FILE *out)
{
    const struct observe_snapshot *s = view->snapshot;
    char buf[64];
    const char *dead = why_dead(view, now_ms, buf, sizeof(buf));

    if (dead || view->number == 0 || s->draining) {
        fputs(dead ? dead : view->number == 0 ? "starting\n" : "stopping\n", out);
        return 503;
    }
    fprintf(out, "%s\n", health_names[s->shown.health]);
    for (uint32_t i = 0; i < s->n_reasons; i++)
        fprintf(out, "%s\n", s->reason[i]);
    return s->shown.health == HEALTH_FAILING ? 503 : 200;
}

static unsigned live_write(const struct published_view *view, uint64_t now_ms, FILE *out)
{
    char buf[64];
    const char *dead = why_dead(view, now_ms, buf, sizeof(buf));

    fputs(dead ? dead : "ok\n", out);
    return dead ? 503 : 200;
}

/* What a stuck loop counted long ago is not what is: the scraper shall find the daemon down. */
static unsigned metrics_write(const struct published_view *view, uint64_t now_ms,
                              enum exposition_format format, FILE *out)
{
    char buf[64];
    const char *dead = why_dead(view, now_ms, buf, sizeof(buf));

    if (dead || view->number == 0) {
        fputs(dead ? dead : "starting\n", out);
        return 503;
    }
    exposition_write(&view->snapshot->shown, format, out);
    return 200;
}

int page_make(enum page_name name, const struct published_view *view, uint64_t now_ms,
              bool openmetrics, struct page *out)
{
    enum exposition_format format = openmetrics ? EXPOSITION_OPENMETRICS : EXPOSITION_PROMETHEUS;
    struct page p = {.status = 200, .type = TEXT};
    FILE *f = open_memstream(&p.text, &p.n);
    bool bad;

    if (!f)
        return -ENOMEM;
    switch (name) {
    case PAGE_METRICS:
        p.status = metrics_write(view, now_ms, format, f);
        p.type = p.status == 200 ? exposition_content_type(format) : TEXT;
        break;
    case PAGE_LIVE:
        p.status = live_write(view, now_ms, f);
        break;
    case PAGE_READY:
        p.status = ready_write(view, now_ms, f);
        break;
    case PAGE_INDEX:
        index_write(f);
        break;
    case PAGE_NONE:
        p.status = 404;
        fputs("there is no such page; / names those that there are\n", f);
        break;
    }
    bad = ferror(f) != 0;
    bad = fclose(f) != 0 || bad;
    if (bad) {
        free(p.text);
        return -ENOMEM;
    }
    *out = p;
    return 0;
}
