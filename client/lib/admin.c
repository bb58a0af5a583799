#include "client/lib/internal.h"

#include <stdlib.h>

struct counted {
    struct client_call call;
    uint64_t *changed, *busy;
};

static int count_take_cb(struct client_call *call, struct proto_envelope *env, struct ucm_error *e)
{
    struct counted *counted = (struct counted *)call;
    struct msg_count_r m;
    int r = client_take(&proto_count_r, env, &m, e);

    if (r)
        return r;
    if (counted->changed)
        *counted->changed = m.blocks;
    if (counted->busy)
        *counted->busy = m.busy;
    return 0;
}

static int keys_call(struct ucm_namespace *ns, enum ucm_method method, const void *keys,
                     uint32_t n_keys, int timeout_ms, uint64_t *changed, uint64_t *busy)
{
    struct counted counted = {.changed = changed, .busy = busy};
    struct msg_evict evict = {0};
    struct msg_keys other = {0};
    struct proto_bin bin = {0};
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!ns)
        return client_fail(UCM_EINVALID, "namespace is NULL");
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    if (keys || n_keys > 0)
        r = client_keys_check(c, ns, keys, n_keys, &bin);
    evict.keys = other.keys = bin;
    if (r == 0 && method == UCM_METHOD_EVICT)
        r = client_exchange(&counted.call, count_take_cb, &ns->handle, &evict.ns, method,
                            &proto_evict, &evict, deadline_ns);
    else if (r == 0)
        r = client_exchange(&counted.call, count_take_cb, &ns->handle, &other.ns, method,
                            &proto_keys, &other, deadline_ns);
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

static int raw_take_cb(struct client_call *call, struct proto_envelope *env, struct ucm_error *e)
{
    struct raw *raw = (struct raw *)call;
    msgpack_packer pk;

    msgpack_packer_init(&pk, &raw->result, msgpack_sbuffer_write);
    if (msgpack_pack_object(&pk, env->body) == 0)
        return 0;
    return ucm_error_set(e, UCM_ENOMEMORY, "no memory for the result");
}

static int raw_send(struct raw *raw, const char *method, const void *params, size_t params_bytes,
                    int64_t deadline_ns)
{
    static const uint8_t empty_map = 0x80;
    struct ucm_client *c = raw->call.client;
    struct proto_builder pb;
    struct ucm_error e = {0};
    int r = client_begin(c, NULL, deadline_ns);

    if (r)
        return r;
    client_request_prepare(&raw->call);
    proto_request_begin(&pb, &c->out, raw->call.msgid, method);
    proto_pack_raw(&pb.pk, params ? params : &empty_map, params ? params_bytes : 1);
    r = proto_response_end(&pb, &e);
    r = client_request_send(&raw->call, r, &e, NULL, 0, deadline_ns);
    if (r)
        return r;
    if (client_call_wait(&raw->call, deadline_ns) == 0)
        return client_call_status(&raw->call);
    client_call_unlink(&raw->call);
    return client_fail(UCM_EDEADLINE, "ucmd did not answer %s in time", method);
}

static bool is_map(const uint8_t *p, size_t n)
{
    return n > 0 && ((*p & 0xf0) == 0x80 || *p == 0xde || *p == 0xdf);
}

int ucm_call(struct ucm_client *c, const char *method, const void *params, size_t params_bytes,
             int timeout_ms, uint8_t **result, size_t *result_bytes)
{
    struct raw raw = {0};
    int64_t deadline_ns;
    int r;

    if (!c || !method || !result || !result_bytes)
        return client_fail(UCM_EINVALID, "client, method, result or result_bytes is NULL");
    if (params && !is_map(params, params_bytes))
        return client_fail(UCM_EINVALID, "params must be a packed map, or NULL");
    r = client_enter(c);
    if (r)
        return r;
    r = client_call_init(&raw.call, c, raw_take_cb, NULL);
    if (r)
        return client_leave(c, r);
    msgpack_sbuffer_init(&raw.result);
    deadline_ns = client_deadline(c, timeout_ms);
    do
        r = raw_send(&raw, method, params, params_bytes, deadline_ns);
    while (r == CLIENT_AGAIN);
    if (r == 0) {
        *result_bytes = raw.result.size;
        *result = (uint8_t *)msgpack_sbuffer_release(&raw.result);
    }
    msgpack_sbuffer_destroy(&raw.result);
    client_call_close(&raw.call);
    return client_leave(c, r);
}
