/* events, events.list, events.metadata: what happens to a tenant's blocks, for routers
 * (daemon/events). */
#include "daemon/admin/admin.h"
#include "daemon/events/events.h"

#include "daemon/features.h"
#include "daemon/request/internal.h"

#include <stdlib.h>
#include <string.h>

/* From the first event that somebody waits for to the answer, so that one answer has many. */
#define GATHER_MS 5
/* Time for answers that become due together, in one iteration of the event loop. */
#define GATHERED_NS 100000u
#define PAGE_USUAL 512
#define LIST_PAGE 1024
/* Bytes of a page's frame; a record without metadata takes less than RECORD_BYTES. */
#define PAGE_BYTES (UCM_MAX_FRAME_BYTES * 7 / 8)
#define RECORD_BYTES 128

/* What the daemon has of it. */
struct following {
    struct cache_follower follower;
    struct requests *rq;
    struct events *events; /* NULL: events.memory is 0 */
    struct list waits;     /* struct follow: requests that wait for an event */
    struct deadline gather;
    struct cache_retry rest; /* calls not yet answered in this round */
};

/* What a connection has. */
struct follower {
    bool subscriber, follows; /* it has asked for events; waits for one */
};

/* One that waits for an event. */
struct follow {
    struct request r;
    struct list link;
    struct tenant_events *te;
    struct msg_events asked; /* without its text */
};

static struct following *following_of(const struct requests *rq)
{
    return rq->ext[FEATURE_EVENTS];
}

static struct follower *follower_of(const struct session *s)
{
    return s->ext[FEATURE_EVENTS];
}

/* ---- permission ---- */

static int events_on(struct call *call)
{
    if (following_of(call->s->rq)->events)
        return 0;
    return ucm_error_set(
        &call->error, UCM_WIRE_UNSUPPORTED,
        "this daemon keeps no events; set events.memory, e.g. 64MiB, and start it again");
}

static int tenant_events(struct call *call, const char *tenant, struct tenant_events **out)
{
    struct requests *rq = call->s->rq;
    int rc = events_on(call);

    return rc != 0 ? rc
                   : events_open(following_of(rq)->events, tenant, uv_now(rq->modules.loop), out,
                                 &call->error);
}

/* The tenant that the call names: the peer's own, or for operators any. */
static int tenant_named(struct call *call, struct proto_str name, char out[UCM_MAX_NAME_BYTES + 1])
{
    const struct peer *peer = &call->s->peer;

    snprintf(out, UCM_MAX_NAME_BYTES + 1, "%.*s", (int)name.n, name.n > 0 ? name.p : "");
    if (name.n == 0)
        strcpy(out, peer->tenant);
    if (strcmp(out, peer->tenant) == 0)
        return 0;
    if (!peer->admin)
        return ucm_error_set(&call->error, UCM_WIRE_DENIED,
                             "events of another tenant are for operators; leave `tenant` out");
    if (!tenant_known(call->s->rq, out))
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "there is no tenant \"%.64s\"", out);
    return 0;
}

/* ---- packing ---- */

static void pack_metadata(msgpack_packer *pk, const struct block_metadata *d)
{
    proto_pack_bin(pk, "parent", d->parent.p, d->parent.n);
    proto_pack_bin(pk, "tokens", d->tokens.p, d->tokens.n);
    proto_pack_str(pk, "lora");
    proto_pack_strn(pk, d->lora.p, d->lora.n);
}

static uint32_t metadata_bytes(const struct block_metadata *d)
{
    return d->parent.n + d->tokens.n + d->lora.n;
}

static void pack_event(msgpack_packer *pk, const struct requests *rq, const struct follow *f,
                       uint64_t number)
{
    const struct event *e = events_at(f->te, number);
    const struct ns *ns = index_ns(rq->modules.index, e->ns);
    struct block_metadata d;
    bool has_metadata = f->asked.tokens && e->is != UCM_LOOKUP_MISS &&
                        events_metadata_get(following_of(rq)->events, f->te, e->ns, e->key, &d);

    msgpack_pack_map(pk, has_metadata ? 8 : 5);
    proto_pack_u64(pk, "number", number);
    proto_pack_u64(pk, "ns", e->ns);
    proto_pack_bin(pk, "key", e->key, ns ? ns->identity.key_bytes : UCM_MAX_KEY_BYTES);
    proto_pack_u64(pk, "was", e->was);
    proto_pack_u64(pk, "is", e->is);
    if (has_metadata)
        pack_metadata(pk, &d);
}

static uint32_t event_bytes(const struct requests *rq, const struct follow *f, uint64_t number)
{
    const struct event *e = events_at(f->te, number);
    struct block_metadata d;

    if (!f->asked.tokens || e->is == UCM_LOOKUP_MISS ||
        !events_metadata_get(following_of(rq)->events, f->te, e->ns, e->key, &d))
        return RECORD_BYTES;
    return RECORD_BYTES + metadata_bytes(&d);
}

/* Events from *first on that together fit an answer; of those that are asked for, *lost are
 * gone. */
static uint32_t page_of(const struct requests *rq, const struct follow *f, uint64_t *first,
                        uint64_t *lost)
{
    uint32_t limit = f->asked.limit ? (uint32_t)f->asked.limit : PAGE_USUAL, n = 0, bytes = 0;

    *first = events_first(f->te);
    *lost = 0;
    if (f->asked.since >= f->te->last)
        return 0;
    if (f->asked.since + 1 < *first)
        *lost = *first - f->asked.since - 1;
    else
        *first = f->asked.since + 1;
    while (n < limit && *first + n <= f->te->last) {
        uint32_t more = event_bytes(rq, f, *first + n);

        if (n > 0 && bytes + more > PAGE_BYTES)
            break;
        bytes += more;
        n++;
    }
    return n;
}

static void pack_page(struct proto_builder *pb, struct requests *rq, const struct follow *f)
{
    uint64_t first, lost;
    uint32_t n = page_of(rq, f, &first, &lost);

    if (f->asked.since > 0)
        rq->modules.metrics->events_lost += lost;
    msgpack_pack_map(&pb->pk, 5);
    proto_pack_bin(&pb->pk, "instance", rq->modules.instance, sizeof(rq->modules.instance));
    proto_pack_u64(&pb->pk, "last", f->te->last);
    proto_pack_u64(&pb->pk, "next", n > 0 ? first + n - 1 : f->te->last);
    proto_pack_u64(&pb->pk, "lost", lost);
    proto_pack_str(&pb->pk, "events");
    msgpack_pack_array(&pb->pk, n);
    for (uint32_t i = 0; i < n; i++)
        pack_event(&pb->pk, rq, f, first + i);
}

/* ---- waiting ---- */

static void follow_end(struct follow *f)
{
    struct session *s = f->r.s;
    struct proto_builder pb;
    struct ucm_error e;

    list_remove(&f->link);
    f->te->waiting--;
    follower_of(s)->follows = false;
    if (!s->closing) {
        proto_response_begin(&pb, &s->rq->out, f->r.msgid);
        pack_page(&pb, s->rq, f);
        if (proto_frame_end(&pb, &e) != 0)
            session_reply(s, f->r.msgid, f->r.method, &e, NULL);
        else
            conn_send(s->conn, &s->rq->out);
    }
    f->r.silent = true;
    request_end(&f->r, NULL, NULL);
}

static void follow_stop_cb(struct request *r)
{
    follow_end((struct follow *)r);
}

static void waited_cb(struct deadline *d)
{
    follow_end((struct follow *)LIST_ENTRY(d, struct request, deadline));
}

/* Answers calls that wait for events. A client that does not read its answers gets the next one
 * only when its own wait is over: its events stay in the ring. */
static void follows_end(struct requests *rq)
{
    struct following *of = following_of(rq);
    uint64_t begun_ns = uv_hrtime();
    struct list *node, *next;

    for (node = of->waits.next; node != &of->waits; node = next) {
        struct follow *f = LIST_ENTRY(node, struct follow, link);

        next = node->next;
        if (f->te->last <= f->asked.since || conn_backed_up(f->r.s->conn))
            continue;
        if (uv_hrtime() - begun_ns >= GATHERED_NS) {
            if (list_empty(&of->rest.link))
                (void)cache_wait_for(rq->modules.cache, &of->rest, WAIT_TURN);
            return;
        }
        follow_end(f);
    }
}

static void rest_cb(struct cache_retry *r)
{
    follows_end(LIST_ENTRY(r, struct following, rest)->rq);
}

static void gathered_cb(struct deadline *d)
{
    struct requests *rq = LIST_ENTRY(d, struct following, gather)->rq;

    events_awake(following_of(rq)->events);
    follows_end(rq);
}

static void wake_cb(void *ctx)
{
    struct requests *rq = ctx;

    deadline_arm(rq->modules.deadlines, &following_of(rq)->gather,
                 uv_now(rq->modules.loop) + GATHER_MS, gathered_cb);
}

static int follow_begin(struct call *call, const struct follow *asked)
{
    struct session *s = call->s;
    struct follow *f;

    if (follower_of(s)->follows)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection waits for events already; a second one needs a "
                             "connection of its own");
    f = request_new(call, sizeof(*f), 0, asked->asked.wait_ms, follow_stop_cb);
    if (!f)
        return -call->error.code;
    /* That nothing happened is no deadline that passed. */
    deadline_arm(s->rq->modules.deadlines, &f->r.deadline,
                 uv_now(s->rq->modules.loop) + asked->asked.wait_ms, waited_cb);
    f->te = asked->te;
    f->asked = asked->asked;
    f->te->waiting++;
    follower_of(s)->follows = true;
    list_push_back(&following_of(s->rq)->waits, &f->link);
    return 0;
}

int method_events(struct call *call)
{
    struct session *s = call->s;
    const struct msg_events *m = &call->params.events;
    struct follow f = {.asked = *m};
    char tenant[UCM_MAX_NAME_BYTES + 1];
    struct proto_builder pb;
    int rc = tenant_named(call, m->tenant, tenant);

    if (rc == 0)
        rc = tenant_events(call, tenant, &f.te);
    if (rc != 0)
        return rc;
    if (!follower_of(s)->subscriber)
        s->rq->modules.metrics->events_subscribers++;
    follower_of(s)->subscriber = true;
    if (f.te->last == m->since && m->wait_ms > 0)
        return follow_begin(call, &f);
    call_map_begin(call, &pb);
    pack_page(&pb, s->rq, &f);
    return call_reply_map(call, &pb);
}

/* ---- events.list ---- */

static void pack_block(msgpack_packer *pk, const struct requests *rq, const struct ns *ns,
                       const struct tenant_events *te, block_ref ref)
{
    const struct block *b = index_block(rq->modules.index, ref);
    struct block_metadata d;
    bool has_metadata = events_metadata_get(following_of(rq)->events, te, ns->id, b->key, &d);

    msgpack_pack_map(pk, has_metadata ? 5 : 2);
    proto_pack_bin(pk, "key", b->key, ns->identity.key_bytes);
    proto_pack_u64(pk, "is", cache_status(rq->modules.cache, ref));
    if (has_metadata)
        pack_metadata(pk, &d);
}

/* Blocks of which as many fit an answer, whatever is known of them. */
static uint32_t list_limit(const struct ns *ns, uint64_t asked)
{
    uint64_t each = RECORD_BYTES + UCM_MAX_KEY_BYTES + UCM_MAX_NAME_BYTES +
                    4 * (uint64_t)ns->identity.block_tokens;
    uint64_t most = PAGE_BYTES / each;

    most = most < LIST_PAGE ? most : LIST_PAGE;
    most = most > 0 ? most : 1;
    return (uint32_t)(asked > 0 && asked < most ? asked : most);
}

int method_events_list(struct call *call)
{
    struct requests *rq = call->s->rq;
    const struct msg_ls *m = &call->params.ls;
    struct ns *ns = call_stored_namespace(call, m->ns);
    block_ref refs[LIST_PAGE];
    struct tenant_events *te;
    struct proto_builder pb;
    uint32_t n, found = 0;
    uint64_t next;

    if (!ns || tenant_events(call, ns->identity.tenant, &te) != 0)
        return -call->error.code;
    next = index_scan(rq->modules.index, ns, m->cursor, list_limit(ns, m->limit), refs, &n);
    for (uint32_t i = 0; i < n; i++)
        if (cache_status(rq->modules.cache, refs[i]) != UCM_LOOKUP_MISS)
            refs[found++] = refs[i];
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 4);
    proto_pack_bin(&pb.pk, "instance", rq->modules.instance, sizeof(rq->modules.instance));
    proto_pack_u64(&pb.pk, "last", te->last);
    proto_pack_u64(&pb.pk, "next", next);
    proto_pack_str(&pb.pk, "blocks");
    msgpack_pack_array(&pb.pk, found);
    for (uint32_t i = 0; i < found; i++)
        pack_block(&pb.pk, rq, ns, te, refs[i]);
    return call_reply_map(call, &pb);
}

/* ---- events.metadata ---- */

static int metadata_check(struct call *call, const struct ns *ns, uint32_t n)
{
    const struct msg_events_metadata *m = &call->params.events_metadata;
    uint32_t key_bytes = ns->identity.key_bytes;

    if (n > UCM_MAX_METADATA_KEYS)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "keys: %u keys; one events.metadata has at most %u", n,
                             UCM_MAX_METADATA_KEYS);
    if (m->tokens.n != (uint64_t)n * ns->identity.block_tokens * 4)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "tokens: %u bytes; %u blocks of %u tokens take 4 bytes a token",
                             m->tokens.n, n, ns->identity.block_tokens);
    if (m->parent.n != 0 && m->parent.n != key_bytes)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "parent: %u bytes; this namespace's keys have %u", m->parent.n,
                             key_bytes);
    return 0;
}

int method_events_metadata(struct call *call)
{
    struct requests *rq = call->s->rq;
    const struct msg_events_metadata *m = &call->params.events_metadata;
    int rc = events_on(call);
    struct ns *ns = rc == 0 ? call_namespace(call, m->ns) : NULL;
    uint32_t n = ns ? call_keys(call, ns, m->keys) : 0, bytes;
    struct tenant_events *te;
    block_ref refs[UCM_MAX_METADATA_KEYS];

    if (n == 0 || metadata_check(call, ns, n) != 0 ||
        tenant_events(call, ns->identity.tenant, &te) != 0)
        return -call->error.code;
    bytes = ns->identity.block_tokens * 4;
    index_find_many(rq->modules.index, ns, m->keys.p, n, false, refs);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *key = m->keys.p + (size_t)i * ns->identity.key_bytes;
        struct block_metadata d = {.parent = i == 0
                                                 ? m->parent
                                                 : (struct proto_bin){key - ns->identity.key_bytes,
                                                                      ns->identity.key_bytes},
                                   .tokens = {m->tokens.p + (size_t)i * bytes, bytes},
                                   .lora = m->lora};

        events_metadata_set(following_of(rq)->events, te, ns, key,
                            cache_status(rq->modules.cache, refs[i]), &d);
    }
    return call_reply(call, NULL);
}

/* ---- life ---- */

static void changed_cb(struct cache_follower *f, const struct ns *ns, const uint8_t *key,
                       uint8_t was, uint8_t is)
{
    /* Summaries have the keys of their base's blocks. */
    if (ns->tenant->follower && strcmp(ns->identity.dtype, "summary") != 0)
        events_changed(LIST_ENTRY(f, struct following, follower)->events, ns, key, was, is);
}

static int open_cb(struct requests *rq)
{
    struct following *of = following_of(rq);
    struct events_config config = {.memory = rq->modules.config->events_memory,
                                   .limits = rq->modules.limits,
                                   .tenants = index_tenants(rq->modules.index),
                                   .metrics = rq->modules.metrics,
                                   .wake_cb = wake_cb,
                                   .ctx = rq};
    int rc;

    of->rq = rq;
    list_init(&of->waits);
    list_init(&of->follower.link);
    list_init(&of->rest.link);
    of->rest.retry_cb = rest_cb;
    if (config.memory == 0)
        return 0;
    rc = events_new(&config, &of->events);
    if (rc != 0)
        return rc;
    of->follower.changed_cb = changed_cb;
    cache_follow(rq->modules.cache, &of->follower);
    return 0;
}

static void close_cb(struct requests *rq)
{
    struct following *of = following_of(rq);

    deadline_disarm(rq->modules.deadlines, &of->gather);
    cache_retry_cancel(&of->rest);
    cache_unfollow(&of->follower);
    events_free(of->events);
    of->events = NULL;
}

/* Whoever waits for an event is answered. */
static void drain_cb(struct requests *rq)
{
    struct following *of = following_of(rq);

    cache_retry_cancel(&of->rest);
    while (!list_empty(&of->waits))
        follow_end(LIST_ENTRY(of->waits.next, struct follow, link));
}

static void session_gone_cb(struct session *s)
{
    s->rq->modules.metrics->events_subscribers -= follower_of(s)->subscriber;
    follower_of(s)->subscriber = false;
}

static void observe_cb(struct requests *rq, struct exposition *x)
{
    x->metrics.events_bytes = limits_used(rq->modules.limits, LIMIT_EVENTS);
}

const struct feature events_feature = {.requests_bytes = sizeof(struct following),
                                       .session_bytes = sizeof(struct follower),
                                       .open_cb = open_cb,
                                       .drain_cb = drain_cb,
                                       .observe_cb = observe_cb,
                                       .close_cb = close_cb,
                                       .session_gone_cb = session_gone_cb};
