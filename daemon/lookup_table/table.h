/* One lookup table (proto/memory/lookup_table.h), as the daemon has it: the memory that it shares,
 * and the only writer.
 *
 * Promises:
 * - A reader may map it at any time, and can't write to it, shrink it or grow it.
 * - It takes 15 to 32 bytes a block. Setting an entry costs about one cache miss.
 * - The seed of its hash is random: keys that a client chose to collide in one table don't in the
 *   next.
 *
 * Thread: the event loop only, but for lookup_table_free. */
#ifndef UCMD_LOOKUP_TABLE_TABLE_H
#define UCMD_LOOKUP_TABLE_TABLE_H

#include "proto/memory/lookup_table.h"

struct lookup_table;

/* An empty table in state FILLING, which is crowded by `blocks` blocks and a twentieth more at the
 * earliest. 0 or -errno. */
int lookup_table_new(uint32_t key_bytes, uint64_t blocks, uint64_t now_ms,
                     struct lookup_table **out);
/* Readers see that state from now on: nothing is set any more. */
void lookup_table_end(struct lookup_table *h, enum ucm_lookup_table_state last);
/* lookup_table_end, and gives the memory back, which takes some ms for a million blocks. Readers
 * keep what they have mapped. Any thread, when no other one uses it. NULL-safe. */
void lookup_table_free(struct lookup_table *h, enum ucm_lookup_table_state last);

/* Gets some of its memory; setting an entry may end the process before all is there. 0: all is
 * there; 1: there is more to get; or -errno. */
int lookup_table_reserve(struct lookup_table *h);
/* The block's tier was `was`, of enum ucm_lookup_status, and is `is`. */
void lookup_table_set(struct lookup_table *h, const uint8_t *key, uint8_t was, uint8_t is);
/* All blocks are in it. */
void lookup_table_begin(struct lookup_table *h);
void lookup_table_beat(struct lookup_table *h, uint64_t now_ms);
/* It should be replaced by a larger one, as it will soon have no room for some blocks: it is three
 * fifths full. */
bool lookup_table_crowded(const struct lookup_table *h);

int lookup_table_fd(const struct lookup_table *h); /* to be read; stays the table's */
uint64_t lookup_table_bytes(const struct lookup_table *h);
uint64_t lookup_table_entries(const struct lookup_table *h);
uint64_t lookup_table_left_out(const struct lookup_table *h);

#endif
