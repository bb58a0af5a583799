/* The order, bounds and accounts of a prefetcher (ucmclient_sparse.h), apart from the client, its
 * connection and the clock: prefetcher.c sends what prefetch_queue_next() returns.
 *
 * The caller owns the items and keeps other threads out. An item is WAITING in the queue, SENT when
 * prefetch_queue_next() returned it, and ENDED. Its bytes count from SENT until it is removed: what
 * was brought up fills DRAM until the user is done with it. */
#ifndef UCM_CLIENT_PREFETCH_QUEUE_H
#define UCM_CLIENT_PREFETCH_QUEUE_H

#include "client/include/ucmclient_sparse.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#define PREFETCH_PRIORITIES 4

enum prefetch_state {
    PREFETCH_WAITING,
    PREFETCH_SENT,
    PREFETCH_ENDED,
};

struct prefetch_item {
    enum prefetch_state state;
    enum ucm_prefetch_priority priority;
    uint64_t batch;      /* that uses the blocks */
    uint64_t bytes;      /* of all its blocks */
    int64_t deadline_ns; /* ends it while it waits */
    bool counted;        /* its bytes are in bytes_used */
    TAILQ_ENTRY(prefetch_item) node;
};
TAILQ_HEAD(prefetch_items, prefetch_item);

struct prefetch_queue {
    struct prefetch_items waiting[PREFETCH_PRIORITIES]; /* in the order of their submission */
    uint32_t max_pending, n_pending;                    /* WAITING and SENT */
    uint64_t bytes_max, bytes_used;
    uint64_t batch; /* that runs now */
    uint32_t ahead;
};

void prefetch_queue_init(struct prefetch_queue *q, uint32_t max_pending, uint64_t bytes_max,
                         uint32_t ahead);
/* Makes room for one more of that priority. 0; or 1 with *out: a less urgent one that still waited
 * was taken out to make room, and is ENDED; or -UCM_EBUSY. */
int prefetch_queue_make_room(struct prefetch_queue *q, enum ucm_prefetch_priority priority,
                             struct prefetch_item **out);
/* After make_room. The item's priority, batch, bytes (at most bytes_max) and deadline are set. */
void prefetch_queue_add(struct prefetch_queue *q, struct prefetch_item *item);
/* The item to send now, which is then SENT; NULL: none may be sent. The most urgent goes first, then
 * the oldest. Items for batches further ahead than `ahead` are passed over. An item without room
 * for its bytes holds back those behind it: else a large one would never leave. */
struct prefetch_item *prefetch_queue_next(struct prefetch_queue *q);
/* It could not be sent: it waits again, before the others of its priority. */
void prefetch_queue_unsend(struct prefetch_queue *q, struct prefetch_item *item);
/* Takes one that waits out if its deadline has passed or its batch has run; it is ENDED. */
struct prefetch_item *prefetch_queue_expire(struct prefetch_queue *q, int64_t now_ns);
/* An item that waits gets another priority, behind those that have it. */
void prefetch_queue_move(struct prefetch_queue *q, struct prefetch_item *item,
                         enum ucm_prefetch_priority priority);
/* It was answered, or is given up. No effect on one that has ended. */
void prefetch_queue_end(struct prefetch_queue *q, struct prefetch_item *item);
/* Ends it and gives its bytes back. */
void prefetch_queue_remove(struct prefetch_queue *q, struct prefetch_item *item);

#endif
