/* summary.open: namespaces of summaries. A summary namespace's identity is a function of the base's
 * and of the summaries' spec. So a client that opens the same spec again finds the same blocks. */
#include "daemon/retrieval/summary.h"
#include "daemon/index/ns_form.h"
#include "daemon/request/view.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What summary.open opened on one connection. */
struct session_space {
    struct list link;
    struct derived_space *space;
    bool watching;
};

/* ---- what sessions have open ---- */

static struct session_space *session_space(struct session *s, const struct ns *derived)
{
    for (struct list *n = session_retrieval(s)->spaces.next; n != &session_retrieval(s)->spaces;
         n = n->next) {
        struct session_space *ss = LIST_ENTRY(n, struct session_space, link);

        if (ss->space->derived == derived)
            return ss;
    }
    return NULL;
}

struct derived_space *call_space(struct call *call, uint64_t id)
{
    struct ns *ns = index_ns(call->s->rq->modules.index, (uint32_t)id);
    struct session_space *ss = ns ? session_space(call->s, ns) : NULL;

    if (ss)
        return ss->space;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "namespace %llu was not opened by summary.open on this connection",
                  (unsigned long long)id);
    return NULL;
}

void spaces_close_all(struct session *s)
{
    struct list *node;

    while ((node = list_pop_front(&session_retrieval(s)->spaces)) != NULL) {
        struct session_space *ss = LIST_ENTRY(node, struct session_space, link);

        if (ss->watching)
            space_unwatch(ss->space);
        space_unref(ss->space);
        free(ss);
    }
}

/* ---- summary.open ---- */

static void spec_take(const struct msg_summary_open *m, const struct ns *base,
                      struct ucm_summary_spec *spec)
{
    *spec = (struct ucm_summary_spec){
        .method = (uint32_t)m->method,
        .kind = (uint32_t)m->kind,
        .run = (uint32_t)m->run,
        .pairs = (uint32_t)m->pairs,
        .keep_bytes = m->keep.n,
        .bits = (uint32_t)m->bits,
        .rope_bits = (uint32_t)m->rope_bits,
        .seed = m->seed,
        .chosen = (uint32_t)m->chosen,
        .rest = (uint32_t)m->rest,
        .shape = {.dtype = (uint32_t)m->dtype,
                  .tokens = base->identity.block_tokens,
                  .kv_heads = (uint32_t)m->kv_heads,
                  .head_dim = (uint32_t)m->head_dim,
                  .v_head_dim = (uint32_t)m->v_head_dim,
                  .rope_dim = (uint32_t)m->rope_dim,
                  .k_offset = m->k_offset,
                  .k_token_stride = m->k_token_stride,
                  .k_head_stride = m->k_head_stride,
                  .v_offset = m->v_offset,
                  .v_token_stride = m->v_token_stride,
                  .v_head_stride = m->v_head_stride},
    };
    if (m->keep.n > 0)
        memcpy(spec->keep, m->keep.p, m->keep.n);
}

static int plan_make(struct call *call, const struct msg_summary_open *m, const struct ns *base,
                     struct ucm_summary_plan *plan)
{
    struct ns_encoded encoded = {.raw_layer_bytes = base->identity.layer_bytes};
    struct ucm_summary_spec spec;
    char why[UCM_SPARSE_WHY];
    uint64_t extent;

    spec_take(m, base, &spec);
    if (ucm_summary_plan_init(plan, &spec, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s", why);
    extent = ucm_summary_extent(&spec);
    (void)ns_encoded(&base->identity, &encoded); /* summaries describe KV as it was computed */
    if (extent > encoded.raw_layer_bytes)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "the shape reaches to byte %llu of a layer; the base namespace's have "
                             "%llu (layer_bytes)",
                             (unsigned long long)extent,
                             (unsigned long long)encoded.raw_layer_bytes);
    return 0;
}

int space_builds(struct call *call, struct ns *base)
{
    struct ns_encoded encoded;

    if (!ns_encoded(&base->identity, &encoded) ||
        (session_view(call->s, base).n > 1 && space_decodes(base)))
        return 0;
    return ucm_error_set(
        &call->error, UCM_WIRE_INVALID,
        "build: the base's blocks are encoded (%s); summaries describe KV as it was "
        "computed, so workers build them and dump them here, unless the base was "
        "opened by encoding.open as lossless",
        encoded.encoding);
}

/* docs/protocol.md, "Block summaries", has this. */
static int derived_open(struct call *call, const struct ns *base,
                        const struct ucm_summary_plan *plan, struct ns **out)
{
    struct requests *rq = call->s->rq;
    uint8_t form[UCM_FINGERPRINT_BYTES + UCM_SUMMARY_CANONICAL_BYTES];
    uint8_t salt[UCM_FINGERPRINT_BYTES];
    struct ns_identity id = base->identity;
    char layout[UCM_MAX_NAME_BYTES + 1];

    memcpy(form, base->fingerprint, UCM_FINGERPRINT_BYTES);
    ucm_summary_canonical(&plan->spec, form + UCM_FINGERPRINT_BYTES);
    if (ns_fingerprint(form, sizeof(form), salt) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a namespace");
    snprintf(layout, sizeof(layout), "summary/1/%s", plan->method->name);
    id.dtype = "summary";
    id.layout = layout;
    id.layer_bytes = plan->bytes;
    id.salt = salt;
    id.salt_bytes = sizeof(salt);
    for (uint32_t part = 0; part < id.parts; part++)
        if (id.layers[part] * id.layer_bytes > arena_slab_bytes(rq->modules.arena))
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "the summaries of %u layers of %llu bytes are longer than "
                                 "arena.slab, %llu",
                                 id.layers[part], (unsigned long long)id.layer_bytes,
                                 (unsigned long long)arena_slab_bytes(rq->modules.arena));
    return index_ns_open(rq->modules.index, &id, call->s->peer.owner, out, &call->error);
}

static int session_space_add(struct call *call, struct ns *base, struct ns *derived,
                             const struct ucm_summary_plan *plan, struct session_space **out)
{
    struct session *s = call->s;
    struct session_space *ss = session_space(s, derived);

    if (!ss) {
        ss = calloc(1, sizeof(*ss));
        if (ss)
            ss->space = space_open(s->rq, base, derived, plan);
        if (!ss || !ss->space) {
            free(ss);
            return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a namespace");
        }
        list_push_back(&session_retrieval(s)->spaces, &ss->link);
    }
    *out = ss;
    return 0;
}

int method_summary_open(struct call *call)
{
    const struct msg_summary_open *m = &call->params.summary_open;
    struct ns *base = call_namespace(call, m->ns), *derived;
    struct ucm_summary_plan plan;
    struct msg_summary_open_r r;
    struct session_space *ss = NULL;
    int rc = base ? plan_make(call, m, base, &plan) : -call->error.code;

    if (rc == 0 && m->build)
        rc = space_builds(call, base);
    if (rc == 0)
        rc = derived_open(call, base, &plan, &derived);
    if (rc == 0)
        rc = session_ns_open(call, derived);
    if (rc == 0)
        rc = session_space_add(call, base, derived, &plan, &ss);
    if (rc != 0)
        return rc;
    if (m->build && !ss->watching) {
        ss->watching = true;
        space_watch(ss->space);
    }
    r = (struct msg_summary_open_r){.ns = derived->id,
                                    .fingerprint = {derived->fingerprint, UCM_FINGERPRINT_BYTES},
                                    .layer_bytes = plan.bytes};
    return call_reply(call, &r);
}
