/* Which blocks windows pin, and how pins end: by name, with their sequence or window, or because
 * the daemon wants memory back. */
#include "daemon/window/window.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static struct cache *cache_of_pins(const struct window_pins *p)
{
    return p->w->s->rq->modules.cache;
}

static struct metrics *metrics_of_pins(const struct window_pins *p)
{
    return p->w->s->rq->modules.metrics;
}

/* ---- the object ---- */

static bool pins_reserve(struct window_pins *p)
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

static void pins_free(struct window_pins *p)
{
    struct session *s = p->w->s;

    assert(p->n == 0 && p->requests == 0);
    list_remove(&p->link);
    list_remove(&p->of_window);
    list_remove(&p->of_sequence);
    memory_return(s, sizeof(*p) + p->cap * sizeof(*p->slab));
    free(p->slab);
    free(p);
}

static struct window_pins *pins_new(struct window *w, struct sequence *ch)
{
    struct window_pins *p = memory_alloc(w->s, sizeof(*p));

    if (!p)
        return NULL;
    p->w = w;
    p->ch = ch;
    p->swept = windows_of(w)->sweep;
    list_push_back(&windows_of(w)->pins, &p->link);
    list_push_back(&w->pins, &p->of_window);
    list_push_back(&ch->pins, &p->of_sequence);
    return p;
}

struct window_pins *pins_get(struct window *w, struct sequence *ch)
{
    struct window_pins *p = NULL;

    for (struct list *node = ch->pins.next; node != &ch->pins && !p; node = node->next) {
        p = LIST_ENTRY(node, struct window_pins, of_sequence);
        if (p->w != w)
            p = NULL;
    }
    if (!p)
        p = pins_new(w, ch);
    if (p && !pins_reserve(p)) {
        pins_put(p);
        return NULL;
    }
    return p;
}

void pins_put(struct window_pins *p)
{
    if (p->n == 0 && p->requests == 0)
        pins_free(p);
}

/* ---- a pin ---- */

uint64_t window_slot_bytes(const struct window *w)
{
    return arena_padded(ns_part_bytes(w->ns, w->part));
}

/* The tenant may have what others leave of the budget, and its part at least. A block that two
 * windows pin counts for both. */
bool window_may_pin(const struct window *w)
{
    const struct arena *a = w->s->rq->modules.arena;
    uint64_t budget = grant_budget(a), part = budget / windows_at(w->s->rq)->n_tenants;
    uint64_t others = grant_bytes(a, NULL) - grant_bytes(a, w->tenant->group);
    uint64_t most = budget > others + part ? budget - others : part;

    return limit_room_within(w->s->peer.owner, LIMIT_PINNED, most) >= window_slot_bytes(w);
}

bool pins_add(struct window_pins *p, uint32_t block)
{
    struct windows *ws = windows_of(p->w);
    block_ref ref = p->ch->blocks[block].base;
    struct window_slab *e;
    struct grant_place place;

    assert(p->slab[block] == UCM_PLACE_NONE);
    if (!window_may_pin(p->w) ||
        !window_place(&windows_of(p->w)->relocations, ref, p->ch->part, &place) ||
        slab_taken(ws, place.window, p->w->tenant, uv_now(p->w->s->rq->modules.loop))) {
        cache_put(cache_of_pins(p), ref, p->ch->part);
        return false;
    }
    cache_ref_lasting(cache_of_pins(p), ref, p->ch->part);
    e = &ws->slabs[place.window];
    e->taken_ms = 0;
    e->tenant = p->w->tenant;
    e->pins++;
    p->slab[block] = place.window;
    p->n++;
    limit_add(p->w->s->peer.owner, LIMIT_PINNED, window_slot_bytes(p->w));
    metrics_of_pins(p)->window_pins++;
    metrics_of_pins(p)->window_pinned_bytes += window_slot_bytes(p->w);
    return true;
}

static void pin_end(struct window_pins *p, uint32_t block)
{
    windows_of(p->w)->slabs[p->slab[block]].pins--;
    p->slab[block] = UCM_PLACE_NONE;
    p->n--;
    limit_give(p->w->s->peer.owner, LIMIT_PINNED, window_slot_bytes(p->w));
    metrics_of_pins(p)->window_pins--;
    metrics_of_pins(p)->window_pinned_bytes -= window_slot_bytes(p->w);
    cache_unref_lasting(cache_of_pins(p), p->ch->blocks[block].base, p->ch->part);
}

bool pins_end(struct window_pins *p, uint32_t *at, uint32_t end, uint32_t *most)
{
    end = end < p->cap ? end : p->cap;
    for (; *at<end && * most> 0; ++*at, --*most)
        if (p->slab[*at] != UCM_PLACE_NONE)
            pin_end(p, *at);
    return *at >= end;
}

/* Nobody pins any more: what was looked at stays without pins. */
static bool pins_end_list(struct list *pins, bool of_window)
{
    uint32_t most = WINDOW_BLOCKS_PER_TURN;

    while (!list_empty(pins)) {
        struct window_pins *p = of_window ? LIST_ENTRY(pins->next, struct window_pins, of_window)
                                          : LIST_ENTRY(pins->next, struct window_pins, of_sequence);

        assert(p->requests == 0);
        if (p->n > 0 && !pins_end(p, &p->end_at, UINT32_MAX, &most))
            return false;
        pins_free(p);
    }
    return true;
}

bool window_pins_end_all(struct window *w)
{
    return pins_end_list(&w->pins, true);
}

bool sequence_pins_end_all(struct sequence *ch)
{
    return pins_end_list(&ch->pins, false);
}

/* ---- sweeps ---- */

static bool must_end(const struct window_pins *p, uint32_t block, uint64_t now_ms)
{
    return slab_taken(windows_of(p->w), p->slab[block], p->w->tenant, now_ms) ||
           !sequence_has(p->ch, block);
}

/* True: all of it was looked at. */
static bool pins_sweep_some(struct window_pins *p, uint32_t *most)
{
    uint64_t now_ms = uv_now(p->w->s->rq->modules.loop);

    for (; p->sweep_at < p->cap && p->n > 0; p->sweep_at++) {
        if (*most == 0)
            return false;
        --*most;
        if (p->slab[p->sweep_at] != UCM_PLACE_NONE && must_end(p, p->sweep_at, now_ms))
            pin_end(p, p->sweep_at);
    }
    return true;
}

void pins_sweep_cb(struct cache_retry *r)
{
    struct windows *ws = LIST_ENTRY(r, struct windows, sweeper);
    struct requests *rq = ws->rq;
    uint32_t most = WINDOW_BLOCKS_PER_TURN;

    while (!list_empty(&ws->pins)) {
        struct window_pins *p = LIST_ENTRY(ws->pins.next, struct window_pins, link);

        if (p->swept == ws->sweep)
            break;
        if (!pins_sweep_some(p, &most)) {
            (void)cache_wait_for(rq->modules.cache, &ws->sweeper, WAIT_TURN);
            return;
        }
        p->swept = ws->sweep;
        list_remove(&p->link);
        list_push_back(&ws->pins, &p->link);
        pins_put(p);
    }
    windows_deleting(rq); /* others may have been evicted meanwhile */
}

void pins_sweep(struct requests *rq)
{
    struct windows *ws = windows_at(rq);

    ws->sweep++;
    for (struct list *node = ws->pins.next; node != &ws->pins; node = node->next)
        LIST_ENTRY(node, struct window_pins, link)->sweep_at = 0;
    if (list_empty(&ws->sweeper.link))
        (void)cache_wait_for(rq->modules.cache, &ws->sweeper, WAIT_TURN);
}

void windows_deleting(struct requests *rq)
{
    struct windows *ws = windows_at(rq);
    uint64_t deletions = cache_deletions(rq->modules.cache);

    /* A sweep under way is finished first: one who evicts without end would keep it at the
     * beginning. */
    if (deletions == ws->deletions || list_empty(&ws->pins) || !list_empty(&ws->sweeper.link))
        return;
    ws->deletions = deletions;
    pins_sweep(rq);
}
