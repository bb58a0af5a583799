#include "daemon/request/copies.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- what a load or dump says ---- */

static int range_check(struct call *call, const struct copy_params *p,
                       const struct device_region *r)
{
    uint32_t shards = r->pages.shards, end;

    if (p->shard >= shards || p->shards > shards - p->shard)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "shards %llu + %llu reach past this part's %u",
                             (unsigned long long)p->shard, (unsigned long long)p->shards, shards);
    end = p->shards ? (uint32_t)(p->shard + p->shards) : shards;
    for (uint32_t shard = (uint32_t)p->shard; shard < end; shard++)
        if (r->shard_first[shard + 1] == r->shard_first[shard])
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "shards %llu to %u: this region has no memory for shard %u; name "
                                 "shards that it has",
                                 (unsigned long long)p->shard, end - 1, shard);
    return 0;
}

/* A hash set with open addressing, at most half full; zero is an empty place. */
int numbers_distinct(struct call *call, const uint32_t *numbers, uint32_t n, uint32_t step,
                     const char *what, const char *of)
{
    /* A random odd factor: a peer can't choose numbers that fall together. */
    uint32_t bits = 2, *set, factor;
    int rc = 0;

    memcpy(&factor, call->s->rq->secret, sizeof(factor));
    factor |= 1;

    while (1u << bits < 2 * n)
        bits++;
    set = calloc(1u << bits, sizeof(*set));
    if (!set)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        uint32_t number = numbers[i * step], at = number * factor >> (32 - bits);

        while (set[at] != 0 && set[at] != number + 1)
            at = (at + 1) & ((1u << bits) - 1);
        if (set[at] != 0)
            rc = ucm_error_set(&call->error, UCM_WIRE_INVALID,
                               "%s %u is named twice; each %s needs its own", what, number, of);
        set[at] = number + 1;
    }
    free(set);
    return rc;
}

struct registered *copies_check(struct call *call, const struct copy_params *p, uint32_t *n_keys)
{
    struct registered *region = call_region(call, p->region);

    if (region && region->region->pool) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "region %llu is a pool, whose slots hold single shards: use fetch",
                      (unsigned long long)p->region);
        return NULL;
    }
    if (!region || range_check(call, p, region->region) != 0)
        return NULL;
    *n_keys = call_keys(call, region->ns, p->keys);
    if (*n_keys == 0)
        return NULL;
    if (p->blocks.n != 4 * *n_keys) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "blocks: %u bytes for %u keys; give 4 for each", p->blocks.n, *n_keys);
        return NULL;
    }
    return region;
}

static int ids_take(struct call *call, struct copies *c, const struct device_region *region,
                    struct proto_bin blocks)
{
    for (uint32_t i = 0; i < c->w.n_keys; i++) {
        const uint8_t *p = blocks.p + 4 * (size_t)i;

        c->blocks[i] = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        if (c->blocks[i] >= region->blocks)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "blocks: block %u; this region has blocks 0 to %u", c->blocks[i],
                                 region->blocks - 1);
    }
    if (c->kind->op != DEVICE_LOAD)
        return 0;
    return numbers_distinct(call, c->blocks, c->w.n_keys, 1, "blocks: block", "key of a load");
}

void *copies_new(struct call *call, const struct copy_kind *kind, const struct copy_params *p,
                 struct registered *region, uint32_t n_keys, size_t bytes)
{
    size_t blocks_at = (bytes + 7) / 8 * 8;
    struct view view = region->view;
    struct copies *c;

    if (p->plain)
        view = (struct view){.ns = {view.ns[view.n - 1]}, .n = 1};
    c = walk_new(call, &kind->walk, &view, n_keys, p->deadline_ms,
                 blocks_at + n_keys * sizeof(*c->blocks));
    if (!c)
        return NULL;
    c->kind = kind;
    c->blocks = (uint32_t *)((uint8_t *)c + blocks_at);
    if (ids_take(call, c, region->region, p->blocks) != 0) {
        request_drop(&c->w.r);
        return NULL;
    }
    c->region = region;
    list_push_back(&region->users, &c->link);
    c->w.part = region->region->part;
    c->n_copies = n_keys;
    c->shard = (uint32_t)p->shard;
    c->shards = p->shards ? (uint32_t)p->shards : region->region->pages.shards - c->shard;
    c->w.priority = (uint8_t)p->priority;
    c->beside = p->computes ? DEVICE_BESIDE_STEPS : DEVICE_BESIDE_NOTHING;
    return c;
}

/* ---- batches ---- */

static void batch_done_cb(struct device_job *job, int status)
{
    struct copy_batch *b = LIST_ENTRY(job, struct copy_batch, job);
    struct copies *c = b->c;
    enum ucm_block_status outcome = job_ended(c, job, status);

    /* The answer has a status for each block, and no room for words. */
    if (outcome == UCM_BLOCK_DEVICE)
        log_warn("request", "copy-failed", "pid=%ld why=\"%s\"", (long)c->region->region->pid,
                 job->error.text);
    batch_end(b, outcome);
    c->jobs--;
    walk_pump(&c->w);
}

/* False: the device's queue is full; it stays open. */
static bool batch_send(struct copy_batch **open)
{
    struct copy_batch *b = *open;
    struct copies *c = b->c;

    /* Slots are handed out in the reverse of the order in which they were freed. Sorted, neighbours
     * become one run of the copy to the worker's slices, where blocks may come in any order. The batch's items
     * stay: they are looked at when all of them end alike. */
    if (c->region->region->ring_region != 0 && !b->turns)
        device_job_sort(&b->job);
    if (!job_submit(b, &b->job, batch_done_cb))
        return false;
    *open = NULL;
    return true;
}

int batch_reserve(struct copies *c, const struct walk_item *it, struct copy_batch **out)
{
    uint32_t copies = c->w.kind->weight ? c->w.kind->weight(&c->w, it->at) : 1;
    struct copy_batch **open = &c->open[1];
    enum copy_way way;

    /* Nearly always the batch of the item before. */
    if (*open && (*open)->form == it->form &&
        (*open)->job.cap_items - (*open)->job.n_items >= copies) {
        *out = *open;
        return 0;
    }
    way = region_way(c->region->region, it->form);
    open = &c->open[way == WAY_STRAIGHT];
    if (way == WAY_NONE) {
        walk_status(&c->w, it->at, UCM_BLOCK_MISS);
        return -EXDEV;
    }
    if (*open && (*open)->n > 0 && (*open)->job.cap_items - (*open)->job.n_items < copies) {
        if (c->steps)
            steps_add(open);
        else if (!batch_send(open))
            return -EAGAIN;
    }
    if (*open && (*open)->job.cap_items < copies) { /* empty: what it was made for did not come */
        free(*open);
        *open = NULL;
    }
    if (!*open)
        *open = batch_new(c, it->form, way,
                          c->region->region->pool ? 1
                          : c->steps              ? steps_shards(c)
                                                  : it->form->shards,
                          copies);
    *out = *open;
    return *open ? 0 : -ENOMEM;
}

/* ---- for walk_kind ---- */

/* False: the device's queue is full. */
static bool batch_flush(struct copies *c, struct copy_batch **open)
{
    const struct walk *w = &c->w;
    bool whole = w->cursor == w->n_keys && list_empty(&w->waits) && list_empty(&w->ready);
    struct copy_batch *b = *open;

    if (b && b->n == 0) {
        free(b);
        *open = NULL;
        return true;
    }
    if (!b || w->yielded)
        return true;
    /* The last batch of a load in steps must not fall behind the others. */
    if (c->steps && (whole || steps_sent(c))) {
        steps_add(open);
        return true;
    }
    /* While a job is under way the batch may grow: when the job ends, the pump comes here again. */
    if (c->steps || (c->jobs > 0 && b->job.n_items < b->job.cap_items))
        return true;
    return batch_send(open);
}

int copies_send(struct walk *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    bool sent = batch_flush(c, &c->open[0]) && batch_flush(c, &c->open[1]);

    if (c->steps) {
        sent = steps_pump(c) && sent;
        steps_report(c);
    }
    if (!sent)
        return -EAGAIN;
    return c->jobs > 0 || c->open[0] || c->open[1] || (c->steps && !steps_sent(c));
}

void copies_stop(struct walk *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);

    for (unsigned form = 0; form < 2; form++) {
        struct copy_batch *b = c->open[form];

        c->open[form] = NULL;
        if (b)
            batch_end(b, UCM_BLOCK_CANCELLED);
    }
    if (c->steps)
        steps_abandon(c);
}

enum metric_size copies_size(const struct copies *c)
{
    return c->w.bytes <= 1u << 20    ? METRIC_LE_1MIB
           : c->w.bytes <= 64u << 20 ? METRIC_LE_64MIB
                                     : METRIC_GT_64MIB;
}
