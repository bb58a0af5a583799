/* What tenants get of NVMe at most. A tenant that would pass it gives up its own: of some of its
 * blocks there that have nothing in DRAM, the least used one, and of those the one that was written
 * first. Redis samples so, too ("Key eviction", redis.io): no list of its own is kept in order for
 * that, and what an earlier run left needs none.
 *
 * A copy on NVMe of what DRAM has, too, goes for a durable part only: without it the block would be
 * lost when it leaves DRAM, which is before all that is newer. */
#include "daemon/cache/internal.h"

#include <errno.h>

/* Blocks that go in one iteration of the event loop when a tenant has more than it may. */
#define TRIM_TURN 64u

static uint64_t written_at(struct cache *c, const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY)
            return c->tier_ops->sequence(c->tier, part_loc(&b->part[i]));
    return UINT64_MAX;
}

static bool look_cb(struct cache_sample *s, const struct ns *ns, block_ref ref)
{
    const struct block *b = index_block(s->cache->config.index, ref);
    uint64_t written = written_at(s->cache, b, ns);
    unsigned heat = policy_heat(b);

    if (written == UINT64_MAX || (!s->any && b->dram_parts > 0) || !cache_may_drop(s->cache, ref))
        return false;
    if (s->best == 0 || heat < s->heat || (heat == s->heat && written < s->written)) {
        s->best = ref;
        s->heat = heat;
        s->written = written;
    }
    return true;
}

static block_ref victim(struct cache *c, struct tenant *t, bool any)
{
    struct cache_sample s = {.below = true, .any = any};

    cache_sample(c, t, &t->below, look_cb, &s);
    return s.best;
}

static void give_up(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY) {
            cache_nvme_lost(c, ref, i, true);
            c->config.metrics->nvme_max_dropped++;
        }
    if (!block_complete(b, ns) && b->dram_parts == 0)
        cache_discard(c, ref);
    else
        cache_shared_trim(c);
}

static bool passes(const struct tenant *t, uint64_t more_bytes)
{
    uint64_t most = t->settings.nvme_max;

    return most > 0 && t->nvme_bytes + t->nvme_writing_bytes + more_bytes > most;
}

int cache_quota_below(struct cache *c, struct tenant *t, uint64_t bytes, bool durable)
{
    if (passes(t, bytes) && bytes > t->settings.nvme_max)
        return -EDQUOT;
    while (passes(t, bytes)) {
        block_ref ref = victim(c, t, false);

        if (ref == 0 && durable)
            ref = victim(c, t, true);
        if (ref == 0)
            return -EDQUOT;
        give_up(c, ref);
    }
    return 0;
}

bool cache_quota_trim_run(void *ctx)
{
    struct cache *c = ctx;
    struct tenant_set *tenants = index_tenants(c->config.index);
    uint32_t left = TRIM_TURN;
    bool more = false;

    if (!c->tier || cache_recovering(c))
        return false; /* the end of recovery begins it */
    for (struct tenant *t = tenant_next(tenants, NULL); t; t = tenant_next(tenants, t))
        while (passes(t, 0)) {
            block_ref ref = left > 0 ? victim(c, t, true) : 0;

            more = more || left == 0;
            if (ref == 0)
                break;
            give_up(c, ref);
            left--;
        }
    return more;
}
