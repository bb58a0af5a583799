/* Users that take turns with the threads: a user is all connections of one uid of a tenant. */
#include "daemon/retrieval/derived.h"

#include <stdlib.h>
#include <string.h>

struct user *user_ref(struct requests *rq, const struct peer *peer)
{
    struct user *u;

    for (struct list *n = retrieval_of(rq)->users.next; n != &retrieval_of(rq)->users;
         n = n->next) {
        u = LIST_ENTRY(n, struct user, link);
        if (u->uid == peer->uid && strcmp(u->tenant->name, peer->tenant) == 0) {
            u->sessions++;
            return u;
        }
    }
    u = calloc(1, sizeof(*u));
    if (u)
        u->tenant = derived_tenant_ref(rq, peer->tenant);
    if (!u || !u->tenant) {
        free(u);
        return NULL;
    }
    u->uid = peer->uid;
    u->sessions = 1;
    summary_queue_init(&u->selections, &u->tenant->selections);
    list_push_back(&retrieval_of(rq)->users, &u->link);
    return u;
}

void user_unref(struct user *u)
{
    if (--u->sessions > 0)
        return;
    list_remove(&u->link);
    derived_tenant_unref(u->tenant);
    free(u);
}
