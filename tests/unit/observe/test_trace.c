/* The ring of daemon/trace/trace.h and what gets into it. */
#include "daemon/trace/trace.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static struct trace t;

static void off(void)
{
    trace_stop(&t);
}

TestSuite(trace, .fini = off);

static const struct trace_about about = {
    .request = {"some-id", 7}, .tenant = {"red", 3}, .method = UCM_METHOD_LOAD};

static void start(void)
{
    cr_assert_eq(trace_start(&t, &(struct trace_choice){.bytes = TRACE_RING_MIN}), 0);
}

/* The request ends at once. */
static void one(void)
{
    struct traced *r = trace_begin(&t, &about);

    r->end_cb(r, 0);
}

/* NULL: there is none. */
static struct trace_record *take(void)
{
    struct trace_record *record;

    cr_assert_eq(trace_take(&t, SIZE_MAX, &record), 0);
    return record;
}

static uint32_t count(void)
{
    struct trace_record *record;
    uint32_t n = 0;

    for (; (record = take()) != NULL; n++)
        free(record);
    return n;
}

Test(trace, many_spans_of_one_kind_become_one)
{
    struct trace_record *record;
    struct traced *r;
    uint32_t n[SPAN_KINDS] = {0};

    start();
    r = trace_begin(&t, &about);
    for (int i = 0; i < 1000; i++) {
        trace_span(r, SPAN_SLOT_WAIT, SPAN_ON);
        trace_span(r, SPAN_SLOT_WAIT, SPAN_ON);
        trace_span(r, SPAN_SLOT_WAIT, SPAN_OFF);
    }
    for (int kind = 0; kind < SPAN_KINDS; kind++)
        trace_span(r, (enum span_kind)kind, SPAN_MORE);
    r->end_cb(r, 0);
    record = take();
    cr_assert(record && record->n_spans <= TRACE_MAX_SPANS);
    for (uint32_t i = 0; i < record->n_spans; i++)
        n[record->spans[i].kind] += record->spans[i].n;
    cr_assert_eq(n[SPAN_SLOT_WAIT], 1001);
    for (int kind = 0; kind < SPAN_KINDS; kind++)
        cr_assert_gt(n[kind], 0, "%d", kind);
    free(record);
}

Test(trace, what_a_full_ring_loses_is_counted_where_it_is_missing)
{
    uint32_t written = 0, lost = 0;
    struct trace_record *record;

    start();
    for (int i = 0; i < 5000; i++)
        one();
    cr_assert_gt(t.lost, 0);
    cr_assert_eq(t.records + t.lost, 5000);
    /* Around the end of the ring some times, then to its end. */
    for (int i = 0; (record = take()) != NULL || i < 5000; i++) {
        if (record) {
            cr_assert_eq(record->number, ++written);
            cr_assert_eq(memcmp(record->about.request.p, "some-id", 7), 0);
            lost += (uint32_t)record->lost;
            free(record);
        }
        if (i < 5000)
            one();
    }
    cr_assert_eq(written, t.records);
    cr_assert_eq(lost + t.lost_now, t.lost);
}

Test(trace, a_request_that_outlives_its_trace_is_not_written_into_the_next)
{
    struct traced *r, *late;

    start();
    r = trace_begin(&t, &about);
    late = trace_begin(&t, &about);
    trace_end_writing(&t);
    trace_span(r, SPAN_COPY, SPAN_MORE);
    r->end_cb(r, 0);
    cr_assert_eq(count(), 0);
    trace_stop(&t);
    start();
    late->end_cb(late, 0);
    cr_assert_eq(count(), 0);
}
