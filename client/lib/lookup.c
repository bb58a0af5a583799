#include "client/lib/internal.h"

#include <string.h>

/* The pointers are the user's. They are written when an answer came that fits the question. */
struct lookup {
    struct client_call call;
    const struct ucm_lookup *asked;
    uint8_t *found; /* NULL: prefix */
    uint32_t *hits, *in_dram, *lease;
};

static int lookup_check(const struct msg_lookup_r *m, const struct lookup *l)
{
    uint32_t found = 0;

    if (m->hits > l->asked->n_keys || m->dram > m->hits || m->shared > m->hits - m->dram ||
        (m->pending && (l->asked->wait_mode != UCM_WAIT_MODE_LATER || m->lease)))
        return -1;
    if (!l->found)
        return 0;
    if (m->status.n != l->asked->n_keys)
        return -1;
    for (uint32_t i = 0; i < m->status.n; i++) {
        if (m->status.p[i] > (l->asked->shared ? UCM_FOUND_SHARED : UCM_FOUND_NVME))
            return -1;
        found += m->status.p[i] != UCM_FOUND_NOT;
    }
    return found == m->hits ? 0 : -1;
}

static int lookup_take_cb(struct client_call *call, const union proto_any *any)
{
    struct lookup *l = (struct lookup *)call;
    const struct msg_lookup_r *m = &any->lookup_r;

    if (lookup_check(m, l) != 0)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd's answer to lookup does not fit the question");
    if (l->found)
        memcpy(l->found, m->status.p, m->status.n);
    if (l->hits)
        *l->hits = (uint32_t)m->hits;
    if (l->in_dram)
        *l->in_dram = (uint32_t)m->dram;
    if (l->asked->shared)
        *l->asked->shared = (uint32_t)m->shared;
    if (l->asked->pending)
        *l->asked->pending = m->pending;
    if (l->lease)
        *l->lease = m->lease && l->asked->lease_ms
                        ? client_lease_add(call->client, (uint32_t)m->lease, l->asked->lease_ms)
                        : 0;
    return 0;
}

int client_keys_check(const struct ucm_client *c, const struct ucm_namespace *ns, const void *keys,
                      uint32_t n_keys, struct proto_bin *out)
{
    uint32_t key_bytes = (uint32_t)ns->open.key_bytes;

    if (!keys || n_keys == 0 || n_keys > c->info.max_keys)
        return client_fail(UCM_EINVALID, "a request has 1 to %u keys, not %u%s", c->info.max_keys,
                           n_keys, keys ? "" : " at NULL");
    *out = (struct proto_bin){keys, n_keys * key_bytes};
    return 0;
}

/* How long the daemon may wait for the shared tier: at most half of the caller's time. An answer
 * that comes too late does not even report local hits. */
static uint64_t lookup_wait_ms(const struct ucm_lookup *asked, int64_t deadline_ns)
{
    int64_t half_ms = (deadline_ns - client_now_ns()) / 2000000;

    if (half_ms < 1)
        return 1;
    if (asked->wait_ms > 0 && asked->wait_ms < half_ms)
        return asked->wait_ms;
    return half_ms < UCM_TIMEOUT_MS ? (uint64_t)half_ms : UCM_TIMEOUT_MS;
}

static uint64_t wait_bounded(uint32_t wait_ms)
{
    return wait_ms < UCM_TIMEOUT_MS ? wait_ms : UCM_TIMEOUT_MS;
}

static int lookup(struct ucm_namespace *ns, struct lookup *l, int timeout_ms)
{
    struct ucm_client *c = ns->handle.client;
    struct msg_lookup m = {.per_key = l->found != NULL,
                           .lease_ms = l->asked->lease_ms,
                           .shared = l->asked->shared != NULL,
                           .wait_mode = l->asked->wait_mode};
    struct client_request q = {UCM_METHOD_LOOKUP, &m, &ns->handle, .handle_id = &m.ns,
                               .request_id = &m.request};
    bool later = l->asked->wait_mode == UCM_WAIT_MODE_LATER;
    int64_t deadline_ns;
    int r;

    if (l->asked->lease_ms > 0 && !l->lease)
        return client_fail(UCM_EINVALID, "lease_ms is %u, but lease is NULL", l->asked->lease_ms);
    if (l->asked->wait_mode > UCM_WAIT_MODE_HERE)
        return client_fail(UCM_EINVALID,
                           "wait_mode is %u; it is one of enum ucm_wait_mode, 0 to %d",
                           l->asked->wait_mode, UCM_WAIT_MODE_HERE);
    if (later && !l->asked->pending)
        return client_fail(UCM_EINVALID, "wait_mode is UCM_WAIT_MODE_LATER, but pending is NULL");
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    m.wait_ms = l->asked->wait_mode == UCM_WAIT_MODE_HERE ? 1
                : later                                   ? wait_bounded(l->asked->wait_ms)
                                                          : lookup_wait_ms(l->asked, deadline_ns);
    r = client_keys_check(c, ns, l->asked->keys, l->asked->n_keys, &m.keys);
    if (r == 0 && l->asked->lease_ms)
        r = client_lease_prepare(c);
    if (r == 0)
        r = client_exchange(&l->call, c, lookup_take_cb, &q, deadline_ns);
    return client_leave(c, r);
}

int ucm_lookup_prefix(struct ucm_namespace *ns, const struct ucm_lookup *asked, int timeout_ms,
                      uint32_t *hits, uint32_t *in_dram, uint32_t *lease)
{
    struct lookup l = {.asked = asked, .hits = hits, .in_dram = in_dram, .lease = lease};

    if (!ns || !asked || !hits)
        return client_fail(UCM_EINVALID, "namespace, lookup or hits is NULL");
    return lookup(ns, &l, timeout_ms);
}

int ucm_lookup_per_key(struct ucm_namespace *ns, const struct ucm_lookup *asked, int timeout_ms,
                       uint8_t *found, uint32_t *hits, uint32_t *lease)
{
    struct lookup l = {.asked = asked, .found = found, .hits = hits, .lease = lease};

    if (!ns || !asked || !found)
        return client_fail(UCM_EINVALID, "namespace, lookup or found is NULL");
    return lookup(ns, &l, timeout_ms);
}

/* An ended lease, or one of a connection before, needs no daemon. */
static int release(struct ucm_client *c, uint32_t lease, int64_t deadline_ns)
{
    struct msg_release m;
    int r = 0;

    if (client_lease_find(c, lease) == 0)
        return 0;
    r = client_begin_same(c, deadline_ns);
    if (r == 0) {
        m.lease = client_lease_find(c, lease);
        if (m.lease == 0) {
            client_writer_release(c);
            return 0;
        }
        r = client_exchange_same(c, UCM_METHOD_RELEASE, &m, deadline_ns);
    }
    if (r == -UCM_ENOTFOUND || r == -UCM_EDISCONNECTED)
        r = 0;
    if (r == 0)
        client_lease_end(c, lease);
    return r;
}

int ucm_release(struct ucm_client *c, uint32_t lease, int timeout_ms)
{
    int r = client_enter_given(c, "client");

    if (r)
        return r;
    return client_leave(c, release(c, lease, client_deadline(c, timeout_ms)));
}

/* A followup leaves on the way out, or with a later call if the socket is full. If it is lost, the
 * lease runs out. */
int ucm_release_soon(struct ucm_client *c, uint32_t lease)
{
    uint32_t wire;
    int r = client_enter_given(c, "client");

    if (r)
        return r;
    wire = client_lease_find(c, lease);
    if (wire != 0) {
        client_followup(c, UCM_METHOD_RELEASE, wire);
        client_lease_end(c, lease);
    }
    return client_leave(c, 0);
}
