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

/* Another thread reads: sleeps until that one finishes this call or stops reading. */
static int follow(struct client_call *call, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    int r;

    if (call->n_waiting++ == 0)
        TAILQ_INSERT_TAIL(&c->waiting, call, waiting);
    r = client_cond_wait(c, &call->cond, deadline_ns);
    if (--call->n_waiting == 0)
        TAILQ_REMOVE(&c->waiting, call, waiting);
    return r;
}

int client_call_wait_layers(struct client_call *call, uint32_t layers, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    int r = 0;

    while (!call->done && call->layers < layers && r == 0) {
        r = c->reading ? follow(call, deadline_ns)
                       : client_read(c, 0, call->expected_ns, deadline_ns);
        client_prove_restore(c);
    }
    return call->done || call->layers >= layers ? 0 : -UCM_EDEADLINE;
}

int client_call_wait(struct client_call *call, int64_t deadline_ns)
{
    return client_call_wait_layers(call, UINT32_MAX, deadline_ns);
}

bool client_call_progress(struct ucm_client *c, const struct msg_progress *m)
{
    struct client_call *call = client_call_find(c, (uint32_t)m->msgid);

    if (!call) /* the user freed the task */
        return true;
    if (!call->progress_cb || m->shards <= call->layers || !call->progress_cb(call, m))
        return false;
    call->layers = (uint32_t)m->shards;
    if (call->n_waiting > 0)
        pthread_cond_broadcast(&call->cond);
    client_signal(c);
    return true;
}

int client_call_status(const struct client_call *call)
{
    return call->status == 0 ? 0 : client_fail_wire(call->status, &call->error);
}
