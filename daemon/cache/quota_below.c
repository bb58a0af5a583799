/* What tenants get of NVMe at most. A tenant that would pass it gives up its own: of some of its blocks there that have
 * nothing in DRAM, the least used one, and of those the one that was written first. Redis samples so, too ("Key
 * eviction", redis.io): no list of its own is kept in order for that, and what an earlier run left needs none.
 *
 * A copy on NVMe of what DRAM has, too, goes for a durable part only: without it the block would be lost when it leaves
 * DRAM, which is before all that is newer. */
#include "daemon/cache/internal.h"

#include <errno.h>

/* Blocks that a search looks at, and how many of those that may go it compares. */
#define LOOKS 256u
#define COMPARED 16u
/* Blocks that go in one turn of the loop when a tenant has more than it may. */
#define TRIM_TURN 64u

struct choice {
    block_ref ref; /* 0: none yet */
    unsigned heat;
    uint64_t written;
};

static uint64_t written_at(struct cache *c, const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY)
            return c->tier_ops->sequence(c->tier, part_loc(&b->part[i]));
    return UINT64_MAX;
}

static bool may_go(const struct block *b, const struct ns *ns, bool any)
{
    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns) &&
           (any || b->dram_parts == 0);
}

static void compare(struct cache *c, struct choice *best, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    struct choice is = {.ref = ref, .heat = policy_heat(b), .written = written_at(c, b, ns)};

    if (best->ref == 0 || is.heat < best->heat ||
        (is.heat == best->heat && is.written < best->written))
        *best = is;
}

static void next_place(struct tenant *t, uint32_t *left)
{
    t->below.cursor = 0;
    t->below.place++;
    --*left;
}

/* The next namespace of the tenant with something on NVMe, from its cursor on. NULL: no place is left to look at. */
static struct ns *next_ns(struct cache *c, struct tenant *t, uint32_t *left)
{
    for (; *left > 0; next_place(t, left)) {
        struct ns *ns;

        if (t->below.place >= index_ns_places(c->config.index))
            t->below.place = 0;
        ns = index_ns_at(c->config.index, t->below.place);
        if (ns && ns->tenant == t && ns->nvme_bytes > 0)
            return ns;
    }
    return NULL;
}

static block_ref victim(struct cache *c, struct tenant *t, bool any)
{
    struct choice best = {.ref = 0};
    /* All places once, and the rest of the one that it begins in. */
    uint32_t looks = 0, compared = 0, left = index_ns_places(c->config.index) + 1;

    while (looks < LOOKS && compared < COMPARED) {
        struct ns *ns = next_ns(c, t, &left);
        block_ref refs[COMPARED];
        uint32_t n = 0;

        if (!ns)
            break;
        t->below.cursor = index_scan(c->config.index, ns, t->below.cursor, COMPARED, refs, &n);
        for (uint32_t i = 0; i < n; i++) {
            const struct block *b = index_block(c->config.index, refs[i]);

            if (!may_go(b, ns, any) || written_at(c, b, ns) == UINT64_MAX)
                continue;
            compare(c, &best, refs[i]);
            compared++;
        }
        if (t->below.cursor == 0)
            next_place(t, &left);
        looks += n + 1;
    }
    return best.ref;
}

static void give_up(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].nvme == PART_NVME_READY) {
            cache_nvme_lost(c, ref, i, true);
            c->config.metrics->nvme_most_dropped++;
        }
    if (!block_complete(b, ns) && b->dram_parts == 0)
        cache_discard(c, ref);
    else
        cache_shared_trim(c);
}

static bool passes(const struct tenant *t, uint64_t more_bytes)
{
    uint64_t most = t->settings.nvme_most;

    return most > 0 && t->nvme_bytes + t->nvme_writing_bytes + more_bytes > most;
}

int cache_quota_below(struct cache *c, struct tenant *t, uint64_t bytes, bool durable)
{
    if (passes(t, bytes) && bytes > t->settings.nvme_most)
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
