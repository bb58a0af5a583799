/* Which blocks mappings reference, and how references end: by name, with their sequence or mapping,
 * or because the daemon wants memory back. */
#include "daemon/mapping/mapping.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static struct cache *cache_of_refs(const struct mapping_refs *p)
{
    return p->w->s->rq->modules.cache;
}

static struct metrics *metrics_of_refs(const struct mapping_refs *p)
{
    return p->w->s->rq->modules.metrics;
}

/* ---- the object ---- */

static bool refs_reserve(struct mapping_refs *p)
{
    struct session *s = p->w->s;
    uint32_t cap = p->cap ? p->cap : 64, *slab;

    while (cap < p->ch->n)
        cap *= 2;
    if (cap == p->cap)
        return true;
    if (!memory_take(s, (cap - p->cap) * sizeof(*slab)))
        return false;
    slab = realloc(p->slab, cap * sizeof(*slab));
    if (!slab) {
        memory_return(s, (cap - p->cap) * sizeof(*slab));
        return false;
    }
    memset(slab + p->cap, 0xff, (cap - p->cap) * sizeof(*slab)); /* UCM_PLACE_NONE */
    p->slab = slab;
    p->cap = cap;
    return true;
}

static void refs_free(struct mapping_refs *p)
{
    struct session *s = p->w->s;

    assert(p->n == 0 && p->requests == 0);
    list_remove(&p->link);
    list_remove(&p->of_mapping);
    list_remove(&p->of_sequence);
    memory_return(s, sizeof(*p) + p->cap * sizeof(*p->slab));
    free(p->slab);
    free(p);
}

static struct mapping_refs *refs_new(struct mapping *w, struct sequence *ch)
{
    struct mapping_refs *p = memory_alloc(w->s, sizeof(*p));

    if (!p)
        return NULL;
    p->w = w;
    p->ch = ch;
    p->swept = mappings_of(w)->sweep;
    list_push_back(&mappings_of(w)->refs, &p->link);
    list_push_back(&w->refs, &p->of_mapping);
    list_push_back(&ch->refs, &p->of_sequence);
    return p;
}

struct mapping_refs *refs_get(struct mapping *w, struct sequence *ch)
{
    struct mapping_refs *p = NULL;

    for (struct list *node = ch->refs.next; node != &ch->refs && !p; node = node->next) {
        p = LIST_ENTRY(node, struct mapping_refs, of_sequence);
        if (p->w != w)
            p = NULL;
    }
    if (!p)
        p = refs_new(w, ch);
    if (p && !refs_reserve(p)) {
        refs_put(p);
        return NULL;
    }
    return p;
}

void refs_put(struct mapping_refs *p)
{
    if (p->n == 0 && p->requests == 0)
        refs_free(p);
}

/* ---- a reference ---- */

uint64_t mapping_slot_bytes(const struct mapping *w)
{
    return arena_padded(ns_part_bytes(w->ns, w->part));
}

/* The tenant may have what others leave of the budget, and its part at least. A block that two
 * mappings reference counts for both. */
bool mapping_may_ref(const struct mapping *w)
{
    const struct arena *a = w->s->rq->modules.arena;
    uint64_t budget = grant_budget(a), part = budget / mappings_at(w->s->rq)->n_tenants;
    uint64_t others = grant_bytes(a, NULL) - grant_bytes(a, w->tenant->group);
    uint64_t most = budget > others + part ? budget - others : part;

    return limit_room_within(w->s->peer.owner, LIMIT_REFERENCED, most) >= mapping_slot_bytes(w);
}

bool refs_add(struct mapping_refs *p, uint32_t block)
{
    struct mappings *ws = mappings_of(p->w);
    block_ref ref = p->ch->blocks[block].base;
    struct mapping_slab *e;
    struct grant_place place;

    assert(p->slab[block] == UCM_PLACE_NONE);
    if (!mapping_may_ref(p->w) ||
        !mapping_place(&mappings_of(p->w)->relocations, ref, p->ch->part, &place) ||
        slab_taken(ws, place.mapping, p->w->tenant, uv_now(p->w->s->rq->modules.loop))) {
        cache_put(cache_of_refs(p), ref, p->ch->part);
        return false;
    }
    cache_ref_lasting(cache_of_refs(p), ref, p->ch->part);
    e = &ws->slabs[place.mapping];
    e->taken_ms = 0;
    e->tenant = p->w->tenant;
    e->refs++;
    p->slab[block] = place.mapping;
    p->n++;
    limit_add(p->w->s->peer.owner, LIMIT_REFERENCED, mapping_slot_bytes(p->w));
    metrics_of_refs(p)->mapping_refs++;
    metrics_of_refs(p)->mapping_referenced_bytes += mapping_slot_bytes(p->w);
    return true;
}

static void ref_end(struct mapping_refs *p, uint32_t block)
{
    mappings_of(p->w)->slabs[p->slab[block]].refs--;
    p->slab[block] = UCM_PLACE_NONE;
    p->n--;
    limit_give(p->w->s->peer.owner, LIMIT_REFERENCED, mapping_slot_bytes(p->w));
    metrics_of_refs(p)->mapping_refs--;
    metrics_of_refs(p)->mapping_referenced_bytes -= mapping_slot_bytes(p->w);
    cache_unref_lasting(cache_of_refs(p), p->ch->blocks[block].base, p->ch->part);
}

bool refs_end(struct mapping_refs *p, uint32_t *at, uint32_t end, uint32_t *most)
{
    end = end < p->cap ? end : p->cap;
    for (; *at<end && * most> 0; ++*at, --*most)
        if (p->slab[*at] != UCM_PLACE_NONE)
            ref_end(p, *at);
    return *at >= end;
}

/* Nobody references any more: what was looked at stays without references. */
static bool refs_end_list(struct list *refs, bool of_mapping)
{
    uint32_t most = MAPPING_BLOCKS_PER_TURN;

    while (!list_empty(refs)) {
        struct mapping_refs *p = of_mapping
                                     ? LIST_ENTRY(refs->next, struct mapping_refs, of_mapping)
                                     : LIST_ENTRY(refs->next, struct mapping_refs, of_sequence);

        assert(p->requests == 0);
        if (p->n > 0 && !refs_end(p, &p->end_at, UINT32_MAX, &most))
            return false;
        refs_free(p);
    }
    return true;
}

bool mapping_refs_end_all(struct mapping *w)
{
    return refs_end_list(&w->refs, true);
}

bool sequence_refs_end_all(struct sequence *ch)
{
    return refs_end_list(&ch->refs, false);
}

/* ---- sweeps ---- */

static bool must_end(const struct mapping_refs *p, uint32_t block, uint64_t now_ms)
{
    return slab_taken(mappings_of(p->w), p->slab[block], p->w->tenant, now_ms) ||
           !sequence_has(p->ch, block);
}

/* True: all of it was looked at. */
static bool refs_sweep_some(struct mapping_refs *p, uint32_t *most)
{
    uint64_t now_ms = uv_now(p->w->s->rq->modules.loop);

    for (; p->sweep_at < p->cap && p->n > 0; p->sweep_at++) {
        if (*most == 0)
            return false;
        --*most;
        if (p->slab[p->sweep_at] != UCM_PLACE_NONE && must_end(p, p->sweep_at, now_ms))
            ref_end(p, p->sweep_at);
    }
    return true;
}

void refs_sweep_cb(struct cache_retry *r)
{
    struct mappings *ws = LIST_ENTRY(r, struct mappings, sweeper);
    struct requests *rq = ws->rq;
    uint32_t most = MAPPING_BLOCKS_PER_TURN;

    while (!list_empty(&ws->refs)) {
        struct mapping_refs *p = LIST_ENTRY(ws->refs.next, struct mapping_refs, link);

        if (p->swept == ws->sweep)
            break;
        if (!refs_sweep_some(p, &most)) {
            (void)cache_wait_for(rq->modules.cache, &ws->sweeper, WAIT_TURN);
            return;
        }
        p->swept = ws->sweep;
        list_remove(&p->link);
        list_push_back(&ws->refs, &p->link);
        refs_put(p);
    }
    mappings_deleting(rq); /* others may have been evicted meanwhile */
}

void refs_sweep(struct requests *rq)
{
    struct mappings *ws = mappings_at(rq);

    ws->sweep++;
    for (struct list *node = ws->refs.next; node != &ws->refs; node = node->next)
        LIST_ENTRY(node, struct mapping_refs, link)->sweep_at = 0;
    if (list_empty(&ws->sweeper.link))
        (void)cache_wait_for(rq->modules.cache, &ws->sweeper, WAIT_TURN);
}

void mappings_deleting(struct requests *rq)
{
    struct mappings *ws = mappings_at(rq);
    uint64_t deletions = cache_deletions(rq->modules.cache);

    /* A sweep under way is finished first: one who evicts without end would keep it at the
     * beginning. */
    if (deletions == ws->deletions || list_empty(&ws->refs) || !list_empty(&ws->sweeper.link))
        return;
    ws->deletions = deletions;
    refs_sweep(rq);
}
