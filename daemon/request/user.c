/* What one uid's connections take of what all share: memory, the DRAM of held digests, turns of the
 * digest threads. Others must find some left, whatever one uid does; operators may take all. */
#include "daemon/request/internal.h"

#include <stdlib.h>

struct user *user_ref(struct requests *rq, uid_t uid)
{
    struct user *u;

    for (struct list *n = rq->users.next; n != &rq->users; n = n->next) {
        u = LIST_ENTRY(n, struct user, link);
        if (u->uid == uid) {
            u->sessions++;
            return u;
        }
    }
    u = calloc(1, sizeof(*u));
    if (!u)
        return NULL;
    u->uid = uid;
    u->sessions = 1;
    digest_queue_init(&u->selections);
    list_push_back(&rq->users, &u->link);
    return u;
}

void user_unref(struct user *u)
{
    if (--u->sessions > 0)
        return;
    list_remove(&u->link);
    free(u);
}

uint64_t user_most(const struct session *s, uint64_t all)
{
    return s->peer.admin ? all : all / 4 * 3;
}

bool memory_take(struct requests *rq, struct session *s, size_t bytes)
{
    uint64_t most = rq->rooms.config->max_frame_memory;

    if (rq->memory + bytes > most || (s && s->user->memory + bytes > user_most(s, most)))
        return false;
    rq->memory += bytes;
    if (s)
        s->user->memory += bytes;
    return true;
}

void memory_return(struct requests *rq, struct session *s, size_t bytes)
{
    rq->memory -= bytes;
    if (s)
        s->user->memory -= bytes;
}
