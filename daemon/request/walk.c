#include "daemon/request/walk.h"
#include "daemon/observe/histogram.h"
#include "daemon/observe/tenants.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HELD_BYTES (256u << 20)
/* Items begun in one turn of the loop, and of them those that are not in DRAM: others want their turn, too. */
#define PUMP_ITEMS 512
#define PUMP_SLOTS 64

void walk_status(struct walk *w, uint32_t at, enum ucm_block_status status)
{
    uint8_t *s = &w->status[at / w->parts];

    if (*s == UCM_BLOCK_OK)
        *s = (uint8_t)status;
}

/* ---- the beginning ---- */

static void retry_cb(struct cache_retry *r)
{
    struct walk *w = LIST_ENTRY(r, struct walk, retry);

    w->yielded = w->awaits_read = false;
    if (w->r.trace) {
        trace_span(w->r.trace, SPAN_READ_TURN, SPAN_OFF);
        trace_span(w->r.trace, SPAN_SLOT_WAIT, SPAN_OFF);
    }
    walk_pump(w);
}

void *walk_new(struct call *call, const struct walk_kind *kind, const struct view *view,
               uint32_t n_keys, uint64_t deadline_ms, size_t bytes)
{
    size_t refs_at = (bytes + 7) / 8 * 8;
    struct walk *w = request_new(call, refs_at + n_keys * (sizeof(*w->refs) + sizeof(*w->status)),
                                 0, deadline_ms, walk_stop_cb);
    uint64_t part;

    if (!w)
        return NULL;
    w->refs = (block_ref *)((uint8_t *)w + refs_at);
    w->status = (uint8_t *)(w->refs + n_keys);
    w->kind = kind;
    w->rooms = &call->s->rq->rooms;
    w->view = *view;
    w->ns = view->ns[0];
    w->n_keys = n_keys;
    w->parts = 1;
    part = arena_bytes_configured(w->rooms->arena) / 4;
    w->held_most = part < HELD_BYTES ? part : HELD_BYTES;
    w->retry.retry_cb = retry_cb;
    list_init(&w->retry.link);
    list_init(&w->waits);
    list_init(&w->ready);
    return w;
}

/* Of a prefix: what a lookup would find, counted as one; the rest is missed. */
static void prefix_take(struct walk *w, const uint8_t *keys)
{
    struct lookup_counts found = {.n = w->n_keys};

    for (uint32_t i = 0; i < w->n_keys; i++) {
        struct ns *ns = w->ns;
        uint8_t tier = 0;

        if (found.hits == i && w->refs[i] != 0) {
            ns = view_ns(&w->view, index_block(w->rooms->index, w->refs[i]));
            tier = cache_tier(w->rooms->cache, w->refs[i]);
        }
        if (tier == 0) {
            w->refs[i] = 0;
            w->status[i] = UCM_BLOCK_MISS;
            continue;
        }
        found.hits++;
        found.dram += tier == CACHE_DRAM;
        found.shared += tier == CACHE_SHARE;
        found.plain += ns != w->ns;
    }
    cache_lease_many(w->rooms->cache, w->refs, w->n_keys);
    if (w->part == 0) /* other ranks look the same blocks up */
        lookup_counts_add(w->r.s->rq, w->ns, keys, &found);
}

uint32_t walk_find(struct walk *w, const uint8_t *keys, bool prefix)
{
    uint32_t missed = 0;

    w->opened = w->n_keys;
    if (!view_find(w->r.s->rq, &w->view, keys, w->n_keys, prefix, w->refs)) {
        memset(w->status, UCM_BLOCK_MISS, w->n_keys);
        w->rooms->metrics->bypass_load_blocks += w->n_keys;
        return 0;
    }
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_MORE);
    if (prefix)
        prefix_take(w, keys);
    else
        missed = w->n_keys - cache_lease_found(w->rooms->cache, w->refs, w->n_keys);
    for (uint32_t i = 0; missed > 0 && i < w->n_keys; i++)
        if (w->refs[i] == 0)
            w->status[i] = UCM_BLOCK_MISS;
    view_touch(w->r.s->rq, &w->view, w->refs, w->n_keys);
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_LESS);
    return missed;
}

static void looked_cb(struct shared_lookup *k)
{
    struct walk_look *l = k->ctx;
    struct walk *w = l->walk;
    struct proto_bin keys = {k->keys, w->n_keys * w->ns->identity.key_bytes};

    w->lookup = NULL;
    if (view_look_next(&l->look, keys, &w->lookup)) {
        w->lookup->ctx = l;
        w->lookup->done_cb = looked_cb;
    } else {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_LESS);
        l->begin_cb(w, k->keys);
    }
    shared_lookup_free(k);
}

void walk_look(struct walk *w, struct walk_look *l, struct proto_bin keys, uint64_t wait_ms)
{
    l->walk = w;
    l->look = (struct view_look){
        .s = w->r.s, .view = w->view, .until_ms = shared_lookup_until(w->r.s->rq, wait_ms)};
    if (!view_look_begin(&l->look, keys, 0, &w->lookup)) {
        l->begin_cb(w, keys.p);
        return;
    }
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_MORE);
    w->lookup->ctx = l;
    w->lookup->done_cb = looked_cb;
}

/* ---- the end ---- */

void walk_release(struct walk *w)
{
    if (!w->refs)
        return;
    cache_retry_cancel(&w->retry);
    cache_unlease_many(w->rooms->cache, w->refs, w->n_keys);
    w->refs = NULL;
}

/* A wait for a slot ends when an item begins, or is given up. */
static void slot_wait_ended(struct walk *w)
{
    histogram_count(w->rooms->metrics->histograms.slot_wait, uv_hrtime() - w->slot_wait_ns);
    w->slot_wait_ns = 0;
}

static uint32_t keys_ok(const struct walk *w)
{
    uint32_t ok = 0;

    for (uint32_t i = 0; i < w->n_keys; i++)
        ok += w->status[i] == UCM_BLOCK_OK || w->status[i] == UCM_BLOCK_EXISTS;
    return ok;
}

void walk_close(struct walk *w)
{
    assert(w->waits_n == 0);
    w->finished = true;
    if (w->r.trace) {
        w->r.trace->ok = keys_ok(w);
        w->r.trace->bytes = w->bytes;
    }
    if (w->slot_wait_ns != 0)
        slot_wait_ended(w);
    walk_release(w);
    free(w->spare);
}

void walk_answer(struct walk *w)
{
    struct msg_blocks_r r = {.status = {w->status, w->n_keys}, .bytes = w->bytes};

    walk_close(w);
    request_end(&w->r, NULL, &r);
}

/* ---- items ---- */

/* Looks at an item whose block is held. */
static void walk_look_at(const struct walk *w, uint32_t at, struct walk_item *it)
{
    block_ref ref = w->refs[at / w->parts];
    const struct block *b = index_block(w->rooms->index, ref);
    uint32_t part = w->part + at % w->parts;
    const struct form *form = ns_form(w->view.n == 1 ? w->ns : view_ns(&w->view, b), part);

    *it = (struct walk_item){.at = at,
                             .part = part,
                             .ref = ref,
                             .p = &b->part[part],
                             .form = form,
                             .slot_bytes = arena_padded(form->shards * form->shard_bytes)};
}

int walk_reserve(struct walk *w)
{
    if (w->spare)
        return 0;
    w->spare = calloc(1, sizeof(*w->spare));
    if (!w->spare)
        return -ENOMEM;
    w->spare->w.small = !walk_large(w);
    return 0;
}

bool walk_gives_way(const struct walk *w, const struct walk_item *it)
{
    return w->held_bytes > 0 && cache_slot_awaited(w->rooms->cache, &w->retry) &&
           it->p->dram != PART_DRAM_READY;
}

int walk_get(struct walk *w, const struct walk_item *it, int node)
{
    int rc;

    if (it->p->dram == PART_DRAM_READY)
        return cache_take(w->rooms->cache, it->ref, it->part);
    rc = walk_reserve(w);
    if (rc == 0 && walk_gives_way(w, it))
        rc = -EBUSY;
    if (rc != 0)
        return rc;
    rc = cache_get(w->rooms->cache, it->ref, it->part, read_priority(w), node, &w->spare->w);
    if (rc == CACHE_PENDING)
        walk_wait(w, it);
    return rc;
}

int walk_not_got(struct walk *w, const struct walk_item *it, int rc)
{
    if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN) {
        w->no_slot = rc != -EAGAIN;
        return rc;
    }
    walk_status(w, it->at,
                rc == -ENOENT ? UCM_BLOCK_MISS
                : rc == -EIO  ? UCM_BLOCK_FAILED
                              : UCM_BLOCK_NO_ROOM);
    return 0;
}

static void read_done_cb(struct cache_wait *cw, int status)
{
    struct item_wait *iw = LIST_ENTRY(cw, struct item_wait, w);
    struct walk *w = iw->walk;

    list_remove(&iw->link);
    read_ended(iw);
    if (w->kind->ready(w, iw, status)) {
        list_push_back(&w->ready, &iw->link);
    } else {
        w->waits_n--;
        w->held_bytes -= iw->it.slot_bytes;
        free(iw);
    }
    walk_pump(w);
}

void walk_wait(struct walk *w, const struct walk_item *it)
{
    struct item_wait *iw = w->spare;

    w->spare = NULL;
    iw->walk = w;
    iw->it = *it;
    iw->w.done_cb = read_done_cb;
    list_push_back(&w->waits, &iw->link);
    read_begun(iw);
    w->waits_n++;
    w->held_bytes += it->slot_bytes;
}

static void item_drop(struct item_wait *iw, enum ucm_block_status status)
{
    struct walk *w = iw->walk;

    walk_status(w, iw->it.at, status);
    w->held_bytes -= iw->it.slot_bytes;
    w->waits_n--;
    free(iw);
}

void walk_drop(struct item_wait *iw, enum ucm_block_status status)
{
    if (iw->walk->kind->drop)
        iw->walk->kind->drop(iw->walk, iw);
    item_drop(iw, status);
}

void walk_drop_ready(struct walk *w, enum ucm_block_status status)
{
    struct list *node;

    while ((node = list_pop_front(&w->ready)) != NULL)
        walk_drop(LIST_ENTRY(node, struct item_wait, link), status);
}

static void waits_abandon(struct walk *w)
{
    struct list *node;

    while ((node = list_pop_front(&w->waits)) != NULL) {
        struct item_wait *iw = LIST_ENTRY(node, struct item_wait, link);

        cache_get_cancel(w->rooms->cache, &iw->w);
        read_ended(iw);
        item_drop(iw, UCM_BLOCK_CANCELLED);
    }
    walk_drop_ready(w, UCM_BLOCK_CANCELLED);
}

/* ---- the pump ---- */

static bool needs_no_room(const struct walk *w)
{
    struct walk_item it;

    if (!w->kind->brings || w->refs[w->cursor / w->parts] == 0)
        return false;
    walk_look_at(w, w->cursor, &it);
    return it.p->dram == PART_DRAM_READY;
}

static void give_up(struct walk *w, enum ucm_block_status status)
{
    bool no_room = status == UCM_BLOCK_NO_ROOM;

    for (; w->cursor < w->n_keys * w->parts; w->cursor++) {
        if (w->refs[w->cursor / w->parts] == 0 && w->cursor / w->parts < w->opened)
            continue;
        if (no_room && needs_no_room(w))
            continue;
        walk_status(w, w->cursor, status);
        w->rooms->metrics->dump_blocks_skipped += w->kind->fills && no_room;
    }
}

/* Waits for a slot or for a place in a queue. Gives the rest up when nothing under way could free any.
 * Of those who wait for a slot one that has nothing under way goes first: it needs little to get on. */
static void walk_park(struct walk *w)
{
    if (w->no_slot && w->slot_wait_ns == 0)
        w->slot_wait_ns = uv_hrtime();
    if (!list_empty(&w->retry.link))
        return;
    w->retry.first = w->held_bytes == 0;
    if (cache_wait_for(w->rooms->cache, &w->retry, w->most ? WAIT_OTHER : WAIT_SLOT)) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_SLOT_WAIT, SPAN_ON);
        return;
    }
    give_up(w, UCM_BLOCK_NO_ROOM);
    if (w->kind->no_room)
        w->kind->no_room(w);
}

void walk_yield(struct walk *w)
{
    w->yielded = true;
    cache_retry_cancel(&w->retry);
    (void)cache_wait_for(w->rooms->cache, &w->retry, WAIT_TURN);
}

/* Begins the next item. As walk_kind.begin; 1: its turn to read has not come. */
static int item_begin(struct walk *w)
{
    struct walk_item it;

    if (w->refs[w->cursor / w->parts] == 0)
        return 0; /* its status was set at the start, or is the key's at the end */
    walk_look_at(w, w->cursor, &it);
    w->awaits_read = !w->kind->fills && it.p->dram != PART_DRAM_READY && read_waits(w);
    if (w->awaits_read) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_READ_TURN, SPAN_ON);
        return 1;
    }
    return w->kind->begin(w, &it);
}

/* Begins items. False: there is no slot, or no place in a batch, now. */
static bool items_begin(struct walk *w)
{
    uint32_t items = PUMP_ITEMS, slots = PUMP_SLOTS, n = w->n_keys * w->parts;

    while (!w->stopping && !w->yielded && !w->awaits_read && w->cursor < n &&
           (w->held_bytes < w->held_most || w->held_bytes == 0)) {
        uint32_t waits = w->waits_n, weight = w->kind->weight ? w->kind->weight(w, w->cursor) : 1;
        int rc;

        if (items == 0 || slots == 0) {
            walk_yield(w);
            break;
        }
        rc = item_begin(w);
        w->most = rc == -EDQUOT || rc == -EAGAIN;
        if (rc == -EBUSY || rc == -EAGAIN || (rc == -EDQUOT && w->held_bytes == 0))
            return false;
        if (rc != 0)
            break; /* the end of what is under way goes on, or its turn to read */
        items -= weight < items ? weight : items;
        slots -= w->kind->fills || w->waits_n > waits;
        w->cursor++;
        if (w->slot_wait_ns != 0)
            slot_wait_ended(w);
    }
    return true;
}

void walk_pump(struct walk *w)
{
    struct requests *rq = w->r.s->rq;
    int sent;
    bool busy;

    if (w->pumping || w->finished || w->lookup)
        return;
    w->pumping = true;
    w->no_slot = w->most = false;
    if (w->opened < w->n_keys && !w->stopping && !w->yielded)
        w->kind->open(w);
    busy = !(list_empty(&w->ready) || w->kind->again(w)) || !items_begin(w);
    sent = w->kind->send ? w->kind->send(w) : 0;
    if (sent == -EAGAIN)
        busy = w->most = true;
    if (busy)
        walk_park(w);
    w->pumping = false;
    if (w->cursor == w->n_keys * w->parts && w->waits_n == 0 && sent == 0)
        w->kind->finish(w);
    if (rq->readers.fair.n > 0)
        reader_wake(rq);
}

void walk_stop_cb(struct request *r)
{
    struct walk *w = LIST_ENTRY(r, struct walk, r);

    if (w->stopping)
        return;
    w->stopping = true;
    w->yielded = w->awaits_read = false;
    cache_retry_cancel(&w->retry);
    if (w->lookup) {
        shared_lookup_cancel(w->lookup);
        w->lookup = NULL;
    }
    waits_abandon(w);
    if (w->kind->stop)
        w->kind->stop(w);
    give_up(w, UCM_BLOCK_CANCELLED);
    walk_pump(w);
}
