#include "daemon/trace/trace.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What precedes a record's spans, texts and keys in the ring. */
struct header {
    uint32_t bytes; /* of the record, this included */
    uint32_t method, code, ok;
    uint32_t uid, pid, ns, part, n_keys;
    uint32_t block_tokens, key_bytes, n_spans;
    uint16_t request_n, tenant_n;
    bool each;
    uint64_t number, lost;
    uint64_t arrived_ns, began_ns, end_ns, moved_bytes, block_bytes;
};

struct trace_request {
    struct traced traced;
    struct trace *trace;
    struct header h;
    uint32_t run;
    uint32_t open[SPAN_KINDS]; /* how many of a kind are under way */
    uint64_t since_ns[SPAN_KINDS];
    uint32_t n[SPAN_KINDS]; /* how many the open span stands for */
    struct trace_span span[TRACE_MAX_SPANS];
    char request[UCM_MAX_REQUEST_BYTES];
    char tenant[UCM_MAX_NAME_BYTES];
};

uint64_t trace_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

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
                        .start_ns = trace_now(),
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
static void record_write(struct trace *t, struct header *h, const struct trace_span *spans,
                         const char *request, const char *tenant, const uint8_t *keys)
{
    size_t keys_n = (size_t)h->key_bytes * h->n_keys;
    uint64_t bytes = sizeof(*h) + h->n_spans * sizeof(*spans) + h->request_n + h->tenant_n + keys_n;

    if (bytes > t->size - (t->put - t->taken)) {
        t->lost++;
        t->lost_now++;
        return;
    }
    h->bytes = (uint32_t)bytes;
    h->number = ++t->records;
    h->lost = t->lost_now;
    t->lost_now = 0;
    ring_write(t, h, sizeof(*h));
    ring_write(t, spans, h->n_spans * sizeof(*spans));
    ring_write(t, request, h->request_n);
    ring_write(t, tenant, h->tenant_n);
    ring_write(t, keys, keys_n);
}

size_t trace_next_bytes(const struct trace *t)
{
    uint32_t bytes;

    if (!t->ring || t->put == t->taken)
        return 0;
    ring_read(t, t->taken, &bytes, sizeof(bytes));
    return bytes;
}

int trace_take(struct trace *t, size_t room, void **memory, struct trace_record *record,
               bool *taken)
{
    size_t bytes = trace_next_bytes(t);
    struct header *h;
    const uint8_t *p;

    *taken = false;
    if (bytes == 0 || bytes > room)
        return 0;
    h = malloc(bytes);
    if (!h)
        return -ENOMEM;
    ring_read(t, t->taken, h, bytes);
    t->taken += bytes;
    p = (const uint8_t *)(h + 1) + h->n_spans * sizeof(struct trace_span);
    *record = (struct trace_record){
        .about = {.arrived_ns = h->arrived_ns,
                  .began_ns = h->began_ns,
                  .request = {(const char *)p, h->request_n},
                  .tenant = {(const char *)p + h->request_n, h->tenant_n},
                  .method = (enum ucm_method)h->method,
                  .uid = h->uid,
                  .pid = h->pid,
                  .ns = h->ns,
                  .part = h->part,
                  .n_keys = h->n_keys},
        .number = h->number,
        .lost = h->lost,
        .end_ns = h->end_ns,
        .bytes = h->moved_bytes,
        .code = h->code,
        .ok = h->ok,
        .n_spans = h->n_spans,
        .block_bytes = h->block_bytes,
        .block_tokens = h->block_tokens,
        .each = h->each,
        .spans = (const struct trace_span *)(h + 1),
        .keys = {p + h->request_n + h->tenant_n, h->key_bytes * h->n_keys},
    };
    *memory = h;
    *taken = true;
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

static struct header header_of(const struct trace_about *a)
{
    return (struct header){
        .method = a->method,
        .uid = a->uid,
        .pid = a->pid,
        .ns = a->ns,
        .part = a->part,
        .n_keys = a->n_keys,
        .request_n = (uint16_t)a->request.n,
        .tenant_n = (uint16_t)a->tenant.n,
        .arrived_ns = a->arrived_ns,
        .began_ns = a->began_ns,
    };
}

void trace_keys(struct trace *t, const struct trace_about *about, struct proto_bin keys,
                uint32_t key_bytes, uint64_t block_bytes, uint32_t block_tokens, bool each)
{
    struct header h;

    if (!t->writing || !chosen(t, about))
        return;
    h = header_of(about);
    h.key_bytes = key_bytes;
    h.n_keys = keys.n / key_bytes;
    h.block_bytes = block_bytes;
    h.block_tokens = block_tokens;
    h.each = each;
    h.end_ns = about->began_ns;
    record_write(t, &h, NULL, about->request.p, about->tenant.p, keys.p);
}

/* ---- requests ---- */

static void span_add(struct trace_request *r, enum span_kind kind, uint64_t end_ns)
{
    struct header *h = &r->h;
    uint32_t i = h->n_spans;

    /* The last places are for kinds that have none yet. */
    if (h->n_spans >= TRACE_MAX_SPANS - SPAN_KINDS)
        while (i > 0 && r->span[i - 1].kind != kind)
            i--;
    else
        i = 0;
    if (i > 0) {
        r->span[i - 1].end_ns = end_ns;
        r->span[i - 1].n += r->n[kind];
        return;
    }
    assert(h->n_spans < TRACE_MAX_SPANS);
    r->span[h->n_spans++] =
        (struct trace_span){r->since_ns[kind], end_ns, r->n[kind], (uint8_t)kind};
}

static void span_cb(struct traced *traced, enum span_kind kind, enum span_change change)
{
    struct trace_request *r = (struct trace_request *)traced;

    if (change == SPAN_LESS || change == SPAN_OFF) {
        if (r->open[kind] > 0 && --r->open[kind] == 0)
            span_add(r, kind, trace_now());
        return;
    }
    if (change == SPAN_ON && r->open[kind] > 0)
        return;
    r->n[kind]++;
    if (r->open[kind]++ > 0)
        return;
    r->since_ns[kind] = trace_now();
    r->n[kind] = 1;
}

static void end_cb(struct traced *traced, uint32_t code)
{
    struct trace_request *r = (struct trace_request *)traced;
    struct trace *t = r->trace;
    uint64_t now = trace_now();

    if (t->writing && r->run == t->run && now - r->h.arrived_ns >= t->choice.slower_ns) {
        for (int kind = 0; kind < SPAN_KINDS; kind++)
            if (r->open[kind] > 0)
                span_add(r, (enum span_kind)kind, now);
        r->h.end_ns = now;
        r->h.code = code;
        r->h.ok = r->traced.ok;
        r->h.moved_bytes = r->traced.bytes;
        record_write(t, &r->h, r->span, r->request, r->tenant, NULL);
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
    r->h = header_of(about);
    r->run = t->run;
    if (about->request.n > 0)
        memcpy(r->request, about->request.p, about->request.n);
    if (about->tenant.n > 0)
        memcpy(r->tenant, about->tenant.p, about->tenant.n);
    r->since_ns[SPAN_QUEUE] = about->arrived_ns;
    r->n[SPAN_QUEUE] = 1;
    span_add(r, SPAN_QUEUE, about->began_ns);
    return &r->traced;
}
