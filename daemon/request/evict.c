/* pin, unpin, evict, namespace.purge and share.collect: what operators and clients change about
 * stored blocks. By key at once; a whole namespace a page a turn of the loop, so that millions of
 * blocks delay nobody. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"
#include "daemon/request/window.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WALK_PAGE 512

struct change {
    enum ucm_method method;
    uint64_t tier; /* as in UCM_MSG_EVICT */
    struct msg_count_r result;
};

static bool evicts(const struct change *k)
{
    return k->method == UCM_METHOD_EVICT || k->method == UCM_METHOD_NS_PURGE;
}

/* 0: all tiers; 3: shared only. */
static bool reaches_shares(const struct change *k)
{
    return k->method == UCM_METHOD_NS_PURGE || k->tier == 0 || k->tier == 3;
}

/* False: nothing of the block was where it should leave. */
static bool change_evict(struct cache *c, struct change *k, block_ref ref)
{
    static const unsigned tiers[] = {CACHE_ALL, CACHE_DRAM, CACHE_NVME, CACHE_SHARE};

    if (k->method == UCM_METHOD_NS_PURGE)
        cache_pin(c, ref, false);
    switch (cache_evict(c, ref, tiers[k->tier])) {
    case CACHE_EVICT_DONE:
        k->result.blocks++;
        return true;
    case CACHE_EVICT_LATER:
        k->result.busy++;
        return true;
    case CACHE_EVICT_NONE:
        break;
    }
    return false;
}

/* False: nothing of the block was there to evict. */
static bool change_apply(struct cache *c, struct change *k, block_ref ref)
{
    if (k->method == UCM_METHOD_PIN)
        k->result.blocks += cache_found(c, ref) && cache_pin(c, ref, true);
    else if (k->method == UCM_METHOD_UNPIN)
        k->result.blocks += cache_pin(c, ref, false);
    else
        return change_evict(c, k, ref);
    return true;
}

static void change_audit(const struct session *s, const struct change *k, const struct ns *ns,
                         uint32_t keys, int code)
{
    static const char *const tiers[] = {"all", "dram", "nvme", "share"};
    struct audit_blocks a = {
        .tier = tiers[k->tier], .keys = keys, .result = &k->result, .code = code};

    audit_blocks(s, k->method, ns, &a);
}

static int change_keys(struct call *call, struct ns *ns, struct change *k, struct proto_bin keys)
{
    struct requests *rq = call->s->rq;
    uint32_t n = call_keys(call, ns, keys);

    if (n == 0)
        return -call->error.code;
    for (uint32_t i = 0; i < n; i++) {
        /* Found one at a time: to evict one block may free another. */
        const uint8_t *key = keys.p + (size_t)i * ns->identity.key_bytes;
        block_ref ref = index_find(rq->rooms.index, ns, key);

        if (ref && change_apply(rq->rooms.cache, k, ref))
            continue;
        /* The index keeps a block that lost its copies while it is leased. */
        k->result.missing += !ref || k->tier == 0;
        /* Another host may have stored a block that this one does not know. */
        if (evicts(k) && reaches_shares(k))
            cache_shared_remove(rq->rooms.cache, ns, key);
    }
    windows_doomed(rq);
    change_audit(call->s, k, ns, n, 0);
    return call_reply(call, &k->result);
}

/* ---- a whole namespace ---- */

struct walk {
    struct request r;
    struct list link; /* in rq->walks while there are blocks to walk */
    struct ns *ns;
    struct change change;
    uint64_t cursor;
    bool walked;
    bool purges; /* `purge` is under way: namespace.purge, or evict that removes shared files */
    struct cache_purge purge;
    int purge_status;
};

/* Why a walk was stopped. */
static void stopped_error(const struct walk *w, struct ucm_error *e)
{
    const struct requests *rq = w->r.s->rq;

    if (rq->draining)
        ucm_error_set(e, UCM_WIRE_SHUTDOWN,
                      "the daemon is shutting down; only some of the blocks may have changed");
    else if (uv_now(rq->rooms.loop) >= w->r.deadline.at_ms)
        ucm_error_set(e, UCM_WIRE_DEADLINE, "not done in time; try again");
    else
        ucm_error_set(e, UCM_WIRE_CANCELLED, "only some of the blocks may have changed");
}

static bool walk_done(const struct walk *w)
{
    return w->walked && (!w->purges || cache_purge_done(&w->purge));
}

static void walk_end(struct walk *w)
{
    struct requests *rq = w->r.s->rq;
    struct ucm_error e = {0};

    list_remove(&w->link);
    if (!walk_done(w))
        stopped_error(w, &e);
    else if (w->purge_status != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone, but storage failed to record that (%s): they may come "
                      "back when the daemon restarts; try again",
                      strerror(-w->purge_status));
    else if (w->purges && w->purge.share_status == -EOPNOTSUPP)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone from this host, but a root of the shared tier lists no "
                      "files: those there are left, and come back; remove them at the store "
                      "(docs/mooncake.md, docs/s3.md)");
    else if (w->purges && w->purge.share_status != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone from this host, but some may be left on the shared tier "
                      "(%s); try again",
                      strerror(-w->purge.share_status));
    if (w->purges)
        cache_purge_end(rq->rooms.cache, &w->purge);
    change_audit(w->r.s, &w->change, w->ns, 0, e.code);
    index_ns_unuse(rq->rooms.index, w->ns);
    request_end(&w->r, &e, &w->change.result);
}

static void walk_stop_cb(struct request *r)
{
    walk_end(LIST_ENTRY(r, struct walk, r));
}

static void purge_done_cb(struct cache_purge *p, int status)
{
    struct walk *w = LIST_ENTRY(p, struct walk, purge);

    w->purge_status = status;
    if (walk_done(w))
        walk_end(w);
}

static void walk_step(struct requests *rq, struct walk *w)
{
    block_ref refs[WALK_PAGE];
    uint32_t n;

    w->cursor = index_scan(rq->rooms.index, w->ns, w->cursor, WALK_PAGE, refs, &n);
    for (uint32_t i = 0; i < n; i++)
        change_apply(rq->rooms.cache, &w->change, refs[i]);
    windows_doomed(rq);
    if (w->cursor != 0)
        return;
    w->walked = true;
    list_remove(&w->link);
    if (walk_done(w))
        walk_end(w);
}

static void walker_cb(uv_idle_t *idle)
{
    struct requests *rq = idle->data;
    struct list *node = list_pop_front(&rq->walks);

    if (node) {
        list_push_back(&rq->walks, node);
        walk_step(rq, LIST_ENTRY(node, struct walk, link));
    }
    if (list_empty(&rq->walks))
        uv_idle_stop(idle);
}

static int change_all(struct call *call, struct ns *ns, const struct change *k)
{
    struct requests *rq = call->s->rq;
    struct walk *w = request_new(call, sizeof(*w), UCM_DEADLINE_MS, walk_stop_cb);

    if (!w)
        return -call->error.code;
    w->purge.done_cb = purge_done_cb;
    w->ns = ns;
    w->change = *k;
    w->purges =
        k->method == UCM_METHOD_NS_PURGE || (rq->rooms.share && evicts(k) && reaches_shares(k));
    w->purge.only_shared = k->method == UCM_METHOD_EVICT;
    if (w->purges && cache_purge_begin(rq->rooms.cache, &w->purge, ns) != 0) {
        request_refuse(&w->r);
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    }
    index_ns_use(rq->rooms.index, ns);
    list_push_back(&rq->walks, &w->link);
    if (uv_idle_start(&rq->walker, walker_cb) != 0)
        abort(); /* libuv: only fails for a NULL callback */
    return 0;
}

/* ---- the methods ---- */

static int change_call(struct call *call, uint64_t ns_id, struct proto_bin keys, uint64_t tier)
{
    struct ns *ns = call_stored_namespace(call, ns_id);
    struct change k = {.method = call->method, .tier = tier};

    if (!ns)
        return -call->error.code;
    return keys.n > 0 ? change_keys(call, ns, &k, keys) : change_all(call, ns, &k);
}

int method_ns_purge(struct call *call)
{
    const struct msg_keys *m = &call->params.keys;

    return change_call(call, m->ns, m->keys, 0);
}

/* Pinned blocks take space from every tenant. */
int method_pin(struct call *call)
{
    return call_operator(call) ? method_ns_purge(call) : -call->error.code;
}

int method_unpin(struct call *call)
{
    return method_pin(call);
}

int method_evict(struct call *call)
{
    const struct msg_evict *m = &call->params.evict;

    return change_call(call, m->ns, m->keys, m->tier);
}

/* ---- share.collect ---- */

/* A root that is read-only here is collected by the hosts that write to it. */
static int root_collect(struct call *call, uint32_t root, bool named, struct msg_collect_r *r)
{
    const struct request_rooms *rooms = &call->s->rq->rooms;
    int err = share_collect(rooms->share, root);

    switch (err) {
    case 0:
        r->roots++;
        return 0;
    case -EALREADY:
        r->busy++;
        return 0;
    case -EROFS:
    case -EINVAL:
        if (!named)
            return 0;
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "root %u is read-only here: a host that writes to it collects it",
                             root + 1);
    case -ECANCELED:
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    default:
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "root %u: %s", root + 1,
                             strerror(-err));
    }
}

int method_share_collect(struct call *call)
{
    const struct request_rooms *rooms = &call->s->rq->rooms;
    const struct msg_collect *m = &call->params.collect;
    struct msg_collect_r r = {0};
    uint32_t n;
    int rc = 0;

    if (!call_operator(call))
        return -call->error.code;
    if (!rooms->share)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "there is no shared tier: share.roots in the configuration is empty");
    n = share_roots(rooms->share);
    if (m->root > n)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                             "the shared tier has no root %u, it has %u", (unsigned)m->root, n);
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        if (m->root == 0 || m->root == i + 1)
            rc = root_collect(call, i, m->root != 0, &r);
    if (r.roots > 0)
        audit(call->s, call->method, "root=%u roots=%u busy=%u", (unsigned)m->root,
              (unsigned)r.roots, (unsigned)r.busy);
    return rc == 0 ? call_reply(call, &r) : rc;
}
