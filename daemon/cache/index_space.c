/* Which blocks make way for a new one in a full index: those on the shared tier only, those that
 * left DRAM, the coldest in DRAM.
 *
 * A block of many parts costs little DRAM while few of them are stored, and much of the index: with
 * such blocks a tenant would soon have pushed out what all others have. So one that has more than
 * an equal part of the index gives way to itself when it adds a block of several parts: of some of
 * its blocks, one that lacks parts goes, else the least used. Redis samples so, too ("Key
 * eviction", redis.io). */
#include "daemon/cache/internal.h"

/* After so many fruitless searches, the next waits until something is released. */
#define FRUITLESS_MAX 64
/* Blocks that a sweep looks at in one iteration of the event loop. */
#define SWEEP_TURN 256
/* cache_list_drop_older compares so many and takes the one that was written first. */
#define OLDER_TRIES 16
/* Blocks that a sample looks at, and how many it compares. */
#define LOOKS 256u
#define COMPARED 16u

void cache_sample(struct cache *c, const struct tenant *t, struct tenant_cursor *at,
                  bool (*look_cb)(struct cache_sample *s, const struct ns *ns, block_ref ref),
                  struct cache_sample *s)
{
    /* All places once, and the rest of the one that it begins in. */
    uint32_t looks = 0, compared = 0, left = index_ns_places(c->config.index) + 1;

    s->cache = c;
    while (looks < LOOKS && compared < COMPARED && left > 0) {
        block_ref refs[COMPARED];
        uint32_t n = 0;
        struct ns *ns;

        if (at->place >= index_ns_places(c->config.index))
            *at = (struct tenant_cursor){0};
        ns = index_ns_at(c->config.index, at->place);
        if (ns && ns->tenant == t && (s->below ? ns->nvme_bytes : ns->blocks) > 0) {
            at->cursor = index_scan(c->config.index, ns, at->cursor, COMPARED, refs, &n);
            looks += n + 1;
        } else {
            at->cursor = 0;
        }
        for (uint32_t i = 0; i < n; i++)
            compared += look_cb(s, ns, refs[i]);
        if (at->cursor == 0) {
            at->place++;
            left--;
        }
    }
}

static bool look_cb(struct cache_sample *s, const struct ns *ns, block_ref ref)
{
    const struct block *b = index_block(s->cache->config.index, ref);
    /* The least valuable is the lowest. */
    unsigned worth = block_complete(b, ns) ? 1 + policy_heat(b) : 0;

    if (b->flags & BLOCK_QUEUED || !cache_may_drop(s->cache, ref))
        return false;
    if (s->best == 0 || worth < s->heat) {
        s->heat = worth;
        s->best = ref;
    }
    return true;
}

static bool gives(struct cache *c, const struct ns *ns)
{
    return ns->identity.parts > 1 && index_over_part(c->config.index, ns->tenant);
}

static bool give(struct cache *c, const struct ns *ns)
{
    struct cache_sample s = {.best = 0};

    cache_sample(c, ns->tenant, &ns->tenant->give, look_cb, &s);
    if (s.best != 0)
        cache_drop(c, s.best);
    return s.best != 0;
}

/* ---- a new block ---- */

/* What is dropped of the list `shared` can be found on the shared tier again. */
bool cache_index_drop(struct cache *c, const struct ns *ns, enum index_space from)
{
    bool own = from == INDEX_SPACE_DRAM && gives(c, ns);

    if (c->lists.fruitless == FRUITLESS_MAX)
        return false;
    if (own ? give(c, ns)
            : cache_list_drop(c, &c->lists.shared) ||
                  (from >= INDEX_SPACE_BELOW && cache_list_drop(c, &c->lists.below)) ||
                  (from >= INDEX_SPACE_DRAM && cache_coldest_drop(c))) {
        c->config.metrics->index_evicted++;
        return true;
    }
    c->lists.fruitless += from == INDEX_SPACE_DRAM && !own;
    return false;
}

/* ---- recovery ---- */

/* The sequence of its last part on NVMe; the others were written shortly before or after. */
static uint64_t written_at(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = ns->identity.parts; i-- > 0;)
        if (b->part[i].nvme == PART_NVME_READY)
            return c->tier_ops->sequence(c->tier, part_loc(&b->part[i]));
    return UINT64_MAX;
}

bool cache_list_drop_older(struct cache *c, uint64_t sequence)
{
    block_ref oldest = 0, ref = c->lists.below.back;
    uint64_t least = sequence;

    c->lists.torn = true;
    for (unsigned i = 0; i < OLDER_TRIES && ref != 0; i++) {
        uint64_t at = cache_may_drop(c, ref) ? written_at(c, ref) : UINT64_MAX;

        if (at < least) {
            least = at;
            oldest = ref;
        }
        ref = index_block(c->config.index, ref)->list_prev;
    }
    if (oldest != 0) {
        cache_discard(c, oldest);
        c->config.metrics->index_evicted++;
        return true;
    }
    for (unsigned i = 0; i < OLDER_TRIES && c->lists.below.back != 0; i++)
        cache_list_front(c, c->lists.below.back); /* the next search looks at others */
    return false;
}

void cache_list_sweep_begin(struct cache *c)
{
    if (!c->lists.torn || c->restoring || cache_recovering(c))
        return;
    c->lists.torn = false;
    c->lists.sweep = c->lists.below.n;
    cache_wake(c, CHORE_SWEEP);
}

bool cache_list_sweep_run(void *ctx)
{
    struct cache *c = ctx;

    for (unsigned i = 0; i < SWEEP_TURN && c->lists.sweep > 0 && c->lists.below.back != 0; i++) {
        block_ref ref = c->lists.below.back;
        struct ns *ns;
        const struct block *b = cache_block(c, ref, &ns);

        c->lists.sweep--;
        if (!block_complete(b, ns) && cache_may_drop(c, ref))
            cache_discard(c, ref);
        else
            cache_list_front(c, ref);
    }
    if (c->lists.below.back == 0)
        c->lists.sweep = 0;
    return c->lists.sweep > 0;
}

bool cache_list_sweep_ready(const void *ctx)
{
    return ((const struct cache *)ctx)->lists.sweep > 0;
}
