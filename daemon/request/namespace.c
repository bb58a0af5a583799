/* namespace.open. */
#include "daemon/request/internal.h"

#include <string.h>

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

static int layers_expand(struct call *call, const struct msg_ns_open *m,
                         uint32_t layers[UCM_MAX_PARTS])
{
    uint64_t limit = arena_slab_bytes(call->s->rq->modules.arena);

    if (m->layers.n != 1 && m->layers.n != m->parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "layers: %u numbers; give one for all parts, or one for each of %llu",
                             m->layers.n, (unsigned long long)m->parts);
    for (uint32_t i = 0; i < m->parts; i++) {
        layers[i] = m->layers.p[m->layers.n == 1 ? 0 : i];
        if (layers[i] < 1 || layers[i] > UCM_MAX_LAYERS)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID, "layers: %u; a part has 1 to %u",
                                 layers[i], UCM_MAX_LAYERS);
        if (layers[i] * m->layer_bytes > limit)
            return ucm_error_set(
                &call->error, UCM_WIRE_INVALID,
                "a part of %u layers of %llu bytes is longer than arena.slab, %llu", layers[i],
                (unsigned long long)m->layer_bytes, (unsigned long long)limit);
    }
    return 0;
}

static int ns_open_checked(struct call *call, const struct msg_ns_open *m, struct ns **out)
{
    struct session *s = call->s;
    char model[UCM_MAX_NAME_BYTES + 1], revision[UCM_MAX_NAME_BYTES + 1];
    char dtype[UCM_MAX_NAME_BYTES + 1], layout[UCM_MAX_NAME_BYTES + 1];
    uint32_t layers[UCM_MAX_PARTS];
    struct ns_identity id = {
        .tenant = s->peer.tenant,
        .model = model,
        .revision = revision,
        .dtype = dtype,
        .layout = layout,
        .block_tokens = (uint32_t)m->block_tokens,
        .key_bytes = (uint32_t)m->key_bytes,
        .parts = (uint32_t)m->parts,
        .layers = layers,
        .layer_bytes = m->layer_bytes,
        .salt = m->salt.p,
        .salt_bytes = m->salt.n,
    };
    int rc = layers_expand(call, m, layers);

    if (rc == 0)
        rc = text_copy(call, "model", m->model, model);
    if (rc == 0)
        rc = text_copy(call, "revision", m->revision, revision);
    if (rc == 0)
        rc = text_copy(call, "dtype", m->dtype, dtype);
    if (rc == 0)
        rc = text_copy(call, "layout", m->layout, layout);
    return rc != 0 ? rc
                   : index_ns_open(s->rq->modules.index, &id, s->peer.owner, out, &call->error);
}

int method_ns_open(struct call *call)
{
    struct session *s = call->s;
    const struct msg_ns_open *m = &call->params.ns_open;
    uint8_t names[UCM_FINGERPRINT_BYTES], *flags;
    struct msg_ns_open_r r;
    struct ns *ns;
    int rc;

    if (m->tenant.n > 0 && !proto_str_is(m->tenant, s->peer.tenant))
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
    (void)cache_shared_fingerprint(s->rq->modules.cache, ns, names);
    flags = &s->ns[index_ns_place(s->rq->modules.index, ns)];
    *flags &= (uint8_t)~SESSION_NS_DURABLE;
    if (m->durability == UCM_DURABILITY_NVME)
        *flags |= SESSION_NS_DURABLE;
    r = (struct msg_ns_open_r){.ns = ns->id,
                               .fingerprint = {ns->fingerprint, UCM_FINGERPRINT_BYTES}};
    return call_reply(call, &r);
}
