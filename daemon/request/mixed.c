/* Mixed blocks: some parts of a block did not fit its encoding and were dumped plain, the others are coded. No
 * form has the block then, and the workers know nothing of each other. So the coded parts are decoded into the
 * base, by a build like any other: after it the block is there, plain. A build that can't be had leaves the
 * block a miss, which is counted.
 *
 * The workers could dump the block again instead, if their scheduler told them to. That takes as many messages as
 * there are steps between a dump and its answer, keeps the pages of requests that have ended, moves the bytes over
 * the bus twice, and ends with a preemption. Here the bytes are at hand, and what UNFIT knows, `lossless`, decodes to
 * what was dumped. */
#include "daemon/request/derived.h"
#include "daemon/request/encoding.h"

static void decode(struct encoded_ns *en, const uint8_t *key, uint32_t part)
{
    struct derived_space *space = space_open(en->rq, en->coded, en->base, NULL);

    if (!space || !build_queue(space, key, part))
        en->rq->rooms.metrics->unfit_decode_failed++;
    if (space)
        space_unref(space);
}

void mixed_part_stored(struct encoded_ns *en, block_ref ref, uint32_t part)
{
    struct index *ix = en->rq->rooms.index;
    const struct block *stored = index_block(ix, ref), *plain = stored, *coded = stored;
    bool is_plain = stored->ns == en->base->id;
    block_ref other = index_find(ix, is_plain ? en->coded : en->base, stored->key);

    if (other == 0)
        return;
    if (is_plain)
        coded = index_block(ix, other);
    else
        plain = index_block(ix, other);
    if (plain->whole_parts == 0 || block_complete(plain, en->base) ||
        block_complete(coded, en->coded))
        return;
    for (uint32_t i = 0; i < en->base->identity.parts; i++)
        if ((is_plain || i == part) && coded->part[i].dram == PART_DRAM_READY &&
            plain->part[i].dram == PART_DRAM_NONE && plain->part[i].nvme == PART_NVME_NONE)
            decode(en, stored->key, i);
}
