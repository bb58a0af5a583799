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

static struct trace_about about(const char *request, const char *tenant)
{
    return (struct trace_about){.arrived_ns = trace_now(),
                                .began_ns = trace_now(),
                                .request = {request, (uint32_t)strlen(request)},
                                .tenant = {tenant, (uint32_t)strlen(tenant)},
                                .method = UCM_METHOD_LOAD,
                                .n_keys = 3};
}

static struct trace_choice choose(const char *request, const char *tenant)
{
    struct trace_choice c = {.bytes = TRACE_RING_MIN,
                             .request_n = (uint8_t)strlen(request),
                             .tenant_n = (uint16_t)strlen(tenant)};

    memcpy(c.request, request, c.request_n);
    memcpy(c.tenant, tenant, c.tenant_n);
    return c;
}

static void start(struct trace_choice c)
{
    cr_assert_eq(trace_start(&t, &c), 0);
}

/* The request ends at once. True: it got a struct. */
static bool one(const char *request, const char *tenant)
{
    struct trace_about a = about(request, tenant);
    struct traced *r = trace_begin(&t, &a);

    if (r)
        r->end_cb(r, 0);
    return r != NULL;
}

static bool take(struct trace_record *record, void **memory)
{
    bool taken;

    cr_assert_eq(trace_take(&t, SIZE_MAX, memory, record, &taken), 0);
    return taken;
}

static uint32_t count(void)
{
    struct trace_record record;
    void *memory;
    uint32_t n = 0;

    for (; take(&record, &memory); n++)
        free(memory);
    return n;
}

Test(trace, nothing_is_written_while_it_is_off)
{
    cr_assert_not(t.writing);
    cr_assert_not(one("a", "b"));
    cr_assert_eq(trace_next_bytes(&t), 0);
    trace_stop(&t);
}

Test(trace, a_record_says_what_the_request_was_and_waited_for)
{
    struct trace_about a = about("cmpl-1", "red");
    struct trace_record record;
    struct traced *r;
    void *memory;

    start(choose("", ""));
    r = trace_begin(&t, &a);
    span(r, SPAN_NVME_READ, SPAN_MORE);
    span(r, SPAN_NVME_READ, SPAN_MORE);
    span(r, SPAN_COPY, SPAN_MORE);
    span(r, SPAN_NVME_READ, SPAN_LESS);
    span(r, SPAN_NVME_READ, SPAN_LESS);
    r->ok = 2;
    r->bytes = 4096;
    r->end_cb(r, 6);

    cr_assert(take(&record, &memory));
    cr_assert_eq(record.about.request.n, 6);
    cr_assert_eq(memcmp(record.about.request.p, "cmpl-1", 6), 0);
    cr_assert_eq(memcmp(record.about.tenant.p, "red", 3), 0);
    cr_assert_eq(record.about.n_keys, 3);
    cr_assert_eq(record.code, 6);
    cr_assert_eq(record.ok, 2);
    cr_assert_eq(record.bytes, 4096);
    cr_assert_eq(record.n_spans, 3);
    cr_assert_eq(record.spans[0].kind, SPAN_QUEUE);
    cr_assert_eq(record.spans[1].kind, SPAN_NVME_READ);
    cr_assert_eq(record.spans[1].n, 2);
    cr_assert_eq(record.spans[2].kind, SPAN_COPY, "it was open and ended with the request");
    cr_assert_eq(record.spans[2].end_ns, record.end_ns);
    free(memory);
    cr_assert_not(take(&record, &memory));
}

Test(trace, a_request_is_chosen_by_id_tenant_and_sample)
{
    struct trace_choice c = choose("cmpl-1", "red");

    start(c);
    cr_assert(one("cmpl-1", "red"));
    cr_assert(one("cmpl-17", "red"), "an id that begins so");
    cr_assert_not(one("cmpl", "red"));
    cr_assert_not(one("xcmpl-1", "red"));
    cr_assert_not(one("cmpl-1", "redder"));
    cr_assert_eq(count(), 2);
    trace_stop(&t);
    c.sample = 3;
    start(c);
    for (int i = 0; i < 9; i++)
        one("cmpl-1", "red");
    cr_assert_eq(count(), 3);
}

Test(trace, a_fast_request_is_not_written_if_slow_ones_are_wanted)
{
    struct trace_choice c = choose("", "");
    struct trace_about a = about("", "red");
    struct trace_record record;
    struct traced *r;
    void *memory;

    c.slower_ns = 1000000000;
    start(c);
    cr_assert(one("fast", "red"));
    a.arrived_ns -= c.slower_ns;
    r = trace_begin(&t, &a);
    r->end_cb(r, 0);
    cr_assert(take(&record, &memory));
    cr_assert_geq(record.end_ns - record.about.arrived_ns, c.slower_ns);
    free(memory);
    cr_assert_eq(count(), 0);
}

Test(trace, many_spans_of_one_kind_become_one)
{
    struct trace_about a = about("", "");
    struct trace_record record;
    struct traced *r;
    uint32_t n[SPAN_KINDS] = {0};
    void *memory;

    start(choose("", ""));
    r = trace_begin(&t, &a);
    for (int i = 0; i < 1000; i++) {
        span(r, SPAN_SLOT_WAIT, SPAN_ON);
        span(r, SPAN_SLOT_WAIT, SPAN_ON);
        span(r, SPAN_SLOT_WAIT, SPAN_OFF);
    }
    for (int kind = 0; kind < SPAN_KINDS; kind++)
        span(r, (enum span_kind)kind, SPAN_MORE);
    r->end_cb(r, 0);
    cr_assert(take(&record, &memory));
    cr_assert_leq(record.n_spans, TRACE_MAX_SPANS);
    for (uint32_t i = 0; i < record.n_spans; i++)
        n[record.spans[i].kind] += record.spans[i].n;
    cr_assert_eq(n[SPAN_SLOT_WAIT], 1001);
    for (int kind = 0; kind < SPAN_KINDS; kind++)
        cr_assert_gt(n[kind], 0, "%d", kind);
    free(memory);
}

Test(trace, what_a_full_ring_loses_is_counted_where_it_is_missing)
{
    uint32_t written = 0, lost = 0;
    struct trace_record record;
    void *memory;

    start(choose("", ""));
    for (int i = 0; i < 5000; i++)
        one("some-id", "red");
    cr_assert_gt(t.lost, 0);
    cr_assert_eq(t.records + t.lost, 5000);
    /* Around the end of the ring some times. */
    for (int i = 0; i < 5000; i++) {
        if (take(&record, &memory)) {
            cr_assert_eq(record.number, ++written);
            cr_assert_eq(memcmp(record.about.request.p, "some-id", 7), 0);
            lost += record.lost;
            free(memory);
        }
        one("some-id", "red");
    }
    while (take(&record, &memory)) {
        cr_assert_eq(record.number, ++written);
        lost += record.lost;
        free(memory);
    }
    cr_assert_eq(written, t.records);
    cr_assert_eq(lost + t.lost_now, t.lost);
}

Test(trace, keys_come_as_they_were_sent)
{
    static const uint8_t keys[48] = {1, 2, 3, [47] = 9};
    struct trace_choice c = choose("", "red");
    struct trace_about a = about("", "red"), other = about("", "blue");
    struct trace_record record;
    void *memory;

    c.keys = true;
    start(c);
    cr_assert_null(trace_begin(&t, &a), "no spans");
    trace_keys(&t, &a, (struct proto_bin){keys, 48}, 16, UINT64_C(1) << 33, 64, true);
    trace_keys(&t, &other, (struct proto_bin){keys, 48}, 16, 1, 64, false);
    cr_assert(take(&record, &memory));
    cr_assert_eq(record.keys.n, 48);
    cr_assert_eq(memcmp(record.keys.p, keys, 48), 0);
    cr_assert_eq(record.block_bytes, UINT64_C(1) << 33);
    cr_assert_eq(record.block_tokens, 64);
    cr_assert(record.each);
    free(memory);
    cr_assert_eq(count(), 0);
}

Test(trace, a_request_that_outlives_its_trace_is_not_written_into_the_next)
{
    struct trace_about a = about("old", "red");
    struct traced *r, *late;

    start(choose("", ""));
    r = trace_begin(&t, &a);
    late = trace_begin(&t, &a);
    trace_end_writing(&t);
    span(r, SPAN_COPY, SPAN_MORE);
    r->end_cb(r, 0);
    cr_assert_eq(count(), 0);
    trace_stop(&t);
    start(choose("", ""));
    late->end_cb(late, 0);
    cr_assert_eq(count(), 0);
}
