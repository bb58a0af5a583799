/* Two lists of blocks that have nothing in DRAM, the last one used in front: `below`, with some part
 * on NVMe, and `shared`, on the shared tier only. */
#include "daemon/cache/internal.h"

#include <assert.h>

#define BLOCK_LISTED (BLOCK_BELOW | BLOCK_SHARED_ONLY)

static struct block_list *list_of(struct cache *c, unsigned flag)
{
    return flag == BLOCK_BELOW ? &c->lists.below : &c->lists.shared;
}

static void list_link(struct cache *c, block_ref ref, unsigned flag)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    assert(!(b->flags & (BLOCK_IN_POLICY | BLOCK_LISTED)));
    block_list_insert(c->config.index, list_of(c, flag), ref, 0);
    b->flags |= (uint16_t)flag;
    if (flag == BLOCK_SHARED_ONLY)
        c->lists.shared_index_bytes += ns->index_bytes;
}

void cache_list_unlink(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (!(b->flags & BLOCK_LISTED))
        return;
    block_list_remove(c->config.index, list_of(c, b->flags & BLOCK_LISTED), b);
    if (b->flags & BLOCK_SHARED_ONLY)
        c->lists.shared_index_bytes -= ns->index_bytes;
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

void cache_list_front(struct cache *c, block_ref ref)
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
        if (refs[n] != 0 && index_block(c->config.index, refs[n])->flags & BLOCK_LISTED)
            cache_list_front(c, refs[n]);
}
