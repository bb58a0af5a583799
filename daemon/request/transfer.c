/* load, dump, prefetch: one object, three kinds.
 *
 * A transfer walks its items (a part of a block each) with a cursor. An item that begins takes a
 * slot (load: cache_get, dump: cache_fill_claim) and joins a batch; a batch becomes one device job;
 * a job's end gives the slots back. Items under way are bounded in bytes, so that a transfer larger
 * than the arena flows through it. When there is no room the transfer waits for any release, if
 * something is under way that will release, and gives the rest up otherwise.
 *
 *   begun -> [waits for its read] -> in a batch -> in a job -> ended
 *
 * Stopping (cancel, deadline, peer gone) ends what has not reached a job; jobs are awaited, since
 * the device may still touch the worker's pages. */
#include "daemon/request/transfer.h"
#include "daemon/request/internal.h"

#include <assert.h>
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
    cache_room_cancel(&t->room);
    for (uint32_t i = 0; i < t->n_keys; i++)
        if (t->refs[i])
            cache_drop(cache_of(t), t->refs[i]);
    lease_end(t->r.s, t->lease);
}

static void calm_cb(struct cache_pressure *w)
{
    transfer_pump(LIST_ENTRY(w, struct transfer, calm));
}

static void calm_end_cb(struct deadline *d)
{
    struct transfer *t = LIST_ENTRY(d, struct transfer, calm_end);

    cache_pressure_cancel(&t->calm);
    transfer_pump(t);
}

/* The answer of a dump waits for the disks, if that is wished. It holds nothing meanwhile that
 * others might need. */
static bool transfer_slowed(struct transfer *t)
{
    struct request_rooms *rooms = &t->r.s->rq->rooms;
    uint64_t at_ms = uv_now(rooms->loop) + rooms->config->nvme_pressure_ms;

    if (t->calmed || t->stopping || t->kind != TRANSFER_DUMP || t->bytes == 0 || t->durable ||
        rooms->config->nvme_pressure != CONFIG_PRESSURE_SLOW || !cache_back_pressure(cache_of(t)) ||
        deadline_arm(rooms->deadlines, &t->calm_end, at_ms, calm_end_cb) != 0)
        return false;
    t->calmed = true;
    t->calm.eased_cb = calm_cb;
    transfer_release(t);
    cache_pressure_wait(cache_of(t), &t->calm);
    metrics_of(t)->dumps_slowed++;
    return true;
}

static void transfer_finish(struct transfer *t)
{
    struct session *s = t->r.s;
    struct registered *region = t->region;
    struct msg_blocks_r r = {.status = {t->status, t->n_keys}, .bytes = t->bytes};

    assert(t->jobs == 0 && !t->open && list_empty(&t->waits));
    t->finished = true;
    cache_pressure_cancel(&t->calm);
    deadline_disarm(s->rq->rooms.deadlines, &t->calm_end);
    transfer_release(t);
    session_reply(s, t->r.msgid, &proto_blocks_r, &r);
    request_end(&t->r);
    steps_free(t->steps);
    free(t->spare);
    free(t);
    if (region)
        region_transfer_ended(region);
    session_settle(s);
}

static bool transfer_done(const struct transfer *t)
{
    return t->cursor == items_of(t) && t->jobs == 0 && !t->open && t->waits_n == 0 &&
           (!t->steps || steps_sent(t));
}

/* ---- the pump ---- */

static void give_up(struct transfer *t, enum ucm_block_status status)
{
    for (; t->cursor < items_of(t); t->cursor++) {
        if (t->refs[item_key(t, t->cursor)] == 0)
            continue;
        item_status(t, t->cursor, status);
        if (t->kind == TRANSFER_DUMP && status == UCM_BLOCK_NO_ROOM)
            metrics_of(t)->dump_blocks_skipped++;
    }
}

void transfer_room_cb(struct cache_room *r)
{
    transfer_pump(LIST_ENTRY(r, struct transfer, room));
}

/* Waits for room, or gives up when nothing is under way that could make any. */
static void transfer_park(struct transfer *t)
{
    if (list_empty(&t->room.link) && !cache_room_wait(cache_of(t), &t->room))
        give_up(t, UCM_BLOCK_NO_ROOM);
}

static void batch_flush(struct transfer *t)
{
    bool whole = t->cursor == items_of(t) && list_empty(&t->waits);

    if (!t->open || t->open->n == 0)
        return;
    /* The last batch of a load in steps must not fall behind the others. */
    if (t->steps && (whole || steps_sent(t))) {
        steps_add(t);
        return;
    }
    /* While a job is under way the batch may grow: its end comes here again. */
    if (t->steps || (t->jobs > 0 && t->open->n < t->open->cap))
        return;
    if (!batch_send(t))
        transfer_park(t);
}

void transfer_pump(struct transfer *t)
{
    bool busy = false;

    if (t->pumping || t->finished || t->lookup)
        return;
    t->pumping = true;
    while (!t->stopping && t->cursor < items_of(t) &&
           (t->in_window < t->window_bytes || t->in_window == 0)) {
        if (item_begin(t, t->cursor) == -EBUSY) {
            busy = true;
            break;
        }
        t->cursor++;
    }
    if (t->open && t->open->n == 0) {
        batch_free(t->open);
        t->open = NULL;
    }
    batch_flush(t);
    if (t->steps) {
        if (!steps_pump(t))
            busy = true;
        steps_tell(t);
    }
    if (busy)
        transfer_park(t);
    t->pumping = false;
    if (transfer_done(t) && !transfer_slowed(t))
        transfer_finish(t);
}

void transfer_stop_cb(struct request *r)
{
    struct transfer *t = LIST_ENTRY(r, struct transfer, r);
    struct list *node;

    if (t->stopping)
        return;
    t->stopping = true;
    cache_room_cancel(&t->room);
    if (t->lookup) {
        shared_lookup_cancel(t->lookup);
        t->lookup = NULL;
        memset(t->status, UCM_BLOCK_CANCELLED, t->n_keys);
    }
    while ((node = list_pop_front(&t->waits)) != NULL) {
        struct item_wait *iw = LIST_ENTRY(node, struct item_wait, link);

        cache_get_cancel(cache_of(t), &iw->w);
        item_status(t, iw->item, UCM_BLOCK_CANCELLED);
        t->in_window -= iw->bytes;
        t->waits_n--;
        free(iw);
    }
    while ((node = t->durables.next) != &t->durables)
        durable_abandon(LIST_ENTRY(node, struct durable_wait, link));
    batch_abandon(t);
    if (t->steps)
        steps_abandon(t);
    give_up(t, UCM_BLOCK_CANCELLED);
    transfer_pump(t);
}

void transfers_stop_region(struct registered *region)
{
    struct session *s = region->s;
    struct list *node, *next;

    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);

        next = node->next;
        if ((r->method == UCM_METHOD_LOAD || r->method == UCM_METHOD_DUMP) &&
            LIST_ENTRY(r, struct transfer, r)->region == region)
            transfer_stop_cb(r);
    }
}
