/* A mapping of the client library over a fake daemon. Each byte of a block is the block's number.
 */
#ifndef UCMD_TESTS_CLIENT_MAPPING_RIG_H
#define UCMD_TESTS_CLIENT_MAPPING_RIG_H

#include "tests/unit/client/mapping_rig.h"

static struct ucm_mapping *mapping;
static struct ucm_sequence *sequence;
static struct ucm_place places[MAPPING_BLOCKS + 8];

static inline void setup(void)
{
    mapping_up();
    sequence = sequence_of(MAPPING_BLOCKS + 8);
}

static inline int ref(uint32_t first, uint32_t n, struct ucm_mapping_referenced *result)
{
    struct ucm_mapping_ref p = {
        .sequence = sequence, .first = first, .n = n, .places = places + first};

    return ucm_mapping_ref(mapping, &p, -1, result);
}

static inline void open_mapping(uint32_t flags)
{
    cr_assert_eq(ucm_mapping_open(rig.ns, 0, flags, -1, &mapping), 0, "%s", ucm_errmsg());
}

static inline void open_and_ref(uint32_t flags)
{
    open_mapping(flags);
    cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
}

static inline int read_block(uint32_t block)
{
    uint8_t bytes[MAPPING_SLOT_BYTES];
    int r = ucm_mapping_read(mapping, &places[block], 0, sizeof bytes, bytes);

    for (size_t i = 0; r == 0 && i < sizeof bytes; i++)
        cr_assert_eq(bytes[i], block, "byte %zu of block %u", i, block);
    return r;
}

static inline unsigned ranges(void)
{
    struct ucm_mapped_range all[MAPPING_SLABS + 2];
    uint32_t n;

    cr_assert_eq(ucm_mapping_ranges(mapping, all, MAPPING_SLABS + 2, &n), 0, "%s", ucm_errmsg());
    return n;
}

#endif
