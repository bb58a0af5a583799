#include "client/lib/internal.h"

int client_enter(struct ucm_client *c)
{
    bool closing;

    if (c->forked)
        return client_fail(UCM_EINVALID, "this process is a fork of the one that made the client; "
                                         "connect again in the child");
    atomic_fetch_add(&c->entering, 1);
    pthread_mutex_lock(&c->lock);
    closing = c->closing;
    c->users += !closing;
    if (closing)
        pthread_mutex_unlock(&c->lock);
    atomic_fetch_sub(&c->entering, 1); /* when closing, this allows ucm_close to free the client */
    return closing ? client_fail(UCM_EDISCONNECTED, "the client is being closed") : 0;
}

int client_enter_given(struct ucm_client *c, const char *needed)
{
    return c ? client_enter(c) : client_fail(UCM_EINVALID, "%s is NULL", needed);
}

int client_leave(struct ucm_client *c, int status)
{
    if (c->followups.n > 0)
        client_followup_flush(c);
    if (c->rest_cb)
        c->rest_cb(c);
    client_lead_pass(c);
    if (--c->users == 0 && c->closing)
        pthread_cond_broadcast(&c->idle);
    pthread_mutex_unlock(&c->lock);
    return status;
}
