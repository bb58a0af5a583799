/* Namespaces that the tier has to know of: those whose parts are written, and those that were
 * purged. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct cache_naming {
    struct tier_ns_record naming;
    struct cache *cache;
    struct ns *ns;
    struct cache_purge *purge; /* NULL: nobody waits */
    uint64_t begin_ms;
    uint8_t identity[NS_CANONICAL_MAX];
};

static_assert(NS_CANONICAL_MAX <= TIER_IDENTITY_BYTES, "the tier takes every identity");

/* A folder that was full, say, may have room again. One that is slow to say no is asked less often,
 * as the namespace's writes wait meanwhile. */
#define AGAIN_MS 5000u
#define AGAIN_SHARE 8u
#define AGAIN_MAX_MS 60000u

static uint64_t again_ms(uint64_t took_ms)
{
    uint64_t pause_ms = took_ms * AGAIN_SHARE;

    return pause_ms < AGAIN_MS ? AGAIN_MS : pause_ms > AGAIN_MAX_MS ? AGAIN_MAX_MS : pause_ms;
}

static void kept_set(struct cache *c, struct ns *ns, const struct cache_naming *k, int status)
{
    bool forget = k->naming.forget;

    if (status != 0) {
        uint64_t now_ms = uv_now(c->config.loop);

        if (k->naming.from_sequence > ns->record_from) /* a purge's may have come in between */
            ns->record_from = k->naming.from_sequence;
        c->keep_again_ms = now_ms + again_ms(now_ms - k->begin_ms);
    } else {
        c->keep_again_ms = 0;
    }
    /* Its blocks are written either way: they serve until the daemon ends. */
    if (!forget)
        ns->record = status == 0 ? NS_RECORD_WRITTEN : NS_RECORD_FAILED;
    else if (status == 0 && ns->record != NS_RECORD_PENDING)
        ns->record = NS_RECORD_WRITTEN;
}

static void purge_check(struct cache_purge *p)
{
    if (cache_purge_kept(p))
        p->done_cb(p, p->status);
}

static void naming_done_cb(struct tier_ns_record *n, int status)
{
    struct cache_naming *k = (struct cache_naming *)n;
    struct cache *c = k->cache;
    struct cache_purge *p = k->purge;

    if (status != 0 && n->forget)
        log_error("cache", "purge-not-kept", "namespace=%u error=%s: it may come back", k->ns->id,
                  strerror(-status));
    kept_set(c, k->ns, k, status);
    index_ns_unuse(c->config.index, k->ns);
    c->tier_busy--;
    free(k);
    if (p) {
        p->naming = NULL;
        p->status = status;
        purge_check(p);
    }
    cache_writes_unstall(c);
}

static int naming_start(struct cache *c, struct ns *ns, struct cache_purge *p)
{
    struct cache_naming *k = calloc(1, sizeof(*k));
    int n = k ? ns_identity_encode(&ns->identity, k->identity, sizeof(k->identity)) : -ENOMEM;

    if (n < 0) {
        free(k);
        return n;
    }
    k->cache = c;
    k->ns = ns;
    k->purge = p;
    k->naming.fingerprint = ns->fingerprint;
    k->naming.identity = k->identity;
    k->naming.identity_bytes = (uint32_t)n;
    k->begin_ms = uv_now(c->config.loop);
    k->naming.forget = p != NULL;
    k->naming.from_sequence = ns->record_from;
    k->naming.done = naming_done_cb;
    if (p)
        p->naming = k;
    index_ns_use(c->config.index, ns);
    c->tier_busy++;
    c->tier_ops->ns_record(c->tier, &k->naming);
    return 0;
}

void cache_ns_record(struct cache *c, struct ns *ns)
{
    if (ns->record == NS_RECORD_FAILED && ns->purges == 0 &&
        uv_now(c->config.loop) >= c->keep_again_ms)
        ns->record = NS_RECORD_NONE;
    if (ns->record != NS_RECORD_NONE)
        return;
    ns->record = naming_start(c, ns, NULL) == 0 ? NS_RECORD_PENDING : NS_RECORD_FAILED;
    if (ns->record == NS_RECORD_FAILED)
        c->keep_again_ms = uv_now(c->config.loop) + AGAIN_MS;
}

bool cache_ns_known_cb(void *ctx, const uint8_t *fingerprint)
{
    struct cache *c = ctx;

    return index_ns_find(c->config.index, fingerprint) != NULL;
}

bool cache_ns_writable(const struct ns *ns)
{
    return ns->record != NS_RECORD_PENDING && ns->purges == 0;
}

static void purge_shared_cb(struct share_purge *sp, int status, uint64_t files)
{
    struct cache_purge *p = LIST_ENTRY(sp, struct cache_purge, share);

    (void)files;
    p->sharing = false;
    p->share_status = status;
    purge_check(p);
}

int cache_purge_begin(struct cache *c, struct cache_purge *p, struct ns *ns)
{
    int rc = c->tier && !p->only_shared ? naming_start(c, ns, p) : 0;

    if (rc != 0)
        return rc;
    if (!p->only_shared)
        cache_snapshot_load_drop(c, ns);
    p->ns = ns;
    ns->purges++;
    if (!c->share)
        return 0;
    p->share.done_cb = purge_shared_cb;
    memcpy(p->share.fingerprint, ns->fingerprint, sizeof(p->share.fingerprint));
    p->share_status = c->share_ops->purge(c->share, &p->share);
    p->sharing = p->share_status == 0;
    return 0;
}

bool cache_purge_kept(const struct cache_purge *p)
{
    return p->naming == NULL && !p->sharing;
}

void cache_purge_end(struct cache *c, struct cache_purge *p)
{
    if (p->naming)
        p->naming->purge = NULL;
    p->naming = NULL;
    if (p->sharing)
        c->share_ops->purge_cancel(c->share, &p->share);
    p->sharing = false;
    p->ns->purges--;
    cache_writes_unstall(c);
}
