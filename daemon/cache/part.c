/* The state of parts, and of the blocks that they make up: where they are, and what is counted of that. Who else has to know that it
 * changed is told here. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "proto/messages.h"

#include <assert.h>

struct ns *cache_ns(struct cache *c, block_ref ref)
{
    struct ns *ns;

    cache_block(c, ref, &ns);
    return ns;
}

bool cache_doomed(struct cache *c, block_ref ref)
{
    return index_block(c->config.index, ref)->flags & BLOCK_DOOMED;
}

/* ---- where they are ---- */

bool cache_found(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = ref ? cache_block(c, ref, &ns) : NULL;

    return b && block_found(b, ns);
}

bool cache_in_dram(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    return b->dram_parts == ns->identity.parts;
}

static bool on_share(const struct cache *c, const struct block *b, const struct ns *ns)
{
    if (b->flags & BLOCK_SHARED_ONLY)
        return true;
    for (uint32_t i = 0; c->share && i < ns->identity.parts; i++)
        if (!part_whole_local(&b->part[i]))
            return true;
    return false;
}

bool cache_on_share(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    return on_share(c, b, ns);
}

static uint8_t tier_of(const struct cache *c, const struct block *b, const struct ns *ns)
{
    if (!block_found(b, ns))
        return 0;
    return b->dram_parts == ns->identity.parts ? CACHE_DRAM
           : on_share(c, b, ns)                ? CACHE_SHARE
                                               : CACHE_NVME;
}

uint8_t cache_tier(const struct cache *c, block_ref ref)
{
    const struct block *b = ref ? index_block(c->config.index, ref) : NULL;

    return b ? tier_of(c, b, index_ns(c->config.index, b->ns)) : 0;
}

void cache_tiers(const struct cache *c, const block_ref *refs, uint32_t n, bool stop_at_gap,
                 uint8_t *tiers)
{
    const struct ns *ns = NULL;
    bool gap = false;

    for (uint32_t i = 0; i < n; i++) {
        const struct block *b = refs[i] && !gap ? index_block(c->config.index, refs[i]) : NULL;

        tiers[i] = 0;
        if (b) {
            ns = cache_ns_again(c, b, ns);
            tiers[i] = tier_of(c, b, ns);
        }
        gap = gap || (stop_at_gap && tiers[i] == 0);
    }
}

/* ---- the state of a part ---- */

/* What the counts depend on, before a change and after it: 0 or 1 each. */
struct part_view {
    int complete, whole, in_dram, on_nvme, to_nvme, on_share, local, dirty, slot;
    uint8_t status; /* of the block, as lookups report it; 0 where nobody follows it */
};

struct part_change {
    block_ref ref;
    struct ns *ns;
    struct block *b;
    struct part *p;
    bool followed;
    struct part_view was;
};

static struct part_view part_view(struct cache *c, const struct part_change *k)
{
    const struct block *b = k->b;
    const struct part *p = k->p;

    return (struct part_view){
        .complete = block_complete(b, k->ns),
        .whole = part_whole(p),
        .in_dram = p->dram == PART_DRAM_READY,
        .on_nvme = p->nvme == PART_NVME_READY,
        .to_nvme = p->nvme == PART_NVME_WRITING,
        .on_share = part_on_share(p),
        .local = p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_NONE,
        .slot = cache_quota_slot(c, p),
        .dirty = b->flags & BLOCK_QUEUED && p->dram == PART_DRAM_READY && p->nvme == PART_NVME_NONE,
        .status = k->followed ? cache_status(c, k->ref) : 0,
    };
}

uint8_t cache_status(const struct cache *c, block_ref ref)
{
    static const uint8_t statuses[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                       [CACHE_NVME] = UCM_LOOKUP_NVME,
                                       [CACHE_SHARE] = UCM_LOOKUP_SHARED};

    return statuses[cache_tier(c, ref)];
}

void cache_follow(struct cache *c, struct cache_follower *f)
{
    list_push_back(&c->followers, &f->link);
}

void cache_unfollow(struct cache_follower *f)
{
    list_remove(&f->link);
}

void cache_status_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was)
{
    const uint8_t *key = index_block(c->config.index, ref)->key;
    uint8_t is = cache_status(c, ref);

    for (struct list *node = c->followers.next; is != was && node != &c->followers;
         node = node->next) {
        struct cache_follower *f = LIST_ENTRY(node, struct cache_follower, link);

        f->changed_cb(f, ns, key, was, is);
    }
}

static struct part_change change_begin(struct cache *c, block_ref ref, uint32_t part)
{
    struct part_change k = {.ref = ref};

    k.b = cache_block(c, ref, &k.ns);
    assert(part < k.ns->identity.parts);
    k.p = &k.b->part[part];
    k.followed = cache_followed(k.ns);
    k.was = part_view(c, &k);
    return k;
}

static void change_end(struct cache *c, const struct part_change *k)
{
    struct part_view was = k->was, is = part_view(c, k);
    uint64_t part_bytes = ns_part_bytes(k->ns, (uint32_t)(k->p - k->b->part)),
             slot_bytes = arena_padded(part_bytes);
    struct tenant *t = k->ns->tenant;
    struct block *b = k->b;
    struct ns *ns = k->ns;

    b->whole_parts = (uint16_t)(b->whole_parts + is.whole - was.whole);
    b->dram_parts = (uint16_t)(b->dram_parts + is.in_dram - was.in_dram);
    b->local_parts = (uint16_t)(b->local_parts + is.local - was.local);
    ns->dram_bytes += slot_bytes * (uint64_t)(is.in_dram - was.in_dram);
    ns->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was.on_nvme);
    ns->share_bytes += part_bytes * (uint64_t)(is.on_share - was.on_share);
    t->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was.on_nvme);
    t->nvme_writing_bytes += part_bytes * (uint64_t)(is.to_nvme - was.to_nvme);
    t->share_bytes += part_bytes * (uint64_t)(is.on_share - was.on_share);
    if (was.slot != is.slot)
        cache_quota_count(c, ns, slot_bytes * (uint64_t)(is.slot - was.slot));
    c->dirty_bytes += slot_bytes * (uint64_t)(is.dirty - was.dirty);
    if (was.dirty && !is.dirty)
        cache_less_dirty(c);
    c->stats.complete += (uint64_t)(block_complete(b, ns) - was.complete);
    if (b->dram_parts == 0 || b->flags & (BLOCK_BELOW | BLOCK_SHARED_ONLY))
        cache_list_update(c, k->ref);
    if (b->policy_data & POLICY_ASIDE)
        cache_reconsider(c, k->ref);
    if (k->followed)
        cache_status_changed(c, ns, k->ref, was.status);
}

void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    /* Workers read slots in windows by themselves: they miss this one before anything may change it. */
    if (k.was.in_dram && arena_slot_group(c->arena, part_slot(p)))
        arena_slot_retract(c->arena, part_slot(p));
    p->dram = dram;
    p->dram_at.number = number; /* or slot */
    if (dram == PART_DRAM_READY && !(k.b->flags & BLOCK_DOOMED) &&
        arena_slot_group(c->arena, number))
        arena_slot_publish(c->arena, number);
    if (dram == PART_DRAM_NONE && p->nvme == PART_NVME_NONE)
        p->checksum = 0; /* it came with a snapshot */
    change_end(c, &k);
    /* A block without parts in DRAM stays in the policy: eviction takes it out, and says why. */
    if (k.b->dram_parts > 0 && !(k.b->flags & BLOCK_IN_POLICY))
        policy_insert(c->config.policy, ref);
}

void block_retract(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY &&
            arena_slot_group(c->arena, part_slot(&b->part[i])))
            arena_slot_retract(c->arena, part_slot(&b->part[i]));
}

static void nvme_set(struct cache *c, block_ref ref, uint32_t part, struct part to)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    p->nvme = to.nvme;
    p->nvme_at = to.nvme_at;
    p->checksum = to.checksum;
    p->sealed = to.sealed;
    change_end(c, &k);
}

void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place)
{
    struct part to = {.nvme = PART_NVME_NONE};

    if (place)
        to = (struct part){.nvme = PART_NVME_READY,
                           .nvme_at.loc = place->loc,
                           .checksum = place->checksum,
                           .sealed = place->sealed};
    nvme_set(c, ref, part, to);
}

void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, struct part_op *write)
{
    nvme_set(c, ref, part, (struct part){.nvme = PART_NVME_WRITING, .nvme_at.write = write});
}

void part_set_share(struct cache *c, block_ref ref, uint32_t part, enum part_share share,
                    share_root_id root)
{
    struct part_change k = change_begin(c, ref, part);
    struct part *p = k.p;

    assert(root <= UCM_MAX_ROOTS);
    p->share = share;
    p->root = root;
    change_end(c, &k);
}
