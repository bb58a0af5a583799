/* Purges: a namespace leaves every tier, and no later start finds what was stored for it. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <string.h>

bool cache_purge_done(const struct cache_purge *p)
{
    return !p->record && !p->sharing;
}

static void purge_check(struct cache_purge *p)
{
    if (cache_purge_done(p))
        p->done_cb(p, p->status);
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
    int rc = c->tier && !p->only_shared ? cache_ns_record_start(c, ns, p) : 0;

    if (rc != 0)
        return rc;
    if (!p->only_shared)
        cache_snapshot_load_drop(c, ns);
    p->ns = ns;
    ns->purges++;
    ns->purged++;
    if (!c->share)
        return 0;
    p->share.done_cb = purge_shared_cb;
    memcpy(p->share.fingerprint, ns->fingerprint, sizeof(p->share.fingerprint));
    (void)cache_shared_fingerprint(c, ns, p->share.sealed_fingerprint);
    p->share_status = share_purge(c->share, &p->share);
    p->sharing = p->share_status == 0;
    return 0;
}

void cache_purge_end(struct cache *c, struct cache_purge *p)
{
    cache_ns_record_leave(p);
    if (p->sharing)
        share_purge_cancel(c->share, &p->share);
    p->sharing = false;
    p->ns->purges--;
    p->ns->purged++;
    cache_writes_unstall(c);
}
