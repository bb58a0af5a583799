#include "daemon/observe/pages.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct observe_snapshot snapshot;
static struct published_view view = {.snapshot = &snapshot, .number = 1, .at_ms = 50000};

static struct page make(enum page_name name, uint64_t now_ms)
{
    struct page page;

    cr_assert_eq(page_make(name, &view, now_ms, false, &page), 0);
    cr_assert_eq(strlen(page.text), page.n);
    return page;
}

#define IS(name, now_ms, wanted_status, wanted_text)                                               \
    do {                                                                                           \
        struct page is_ = make(name, now_ms);                                                      \
        cr_assert_eq(is_.status, wanted_status, "%u", is_.status);                                 \
        cr_assert_str_eq(is_.text, wanted_text);                                                   \
        free(is_.text);                                                                            \
    } while (0)

Test(pages, a_path_is_exact)
{
    cr_assert_eq(page_find("/"), PAGE_INDEX);
    cr_assert_eq(page_find("/metrics"), PAGE_METRICS);
    cr_assert_eq(page_find("/live"), PAGE_LIVE);
    cr_assert_eq(page_find("/ready"), PAGE_READY);
    cr_assert_eq(page_find("/metrics/"), PAGE_NONE);
    cr_assert_eq(page_find("/../metrics"), PAGE_NONE);
    cr_assert_eq(page_find(""), PAGE_NONE);
}

Test(pages, live_is_a_loop_that_turns_whatever_its_health)
{
    snapshot.shown.health = HEALTH_FAILING;
    snapshot.draining = true;
    IS(PAGE_LIVE, 50000 + PAGES_STUCK_MS - 1, 200, "ok\n");
    IS(PAGE_LIVE, 49999, 200, "ok\n"); /* published after the reader looked at its clock */
    IS(PAGE_LIVE, 50000 + PAGES_STUCK_MS, 503, "the event loop has not run for 10 s\n");
    IS(PAGE_LIVE, 50000 + 75999, 503, "the event loop has not run for 75 s\n");
}

Test(pages, ready_is_who_takes_requests)
{
    IS(PAGE_READY, 50000, 200, "ok\n");
    snapshot.shown.health = HEALTH_RECOVERING;
    snapshot.n_reasons = 1;
    strcpy(snapshot.reason[0], "tier nvme: recovering, 1 of 4 segments");
    IS(PAGE_READY, 50000, 200, "recovering\ntier nvme: recovering, 1 of 4 segments\n");
    snapshot.shown.health = HEALTH_DEGRADED;
    snapshot.n_reasons = 2;
    strcpy(snapshot.reason[1], "shared root /mnt/kv: down");
    IS(PAGE_READY, 50000, 200,
       "degraded\ntier nvme: recovering, 1 of 4 segments\nshared root /mnt/kv: down\n");
    snapshot.shown.health = HEALTH_FAILING;
    snapshot.n_reasons = 0;
    IS(PAGE_READY, 50000, 503, "failing\n");
    snapshot.draining = true;
    IS(PAGE_READY, 50000, 503, "stopping\n");
    IS(PAGE_READY, 50000 + PAGES_STUCK_MS, 503, "the event loop has not run for 10 s\n");
}

Test(pages, before_the_first_publication_nothing_is_ready)
{
    view.number = 0;
    IS(PAGE_READY, 50000, 503, "starting\n");
    IS(PAGE_METRICS, 50000, 503, "starting\n");
    IS(PAGE_LIVE, 50000, 200, "ok\n");
}

Test(pages, metrics_are_openmetrics_for_who_takes_it)
{
    static const char prometheus[] =
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    struct page plain = make(PAGE_METRICS, 50000), open;

    cr_assert(page_openmetrics(prometheus));
    cr_assert(!page_openmetrics("*/*"));
    cr_assert(!page_openmetrics(NULL));
    cr_assert_eq(page_make(PAGE_METRICS, &view, 50000, true, &open), 0);
    cr_assert_str_eq(plain.type, "text/plain; version=0.0.4; charset=utf-8");
    cr_assert_str_eq(open.type, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    cr_assert_null(strstr(plain.text, "# EOF"));
    cr_assert_str_eq(open.text + open.n - 6, "# EOF\n");
    IS(PAGE_METRICS, 50000 + PAGES_STUCK_MS, 503, "the event loop has not run for 10 s\n");
    free(plain.text);
    free(open.text);
}
