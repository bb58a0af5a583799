/* One call: what it names of its session, its answer, and what an operator keeps it from. */
#include "daemon/request/internal.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

/* ---- what a call names ---- */

bool call_operator(struct call *call)
{
    static const char *const but[] = {
        [PLACE_HERE] = "",
        [PLACE_CONTAINER] = "; from a container only if `container_admins` says so",
        [PLACE_USER_NS] = "; never from another user namespace, as this process's",
        [PLACE_UNKNOWN] = "; the daemon can't see where this process runs",
    };
    const struct peer *peer = &call->s->peer;

    if (!peer->admin)
        ucm_error_set(&call->error, UCM_WIRE_DENIED,
                      "%s is for operators: root, the daemon's own user, and whom `admins` names%s",
                      proto_methods[call->method].name.p, but[peer->place]);
    return peer->admin;
}

uint32_t session_name(uint32_t *names, uint32_t number)
{
    return number | ((*names)++ * UINT32_C(2654435761) & ~SESSION_NUMBERS);
}

int session_ns_open(struct call *call, struct ns *ns)
{
    struct session *s = call->s;
    uint8_t *flags = &s->ns[index_ns_place(s->rq->modules.index, ns)];
    uint32_t most = s->rq->modules.config->max_namespaces_tenant / 4;

    if (*flags & SESSION_NS_OPEN)
        return 0;
    if (most < SESSION_MIN_NAMESPACES)
        most = SESSION_MIN_NAMESPACES;
    if (!s->peer.admin && s->n_ns >= most)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has %u namespaces open; one may have a quarter of "
                             "limits.namespaces_per_tenant",
                             s->n_ns);
    *flags |= SESSION_NS_OPEN;
    s->n_ns++;
    index_ns_ref(s->rq->modules.index, ns);
    return 0;
}

void session_ns_close_all(struct session *s)
{
    struct index *ix = s->rq->modules.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        struct ns *ns = s->ns[place] & SESSION_NS_OPEN ? index_ns_at(ix, place) : NULL;

        if (ns)
            index_ns_unref(ix, ns);
    }
}

void session_ns_with_base(struct session *s, const struct ns *ns, const struct ns *base)
{
    const struct index *ix = s->rq->modules.index;

    s->ns[index_ns_place(ix, ns)] |=
        (uint8_t)(SESSION_NS_WITH_BASE | (s->ns[index_ns_place(ix, base)] & SESSION_NS_DURABLE));
}

bool session_durable(struct session *s, const struct ns *ns, uint64_t durability)
{
    if (durability == UCM_DURABILITY_DEFAULT)
        return s->ns[index_ns_place(s->rq->modules.index, ns)] & SESSION_NS_DURABLE;
    return durability == UCM_DURABILITY_NVME;
}

struct ns *call_namespace(struct call *call, uint64_t id)
{
    struct session *s = call->s;
    struct ns *ns = index_ns(s->rq->modules.index, (uint32_t)id);

    if (ns && s->ns[index_ns_place(s->rq->modules.index, ns)] & SESSION_NS_OPEN)
        return ns;
    if (ns && s->peer.admin)
        return session_ns_open(call, ns) == 0 ? ns : NULL;
    /* The same text whether or not it exists: other tenants must not learn that. */
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "namespace %llu is not open on this connection; call namespace.open first",
                  (unsigned long long)id);
    return NULL;
}

struct ns *call_stored_namespace(struct call *call, uint64_t id)
{
    const struct session *s = call->s;
    struct ns *ns = index_ns(s->rq->modules.index, (uint32_t)id);

    if (ns && (s->peer.admin || strcmp(ns->identity.tenant, s->peer.tenant) == 0))
        return ns;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "tenant \"%s\" has no namespace %llu; namespace.list lists those that there are",
                  s->peer.tenant, (unsigned long long)id);
    return NULL;
}

uint32_t call_keys(struct call *call, const struct ns *ns, struct proto_bin keys)
{
    uint32_t key_bytes = ns->identity.key_bytes, n = keys.n / key_bytes;

    if (keys.n % key_bytes != 0)
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "keys: %u bytes are no whole number of this namespace's %u-byte keys", keys.n,
                      key_bytes);
    else if (n > UCM_MAX_KEYS)
        ucm_error_set(&call->error, UCM_WIRE_INVALID, "keys: %u keys; a request has at most %u", n,
                      UCM_MAX_KEYS);
    else
        return n;
    return 0;
}

/* ---- answers and notifications ---- */

static void reply_error(struct session *s, uint32_t msgid, const struct ucm_error *e)
{
    struct proto_buf *out = &s->rq->out;

    s->rq->modules.metrics->requests_failed++;
    s->rq->modules.metrics->requests_busy += e->code == UCM_WIRE_BUSY;
    if (proto_response_error(out, msgid, e) != 0)
        conn_drop(s->conn, "no memory for an answer");
    else
        conn_send(s->conn, out);
}

void session_reply(struct session *s, uint32_t msgid, enum ucm_method method,
                   const struct ucm_error *e, const void *result)
{
    struct ucm_error unsent;

    if (s->closing)
        return;
    assert((e && e->code != 0) || (unsigned)method < UCM_METHOD_COUNT);
    if (e && e->code != 0)
        reply_error(s, msgid, e);
    else if (proto_response(&s->rq->out, msgid, proto_methods[method].result, result, &unsent) != 0)
        reply_error(s, msgid, &unsent);
    else
        conn_send(s->conn, &s->rq->out);
}

void session_reply_fds(struct session *s, uint32_t msgid, enum ucm_method method,
                       const void *result, const int *fds, uint32_t n)
{
    struct ucm_error unsent;
    bool sent = !s->closing && proto_response(&s->rq->out, msgid, proto_methods[method].result,
                                              result, &unsent) == 0;

    if (sent) {
        conn_send_fds(s->conn, &s->rq->out, fds, n);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        close(fds[i]);
    if (!s->closing)
        reply_error(s, msgid, &unsent);
}

void session_notify(struct session *s, const char *name, const struct proto_message *m,
                    const void *params)
{
    struct ucm_error e;

    if (s->closing)
        return;
    if (proto_notification(&s->rq->out, name, m, params, &e) != 0)
        conn_drop(s->conn, "no memory for a notification");
    else
        conn_send(s->conn, &s->rq->out);
}

int call_reply(struct call *call, const void *result)
{
    if (call->trace)
        trace_span(call->trace, SPAN_ANSWER, SPAN_ON);
    session_reply(call->s, call->msgid, call->method, NULL, result);
    return 0;
}

void call_map_begin(struct call *call, struct proto_builder *pb)
{
    proto_response_begin(pb, &call->s->rq->out, call->msgid);
}

int call_reply_map(struct call *call, struct proto_builder *pb)
{
    struct ucm_error e;

    if (proto_frame_end(pb, &e) != 0)
        reply_error(call->s, call->msgid, &e);
    else
        conn_send(call->s->conn, &call->s->rq->out);
    return 0;
}

bool session_progress(struct session *s, const struct msg_progress *m)
{
    struct ucm_error e;

    if (s->closing || conn_backed_up(s->conn) ||
        proto_notification(&s->rq->out, UCM_PROGRESS, &proto_progress, m, &e) != 0)
        return false;
    conn_send(s->conn, &s->rq->out);
    return true;
}

/* ---- what it may not touch ---- */

static bool is_of(const struct bypass *b, const struct ns *ns)
{
    if (b->of_ns)
        return memcmp(b->fingerprint, ns->fingerprint, sizeof(b->fingerprint)) == 0;
    return b->tenant[0] == '\0' || strcmp(b->tenant, ns->identity.tenant) == 0;
}

bool bypass_on(const struct requests *rq, const struct ns *ns, enum bypass_what what)
{
    for (uint32_t i = 0; i < rq->bypasses.n; i++)
        if (rq->bypasses.at[i].what & what && is_of(&rq->bypasses.at[i], ns))
            return true;
    return false;
}

int call_parts(struct call *call, uint64_t part, uint64_t parts, uint32_t of, uint32_t *n)
{
    if (part >= of || parts > of - part)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "part: %llu, parts: %llu; the namespace has %u, from 0",
                             (unsigned long long)part, (unsigned long long)parts, of);
    *n = parts > 0 ? (uint32_t)parts : of - (uint32_t)part;
    return 0;
}
