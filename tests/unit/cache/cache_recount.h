/* A recount of all that a cache counts: of its blocks, lists, tenants and lookup tables, against its own figures. */
#ifndef UCM_TESTS_CACHE_RECOUNT_H
#define UCM_TESTS_CACHE_RECOUNT_H

#include "tests/unit/cache/cache_shared_rig.h"
#include "tests/unit/cache/lookup_table_rig.h"

#define RECOUNT_KEYS 12 /* that blocks have */
#define NAMESPACES 2u

static struct ns *ns_at(unsigned i)
{
    return i == 0 ? rig.one : rig.two;
}

struct recount {
    uint64_t slot_bytes; /* slots of DRAM, those that are being filled too */
    uint64_t complete, dram_bytes, nvme_bytes, to_nvme_bytes, shared_bytes, dirty, users, pinned,
        pending_reads, only, only_bytes, below, index_bytes;
};

#define HELD 1u /* the list of what is in use, see space.c */

static void recount(struct recount *r, block_ref ref)
{
    const struct block *b = index_block(rig.index, ref);
    const struct ns *ns = cache_ns(rig.cache, ref);
    uint32_t ready = 0, dram = 0, here = 0;
    unsigned aside, now;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];
        bool in_dram = p->dram == PART_DRAM_READY;

        ready += part_whole(p);
        dram += in_dram;
        here += p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_NONE;
        r->slot_bytes += p->dram != PART_DRAM_NONE ? ns_part_bytes(ns, i) : 0;
        r->shared_bytes += part_on_shared(p) ? ns_part_bytes(ns, i) : 0;
        r->dram_bytes += in_dram ? ns_part_bytes(ns, i) : 0;
        r->nvme_bytes += p->nvme == PART_NVME_READY ? ns_part_bytes(ns, i) : 0;
        r->to_nvme_bytes += p->nvme == PART_NVME_WRITING ? ns_part_bytes(ns, i) : 0;
        r->dirty += b->flags & BLOCK_QUEUED && in_dram && p->nvme == PART_NVME_NONE
                        ? ns_part_bytes(ns, i)
                        : 0;
        r->users += p->users;
        r->pending_reads += p->dram == PART_DRAM_PENDING_READ;
        cr_assert(p->nvme != PART_NVME_READY || rig.tier.place[part_loc(p) - 1].live);
        cr_assert(p->users == 0 || in_dram, "a user of nothing");
    }
    cr_assert(b->whole_parts == ready && b->dram_parts == dram && b->local_parts == here);
    cr_assert_eq(!!(b->flags & BLOCK_SHARED_ONLY), here == 0 && ready > 0);
    cr_assert_eq(!!(b->flags & BLOCK_BELOW), here > 0 && ready > 0 && dram == 0);
    r->only += here == 0 && ready > 0;
    r->index_bytes += ns->index_bytes;
    r->only_bytes += here == 0 && ready > 0 ? ns->index_bytes : 0;
    r->below += here > 0 && ready > 0 && dram == 0;
    cr_assert_eq(!!(b->flags & BLOCK_IN_POLICY), dram > 0);
    cr_assert(b->leases > 0 || !block_idle(b, ns) || dram > 0 || ready == ns->identity.parts,
              "a block that nobody would ever find");
    cr_assert(b->leases > 0 || !block_idle(b, ns) || !(b->flags & BLOCK_DELETING));
    /* A block that the policy put aside is back if it may be evicted. */
    aside = policy_list(index_block(rig.index, ref));
    cache_reconsider(rig.cache, ref);
    now = policy_list(index_block(rig.index, ref));
    cr_assert(now == aside || now == HELD || (now != POLICY_CANDIDATES && aside != HELD));
    r->complete += ready == ns->identity.parts;
    r->pinned += !!(b->flags & BLOCK_PINNED);
}

static void list_walk(const struct block_list *l)
{
    block_ref before = 0, ref = l->front;
    uint64_t n = 0;

    for (; ref != 0; n++) {
        const struct block *b = index_block(rig.index, ref);

        cr_assert(b && b->list_prev == before && n < l->n);
        before = ref;
        ref = b->list_next;
    }
    cr_assert(n == l->n && before == l->back);
}

static void recount_all(struct recount *r, const struct ns *ns)
{
    block_ref refs[1000];
    uint32_t n;

    cr_assert_eq(index_scan(rig.index, ns, 0, 1000, refs, &n), 0u);
    for (uint32_t i = 0; i < n; i++)
        recount(r, refs[i]);
}

static void tenant_recount(const struct tenant *t)
{
    struct recount r = {0};

    for (unsigned i = 0; i < NAMESPACES; i++)
        if (ns_at(i)->tenant == t)
            recount_all(&r, ns_at(i));
    cr_assert_eq(t->dram_bytes, r.slot_bytes);
    cr_assert_eq(t->index_bytes, r.index_bytes);
    cr_assert_eq(t->nvme_bytes, r.nvme_bytes);
    cr_assert_eq(t->nvme_writing_bytes, r.to_nvme_bytes);
    cr_assert_eq(t->shared_bytes, r.shared_bytes);
    if (t->group)
        cr_assert_eq(!list_empty(&t->group->open), t->dram_bytes > 0 && !cache_quota_keeps(t));
}

/* All that the cache counts, counted again. copying: so many parts are used by copies under way. */
static void recount_cache(uint64_t copying)
{
    uint64_t slots, dram = 0, nvme = 0, on_roots = 0;
    struct recount r = {0};

    for (unsigned i = 0; i < NAMESPACES; i++) {
        recount_all(&r, ns_at(i));
        dram += ns_at(i)->dram_bytes;
        nvme += ns_at(i)->nvme_bytes;
        on_roots += ns_at(i)->shared_bytes;
        if (ns_at(i)->follower)
            lookup_table_agree(ns_at(i), RECOUNT_KEYS);
    }
    tenant_recount(rig.one->tenant);
    tenant_recount(rig.two->tenant);
    cr_assert_eq(r.complete, rig.cache->stats.complete);
    cr_assert_eq(r.pinned, rig.cache->stats.pinned);
    cr_assert_eq(r.dram_bytes, dram);
    cr_assert_eq(r.nvme_bytes, nvme);
    cr_assert_eq(r.shared_bytes, on_roots);
    cr_assert_eq(r.only, rig.cache->lists.shared.n);
    cr_assert_eq(r.only_bytes, rig.cache->lists.shared_index_bytes);
    cr_assert_eq(r.below, rig.cache->lists.below.n);
    list_walk(&rig.cache->lists.below);
    list_walk(&rig.cache->lists.shared);
    cr_assert_eq(shared.n_pending, rig.cache->shared_busy);
    cr_assert_eq(r.dirty, rig.cache->dirty_bytes);
    cr_assert_eq(r.pending_reads, table_count(&rig.cache->pending_reads));
    cr_assert_eq(rig.tier.n_pending, rig.cache->tier_busy);
    cr_assert_eq(r.users + copying, rig.cache->users);
    slots = arena_bytes_used(rig.arena);
    cr_assert_geq(slots, r.dram_bytes);
    cr_assert_leq(slots, 2u * (rig.slab > 0 ? rig.slab : MIB));
}

#endif
