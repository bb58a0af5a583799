/* encryption_key.list and encryption_key.reload: what operators see and change of tenants' keys.
 * Never a key, only ids. */
#include "daemon/admin/admin.h"
#include "daemon/encryption/encryption.h"
#include "daemon/request/internal.h"

#include <stdio.h>

static uint64_t encrypted_by(const struct request_modules *r, const uint8_t *id, uint64_t *parts)
{
    uint64_t bytes = 0;

    *parts = 0;
    if (r->tier)
        r->tier_ops->encrypted(r->tier, id, parts, &bytes);
    return bytes;
}

/* Bytes of the keys that are current, or of those that are not, whose ids nobody has counted yet:
 * one key may be of several tenants, and ids count together when their first 16 bits agree. */
static uint64_t encrypted_by_those(const struct request_modules *r, bool current,
                                   uint8_t counted[8192])
{
    struct encryption_tenant_view v;
    uint64_t bytes = 0, parts;

    for (unsigned i = 0; encryption_view(r->encryption, i, &v); i++)
        for (unsigned k = 0; k < v.keys; k++) {
            const uint8_t *id = v.id[k];

            if ((k + 1 == v.keys) != current || counted[id[0] << 5 | id[1] >> 3] & 1 << id[1] % 8)
                continue;
            counted[id[0] << 5 | id[1] >> 3] |= (uint8_t)(1 << id[1] % 8);
            bytes += encrypted_by(r, id, &parts);
        }
    return bytes;
}

void keys_observe(const struct request_modules *r, struct metrics *out)
{
    uint8_t counted[8192] = {0};
    uint64_t parts, all = encrypted_by(r, NULL, &parts);

    if (all == 0)
        return;
    out->encryption_bytes_current = encrypted_by_those(r, true, counted);
    out->encryption_bytes_older = encrypted_by_those(r, false, counted);
    out->encryption_bytes_unknown =
        all - out->encryption_bytes_current - out->encryption_bytes_older;
}

static void pack_encrypted(msgpack_packer *pk, const struct request_modules *r,
                           const struct encryption_tenant_view *v, bool of_parts)
{
    proto_pack_str(pk, of_parts ? "nvme_parts" : "nvme_bytes");
    msgpack_pack_array(pk, v->keys);
    for (unsigned i = 0; i < v->keys; i++) {
        uint64_t parts, bytes = encrypted_by(r, v->id[i], &parts);

        msgpack_pack_uint64(pk, of_parts ? parts : bytes);
    }
}

static void pack_tenant(msgpack_packer *pk, const struct request_modules *r,
                        const struct encryption_tenant_view *v)
{
    char text[2 * ENCRYPTION_ID_BYTES + 1], error[200];

    snprintf(error, sizeof(error), "%s", v->error);
    proto_clean(error); /* it holds paths */
    msgpack_pack_map(pk, 7);
    proto_pack_text(pk, "tenant", v->tenant);
    proto_pack_text(pk, "source", v->source);
    proto_pack_str(pk, "ids");
    msgpack_pack_array(pk, v->keys);
    for (unsigned i = 0; i < v->keys; i++) {
        for (unsigned byte = 0; byte < ENCRYPTION_ID_BYTES; byte++)
            snprintf(text + 2 * (size_t)byte, 3, "%02x", v->id[i][byte]);
        proto_pack_str(pk, text);
    }
    pack_encrypted(pk, r, v, true);
    pack_encrypted(pk, r, v, false);
    proto_pack_flag(pk, "reading", v->reading);
    proto_pack_text(pk, "error", error);
}

static int answer(struct call *call)
{
    const struct encryption *encryption = call->s->rq->modules.encryption;
    struct encryption_tenant_view v;
    struct proto_builder pb;
    unsigned n = 0;

    while (encryption_view(encryption, n, &v))
        n++;
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 1);
    proto_pack_str(&pb.pk, "keys");
    msgpack_pack_array(&pb.pk, n);
    for (unsigned i = 0; encryption_view(encryption, i, &v); i++)
        pack_tenant(&pb.pk, &call->s->rq->modules, &v);
    return call_reply_map(call, &pb);
}

int method_encryption_key_list(struct call *call)
{
    return call_operator(call) ? answer(call) : -call->error.code;
}

int method_encryption_key_reload(struct call *call)
{
    const struct msg_key_reload *m = &call->params.key_reload;
    char tenant[UCM_MAX_NAME_BYTES + 1];
    int rc;

    if (!call_operator(call))
        return -call->error.code;
    snprintf(tenant, sizeof(tenant), "%.*s", (int)m->tenant.n, m->tenant.p);
    rc = encryption_reload(call->s->rq->modules.encryption, tenant[0] ? tenant : NULL);
    audit(call->s, UCM_METHOD_ENCRYPTION_KEY_RELOAD, "tenant=\"%s\" sources=%d", tenant,
          rc < 0 ? 0 : rc);
    if (rc < 0)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "encryption.tenants has no \"%s\"",
                             tenant);
    return answer(call);
}
