/* Runs of a trace or a workload: blocks that always come together, one behind the other. */
#include "tests/bench/policy_workloads.h"
#include "tests/bench/scale.h"

#define HEAD_CHILDREN 16u /* prompts that go on from one: it is nobody's own */
#define DOCUMENTS 1000u
#define RUN_BLOCKS 16384u

/* ---- traffic with a skew ---- */

/* 0 to n - 1 with a chance of rank^-exponent. */
static uint32_t ranked(const double *sum, uint32_t n)
{
    double x = chance() * sum[n - 1];
    uint32_t low = 0, high = n - 1;

    while (low < high) {
        uint32_t middle = (low + high) / 2;

        if (sum[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Sessions of some turns, each over one of 1,000 documents that all copies have; the exponent says how far some are more
 * popular. Returns how many blocks the documents have: they come first. */
static uint32_t make_skew(double exponent)
{
    static struct chain document[DOCUMENTS];
    static double sum[DOCUMENTS];
    uint32_t common;

    memset(document, 0, sizeof(document));
    for (uint32_t i = 0; i < DOCUMENTS; i++) {
        grow(&document[i], between(8, 40));
        sum[i] = pow(i + 1.0, -exponent) + (i > 0 ? sum[i - 1] : 0);
    }
    common = n_ids;
    for (double t = after(1); t < HOUR; t += after(1)) {
        struct chain c = document[ranked(sum, DOCUMENTS)];
        double when = t;

        for (uint32_t turns = 1 + (uint32_t)after(2); turns > 0 && when < HOUR; turns--) {
            grow(&c, between(1, 8));
            at(when, c.id, c.n);
            when += around(60, 1);
        }
    }
    sort_by_time();
    free(when_at);
    when_at = NULL;
    when_cap = 0;
    return common;
}

/* ---- runs ---- */

struct maker {
    const struct scale_source *source;
    uint32_t *parent,
        *children;      /* of each block: the one before it, SCALE_NONE; how many come behind it */
    bool *known, *ends; /* a request ends there */
    uint32_t *run;      /* of each block */
    uint32_t *owner;    /* of each run: the session that came first; SCALE_NONE: nobody's */
    uint32_t common;    /* blocks */
};

static void blocks_link(struct maker *m)
{
    for (uint32_t i = 0; i < n_requests; i++) {
        uint32_t before = SCALE_NONE;

        for (uint32_t k = 0; k < requests[i].n; k++) {
            uint32_t id = requests[i].id[k];

            if (!m->known[id]) {
                m->known[id] = true;
                m->parent[id] = before;
                if (before != SCALE_NONE)
                    m->children[before]++;
            }
            before = id;
        }
        if (before != SCALE_NONE)
            m->ends[before] = true;
    }
}

static bool begins_run(const struct maker *m, uint32_t id)
{
    uint32_t before = m->parent[id];

    return before == SCALE_NONE || m->ends[before] || m->children[before] != 1 ||
           (before < m->common) != (id < m->common);
}

/* Numbers follow the first appearance, so a parent's is lower. */
static void runs_make(struct maker *m, struct scale_traffic *t)
{
    for (uint32_t i = 0; i < n_requests; i++)
        for (uint32_t k = 0; k < requests[i].n; k++) {
            uint32_t id = requests[i].id[k], before = m->parent[id];

            if (m->run[id] != SCALE_NONE)
                continue;
            t->blocks += m->source->split;
            if (begins_run(m, id) ||
                t->runs[m->run[before]].blocks + m->source->split > RUN_BLOCKS) {
                t->runs[t->n_runs].parent = before == SCALE_NONE ? SCALE_NONE : m->run[before];
                m->run[id] = t->n_runs++;
            } else {
                m->run[id] = m->run[before];
            }
            t->runs[m->run[id]].blocks = (uint16_t)(t->runs[m->run[id]].blocks + m->source->split);
            t->runs[m->run[id]].common = id < m->common;
        }
}

/* Heads: runs that many others go on from, and those before them. */
static void heads_find(const struct maker *m, struct scale_traffic *t)
{
    uint32_t *children = zeroed(t->n_runs, sizeof(*children));

    for (uint32_t i = t->n_runs; i-- > 0;) {
        struct scale_run *r = &t->runs[i];
        bool head = r->common || children[i] >= HEAD_CHILDREN;

        if (head)
            m->owner[i] = SCALE_NONE - 1;
        if (r->parent != SCALE_NONE) {
            children[r->parent]++;
            if (head)
                children[r->parent] = HEAD_CHILDREN;
        }
    }
    free(children);
}

/* A request goes on with the session whose run it has; heads are nobody's. */
static uint32_t session_of(const struct maker *m, const struct scale_traffic *t, uint32_t run,
                           uint32_t next)
{
    uint32_t session = next;

    for (uint32_t r = run; r != SCALE_NONE; r = t->runs[r].parent)
        if (m->owner[r] < SCALE_NONE - 1) {
            session = m->owner[r];
            break;
        }
    for (uint32_t r = run; r != SCALE_NONE; r = t->runs[r].parent)
        if (m->owner[r] == SCALE_NONE)
            m->owner[r] = session;
    return session;
}

static void requests_make(const struct maker *m, struct scale_traffic *t)
{
    uint32_t sessions = 0;

    for (uint32_t i = 0; i < n_requests; i++) {
        struct scale_request *r = &t->requests[t->n_requests];
        uint32_t depth = 0;

        if (requests[i].n == 0)
            continue;
        r->step = (uint32_t)(requests[i].when * SCALE_STEPS);
        if (t->n_requests > 0 && r->step < r[-1].step)
            r->step = r[-1].step; /* a recorder's lines may be out of order by a little */
        r->run = m->run[requests[i].id[requests[i].n - 1]];
        r->session = session_of(m, t, r->run, sessions);
        sessions += r->session == sessions;
        t->n_requests++;
        t->references += (uint64_t)requests[i].n * m->source->split;
        for (uint32_t k = r->run; k != SCALE_NONE; k = t->runs[k].parent)
            depth++;
        t->deepest = depth > t->deepest ? depth : t->deepest;
    }
}

/* Of each run a number among the common or among the others, and of each step the first request. */
static void numbers_make(const struct maker *m, struct scale_traffic *t)
{
    uint32_t own = 0, at = 0;

    for (uint32_t i = 0; i < t->n_runs; i++) {
        struct scale_run *r = &t->runs[i];

        r->common = m->source->common == SCALE_COMMON_ALL ||
                    (m->source->common == SCALE_COMMON_HEADS && m->owner[i] == SCALE_NONE - 1);
        r->number = r->common ? t->n_common++ : own++;
    }
    t->n_steps = (t->n_requests > 0 ? t->requests[t->n_requests - 1].step : 0) + 1;
    t->n_steps += (SCALE_STEPS - t->n_steps % SCALE_STEPS) % SCALE_STEPS;
    t->first = zeroed(t->n_steps + 1, sizeof(*t->first));
    for (uint32_t s = 0; s <= t->n_steps; s++) {
        while (at < t->n_requests && t->requests[at].step < s)
            at++;
        t->first[s] = at;
    }
}

static void *nones(size_t n)
{
    uint32_t *p = zeroed(n, sizeof(*p));

    memset(p, 0xff, n * sizeof(*p));
    return p;
}

void scale_traffic_add(double when, const uint32_t *id, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        n_ids = id[i] >= n_ids ? id[i] + 1 : n_ids;
    request_add(id, n);
    requests[n_requests - 1].when = when;
}

void scale_traffic_make(const struct scale_source *source, uint32_t common, struct scale_traffic *t)
{
    struct maker m = {.source = source,
                      .parent = nones(n_ids),
                      .children = zeroed(n_ids, sizeof(uint32_t)),
                      .known = zeroed(n_ids, 1),
                      .ends = zeroed(n_ids, 1),
                      .run = nones(n_ids),
                      .owner = nones(n_ids),
                      .common = common};

    *t = (struct scale_traffic){.runs = zeroed(n_ids, sizeof(*t->runs)),
                                .requests = zeroed(n_requests, sizeof(*t->requests))};
    while (source->minutes > 0 && n_requests > 0 &&
           requests[n_requests - 1].when >= source->minutes * 60)
        free(requests[--n_requests].id);
    blocks_link(&m);
    runs_make(&m, t);
    heads_find(&m, t);
    requests_make(&m, t);
    numbers_make(&m, t);
    free(m.parent);
    free(m.children);
    free(m.known);
    free(m.ends);
    free(m.run);
    free(m.owner);
    trace_free();
}

int scale_traffic_load(const struct scale_source *source, struct scale_traffic *out)
{
    uint32_t common = 0;

    if (strncmp(source->what, "skew:", 5) == 0) {
        seed_state = source->seed * UINT64_C(0x2545f4914f6cdd1d);
        common = make_skew(atof(source->what + 5));
    } else if (workload_make(source->what, source->seed) < 0 && trace_read(source->what) < 0) {
        fprintf(stderr, "it is neither a trace (docs/measuring.md) nor skew:EXPONENT nor one of "
                        "these workloads:\n");
        workload_list(stderr);
        return -1;
    }
    scale_traffic_make(source, common, out);
    return 0;
}

void scale_traffic_free(struct scale_traffic *t)
{
    free(t->runs);
    free(t->requests);
    free(t->first);
}
