/* dump: parts of blocks out of a worker's memory. */
#include "daemon/request/copies.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define JOB_ITEMS 512u
/* Blocks that a dump opens in one iteration of the event loop. */
#define OPENS_PER_TURN 512

struct dump {
    struct copies c;
    uint8_t *keys;
    bool durable;                 /* it waits for stable storage */
    bool slowed;                  /* its answer is, or was, held back */
    struct list durables;         /* struct durable_wait: items that wait for that */
    struct cache_retry pressure;  /* while the answer is held back, */
    struct deadline pressure_end; /* for so long at most */
    uint8_t cuda_event[UCM_MAX_HANDLE_BYTES];
};

/* Outlives its dump when that is stopped; then dump is NULL. */
struct durable_wait {
    struct cache_durable d;
    struct list link;
    struct dump *dump;
    uint32_t at;
    enum ucm_block_status status; /* once it is durable */
};

/* ---- stable storage ---- */

static void durable_done_cb(struct cache_durable *d, int status)
{
    struct durable_wait *dw = LIST_ENTRY(d, struct durable_wait, d);
    struct transfer *w = dw->dump ? &dw->dump->c.w : NULL;

    list_remove(&dw->link);
    if (w) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_DURABLE, SPAN_LESS);
        transfer_status(w, dw->at, status == 0 ? dw->status : UCM_BLOCK_NOT_DURABLE);
        w->waits_n--;
    }
    free(dw);
    if (w)
        transfer_pump(w);
}

/* The item is in DRAM: it gets `status` once its part is on stable storage. */
static void item_durable(struct dump *d, uint32_t at, enum ucm_block_status status)
{
    struct transfer *w = &d->c.w;
    struct durable_wait *dw = w->stopping ? NULL : calloc(1, sizeof(*dw));
    int rc = -ENOMEM;

    if (dw) {
        dw->d.done_cb = durable_done_cb;
        rc = cache_durable(w->modules->cache, &dw->d, w->refs[at], w->part);
    }
    if (rc == 0) {
        dw->dump = d;
        dw->at = at;
        dw->status = status;
        list_push_back(&d->durables, &dw->link);
        w->waits_n++;
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_DURABLE, SPAN_MORE);
        return;
    }
    free(dw);
    /* -EINPROGRESS: layers are missing; the dump that brings the last of them waits instead. */
    transfer_status(w, at, rc == -EINPROGRESS ? status : UCM_BLOCK_NOT_DURABLE);
}

/* Ends what waits as NOT_DURABLE; the writes go on. */
static void durables_abandon(struct dump *d)
{
    struct transfer *w = &d->c.w;
    struct list *node;

    while ((node = list_pop_front(&d->durables)) != NULL) {
        struct durable_wait *dw = LIST_ENTRY(node, struct durable_wait, link);

        if (w->r.trace)
            trace_span(w->r.trace, SPAN_DURABLE, SPAN_LESS);
        transfer_status(w, dw->at, UCM_BLOCK_NOT_DURABLE);
        w->waits_n--;
        dw->dump = NULL;
    }
}

/* ---- items ---- */

/* Whether a dump with stores bypassed leaves this block out. A part of which it has stored some
 * layers is finished: it would hold its slot as long as the connection lives. */
static bool store_bypassed(const struct dump *d, const uint8_t *key)
{
    const struct transfer *w = &d->c.w;
    struct index *ix = w->modules->index;
    block_ref ref = index_find(ix, w->ns, key);

    return ref == 0 || index_block(ix, ref)->part[w->part].dram != PART_DRAM_PENDING_WRITE;
}

/* Opens blocks, and when all are open touches them as one prefix. */
static void dump_open(struct transfer *w)
{
    struct dump *d = LIST_ENTRY(w, struct dump, c.w);
    const struct requests *rq = w->r.s->rq;
    bool bypassed = bypass_on(rq, w->ns, BYPASS_STORE);

    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_ON);
    for (uint32_t opens = 0; w->opened < w->n_keys; w->opened++) {
        uint32_t i = w->opened;
        const uint8_t *key = d->keys + (size_t)i * w->ns->identity.key_bytes;

        if (opens++ == OPENS_PER_TURN) {
            transfer_yield(w);
            return;
        }
        if (bypassed && store_bypassed(d, key)) {
            w->status[i] = UCM_BLOCK_NO_ROOM;
            w->modules->metrics->bypass_dump_blocks++;
            continue;
        }
        w->refs[i] = cache_open(w->modules->cache, w->ns, key);
        if (w->refs[i] == 0)
            w->status[i] = UCM_BLOCK_NO_ROOM;
    }
    /* Another part's dump of the same blocks would look like a second use of them. */
    if (w->part == 0)
        cache_touch(w->modules->cache, w->ns, w->refs, w->n_keys);
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_LOOKUP, SPAN_OFF);
}

static void pending_write_refused(struct dump *d, const struct transfer_item *it, int rc)
{
    struct transfer *w = &d->c.w;

    if (rc == -EINPROGRESS) {
        transfer_status(w, it->at, UCM_BLOCK_IN_PROGRESS);
    } else if (rc != -EEXIST) {
        transfer_status(w, it->at, UCM_BLOCK_NO_ROOM);
        w->modules->metrics->dump_blocks_skipped++;
    } else {
        if (d->durable)
            item_durable(d, it->at, UCM_BLOCK_EXISTS);
        else
            transfer_status(w, it->at, UCM_BLOCK_EXISTS);
        w->modules->metrics->dump_blocks_existing++;
    }
}

static int dump_begin(struct transfer *w, const struct transfer_item *it)
{
    struct dump *d = LIST_ENTRY(w, struct dump, c.w);
    struct batch_item item = {.at = it->at};
    struct copy_batch *b;
    int rc;

    if (transfer_gives_way(w, it))
        return -EBUSY;
    rc = batch_reserve(&d->c, it, &b);
    if (rc == 0 && d->durable)
        cache_shared_presume(w->modules->cache, it->ref, it->part);
    if (rc == 0)
        rc = pending_write_claim(w->modules->cache, &w->r.s->pending_writes, it->ref, it->part,
                                 d->c.layer, d->c.layers, d->c.region->region->device->node,
                                 &item.held.pending_write);
    if (rc == -EBUSY || rc == -EDQUOT || rc == -EAGAIN || rc == -EXDEV)
        return rc;
    if (rc == 0)
        batch_add(b, &item);
    else
        pending_write_refused(d, it, rc);
    return 0;
}

static int dump_add(struct copy_batch *b, const struct batch_item *i)
{
    const struct copies *c = b->c;
    struct span span;
    int rc =
        span_pending_write(c->w.modules->cache, i->held.pending_write, c->layer, c->layers, &span);

    return rc != 0 ? rc : device_job_add(&b->job, &span, c->blocks[i->at]);
}

static void dump_put(struct copies *c, const struct copy_batch *b, const struct batch_item *i,
                     bool ok)
{
    struct dump *d = LIST_ENTRY(c, struct dump, c);

    (void)b;
    /* A worker that is gone may have died before its bytes were final. */
    pending_write_end(c->w.modules->cache, i->held.pending_write, c->layers,
                      ok && !c->w.r.s->closing);
    if (ok && c->region->view.n > 1) /* other ranks' parts may lie in the other form */
        c->w.r.s->rq->part_stored_cb(c->region, c->w.refs[i->at]);
    if (ok && d->durable)
        item_durable(d, i->at, UCM_BLOCK_OK);
}

static void dump_stop(struct transfer *w)
{
    durables_abandon(LIST_ENTRY(w, struct dump, c.w));
    copies_stop(w);
}

/* ---- the end ---- */

static void pressure_eased_cb(struct cache_retry *r)
{
    transfer_pump(&LIST_ENTRY(r, struct dump, pressure)->c.w);
}

static void pressure_over_cb(struct deadline *dl)
{
    struct dump *d = LIST_ENTRY(dl, struct dump, pressure_end);

    cache_retry_cancel(&d->pressure);
    transfer_pump(&d->c.w);
}

/* Back-pressure: a dump's answer waits until write-back catches up, for nvme.on_write_stall at
 * most. Its items have ended, so it holds no slot, block or lease meanwhile. */
static bool dump_slows(struct dump *d)
{
    struct transfer *w = &d->c.w;
    struct request_modules *modules = &w->r.s->rq->modules;

    if (d->slowed || w->stopping || w->bytes == 0 || d->durable ||
        modules->config->nvme_on_write_stall != CONFIG_WRITE_STALL_SLOW ||
        !cache_back_pressure(w->modules->cache))
        return false;
    deadline_arm(modules->deadlines, &d->pressure_end,
                 uv_now(modules->loop) + modules->config->nvme_write_stall_max_ms,
                 pressure_over_cb);
    d->slowed = true;
    if (w->r.trace)
        trace_span(w->r.trace, SPAN_BACK_PRESSURE, SPAN_MORE);
    d->pressure.retry_cb = pressure_eased_cb;
    (void)cache_wait_for(w->modules->cache, &d->pressure, WAIT_PRESSURE);
    w->modules->metrics->dumps_slowed++;
    return true;
}

static void dump_finish(struct transfer *w)
{
    struct dump *d = LIST_ENTRY(w, struct dump, c.w);

    if (dump_slows(d))
        return;
    if (w->bytes > 0) {
        w->ns->tenant->metrics->dumps++;
        w->ns->tenant->metrics->dump_bytes += w->bytes;
        w->ns->traffic.dumps++;
        w->ns->traffic.dump_bytes += w->bytes;
    }
    if (d->slowed) {
        if (w->r.trace)
            trace_span(w->r.trace, SPAN_BACK_PRESSURE, SPAN_LESS);
        cache_retry_cancel(&d->pressure);
        deadline_disarm(w->modules->deadlines, &d->pressure_end);
    }
    (void)copies_end(&d->c, w->modules->metrics->histograms.dump);
    transfer_end(w, NULL);
}

static const struct copy_kind dump_kind = {.transfer = {.writes = true,
                                                        .open = dump_open,
                                                        .begin = dump_begin,
                                                        .send = copies_send,
                                                        .stop = dump_stop,
                                                        .finish = dump_finish},
                                           .op = DEVICE_DUMP,
                                           .job_items = JOB_ITEMS,
                                           .add = dump_add,
                                           .put = dump_put};

/* ---- the request ---- */

int method_dump(struct call *call)
{
    const struct msg_dump *m = &call->params.dump;
    struct copy_params p = {.region = m->region,
                            .layer = m->layer,
                            .layers = m->layers,
                            .priority = m->priority,
                            .timeout_ms = m->timeout_ms,
                            .keys = m->keys,
                            .blocks = m->blocks,
                            .raw = m->raw,
                            .gpu_busy = m->gpu_busy};
    struct registered *region;
    struct dump *d;
    uint32_t n;

    region = copies_check(call, &p, &n);
    d = region ? copies_new(call, &dump_kind, &p, region, n, sizeof(*d) + m->keys.n) : NULL;
    if (!d)
        return -call->error.code;
    list_init(&d->durables);
    list_init(&d->pressure.link);
    d->keys = (uint8_t *)(d + 1);
    memcpy(d->keys, m->keys.p, m->keys.n);
    d->durable = session_durable(call->s, d->c.w.ns, m->durability);
    if (m->cuda_event.n > 0) {
        memcpy(d->cuda_event, m->cuda_event.p, sizeof(d->cuda_event));
        d->c.event = d->cuda_event;
    }
    transfer_pump(&d->c.w);
    return 0;
}
