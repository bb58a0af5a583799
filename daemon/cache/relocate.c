/* Parts move into windows. A relocation has one part on its way into a slot of its tenant's window, for all who
 * ask for it:
 *
 *   SLOT ----> COPYING --copied--> SWITCHING --nobody else uses it--> done
 *   READING --into a slot of the window--> done
 *   READING --into another one, for somebody else--> SLOT
 *
 * A part that is not in DRAM is read into the window. One that is has its bytes copied, while it is used where it
 * is; when the relocation's use is the only one, the part's slot is exchanged. So DRAM has one copy of it, and
 * whoever has a use finds the part where it was. When nobody waits any more the copy is dropped. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"
#include "daemon/window/lend.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct relocation {
    struct list link; /* in cache.moves.ops */
    struct cache *cache;
    struct arena_group *group; /* open */
    block_ref ref;             /* leased */
    uint32_t part;
    enum { SLOT, COPYING, SWITCHING, READING } state;
    bool read, copied;
    uint8_t priority;
    struct list waiters;    /* of cache_move.link */
    struct cache_wait wait; /* READING */
    struct slot_move move;  /* COPYING, SWITCHING: into the window */
};

static bool in_window(struct cache *c, const struct part *p, const struct arena_group *group)
{
    return p->dram == PART_DRAM_READY && arena_slot_group(c->arena, part_slot(p)) == group;
}

static struct part *part_of(const struct relocation *r)
{
    return cache_part(r->cache, r->ref, r->part);
}

/* ---- the end ---- */

/* With status 0 the relocation has a use of the part, in the window. A waiter's callback may cancel others, and
 * begin other relocations. */
static void relocation_end(struct relocation *r, int status)
{
    struct cache *c = r->cache;
    struct part *p = part_of(r);
    struct list *node;

    p->moving = 0;
    list_remove(&r->link);
    c->moves.n--;
    while ((node = list_pop_front(&r->waiters)) != NULL) {
        struct cache_move *m = LIST_ENTRY(node, struct cache_move, link);
        int rc = status == 0 && p->users >= PART_USERS_MAX ? -EBUSY : status;

        if (rc == 0)
            part_use(c, p);
        m->read = r->read;
        m->copied = r->copied;
        m->done_cb(m, rc);
    }
    if (status == 0)
        cache_put(c, r->ref, r->part);
    cache_unlease(c, r->ref);
    arena_group_close(c->arena, r->group);
    free(r);
    cache_released(c); /* a slot, or a place among the relocations */
}

/* ---- its steps: each returns 0 when it goes on by itself or waits, or -errno ---- */

static bool wanted(const struct relocation *r)
{
    return !list_empty(&r->waiters) && !cache_doomed(r->cache, r->ref);
}

static void try_switch(struct relocation *r)
{
    if (!wanted(r)) {
        slot_move_end(&r->move);
        relocation_end(r, -ENOENT);
    } else if (slot_move_exchange(&r->move)) {
        r->copied = true;
        relocation_end(r, 0);
    }
}

static void copied_cb(struct slot_move *m)
{
    struct relocation *r = LIST_ENTRY(m, struct relocation, move);

    r->state = SWITCHING;
    try_switch(r);
}

static int window_slot_cb(struct slot_move *m, uint64_t bytes)
{
    struct relocation *r = LIST_ENTRY(m, struct relocation, move);

    return cache_group_slot(m->cache, r->group, bytes, part_owner(m->ref, m->part), &m->to);
}

/* Of a part that is READY, elsewhere. -EAGAIN: no slot yet. */
static int begin_copy(struct relocation *r)
{
    int rc;

    if (!r->cache->copier.copy)
        return -ENOSPC;
    r->move = (struct slot_move){
        .cache = r->cache, .ref = r->ref, .part = r->part, .copied_cb = copied_cb};
    rc = slot_move_begin(&r->move, window_slot_cb);
    if (rc == 0)
        r->state = COPYING;
    return rc;
}

static void read_cb(struct cache_wait *w, int status);

/* Of a part that is not in DRAM, or that somebody else reads. -EAGAIN: no slot yet. */
static int begin_read(struct relocation *r, bool small)
{
    struct cache *c = r->cache;
    bool joined = part_of(r)->dram == PART_DRAM_FETCHING;
    int rc;

    r->wait = (struct cache_wait){.small = small, .done_cb = read_cb};
    rc = joined ? cache_get(c, r->ref, r->part, r->priority, NUMA_NONE, &r->wait)
                : cache_get_into(c, r->ref, r->part, r->group, r->priority, &r->wait);
    if (rc < 0)
        return rc;
    assert(rc == CACHE_PENDING);
    r->state = READING;
    r->read = r->read || !joined;
    return 0;
}

static int begin(struct relocation *r, bool small)
{
    const struct part *p = part_of(r);

    if (p->dram == PART_DRAM_READY)
        return begin_copy(r);
    if (!part_whole(p) || p->dram == PART_DRAM_FILLING)
        return -ENOENT;
    return begin_read(r, small);
}

static void read_cb(struct cache_wait *w, int status)
{
    struct relocation *r = LIST_ENTRY(w, struct relocation, wait);
    struct cache *c = r->cache;

    if (status != 0 || in_window(c, part_of(r), r->group)) {
        relocation_end(r, status);
        return;
    }
    /* A reader of its own chose another slot. */
    r->state = SLOT;
    cache_put(c, r->ref, r->part);
    cache_wake(c, CHORE_GROUPS);
}

/* ---- going on ---- */

static void try_begin(struct relocation *r)
{
    int rc;

    if (!wanted(r))
        rc = -ENOENT;
    else if (in_window(r->cache, part_of(r), r->group))
        rc = 0;
    else
        rc = begin(r, false);
    if (rc == -EAGAIN || (rc == 0 && r->state != SLOT))
        return;
    if (rc == 0)
        part_use(r->cache, part_of(r));
    relocation_end(r, rc);
}

/* Who was called back may end relocations behind this one, but none that waits for something: those leave the
 * list here, or in callbacks of reads and copies. */
static void relocations_pump(struct cache *c)
{
    struct list *ops = &c->moves.ops, *node = ops->next, *next;

    for (uint32_t n = c->moves.n; n > 0 && node != ops; n--, node = next) {
        struct relocation *r = LIST_ENTRY(node, struct relocation, link);

        next = node->next;
        if (r->state == SLOT)
            try_begin(r);
        else if (r->state == SWITCHING)
            try_switch(r);
        else if (r->state == READING && list_empty(&r->waiters)) {
            cache_get_cancel(c, &r->wait);
            relocation_end(r, -ECANCELED);
        }
    }
}

bool cache_groups_run(void *ctx)
{
    struct cache *c = ctx;

    c->groups.looks = 0;
    c->groups.change++;
    relocations_pump(c);
    return cache_groups_step(c);
}

bool cache_groups_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return c->groups.taking;
}

/* ---- for requests ---- */

static struct relocation *relocation_of(struct cache *c, block_ref ref, uint32_t part)
{
    for (struct list *node = c->moves.ops.next; node != &c->moves.ops; node = node->next) {
        struct relocation *r = LIST_ENTRY(node, struct relocation, link);

        if (r->ref == ref && r->part == part)
            return r;
    }
    return NULL;
}

/* Tenants have equal parts of the bound: what one waits for keeps no other from its own. */
static bool may_begin(struct cache *c, const struct arena_group *group)
{
    uint32_t part = c->moves.most / arena_groups(c->arena), mine = 0;

    part = part > 0 ? part : 1;
    if (c->moves.n < part)
        return true;
    for (struct list *node = c->moves.ops.next; node != &c->moves.ops; node = node->next)
        mine += LIST_ENTRY(node, struct relocation, link)->group == group;
    return mine < part && c->moves.n < c->moves.most;
}

static int relocation_new(struct cache *c, block_ref ref, uint32_t part, struct arena_group *group,
                          struct cache_move *m)
{
    struct relocation *r = NULL;
    int rc;

    if (may_begin(c, group))
        r = calloc(1, sizeof(*r));
    if (!r)
        return -EBUSY;
    r->cache = c;
    r->group = group;
    r->ref = ref;
    r->part = part;
    r->priority = m->priority;
    r->state = SLOT;
    list_init(&r->waiters);
    list_init(&r->wait.link);
    cache_lease(c, ref); /* nothing of it leaves the index while a slot is sought */
    rc = begin(r, m->small);
    if (rc < 0 && rc != -EAGAIN) {
        cache_lease_undo(c, ref);
        free(r);
        return rc;
    }
    arena_group_ref(group);
    cache_part(c, ref, part)->moving = 1;
    list_push_back(&c->moves.ops, &r->link);
    c->moves.n++;
    list_push_back(&r->waiters, &m->link);
    return CACHE_PENDING;
}

int cache_move_into(struct cache *c, block_ref ref, uint32_t part, struct arena_group *group,
                    struct cache_move *m)
{
    struct part *p = cache_part(c, ref, part);

    assert(strcmp(arena_group_tenant(group), cache_ns(c, ref)->identity.tenant) == 0);
    list_init(&m->link);
    m->read = m->copied = false;
    if (cache_doomed(c, ref))
        return -ENOENT;
    if (p->moving) {
        list_push_back(&relocation_of(c, ref, part)->waiters, &m->link);
        return CACHE_PENDING;
    }
    if (!in_window(c, p, group))
        return relocation_new(c, ref, part, group, m);
    if (p->users >= PART_USERS_MAX)
        return -EBUSY;
    part_use(c, p);
    return CACHE_READY;
}

void cache_move_cancel(struct cache *c, struct cache_move *m)
{
    list_remove(&m->link);
    cache_wake(c, CHORE_GROUPS);
}

bool cache_group_place(struct cache *c, block_ref ref, uint32_t part, struct arena_place *out)
{
    const struct part *p = cache_part(c, ref, part);

    return p->dram == PART_DRAM_READY && !cache_doomed(c, ref) &&
           arena_slot_place(c->arena, part_slot(p), out);
}

uint32_t cache_moves(const struct cache *c)
{
    return c->moves.n + c->compact.n;
}
