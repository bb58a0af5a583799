#include "client/lib/sparse/internal.h"

#include <stdlib.h>
#include <string.h>

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_namespace *ns = (struct ucm_namespace *)client_handle_of(call);
    const struct msg_summary_open_r *m = &any->summary_open_r;

    if (m->layer_bytes != ns->open.layer_bytes)
        return ucm_error_set(&call->error, UCM_EUNSUPPORTED,
                             "ucmd's summaries of this kind have %llu bytes, the library's %llu: "
                             "their versions differ",
                             (unsigned long long)m->layer_bytes,
                             (unsigned long long)ns->open.layer_bytes);
    ns->handle.id = (uint32_t)m->ns;
    memcpy(ns->fingerprint, m->fingerprint.p, sizeof ns->fingerprint);
    return 0;
}

static void spec_to_wire(const struct ucm_sparse_summary *d, struct msg_summary_open *m)
{
    const struct ucm_sparse_shape *s = &d->shape;

    *m = (struct msg_summary_open){
        .method = d->method,
        .kind = d->kind,
        .run = d->run,
        .keep = {d->keep, d->keep_bytes},
        .pairs = d->pairs,
        .bits = d->bits,
        .rope_bits = d->rope_bits,
        .seed = d->seed,
        .chosen = d->chosen,
        .rest = d->rest,
        .dtype = s->dtype,
        .kv_heads = s->kv_heads,
        .head_dim = s->head_dim,
        .v_head_dim = s->v_head_dim,
        .rope_dim = s->rope_dim,
        .k_offset = s->k_offset,
        .k_token_stride = s->k_token_stride,
        .k_head_stride = s->k_head_stride,
        .v_offset = s->v_offset,
        .v_token_stride = s->v_token_stride,
        .v_head_stride = s->v_head_stride,
    };
}

/* A namespace like the base. It borrows the base's strings and numbers, so the handle references
 * the base. */
static struct ucm_namespace *summaries_new(struct ucm_namespace *base,
                                           const struct ucm_sparse_summary *d, uint64_t bytes,
                                           bool build)
{
    struct ucm_namespace *ns = calloc(1, sizeof *ns + sizeof *ns->summary);
    struct client_request q = {UCM_METHOD_SUMMARY_OPEN, .handle = &base->handle};

    if (!ns)
        return NULL;
    ns->summary = (struct client_summary *)(ns + 1);
    ns->summary->summary = *d;
    if (d->keep_bytes > 0) {
        memcpy(ns->summary->keep, d->keep, d->keep_bytes);
        ns->summary->summary.keep = ns->summary->keep;
    }
    ns->open = base->open;
    ns->open.layer_bytes = bytes;
    spec_to_wire(&ns->summary->summary, &ns->summary->open);
    ns->summary->open.build = build;
    q.params = &ns->summary->open;
    q.handle_id = &ns->summary->open.ns;
    client_handle_init(&ns->handle, base->handle.client, &q, open_take_cb);
    return ns;
}

int ucm_sparse_summary_open(struct ucm_namespace *base, const struct ucm_sparse_summary *summary,
                            int build, int timeout_ms, struct ucm_namespace **out)
{
    struct ucm_namespace *ns;
    struct ucm_client *c;
    uint64_t bytes;
    int r;

    if (!base || !summary || !out)
        return client_fail(UCM_EINVALID, "base, summary or out is NULL");
    if (base->summary)
        return client_fail(UCM_EINVALID, "summaries of summaries: base must hold KV");
    r = ucm_sparse_summary_bytes(summary, &bytes);
    if (r)
        return r;
    if (summary->shape.tokens != base->open.block_tokens)
        return client_fail(UCM_EINVALID, "shape.tokens is %u, but the base's blocks have %u tokens",
                           summary->shape.tokens, (unsigned)base->open.block_tokens);
    c = base->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    ns = summaries_new(base, summary, bytes, build);
    if (!ns)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for the namespace"));
    r = client_handle_open(&ns->handle, client_deadline(c, timeout_ms));
    if (r == 0)
        *out = ns;
    return client_leave(c, r);
}

int ucm_sparse_summary_build(struct ucm_namespace *ns, const struct ucm_transfer *t, int timeout_ms,
                             struct ucm_task **out)
{
    struct msg_summary_build m;
    struct client_request q = {UCM_METHOD_SUMMARY_BUILD, &m, .handle_id = &m.ns};

    if (!ns || !t || !out)
        return client_fail(UCM_EINVALID, "namespace, transfer or out is NULL");
    if (!ns->summary)
        return client_fail(UCM_EINVALID, "summaries are built in a namespace of "
                                         "ucm_sparse_summary_open");
    q.handle = &ns->handle;
    m = (struct msg_summary_build){.part = t->part,
                                   .parts = t->n_parts,
                                   .priority = t->priority,
                                   .timeout_ms = t->daemon_timeout_ms};
    return client_task_start(&q, ns, &m.keys, t, timeout_ms, out);
}
