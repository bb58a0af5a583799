/* Tenants' parts of window.size: who gives slabs up for whom. */
#include "daemon/window/window.h"

/* While a slab is wanted back nobody pins in it: so long, if nobody took it by then. */
#define TAKEN_MS (2 * (uint64_t)WINDOW_REVOKE_MS)

/* Pins of a tenant's end in that slab, and nobody pins in it for a while: the cache can empty
 * it. */
static void slab_take(struct requests *rq, uint32_t slab)
{
    windows_at(rq)->slabs[slab].taken_ms = uv_now(rq->modules.loop) + TAKEN_MS;
    pins_sweep(rq);
}

/* The slab of that tenant with the fewest pins, but some; UINT32_MAX: there is none, or all are
 * taken. */
static uint32_t slab_choose(const struct requests *rq, const struct window_tenant *t)
{
    const struct windows *ws = windows_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop);
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < ws->n_slabs; i++) {
        const struct window_slab *e = &ws->slabs[i];

        if (e->tenant == t && e->pins > 0 && !slab_taken(ws, i, t, now_ms) &&
            (best == UINT32_MAX || e->pins < ws->slabs[best].pins))
            best = i;
    }
    return best;
}

static struct window_tenant *tenant_largest(const struct requests *rq, uint64_t *granted)
{
    const struct list *tenants = &windows_at(rq)->tenants;
    struct window_tenant *most = NULL;

    *granted = 0;
    for (struct list *node = tenants->next; node != tenants; node = node->next) {
        struct window_tenant *t = LIST_ENTRY(node, struct window_tenant, link);
        uint64_t bytes = grant_bytes(rq->modules.arena, t->group);

        if (!most || bytes > *granted) {
            most = t;
            *granted = bytes;
        }
    }
    return most;
}

bool window_claim(const struct window *w)
{
    struct requests *rq = w->s->rq;
    struct arena *a = rq->modules.arena;
    uint64_t part = grant_budget(a) / windows_at(rq)->n_tenants, granted;
    uint64_t mine = grant_bytes(a, w->tenant->group) + grant_kept_bytes(a, w->tenant->group);
    struct window_tenant *from = tenant_largest(rq, &granted);
    struct windows *ws = windows_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop);
    uint32_t slab;

    if (mine + w->tenant->header.slab_bytes > part || granted <= part || from == w->tenant)
        return false;
    if (ws->taking.from == from && ws->taking.until_ms > now_ms && granted >= ws->taking.granted)
        return true; /* one at a time */
    slab = slab_choose(rq, from);
    if (slab == UINT32_MAX)
        return false; /* nothing of it is pinned, and the cache could not empty any */
    ws->taking.from = from;
    ws->taking.granted = granted;
    ws->taking.until_ms = now_ms + TAKEN_MS;
    slab_take(rq, slab);
    return true;
}

/* Counts for each tenant the slabs in which it pins something that is not being taken. */
static uint64_t pinned_count(struct requests *rq)
{
    const struct windows *ws = windows_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop), all = 0;

    for (struct list *node = ws->tenants.next; node != &ws->tenants; node = node->next) {
        struct window_tenant *t = LIST_ENTRY(node, struct window_tenant, link);

        t->pinned = 0;
        for (uint32_t i = 0; i < ws->n_slabs; i++)
            t->pinned +=
                ws->slabs[i].tenant == t && ws->slabs[i].pins > 0 && !slab_taken(ws, i, t, now_ms);
        all += t->pinned;
    }
    return all;
}

static struct window_tenant *tenant_most_pinned(const struct requests *rq)
{
    const struct list *tenants = &windows_at(rq)->tenants;
    struct window_tenant *most = LIST_ENTRY(tenants->next, struct window_tenant, link);

    for (struct list *node = tenants->next; node != tenants; node = node->next) {
        struct window_tenant *t = LIST_ENTRY(node, struct window_tenant, link);

        most = t->pinned > most->pinned ? t : most;
    }
    return most;
}

/* Slabs without pins leave by themselves. Of the others those go that don't fit, from whoever has
 * most. */
void windows_reload(struct requests *rq)
{
    struct arena *a = rq->modules.arena;
    uint64_t budget = rq->modules.config->window_size, pinned;
    bool enough;

    grant_budget_set(a, budget);
    window_slots_changed(&windows_at(rq)->relocations);
    pinned = pinned_count(rq);
    enough = grant_bytes(a, NULL) <= budget;
    for (uint32_t i = 0; enough && i < windows_at(rq)->n_slabs; i++)
        windows_at(rq)->slabs[i].taken_ms = 0;
    for (; pinned > budget / arena_slab_bytes(a); pinned--) {
        struct window_tenant *from = tenant_most_pinned(rq);

        slab_take(rq, slab_choose(rq, from));
        from->pinned--;
    }
}
