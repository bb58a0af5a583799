/* Answers and notifications of a session; who may call what. */
#include "daemon/request/internal.h"

#include <unistd.h>

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
