/* load, fetch, dump, prefetch, and those that bring digests: one object of several kinds.
 *
 * A transfer walks its items (a part of a block each) with a cursor. An item that begins takes a
 * slot (load, fetch: cache_get, dump: cache_fill_claim) and joins a batch; a batch becomes one device job;
 * when the job ends, the slots are given back. Bytes under way are bounded, so that a transfer larger
 * than the arena flows through it. Without a slot the transfer waits until somebody releases a slot;
 * if nobody holds one that he will release, it gives up the rest.
 *
 *   begun -> [waits for its read] -> [read, waits for a batch] -> in a batch -> in a job -> ended
 *
 * Stopping (cancel, deadline, connection closed) ends items that have not reached a job. Jobs are
 * awaited, since the device may still touch the worker's pages. */
#include "daemon/request/transfer.h"
#include "daemon/observe/histogram.h"
#include "daemon/observe/tenants.h"
#include "daemon/request/digest.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void item_status(struct transfer *t, uint32_t item, enum ucm_block_status status)
{
    uint8_t *s = &t->status[item_key(t, item)];

    if (*s == UCM_BLOCK_OK)
        *s = (uint8_t)status;
}

/* ---- the end ---- */

static void transfer_release(struct transfer *t)
{
    if (t->released)
        return;
    t->released = true;
    cache_retry_cancel(&t->retry);
    view_unlease(t->r.s->rq, &t->view, t->refs, t->n_keys);
    for (uint32_t i = 0; t->kind == TRANSFER_BUILD && i < t->n_keys; i++)
        if (t->blocks[i])
            cache_unlease(cache_of(t), t->blocks[i]);
    lease_end(t->r.s, t->lease);
}

static void pressure_eased_cb(struct cache_retry *w)
{
    transfer_pump(LIST_ENTRY(w, struct transfer, pressure));
}

static void pressure_over_cb(struct deadline *d)
{
    struct transfer *t = LIST_ENTRY(d, struct transfer, pressure_end);

    cache_retry_cancel(&t->pressure);
    transfer_pump(t);
}

/* Back-pressure: a dump's answer waits until write-behind catches up, for nvme.pressure at most. It
 * holds no slot, block or lease meanwhile. */
static bool transfer_slowed(struct transfer *t)
{
    struct request_rooms *rooms = &t->r.s->rq->rooms;
    uint64_t at_ms = uv_now(rooms->loop) + rooms->config->nvme_pressure_ms;

    if (t->slowed || t->stopping || t->kind != TRANSFER_DUMP || t->bytes == 0 || t->durable ||
        rooms->config->nvme_pressure != CONFIG_PRESSURE_SLOW || !cache_back_pressure(cache_of(t)))
        return false;
    deadline_arm(rooms->deadlines, &t->pressure_end, at_ms, pressure_over_cb);
    t->slowed = true;
    trace_more(t->r.trace, TRACE_BACK_PRESSURE);
    t->pressure.retry_cb = pressure_eased_cb;
    transfer_release(t);
    (void)cache_wait_for(cache_of(t), &t->pressure, WAIT_PRESSURE);
    metrics_of(t)->dumps_slowed++;
    return true;
}

/* A wait for a slot ends when an item begins, or is given up. */
static void slot_wait_ended(struct transfer *t)
{
    histogram_count(metrics_of(t)->histograms.slot_wait, uv_hrtime() - t->slot_wait_ns);
    t->slot_wait_ns = 0;
}

static enum metric_size size_of(uint64_t bytes)
{
    return bytes <= 1u << 20    ? METRIC_LE_1MIB
           : bytes <= 64u << 20 ? METRIC_LE_64MIB
                                : METRIC_GT_64MIB;
}

/* Of loads, fetches and dumps that copied something. */
static void transfer_count(struct transfer *t)
{
    struct histograms *h = &metrics_of(t)->histograms;
    struct histogram *timed = &h->dump[size_of(t->bytes)];
    uint64_t took_ns;

    if (t->bytes == 0 || (!transfer_loads(t) && t->kind != TRANSFER_DUMP))
        return;
    took_ns = uv_hrtime() - t->r.begun_ns;
    if (t->kind == TRANSFER_FETCH) {
        timed = &h->fetch[t->slowest];
        t->ns->tenant->metrics->load_bytes += t->bytes;
        t->ns->traffic.load_bytes += t->bytes;
    } else if (t->kind == TRANSFER_LOAD) {
        timed = &h->load[t->slowest * METRIC_SIZES + size_of(t->bytes)];
        histogram_count(&t->ns->tenant->times->load, took_ns);
        t->ns->tenant->metrics->loads++;
        t->ns->tenant->metrics->load_bytes += t->bytes;
        t->ns->traffic.loads++;
        t->ns->traffic.load_bytes += t->bytes;
    } else {
        t->ns->tenant->metrics->dumps++;
        t->ns->tenant->metrics->dump_bytes += t->bytes;
        t->ns->traffic.dumps++;
        t->ns->traffic.dump_bytes += t->bytes;
    }
    histogram_count(timed, took_ns);
}

static uint32_t keys_ok(const struct transfer *t)
{
    uint32_t ok = 0;

    for (uint32_t i = 0; i < t->n_keys && t->r.trace; i++)
        ok += t->status[i] == UCM_BLOCK_OK || t->status[i] == UCM_BLOCK_EXISTS;
    return ok;
}

static void transfer_finish(struct transfer *t)
{
    struct session *s = t->r.s;
    struct msg_blocks_r r = {.status = {t->status, t->n_keys}, .bytes = t->bytes};

    assert(t->jobs == 0 && !batch_is_open(t) && t->waits_n == 0);
    t->finished = true;
    if (t->slot_wait_ns != 0)
        slot_wait_ended(t);
    transfer_count(t);
    trace_less(t->r.trace, TRACE_BACK_PRESSURE);
    trace_outcome(t->r.trace, keys_ok(t), t->bytes);
    cache_retry_cancel(&t->pressure);
    deadline_disarm(s->rq->rooms.deadlines, &t->pressure_end);
    transfer_release(t);
    free(t->spare);
    if (t->region)
        region_transfer_ended(t->region);
    if (t->kind == TRANSFER_HOLD)
        append_finish(t);
    else if (t->kind == TRANSFER_FETCH)
        fetch_finish(t);
    else
        request_end(&t->r, NULL, &r);
}

static bool transfer_done(const struct transfer *t)
{
    return t->cursor == items_of(t) && t->jobs == 0 && !batch_is_open(t) && t->waits_n == 0 &&
           (!t->steps || steps_sent(t));
}

/* ---- the pump ---- */

/* Blocks that a dump opens in one turn of the loop; items begun in one, and of them those that are
 * not in DRAM: others want their turn, too. */
#define PUMP_OPENS 512
#define PUMP_ITEMS 512
#define PUMP_SLOTS 64

static void give_up(struct transfer *t, enum ucm_block_status status)
{
    for (; t->cursor < items_of(t); t->cursor++) {
        if (t->refs[item_key(t, t->cursor)] == 0 && item_key(t, t->cursor) < t->opened)
            continue;
        if (t->kind == TRANSFER_PREFETCH && status == UCM_BLOCK_NO_ROOM &&
            item_in_dram(t, t->cursor))
            continue;
        item_status(t, t->cursor, status);
        if (t->kind == TRANSFER_DUMP && status == UCM_BLOCK_NO_ROOM)
            metrics_of(t)->dump_blocks_skipped++;
    }
}

void transfer_retry_cb(struct cache_retry *r)
{
    struct transfer *t = LIST_ENTRY(r, struct transfer, retry);

    t->yielded = t->awaits_read = false;
    trace_set(t->r.trace, TRACE_READ_TURN, false);
    trace_set(t->r.trace, TRACE_SLOT_WAIT, false);
    transfer_pump(t);
}

/* Waits for a slot or for a place in a queue. Gives the rest up when nothing under way could free any.
 * Of those who wait for a slot one that has nothing under way goes first: it needs little to get on. */
static void transfer_park(struct transfer *t)
{
    if (t->no_slot && t->slot_wait_ns == 0) {
        t->slot_wait_ns = uv_hrtime();
        t->slot_wait_at = t->cursor;
    }
    if (!list_empty(&t->retry.link))
        return;
    t->retry.first = t->in_window == 0;
    if (cache_wait_for(cache_of(t), &t->retry, t->most ? WAIT_OTHER : WAIT_SLOT)) {
        trace_set(t->r.trace, TRACE_SLOT_WAIT, true);
        return;
    }
    give_up(t, UCM_BLOCK_NO_ROOM);
    if (t->space)
        ready_abandon(t, UCM_BLOCK_NO_ROOM); /* no room for what they are built in */
}

void transfer_yield(struct transfer *t)
{
    t->yielded = true;
    cache_retry_cancel(&t->retry);
    (void)cache_wait_for(cache_of(t), &t->retry, WAIT_TURN);
}

/* Whether a dump with stores bypassed leaves this block out. A part of which it has stored some layers is
 * finished: it would hold its slot as long as the connection lives. */
static bool store_bypassed(const struct transfer *t, uint32_t i)
{
    struct index *ix = t->r.s->rq->rooms.index;
    block_ref ref = index_find(ix, t->ns, t->keys + (size_t)i * t->ns->identity.key_bytes);

    return ref == 0 || index_block(ix, ref)->part[t->part].dram != PART_DRAM_FILLING;
}

/* Opens blocks of a dump, and when all are open touches them as one prefix. */
static void blocks_open(struct transfer *t)
{
    uint32_t key_bytes = t->ns->identity.key_bytes;
    bool bypassed = bypass_on(t->r.s->rq, t->ns, BYPASS_STORE);

    trace_set(t->r.trace, TRACE_LOOKUP, true);
    for (uint32_t opens = 0; t->opened < t->n_keys; t->opened++) {
        uint32_t i = t->opened;

        if (opens++ == PUMP_OPENS) {
            transfer_yield(t);
            return;
        }
        if (bypassed && store_bypassed(t, i)) {
            t->status[i] = UCM_BLOCK_NO_ROOM;
            metrics_of(t)->bypass_dump_blocks++;
            continue;
        }
        t->refs[i] = cache_open(cache_of(t), t->ns, t->keys + (size_t)i * key_bytes);
        if (t->refs[i] == 0)
            t->status[i] = UCM_BLOCK_NO_ROOM;
    }
    /* Another part's dump of the same blocks would look like a second use of them. */
    if (t->part == 0)
        cache_touch(cache_of(t), t->ns, t->refs, t->n_keys);
    trace_set(t->r.trace, TRACE_LOOKUP, false);
}

/* Begins items. False: there is no slot, or no place in a batch, now. */
static bool items_begin(struct transfer *t)
{
    uint32_t items = PUMP_ITEMS, slots = PUMP_SLOTS;
    int rc;

    while (!t->stopping && !t->yielded && !t->awaits_read && t->cursor < items_of(t) &&
           (t->in_window < t->window_bytes || t->in_window == 0)) {
        uint32_t waits = t->waits_n, copies = item_copies(t, t->cursor);

        if (items == 0 || slots == 0) {
            transfer_yield(t);
            break;
        }
        t->awaits_read = read_waits(t);
        trace_set(t->r.trace, TRACE_READ_TURN, t->awaits_read);
        if (t->awaits_read)
            break;
        rc = item_begin(t, t->cursor);
        t->most = rc == -EDQUOT || rc == -EAGAIN;
        if (rc == -EBUSY || rc == -EAGAIN || (rc == -EDQUOT && t->in_window == 0))
            return false;
        if (rc == -EDQUOT)
            break; /* the end of what is under way goes on */
        items -= copies < items ? copies : items;
        slots -= t->kind == TRANSFER_DUMP || t->waits_n > waits;
        t->cursor++;
    }
    return true;
}

/* False: the device's queue is full. */
static bool batch_flush(struct transfer *t, bool coded)
{
    bool whole = t->cursor == items_of(t) && list_empty(&t->waits) && list_empty(&t->ready);
    struct copy_batch *b = t->open[coded];

    if (b && b->n == 0) {
        batch_free(b);
        t->open[coded] = NULL;
        return true;
    }
    if (!b || t->yielded)
        return true;
    /* The last batch of a load in steps must not fall behind the others. */
    if (t->steps && (whole || steps_sent(t))) {
        steps_add(t, coded);
        return true;
    }
    /* While a job is under way the batch may grow: when the job ends, the pump comes here again. */
    if (t->steps || (t->jobs > 0 && b->job.n_items < b->job.cap_items))
        return true;
    return batch_send(t, coded);
}

void transfer_pump(struct transfer *t)
{
    struct requests *rq = t->r.s->rq;
    bool busy;

    if (t->pumping || t->finished || t->lookup)
        return;
    t->pumping = true;
    t->no_slot = t->most = false;
    if (t->opened < t->n_keys && !t->stopping && !t->yielded) {
        if (t->space)
            digests_open(t);
        else
            blocks_open(t);
    }
    busy = !(t->space ? digests_again(t) : ready_take(t)) || !items_begin(t);
    if (t->slot_wait_ns != 0 && t->cursor > t->slot_wait_at)
        slot_wait_ended(t);
    if (!batch_flush(t, true) || !batch_flush(t, false))
        busy = t->most = true;
    if (t->steps) {
        if (!steps_pump(t))
            busy = t->most = true;
        steps_report(t);
    }
    if (busy)
        transfer_park(t);
    t->pumping = false;
    if (transfer_done(t) && !transfer_slowed(t))
        transfer_finish(t);
    reader_wake(rq);
}

void transfer_stop_cb(struct request *r)
{
    struct transfer *t = LIST_ENTRY(r, struct transfer, r);
    struct list *node;

    if (t->stopping)
        return;
    t->stopping = true;
    t->yielded = t->awaits_read = false;
    cache_retry_cancel(&t->retry);
    if (t->lookup) {
        shared_lookup_cancel(t->lookup);
        t->lookup = NULL;
    }
    waits_abandon(t);
    while ((node = t->durables.next) != &t->durables)
        durable_abandon(LIST_ENTRY(node, struct durable_wait, link));
    batch_abandon(t);
    if (t->steps)
        steps_abandon(t);
    give_up(t, UCM_BLOCK_CANCELLED);
    transfer_pump(t);
}

uint64_t transfer_waits_since(const struct request *r)
{
    bool transfer = r->method == UCM_METHOD_LOAD || r->method == UCM_METHOD_LOAD_PREFIX ||
                    r->method == UCM_METHOD_DUMP || r->method == UCM_METHOD_PREFETCH ||
                    r->method == UCM_METHOD_FETCH;

    return transfer ? LIST_ENTRY(r, const struct transfer, r)->slot_wait_ns : 0;
}

void transfers_stop_region(struct registered *region)
{
    struct session *s = region->s;
    struct list *node, *next;

    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);

        next = node->next;
        if ((r->method == UCM_METHOD_LOAD || r->method == UCM_METHOD_LOAD_PREFIX ||
             r->method == UCM_METHOD_DUMP || r->method == UCM_METHOD_FETCH) &&
            LIST_ENTRY(r, struct transfer, r)->region == region)
            transfer_stop_cb(r);
    }
}
