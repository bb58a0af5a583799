#include "client/lib/internal.h"

struct counted {
    struct client_call call;
    uint64_t *changed, *busy;
};

static int count_take_cb(struct client_call *call, const union proto_any *any)
{
    struct counted *counted = (struct counted *)call;
    const struct msg_count_r *m = &any->count_r;

    if (counted->changed)
        *counted->changed = m->blocks;
    if (counted->busy)
        *counted->busy = m->busy;
    return 0;
}

static int keys_call(struct ucm_namespace *ns, enum ucm_method method, const void *keys,
                     uint32_t n_keys, int timeout_ms, uint64_t *changed, uint64_t *busy)
{
    struct counted counted = {.changed = changed, .busy = busy};
    union proto_any m = {0};
    bool evict = method == UCM_METHOD_EVICT;
    struct client_request q = {
        .method = method, .params = &m, .handle_id = evict ? &m.evict.ns : &m.keys.ns};
    struct ucm_client *c = ns ? ns->handle.client : NULL;
    int r = client_enter_given(c, "namespace");

    if (r)
        return r;
    q.handle = &ns->handle;
    if (keys || n_keys > 0)
        r = client_keys_check(c, ns, keys, n_keys, evict ? &m.evict.keys : &m.keys.keys);
    if (r == 0)
        r = client_exchange(&counted.call, c, count_take_cb, &q, client_deadline(c, timeout_ms));
    return client_leave(c, r);
}

int ucm_pin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
            uint64_t *changed)
{
    return keys_call(ns, UCM_METHOD_PIN, keys, n_keys, timeout_ms, changed, NULL);
}

int ucm_unpin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
              uint64_t *changed)
{
    return keys_call(ns, UCM_METHOD_UNPIN, keys, n_keys, timeout_ms, changed, NULL);
}

int ucm_evict(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
              uint64_t *changed, uint64_t *busy)
{
    return keys_call(ns, UCM_METHOD_EVICT, keys, n_keys, timeout_ms, changed, busy);
}

/* ---- any method ---- */

struct raw {
    struct client_call call;
    msgpack_sbuffer result;
};

static int raw_take_cb(struct client_call *call, const union proto_any *any)
{
    struct raw *raw = (struct raw *)call;
    msgpack_packer pk;

    (void)any;
    msgpack_packer_init(&pk, &raw->result, msgpack_sbuffer_write);
    if (msgpack_pack_object(&pk, call->answer->body) == 0)
        return 0;
    return ucm_error_set(&call->error, UCM_ENOMEMORY, "no memory for the result");
}

static bool is_map(const uint8_t *p, size_t n)
{
    return n > 0 && ((*p & 0xf0) == 0x80 || *p == 0xde || *p == 0xdf);
}

int ucm_call(struct ucm_client *c, const char *method, const void *params, size_t params_bytes,
             int timeout_ms, uint8_t **result, size_t *result_bytes)
{
    static const uint8_t empty_map = 0x80;
    struct client_request q = {.name = method,
                               .params = params ? params : &empty_map,
                               .packed_bytes = params ? params_bytes : 1};
    struct raw raw;
    int r;

    if (!c || !method || !result || !result_bytes)
        return client_fail(UCM_EINVALID, "client, method, result or result_bytes is NULL");
    if (params && !is_map(params, params_bytes))
        return client_fail(UCM_EINVALID, "params must be a packed map, or NULL");
    r = client_enter(c);
    if (r)
        return r;
    msgpack_sbuffer_init(&raw.result);
    r = client_exchange(&raw.call, c, raw_take_cb, &q, client_deadline(c, timeout_ms));
    if (r == 0) {
        *result_bytes = raw.result.size;
        *result = (uint8_t *)msgpack_sbuffer_release(&raw.result);
    }
    msgpack_sbuffer_destroy(&raw.result);
    return client_leave(c, r);
}
