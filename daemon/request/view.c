/* What a call names: namespaces of its session, and the keys of blocks, and what is found where in a view. */
#include "daemon/request/view.h"

#include <string.h>

/* ---- what a call names ---- */

bool call_operator(struct call *call)
{
    static const char *const but[] = {
        [PLACE_HERE] = "",
        [PLACE_CONTAINER] = "; from a container only if `container_admins` says so",
        [PLACE_USER_NS] = "; never from another user namespace, as this process's",
        [PLACE_UNKNOWN] = "; the daemon can't see where this process runs",
    };
    const struct peer *peer = &call->s->peer;

    if (!peer->admin)
        ucm_error_set(&call->error, UCM_WIRE_DENIED,
                      "%s is for operators: root, the daemon's own user, and whom `admins` names%s",
                      proto_methods[call->method].name.p, but[peer->place]);
    return peer->admin;
}

uint32_t session_name(uint32_t *names, uint32_t number)
{
    return number | ((*names)++ * UINT32_C(2654435761) & ~SESSION_NUMBERS);
}

int session_ns_open(struct call *call, struct ns *ns)
{
    struct session *s = call->s;
    uint8_t *flags = &s->ns[index_ns_place(s->rq->rooms.index, ns)];
    uint32_t most = s->rq->rooms.config->max_namespaces_tenant / 4;

    if (*flags & SESSION_NS_OPEN)
        return 0;
    if (most < SESSION_MIN_NAMESPACES)
        most = SESSION_MIN_NAMESPACES;
    if (!s->peer.admin && s->n_ns >= most)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection has %u namespaces open; one may have a quarter of "
                             "limits.namespaces_per_tenant",
                             s->n_ns);
    *flags |= SESSION_NS_OPEN;
    s->n_ns++;
    index_ns_use(s->rq->rooms.index, ns);
    return 0;
}

void session_ns_close_all(struct session *s)
{
    struct index *ix = s->rq->rooms.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        struct ns *ns = s->ns[place] & SESSION_NS_OPEN ? index_ns_at(ix, place) : NULL;

        if (ns)
            index_ns_unuse(ix, ns);
    }
}

struct view session_view(struct session *s, struct ns *ns)
{
    struct view v = {.ns = {ns}, .n = 1};

    if (s->ns[index_ns_place(s->rq->rooms.index, ns)] & SESSION_NS_WITH_BASE)
        v = (struct view){.ns = {ns, ns->base}, .n = 2};
    return v;
}

void session_ns_with_base(struct session *s, const struct ns *ns, const struct ns *base)
{
    const struct index *ix = s->rq->rooms.index;

    s->ns[index_ns_place(ix, ns)] |=
        (uint8_t)(SESSION_NS_WITH_BASE | (s->ns[index_ns_place(ix, base)] & SESSION_NS_DURABLE));
}

struct ns *call_namespace(struct call *call, uint64_t id)
{
    struct session *s = call->s;
    struct ns *ns = index_ns(s->rq->rooms.index, (uint32_t)id);

    if (ns && s->ns[index_ns_place(s->rq->rooms.index, ns)] & SESSION_NS_OPEN)
        return ns;
    if (ns && s->peer.admin)
        return session_ns_open(call, ns) == 0 ? ns : NULL;
    /* The same text whether or not it exists: other tenants must not learn that. */
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "namespace %llu is not open on this connection; call namespace.open first",
                  (unsigned long long)id);
    return NULL;
}

struct ns *call_stored_namespace(struct call *call, uint64_t id)
{
    const struct session *s = call->s;
    struct ns *ns = index_ns(s->rq->rooms.index, (uint32_t)id);

    if (ns && (s->peer.admin || strcmp(ns->identity.tenant, s->peer.tenant) == 0))
        return ns;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "tenant \"%s\" has no namespace %llu; namespace.list lists those that there are",
                  s->peer.tenant, (unsigned long long)id);
    return NULL;
}

uint32_t call_keys(struct call *call, const struct ns *ns, struct proto_bin keys)
{
    uint32_t key_bytes = ns->identity.key_bytes, n = keys.n / key_bytes;

    if (keys.n % key_bytes != 0)
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "keys: %u bytes are no whole number of this namespace's %u-byte keys", keys.n,
                      key_bytes);
    else if (n > UCM_MAX_KEYS)
        ucm_error_set(&call->error, UCM_WIRE_INVALID, "keys: %u keys; a request has at most %u", n,
                      UCM_MAX_KEYS);
    else
        return n;
    return 0;
}

/* ---- namespace.open ---- */

static bool str_equal(struct proto_str a, const char *b)
{
    return a.n == strlen(b) && memcmp(a.p, b, a.n) == 0;
}

/* Identity strings become C strings: a NUL inside would cut one short and make two that differ
 * alike. */
static int text_copy(struct call *call, const char *field, struct proto_str from,
                     char to[UCM_MAX_NAME_BYTES + 1])
{
    if (from.n > 0 && memchr(from.p, '\0', from.n))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s: text may not hold a NUL byte",
                             field);
    if (from.n > 0)
        memcpy(to, from.p, from.n);
    to[from.n] = '\0';
    return 0;
}

static int shards_expand(struct call *call, const struct msg_ns_open *m,
                         uint32_t shards[UCM_MAX_PARTS])
{
    uint64_t limit = arena_extent_bytes(call->s->rq->rooms.arena);

    if (m->shards.n != 1 && m->shards.n != m->parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shards: %u numbers; give one for all parts, or one for each of %llu",
                             m->shards.n, (unsigned long long)m->parts);
    for (uint32_t i = 0; i < m->parts; i++) {
        shards[i] = m->shards.p[m->shards.n == 1 ? 0 : i];
        if (shards[i] < 1 || shards[i] > UCM_MAX_SHARDS)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID, "shards: %u; a part has 1 to %u",
                                 shards[i], UCM_MAX_SHARDS);
        if (shards[i] * m->shard_bytes > limit)
            return ucm_error_set(
                &call->error, UCM_WIRE_INVALID,
                "a part of %u shards of %llu bytes is longer than arena.extent, %llu", shards[i],
                (unsigned long long)m->shard_bytes, (unsigned long long)limit);
    }
    return 0;
}

static int ns_open_checked(struct call *call, const struct msg_ns_open *m, struct ns **out)
{
    struct session *s = call->s;
    char model[UCM_MAX_NAME_BYTES + 1], revision[UCM_MAX_NAME_BYTES + 1];
    char dtype[UCM_MAX_NAME_BYTES + 1], layout[UCM_MAX_NAME_BYTES + 1];
    uint32_t shards[UCM_MAX_PARTS];
    struct ns_identity id = {
        .tenant = s->peer.tenant,
        .model = model,
        .revision = revision,
        .dtype = dtype,
        .layout = layout,
        .block_tokens = (uint32_t)m->block_tokens,
        .key_bytes = (uint32_t)m->key_bytes,
        .parts = (uint32_t)m->parts,
        .shards = shards,
        .shard_bytes = m->shard_bytes,
        .salt = m->salt.p,
        .salt_bytes = m->salt.n,
    };
    int rc = shards_expand(call, m, shards);

    if (rc == 0)
        rc = text_copy(call, "model", m->model, model);
    if (rc == 0)
        rc = text_copy(call, "revision", m->revision, revision);
    if (rc == 0)
        rc = text_copy(call, "dtype", m->dtype, dtype);
    if (rc == 0)
        rc = text_copy(call, "layout", m->layout, layout);
    return rc != 0 ? rc : index_ns_open(s->rq->rooms.index, &id, s->peer.owner, out, &call->error);
}

bool session_durable(struct session *s, const struct ns *ns, uint64_t durability)
{
    if (durability == UCM_DURABILITY_DEFAULT)
        return s->ns[index_ns_place(s->rq->rooms.index, ns)] & SESSION_NS_DURABLE;
    return durability == UCM_DURABILITY_NVME;
}

int method_ns_open(struct call *call)
{
    struct session *s = call->s;
    const struct msg_ns_open *m = &call->params.ns_open;
    uint8_t names[UCM_FINGERPRINT_BYTES], *flags;
    struct msg_ns_open_r r;
    struct ns *ns;
    int rc;

    if (m->tenant.n > 0 && !str_equal(m->tenant, s->peer.tenant))
        return ucm_error_set(
            &call->error, UCM_WIRE_DENIED,
            "uid %u belongs to tenant \"%s\"; the config's `tenants` says who may act "
            "for another",
            (unsigned)s->peer.uid, s->peer.tenant);
    rc = ns_open_checked(call, m, &ns);
    if (rc == 0)
        rc = session_ns_open(call, ns);
    if (rc != 0)
        return rc;
    /* Its names on shared roots, which may have to be read, are there for the first lookup then. */
    (void)cache_shared_fingerprint(s->rq->rooms.cache, ns, names);
    flags = &s->ns[index_ns_place(s->rq->rooms.index, ns)];
    *flags &= (uint8_t)~SESSION_NS_DURABLE;
    if (m->durability == UCM_DURABILITY_NVME)
        *flags |= SESSION_NS_DURABLE;
    r = (struct msg_ns_open_r){.ns = ns->id,
                               .fingerprint = {ns->fingerprint, UCM_FINGERPRINT_BYTES}};
    return call_reply(call, &r);
}

/* ---- what is found ---- */

#define FIND_KEYS 256u

static bool is_bypassed(const struct requests *rq, const struct view *v)
{
    return bypass_on(rq, v->ns[0], BYPASS_LOAD) &&
           (v->n == 1 || bypass_on(rq, v->ns[1], BYPASS_LOAD));
}

/* Adds blocks of ns: where there is none yet, and where that one has to be read and this one has not.
 * Returns how many keys have no block in DRAM; *missing: none at all. */
static uint32_t find_in(struct requests *rq, const struct ns *ns, const uint8_t *keys, uint32_t n,
                        block_ref *refs, uint32_t *missing)
{
    struct cache *c = rq->rooms.cache;
    block_ref found[FIND_KEYS];
    uint32_t not_in_dram = 0;

    assert(n <= FIND_KEYS);
    if (bypass_on(rq, ns, BYPASS_LOAD))
        memset(found, 0, n * sizeof(*found));
    else
        index_find_many(rq->rooms.index, ns, keys, n, false, found);
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
        index_find_many(rq->rooms.index, v->ns[0], keys, n, stop_at_gap, refs);
    else
        find_in_both(rq, v, keys, n, stop_at_gap, refs);
    return true;
}

void view_touch(struct requests *rq, const struct view *v, const block_ref *refs, uint32_t n)
{
    if (v->n == 1 || n == 0) { /* of none, too: the policy's last chain ends */
        cache_touch(rq->rooms.cache, v->ns[0], refs, n);
        return;
    }
    cache_touch_own(rq->rooms.cache, v->ns[0], refs, n);
    cache_touch_own(rq->rooms.cache, v->ns[1], refs, n);
}

/* ---- the shared tier ---- */

/* Of a chain that changes its form more often than this the tail is found by the next lookup. */
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

static void looked_cb(struct shared_lookup *k);

static bool round_begin(struct view_look *look, struct ns *ns, struct proto_bin keys)
{
    if (shared_lookup_start(look->s, ns, keys, look->each ? 0 : look->hits, look->each,
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
    if (!look->each)
        look->hits = prefix_found(look, keys);
    if (look->hits == keys.n / look->view.ns[0]->identity.key_bytes)
        return false;
    /* The form that was asked last has no more of the chain. */
    if (look->rounds >= 2 && look->hits == before)
        return false;
    while (look->rounds < (look->each ? 2 : ROUNDS_MAX) &&
           uv_now(look->s->rq->rooms.loop) < look->until_ms) {
        if (round_begin(look, look->view.ns[look->rounds++ % 2], keys))
            return true;
        if (look->rounds >= 2)
            return false;
    }
    return false;
}

static void looked_cb(struct shared_lookup *k)
{
    struct view_look *look = k->ctx;

    look->k = NULL;
    if (!look_next(look, (struct proto_bin){k->keys, look->keys_bytes}))
        look->done_cb(look, k->keys);
    shared_lookup_free(k);
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
    shared_lookup_cancel(look->k);
    look->k = NULL;
}
