/* Builds: a part of a base block is read up if need be, a thread of the pool computes its digest into a
 * slot of the digest block, and the digest is published.
 *
 *   begun -> [waits for the base's read] -> in the pool -> published -> waiters get a use
 *
 * A build belongs to no request: it goes on when its waiters leave. When the daemon stops, the build ends
 * without publishing. */
#include "daemon/digest/build.h"
#include "daemon/request/digest.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PUBLISHED_PER_TURN 64

struct digest_build {
    struct part_build work;
    struct list link;
    struct digest_space *space;
    struct list waiters;    /* of cache_wait.link */
    struct cache_wait read; /* of the base */
    block_ref base, digest; /* held */
    uint32_t part;
    struct cache_fill *fill;
};

struct published {
    struct list link;
    struct digest_space *space;
    uint32_t part;
    uint8_t key[UCM_MAX_KEY_BYTES];
};

static struct cache *cache_at(const struct digest_space *space)
{
    return space->rq->rooms.cache;
}

static struct metrics *metrics_at(const struct digest_space *space)
{
    return space->rq->rooms.metrics;
}

static const struct part *part_at(const struct digest_space *space, block_ref ref, uint32_t part)
{
    return &index_block(space->rq->rooms.index, ref)->part[part];
}

/* ---- one build ---- */

static void published_pump(struct requests *rq);

static void build_end(struct digest_build *b, int status)
{
    struct digest_space *space = b->space;
    struct requests *rq = space->rq;
    struct cache *c = cache_at(space);
    struct list *node;

    list_remove(&b->link);
    rq->digests.n_builds--;
    space->tenant->builds--;
    metrics_at(space)->digest_build_failed += status != 0;
    while ((node = list_pop_front(&b->waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);
        int rc = status;

        /* The slot is the digest's now, unless the block was evicted by name meanwhile. */
        if (rc == 0 && part_at(space, b->digest, b->part)->dram != PART_DRAM_READY)
            rc = -ENOENT;
        if (rc == 0)
            rc = cache_get(c, b->digest, b->part, 0, NUMA_NONE, w);
        w->shared = false;
        w->done_cb(w, rc == CACHE_READY ? 0 : rc);
    }
    cache_unlease(c, b->digest);
    cache_unlease(c, b->base);
    space_unref(space);
    free(b);
    published_pump(rq);
}

static void build_done_cb(struct digest_job *job)
{
    struct digest_build *b = LIST_ENTRY(job, struct digest_build, work.job);
    struct digest_space *space = b->space;

    bool whole = !digest_job_stopped(job);

    cache_put(cache_at(space), b->base, b->part);
    cache_fill_done(cache_at(space), b->fill, b->work.shards, whole);
    if (whole) {
        metrics_at(space)->digest_builds++;
        metrics_at(space)->digest_bytes += ns_part_bytes(space->derived, b->part);
    }
    build_end(b, whole ? 0 : -ECANCELED);
}

static void build_submit(struct digest_build *b)
{
    struct digest_space *space = b->space;

    b->work.plan = &space->plan;
    b->work.from = cache_memory(cache_at(space), b->base, b->part);
    b->work.to = cache_fill_memory(cache_at(space), b->fill);
    b->work.shard_bytes = space->base->identity.shard_bytes;
    b->work.job.done_cb = build_done_cb;
    part_build_submit(space->rq->rooms.digests, &b->work);
    if (space->rq->digests.stopping)
        digest_job_stop(&b->work.job);
}

static void base_read_cb(struct cache_wait *w, int status)
{
    struct digest_build *b = LIST_ENTRY(w, struct digest_build, read);

    if (status == 0) {
        build_submit(b);
        return;
    }
    cache_fill_done(cache_at(b->space), b->fill, b->work.shards, false);
    build_end(b, status);
}

/* 0: under way. */
static int build_begin(struct digest_space *space, block_ref base, block_ref digest, uint32_t part,
                       uint8_t priority, struct digest_build **out)
{
    struct digests *ds = &space->rq->digests;
    struct cache *c = cache_at(space);
    struct digest_build *b;
    int got, rc;

    if (ds->n_builds == DIGEST_BUILDS_MAX ||
        space->tenant->builds == DIGEST_OF_TENANT(DIGEST_BUILDS_MAX))
        return -EBUSY;
    b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->work.shards = space->derived->identity.shards[part];
    b->read.done_cb = base_read_cb;
    got = cache_get(c, base, part, priority, NUMA_NONE, &b->read);
    rc = got < 0 ? got
                 : cache_fill_claim(c, &ds->fills, digest, part, 0, b->work.shards, NUMA_NONE,
                                    &b->fill);
    if (rc != 0) {
        if (got == CACHE_READY)
            cache_put(c, base, part);
        else if (got == CACHE_PENDING)
            cache_get_cancel(c, &b->read); /* the next try finds it in DRAM */
        free(b);
        return rc;
    }
    list_init(&b->waiters);
    b->space = space_ref(space);
    b->base = base;
    b->digest = digest;
    b->part = part;
    cache_lease(c, base);
    cache_lease(c, digest);
    list_push_back(&ds->builds, &b->link);
    ds->n_builds++;
    space->tenant->builds++;
    if (got == CACHE_READY)
        build_submit(b);
    *out = b;
    return 0;
}

static struct digest_build *build_find(const struct requests *rq, block_ref digest, uint32_t part)
{
    for (struct list *n = rq->digests.builds.next; n != &rq->digests.builds; n = n->next) {
        struct digest_build *b = LIST_ENTRY(n, struct digest_build, link);

        if (b->digest == digest && b->part == part)
            return b;
    }
    return NULL;
}

int digest_get(struct digest_space *space, block_ref base, block_ref digest, uint32_t part,
               uint8_t priority, struct cache_wait *w)
{
    struct digest_build *b = NULL;
    int rc = cache_get(cache_at(space), digest, part, priority, NUMA_NONE, w);

    if (rc != -ENOENT)
        return rc;
    if (part_at(space, digest, part)->dram == PART_DRAM_FILLING) {
        b = build_find(space->rq, digest, part);
        rc = b ? 0 : -EINPROGRESS;
        metrics_at(space)->single_flight += b != NULL;
    } else if (base != 0) {
        rc = build_begin(space, base, digest, part, priority, &b);
    }
    if (rc != 0)
        return rc;
    list_push_back(&b->waiters, &w->link);
    return CACHE_PENDING;
}

/* ---- parts that were published ---- */

/* Keys, not blocks: what waits here holds nothing, and an evicted block is passed over. */
static bool published_add(struct digests *ds, struct digest_space *space, const uint8_t *key,
                          uint32_t part)
{
    struct digest_tenant *tenant = space->tenant;
    struct list *node;
    struct published *p;

    if (tenant->waiting == DIGEST_OF_TENANT(DIGEST_PUBLISHED_MAX))
        return false;
    node = list_pop_front(&ds->published_free);
    if (!node)
        return false;
    p = LIST_ENTRY(node, struct published, link);
    p->space = space_ref(space);
    p->part = part;
    memcpy(p->key, key, sizeof(p->key));
    list_push_back(&tenant->parts, &p->link);
    if (tenant->waiting++ == 0)
        list_push_back(&ds->turns, &tenant->turn);
    return true;
}

/* Takes the first part of the tenant, who goes behind the others. */
static void published_remove(struct digests *ds, struct digest_tenant *tenant)
{
    struct published *p = LIST_ENTRY(list_pop_front(&tenant->parts), struct published, link);

    list_remove(&tenant->turn);
    if (--tenant->waiting > 0)
        list_push_back(&ds->turns, &tenant->turn);
    list_push_back(&ds->published_free, &p->link);
    space_unref(p->space); /* the tenant may go */
}

static void published_cb(void *ctx, struct ns *ns, block_ref ref, uint32_t part)
{
    struct requests *rq = ctx;
    struct digests *ds = &rq->digests;

    if (ds->watchers == 0 || rq->draining)
        return;
    for (struct list *n = ds->spaces.next; n != &ds->spaces; n = n->next) {
        struct digest_space *space = LIST_ENTRY(n, struct digest_space, link);

        if (space->base != ns || space->watchers == 0)
            continue;
        if (!published_add(ds, space, index_block(rq->rooms.index, ref)->key, part))
            metrics_at(space)->digest_build_skipped++;
        else if (list_empty(&ds->published_retry.link))
            cache_next_turn(rq->rooms.cache, &ds->published_retry);
    }
}

/* 0, -EBUSY (later), or another -errno: it is not built. */
static int published_begin(const struct published *p)
{
    struct digest_space *space = p->space;
    struct cache *c = cache_at(space);
    block_ref base = index_find(space->rq->rooms.index, space->base, p->key), digest;
    struct digest_build *b;
    int rc;

    if (space->watchers == 0 || base == 0 || part_at(space, base, p->part)->dram != PART_DRAM_READY)
        return -ENOENT;
    cache_lease(c, base); /* first: a new block may take the place of another */
    digest = cache_open(c, space->derived, p->key);
    /* The claim of the fill refuses one that is there already, or being written. */
    rc = digest ? build_begin(space, base, digest, p->part, 0, &b) : -ENOSPC;
    if (digest)
        cache_unlease(c, digest);
    cache_unlease(c, base);
    return rc;
}

/* Whose turn it is; NULL: nothing may begin now. */
static struct digest_tenant *turn_next(struct digests *ds)
{
    if (ds->n_builds == DIGEST_BUILDS_MAX)
        return NULL;
    for (struct list *n = ds->turns.next; n != &ds->turns; n = n->next) {
        struct digest_tenant *tenant = LIST_ENTRY(n, struct digest_tenant, turn);

        if (tenant->builds < DIGEST_OF_TENANT(DIGEST_BUILDS_MAX))
            return tenant;
    }
    return NULL;
}

static void published_pump(struct requests *rq)
{
    struct digests *ds = &rq->digests;
    struct digest_tenant *tenant;
    unsigned n = PUBLISHED_PER_TURN;

    cache_retry_cancel(&ds->published_retry);
    while ((tenant = turn_next(ds)) != NULL) {
        struct published *p = LIST_ENTRY(tenant->parts.next, struct published, link);
        int rc;

        if (n-- == 0) {
            cache_next_turn(rq->rooms.cache, &ds->published_retry);
            return;
        }
        rc = rq->draining ? -ESHUTDOWN : published_begin(p);
        /* The next one behind the queue of those who wait for space. */
        if (rc == -EBUSY && cache_space_wait(rq->rooms.cache, &ds->published_retry, false))
            return;
        metrics_at(p->space)->digest_build_skipped +=
            rc != 0 && rc != -EEXIST && rc != -EINPROGRESS;
        published_remove(ds, tenant);
    }
}

static void published_retry_cb(struct cache_retry *r)
{
    published_pump(LIST_ENTRY(r, struct requests, digests.published_retry));
}

void space_watch(struct digest_space *space)
{
    struct requests *rq = space->rq;

    space->watchers++;
    if (rq->digests.watchers++ == 0)
        cache_watch(rq->rooms.cache, published_cb, rq);
}

void space_unwatch(struct digest_space *space)
{
    struct requests *rq = space->rq;

    space->watchers--;
    if (--rq->digests.watchers == 0)
        cache_watch(rq->rooms.cache, NULL, NULL);
}

/* ---- life ---- */

int digests_init(struct requests *rq)
{
    struct digests *ds = &rq->digests;

    ds->published = calloc(DIGEST_PUBLISHED_MAX, sizeof(*ds->published));
    if (!ds->published)
        return -ENOMEM;
    list_init(&ds->spaces);
    list_init(&ds->builds);
    list_init(&ds->tenants);
    list_init(&ds->turns);
    list_init(&ds->published_free);
    for (uint32_t i = 0; i < DIGEST_PUBLISHED_MAX; i++)
        list_push_back(&ds->published_free, &ds->published[i].link);
    list_init(&ds->published_retry.link);
    ds->published_retry.retry_cb = published_retry_cb;
    cache_fills_init(&ds->fills);
    return 0;
}

void digests_drop(struct requests *rq)
{
    struct digests *ds = &rq->digests;

    cache_retry_cancel(&ds->published_retry);
    while (!list_empty(&ds->turns))
        published_remove(ds, LIST_ENTRY(ds->turns.next, struct digest_tenant, turn));
}

void digests_stop(struct requests *rq)
{
    struct digests *ds = &rq->digests;

    ds->stopping = true;
    for (struct list *n = ds->builds.next; n != &ds->builds; n = n->next)
        digest_job_stop(&LIST_ENTRY(n, struct digest_build, link)->work.job);
}

void digests_close(struct requests *rq)
{
    assert(rq->digests.n_builds == 0 && rq->digests.held_bytes == 0);
    digests_drop(rq);
    assert(list_empty(&rq->digests.spaces) && list_empty(&rq->digests.tenants));
    free(rq->digests.published);
}
