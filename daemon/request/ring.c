/* ring.register and ring.unregister. A ring may be closed at any time: copies that may go through
 * it are awaited by the device, and later ones don't get to see it. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RING_GRAIN 4096u /* slices are whole pages */

struct session_ring {
    struct session *s;
    struct device_staging ring;
    uint32_t number, name; /* in the session's table, and on the wire */
    enum { RING_OPENING, RING_OPEN, RING_CLOSING } state;
    struct device_job job;
    struct list pending; /* the register, or unregisters, that wait for the job */
};

static void ring_delete(struct session_ring *r)
{
    struct session *s = r->s;

    table_remove(&s->rings, r->number);
    if (r->ring.fd >= 0)
        close(r->ring.fd);
    free(r);
    session_settle(s);
}

/* The device promises to take every open and every close. */
static void ring_submit(struct session_ring *r, enum device_op op,
                        void (*done)(struct device_job *job, int status))
{
    int rc;

    r->job = (struct device_job){.op = op, .ring = &r->ring, .done = done};
    rc = r->ring.device->ops->submit(r->ring.device, &r->job);
    assert(rc == 0);
    (void)rc;
}

static void closed_cb(struct device_job *job, int status)
{
    struct session_ring *r = LIST_ENTRY(job, struct session_ring, job);

    pending_answer(r->s, &r->pending, status == 0 ? NULL : &job->error, &proto_none, NULL);
    ring_delete(r);
}

static void ring_close(struct session_ring *r)
{
    if (r->state != RING_OPEN)
        return; /* it closes already, or opened_cb sees that the session closes */
    r->state = RING_CLOSING;
    ring_submit(r, DEVICE_STAGING_CLOSE, closed_cb);
}

void rings_close_all(struct session *s)
{
    for (uint32_t i = table_next(&s->rings, 0); i; i = table_next(&s->rings, i))
        ring_close(table_get(&s->rings, i));
}

static void opened_cb(struct device_job *job, int status)
{
    struct session_ring *r = LIST_ENTRY(job, struct session_ring, job);

    if (status != 0) {
        pending_answer(r->s, &r->pending, &job->error, NULL, NULL);
        ring_delete(r);
        return;
    }
    r->state = RING_OPEN;
    pending_answer(r->s, &r->pending, NULL, &proto_ring, &(struct msg_ring){r->name});
    if (r->s->closing)
        session_settle(r->s);
}

/* In any state. */
static bool device_has_ring(const struct session *s, const struct device *device)
{
    for (uint32_t i = table_next(&s->rings, 0); i; i = table_next(&s->rings, i))
        if (((struct session_ring *)table_get(&s->rings, i))->ring.device == device)
            return true;
    return false;
}

struct device_staging *session_ring_of(const struct session *s, const struct device *device)
{
    for (uint32_t i = table_next(&s->rings, 0); i; i = table_next(&s->rings, i)) {
        struct session_ring *r = table_get(&s->rings, i);

        if (r->ring.device == device && r->state == RING_OPEN)
            return &r->ring;
    }
    return NULL;
}

static int ring_new(struct call *call, const struct msg_ring_register *m, struct device *device,
                    struct session_ring **out)
{
    struct session_ring *r = calloc(1, sizeof(*r));

    if (!r)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a ring");
    r->s = call->s;
    list_init(&r->pending);
    r->ring = (struct device_staging){.device = device,
                                      .pid = call->s->peer.pid,
                                      .offset = m->offset,
                                      .slice_bytes = m->slice_bytes,
                                      .slices = (uint32_t)m->slices,
                                      .fd = call->fds[m->fd]};
    memcpy(r->ring.ipc, m->ipc.p, sizeof(r->ring.ipc));
    r->number = table_add(&call->s->rings, r);
    if (r->number == 0) {
        free(r);
        return ucm_error_set(&call->error, UCM_WIRE_BUSY, "this connection has a ring on each GPU");
    }
    r->name = session_name(&call->s->ring_names, r->number);
    call->fds[m->fd] = -1;
    *out = r;
    return 0;
}

static int ring_check(struct call *call, const struct msg_ring_register *m,
                      const struct device *device)
{
    if (m->slice_bytes % RING_GRAIN != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "slice_bytes: %llu; a multiple of %u is right",
                             (unsigned long long)m->slice_bytes, RING_GRAIN);
    if (m->fd >= call->n_fds || call->fds[m->fd] < 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "fd: %llu; %u descriptors came with the request",
                             (unsigned long long)m->fd, call->n_fds);
    if (device_has_ring(call->s, device))
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has a ring on that GPU; unregister it first");
    return 0;
}

int method_ring_register(struct call *call)
{
    struct msg_ring_register m;
    struct session_ring *r = NULL;
    struct device *device = NULL;
    int rc = proto_decode(&proto_ring_register, call->env, &m, &call->error);

    if (rc == 0) {
        device = device_set_find(call->s->rq->rooms.devices, (struct proto_str){"cuda", 4}, m.gpu,
                                 &call->error);
        rc = device ? ring_check(call, &m, device) : -call->error.code;
    }
    if (rc == 0)
        rc = ring_new(call, &m, device, &r);
    if (rc != 0)
        return rc;
    rc = fds_all_taken(call);
    if (rc == 0)
        rc = pending_start(call, &r->pending);
    if (rc != 0) {
        table_remove(&call->s->rings, r->number);
        close(r->ring.fd);
        free(r);
        return rc;
    }
    ring_submit(r, DEVICE_STAGING_OPEN, opened_cb);
    return 0;
}

int method_ring_unregister(struct call *call)
{
    struct session_ring *r;
    struct msg_ring m;
    int rc = proto_decode(&proto_ring, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    r = table_get(&call->s->rings, session_number(m.ring));
    if (!r || r->name != m.ring || r->state == RING_OPENING)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                             "ring %llu is not registered on this connection",
                             (unsigned long long)m.ring);
    rc = pending_start(call, &r->pending);
    if (rc == 0)
        ring_close(r); /* or it closes already */
    return rc;
}
