/* Transfers of digests: digest.build and the part of chain.append that needs time. Their blocks are of
 * the digests' namespace. An item takes a use of a part in DRAM, waits for its read, or for its build. */
#include "daemon/request/digest.h"
#include "daemon/request/transfer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define OPENS_PER_TURN 512

static struct block *block_of(const struct transfer *t, block_ref ref)
{
    return index_block(t->r.s->rq->rooms.index, ref);
}

/* A copy that this host has, or knows of. */
static bool digest_exists(const struct transfer *t, uint32_t item)
{
    block_ref ref = t->refs[item_key(t, item)];
    const struct part *p = &block_of(t, ref)->part[item_part(t, item)];

    if (cache_doomed(cache_of(t), ref))
        return false;
    return p->dram == PART_DRAM_READY || p->nvme == PART_NVME_READY || p->share == PART_SHARE_KNOWN;
}

/* ---- the shared tier ---- */

static void digests_looked_cb(struct shared_lookup *k)
{
    struct transfer *t = k->ctx;

    t->lookup = NULL;
    shared_lookup_free(k);
    transfer_pump(t);
}

static bool digests_own_look(struct transfer *t)
{
    struct proto_bin keys = {t->keys, t->n_keys * t->ns->identity.key_bytes};

    if (shared_lookup_start(t->r.s, t->ns, keys, 0, false, shared_lookup_until(t->r.s->rq, 0),
                            &t->lookup) != 0)
        return false;
    t->lookup->ctx = t;
    t->lookup->done_cb = digests_looked_cb;
    return true;
}

static void bases_looked_cb(struct shared_lookup *k);

/* An encoded base's blocks lie in it or in its own base. */
static bool bases_look(struct transfer *t, bool first)
{
    struct proto_bin keys = {t->keys, t->n_keys * t->ns->identity.key_bytes};

    if (!(first ? view_look_begin(&t->look, keys, 0, &t->lookup)
                : view_look_next(&t->look, keys, &t->lookup)))
        return false;
    t->lookup->ctx = t;
    t->lookup->done_cb = bases_looked_cb;
    return true;
}

static void bases_looked_cb(struct shared_lookup *k)
{
    struct transfer *t = k->ctx;

    t->lookup = NULL;
    shared_lookup_free(k);
    if (!bases_look(t, false) && !digests_own_look(t))
        transfer_pump(t);
}

void digests_look(struct transfer *t)
{
    t->look = (struct view_look){.s = t->r.s,
                                 .view = session_view(t->r.s, t->space->base),
                                 .until_ms = shared_lookup_until(t->r.s->rq, 0)};
    if (!bases_look(t, true) && !digests_own_look(t))
        transfer_pump(t);
}

/* ---- digest.build ---- */

static void build_open(struct transfer *t, uint32_t i)
{
    struct index *ix = t->r.s->rq->rooms.index;
    const uint8_t *key = t->keys + (size_t)i * t->ns->identity.key_bytes;
    struct view v = session_view(t->r.s, t->space->base);
    block_ref base;

    (void)view_find(t->r.s->rq, &v, key, 1, false, &base);
    if (cache_found(cache_of(t), base)) {
        t->blocks[i] = base;
        cache_lease(cache_of(t), base); /* first: a new block may take the place of another */
        t->refs[i] = cache_open(cache_of(t), t->ns, key);
        t->status[i] = t->refs[i] ? UCM_BLOCK_OK : UCM_BLOCK_NO_ROOM;
        return;
    }
    t->refs[i] = index_find(ix, t->ns, key);
    if (cache_found(cache_of(t), t->refs[i])) {
        t->r.s->rq->rooms.metrics->digest_orphans++;
        cache_lease(cache_of(t), t->refs[i]);
        return;
    }
    t->refs[i] = 0;
    t->status[i] = UCM_BLOCK_MISS;
}

int method_digest_build(struct call *call)
{
    const struct msg_digest_build *m = &call->params.digest_build;
    struct derived_space *space = call_space(call, m->ns);
    uint32_t n = space ? call_keys(call, space->derived, m->keys) : 0, parts;
    struct transfer *t;
    struct view view;

    if (n == 0 || space_builds(call, space->base) != 0)
        return -call->error.code;
    parts = space->derived->identity.parts;
    if (m->part > parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "part: %llu; 0 means all, else 1 to %u for parts 0 to %u",
                             (unsigned long long)m->part, parts, parts - 1);
    view = (struct view){.ns = {space->derived}, .n = 1};
    t = transfer_new(call, TRANSFER_BUILD, &view, n, m->deadline_ms, 0);
    if (!t)
        return -call->error.code;
    t->space = space;
    t->build = true;
    t->part = m->part ? (uint32_t)m->part - 1 : 0;
    t->parts = m->part ? 1 : parts;
    t->priority = (uint8_t)m->priority;
    memcpy(t->keys, m->keys.p, m->keys.n);
    digests_look(t);
    return 0;
}

/* ---- items ---- */

void digests_open(struct transfer *t)
{
    if (t->kind == TRANSFER_HOLD) {
        if (!append_open(t))
            transfer_yield(t);
        return;
    }
    for (uint32_t opens = 0; t->opened < t->n_keys; t->opened++) {
        if (opens++ == OPENS_PER_TURN) {
            transfer_yield(t);
            return;
        }
        build_open(t, t->opened);
    }
}

static void item_failed(struct transfer *t, uint32_t item, int status)
{
    item_status(t, item,
                status == -ENOENT                      ? UCM_BLOCK_MISS
                : status == -EINPROGRESS               ? UCM_BLOCK_IN_PROGRESS
                : status == -EIO || status == -EBADMSG ? UCM_BLOCK_FAILED
                                                       : UCM_BLOCK_NO_ROOM);
}

/* The transfer has a use of the item's part. */
static void item_take(struct transfer *t, uint32_t item, bool built)
{
    t->built += built;
    if (t->kind == TRANSFER_HOLD)
        append_hold(t, item);
    else
        cache_put(cache_of(t), t->refs[item_key(t, item)], item_part(t, item));
    if (built)
        t->bytes += ns_part_bytes(t->ns, item_part(t, item));
}

/* As derived_get, by w. */
static int item_source(struct transfer *t, uint32_t item, struct cache_wait *w)
{
    block_ref ref = t->refs[item_key(t, item)];
    uint32_t part = item_part(t, item);

    if (t->build)
        return derived_get(t->space, t->blocks[item_key(t, item)], ref, part, read_priority(t), w);
    return cache_get(cache_of(t), ref, part, read_priority(t), NUMA_NONE, w);
}

/* It may not be held: too many hold it, or too much is held. Nobody knows when that ends. */
static bool item_barred(const struct transfer *t, uint32_t item)
{
    const struct part *p = &block_of(t, t->refs[item_key(t, item)])->part[item_part(t, item)];

    return (p->dram == PART_DRAM_READY && p->users >= PART_USERS_MAX) ||
           (t->kind == TRANSFER_HOLD && !append_may_hold(t));
}

static bool item_building(const struct transfer *t, uint32_t item)
{
    return block_of(t, t->refs[item_key(t, item)])->part[item_part(t, item)].dram ==
           PART_DRAM_FILLING;
}

int digest_begin(struct transfer *t, uint32_t item)
{
    int rc = wait_reserve(t);

    if (t->kind == TRANSFER_BUILD && digest_exists(t, item)) {
        item_status(t, item, UCM_BLOCK_EXISTS);
        return 0;
    }
    if (rc == 0 && item_barred(t, item))
        rc = -EMLINK;
    if (rc == 0 && slot_waits(t, item))
        rc = -EBUSY;
    if (rc == 0)
        rc = item_source(t, item, &t->spare->w);
    if (rc == CACHE_READY) {
        item_take(t, item, false);
    } else if (rc == CACHE_PENDING) {
        t->spare->building = item_building(t, item);
        item_waits(t, item);
    } else if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN) {
        return rc;
    } else {
        item_failed(t, item, rc);
    }
    return 0;
}

bool digest_ended(struct item_wait *iw, int status)
{
    struct transfer *t = iw->t;

    if (status != 0 && t->build && !iw->again && !iw->building) {
        /* Its copy is gone: the next source is a build. */
        iw->again = true;
        t->waits_n++;
        list_push_back(&t->ready, &iw->link);
        return true;
    }
    if (status == 0)
        item_take(t, iw->item, iw->building);
    else
        item_failed(t, iw->item, status);
    t->in_window -= item_slot_bytes(t, iw->item);
    return false;
}

bool digests_again(struct transfer *t)
{
    while (!list_empty(&t->ready)) {
        struct item_wait *iw = LIST_ENTRY(t->ready.next, struct item_wait, link);
        int rc = item_source(t, iw->item, &iw->w);

        t->most = rc == -EDQUOT || rc == -EAGAIN;
        if (rc == -EBUSY || t->most)
            return false;
        list_remove(&iw->link);
        t->waits_n--;
        t->in_window -= item_slot_bytes(t, iw->item);
        if (rc == CACHE_PENDING) {
            free(t->spare);
            t->spare = iw;
            iw->building = item_building(t, iw->item);
            item_waits(t, iw->item);
            continue;
        }
        if (rc == CACHE_READY)
            item_take(t, iw->item, false);
        else
            item_failed(t, iw->item, rc);
        free(iw);
    }
    return true;
}
