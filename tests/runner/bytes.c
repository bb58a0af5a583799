#include "tests/runner/bytes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define WORD sizeof(uint64_t)
#define HUGE_BYTES ((size_t)2 << 20)

static uint64_t word_of(uint64_t seed, size_t at)
{
    uint64_t x = (seed + 1) * UINT64_C(0xD1342543DE82EF95) + at / WORD;

    x ^= x >> 29;
    return x * UINT64_C(0x9E3779B97F4A7C15);
}

void bytes_fill(void *memory, size_t n, uint64_t seed)
{
    uint8_t *p = memory;
    uint64_t word;
    size_t at = 0;

    for (; n - at >= WORD; at += WORD) {
        word = word_of(seed, at);
        memcpy(p + at, &word, WORD);
    }
    word = word_of(seed, at);
    for (size_t i = 0; at + i < n; i++)
        p[at + i] = ((const uint8_t *)&word)[i];
}

static size_t unlike(const uint8_t *a, const uint8_t *b, size_t n)
{
    size_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += a[i] != b[i];
    return count;
}

size_t bytes_differ(const void *memory, size_t n, uint64_t seed)
{
    const uint8_t *p = memory;
    size_t count = 0, at = 0;
    uint64_t word, there;

    for (; n - at >= WORD; at += WORD) {
        word = word_of(seed, at);
        memcpy(&there, p + at, WORD);
        if (there != word)
            count += unlike(p + at, (const uint8_t *)&word, WORD);
    }
    word = word_of(seed, at);
    return count + unlike(p + at, (const uint8_t *)&word, n - at);
}

size_t bytes_right(const void *memory, size_t n, uint64_t seed)
{
    const uint8_t *p = memory;
    uint64_t word = 0;
    size_t at = 0;

    for (; at < n; at++) {
        if (at % WORD == 0)
            word = word_of(seed, at);
        if (p[at] != ((const uint8_t *)&word)[at % WORD])
            break;
    }
    return at;
}

static uint8_t *made(size_t n, uint64_t seed)
{
    uint8_t *pattern = malloc(n);

    if (!pattern)
        abort();
    bytes_fill(pattern, n, seed);
    return pattern;
}

void bytes_put(void *memory, size_t n, uint64_t seed)
{
    uint8_t *pattern = made(n, seed);

    memcpy(memory, pattern, n);
    free(pattern);
}

bool bytes_are(const void *memory, size_t n, uint64_t seed)
{
    uint8_t *pattern = made(n, seed);
    bool are = memcmp(memory, pattern, n) == 0;

    free(pattern);
    return are;
}

/* volatile, because a sanitizer watches calls of memset. */
void bytes_set(void *memory, size_t n, uint8_t value)
{
    uint8_t *p = memory;
    size_t at = 0;

    for (; at < n && (uintptr_t)(p + at) % WORD != 0; at++)
        p[at] = value;
    for (; n - at >= WORD; at += WORD)
        *(volatile uint64_t *)(void *)(p + at) = value * UINT64_C(0x0101010101010101);
    for (; at < n; at++)
        *(volatile uint8_t *)(p + at) = value;
}

size_t bytes_other(const void *memory, size_t n, uint8_t value)
{
    const uint8_t *p = memory;
    size_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += p[i] != value;
    return count;
}

size_t bytes_unlike(const void *a, const void *b, size_t n)
{
    return unlike(a, b, n);
}

void bytes_random(void *memory, size_t n, uint64_t seed)
{
    uint64_t x = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    uint8_t *p = memory;

    for (size_t at = 0; at < n; at += WORD) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        if (n - at >= WORD)
            memcpy(p + at, &x, WORD);
        else
            for (size_t i = 0; at + i < n; i++)
                p[at + i] = ((const uint8_t *)&x)[i];
    }
}

void *bytes_pages(size_t n)
{
    void *p = NULL;

    if (posix_memalign(&p, n < HUGE_BYTES ? 4096 : HUGE_BYTES, n) != 0)
        abort();
    if (n >= HUGE_BYTES)
        (void)madvise(p, n / HUGE_BYTES * HUGE_BYTES, MADV_HUGEPAGE); /* slower without */
    return p;
}
