/* Empties a slab for slots of another size although it has parts that may not be evicted: those of
 * guaranteed blocks, and those of blocks of which another part is in use (often so with many
 * parts). It moves their parts into slots of their own size in other slabs, a few at a time, and
 * then lets the others leave. A search for space begins it when it has found nothing else, or
 * passed over colder blocks that are stuck next to guaranteed ones (space.c); a chore goes on
 * with it.
 *
 *   choose the slab with the fewest parts that stay ---> copy these
 *   ---> exchange each one's slot when nobody else uses it
 *   ---> nothing that stays is left: evict the rest ---> the slab is free
 *
 * If their new slots need space, the coldest blocks are evicted, as for any slot. So a guarantee
 * keeps as many bytes as it says, and not the slabs in which they came to lie. It gives up and puts
 * the slab back if a part stays in use or no slot is free. It then pauses, and tries again once
 * something was released. */
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* Looks of a search for a slab in one iteration of the event loop. A slab may have more
 * owners: one of a block of so many parts is a look more, as all of them say whether it may
 * leave. */
#define LOOKS 4096
#define PARTS_PER_LOOK 16u
/* Parts on their way at once, and bytes, or one part. */
#define MOVES_MAX 64u
#define MOVE_BYTES (16u << 20)
/* Blocks that leave in one iteration of the event loop, and slots that are sought. */
#define ITERATION 64u
/* When it has given up nothing is tried for so long, twice as long each time. */
#define PAUSE_MS 250u
#define PAUSE_MAX_MS 8000u
/* What a part in use adds to a slab's cost, in parts that are moved. */
#define BUSY_COST 8u

struct compact_move {
    struct list link; /* in cache.compact.moves */
    struct cache_move move;
};

/* What stands in a slab's way. */
struct survey {
    struct cache *cache;
    unsigned kept, rest, busy;
    unsigned looks;
    bool move, evict; /* deal with them */
    bool stuck;       /* no slot is free now */
};

static const struct part *part_at(struct cache *c, uint64_t owner, const struct ns **ns)
{
    const struct block *b = index_peek(c->config.index, owner_block(owner));

    *ns = b ? index_ns(c->config.index, b->ns) : NULL;
    if (!b || b->flags & BLOCK_DELETING || owner_part(owner) >= (*ns)->identity.parts)
        return NULL;
    return &b->part[owner_part(owner)];
}

static bool is_kept(struct cache *c, uint64_t owner)
{
    const struct ns *ns;

    return owner != 0 && part_at(c, owner, &ns) && cache_quota_keeps(ns->tenant);
}

static bool may_move(struct cache *c, uint64_t owner)
{
    const struct ns *ns;
    const struct part *p = part_at(c, owner, &ns);

    return p && p->dram == PART_DRAM_READY && p->users == 0 && !p->moving;
}

/* ---- one part ---- */

static void move_end(struct compact_move *cm)
{
    struct cache *c = cm->move.cache;

    list_remove(&cm->link);
    c->compact.n--;
    c->compact.bytes -= cm->move.copy.bytes;
    cache_move_end(&cm->move);
    free(cm);
}

/* The part lies there from now on; or, when somebody is about to move or evict it, the copy is
 * dropped. */
static void move_go_on(struct compact_move *cm, bool give_up)
{
    struct cache_move *m = &cm->move;
    struct cache *c = m->cache;
    bool wanted = !cache_part(c, m->ref, m->part)->moving && !cache_deleting(c, m->ref);

    if (wanted && cache_move_exchange(m)) {
        c->config.metrics->arena_parts_moved++;
        c->compact.progress_ms = uv_now(c->config.loop);
        move_end(cm);
    } else if (m->copied && (give_up || !wanted)) {
        move_end(cm);
    }
}

static void copied_cb(struct cache_move *m)
{
    cache_wake(m->cache, CHORE_COMPACT);
}

static int slot_beside_cb(struct cache_move *m, uint64_t bytes)
{
    struct cache *c = m->cache;
    slot_ref from = part_slot(cache_part(c, m->ref, m->part));

    m->to =
        cache_slot_beside(c, bytes, part_owner(m->ref, m->part), arena_slot_node(c->arena, from));
    return m->to ? 0 : -EBUSY;
}

/* 0, or -EBUSY: there is no slot. */
static int move_begin(struct cache *c, uint64_t owner)
{
    struct compact_move *cm = calloc(1, sizeof(*cm));

    if (!cm)
        return -EBUSY;
    cm->move = (struct cache_move){
        .cache = c, .ref = owner_block(owner), .part = owner_part(owner), .copied_cb = copied_cb};
    if (cache_move_begin(&cm->move, slot_beside_cb) != 0) {
        free(cm);
        return -EBUSY;
    }
    list_push_back(&c->compact.moves, &cm->link);
    c->compact.n++;
    c->compact.bytes += cm->move.copy.bytes;
    return 0;
}

/* ---- the slab ---- */

static bool survey_cb(void *ctx, uint64_t owner)
{
    struct survey *s = ctx;
    struct cache *c = s->cache;
    const struct ns *ns;
    bool stays = is_kept(c, owner) || !cache_owner_may_leave(c, owner);

    c->config.metrics->arena_candidates++;
    s->looks += 1 + (part_at(c, owner, &ns) ? ns->identity.parts / PARTS_PER_LOOK : 0);
    if (stays && !may_move(c, owner)) {
        s->busy++;
    } else if (stays) {
        s->kept++;
        if (s->move && c->compact.n < MOVES_MAX && c->compact.bytes < MOVE_BYTES && !s->stuck)
            s->stuck = move_begin(c, owner) != 0;
    } else {
        s->rest++;
        if (s->evict && s->rest <= ITERATION)
            cache_owner_evict(c, owner);
    }
    return s->looks < LOOKS;
}

static struct survey survey(struct cache *c, uint32_t slab, struct survey s)
{
    s.cache = c;
    (void)arena_slab_owners(c->arena, slab, survey_cb, &s);
    return s;
}

static void alarm_cb(struct deadline *d)
{
    struct cache *c = LIST_ENTRY(d, struct cache, compact.alarm);

    if (c->compact.slab > 0)
        cache_wake(c, CHORE_COMPACT);
    else if (c->compact.vain != c->releases)
        cache_released(c); /* the pause is over: waiters try again */
}

static void alarm_set(struct cache *c, uint64_t at_ms)
{
    if (c->config.deadlines && !deadline_armed(&c->compact.alarm))
        deadline_arm(c->config.deadlines, &c->compact.alarm, at_ms, alarm_cb);
}

void cache_compact_disarm(struct cache *c)
{
    if (c->config.deadlines)
        deadline_disarm(c->config.deadlines, &c->compact.alarm);
}

/* The slab that costs least, of those that one iteration looks at. */
static void choose(struct cache *c)
{
    uint32_t slabs = arena_slabs(c->arena), best = 0;
    unsigned least = UINT32_MAX;

    for (int64_t looks = LOOKS; looks > 0 && c->compact.left > 0; c->compact.left--) {
        uint32_t slab = c->compact.cursor++ % slabs;
        uint64_t slot_bytes = arena_slab_slot_bytes(c->arena, slab);
        struct survey s;

        looks--;
        if (slot_bytes == 0 || slot_bytes == c->compact.slot_bytes ||
            arena_slab_closed(c->arena, slab))
            continue;
        s = survey(c, slab, (struct survey){0});
        looks -= s.looks;
        if (s.kept + s.busy * BUSY_COST >= least || 1 + slab == c->compact.failed)
            continue;
        least = s.kept + s.busy * BUSY_COST;
        best = 1 + slab;
    }
    if (best == 0)
        return;
    c->compact.slab = best;
    c->compact.progress_ms = uv_now(c->config.loop);
    arena_slab_close(c->arena, best - 1, true);
}

/* It is free, or another one made it so. */
static bool emptied(const struct cache *c)
{
    return !arena_slab_closed(c->arena, c->compact.slab - 1);
}

static void end(struct cache *c, bool in_vain)
{
    if (c->compact.slab > 0 && !emptied(c))
        arena_slab_close(c->arena, c->compact.slab - 1, false);
    cache_compact_disarm(c);
    c->compact.failed = in_vain ? c->compact.slab : 0;
    c->compact.slab = 0;
    c->compact.slot_bytes = 0;
    cache_released(c);
    if (!in_vain) {
        c->compact.pause_ms = 0;
        return;
    }
    c->compact.pause_ms = c->compact.pause_ms > 0 ? 2 * c->compact.pause_ms : PAUSE_MS;
    if (c->compact.pause_ms > PAUSE_MAX_MS)
        c->compact.pause_ms = PAUSE_MAX_MS;
    c->compact.vain = c->releases;
    c->compact.again_ms = uv_now(c->config.loop) + c->compact.pause_ms;
    alarm_set(c, c->compact.again_ms); /* waiters try again then */
}

/* True: there is more for the next iteration of the event loop. Else the end of a copy, or of what
 * is in use, goes on. */
static bool step(struct cache *c)
{
    uint32_t slab = c->compact.slab - 1;
    struct survey s = survey(c, slab, (struct survey){.move = true});
    bool evict = s.kept + s.busy == 0 && c->compact.n == 0;

    if (evict) {
        s = survey(c, slab, (struct survey){.evict = true});
        c->compact.progress_ms = uv_now(c->config.loop);
    }
    if (emptied(c)) {
        c->config.metrics->arena_slabs_moved++;
        end(c, false);
    } else if ((s.stuck && c->compact.n == 0 && !c->space.searching) || cache_compact_late(c)) {
        end(c, true);
    }
    return c->compact.slot_bytes > 0 && (evict || (s.stuck && c->space.searching));
}

static void moves_go_on(struct cache *c)
{
    bool give_up = c->no_writes || c->compact.slot_bytes == 0 || cache_compact_late(c);
    struct list *moves = &c->compact.moves, *node = moves->next, *next;

    for (; node != moves; node = next) {
        next = node->next;
        move_go_on(LIST_ENTRY(node, struct compact_move, link), give_up);
    }
}

/* One turn of it: is there more for the next one? */
static bool compact(struct cache *c)
{
    moves_go_on(c);
    if (c->compact.slot_bytes == 0)
        return false;
    if (c->no_writes || (c->compact.slab == 0 && c->compact.left == 0)) {
        end(c, true);
        return false;
    }
    if (c->compact.slab == 0) {
        choose(c);
        return true;
    }
    if (emptied(c)) {
        end(c, false);
        return false;
    }
    return step(c);
}

bool cache_compact_run(void *ctx)
{
    struct cache *c = ctx;
    bool more = compact(c);

    /* Nothing else may happen meanwhile: the request that uses the part in the way may itself wait
     * for space. */
    if (c->compact.slab > 0)
        alarm_set(c, c->compact.progress_ms + CACHE_COMPACT_PATIENCE_MS + 1);
    return more;
}

bool cache_compact_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return c->compact.slot_bytes > 0 && c->compact.slab == 0;
}
