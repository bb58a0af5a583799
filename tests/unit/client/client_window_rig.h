/* A window of the client library before a fake daemon, and what its blocks hold: each byte is the block's number. */
#ifndef UCMD_TESTS_CLIENT_WINDOW_RIG_H
#define UCMD_TESTS_CLIENT_WINDOW_RIG_H

#include "tests/unit/client/window_rig.h"

static struct ucm_window *window;
static struct ucm_sequence *sequence;
static struct ucm_place places[WINDOW_BLOCKS + 8];

static inline void setup(void)
{
    window_up();
    sequence = sequence_of(WINDOW_BLOCKS + 8);
}

static inline void teardown(void)
{
    window_down();
}

static inline int pin(uint32_t first, uint32_t n, struct ucm_window_pinned *result)
{
    struct ucm_window_pin p = {
        .sequence = sequence, .first = first, .n = n, .places = places + first};

    return ucm_window_pin(window, &p, -1, result);
}

static inline void open_window(uint32_t flags)
{
    cr_assert_eq(ucm_window_open(rig.ns, 0, flags, -1, &window), 0, "%s", ucm_errmsg());
}

static inline void open_and_pin(uint32_t flags)
{
    open_window(flags);
    cr_assert_eq(pin(0, WINDOW_BLOCKS, NULL), 0, "%s", ucm_errmsg());
}

static inline int read_block(uint32_t block)
{
    uint8_t bytes[WINDOW_SLOT_BYTES];
    int r = ucm_window_read(window, &places[block], 0, sizeof bytes, bytes);

    for (size_t i = 0; r == 0 && i < sizeof bytes; i++)
        cr_assert_eq(bytes[i], block, "byte %zu of block %u", i, block);
    return r;
}

static inline unsigned mappings(void)
{
    struct ucm_window_mapping all[WINDOW_SLABS + 2];
    uint32_t n;

    cr_assert_eq(ucm_window_mappings(window, all, WINDOW_SLABS + 2, &n), 0, "%s", ucm_errmsg());
    return n;
}

#endif
