/* Whose reads and copies go first.
 *
 * A transfer of more than SMALL_ITEMS items is large. Large transfers may fill the tier's queue, but
 * then a client that wants one block waits for every read ahead of its own. So each read of a small
 * transfer narrows the queue: the next NARROW_READS reads of large transfers begin under a bound. Tenants
 * share these turns by their weights, and of a tenant's large transfers the more urgent ones go first. The bound is low enough for a small
 * read to take at most three times as long as on an idle disk, and high enough to keep a disk busy
 * with parts of 128 KiB and more. The tier does the same with writes (tier_io.small). */
#include "daemon/request/transfer.h"

#define SMALL_ITEMS 16u
#define FEW_READS 32u
#define NARROW_READS 2048u
/* The bound: as many reads, or as many bytes, but at least LARGE_MIN reads. */
#define LARGE_MIN 2u
#define LARGE_MAX 16u
#define LARGE_BYTES (256u << 10)
#define LARGE_BURST (2u << 20) /* see base/fair.h */
#define PRIORITY_MAX 7         /* of the wire and of devices */

bool transfer_large(const struct transfer *t)
{
    return items_of(t) > SMALL_ITEMS;
}

uint8_t read_priority(const struct transfer *t)
{
    return (uint8_t)(2 * t->priority + (t->waits_n < FEW_READS));
}

uint8_t copy_priority(const struct transfer *t)
{
    bool sooner = !transfer_large(t) && t->priority < PRIORITY_MAX;

    return (uint8_t)(t->priority + sooner);
}

static bool bound_reached(const struct requests *rq)
{
    return rq->narrow_reads > 0 && rq->large_reads >= LARGE_MIN &&
           (rq->large_reads >= LARGE_MAX || rq->large_bytes >= LARGE_BYTES);
}

/* Whether the item begins with a read. One whose block was missing has ended already. */
static bool item_reads(const struct transfer *t, uint32_t item)
{
    return t->kind != TRANSFER_DUMP && t->refs[item_key(t, item)] != 0 && !item_in_dram(t, item);
}

static bool item_on_nvme(const struct transfer *t, uint32_t item)
{
    const struct block *b = index_block(t->r.s->rq->rooms.index, t->refs[item_key(t, item)]);

    return b->part[item_part(t, item)].nvme == PART_NVME_READY;
}

void transfers_init(struct requests *rq)
{
    fair_queue_init(&rq->readers, PRIORITY_MAX + 1, LARGE_BURST);
}

static void reader_queue(struct requests *rq, struct transfer *t)
{
    struct fair_who who = tenant_who(t->ns->tenant);

    fair_queue_push(&rq->readers, &who, (unsigned)PRIORITY_MAX - t->priority, &t->retry.link,
                    false);
}

bool read_waits(struct transfer *t)
{
    struct requests *rq = t->r.s->rq;

    if (!transfer_large(t) || !bound_reached(rq) || !item_reads(t, t->cursor))
        return false;
    cache_retry_cancel(&t->retry);
    reader_queue(rq, t);
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
    struct requests *rq = iw->t->r.s->rq;
    struct fair_who who = tenant_who(iw->t->ns->tenant);

    if (iw->t->r.trace) {
        iw->span = item_on_nvme(iw->t, iw->item) ? TRACE_NVME_READ : TRACE_SHARED_READ;
        trace_span_more(iw->t->r.trace, iw->span);
    }
    iw->large = transfer_large(iw->t);
    if (!iw->large) {
        rq->narrow_reads = NARROW_READS;
        return;
    }
    fair_queue_charge(&rq->readers, &who, item_slot_bytes(iw->t, iw->item), NULL);
    rq->large_reads++;
    rq->large_bytes += item_slot_bytes(iw->t, iw->item);
    rq->narrow_reads -= rq->narrow_reads > 0;
}

void read_ended(const struct item_wait *iw)
{
    struct requests *rq = iw->t->r.s->rq;

    trace_less(iw->t->r.trace, iw->span);
    if (!iw->large)
        return;
    rq->large_reads--;
    rq->large_bytes -= item_slot_bytes(iw->t, iw->item);
}
