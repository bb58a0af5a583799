/* Block metadata, for readers of the daemon's events. */
#include "client/lib/internal.h"

#include <string.h>

/* Blocks of one request, at most. */
static uint32_t most(const struct ucm_namespace *ns)
{
    uint64_t n = UCM_MAX_FRAME_BYTES / 2 / 4 / ns->open.block_tokens;

    return (uint32_t)(n < UCM_MAX_METADATA_KEYS ? n : UCM_MAX_METADATA_KEYS);
}

static int send_metadata(struct ucm_client *c, struct ucm_namespace *ns,
                         const struct ucm_block_metadata *d, int64_t deadline_ns)
{
    uint32_t key_bytes = (uint32_t)ns->open.key_bytes, tokens = (uint32_t)ns->open.block_tokens;
    const uint8_t *keys = d->keys;
    struct proto_bin parent = {d->parent, d->parent ? key_bytes : 0};

    for (uint32_t at = 0, n; at < d->n_keys; at += n) {
        struct msg_events_metadata m = {.parent = parent,
                                        .lora = {d->lora, d->lora ? (uint32_t)strlen(d->lora) : 0}};
        struct client_request q = {.method = UCM_METHOD_EVENTS_METADATA,
                                   .params = &m,
                                   .handle = &ns->handle,
                                   .handle_id = &m.ns};
        struct client_call call;
        int r;

        n = d->n_keys - at < most(ns) ? d->n_keys - at : most(ns);
        m.keys = (struct proto_bin){keys + (size_t)at * key_bytes, n * key_bytes};
        m.tokens =
            (struct proto_bin){(const uint8_t *)(d->tokens + (size_t)at * tokens), n * tokens * 4};
        r = client_exchange(&call, c, NULL, &q, deadline_ns);
        if (r)
            return r;
        parent = (struct proto_bin){m.keys.p + (size_t)(n - 1) * key_bytes, key_bytes};
    }
    return 0;
}

int ucm_block_metadata(struct ucm_namespace *ns, const struct ucm_block_metadata *d, int timeout_ms)
{
    struct ucm_client *c;
    int r;

    if (!ns || !d || (d->n_keys > 0 && (!d->keys || !d->tokens)))
        return client_fail(UCM_EINVALID, "namespace, metadata, keys or tokens is NULL");
    if (most(ns) == 0)
        return client_fail(UCM_EINVALID,
                           "blocks of so many tokens have too much metadata for a request");
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    return client_leave(c, send_metadata(c, ns, d, client_deadline(c, timeout_ms)));
}
