/* Fills a test's memory, and compares it byte by byte. Tests are compiled without optimisation and
 * with sanitizers, where such loops took most of their time. These are optimised and unwatched in
 * every build. So callers answer for the sizes: pass memory that daemons write, or that was
 * allocated in just this size. */
#ifndef UCM_TESTS_BYTES_H
#define UCM_TESTS_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Fill with a pattern of `seed`, in which bytes tell their place; count bytes that differ from it,
 * and bytes in front that don't. */
void bytes_fill(void *memory, size_t n, uint64_t seed);
size_t bytes_differ(const void *memory, size_t n, uint64_t seed);
size_t bytes_right(const void *memory, size_t n, uint64_t seed);

/* The same in memory that threads of this process share. Uses memcpy and memcmp, so that sanitizers
 * see accesses of a thread at the wrong time. */
void bytes_put(void *memory, size_t n, uint64_t seed);
bool bytes_are(const void *memory, size_t n, uint64_t seed);

/* Fill with one value; count bytes that have another. */
void bytes_set(void *memory, size_t n, uint8_t value);
size_t bytes_other(const void *memory, size_t n, uint8_t value);

/* The number of bytes in which two memories differ. */
size_t bytes_unlike(const void *a, const void *b, size_t n);

/* Bytes without a pattern, of a seed. */
void bytes_random(void *memory, size_t n, uint64_t seed);

/* n bytes in whole pages of their own, zeroed or not. Large ones may lie in huge pages, which the
 * kernel makes in a tenth of the time. The caller frees them by free(). Ends the process if there
 * is no memory. */
void *bytes_pages(size_t n);

#endif
