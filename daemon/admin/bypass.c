/* The incident switch: loads find nothing, or dumps store nothing, of a namespace, a tenant or all,
 * until an operator turns that off or the daemon ends. Engines go on, and compute what they would
 * have loaded.
 *
 * With loads bypassed, a lookup and what appends to sequences find nothing, loads and prefetches
 * are misses, and the shared tier is not asked. With stores bypassed, a dump skips what it would
 * have begun to store: a part of which some layers are stored already is finished. What is under
 * way goes on. */
#include "daemon/admin/admin.h"

#include <stdio.h>
#include <string.h>

/* ---- the list ---- */

static bool is_visible(const struct bypass *b, const struct peer *peer)
{
    return peer->admin || (!b->of_ns && b->tenant[0] == '\0') ||
           strcmp(b->tenant, peer->tenant) == 0;
}

/* For a namespace that left the index, the number that the operator named. It keeps naming the
 * bypass, which applies again once an engine opens the namespace. */
static uint32_t number_of(const struct requests *rq, const struct bypass *b)
{
    const struct ns *ns = b->of_ns ? index_ns_find(rq->modules.index, b->fingerprint) : NULL;

    return ns ? ns->id : b->ns;
}

void bypass_pack(msgpack_packer *pk, const struct requests *rq, const struct peer *peer)
{
    const struct bypasses *all = &rq->bypasses;
    uint32_t n = 0;

    for (uint32_t i = 0; i < all->n; i++)
        n += is_visible(&all->at[i], peer);
    proto_pack_str(pk, "bypassed");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < all->n; i++) {
        const struct bypass *b = &all->at[i];

        if (!is_visible(b, peer))
            continue;
        msgpack_pack_map(pk, b->of_ns ? 6 : 5);
        proto_pack_text(pk, "tenant", b->tenant);
        proto_pack_u64(pk, "ns", number_of(rq, b));
        proto_pack_flag(pk, "load", b->what & BYPASS_LOAD);
        proto_pack_flag(pk, "store", b->what & BYPASS_STORE);
        proto_pack_u64(pk, "ms", uv_now(rq->modules.loop) - b->since_ms);
        if (b->of_ns)
            proto_pack_bin(pk, "fingerprint", b->fingerprint, sizeof(b->fingerprint));
    }
}

/* ---- the method ---- */

static struct bypass *bypass_find(struct bypasses *all, const struct bypass *like)
{
    for (uint32_t i = 0; i < all->n; i++) {
        struct bypass *b = &all->at[i];

        if (b->of_ns == like->of_ns && strcmp(b->tenant, like->tenant) == 0 &&
            memcmp(b->fingerprint, like->fingerprint, sizeof(b->fingerprint)) == 0)
            return b;
    }
    return NULL;
}

/* The bypass of a namespace that left the index; NULL: none. */
static const struct bypass *bypass_of_gone(const struct requests *rq, uint64_t number)
{
    for (uint32_t i = 0; i < rq->bypasses.n; i++) {
        const struct bypass *b = &rq->bypasses.at[i];

        if (b->of_ns && b->ns == number && number_of(rq, b) == number)
            return b;
    }
    return NULL;
}

/* What the call names, as an entry. 0 or -code with call->error. */
static int scope_read(struct call *call, const struct msg_bypass *m, struct bypass *b)
{
    struct requests *rq = call->s->rq;
    const struct bypass *gone;
    const struct ns *ns;

    *b = (struct bypass){.of_ns = m->ns != 0, .since_ms = uv_now(rq->modules.loop)};
    if (m->ns != 0 && m->tenant.n > 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "tenant: name a tenant or a namespace, not both");
    if (m->tenant.n > 0) {
        memcpy(b->tenant, m->tenant.p,
               m->tenant.n); /* its bound in the table leaves room for the NUL */
        /* One that is gone since must not keep its bypass until the daemon ends. */
        if (!tenant_known(rq, b->tenant) && !bypass_find(&rq->bypasses, b))
            return ucm_error_set(
                &call->error, UCM_WIRE_NOT_FOUND,
                "there is no tenant \"%s\": no namespace is its, and `tenants` does "
                "not name it",
                b->tenant);
    }
    if (m->ns == 0)
        return 0;
    ns = call_stored_namespace(call, m->ns);
    gone = ns ? NULL : bypass_of_gone(rq, m->ns);
    if (gone) {
        *b = *gone;
        call->error = (struct ucm_error){0};
        return 0;
    }
    if (!ns)
        return -call->error.code;
    b->ns = ns->id;
    memcpy(b->fingerprint, ns->fingerprint, sizeof(b->fingerprint));
    snprintf(b->tenant, sizeof(b->tenant), "%s", ns->identity.tenant);
    return 0;
}

static unsigned switched(unsigned what, uint64_t to, enum bypass_what bit)
{
    return to == UCM_BYPASS_ON ? what | bit : to == UCM_BYPASS_OFF ? what & ~(unsigned)bit : what;
}

static int bypass_change(struct call *call, const struct msg_bypass *m)
{
    struct requests *rq = call->s->rq;
    struct bypasses *all = &rq->bypasses;
    struct bypass like, *b;
    int rc = scope_read(call, m, &like);

    if (rc != 0)
        return rc;
    b = bypass_find(all, &like);
    if (!b && all->n == BYPASSES_MAX)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "there are %u bypasses, as many as there may be; turn some off",
                             all->n);
    if (!b) {
        all->at[all->n] = like;
        b = &all->at[all->n++];
    }
    b->what = switched(switched(b->what, m->load, BYPASS_LOAD), m->store, BYPASS_STORE);
    audit(call->s, call->method, "of_tenant=%s of_ns=%llu load=%s store=%s",
          like.tenant[0] ? like.tenant : "all", (unsigned long long)m->ns,
          b->what & BYPASS_LOAD ? "on" : "off", b->what & BYPASS_STORE ? "on" : "off");
    if (b->what == 0)
        *b = all->at[--all->n];
    rq->modules.metrics->bypasses = all->n;
    return 0;
}

int method_bypass(struct call *call)
{
    const struct msg_bypass *m = &call->params.bypass;
    struct proto_builder pb;

    if (!call_operator(call))
        return -call->error.code;
    if ((m->load != UCM_BYPASS_KEEP || m->store != UCM_BYPASS_KEEP) && bypass_change(call, m) != 0)
        return -call->error.code;
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 1);
    bypass_pack(&pb.pk, call->s->rq, &call->s->peer);
    return call_reply_map(call, &pb);
}
