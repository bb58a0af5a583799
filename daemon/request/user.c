/* What one uid's connections take of what all share: memory, the DRAM of held digests, turns of the
 * digest threads, leases. Others must find some left, whatever one uid does; operators may take all. */
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

void leased_add(struct session *s, int64_t keys)
{
    s->leased_keys = (uint32_t)((int64_t)s->leased_keys + keys);
    s->user->leased_keys = (uint64_t)((int64_t)s->user->leased_keys + keys);
}

static bool three_quarters(uint64_t part, uint64_t all)
{
    return part >= all / 4 * 3;
}

/* Of the places for blocks; or of the bytes, unless blocks may move to a shared tier. */
static bool leased_much(const struct request_rooms *rooms, const struct cache_leased *leased)
{
    uint64_t room = arena_bytes_configured(rooms->arena);
    struct tier_stats ts;

    if (three_quarters(leased->blocks, index_blocks_max(rooms->index)))
        return true;
    if (rooms->share || !three_quarters(leased->bytes, room))
        return false;
    if (rooms->tier) {
        rooms->tier_ops->stats(rooms->tier, &ts);
        room += ts.capacity_bytes;
    }
    return three_quarters(leased->bytes, room);
}

int leased_check(struct call *call)
{
    const struct session *s = call->s;
    struct cache_leased leased = cache_leased(s->rq->rooms.cache);

    if (s->peer.admin || s->user->leased_keys <= leased.blocks / 4 ||
        !leased_much(&s->rq->rooms, &leased))
        return 0;
    return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                         "leases and chains keep three quarters of what this host can hold, and "
                         "more than a quarter of that is this user's; release some");
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
