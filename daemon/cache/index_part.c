/* Whose blocks make way in a full index. A block of many parts costs little DRAM while few of them are stored, and much of the
 * index: with such blocks a tenant would soon have pushed out what all others have. So one that has more than an equal part of
 * the index gives way to itself when it adds a block of several parts: of some of its blocks, one that lacks parts goes, else
 * the least used. Redis samples so, too ("Key eviction", redis.io). */
#include "daemon/cache/internal.h"

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

bool cache_index_gives(struct cache *c, const struct ns *ns)
{
    return ns->identity.parts > 1 && index_over_part(c->config.index, ns->tenant);
}

bool cache_index_give(struct cache *c, const struct ns *ns)
{
    block_ref ref = find(c, ns->tenant);

    if (ref != 0)
        cache_drop(c, ref);
    return ref != 0;
}
