#include "daemon/trace/trace.h"

#include "proto/clock.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct trace_request {
    struct traced traced;
    struct trace *trace;
    struct trace_record record;
    uint32_t run;
    uint32_t open[SPAN_KINDS]; /* how many of a kind are under way */
    uint64_t since_ns[SPAN_KINDS];
    uint32_t n[SPAN_KINDS]; /* how many the open span stands for */
    struct trace_span span[TRACE_MAX_SPANS];
    char request[UCM_MAX_REQUEST_BYTES];
    char tenant[UCM_MAX_NAME_BYTES];
};

/* ---- on and off ---- */

int trace_start(struct trace *t, const struct trace_choice *choice)
{
    uint32_t run = t->run + 1;
    uint64_t size = choice->bytes ? choice->bytes : TRACE_RING_DEFAULT;
    uint8_t *ring;

    assert(!t->ring);
    if (size < TRACE_RING_MIN)
        size = TRACE_RING_MIN;
    ring = malloc(size);
    if (!ring)
        return -ENOMEM;
    *t = (struct trace){.ring = ring,
                        .size = size,
                        .writing = true,
                        .run = run,
                        .start_ns = clock_ns(),
                        .choice = *choice};
    return 0;
}

void trace_end_writing(struct trace *t)
{
    t->writing = false;
}

void trace_stop(struct trace *t)
{
    free(t->ring);
    t->ring = NULL;
    t->writing = false;
}

/* ---- the ring ---- */

static void ring_write(struct trace *t, const void *from, size_t n)
{
    uint64_t at = t->put % t->size, first = t->size - at < n ? t->size - at : n;

    if (n == 0)
        return;
    memcpy(t->ring + at, from, first);
    memcpy(t->ring, (const uint8_t *)from + first, n - first);
    t->put += n;
}

static void ring_read(const struct trace *t, uint64_t from, void *to, size_t n)
{
    uint64_t at = from % t->size, first = t->size - at < n ? t->size - at : n;

    memcpy(to, t->ring + at, first);
    memcpy((uint8_t *)to + first, t->ring, n - first);
}

/* Spans first: they are aligned in what trace_take copies out. */
static void record_write(struct trace *t, struct trace_record *r)
{
    const struct trace_about *a = &r->about;
    size_t spans_n = r->n_spans * sizeof(*r->spans);
    uint64_t bytes = sizeof(*r) + spans_n + a->request.n + a->tenant.n + r->keys.n;

    if (bytes > t->size - (t->put - t->taken)) {
        t->lost++;
        t->lost_now++;
        return;
    }
    r->ring_bytes = (uint32_t)bytes;
    r->number = ++t->records;
    r->lost = t->lost_now;
    t->lost_now = 0;
    ring_write(t, r, sizeof(*r));
    ring_write(t, r->spans, spans_n);
    ring_write(t, a->request.p, a->request.n);
    ring_write(t, a->tenant.p, a->tenant.n);
    ring_write(t, r->keys.p, r->keys.n);
}

size_t trace_next_bytes(const struct trace *t)
{
    uint32_t bytes;

    if (!t->ring || t->put == t->taken)
        return 0;
    ring_read(t, t->taken, &bytes, sizeof(bytes));
    return bytes;
}

int trace_take(struct trace *t, size_t room, struct trace_record **out)
{
    size_t bytes = trace_next_bytes(t);
    struct trace_record *r;
    const char *p;

    *out = NULL;
    if (bytes == 0 || bytes > room)
        return 0;
    r = *out = malloc(bytes);
    if (!r)
        return -ENOMEM;
    ring_read(t, t->taken, r, bytes);
    t->taken += bytes;
    r->spans = (const struct trace_span *)(r + 1);
    p = (const char *)(r->spans + r->n_spans);
    r->about.request.p = p;
    r->about.tenant.p = p + r->about.request.n;
    r->keys.p = (const uint8_t *)r->about.tenant.p + r->about.tenant.n;
    return 0;
}

/* ---- choosing ---- */

/* What is known at the start; how long it takes is not. */
static bool chosen(struct trace *t, const struct trace_about *about)
{
    const struct trace_choice *c = &t->choice;

    if (c->request_n > 0 && (about->request.n < c->request_n ||
                             memcmp(about->request.p, c->request, c->request_n) != 0))
        return false;
    if (c->tenant_n > 0 &&
        (about->tenant.n != c->tenant_n || memcmp(about->tenant.p, c->tenant, c->tenant_n) != 0))
        return false;
    return c->sample <= 1 || t->seen++ % c->sample == 0;
}

void trace_keys(struct trace *t, struct trace_record *record)
{
    if (!t->writing || !chosen(t, &record->about))
        return;
    record->end_ns = record->about.began_ns;
    record_write(t, record);
}

/* ---- requests ---- */

static void span_add(struct trace_request *r, enum span_kind kind, uint64_t end_ns)
{
    uint32_t i = r->record.n_spans;

    /* The last places are for kinds that have none yet. */
    if (i >= TRACE_MAX_SPANS - SPAN_KINDS)
        while (i > 0 && r->span[i - 1].kind != kind)
            i--;
    else
        i = 0;
    if (i > 0) {
        r->span[i - 1].end_ns = end_ns;
        r->span[i - 1].n += r->n[kind];
        return;
    }
    assert(r->record.n_spans < TRACE_MAX_SPANS);
    r->span[r->record.n_spans++] =
        (struct trace_span){r->since_ns[kind], end_ns, r->n[kind], (uint8_t)kind};
}

static void span_cb(struct traced *traced, enum span_kind kind, enum span_change change)
{
    struct trace_request *r = (struct trace_request *)traced;

    if (change == SPAN_LESS || change == SPAN_OFF) {
        if (r->open[kind] > 0 && --r->open[kind] == 0)
            span_add(r, kind, clock_ns());
        return;
    }
    if (change == SPAN_ON && r->open[kind] > 0)
        return;
    r->n[kind]++;
    if (r->open[kind]++ > 0)
        return;
    r->since_ns[kind] = clock_ns();
    r->n[kind] = 1;
}

static void end_cb(struct traced *traced, uint32_t code)
{
    struct trace_request *r = (struct trace_request *)traced;
    struct trace *t = r->trace;
    uint64_t now = clock_ns();

    if (t->writing && r->run == t->run && now - r->record.about.arrived_ns >= t->choice.slower_ns) {
        for (int kind = 0; kind < SPAN_KINDS; kind++)
            if (r->open[kind] > 0)
                span_add(r, (enum span_kind)kind, now);
        r->record.end_ns = now;
        r->record.code = code;
        r->record.ok = r->traced.ok;
        r->record.bytes = r->traced.bytes;
        record_write(t, &r->record);
    }
    free(r);
}

struct traced *trace_begin(struct trace *t, const struct trace_about *about)
{
    struct trace_request *r;

    if (!t->writing || t->choice.keys || !chosen(t, about))
        return NULL;
    r = calloc(1, sizeof(*r));
    if (!r) {
        t->lost++;
        t->lost_now++;
        return NULL;
    }
    r->traced.span_cb = span_cb;
    r->traced.end_cb = end_cb;
    r->trace = t;
    r->record = (struct trace_record){.about = *about, .spans = r->span};
    r->run = t->run;
    if (about->request.n > 0)
        r->record.about.request.p = memcpy(r->request, about->request.p, about->request.n);
    if (about->tenant.n > 0)
        r->record.about.tenant.p = memcpy(r->tenant, about->tenant.p, about->tenant.n);
    r->since_ns[SPAN_QUEUE] = about->arrived_ns;
    r->n[SPAN_QUEUE] = 1;
    span_add(r, SPAN_QUEUE, about->began_ns);
    return &r->traced;
}
