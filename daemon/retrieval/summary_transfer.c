#include "daemon/retrieval/summary_transfer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define OPENS_PER_TURN 512

struct summary_transfer *summary_transfer_new(struct call *call, const struct transfer_kind *kind,
                                              struct derived_space *space, struct proto_bin keys,
                                              uint32_t n, uint64_t timeout_ms)
{
    struct view view = {.ns = {space->derived}, .n = 1};
    struct summary_transfer *d = transfer_new(call, kind, &view, n, timeout_ms,
                                              sizeof(*d) + n * (sizeof(*d->bases) + 1) + keys.n);

    if (!d)
        return NULL;
    d->space = space;
    d->bases = (block_ref *)(d + 1);
    d->found = (uint8_t *)(d->bases + n);
    d->keys = d->found + n;
    memcpy(d->keys, keys.p, keys.n);
    return d;
}

/* ---- the shared tier ---- */

static void summaries_looked_cb(struct view_look *look, const uint8_t *keys)
{
    struct transfer *w = &LIST_ENTRY(look, struct summary_transfer, look)->w;

    (void)keys;
    w->look = NULL;
    transfer_pump(w);
}

static void summaries_look_for(struct summary_transfer *d, const struct view *view,
                               void (*done_cb)(struct view_look *look, const uint8_t *keys))
{
    struct session *s = d->w.r.s;
    struct proto_bin keys = {d->keys, d->w.n_keys * d->w.ns->identity.key_bytes};

    d->look = (struct view_look){
        .s = s, .view = *view, .until_ms = shared_query_until(s->rq, 0), .done_cb = done_cb};
    d->w.look = &d->look;
    if (!view_look_begin(&d->look, keys, 0))
        done_cb(&d->look, keys.p);
}

static void bases_looked_cb(struct view_look *look, const uint8_t *keys)
{
    struct summary_transfer *d = LIST_ENTRY(look, struct summary_transfer, look);

    (void)keys;
    summaries_look_for(d, &d->w.view, summaries_looked_cb);
}

void summaries_look(struct summary_transfer *d)
{
    struct view bases = session_view(d->w.r.s, d->space->base);

    summaries_look_for(d, &bases, bases_looked_cb);
}

/* ---- items ---- */

static void summary_failed(struct transfer *w, const struct transfer_item *it, int status)
{
    transfer_status(w, it->at,
                    status == -ENOENT                      ? UCM_BLOCK_MISS
                    : status == -EINPROGRESS               ? UCM_BLOCK_IN_PROGRESS
                    : status == -EIO || status == -EBADMSG ? UCM_BLOCK_FAILED
                                                           : UCM_BLOCK_NO_ROOM);
}

/* The transfer has a reference to the item's part. */
static void item_take(struct summary_transfer *d, const struct transfer_item *it, bool built)
{
    d->built += built;
    if (d->sequence)
        sequence_keep(d->sequence, d->sequence_first + it->at, it->ref);
    else
        cache_put(d->w.modules->cache, it->ref, it->part);
    if (built)
        d->w.bytes += it->form->layers * it->form->layer_bytes;
}

/* As derived_get, by cw. */
static int item_source(struct summary_transfer *d, const struct transfer_item *it,
                       struct cache_wait *cw)
{
    struct transfer *w = &d->w;

    if (d->build)
        return derived_get(d->space, d->bases[it->at / w->parts], it->ref, it->part,
                           read_priority(w), cw);
    return cache_get(w->modules->cache, it->ref, it->part, read_priority(w), NUMA_NONE, cw);
}

/* It may not be held: too many hold it, or too much is held. Nobody knows when that ends. */
static bool item_barred(const struct summary_transfer *d, const struct transfer_item *it)
{
    return (it->p->dram == PART_DRAM_READY && it->p->users >= PART_USERS_MAX) ||
           (d->sequence && sequence_may_hold(d->sequence) == 0);
}

int summary_begin(struct transfer *w, const struct transfer_item *it)
{
    struct summary_transfer *d = summary_transfer(w);
    int rc = transfer_reserve(w);

    if (rc == 0 && item_barred(d, it))
        rc = -EMLINK;
    if (rc == 0 && transfer_gives_way(w, it))
        rc = -EBUSY;
    if (rc == 0)
        rc = item_source(d, it, &w->spare->w);
    if (rc == CACHE_READY) {
        item_take(d, it, false);
    } else if (rc == CACHE_PENDING) {
        w->spare->building = it->p->dram == PART_DRAM_PENDING_WRITE;
        transfer_wait(w, it);
    } else if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN) {
        return rc;
    } else {
        summary_failed(w, it, rc);
    }
    return 0;
}

int summary_ready(struct transfer *w, struct item_wait *iw, int status)
{
    struct summary_transfer *d = summary_transfer(w);

    if (status != 0 && d->build && !iw->again && !iw->building) {
        iw->again = true; /* its copy is gone: the next source is a build */
        return 1;
    }
    if (status == 0)
        item_take(d, &iw->it, iw->building);
    else
        summary_failed(w, &iw->it, status);
    return 0;
}

int summary_again(struct transfer *w)
{
    struct summary_transfer *d = summary_transfer(w);

    while (!list_empty(&w->ready)) {
        struct item_wait *iw = LIST_ENTRY(w->ready.next, struct item_wait, link);
        struct transfer_item it = iw->it;
        int rc = item_source(d, &it, &iw->w);

        if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN)
            return rc;
        list_remove(&iw->link);
        w->waits_n--;
        w->held_bytes -= iw->slot_bytes;
        if (rc == CACHE_PENDING) {
            free(w->spare);
            w->spare = iw;
            iw->building = it.p->dram == PART_DRAM_PENDING_WRITE;
            transfer_wait(w, &it);
            continue;
        }
        if (rc == CACHE_READY)
            item_take(d, &it, false);
        else
            summary_failed(w, &it, rc);
        free(iw);
    }
    return 0;
}

/* No room for what they are built in. */
void summary_no_room(struct transfer *w)
{
    transfer_drop_ready(w, UCM_BLOCK_NO_ROOM);
}

/* ---- summary.build ---- */

static void build_open_one(struct summary_transfer *d, const struct view *v, uint32_t i)
{
    struct transfer *w = &d->w;
    const uint8_t *key = d->keys + (size_t)i * w->ns->identity.key_bytes;
    block_ref base;

    /* A bypass of loads is no reason to think that a block of this one space's base is not here. */
    if (!view_find(w->r.s->rq, v, key, 1, false, &base) && v->n == 1)
        base = index_find(w->modules->index, v->ns[0], key);
    if (cache_found(w->modules->cache, base)) {
        d->bases[i] = base;
        cache_lease(w->modules->cache, base); /* first: a new block may take the place of another */
        w->refs[i] = cache_open(w->modules->cache, w->ns, key);
        w->status[i] = w->refs[i] ? UCM_BLOCK_OK : UCM_BLOCK_NO_ROOM;
        return;
    }
    w->refs[i] = index_find(w->modules->index, w->ns, key);
    if (cache_found(w->modules->cache, w->refs[i])) {
        w->modules->metrics->summaries_orphaned++;
        cache_lease(w->modules->cache, w->refs[i]);
        return;
    }
    w->refs[i] = 0;
    w->status[i] = UCM_BLOCK_MISS;
}

static void build_open(struct transfer *w)
{
    struct summary_transfer *d = summary_transfer(w);
    struct view v = session_view(w->r.s, d->space->base);

    for (uint32_t opens = 0; w->opened < w->n_keys; w->opened++) {
        if (opens++ == OPENS_PER_TURN) {
            transfer_yield(w);
            return;
        }
        build_open_one(d, &v, w->opened);
    }
}

/* A copy that this host has, or knows of. */
static bool summary_exists(const struct transfer *w, const struct transfer_item *it)
{
    return !cache_deleting(w->modules->cache, it->ref) &&
           (it->p->dram == PART_DRAM_READY || it->p->nvme == PART_NVME_READY ||
            it->p->shared == PART_SHARED_KNOWN);
}

static int build_begin(struct transfer *w, const struct transfer_item *it)
{
    if (!summary_exists(w, it))
        return summary_begin(w, it);
    transfer_status(w, it->at, UCM_BLOCK_EXISTS);
    return 0;
}

static void build_finish(struct transfer *w)
{
    struct summary_transfer *d = summary_transfer(w);

    for (uint32_t i = 0; i < w->n_keys; i++)
        if (d->bases[i] != 0)
            cache_unlease(w->modules->cache, d->bases[i]);
    transfer_end(w, NULL);
}

static const struct transfer_kind build_kind = {.open = build_open,
                                                .begin = build_begin,
                                                .ready = summary_ready,
                                                .again = summary_again,
                                                .no_room = summary_no_room,
                                                .finish = build_finish};

int method_summary_build(struct call *call)
{
    const struct msg_summary_build *m = &call->params.summary_build;
    struct derived_space *space = call_space(call, m->ns);
    uint32_t n = space ? call_keys(call, space->derived, m->keys) : 0, parts;
    struct summary_transfer *d;

    if (n == 0 || space_builds(call, space->base) != 0)
        return -call->error.code;
    if (call_parts(call, m->part, m->parts, space->derived->identity.parts, &parts) != 0)
        return -call->error.code;
    d = summary_transfer_new(call, &build_kind, space, m->keys, n, m->timeout_ms);
    if (!d)
        return -call->error.code;
    d->build = true;
    d->w.part = (uint32_t)m->part;
    d->w.parts = parts;
    d->w.priority = (uint8_t)m->priority;
    summaries_look(d);
    return 0;
}
