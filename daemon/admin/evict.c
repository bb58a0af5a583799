/* pin, unpin, evict, namespace.purge and shared.gc: what operators and clients change about
 * stored blocks. A page an iteration of the event loop, so that many of them delay nobody. By key
 * the first page goes at once, and files on shared roots go after the last. Meanwhile lookups may
 * find such a file, and loads read it: so all keys have a second look once the files are gone. */
#include "daemon/admin/admin.h"
#include "daemon/mapping/mapping.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What one iteration of the event loop changes. */
#define PAGE_BLOCKS 512u
#define PAGE_PARTS 16384u
#define PAGE_COST 1024u

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
static bool reaches_shared(const struct change *k)
{
    return evicts(k) && (k->method == UCM_METHOD_NS_PURGE || k->tier == 0 || k->tier == 3);
}

static enum cache_evicted change_evict(struct cache *c, struct change *k, block_ref ref)
{
    static const unsigned tiers[] = {CACHE_ALL, CACHE_DRAM, CACHE_NVME, CACHE_SHARED};
    enum cache_evicted how;

    if (k->method == UCM_METHOD_NS_PURGE)
        cache_pin(c, ref, false);
    how = cache_evict(c, ref, tiers[k->tier]);
    k->result.blocks += how == CACHE_EVICT_DONE;
    k->result.busy += how == CACHE_EVICT_LATER;
    return how;
}

/* CACHE_EVICT_NONE: nothing of the block was there to evict. */
static enum cache_evicted change_apply(struct cache *c, struct change *k, block_ref ref)
{
    if (evicts(k))
        return change_evict(c, k, ref);
    if (k->method == UCM_METHOD_PIN)
        k->result.blocks += cache_found(c, ref) && cache_pin(c, ref, true);
    else
        k->result.blocks += cache_pin(c, ref, false);
    return CACHE_EVICT_DONE;
}

static void change_audit(const struct session *s, const struct change *k, const struct ns *ns,
                         uint32_t keys, int code)
{
    static const char *const tiers[] = {"all", "dram", "nvme", "shared"};
    struct audit_blocks a = {
        .tier = tiers[k->tier], .keys = keys, .result = &k->result, .code = code};

    audit_blocks(s, k->method, ns, &a);
}

/* ---- page by page ---- */

struct sweep {
    struct request r;
    struct list link; /* in admin.sweeps while there is a page to do */
    struct ns *ns;
    struct change change;
    uint32_t keys;                    /* named; 0: the whole namespace */
    void (*step_cb)(struct sweep *w); /* a page; it may end the sweep */
};

static uint32_t page_of(const struct sweep *w)
{
    uint32_t n = PAGE_PARTS / w->ns->identity.parts;

    return n < PAGE_BLOCKS ? n : PAGE_BLOCKS;
}

/* It is the event loop's time that they share, so tenants count alike. */
static struct fair_who who_of(const struct sweep *w)
{
    return (struct fair_who){limit_number(w->r.s->peer.owner), FAIR_WEIGHT};
}

static void sweep_cb(uv_idle_t *idle)
{
    struct admin *a = LIST_ENTRY(idle, struct admin, sweep_iteration);
    struct list *node = fair_queue_first(&a->sweeps);
    struct fair_who who;
    struct sweep *w;

    if (!node) {
        uv_idle_stop(idle);
        return;
    }
    w = LIST_ENTRY(node, struct sweep, link);
    who = who_of(w);
    list_remove(node);
    fair_queue_push(&a->sweeps, &who, 0, node, false);
    fair_queue_charge(&a->sweeps, &who, PAGE_COST, NULL);
    w->step_cb(w);
}

void sweeps_init(struct requests *rq)
{
    fair_queue_init(&admin_of(rq)->sweeps, PAGE_COST);
}

/* It goes on in the next iteration of the event loop, and in those after it until it leaves the
 * queue. */
static void sweep_go_on(struct sweep *w)
{
    struct admin *a = admin_of(w->r.s->rq);
    struct fair_who who = who_of(w);

    if (!list_empty(&w->link))
        return;
    fair_queue_push(&a->sweeps, &who, 0, &w->link, false);
    if (uv_idle_start(&a->sweep_iteration, sweep_cb) != 0)
        abort(); /* libuv: only fails for a NULL callback */
}

/* NULL with call->error. */
static void *sweep_new(struct call *call, size_t bytes, size_t more, struct ns *ns,
                       const struct change *k, void (*stop_cb)(struct request *r))
{
    struct sweep *w = request_new(call, bytes + more, 0, UCM_TIMEOUT_MS, stop_cb);

    if (!w)
        return NULL;
    list_init(&w->link);
    w->ns = ns;
    w->change = *k;
    index_ns_ref(call->s->rq->modules.index, ns);
    return w;
}

/* Why a sweep was stopped. */
static void stopped_error(const struct sweep *w, struct ucm_error *e)
{
    const struct requests *rq = w->r.s->rq;

    if (rq->draining)
        ucm_error_set(e, UCM_WIRE_SHUTDOWN,
                      "the daemon is shutting down; only some of the blocks may have changed");
    else if (uv_now(rq->modules.loop) >= w->r.deadline.at_ms)
        ucm_error_set(e, UCM_WIRE_DEADLINE, "not done in time; try again");
    else
        ucm_error_set(e, UCM_WIRE_CANCELLED, "only some of the blocks may have changed");
}

static void left_error(int status, struct ucm_error *e)
{
    ucm_error_set(e, UCM_WIRE_IO,
                  "the blocks are gone from this host, but some may be left on the shared tier "
                  "(%s); try again",
                  strerror(-status));
}

static void sweep_end(struct sweep *w, const struct ucm_error *e)
{
    list_remove(&w->link);
    change_audit(w->r.s, &w->change, w->ns, w->keys, e->code);
    index_ns_unref(w->r.s->rq->modules.index, w->ns);
    request_end(&w->r, e, &w->change.result);
}

/* ---- keys ---- */

struct keys_sweep {
    struct sweep w;
    uint32_t at;   /* the next key of this pass */
    bool again;    /* the pass after the removal */
    bool removing; /* it is under way */
    bool removes;
    /* Its keys are those whose files go, the first of `keys`, as far as these have been swept. */
    struct shared_removal removal;
    uint8_t *keys;
};

static struct keys_sweep *keys_of(struct sweep *w)
{
    return LIST_ENTRY(w, struct keys_sweep, w);
}

static uint8_t *key_at(const struct keys_sweep *k, uint32_t i)
{
    return k->keys + (size_t)i * k->w.ns->identity.key_bytes;
}

/* Its files go. Another host may have stored a block that this one does not know: then they are
 * asked for. */
static void key_removes(struct keys_sweep *k, const uint8_t *key, uint32_t roots)
{
    memmove(key_at(k, k->removal.n), key, k->w.ns->identity.key_bytes);
    k->removal.whole[k->removal.n++] = roots;
}

static void key_change(struct keys_sweep *k, const uint8_t *key)
{
    const struct request_modules *modules = &k->w.r.s->rq->modules;
    struct change *change = &k->w.change;
    /* Found one at a time: to evict one block may free another. */
    block_ref ref = index_find(modules->index, k->w.ns, key);
    uint32_t roots = ref && k->removes ? cache_shared_roots(modules->cache, ref) : 0;
    enum cache_evicted how = ref ? change_apply(modules->cache, change, ref) : CACHE_EVICT_NONE;

    /* The index keeps a block that lost its copies while it is leased. */
    if (how == CACHE_EVICT_NONE)
        change->result.missing += !ref || change->tier == 0;
    /* One that stays, because it is pinned, say, keeps its files, too. */
    if (k->removes && (how != CACHE_EVICT_LATER || cache_deleting(modules->cache, ref)))
        key_removes(k, key, roots);
}

/* The key's files are gone. What came of them in the meantime goes, too: blocks that a lookup found
 * or a load read, and what lookups under way are about to note. What was stored again stays, unless
 * it has been written below. */
static void key_again(struct keys_sweep *k, const uint8_t *key)
{
    struct requests *rq = k->w.r.s->rq;
    struct change uncounted = k->w.change;
    block_ref ref = index_find(rq->modules.index, k->w.ns, key);

    shared_queries_forget(rq, k->w.ns, key);
    if (ref && cache_shared_roots(rq->modules.cache, ref) != 0)
        change_apply(rq->modules.cache, &uncounted, ref);
}

static void removed_cb(struct shared_removal *r, int status);

static void keys_swept(struct keys_sweep *k)
{
    const struct request_modules *modules = &k->w.r.s->rq->modules;
    struct ucm_error e = {0};

    if (k->again || k->removal.n == 0) {
        if (k->removal.status != 0)
            left_error(k->removal.status, &e);
        sweep_end(&k->w, &e);
        return;
    }
    list_remove(&k->w.link);
    k->removing = true;
    shared_removal_begin(modules->shared, &k->removal);
}

static void keys_step_cb(struct sweep *w)
{
    struct keys_sweep *k = keys_of(w);
    uint32_t n = k->again ? k->removal.n : w->keys, left = page_of(w);

    for (; k->at < n && left > 0; k->at++, left--) {
        if (k->again)
            key_again(k, key_at(k, k->at));
        else
            key_change(k, key_at(k, k->at));
    }
    mappings_deleting(w->r.s->rq);
    if (k->at < n)
        sweep_go_on(w);
    else
        keys_swept(k);
}

static void removed_cb(struct shared_removal *r, int status)
{
    struct keys_sweep *k = LIST_ENTRY(r, struct keys_sweep, removal);

    (void)status; /* the removal has it */
    k->removing = false;
    k->again = true;
    k->at = 0;
    keys_step_cb(&k->w);
}

static void keys_stop_cb(struct request *r)
{
    struct keys_sweep *k = keys_of(LIST_ENTRY(r, struct sweep, r));
    struct ucm_error e = {0};

    if (k->removing)
        shared_removal_cancel(r->s->rq->modules.shared, &k->removal);
    stopped_error(&k->w, &e);
    sweep_end(&k->w, &e);
}

static int change_keys(struct call *call, struct ns *ns, const struct change *change,
                       struct proto_bin keys)
{
    const struct request_modules *modules = &call->s->rq->modules;
    uint32_t n = call_keys(call, ns, keys);
    struct keys_sweep *k;

    if (n == 0)
        return -call->error.code;
    k = sweep_new(call, sizeof(*k), n * sizeof(uint32_t) + keys.n, ns, change, keys_stop_cb);
    if (!k)
        return -call->error.code;
    k->removal = (struct shared_removal){.who = tenant_who(ns->tenant),
                                         .encrypted = cache_encrypted(modules->cache, ns),
                                         .key_bytes = ns->identity.key_bytes,
                                         .part = ns->identity.parts - 1,
                                         .whole = (uint32_t *)(k + 1),
                                         .done_cb = removed_cb};
    memcpy(k->removal.fingerprint, ns->fingerprint, sizeof(k->removal.fingerprint));
    k->keys = (uint8_t *)(k->removal.whole + n);
    k->removal.keys = k->keys;
    memcpy(k->keys, keys.p, keys.n);
    k->removes = modules->shared && reaches_shared(change);
    k->w.keys = n;
    k->w.step_cb = keys_step_cb;
    keys_step_cb(&k->w);
    return 0;
}

/* ---- a whole namespace ---- */

struct ns_sweep {
    struct sweep w;
    uint64_t cursor;
    bool swept;
    bool purges; /* `purge` is under way: namespace.purge, or evict that removes shared files */
    struct cache_purge purge;
    int purge_status;
};

static bool all_done(const struct ns_sweep *a)
{
    return a->swept && (!a->purges || cache_purge_done(&a->purge));
}

static void all_end(struct ns_sweep *a)
{
    int shared = a->purges ? a->purge.shared_status : 0;
    struct ucm_error e = {0};

    if (!all_done(a))
        stopped_error(&a->w, &e);
    else if (a->purge_status != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone, but storage failed to record that (%s): they may come "
                      "back when the daemon restarts; try again",
                      strerror(-a->purge_status));
    else if (shared == -EOPNOTSUPP)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone from this host, but a root of the shared tier lists no "
                      "files: those there are left, and come back; remove them at the store "
                      "(docs/shared-tier.md)");
    else if (shared != 0)
        left_error(shared, &e);
    if (a->purges)
        cache_purge_end(a->w.r.s->rq->modules.cache, &a->purge);
    sweep_end(&a->w, &e);
}

static void all_stop_cb(struct request *r)
{
    all_end(LIST_ENTRY(r, struct ns_sweep, w.r));
}

static void purge_done_cb(struct cache_purge *p, int status)
{
    struct ns_sweep *a = LIST_ENTRY(p, struct ns_sweep, purge);

    a->purge_status = status;
    if (all_done(a))
        all_end(a);
}

static void all_step_cb(struct sweep *w)
{
    struct ns_sweep *a = LIST_ENTRY(w, struct ns_sweep, w);
    struct requests *rq = w->r.s->rq;
    block_ref refs[PAGE_BLOCKS];
    uint32_t n;

    a->cursor = index_scan(rq->modules.index, w->ns, a->cursor, page_of(w), refs, &n);
    for (uint32_t i = 0; i < n; i++)
        change_apply(rq->modules.cache, &w->change, refs[i]);
    mappings_deleting(rq);
    if (a->cursor != 0)
        return;
    a->swept = true;
    list_remove(&w->link);
    if (all_done(a))
        all_end(a);
}

static int change_all(struct call *call, struct ns *ns, const struct change *k)
{
    struct requests *rq = call->s->rq;
    struct ns_sweep *a = sweep_new(call, sizeof(*a), 0, ns, k, all_stop_cb);

    if (!a)
        return -call->error.code;
    a->w.step_cb = all_step_cb;
    a->purge.done_cb = purge_done_cb;
    a->purges = k->method == UCM_METHOD_NS_PURGE || (rq->modules.shared && reaches_shared(k));
    a->purge.only_shared = k->method == UCM_METHOD_EVICT;
    if (a->purges && cache_purge_begin(rq->modules.cache, &a->purge, ns) != 0) {
        index_ns_unref(rq->modules.index, ns);
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
        request_refuse(&a->w.r, call);
        return -call->error.code;
    }
    sweep_go_on(&a->w);
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

/* ---- shared.gc ---- */

/* A root that is read-only here is collected by the hosts that write to it. */
static int root_collect(struct call *call, uint32_t root, bool named, struct msg_collect_r *r)
{
    const struct request_modules *modules = &call->s->rq->modules;
    int err = shared_collect(modules->shared, root);

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

int method_shared_gc(struct call *call)
{
    const struct request_modules *modules = &call->s->rq->modules;
    const struct msg_collect *m = &call->params.collect;
    struct msg_collect_r r = {0};
    uint32_t n;
    int rc = 0;

    if (!call_operator(call))
        return -call->error.code;
    if (!modules->shared)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "there is no shared tier: shared.roots in the configuration is empty");
    n = shared_roots(modules->shared);
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
