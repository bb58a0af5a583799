/* Parts move into mappings. A relocation brings one part into a slot of its tenant's mapping, for
 * all requests that want it:
 *
 *   SLOT ----> COPYING --copied--> SWITCHING --nobody else uses it--> done
 *   READING --into a slot of the mapping--> done
 *   READING --into another one, for somebody else--> SLOT
 *
 * A part that is not in DRAM is read into the mapping. The bytes of a part in DRAM are copied while
 * others use it in place; once the relocation's reference is the only one, the part's slot is
 * exchanged. So DRAM has one copy, and a reference finds the part where it was. If the last waiter
 * cancels, the copy is discarded. */
#include "daemon/mapping/relocate.h"

#include "daemon/index/index.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct relocation {
    struct list link; /* in relocations.all */
    struct relocations *of;
    struct arena_group *group; /* open */
    block_ref ref;             /* leased */
    uint32_t part;
    enum { SLOT, COPYING, SWITCHING, READING } state;
    bool read, copied;
    uint8_t priority;
    struct list waiters;    /* of mapping_move.link */
    struct cache_wait wait; /* READING */
    struct cache_move move; /* COPYING, SWITCHING: into the mapping */
};

static const struct part *part_at(const struct relocations *rs, block_ref ref, uint32_t part)
{
    return &index_block(rs->index, ref)->part[part];
}

static const struct part *part_of(const struct relocation *r)
{
    return part_at(r->of, r->ref, r->part);
}

static bool in_mapping(const struct relocations *rs, const struct part *p,
                       const struct arena_group *group)
{
    return p->dram == PART_DRAM_READY && arena_slot_group(rs->arena, part_slot(p)) == group;
}

/* ---- the end ---- */

/* With status 0 the relocation has a reference to the part, in the mapping. A waiter's callback may
 * cancel others, and begin other relocations. */
static void relocation_end(struct relocation *r, int status)
{
    struct relocations *rs = r->of;
    struct cache *c = rs->cache;
    struct list *node;

    cache_move_unclaim(c, r->ref, r->part);
    list_remove(&r->link);
    rs->n--;
    while ((node = list_pop_front(&r->waiters)) != NULL) {
        struct mapping_move *m = LIST_ENTRY(node, struct mapping_move, link);
        int rc = status;

        if (rc == 0 && cache_take(c, r->ref, r->part) != CACHE_READY)
            rc = -EBUSY;
        m->read = r->read;
        m->copied = r->copied;
        m->done_cb(m, rc);
    }
    if (status == 0)
        cache_put(c, r->ref, r->part);
    cache_unlease(c, r->ref);
    grant_group_close(rs->arena, r->group);
    free(r);
    cache_released(c); /* a slot, or a place among the relocations */
}

/* ---- its steps: each returns 0 when it goes on by itself or waits, or -errno ---- */

static bool wanted(const struct relocation *r)
{
    return !list_empty(&r->waiters) && !cache_deleting(r->of->cache, r->ref);
}

static void try_switch(struct relocation *r)
{
    if (!wanted(r)) {
        cache_move_end(&r->move);
        relocation_end(r, -ENOENT);
    } else if (cache_move_exchange(&r->move)) {
        r->copied = true;
        relocation_end(r, 0);
    }
}

static void copied_cb(struct cache_move *m)
{
    struct relocation *r = LIST_ENTRY(m, struct relocation, move);

    r->state = SWITCHING;
    try_switch(r);
}

static int slot_of(const struct relocation *r, uint64_t bytes, slot_ref *out)
{
    return mapping_slot(r->of, r->group, bytes, part_owner(r->ref, r->part), out);
}

static int copy_slot_cb(struct cache_move *m, uint64_t bytes)
{
    return slot_of(LIST_ENTRY(m, struct relocation, move), bytes, &m->to);
}

static int read_slot_cb(struct cache_wait *w, uint64_t bytes, slot_ref *out)
{
    return slot_of(LIST_ENTRY(w, struct relocation, wait), bytes, out);
}

/* Begins to copy a part that is READY elsewhere. -EAGAIN: no slot yet. */
static int begin_copy(struct relocation *r)
{
    int rc;

    r->move = (struct cache_move){
        .cache = r->of->cache, .ref = r->ref, .part = r->part, .copied_cb = copied_cb};
    rc = cache_move_begin(&r->move, copy_slot_cb);
    if (rc == 0)
        r->state = COPYING;
    return rc;
}

static void read_cb(struct cache_wait *w, int status);

/* Begins to read a part that is not in DRAM, or that another request reads. -EAGAIN: no slot
 * yet. */
static int begin_read(struct relocation *r, bool small)
{
    bool joined = part_of(r)->dram == PART_DRAM_PENDING_READ;
    int rc;

    r->wait = (struct cache_wait){.small = small, .done_cb = read_cb};
    rc = cache_get_into(r->of->cache, r->ref, r->part, r->priority, read_slot_cb, &r->wait);
    if (rc < 0)
        return rc;
    assert(rc == CACHE_PENDING);
    r->state = READING;
    r->read = r->read || !joined;
    return 0;
}

static int begin(struct relocation *r, bool small)
{
    return part_of(r)->dram == PART_DRAM_READY ? begin_copy(r) : begin_read(r, small);
}

static void read_cb(struct cache_wait *w, int status)
{
    struct relocation *r = LIST_ENTRY(w, struct relocation, wait);

    if (status != 0 || in_mapping(r->of, part_of(r), r->group)) {
        relocation_end(r, status);
        return;
    }
    /* A reader of its own chose another slot. */
    r->state = SLOT;
    cache_put(r->of->cache, r->ref, r->part);
    chore_wake(&r->of->mover.chore);
}

/* ---- going on ---- */

static void try_begin(struct relocation *r)
{
    int rc;

    if (!wanted(r))
        rc = -ENOENT;
    else if (in_mapping(r->of, part_of(r), r->group))
        rc = 0;
    else
        rc = begin(r, false);
    if (rc == -EAGAIN || (rc == 0 && r->state != SLOT))
        return;
    if (rc == 0 && cache_take(r->of->cache, r->ref, r->part) != CACHE_READY)
        rc = -EBUSY;
    relocation_end(r, rc);
}

/* A callback may end later relocations, but none that waits for something: those leave the list
 * here, or in callbacks of reads and copies. */
static void relocations_pump(struct relocations *rs)
{
    struct list *node = rs->all.next, *next;

    for (uint32_t n = rs->n; n > 0 && node != &rs->all; n--, node = next) {
        struct relocation *r = LIST_ENTRY(node, struct relocation, link);

        next = node->next;
        if (r->state == SLOT)
            try_begin(r);
        else if (r->state == SWITCHING)
            try_switch(r);
        else if (r->state == READING && list_empty(&r->waiters)) {
            cache_get_cancel(rs->cache, &r->wait);
            relocation_end(r, -ECANCELED);
        }
    }
}

static bool run_cb(void *ctx)
{
    struct relocations *rs = ctx;
    bool more;

    rs->search.looks = 0;
    rs->search.iterations++;
    relocations_pump(rs);
    more = mapping_slots_step(rs);
    rs->mover.waits = rs->n > 0 || rs->search.taking || rs->search.over;
    return more;
}

static bool ready_cb(const void *ctx)
{
    const struct relocations *rs = ctx;

    return rs->search.taking;
}

void relocations_open(struct relocations *rs)
{
    list_init(&rs->all);
    rs->most = CACHE_MOVES_MAX;
    rs->search.iterations = 1;
    cache_mover_attach(rs->cache, &rs->mover, run_cb, ready_cb, rs);
}

void relocations_close(struct relocations *rs)
{
    assert(rs->n == 0);
    cache_mover_detach(rs->cache);
}

/* ---- for requests ---- */

static struct relocation *relocation_of(const struct relocations *rs, block_ref ref, uint32_t part)
{
    for (struct list *node = rs->all.next; node != &rs->all; node = node->next) {
        struct relocation *r = LIST_ENTRY(node, struct relocation, link);

        if (r->ref == ref && r->part == part)
            return r;
    }
    return NULL;
}

/* Tenants have equal parts of the bound: what one waits for keeps no other from its own. */
static bool may_begin(const struct relocations *rs, const struct arena_group *group)
{
    uint32_t part = rs->most / grant_groups(rs->arena), mine = 0;

    part = part > 0 ? part : 1;
    if (rs->n < part)
        return true;
    for (struct list *node = rs->all.next; node != &rs->all; node = node->next)
        mine += LIST_ENTRY(node, struct relocation, link)->group == group;
    return mine < part && rs->n < rs->most;
}

/* Makes the relocation of a claimed part. */
static int relocation_new(struct relocations *rs, block_ref ref, uint32_t part,
                          struct arena_group *group, struct mapping_move *m)
{
    struct relocation *r = NULL;
    int rc;

    if (may_begin(rs, group))
        r = calloc(1, sizeof(*r));
    if (!r)
        return -EBUSY;
    r->of = rs;
    r->group = group;
    r->ref = ref;
    r->part = part;
    r->priority = m->priority;
    r->state = SLOT;
    list_init(&r->waiters);
    list_init(&r->wait.link);
    cache_lease(rs->cache, ref); /* nothing of it leaves the index while a slot is sought */
    rc = begin(r, m->small);
    if (rc < 0 && rc != -EAGAIN) {
        cache_lease_undo(rs->cache, ref);
        free(r);
        return rc;
    }
    grant_group_ref(group);
    list_push_back(&rs->all, &r->link);
    rs->n++;
    rs->mover.waits = true;
    list_push_back(&r->waiters, &m->link);
    return CACHE_PENDING;
}

int mapping_move(struct relocations *rs, block_ref ref, uint32_t part, struct arena_group *group,
                 struct mapping_move *m)
{
    struct cache *c = rs->cache;
    int rc;

    assert(strcmp(grant_group_tenant(group), cache_ns(c, ref)->identity.tenant) == 0);
    list_init(&m->link);
    m->read = m->copied = false;
    if (cache_deleting(c, ref))
        return -ENOENT;
    if (!cache_move_claim(c, ref, part)) {
        list_push_back(&relocation_of(rs, ref, part)->waiters, &m->link);
        return CACHE_PENDING;
    }
    if (in_mapping(rs, part_at(rs, ref, part), group))
        rc = cache_take(c, ref, part) == CACHE_READY ? CACHE_READY : -EBUSY;
    else
        rc = relocation_new(rs, ref, part, group, m);
    if (rc != CACHE_PENDING)
        cache_move_unclaim(c, ref, part);
    return rc;
}

void mapping_move_cancel(struct relocations *rs, struct mapping_move *m)
{
    list_remove(&m->link);
    chore_wake(&rs->mover.chore);
}

bool mapping_place(const struct relocations *rs, block_ref ref, uint32_t part,
                   struct grant_place *out)
{
    const struct part *p = part_at(rs, ref, part);

    return p->dram == PART_DRAM_READY && !cache_deleting(rs->cache, ref) &&
           grant_place(rs->arena, part_slot(p), out);
}
