/* What a worker registers with a device: regions and staging rings. Both open, are named by the
 * worker, and close by unregister or with their session. The device completes a close after all
 * copies and the unmapping; then the worker may free its memory.
 *
 *   OPENING --opened--> OPEN --unregister, session closes--> CLOSING --closed--> gone
 *      `--failed--> gone
 *
 * A region sends its close when the last transfer that copies by it has ended. */
#include "daemon/request/copies.h"

#include "daemon/front/peer.h"
#include "daemon/index/ns_form.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/random.h>

#define NONCE_MS 10000 /* how long the answer to region.challenge may be used */

/* ---- requests that wait for a job of the device ---- */

struct pending_request {
    struct request r;
    struct list node;
};

/* Opening and closing a mapping can't be stopped half way, and end soon by themselves. */
static void pending_stop_cb(struct request *q)
{
    (void)q;
}

/* 0, or -code with call->error. */
static int pending_start(struct call *call, struct list *pending)
{
    struct pending_request *q = request_new(call, sizeof(*q), 0, 0, pending_stop_cb);

    if (!q)
        return -call->error.code;
    list_push_back(pending, &q->node);
    return 0;
}

/* Answers all of them, with the error or else the result. */
static void pending_answer(struct registered *r, const struct ucm_error *e, const void *result)
{
    struct list *node;

    r->s->n_requests++; /* keeps the session until registered_end or opened_cb settles it */
    while ((node = list_pop_front(&r->pending)) != NULL)
        request_end(&LIST_ENTRY(node, struct pending_request, node)->r, e, result);
    r->s->n_requests--;
}

/* ---- states ---- */

/* What a registration takes of its session's. DESCRIPTORS, the last: until they
 * are mapped, and closed. */
static const enum limit registered_kinds[REGISTERED_KINDS] = {
    LIMIT_MAPPINGS, LIMIT_MAPPED, LIMIT_TOUCHED, LIMIT_MEMORY, LIMIT_DESCRIPTORS};

static void taken_give(struct registered *r, unsigned from)
{
    for (unsigned i = from; i < REGISTERED_KINDS; i++) {
        limit_give(r->s->peer.owner, registered_kinds[i], r->taken[i]);
        r->taken[i] = 0;
    }
}

/* 0, or -code with call->error. */
static int taken_take(struct call *call, struct registered *r,
                      const uint64_t wanted[REGISTERED_KINDS])
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < REGISTERED_KINDS; i++) {
        rc = limit_take(r->s->peer.owner, registered_kinds[i], wanted[i], &call->error);
        if (rc == 0)
            r->taken[i] = wanted[i];
    }
    return rc; /* registered_free gives back */
}

/* Descriptors that came from the client: their close() may wait. */
static void fd_close(struct registered *r, int *fd)
{
    const unsigned last = REGISTERED_KINDS - 1;

    if (*fd < 0)
        return;
    if (r->taken[last] > 0)
        r->taken[last]--;
    else
        limit_add(r->s->peer.owner, LIMIT_DESCRIPTORS, 1); /* it was refused */
    reaper_close(r->s->rq->modules.reaper, *fd, r->s->peer.owner);
    *fd = -1;
}

static void fds_close(struct registered *r)
{
    for (uint32_t i = 0; r->region && i < r->region->n_handles; i++)
        fd_close(r, &r->region->handles[i].fd);
    if (r->staging)
        fd_close(r, &r->staging->fd);
}

static void registered_free(struct registered *r)
{
    fds_close(r);
    taken_give(r, 0);
    if (r->number != 0)
        table_remove(r->table, r->number);
    region_free(r->region);
    staging_free(r->staging);
    free(r);
}

static void registered_end(struct registered *r)
{
    struct session *s = r->s;

    s->rq->modules.metrics->regions -= r->region != NULL;
    registered_free(r);
    s->settle_cb(s);
}

/* The device promises to take every open and every close. */
static void registered_submit(struct registered *r, enum device_op op,
                              void (*done)(struct device_job *job, int status))
{
    int rc;

    r->job = (struct device_job){
        .op = op, .region = r->region, .staging = r->staging, .who = r->job.who, .done_cb = done};
    rc = r->device->ops->submit(r->device, &r->job);
    assert(rc == 0);
    (void)rc;
}

/* A device that failed for good has nothing mapped any more. */
static void closed_cb(struct device_job *job, int status)
{
    struct registered *r = LIST_ENTRY(job, struct registered, job);

    pending_answer(r, status == 0 ? NULL : &job->error, NULL);
    registered_end(r);
}

void registered_close(struct registered *r)
{
    if (r->state == REGISTERED_OPENING)
        return; /* opened_cb sees that the session closes */
    r->state = REGISTERED_CLOSING;
    if (!list_empty(&r->users) || r->close_sent)
        return;
    r->close_sent = true;
    registered_submit(r, DEVICE_CLOSE, closed_cb);
}

static void users_stop(struct registered *region)
{
    struct list *node, *next;

    for (node = region->users.next; node != &region->users; node = next) {
        struct request *r = &LIST_ENTRY(node, struct copies, link)->w.r;

        next = node->next;
        r->stop_cb(r);
    }
}

static void close_all(const struct table *t)
{
    for (uint32_t i = table_next(t, 0); i; i = table_next(t, i))
        registered_close(table_get(t, i));
}

void registered_close_all(struct session *s)
{
    close_all(&s->regions);
    close_all(&s->stagings);
}

static void opened_cb(struct device_job *job, int status)
{
    struct registered *r = LIST_ENTRY(job, struct registered, job);
    struct session *s = r->s;

    if (status != 0) {
        pending_answer(r, &job->error, NULL);
        registered_end(r);
        return;
    }
    r->state = REGISTERED_OPEN;
    fds_close(r);
    taken_give(r, REGISTERED_KINDS - 1);
    if (r->region)
        pending_answer(r, NULL, &(struct msg_region){r->name});
    else
        pending_answer(r, NULL, &(struct msg_ring){r->name});
    if (s->closing)
        s->settle_cb(s);
}

/* ---- what IPC handles need ---- */

int method_region_challenge(struct call *call)
{
    struct session *s = call->s;

    s->nonce_until_ms = 0;
    if (getentropy(s->nonce, sizeof(s->nonce)) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INTERNAL, "no random number for a nonce");
    s->nonce_until_ms = uv_now(s->rq->modules.loop) + NONCE_MS;
    return call_reply(call, &(struct msg_challenge_r){.nonce = {s->nonce, sizeof(s->nonce)}});
}

/* The connection's nonce, which serves once. 0, or -code with call->error. */
static int nonce_take(struct call *call, struct device_proof *out)
{
    struct session *s = call->s;
    uint64_t until_ms = s->nonce_until_ms;

    s->nonce_until_ms = 0;
    memcpy(out->nonce, s->nonce, sizeof(out->nonce));
    if (uv_now(s->rq->modules.loop) < until_ms)
        return 0;
    return ucm_error_set(&call->error, UCM_WIRE_DENIED,
                         "%s: memory by CUDA IPC handle needs region.challenge within the %d s "
                         "before, and its nonce over the memory's first %d bytes",
                         proto_methods[call->method].name.p, NONCE_MS / 1000, UCM_NONCE_BYTES);
}

static bool has_ipc(const struct msg_region_register *m)
{
    for (uint32_t i = 0; i < m->handles.n; i++)
        if (m->handles.p[i].kind == UCM_HANDLE_CUDA_IPC)
            return true;
    return false;
}

/* ---- register ---- */

/* NULL with call->error. */
static struct registered *registered_new(struct call *call, struct proto_str name,
                                         struct proto_bin gpu)
{
    struct device *device = device_set_find(call->s->rq->modules.devices, name, gpu, &call->error);
    struct registered *r = device ? calloc(1, sizeof(*r)) : NULL;

    if (device && !r)
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a registration");
    if (!r)
        return NULL;
    r->s = call->s;
    r->device = device;
    list_init(&r->pending);
    list_init(&r->users);
    return r;
}

/* Every descriptor that came must have been taken. 0, or -code with call->error. */
static int fds_all_taken(struct call *call)
{
    for (uint32_t i = 0; i < call->n_fds; i++)
        if (call->fds[i] >= 0)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "%u descriptors came and nothing names the one at place %u",
                                 call->n_fds, i);
    return 0;
}

/* Names r, whose object was checked, and opens it. 0, or -code; then r is freed. */
static int registered_open(struct call *call, struct registered *r, struct table *table,
                           uint32_t *names, const char *full)
{
    int rc = fds_all_taken(call);

    if (rc == 0) {
        r->table = table;
        r->number = table_add(table, r);
        if (r->number == 0)
            rc = ucm_error_set(&call->error, UCM_WIRE_BUSY, "%s", full);
    }
    if (rc == 0)
        rc = pending_start(call, &r->pending);
    if (rc != 0) {
        registered_free(r);
        return rc;
    }
    r->name = session_name(names, r->number);
    call->s->rq->modules.metrics->regions += r->region != NULL;
    registered_submit(r, DEVICE_OPEN, opened_cb);
    return 0;
}

/* Memory of the host is mapped from the file's beginning on. No sum of them passes the type's
 * end. */
static uint64_t mapped_bytes(const struct device_handle *h)
{
    uint64_t bytes = h->kind == UCM_HANDLE_MEMFD ? h->offset + h->bytes : h->bytes;

    return bytes < UINT64_MAX / UCM_MAX_HANDLES ? bytes : UINT64_MAX / UCM_MAX_HANDLES;
}

static int region_take(struct call *call, struct registered *r)
{
    const struct device_region *region = r->region;
    uint64_t wanted[REGISTERED_KINDS] = {
        region->n_handles, 0, 0,
        region->n_planes * sizeof(region->planes[0]) +
            region->n_handles * sizeof(region->handles[0]) +
            (region->rope ? sizeof(*region->rope) + region->n_planes * sizeof(region->rope->at[0])
                          : 0),
        call->n_fds};

    for (uint32_t i = 0; i < region->n_handles; i++) {
        const struct device_handle *h = &region->handles[i];

        wanted[1] += mapped_bytes(h);
        if (h->kind == UCM_HANDLE_MEMFD)
            wanted[2] += mapped_bytes(h) < h->bytes ? mapped_bytes(h) : h->bytes;
    }
    return taken_take(call, r, wanted);
}

/* An entry of a block pool takes any layer, so there is one place for all of them. 0, or -code with
 * call->error. */
static int pool_check(struct call *call, const struct msg_region_register *m)
{
    for (uint32_t i = 0; i < m->planes.n; i++)
        if (m->planes.p[i].layer != 0)
            return ucm_error_set(
                &call->error, UCM_WIRE_INVALID,
                "planes[%u].layer: %llu; the entries of a block pool hold any layer, so its "
                "planes are those of one, and their layer is 0",
                i, (unsigned long long)m->planes.p[i].layer);
    return 0;
}

int method_region_register(struct call *call)
{
    struct session *s = call->s;
    const struct msg_region_register *m = &call->params.region_register;
    struct registered *r;
    struct ns *ns = call_namespace(call, m->ns);
    struct view view = ns ? session_view(s, ns) : (struct view){.n = 0};
    struct form pages;
    int rc;

    if (!ns)
        return -call->error.code;
    if (m->part >= ns->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "part: %llu; this namespace has parts 0 to %u",
                             (unsigned long long)m->part, ns->identity.parts - 1);
    if (m->block_pool && pool_check(call, m) != 0)
        return -call->error.code;
    r = registered_new(call, m->device, m->gpu);
    if (!r)
        return -call->error.code;
    r->ns = ns;
    r->view = view;
    r->job.who = tenant_who(ns->tenant);
    pages = *ns_form(view.ns[view.n - 1], (uint32_t)m->part);
    pages.layers = m->block_pool ? 1 : pages.layers;
    rc = region_check(m, &pages, view.n > 1 ? ns_codec(ns) : NULL, call->fds, call->n_fds,
                      &r->region, &call->error);
    if (rc == 0 && has_ipc(m))
        rc = nonce_take(call, &r->region->proof);
    if (rc == 0)
        rc = region_take(call, r);
    if (rc != 0) {
        registered_free(r);
        return rc;
    }
    r->region->device = r->device;
    r->region->pid = s->peer.pid;
    r->region->connection = (uint64_t)(uintptr_t)s;
    r->region->peer_fd = &s->peer.fd;
    r->region->stranger = !peer_is_own(&s->peer, s->rq->modules.config);
    return registered_open(call, r, &s->regions, &s->region_names,
                           "this connection has as many regions as one may have");
}

int method_ring_register(struct call *call)
{
    struct session *s = call->s;
    const struct msg_ring_register *m = &call->params.ring_register;
    struct registered *r;
    int rc;

    r = registered_new(call, (struct proto_str){"cuda", 4}, m->gpu);
    if (!r)
        return -call->error.code;
    rc = staging_check(m, call->fds, call->n_fds, &r->staging, &call->error);
    if (rc == 0)
        rc = nonce_take(call, &r->staging->proof);
    if (rc == 0)
        rc = taken_take(
            call, r,
            (const uint64_t[]){2, m->offset + m->entry_bytes * m->entries, 0, 0, call->n_fds});
    if (rc != 0) {
        registered_free(r);
        return rc;
    }
    r->staging->pid = s->peer.pid;
    r->staging->connection = (uint64_t)(uintptr_t)s;
    return registered_open(call, r, &s->stagings, &s->staging_names,
                           "this connection has a ring on each GPU");
}

/* ---- unregister ---- */

struct registered *call_region(struct call *call, uint64_t name)
{
    struct registered *r = table_get(&call->s->regions, name & SESSION_NUMBERS);
    bool there = r && r->name == name;

    if (there && r->state == REGISTERED_OPEN)
        return r;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "region %llu is %s on this connection",
                  (unsigned long long)name,
                  there && r->state == REGISTERED_CLOSING ? "being unregistered"
                                                          : "not registered");
    return NULL;
}

/* One that closes already is awaited: NOT_FOUND would mean that its memory is free. */
static int unregister(struct call *call, const struct table *table, const char *kind, uint64_t name)
{
    struct registered *r = table_get(table, name & SESSION_NUMBERS);
    int rc;

    if (!r || r->name != name || r->state == REGISTERED_OPENING)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                             "%s %llu is not registered on this connection", kind,
                             (unsigned long long)name);
    call->gives_back = true;
    rc = pending_start(call, &r->pending);
    if (rc != 0 || r->state == REGISTERED_CLOSING)
        return rc;
    if (r->region)
        users_stop(r);
    registered_close(r);
    return 0;
}

int method_region_unregister(struct call *call)
{
    return unregister(call, &call->s->regions, "region", call->params.region.region);
}

int method_ring_unregister(struct call *call)
{
    return unregister(call, &call->s->stagings, "ring", call->params.ring.ring);
}
