/* load, load_prefix, dump, prefetch as they arrive: everything is checked before anything moves. */
#include "daemon/request/transfer.h"

#include <stdlib.h>
#include <string.h>

#define WINDOW_BYTES (256u << 20)

/* Behind the struct: `more`, the arrays, and keys that it needs later. */
struct transfer *transfer_new(struct call *call, enum transfer_kind kind, const struct view *view,
                              uint32_t n_keys, uint64_t deadline_ms, size_t more)
{
    bool keeps_keys = kind != TRANSFER_LOAD && kind != TRANSFER_FETCH && kind != TRANSFER_PREFETCH;
    size_t key_bytes = keeps_keys ? view->ns[0]->identity.key_bytes : 0;
    size_t found_bytes = kind == TRANSFER_HOLD;
    size_t memory = sizeof(struct transfer) + more +
                    n_keys * (sizeof(block_ref) + sizeof(uint32_t) + 1 + key_bytes + found_bytes);
    struct transfer *t = request_new(call, memory, deadline_ms, transfer_stop_cb);
    uint64_t window;

    if (!t)
        return NULL;
    t->refs = (block_ref *)((uint8_t *)(t + 1) + more);
    t->blocks = t->refs + n_keys;
    t->status = (uint8_t *)(t->blocks + n_keys);
    t->keys = t->status + n_keys;
    t->found = t->keys + n_keys * key_bytes;
    t->kind = kind;
    t->view = *view;
    t->ns = view->ns[0];
    t->n_keys = n_keys;
    t->parts = 1;
    window = arena_bytes_configured(call->s->rq->rooms.arena) / 4;
    t->window_bytes = window < WINDOW_BYTES ? window : WINDOW_BYTES;
    t->retry.retry_cb = transfer_retry_cb;
    list_init(&t->retry.link);
    list_init(&t->pressure.link);
    list_init(&t->waits);
    list_init(&t->ready);
    list_init(&t->durables);
    return t;
}

/* The fields that load and dump have in common. */
struct copy_params {
    uint64_t region, shard, shards, priority, deadline_ms;
    struct proto_bin keys, blocks;
    uint64_t step; /* load */
    bool plain;    /* dump */
    bool computes;
    struct proto_u32s turns; /* load */
};

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

static int ids_take(struct call *call, struct transfer *t, const struct device_region *region,
                    struct proto_bin blocks)
{
    for (uint32_t i = 0; i < t->n_keys; i++) {
        const uint8_t *p = blocks.p + 4 * (size_t)i;

        t->blocks[i] = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        if (t->blocks[i] >= region->blocks)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "blocks: block %u; this region has blocks 0 to %u", t->blocks[i],
                                 region->blocks - 1);
    }
    if (t->kind != TRANSFER_LOAD)
        return 0;
    return numbers_distinct(call, t->blocks, t->n_keys, 1, "blocks: block", "key of a load");
}

static void copy_range(struct transfer *t, const struct copy_params *p,
                       const struct device_region *r)
{
    t->shard = (uint32_t)p->shard;
    t->shards = p->shards ? (uint32_t)p->shards : r->pages.shards - t->shard;
    if (p->step == 0)
        return;
    steps_init(t, t + 1, (uint32_t)p->step);
    /* Layer 0 of all blocks can go first only if all blocks are in DRAM at once. */
    t->window_bytes = arena_bytes_configured(t->r.s->rq->rooms.arena) / 2;
}

/* Everything that is checked before anything moves. NULL with call->error. */
static struct transfer *copy_new(struct call *call, enum transfer_kind kind,
                                 const struct copy_params *p)
{
    struct registered *region = call_region(call, p->region);
    size_t steps, turns;
    struct transfer *t;
    struct view view;
    uint32_t n;

    if (region && region->region->pool) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "region %llu is a pool, whose slots hold single shards: use fetch",
                      (unsigned long long)p->region);
        return NULL;
    }
    if (!region || range_check(call, p, region->region) != 0)
        return NULL;
    n = call_keys(call, region->ns, p->keys);
    if (n == 0)
        return NULL;
    if (p->blocks.n != 4 * n) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "blocks: %u bytes for %u keys; give 4 for each", p->blocks.n, n);
        return NULL;
    }
    if (turns_check(call, region, p->turns, n, &turns) != 0)
        return NULL;
    steps = steps_memory((uint32_t)p->step, region->region->pages.shards);
    view = region_view(region);
    if (p->plain)
        view = (struct view){.ns = {view.ns[view.n - 1]}, .n = 1};
    t = transfer_new(call, kind, &view, n, p->deadline_ms, steps + turns);
    if (!t)
        return NULL;
    copy_range(t, p, region->region);
    if (ids_take(call, t, region->region, p->blocks) != 0) {
        request_refuse(&t->r);
        return NULL;
    }
    t->region = region;
    if (turns > 0)
        turns_init(t, p->turns, (uint8_t *)(t + 1) + steps);
    region->transfers++;
    t->part = region->region->part;
    t->priority = (uint8_t)p->priority;
    t->beside = p->computes ? DEVICE_BESIDE_STEPS : DEVICE_BESIDE_NOTHING;
    return t;
}

/* Of a prefix: leases what a lookup would find, counts it as one, and lets the rest be missed. */
static void prefix_take(struct transfer *t, const uint8_t *keys)
{
    struct requests *rq = t->r.s->rq;
    struct lookup_counts found = {.n = t->n_keys};

    for (uint32_t i = 0; i < t->n_keys; i++) {
        uint8_t tier = 0;
        struct ns *ns = t->ns;

        if (found.hits == i && t->refs[i] != 0) {
            ns = item_ns(t, i);
            tier = cache_tier(rq->rooms.cache, ns, t->refs[i]);
        }
        if (tier == 0) {
            t->refs[i] = 0;
            t->status[i] = UCM_BLOCK_MISS;
            continue;
        }
        found.hits++;
        found.dram += tier == CACHE_DRAM;
        found.shared += tier == CACHE_SHARE;
        found.plain += ns != t->ns;
    }
    if (t->part == 0) /* other ranks look the same blocks up */
        lookup_counts_add(rq, t->ns, keys, &found);
}

/* Keys are looked up by themselves. */
static void blocks_take(struct transfer *t)
{
    struct requests *rq = t->r.s->rq;

    for (uint32_t i = 0; i < t->n_keys; i++) {
        if (cache_found(rq->rooms.cache, t->refs[i]))
            continue;
        t->refs[i] = 0;
        t->status[i] = UCM_BLOCK_MISS;
        rq->rooms.metrics->load_blocks_missed += t->kind == TRANSFER_LOAD;
    }
}

void blocks_find(struct transfer *t, const uint8_t *keys)
{
    struct requests *rq = t->r.s->rq;

    t->opened = t->n_keys;
    trace_more(t->r.trace, TRACE_LOOKUP);
    if (!view_find(rq, &t->view, keys, t->n_keys, t->prefix, t->refs)) {
        memset(t->status, UCM_BLOCK_MISS, t->n_keys);
        rq->rooms.metrics->bypass_load_blocks += t->n_keys;
    } else {
        if (t->prefix)
            prefix_take(t, keys);
        else
            blocks_take(t);
        view_lease(rq, &t->view, t->refs, t->n_keys);
        view_touch(rq, &t->view, t->refs, t->n_keys);
    }
    trace_less(t->r.trace, TRACE_LOOKUP);
}

int method_load(struct call *call)
{
    const struct msg_load *m = &call->params.load;
    struct copy_params p = {m->region, m->shard, m->shards, m->priority, m->deadline_ms, m->keys,
                            m->blocks, m->step,  false,     m->computes, m->turns};
    struct transfer *t = copy_new(call, TRANSFER_LOAD, &p);

    if (!t) {
        /* The client forgot the lease when it sent the load. */
        lease_end(call->s, (uint32_t)m->lease);
        return -call->error.code;
    }
    t->lease = (uint32_t)m->lease;
    blocks_find(t, m->keys.p);
    transfer_pump(t);
    return 0;
}

int method_dump(struct call *call)
{
    const struct msg_dump *m = &call->params.dump;
    struct copy_params p = {m->region,      m->shard,    m->shards, m->priority,
                            m->deadline_ms, m->keys,     m->blocks, 0,
                            m->plain,       m->computes, {0}};
    struct transfer *t = copy_new(call, TRANSFER_DUMP, &p);

    if (!t)
        return -call->error.code;
    t->has_event = m->event.n > 0;
    t->durable = session_durable(call->s, t->ns, m->durability);
    if (t->has_event)
        memcpy(t->event, m->event.p, sizeof(t->event));
    memcpy(t->keys, m->keys.p, m->keys.n);
    transfer_pump(t);
    return 0;
}

static void found_begin(struct transfer *t, const uint8_t *keys)
{
    blocks_find(t, keys);
    transfer_pump(t);
}

static void looked_cb(struct shared_lookup *k)
{
    struct transfer *t = k->ctx;
    struct proto_bin keys = {k->keys, t->n_keys * t->ns->identity.key_bytes};

    t->lookup = NULL;
    if (view_look_next(&t->look, keys, &t->lookup)) {
        t->lookup->ctx = t;
        t->lookup->done_cb = looked_cb;
    } else {
        trace_less(t->r.trace, TRACE_SHARED_LOOKUP);
        found_begin(t, k->keys);
    }
    shared_lookup_free(k);
}

/* Asks the shared tier for keys that are not here, if there is one, and then begins. */
static void look_begin(struct transfer *t, struct proto_bin keys, uint64_t wait_ms)
{
    t->look = (struct view_look){
        .s = t->r.s, .view = t->view, .until_ms = shared_lookup_until(t->r.s->rq, wait_ms)};
    if (!view_look_begin(&t->look, keys, 0, &t->lookup)) {
        found_begin(t, keys.p);
        return;
    }
    trace_more(t->r.trace, TRACE_SHARED_LOOKUP);
    t->lookup->ctx = t;
    t->lookup->done_cb = looked_cb;
}

int method_prefetch(struct call *call)
{
    const struct msg_prefetch *m = &call->params.prefetch;
    struct transfer *t;
    struct view view;
    struct ns *ns = call_namespace(call, m->ns);
    uint32_t n = ns ? call_keys(call, ns, m->keys) : 0;

    if (n == 0)
        return -call->error.code;
    if (m->part > ns->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "part: %llu; 0 means all, else 1 to %u for parts 0 to %u",
                             (unsigned long long)m->part, ns->identity.parts,
                             ns->identity.parts - 1);
    view = session_view(call->s, ns);
    t = transfer_new(call, TRANSFER_PREFETCH, &view, n, m->deadline_ms, 0);
    if (!t)
        return -call->error.code;
    t->part = m->part ? (uint32_t)m->part - 1 : 0;
    t->parts = m->part ? 1 : ns->identity.parts;
    t->priority = (uint8_t)m->priority;
    look_begin(t, m->keys, m->deadline_ms);
    return 0;
}

int method_load_prefix(struct call *call)
{
    const struct msg_load_prefix *m = &call->params.load_prefix;
    struct copy_params p = {m->region,      m->shard,    m->shards, m->priority,
                            m->deadline_ms, m->keys,     m->blocks, m->step,
                            false,          m->computes, {0}};
    struct transfer *t = copy_new(call, TRANSFER_LOAD, &p);

    if (!t)
        return -call->error.code;
    t->prefix = true;
    look_begin(t, m->keys, m->wait_ms);
    return 0;
}
