/* load, load_prefix: blocks' parts into a worker's memory. */
#include "daemon/request/copies.h"
#include "proto/histogram.h"

#include <errno.h>
#include <stdlib.h>

#define JOB_ITEMS 512u

struct load {
    struct copies c;
    uint32_t lease;            /* it ends with the load */
    uint8_t slowest;           /* enum metric_tier that a part came from */
    struct transfer_look look; /* of a prefix */
};

/* ---- items ---- */

static int load_begin(struct transfer *w, const struct transfer_item *it)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    struct copy_batch *b;
    int rc = batch_reserve(c, it, &b);

    if (rc == 0)
        rc = it->p->dram == PART_DRAM_READY ? cache_take(w->modules->cache, it->ref, it->part)
                                            : transfer_get(w, it, c->region->region->device->node);
    if (rc != CACHE_READY) {
        w->modules->metrics->load_blocks_missed += rc == -ENOENT || rc == -EXDEV;
        return rc; /* CACHE_PENDING is 0 */
    }
    w->modules->metrics->load_blocks_dram++;
    cache_prefetch_used(w->modules->cache, it->ref);
    batch_add(b, &(struct batch_item){.at = it->at});
    return 0;
}

static int load_ready(struct transfer *w, struct item_wait *iw, int status)
{
    struct load *l = LIST_ENTRY(w, struct load, c.w);
    struct metrics *m = w->modules->metrics;
    uint8_t tier = iw->w.shared ? METRIC_SHARED : METRIC_NVME;

    if (status != 0) {
        m->load_blocks_missed += status == -ENOENT;
        return status;
    }
    *(iw->w.shared ? &m->load_blocks_shared : &m->load_blocks_nvme) += 1;
    l->slowest = tier > l->slowest ? tier : l->slowest;
    return 1;
}

static void load_drop(struct transfer *w, struct item_wait *iw)
{
    cache_put(w->modules->cache, iw->it.ref, iw->it.part);
}

/* ---- the end ---- */

static void load_finish(struct transfer *w)
{
    struct load *l = LIST_ENTRY(w, struct load, c.w);
    struct tenant *t = w->ns->tenant;
    uint64_t took_ns =
        copies_end(&l->c, &w->modules->metrics->histograms.load[l->slowest * METRIC_SIZES]);

    if (took_ns > 0) {
        histogram_add(&t->times->load, took_ns, 1);
        t->metrics->loads++;
        t->metrics->load_bytes += w->bytes;
        w->ns->traffic.loads++;
        w->ns->traffic.load_bytes += w->bytes;
    }
    if (l->lease != 0)
        lease_end(w->r.s, l->lease);
    transfer_end(w, NULL);
}

static const struct copy_kind load_kind = {.transfer = {.begin = load_begin,
                                                        .ready = load_ready,
                                                        .again = copies_again,
                                                        .drop = load_drop,
                                                        .send = copies_send,
                                                        .stop = copies_stop,
                                                        .finish = load_finish},
                                           .op = DEVICE_LOAD,
                                           .job_items = JOB_ITEMS};

static const struct copy_kind steps_kind = {.transfer = {.begin = load_begin,
                                                         .ready = load_ready,
                                                         .again = copies_again,
                                                         .drop = load_drop,
                                                         .send = steps_send,
                                                         .stop = steps_stop,
                                                         .finish = load_finish},
                                            .op = DEVICE_LOAD,
                                            .job_items = JOB_ITEMS,
                                            .send_batch = steps_send_batch};

/* ---- the requests ---- */

/* NULL with call->error. */
static struct load *load_new(struct call *call, const struct msg_load *m)
{
    struct copy_params p = {.region = m->region,
                            .layer = m->layer,
                            .layers = m->layers,
                            .priority = m->priority,
                            .timeout_ms = m->timeout_ms,
                            .keys = m->keys,
                            .blocks = m->blocks,
                            .gpu_busy = m->gpu_busy};
    const struct load_shifts *shifts = m->shifts.n > 0 ? call->s->rq->shifts : NULL;
    size_t steps_bytes = 0, shifts_bytes = 0;
    struct registered *region;
    struct load *l;
    uint32_t n;

    region = copies_check(call, &p, &n);
    if (!region || (shifts && shifts->check(call, region, m->shifts, n, &shifts_bytes) != 0))
        return NULL;
    if (m->progress_interval > 0)
        steps_bytes = steps_memory(region->region->pages.layers);
    l = copies_new(call, m->progress_interval > 0 ? &steps_kind : &load_kind, &p, region, n,
                   sizeof(*l) + steps_bytes + shifts_bytes);
    if (!l)
        return NULL;
    if (shifts)
        shifts->init(&l->c, m->shifts, (uint8_t *)(l + 1) + steps_bytes);
    if (m->progress_interval > 0) {
        steps_init(&l->c, l + 1, (uint32_t)m->progress_interval);
        /* Layer 0 of all blocks can go first only if all blocks are in DRAM at once. */
        l->c.w.held_most = call->s->rq->dram_bytes / 2;
    }
    return l;
}

int method_load(struct call *call)
{
    const struct msg_load *m = &call->params.load;
    struct load *l = load_new(call, m);

    if (!l) {
        /* Also if the answer is BUSY: the client forgot the lease when it sent the load, and looks
         * up again before it retries. A lease that outlived its load would keep blocks that nobody
         * can name until it expires. */
        lease_end(call->s, (uint32_t)m->lease);
        return -call->error.code;
    }
    l->lease = (uint32_t)m->lease;
    l->c.w.modules->metrics->load_blocks_missed += transfer_find(&l->c.w, m->keys.p, false);
    transfer_pump(&l->c.w);
    return 0;
}

static void prefix_begin(struct transfer *w, const uint8_t *keys)
{
    transfer_find(w, keys, true);
    transfer_pump(w);
}

int method_load_prefix(struct call *call)
{
    const struct msg_load_prefix *m = &call->params.load_prefix;
    struct msg_load load = {0};
    struct load *l;

#define COPY(m, type, name, ...) load.name = (m)->name;
    UCM_LOADED_FIELDS(COPY, m)
#undef COPY
    l = load_new(call, &load);
    if (!l)
        return -call->error.code;
    l->look.begin_cb = prefix_begin;
    transfer_look(&l->c.w, &l->look, m->keys, m->wait_ms);
    return 0;
}
