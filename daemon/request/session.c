/* Sessions: a connection's state. Each frame is decoded here and goes to its method. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"
#include "daemon/request/view.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- answers ---- */

static void reply_error(struct session *s, uint32_t msgid, const struct ucm_error *e)
{
    struct proto_buf *out = &s->rq->out;

    s->rq->rooms.metrics->requests_failed++;
    s->rq->rooms.metrics->requests_busy += e->code == UCM_WIRE_BUSY;
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
    if (e && e->code != 0)
        reply_error(s, msgid, e);
    else if (proto_response(&s->rq->out, msgid, proto_method_result(method), result, &unsent) != 0)
        reply_error(s, msgid, &unsent);
    else
        conn_send(s->conn, &s->rq->out);
}

void session_reply_fds(struct session *s, uint32_t msgid, enum ucm_method method,
                       const void *result, const int *fds, uint32_t n)
{
    struct ucm_error unsent;
    bool sent = !s->closing && proto_response(&s->rq->out, msgid, proto_method_result(method),
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
    trace_set(call->trace, TRACE_ANSWER, true);
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

    if (proto_response_end(pb, &e) != 0)
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

/* ---- what a call names ---- */

uint8_t *session_ns_flags(struct session *s, const struct ns *ns)
{
    return &s->ns[index_ns_place(s->rq->rooms.index, ns)];
}

int session_ns_open(struct call *call, struct ns *ns)
{
    struct session *s = call->s;
    uint8_t *flags = session_ns_flags(s, ns);
    uint32_t most = s->rq->rooms.config->max_namespaces_tenant / 4;

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
    index_ns_use(s->rq->rooms.index, ns);
    return 0;
}

static void ns_close_all(struct session *s)
{
    struct index *ix = s->rq->rooms.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        struct ns *ns = s->ns[place] & SESSION_NS_OPEN ? index_ns_at(ix, place) : NULL;

        if (ns)
            index_ns_unuse(ix, ns);
    }
}

struct view session_view(struct session *s, struct ns *ns)
{
    struct view v = {.ns = {ns}, .n = 1};

    if (*session_ns_flags(s, ns) & SESSION_NS_WITH_BASE)
        v = (struct view){.ns = {ns, ns->base}, .n = 2};
    return v;
}

void session_ns_with_base(struct session *s, const struct ns *ns, const struct ns *base)
{
    *session_ns_flags(s, ns) |=
        (uint8_t)(SESSION_NS_WITH_BASE | (*session_ns_flags(s, base) & SESSION_NS_DURABLE));
}

struct ns *call_namespace(struct call *call, uint64_t id)
{
    struct session *s = call->s;
    struct ns *ns = index_ns(s->rq->rooms.index, (uint32_t)id);

    if (ns && *session_ns_flags(s, ns) & SESSION_NS_OPEN)
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
    struct ns *ns = index_ns(s->rq->rooms.index, (uint32_t)id);

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
                      proto_method_name(call->method), but[peer->place]);
    return peer->admin;
}

/* ---- hello, namespaces ---- */

int method_hello(struct call *call)
{
    struct session *s = call->s;
    const struct config *config = s->rq->rooms.config;
    static const char server[] = "ucmd " UCM_VERSION;
    const struct msg_hello *m = &call->params.hello;
    struct msg_hello_r r = {
        .version = m->version_max < UCM_PROTOCOL_VERSION ? m->version_max : UCM_PROTOCOL_VERSION,
        .server = {server, sizeof(server) - 1},
        .instance = {s->rq->rooms.instance, 16},
        .tenant = {s->peer.tenant, (uint32_t)strlen(s->peer.tenant)},
        .admin = s->peer.admin,
        .max_frame_bytes = UCM_MAX_FRAME_BYTES,
        .max_keys = UCM_MAX_KEYS,
        .max_requests = config->max_requests_conn,
        .max_regions = CONFIG_MAX_REGIONS_CONN,
        .max_leases = CONFIG_MAX_LEASES_CONN,
        .max_lease_ms = config->lease_max_ms,
        .max_deadline_ms = UCM_DEADLINE_MS,
    };

    if (m->version_min > m->version_max)
        return ucm_error_set(
            &call->error, UCM_WIRE_INVALID, "version_max: %llu; it is at least version_min, %llu",
            (unsigned long long)m->version_max, (unsigned long long)m->version_min);
    if (m->version_min > UCM_PROTOCOL_VERSION || m->version_max < UCM_PROTOCOL_VERSION_MIN)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "this daemon speaks versions %d to %d, the client %llu to %llu",
                             UCM_PROTOCOL_VERSION_MIN, UCM_PROTOCOL_VERSION,
                             (unsigned long long)m->version_min,
                             (unsigned long long)m->version_max);
    s->hello = true;
    conn_welcome(s->conn);
    return call_reply(call, &r);
}

static bool str_equal(struct proto_str a, const char *b)
{
    return a.n == strlen(b) && memcmp(a.p, b, a.n) == 0;
}

/* Identity strings become C strings: a NUL inside would cut one short and make two that differ
 * alike. */
static int text_copy(struct call *call, const char *field, struct proto_str from,
                     char to[UCM_MAX_NAME_BYTES + 1])
{
    if (from.n > 0 && memchr(from.p, '\0', from.n))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s: text may not hold a NUL byte",
                             field);
    if (from.n > 0)
        memcpy(to, from.p, from.n);
    to[from.n] = '\0';
    return 0;
}

static int shards_expand(struct call *call, const struct msg_ns_open *m,
                         uint32_t shards[UCM_MAX_PARTS])
{
    uint64_t limit = arena_extent_bytes(call->s->rq->rooms.arena);

    if (m->shards.n != 1 && m->shards.n != m->parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shards: %u numbers; give one for all parts, or one for each of %llu",
                             m->shards.n, (unsigned long long)m->parts);
    for (uint32_t i = 0; i < m->parts; i++) {
        shards[i] = m->shards.p[m->shards.n == 1 ? 0 : i];
        if (shards[i] < 1 || shards[i] > UCM_MAX_SHARDS)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID, "shards: %u; a part has 1 to %u",
                                 shards[i], UCM_MAX_SHARDS);
        if (shards[i] * m->shard_bytes > limit)
            return ucm_error_set(
                &call->error, UCM_WIRE_INVALID,
                "a part of %u shards of %llu bytes is longer than arena.extent, %llu", shards[i],
                (unsigned long long)m->shard_bytes, (unsigned long long)limit);
    }
    return 0;
}

static int ns_open_checked(struct call *call, const struct msg_ns_open *m, struct ns **out)
{
    struct session *s = call->s;
    char model[UCM_MAX_NAME_BYTES + 1], revision[UCM_MAX_NAME_BYTES + 1];
    char dtype[UCM_MAX_NAME_BYTES + 1], layout[UCM_MAX_NAME_BYTES + 1];
    uint32_t shards[UCM_MAX_PARTS];
    struct ns_identity id = {
        .tenant = s->peer.tenant,
        .model = model,
        .revision = revision,
        .dtype = dtype,
        .layout = layout,
        .block_tokens = (uint32_t)m->block_tokens,
        .key_bytes = (uint32_t)m->key_bytes,
        .parts = (uint32_t)m->parts,
        .shards = shards,
        .shard_bytes = m->shard_bytes,
        .salt = m->salt.p,
        .salt_bytes = m->salt.n,
    };
    int rc = shards_expand(call, m, shards);

    if (rc == 0)
        rc = text_copy(call, "model", m->model, model);
    if (rc == 0)
        rc = text_copy(call, "revision", m->revision, revision);
    if (rc == 0)
        rc = text_copy(call, "dtype", m->dtype, dtype);
    if (rc == 0)
        rc = text_copy(call, "layout", m->layout, layout);
    return rc != 0 ? rc : index_ns_open(s->rq->rooms.index, &id, owner_of(s), out, &call->error);
}

bool session_durable(struct session *s, const struct ns *ns, uint64_t durability)
{
    if (durability == UCM_DURABILITY_DEFAULT)
        return *session_ns_flags(s, ns) & SESSION_NS_DURABLE;
    return durability == UCM_DURABILITY_NVME;
}

int method_ns_open(struct call *call)
{
    struct session *s = call->s;
    const struct msg_ns_open *m = &call->params.ns_open;
    uint8_t names[UCM_FINGERPRINT_BYTES];
    struct msg_ns_open_r r;
    struct ns *ns;
    int rc;

    if (m->tenant.n > 0 && !str_equal(m->tenant, s->peer.tenant))
        return ucm_error_set(
            &call->error, UCM_WIRE_DENIED,
            "uid %u belongs to tenant \"%s\"; the config's `tenants` says who may act "
            "for another",
            (unsigned)s->peer.uid, s->peer.tenant);
    rc = ns_open_checked(call, m, &ns);
    if (rc == 0)
        rc = session_ns_open(call, ns);
    if (rc != 0)
        return rc;
    /* Its names on shared roots, which may have to be read, are there for the first lookup then. */
    (void)cache_shared_fingerprint(s->rq->rooms.cache, ns, names);
    *session_ns_flags(s, ns) &= (uint8_t)~SESSION_NS_DURABLE;
    if (m->durability == UCM_DURABILITY_NVME)
        *session_ns_flags(s, ns) |= SESSION_NS_DURABLE;
    r = (struct msg_ns_open_r){.ns = ns->id,
                               .fingerprint = {ns->fingerprint, UCM_FINGERPRINT_BYTES}};
    return call_reply(call, &r);
}

/* ---- life ---- */

static void retry_cb(struct cache_retry *r)
{
    session_settle(LIST_ENTRY(r, struct session, retry));
}

/* Features from `id` down end with it. */
static void features_close(struct session *s, unsigned id)
{
    while (id-- > 0)
        if (s->rq->rooms.features[id]->session_close_cb)
            s->rq->rooms.features[id]->session_close_cb(s);
}

static int features_open(struct session *s)
{
    int rc = 0;

    for (unsigned id = 0; id < FEATURES && rc == 0; id++) {
        const struct feature *f = s->rq->rooms.features[id];

        if (f->session_bytes > 0 && !(s->ext[id] = calloc(1, f->session_bytes)))
            rc = -ENOMEM;
        if (rc == 0 && f->session_open_cb)
            rc = f->session_open_cb(s);
        if (rc != 0)
            features_close(s, id);
    }
    return rc;
}

static void session_free(struct session *s)
{
    for (unsigned id = 0; id < FEATURES; id++)
        free(s->ext[id]);
    free(s);
}

static void *open_cb(void *ctx, struct conn *conn, const struct peer *peer)
{
    struct requests *rq = ctx;
    struct session *s = calloc(1, sizeof(*s) + index_ns_places(rq->rooms.index));

    if (!s)
        return NULL;
    s->rq = rq;
    s->conn = conn;
    s->peer = *peer;
    if (features_open(s) != 0) {
        session_free(s);
        return NULL;
    }
    table_init(&s->regions, CONFIG_MAX_REGIONS_CONN);
    table_init(&s->stagings, DEVICE_GPUS_MAX);
    table_init(&s->leases, CONFIG_MAX_LEASES_CONN);
    list_init(&s->laters);
    list_init(&s->requests);
    list_init(&s->retry.link);
    s->retry.retry_cb = retry_cb;
    cache_fills_init(&s->fills);
    list_push_back(&rq->sessions, &s->link);
    rq->n_sessions++;
    return s;
}

/* Runs the method. 0 or its code, with call->error. */
static int call_run(struct call *call)
{
    struct trace *trace = &call->s->rq->trace;
    int rc;

    if (trace_writing(trace))
        call_trace_begin(call);
    rc = call->s->rq->rooms.methods[call->method](call);
    if (call->trace)
        trace_end(trace, call->trace, (uint32_t)-rc);
    return rc;
}

static void frame_cb(void *session, struct proto_envelope *env, int *fds, uint32_t n_fds)
{
    struct session *s = session;
    struct call call = {
        .s = s, .msgid = env->msgid, .fds = fds, .n_fds = n_fds, .begun_ns = uv_hrtime()};
    int method;

    if (env->type != PROTO_REQUEST) {
        ucm_error_set(&call.error, UCM_WIRE_INVALID, "a client sends requests [0, ...] only");
        conn_offend(s->conn, &call.error);
        return;
    }
    s->rq->rooms.metrics->requests_total++;
    method = proto_method_find(env->method);
    call.method = (enum ucm_method)method;
    if (method < 0) {
        char name[65];

        proto_quote(env->method, name, sizeof(name));
        ucm_error_set(&call.error, UCM_WIRE_NO_METHOD, "unknown method \"%s\"", name);
    } else if (!s->hello && method != UCM_METHOD_HELLO) {
        ucm_error_set(&call.error, UCM_WIRE_INVALID, "the first call of a connection is hello");
    } else if (n_fds > 0 && method != UCM_METHOD_REGION_REGISTER &&
               method != UCM_METHOD_RING_REGISTER) {
        ucm_error_set(&call.error, UCM_WIRE_INVALID,
                      "only region.register and ring.register take descriptors");
    } else if (proto_decode(proto_method_params(call.method), env, &call.params, &call.error) ==
                   0 &&
               call_run(&call) == 0) {
        return;
    }
    reply_error(s, env->msgid, &call.error);
}

/* The last one first, as each may hold something of those before. True: all have ended. */
static bool features_end(struct session *s)
{
    bool (*end_cb)(struct session *);

    for (unsigned id = FEATURES; id-- > 0;) {
        end_cb = s->rq->rooms.features[id]->session_end_cb;
        if (end_cb && !end_cb(s))
            return false;
    }
    return true;
}

static void features_gone(struct session *s)
{
    for (unsigned id = FEATURES; id-- > 0;)
        if (s->rq->rooms.features[id]->session_gone_cb)
            s->rq->rooms.features[id]->session_gone_cb(s);
}

void session_settle(struct session *s)
{
    struct requests *rq = s->rq;

    if (!s->closing || s->n_requests > 0 || !list_empty(&s->retry.link))
        return;
    registered_close_all(s);
    if (table_count(&s->regions) > 0 || table_count(&s->stagings) > 0)
        return;
    if (!features_end(s))
        return;
    if (!leases_end(s)) {
        (void)cache_wait_for(rq->rooms.cache, &s->retry, WAIT_TURN);
        return;
    }
    cache_fills_end(rq->rooms.cache, &s->fills);
    features_close(s, FEATURES);
    ns_close_all(s);
    list_remove(&s->link);
    rq->n_sessions--;
    table_close(&s->regions);
    table_close(&s->stagings);
    table_close(&s->leases);
    conn_free(s->conn);
    session_free(s);
}

static void close_cb(void *session)
{
    struct session *s = session;
    struct list *node, *next;

    s->closing = true;
    tracing_session_ended(s);
    features_gone(s);
    lookups_later_end(s);
    /* stop_cb may end the request at once; none of them frees a session that has requests left. */
    s->n_requests++;
    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);

        next = node->next;
        r->stop_cb(r);
    }
    s->n_requests--;
    session_settle(s);
}

struct front_handler requests_handler(struct requests *rq)
{
    return (struct front_handler){
        .open_cb = open_cb, .frame_cb = frame_cb, .close_cb = close_cb, .ctx = rq};
}
