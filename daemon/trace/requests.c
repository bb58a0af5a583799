/* trace: operators see what requests wait for (trace.h). One trace at a time; it ends with the
 * connection that began it. And what more DRAM would bring (reuse.h), of all lookups. */
#include "daemon/admin/admin.h"
#include "daemon/features.h"
#include "daemon/request/internal.h"
#include "daemon/trace/reuse.h"
#include "daemon/trace/trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Without limit_ms. */
#define TRACE_LIMIT_MS 60000
/* Bounds of a page's frame: bytes of the ring, with RECORD_PACKED for the names of each record's
 * fields. Spans take 2.5 times as much when packed, but then RECORD_ELEMENTS ends the page
 * first. */
#define PAGE_BYTES (UCM_MAX_FRAME_BYTES * 3 / 4)
#define RECORD_PACKED 512
#define RECORD_ELEMENTS 34
#define SPAN_ELEMENTS 9
#define PAGE_RECORDS 512

struct tracing {
    struct requests *rq;
    struct trace trace;
    struct session *session; /* whose trace it is; NULL: none */
    struct deadline limit;
    uv_prepare_t turn;
    uint64_t woke_ns; /* of this iteration of the event loop; 0: it has handled no frame yet */
    struct reuse *reuse;
};

static struct tracing *tracing_of(const struct requests *rq)
{
    return rq->ext[FEATURE_TRACE];
}

/* The first frame that an iteration of the event loop handles shows when the event loop woke up. */
static void turn_cb(uv_prepare_t *turn)
{
    LIST_ENTRY(turn, struct tracing, turn)->woke_ns = 0;
}

static void tracing_end(struct tracing *tg)
{
    trace_end_writing(&tg->trace);
    tg->rq->trace_cb = NULL;
    uv_prepare_stop(&tg->turn);
    deadline_disarm(tg->rq->modules.deadlines, &tg->limit);
}

static void tracing_stop(struct tracing *tg)
{
    tracing_end(tg);
    trace_stop(&tg->trace);
    tg->session = NULL;
}

static void limit_cb(struct deadline *d)
{
    tracing_end(LIST_ENTRY(d, struct tracing, limit));
}

static void session_gone(struct session *s)
{
    if (tracing_of(s->rq)->session == s)
        tracing_stop(tracing_of(s->rq));
}

/* ---- requests ---- */

/* A view of what a request says of itself. False: not one that is traced. */
static bool call_about(struct call *call, struct trace_about *a, struct proto_bin *keys)
{
    const union proto_any *m = &call->params;
    uint64_t region = 0, ns = 0, part = 0;
    const struct registered *r;
    const struct ns *space;

    switch (call->method) {
    case UCM_METHOD_LOOKUP:
        *keys = m->lookup.keys;
        a->request = m->lookup.request;
        ns = m->lookup.ns;
        break;
    case UCM_METHOD_PREFETCH:
        *keys = m->prefetch.keys;
        a->request = m->prefetch.request;
        ns = m->prefetch.ns;
        break;
    case UCM_METHOD_LOAD:
        *keys = m->load.keys;
        a->request = m->load.request;
        region = m->load.region;
        break;
    case UCM_METHOD_LOAD_PREFIX:
        *keys = m->load_prefix.keys;
        a->request = m->load_prefix.request;
        region = m->load_prefix.region;
        break;
    case UCM_METHOD_GATHER: /* of many requests of the engine, so of none */
        *keys = m->gather.keys;
        region = m->gather.region;
        break;
    case UCM_METHOD_DUMP:
        *keys = m->dump.keys;
        a->request = m->dump.request;
        region = m->dump.region;
        break;
    default:
        return false;
    }
    if (region != 0) {
        r = table_get(&call->s->regions, region & SESSION_NUMBERS);
        if (!r || r->name != region || !r->region)
            return false;
        ns = r->ns->id;
        part = r->region->part;
    }
    space = index_ns(call->s->rq->modules.index, (uint32_t)ns);
    if (!space || keys->n % space->identity.key_bytes != 0)
        return false;
    a->n_keys = call->method == UCM_METHOD_GATHER ? m->gather.items.n / UCM_GATHER_ITEM_BYTES
                                                  : keys->n / space->identity.key_bytes;
    a->ns = (uint32_t)ns;
    a->part = (uint32_t)part;
    return true;
}

/* Keys are those of lookups, and of the dumps of part 0: the other ranks dump the same. */
static void call_keys_trace(struct call *call, const struct trace_about *a, struct proto_bin keys)
{
    const struct ns *ns = index_ns(call->s->rq->modules.index, a->ns);
    struct trace_record record = {.about = *a,
                                  .keys = keys,
                                  .block_bytes = ns->block_bytes,
                                  .block_tokens = ns->identity.block_tokens};

    if (a->part != 0 || (call->method != UCM_METHOD_LOOKUP && call->method != UCM_METHOD_DUMP &&
                         call->method != UCM_METHOD_LOAD_PREFIX))
        return;
    if (call->method == UCM_METHOD_DUMP && call->params.dump.layer != 0)
        return; /* a later layer of the same blocks */
    record.per_key = call->method == UCM_METHOD_LOOKUP && call->params.lookup.per_key;
    trace_keys(&tracing_of(call->s->rq)->trace, &record);
}

static void call_trace(struct call *call)
{
    struct session *s = call->s;
    struct tracing *tg = tracing_of(s->rq);
    struct trace_about a = {.method = call->method,
                            .tenant = {s->peer.tenant, (uint32_t)strlen(s->peer.tenant)},
                            .uid = (uint32_t)s->peer.uid,
                            .pid = (uint32_t)s->peer.pid,
                            .began_ns = call->begun_ns};
    struct proto_bin keys;

    if (tg->woke_ns == 0)
        tg->woke_ns = a.began_ns;
    if (!call_about(call, &a, &keys))
        return;
    a.arrived_ns = tg->woke_ns;
    if (tg->trace.choice.keys)
        call_keys_trace(call, &a, keys);
    else
        call->trace = trace_begin(&tg->trace, &a);
}

/* ---- the method ---- */

static int choice_read(struct call *call, const struct msg_trace *m, struct trace_choice *c)
{
    if (m->keys && (m->slower_us > 0 || m->request.n > 0 || m->sample > 1))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "keys are of all requests, or of those of a tenant; leave out "
                             "slower_us, request and sample");
    *c = (struct trace_choice){.keys = m->keys,
                               .slower_ns = m->slower_us * 1000,
                               .sample = (uint32_t)m->sample,
                               .bytes = (uint32_t)m->bytes,
                               .request_n = (uint8_t)m->request.n,
                               .tenant_n = (uint16_t)m->tenant.n};
    if (m->request.n > 0)
        memcpy(c->request, m->request.p, m->request.n);
    if (m->tenant.n > 0)
        memcpy(c->tenant, m->tenant.p, m->tenant.n);
    return 0;
}

static int tracing_start(struct call *call, const struct msg_trace *m)
{
    struct requests *rq = call->s->rq;
    struct tracing *tg = tracing_of(rq);
    uint64_t limit_ms = m->limit_ms ? m->limit_ms : TRACE_LIMIT_MS;
    struct trace_choice choice;
    int rc = choice_read(call, m, &choice);

    if (rc != 0)
        return rc;
    if (tg->session == call->s)
        tracing_stop(tg);
    if (tg->session)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "process %d traces already; the daemon writes one trace at a time",
                             (int)tg->session->peer.pid);
    if (trace_start(&tg->trace, &choice) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a trace");
    rq->trace_cb = call_trace;
    tg->session = call->s;
    tg->woke_ns = 0;
    uv_prepare_start(&tg->turn, turn_cb);
    deadline_arm(rq->modules.deadlines, &tg->limit, uv_now(rq->modules.loop) + limit_ms, limit_cb);
    audit(call->s, call->method, "keys=%d slower_us=%llu sample=%llu limit_ms=%llu", m->keys,
          (unsigned long long)m->slower_us, (unsigned long long)m->sample,
          (unsigned long long)limit_ms);
    return 0;
}

static uint64_t since_start_us(const struct trace *t, uint64_t at_ns)
{
    return at_ns > t->start_ns ? (at_ns - t->start_ns) / 1000 : 0;
}

static void pack_view(msgpack_packer *pk, const char *name, struct proto_str s)
{
    proto_pack_str(pk, name);
    msgpack_pack_str(pk, s.n);
    msgpack_pack_str_body(pk, s.p, s.n);
}

static void pack_spans(msgpack_packer *pk, const struct trace *t, const struct trace_record *r)
{
    static const char *const names[] = {
#define X(NAME, text) text,
        SPANS(X)
#undef X
    };

    proto_pack_str(pk, "spans");
    msgpack_pack_array(pk, r->n_spans);
    for (uint32_t i = 0; i < r->n_spans; i++) {
        const struct trace_span *span = &r->spans[i];

        msgpack_pack_map(pk, 4);
        proto_pack_text(pk, "name", names[span->kind]);
        proto_pack_u64(pk, "start_us", since_start_us(t, span->start_ns));
        proto_pack_u64(pk, "us", (span->end_ns - span->start_ns) / 1000);
        proto_pack_u64(pk, "count", span->n);
    }
}

static void pack_record(msgpack_packer *pk, const struct trace *t, const struct trace_record *r)
{
    const struct trace_about *a = &r->about;

    msgpack_pack_map(pk, t->choice.keys ? 14 : 16);
    proto_pack_u64(pk, "number", r->number);
    proto_pack_u64(pk, "lost", r->lost);
    proto_pack_text(pk, "method", proto_methods[a->method].name.p);
    pack_view(pk, "request", a->request);
    pack_view(pk, "tenant", a->tenant);
    proto_pack_u64(pk, "uid", a->uid);
    proto_pack_u64(pk, "pid", a->pid);
    proto_pack_u64(pk, "ns", a->ns);
    proto_pack_u64(pk, "n_keys", a->n_keys);
    proto_pack_u64(pk, "start_us", since_start_us(t, a->arrived_ns));
    if (t->choice.keys) {
        proto_pack_flag(pk, "per_key", r->per_key);
        proto_pack_u64(pk, "block_bytes", r->block_bytes);
        proto_pack_u64(pk, "block_tokens", r->block_tokens);
        proto_pack_bin(pk, "keys", r->keys.p, r->keys.n);
        return;
    }
    proto_pack_u64(pk, "part", a->part);
    proto_pack_u64(pk, "us", (r->end_ns - a->arrived_ns) / 1000);
    proto_pack_u64(pk, "code", r->code);
    proto_pack_u64(pk, "ok", r->ok);
    proto_pack_u64(pk, "bytes", r->bytes);
    pack_spans(pk, t, r);
}

/* Takes records that together fit a frame. Returns how many. */
static uint32_t page_take(struct trace *t, struct trace_record **records)
{
    size_t room = PAGE_BYTES, elements = UCM_MAX_ELEMENTS - 64;
    uint32_t n = 0;

    while (n < PAGE_RECORDS && elements >= RECORD_ELEMENTS + SPAN_ELEMENTS * TRACE_MAX_SPANS) {
        size_t bytes = trace_next_bytes(t) + RECORD_PACKED;

        if (bytes > room || trace_take(t, room, &records[n]) != 0 || !records[n])
            break;
        elements -= RECORD_ELEMENTS + SPAN_ELEMENTS * records[n]->n_spans;
        room -= bytes;
        n++;
    }
    return n;
}

static int page_reply(struct call *call)
{
    struct trace *t = &tracing_of(call->s->rq)->trace;
    struct trace_record *records[PAGE_RECORDS];
    struct proto_builder pb;
    uint32_t n = t->ring ? page_take(t, records) : 0;

    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 5);
    proto_pack_flag(&pb.pk, "on", t->writing);
    proto_pack_flag(&pb.pk, "more", trace_next_bytes(t) > 0);
    proto_pack_u64(&pb.pk, "written", t->records);
    proto_pack_u64(&pb.pk, "lost", t->lost);
    proto_pack_str(&pb.pk, "records");
    msgpack_pack_array(&pb.pk, n);
    for (uint32_t i = 0; i < n; i++) {
        pack_record(&pb.pk, t, records[i]);
        free(records[i]);
    }
    return call_reply_map(call, &pb);
}

int method_trace(struct call *call)
{
    struct tracing *tg = tracing_of(call->s->rq);
    const struct msg_trace *m = &call->params.trace;
    int rc = 0;

    if (!call_operator(call))
        return -call->error.code;
    if (m->op == UCM_TRACE_START)
        rc = tracing_start(call, m);
    else if (tg->session != call->s)
        rc = ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                           "this connection has begun no trace; call trace with op 1 first");
    else if (m->op == UCM_TRACE_STOP)
        tracing_end(tg);
    if (rc == 0 && (m->op == UCM_TRACE_START || m->op == UCM_TRACE_STOP))
        audit(call->s, call->method, "op=%s", m->op == UCM_TRACE_START ? "start" : "stop");
    return rc != 0 ? rc : page_reply(call);
}

/* ---- reuse ---- */

static void sizes_tell(struct requests *rq)
{
    const struct request_modules *modules = &rq->modules;
    uint64_t bytes[REUSE_TIERS] = {arena_bytes_configured(modules->arena), 0};

    if (modules->tier) {
        struct tier_stats ts;

        modules->tier_ops->stats(modules->tier, &ts);
        bytes[REUSE_DRAM_NVME] = bytes[REUSE_DRAM] + ts.capacity_bytes;
    }
    reuse_sizes(tracing_of(rq)->reuse, bytes);
}

static void trace_observe(struct requests *rq, struct exposition *out)
{
    sizes_tell(rq);
    reuse_read(tracing_of(rq)->reuse, &out->reuse);
}

/* ---- the feature ---- */

static int trace_open(struct requests *rq)
{
    struct tracing *tg = tracing_of(rq);
    uint64_t seed;
    int rc;

    tg->rq = rq;
    uv_prepare_init(rq->modules.loop, &tg->turn); /* never fails */
    if (getrandom(&seed, sizeof(seed), 0) != sizeof(seed))
        return -EIO;
    rc = reuse_new(seed, &tg->reuse);
    if (rc != 0)
        return rc;
    sizes_tell(rq);
    rq->reuse = tg->reuse;
    rq->looked_up_cb = reuse_lookup;
    return 0;
}

static void turn_closed_cb(uv_handle_t *turn)
{
    free(LIST_ENTRY(turn, struct tracing, turn));
}

static void trace_close(struct requests *rq)
{
    struct tracing *tg = tracing_of(rq);

    reuse_free(tg->reuse);
    rq->ext[FEATURE_TRACE] = NULL; /* turn_closed_cb frees it */
    uv_close((uv_handle_t *)&tg->turn, turn_closed_cb);
}

const struct feature trace_feature = {.requests_bytes = sizeof(struct tracing),
                                      .open_cb = trace_open,
                                      .close_cb = trace_close,
                                      .observe_cb = trace_observe,
                                      .session_gone_cb = session_gone};
