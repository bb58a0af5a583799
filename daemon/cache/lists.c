/* Two lists of blocks that have nothing in DRAM, the last one used in front: `below`, with some part
 * on NVMe, and `shared`, on the shared tier only. When the index is full, blocks at their ends are
 * dropped for new ones. */
#include "daemon/cache/internal.h"

#include <assert.h>

/* A search for a block to drop looks at so many. Those that may not be dropped go to the front, so
 * that the next search looks at others. */
#define DROP_TRIES 64
/* After so many searches that found none, no more before something is released. */
#define FRUITLESS_MAX 64
/* Blocks that cache_list_sweep looks at in one turn of the loop. */
#define SWEEP_TURN 256
/* Of so many, cache_list_drop_older takes the one that was written first. */
#define OLDER_TRIES 16

#define BLOCK_LISTED (BLOCK_BELOW | BLOCK_SHARED_ONLY)

static struct block_list *list_of(struct cache *c, unsigned flag)
{
    return flag == BLOCK_BELOW ? &c->lists.below : &c->lists.shared;
}

static void list_link(struct cache *c, block_ref ref, unsigned flag)
{
    struct block *b = index_block(c->config.index, ref);

    assert(!(b->flags & (BLOCK_IN_POLICY | BLOCK_LISTED)));
    block_list_insert(c->config.index, list_of(c, flag), ref, 0);
    b->flags |= (uint16_t)flag;
    if (flag == BLOCK_SHARED_ONLY)
        c->lists.shared_index_bytes += cache_ns(c, ref)->index_bytes;
}

void cache_list_unlink(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);

    if (!(b->flags & BLOCK_LISTED))
        return;
    block_list_remove(c->config.index, list_of(c, b->flags & BLOCK_LISTED), b);
    if (b->flags & BLOCK_SHARED_ONLY)
        c->lists.shared_index_bytes -= cache_ns(c, ref)->index_bytes;
    b->flags &= (uint16_t)~BLOCK_LISTED;
}

void cache_list_update(struct cache *c, block_ref ref)
{
    const struct block *b = index_block(c->config.index, ref);
    unsigned flag = 0;

    if (b->whole_parts > 0 && b->dram_parts == 0 && !(b->flags & BLOCK_IN_POLICY))
        flag = b->local_parts > 0 ? BLOCK_BELOW : BLOCK_SHARED_ONLY;
    if ((b->flags & BLOCK_LISTED) == flag)
        return;
    cache_list_unlink(c, ref);
    if (flag)
        list_link(c, ref, flag);
}

static void to_front(struct cache *c, block_ref ref)
{
    unsigned flag = index_block(c->config.index, ref)->flags & BLOCK_LISTED;

    if (flag) {
        cache_list_unlink(c, ref);
        list_link(c, ref, flag);
    }
}

/* The head of the prefix comes to the front last, so it stays longest. */
void cache_list_touch(struct cache *c, const block_ref *refs, uint32_t n)
{
    while (n-- > 0)
        if (refs[n] != 0)
            to_front(c, refs[n]);
}

static bool may_drop(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

bool cache_list_drop(struct cache *c, struct block_list *l)
{
    for (unsigned i = 0; i < DROP_TRIES && l->back != 0; i++) {
        block_ref ref = l->back;

        if (may_drop(c, ref) &&
            (l != &c->lists.below || !cache_quota_keeps_below(cache_ns(c, ref)->tenant))) {
            cache_discard(c, ref);
            return true;
        }
        to_front(c, ref);
    }
    return false;
}

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
        uint64_t at = may_drop(c, ref) ? written_at(c, ref) : UINT64_MAX;

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
        to_front(c, c->lists.below.back); /* the next search looks at others */
    return false;
}

void cache_list_sweep_begin(struct cache *c)
{
    if (!c->lists.torn || c->snapshot.loading || cache_recovering(c))
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
        if (!block_complete(b, ns) && may_drop(c, ref))
            cache_discard(c, ref);
        else
            to_front(c, ref);
    }
    if (c->lists.below.back == 0)
        c->lists.sweep = 0;
    return c->lists.sweep > 0;
}

bool cache_list_sweep_ready(const void *ctx)
{
    return ((const struct cache *)ctx)->lists.sweep > 0;
}

/* ---- space in the index ---- */

/* What is dropped of the list `shared` can be found on the shared tier again. */
static bool index_drop(struct cache *c, const struct ns *ns, enum index_space from)
{
    bool own = from == INDEX_SPACE_DRAM && cache_index_gives(c, ns);

    if (c->lists.fruitless == FRUITLESS_MAX)
        return false;
    if (own ? cache_index_give(c, ns)
            : cache_list_drop(c, &c->lists.shared) ||
                  (from >= INDEX_SPACE_BELOW && cache_list_drop(c, &c->lists.below)) ||
                  (from >= INDEX_SPACE_DRAM && cache_coldest_drop(c))) {
        c->config.metrics->index_evicted++;
        return true;
    }
    c->lists.fruitless += from == INDEX_SPACE_DRAM && !own;
    return false;
}

/* One with many parts takes the place of some with few. */
block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_space from)
{
    while (index_full(c->config.index, ns))
        if (!index_drop(c, ns, from))
            return 0;
    return index_insert(c->config.index, ns, key);
}
