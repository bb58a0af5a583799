/* sequence.prefetch, and the prefetch that a selection asks for: blocks of a sequence by their
 * index. */
#include "daemon/request/prefetch.h"
#include "daemon/retrieval/summary.h"

/* Blocks of the sequence's base, of which only the sequence's part is brought. A block that was
 * evicted by name is a miss. NULL with call->error. */
static struct transfer *blocks_new(struct call *call, struct sequence *ch, uint32_t n,
                                   uint64_t priority, uint64_t timeout_ms)
{
    struct view view = view_whole(ch->space->base);
    struct prefetch *p = prefetch_new(call, &view, n, priority, timeout_ms);

    if (!p)
        return NULL;
    p->w.part = ch->part;
    p->w.opened = n;
    p->marks = true;
    return &p->w;
}

void sequence_block_set(struct transfer *w, const struct sequence *ch, uint32_t i, uint32_t block)
{
    block_ref ref = sequence_has(ch, block) ? ch->blocks[block].base : 0;
    bool bypassed = false;

    if (ref != 0)
        bypassed = bypass_on(ch->s->rq, view_ns(&w->view, index_block(w->modules->index, ref)),
                             BYPASS_LOAD);
    else
        bypassed = bypass_on(ch->s->rq, w->ns, BYPASS_LOAD);
    if (ref != 0 && !bypassed) {
        w->refs[i] = ref;
        cache_lease(w->modules->cache, ref);
        return;
    }
    w->status[i] = UCM_BLOCK_MISS;
    w->modules->metrics->bypass_load_blocks += bypassed;
}

static uint32_t index_at(struct proto_bin index, uint32_t i)
{
    const uint8_t *p = index.p + 4 * (size_t)i;

    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int index_check(struct call *call, const struct sequence *ch, struct proto_bin index)
{
    if (index.n % 4 != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "index: %u bytes; give 4 for each block", index.n);
    for (uint32_t i = 0; i < index.n / 4; i++)
        if (index_at(index, i) >= ch->n)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "index: block %u; this sequence has %u", index_at(index, i),
                                 ch->n);
    return 0;
}

int method_sequence_prefetch(struct call *call)
{
    const struct msg_sequence_prefetch *m = &call->params.sequence_prefetch;
    struct sequence *ch = call_sequence(call, m->sequence);
    struct transfer *w;

    if (!ch || index_check(call, ch, m->index) != 0)
        return -call->error.code;
    w = blocks_new(call, ch, m->index.n / 4, m->priority, m->timeout_ms);
    if (!w)
        return -call->error.code;
    for (uint32_t i = 0; i < w->n_keys; i++)
        sequence_block_set(w, ch, i, index_at(m->index, i));
    sequence_ref(ch); /* renews its lease */
    sequence_unref(ch);
    transfer_pump(w);
    return 0;
}

uint32_t sequence_mark(const uint32_t *index, uint32_t n, uint32_t most, uint8_t *bits)
{
    uint32_t marked = 0;

    for (uint32_t i = 0; i < n && marked < most; i++) {
        uint8_t bit = (uint8_t)(1u << index[i] % 8);

        marked += !(bits[index[i] / 8] & bit);
        bits[index[i] / 8] |= bit;
    }
    return marked;
}

bool sequence_prefetch(struct sequence *ch, const struct request *from, const uint8_t *bits,
                       uint32_t n, uint8_t priority)
{
    struct call call = {.s = ch->s, .msgid = from->msgid, .method = UCM_METHOD_SEQUENCE_PREFETCH};
    struct transfer *w = blocks_new(&call, ch, n, priority, 0);

    if (!w)
        return false;
    w->r.silent = true;
    for (uint32_t block = 0, to = 0; to < n; block++) {
        if (bits[block / 8] == 0)
            block |= 7; /* a long sequence has few */
        else if (bits[block / 8] >> block % 8 & 1)
            sequence_block_set(w, ch, to++, block);
    }
    transfer_pump(w);
    return true;
}
