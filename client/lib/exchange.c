/* A request and its answer, on as many connections as it takes. */
#include "client/lib/internal.h"

#include <stdlib.h>

int client_exchange(struct client_call *call, struct ucm_client *c, client_take_cb take_cb,
                    const struct client_request *q, int64_t deadline_ns)
{
    int r;

    client_call_init(call, c, take_cb, NULL);
    do {
        r = client_begin(c, q->handle, deadline_ns);
        if (r == 0)
            r = client_request_wait(call, q, deadline_ns);
    } while (r == CLIENT_AGAIN);
    client_call_close(call);
    return r;
}

int client_begin_same(struct ucm_client *c, int64_t deadline_ns)
{
    uint64_t attempts = c->attempts;
    int r = 0;

    while (r == 0 && c->writing && c->link == LINK_UP && c->attempts == attempts)
        r = client_writer_wait(c, deadline_ns);
    if (c->link != LINK_UP || c->attempts != attempts) {
        r = client_link_settle(c, deadline_ns);
        return r ? r : client_fail_as(-UCM_EDISCONNECTED, c->why_text);
    }
    c->writing = r == 0;
    return r;
}

int client_exchange_same(struct ucm_client *c, enum ucm_method method, const void *params,
                         int64_t deadline_ns)
{
    struct client_request q = {.method = method, .params = params};
    uint64_t attempts = c->attempts;
    struct client_call call;
    int r;

    client_call_init(&call, c, NULL, NULL);
    r = client_request_wait(&call, &q, deadline_ns);
    client_call_close(&call);
    if (r == 0 || (c->link == LINK_UP && c->attempts == attempts))
        return r;
    r = client_link_settle(c, deadline_ns);
    return r ? r : client_fail_as(-UCM_EDISCONNECTED, c->why_text);
}

static void told_done_cb(struct client_call *call)
{
    call->client->n_told--;
    client_call_close(call);
    free(call);
}

int client_tell(struct ucm_client *c, const struct client_request *q, int64_t deadline_ns)
{
    struct client_call *call;
    int r;

    if (c->n_told > 0)
        client_read_ready(
            c); /* a caller that only sends notifications reads answers nowhere else */
    if (c->n_told >= CLIENT_TOLD)
        return client_fail(UCM_EBUSY, "ucmd has not answered %u requests that nobody waits for",
                           c->n_told);
    call = malloc(sizeof *call);
    if (!call)
        return client_fail(UCM_ENOMEMORY, "no memory for a request");
    client_call_init(call, c, client_undo_cb, NULL);
    c->n_told++;
    do {
        r = client_begin(c, q->handle, deadline_ns);
        if (r == 0)
            r = client_request(call, q, deadline_ns);
    } while (r == CLIENT_AGAIN);
    call->done_cb = told_done_cb;
    if (r || call->done) /* it may have been answered, or the connection have broken */
        told_done_cb(call);
    return r;
}
