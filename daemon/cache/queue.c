/* Rings of blocks that wait to be written, and whose turn it is. */
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* A block that is removed while it waits leaves its number here, so that the index's bound is none
 * for the queue. */
#define QUEUE_MAX (1u << 20)

static int queue_grow(struct block_queue *q)
{
    uint32_t cap = q->cap ? 2 * q->cap : 1024;
    block_ref *entries;

    if (q->n == QUEUE_MAX)
        return -ENOSPC;
    entries = malloc(cap * sizeof(*entries));
    if (!entries)
        return -ENOMEM;
    for (uint32_t i = 0; i < q->n; i++)
        entries[i] = q->entries[(q->head + i) % q->cap];
    free(q->entries);
    *q = (struct block_queue){.entries = entries, .n = q->n, .cap = cap};
    return 0;
}

int queue_push(struct block_queue *q, block_ref ref)
{
    int rc = q->n == q->cap ? queue_grow(q) : 0;

    if (rc == 0)
        q->entries[(q->head + q->n++) % q->cap] = ref;
    return rc;
}

int queue_push_front(struct block_queue *q, block_ref ref)
{
    int rc = q->n == q->cap ? queue_grow(q) : 0;

    if (rc < 0)
        return rc;
    q->head = (q->head + q->cap - 1) % q->cap;
    q->entries[q->head] = ref;
    q->n++;
    return 0;
}

block_ref queue_pop(struct block_queue *q)
{
    block_ref ref = q->entries[q->head];

    q->head = (q->head + 1) % q->cap;
    q->n--;
    return ref;
}

block_ref queue_pop_last(struct block_queue *q)
{
    return q->entries[(q->head + --q->n) % q->cap];
}

/* ---- tenants' queues ---- */

static struct write_lane *lane_of(struct write_target *t, const struct tenant *of)
{
    return &t->lane[of->id % FAIR_FLOWS_MAX];
}

int writes_push(struct write_target *t, const struct tenant *of, block_ref ref, bool front)
{
    struct write_lane *lane = lane_of(t, of);
    int rc = front ? queue_push_front(&lane->queue, ref) : queue_push(&lane->queue, ref);

    if (rc != 0)
        return rc;
    t->n++;
    if (lane->flow.at == 0)
        fair_add(&t->fair, &lane->flow);
    fair_weigh(&t->fair, &lane->flow, (uint32_t)of->settings.weight);
    return 0;
}

block_ref writes_pop(struct write_target *t, struct write_lane **lane)
{
    *lane = LIST_ENTRY(fair_first(&t->fair), struct write_lane, flow);
    t->n--;
    return queue_pop(&(*lane)->queue);
}

void writes_charge(struct write_target *t, struct write_lane *lane, uint64_t bytes)
{
    if (bytes > 0)
        fair_charge(&t->fair, &lane->flow, bytes, NULL);
    if (lane->queue.n == 0)
        fair_remove(&t->fair, &lane->flow);
}

void writes_free(struct write_target *t)
{
    for (uint32_t i = 0; i < FAIR_FLOWS_MAX; i++)
        free(t->lane[i].queue.entries);
    free(t->stalled.entries);
}
