/* Requests: what goes on after its call, within limits, until its answer. */
#include "daemon/request/internal.h"

#include <stdlib.h>

static void expired_cb(struct deadline *d)
{
    struct request *r = LIST_ENTRY(d, struct request, deadline);

    r->s->rq->modules.metrics->requests_deadline++;
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

void *request_new(struct call *call, size_t bytes, size_t more, uint64_t timeout_ms,
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
    if (s->n_requests >= rq->modules.config->max_requests_conn) {
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
    if (timeout_ms == 0)
        timeout_ms = rq->modules.config->request_timeout_ms;
    deadline_arm(rq->modules.deadlines, &r->deadline, uv_now(rq->modules.loop) + timeout_ms,
                 expired_cb);
    list_push_back(&s->requests, &r->link);
    list_push_back(&rq->active, &r->link_all);
    s->n_requests++;
    rq->modules.metrics->requests_active = ++rq->n_active;
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
    deadline_disarm(rq->modules.deadlines, &r->deadline);
    list_remove(&r->link);
    list_remove(&r->link_all);
    s->n_requests--;
    limit_give(s->peer.owner, LIMIT_MEMORY, r->memory);
    limit_give(s->peer.owner, LIMIT_REQUESTS, 1);
    rq->modules.metrics->requests_active = --rq->n_active;
    free(r);
    if (s->closing)
        s->settle_cb(s);
}

void request_refuse(struct request *r, const struct call *call)
{
    r->silent = true; /* the error is its call's answer */
    request_end(r, &call->error, NULL);
}

/* ---- memory of a session that no request has ---- */

bool memory_take(struct session *s, size_t bytes)
{
    return limit_take(s->peer.owner, LIMIT_MEMORY, bytes, NULL) == 0;
}

void memory_return(struct session *s, size_t bytes)
{
    limit_give(s->peer.owner, LIMIT_MEMORY, bytes);
}

void *memory_alloc(struct session *s, size_t bytes)
{
    bool taken = memory_take(s, bytes);
    void *memory = taken ? calloc(1, bytes) : NULL;

    if (taken && !memory)
        memory_return(s, bytes);
    return memory;
}

/* ---- cancel ---- */

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
