#include "daemon/cache/move.h"

#include "daemon/cache/internal.h"

#include <assert.h>
#include <errno.h>

static struct part *part_of(const struct slot_move *m)
{
    return cache_part(m->cache, m->ref, m->part);
}

static void copied_cb(struct cache_copy *k)
{
    struct slot_move *m = LIST_ENTRY(k, struct slot_move, copy);

    m->copied = true;
    m->copied_cb(m);
}

int slot_move_begin(struct slot_move *m, int (*slot_cb)(struct slot_move *m, uint64_t bytes))
{
    struct cache *c = m->cache;
    struct part *p = part_of(m);
    int rc;

    if (p->users >= PART_USERS_MAX)
        return -EBUSY;
    part_use(c, p); /* whatever leaves for the slot, it is not this part */
    m->copied = false;
    rc = slot_cb(m, ns_part_bytes(cache_ns(c, m->ref), m->part));
    if (rc == 0) {
        rc = span_copy(c, m->ref, m->part, m->to, &m->copy);
        if (rc != 0)
            arena_slot_free(c->arena, m->to);
    }
    if (rc != 0) {
        m->to = 0;
        part_unuse(c, p);
        cache_reconsider(c, m->ref);
        return rc;
    }
    m->copy.done_cb = copied_cb;
    c->copier.copy(c->copier.ctx, &m->copy);
    return 0;
}

bool slot_move_exchange(struct slot_move *m)
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

void slot_move_end(struct slot_move *m)
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
