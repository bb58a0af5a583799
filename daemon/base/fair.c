#include "daemon/base/fair.h"

#include <assert.h>
#include <string.h>

/* ---- flows ---- */

void fair_init(struct fair *f, uint64_t burst)
{
    memset(f, 0, sizeof(*f));
    f->burst = burst;
}

static bool before(const struct fair_flow *a, const struct fair_flow *b)
{
    if (a->burst > 0 || b->burst > 0)
        return a->burst > 0 && (b->burst == 0 || a->came < b->came);
    return a->start < b->start || (a->start == b->start && a->came < b->came);
}

/* The flow gets its place among those that wait, or leaves it. */
static void place(struct fair *f, struct fair_flow *flow, bool waits)
{
    uint32_t at = 0;

    for (uint32_t upto = f->n; at < upto && f->waiting[at] != flow;) { /* mostly the first one */
        uint32_t middle = (at + upto) / 2;

        if (before(f->waiting[middle], flow))
            at = middle + 1;
        else
            upto = middle;
    }
    if (waits) {
        memmove(&f->waiting[at + 1], &f->waiting[at], (f->n++ - at) * sizeof(f->waiting[0]));
        f->waiting[at] = flow;
    } else {
        memmove(&f->waiting[at], &f->waiting[at + 1], (--f->n - at) * sizeof(f->waiting[0]));
    }
}

void fair_weigh(struct fair *f, struct fair_flow *flow, uint32_t weight)
{
    weight = weight > 0 ? weight : 1;
    if (flow->waits && !flow->aside)
        f->weights += weight - (uint64_t)flow->weight;
    flow->weight = weight;
}

void fair_add(struct fair *f, struct fair_flow *flow)
{
    assert(!flow->waits && f->n < FAIR_FLOWS_MAX);
    flow->burst = flow->start <= f->now ? f->burst : 0;
    if (flow->start < f->now)
        flow->start = f->now;
    flow->came = ++f->arrivals;
    flow->weight += flow->weight == 0; /* nobody has weighed it */
    flow->waits = true;
    f->n_aside += flow->aside;
    f->weights += flow->aside ? 0 : flow->weight;
    flow->settled = f->turn;
    place(f, flow, true);
}

void fair_remove(struct fair *f, struct fair_flow *flow)
{
    if (!flow->waits)
        return;
    if (!flow->aside) {
        flow->owed += (f->turn - flow->settled) * flow->weight;
        f->weights -= flow->weight;
    }
    place(f, flow, false);
    flow->waits = false;
    f->n_aside -= flow->aside;
    if (f->n == 0)
        f->now = f->latest; /* the end of a busy period: nobody waited, so nobody is in debt */
}

struct fair_flow *fair_first(const struct fair *f)
{
    return f->n > 0 ? f->waiting[0] : NULL;
}

struct fair_flow *fair_next(const struct fair *f, const struct fair_flow *flow)
{
    for (uint32_t i = 0; i < f->n; i++)
        if (before(flow, f->waiting[i]))
            return f->waiting[i];
    return NULL;
}

void fair_charge(struct fair *f, struct fair_flow *flow, uint64_t bytes, struct fair_got *got)
{
    uint64_t weight = flow->weight, cost = flow->rest + bytes;
    uint64_t credit = FAIR_CREDIT * f->burst / weight,
             least = f->now > credit ? f->now - credit : 0;
    bool others = f->n - f->n_aside > 1, moves = flow->waits && f->n > 1;

    if (!flow->aside && f->last != flow) {
        f->shared = f->last != NULL;
        f->alone_from = f->served;
        f->last = flow;
    }
    f->served += flow->aside ? 0 : bytes;
    if (flow->waits && !flow->aside) { /* what it gets, and what is due to it */
        f->turn += others ? (double)bytes / (double)f->weights : 0;
        if (got) {
            got->contended += others ? bytes : 0;
            got->due += (uint64_t)((f->turn - flow->settled) * flow->weight + flow->owed + 0.5);
            flow->owed = 0;
        }
        flow->settled = f->turn;
    }
    if (moves)
        place(f, flow, false);
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
    if (moves)
        place(f, flow, true);
}

bool fair_contended(const struct fair *f, uint64_t window)
{
    uint32_t n = f->n - f->n_aside;

    if (n > 1 || (n == 1 && f->last && !f->last->waits))
        return true;
    return f->shared && f->served - f->alone_from < window;
}

/* ---- queues ---- */

#define LANE_OF(flow_) LIST_ENTRY(flow_, struct fair_lane, flow)

void fair_queue_init(struct fair_queue *q, uint64_t burst)
{
    fair_init(&q->fair, burst);
    q->lanes[0].flow.aside = true;
}

static struct fair_lane *lane_of(struct fair_queue *q, const struct fair_who *who)
{
    struct fair_lane *lane =
        &q->lanes[who->tenant == 0 ? 0 : 1 + (who->tenant - 1) % (FAIR_LANES - 1)];
    uint32_t weight = who->weight > 0 ? who->weight : FAIR_WEIGHT;

    if (lane->flow.weight != weight)
        fair_weigh(&q->fair, &lane->flow, weight);
    return lane;
}

/* From that rank on; NULL: nothing waits there. */
static struct list *lane_first(struct fair_lane *lane, unsigned rank)
{
    for (uint32_t left = lane->used >> rank << rank; left; left &= left - 1) {
        struct list *class = &lane->classes[__builtin_ctz(left)];

        if (!list_empty(class))
            return class->next;
        lane->used &= ~(left & -left);
    }
    return NULL;
}

void fair_queue_push(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                     struct list *node, bool front)
{
    struct fair_lane *lane = lane_of(q, who);

    assert(rank < FAIR_CLASSES);
    if (!lane_first(lane, 0)) {
        fair_remove(&q->fair, &lane->flow); /* the owner took out what it had waiting */
        fair_add(&q->fair, &lane->flow);
    }
    if (!(lane->used & 1u << rank))
        list_init(&lane->classes[rank]);
    lane->used |= 1u << rank;
    if (front)
        list_push_front(&lane->classes[rank], node);
    else
        list_push_back(&lane->classes[rank], node);
}

struct list *fair_queue_first(struct fair_queue *q)
{
    while (q->fair.n > 0) {
        struct fair_flow *flow = q->fair.waiting[0];
        struct list *node = lane_first(LANE_OF(flow), 0);

        if (node)
            return node;
        fair_remove(&q->fair, flow);
    }
    return NULL;
}

struct list *fair_queue_first_unless(struct fair_queue *q,
                                     bool (*skip_cb)(void *ctx, struct list *node), void *ctx)
{
    struct fair_flow *flow = fair_first(&q->fair);

    for (; flow; flow = fair_next(&q->fair, flow)) {
        struct list *node = lane_first(LANE_OF(flow), 0);

        if (node && !skip_cb(ctx, node))
            return node;
    }
    return NULL;
}

struct list *fair_queue_next(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                             struct list *node)
{
    struct fair_lane *lane = lane_of(q, who);
    struct fair_flow *flow = &lane->flow;
    struct list *next =
        node->next != &lane->classes[rank] ? node->next : lane_first(lane, rank + 1);

    while (!next && (flow = fair_next(&q->fair, flow)))
        next = lane_first(LANE_OF(flow), 0);
    return next;
}

void fair_queue_charge(struct fair_queue *q, const struct fair_who *who, uint64_t bytes,
                       struct fair_got *got)
{
    struct fair_lane *lane = lane_of(q, who);

    fair_charge(&q->fair, &lane->flow, bytes, got);
    if (!lane_first(lane, 0)) /* harmless if it is out already */
        fair_remove(&q->fair, &lane->flow);
}

bool fair_queue_bursts(struct fair_queue *q, const struct fair_who *who)
{
    return lane_of(q, who)->flow.burst > 0;
}

void fair_queue_each(struct fair_queue *q, void (*each_cb)(void *ctx, struct list *node), void *ctx)
{
    for (uint32_t at = 0; at < q->fair.n; at++) {
        struct fair_lane *lane = LANE_OF(q->fair.waiting[at]);

        for (unsigned i = 0; i < FAIR_CLASSES; i++) {
            struct list *head = &lane->classes[i], *next;

            for (struct list *node = lane->used & 1u << i ? head->next : head; node != head;
                 node = next) {
                next = node->next;
                each_cb(ctx, node);
            }
        }
    }
}
