#include "client/lib/sparse/prefetch_queue.h"

#include <assert.h>
#include <stddef.h>

void prefetch_queue_init(struct prefetch_queue *q, uint32_t max_pending, uint64_t bytes_max,
                         uint32_t ahead)
{
    *q =
        (struct prefetch_queue){.max_pending = max_pending, .bytes_max = bytes_max, .ahead = ahead};
    for (unsigned i = 0; i < PREFETCH_PRIORITIES; i++)
        TAILQ_INIT(&q->waiting[i]);
}

void prefetch_queue_end(struct prefetch_queue *q, struct prefetch_item *item)
{
    if (item->state == PREFETCH_ENDED)
        return;
    if (item->state == PREFETCH_WAITING)
        TAILQ_REMOVE(&q->waiting[item->priority], item, node);
    item->state = PREFETCH_ENDED;
    q->n_pending--;
}

void prefetch_queue_remove(struct prefetch_queue *q, struct prefetch_item *item)
{
    prefetch_queue_end(q, item);
    if (item->counted)
        q->bytes_used -= item->bytes;
    item->counted = false;
}

int prefetch_queue_make_room(struct prefetch_queue *q, enum ucm_prefetch_priority priority,
                             struct prefetch_item **out)
{
    if (q->n_pending < q->max_pending)
        return 0;
    for (unsigned i = PREFETCH_PRIORITIES; i-- > (unsigned)priority + 1;) {
        struct prefetch_item *last = TAILQ_LAST(&q->waiting[i], prefetch_items);

        if (!last)
            continue;
        prefetch_queue_end(q, last);
        *out = last;
        return 1;
    }
    return -UCM_EBUSY;
}

void prefetch_queue_add(struct prefetch_queue *q, struct prefetch_item *item)
{
    assert(item->bytes <= q->bytes_max && q->n_pending < q->max_pending);
    item->state = PREFETCH_WAITING;
    item->counted = false;
    TAILQ_INSERT_TAIL(&q->waiting[item->priority], item, node);
    q->n_pending++;
}

static bool too_early(const struct prefetch_queue *q, const struct prefetch_item *item)
{
    return item->batch > q->batch && item->batch - q->batch > q->ahead;
}

struct prefetch_item *prefetch_queue_next(struct prefetch_queue *q)
{
    for (unsigned i = 0; i < PREFETCH_PRIORITIES; i++) {
        struct prefetch_item *item;

        TAILQ_FOREACH(item, &q->waiting[i], node) {
            if (too_early(q, item))
                continue;
            if (item->bytes > q->bytes_max - q->bytes_used)
                return NULL;
            TAILQ_REMOVE(&q->waiting[i], item, node);
            item->state = PREFETCH_SENT;
            item->counted = true;
            q->bytes_used += item->bytes;
            return item;
        }
    }
    return NULL;
}

void prefetch_queue_unsend(struct prefetch_queue *q, struct prefetch_item *item)
{
    assert(item->state == PREFETCH_SENT);
    q->bytes_used -= item->bytes;
    item->counted = false;
    item->state = PREFETCH_WAITING;
    TAILQ_INSERT_HEAD(&q->waiting[item->priority], item, node);
}

struct prefetch_item *prefetch_queue_expire(struct prefetch_queue *q, int64_t now_ns)
{
    for (unsigned i = 0; i < PREFETCH_PRIORITIES; i++) {
        struct prefetch_item *item;

        TAILQ_FOREACH(item, &q->waiting[i], node) {
            if (item->batch >= q->batch && item->deadline_ns > now_ns)
                continue;
            prefetch_queue_end(q, item);
            return item;
        }
    }
    return NULL;
}

void prefetch_queue_move(struct prefetch_queue *q, struct prefetch_item *item,
                         enum ucm_prefetch_priority priority)
{
    if (item->state != PREFETCH_WAITING || item->priority == priority)
        return;
    TAILQ_REMOVE(&q->waiting[item->priority], item, node);
    item->priority = priority;
    TAILQ_INSERT_TAIL(&q->waiting[priority], item, node);
}
