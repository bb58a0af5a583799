/* Parts that wait for their build, by their keys: each that is published while a session wants
 * summaries of what is stored, and those of mixed blocks (daemon/encoding/mixed.c). */
#include "daemon/retrieval/summary.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PUBLISHED_PER_TURN 64

struct published {
    struct list link;
    struct derived_space *space;
    uint32_t part;
    uint8_t key[UCM_MAX_KEY_BYTES];
};

/* Part `part` of the block of that key waits for its build. Keys, not blocks: what waits here holds
 * nothing, and an evicted block is passed over. False: too many wait. */
static bool build_queue(struct derived_space *space, const uint8_t *key, uint32_t part)
{
    struct summaries *ds = &retrieval_of(space->rq)->summaries;
    struct derived_tenant *tenant = space->tenant;
    struct list *node;
    struct published *p;

    if (limit_take(tenant->owner, LIMIT_BUILDS_WAITING, 1, NULL) != 0)
        return false;
    node = list_pop_front(&ds->published_free); /* there are as many as may wait */
    p = LIST_ENTRY(node, struct published, link);
    p->space = space_ref(space);
    p->part = part;
    memcpy(p->key, key, sizeof(p->key));
    list_push_back(&tenant->parts, &p->link);
    if (tenant->waiting++ == 0)
        list_push_back(&ds->turns, &tenant->turn);
    if (list_empty(&ds->published_retry.link))
        (void)cache_wait_for(space->rq->modules.cache, &ds->published_retry, WAIT_TURN);
    return true;
}

bool build_raw(struct requests *rq, struct ns *from, struct ns *base, const uint8_t *key,
               uint32_t part)
{
    struct derived_space *space = space_open(rq, from, base, NULL);
    bool queued = space && build_queue(space, key, part);

    if (space)
        space_unref(space);
    return queued;
}

static void build_skipped(const struct derived_space *space)
{
    struct metrics *m = space->rq->modules.metrics;

    if (space->summaries)
        m->summaries_skipped++;
    else
        m->unfit_decode_failed++;
}

/* Takes the first part of the tenant, who goes after the others. */
static void published_remove(struct summaries *ds, struct derived_tenant *tenant)
{
    struct published *p = LIST_ENTRY(list_pop_front(&tenant->parts), struct published, link);

    list_remove(&tenant->turn);
    limit_give(tenant->owner, LIMIT_BUILDS_WAITING, 1);
    if (--tenant->waiting > 0)
        list_push_back(&ds->turns, &tenant->turn);
    list_push_back(&ds->published_free, &p->link);
    space_unref(p->space); /* the tenant may go */
}

/* Blocks stored in an encoded base's own base are found in the encoded one, too. NULL: there is
 * none. */
static const struct ns *raw_base(const struct derived_space *space)
{
    return space->summaries && space_decodes(space->base) ? space->base->base : NULL;
}

static bool stores_for(const struct derived_space *space, const struct ns *ns)
{
    return space->summaries && (ns == space->base || ns == raw_base(space));
}

/* The block of that key that has the part in DRAM; 0: none. */
static block_ref stored_block(const struct derived_space *space, const uint8_t *key, uint32_t part)
{
    const struct ns *ns[] = {space->base, raw_base(space)};

    for (unsigned i = 0; i < 2 && ns[i]; i++) {
        block_ref ref = index_find(space->rq->modules.index, ns[i], key);

        if (ref != 0 && space_part(space, ref, part)->dram == PART_DRAM_READY)
            return ref;
    }
    return 0;
}

static void published_cb(void *ctx, struct ns *ns, block_ref ref, uint32_t part)
{
    struct requests *rq = ctx;
    struct summaries *ds = &retrieval_of(rq)->summaries;
    struct list *spaces = &retrieval_of(rq)->derived.spaces;

    if (ds->watchers == 0 || rq->draining)
        return;
    for (struct list *n = spaces->next; n != spaces; n = n->next) {
        struct derived_space *space = LIST_ENTRY(n, struct derived_space, link);

        if (!stores_for(space, ns) || space->watchers == 0)
            continue;
        if (!build_queue(space, index_block(rq->modules.index, ref)->key, part))
            build_skipped(space);
    }
}

/* 0, -EBUSY or -EAGAIN (later), or another -errno: it is not built. */
static int published_begin(const struct published *p)
{
    struct derived_space *space = p->space;
    struct cache *c = space->rq->modules.cache;
    block_ref base = stored_block(space, p->key, p->part), derived;
    int rc;

    if ((space->watchers == 0 && space->summaries) || base == 0)
        return -ENOENT;
    /* Decoded parts complete what another rank has stored. */
    if (!space->summaries && index_find(space->rq->modules.index, space->derived, p->key) == 0)
        return -ENOENT;
    cache_lease(c, base); /* first: a new block may take the place of another */
    derived = cache_open(c, space->derived, p->key);
    /* The claim of the pending write refuses one that is there already, or being written. */
    rc = derived ? derived_build(space, base, derived, p->part) : -ENOSPC;
    if (rc == 0) {
        cache_unlease(c, derived);
        cache_unlease(c, base);
        return 0;
    }
    if (derived)
        cache_lease_undo(c, derived);
    cache_lease_undo(c, base);
    return rc;
}

/* Whose turn it is; NULL: nothing may begin now. */
static struct derived_tenant *turn_next(struct requests *rq)
{
    struct summaries *ds = &retrieval_of(rq)->summaries;

    for (struct list *n = ds->turns.next; n != &ds->turns; n = n->next) {
        struct derived_tenant *tenant = LIST_ENTRY(n, struct derived_tenant, turn);

        if (limit_room(tenant->owner, LIMIT_BUILDS) > 0)
            return tenant;
    }
    return NULL;
}

static void summaries_pump(struct requests *rq)
{
    struct summaries *ds = &retrieval_of(rq)->summaries;
    struct derived_tenant *tenant;
    unsigned n = PUBLISHED_PER_TURN;

    cache_retry_cancel(&ds->published_retry);
    while ((tenant = turn_next(rq)) != NULL) {
        struct published *p = LIST_ENTRY(tenant->parts.next, struct published, link);
        int rc;

        if (n-- == 0) {
            (void)cache_wait_for(rq->modules.cache, &ds->published_retry, WAIT_TURN);
            return;
        }
        rc = rq->draining ? -ESHUTDOWN : published_begin(p);
        /* The next one after the queue of those who wait for space. */
        if ((rc == -EBUSY && cache_wait_for(rq->modules.cache, &ds->published_retry, WAIT_SLOT)) ||
            (rc == -EAGAIN && cache_wait_for(rq->modules.cache, &ds->published_retry, WAIT_OTHER)))
            return;
        if (rc != 0 && rc != -EEXIST && rc != -EINPROGRESS)
            build_skipped(p->space);
        published_remove(ds, tenant);
    }
}

static void published_retry_cb(struct cache_retry *r)
{
    summaries_pump(LIST_ENTRY(r, struct retrieval, summaries.published_retry)->rq);
}

void space_watch(struct derived_space *space)
{
    struct requests *rq = space->rq;

    space->watchers++;
    if (retrieval_of(rq)->summaries.watchers++ == 0)
        cache_watch(rq->modules.cache, published_cb, rq);
}

void space_unwatch(struct derived_space *space)
{
    struct requests *rq = space->rq;

    space->watchers--;
    if (--retrieval_of(rq)->summaries.watchers == 0)
        cache_watch(rq->modules.cache, NULL, NULL);
}

/* ---- life ---- */

int summaries_init(struct requests *rq)
{
    struct summaries *ds = &retrieval_of(rq)->summaries;

    retrieval_of(rq)->derived.ended_cb = summaries_pump;
    /* First what summaries_close looks at. */
    list_init(&ds->turns);
    list_init(&ds->published_free);
    list_init(&ds->published_retry.link);
    ds->published_retry.retry_cb = published_retry_cb;
    ds->published = calloc(SUMMARY_PUBLISHED_MAX, sizeof(*ds->published));
    if (!ds->published)
        return -ENOMEM;
    for (uint32_t i = 0; i < SUMMARY_PUBLISHED_MAX; i++)
        list_push_back(&ds->published_free, &ds->published[i].link);
    return 0;
}

void summaries_drop(struct requests *rq)
{
    struct summaries *ds = &retrieval_of(rq)->summaries;

    cache_retry_cancel(&ds->published_retry);
    while (!list_empty(&ds->turns))
        published_remove(ds, LIST_ENTRY(ds->turns.next, struct derived_tenant, turn));
}

void summaries_close(struct requests *rq)
{
    summaries_drop(rq);
    free(retrieval_of(rq)->summaries.published);
    free(retrieval_of(rq)->summaries.spare);
}
