#include "daemon/request/transfer.h"
#include "proto/histogram.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HELD_BYTES (256u << 20)
/* Items begun in one iteration of the event loop, and of them those that are not in DRAM: others
 * want their turn, too. */
#define PUMP_ITEMS 512
#define PUMP_SLOTS 64
#define SMALL_ITEMS 16u
#define FEW_READS 32u
#define NARROW_READS 2048u
/* The bound: as many reads, or as many bytes, but at least LARGE_MIN reads. */
#define LARGE_MIN 2u
#define LARGE_MAX 16u
#define LARGE_BYTES (256u << 10)
#define LARGE_BURST (2u << 20) /* see base/fair.h */

void transfer_status(struct transfer *w, uint32_t at, enum ucm_block_status status)
{
    uint8_t *s = &w->status[at / w->parts];

    if (*s == UCM_BLOCK_OK)
        *s = (uint8_t)status;
}

/* ---- the beginning ---- */

static void retry_cb(struct cache_retry *r)
{
    struct transfer *w = LIST_ENTRY(r, struct transfer, retry);

    w->yielded = w->awaits_read = false;
    if (w->r.trace) {
        trace_span(w->r.trace, SPAN_READ_TURN, SPAN_OFF);
        trace_span(w->r.trace, SPAN_SLOT_WAIT, SPAN_OFF);
    }
    transfer_pump(w);
}

void *transfer_new(struct call *call, const struct transfer_kind *kind, const struct view *view,
                   uint32_t n_keys, uint64_t timeout_ms, size_t bytes)
{
    size_t refs_at = (bytes + 7) / 8 * 8;
    struct transfer *w =
        request_new(call, refs_at + n_keys * (sizeof(*w->refs) + sizeof(*w->status)), 0, timeout_ms,
                    transfer_stop_cb);
    uint64_t part;

    if (!w)
        return NULL;
    w->refs = (block_ref *)((uint8_t *)w + refs_at);
    w->status = (uint8_t *)(w->refs + n_keys);
    w->kind = kind;
    w->modules = &call->s->rq->modules;
    w->view = *view;
    w->ns = view->ns[0];
    w->n_keys = n_keys;
    w->parts = 1;
    part = call->s->rq->dram_bytes / 4;
    w->held_most = part < HELD_BYTES ? part : HELD_BYTES;
    w->retry.retry_cb = retry_cb;
    list_init(&w->retry.link);
    list_init(&w->waits);
    list_init(&w->ready);
    return w;
}

/* Counts the prefix that a lookup would find as one lookup; the rest are misses. */
static void prefix_take(struct transfer *w, const uint8_t *keys)
{
    struct lookup_counts found = {.n = w->n_keys};

    for (uint32_t i = 0; i < w->n_keys; i++) {
        struct ns *ns = w->ns;
        uint8_t tier = 0;

        if (found.hits == i && w->refs[i] != 0) {
            ns = view_ns(&w->view, index_block(w->modules->index, w->refs[i]));
            tier = cache_tier(w->modules->cache, w->refs[i]);
        }
        if (tier == 0) {
            w->refs[i] = 0;
            w->status[i] = UCM_BLOCK_MISS;
            continue;
        }
        found.hits++;
        found.dram += tier == CACHE_DRAM;
        found.shared += tier == CACHE_SHARED;
        found.raw += ns != w->ns;
    }
    (void)cache_lease_many(w->modules->cache, w->refs, w->n_keys, false);
    if (w->part == 0) /* other ranks look the same blocks up */
        lookup_counts_add(w->r.s->rq, w->ns, keys, &found);
}

uint32_t transfer_find(struct transfer *w, const uint8_t *keys, bool prefix)
{
    uint32_t missed = 0;

    w->opened = w->n_keys;
    if (!view_find(w->r.s->rq, &w->view, keys, w->n_keys, prefix, w->refs)) {
        memset(w->status, UCM_BLOCK_MISS, w->n_keys);
        w->modules->metrics->bypass_load_blocks += w->n_keys;
        return 0;
    }
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_MORE);
    if (prefix)
        prefix_take(w, keys);
    else
        missed = w->n_keys - cache_lease_many(w->modules->cache, w->refs, w->n_keys, true);
    for (uint32_t i = 0; missed > 0 && i < w->n_keys; i++)
        if (w->refs[i] == 0)
            w->status[i] = UCM_BLOCK_MISS;
    view_touch(w->r.s->rq, &w->view, w->refs, w->n_keys);
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_LESS);
    return missed;
}

static void looked_cb(struct view_look *look, const uint8_t *keys)
{
    struct transfer_look *l = LIST_ENTRY(look, struct transfer_look, look);
    struct transfer *w = l->transfer;

    w->look = NULL;
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_LESS);
    l->begin_cb(w, keys);
}

void transfer_look(struct transfer *w, struct transfer_look *l, struct proto_bin keys,
                   uint64_t wait_ms)
{
    l->transfer = w;
    l->look = (struct view_look){.s = w->r.s,
                                 .view = w->view,
                                 .until_ms = shared_query_until(w->r.s->rq, wait_ms),
                                 .done_cb = looked_cb};
    if (!view_look_begin(&l->look, keys, 0)) {
        l->begin_cb(w, keys.p);
        return;
    }
    w->look = &l->look;
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_MORE);
}

/* ---- the end ---- */

/* A wait for a slot ends when an item has one or is given up, or the transfer waits for something
 * else first: its turn to read, or a device. */
static void slot_wait_ended(struct transfer *w)
{
    histogram_add(w->modules->metrics->histograms.slot_wait, uv_hrtime() - w->slot_wait_ns, 1);
    w->slot_wait_ns = 0;
}

/* Whether something of the transfer waits for a slot now. */
static void slot_waits(struct transfer *w, bool waits)
{
    if (waits && w->slot_wait_ns == 0)
        w->slot_wait_ns = uv_hrtime();
    if (!waits && w->slot_wait_ns != 0)
        slot_wait_ended(w);
}

static uint32_t keys_ok(const struct transfer *w)
{
    uint32_t ok = 0;

    for (uint32_t i = 0; i < w->n_keys; i++)
        ok += w->status[i] == UCM_BLOCK_OK || w->status[i] == UCM_BLOCK_EXISTS;
    return ok;
}

void transfer_end(struct transfer *w, const void *result)
{
    struct msg_blocks_r r = {.status = {w->status, w->n_keys}, .bytes = w->bytes};

    assert(w->waits_n == 0 && !w->refs);
    w->finished = true;
    if (w->r.trace) {
        w->r.trace->bytes = w->bytes;
        if (!result)
            w->r.trace->ok = keys_ok(w);
    }
    if (w->slot_wait_ns != 0)
        slot_wait_ended(w);
    free(w->spare);
    request_end(&w->r, NULL, result ? result : &r);
}

/* ---- whose reads go first ----
 *
 * A transfer of more than SMALL_ITEMS items is large. Large transfers may fill the tier's queue,
 * but then a client that wants one block waits for every read ahead of its own. So each read of a
 * small one narrows the queue: the next NARROW_READS reads of large transfers begin under a bound.
 * Tenants share these turns by their weights, and of a tenant's large transfers the more urgent
 * ones go first. With this bound a small read takes at most three times as long as on an idle disk.
 * Parts of 128 KiB and more still keep a disk busy. The tier does the same with writes
 * (tier_io.small). */

bool transfer_large(const struct transfer *w)
{
    return w->n_keys * w->parts > SMALL_ITEMS;
}

uint8_t read_priority(const struct transfer *w)
{
    return (uint8_t)(2 * w->priority + (w->waits_n < FEW_READS));
}

static bool bound_reached(const struct requests *rq)
{
    return rq->narrow_reads > 0 && rq->large_reads >= LARGE_MIN &&
           (rq->large_reads >= LARGE_MAX || rq->large_bytes >= LARGE_BYTES);
}

void transfers_init(struct requests *rq)
{
    fair_queue_init(&rq->readers, LARGE_BURST);
}

/* True: the next item, which is not in DRAM, needs a read, and that may not begin now. The transfer
 * waits in the queue for its turn, then retry_cb runs. */
static bool read_waits(struct transfer *w)
{
    struct requests *rq = w->r.s->rq;
    struct fair_who who;

    if (!transfer_large(w) || !bound_reached(rq))
        return false;
    who = tenant_who(w->ns->tenant);
    cache_retry_cancel(&w->retry);
    fair_queue_push(&rq->readers, &who, (unsigned)TRANSFER_PRIORITY_MAX - w->priority,
                    &w->retry.link, false);
    return true;
}

/* The next transfer gets its turn if a read may begin. */
static void reader_wake(struct requests *rq)
{
    struct list *node = bound_reached(rq) ? NULL : fair_queue_first(&rq->readers);

    if (!node)
        return;
    list_remove(node);
    (void)cache_wait_for(rq->modules.cache, LIST_ENTRY(node, struct cache_retry, link), WAIT_TURN);
}

static void read_begun(struct item_wait *iw)
{
    struct requests *rq = iw->transfer->r.s->rq;
    struct fair_who who = tenant_who(iw->transfer->ns->tenant);

    if (iw->transfer->r.trace) {
        iw->span = iw->it.p->nvme == PART_NVME_READY ? SPAN_NVME_READ : SPAN_SHARED_READ;
        trace_span(iw->transfer->r.trace, iw->span, SPAN_MORE);
    }
    iw->large = transfer_large(iw->transfer);
    if (!iw->large) {
        rq->narrow_reads = NARROW_READS;
        return;
    }
    fair_queue_charge(&rq->readers, &who, iw->slot_bytes, NULL);
    rq->large_reads++;
    rq->large_bytes += iw->slot_bytes;
    rq->narrow_reads -= rq->narrow_reads > 0;
}

static void read_ended(const struct item_wait *iw)
{
    struct requests *rq = iw->transfer->r.s->rq;

    if (iw->transfer->r.trace)
        trace_span(iw->transfer->r.trace, iw->span, SPAN_LESS);
    if (!iw->large)
        return;
    rq->large_reads--;
    rq->large_bytes -= iw->slot_bytes;
}

/* ---- items ---- */

int transfer_reserve(struct transfer *w)
{
    if (w->spare)
        return 0;
    w->spare = calloc(1, sizeof(*w->spare));
    if (!w->spare)
        return -ENOMEM;
    w->spare->w.small = !transfer_large(w);
    return 0;
}

bool transfer_gives_way(const struct transfer *w, const struct transfer_item *it)
{
    return w->held_bytes > 0 && cache_slot_awaited(w->modules->cache, &w->retry) &&
           it->p->dram != PART_DRAM_READY;
}

int transfer_get(struct transfer *w, const struct transfer_item *it, int node)
{
    int rc = transfer_reserve(w);

    if (rc != 0)
        return rc;
    if (transfer_gives_way(w, it))
        return -EBUSY;
    rc = cache_get(w->modules->cache, it->ref, it->part, read_priority(w), node, &w->spare->w);
    if (rc == CACHE_PENDING)
        transfer_wait(w, it);
    return rc;
}

/* FAILED says that a copy is gone: an item that could not begin has no room, unless its copy was at
 * fault. One whose read failed has lost its copy, unless there was no room. */
static void item_failed(struct transfer *w, uint32_t at, int rc, enum ucm_block_status otherwise)
{
    transfer_status(w, at,
                    rc == -ENOENT || rc == -EXDEV   ? UCM_BLOCK_MISS
                    : rc == -EIO || rc == -EBADMSG  ? UCM_BLOCK_FAILED
                    : rc == -EBUSY || rc == -ENOSPC ? UCM_BLOCK_NO_ROOM
                                                    : otherwise);
}

static void read_done_cb(struct cache_wait *cw, int status)
{
    struct item_wait *iw = LIST_ENTRY(cw, struct item_wait, w);
    struct transfer *w = iw->transfer;
    int rc;

    list_remove(&iw->link);
    read_ended(iw);
    rc = w->kind->ready(w, iw, status);
    if (rc > 0) {
        list_push_back(&w->ready, &iw->link);
    } else {
        if (rc < 0)
            item_failed(w, iw->it.at, rc, UCM_BLOCK_FAILED);
        w->waits_n--;
        w->held_bytes -= iw->slot_bytes;
        free(iw);
    }
    transfer_pump(w);
}

void transfer_wait(struct transfer *w, const struct transfer_item *it)
{
    struct item_wait *iw = w->spare;

    w->spare = NULL;
    iw->transfer = w;
    iw->it = *it;
    iw->slot_bytes = arena_padded(it->form->layers * it->form->layer_bytes);
    iw->w.done_cb = read_done_cb;
    list_push_back(&w->waits, &iw->link);
    read_begun(iw);
    w->waits_n++;
    w->held_bytes += iw->slot_bytes;
}

static void item_drop(struct item_wait *iw, enum ucm_block_status status)
{
    struct transfer *w = iw->transfer;

    transfer_status(w, iw->it.at, status);
    w->held_bytes -= iw->slot_bytes;
    w->waits_n--;
    free(iw);
}

void transfer_drop(struct item_wait *iw, enum ucm_block_status status)
{
    if (iw->transfer->kind->drop)
        iw->transfer->kind->drop(iw->transfer, iw);
    item_drop(iw, status);
}

void transfer_drop_ready(struct transfer *w, enum ucm_block_status status)
{
    struct list *node;

    while ((node = list_pop_front(&w->ready)) != NULL)
        transfer_drop(LIST_ENTRY(node, struct item_wait, link), status);
}

static void waits_abandon(struct transfer *w)
{
    struct list *node;

    while ((node = list_pop_front(&w->waits)) != NULL) {
        struct item_wait *iw = LIST_ENTRY(node, struct item_wait, link);

        cache_get_cancel(w->modules->cache, &iw->w);
        read_ended(iw);
        item_drop(iw, UCM_BLOCK_CANCELLED);
    }
    transfer_drop_ready(w, UCM_BLOCK_CANCELLED);
}

/* ---- the pump ---- */

static bool needs_no_room(const struct transfer *w)
{
    block_ref ref = w->refs[w->cursor / w->parts];

    return w->kind->brings && ref != 0 &&
           index_block(w->modules->index, ref)->part[w->part + w->cursor % w->parts].dram ==
               PART_DRAM_READY;
}

static void give_up(struct transfer *w, enum ucm_block_status status)
{
    bool no_room = status == UCM_BLOCK_NO_ROOM;

    for (; w->cursor < w->n_keys * w->parts; w->cursor++) {
        if (w->refs[w->cursor / w->parts] == 0 && w->cursor / w->parts < w->opened)
            continue;
        if (no_room && needs_no_room(w))
            continue;
        transfer_status(w, w->cursor, status);
        w->modules->metrics->dump_blocks_skipped += w->kind->writes && no_room;
    }
}

/* Waits for a slot (-EBUSY) or for a place in a queue. Gives the rest up when nothing under way
 * could free any. Among transfers that wait for a slot, one with nothing under way goes first: it
 * needs little to continue. */
static void transfer_park(struct transfer *w, int rc)
{
    if (!list_empty(&w->retry.link))
        return;
    w->retry.first = w->held_bytes == 0;
    if (cache_wait_for(w->modules->cache, &w->retry, rc == -EBUSY ? WAIT_SLOT : WAIT_OTHER)) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_SLOT_WAIT, SPAN_ON);
        return;
    }
    give_up(w, UCM_BLOCK_NO_ROOM);
    if (w->kind->no_room)
        w->kind->no_room(w);
}

void transfer_yield(struct transfer *w)
{
    w->yielded = true;
    cache_retry_cancel(&w->retry);
    (void)cache_wait_for(w->modules->cache, &w->retry, WAIT_TURN);
}

/* The next item, whose block is held. */
static struct transfer_item item_next(const struct transfer *w, block_ref ref)
{
    uint32_t part = w->part + w->cursor % w->parts;
    const struct block *b = index_block(w->modules->index, ref);

    return (struct transfer_item){.at = w->cursor,
                                  .part = part,
                                  .ref = ref,
                                  .p = &b->part[part],
                                  .form =
                                      ns_form(w->view.n == 1 ? w->ns : view_ns(&w->view, b), part)};
}

/* Whether the item has to be read, and other transfers' reads go first. */
static bool item_awaits_read(struct transfer *w, const struct transfer_item *it)
{
    w->awaits_read = !w->kind->writes && it->p->dram != PART_DRAM_READY && read_waits(w);
    if (w->awaits_read && w->r.trace)
        trace_span(w->r.trace, SPAN_READ_TURN, SPAN_ON);
    return w->awaits_read;
}

/* Begins as many items as this iteration of the event loop and the window have room for. 0: nobody
 * has to wake the transfer: it has begun them all, has something under way, or is queued for its
 * next turn. Else what the next item waits for, as transfer_kind.begin says it. */
static int items_begin(struct transfer *w)
{
    uint32_t items = PUMP_ITEMS, slots = PUMP_SLOTS, n = w->n_keys * w->parts;

    while (!w->stopping && !w->yielded && w->cursor < n &&
           (w->held_bytes < w->held_most || w->held_bytes == 0)) {
        uint32_t waits = w->waits_n, weight = w->kind->weight ? w->kind->weight(w, w->cursor) : 1;
        block_ref ref = w->refs[w->cursor / w->parts];
        int rc = 0;

        if (items == 0 || slots == 0) {
            transfer_yield(w);
            break;
        }
        if (ref != 0) { /* else its status was set at the start, or is the key's at the end */
            struct transfer_item it = item_next(w, ref);

            if (item_awaits_read(w, &it))
                break;
            rc = w->kind->begin(w, &it);
        }
        if (rc == -EDQUOT && w->held_bytes > 0)
            break;
        if (rc == -EBUSY || rc == -EAGAIN || rc == -EDQUOT)
            return rc;
        if (rc < 0)
            item_failed(w, w->cursor, rc, UCM_BLOCK_NO_ROOM);
        items -= weight < items ? weight : items;
        slots -= w->kind->writes || w->waits_n > waits;
        w->cursor++;
        if (w->slot_wait_ns != 0)
            slot_wait_ended(w);
    }
    return 0;
}

void transfer_pump(struct transfer *w)
{
    struct requests *rq = w->r.s->rq;
    int sent, rc;

    if (w->pumping || w->finished || w->look)
        return;
    w->pumping = true;
    if (w->opened < w->n_keys && !w->stopping && !w->yielded)
        w->kind->open(w);
    rc = list_empty(&w->ready) ? 0 : w->kind->again(w);
    if (rc == 0 && !w->awaits_read)
        rc = items_begin(w);
    slot_waits(w, rc == -EBUSY || rc == -EDQUOT);
    sent = w->kind->send ? w->kind->send(w) : 0;
    if (sent == -EAGAIN || rc != 0)
        transfer_park(w, sent == -EAGAIN ? sent : rc);
    w->pumping = false;
    if (w->cursor == w->n_keys * w->parts && w->waits_n == 0 && sent == 0) {
        if (w->refs) { /* NULL: it is the second end of a dump that was held back */
            cache_retry_cancel(&w->retry);
            if (cache_unlease_many(w->modules->cache, w->refs, w->n_keys))
                cache_released(w->modules->cache);
            w->refs = NULL;
        }
        w->kind->finish(w);
    }
    if (rq->readers.fair.n > 0)
        reader_wake(rq);
}

void transfer_stop_cb(struct request *r)
{
    struct transfer *w = LIST_ENTRY(r, struct transfer, r);

    if (w->stopping)
        return;
    w->stopping = true;
    w->yielded = w->awaits_read = false;
    cache_retry_cancel(&w->retry);
    if (w->look) {
        view_look_cancel(w->look);
        w->look = NULL;
    }
    waits_abandon(w);
    if (w->kind->stop)
        w->kind->stop(w);
    give_up(w, UCM_BLOCK_CANCELLED);
    transfer_pump(w);
}
