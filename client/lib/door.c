#include "client/lib/internal.h"

void client_door_open(struct ucm_client *c, struct client_door *d, const struct client_feature *f)
{
    d->feature = f;
    LIST_INSERT_HEAD(&c->doors, d, node);
}

void client_door_close(struct client_door *d)
{
    if (d->feature)
        LIST_REMOVE(d, node);
    d->feature = NULL;
}

bool client_doors_settled(struct ucm_client *c)
{
    struct client_door *d;
    bool settled = true;

    LIST_FOREACH(d, &c->doors, node)
        if (d->feature->settled_cb)
            settled &= d->feature->settled_cb(d);
    return settled;
}

/* A callback may close any door, so those still to call are in a list of their own. */
void client_doors_down(struct ucm_client *c)
{
    struct client_doors left = LIST_HEAD_INITIALIZER(left);
    struct client_door *d;

    while ((d = LIST_FIRST(&c->doors)) != NULL) {
        LIST_REMOVE(d, node);
        LIST_INSERT_HEAD(&left, d, node);
    }
    while ((d = LIST_FIRST(&left)) != NULL) {
        LIST_REMOVE(d, node);
        LIST_INSERT_HEAD(&c->doors, d, node);
        if (d->feature->down_cb)
            d->feature->down_cb(d);
    }
}

void client_doors_forked(struct ucm_client *c)
{
    struct client_door *d;

    LIST_FOREACH(d, &c->doors, node)
        if (d->feature->forked_cb)
            d->feature->forked_cb(d);
}

int client_doors_notify(struct ucm_client *c, struct proto_envelope *env, struct ucm_error *e)
{
    struct client_door *d;
    int r = 0;

    LIST_FOREACH(d, &c->doors, node)
        if (r == 0 && d->feature->notified_cb)
            r = d->feature->notified_cb(d, env, e);
    return r;
}

void client_doors_closed(struct ucm_client *c)
{
    struct client_door *d = LIST_FIRST(&c->doors);

    while (d) {
        if (d->feature->closed_cb) {
            d->feature->closed_cb(d);
            d = LIST_FIRST(&c->doors); /* it may have closed others */
        } else {
            d = LIST_NEXT(d, node);
        }
    }
}
