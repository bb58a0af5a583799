#include "daemon/base/fair.h"

#include <assert.h>
#include <string.h>

void fair_init(struct fair *f, uint64_t burst)
{
    memset(f, 0, sizeof(*f));
    f->burst = burst;
}

/* ---- the heap, from 1 ---- */

static bool before(const struct fair_flow *a, const struct fair_flow *b)
{
    if (a->burst > 0 || b->burst > 0)
        return a->burst > 0 && (b->burst == 0 || a->came < b->came);
    return a->start < b->start || (a->start == b->start && a->came < b->came);
}

static void place(struct fair *f, struct fair_flow *flow, uint32_t at)
{
    f->heap[at - 1] = flow;
    flow->at = at;
}

static void sift_up(struct fair *f, struct fair_flow *flow)
{
    uint32_t at = flow->at;

    for (; at > 1 && before(flow, f->heap[at / 2 - 1]); at /= 2)
        place(f, f->heap[at / 2 - 1], at);
    place(f, flow, at);
}

static void sift_down(struct fair *f, struct fair_flow *flow)
{
    uint32_t at = flow->at, child;

    for (; (child = 2 * at) <= f->n; at = child) {
        child += child < f->n && before(f->heap[child], f->heap[child - 1]);
        if (!before(f->heap[child - 1], flow))
            break;
        place(f, f->heap[child - 1], at);
    }
    place(f, flow, at);
}

/* ---- flows ---- */

static bool contends(const struct fair_flow *flow)
{
    return flow->at > 0 && !flow->aside;
}

void fair_weigh(struct fair *f, struct fair_flow *flow, uint32_t weight)
{
    weight = weight > 0 ? weight : 1;
    if (contends(flow))
        f->weights += weight - (uint64_t)flow->weight;
    flow->weight = weight;
}

void fair_add(struct fair *f, struct fair_flow *flow)
{
    assert(flow->at == 0 && f->n < FAIR_FLOWS_MAX);
    flow->burst = flow->start <= f->now ? f->burst : 0;
    if (flow->start < f->now)
        flow->start = f->now;
    flow->came = ++f->arrivals;
    flow->weight += flow->weight == 0; /* nobody has weighed it */
    flow->at = ++f->n;
    f->n_aside += flow->aside;
    f->weights += contends(flow) ? flow->weight : 0;
    flow->settled = f->turn;
    sift_up(f, flow);
}

void fair_remove(struct fair *f, struct fair_flow *flow)
{
    struct fair_flow *last;

    if (flow->at == 0)
        return;
    flow->owed += contends(flow) ? (f->turn - flow->settled) * flow->weight : 0;
    f->weights -= contends(flow) ? flow->weight : 0;
    last = f->heap[--f->n];
    if (last != flow) {
        place(f, last, flow->at);
        sift_up(f, last);
        sift_down(f, last);
    }
    flow->at = 0;
    f->n_aside -= flow->aside;
    if (f->n == 0)
        f->now = f->latest; /* the end of a busy period: nobody waited, so nobody is in debt */
}

struct fair_flow *fair_first(const struct fair *f)
{
    return f->n > 0 ? f->heap[0] : NULL;
}

struct fair_flow *fair_next(const struct fair *f, const struct fair_flow *flow)
{
    struct fair_flow *next = NULL;

    for (uint32_t i = 0; i < f->n; i++)
        if (before(flow, f->heap[i]) && (!next || before(f->heap[i], next)))
            next = f->heap[i];
    return next;
}

static void count_last(struct fair *f, const struct fair_flow *flow, uint64_t bytes)
{
    if (flow->aside)
        return;
    if (f->last != flow) {
        f->shared = f->last != NULL;
        f->alone_from = f->served;
        f->last = flow;
    }
    f->served += bytes;
}

static void settle(struct fair *f, struct fair_flow *flow, uint64_t bytes, struct fair_got *got)
{
    bool others = f->n - f->n_aside > 1;

    if (!contends(flow))
        return;
    if (others)
        f->turn += (double)bytes / (double)f->weights;
    if (got) {
        got->contended += others ? bytes : 0;
        got->due += (uint64_t)((f->turn - flow->settled) * flow->weight + flow->owed + 0.5);
        flow->owed = 0;
    }
    flow->settled = f->turn;
}

void fair_charge(struct fair *f, struct fair_flow *flow, uint64_t bytes, struct fair_got *got)
{
    uint64_t weight = flow->weight, cost = flow->rest + bytes;
    uint64_t credit = FAIR_CREDIT * f->burst / weight,
             least = f->now > credit ? f->now - credit : 0;

    count_last(f, flow, bytes);
    settle(f, flow, bytes, got);
    flow->bytes += bytes;
    if (flow->start < least)
        flow->start = least; /* who waited while others passed keeps its place, up to its credit */
    if (flow->burst == 0 && flow->start > f->now)
        f->now = flow->start;
    flow->start += cost / weight;
    flow->rest = cost % weight;
    if (flow->start > f->latest)
        f->latest = flow->start;
    flow->burst -= bytes < flow->burst ? bytes : flow->burst;
    if (flow->at > 0)
        sift_down(f, flow);
}

bool fair_contended(const struct fair *f, uint64_t window)
{
    uint32_t n = f->n - f->n_aside;

    if (n > 1 || (n == 1 && f->last && f->last->at == 0))
        return true;
    return f->shared && f->served - f->alone_from < window;
}
