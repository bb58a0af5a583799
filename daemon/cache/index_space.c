/* Which blocks make way for a new one in a full index: those on the shared tier only, those that left DRAM, the coldest in DRAM.
 *
 * A block of many parts costs little DRAM while few of them are stored, and much of the
 * index: with such blocks a tenant would soon have pushed out what all others have. So one that has more than an equal part of
 * the index gives way to itself when it adds a block of several parts: of some of its blocks, one that lacks parts goes, else
 * the least used. Redis samples so, too ("Key eviction", redis.io). */
#include "daemon/cache/internal.h"

/* After so many searches that found none, no more before something is released. */
#define FRUITLESS_MAX 64
/* Blocks that cache_list_sweep looks at in one turn of the loop. */
#define SWEEP_TURN 256
/* Of so many, cache_list_drop_older takes the one that was written first. */
#define OLDER_TRIES 16
/* Blocks that a search looks at, and how many of those that may go it compares. */
#define LOOKS 256u
#define COMPARED 16u

static bool may_go(const struct block *b, const struct ns *ns)
{
    return b->leases == 0 && !(b->flags & (BLOCK_PINNED | BLOCK_QUEUED)) && block_idle(b, ns);
}

/* What is worth least is lowest. */
static unsigned worth(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return block_complete(b, ns) ? 1 + policy_heat(b) : 0;
}

/* The namespace of the tenant where the search goes on. NULL: it has none with blocks from there to the last place. */
static struct ns *next_ns(struct cache *c, struct tenant *t)
{
    for (; t->give.place < index_ns_places(c->config.index); t->give.place++, t->give.cursor = 0) {
        struct ns *ns = index_ns_at(c->config.index, t->give.place);

        if (ns && ns->tenant == t && ns->blocks > 0)
            return ns;
    }
    t->give.place = 0;
    t->give.cursor = 0;
    return NULL;
}

static block_ref find(struct cache *c, struct tenant *t)
{
    uint32_t looks = 0, compared = 0, rounds = 0;
    unsigned least = UINT32_MAX;
    block_ref best = 0;

    while (looks < LOOKS && compared < COMPARED && rounds < 2) {
        struct ns *ns = next_ns(c, t);
        block_ref refs[COMPARED];
        uint32_t n = 0;

        if (!ns) {
            rounds++;
            continue;
        }
        t->give.cursor = index_scan(c->config.index, ns, t->give.cursor, COMPARED, refs, &n);
        t->give.place += t->give.cursor == 0;
        looks += n + 1;
        for (uint32_t i = 0; i < n; i++) {
            unsigned is =
                may_go(index_block(c->config.index, refs[i]), ns) ? worth(c, refs[i]) : UINT32_MAX;

            compared += is < UINT32_MAX;
            if (is < least) {
                least = is;
                best = refs[i];
            }
        }
    }
    return best;
}

static bool gives(struct cache *c, const struct ns *ns)
{
    return ns->identity.parts > 1 && index_over_part(c->config.index, ns->tenant);
}

static bool give(struct cache *c, const struct ns *ns)
{
    block_ref ref = find(c, ns->tenant);

    if (ref != 0)
        cache_drop(c, ref);
    return ref != 0;
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
