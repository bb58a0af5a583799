/* Marks memory as untouchable for AddressSanitizer, which then reports accesses. In other builds it
 * does nothing.
 *
 * The kernel's own reads and writes are not seen. A call such as pwritev(2) is. */
#ifndef UCMD_BASE_POISON_H
#define UCMD_BASE_POISON_H

#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
#define POISON 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISON 1
#endif
#endif

#ifdef POISON

#include <sanitizer/asan_interface.h>

/* Poisons all of these bytes but the first `open`. The first and the end are aligned to 8. */
static inline void poison(const void *at, uint64_t bytes, uint64_t open)
{
    __asan_unpoison_memory_region(at, open);
    __asan_poison_memory_region((const char *)at + open, bytes - open);
}

/* How many of the bytes may be touched, from the first on. */
static inline uint64_t poison_begins(const void *at, uint64_t bytes)
{
    const char *first = __asan_region_is_poisoned((void *)(uintptr_t)at, bytes);

    return first ? (uint64_t)(first - (const char *)at) : bytes;
}

#else

static inline void poison(const void *at, uint64_t bytes, uint64_t open)
{
    (void)at;
    (void)bytes;
    (void)open;
}

static inline uint64_t poison_begins(const void *at, uint64_t bytes)
{
    (void)at;
    return bytes;
}

#endif

#endif
