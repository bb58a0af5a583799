/* A ring of blocks that wait to be written. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* Blocks removed while they waited leave their numbers behind, so the queue has a bound of its own.
 */
#define QUEUE_MAX (1u << 20)

static int ring_grow(struct write_queue *q)
{
    uint32_t cap = q->cap ? 2 * q->cap : 1024;
    struct write_entry *ring;

    if (q->n == QUEUE_MAX)
        return -ENOSPC;
    ring = malloc(cap * sizeof(*ring));
    if (!ring)
        return -ENOMEM;
    for (uint32_t i = 0; i < q->n; i++)
        ring[i] = q->ring[(q->head + i) % q->cap];
    free(q->ring);
    *q = (struct write_queue){.ring = ring, .n = q->n, .cap = cap};
    return 0;
}

int queue_push(struct write_queue *q, struct write_entry entry)
{
    int rc = q->n == q->cap ? ring_grow(q) : 0;

    if (rc == 0)
        q->ring[(q->head + q->n++) % q->cap] = entry;
    return rc;
}

int queue_push_front(struct write_queue *q, struct write_entry entry)
{
    int rc = q->n == q->cap ? ring_grow(q) : 0;

    if (rc != 0)
        return rc;
    q->head = (q->head + q->cap - 1) % q->cap;
    q->ring[q->head] = entry;
    q->n++;
    return 0;
}

struct write_entry queue_pop(struct write_queue *q)
{
    struct write_entry entry = q->ring[q->head];

    q->head = (q->head + 1) % q->cap;
    q->n--;
    return entry;
}

struct write_entry queue_last(const struct write_queue *q)
{
    return q->ring[(q->head + q->n - 1) % q->cap];
}

void queue_unpop(struct write_queue *q, struct write_entry entry)
{
    q->head = (q->head + q->cap - 1) % q->cap;
    q->ring[q->head] = entry;
    q->n++;
}

void queue_free(struct write_queue *q)
{
    free(q->ring);
}
