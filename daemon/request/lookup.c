/* lookup: which keys are found, and where; with a lease on what was found (lease.c). */
#include "daemon/observe/tenants.h"
#include "daemon/request/view.h"
#include "proto/histogram.h"

#include <stdlib.h>
#include <string.h>

/* What the cache knows of a lookup's keys. */
struct found {
    struct view view;
    bool bypassed;
    struct lookup_counts counts;
    block_ref refs[UCM_MAX_KEYS]; /* 0: a miss */
    uint8_t status[UCM_MAX_KEYS]; /* enum ucm_lookup_status */
};

/* Without m->each the search ends at the first miss. */
static void keys_find(struct session *s, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                      struct found *f)
{
    /* A client that did not set `shared` may not know that status. */
    const uint8_t told[] = {[0] = UCM_LOOKUP_MISS,
                            [CACHE_DRAM] = UCM_LOOKUP_DRAM,
                            [CACHE_NVME] = UCM_LOOKUP_NVME,
                            [CACHE_SHARE] = m->shared ? UCM_LOOKUP_SHARED : UCM_LOOKUP_NVME};
    struct requests *rq = s->rq;
    struct lookup_counts counts = {.n = n};

    f->view = session_view(s, ns);
    f->bypassed = !view_find(rq, &f->view, m->keys.p, n, !m->each, f->refs);
    cache_tiers(rq->rooms.cache, f->refs, n, !m->each, f->status);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t tier = f->status[i];

        f->status[i] = told[tier];
        if (tier == 0) {
            f->refs[i] = 0;
            if (!m->each)
                break;
            continue;
        }
        counts.hits++;
        counts.dram += tier == CACHE_DRAM;
        counts.shared += tier == CACHE_SHARE;
        if (f->view.n > 1)
            counts.plain += index_block(rq->rooms.index, f->refs[i])->ns != f->view.ns[0]->id;
    }
    f->counts = counts;
}

void lookup_counts_add(struct requests *rq, struct ns *ns, const uint8_t *keys,
                       const struct lookup_counts *f)
{
    struct metrics *m = rq->rooms.metrics;
    struct metrics_tenant *t = ns->tenant->metrics;

    m->lookups++;
    m->lookup_keys += f->n;
    m->lookup_hits += f->hits;
    m->lookup_hits_dram += f->dram;
    m->lookup_hits_shared += f->shared;
    m->lookup_hits_plain += f->plain;
    t->lookups++;
    t->lookup_keys += f->n;
    t->lookup_hits += f->hits;
    t->lookup_hits_dram += f->dram;
    t->lookup_hits_shared += f->shared;
    ns->traffic.lookups++;
    ns->traffic.lookup_keys += f->n;
    ns->traffic.lookup_hits += f->hits;
    rq->looked_up_cb(rq->reuse, ns->id, keys, ns->identity.key_bytes, f->n, ns->block_bytes,
                     uv_now(rq->rooms.loop));
}

static void lookup_timed(struct requests *rq, const struct ns *ns, uint64_t begun_ns)
{
    uint64_t took_ns = uv_hrtime() - begun_ns;

    histogram_add(rq->rooms.metrics->histograms.lookup, took_ns, 1);
    histogram_add(&ns->tenant->times->lookup, took_ns, 1);
}

/* Takes the lease, and fills *r. pending: its client asks again, so it takes no lease, counts nothing and moves no block in
 * the policy. 0 or -code with call->error. */
static int lookup_result(struct call *call, const struct msg_lookup *m, const struct found *f,
                         bool pending, struct msg_lookup_r *r)
{
    struct requests *rq = call->s->rq;
    uint32_t covered = m->each ? f->counts.n : f->counts.hits, lease = 0;

    *r = (struct msg_lookup_r){.hits = f->counts.hits,
                               .dram = f->counts.dram,
                               .status = {f->status, m->each ? f->counts.n : 0},
                               .shared = m->shared ? f->counts.shared : 0,
                               .pending = pending};
    if (pending) {
        rq->rooms.metrics->lookups_pending++;
        return 0;
    }
    if (m->lease_ms > 0 && f->counts.hits > 0) {
        int rc = lease_new(call, f->refs, covered, m->lease_ms, &lease);

        if (rc != 0)
            return rc;
        r->lease = lease;
    }
    /* The policy takes the keys of one call for one chain; with `each` they are none. */
    if (!m->each)
        view_touch(rq, &f->view, f->refs, covered);
    for (uint32_t i = 0; m->each && i < covered; i++)
        view_touch(rq, &f->view, f->refs + i, 1);
    if (f->bypassed) /* it says nothing about how well the cache does */
        rq->rooms.metrics->bypass_lookup_keys += f->counts.n;
    else
        lookup_counts_add(rq, f->view.ns[0], m->keys.p, &f->counts);
    if (call->trace)
        call->trace->ok = f->counts.hits;
    return 0;
}

/* ---- a lookup that waits for the shared tier ---- */

struct lookup_wait {
    struct request r;
    struct ns *ns;
    struct view_look look;
    struct msg_lookup m; /* its keys are in a copy that the look has */
};

/* Looks at all keys again: the shared tier's answer is noted in the cache now, and other blocks
 * came and went meanwhile. */
static void wait_end(struct lookup_wait *w, const uint8_t *keys)
{
    struct session *s = w->r.s;
    struct call call = {.s = s, .msgid = w->r.msgid, .method = w->r.method, .trace = w->r.trace};
    struct msg_lookup_r r = {0};
    struct found f;

    if (w->r.trace)
        trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_LESS);
    w->m.keys.p = keys;
    if (!s->closing) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_LOOKUP, SPAN_MORE);
        keys_find(s, w->ns, &w->m, w->m.keys.n / w->ns->identity.key_bytes, &f);
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_LOOKUP, SPAN_LESS);
        (void)lookup_result(&call, &w->m, &f, false, &r); /* its error is in call */
        lookup_timed(s->rq, w->ns, w->r.begun_ns);
    }
    request_end(&w->r, &call.error, &r);
}

static void wait_done_cb(struct view_look *look, const uint8_t *keys)
{
    wait_end(LIST_ENTRY(look, struct lookup_wait, look), keys);
}

static void wait_stop_cb(struct request *r)
{
    struct lookup_wait *w = LIST_ENTRY(r, struct lookup_wait, r);
    struct shared_lookup *k = w->look.k;

    wait_end(w, k->keys);
    shared_lookup_cancel(k);
}

/* The shared tier ends a lookup at its deadline; this is for a tier that does not. */
#define WAIT_GRACE_MS 1000

/* False: there is nothing to wait for, or no memory for one more request. Then what this host has is
 * the answer. */
static bool lookup_waits(struct call *call, struct ns *ns, const struct msg_lookup *m,
                         const struct found *f)
{
    struct requests *rq = call->s->rq;
    struct view_look look = {.s = call->s,
                             .view = f->view,
                             .each = m->each,
                             .until_ms = shared_lookup_until(rq, m->wait_ms),
                             .done_cb = wait_done_cb};
    struct lookup_wait *w;

    if (!view_look_begin(&look, m->keys, f->counts.hits))
        return false;
    w = request_new(call, sizeof(*w), 0, look.until_ms - uv_now(rq->rooms.loop) + WAIT_GRACE_MS,
                    wait_stop_cb);
    if (!w) {
        call->error.code = 0;
        view_look_cancel(&look);
        return false;
    }
    w->ns = ns;
    w->m = *m;
    w->look = look;
    w->look.k->ctx = &w->look;
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_SHARED_LOOKUP, SPAN_MORE);
    rq->rooms.metrics->lookups_waited++;
    return true;
}

int method_lookup(struct call *call)
{
    const struct msg_lookup *m = &call->params.lookup;
    struct msg_lookup_r r;
    struct found f;
    struct ns *ns = call_namespace(call, m->ns);
    uint32_t n = ns ? call_keys(call, ns, m->keys) : 0;
    bool lacks, pending;
    int rc;

    if (n == 0)
        return -call->error.code;
    if (call->trace)
        trace_span(call->trace, SPAN_LOOKUP, SPAN_MORE);
    keys_find(call->s, ns, m, n, &f);
    if (call->trace)
        trace_span(call->trace, SPAN_LOOKUP, SPAN_LESS);
    lacks = f.counts.hits < n;
    if (lacks && m->nowait == UCM_LOOKUP_WAIT && lookup_waits(call, ns, m, &f))
        return 0;
    pending =
        lacks && m->nowait == UCM_LOOKUP_LATER && lookup_later(call->s, &f.view, m, f.counts.hits);
    rc = lookup_result(call, m, &f, pending, &r);
    if (rc == 0)
        call_reply(call, &r);
    lookup_timed(call->s->rq, ns, call->begun_ns);
    return rc;
}
