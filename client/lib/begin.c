#include "client/lib/internal.h"

#include <assert.h>

/* ---- opening and registering ---- */

static void handle_done_cb(struct client_call *call)
{
    struct client_handle *h = client_handle_of(call);

    client_prove_end(h);
    if (!client_link_live(h->client)) {
        h->state = HANDLE_STALE;
        return;
    }
    h->state = call->status ? HANDLE_REFUSED : HANDLE_READY;
    if (call->status == 0 && !h->once)
        client_handle_list(h);
}

void client_handle_init(struct client_handle *h, struct ucm_client *c,
                        const struct client_request *request, client_take_cb take_cb)
{
    client_call_init(&h->call, c, take_cb, handle_done_cb);
    h->client = c;
    h->refs = 1;
    h->state = HANDLE_STALE;
    h->request = *request;
    h->request.fds = h->fds;
    if (request->handle)
        client_handle_ref(request->handle);
}

void client_handle_drop(struct client_handle *h)
{
    client_handle_unlist(h);
    /* After a reconnect its id may mean another one, so what still belongs to it must not use the
     * id. */
    if (h->state == HANDLE_READY)
        h->state = HANDLE_STALE;
    if (h->call.linked || client_proves(h))
        client_call_finish(&h->call, -UCM_ECANCELLED, "the handle was closed");
    client_prove_end(h);
    client_prove_settle(h);
    client_handle_unref(h);
}

/* Sends its open or register, or first begins to prove its memory. The caller holds the writer's
 * token, and this gives it back. */
static int handle_send(struct client_handle *h, int64_t deadline_ns)
{
    int r;

    if (h->prove_cb) {
        client_writer_release(h->client);
        if (client_prove_begin(h))
            return 0;
        r = client_prove_turn(h->client, deadline_ns);
        return r ? r : CLIENT_AGAIN;
    }
    client_handle_ref(h);
    h->state = HANDLE_PENDING;
    r = client_request(&h->call, &h->request, deadline_ns);
    if (r && !h->call.done) {
        if (r == -UCM_EDEADLINE) {
            h->state = HANDLE_STALE;
            h->client->stale = true;
        } else {
            client_call_finish(&h->call, r, ucm_errmsg());
        }
    }
    client_handle_unref(h);
    return r;
}

/* Returns its outcome. May return CLIENT_AGAIN. */
static int answer_take(struct client_handle *h, int64_t deadline_ns)
{
    if (client_handle_wait(h, deadline_ns) != 0)
        return h->call.linked
                   ? client_call_orphan(&h->call, &h->request)
                   : client_fail(UCM_EDEADLINE, "ucmd did not answer region.challenge in time");
    return h->call.status == CLIENT_AGAIN ? CLIENT_AGAIN : client_call_status(&h->call);
}

int client_handle_open(struct client_handle *h, int64_t deadline_ns)
{
    int r;

    do {
        r = client_begin(h->client, h->request.handle, deadline_ns);
        if (r == 0)
            r = handle_send(h, deadline_ns);
        if (r == 0)
            r = answer_take(h, deadline_ns);
    } while (r == CLIENT_AGAIN);
    if (r != 0)
        client_handle_drop(h);
    return r;
}

/* ---- registering again after a reconnect ---- */

static int restore_late(void)
{
    return client_fail(UCM_EDEADLINE,
                       "the connection was made again, but ucmd did not answer in time "
                       "for its namespaces and regions");
}

static int handle_wait(struct client_handle *h, int64_t deadline_ns)
{
    return client_handle_wait(h, deadline_ns) ? restore_late() : 0;
}

/* If the daemon refused a region's namespace, or a summaries' base, or the user closed it, the same
 * holds for this handle. */
static void follow_parent(struct client_handle *h)
{
    const struct client_handle *parent = h->request.handle;

    if (!parent || parent->state == HANDLE_READY || parent->state == HANDLE_PENDING)
        return;
    h->state = HANDLE_REFUSED;
    if (parent->listed) {
        h->call.status = parent->call.status;
        h->call.error = parent->call.error;
    } else {
        h->call.status = -UCM_ENOTFOUND;
        ucm_error_set(&h->call.error, UCM_ENOTFOUND,
                      "the namespace that this one is of was closed");
    }
}

/* Sends the first handle that the daemon does not know, or waits for its namespace. 1: call again,
 * 0: none is left, else an error. The list may change whenever this waits or sends. */
static int restore_step(struct ucm_client *c, int64_t deadline_ns)
{
    struct client_handle *h = c->prover.handle;
    int r;

    /* The next call may come late, and the nonce stays in the memory until a call reads the
     * answer. */
    if (h && h->listed)
        return client_prove_turn(c, deadline_ns) ? restore_late() : 1;
    /* A namespace precedes its regions in the list, so a region found here has a namespace that is
     * not STALE. */
    TAILQ_FOREACH(h, &c->handles, node) {
        if (h->state == HANDLE_STALE)
            follow_parent(h);
        if (h->state == HANDLE_STALE)
            break;
    }
    if (!h)
        return 0;
    if (h->request.handle && h->request.handle->state == HANDLE_PENDING)
        return (r = handle_wait(h->request.handle, deadline_ns)) ? r : 1;
    c->writing = true;
    r = handle_send(h, deadline_ns);
    return r == -UCM_EDEADLINE ? r : 1;
}

/* After a refusal that may pass, the next call that needs the handle opens it again, and with it
 * the handle that it belongs to. */
static int refused(struct client_handle *h)
{
    int status = h->call.status;

    if (status == -UCM_EBUSY || status == -UCM_ENOMEMORY || status == -UCM_EDEADLINE) {
        for (struct client_handle *of = h; of; of = of->request.handle)
            if (of->state == HANDLE_REFUSED)
                of->state = HANDLE_STALE;
        h->client->stale = true;
    }
    return client_call_status(&h->call);
}

int client_begin(struct ucm_client *c, struct client_handle *h, int64_t deadline_ns)
{
    for (;;) {
        int r = client_link_up(c, deadline_ns);

        if (r == 0 && c->writing) {
            r = client_writer_wait(c, deadline_ns);
        } else if (r == 0 && c->stale) {
            r = restore_step(c, deadline_ns);
            c->stale = r != 0;
        } else if (r == 0 && h && h->state == HANDLE_PENDING) {
            r = handle_wait(h, deadline_ns);
        } else if (r == 0 && h && h->state == HANDLE_REFUSED) {
            client_read_ready(c); /* notices if the daemon that refused it is gone */
            if (c->link == LINK_UP && h->state == HANDLE_REFUSED)
                return refused(h);
        } else if (r == 0 && h && h->state == HANDLE_STALE && !h->listed) {
            return client_fail(UCM_ENOTFOUND, "the namespace was closed");
        } else if (r == 0) {
            assert(!h || h->state == HANDLE_READY);
            c->writing = true;
            return 0;
        }
        if (r < 0)
            return r;
    }
}
