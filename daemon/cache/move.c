#include "daemon/cache/move.h"

#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>

static struct part *part_of(const struct cache_move *m)
{
    return cache_part(m->cache, m->ref, m->part);
}

static void copied_cb(struct cache_copy *k)
{
    struct cache_move *m = LIST_ENTRY(k, struct cache_move, copy);

    m->copied = true;
    m->copied_cb(m);
}

int cache_move_begin(struct cache_move *m, int (*slot_cb)(struct cache_move *m, uint64_t bytes))
{
    struct cache *c = m->cache;
    struct part *p = part_of(m);
    int rc;

    if (!c->copier.copy)
        return -ENOSPC;
    if (p->users >= PART_USERS_MAX)
        return -EBUSY;
    part_ref(c, p); /* whatever leaves for the slot, it is not this part */
    m->copied = false;
    rc = slot_cb(m, ns_part_bytes(cache_ns(c, m->ref), m->part));
    if (rc == 0) {
        rc = span_copy(c, m->ref, m->part, m->to, &m->copy);
        if (rc != 0)
            arena_slot_free(c->arena, m->to);
    }
    if (rc != 0) {
        m->to = 0;
        part_unref(c, p);
        cache_reconsider(c, m->ref);
        return rc;
    }
    m->copy.done_cb = copied_cb;
    c->copier.copy(c->copier.ctx, &m->copy);
    return 0;
}

bool cache_move_exchange(struct cache_move *m)
{
    struct cache *c = m->cache;
    struct part *p = part_of(m);
    slot_ref was;

    if (!m->copied || p->users > 1)
        return false;
    was = part_slot(p);
    part_set_dram(c, m->ref, m->part, PART_DRAM_READY, m->to);
    arena_slot_free(c->arena, was);
    m->to = 0;
    return true;
}

void cache_move_end(struct cache_move *m)
{
    assert(m->copied);
    if (m->to != 0)
        arena_slot_free(m->cache->arena, m->to);
    m->to = 0;
    cache_put(m->cache, m->ref, m->part);
}

void cache_copier_attach(struct cache *c, void (*copy)(void *ctx, struct cache_copy *k), void *ctx)
{
    c->copier = (struct cache_copier){copy, ctx};
}

bool cache_move_claim(struct cache *c, block_ref ref, uint32_t part)
{
    struct part *p = cache_part(c, ref, part);

    if (p->moving)
        return false;
    p->moving = 1;
    c->moving++;
    return true;
}

void cache_move_unclaim(struct cache *c, block_ref ref, uint32_t part)
{
    assert(cache_part(c, ref, part)->moving);
    cache_part(c, ref, part)->moving = 0;
    c->moving--;
}

uint32_t cache_moves(const struct cache *c)
{
    return c->moving + c->compact.n;
}

void cache_mover_attach(struct cache *c, struct cache_mover *m, bool (*run_cb)(void *ctx),
                        bool (*ready_cb)(const void *ctx), void *ctx)
{
    assert(!c->mover);
    chore_add(&c->chores, &m->chore, run_cb, ready_cb, ctx);
    c->mover = m;
}

void cache_mover_detach(struct cache *c)
{
    if (c->mover)
        chore_remove(&c->mover->chore);
    c->mover = NULL;
}

uint64_t cache_releases(const struct cache *c)
{
    return c->releases;
}
