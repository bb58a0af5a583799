/* What operators read of all namespaces, and tenants of their own: namespace.list, ls, inspect,
 * verify. */
#include "daemon/admin/admin.h"
#include "daemon/index/ns_form.h"
#include "daemon/index/policy.h"
#include "daemon/request/view.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LS_PAGE 256
#define LS_MAX 1024 /* some 0.5 ms, and fewer values than a frame may have */
#define VERIFY_IN_FLIGHT 8
#define VERIFY_PARTS 8192u /* of a page: 0.4 ms where none of them lies on NVMe */

/* ---- namespace.list ---- */

/* What an encoded namespace says; of others nothing. */
static void pack_encoding(msgpack_packer *pk, struct index *ix, const struct ns *ns)
{
    struct ns_encoded encoded = {.encoding = "", .raw_layer_bytes = ns->identity.layer_bytes};
    const struct ns *base = NULL;

    if (ns_encoded(&ns->identity, &encoded))
        base = index_ns_find(ix, encoded.base);
    /* By namespace.open a client may name any base: other tenants must not learn whether it
     * exists. */
    if (base && strcmp(base->identity.tenant, ns->identity.tenant) != 0)
        base = NULL;
    proto_pack_text(pk, "encoding", encoded.encoding);
    proto_pack_u64(pk, "encoding_version", encoded.version);
    proto_pack_u64(pk, "raw_layer_bytes", encoded.raw_layer_bytes);
    proto_pack_u64(pk, "base", base ? base->id : 0);
    proto_pack_bin(pk, "base_fingerprint", encoded.base, encoded.base ? UCM_FINGERPRINT_BYTES : 0);
}

static void pack_ns(msgpack_packer *pk, struct index *ix, const struct ns *ns)
{
    const struct ns_identity *id = &ns->identity;

    msgpack_pack_map(pk, 29);
    proto_pack_u64(pk, "ns", ns->id);
    proto_pack_bin(pk, "fingerprint", ns->fingerprint, UCM_FINGERPRINT_BYTES);
    proto_pack_text(pk, "tenant", id->tenant);
    proto_pack_text(pk, "model", id->model);
    proto_pack_text(pk, "revision", id->revision);
    proto_pack_text(pk, "dtype", id->dtype);
    proto_pack_text(pk, "layout", id->layout);
    proto_pack_u64(pk, "block_tokens", id->block_tokens);
    proto_pack_u64(pk, "key_bytes", id->key_bytes);
    proto_pack_u64(pk, "parts", id->parts);
    proto_pack_str(pk, "layers");
    msgpack_pack_array(pk, id->parts);
    for (uint32_t i = 0; i < id->parts; i++)
        msgpack_pack_uint32(pk, id->layers[i]);
    proto_pack_u64(pk, "layer_bytes", id->layer_bytes);
    proto_pack_u64(pk, "blocks", ns->blocks);
    proto_pack_u64(pk, "dram_bytes", ns->dram_bytes);
    proto_pack_u64(pk, "nvme_bytes", ns->nvme_bytes);
    proto_pack_u64(pk, "shared_bytes", ns->shared_bytes);
    proto_pack_u64(pk, "lookups", ns->traffic.lookups);
    proto_pack_u64(pk, "lookup_keys", ns->traffic.lookup_keys);
    proto_pack_u64(pk, "lookup_hits", ns->traffic.lookup_hits);
    proto_pack_u64(pk, "loads", ns->traffic.loads);
    proto_pack_u64(pk, "load_bytes", ns->traffic.load_bytes);
    proto_pack_u64(pk, "dumps", ns->traffic.dumps);
    proto_pack_u64(pk, "dump_bytes", ns->traffic.dump_bytes);
    proto_pack_u64(pk, "evicted_blocks", ns->traffic.evicted_blocks);
    pack_encoding(pk, ix, ns);
}

/* Bytes of a namespace with the longest names and most parts: a full page still fits a frame. */
#define NS_PACKED_MAX 8192
#define NS_PAGE_MAX (UCM_MAX_FRAME_BYTES / NS_PACKED_MAX - 1)

int method_ns_list(struct call *call)
{
    struct session *s = call->s;
    struct index *ix = s->rq->modules.index;
    struct proto_builder pb;
    const struct msg_page *m = &call->params.page;
    uint32_t places[NS_PAGE_MAX], n = 0, end = index_ns_places(ix), place, limit;

    limit = m->limit && m->limit < NS_PAGE_MAX ? (uint32_t)m->limit : NS_PAGE_MAX;
    place = m->cursor < end ? (uint32_t)m->cursor : end;
    for (; place < end; place++) {
        const struct ns *ns = index_ns_at(ix, place);

        if (!ns || (!s->peer.admin && strcmp(ns->identity.tenant, s->peer.tenant) != 0))
            continue;
        if (n == limit)
            break;
        places[n++] = place;
    }
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_str(&pb.pk, "namespaces");
    msgpack_pack_array(&pb.pk, n);
    for (uint32_t i = 0; i < n; i++)
        pack_ns(&pb.pk, ix, index_ns_at(ix, places[i]));
    proto_pack_u64(&pb.pk, "next", place < end ? place : 0);
    return call_reply_map(call, &pb);
}

/* ---- ls ---- */

static void pack_block(msgpack_packer *pk, const struct ns *ns, const struct block *b)
{
    uint32_t nvme = 0, shared = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        nvme += b->part[i].nvme == PART_NVME_READY;
        shared += part_on_shared(&b->part[i]);
    }
    msgpack_pack_map(pk, 8);
    proto_pack_bin(pk, "key", b->key, ns->identity.key_bytes);
    proto_pack_u64(pk, "dram", b->dram_parts);
    proto_pack_u64(pk, "nvme", nvme);
    proto_pack_u64(pk, "shared", shared);
    proto_pack_u64(pk, "ready", b->whole_parts);
    proto_pack_flag(pk, "complete", block_complete(b, ns));
    proto_pack_flag(pk, "pinned", b->flags & BLOCK_PINNED);
    proto_pack_u64(pk, "leases", b->leases);
}

int method_ls(struct call *call)
{
    struct requests *rq = call->s->rq;
    block_ref refs[LS_MAX];
    uint32_t n;
    struct proto_builder pb;
    const struct msg_ls *m = &call->params.ls;
    struct ns *ns = call_stored_namespace(call, m->ns);
    uint32_t limit = m->limit == 0 ? LS_PAGE : m->limit < LS_MAX ? (uint32_t)m->limit : LS_MAX;
    uint64_t next;

    if (!ns)
        return -call->error.code;
    next = index_scan(rq->modules.index, ns, m->cursor, limit, refs, &n);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_str(&pb.pk, "blocks");
    msgpack_pack_array(&pb.pk, n);
    for (uint32_t i = 0; i < n; i++)
        pack_block(&pb.pk, ns, index_block(rq->modules.index, refs[i]));
    proto_pack_u64(&pb.pk, "next", next);
    return call_reply_map(call, &pb);
}

/* ---- inspect ---- */

static void pack_part(msgpack_packer *pk, uint32_t part, const struct part *p)
{
    static const char *const dram[] = {"none", "pending_write", "pending_read", "ready"};
    static const char *const nvme[] = {"none", "writing", "ready"};
    static const char *const shared[] = {"none", "unverified", "writing", "ready"};

    msgpack_pack_map(pk, 8);
    proto_pack_u64(pk, "part", part);
    proto_pack_text(pk, "dram", dram[p->dram]);
    proto_pack_text(pk, "nvme", nvme[p->nvme]);
    proto_pack_text(pk, "shared", shared[p->shared]);
    proto_pack_u64(pk, "root", p->root);
    proto_pack_u64(pk, "users", p->users);
    proto_pack_u64(pk, "loc", p->nvme == PART_NVME_READY ? part_loc(p) : 0);
    proto_pack_u64(pk, "checksum", p->checksum);
}

int method_inspect(struct call *call)
{
    struct requests *rq = call->s->rq;
    struct proto_builder pb;
    const struct msg_key *m = &call->params.key;
    struct ns *ns = call_stored_namespace(call, m->ns);
    struct block *b;
    block_ref ref;

    if (!ns)
        return -call->error.code;
    if (m->key.n != ns->identity.key_bytes)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "key: %u bytes; this namespace's keys have %u", m->key.n,
                             ns->identity.key_bytes);
    ref = index_find(rq->modules.index, ns, m->key.p);
    if (ref == 0)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "no such block in namespace %u",
                             ns->id);
    b = index_block(rq->modules.index, ref);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 8);
    proto_pack_bin(&pb.pk, "key", b->key, ns->identity.key_bytes);
    proto_pack_flag(&pb.pk, "complete", block_complete(b, ns));
    proto_pack_u64(&pb.pk, "ready", b->whole_parts);
    proto_pack_flag(&pb.pk, "pinned", b->flags & BLOCK_PINNED);
    proto_pack_flag(&pb.pk, "deleting", b->flags & BLOCK_DELETING);
    proto_pack_u64(&pb.pk, "leases", b->leases);
    proto_pack_u64(&pb.pk, "heat", policy_heat(index_block(rq->modules.index, ref)));
    proto_pack_str(&pb.pk, "parts");
    msgpack_pack_array(&pb.pk, ns->identity.parts);
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        pack_part(&pb.pk, i, &b->part[i]);
    return call_reply_map(call, &pb);
}

/* ---- verify ---- */

struct verify {
    struct request r;
    struct ns *ns;
    struct msg_verify_r result;
    uint32_t n, at, part, in_flight; /* part `part` of refs[at] is next */
    bool stopping;
    block_ref refs[];
};

struct verify_check {
    struct cache_check k;
    struct verify *v;
};

static void verify_pump(struct verify *v);

static void verify_end(struct verify *v)
{
    const struct request_modules *modules = &v->r.s->rq->modules;

    for (uint32_t i = 0; i < v->n; i++)
        cache_unlease(modules->cache, v->refs[i]);
    index_ns_unref(modules->index, v->ns);
    request_end(&v->r, NULL, &v->result);
}

static void check_done_cb(struct cache_check *k, int status)
{
    struct verify_check *vc = LIST_ENTRY(k, struct verify_check, k);
    struct verify *v = vc->v;

    v->in_flight--;
    v->result.checked += status == 0;
    v->result.corrupt += status == -EBADMSG;
    v->result.failed += status != 0 && status != -EBADMSG;
    free(vc);
    verify_pump(v);
}

/* 0: begun, or nothing to check there; -EBUSY: not now. */
static int verify_part(struct verify *v, block_ref ref, uint32_t part)
{
    struct verify_check *vc = calloc(1, sizeof(*vc));
    int rc;

    if (!vc)
        return -EBUSY;
    vc->v = v;
    vc->k.done_cb = check_done_cb;
    rc = cache_verify(v->r.s->rq->modules.cache, &vc->k, ref, part);
    if (rc == 0) {
        v->in_flight++;
        return 0;
    }
    free(vc);
    if (rc != -ENOENT && rc != -EBUSY)
        v->result.failed++;
    return rc == -EBUSY ? rc : 0;
}

static void verify_pump(struct verify *v)
{
    while (v->at < v->n && !v->stopping && v->in_flight < VERIFY_IN_FLIGHT) {
        if (verify_part(v, v->refs[v->at], v->part) == -EBUSY) {
            if (v->in_flight > 0)
                return;
            v->result.skipped++; /* no read of this verify will end and free a slot */
        }
        if (++v->part == v->ns->identity.parts) {
            v->part = 0;
            v->at++;
        }
    }
    if (v->in_flight == 0)
        verify_end(v);
}

static void verify_stop_cb(struct request *r)
{
    struct verify *v = LIST_ENTRY(r, struct verify, r);

    if (v->stopping)
        return;
    v->stopping = true;
    if (v->in_flight == 0)
        verify_end(v);
}

/* Blocks of a page: all their parts may be looked at in one iteration of the event loop. */
static uint32_t verify_page(const struct ns *ns, uint32_t limit)
{
    uint32_t most = VERIFY_PARTS / ns->identity.parts;

    return limit < most ? limit : most;
}

int method_verify(struct call *call)
{
    struct requests *rq = call->s->rq;
    const struct msg_ls *m = &call->params.ls;
    struct verify *v;
    struct ns *ns = call_stored_namespace(call, m->ns);
    uint32_t limit;

    if (!ns)
        return -call->error.code;
    limit = verify_page(ns, m->limit ? (uint32_t)m->limit : LS_PAGE);
    v = request_new(call, sizeof(*v) + limit * sizeof(v->refs[0]), 0, UCM_TIMEOUT_MS,
                    verify_stop_cb);
    if (!v)
        return -call->error.code;
    v->ns = ns;
    index_ns_ref(rq->modules.index, ns);
    v->result.next = index_scan(rq->modules.index, ns, m->cursor, limit, v->refs, &v->n);
    for (uint32_t i = 0; i < v->n; i++)
        cache_lease(rq->modules.cache, v->refs[i]);
    verify_pump(v);
    return 0;
}
