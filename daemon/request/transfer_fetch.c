/* fetch: single shards of blocks into slots of a worker's pool.
 *
 * The items of one block are the pieces of one item of the transfer: one read brings the part into
 * DRAM, or from the first to the last of the shards that they name, if that is little of it
 * (cache_get_shards); and its pieces go in one batch. To a device a piece is a copy as any, of a
 * span of one shard, and the pool's planes are those of a part with one shard. */
#include "daemon/request/digest.h"
#include "daemon/request/transfer.h"

#include <stdlib.h>
#include <string.h>

/* A fetch takes this fraction of the arena at most. More than a load may: of each part that it holds it
 * copies little. */
#define WINDOW_FRACTION 4

/* ---- pieces ---- */

static uint32_t get32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* What the items of a fetch count. */
struct fetch_bounds {
    const char *of; /* "this chain" */
    uint32_t blocks, shards, slots;
};

static int piece_check(struct call *call, const struct fetch_piece *p, const struct fetch_bounds *b)
{
    if (p->index >= b->blocks)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: block %u; %s %u, counted from 0", p->place, p->index,
                             b->of, b->blocks);
    if (p->shard >= b->shards)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: shard %u; this part has %u, counted from 0", p->place,
                             p->shard, b->shards);
    if (p->slot >= b->slots)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "items[%u]: slot %u; this pool has %u, counted from 0", p->place,
                             p->slot, b->slots);
    return 0;
}

/* Fills t->pieces. 0 or -code with call->error. */
static int pieces_take(struct call *call, struct transfer *t, struct proto_bin items,
                       const struct fetch_bounds *b)
{
    for (uint32_t i = 0; i < t->n_pieces; i++) {
        const uint8_t *p = items.p + (size_t)i * UCM_FETCH_ITEM_BYTES;

        t->pieces[i] = (struct fetch_piece){get32(p), get32(p + 4), get32(p + 8), i};
        if (piece_check(call, &t->pieces[i], b) != 0)
            return -call->error.code;
    }
    return numbers_distinct(call, &t->pieces->slot, t->n_pieces,
                            sizeof(*t->pieces) / sizeof(uint32_t), "items: slot",
                            "item of a fetch");
}

#define DIGIT_BITS 11u /* two digits count the blocks of any chain */
_Static_assert(UCM_MAX_CHAIN_BLOCKS <= 1u << 2 * DIGIT_BITS, "an index has more than two digits");

static void sort_digit(const struct fetch_piece *from, struct fetch_piece *to, uint32_t n,
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
static int pieces_sort(struct call *call, struct transfer *t)
{
    struct fetch_piece *other;
    uint32_t i = 1;

    while (i < t->n_pieces && t->pieces[i - 1].index <= t->pieces[i].index)
        i++;
    if (i == t->n_pieces)
        return 0;
    other = malloc(t->n_pieces * sizeof(*other));
    if (!other)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    sort_digit(t->pieces, other, t->n_pieces, 0);
    sort_digit(other, t->pieces, t->n_pieces, DIGIT_BITS);
    free(other);
    return 0;
}

/* Makes a key of each block that the sorted pieces name; there is room for `most`. 0 or -code with
 * call->error. */
static int pieces_group(struct call *call, struct transfer *t, uint32_t most)
{
    t->n_keys = 0;
    for (uint32_t i = 0; i < t->n_pieces; i++) {
        if (i > 0 && t->pieces[i].index == t->pieces[i - 1].index)
            continue;
        if (t->n_keys == most)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "items: they name more than %u blocks; as many as a request may "
                                 "have keys are right",
                                 most);
        t->blocks[t->n_keys++] = i;
    }
    return 0;
}

int fetch_get(struct transfer *t, uint32_t item, struct cache_wait *w)
{
    const struct fetch_piece *p = &t->pieces[t->blocks[item]];
    uint32_t first = p->shard, last = p->shard;

    for (uint32_t i = 1, n = item_copies(t, item); i < n; i++) {
        first = p[i].shard < first ? p[i].shard : first;
        last = p[i].shard > last ? p[i].shard : last;
    }
    return cache_get_shards(cache_of(t), t->refs[item], t->part, first, last - first + 1,
                            read_priority(t), node_of(t), w);
}

int fetch_copies(const struct transfer *t, uint32_t item, const struct span *span,
                 struct device_job *job)
{
    const struct fetch_piece *p = &t->pieces[t->blocks[item]];
    uint32_t before = job->n_items;
    int rc = 0;

    for (uint32_t i = 0, n = item_copies(t, item); rc == 0 && i < n; i++) {
        struct span shard;

        rc = span_cut(cache_of(t), span, p[i].shard, 1, &shard);
        if (rc == 0)
            rc = device_job_add(job, &shard, p[i].slot);
    }
    if (rc != 0)
        job->n_items = before;
    return rc;
}

/* ---- the answer ---- */

void fetch_finish(struct transfer *t)
{
    uint8_t *status = (uint8_t *)(t->pieces + t->n_pieces);
    struct msg_fetch_r r = {.status = {status, t->n_pieces}, .bytes = t->bytes};
    uint32_t items_ok = 0;

    for (uint32_t i = 0; i < t->n_keys; i++) {
        uint32_t first = t->blocks[i], n = item_copies(t, i);

        for (uint32_t p = first; p < first + n; p++)
            status[t->pieces[p].place] = t->status[i];
        items_ok += t->status[i] == UCM_BLOCK_OK ? n : 0;
        if (t->status[i] == UCM_BLOCK_MISS || t->status[i] == UCM_BLOCK_FAILED)
            metrics_of(t)->fetch_items_missed += n;
    }
    trace_outcome(t->r.trace, items_ok, t->bytes);
    request_end(&t->r, NULL, &r);
}

/* ---- the request ---- */

/* Whose blocks a fetch names. 0 or -code with call->error. */
static int source_check(struct call *call, const struct msg_fetch *m,
                        const struct registered *region, struct chain **ch, struct fetch_bounds *b)
{
    if (!region->region->pool)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "region %llu is no pool; register one with pool: true",
                             (unsigned long long)m->region);
    if ((m->chain == 0) == (m->keys.n == 0))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "a fetch names its blocks by a chain or by keys, one of the two");
    *ch = m->chain ? call_chain(call, m->chain) : NULL;
    b->blocks = *ch ? (*ch)->n : m->chain ? 0 : call_keys(call, region->ns, m->keys);
    if (!*ch && b->blocks == 0)
        return -call->error.code;
    if (*ch && ((*ch)->space->base != region->ns || (*ch)->part != region->region->part))
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "chain %llu is of part %u of namespace %u, region %llu of part %u of "
                             "namespace %u; they must be the same",
                             (unsigned long long)m->chain, (*ch)->part, (*ch)->space->base->id,
                             (unsigned long long)m->region, region->region->part, region->ns->id);
    b->of = *ch ? "this chain has" : "this fetch has keys:";
    b->shards = region->ns->identity.shards[region->region->part];
    b->slots = region->region->blocks;
    return 0;
}

/* Finds and holds the blocks of the keys that pieces name. 0 or -code with call->error. */
static int keys_find(struct call *call, struct transfer *t, const uint8_t *keys)
{
    uint32_t key_bytes = t->ns->identity.key_bytes;
    uint8_t *named = malloc((size_t)t->n_keys * key_bytes);

    if (!named)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a request");
    for (uint32_t i = 0; i < t->n_keys; i++)
        memcpy(named + (size_t)i * key_bytes,
               keys + (size_t)t->pieces[t->blocks[i]].index * key_bytes, key_bytes);
    blocks_find(t, named);
    free(named);
    return 0;
}

/* The same of a chain's blocks. */
static void chain_find(struct transfer *t, struct chain *ch)
{
    for (uint32_t i = 0; i < t->n_keys; i++)
        chain_block_set(t, ch, i, t->pieces[t->blocks[i]].index);
    t->opened = t->n_keys;
    view_touch(t->r.s->rq, &t->view, t->refs, t->n_keys);
    chain_use(ch); /* renews its lease */
    chain_unuse(ch);
}

/* Everything that is checked before anything moves; blocks are not looked for yet. NULL with call->error. */
static struct transfer *fetch_new(struct call *call, const struct msg_fetch *m,
                                  struct registered *region, const struct fetch_bounds *b)
{
    struct view view = m->chain ? view_of_chain(region->ns) : region_view(region);
    uint32_t n = m->items.n / UCM_FETCH_ITEM_BYTES, most = n < UCM_MAX_KEYS ? n : UCM_MAX_KEYS;
    size_t pieces = n * sizeof(struct fetch_piece), statuses = (n + (size_t)7) / 8 * 8;
    struct transfer *t;

    if (m->items.n % UCM_FETCH_ITEM_BYTES != 0) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID, "items: %u bytes; give %u for each item",
                      m->items.n, UCM_FETCH_ITEM_BYTES);
        return NULL;
    }
    t = transfer_new(call, TRANSFER_FETCH, &view, most, m->deadline_ms, pieces + statuses);
    if (!t)
        return NULL;
    t->pieces = (struct fetch_piece *)(t + 1);
    t->n_pieces = n;
    if (pieces_take(call, t, m->items, b) != 0 || pieces_sort(call, t) != 0 ||
        pieces_group(call, t, most) != 0) {
        request_refuse(&t->r);
        return NULL;
    }
    t->part = region->region->part;
    t->priority = (uint8_t)m->priority;
    t->beside = DEVICE_BESIDE_AWAITED;
    t->shards = 1;
    t->window_bytes = arena_bytes_configured(call->s->rq->rooms.arena) / WINDOW_FRACTION;
    return t;
}

int method_fetch(struct call *call)
{
    const struct msg_fetch *m = &call->params.fetch;
    struct registered *region = call_region(call, m->region);
    struct fetch_bounds bounds = {0};
    struct chain *ch = NULL;
    struct transfer *t;

    if (!region || source_check(call, m, region, &ch, &bounds) != 0)
        return -call->error.code;
    t = fetch_new(call, m, region, &bounds);
    if (!t)
        return -call->error.code;
    if (ch) {
        chain_find(t, ch);
    } else if (keys_find(call, t, m->keys.p) != 0) {
        request_refuse(&t->r);
        return -call->error.code;
    }
    t->region = region;
    region->transfers++;
    metrics_of(t)->fetches++;
    transfer_pump(t);
    return 0;
}
