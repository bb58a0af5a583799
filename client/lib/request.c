#include "client/lib/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int encode(struct ucm_client *c, uint32_t msgid, const struct client_request *q,
                  struct ucm_error *e)
{
    struct proto_builder pb;

    c->out.n = 0;
    c->out.limit = PROTO_HEADER_BYTES + (size_t)c->max_frame_bytes;
    if (q->handle)
        *q->handle_id = q->handle->id;
    if (q->request_id)
        *q->request_id = client_request_id();
    if (!q->name)
        return proto_request(&c->out, msgid, q->method, proto_methods[q->method].params, q->params,
                             e);
    proto_request_begin(&pb, &c->out, msgid, q->name);
    proto_pack_raw(&pb.pk, q->params, q->packed_bytes);
    return proto_frame_end(&pb, e);
}

int client_request(struct client_call *call, const struct client_request *q, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    struct ucm_error e = {0};
    int r;

    client_call_reset(call);
    call->method = q->name ? UCM_METHOD_COUNT : q->method;
    client_call_link(call, client_msgid(c));
    r = encode(c, call->msgid, q, &e);
    r = r ? client_fail_wire(r, &e) : client_send(c, q->fds, q->n_fds, deadline_ns);
    if (r)
        client_call_unlink(call);
    client_writer_release(c);
    return r;
}

int client_request_wait(struct client_call *call, const struct client_request *q,
                        int64_t deadline_ns)
{
    int r = client_request(call, q, deadline_ns);

    if (r)
        return r;
    if (client_call_wait(call, deadline_ns) != 0)
        return client_call_orphan(call, q);
    return client_call_status(call);
}

int client_undo_cb(struct client_call *call, const union proto_any *m)
{
    struct ucm_client *c = call->client;

    if (call->method == UCM_METHOD_REGION_REGISTER)
        client_followup(c, UCM_METHOD_REGION_UNREGISTER, (uint32_t)m->region.region);
    else if (call->method == UCM_METHOD_RING_REGISTER)
        client_followup(c, UCM_METHOD_RING_UNREGISTER, (uint32_t)m->ring.ring);
    else if (call->method == UCM_METHOD_SEQUENCE_OPEN)
        client_followup(c, UCM_METHOD_SEQUENCE_CLOSE, (uint32_t)m->sequence.sequence);
    else if (call->method == UCM_METHOD_MAPPING_OPEN)
        client_followup(c, UCM_METHOD_MAPPING_CLOSE, (uint32_t)m->mapping_open_r.mapping);
    else if (m->lookup_r.lease != 0)
        client_followup(c, UCM_METHOD_RELEASE, (uint32_t)m->lookup_r.lease);
    return 0;
}

static void orphan_done_cb(struct client_call *call)
{
    call->client->n_orphans--;
    client_call_close(call);
    free(call);
}

/* Takes the place in the table of a call that was given up, to undo what its late answer brings.
 * Lookups and sequences leave some places to registrations. */
static bool orphan_new(const struct client_call *call, bool registers)
{
    struct ucm_client *c = call->client;
    unsigned most = registers ? CLIENT_ORPHANS : CLIENT_ORPHANS / 2;
    struct client_call *orphan = c->n_orphans < most ? malloc(sizeof *orphan) : NULL;

    if (!orphan)
        return false;
    client_call_init(orphan, c, client_undo_cb, orphan_done_cb);
    orphan->method = call->method;
    client_call_link(orphan, call->msgid);
    c->n_orphans++;
    return true;
}

/* A lookup's lease and a sequence run out by themselves; a registration would stay. */
int client_call_orphan(struct client_call *call, const struct client_request *q)
{
    bool registers = call->method == UCM_METHOD_REGION_REGISTER ||
                     call->method == UCM_METHOD_RING_REGISTER ||
                     call->method == UCM_METHOD_MAPPING_OPEN;
    bool leases = call->method == UCM_METHOD_LOOKUP || call->method == UCM_METHOD_SEQUENCE_OPEN;

    client_call_unlink(call);
    if ((registers || leases) && !orphan_new(call, registers) && registers)
        client_link_break(call->client, UCM_EDISCONNECTED, "ucmd answers no registration");
    return client_fail(UCM_EDEADLINE, "ucmd did not answer %s in time",
                       q->name ? q->name : proto_methods[q->method].name.p);
}

/* A cancel may be lost, and a lease or a sequence runs out by itself. A registration or a mapping
 * would stay. */
void client_followup_params(struct ucm_client *c, enum ucm_method method, const void *params)
{
    struct ucm_error e;

    if (c->link != LINK_UP)
        return;
    if (proto_request(&c->followups, client_msgid(c), method, proto_methods[method].params, params,
                      &e) != 0 &&
        (method == UCM_METHOD_REGION_UNREGISTER || method == UCM_METHOD_RING_UNREGISTER ||
         method == UCM_METHOD_MAPPING_CLOSE || method == UCM_METHOD_MAPPING_RELEASE))
        client_link_break(c, UCM_EDISCONNECTED, "ucmd does not read");
}

void client_followup(struct ucm_client *c, enum ucm_method method, uint32_t id)
{
    union proto_any params;

    switch (method) {
    case UCM_METHOD_CANCEL:
        params.cancel.msgid = id;
        break;
    case UCM_METHOD_RELEASE:
        params.release.lease = id;
        break;
    case UCM_METHOD_RING_UNREGISTER:
        params.ring.ring = id;
        break;
    case UCM_METHOD_SEQUENCE_CLOSE:
        params.sequence.sequence = id;
        break;
    case UCM_METHOD_MAPPING_CLOSE:
        params.mapping.mapping = id;
        break;
    default:
        params.region.region = id;
    }
    client_followup_params(c, method, &params);
}

/* Runs on the way out of other calls, so it never blocks and leaves ucm_errmsg alone. What does not
 * fit into the socket leaves with a later call. */
void client_followup_flush(struct ucm_client *c)
{
    ssize_t n;

    if (c->link != LINK_UP || c->writing)
        return;
    n = send(c->fd, c->followups.p, c->followups.n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n < 0 || (size_t)n < c->followups.n)
        client_link_break(c, UCM_EDISCONNECTED,
                          n < 0 ? strerror(errno)
                                : "the socket filled up in the middle of a cancel");
    c->followups.n = 0;
}
