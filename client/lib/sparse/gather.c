/* Gathers into a pool's entries, from blocks that keys or a sequence name. */
#include "client/lib/sparse/internal.h"

_Static_assert(sizeof(struct ucm_gather_item) == UCM_GATHER_ITEM_BYTES &&
                   (int)UCM_GATHER_ITEMS_MAX == (int)UCM_MAX_GATHER_ITEMS,
               "a gather's items are sent as they lie in memory");

static int gather_check(const struct ucm_region *pool, const struct ucm_gather_spec *f)
{
    if (!f->items || f->n_items == 0 || f->n_items > UCM_GATHER_ITEMS_MAX)
        return client_fail(UCM_EINVALID, "a gather has 1 to %d items, not %u%s",
                           UCM_GATHER_ITEMS_MAX, f->n_items, f->items ? "" : " at NULL");
    if (f->sequence && (f->keys || f->n_keys != 0))
        return client_fail(UCM_EINVALID,
                           "a gather names its blocks by a sequence or by keys, not both");
    if (f->sequence && f->sequence->client != pool->handle.client)
        return client_fail(UCM_EINVALID, "the sequence is another client's than the pool");
    return 0;
}

/* The answer has a byte an item. */
int ucm_gather(struct ucm_region *pool, const struct ucm_gather_spec *f, int timeout_ms,
               struct ucm_task **out)
{
    struct msg_gather m = {0};
    struct client_request q = {UCM_METHOD_GATHER, &m, .handle_id = &m.region};
    struct ucm_client *c = pool && f && out ? pool->handle.client : NULL;
    int64_t deadline_ns;
    int r = client_enter_given(c, "pool, gather or out");

    if (r)
        return r;
    q.handle = &pool->handle;
    r = gather_check(pool, f);
    if (r == 0 && !f->sequence)
        r = client_keys_check(c, client_namespace_of(pool), f->keys, f->n_keys, &m.keys);
    if (r)
        return client_leave(c, r);
    m.items =
        (struct proto_bin){(const uint8_t *)f->items, f->n_items * (uint32_t)sizeof *f->items};
    m.priority = f->priority;
    m.timeout_ms = f->daemon_timeout_ms;
    deadline_ns = client_deadline(c, timeout_ms);
    r = f->sequence
            ? client_sequence_task(f->sequence, &m.sequence, &q, f->n_items, deadline_ns, out)
            : client_task_run(c, &q, f->n_items, NULL, NULL, deadline_ns, out);
    return client_leave(c, r);
}
