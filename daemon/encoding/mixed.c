/* Mixed blocks: some parts of a block did not fit its encoding and were dumped raw, the others
 * are encoded. No form has the block then, and the workers know nothing of each other. So the
 * encoded parts are decoded into the base, by a build like any other: after it the block is there,
 * raw. If no build is possible, the block stays a miss, which is counted.
 *
 * The workers could dump the block again instead, if their scheduler told them to. That would take
 * one message for each step between a dump and its answer, and keep the pages of ended requests. It
 * would move the bytes over the bus twice, and end with a preemption. Here the bytes are at hand,
 * and what UNFIT knows, `lossless`, decodes to what was dumped. */
#include "daemon/features.h"
#include "daemon/retrieval/derived.h"

/* part: which was stored now. */
static void complete(struct requests *rq, const struct view *v, block_ref ref, uint32_t part)
{
    struct index *ix = rq->modules.index;
    const struct block *stored = index_block(ix, ref), *raw = stored, *encoded = stored;
    bool is_raw = stored->ns == v->ns[1]->id;
    block_ref other = index_find(ix, is_raw ? v->ns[0] : v->ns[1], stored->key);

    if (other == 0)
        return;
    if (is_raw)
        encoded = index_block(ix, other);
    else
        raw = index_block(ix, other);
    if (raw->whole_parts == 0 || block_complete(raw, v->ns[1]) || block_complete(encoded, v->ns[0]))
        return;
    for (uint32_t i = 0; i < v->ns[1]->identity.parts; i++)
        if ((is_raw || i == part) && encoded->part[i].dram == PART_DRAM_READY &&
            raw->part[i].dram == PART_DRAM_NONE && raw->part[i].nvme == PART_NVME_NONE)
            rq->modules.metrics->unfit_decode_failed +=
                !build_raw(rq, v->ns[0], v->ns[1], stored->key, i);
}

/* Where other parts lie in the other form only, those that are encoded are decoded into the
 * base. */
static void part_stored_cb(const struct registered *r, block_ref ref)
{
    if (r->ns->identity.parts > 1 && form_refuses(ns_form(r->view.ns[0], r->region->part)))
        complete(r->s->rq, &r->view, ref, r->region->part);
}

static int encoding_open(struct requests *rq)
{
    rq->part_stored_cb = part_stored_cb;
    return 0;
}

const struct feature encoding_feature = {.open_cb = encoding_open};
