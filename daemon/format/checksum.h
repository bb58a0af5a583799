/* XXH3-64 with seed 0: the checksum of every page and payload that is stored. Any thread. */
#ifndef UCMD_FORMAT_CHECKSUM_H
#define UCMD_FORMAT_CHECKSUM_H

#include <stdbool.h>
#include <stdint.h>

uint64_t checksum_of(const void *data, uint64_t bytes);
/* The same, and of each fragment of `fragment_bytes`, which divides `bytes`, into `sums`. */
uint64_t checksum_fragments(const void *data, uint64_t bytes, uint64_t fragment_bytes,
                            uint64_t *sums);
/* Copies, and returns the checksum of what lies at `to`, with `of_copy`, or at `from`: of the side
 * that nobody else writes to meanwhile. They don't overlap. */
uint64_t checksum_copy(void *to, const void *from, uint64_t bytes, bool of_copy);

#endif
