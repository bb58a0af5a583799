/* One table of hints (proto/memory/hint.h), as the daemon has it: the memory that it shares, and
 * the only writer.
 *
 * Promises:
 * - A reader may map it at any time, and can't write to it, shrink it or grow it.
 * - It takes 15 to 32 bytes a block. Setting an entry costs about one cache miss.
 * - The seed of its hash is random: keys that a client chose to collide in one table don't in the
 *   next.
 *
 * Thread: the event loop only, but for hints_free. */
#ifndef UCMD_HINTS_TABLE_H
#define UCMD_HINTS_TABLE_H

#include "proto/memory/hint.h"

struct hints;

/* An empty table in state FILLING, which is crowded by `blocks` blocks and a twentieth more at the
 * earliest. 0 or -errno. */
int hints_new(uint32_t key_bytes, uint64_t blocks, uint64_t now_ms, struct hints **out);
/* Readers see that state from now on: nothing is set any more. */
void hints_end(struct hints *h, enum ucm_hint_state last);
/* hints_end, and gives the memory back, which takes some ms for a million blocks. Readers keep what
 * they have mapped. Any thread, when no other one uses it. NULL-safe. */
void hints_free(struct hints *h, enum ucm_hint_state last);

/* Gets some of its memory; setting an entry may end the process before all is there. 0: all is
 * there; 1: there is more to get; or -errno. */
int hints_reserve(struct hints *h);
/* The block's tier was `was`, of enum ucm_lookup_status, and is `is`. */
void hints_set(struct hints *h, const uint8_t *key, uint8_t was, uint8_t is);
/* All blocks are in it. */
void hints_begin(struct hints *h);
void hints_beat(struct hints *h, uint64_t now_ms);
/* It should be replaced by a larger one, as it will soon have no room for some blocks: it is three
 * fifths full. */
bool hints_crowded(const struct hints *h);

int hints_fd(const struct hints *h); /* to be read; stays the table's */
uint64_t hints_bytes(const struct hints *h);
uint64_t hints_entries(const struct hints *h);
uint64_t hints_left_out(const struct hints *h);

#endif
