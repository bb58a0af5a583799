/* What is found where in a view. */
#include "daemon/request/view.h"

#include <assert.h>
#include <string.h>

/* ---- on this host ---- */

struct view session_view(struct session *s, struct ns *ns)
{
    struct view v = {.ns = {ns}, .n = 1};

    if (s->ns[index_ns_place(s->rq->modules.index, ns)] & SESSION_NS_WITH_BASE)
        v = (struct view){.ns = {ns, ns->base}, .n = 2};
    return v;
}

#define FIND_KEYS 256u

static bool is_bypassed(const struct requests *rq, const struct view *v)
{
    return bypass_on(rq, v->ns[0], BYPASS_LOAD) &&
           (v->n == 1 || bypass_on(rq, v->ns[1], BYPASS_LOAD));
}

/* Adds blocks of ns: where there is none yet, and where that one has to be read and this one has
 * not. Returns how many keys have no block in DRAM; *missing: none at all. */
static uint32_t find_in(struct requests *rq, const struct ns *ns, const uint8_t *keys, uint32_t n,
                        block_ref *refs, uint32_t *missing)
{
    struct cache *c = rq->modules.cache;
    block_ref found[FIND_KEYS];
    uint32_t not_in_dram = 0;

    assert(n <= FIND_KEYS);
    if (bypass_on(rq, ns, BYPASS_LOAD))
        memset(found, 0, n * sizeof(*found));
    else
        index_find_many(rq->modules.index, ns, keys, n, false, found);
    *missing = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (refs[i] != 0 && cache_in_dram(c, refs[i]))
            continue;
        if (cache_found(c, found[i]) && (refs[i] == 0 || cache_in_dram(c, found[i])))
            refs[i] = found[i];
        *missing += refs[i] == 0;
        not_in_dram += refs[i] == 0 || !cache_in_dram(c, refs[i]);
    }
    return not_in_dram;
}

static void find_in_both(struct requests *rq, const struct view *v, const uint8_t *keys, uint32_t n,
                         bool stop_at_gap, block_ref *refs)
{
    uint32_t key_bytes = v->ns[0]->identity.key_bytes, missing = 0;

    memset(refs, 0, n * sizeof(*refs));
    for (uint32_t first = 0; first < n && !(missing > 0 && stop_at_gap); first += FIND_KEYS) {
        const uint8_t *key = keys + (size_t)first * key_bytes;
        uint32_t some = n - first < FIND_KEYS ? n - first : FIND_KEYS;

        if (find_in(rq, v->ns[0], key, some, refs + first, &missing) > 0)
            find_in(rq, v->ns[1], key, some, refs + first, &missing);
    }
}

bool view_find(struct requests *rq, const struct view *v, const uint8_t *keys, uint32_t n,
               bool stop_at_gap, block_ref *refs)
{
    if (rq->bypasses.n > 0 && is_bypassed(rq, v)) {
        memset(refs, 0, n * sizeof(*refs));
        return false;
    }
    if (v->n == 1)
        index_find_many(rq->modules.index, v->ns[0], keys, n, stop_at_gap, refs);
    else
        find_in_both(rq, v, keys, n, stop_at_gap, refs);
    return true;
}

void view_touch(struct requests *rq, const struct view *v, const block_ref *refs, uint32_t n)
{
    if (v->n == 1 || n == 0) { /* of none, too: the policy's last chain ends */
        cache_touch(rq->modules.cache, v->ns[0], refs, n);
        return;
    }
    cache_touch_own(rq->modules.cache, v->ns[0], refs, n);
    cache_touch_own(rq->modules.cache, v->ns[1], refs, n);
}

/* ---- the shared tier ---- */

/* If a chain changes its form more often than this, the next lookup finds its tail. */
#define ROUNDS_MAX 6u

static uint32_t prefix_found(const struct view_look *look, struct proto_bin keys)
{
    block_ref refs[UCM_MAX_KEYS];
    uint32_t n = keys.n / look->view.ns[0]->identity.key_bytes, hits = 0;

    find_in_both(look->s->rq, &look->view, keys.p, n, true, refs);
    while (hits < n && refs[hits] != 0)
        hits++;
    return hits;
}

static void looked_cb(struct shared_query *k);

static bool round_begin(struct view_look *look, struct ns *ns, struct proto_bin keys)
{
    if (bypass_on(look->s->rq, ns, BYPASS_LOAD))
        return false;
    if (shared_query_start(look->s, ns, keys, look->per_key ? 0 : look->hits, look->per_key,
                           look->until_ms, &look->k) != 0)
        return false;
    look->k->ctx = look;
    look->k->done_cb = looked_cb;
    return true;
}

/* False: there is no other round. */
static bool look_next(struct view_look *look, struct proto_bin keys)
{
    uint32_t before = look->hits;

    if (look->view.n == 1 || look->s->closing)
        return false;
    if (!look->per_key)
        look->hits = prefix_found(look, keys);
    if (look->hits == keys.n / look->view.ns[0]->identity.key_bytes)
        return false;
    /* The form that was asked last has nothing further of the chain. */
    if (look->rounds >= 2 && look->hits == before)
        return false;
    while (look->rounds < (look->per_key ? 2 : ROUNDS_MAX) &&
           uv_now(look->s->rq->modules.loop) < look->until_ms) {
        if (round_begin(look, look->view.ns[look->rounds++ % 2], keys))
            return true;
        if (look->rounds >= 2)
            return false;
    }
    return false;
}

static void looked_cb(struct shared_query *k)
{
    struct view_look *look = k->ctx;

    look->k = NULL;
    if (!look_next(look, (struct proto_bin){k->keys, look->keys_bytes}))
        look->done_cb(look, k->keys);
    shared_query_free(k);
}

bool view_look_begin(struct view_look *look, struct proto_bin keys, uint32_t hits)
{
    look->keys_bytes = keys.n;
    if (look->view.n > 1)
        return look_next(look, keys);
    look->hits = hits;
    return round_begin(look, look->view.ns[0], keys);
}

void view_look_cancel(struct view_look *look)
{
    shared_query_cancel(look->k);
    look->k = NULL;
}
