/* Builds: if need be a part of a base block is read first; a thread of the pool computes the
 * derived part into its slot, and the part is published.
 *
 *   begun -> [waits for the base's read] -> in the pool -> published -> waiters get a reference
 *
 * A build belongs to no request: it goes on when its waiters leave. When the daemon stops, the
 * build ends without publishing. */
#include "daemon/retrieval/derived.h"

#include "daemon/cache/span.h"
#include "daemon/request/view.h"
#include "daemon/retrieval/part_build.h"
#include "daemon/retrieval/summary.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct derived_build {
    struct part_build work;
    struct list link;
    struct derived_space *space;
    struct list waiters;     /* of cache_wait.link */
    struct cache_wait read;  /* of the base */
    block_ref base, derived; /* held */
    uint32_t part, layers;
    struct pending_write *pending_write;
};

static struct cache *cache_at(const struct derived_space *space)
{
    return space->rq->modules.cache;
}

static struct metrics *metrics_at(const struct derived_space *space)
{
    return space->rq->modules.metrics;
}

/* ---- tenants ---- */

struct derived_tenant *derived_tenant_ref(struct requests *rq, const char *name)
{
    struct derived *d = &retrieval_of(rq)->derived;
    struct derived_tenant *t;

    for (struct list *n = d->tenants.next; n != &d->tenants; n = n->next) {
        t = LIST_ENTRY(n, struct derived_tenant, link);
        if (strcmp(t->name, name) == 0) {
            t->refs++;
            return t;
        }
    }
    t = calloc(1, sizeof(*t));
    if (t)
        t->owner = limits_tenant(rq->modules.limits, name);
    if (!t || !t->owner) {
        free(t);
        return NULL;
    }
    t->refs = 1;
    snprintf(t->name, sizeof(t->name), "%s", name);
    list_init(&t->turn);
    list_init(&t->parts);
    summary_turns_init(&t->selections);
    list_push_back(&d->tenants, &t->link);
    return t;
}

void derived_tenant_unref(struct derived_tenant *t)
{
    if (--t->refs > 0)
        return;
    list_remove(&t->link);
    limit_owner_unref(t->owner);
    free(t);
}

/* ---- spaces ---- */

struct derived_space *space_ref(struct derived_space *space)
{
    space->refs++;
    return space;
}

void space_unref(struct derived_space *space)
{
    struct index *ix = space->rq->modules.index;

    if (--space->refs > 0)
        return;
    index_ns_unref(ix, space->base);
    index_ns_unref(ix, space->derived);
    list_remove(&space->link);
    derived_tenant_unref(space->tenant);
    free(space);
}

bool space_decodes(const struct ns *base)
{
    return form_exact(ns_form(base, 0));
}

struct derived_space *space_open(struct requests *rq, struct ns *base, struct ns *derived,
                                 const struct ucm_summary_plan *plan)
{
    struct derived_space *space;

    for (struct list *n = retrieval_of(rq)->derived.spaces.next;
         n != &retrieval_of(rq)->derived.spaces; n = n->next) {
        space = LIST_ENTRY(n, struct derived_space, link);
        if (space->derived == derived && space->base == base)
            return space_ref(space);
    }
    space = calloc(1, sizeof(*space));
    if (space)
        space->tenant = derived_tenant_ref(rq, base->identity.tenant);
    if (!space || !space->tenant) {
        free(space);
        return NULL;
    }
    space->rq = rq;
    space->refs = 1;
    space->base = base;
    space->derived = derived;
    space->summaries = plan != NULL;
    if (plan)
        space->plan = *plan;
    index_ns_ref(rq->modules.index, base);
    index_ns_ref(rq->modules.index, derived);
    list_push_back(&retrieval_of(rq)->derived.spaces, &space->link);
    return space;
}

/* ---- one build ---- */

static void scratch_free(struct derived_build *b)
{
    if (!b->work.scratch)
        return;
    free(b->work.scratch);
    limit_give(b->space->tenant->owner, LIMIT_MEMORY, part_build_scratch(&b->work));
}

/* 0 or -ENOMEM. */
static int scratch_new(struct derived_build *b)
{
    struct limit_owner *owner = b->space->tenant->owner;
    uint64_t bytes = part_build_scratch(&b->work);

    if (bytes == 0)
        return 0;
    if (limit_take(owner, LIMIT_MEMORY, bytes, NULL) != 0)
        return -ENOMEM;
    b->work.scratch = malloc(bytes);
    if (b->work.scratch)
        return 0;
    limit_give(owner, LIMIT_MEMORY, bytes);
    return -ENOMEM;
}

static void build_end(struct derived_build *b, int status)
{
    struct derived_space *space = b->space;
    struct requests *rq = space->rq;
    struct cache *c = cache_at(space);
    struct list *node;

    list_remove(&b->link);
    scratch_free(b);
    limit_give(space->tenant->owner, LIMIT_BUILDS, 1);
    metrics_at(space)->summaries_failed += status != 0 && space->summaries;
    metrics_at(space)->unfit_decode_failed += status != 0 && !space->summaries;
    /* The waiter has references to both blocks, and may drop them when its callback returns. */
    cache_unlease(c, b->derived);
    cache_unlease(c, b->base);
    while ((node = list_pop_front(&b->waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);
        int rc = status;

        /* The slot is the part's now, unless the block was evicted by name meanwhile. */
        if (rc == 0 && space_part(space, b->derived, b->part)->dram != PART_DRAM_READY)
            rc = -ENOENT;
        if (rc == 0)
            rc = cache_get(c, b->derived, b->part, 0, NUMA_NONE, w);
        rc = rc == -EAGAIN ? -EBUSY : rc; /* too many users */
        w->shared = false;
        w->done_cb(w, rc == CACHE_READY ? 0 : rc);
    }
    space_unref(space);
    free(b);
    retrieval_of(rq)->derived.ended_cb(rq);
}

static void build_count(const struct derived_build *b)
{
    const struct derived_space *space = b->space;
    struct metrics *m = metrics_at(space);

    if (space->summaries) {
        m->summaries_built++;
        m->summaries_built_bytes += ns_part_bytes(space->derived, b->part);
        return;
    }
    m->unfit_decoded++;
}

static void build_done_cb(struct summary_job *job)
{
    struct derived_build *b = LIST_ENTRY(job, struct derived_build, work.job);
    struct derived_space *space = b->space;
    int status = summary_job_stopped(job) ? -ECANCELED : 0;

    cache_put(cache_at(space), b->base, b->part);
    pending_write_done(cache_at(space), b->pending_write, b->layers, status == 0);
    if (status == 0)
        build_count(b);
    build_end(b, status);
}

/* Its base has been read, and the build has a reference to it. 0, or -EINVAL. */
static int build_submit(struct derived_build *b)
{
    struct derived_space *space = b->space;
    struct span from, to;
    int rc = span_part(cache_at(space), b->base, b->part, &from);

    if (rc == 0)
        rc = span_pending_write(cache_at(space), b->pending_write, 0, b->layers, &to);
    b->work.job.done_cb = build_done_cb;
    if (rc == 0)
        rc = part_build_submit(retrieval_of(space->rq)->pool, &b->work, &from, &to);
    if (rc == 0 && retrieval_of(space->rq)->derived.stopping)
        summary_job_stop(&b->work.job);
    return rc;
}

static void base_read_cb(struct cache_wait *w, int status)
{
    struct derived_build *b = LIST_ENTRY(w, struct derived_build, read);
    int rc = status == 0 ? build_submit(b) : status;

    if (rc == 0)
        return;
    if (status == 0)
        cache_put(cache_at(b->space), b->base, b->part);
    pending_write_done(cache_at(b->space), b->pending_write, b->layers, false);
    build_end(b, rc);
}

/* 0: under way. */
static int build_begin(struct derived_space *space, block_ref base, block_ref derived,
                       uint32_t part, uint8_t priority, struct derived_build **out)
{
    struct derived *d = &retrieval_of(space->rq)->derived;
    struct cache *c = cache_at(space);
    struct derived_build *b;
    int got, rc;

    if (limit_room(space->tenant->owner, LIMIT_BUILDS) == 0)
        return -EAGAIN;
    b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->space = space;
    b->base = base;
    b->derived = derived;
    b->part = part;
    b->layers = ns_form(space->derived, part)->layers;
    rc = part_build_init(&b->work, space->summaries ? &space->plan : NULL,
                         ns_form(cache_ns(c, base), part), ns_form(space->derived, part));
    if (rc == 0)
        rc = scratch_new(b);
    if (rc != 0) {
        free(b);
        return rc;
    }
    b->read.done_cb = base_read_cb;
    got = cache_get(c, base, part, priority, NUMA_NONE, &b->read);
    rc = got < 0 ? got
                 : pending_write_claim(c, &d->pending_writes, derived, part, 0, b->layers,
                                       NUMA_NONE, &b->pending_write);
    if (rc == 0 && got == CACHE_READY && (rc = build_submit(b)) != 0)
        pending_write_done(c, b->pending_write, b->layers, false);
    if (rc != 0) {
        if (got == CACHE_READY)
            cache_unref(c, base, part);
        else if (got == CACHE_PENDING)
            cache_get_cancel(c, &b->read); /* the next try finds it in DRAM */
        scratch_free(b);
        free(b);
        return rc;
    }
    list_init(&b->waiters);
    b->space = space_ref(space);
    cache_lease(c, base);
    cache_lease(c, derived);
    list_push_back(&d->builds, &b->link);
    limit_add(space->tenant->owner, LIMIT_BUILDS, 1); /* there was room */
    *out = b;
    return 0;
}

static struct derived_build *build_find(const struct requests *rq, block_ref derived, uint32_t part)
{
    for (struct list *n = retrieval_of(rq)->derived.builds.next;
         n != &retrieval_of(rq)->derived.builds; n = n->next) {
        struct derived_build *b = LIST_ENTRY(n, struct derived_build, link);

        if (b->derived == derived && b->part == part)
            return b;
    }
    return NULL;
}

int derived_get(struct derived_space *space, block_ref base, block_ref derived, uint32_t part,
                uint8_t priority, struct cache_wait *w)
{
    struct derived_build *b = NULL;
    int rc;

    if (cache_deleting(cache_at(space), derived))
        return -EINPROGRESS;
    rc = cache_get(cache_at(space), derived, part, priority, NUMA_NONE, w);
    if (rc != -ENOENT)
        return rc;
    if (space_part(space, derived, part)->dram == PART_DRAM_PENDING_WRITE) {
        b = build_find(space->rq, derived, part);
        rc = b ? 0 : -EINPROGRESS;
        metrics_at(space)->reads_coalesced += b != NULL;
    } else if (base != 0) {
        rc = build_begin(space, base, derived, part, priority, &b);
    }
    if (rc != 0)
        return rc;
    list_push_back(&b->waiters, &w->link);
    return CACHE_PENDING;
}

int derived_build(struct derived_space *space, block_ref base, block_ref derived, uint32_t part)
{
    struct derived_build *b;

    return build_begin(space, base, derived, part, 0, &b);
}

/* ---- life ---- */

void derived_init(struct requests *rq)
{
    struct derived *d = &retrieval_of(rq)->derived;

    list_init(&d->spaces);
    list_init(&d->tenants);
    list_init(&d->builds);
    pending_writes_init(&d->pending_writes);
    d->pending_writes.keep = true; /* what is made of a block is not worth another one */
}

void derived_stop(struct requests *rq)
{
    struct derived *d = &retrieval_of(rq)->derived;

    d->stopping = true;
    for (struct list *n = d->builds.next; n != &d->builds; n = n->next)
        summary_job_stop(&LIST_ENTRY(n, struct derived_build, link)->work.job);
}

void derived_close(struct requests *rq)
{
    assert(limits_used(rq->modules.limits, LIMIT_BUILDS) == 0);
    assert(list_empty(&retrieval_of(rq)->derived.spaces) &&
           list_empty(&retrieval_of(rq)->derived.tenants));
}
