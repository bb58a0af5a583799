/* Whose reads and copies go first.
 *
 * A walk of more than SMALL_ITEMS items is large. Large walks may fill the tier's queue, but
 * then a client that wants one block waits for every read ahead of its own. So each read of a small
 * one narrows the queue: the next NARROW_READS reads of large walks begin under a bound. Tenants
 * share these turns by their weights, and of a tenant's large walks the more urgent ones go first. The bound is low enough for a small
 * read to take at most three times as long as on an idle disk, and high enough to keep a disk busy
 * with parts of 128 KiB and more. The tier does the same with writes (tier_io.small). */
#include "daemon/request/walk.h"

#define SMALL_ITEMS 16u
#define FEW_READS 32u
#define NARROW_READS 2048u
/* The bound: as many reads, or as many bytes, but at least LARGE_MIN reads. */
#define LARGE_MIN 2u
#define LARGE_MAX 16u
#define LARGE_BYTES (256u << 10)
#define LARGE_BURST (2u << 20) /* see base/fair.h */
#define PRIORITY_MAX 7         /* of the wire and of devices */

bool walk_large(const struct walk *w)
{
    return w->n_keys * w->parts > SMALL_ITEMS;
}

uint8_t read_priority(const struct walk *w)
{
    return (uint8_t)(2 * w->priority + (w->waits_n < FEW_READS));
}

uint8_t copy_priority(const struct walk *w)
{
    bool sooner = !walk_large(w) && w->priority < PRIORITY_MAX;

    return (uint8_t)(w->priority + sooner);
}

static bool bound_reached(const struct requests *rq)
{
    return rq->narrow_reads > 0 && rq->large_reads >= LARGE_MIN &&
           (rq->large_reads >= LARGE_MAX || rq->large_bytes >= LARGE_BYTES);
}

static bool item_on_nvme(const struct walk_item *it)
{
    return it->p->nvme == PART_NVME_READY;
}

void walks_init(struct requests *rq)
{
    fair_queue_init(&rq->readers, LARGE_BURST);
}

bool read_waits(struct walk *w)
{
    struct requests *rq = w->r.s->rq;
    struct fair_who who;

    if (!walk_large(w) || !bound_reached(rq))
        return false;
    who = tenant_who(w->ns->tenant);
    cache_retry_cancel(&w->retry);
    fair_queue_push(&rq->readers, &who, (unsigned)PRIORITY_MAX - w->priority, &w->retry.link,
                    false);
    return true;
}

void reader_wake(struct requests *rq)
{
    struct list *node = bound_reached(rq) ? NULL : fair_queue_first(&rq->readers);

    if (!node)
        return;
    list_remove(node);
    (void)cache_wait_for(rq->rooms.cache, LIST_ENTRY(node, struct cache_retry, link), WAIT_TURN);
}

void read_begun(struct item_wait *iw)
{
    struct requests *rq = iw->walk->r.s->rq;
    struct fair_who who = tenant_who(iw->walk->ns->tenant);

    if (iw->walk->r.trace) {
        iw->span = item_on_nvme(&iw->it) ? SPAN_NVME_READ : SPAN_SHARED_READ;
        trace_span(iw->walk->r.trace, iw->span, SPAN_MORE);
    }
    iw->large = walk_large(iw->walk);
    if (!iw->large) {
        rq->narrow_reads = NARROW_READS;
        return;
    }
    fair_queue_charge(&rq->readers, &who, iw->it.slot_bytes, NULL);
    rq->large_reads++;
    rq->large_bytes += iw->it.slot_bytes;
    rq->narrow_reads -= rq->narrow_reads > 0;
}

void read_ended(const struct item_wait *iw)
{
    struct requests *rq = iw->walk->r.s->rq;

    if (iw->walk->r.trace)
        trace_span(iw->walk->r.trace, iw->span, SPAN_LESS);
    if (!iw->large)
        return;
    rq->large_reads--;
    rq->large_bytes -= iw->it.slot_bytes;
}
