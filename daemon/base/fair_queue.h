/* What waits for one resource, in a lane for each tenant: tenants share the resource as fair.h says, and within a lane the
 * more urgent rank goes first, the oldest of a rank before the others.
 *
 * Tenants are told apart by their numbers, which are dense: below twice as many as there ever were at once. Each number below
 * FAIR_LANES has a lane of its own; above, some share one, as in stochastic fairness queueing (McKenney, "Stochastic Fairness
 * Queueing", INFOCOM 1990): together they get one tenant's part, with the weight of who came last. Tenant 0 is the daemon
 * itself, and shares with nobody. Memory of a lane that nobody has used is not touched.
 *
 * The owner's objects have a list node each and stay the owner's: to take one out of the queue, remove its node.
 * Threads: the owner's. */
#ifndef UCMD_BASE_FAIR_QUEUE_H
#define UCMD_BASE_FAIR_QUEUE_H

#include "daemon/base/fair.h"
#include "daemon/base/list.h"

#define FAIR_LANES FAIR_FLOWS_MAX
#define FAIR_CLASSES 16u
/* Of the daemon's own work, and of tenants unless somebody gives them another. */
#define FAIR_WEIGHT 100u

/* For whom something is done. All zero: for the daemon itself. */
struct fair_who {
    uint32_t tenant, weight;
};

struct fair_lane {
    struct fair_flow flow;
    struct list classes[FAIR_CLASSES]; /* the most urgent first; all zero before its first use */
};

struct fair_queue {
    struct fair fair;
    unsigned classes; /* that are used */
    struct fair_lane lanes[FAIR_LANES];
};

/* On zeroed memory. burst: see fair.h. */
void fair_queue_init(struct fair_queue *q, unsigned classes, uint64_t burst);
/* Behind all of its rank in its lane; front: before them. */
void fair_queue_push(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                     struct list *node, bool front);
/* What is to be served, left in the queue, or NULL. */
struct list *fair_queue_first(struct fair_queue *q);
/* Nothing waits. False: something may. */
static inline bool fair_queue_is_empty(const struct fair_queue *q)
{
    return q->fair.n == 0;
}
/* What would be if the lanes whose first skip_cb names waited; or NULL. */
struct list *fair_queue_first_unless(struct fair_queue *q,
                                     bool (*skip_cb)(void *ctx, struct list *node), void *ctx);
/* What would be if `node`, which waits, could not be; or NULL. */
struct list *fair_queue_next(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                             struct list *node);
/* So many bytes begin of something that waits, or did. got: see fair_charge. */
void fair_queue_charge(struct fair_queue *q, const struct fair_who *who, uint64_t bytes,
                       struct fair_got *got);
/* Has who waits in that lane come back, with no more than his due so far, and some of his burst left? */
bool fair_queue_bursts(struct fair_queue *q, const struct fair_who *who);
/* Calls each for all that waits, which it may take out. */
void fair_queue_each(struct fair_queue *q, void (*each_cb)(void *ctx, struct list *node),
                     void *ctx);

#endif
