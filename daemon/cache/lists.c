/* Blocks of which nothing lies in DRAM, in the order in which they left it or were used, and what
 * makes way for new ones when the index is full. */
#include "daemon/cache/internal.h"

#include <assert.h>

/* Held blocks that are passed over for one that may go. */
#define DROP_TRIES 64
/* Searches for one that may go, each among others; from then on only once something is released. */
#define FRUITLESS_MAX 64
#define SWEEP_TURN 256
/* Of these the one that was written first, or none. */
#define OLDER_TRIES 16

#define BLOCK_LISTED (BLOCK_BELOW | BLOCK_SHARED_ONLY)

static struct block_list *list_of(struct cache *c, unsigned flag)
{
    return flag == BLOCK_BELOW ? &c->below : &c->shared;
}

static void list_link(struct cache *c, block_ref ref, unsigned flag)
{
    struct block_list *l = list_of(c, flag);
    struct block *b = index_block(c->config.index, ref);

    assert(!(b->flags & (BLOCK_IN_POLICY | BLOCK_LISTED))); /* the policy or a list has the links */
    b->policy_prev = 0;
    b->policy_next = l->front;
    if (l->front)
        index_block(c->config.index, l->front)->policy_prev = ref;
    else
        l->back = ref;
    l->front = ref;
    l->n++;
    b->flags |= (uint16_t)flag;
}

void cache_list_unlink(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);
    struct block_list *l = list_of(c, b->flags & BLOCK_LISTED);

    if (!(b->flags & BLOCK_LISTED))
        return;
    if (b->policy_prev)
        index_block(c->config.index, b->policy_prev)->policy_next = b->policy_next;
    else
        l->front = b->policy_next;
    if (b->policy_next)
        index_block(c->config.index, b->policy_next)->policy_prev = b->policy_prev;
    else
        l->back = b->policy_prev;
    b->policy_prev = b->policy_next = 0;
    l->n--;
    b->flags &= (uint16_t)~BLOCK_LISTED;
}

void cache_list_place(struct cache *c, block_ref ref)
{
    const struct block *b = index_block(c->config.index, ref);
    unsigned flag = 0;

    if (b->ready > 0 && b->dram_parts == 0 && !(b->flags & BLOCK_IN_POLICY))
        flag = b->here > 0 ? BLOCK_BELOW : BLOCK_SHARED_ONLY;
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

/* From the end, as heads outlive tails. */
void cache_list_touch(struct cache *c, const block_ref *refs, uint32_t n)
{
    while (n-- > 0)
        if (refs[n] != 0)
            to_front(c, refs[n]);
}

static bool may_go(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return b->leases == 0 && !(b->flags & BLOCK_PINNED) && block_idle(b, ns);
}

bool cache_list_drop(struct cache *c, struct block_list *l)
{
    for (unsigned i = 0; i < DROP_TRIES && l->back != 0; i++) {
        block_ref ref = l->back;

        if (may_go(c, ref)) {
            cache_discard(c, ref);
            return true;
        }
        to_front(c, ref);
    }
    return false;
}

/* When its highest part was written: the others were about then. */
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
    block_ref oldest = 0, ref = c->below.back;
    uint64_t least = sequence;

    c->torn = true;
    for (unsigned i = 0; i < OLDER_TRIES && ref != 0; i++) {
        uint64_t at = may_go(c, ref) ? written_at(c, ref) : UINT64_MAX;

        if (at < least) {
            least = at;
            oldest = ref;
        }
        ref = index_block(c->config.index, ref)->policy_prev;
    }
    if (oldest != 0) {
        cache_discard(c, oldest);
        c->config.metrics->index_evicted++;
        return true;
    }
    for (unsigned i = 0; i < OLDER_TRIES && c->below.back != 0; i++)
        to_front(c, c->below.back); /* others the next time */
    return false;
}

void cache_list_sweep_begin(struct cache *c)
{
    if (!c->torn || c->loading || cache_recovering(c))
        return;
    c->torn = false;
    c->sweep = c->below.n;
}

bool cache_list_sweep(struct cache *c)
{
    for (unsigned i = 0; i < SWEEP_TURN && c->sweep > 0 && c->below.back != 0; i++) {
        block_ref ref = c->below.back;
        struct ns *ns;
        const struct block *b = cache_block(c, ref, &ns);

        c->sweep--;
        if (!block_complete(b, ns) && may_go(c, ref))
            cache_discard(c, ref);
        else
            to_front(c, ref);
    }
    if (c->below.back == 0)
        c->sweep = 0;
    return c->sweep > 0;
}

/* ---- space in the index ---- */

/* What lies on a share only can be found there again. */
static bool space_make(struct cache *c, enum index_space from)
{
    if (!index_full(c->config.index) || c->fruitless == FRUITLESS_MAX)
        return false;
    if (cache_list_drop(c, &c->shared) ||
        (from >= INDEX_SPACE_BELOW && cache_list_drop(c, &c->below)) ||
        (from >= INDEX_SPACE_DRAM && cache_coldest_drop(c))) {
        c->config.metrics->index_evicted++;
        return true;
    }
    c->fruitless += from == INDEX_SPACE_DRAM;
    return false;
}

block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_space from)
{
    block_ref ref = index_insert(c->config.index, ns, key);

    if (ref == 0 && space_make(c, from))
        ref = index_insert(c->config.index, ns, key);
    return ref;
}
