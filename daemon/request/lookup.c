/* lookup, release, and the leases that lookups take. */
#include "daemon/observe/histogram.h"
#include "daemon/observe/tenants.h"
#include "daemon/request/encoding.h"

#include <stdlib.h>
#include <string.h>

struct lease {
    struct session *s;
    const struct ns *ns, *base; /* which its blocks keep; base: of an encoded namespace, or NULL */
    struct deadline deadline;
    uint32_t number, name; /* number: in the session's table */
    uint32_t n, n_base;    /* of n, the last n_base are the base's */
    size_t memory;
    block_ref refs[];
};

void lease_end(struct session *s, uint32_t name)
{
    struct lease *l = table_get(&s->leases, session_number(name));

    if (!l || l->name != name)
        return;
    table_remove(&s->leases, l->number);
    deadline_disarm(s->rq->rooms.deadlines, &l->deadline);
    cache_unlease_many(s->rq->rooms.cache, l->ns, l->refs, l->n - l->n_base);
    if (l->n_base > 0)
        cache_unlease_many(s->rq->rooms.cache, l->base, l->refs + l->n - l->n_base, l->n_base);
    leased_add(s, -(int64_t)l->n);
    memory_return(s, l->memory);
    s->rq->rooms.metrics->leases--;
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

    l->s->rq->rooms.metrics->leases_expired++;
    lease_end(l->s, l->name);
}

/* Skips zeroes in refs. */
static void lease_take(struct lease *l, const struct encoded_ns *en, const block_ref *refs,
                       uint32_t n)
{
    struct cache *c = l->s->rq->rooms.cache;
    uint32_t own;

    for (uint32_t i = 0; i < n; i++)
        if (refs[i] != 0 && !(en && encoded_is_plain(en, refs[i])))
            l->refs[l->n++] = refs[i];
    own = l->n;
    cache_lease_many(c, l->ns, l->refs, own);
    for (uint32_t i = 0; en && i < n; i++)
        if (refs[i] != 0 && encoded_is_plain(en, refs[i]))
            l->refs[l->n++] = refs[i];
    l->n_base = l->n - own;
    if (l->n_base == 0)
        return;
    l->base = en->base;
    cache_lease_many(c, l->base, l->refs + own, l->n_base);
}

/* NULL with call->error. */
static struct lease *lease_alloc(struct call *call, size_t memory)
{
    struct session *s = call->s;
    struct lease *l;

    if (limit_take(owner_of(s), LIMIT_MEMORY, memory, &call->error) != 0)
        return NULL;
    l = malloc(memory);
    if (!l) {
        memory_return(s, memory);
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lease");
        return NULL;
    }
    *l = (struct lease){.s = s, .memory = memory};
    return l;
}

int lease_new(struct call *call, const struct ns *ns, const block_ref *refs, uint32_t n,
              uint64_t lease_ms, uint32_t *name)
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    uint64_t limit = rq->rooms.config->lease_max_ms;
    struct lease *l;

    if (s->leased_keys + n > SESSION_MAX_LEASED_KEYS)
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "this connection's leases cover %u keys, at most %u may be; release some",
            s->leased_keys, SESSION_MAX_LEASED_KEYS);
    if (leased_check(call) != 0)
        return -call->error.code;
    l = lease_alloc(call, sizeof(*l) + n * sizeof(*refs));
    if (!l)
        return -call->error.code;
    l->ns = ns;
    l->number = table_add(&s->leases, l);
    if (l->number == 0) {
        memory_return(s, l->memory);
        free(l);
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has %u leases, as many as one may have; release some",
                             table_count(&s->leases));
    }
    deadline_arm(rq->rooms.deadlines, &l->deadline,
                 uv_now(rq->rooms.loop) + (lease_ms < limit ? lease_ms : limit), lease_expired_cb);
    lease_take(l, session_encoded(s, ns), refs, n);
    leased_add(s, l->n);
    rq->rooms.metrics->leases++;
    *name = l->name = session_name(&s->lease_names, l->number);
    return 0;
}

/* ---- lookup ---- */

/* What the cache knows of a lookup's keys. */
struct found {
    struct ns *ns;
    const struct encoded_ns *encoded; /* NULL: ns is not encoded */
    bool bypassed;
    uint32_t n;                         /* keys */
    uint32_t hits, dram, shared, plain; /* plain: in an encoded namespace's base */
    block_ref refs[UCM_MAX_KEYS];       /* 0: a miss */
    uint8_t status[UCM_MAX_KEYS];       /* enum ucm_lookup_status */
};

/* Whose block it is. */
static struct ns *found_ns(const struct found *f, block_ref ref)
{
    return f->encoded && ref != 0 && encoded_is_plain(f->encoded, ref) ? f->encoded->base : f->ns;
}

/* Without `each` the search ends at the first miss. */
static void keys_find(struct session *s, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                      struct found *f)
{
    static const uint8_t statuses[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                       [CACHE_NVME] = UCM_LOOKUP_NVME,
                                       [CACHE_SHARE] = UCM_LOOKUP_SHARED};
    struct requests *rq = s->rq;

    f->ns = ns;
    f->encoded = session_encoded(s, ns);
    f->n = n;
    f->hits = f->dram = f->shared = f->plain = 0;
    f->bypassed = encoded_bypassed(rq, ns, f->encoded);
    if (f->bypassed) {
        memset(f->refs, 0, n * sizeof(f->refs[0]));
        memset(f->status, UCM_LOOKUP_MISS, n);
        return;
    }
    if (f->encoded)
        encoded_find(f->encoded, m->keys.p, n, !m->each, f->refs);
    else
        index_find_many(rq->rooms.index, ns, m->keys.p, n, !m->each, f->refs);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t tier = cache_tier(rq->rooms.cache, found_ns(f, f->refs[i]), f->refs[i]), status;

        if (tier == 0) {
            f->refs[i] = 0;
            f->status[i] = UCM_LOOKUP_MISS;
            if (!m->each)
                break;
            continue;
        }
        status = statuses[tier];
        f->hits++;
        f->dram += status == UCM_LOOKUP_DRAM;
        f->shared += status == UCM_LOOKUP_SHARED;
        f->plain += found_ns(f, f->refs[i]) != ns;
        /* A client that did not set `shared` may not know that status. */
        f->status[i] = status == UCM_LOOKUP_SHARED && !m->shared ? UCM_LOOKUP_NVME : status;
    }
}

/* The policy takes the keys of one call for one chain; with `each` they are none. */
static void keys_touch(struct requests *rq, const struct msg_lookup *m, const struct found *f,
                       uint32_t covered)
{
    struct cache *c = rq->rooms.cache;

    if (m->each)
        for (uint32_t i = 0; i < covered; i++)
            cache_touch(c, found_ns(f, f->refs[i]), f->refs + i, 1);
    else if (f->encoded)
        encoded_touch(f->encoded, f->refs, covered);
    else
        cache_touch(c, f->ns, f->refs, covered);
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
    reuse_lookup(rq->reuse, ns->id, keys, ns->identity.key_bytes, f->n, ns->block_bytes,
                 uv_now(rq->rooms.loop));
}

static void lookup_count(struct requests *rq, const uint8_t *keys, const struct found *f)
{
    if (f->bypassed) /* it says nothing about how well the cache does */
        rq->rooms.metrics->bypass_lookup_keys += f->n;
    else
        lookup_counts_add(rq, f->ns, keys,
                          &(struct lookup_counts){f->n, f->hits, f->dram, f->shared, f->plain});
}

static void lookup_timed(struct requests *rq, const struct ns *ns, uint64_t begun_ns)
{
    uint64_t took_ns = uv_hrtime() - begun_ns;

    histogram_count(rq->rooms.metrics->histograms.lookup, took_ns);
    histogram_count(&ns->tenant->times->lookup, took_ns);
}

static void found_tell(const struct msg_lookup *m, const struct found *f, struct msg_lookup_r *r)
{
    *r = (struct msg_lookup_r){.hits = f->hits,
                               .dram = f->dram,
                               .status = {f->status, m->each ? f->n : 0},
                               .shared = m->shared ? f->shared : 0};
}

/* Takes the lease and fills *r. 0 or -code with call->error. */
static int lookup_result(struct call *call, const struct msg_lookup *m, const struct found *f,
                         struct msg_lookup_r *r)
{
    struct requests *rq = call->s->rq;
    uint32_t covered = m->each ? f->n : f->hits, lease = 0;

    if (m->lease_ms > 0 && f->hits > 0) {
        int rc = lease_new(call, f->ns, f->refs, covered, m->lease_ms, &lease);

        if (rc != 0)
            return rc;
    }
    keys_touch(rq, m, f, covered);
    lookup_count(rq, m->keys.p, f);
    trace_outcome(call->trace, f->hits, 0);
    found_tell(m, f, r);
    r->lease = lease;
    return 0;
}

/* ---- a lookup that waits for the shared tier ---- */

struct lookup_wait {
    struct request r;
    struct shared_lookup *lookup;
    struct ns *ns;
    struct encoded_look look;
    struct msg_lookup m; /* its keys are in lookup's copy */
};

/* Looks at all keys again: the shared tier's answer is noted in the cache now, and other blocks
 * came and went meanwhile. */
static void wait_end(struct lookup_wait *w)
{
    struct session *s = w->r.s;
    struct call call = {.s = s, .msgid = w->r.msgid, .method = w->r.method, .trace = w->r.trace};
    struct msg_lookup_r r = {0};
    struct found f;

    trace_less(w->r.trace, TRACE_SHARED_LOOKUP);
    if (!s->closing) {
        trace_more(w->r.trace, TRACE_LOOKUP);
        keys_find(s, w->ns, &w->m, w->m.keys.n / w->ns->identity.key_bytes, &f);
        trace_less(w->r.trace, TRACE_LOOKUP);
        (void)lookup_result(&call, &w->m, &f, &r); /* its error is in call */
        lookup_timed(s->rq, w->ns, w->r.begun_ns);
    }
    request_end(&w->r, &call.error, &r);
}

static void wait_done_cb(struct shared_lookup *k);

static void wait_on(struct lookup_wait *w, struct shared_lookup *k)
{
    w->lookup = k;
    w->m.keys.p = k->keys;
    k->ctx = w;
    k->done_cb = wait_done_cb;
}

static void wait_done_cb(struct shared_lookup *k)
{
    struct lookup_wait *w = k->ctx;
    struct shared_lookup *next;

    if (w->look.en && !w->r.s->closing && encoded_look_next(&w->look, w->m.keys, &next))
        wait_on(w, next);
    else
        wait_end(w);
    shared_lookup_free(k);
}

static void wait_stop_cb(struct request *r)
{
    struct lookup_wait *w = LIST_ENTRY(r, struct lookup_wait, r);
    struct shared_lookup *k = w->lookup;

    wait_end(w);
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
    struct encoded_look look = {.s = call->s,
                                .en = f->encoded,
                                .each = m->each,
                                .until_ms = shared_lookup_until(rq, m->wait_ms)};
    struct shared_lookup *lookup;
    struct lookup_wait *w;

    if (f->hits == f->n)
        return false;
    if (!encoded_look_begin(&look, ns, m->keys, f->hits, &lookup))
        return false;
    w = request_new(call, sizeof(*w),
                    lookup->p.deadline_ms - uv_now(rq->rooms.loop) + WAIT_GRACE_MS, wait_stop_cb);
    if (!w) {
        call->error.code = 0;
        shared_lookup_cancel(lookup);
        return false;
    }
    w->ns = ns;
    w->look = look;
    w->m = *m;
    wait_on(w, lookup);
    trace_more(w->r.trace, TRACE_SHARED_LOOKUP);
    rq->rooms.metrics->lookups_waited++;
    return true;
}

/* Its client asks again: so this one takes no lease, counts nothing and moves no block in the policy. */
static bool lookup_pends(struct call *call, struct ns *ns, const struct msg_lookup *m,
                         const struct found *f, struct msg_lookup_r *r)
{
    if (m->nowait != UCM_LOOKUP_LATER || f->hits == f->n ||
        !lookup_later(call->s, ns, f->encoded, m, f->hits))
        return false;
    found_tell(m, f, r);
    r->pending = true;
    call->s->rq->rooms.metrics->lookups_pending++;
    return true;
}

int method_lookup(struct call *call)
{
    const struct msg_lookup *m = &call->params.lookup;
    struct msg_lookup_r r;
    struct found f;
    struct ns *ns = call_namespace(call, m->ns);
    uint32_t n = ns ? call_keys(call, ns, m->keys) : 0;
    int rc;

    if (n == 0)
        return -call->error.code;
    trace_more(call->trace, TRACE_LOOKUP);
    keys_find(call->s, ns, m, n, &f);
    trace_less(call->trace, TRACE_LOOKUP);
    if (m->nowait == UCM_LOOKUP_WAIT && lookup_waits(call, ns, m, &f))
        return 0;
    rc = lookup_pends(call, ns, m, &f, &r) ? 0 : lookup_result(call, m, &f, &r);
    if (rc == 0)
        call_reply(call, &r);
    lookup_timed(call->s->rq, ns, call->begun_ns);
    return rc;
}

int method_release(struct call *call)
{
    const struct msg_release *m = &call->params.release;

    lease_end(call->s, (uint32_t)m->lease);
    return call_reply(call, NULL);
}
