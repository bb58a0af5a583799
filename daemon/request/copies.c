#include "daemon/request/batch.h"

#include <assert.h>
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
    if (copy_kind(c)->op != DEVICE_LOAD)
        return 0;
    return numbers_distinct(call, c->blocks, c->w.n_keys, 1, "blocks: block", "key of a load");
}

void *copies_new(struct call *call, const struct copy_kind *kind, const struct copy_params *p,
                 struct registered *region, uint32_t n_keys, size_t bytes)
{
    size_t blocks_at = (bytes + 7) / 8 * 8;
    struct view view = region_view(region);
    struct copies *c;

    if (p->plain)
        view = (struct view){.ns = {view.ns[view.n - 1]}, .n = 1};
    c = walk_new(call, &kind->walk, &view, n_keys, p->deadline_ms,
                 blocks_at + n_keys * sizeof(*c->blocks));
    if (!c)
        return NULL;
    c->blocks = (uint32_t *)((uint8_t *)c + blocks_at);
    if (ids_take(call, c, region->region, p->blocks) != 0) {
        request_refuse(&c->w.r);
        return NULL;
    }
    copies_use(c, region);
    c->n_copies = n_keys;
    c->shard = (uint32_t)p->shard;
    c->shards = p->shards ? (uint32_t)p->shards : region->region->pages.shards - c->shard;
    c->w.priority = (uint8_t)p->priority;
    c->beside = p->computes ? DEVICE_BESIDE_STEPS : DEVICE_BESIDE_NOTHING;
    return c;
}

void copies_use(struct copies *c, struct registered *region)
{
    c->region = region;
    c->w.part = region->region->part;
    region->users++;
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

bool copies_send(struct walk *w)
{
    struct copies *c = LIST_ENTRY(w, struct copies, w);
    bool sent = batch_flush(c, &c->open[1]) && batch_flush(c, &c->open[0]);

    if (!c->steps)
        return sent;
    sent = steps_pump(c) && sent;
    steps_report(c);
    return sent;
}

bool copies_busy(const struct walk *w)
{
    const struct copies *c = LIST_ENTRY(w, const struct copies, w);

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

/* ---- the end ---- */

enum metric_size copies_size(const struct copies *c)
{
    return c->w.bytes <= 1u << 20    ? METRIC_LE_1MIB
           : c->w.bytes <= 64u << 20 ? METRIC_LE_64MIB
                                     : METRIC_GT_64MIB;
}

void copies_close(struct copies *c)
{
    assert(c->jobs == 0 && !c->open[0] && !c->open[1]);
    walk_close(&c->w);
    region_copies_ended(c->region);
}

/* ---- by name ---- */

static bool is_copy(enum ucm_method m)
{
    return m == UCM_METHOD_LOAD || m == UCM_METHOD_LOAD_PREFIX || m == UCM_METHOD_DUMP ||
           m == UCM_METHOD_FETCH;
}

uint64_t walk_waits_since(const struct request *r)
{
    bool waits = is_copy(r->method) || r->method == UCM_METHOD_PREFETCH;

    return waits ? LIST_ENTRY(r, const struct walk, r)->slot_wait_ns : 0;
}

void copies_stop_region(struct registered *region)
{
    struct session *s = region->s;
    struct list *node, *next;

    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);

        next = node->next;
        if (is_copy(r->method) && LIST_ENTRY(r, struct copies, w.r)->region == region)
            walk_stop_cb(r);
    }
}
