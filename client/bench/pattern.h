/* The bytes of a synthetic block: a function of its key, its part and the offset. A reader can
 * check every byte without a copy, and detects a byte of another block, part or place.
 *
 * Word i (8 bytes, little-endian) of a part is seed + i * an odd constant. Both functions work at
 * the speed of memory. Threads: no state. */
#ifndef UCM_BENCH_PATTERN_H
#define UCM_BENCH_PATTERN_H

#include <stddef.h>
#include <stdint.h>

/* key: 16 bytes or more. */
uint64_t pattern_seed(const uint8_t *key, uint32_t part);
/* offset: of dst's first byte in the part, a multiple of 8. */
void pattern_fill(void *dst, size_t bytes, uint64_t seed, uint64_t offset);
/* How many bytes are not the pattern's. */
size_t pattern_differ(const void *src, size_t bytes, uint64_t seed, uint64_t offset);

#endif
