/* lookup: which keys are found, and where; with a lease on what was found.
 *
 * A lease's blocks stay in some tier until the client releases it (by name, or with its load), it
 * expires, or the connection closes. */
#include "daemon/request/view.h"
#include "proto/histogram.h"

#include <stdlib.h>

#define LEASES_UNBOUND (UINT64_C(1) << 60)

struct lease {
    struct session *s;
    struct deadline deadline;
    uint32_t number, name; /* number: in the session's table */
    uint32_t n;            /* blocks, which keep their namespaces */
    size_t memory;
    block_ref refs[];
};

/* ---- what connections take of what all share, by the rule of limit.h ---- */

void leased_add(struct session *s, int64_t keys)
{
    s->leased_keys = (uint32_t)((int64_t)s->leased_keys + keys);
    if (keys < 0)
        limit_give(s->peer.owner, LIMIT_LEASED, (uint64_t)-keys);
    else
        limit_add(s->peer.owner, LIMIT_LEASED, (uint64_t)keys); /* leased_check bounds it */
}

/* Several leases may cover one block: of what is leased, a session's user and tenant count as
 * having the part that they have of the leases' keys. */
int leased_check(struct call *call)
{
    const struct session *s = call->s;
    const struct request_modules *modules = &s->rq->modules;
    struct cache_leased leased = cache_leased(modules->cache);
    struct limit_pool index = {"bytes of the index that leases and sequences keep",
                               "index.max_blocks", s->rq->index_bytes, leased.index_bytes, false};
    struct limit_pool bytes = {"bytes that leases and sequences keep", "the size of DRAM and NVMe",
                               s->rq->dram_bytes, leased.bytes, true};
    struct tier_stats ts;
    int rc;

    if (s->peer.admin)
        return 0;
    if (modules->shared) {
        bytes.all = LEASES_UNBOUND; /* they may move there */
    } else if (modules->tier) {
        modules->tier_ops->stats(modules->tier, &ts);
        bytes.all += ts.capacity_bytes;
    }
    rc = limit_check(s->peer.owner, LIMIT_LEASED, &index, 1, &call->error);
    if (rc == 0)
        rc = limit_check(s->peer.owner, LIMIT_LEASED, &bytes, 1, &call->error);
    return rc;
}

/* ---- leases ---- */

void lease_end(struct session *s, uint32_t name)
{
    struct lease *l = table_get(&s->leases, name & SESSION_NUMBERS);

    if (!l || l->name != name)
        return;
    table_remove(&s->leases, l->number);
    deadline_disarm(s->rq->modules.deadlines, &l->deadline);
    if (cache_unlease_many(s->rq->modules.cache, l->refs, l->n))
        cache_released(s->rq->modules.cache);
    leased_add(s, -(int64_t)l->n);
    limit_give(s->peer.owner, LIMIT_MEMORY, l->memory);
    s->rq->modules.metrics->leases--;
    free(l);
}

bool leases_end(struct session *s)
{
    uint32_t before = s->leased_keys, i;

    while ((i = table_next(&s->leases, 0)) != 0 && before - s->leased_keys < LEASED_KEYS_PER_TURN)
        lease_end(s, ((struct lease *)table_get(&s->leases, i))->name);
    return i == 0;
}

static void lease_expired_cb(struct deadline *d)
{
    struct lease *l = LIST_ENTRY(d, struct lease, deadline);

    l->s->rq->modules.metrics->leases_expired++;
    lease_end(l->s, l->name);
}

int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms,
              uint32_t *name)
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    uint64_t limit = rq->modules.config->lease_max_ms;
    size_t memory = sizeof(struct lease) + n * sizeof(*refs);
    struct lease *l;
    uint32_t number;

    if (s->leased_keys + n > SESSION_MAX_LEASED_KEYS)
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "this connection's leases cover %u keys, at most %u may be; release some",
            s->leased_keys, SESSION_MAX_LEASED_KEYS);
    if (leased_check(call) != 0 ||
        limit_take(s->peer.owner, LIMIT_MEMORY, memory, &call->error) != 0)
        return -call->error.code;
    l = malloc(memory);
    number = l ? table_add(&s->leases, l) : 0;
    if (number == 0) {
        limit_give(s->peer.owner, LIMIT_MEMORY, memory);
        if (!l)
            return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lease");
        free(l);
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has %u leases, as many as one may have; release some",
                             table_count(&s->leases));
    }
    *l = (struct lease){.s = s, .number = number, .memory = memory};
    *name = l->name = session_name(&s->lease_names, number);
    deadline_arm(rq->modules.deadlines, &l->deadline,
                 uv_now(rq->modules.loop) + (lease_ms < limit ? lease_ms : limit),
                 lease_expired_cb);
    for (uint32_t i = 0; i < n; i++)
        if (refs[i] != 0)
            l->refs[l->n++] = refs[i];
    (void)cache_lease_many(rq->modules.cache, l->refs, l->n, false);
    leased_add(s, l->n);
    rq->modules.metrics->leases++;
    return 0;
}

int method_release(struct call *call)
{
    const struct msg_release *m = &call->params.release;

    lease_end(call->s, (uint32_t)m->lease);
    return call_reply(call, NULL);
}

/* ---- lookups ---- */

/* What the cache knows of a lookup's keys. */
struct found {
    struct view view;
    bool bypassed;
    struct lookup_counts counts;
    block_ref refs[UCM_MAX_KEYS]; /* 0: a miss */
    uint8_t status[UCM_MAX_KEYS]; /* enum ucm_lookup_status */
};

/* Without m->per_key the search ends at the first miss. */
static void keys_find(struct session *s, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                      struct found *f)
{
    /* A client that did not set `shared` may not know that status. */
    const uint8_t told[] = {[0] = UCM_LOOKUP_MISS,
                            [CACHE_DRAM] = UCM_LOOKUP_DRAM,
                            [CACHE_NVME] = UCM_LOOKUP_NVME,
                            [CACHE_SHARED] = m->shared ? UCM_LOOKUP_SHARED : UCM_LOOKUP_NVME};
    struct requests *rq = s->rq;
    struct lookup_counts counts = {.n = n};

    f->view = session_view(s, ns);
    f->bypassed = !view_find(rq, &f->view, m->keys.p, n, !m->per_key, f->refs);
    cache_tiers(rq->modules.cache, f->refs, n, !m->per_key, f->status);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t tier = f->status[i];

        f->status[i] = told[tier];
        if (tier == 0) {
            f->refs[i] = 0;
            if (!m->per_key)
                break;
            continue;
        }
        counts.hits++;
        counts.dram += tier == CACHE_DRAM;
        counts.shared += tier == CACHE_SHARED;
        if (f->view.n > 1)
            counts.raw += index_block(rq->modules.index, f->refs[i])->ns != f->view.ns[0]->id;
    }
    f->counts = counts;
}

void lookup_counts_add(struct requests *rq, struct ns *ns, const uint8_t *keys,
                       const struct lookup_counts *f)
{
    struct metrics *m = rq->modules.metrics;
    struct metrics_tenant *t = ns->tenant->metrics;

    m->lookups++;
    m->lookup_keys += f->n;
    m->lookup_hits += f->hits;
    m->lookup_hits_dram += f->dram;
    m->lookup_hits_shared += f->shared;
    m->lookup_hits_raw += f->raw;
    t->lookups++;
    t->lookup_keys += f->n;
    t->lookup_hits += f->hits;
    t->lookup_hits_dram += f->dram;
    t->lookup_hits_shared += f->shared;
    ns->traffic.lookups++;
    ns->traffic.lookup_keys += f->n;
    ns->traffic.lookup_hits += f->hits;
    rq->looked_up_cb(rq->reuse, ns->id, keys, ns->identity.key_bytes, f->n, ns->block_bytes,
                     uv_now(rq->modules.loop));
}

static void lookup_timed(struct requests *rq, const struct ns *ns, uint64_t begun_ns)
{
    uint64_t took_ns = uv_hrtime() - begun_ns;

    histogram_add(rq->modules.metrics->histograms.lookup, took_ns, 1);
    histogram_add(&ns->tenant->times->lookup, took_ns, 1);
}

/* Takes the lease, and fills *r. pending: its client asks again, so it takes no lease, counts
 * nothing and moves no block in the policy. 0 or -code with call->error. */
static int lookup_result(struct call *call, const struct msg_lookup *m, const struct found *f,
                         bool pending, struct msg_lookup_r *r)
{
    struct requests *rq = call->s->rq;
    uint32_t covered = m->per_key ? f->counts.n : f->counts.hits, lease = 0;

    *r = (struct msg_lookup_r){.hits = f->counts.hits,
                               .dram = f->counts.dram,
                               .status = {f->status, m->per_key ? f->counts.n : 0},
                               .shared = m->shared ? f->counts.shared : 0,
                               .pending = pending};
    if (pending) {
        rq->modules.metrics->lookups_pending++;
        return 0;
    }
    if (m->lease_ms > 0 && f->counts.hits > 0) {
        int rc = lease_new(call, f->refs, covered, m->lease_ms, &lease);

        if (rc != 0)
            return rc;
        r->lease = lease;
    }
    /* The policy takes the keys of one call for one chain; with `per_key` they are none. */
    if (!m->per_key)
        view_touch(rq, &f->view, f->refs, covered);
    for (uint32_t i = 0; m->per_key && i < covered; i++)
        view_touch(rq, &f->view, f->refs + i, 1);
    if (f->bypassed) /* it says nothing about how well the cache does */
        rq->modules.metrics->bypass_lookup_keys += f->counts.n;
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
    struct shared_query *k = w->look.k;

    wait_end(w, k->keys);
    shared_query_cancel(k);
}

/* The shared tier ends a lookup at its deadline; this is for a tier that does not. */
#define WAIT_GRACE_MS 1000

/* False: there is nothing to wait for, or no memory for one more request. Then what this host has
 * is the answer. */
static bool lookup_waits(struct call *call, struct ns *ns, const struct msg_lookup *m,
                         const struct found *f)
{
    struct requests *rq = call->s->rq;
    struct view_look look = {.s = call->s,
                             .view = f->view,
                             .per_key = m->per_key,
                             .until_ms = shared_query_until(rq, m->wait_ms),
                             .done_cb = wait_done_cb};
    struct lookup_wait *w;

    if (!view_look_begin(&look, m->keys, f->counts.hits))
        return false;
    w = request_new(call, sizeof(*w), 0, look.until_ms - uv_now(rq->modules.loop) + WAIT_GRACE_MS,
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
    rq->modules.metrics->lookups_waited++;
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
    if (lacks && m->wait_mode == UCM_LOOKUP_WAIT && lookup_waits(call, ns, m, &f))
        return 0;
    pending = lacks && m->wait_mode == UCM_LOOKUP_LATER &&
              lookup_later(call->s, &f.view, m, f.counts.hits);
    rc = lookup_result(call, m, &f, pending, &r);
    if (rc == 0)
        call_reply(call, &r);
    lookup_timed(call->s->rq, ns, call->begun_ns);
    return rc;
}
