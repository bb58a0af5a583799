/* The state of parts and of their blocks, and the counters of it. Changes are reported to other
 * modules from here. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "proto/messages.h"

#include <assert.h>

/* Memory that is waited for: a slow virtual machine was seen to touch 280 MiB a second. */
#define SOON_BYTES (256u << 20)

bool part_whole(const struct part *p)
{
    return p->dram == PART_DRAM_READY || p->nvme == PART_NVME_READY ||
           (part_on_shared(p) && p->dram != PART_DRAM_PENDING_WRITE);
}

uint64_t part_owner(block_ref ref, uint32_t part)
{
    return (uint64_t)ref << 16 | part;
}

block_ref owner_block(uint64_t owner)
{
    return (block_ref)(owner >> 16);
}

struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns)
{
    struct block *b = index_block(c->config.index, ref);

    *ns = index_ns(c->config.index, b->ns);
    assert(*ns);
    return b;
}

struct ns *cache_ns(struct cache *c, block_ref ref)
{
    return index_ns(c->config.index, index_block(c->config.index, ref)->ns);
}

/* ---- where they are ---- */

bool cache_deleting(struct cache *c, block_ref ref)
{
    return index_block(c->config.index, ref)->flags & BLOCK_DELETING;
}

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

static bool on_shared(const struct cache *c, const struct block *b, const struct ns *ns)
{
    if (b->flags & BLOCK_SHARED_ONLY)
        return true;
    for (uint32_t i = 0; c->shared && i < ns->identity.parts; i++)
        if (b->part[i].dram != PART_DRAM_READY && b->part[i].nvme != PART_NVME_READY)
            return true;
    return false;
}

uint8_t cache_tier(const struct cache *c, block_ref ref)
{
    const struct block *b = ref ? index_block(c->config.index, ref) : NULL;
    const struct ns *ns = b ? index_ns(c->config.index, b->ns) : NULL;

    if (!b || !block_found(b, ns))
        return 0;
    if (b->dram_parts == ns->identity.parts)
        return CACHE_DRAM;
    return on_shared(c, b, ns) ? CACHE_SHARED : CACHE_NVME;
}

uint8_t cache_status(const struct cache *c, block_ref ref)
{
    static const uint8_t statuses[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                       [CACHE_NVME] = UCM_LOOKUP_NVME,
                                       [CACHE_SHARED] = UCM_LOOKUP_SHARED};

    return statuses[cache_tier(c, ref)];
}

/* ---- which may leave DRAM now, and in which of the policy's lists those wait that may not ---- */

bool block_idle(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0 || p->dram == PART_DRAM_PENDING_WRITE ||
            p->dram == PART_DRAM_PENDING_READ || p->nvme == PART_NVME_WRITING)
            return false;
    }
    return true;
}

bool cache_arena_grows(const struct cache *c)
{
    return arena_space_comes(c->arena, SOON_BYTES);
}

static unsigned list_for_dram(const struct leave *l, const struct block *b, const struct ns *ns)
{
    bool only_copy = false;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (p->users > 0)
            return LIST_HELD;
        only_copy = only_copy || (p->dram == PART_DRAM_READY && !part_clean(p));
    }
    if (!only_copy)
        return LIST_CANDIDATES;
    if (b->leases > 0 || b->flags & BLOCK_PINNED || !block_idle(b, ns))
        return LIST_HELD;
    if (l->spare)
        return LIST_ONLY_COPY;
    return b->flags & BLOCK_QUEUED && !l->lose ? LIST_UNWRITTEN : LIST_CANDIDATES;
}

/* None of its parts in DRAM has an ordinary slot. */
static bool in_groups_only(struct cache *c, const struct block *b, const struct ns *ns)
{
    bool any = false;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        if (b->part[i].dram != PART_DRAM_READY)
            continue;
        if (!arena_slot_group(c->arena, part_slot(&b->part[i])))
            return false;
        any = true;
    }
    return any;
}

unsigned cache_leave_list(const struct leave *l, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(l->cache, ref, &ns);
    unsigned list = list_for_dram(l, b, ns);

    if (list == LIST_CANDIDATES && !l->groups && in_groups_only(l->cache, b, ns))
        return LIST_GROUPS;
    if (list != LIST_CANDIDATES || !l->drop)
        return list;
    if (b->leases > 0 || b->flags & BLOCK_PINNED || !block_idle(b, ns))
        return LIST_KEPT;
    return b->flags & BLOCK_QUEUED ? LIST_UNWRITTEN : LIST_CANDIDATES;
}

void cache_reconsider(struct cache *c, block_ref ref)
{
    unsigned was = policy_list(index_block(c->config.index, ref)), list;
    struct leave l = {.cache = c, .drop = true};

    if (was == LIST_CANDIDATES || was == LIST_STUCK)
        return; /* it may leave, or does not depend on the block */
    l.spare = cache_arena_grows(c);
    list = cache_leave_list(&l, ref);
    if (list != was)
        policy_move(c->config.policy, ref, list);
}

/* The slot can't be emptied now. Owner 0: it is not known to be a part's. */
bool cache_leave_blocked(const struct leave *l, uint64_t owner)
{
    const struct block *b = index_peek(l->cache->config.index, owner_block(owner));
    const struct ns *ns = b ? index_ns(l->cache->config.index, b->ns) : NULL;
    uint32_t part = owner_part(owner);

    return !b || part >= ns->identity.parts || b->part[part].dram != PART_DRAM_READY ||
           list_for_dram(l, b, ns) != LIST_CANDIDATES ||
           (!l->groups && cache_quota_keeps(ns->tenant));
}

bool cache_owner_may_leave(struct cache *c, uint64_t owner)
{
    const struct leave l = {
        .cache = c, .lose = c->dirty_bytes > c->config.backlog_bytes, .groups = true};

    return owner != 0 && !cache_leave_blocked(&l, owner);
}

/* ---- two lists of blocks with nothing in DRAM, the last one used in front ---- */

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

/* ---- followers of blocks ---- */

void cache_follow(struct cache *c, struct cache_follower *f)
{
    list_push_back(&c->followers, &f->link);
}

void cache_unfollow(struct cache_follower *f)
{
    list_remove(&f->link);
}

/* Reports a status that may have changed from `was`, in a namespace that is followed. */
static void status_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was)
{
    const uint8_t *key = index_block(c->config.index, ref)->key;
    uint8_t is = cache_status(c, ref);

    for (struct list *node = c->followers.next; is != was && node != &c->followers;
         node = node->next) {
        struct cache_follower *f = LIST_ENTRY(node, struct cache_follower, link);

        f->changed_cb(f, ns, key, was, is);
    }
}

/* ---- a change ---- */

/* A part, and what the counts depend on, before a change and after it: 0 or 1 each. */
struct part_view {
    struct ns *ns;
    struct block *b;
    struct part *p;
    int complete, whole, in_dram, on_nvme, to_nvme, on_shared, local, dirty;
    int slot; /* it has one of ordinary DRAM, or fills one */
    bool followed;
    uint8_t status; /* of the block, as lookups report it; 0 where nobody follows it */
};

static struct part_view part_view(struct cache *c, block_ref ref, uint32_t part)
{
    struct block *b = index_block(c->config.index, ref);
    struct ns *ns = index_ns(c->config.index, b->ns);
    struct part *p = &b->part[part];
    bool followed = ns->follower || ns->tenant->follower;
    slot_ref slot = p->dram == PART_DRAM_READY ? part_slot(p) : 0;

    assert(part < ns->identity.parts);
    if (p->dram == PART_DRAM_PENDING_READ)
        slot = ((const struct part_op *)table_get(&c->pending_reads, part_pending_read(p)))->slot;
    return (struct part_view){
        .ns = ns,
        .b = b,
        .p = p,
        .complete = block_complete(b, ns),
        .whole = part_whole(p),
        .in_dram = p->dram == PART_DRAM_READY,
        .on_nvme = p->nvme == PART_NVME_READY,
        .to_nvme = p->nvme == PART_NVME_WRITING,
        .on_shared = part_on_shared(p),
        .local = p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_NONE,
        .dirty = b->flags & BLOCK_QUEUED && p->dram == PART_DRAM_READY && p->nvme == PART_NVME_NONE,
        .slot =
            p->dram == PART_DRAM_PENDING_WRITE || (slot != 0 && !arena_slot_group(c->arena, slot)),
        .followed = followed,
        .status = followed ? cache_status(c, ref) : 0,
    };
}

/* The tenant has so much more of ordinary slots; less: the negative number. */
static void slots_count(struct cache *c, struct ns *ns, uint64_t more_bytes)
{
    struct tenant *t = ns->tenant;

    if (ns->slot_bytes == 0)
        for (uint32_t i = 0; i < ns->identity.parts; i++)
            ns->slot_bytes += arena_padded(ns_part_bytes(ns, i));
    t->dram_bytes += more_bytes;
    if (ns->slot_bytes > t->block_max_bytes)
        t->block_max_bytes = ns->slot_bytes;
    if (t->group || t->settings.dram_min > 0 || t->settings.dram_max > 0)
        cache_quota_update(c, t);
}

/* The part has changed: what was seen before, and what is now, is the difference. */
static void changed(struct cache *c, block_ref ref, uint32_t part, const struct part_view *was)
{
    const struct part_view is = part_view(c, ref, part);
    struct ns *ns = is.ns;
    struct tenant *t = ns->tenant;
    struct block *b = is.b;
    uint64_t part_bytes = ns_part_bytes(ns, part), slot_bytes = arena_padded(part_bytes);

    b->whole_parts = (uint16_t)(b->whole_parts + is.whole - was->whole);
    b->dram_parts = (uint16_t)(b->dram_parts + is.in_dram - was->in_dram);
    b->local_parts = (uint16_t)(b->local_parts + is.local - was->local);
    ns->dram_bytes += slot_bytes * (uint64_t)(is.in_dram - was->in_dram);
    ns->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was->on_nvme);
    ns->shared_bytes += part_bytes * (uint64_t)(is.on_shared - was->on_shared);
    t->nvme_bytes += part_bytes * (uint64_t)(is.on_nvme - was->on_nvme);
    t->nvme_writing_bytes += part_bytes * (uint64_t)(is.to_nvme - was->to_nvme);
    t->shared_bytes += part_bytes * (uint64_t)(is.on_shared - was->on_shared);
    if (was->slot != is.slot)
        slots_count(c, ns, slot_bytes * (uint64_t)(is.slot - was->slot));
    c->dirty_bytes += slot_bytes * (uint64_t)(is.dirty - was->dirty);
    if (was->dirty && !is.dirty)
        cache_less_dirty(c);
    c->stats.complete += (uint64_t)(block_complete(b, ns) - was->complete);
    if ((b->dram_parts == 0 && b->whole_parts > 0) || b->flags & BLOCK_LISTED)
        cache_list_update(c, ref);
    if (b->policy_data & POLICY_ASIDE)
        cache_reconsider(c, ref);
    if (is.followed)
        status_changed(c, ns, ref, was->status);
}

void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number)
{
    const struct part_view was = part_view(c, ref, part);
    struct part *p = was.p;

    /* Readers of a slot that is granted read it by themselves: they miss it before anything may
     * change it. */
    if (was.in_dram && !was.slot)
        arena_slot_retract(c->arena, part_slot(p));
    p->dram = dram;
    p->dram_at.number = number; /* or slot */
    if (dram == PART_DRAM_READY && !(was.b->flags & BLOCK_DELETING) &&
        arena_slot_group(c->arena, number))
        arena_slot_publish(c->arena, number);
    if (dram == PART_DRAM_NONE && p->nvme == PART_NVME_NONE)
        p->checksum = 0; /* it came with a snapshot */
    changed(c, ref, part, &was);
    /* A block without parts in DRAM stays in the policy: eviction takes it out, and says why. */
    if (was.b->dram_parts > 0 && !(was.b->flags & BLOCK_IN_POLICY))
        policy_insert(c->config.policy, ref);
}

void block_mark_deleting(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    uint8_t was = cache_status(c, ref);

    c->deletions += !(b->flags & BLOCK_DELETING);
    b->flags |= BLOCK_DELETING;
    if (ns->follower || ns->tenant->follower)
        status_changed(c, ns, ref, was);
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY &&
            arena_slot_group(c->arena, part_slot(&b->part[i])))
            arena_slot_retract(c->arena, part_slot(&b->part[i]));
    if (c->mover && c->mover->waits)
        chore_wake(&c->mover->chore);
}

static void nvme_set(struct cache *c, block_ref ref, uint32_t part, struct part to)
{
    const struct part_view was = part_view(c, ref, part);
    struct part *p = was.p;

    p->nvme = to.nvme;
    p->nvme_at = to.nvme_at;
    p->checksum = to.checksum;
    p->encrypted = to.encrypted;
    changed(c, ref, part, &was);
}

void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place)
{
    struct part to = {.nvme = PART_NVME_NONE};

    if (place)
        to = (struct part){.nvme = PART_NVME_READY,
                           .nvme_at.loc = place->loc,
                           .checksum = place->checksum,
                           .encrypted = place->encrypted};
    nvme_set(c, ref, part, to);
}

void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, struct part_op *write)
{
    nvme_set(c, ref, part, (struct part){.nvme = PART_NVME_WRITING, .nvme_at.write = write});
}

void part_set_shared(struct cache *c, block_ref ref, uint32_t part, enum part_shared shared,
                     shared_root_id root)
{
    const struct part_view was = part_view(c, ref, part);
    struct part *p = was.p;

    assert(root <= UCM_MAX_ROOTS);
    p->shared = shared;
    p->root = root;
    changed(c, ref, part, &was);
}
