/* What is answered: at once, or by a request, which ends with its answer. */
#include "daemon/request/internal.h"

#include <stdlib.h>
#include <unistd.h>

/* ---- answers and notifications ---- */

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

/* ---- requests ---- */

static void expired_cb(struct deadline *d)
{
    struct request *r = LIST_ENTRY(d, struct request, deadline);

    r->s->rq->rooms.metrics->requests_deadline++;
    r->stop_cb(r);
}

/* False with call->error: trying again would not help. */
static bool memory_may_fit(struct call *call, size_t bytes)
{
    uint64_t most = limit_most(call->s->peer.owner, LIMIT_MEMORY);

    if (bytes > most)
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "this request takes %zu bytes of memory, of limits.frame_memory it may have "
                      "%llu; ask for less at once",
                      bytes, (unsigned long long)most);
    return bytes <= most;
}

void *request_new(struct call *call, size_t bytes, size_t more, uint64_t deadline_ms,
                  void (*stop_cb)(struct request *r))
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    struct limit_owner *owner = s->peer.owner;
    size_t memory = bytes + more;
    struct request *r;
    bool taken;

    if (rq->draining && !call->gives_back) {
        ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
        return NULL;
    }
    if (s->n_requests >= rq->rooms.config->max_requests_conn) {
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u requests under way, as many as "
                      "limits.requests_per_connection allows",
                      s->n_requests);
        return NULL;
    }
    if (limit_take(owner, LIMIT_REQUESTS, 1, &call->error) != 0)
        return NULL;
    taken = (limit_few(owner, LIMIT_MEMORY, memory) || memory_may_fit(call, memory)) &&
            limit_take(owner, LIMIT_MEMORY, memory, &call->error) == 0;
    r = taken ? calloc(1, bytes) : NULL;
    if (!r) {
        limit_give(owner, LIMIT_REQUESTS, 1);
        if (!taken)
            return NULL;
        limit_give(owner, LIMIT_MEMORY, memory);
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
        return NULL;
    }
    *r = (struct request){.s = s,
                          .msgid = call->msgid,
                          .method = call->method,
                          .gives_back = call->gives_back,
                          .begun_ns = call->begun_ns,
                          .memory = memory,
                          .stop_cb = stop_cb,
                          .trace = call->trace};
    call->trace = NULL;
    if (deadline_ms == 0)
        deadline_ms = rq->rooms.config->deadline_ms;
    deadline_arm(rq->rooms.deadlines, &r->deadline, uv_now(rq->rooms.loop) + deadline_ms,
                 expired_cb);
    list_push_back(&s->requests, &r->link);
    list_push_back(&rq->active, &r->link_all);
    s->n_requests++;
    rq->rooms.metrics->requests_active = ++rq->n_active;
    return r;
}

void request_end(struct request *r, const struct ucm_error *e, const void *result)
{
    struct session *s = r->s;
    struct requests *rq = s->rq;

    if (r->trace)
        trace_span(r->trace, SPAN_ANSWER, SPAN_MORE);
    if (!r->silent)
        session_reply(s, r->msgid, r->method, e, result);
    if (r->trace)
        r->trace->end_cb(r->trace, e ? (uint32_t)e->code : 0);
    deadline_disarm(rq->rooms.deadlines, &r->deadline);
    list_remove(&r->link);
    list_remove(&r->link_all);
    s->n_requests--;
    limit_give(s->peer.owner, LIMIT_MEMORY, r->memory);
    limit_give(s->peer.owner, LIMIT_REQUESTS, 1);
    rq->rooms.metrics->requests_active = --rq->n_active;
    free(r);
    if (s->closing)
        s->settle_cb(s);
}

void request_refuse(struct request *r, const struct call *call)
{
    r->silent = true; /* the error is its call's answer */
    request_end(r, &call->error, NULL);
}

int method_cancel(struct call *call)
{
    struct session *s = call->s;
    const struct msg_cancel *m = &call->params.cancel;
    struct msg_cancel_r result = {0};

    for (struct list *n = s->requests.next; n != &s->requests; n = n->next) {
        struct request *r = LIST_ENTRY(n, struct request, link);

        /* Mapping and unmapping can't be stopped half way; their ends are near. */
        if (r->msgid != m->msgid || r->gives_back || r->method == UCM_METHOD_REGION_REGISTER ||
            r->method == UCM_METHOD_RING_REGISTER)
            continue;
        r->stop_cb(r);
        result.cancelled = true;
        break;
    }
    return call_reply(call, &result);
}
