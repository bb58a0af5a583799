/* encoding.open: blocks of a base namespace in another form, under the same keys.
 *
 * An encoded namespace's identity is a function of the base's and of the encoding's spec. So
 * clients that open the same spec find the same blocks, and no others. Its geometry is that of the
 * encoded form: index, cache and tiers hold, move and check encoded bytes and know nothing of
 * encodings. Devices encode and decode (device_job.converts). */
#include "daemon/index/ns_form.h"
#include "daemon/request/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse_encoding(struct call *call, struct proto_str name)
{
    char known[128] = "", quoted[65];

    for (unsigned i = 0; ucm_encoding_methods[i]; i++)
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "",
                 ucm_encoding_methods[i]->name);
    proto_quote(name, quoted, sizeof(quoted));
    return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                         "encoding: \"%s\"; this daemon knows %s", quoted, known);
}

static int method_take(struct call *call, const struct msg_encoding_open *m,
                       struct ucm_encoding_spec *spec)
{
    const struct ucm_encoding_method *method = NULL;

    for (unsigned i = 0; ucm_encoding_methods[i] && !method; i++)
        if (proto_str_is(m->encoding, ucm_encoding_methods[i]->name))
            method = ucm_encoding_methods[i];
    if (!method)
        return refuse_encoding(call, m->encoding);
    if (m->version != 0 && m->version != method->version)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "version: %llu of %s; this daemon knows version %u",
                             (unsigned long long)m->version, method->name, method->version);
    spec->encoding = method->number;
    spec->version = method->version;
    return 0;
}

static int dtype_take(struct call *call, struct proto_str dtype, struct ucm_encoding_spec *spec)
{
    static const char *const names[] = {[UCM_ENCODING_F32] = "f32",
                                        [UCM_ENCODING_F16] = "f16",
                                        [UCM_ENCODING_BF16] = "bf16",
                                        [UCM_ENCODING_FP8_E4M3] = "fp8_e4m3"};
    char quoted[65];

    for (uint32_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (proto_str_is(dtype, names[i])) {
            spec->dtype = i;
            return 0;
        }
    proto_quote(dtype, quoted, sizeof(quoted));
    return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                         "dtype: \"%s\"; f32, f16, bf16 and fp8_e4m3 are known", quoted);
}

static void tensor_take(struct proto_u32s from, uint32_t kind, uint64_t order,
                        struct ucm_encoding_spec *spec)
{
    spec->tensor[spec->n_tensors++] = (struct ucm_encoding_tensor){.kind = kind,
                                                                   .tokens = from.p[0],
                                                                   .heads = from.p[1],
                                                                   .dim = from.p[2],
                                                                   .order = (uint32_t)order};
}

static int spec_take(struct call *call, const struct msg_encoding_open *m, const struct ns *base,
                     struct ucm_encoding_spec *spec)
{
    char why[UCM_ENCODING_WHY];
    uint64_t raw;
    int rc;

    *spec = (struct ucm_encoding_spec){
        .axis = (uint32_t)m->axis, .run = (uint32_t)m->run, .seed = m->seed};
    rc = method_take(call, m, spec);
    if (rc == 0)
        rc = dtype_take(call, m->dtype, spec);
    if (rc != 0)
        return rc;
    if (m->v.n != 0 && m->v.n != 3)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "v: %u numbers; tokens, heads and elements of a row, or none", m->v.n);
    tensor_take(m->k, UCM_ENCODING_K, m->order, spec);
    if (m->v.n > 0)
        tensor_take(m->v, UCM_ENCODING_V, m->order, spec);
    if (ucm_encoding_check(spec, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s", why);
    raw = ucm_encoding_raw_layer_bytes(spec);
    if (raw != base->identity.layer_bytes)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "k and v: %llu bytes a layer; the base namespace's have %llu "
                             "(layer_bytes)",
                             (unsigned long long)raw,
                             (unsigned long long)base->identity.layer_bytes);
    return 0;
}

/* The base holds KV as it is. */
static int base_check(struct call *call, const struct ns *base)
{
    struct ns_encoded id;

    if (ns_encoded(&base->identity, &id))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "namespace %u is encoded already (%s); name its base", base->id,
                             id.encoding);
    if (strcmp(base->identity.dtype, "summary") == 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "namespace %u holds summaries; only KV is encoded", base->id);
    return 0;
}

static int encoded_open(struct call *call, const struct ns *base,
                        const struct ucm_encoding_spec *spec, struct ns **out)
{
    struct requests *rq = call->s->rq;
    struct ns_encoded_memory memory;
    struct ns_identity id;

    ns_encoded_identity(base, spec, &memory, &id);
    for (uint32_t part = 0; part < id.parts; part++)
        if (id.layers[part] * id.layer_bytes > arena_slab_bytes(rq->modules.arena))
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "%u layers of %llu encoded bytes are longer than arena.slab, %llu",
                                 id.layers[part], (unsigned long long)id.layer_bytes,
                                 (unsigned long long)arena_slab_bytes(rq->modules.arena));
    return index_ns_open(rq->modules.index, &id, call->s->peer.owner, out, &call->error);
}

int method_encoding_open(struct call *call)
{
    const struct msg_encoding_open *m = &call->params.encoding_open;
    struct session *s = call->s;
    struct ns *base = call_namespace(call, m->ns), *encoded;
    struct ucm_encoding_spec spec;
    struct msg_encoding_open_r r;
    int rc = base ? base_check(call, base) : -call->error.code;

    if (rc == 0)
        rc = spec_take(call, m, base, &spec);
    if (rc == 0)
        rc = encoded_open(call, base, &spec, &encoded);
    if (rc == 0)
        rc = session_ns_open(call, encoded);
    if (rc != 0)
        return rc;
    assert(ns_codec(encoded)); /* it was made by a spec that this daemon knows */
    if (!encoded->base)
        index_ns_derive(call->s->rq->modules.index, encoded, base);
    session_ns_with_base(s, encoded, base);
    r = (struct msg_encoding_open_r){.ns = encoded->id,
                                     .fingerprint = {encoded->fingerprint, UCM_FINGERPRINT_BYTES},
                                     .version = spec.version,
                                     .encoded_bytes = encoded->block_bytes,
                                     .raw_bytes = base->block_bytes};
    return call_reply(call, &r);
}
