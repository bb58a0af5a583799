/* pin, unpin, evict, namespace.purge: by key at once, or a whole namespace a page a turn of the
 * loop, so that millions of blocks hold nobody up. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <stdlib.h>
#include <string.h>

#define SWEEP_PAGE 512

struct change {
    enum ucm_method method;
    uint64_t tier;
    struct msg_count_r result;
};

struct sweep {
    struct request r;
    struct list link; /* in the sweeps while there is something to walk */
    struct ns *ns;
    struct change change;
    uint64_t cursor;
    bool walked;
    bool purges; /* namespace.purge; evict, when files on shares go too, whichever host's */
    struct cache_purge purge;
    int purge_status;
};

/* In the words of the wire: 0 all, 3 shared only. */
static bool reaches_shares(const struct change *k)
{
    return k->method == UCM_METHOD_NS_PURGE || k->tier == 0 || k->tier == 3;
}

static bool evicts(const struct change *k)
{
    return k->method == UCM_METHOD_EVICT || k->method == UCM_METHOD_NS_PURGE;
}

static void change_evict(struct cache *c, struct change *k, block_ref ref)
{
    static const unsigned tiers[] = {CACHE_ALL, CACHE_DRAM, CACHE_NVME, CACHE_SHARE};

    if (k->method == UCM_METHOD_NS_PURGE)
        cache_pin(c, ref, false);
    switch (cache_evict(c, ref, tiers[k->tier])) {
    case CACHE_EVICT_DONE:
        k->result.blocks++;
        break;
    case CACHE_EVICT_LATER:
        k->result.busy++;
        break;
    case CACHE_EVICT_NONE:
        break;
    }
}

static void change_apply(struct cache *c, struct change *k, block_ref ref)
{
    if (k->method == UCM_METHOD_PIN)
        k->result.blocks += cache_found(c, ref) && cache_pin(c, ref, true);
    else if (k->method == UCM_METHOD_UNPIN)
        k->result.blocks += cache_pin(c, ref, false);
    else
        change_evict(c, k, ref);
}

static int change_keys(struct call *call, struct ns *ns, struct change *k, struct proto_bin keys)
{
    struct requests *rq = call->s->rq;
    uint32_t n = call_keys(call, ns, keys);

    if (n == 0)
        return -call->error.code;
    for (uint32_t i = 0; i < n; i++) {
        /* Found one at a time: evicting one block may take another's place in the scratch list. */
        const uint8_t *key = keys.p + (size_t)i * ns->identity.key_bytes;
        block_ref ref = index_find(rq->rooms.index, ns, key);

        /* Another host may have stored what this one does not know. */
        if (!ref && evicts(k) && reaches_shares(k))
            cache_shared_remove(rq->rooms.cache, ns, key);
        if (ref)
            change_apply(rq->rooms.cache, k, ref);
        else
            k->result.missing++;
    }
    session_reply(call->s, call->msgid, &proto_count_r, &k->result);
    return 0;
}

/* ---- a whole namespace ---- */

/* Why a request was stopped that has nothing to show for it. */
static void stopped_error(const struct sweep *sw, struct ucm_error *e)
{
    const struct requests *rq = sw->r.s->rq;

    if (rq->draining)
        ucm_error_set(e, UCM_WIRE_SHUTDOWN,
                      "the daemon is shutting down; what was asked for may be incomplete");
    else if (uv_now(rq->rooms.loop) >= sw->r.deadline.at_ms)
        ucm_error_set(e, UCM_WIRE_DEADLINE, "not done in time; try again");
    else
        ucm_error_set(e, UCM_WIRE_CANCELLED, "what was asked for may be incomplete");
}

static void sweep_answer(struct sweep *sw)
{
    struct ucm_error e = {0};

    if (!sw->walked || (sw->purges && !cache_purge_kept(&sw->purge)))
        stopped_error(sw, &e);
    else if (sw->purge_status != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone, but storage failed to keep that (%s): they may come "
                      "back when the daemon restarts; try again",
                      strerror(-sw->purge_status));
    else if (sw->purges && sw->purge.share_status != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "the blocks are gone from this host, but some may be left on the shared tier "
                      "(%s); try again",
                      strerror(-sw->purge.share_status));
    if (e.code == 0)
        session_reply(sw->r.s, sw->r.msgid, &proto_count_r, &sw->change.result);
    else if (!sw->r.s->closing)
        session_reply_error(sw->r.s, sw->r.msgid, &e);
}

static void sweep_end(struct sweep *sw)
{
    struct session *s = sw->r.s;

    list_remove(&sw->link);
    sweep_answer(sw);
    if (sw->purges)
        cache_purge_end(s->rq->rooms.cache, &sw->purge);
    request_end(&sw->r);
    free(sw);
    session_settle(s);
}

static void sweep_stop_cb(struct request *r)
{
    sweep_end(LIST_ENTRY(r, struct sweep, r));
}

/* Its end is known when both are: the walk, and whether storage has it. */
static void sweep_check(struct sweep *sw)
{
    if (sw->walked && (!sw->purges || cache_purge_kept(&sw->purge)))
        sweep_end(sw);
}

static void purge_done_cb(struct cache_purge *p, int status)
{
    struct sweep *sw = LIST_ENTRY(p, struct sweep, purge);

    sw->purge_status = status;
    sweep_check(sw);
}

static void sweep_step(struct requests *rq, struct sweep *sw)
{
    uint32_t n;

    sw->cursor = blocks_page(rq, sw->ns, sw->cursor, SWEEP_PAGE, &n);
    for (uint32_t i = 0; i < n; i++)
        change_apply(rq->rooms.cache, &sw->change, rq->refs[i]);
    if (sw->cursor != 0)
        return;
    sw->walked = true;
    list_remove(&sw->link);
    sweep_check(sw);
}

static void sweeper_cb(uv_idle_t *idle)
{
    struct requests *rq = idle->data;
    struct list *node = list_pop_front(&rq->sweeps);

    if (node) {
        list_push_back(&rq->sweeps, node);
        sweep_step(rq, LIST_ENTRY(node, struct sweep, link));
    }
    if (list_empty(&rq->sweeps))
        uv_idle_stop(idle);
}

static int change_all(struct call *call, struct ns *ns, const struct change *k)
{
    struct requests *rq = call->s->rq;
    struct sweep *sw = calloc(1, sizeof(*sw));
    int rc;

    if (!sw)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    sw->r.stop_cb = sweep_stop_cb;
    sw->purge.done_cb = purge_done_cb;
    rc = request_start(call, &sw->r, sizeof(*sw), UCM_DEADLINE_MS);
    if (rc != 0) {
        free(sw);
        return rc;
    }
    sw->ns = ns;
    sw->change = *k;
    sw->purges =
        k->method == UCM_METHOD_NS_PURGE || (rq->rooms.share && evicts(k) && reaches_shares(k));
    sw->purge.only_shared = k->method == UCM_METHOD_EVICT;
    if (sw->purges && cache_purge_begin(rq->rooms.cache, &sw->purge, ns) != 0) {
        request_end(&sw->r);
        free(sw);
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    }
    list_push_back(&rq->sweeps, &sw->link);
    if (uv_idle_start(&rq->sweeper, sweeper_cb) != 0)
        abort(); /* libuv: only fails for a NULL callback */
    return 0;
}

static int change_call(struct call *call, uint64_t ns_id, struct proto_bin keys, uint64_t tier)
{
    struct ns *ns = call_namespace(call, ns_id);
    struct change k = {.method = call->method, .tier = tier};

    if (!ns)
        return -call->error.code;
    return keys.n > 0 ? change_keys(call, ns, &k, keys) : change_all(call, ns, &k);
}

static int keys_call(struct call *call)
{
    struct msg_keys m;
    int rc = proto_decode(&proto_keys, call->env, &m, &call->error);

    return rc != 0 ? rc : change_call(call, m.ns, m.keys, 0);
}

/* Pinned blocks take room from every tenant. */
static int pin_call(struct call *call)
{
    if (!call->s->peer.admin)
        return ucm_error_set(
            &call->error, UCM_WIRE_DENIED,
            "%s is for operators: root, the daemon's own user, and whom `admins` names",
            proto_method_name(call->method));
    return keys_call(call);
}

int method_pin(struct call *call)
{
    return pin_call(call);
}

int method_unpin(struct call *call)
{
    return pin_call(call);
}

int method_purge(struct call *call)
{
    return keys_call(call);
}

int method_evict(struct call *call)
{
    struct msg_evict m;
    int rc = proto_decode(&proto_evict, call->env, &m, &call->error);

    return rc != 0 ? rc : change_call(call, m.ns, m.keys, m.tier);
}
