/* lookup, release, and leases: what a lookup promises to keep. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <stdlib.h>
#include <string.h>

struct lease {
    struct session *s;
    struct deadline deadline;
    uint32_t id, n;
    block_ref refs[];
};

void lease_end(struct session *s, uint32_t id)
{
    struct lease *l = table_remove(&s->leases, id);

    if (!l)
        return;
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
        lease_end(s, i);
}

static void lease_expired_cb(struct deadline *d)
{
    struct lease *l = LIST_ENTRY(d, struct lease, deadline);

    l->s->rq->rooms.metrics->leases_expired++;
    lease_end(l->s, l->id);
}

/* refs may hold zeroes, which are passed over. */
int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms, uint32_t *id)
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
    l->id = table_add(&s->leases, l);
    if (l->id == 0) {
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
        table_remove(&s->leases, l->id);
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
    *id = l->id;
    return 0;
}

/* Fills rq->status and clears what is not found from rq->refs. */
static void look(struct requests *rq, struct ns *ns, const struct msg_lookup *m, uint32_t n,
                 struct msg_lookup_r *r)
{
    index_find_many(rq->rooms.index, ns, m->keys.p, n, !m->each, rq->refs);
    for (uint32_t i = 0; i < n; i++) {
        rq->status[i] = UCM_LOOKUP_MISS;
        if (!cache_found(rq->rooms.cache, rq->refs[i])) {
            rq->refs[i] = 0;
            if (!m->each)
                break;
            continue;
        }
        r->hits++;
        rq->status[i] =
            cache_in_dram(rq->rooms.cache, rq->refs[i]) ? UCM_LOOKUP_DRAM : UCM_LOOKUP_NVME;
        r->dram += rq->status[i] == UCM_LOOKUP_DRAM;
    }
    if (m->each)
        r->status = (struct proto_bin){rq->status, n};
}

/* The policy takes what it is told of at once for one chain; keys looked at each by itself are
 * none. */
static void touch(struct requests *rq, const struct msg_lookup *m, uint32_t n)
{
    uint32_t step = m->each ? 1 : n;

    for (uint32_t i = 0; i < n; i += step)
        cache_touch(rq->rooms.cache, rq->refs + i, step);
}

int method_lookup(struct call *call)
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    struct msg_lookup m;
    struct msg_lookup_r r = {0};
    struct ns *ns;
    uint32_t n, covered, lease = 0;
    int rc = proto_decode(&proto_lookup, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    ns = call_namespace(call, m.ns);
    n = ns ? call_keys(call, ns, m.keys) : 0;
    if (n == 0)
        return -call->error.code;
    look(rq, ns, &m, n, &r);
    covered = m.each ? n : (uint32_t)r.hits;
    if (m.lease_ms > 0 && r.hits > 0) {
        rc = lease_new(call, rq->refs, covered, m.lease_ms, &lease);
        if (rc != 0)
            return rc;
    }
    touch(rq, &m, covered);
    rq->rooms.metrics->lookups++;
    rq->rooms.metrics->lookup_keys += n;
    rq->rooms.metrics->lookup_hits += r.hits;
    r.lease = lease;
    session_reply(s, call->msgid, &proto_lookup_r, &r);
    return 0;
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
