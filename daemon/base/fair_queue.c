#include "daemon/base/fair_queue.h"

#include <assert.h>

void fair_queue_init(struct fair_queue *q, unsigned classes, uint64_t burst)
{
    assert(classes <= FAIR_CLASSES);
    q->classes = classes;
    fair_init(&q->fair, burst);
    q->lanes[0].flow.aside = true;
}

static struct fair_lane *lane_of(struct fair_queue *q, const struct fair_who *who)
{
    struct fair_lane *lane =
        &q->lanes[who->tenant == 0 ? 0 : 1 + (who->tenant - 1) % (FAIR_LANES - 1)];

    for (unsigned rank = 0; !lane->classes[0].next && rank < q->classes; rank++)
        list_init(&lane->classes[q->classes - 1 - rank]); /* the first one last */
    return lane;
}

/* From that rank on; NULL: nothing waits there. */
static struct list *lane_first(const struct fair_queue *q, struct fair_lane *lane, unsigned rank)
{
    for (; rank < q->classes; rank++)
        if (!list_empty(&lane->classes[rank]))
            return lane->classes[rank].next;
    return NULL;
}

#define LANE_OF(flow_) LIST_ENTRY(flow_, struct fair_lane, flow)

void fair_queue_push(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                     struct list *node, bool front)
{
    uint32_t weight = who->weight > 0 ? who->weight : FAIR_WEIGHT;
    struct fair_lane *lane = lane_of(q, who);

    if (!lane_first(q, lane, 0)) {
        fair_remove(&q->fair, &lane->flow); /* the owner took out what it had waiting */
        fair_add(&q->fair, &lane->flow);
    }
    if (lane->flow.weight != weight)
        fair_weigh(&q->fair, &lane->flow, weight);
    if (front)
        list_push_front(&lane->classes[rank], node);
    else
        list_push_back(&lane->classes[rank], node);
}

struct list *fair_queue_first(struct fair_queue *q)
{
    struct fair_flow *flow;

    while ((flow = fair_first(&q->fair))) {
        struct list *node = lane_first(q, LANE_OF(flow), 0);

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
        struct list *node = lane_first(q, LANE_OF(flow), 0);

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
        node->next != &lane->classes[rank] ? node->next : lane_first(q, lane, rank + 1);

    while (!next && (flow = fair_next(&q->fair, flow)))
        next = lane_first(q, LANE_OF(flow), 0);
    return next;
}

void fair_queue_charge(struct fair_queue *q, const struct fair_who *who, uint64_t bytes,
                       struct fair_got *got)
{
    uint32_t weight = who->weight > 0 ? who->weight : FAIR_WEIGHT;
    struct fair_lane *lane = lane_of(q, who);

    if (lane->flow.weight != weight)
        fair_weigh(&q->fair, &lane->flow, weight);
    fair_charge(&q->fair, &lane->flow, bytes, got);
    if (!lane_first(q, lane, 0)) /* harmless if it is out already */
        fair_remove(&q->fair, &lane->flow);
}

bool fair_queue_bursts(struct fair_queue *q, const struct fair_who *who)
{
    return lane_of(q, who)->flow.burst > 0;
}

void fair_queue_each(struct fair_queue *q, void (*each_cb)(void *ctx, struct list *node), void *ctx)
{
    for (uint32_t at = 0; at < q->fair.n; at++) {
        struct fair_lane *lane = LANE_OF(q->fair.heap[at]);

        for (unsigned i = 0; i < q->classes; i++) {
            struct list *head = &lane->classes[i], *next;

            for (struct list *node = head->next; node != head; node = next) {
                next = node->next;
                each_cb(ctx, node);
            }
        }
    }
}
