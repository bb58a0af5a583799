/* Records of namespaces: the tier has one on stable storage for each namespace of which it stores
 * parts, or no later start would know whose they are. A purge is a record too: nothing that was
 * stored before it is found again. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct cache_record {
    struct tier_ns_record tier;
    struct cache *cache;
    struct ns *ns;
    struct cache_purge *purge; /* NULL: none, or it ended */
};

static_assert(NS_CANONICAL_MAX <= TIER_IDENTITY_BYTES, "the tier takes every identity");

/* A directory that was full may have space again. One failure counts a pause, however many
 * namespaces had it. */
static void retry_cb(uv_timer_t *timer);

static void record_failed(struct cache *c)
{
    uint64_t now_ms = uv_now(c->config.loop);

    if (!backoff_ready(&c->records.retry, now_ms))
        return;
    (void)uv_timer_start(&c->records.timer, retry_cb,
                         backoff_fail(&c->records.retry, now_ms) - now_ms,
                         0); /* can't fail: it has a callback */
}

/* Is there one left, or that has to wait for the end of a purge? */
static bool records_try(struct cache *c, uint32_t most)
{
    struct index *ix = c->config.index;
    bool held = false;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        struct ns *ns = index_ns_at(ix, place);

        if (!ns || ns->record != NS_RECORD_FAILED)
            continue;
        if (ns->purges > 0 || most == 0) {
            held = true;
            continue;
        }
        cache_ns_record(c, ns);
        most--;
    }
    return held;
}

/* Looks again soon where one has to wait. */
static void records_go_on(struct cache *c, uint32_t most)
{
    if (records_try(c, most))
        (void)uv_timer_start(&c->records.timer, retry_cb, RECORD_RETRY_MIN_MS, 0); /* can't fail */
}

/* One finds out for all. */
static void retry_cb(uv_timer_t *timer)
{
    struct cache *c = timer->data;

    if (!c->no_writes)
        records_go_on(c, c->records.n == 0);
}

void cache_ns_records_init(struct cache *c)
{
    backoff_init(&c->records.retry, RECORD_RETRY_MIN_MS, RECORD_RETRY_MAX_MS, 0);
    (void)uv_timer_init(c->config.loop, &c->records.timer); /* can't fail */
    uv_unref((uv_handle_t *)&c->records.timer);
    c->records.timer.data = c;
}

void cache_ns_records_last(struct cache *c)
{
    backoff_reset(&c->records.retry);
    (void)records_try(c, UINT32_MAX);
}

uint32_t cache_ns_unrecorded(const struct cache *c, uint64_t *bytes)
{
    struct index *ix = c->config.index;
    uint32_t n = 0;

    *bytes = 0;
    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        const struct ns *ns = index_ns_at(ix, place);

        /* Also one that is tried again: what the tier has of it is not safe yet. */
        if (!ns || (ns->record != NS_RECORD_FAILED &&
                    (ns->record != NS_RECORD_PENDING || ns->nvme_bytes == 0)))
            continue;
        n++;
        *bytes += ns->nvme_bytes;
    }
    return n;
}

static void state_set(struct cache_record *r, int status)
{
    struct ns *ns = r->ns;
    bool failed = r->cache->records.retry.pause > 0;

    if (status == 0)
        backoff_reset(&r->cache->records.retry);
    else
        record_failed(r->cache);
    if (status != 0 && r->tier.from_sequence > ns->record_from) /* a purge may have raised it */
        ns->record_from = r->tier.from_sequence;
    /* After a failure its blocks are written all the same: they serve until the daemon ends. */
    if (!r->tier.forget)
        ns->record = status == 0 ? NS_RECORD_WRITTEN : NS_RECORD_FAILED;
    else if (status == 0 && ns->record != NS_RECORD_PENDING)
        ns->record = NS_RECORD_WRITTEN;
    if (status == 0 && failed)
        records_go_on(r->cache, UINT32_MAX);
}

static void record_done_cb(struct tier_ns_record *n, int status)
{
    struct cache_record *r = LIST_ENTRY(n, struct cache_record, tier);
    struct cache *c = r->cache;
    struct cache_purge *p = r->purge;

    if (status != 0 && n->forget)
        log_error("cache", "purge-not-recorded",
                  "namespace=%u error=%s: a later start may find its blocks again", r->ns->id,
                  strerror(-status));
    state_set(r, status);
    index_ns_unref(c->config.index, r->ns);
    c->tier_busy--;
    c->records.n--;
    free(r);
    if (p) {
        p->record = NULL;
        p->status = status;
        if (!p->sharing)
            p->done_cb(p, p->status);
    }
    cache_writes_unstall(c);
}

static int record_start(struct cache *c, struct ns *ns, struct cache_purge *p)
{
    struct cache_record *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    r->cache = c;
    r->ns = ns;
    r->purge = p;
    r->tier = (struct tier_ns_record){.fingerprint = ns->fingerprint,
                                      .identity = ns->canonical,
                                      .identity_bytes = ns->canonical_bytes,
                                      .forget = p != NULL,
                                      .who = tenant_who(ns->tenant),
                                      .from_sequence = ns->record_from,
                                      .done_cb = record_done_cb};
    if (p)
        p->record = r;
    index_ns_ref(c->config.index, ns);
    c->tier_busy++;
    c->records.n++;
    c->tier_ops->ns_record(c->tier, &r->tier);
    return 0;
}

void cache_ns_record(struct cache *c, struct ns *ns)
{
    if (ns->record == NS_RECORD_FAILED && ns->purges == 0 &&
        backoff_ready(&c->records.retry, uv_now(c->config.loop)))
        ns->record = NS_RECORD_NONE;
    if (ns->record != NS_RECORD_NONE)
        return;
    ns->record = NS_RECORD_PENDING;
    if (record_start(c, ns, NULL) != 0) {
        ns->record = NS_RECORD_FAILED;
        record_failed(c);
    }
}

bool cache_ns_writable(const struct ns *ns)
{
    return ns->record != NS_RECORD_PENDING && ns->purges == 0;
}

/* ---- purges: a namespace leaves every tier, and no later start finds what was stored for it
 * ---- */

bool cache_purge_done(const struct cache_purge *p)
{
    return !p->record && !p->sharing;
}

static void purge_check(struct cache_purge *p)
{
    if (cache_purge_done(p))
        p->done_cb(p, p->status);
}

static void purge_shared_cb(struct shared_purge *sp, int status, uint64_t files)
{
    struct cache_purge *p = LIST_ENTRY(sp, struct cache_purge, shared);

    (void)files;
    p->sharing = false;
    p->shared_status = status;
    purge_check(p);
}

int cache_purge_begin(struct cache *c, struct cache_purge *p, struct ns *ns)
{
    int rc = c->tier && !p->only_shared ? record_start(c, ns, p) : 0;

    if (rc != 0)
        return rc;
    ns->wiped += !p->only_shared;
    p->ns = ns;
    ns->purges++;
    ns->purged++;
    if (!c->shared)
        return 0;
    p->shared.done_cb = purge_shared_cb;
    memcpy(p->shared.fingerprint, ns->fingerprint, sizeof(p->shared.fingerprint));
    p->shared.encrypted = cache_encrypted(c, ns);
    p->shared_status = shared_purge(c->shared, &p->shared);
    p->sharing = p->shared_status == 0;
    return 0;
}

void cache_purge_end(struct cache *c, struct cache_purge *p)
{
    if (p->record)
        p->record->purge = NULL;
    p->record = NULL;
    if (p->sharing)
        shared_purge_cancel(c->shared, &p->shared);
    p->sharing = false;
    p->ns->purges--;
    p->ns->purged++;
    cache_writes_unstall(c);
}
