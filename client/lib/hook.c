#include "client/lib/internal.h"

void client_hook_open(struct ucm_client *c, struct client_hook *hook,
                      const struct client_feature *f)
{
    hook->feature = f;
    LIST_INSERT_HEAD(&c->hooks, hook, node);
}

void client_hook_close(struct client_hook *hook)
{
    if (hook->feature)
        LIST_REMOVE(hook, node);
    hook->feature = NULL;
}

bool client_hooks_settled(struct ucm_client *c)
{
    struct client_hook *hook;
    bool settled = true;

    LIST_FOREACH(hook, &c->hooks, node)
        if (hook->feature->settled_cb)
            settled &= hook->feature->settled_cb(hook);
    return settled;
}

/* A callback may close any hook, so those still to call are in a list of their own. */
void client_hooks_down(struct ucm_client *c)
{
    struct client_hooks left = LIST_HEAD_INITIALIZER(left);
    struct client_hook *hook;

    while ((hook = LIST_FIRST(&c->hooks)) != NULL) {
        LIST_REMOVE(hook, node);
        LIST_INSERT_HEAD(&left, hook, node);
    }
    while ((hook = LIST_FIRST(&left)) != NULL) {
        LIST_REMOVE(hook, node);
        LIST_INSERT_HEAD(&c->hooks, hook, node);
        if (hook->feature->down_cb)
            hook->feature->down_cb(hook);
    }
}

void client_hooks_forked(struct ucm_client *c)
{
    struct client_hook *hook;

    LIST_FOREACH(hook, &c->hooks, node)
        if (hook->feature->forked_cb)
            hook->feature->forked_cb(hook);
}

int client_hooks_notify(struct ucm_client *c, struct proto_envelope *env, struct ucm_error *e)
{
    struct client_hook *hook;
    int r = 0;

    LIST_FOREACH(hook, &c->hooks, node)
        if (r == 0 && hook->feature->notified_cb)
            r = hook->feature->notified_cb(hook, env, e);
    return r;
}

void client_hooks_closed(struct ucm_client *c)
{
    struct client_hook *hook = LIST_FIRST(&c->hooks);

    while (hook) {
        if (hook->feature->closed_cb) {
            hook->feature->closed_cb(hook);
            hook = LIST_FIRST(&c->hooks); /* it may have closed others */
        } else {
            hook = LIST_NEXT(hook, node);
        }
    }
}
