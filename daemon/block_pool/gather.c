/* gather: single layers of blocks into entries of a worker's block pool.
 *
 * The items of one block are the pieces of one item of the transfer: one read brings the part into
 * DRAM, or only the layers from the first to the last that they name, if these are at most half of
 * the part (layers_get); and its pieces go in one batch. For a device a piece is an ordinary copy
 * of a span of one layer; the pool's planes are those of a part with one layer. */
#include "daemon/block_pool/layers.h"
#include "daemon/features.h"
#include "daemon/request/copies.h"
#include "daemon/retrieval/summary.h"
#include "proto/histogram.h"

#include <stdlib.h>
#include <string.h>

/* A gather takes this fraction of the arena at most. More than a load may: of each part that it
 * holds it copies little. */
#define HELD_FRACTION 4
#define JOB_ITEMS 4096u /* as many as a device launches in one go: pieces are small */

/* One item of the request. */
struct gather_piece {
    uint32_t index, layer, entry; /* as the client named them */
    uint32_t place;               /* in the request */
};

/* A key is a block, whose pieces follow one another from c.blocks[key] on. */
struct gather {
    struct copies c;
    struct gather_piece *pieces; /* c.n_copies */
    uint8_t *status;             /* of each, as the client named them */
    uint8_t slowest;             /* enum metric_tier that a part came from */
};

static struct gather *gather_of(struct transfer *w)
{
    return LIST_ENTRY(w, struct gather, c.w);
}

/* Pieces of an item. */
static uint32_t pieces_of(const struct transfer *w, uint32_t at)
{
    const struct copies *c = LIST_ENTRY(w, const struct copies, w);

    return (at + 1 < w->n_keys ? c->blocks[at + 1] : c->n_copies) - c->blocks[at];
}

/* ---- pieces ---- */

static uint32_t get32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* What the items of a gather count. */
struct gather_bounds {
    const char *of; /* "this sequence" */
    uint32_t blocks, layers, entries;
};

static int piece_check(struct call *call, const struct gather_piece *p,
                       const struct gather_bounds *b)
{
    if (p->index >= b->blocks)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: block %u; %s %u, counted from 0", p->place, p->index,
                             b->of, b->blocks);
    if (p->layer >= b->layers)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: layer %u; this part has %u, counted from 0", p->place,
                             p->layer, b->layers);
    if (p->entry >= b->entries)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: entry %u; this block pool has %u, counted from 0",
                             p->place, p->entry, b->entries);
    return 0;
}

/* Fills f->pieces. 0 or -code with call->error. */
static int pieces_take(struct call *call, struct gather *f, struct proto_bin items,
                       const struct gather_bounds *b)
{
    for (uint32_t i = 0; i < f->c.n_copies; i++) {
        const uint8_t *p = items.p + (size_t)i * UCM_GATHER_ITEM_BYTES;

        f->pieces[i] = (struct gather_piece){get32(p), get32(p + 4), get32(p + 8), i};
        if (piece_check(call, &f->pieces[i], b) != 0)
            return -call->error.code;
    }
    return numbers_distinct(call, &f->pieces->entry, f->c.n_copies,
                            sizeof(*f->pieces) / sizeof(uint32_t), "items: entry",
                            "item of a gather");
}

#define DIGIT_BITS 11u /* two digits count the blocks of any sequence */
_Static_assert(UCM_MAX_SEQUENCE_BLOCKS <= 1u << 2 * DIGIT_BITS,
               "an index has more than two digits");

static void sort_digit(const struct gather_piece *from, struct gather_piece *to, uint32_t n,
                       unsigned shift)
{
    uint32_t at[1u << DIGIT_BITS] = {0}, mask = (1u << DIGIT_BITS) - 1, sum = 0;

    for (uint32_t i = 0; i < n; i++)
        at[from[i].index >> shift & mask]++;
    for (uint32_t d = 0; d <= mask; d++) {
        uint32_t many = at[d];

        at[d] = sum;
        sum += many;
    }
    for (uint32_t i = 0; i < n; i++)
        to[at[from[i].index >> shift & mask]++] = from[i];
}

/* By index. 0 or -code with call->error. */
static int pieces_sort(struct call *call, struct gather *f)
{
    struct gather_piece *other;
    uint32_t i = 1;

    while (i < f->c.n_copies && f->pieces[i - 1].index <= f->pieces[i].index)
        i++;
    if (i == f->c.n_copies)
        return 0;
    other = malloc(f->c.n_copies * sizeof(*other));
    if (!other)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    sort_digit(f->pieces, other, f->c.n_copies, 0);
    sort_digit(other, f->pieces, f->c.n_copies, DIGIT_BITS);
    free(other);
    return 0;
}

/* Makes a key of each block that the sorted pieces name; there is room for `most`. 0 or -code with
 * call->error. */
static int pieces_group(struct call *call, struct gather *f, uint32_t most)
{
    f->c.w.n_keys = 0;
    for (uint32_t i = 0; i < f->c.n_copies; i++) {
        if (i > 0 && f->pieces[i].index == f->pieces[i - 1].index)
            continue;
        if (f->c.w.n_keys == most)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "items: they name more than %u blocks; as many as a request may "
                                 "have keys are right",
                                 most);
        f->c.blocks[f->c.w.n_keys++] = i;
    }
    return 0;
}

/* ---- items ---- */

static struct layer_reads *reads_at(struct requests *rq)
{
    return rq->ext[FEATURE_BLOCK_POOL];
}

static int pool_open(struct requests *rq)
{
    struct layer_reads *r = reads_at(rq);

    r->cache = rq->modules.cache;
    r->index = rq->modules.index;
    r->arena = rq->modules.arena;
    r->metrics = rq->modules.metrics;
    return 0;
}

const struct feature block_pool_feature = {.requests_bytes = sizeof(struct layer_reads),
                                           .open_cb = pool_open};

/* From the first to the last of the layers that its pieces name. As layers_get. */
static int item_get(struct gather *f, const struct transfer_item *it)
{
    const struct gather_piece *p = &f->pieces[f->c.blocks[it->at]];
    struct transfer *w = &f->c.w;
    uint32_t first = p->layer, last = first;

    for (uint32_t i = 1, n = pieces_of(w, it->at); i < n; i++) {
        first = p[i].layer < first ? p[i].layer : first;
        last = p[i].layer > last ? p[i].layer : last;
    }
    return layers_get(reads_at(w->r.s->rq), it->ref, it->part, first, last - first + 1,
                      read_priority(w), f->c.region->region->device->node, &w->spare->w);
}

static int gather_begin(struct transfer *w, const struct transfer_item *it)
{
    struct gather *f = gather_of(w);
    struct copy_batch *b;
    int rc = transfer_reserve(w);

    if (rc == 0)
        rc = batch_reserve(&f->c, it, &b);
    if (rc != 0)
        return rc;
    rc = transfer_gives_way(w, it) ? -EBUSY : item_get(f, it);
    if (rc == CACHE_PENDING)
        transfer_wait(w, it);
    if (rc != CACHE_READY)
        return rc;
    cache_prefetch_used(w->modules->cache, it->ref);
    batch_add(b, &(struct batch_item){.at = it->at});
    return 0;
}

static int gather_ready(struct transfer *w, struct item_wait *iw, int status)
{
    struct gather *f = gather_of(w);
    uint8_t tier = iw->w.shared ? METRIC_SHARED : METRIC_NVME;

    if (status != 0)
        return status;
    w->modules->metrics->gather_reads++;
    w->modules->metrics->gather_reads_partial += iw->w.layers != NULL;
    f->slowest = tier > f->slowest ? tier : f->slowest;
    return 1;
}

/* Ends the reference to what was read for an item. */
static void item_put(struct transfer *w, uint32_t at, struct cache_layers *layers)
{
    if (layers)
        layers_put(layers);
    else
        cache_unref(w->modules->cache, w->refs[at], w->part);
}

static void gather_drop(struct transfer *w, struct item_wait *iw)
{
    item_put(w, iw->it.at, iw->w.layers);
    cache_released(w->modules->cache);
}

/* The copies of its pieces, each of one layer. */
static int gather_add(struct copy_batch *b, const struct batch_item *item)
{
    const struct gather *f = LIST_ENTRY(b->c, const struct gather, c);
    const struct transfer *w = &f->c.w;
    const struct gather_piece *p = &f->pieces[f->c.blocks[item->at]];
    uint32_t before = b->job.n_items;
    struct span span, layer;
    int rc = item->held.layers ? layers_span(item->held.layers, &span)
                               : span_part(w->modules->cache, w->refs[item->at], w->part, &span);

    for (uint32_t i = 0, n = pieces_of(w, item->at); rc == 0 && i < n; i++) {
        rc = span_cut(w->modules->cache, &span, p[i].layer, 1, &layer);
        if (rc == 0)
            rc = device_job_add(&b->job, &layer, p[i].entry);
    }
    if (rc != 0)
        b->job.n_items = before;
    return rc;
}

static void gather_put(struct copies *c, const struct copy_batch *b, const struct batch_item *i,
                       bool ok)
{
    uint64_t pieces = ok ? pieces_of(&c->w, i->at) : 0;

    item_put(&c->w, i->at, i->held.layers);
    c->w.modules->metrics->gather_items += pieces;
    c->w.modules->metrics->gather_bytes += pieces * b->form->layer_bytes;
}

/* ---- the answer ---- */

static void gather_count(struct gather *f)
{
    struct transfer *w = &f->c.w;

    w->ns->tenant->metrics->load_bytes += w->bytes;
    w->ns->traffic.load_bytes += w->bytes;
    histogram_add(&w->modules->metrics->histograms.gather[f->slowest], uv_hrtime() - w->r.begun_ns,
                  1);
}

static void gather_finish(struct transfer *w)
{
    struct gather *f = gather_of(w);
    struct msg_gather_r r = {.status = {f->status, f->c.n_copies}, .bytes = w->bytes};
    uint32_t items_ok = 0;

    if (w->bytes > 0)
        gather_count(f);
    (void)copies_end(&f->c, NULL);
    for (uint32_t i = 0; i < w->n_keys; i++) {
        uint32_t first = f->c.blocks[i], n = pieces_of(w, i);

        for (uint32_t p = first; p < first + n; p++)
            f->status[f->pieces[p].place] = w->status[i];
        items_ok += w->status[i] == UCM_BLOCK_OK ? n : 0;
        if (w->status[i] == UCM_BLOCK_MISS || w->status[i] == UCM_BLOCK_FAILED)
            w->modules->metrics->gather_items_missed += n;
    }
    if (w->r.trace)
        w->r.trace->ok = items_ok;
    transfer_end(w, &r);
}

static const struct copy_kind gather_kind = {.transfer = {.weight = pieces_of,
                                                          .begin = gather_begin,
                                                          .ready = gather_ready,
                                                          .again = copies_again,
                                                          .drop = gather_drop,
                                                          .send = copies_send,
                                                          .stop = copies_stop,
                                                          .finish = gather_finish},
                                             .op = DEVICE_LOAD,
                                             .job_items = JOB_ITEMS,
                                             .add = gather_add,
                                             .put = gather_put};

/* ---- the request ---- */

/* Whose blocks a gather names. 0 or -code with call->error. */
static int source_check(struct call *call, const struct msg_gather *m,
                        const struct registered *region, struct sequence **ch,
                        struct gather_bounds *b)
{
    if (!region->region->block_pool)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "region %llu is no block pool; register one with block_pool: true",
                             (unsigned long long)m->region);
    if ((m->sequence == 0) == (m->keys.n == 0))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "a gather names its blocks by a sequence or by keys, one of the two");
    *ch = m->sequence ? call_sequence(call, m->sequence) : NULL;
    b->blocks = *ch ? (*ch)->n : m->sequence ? 0 : call_keys(call, region->ns, m->keys);
    if (!*ch && b->blocks == 0)
        return -call->error.code;
    if (*ch && ((*ch)->space->base != region->ns || (*ch)->part != region->region->part))
        return ucm_error_set(
            &call->error, UCM_WIRE_INVALID,
            "sequence %llu is of part %u of namespace %u, region %llu of part %u of "
            "namespace %u; they must be the same",
            (unsigned long long)m->sequence, (*ch)->part, (*ch)->space->base->id,
            (unsigned long long)m->region, region->region->part, region->ns->id);
    b->of = *ch ? "this sequence has" : "this gather has keys:";
    b->layers = region->ns->identity.layers[region->region->part];
    b->entries = region->region->blocks;
    return 0;
}

/* Finds and holds the blocks of the keys that pieces name. 0 or -code with call->error. */
static int keys_find(struct call *call, struct gather *f, const uint8_t *keys)
{
    uint32_t key_bytes = f->c.w.ns->identity.key_bytes;
    uint8_t *named = malloc((size_t)f->c.w.n_keys * key_bytes);

    if (!named)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    for (uint32_t i = 0; i < f->c.w.n_keys; i++)
        memcpy(named + (size_t)i * key_bytes,
               keys + (size_t)f->pieces[f->c.blocks[i]].index * key_bytes, key_bytes);
    (void)transfer_find(&f->c.w, named, false); /* missed pieces are counted at the end */
    free(named);
    return 0;
}

/* The same of a sequence's blocks. */
static void sequence_find(struct gather *f, struct sequence *ch)
{
    struct transfer *w = &f->c.w;

    for (uint32_t i = 0; i < w->n_keys; i++)
        sequence_block_set(w, ch, i, f->pieces[f->c.blocks[i]].index);
    w->opened = w->n_keys;
    view_touch(w->r.s->rq, &w->view, w->refs, w->n_keys);
    sequence_ref(ch); /* renews its lease */
    sequence_unref(ch);
}

/* Everything that is checked before anything moves; blocks are not looked for yet. NULL with
 * call->error. */
static struct gather *gather_new(struct call *call, const struct msg_gather *m,
                                 struct registered *region, const struct gather_bounds *b)
{
    struct view view = m->sequence ? view_whole(region->ns) : region->view;
    uint32_t n = m->items.n / UCM_GATHER_ITEM_BYTES, most = n < UCM_MAX_KEYS ? n : UCM_MAX_KEYS;
    struct gather *f;

    if (m->items.n % UCM_GATHER_ITEM_BYTES != 0) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID, "items: %u bytes; give %u for each item",
                      m->items.n, UCM_GATHER_ITEM_BYTES);
        return NULL;
    }
    f = transfer_new(call, &gather_kind.transfer, &view, most, m->timeout_ms,
                     sizeof(*f) + n * (sizeof(*f->pieces) + 1) + most * sizeof(*f->c.blocks));
    if (!f)
        return NULL;
    f->pieces = (struct gather_piece *)(f + 1);
    f->c.blocks = (uint32_t *)(f->pieces + n);
    f->status = (uint8_t *)(f->c.blocks + most);
    f->c.n_copies = n;
    if (pieces_take(call, f, m->items, b) != 0 || pieces_sort(call, f) != 0 ||
        pieces_group(call, f, most) != 0) {
        request_refuse(&f->c.w.r, call);
        return NULL;
    }
    f->c.kind = &gather_kind;
    f->c.w.part = region->region->part;
    f->c.w.priority = (uint8_t)m->priority;
    f->c.beside = DEVICE_BESIDE_AWAITED;
    f->c.layers = 1;
    f->c.w.held_most = call->s->rq->dram_bytes / HELD_FRACTION;
    return f;
}

int method_gather(struct call *call)
{
    const struct msg_gather *m = &call->params.gather;
    struct registered *region = call_region(call, m->region);
    struct gather_bounds bounds = {0};
    struct sequence *ch = NULL;
    struct gather *f;

    if (!region || source_check(call, m, region, &ch, &bounds) != 0)
        return -call->error.code;
    f = gather_new(call, m, region, &bounds);
    if (!f)
        return -call->error.code;
    if (ch) {
        sequence_find(f, ch);
    } else if (keys_find(call, f, m->keys.p) != 0) {
        request_refuse(&f->c.w.r, call);
        return -call->error.code;
    }
    f->c.region = region;
    list_push_back(&region->users, &f->c.link);
    f->c.w.modules->metrics->gathers++;
    transfer_pump(&f->c.w);
    return 0;
}
