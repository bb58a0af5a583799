/* region.register and region.unregister. A region's jobs are awaited before its mapping is closed,
 * and the mapping's end before the answer: then the worker may free its memory. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

static void region_delete(struct session_region *r)
{
    struct session *s = r->s;

    table_remove(&s->regions, r->number);
    region_free(r->region);
    free(r);
    s->rq->rooms.metrics->regions--;
    session_settle(s);
}

struct pending_request {
    struct request r;
    struct list node;
};

void pending_answer(struct session *s, struct list *pending, const struct ucm_error *e,
                    const struct proto_message *m, const void *result)
{
    struct list *node;

    while ((node = list_pop_front(pending)) != NULL) {
        struct pending_request *q = LIST_ENTRY(node, struct pending_request, node);

        if (e && !s->closing)
            session_reply_error(s, q->r.msgid, e);
        else
            session_reply(s, q->r.msgid, m, result);
        request_end(&q->r);
        free(q);
    }
}

/* Opening and closing a mapping can't be stopped half way; their ends are near and come by
 * themselves. */
static void pending_stop_cb(struct request *q)
{
    (void)q;
}

/* The device promises to take every open and every close. */
static void region_submit(struct session_region *r)
{
    struct device *device = r->region->device;
    int rc = device->ops->submit(device, &r->job);

    assert(rc == 0);
    (void)rc;
}

/* ---- closing ---- */

static void closed_cb(struct device_job *job, int status)
{
    struct session_region *r = LIST_ENTRY(job, struct session_region, job);

    /* A device that failed for good has nothing mapped any more. */
    pending_answer(r->s, &r->pending, status == 0 ? NULL : &job->error, &proto_none, NULL);
    region_delete(r);
}

static void close_send(struct session_region *r)
{
    r->close_sent = true;
    r->job = (struct device_job){.op = DEVICE_CLOSE, .region = r->region, .done = closed_cb};
    region_submit(r);
}

static void region_close(struct session_region *r)
{
    if (r->state == REGION_OPENING)
        return; /* opened_cb sees that the session closes */
    r->state = REGION_CLOSING;
    if (r->transfers == 0 && !r->close_sent)
        close_send(r);
}

void region_transfer_ended(struct session_region *r)
{
    r->transfers--;
    if (r->state == REGION_CLOSING && r->transfers == 0 && !r->close_sent)
        close_send(r);
}

void regions_close_all(struct session *s)
{
    for (uint32_t i = table_next(&s->regions, 0); i; i = table_next(&s->regions, i))
        region_close(table_get(&s->regions, i));
}

/* ---- opening ---- */

static void opened_cb(struct device_job *job, int status)
{
    struct session_region *r = LIST_ENTRY(job, struct session_region, job);

    if (status != 0) {
        pending_answer(r->s, &r->pending, &job->error, NULL, NULL);
        region_delete(r);
        return;
    }
    r->state = REGION_OPEN;
    pending_answer(r->s, &r->pending, NULL, &proto_region, &(struct msg_region){r->name});
    if (r->s->closing)
        session_settle(r->s);
}

int pending_start(struct call *call, struct list *pending)
{
    struct pending_request *q = calloc(1, sizeof(*q));
    int rc;

    if (!q)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    q->r.stop_cb = pending_stop_cb;
    rc = request_start(call, &q->r, sizeof(*q), 0);
    if (rc != 0) {
        free(q);
        return rc;
    }
    list_push_back(pending, &q->node);
    return 0;
}

static int region_open(struct call *call, struct session_region *r)
{
    int rc = pending_start(call, &r->pending);

    if (rc != 0)
        return rc;
    r->state = REGION_OPENING;
    r->job = (struct device_job){.op = DEVICE_OPEN, .region = r->region, .done = opened_cb};
    region_submit(r);
    return 0;
}

int fds_all_taken(struct call *call)
{
    for (uint32_t i = 0; i < call->n_fds; i++)
        if (call->fds[i] >= 0)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "%u descriptors came and nothing names the one at place %u",
                                 call->n_fds, i);
    return 0;
}

int method_region_register(struct call *call)
{
    struct session *s = call->s;
    struct msg_region_register m;
    struct session_region *r;
    struct device *device;
    struct ns *ns;
    int rc = proto_decode(&proto_region_register, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    ns = call_namespace(call, m.ns);
    if (!ns)
        return -call->error.code;
    if (m.part >= ns->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "part: %llu; this namespace has parts 0 to %u",
                             (unsigned long long)m.part, ns->identity.parts - 1);
    device = device_set_find(s->rq->rooms.devices, m.device, m.gpu, &call->error);
    if (!device)
        return -call->error.code;
    r = calloc(1, sizeof(*r));
    if (!r)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a region");
    r->s = s;
    r->ns = ns;
    list_init(&r->pending);
    rc = region_check(&m, ns->identity.shards[m.part], ns->identity.shard_bytes, call->fds,
                      call->n_fds, &r->region, &call->error);
    if (rc != 0)
        goto err_after_alloc;
    rc = fds_all_taken(call);
    if (rc != 0)
        goto err_after_check;
    r->region->device = device;
    r->region->pid = s->peer.pid;
    r->region->owner = (uint64_t)(uintptr_t)s;
    r->region->peer_fd = &s->peer.fd;
    r->number = table_add(&s->regions, r);
    if (r->number == 0) {
        rc = ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "this connection has %u regions, as many as limits.regions_per_connection "
            "allows",
            table_count(&s->regions));
        goto err_after_check;
    }
    r->name = session_name(&s->region_names, r->number);
    rc = region_open(call, r);
    if (rc != 0)
        goto err_after_table;
    s->rq->rooms.metrics->regions++;
    return 0;

err_after_table:
    table_remove(&s->regions, r->number);
err_after_check:
    region_free(r->region);
err_after_alloc:
    free(r);
    return rc;
}

static void region_unknown(struct call *call, uint64_t name)
{
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "region %llu is not registered on this connection", (unsigned long long)name);
}

static struct session_region *region_named(struct call *call, uint64_t name)
{
    struct session_region *r = table_get(&call->s->regions, session_number(name));

    if (r && r->name == name && r->state != REGION_OPENING)
        return r;
    region_unknown(call, name);
    return NULL;
}

struct session_region *call_region(struct call *call, uint64_t name)
{
    struct session_region *r = region_named(call, name);

    if (r && r->state == REGION_OPEN)
        return r;
    region_unknown(call, name);
    return NULL;
}

/* One that closes already is waited for: that it is unknown would say that its memory is free. */
int method_region_unregister(struct call *call)
{
    struct msg_region m;
    struct session_region *r;
    int rc = proto_decode(&proto_region, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    r = region_named(call, m.region);
    if (!r)
        return -call->error.code;
    rc = pending_start(call, &r->pending);
    if (rc != 0 || r->state == REGION_CLOSING)
        return rc;
    transfers_stop_region(r);
    region_close(r);
    return 0;
}
