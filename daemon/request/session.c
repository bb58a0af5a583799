/* Sessions: a connection's life, from hello on. Each frame is decoded here and goes to its
 * method. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <errno.h>
#include <stdlib.h>

/* ---- hello ---- */

int method_hello(struct call *call)
{
    struct session *s = call->s;
    const struct config *config = s->rq->modules.config;
    static const char server[] = "ucmd " UCM_VERSION;
    const struct msg_hello *m = &call->params.hello;
    struct msg_hello_r r = {
        .version = m->version_max < UCM_PROTOCOL_VERSION ? m->version_max : UCM_PROTOCOL_VERSION,
        .server = {server, sizeof(server) - 1},
        .instance = {s->rq->modules.instance, 16},
        .tenant = {s->peer.tenant, (uint32_t)strlen(s->peer.tenant)},
        .admin = s->peer.admin,
        .max_frame_bytes = UCM_MAX_FRAME_BYTES,
        .max_keys = UCM_MAX_KEYS,
        .max_requests = config->max_requests_conn,
        .max_regions = CONFIG_MAX_REGIONS_CONN,
        .max_leases = CONFIG_MAX_LEASES_CONN,
        .max_lease_ms = config->lease_max_ms,
        .max_timeout_ms = UCM_TIMEOUT_MS,
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

/* ---- life ---- */

/* Features from `id` down end with it. */
static void features_close(struct session *s, unsigned id)
{
    while (id-- > 0)
        if (s->rq->modules.features[id]->session_close_cb)
            s->rq->modules.features[id]->session_close_cb(s);
}

static int features_open(struct session *s)
{
    int rc = 0;

    for (unsigned id = 0; id < FEATURES && rc == 0; id++) {
        const struct feature *f = s->rq->modules.features[id];

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

/* The last one first, as each may hold something of those before. True: all have ended. */
static bool features_end(struct session *s)
{
    bool (*end_cb)(struct session *);

    for (unsigned id = FEATURES; id-- > 0;) {
        end_cb = s->rq->modules.features[id]->session_end_cb;
        if (end_cb && !end_cb(s))
            return false;
    }
    return true;
}

static void features_gone(struct session *s)
{
    for (unsigned id = FEATURES; id-- > 0;)
        if (s->rq->modules.features[id]->session_gone_cb)
            s->rq->modules.features[id]->session_gone_cb(s);
}

static void settle_cb(struct session *s)
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
        (void)cache_wait_for(rq->modules.cache, &s->retry, WAIT_TURN);
        return;
    }
    pending_writes_end(rq->modules.cache, &s->pending_writes);
    features_close(s, FEATURES);
    session_ns_close_all(s);
    list_remove(&s->link);
    rq->n_sessions--;
    table_close(&s->regions);
    table_close(&s->stagings);
    table_close(&s->leases);
    conn_free(s->conn);
    session_free(s);
}

static void retry_cb(struct cache_retry *r)
{
    settle_cb(LIST_ENTRY(r, struct session, retry));
}

static void *open_cb(void *ctx, struct conn *conn, const struct peer *peer)
{
    struct requests *rq = ctx;
    struct session *s = calloc(1, sizeof(*s) + index_ns_places(rq->modules.index));

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
    s->settle_cb = settle_cb;
    pending_writes_init(&s->pending_writes);
    list_push_back(&rq->sessions, &s->link);
    rq->n_sessions++;
    return s;
}

/* As the method does. */
static int call_run_traced(struct call *call)
{
    struct requests *rq = call->s->rq;
    int rc;

    rq->trace_cb(call);
    rc = rq->modules.methods[call->method](call);
    if (call->trace)
        call->trace->end_cb(call->trace, (uint32_t)-rc);
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
    s->rq->modules.metrics->requests_total++;
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
    } else if (proto_decode(proto_methods[call.method].params, env, &call.params, &call.error) ==
                   0 &&
               (s->rq->trace_cb ? call_run_traced(&call)
                                : s->rq->modules.methods[call.method](&call)) == 0) {
        return;
    }
    session_reply(s, env->msgid, call.method, &call.error, NULL);
}

static void close_cb(void *session)
{
    struct session *s = session;
    struct list *node, *next;

    s->closing = true;
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
    s->settle_cb(s);
}

struct front_handler requests_handler(struct requests *rq)
{
    return (struct front_handler){
        .open_cb = open_cb, .frame_cb = frame_cb, .close_cb = close_cb, .ctx = rq};
}
