/* Shares one resource among tenants by their weights: chooses which waiting tenant is served next.
 *
 * Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing: A Scheduling Algorithm for
 * Integrated Services Packet Switching Networks", SIGCOMM 1996). A flow's *start* counts the bytes
 * that it got, divided by its weight; the flow with the lowest start is served. *Now* is the
 * highest start of what was served. A flow that comes back from idle starts at now, or at its own
 * start if that is higher: no flow saves up credit, and a short pause forgives no debt. The
 * resource may do several things at a time; they count when they begin (SFQ(D): Jin, Chase, Kaur,
 * "Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS 2004).
 *
 * Two things are added. One is credit. A flow that waits but can't be served, because its own way
 * is full, lets others pass. It keeps its place, up to FAIR_CREDIT bursts of credit. Without that
 * it would lose its share of all such moments for good, although it had work waiting. (One burst is
 * too little for a heavy flow alongside light ones: tests/unit/base/test_fair_ways.c.)
 *
 * The other is the burst. A flow that comes back, and got at most its due, is served at once and
 * may get up to `burst` bytes before its turn ends: a request that small waits for work under way
 * and for other bursts, not for its neighbours' queues. These bytes count like all others.
 *
 * Promises, for flows i and j that have something waiting during an interval, with bytes W, weights
 * w, and L the most that is charged in one go:
 * - |W_i/w_i - W_j/w_j| <= (burst + L)/w_i + (burst + L)/w_j + 2, however the others come and go,
 *   if neither is passed over. The 2 is rounding: starts are whole numbers.
 * - A flow that was passed over gets what it missed, up to FAIR_CREDIT bursts, as soon as its way
 *   is free.
 * - A flow that comes back and got at most its due (its start is at most now) gets `burst` bytes
 *   before any flow that waits without a burst gets one, and after at most `burst` + L of each that
 *   has one.
 * - There is no clock, and nothing is allocated. Those that wait stand in the order of their turns:
 *   of n of them a call looks at O(log n), fair_queue_next and fair_queue_first_unless at all, and
 *   moves n pointers at most, which for all FAIR_FLOWS_MAX takes less than 2 us.
 *
 * A queue keeps what waits for the resource in a lane, and so a flow, for each tenant; within a
 * lane the more urgent rank goes first, the oldest of a rank before the others.
 *
 * Tenants are identified by dense numbers: below twice as many as there ever were at once. Each
 * number below FAIR_LANES has a lane of its own; above, some share one, as in stochastic fairness
 * queueing (McKenney, "Stochastic Fairness Queueing", INFOCOM 1990): together they get one tenant's
 * share, with the weight of the latest. Tenant 0 is the daemon itself, and shares with nobody.
 * Memory of a lane that nobody has used is not touched.
 *
 * A queue's objects have a list node each and stay their owner's: to take one out of the queue,
 * remove its node.
 *
 * Threads: the owner's. */
#ifndef UCMD_BASE_FAIR_H
#define UCMD_BASE_FAIR_H

#include "daemon/base/list.h"

#include <stdint.h>

#define FAIR_FLOWS_MAX 4096u
#define FAIR_WEIGHT_MAX 10000u
#define FAIR_CREDIT 4u /* bursts */

/* All zero before its first use. */
struct fair_flow {
    uint32_t weight; /* 1 to FAIR_WEIGHT_MAX */
    bool waits;      /* it has something waiting */
    bool aside;      /* the daemon's own: it contends with nobody */
    uint64_t start;
    uint64_t rest;  /* bytes that `start` does not count yet: less than its weight */
    uint64_t burst; /* bytes that it may still have in one go */
    uint64_t came;  /* when its burst began: its place among the bursts */
    uint64_t bytes; /* all bytes that it got */
    double settled; /* fair.turn when the caller was last told what was due to it */
    double owed; /* bytes that were due to it and not reported, since its requests were withdrawn */
};

/* contended: bytes that a flow got while others waited, too. due: bytes that its weight entitled it
 * to meanwhile. If the scheduler keeps its promises, the two converge. */
struct fair_got {
    uint64_t contended, due;
};

struct fair {
    uint64_t burst;       /* bytes */
    uint64_t now, latest; /* latest: the highest start so far */
    uint64_t arrivals;
    /* The flow served last, the total served, and the total when another flow was last served. */
    const struct fair_flow *last;
    uint64_t served, alone_from;
    bool shared;         /* more than one was ever served */
    uint32_t n, n_aside; /* n_aside: of them, those that contend with nobody */
    uint64_t weights;    /* of those that wait and contend */
    double turn; /* bytes that were served while several waited, each by their weights' sum then */
    struct fair_flow
        *waiting[FAIR_FLOWS_MAX]; /* n of them, in the order in which they are served */
};

/* Does more than one flow use the resource: is another one waiting than was served last, or was
 * another one served within the last `window` bytes? Then as little as possible should be under
 * way, as it is in nobody's order. */
bool fair_contended(const struct fair *f, uint64_t window);

/* ---- queues ---- */

#define FAIR_LANES FAIR_FLOWS_MAX
#define FAIR_CLASSES 16u
/* The weight of the daemon's own work, and of tenants without a setting. */
#define FAIR_WEIGHT 100u

/* The tenant that work is done for. All zero: the daemon itself. */
struct fair_who {
    uint32_t tenant, weight;
};

struct fair_lane {
    struct fair_flow flow;
    uint32_t used; /* a bit for each class that something was pushed into: only these are lists */
    struct list classes[FAIR_CLASSES]; /* the most urgent first */
};

struct fair_queue {
    struct fair fair; /* with fair.n == 0 nothing waits; else something may */
    struct fair_lane lanes[FAIR_LANES];
};

/* On zeroed memory. */
void fair_queue_init(struct fair_queue *q, uint64_t burst);
/* After all of its rank, which is below FAIR_CLASSES, in its lane; front: before them. */
void fair_queue_push(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                     struct list *node, bool front);
/* What is to be served, left in the queue, or NULL. */
struct list *fair_queue_first(struct fair_queue *q);
/* What would be if the lanes whose first skip_cb names waited; or NULL. */
struct list *fair_queue_first_unless(struct fair_queue *q,
                                     bool (*skip_cb)(void *ctx, struct list *node), void *ctx);
/* What would be if `node`, which waits, could not be; or NULL. */
struct list *fair_queue_next(struct fair_queue *q, const struct fair_who *who, unsigned rank,
                             struct list *node);
/* Charges bytes of a transfer that begins, queued or not. Any flow may be served, but the promises
 * hold only if the first one is. A flow that was passed over goes first as soon as it can. Adds to
 * *got, which may be NULL. */
void fair_queue_charge(struct fair_queue *q, const struct fair_who *who, uint64_t bytes,
                       struct fair_got *got);
/* Whether the flow of that lane came back, got at most its due so far, and has some of its burst
 * left. */
bool fair_queue_bursts(struct fair_queue *q, const struct fair_who *who);
/* Calls each for all that waits, which it may take out. */
void fair_queue_each(struct fair_queue *q, void (*each_cb)(void *ctx, struct list *node),
                     void *ctx);

#endif
