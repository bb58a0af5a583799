/* Asking the shared tier which keys are there. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* From the end: where there is no room for all, the tail of a chain is what its head can do
 * without. */
static void lookup_note(struct shared_lookup *k)
{
    const struct share_lookup *p = &k->p;

    for (uint32_t i = p->each ? p->n : p->prefix; i-- > 0;) {
        share_root_id root = p->answers[i] <= SHARE_MAX_ROOTS ? p->answers[i] : 0;

        if (root != 0 || !p->each)
            cache_shared_note(k->rq->rooms.cache, k->ns, p->keys + (size_t)i * p->key_bytes, root,
                              p->each);
    }
}

static void lookup_done_cb(struct share_lookup *p)
{
    struct shared_lookup *k = LIST_ENTRY(p, struct shared_lookup, p);

    lookup_note(k);
    k->done_cb(k);
}

/* How many are to be asked for; their places in rq->missing. */
static uint32_t keys_missing(struct requests *rq, struct ns *ns, const uint8_t *keys, uint32_t from,
                             uint32_t n)
{
    uint32_t missing = 0;

    index_find_many(rq->rooms.index, ns, keys + (size_t)from * ns->identity.key_bytes, n - from,
                    false, rq->missing + from);
    for (uint32_t i = from; i < n; i++)
        if (!cache_found(rq->rooms.cache, rq->missing[i]))
            rq->missing[missing++] = i;
    return missing;
}

/* The keys, those that are asked for, and the answers behind it. */
static struct shared_lookup *lookup_new(struct requests *rq, struct ns *ns, struct proto_bin keys,
                                        uint32_t missing)
{
    uint32_t key_bytes = ns->identity.key_bytes;
    size_t memory = sizeof(struct shared_lookup) + keys.n + (size_t)missing * (key_bytes + 1);
    struct shared_lookup *k = calloc(1, memory);
    uint8_t *all, *asked;

    if (!k)
        return NULL;
    all = (uint8_t *)(k + 1);
    asked = all + keys.n;
    memcpy(all, keys.p, keys.n);
    for (uint32_t i = 0; i < missing; i++)
        memcpy(asked + (size_t)i * key_bytes, all + (size_t)rq->missing[i] * key_bytes, key_bytes);
    k->rq = rq;
    k->ns = ns;
    k->memory = memory;
    k->keys = all;
    k->n = keys.n / key_bytes;
    k->p.keys = asked;
    k->p.answers = asked + (size_t)missing * key_bytes;
    return k;
}

int shared_lookup_start(struct requests *rq, struct ns *ns, struct proto_bin keys, uint32_t from,
                        bool each, uint64_t wait_ms, struct shared_lookup **out)
{
    const struct request_rooms *rooms = &rq->rooms;
    uint64_t most_ms = rooms->config->share_lookup_ms;
    uint32_t last = ns->identity.parts - 1, missing;
    struct shared_lookup *k;
    int rc;

    if (!rooms->share || rq->draining)
        return -ENOENT;
    missing = keys_missing(rq, ns, keys.p, from, keys.n / ns->identity.key_bytes);
    if (missing == 0)
        return -ENOENT;
    k = lookup_new(rq, ns, keys, missing);
    if (!k)
        return -ENOMEM;
    memcpy(k->p.fingerprint, ns->fingerprint, sizeof(k->p.fingerprint));
    k->p.key_bytes = ns->identity.key_bytes;
    k->p.n = missing;
    k->p.part = last;
    k->p.part_bytes = ns_part_bytes(ns, last);
    k->p.each = each;
    k->p.deadline_ms = uv_now(rooms->loop) + (wait_ms && wait_ms < most_ms ? wait_ms : most_ms);
    k->p.done_cb = lookup_done_cb;
    rc = rooms->share_ops->lookup(rooms->share, &k->p);
    if (rc != 0)
        free(k);
    else
        *out = k;
    return rc;
}

void shared_lookup_free(struct shared_lookup *k)
{
    free(k);
}

void shared_lookup_cancel(struct shared_lookup *k)
{
    k->rq->rooms.share_ops->lookup_cancel(k->rq->rooms.share, &k->p);
    free(k);
}
