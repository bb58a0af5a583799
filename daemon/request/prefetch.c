/* prefetch: blocks into DRAM, of one part or of all; also of a sequence's (sequence_prefetch.c). */
#include "daemon/request/prefetch.h"

#include <errno.h>

/* A prefetch larger than the arena, or than what its tenant gets of that, would evict its own
 * blocks. What is in DRAM needs no slot. */
static bool is_enough(const struct transfer *w, const struct transfer_item *it)
{
    uint64_t room = w->r.s->rq->dram_bytes, most = w->ns->tenant->settings.dram_max;

    room = most > 0 && most < room ? most : room;
    return it->p->dram != PART_DRAM_READY && w->bytes + w->held_bytes >= room / 2;
}

static int prefetch_begin(struct transfer *w, const struct transfer_item *it)
{
    int rc = is_enough(w, it) ? -ENOSPC : transfer_get(w, it, NUMA_NONE);

    if (rc != CACHE_READY)
        return rc; /* CACHE_PENDING is 0 */
    cache_put(w->modules->cache, it->ref, it->part);
    return 0;
}

static int prefetch_ready(struct transfer *w, struct item_wait *iw, int status)
{
    if (status != 0)
        return status;
    cache_put(w->modules->cache, iw->it.ref, iw->it.part);
    w->modules->metrics->prefetch_blocks++;
    if (LIST_ENTRY(w, struct prefetch, w)->marks)
        cache_prefetched(w->modules->cache, iw->it.ref);
    w->bytes += iw->it.form->layers * iw->it.form->layer_bytes;
    return 0;
}

static void prefetch_finish(struct transfer *w)
{
    transfer_end(w, NULL);
}

static const struct transfer_kind prefetch_kind = {
    .brings = true, .begin = prefetch_begin, .ready = prefetch_ready, .finish = prefetch_finish};

struct prefetch *prefetch_new(struct call *call, const struct view *v, uint32_t n_keys,
                              uint64_t priority, uint64_t timeout_ms)
{
    struct prefetch *p =
        transfer_new(call, &prefetch_kind, v, n_keys, timeout_ms, sizeof(struct prefetch));

    if (p)
        p->w.priority = (uint8_t)priority;
    return p;
}

static void found_begin(struct transfer *w, const uint8_t *keys)
{
    transfer_find(w, keys, false);
    transfer_pump(w);
}

int method_prefetch(struct call *call)
{
    const struct msg_prefetch *m = &call->params.prefetch;
    struct ns *ns = call_namespace(call, m->ns);
    uint32_t n = ns ? call_keys(call, ns, m->keys) : 0, parts;
    struct prefetch *p;
    struct view view;

    if (n == 0)
        return -call->error.code;
    if (call_parts(call, m->part, m->parts, ns->identity.parts, &parts) != 0)
        return -call->error.code;
    view = session_view(call->s, ns);
    p = prefetch_new(call, &view, n, m->priority, m->timeout_ms);
    if (!p)
        return -call->error.code;
    p->w.part = (uint32_t)m->part;
    p->w.parts = parts;
    p->look.begin_cb = found_begin;
    transfer_look(&p->w, &p->look, m->keys, m->timeout_ms);
    return 0;
}
