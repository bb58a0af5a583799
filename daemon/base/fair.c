#include "daemon/base/fair.h"

#include <assert.h>
#include <string.h>

static bool before(const struct fair_flow *a, const struct fair_flow *b)
{
    if (a->burst > 0 || b->burst > 0)
        return a->burst > 0 && (b->burst == 0 || a->came < b->came);
    return a->start < b->start || (a->start == b->start && a->came < b->came);
}

/* Where it stands among those that wait, from that place on, or would stand. */
static uint32_t place_of(const struct fair *f, const struct fair_flow *flow, uint32_t from)
{
    for (uint32_t upto = f->n; from < upto && f->waiting[from] != flow;) { /* mostly the first */
        uint32_t middle = (from + upto) / 2;

        if (before(f->waiting[middle], flow))
            from = middle + 1;
        else
            upto = middle;
    }
    return from;
}

static void leave(struct fair *f, struct fair_flow *flow)
{
    struct fair_flow **at;

    if (!flow->waits)
        return;
    if (!flow->aside) {
        flow->owed += (f->turn - flow->settled) * flow->weight;
        f->weights -= flow->weight;
    }
    at = &f->waiting[place_of(f, flow, 0)];
    memmove(at, at + 1, (size_t)(&f->waiting[--f->n] - at) * sizeof(*at));
    flow->waits = false;
    f->n_aside -= flow->aside;
    if (f->n == 0)
        f->now = f->latest; /* the end of a busy period: nobody waited, so nobody is in debt */
}

bool fair_contended(const struct fair *f, uint64_t window)
{
    uint32_t n = f->n - f->n_aside;

    if (n > 1 || (n == 1 && f->last && !f->last->waits))
        return true;
    return f->shared && f->served - f->alone_from < window;
}

#define LANE_OF(flow_) LIST_ENTRY(flow_, struct fair_lane, flow)

void fair_queue_init(struct fair_queue *q, uint64_t burst)
{
    q->fair = (struct fair){.burst = burst};
    q->lanes[0].flow.aside = true;
}

/* The lane of who's tenant, with who's weight from now on. */
static struct fair_lane *lane_of(struct fair_queue *q, const struct fair_who *who)
{
    struct fair_lane *lane =
        &q->lanes[who->tenant == 0 ? 0 : 1 + (who->tenant - 1) % (FAIR_LANES - 1)];
    uint32_t weight = who->weight > 0 ? who->weight : FAIR_WEIGHT;

    if (lane->flow.waits && !lane->flow.aside)
        q->fair.weights += weight - (uint64_t)lane->flow.weight;
    lane->flow.weight = weight;
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
    struct fair_flow *flow = &lane->flow;
    struct fair *f = &q->fair;
    struct fair_flow **at;

    assert(rank < FAIR_CLASSES);
    if (!lane_first(lane, 0)) {
        leave(f, flow); /* the owner took out what it had waiting */
        flow->burst = flow->start <= f->now ? f->burst : 0;
        if (flow->start < f->now)
            flow->start = f->now;
        flow->came = ++f->arrivals;
        flow->waits = true;
        f->n_aside += flow->aside;
        f->weights += flow->aside ? 0 : flow->weight;
        flow->settled = f->turn;
        at = &f->waiting[place_of(f, flow, 0)];
        memmove(at + 1, at, (size_t)(&f->waiting[f->n++] - at) * sizeof(*at));
        *at = flow;
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
        leave(&q->fair, flow);
    }
    return NULL;
}

struct list *fair_queue_first_unless(struct fair_queue *q,
                                     bool (*skip_cb)(void *ctx, struct list *node), void *ctx)
{
    for (uint32_t i = 0; i < q->fair.n; i++) {
        struct list *node = lane_first(LANE_OF(q->fair.waiting[i]), 0);

        if (node && !skip_cb(ctx, node))
            return node;
    }
    return NULL;
}

struct list *fair_queue_next(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                             struct list *node)
{
    struct fair_lane *lane = lane_of(q, who);
    struct list *next =
        node->next != &lane->classes[rank] ? node->next : lane_first(lane, rank + 1);

    for (uint32_t i = 0; i < q->fair.n && !next; i++)
        if (before(&lane->flow, q->fair.waiting[i]))
            next = lane_first(LANE_OF(q->fair.waiting[i]), 0);
    return next;
}

void fair_queue_charge(struct fair_queue *q, const struct fair_who *who, uint64_t bytes,
                       struct fair_got *got)
{
    struct fair_lane *lane = lane_of(q, who);
    struct fair_flow *flow = &lane->flow;
    struct fair *f = &q->fair;
    uint64_t cost = flow->rest + bytes, credit = FAIR_CREDIT * f->burst / flow->weight,
             least = f->now > credit ? f->now - credit : 0;
    bool others = f->n - f->n_aside > 1, moves = flow->waits && f->n > 1;
    uint32_t at = moves ? place_of(f, flow, 0) : 0, to;

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
    flow->bytes += bytes;
    if (flow->start < least)
        flow->start =
            least; /* a flow that waited while others passed keeps its place, up to its credit */
    if (flow->burst == 0 && flow->start > f->now)
        f->now = flow->start;
    flow->start += cost / flow->weight;
    flow->rest = cost % flow->weight;
    if (flow->start > f->latest)
        f->latest = flow->start;
    flow->burst -= bytes < flow->burst ? bytes : flow->burst;
    if (moves) {
        to = place_of(f, flow, at + 1) - 1;
        memmove(&f->waiting[at], &f->waiting[at + 1], (to - at) * sizeof(f->waiting[0]));
        f->waiting[to] = flow;
    }
    if (!lane_first(lane, 0)) /* harmless if it is out already */
        leave(f, flow);
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
