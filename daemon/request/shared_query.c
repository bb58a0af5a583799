/* Asking the shared tier which keys are there. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static uint32_t gone_bit(const struct ns *ns, const uint8_t *key)
{
    return (uint32_t)XXH3_64bits(key, ns->identity.key_bytes) % SHARED_LOOKUP_GONE;
}

/* Others share the key's bit: they are misses once, and are asked for again. */
void shared_queries_forget(struct requests *rq, const struct ns *ns, const uint8_t *key)
{
    uint32_t bit = gone_bit(ns, key);

    for (struct list *node = rq->shared_queries.next; node != &rq->shared_queries;
         node = node->next) {
        struct shared_query *k = LIST_ENTRY(node, struct shared_query, link);

        if (k->ns == ns)
            k->gone[bit / 64] |= UINT64_C(1) << bit % 64;
    }
}

static bool gone(const struct shared_query *k, const uint8_t *key)
{
    uint32_t bit = gone_bit(k->ns, key);

    return k->gone[bit / 64] >> bit % 64 & 1;
}

/* From the end: a chain's head is worth more than its tail, and the cache forgets the oldest notes
 * when it has no space for all. */
static void lookup_note(struct shared_query *k)
{
    const struct shared_lookup *p = &k->p;

    if (k->purged != k->ns->purged)
        return; /* what it found may be gone */
    for (uint32_t i = p->per_key ? p->n : p->prefix; i-- > 0;) {
        shared_root_id root = p->answers[i] <= UCM_MAX_ROOTS ? p->answers[i] : 0;
        const uint8_t *key = p->keys + (size_t)i * p->key_bytes;

        if ((root != 0 || !p->per_key) && !gone(k, key))
            cache_shared_note(k->s->rq->modules.cache, k->ns, key, root, p->per_key);
    }
}

static void lookup_done_cb(struct shared_lookup *p)
{
    struct shared_query *k = LIST_ENTRY(p, struct shared_query, p);

    lookup_note(k);
    k->done_cb(k);
}

static uint64_t bytes_of(const struct shared_lookup *p, uint32_t part)
{
    const struct shared_query *k = LIST_ENTRY(p, const struct shared_query, p);
    const struct cache *c = k->s->rq->modules.cache;

    return ns_part_bytes(k->ns, part) +
           (cache_encrypted(c, k->ns) ? BLOCK_FILE_ENCRYPTION_BYTES : 0);
}

/* What to ask for, in `asked`. Returns how many keys. */
static uint32_t keys_missing(struct requests *rq, struct ns *ns, struct proto_bin keys,
                             uint32_t from, uint8_t *asked)
{
    uint32_t key_bytes = ns->identity.key_bytes, n = keys.n / key_bytes - from, missing = 0;
    const uint8_t *key = keys.p + (size_t)from * key_bytes;
    block_ref refs[UCM_MAX_KEYS];

    index_find_many(rq->modules.index, ns, key, n, false, refs);
    for (uint32_t i = 0; i < n; i++)
        if (!cache_found(rq->modules.cache, refs[i]))
            memcpy(asked + (size_t)missing++ * key_bytes, key + (size_t)i * key_bytes, key_bytes);
    return missing;
}

/* After it: the keys, those to ask for, and the answers. NULL: nothing to ask for, or no
 * memory. */
static struct shared_query *lookup_new(struct session *s, struct ns *ns, struct proto_bin keys,
                                       uint32_t from)
{
    uint32_t key_bytes = ns->identity.key_bytes, most = keys.n / key_bytes - from;
    size_t memory = sizeof(struct shared_query) + keys.n + (size_t)most * (key_bytes + 1);
    struct shared_query *k;
    uint8_t *all, *asked;

    if (limit_take(s->peer.owner, LIMIT_SHARED_LOOKUPS, 1, NULL) != 0)
        return NULL;
    k = memory_alloc(s, memory);
    if (!k) {
        limit_give(s->peer.owner, LIMIT_SHARED_LOOKUPS, 1);
        return NULL;
    }
    all = (uint8_t *)(k + 1);
    asked = all + keys.n;
    memcpy(all, keys.p, keys.n);
    k->s = s;
    k->ns = ns;
    list_push_back(&s->rq->shared_queries, &k->link);
    k->purged = ns->purged;
    k->memory = memory;
    k->keys = all;
    k->p.keys = asked;
    k->p.answers = asked + (size_t)most * key_bytes;
    k->p.n = keys_missing(s->rq, ns, keys, from, asked);
    if (k->p.n > 0)
        return k;
    shared_query_free(k);
    return NULL;
}

static uint64_t until(const struct requests *rq, uint64_t wait_ms, uint64_t most_ms)
{
    return uv_now(rq->modules.loop) + (wait_ms && wait_ms < most_ms ? wait_ms : most_ms);
}

uint64_t shared_query_until(const struct requests *rq, uint64_t wait_ms)
{
    return until(rq, wait_ms, rq->modules.config->shared_lookup_ms);
}

uint64_t shared_query_until_later(const struct requests *rq, uint64_t wait_ms)
{
    return until(rq, wait_ms, rq->modules.config->shared_timeout_ms);
}

int shared_query_start(struct session *s, struct ns *ns, struct proto_bin keys, uint32_t from,
                       bool per_key, uint64_t until_ms, struct shared_query **out)
{
    const struct request_modules *modules = &s->rq->modules;
    struct shared_query *k;
    int rc;

    if (!modules->shared || s->rq->draining)
        return -ENOENT;
    k = lookup_new(s, ns, keys, from);
    if (!k)
        return -ENOENT;
    if (!cache_shared_fingerprint(modules->cache, ns, k->p.fingerprint)) {
        shared_query_free(k);
        return -ENOENT; /* its names there are not known now */
    }
    k->p.key_bytes = ns->identity.key_bytes;
    k->p.part = ns->identity.parts - 1;
    k->p.bytes_of = bytes_of;
    k->p.who = tenant_who(ns->tenant);
    k->p.per_key = per_key;
    k->p.deadline_ms = until_ms;
    k->p.done_cb = lookup_done_cb;
    rc = shared_lookup(modules->shared, &k->p);
    if (rc != 0)
        shared_query_free(k);
    else
        *out = k;
    return rc;
}

void shared_query_free(struct shared_query *k)
{
    list_remove(&k->link);
    memory_return(k->s, k->memory);
    limit_give(k->s->peer.owner, LIMIT_SHARED_LOOKUPS, 1);
    free(k);
}

void shared_query_cancel(struct shared_query *k)
{
    shared_lookup_cancel(k->s->rq->modules.shared, &k->p);
    shared_query_free(k);
}
