/* Leases: a lookup's blocks stay in some tier until their client releases them, by name or with the load that uses
 * them, until the lease's time is over, or until its connection closes. */
#include "daemon/request/internal.h"

#include <stdlib.h>

#define LEASES_UNBOUND (UINT64_C(1) << 60)

struct lease {
    struct session *s;
    struct deadline deadline;
    uint32_t number, name; /* number: in the session's table */
    uint32_t n;            /* blocks, which keep their namespaces */
    size_t memory;
    block_ref refs[];
};

/* ---- what connections take of what all share, by the rule of limit.h: memory and leases ---- */

void leased_add(struct session *s, int64_t keys)
{
    s->leased_keys = (uint32_t)((int64_t)s->leased_keys + keys);
    if (keys < 0)
        limit_give(s->peer.owner, LIMIT_LEASED, (uint64_t)-keys);
    else
        limit_add(s->peer.owner, LIMIT_LEASED, (uint64_t)keys); /* leased_check bounds it */
}

/* Several leases may cover one block: of what is leased, a session's user and tenant count as having the part that they
 * have of the leases' keys. */
int leased_check(struct call *call)
{
    const struct session *s = call->s;
    const struct request_rooms *rooms = &s->rq->rooms;
    struct cache_leased leased = cache_leased(rooms->cache);
    struct limit_pool index = {"bytes of the index that leases and chains keep", "index.max_blocks",
                               index_bytes_max(rooms->index), leased.index_bytes, false};
    struct limit_pool bytes = {"bytes that leases and chains keep", "the size of DRAM and NVMe",
                               arena_bytes_configured(rooms->arena), leased.bytes, true};
    struct tier_stats ts;
    int rc;

    if (s->peer.admin)
        return 0;
    if (rooms->share) {
        bytes.all = LEASES_UNBOUND; /* they may move there */
    } else if (rooms->tier) {
        rooms->tier_ops->stats(rooms->tier, &ts);
        bytes.all += ts.capacity_bytes;
    }
    rc = limit_check(s->peer.owner, LIMIT_LEASED, &index, 1, &call->error);
    if (rc == 0)
        rc = limit_check(s->peer.owner, LIMIT_LEASED, &bytes, 1, &call->error);
    return rc;
}

bool memory_take(struct session *s, size_t bytes)
{
    return limit_take(s->peer.owner, LIMIT_MEMORY, bytes, NULL) == 0;
}

void memory_return(struct session *s, size_t bytes)
{
    limit_give(s->peer.owner, LIMIT_MEMORY, bytes);
}

void *memory_alloc(struct session *s, size_t bytes)
{
    bool taken = memory_take(s, bytes);
    void *memory = taken ? calloc(1, bytes) : NULL;

    if (taken && !memory)
        memory_return(s, bytes);
    return memory;
}

/* ---- leases ---- */

void lease_end(struct session *s, uint32_t name)
{
    struct lease *l = table_get(&s->leases, name & SESSION_NUMBERS);

    if (!l || l->name != name)
        return;
    table_remove(&s->leases, l->number);
    deadline_disarm(s->rq->rooms.deadlines, &l->deadline);
    if (cache_unlease_many(s->rq->rooms.cache, l->refs, l->n))
        cache_released(s->rq->rooms.cache);
    leased_add(s, -(int64_t)l->n);
    limit_give(s->peer.owner, LIMIT_MEMORY, l->memory);
    s->rq->rooms.metrics->leases--;
    free(l);
}

bool leases_end(struct session *s)
{
    uint32_t before = s->leased_keys, i;

    while ((i = table_next(&s->leases, 0)) != 0 && before - s->leased_keys < LEASED_KEYS_PER_TURN)
        lease_end(s, ((struct lease *)table_get(&s->leases, i))->name);
    return i == 0;
}

static void lease_expired_cb(struct deadline *d)
{
    struct lease *l = LIST_ENTRY(d, struct lease, deadline);

    l->s->rq->rooms.metrics->leases_expired++;
    lease_end(l->s, l->name);
}

int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms,
              uint32_t *name)
{
    struct session *s = call->s;
    struct requests *rq = s->rq;
    uint64_t limit = rq->rooms.config->lease_max_ms;
    size_t memory = sizeof(struct lease) + n * sizeof(*refs);
    struct lease *l;
    uint32_t number;

    if (s->leased_keys + n > SESSION_MAX_LEASED_KEYS)
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "this connection's leases cover %u keys, at most %u may be; release some",
            s->leased_keys, SESSION_MAX_LEASED_KEYS);
    if (leased_check(call) != 0 ||
        limit_take(s->peer.owner, LIMIT_MEMORY, memory, &call->error) != 0)
        return -call->error.code;
    l = malloc(memory);
    number = l ? table_add(&s->leases, l) : 0;
    if (number == 0) {
        limit_give(s->peer.owner, LIMIT_MEMORY, memory);
        if (!l)
            return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lease");
        free(l);
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has %u leases, as many as one may have; release some",
                             table_count(&s->leases));
    }
    *l = (struct lease){.s = s, .number = number, .memory = memory};
    *name = l->name = session_name(&s->lease_names, number);
    deadline_arm(rq->rooms.deadlines, &l->deadline,
                 uv_now(rq->rooms.loop) + (lease_ms < limit ? lease_ms : limit), lease_expired_cb);
    for (uint32_t i = 0; i < n; i++)
        if (refs[i] != 0)
            l->refs[l->n++] = refs[i];
    (void)cache_lease_many(rq->rooms.cache, l->refs, l->n, false);
    leased_add(s, l->n);
    rq->rooms.metrics->leases++;
    return 0;
}

int method_release(struct call *call)
{
    const struct msg_release *m = &call->params.release;

    lease_end(call->s, (uint32_t)m->lease);
    return call_reply(call, NULL);
}
