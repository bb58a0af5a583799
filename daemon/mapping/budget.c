/* Tenants' shares of mapping.size: which tenant gives up slabs for another. */
#include "daemon/mapping/mapping.h"

/* While a slab is wanted back nobody takes references in it: so long, if nobody took it by then. */
#define TAKEN_MS (2 * (uint64_t)MAPPING_REVOKE_MS)

/* References of a tenant's end in that slab, and nobody takes references in it for a while: the
 * cache can empty it. */
static void slab_take(struct requests *rq, uint32_t slab)
{
    mappings_at(rq)->slabs[slab].taken_ms = uv_now(rq->modules.loop) + TAKEN_MS;
    refs_sweep(rq);
}

/* The slab of that tenant with the fewest references, but some; UINT32_MAX: there is none, or all
 * are taken. */
static uint32_t slab_choose(const struct requests *rq, const struct mapping_tenant *t)
{
    const struct mappings *ws = mappings_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop);
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < ws->n_slabs; i++) {
        const struct mapping_slab *e = &ws->slabs[i];

        if (e->tenant == t && e->refs > 0 && !slab_taken(ws, i, t, now_ms) &&
            (best == UINT32_MAX || e->refs < ws->slabs[best].refs))
            best = i;
    }
    return best;
}

static struct mapping_tenant *tenant_largest(const struct requests *rq, uint64_t *granted)
{
    const struct list *tenants = &mappings_at(rq)->tenants;
    struct mapping_tenant *most = NULL;

    *granted = 0;
    for (struct list *node = tenants->next; node != tenants; node = node->next) {
        struct mapping_tenant *t = LIST_ENTRY(node, struct mapping_tenant, link);
        uint64_t bytes = grant_bytes(rq->modules.arena, t->group);

        if (!most || bytes > *granted) {
            most = t;
            *granted = bytes;
        }
    }
    return most;
}

bool mapping_claim(const struct mapping *w)
{
    struct requests *rq = w->s->rq;
    struct arena *a = rq->modules.arena;
    uint64_t part = grant_budget(a) / mappings_at(rq)->n_tenants, granted;
    uint64_t mine = grant_bytes(a, w->tenant->group) + grant_kept_bytes(a, w->tenant->group);
    struct mapping_tenant *from = tenant_largest(rq, &granted);
    struct mappings *ws = mappings_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop);
    uint32_t slab;

    if (mine + w->tenant->header.slab_bytes > part || granted <= part || from == w->tenant)
        return false;
    if (ws->taking.from == from && ws->taking.until_ms > now_ms && granted >= ws->taking.granted)
        return true; /* one at a time */
    slab = slab_choose(rq, from);
    if (slab == UINT32_MAX)
        return false; /* nothing of it is referenced, and the cache could not empty any */
    ws->taking.from = from;
    ws->taking.granted = granted;
    ws->taking.until_ms = now_ms + TAKEN_MS;
    slab_take(rq, slab);
    return true;
}

/* Counts for each tenant the slabs in which it references something that is not being taken. */
static uint64_t referenced_count(struct requests *rq)
{
    const struct mappings *ws = mappings_at(rq);
    uint64_t now_ms = uv_now(rq->modules.loop), all = 0;

    for (struct list *node = ws->tenants.next; node != &ws->tenants; node = node->next) {
        struct mapping_tenant *t = LIST_ENTRY(node, struct mapping_tenant, link);

        t->referenced = 0;
        for (uint32_t i = 0; i < ws->n_slabs; i++)
            t->referenced +=
                ws->slabs[i].tenant == t && ws->slabs[i].refs > 0 && !slab_taken(ws, i, t, now_ms);
        all += t->referenced;
    }
    return all;
}

static struct mapping_tenant *tenant_most_referenced(const struct requests *rq)
{
    const struct list *tenants = &mappings_at(rq)->tenants;
    struct mapping_tenant *most = LIST_ENTRY(tenants->next, struct mapping_tenant, link);

    for (struct list *node = tenants->next; node != tenants; node = node->next) {
        struct mapping_tenant *t = LIST_ENTRY(node, struct mapping_tenant, link);

        most = t->referenced > most->referenced ? t : most;
    }
    return most;
}

/* Slabs without references leave by themselves. While the others don't fit, the tenant that has
 * most of them then gives up one. */
void mappings_reload(struct requests *rq)
{
    struct arena *a = rq->modules.arena;
    uint64_t budget = rq->modules.config->mapping_size, referenced;
    bool enough;

    grant_budget_set(a, budget);
    mapping_slots_changed(&mappings_at(rq)->relocations);
    referenced = referenced_count(rq);
    enough = grant_bytes(a, NULL) <= budget;
    for (uint32_t i = 0; enough && i < mappings_at(rq)->n_slabs; i++)
        mappings_at(rq)->slabs[i].taken_ms = 0;
    for (; referenced > budget / arena_slab_bytes(a); referenced--) {
        struct mapping_tenant *from = tenant_most_referenced(rq);

        slab_take(rq, slab_choose(rq, from));
        from->referenced--;
    }
}
