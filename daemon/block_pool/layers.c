/* Reads some layers of a part from NVMe, for a request that wants only few of them.
 *
 * The layers come into a piece of a staging slot. It has the size of the part's own slots, so no
 * slab changes its slot size. The part's state does not change: no lookup finds these bytes in
 * DRAM. If the tier can't deliver them for any reason, the part is read as by cache_get, which
 * handles bad and missing copies.
 *
 * If requests come back for other layers of the part, DRAM serves them better. So the bytes read
 * this way are summed for each part, and once the sum would reach the part's size, the whole part
 * is read: in total at most twice its bytes. The sums are few, and parts may share one, which
 * sometimes reads a whole part too early. */
#include "daemon/block_pool/layers.h"

#include "daemon/cache/extend.h"
#include "daemon/tier/tier.h"
#include "proto/histogram.h"
#include "proto/metrics/metrics.h"

#include <errno.h>
#include <stdlib.h>

/* A slot that pieces are taken of, front to back. It is freed with its last piece. */
struct layer_stage {
    slot_ref slot;
    uint64_t bytes, used;
    uint32_t pieces;
};

struct cache_layers {
    struct layer_reads *of;
    struct part_op op; /* its waiter: the caller, unless it has cancelled */
    struct layer_stage *stage;
    struct span span;         /* on the stage */
    struct cache_retry retry; /* without a stage: the caller waits for a slot for the whole part */
    int node;
};

#define WHOLE (1u << 12) /* of what sums count: a part */

/* ---- which parts ---- */

static uint16_t *sum_of(struct layer_reads *r, block_ref ref, uint32_t part)
{
    uint64_t mixed = ((uint64_t)ref << 16 | part) * UINT64_C(0x9e3779b97f4a7c15);

    return &r->sums[mixed >> (64 - LAYER_SUM_BITS)];
}

/* What a read of these layers adds to the part's sum. */
static uint32_t share_of(const struct ns *ns, uint32_t part, uint32_t first, uint32_t n)
{
    uint64_t room = tier_layers_room(ns->identity.layer_bytes, first, n);

    return (uint32_t)((room * WHOLE + ns_part_bytes(ns, part) - 1) / ns_part_bytes(ns, part));
}

/* Little of the part, and not the last of many times. */
static bool worth(struct layer_reads *r, block_ref ref, uint32_t part, uint32_t first, uint32_t n)
{
    const struct part *p = &index_block(r->index, ref)->part[part];
    uint32_t share = share_of(cache_ns(r->cache, ref), part, first, n);

    if (p->dram != PART_DRAM_NONE || p->nvme != PART_NVME_READY || share > WHOLE / 2)
        return false;
    if (*sum_of(r, ref, part) + share <= WHOLE)
        return true;
    *sum_of(r, ref, part) = 0;
    return false;
}

/* ---- stages ---- */

static int stage_new(struct layer_reads *r, uint64_t part_bytes, int node)
{
    struct layer_stage *g = calloc(1, sizeof(*g));
    int rc = g ? cache_slot_grant(r->cache, part_bytes, node, &g->slot) : -ENOMEM;

    if (rc != 0) {
        free(g);
        return rc;
    }
    g->bytes = arena_slot_bytes(r->arena, g->slot);
    r->stage = g;
    return 0;
}

/* Was that the last one of it? */
static bool stage_drop(struct layer_reads *r, struct layer_stage *g)
{
    if (--g->pieces > 0)
        return false;
    if (r->stage == g)
        r->stage = NULL;
    cache_slot_return(r->cache, g->slot);
    free(g);
    return true;
}

static void stage_put(struct layer_reads *r, struct layer_stage *g)
{
    if (stage_drop(r, g))
        cache_released(r->cache);
}

/* 0; -EBUSY: no slot now; -ENOMEM; or -EINVAL. */
static int stage_take(struct cache_layers *s, const struct form *form, uint32_t first, uint32_t n)
{
    struct layer_reads *r = s->of;
    uint64_t part_bytes = form->layers * form->layer_bytes,
             room = tier_layers_room(form->layer_bytes, first, n);
    struct layer_stage *g = r->stage;
    int rc = 0;

    if (!g || g->bytes != arena_padded(part_bytes) || g->bytes - g->used < room)
        rc = stage_new(r, part_bytes, s->node);
    if (rc != 0)
        return rc;
    g = r->stage;
    g->pieces++;
    rc = span_stage(r->cache, g->slot, g->used, form, first, n, &s->span);
    if (rc != 0) {
        stage_put(r, g);
        return rc;
    }
    s->stage = g;
    g->used += room;
    return 0;
}

/* ---- a read ---- */

void layers_put(struct cache_layers *s)
{
    stage_put(s->of, s->stage);
    free(s);
}

int layers_span(const struct cache_layers *s, struct span *out)
{
    if (!s->stage)
        return -EINVAL;
    *out = s->span;
    return 0;
}

static void cancel_cb(struct cache_wait *w)
{
    struct cache_layers *s = w->layers;

    cache_retry_cancel(&s->retry);
    free(s);
    w->layers = NULL;
}

/* Gets the whole part for the waiter, which has a reference to the block. Without a slot it keeps
 * waiting, ahead of newcomers. */
static void whole_instead(struct cache_layers *s, struct cache_wait *w)
{
    struct cache *c = s->op.cache;
    int rc = cache_get(c, s->op.ref, s->op.part, s->op.priority, s->node, w);

    if ((rc == -EBUSY && cache_wait_for(c, &s->retry, WAIT_SLOT)) ||
        (rc == -EAGAIN && cache_wait_for(c, &s->retry, WAIT_OTHER))) {
        list_push_back(&s->op.waiters, &w->link);
        w->layers = s;
        w->cancel_cb = cancel_cb;
        return;
    }
    free(s);
    if (rc == -ENOMEM || rc == -EDQUOT || rc == -EAGAIN)
        rc = -EBUSY; /* no slot: its copy below is as it was */
    if (rc != CACHE_PENDING)
        w->done_cb(w, rc == CACHE_READY ? 0 : rc);
}

static void whole_retry_cb(struct cache_retry *r)
{
    struct cache_layers *s = LIST_ENTRY(r, struct cache_layers, retry);

    whole_instead(s, LIST_ENTRY(list_pop_front(&s->op.waiters), struct cache_wait, link));
}

static void layers_cb(struct part_op *op, int status)
{
    struct cache_layers *s = LIST_ENTRY(op, struct cache_layers, op);
    struct list *node = list_pop_front(&op->waiters);
    struct cache_wait *w;

    if (status == 0)
        histogram_add(s->of->metrics->histograms.nvme_read, uv_hrtime() - op->begun_ns, 1);
    if (!node) {
        layers_put(s);
        return;
    }
    w = LIST_ENTRY(node, struct cache_wait, link); /* the waiter has a reference to the block */
    op_read_count(op, status == 0 ? s->span.len : 0);
    if (status != 0) {
        stage_put(s->of, s->stage);
        s->stage = NULL;
        whole_instead(s, w);
        return;
    }
    w->layers = s;
    w->done_cb(w, 0);
}

static const struct op_kind layers_kind = {.tier_cb = layers_cb};

/* CACHE_PENDING; -EBUSY: no slot; -EAGAIN: the tier's queue is full; or another -errno: it can't be
 * read this way. */
static int layers_start(struct layer_reads *r, block_ref ref, uint32_t part, uint32_t first,
                        uint32_t n, uint8_t priority, int node, struct cache_wait *w)
{
    struct cache_layers *s = calloc(1, sizeof(*s));
    const struct ns *ns = cache_ns(r->cache, ref);
    int rc;

    if (!s)
        return -ENOMEM;
    s->of = r;
    op_init(&s->op, r->cache, &layers_kind, ref, part);
    s->op.priority = priority;
    s->op.small = w->small;
    s->node = node;
    list_init(&s->retry.link);
    s->retry.retry_cb = whole_retry_cb;
    s->retry.first = true;
    rc = stage_take(s, ns_form(ns, part), first, n);
    if (rc != 0) {
        free(s);
        return rc;
    }
    rc = op_tier(&s->op, TIER_READ_LAYERS, &s->span);
    if (rc != 0) {
        /* As it was: nothing was released. */
        s->stage->used -= tier_layers_room(ns_form(ns, part)->layer_bytes, first, n);
        (void)stage_drop(r, s->stage);
        free(s);
        return rc;
    }
    *sum_of(r, ref, part) += (uint16_t)share_of(ns, part, first, n);
    list_push_back(&s->op.waiters, &w->link);
    return CACHE_PENDING;
}

int layers_get(struct layer_reads *r, block_ref ref, uint32_t part, uint32_t first, uint32_t n,
               uint8_t priority, int node, struct cache_wait *w)
{
    int rc;

    w->layers = NULL;
    w->cancel_cb = NULL;
    list_init(&w->link);
    if (worth(r, ref, part, first, n)) {
        rc = layers_start(r, ref, part, first, n, priority, node, w);
        if (rc == CACHE_PENDING || rc == -EBUSY || rc == -EAGAIN)
            return rc;
    }
    return cache_get(r->cache, ref, part, priority, node, w);
}
