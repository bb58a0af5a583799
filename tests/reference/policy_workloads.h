/* Workloads: seeded, and so the same in each run. Each is a list of requests in order of time, and
 * each request a sequence of numbered blocks. This header is part of one program each, so its state
 * is global. */
#ifndef UCM_TESTS_POLICY_WORKLOADS_H
#define UCM_TESTS_POLICY_WORKLOADS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HOUR 3600.0
#define CHAIN_MAX 1024

/* ---- chance ---- */

static uint64_t seed_state;

static uint64_t draw(void)
{
    uint64_t z = (seed_state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double chance(void) /* above 0, at most 1 */
{
    return ((double)(draw() >> 11) + 1) / 9007199254740992.0;
}

static uint32_t between(uint32_t least, uint32_t most)
{
    return least + (uint32_t)(draw() % (most - least + 1));
}

static double after(double mean) /* exponential */
{
    return -mean * log(chance());
}

static double around(double median, double sigma) /* log-normal */
{
    return median * exp(sigma * sqrt(-2 * log(chance())) * cos(6.283185307179586 * chance()));
}

/* 0 to n - 1, the lower the likelier: Zipf with exponent 1, nearly. */
static uint32_t popular(uint32_t n)
{
    return (uint32_t)(exp(chance() * log(n + 1.0)) - 1) % n;
}

/* ---- requests ---- */

struct request {
    uint32_t *id;
    uint32_t n;
};

static struct request *requests;
static uint32_t n_requests, n_ids, cap_requests;
static uint64_t n_references;

static void *zeroed(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);

    if (!p)
        abort();
    return p;
}

static void request_add(const uint32_t *id, uint32_t n)
{
    struct request r = {.n = n};

    r.id = zeroed(n, sizeof(*r.id));
    memcpy(r.id, id, n * sizeof(*r.id));
    n_references += n;
    if (n_requests == cap_requests) {
        cap_requests = cap_requests ? cap_requests * 2 : 1024;
        requests = realloc(requests, cap_requests * sizeof(*requests));
        if (!requests)
            abort();
    }
    requests[n_requests++] = r;
}

static void trace_free(void)
{
    for (uint32_t i = 0; i < n_requests; i++)
        free(requests[i].id);
    free(requests);
    requests = NULL;
    n_requests = n_ids = cap_requests = 0;
    n_references = 0;
}

static double *when_at;
static uint32_t when_cap;

static void at(double when, const uint32_t *id, uint32_t n)
{
    if (n_requests >= when_cap) {
        when_cap = when_cap ? 2 * when_cap : 1024;
        when_at = realloc(when_at, when_cap * sizeof(*when_at));
        if (!when_at)
            abort();
    }
    when_at[n_requests] = when;
    request_add(id, n);
}

struct chain {
    uint32_t id[CHAIN_MAX];
    uint32_t n;
};

static void grow(struct chain *c, uint32_t n)
{
    while (n-- > 0 && c->n < CHAIN_MAX)
        c->id[c->n++] = n_ids++;
}

/* A sequence that `which` of the workload shares; made at its first use. */
static void shared(struct chain *c, struct chain *pool, uint32_t which, uint32_t n)
{
    if (pool[which].n == 0)
        grow(&pool[which], n);
    *c = pool[which];
}

/* ---- requests; rates are requests or sessions a second, from begin to end ---- */

/* Users who read, think and go on: 3 system prompts, each turn longer than the one before. */
static void chat(double begin, double end, double rate)
{
    static struct chain prompt[3];

    memset(prompt, 0, sizeof(prompt));
    for (double t = begin + after(1 / rate); t < end; t += after(1 / rate)) {
        struct chain c;
        double when = t, goes_on = chance() < 0.5 ? 0.3 : 0.85;

        shared(&c, prompt, popular(3), between(1, 4));
        grow(&c, between(1, 12));
        for (at(when, c.id, c.n); chance() < goes_on; at(when, c.id, c.n)) {
            grow(&c, between(1, 5));
            when += around(60, 1);
            if (when > end)
                break;
        }
    }
}

/* Tens of turns over a context of up to 200 blocks (100k tokens), seconds apart, at times minutes. */
static void agents(double begin, double end, double rate)
{
    static struct chain tools[6];

    memset(tools, 0, sizeof(tools));
    for (double t = begin + after(1 / rate); t < end; t += after(1 / rate)) {
        struct chain c;
        double when = t;

        shared(&c, tools, popular(6), between(8, 20));
        grow(&c, between(4, 30));
        for (uint32_t turns = between(10, 60); turns > 0 && c.n < 200 && when < end; turns--) {
            at(when, c.id, c.n);
            grow(&c, between(1, 5));
            when += chance() < 0.15 ? around(150, 0.7) : around(8, 0.8);
        }
    }
}

/* One of 60 prompts with examples, some far more popular, and a question that nobody asks again. */
static void few_shot(double begin, double end, double rate)
{
    static struct chain prompt[60];

    memset(prompt, 0, sizeof(prompt));
    for (double t = begin + after(1 / rate); t < end; t += after(1 / rate)) {
        struct chain c;

        shared(&c, prompt, popular(60), between(8, 40));
        grow(&c, between(1, 4));
        at(t, c.id, c.n);
    }
}

/* Documents of 10 to 60 blocks: some questions within minutes, and perhaps the same hours later. */
static void rag(double begin, double end, double rate)
{
    enum { DOCUMENTS = 1500 };
    static struct chain document[DOCUMENTS];

    memset(document, 0, sizeof(document));
    for (double t = begin + after(1 / rate); t < end; t += after(1 / rate)) {
        uint32_t which = popular(DOCUMENTS), questions = 1 + (uint32_t)after(3);
        double when = t;

        for (; questions > 0 && when < end; questions--) {
            struct chain c;

            shared(&c, document, which, between(10, 60));
            grow(&c, 1);
            at(when, c.id, c.n);
            when += after(40);
        }
    }
}

/* Jobs over rows that nobody asks for again. */
static void batch(double begin, double end, double rate)
{
    struct chain head = {.n = 0};

    grow(&head, 2);
    for (double t = begin + after(1 / rate); t < end; t += after(1 / rate)) {
        struct chain c = head;

        grow(&c, between(4, 40));
        at(t, c.id, c.n);
    }
}

/* ---- workloads ---- */

/* The shape of a second production-like trace, of which only figures are known. It has 121,877
 * references to 43,924 blocks. After 1, 2, ... uses, 41.6, 84.1, 78.2, 73.4, 76.0, 68.5 % are used
 * again. Distances between uses are about exponential, of a fifth of all blocks. There are some 350
 * sessions at a time, each over its own text; the next one is random. */
static void sessions(double begin, double end, double rate)
{
    enum { ACTIVE = 350 };
    static struct chain text[ACTIVE];
    static uint32_t left[ACTIVE];

    memset(left, 0, sizeof(left));
    for (double t = begin; t < end; t += 1 / rate) {
        uint32_t s = between(0, ACTIVE - 1);
        struct chain c;

        if (left[s] == 0) {
            text[s].n = 0;
            grow(&text[s], (uint32_t)fmin(200, around(14, 0.8)) + 1);
            left[s] = chance() < 0.3 ? 1 : 2;
            while (left[s] > 1 && left[s] < 40 && chance() < 0.8)
                left[s]++;
        }
        c = text[s];
        grow(&c, between(2, 8));
        at(t, c.id, c.n);
        left[s]--;
    }
}

struct part {
    void (*make)(double begin, double end, double rate);
    double begin, end, rate;
};

static const struct {
    const char *name;
    struct part parts[6]; /* after the last, one without make */
} workloads[] = {
    {"chat", {{chat, 0, HOUR, 1.6}}},
    {"agents", {{agents, 0, HOUR, 0.06}}},
    {"few-shot", {{few_shot, 0, HOUR, 2.5}}},
    {"rag", {{rag, 0, HOUR, 0.6}}},
    {"batch", {{batch, 0, HOUR, 0.8}, {chat, 0, HOUR, 0.8}}},
    {"sessions", {{sessions, 0, 4000, 1}}},
    {"shift",
     {{chat, 0, HOUR / 3, 1.6},
      {agents, HOUR / 4, 2 * HOUR / 3, 0.06},
      {batch, HOUR / 3, HOUR / 2, 1.5},
      {rag, HOUR / 2, HOUR, 0.6},
      {few_shot, 2 * HOUR / 3, HOUR, 2}}},
    {"tenants",
     {{chat, 0, HOUR, 0.5},
      {agents, 0, HOUR, 0.02},
      {rag, 0, HOUR, 0.15},
      {few_shot, 0, HOUR, 0.5},
      {batch, HOUR / 4, HOUR, 0.3}}},
};

static int by_time(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;

    if (when_at[*x] != when_at[*y])
        return when_at[*x] < when_at[*y] ? -1 : 1;
    return *x < *y ? -1 : 1;
}

static void sort_by_time(void)
{
    uint32_t *order = zeroed(n_requests, sizeof(*order));
    struct request *sorted = zeroed(n_requests, sizeof(*sorted));

    for (uint32_t i = 0; i < n_requests; i++)
        order[i] = i;
    qsort(order, n_requests, sizeof(*order), by_time);
    for (uint32_t i = 0; i < n_requests; i++)
        sorted[i] = requests[order[i]];
    memcpy(requests, sorted, n_requests * sizeof(*sorted));
    free(sorted);
    free(order);
}

/* -1: there is no workload of that name. */
static int workload_make(const char *name, unsigned long seed)
{
    for (size_t i = 0; i < sizeof(workloads) / sizeof(workloads[0]); i++) {
        if (strcmp(workloads[i].name, name) != 0)
            continue;
        seed_state = seed * UINT64_C(0x2545f4914f6cdd1d) + i;
        for (const struct part *p = workloads[i].parts; p->make; p++)
            p->make(p->begin, p->end, p->rate);
        sort_by_time();
        free(when_at);
        when_at = NULL;
        when_cap = 0;
        return 0;
    }
    return -1;
}

#endif
