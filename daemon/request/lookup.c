/* lookup, release, and leases: what a lookup promises to keep. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <stdlib.h>
#include <string.h>

struct lease {
    struct session *s;
    struct deadline deadline;
    uint32_t number, name, n; /* number: in the session's table */
    block_ref refs[];
};

void lease_end(struct session *s, uint32_t name)
{
    struct lease *l = table_get(&s->leases, session_number(name));

    if (!l || l->name != name)
        return;
    table_remove(&s->leases, l->number);
    deadline_disarm(s->rq->rooms.deadlines, &l->deadline);
    for (uint32_t i = 0; i < l->n; i++)
        cache_drop(s->rq->rooms.cache, l->refs[i]);
    s->leased_keys -= l->n;
    s->rq->rooms.metrics->leases--;
    free(l);
}

void leases_end_all(struct session *s)
{
    for (uint32_t i = table_next(&s->leases, 0); i; i = table_next(&s->leases, i))
        lease_end(s, ((struct lease *)table_get(&s->leases, i))->name);
}

static void lease_expired_cb(struct deadline *d)
{
    struct lease *l = LIST_ENTRY(d, struct lease, deadline);

    l->s->rq->rooms.metrics->leases_expired++;
    lease_end(l->s, l->name);
}

/* refs may hold zeroes, which are passed over. */
int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms,
              uint32_t *name)
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
    l = malloc(sizeof(*l) + n * sizeof(*refs));
    if (!l)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lease");
    *l = (struct lease){.s = s};
    l->number = table_add(&s->leases, l);
    if (l->number == 0) {
        free(l);
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "this connection has %u leases, as many as limits.leases_per_connection "
            "allows; release some",
            table_count(&s->leases));
    }
    if (deadline_arm(rq->rooms.deadlines, &l->deadline,
                     uv_now(rq->rooms.loop) + (lease_ms < limit ? lease_ms : limit),
                     lease_expired_cb) != 0) {
        table_remove(&s->leases, l->number);
        free(l);
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lease");
    }
    for (uint32_t i = 0; i < n; i++) {
        if (refs[i] == 0)
            continue;
        l->refs[l->n++] = refs[i];
        cache_hold(rq->rooms.cache, refs[i]);
    }
    s->leased_keys += l->n;
    rq->rooms.metrics->leases++;
    *name = l->name = session_name(&s->lease_names, l->number);
    return 0;
}

/* One that waits for the shared tier. */
struct lookup_wait {
    struct request r;
    struct shared_lookup *lookup;
    struct ns *ns;
    struct msg_lookup m; /* its keys are in lookup's copy */
};

static enum ucm_lookup_status status_of(struct cache *c, block_ref ref)
{
    if (cache_in_dram(c, ref))
        return UCM_LOOKUP_DRAM;
    return cache_on_share(c, ref) ? UCM_LOOKUP_SHARED : UCM_LOOKUP_NVME;
}

/* Fills rq->status and clears what is not found from rq->refs. Returns how many hits need a share.
 */
static uint32_t look(struct requests *rq, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                     struct msg_lookup_r *r)
{
    uint32_t shared = 0;

    index_find_many(rq->rooms.index, ns, m->keys.p, n, !m->each, rq->refs);
    for (uint32_t i = 0; i < n; i++) {
        enum ucm_lookup_status status = UCM_LOOKUP_MISS;

        rq->status[i] = UCM_LOOKUP_MISS;
        if (!cache_found(rq->rooms.cache, rq->refs[i])) {
            rq->refs[i] = 0;
            if (!m->each)
                break;
            continue;
        }
        status = status_of(rq->rooms.cache, rq->refs[i]);
        r->hits++;
        r->dram += status == UCM_LOOKUP_DRAM;
        shared += status == UCM_LOOKUP_SHARED;
        /* A client that did not ask for the difference may not know of it. */
        rq->status[i] = status == UCM_LOOKUP_SHARED && !m->shared ? UCM_LOOKUP_NVME : status;
    }
    if (m->each)
        r->status = (struct proto_bin){rq->status, n};
    r->shared = m->shared ? shared : 0;
    return shared;
}

/* The policy takes what it is told of at once for one chain; keys looked at each by itself are
 * none. */
static void touch(struct requests *rq, const struct msg_lookup *m, uint32_t n)
{
    uint32_t step = m->each ? 1 : n;

    for (uint32_t i = 0; i < n; i += step)
        cache_touch(rq->rooms.cache, rq->refs + i, step);
}

/* Of what was just looked at. */
static int lookup_answer(struct call *call, const struct msg_lookup *m, uint32_t n,
                         struct msg_lookup_r *r, uint32_t shared)
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    uint32_t covered = m->each ? n : (uint32_t)r->hits, lease = 0;

    if (m->lease_ms > 0 && r->hits > 0) {
        int rc = lease_new(call, rq->refs, covered, m->lease_ms, &lease);

        if (rc != 0)
            return rc;
    }
    touch(rq, m, covered);
    rq->rooms.metrics->lookups++;
    rq->rooms.metrics->lookup_keys += n;
    rq->rooms.metrics->lookup_hits += r->hits;
    rq->rooms.metrics->lookup_hits_shared += shared;
    r->lease = lease;
    session_reply(s, call->msgid, &proto_lookup_r, r);
    return 0;
}

/* ---- waiting for the shared tier ---- */

/* Looks once more: what was found meanwhile is here now, and what has gone is not. */
static void wait_end(struct lookup_wait *w)
{
    struct session *s = w->r.s;
    struct call call = {.s = s, .msgid = w->r.msgid, .method = w->r.method};
    struct msg_lookup_r r = {0};
    uint32_t n = w->m.keys.n / w->ns->identity.key_bytes, shared;

    request_end(&w->r);
    if (!s->closing) {
        shared = look(s->rq, w->ns, &w->m, n, &r);
        if (lookup_answer(&call, &w->m, n, &r, shared) != 0)
            session_reply_error(s, call.msgid, &call.error);
    }
    free(w);
    session_settle(s);
}

static void wait_done_cb(struct shared_lookup *k)
{
    struct lookup_wait *w = k->ctx;

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

/* The shared tier keeps its deadline; this one is for the case that it does not. */
#define WAIT_GRACE_MS 1000

/* False: nothing is to be waited for. */
static bool lookup_waits(struct call *call, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                         uint32_t hits)
{
    struct requests *rq = call->s->rq;
    struct shared_lookup *lookup;
    struct lookup_wait *w;

    if (!rq->rooms.share || hits == n ||
        shared_lookup_start(rq, ns, m->keys, m->each ? 0 : hits, m->each, m->wait_ms, &lookup) != 0)
        return false;
    w = calloc(1, sizeof(*w));
    if (!w)
        goto err_after_lookup;
    w->r.stop_cb = wait_stop_cb;
    /* Too many requests: what is here is an answer, too. */
    if (request_start(call, &w->r, sizeof(*w) + lookup->memory,
                      lookup->p.deadline_ms - uv_now(rq->rooms.loop) + WAIT_GRACE_MS) != 0)
        goto err_after_wait;
    w->ns = ns;
    w->lookup = lookup;
    w->m = *m;
    w->m.keys.p = lookup->keys;
    lookup->ctx = w;
    lookup->done_cb = wait_done_cb;
    rq->rooms.metrics->lookups_waited++;
    return true;

err_after_wait:
    call->error.code = 0;
    free(w);
err_after_lookup:
    shared_lookup_cancel(lookup);
    return false;
}

int method_lookup(struct call *call)
{
    struct msg_lookup m;
    struct msg_lookup_r r = {0};
    struct ns *ns;
    uint32_t n, shared;
    int rc = proto_decode(&proto_lookup, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    ns = call_namespace(call, m.ns);
    n = ns ? call_keys(call, ns, m.keys) : 0;
    if (n == 0)
        return -call->error.code;
    shared = look(call->s->rq, ns, &m, n, &r);
    if (lookup_waits(call, ns, &m, n, (uint32_t)r.hits))
        return 0;
    return lookup_answer(call, &m, n, &r, shared);
}

int method_release(struct call *call)
{
    struct msg_release m;
    int rc = proto_decode(&proto_release, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    lease_end(call->s, (uint32_t)m.lease);
    session_reply(call->s, call->msgid, &proto_none, NULL);
    return 0;
}
