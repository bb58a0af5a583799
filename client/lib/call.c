#include "client/lib/internal.h"

#include <assert.h>
#include <stdio.h>

void client_call_init(struct client_call *call, struct ucm_client *c, client_take_cb take_cb,
                      client_done_cb done_cb)
{
    *call = (struct client_call){
        .client = c, .take_cb = take_cb, .done_cb = done_cb, .cond = PTHREAD_COND_INITIALIZER};
}

void client_call_close(struct client_call *call)
{
    assert(!call->linked && call->n_waiting == 0);
    pthread_cond_destroy(&call->cond);
}

void client_call_reset(struct client_call *call)
{
    assert(!call->linked);
    call->done = false;
    call->layers = 0;
    call->expected_ns = 0;
    call->status = 0;
    call->error.code = 0;
    call->error.text[0] = '\0';
}

struct client_call *client_call_find(struct ucm_client *c, uint32_t msgid)
{
    struct client_call *call;

    LIST_FOREACH(call, &c->calls[msgid % CLIENT_BUCKETS], node)
        if (call->msgid == msgid)
            break;
    return call;
}

uint32_t client_msgid(struct ucm_client *c)
{
    uint32_t msgid;

    /* The counter wraps, and a task can be older than a wrap. The daemon answers to 0 when it
     * cannot decode the id. */
    do
        msgid = c->next_msgid++;
    while (msgid == 0 || client_call_find(c, msgid));
    return msgid;
}

void client_call_link(struct client_call *call, uint32_t msgid)
{
    assert(!call->linked && !call->done);
    call->msgid = msgid;
    LIST_INSERT_HEAD(&call->client->calls[msgid % CLIENT_BUCKETS], call, node);
    call->linked = true;
}

void client_call_unlink(struct client_call *call)
{
    if (call->linked)
        LIST_REMOVE(call, node);
    call->linked = false;
}

void client_call_finish(struct client_call *call, int status, const char *text)
{
    client_call_unlink(call);
    call->done = true;
    call->status = status;
    if (text)
        snprintf(call->error.text, sizeof call->error.text, "%s", text);
    if (call->n_waiting > 0)
        pthread_cond_broadcast(&call->cond);
    if (call->done_cb)
        call->done_cb(call);
}

void client_call_finish_all(struct ucm_client *c, int status, const char *text)
{
    for (unsigned i = 0; i < CLIENT_BUCKETS; i++)
        while (!LIST_EMPTY(&c->calls[i]))
            client_call_finish(LIST_FIRST(&c->calls[i]), status, text);
}

bool client_call_progress(struct ucm_client *c, const struct msg_progress *m)
{
    struct client_call *call = client_call_find(c, (uint32_t)m->msgid);

    if (!call) /* the user freed the task */
        return true;
    if (!call->progress_cb || m->layers <= call->layers || !call->progress_cb(call, m))
        return false;
    call->layers = (uint32_t)m->layers;
    if (call->n_waiting > 0)
        pthread_cond_broadcast(&call->cond);
    client_signal(c);
    return true;
}

int client_call_status(const struct client_call *call)
{
    return call->status == 0 ? 0 : client_fail_wire(call->status, &call->error);
}
