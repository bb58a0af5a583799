#include "client/lib/internal.h"

#include <stdlib.h>
#include <string.h>

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_namespace *ns = (struct ucm_namespace *)client_handle_of(call);

    ns->handle.id = (uint32_t)any->ns_open_r.ns;
    memcpy(ns->fingerprint, any->ns_open_r.fingerprint.p, sizeof ns->fingerprint);
    return 0;
}

/* Checks what the wire could not carry as meant. The daemon checks the rest. */
static int identity_check(const struct ucm_identity *id)
{
    if (!id->model || !id->dtype || !id->layout)
        return client_fail(UCM_EINVALID, "model, dtype and layout must be given");
    if (!id->layers || id->n_layers == 0)
        return client_fail(UCM_EINVALID, "layers must name the layers of a part");
    if (id->durability > UCM_DURABLE_IN_DRAM)
        return client_fail(UCM_EINVALID, "durability is %u; see enum ucm_durability",
                           id->durability);
    if (id->salt_bytes > 0 && !id->salt)
        return client_fail(UCM_EINVALID, "salt is NULL, but salt_bytes is %zu", id->salt_bytes);
    if (id->salt_bytes > UCM_MAX_SALT_BYTES || id->n_layers > UCM_MAX_PARTS)
        return client_fail(UCM_EINVALID, "salt_bytes is %zu and n_layers %u; at most %d and %d",
                           id->salt_bytes, id->n_layers, UCM_MAX_SALT_BYTES, UCM_MAX_PARTS);
    return 0;
}

#define NAMES 5

static void identity_copy(struct ucm_namespace *ns, const struct ucm_identity *id,
                          const struct proto_str names[NAMES])
{
    struct proto_str *to[NAMES] = {&ns->open.tenant, &ns->open.model, &ns->open.revision,
                                   &ns->open.dtype, &ns->open.layout};
    char *at = (char *)(ns->layers + id->n_layers);

    memcpy(ns->layers, id->layers, id->n_layers * sizeof *ns->layers);
    ns->open.layers = (struct proto_u32s){ns->layers, id->n_layers};
    ns->open.salt = (struct proto_bin){(uint8_t *)at, (uint32_t)id->salt_bytes};
    if (id->salt_bytes > 0)
        memcpy(at, id->salt, id->salt_bytes);
    at += id->salt_bytes;
    for (size_t i = 0; i < NAMES; at += names[i++].n) {
        memcpy(at, names[i].p, names[i].n);
        *to[i] = (struct proto_str){at, names[i].n};
    }
    ns->open.block_tokens = id->block_tokens;
    ns->open.key_bytes = id->key_bytes;
    ns->open.parts = id->parts;
    ns->open.layer_bytes = id->layer_bytes;
    ns->open.durability = id->durability == UCM_DURABLE_ON_NVME;
}

static int namespace_new(struct ucm_client *c, const struct ucm_identity *id,
                         struct ucm_namespace **out)
{
    struct proto_str names[NAMES] = {{id->tenant ? id->tenant : "", 0},
                                     {id->model, 0},
                                     {id->revision ? id->revision : "", 0},
                                     {id->dtype, 0},
                                     {id->layout, 0}};
    size_t bytes = id->n_layers * sizeof *id->layers + id->salt_bytes;
    struct client_request q = {.method = UCM_METHOD_NS_OPEN};
    struct ucm_namespace *ns;

    for (size_t i = 0; i < NAMES; i++) {
        names[i].n = (uint32_t)strnlen(names[i].p, UCM_MAX_NAME_BYTES + 1);
        bytes += names[i].n;
        if (names[i].n > UCM_MAX_NAME_BYTES)
            return client_fail(UCM_EINVALID, "a name of the identity is longer than %d bytes",
                               UCM_MAX_NAME_BYTES);
    }
    ns = calloc(1, sizeof *ns + bytes);
    if (!ns)
        return client_fail(UCM_ENOMEMORY, "no memory for the namespace");
    q.params = &ns->open;
    client_handle_init(&ns->handle, c, &q, open_take_cb);
    identity_copy(ns, id, names);
    *out = ns;
    return 0;
}

int ucm_namespace_open(struct ucm_client *c, const struct ucm_identity *identity, int timeout_ms,
                       struct ucm_namespace **out)
{
    struct ucm_namespace *ns = NULL;
    int r;

    if (!c || !identity || !out)
        return client_fail(UCM_EINVALID, "client, identity or out is NULL");
    r = identity_check(identity);
    if (r == 0)
        r = client_enter(c);
    if (r)
        return r;
    r = namespace_new(c, identity, &ns);
    if (r)
        return client_leave(c, r);
    r = client_handle_open(&ns->handle, client_deadline(c, timeout_ms));
    if (r == 0)
        *out = ns;
    return client_leave(c, r);
}

void ucm_namespace_close(struct ucm_namespace *ns)
{
    struct ucm_client *c = ns ? ns->handle.client : NULL;

    if (!c || client_enter(c) != 0)
        return;
    client_handle_drop(&ns->handle);
    client_leave(c, 0);
}

void ucm_namespace_fingerprint(const struct ucm_namespace *ns, uint8_t out[32])
{
    struct ucm_client *c = ns->handle.client;

    if (client_enter(c) != 0)
        return;
    memcpy(out, ns->fingerprint, sizeof ns->fingerprint);
    client_leave(c, 0);
}
