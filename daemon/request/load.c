/* load, load_prefix: blocks' parts into a worker's memory. */
#include "daemon/observe/histogram.h"
#include "daemon/observe/tenants.h"
#include "daemon/request/copies.h"

#include <errno.h>
#include <stdlib.h>

#define JOB_ITEMS 512u

struct load {
    struct copies c;
    uint32_t lease;        /* it ends with the load */
    uint8_t slowest;       /* enum metric_tier that a part came from */
    struct walk_look look; /* of a prefix */
};

/* ---- items ---- */

void load_add(struct copy_batch *b, const struct walk_item *it, struct cache_shards *shards)
{
    const struct batch_item item = {.at = it->at, .held.shards = shards};
    struct span span;
    int rc = shards ? span_piece(shards, &span)
                    : span_part(b->c->w.rooms->cache, it->ref, it->part, &span);

    batch_add(b, rc, &span, &item);
}

static int load_begin(struct walk *w, const struct walk_item *it)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    struct copy_batch *b;
    int rc = batch_reserve(c, it, &b);

    w->rooms->metrics->load_blocks_missed += rc == -EXDEV;
    if (rc == -EAGAIN || rc == -EXDEV)
        return rc == -EAGAIN ? rc : 0;
    if (rc == 0)
        rc = walk_get(w, it, c->region->region->device->node);
    if (rc == CACHE_PENDING)
        return 0;
    if (rc != CACHE_READY) {
        w->rooms->metrics->load_blocks_missed += rc == -ENOENT;
        return walk_not_got(w, it, rc);
    }
    w->held_bytes += it->slot_bytes;
    w->rooms->metrics->load_blocks_dram++;
    cache_prefetch_used(w->rooms->cache, it->ref);
    load_add(b, it, NULL);
    return 0;
}

bool load_read(struct walk *w, struct item_wait *iw, int status)
{
    if (status == 0)
        return true;
    walk_status(w, iw->it.at,
                status == -ENOENT  ? UCM_BLOCK_MISS
                : status == -EBUSY ? UCM_BLOCK_NO_ROOM
                                   : UCM_BLOCK_FAILED);
    return false;
}

static bool load_ready(struct walk *w, struct item_wait *iw, int status)
{
    struct load *l = LIST_ENTRY(w, struct load, c.w);
    uint8_t tier = iw->w.shared ? METRIC_SHARED : METRIC_NVME;

    w->rooms->metrics->load_blocks_missed += status == -ENOENT;
    if (!load_read(w, iw, status))
        return false;
    *(iw->w.shared ? &w->rooms->metrics->load_blocks_shared
                   : &w->rooms->metrics->load_blocks_nvme) += 1;
    l->slowest = tier > l->slowest ? tier : l->slowest;
    return true;
}

bool load_again(struct walk *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);

    while (!list_empty(&w->ready)) {
        struct item_wait *iw = LIST_ENTRY(w->ready.next, struct item_wait, link);
        struct copy_batch *b;
        int rc = batch_reserve(c, &iw->it, &b);

        if (rc == -EAGAIN) {
            w->most = true;
            return false;
        }
        list_remove(&iw->link);
        if (rc != 0) {
            walk_drop(iw, UCM_BLOCK_NO_ROOM);
            continue;
        }
        load_add(b, &iw->it, iw->w.shards);
        w->waits_n--;
        free(iw);
    }
    return true;
}

static void load_drop(struct walk *w, struct item_wait *iw)
{
    cache_put(w->rooms->cache, iw->it.ref, iw->it.part);
}

/* ---- the end ---- */

static void load_count(struct load *l)
{
    struct walk *w = &l->c.w;
    uint64_t took_ns = uv_hrtime() - w->r.begun_ns;
    struct tenant *t = w->ns->tenant;

    histogram_count(
        &w->rooms->metrics->histograms.load[l->slowest * METRIC_SIZES + copies_size(&l->c)],
        took_ns);
    histogram_count(&t->times->load, took_ns);
    t->metrics->loads++;
    t->metrics->load_bytes += w->bytes;
    w->ns->traffic.loads++;
    w->ns->traffic.load_bytes += w->bytes;
}

static void load_finish(struct walk *w)
{
    struct load *l = LIST_ENTRY(w, struct load, c.w);

    if (w->bytes > 0)
        load_count(l);
    region_copies_ended(l->c.region, &l->c.link);
    if (l->lease != 0)
        lease_end(w->r.s, l->lease);
    walk_answer(w);
}

static const struct copy_kind load_kind = {.walk = {.begin = load_begin,
                                                    .ready = load_ready,
                                                    .again = load_again,
                                                    .drop = load_drop,
                                                    .send = copies_send,
                                                    .stop = copies_stop,
                                                    .finish = load_finish},
                                           .op = DEVICE_LOAD,
                                           .job_items = JOB_ITEMS};

/* ---- the requests ---- */

/* NULL with call->error. */
static struct load *load_new(struct call *call, const struct copy_params *p, uint64_t step,
                             struct proto_u32s turns)
{
    size_t steps_bytes = 0, turns_bytes = 0;
    struct registered *region;
    struct load *l;
    uint32_t n;

    region = copies_check(call, p, &n);
    if (!region || (turns.n > 0 && turns_check(call, region, turns, n, &turns_bytes) != 0))
        return NULL;
    if (step > 0)
        steps_bytes = steps_memory(region->region->pages.shards);
    l = copies_new(call, &load_kind, p, region, n, sizeof(*l) + steps_bytes + turns_bytes);
    if (!l)
        return NULL;
    if (turns.n > 0)
        turns_init(&l->c, turns, (uint8_t *)(l + 1) + steps_bytes);
    if (step > 0) {
        steps_init(&l->c, l + 1, (uint32_t)step);
        /* Layer 0 of all blocks can go first only if all blocks are in DRAM at once. */
        l->c.w.held_most = arena_bytes_configured(call->s->rq->rooms.arena) / 2;
    }
    return l;
}

int method_load(struct call *call)
{
    const struct msg_load *m = &call->params.load;
    struct copy_params p = {.region = m->region,
                            .shard = m->shard,
                            .shards = m->shards,
                            .priority = m->priority,
                            .deadline_ms = m->deadline_ms,
                            .keys = m->keys,
                            .blocks = m->blocks,
                            .computes = m->computes};
    struct load *l = load_new(call, &p, m->step, m->turns);

    if (!l) {
        /* The client forgot the lease when it sent the load. */
        lease_end(call->s, (uint32_t)m->lease);
        return -call->error.code;
    }
    l->lease = (uint32_t)m->lease;
    l->c.w.rooms->metrics->load_blocks_missed += walk_find(&l->c.w, m->keys.p, false);
    walk_pump(&l->c.w);
    return 0;
}

static void prefix_begin(struct walk *w, const uint8_t *keys)
{
    walk_find(w, keys, true);
    walk_pump(w);
}

int method_load_prefix(struct call *call)
{
    const struct msg_load_prefix *m = &call->params.load_prefix;
    struct copy_params p = {.region = m->region,
                            .shard = m->shard,
                            .shards = m->shards,
                            .priority = m->priority,
                            .deadline_ms = m->deadline_ms,
                            .keys = m->keys,
                            .blocks = m->blocks,
                            .computes = m->computes};
    struct load *l = load_new(call, &p, m->step, (struct proto_u32s){0});

    if (!l)
        return -call->error.code;
    l->look.begin_cb = prefix_begin;
    walk_look(&l->c.w, &l->look, m->keys, m->wait_ms);
    return 0;
}
