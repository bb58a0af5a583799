/* What lies on the shared tier, as far as this host knows. Other hosts write and remove files
 * without saying so: a place here is a hint, and what turns out not to be there is forgotten. Of
 * blocks that lie on a share only there are few enough not to fill the index. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

/* Held blocks that are passed over for one that may go. */
#define TRIM_TRIES 64

/* ---- the list of blocks that lie on a share only ---- */

static void list_link(struct cache *c, block_ref ref, struct block *b)
{
    struct shared_list *l = &c->shared;

    b->policy_prev = 0;
    b->policy_next = l->front;
    if (l->front)
        index_block(c->config.index, l->front)->policy_prev = ref;
    else
        l->back = ref;
    l->front = ref;
    l->n++;
    b->flags |= BLOCK_SHARED_ONLY;
}

void cache_shared_unlink(struct cache *c, block_ref ref)
{
    struct shared_list *l = &c->shared;
    struct block *b = index_block(c->config.index, ref);

    if (!(b->flags & BLOCK_SHARED_ONLY))
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
    b->flags &= (uint16_t)~BLOCK_SHARED_ONLY;
}

void cache_shared_place(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);
    bool only = b->here == 0 && b->ready > 0;

    if (!only)
        cache_shared_unlink(c, ref);
    else if (!(b->flags & (BLOCK_SHARED_ONLY | BLOCK_IN_POLICY)))
        list_link(c, ref, b);
}

/* False: those that are looked at are all held. */
static bool oldest_drop(struct cache *c)
{
    for (unsigned i = 0; i < TRIM_TRIES && c->shared.back != 0; i++) {
        block_ref ref = c->shared.back;
        struct block *b = index_block(c->config.index, ref);

        if (b->leases == 0 && !(b->flags & BLOCK_PINNED)) {
            cache_discard(c, ref);
            return true;
        }
        cache_shared_unlink(c, ref);
        list_link(c, ref, b);
    }
    return false;
}

void cache_shared_trim(struct cache *c)
{
    while (c->shared.n > c->config.shared_blocks && oldest_drop(c))
        ;
}

block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key)
{
    block_ref ref = index_insert(c->config.index, ns, key);

    if (ref == 0 && oldest_drop(c))
        ref = index_insert(c->config.index, ns, key);
    return ref;
}

/* ---- what is known ---- */

void cache_shared_note(struct cache *c, struct ns *ns, const uint8_t *key, share_root root,
                       bool asked)
{
    block_ref ref = index_find(c->config.index, ns, key);
    uint32_t last = ns->identity.parts - 1;
    const struct block *b;

    if (ns->purges > 0)
        return; /* it was found before it was removed */
    if (ref == 0 && c->shared.n >= c->config.shared_blocks && !oldest_drop(c))
        return;
    if (ref == 0)
        ref = cache_insert(c, ns, key);
    if (ref == 0)
        return;
    b = index_block(c->config.index, ref);
    if (b->flags & BLOCK_DOOMED)
        return;
    for (uint32_t i = 0; i <= last; i++)
        if (b->part[i].share == PART_SHARE_NONE ||
            (b->part[i].share == PART_SHARE_PRESUMED && asked))
            part_set_share(c, ref, i, asked && i == last ? PART_SHARE_KNOWN : PART_SHARE_PRESUMED,
                           root);
}

void cache_shared_forget(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (part_on_share(&b->part[i]))
            part_set_share(c, ref, i, PART_SHARE_NONE, 0);
}

void cache_shared_doubt(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct part *p = &cache_block(c, ref, &ns)->part[part];

    if (c->tier && p->share == PART_SHARE_KNOWN && p->dram == PART_DRAM_NONE && !part_whole_here(p))
        part_set_share(c, ref, part, PART_SHARE_PRESUMED, p->root);
}

/* ---- names ---- */

static struct block_file_id id_of(const struct ns *ns, const uint8_t *key, uint32_t part)
{
    struct block_file_id id = {.key_bytes = ns->identity.key_bytes, .part = part};

    memcpy(id.fingerprint, ns->fingerprint, sizeof(id.fingerprint));
    memcpy(id.key, key, ns->identity.key_bytes);
    return id;
}

struct block_file_id cache_shared_id(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    return id_of(ns, b->key, part);
}

void cache_shared_remove(struct cache *c, const struct ns *ns, const uint8_t *key)
{
    /* The last part first: without it nobody looks for the others. */
    for (uint32_t i = ns->identity.parts; c->share && i-- > 0;) {
        struct block_file_id id = id_of(ns, key, i);

        if (c->share_ops->remove(c->share, &id) != 0)
            c->config.metrics->share_remove_dropped++;
    }
}

/* ---- the door ---- */

static void ready_cb(void *ctx)
{
    struct cache *c = ctx;

    c->share_full = false;
    cache_released(c);
}

void cache_share_attach(struct cache *c, const struct share_ops *ops, struct share *share)
{
    c->share_ops = ops;
    c->share = share;
    ops->on_ready(share, ready_cb, c);
}
