/* What connections take of what all share, by the rule of limit.h: memory and leases. */
#include "daemon/request/internal.h"

#define LEASES_UNBOUND (UINT64_C(1) << 60)

void leased_add(struct session *s, int64_t keys)
{
    s->leased_keys = (uint32_t)((int64_t)s->leased_keys + keys);
    if (keys < 0)
        limit_give(owner_of(s), LIMIT_LEASED, (uint64_t)-keys);
    else
        limit_add(owner_of(s), LIMIT_LEASED, (uint64_t)keys); /* leased_check bounds it */
}

/* Bytes for blocks that are leased. */
static uint64_t lease_room(const struct request_rooms *rooms)
{
    uint64_t room = arena_bytes_configured(rooms->arena);
    struct tier_stats ts;

    if (rooms->share)
        return LEASES_UNBOUND; /* they may move there */
    if (rooms->tier) {
        rooms->tier_ops->stats(rooms->tier, &ts);
        room += ts.capacity_bytes;
    }
    return room;
}

/* Several leases may cover one block: of what is leased, a session's user and tenant count as having the part that they
 * have of the leases' keys. */
int leased_check(struct call *call)
{
    const struct session *s = call->s;
    const struct request_rooms *rooms = &s->rq->rooms;
    struct cache_leased leased = cache_leased(rooms->cache);
    struct limit_pool index = {"bytes of the index that leases and chains keep", "index.max_blocks",
                               index_bytes_max(rooms->index), leased.index_bytes, UINT64_MAX};
    struct limit_pool bytes = {"bytes that leases and chains keep", "the size of DRAM and NVMe",
                               lease_room(rooms), leased.bytes,
                               limit_setting(owner_of(s), LIMIT_LEASED)};
    int rc;

    if (s->peer.admin)
        return 0;
    rc = limit_check(owner_of(s), LIMIT_LEASED, &index, 1, &call->error);
    if (rc == 0)
        rc = limit_check(owner_of(s), LIMIT_LEASED, &bytes, 1, &call->error);
    return rc;
}

bool memory_take(struct session *s, size_t bytes)
{
    return limit_take(owner_of(s), LIMIT_MEMORY, bytes, NULL) == 0;
}

void memory_return(struct session *s, size_t bytes)
{
    limit_give(owner_of(s), LIMIT_MEMORY, bytes);
}
