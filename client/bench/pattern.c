#include "client/bench/pattern.h"

#include <assert.h>
#include <string.h>

#define STEP UINT64_C(0x9e3779b97f4a7c15) /* odd, no short runs of equal bits */
#define STRIDE_WORDS 512                  /* words compared between two looks at the sum */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint64_t pattern_seed(const uint8_t *key, uint32_t part)
{
    uint64_t low, high;

    memcpy(&low, key, sizeof low);
    memcpy(&high, key + sizeof low, sizeof high);
    return mix(low ^ mix(high + part));
}

void pattern_fill(void *dst, size_t bytes, uint64_t seed, uint64_t offset)
{
    size_t words = bytes / 8, rest = bytes % 8;
    uint64_t x = seed + offset / 8 * STEP;
    uint8_t *p = dst;

    assert(offset % 8 == 0);
    for (size_t i = 0; i < words; i++) {
        uint64_t w = x + i * STEP;

        memcpy(p + i * 8, &w, 8);
    }
    x += words * STEP;
    memcpy(p + words * 8, &x, rest);
}

static size_t count_differing(const uint8_t *p, size_t words, uint64_t x)
{
    size_t n = 0;

    for (size_t i = 0; i < words; i++, x += STEP) {
        uint8_t want[8];

        memcpy(want, &x, 8);
        for (size_t b = 0; b < 8; b++)
            n += p[i * 8 + b] != want[b];
    }
    return n;
}

size_t pattern_differ(const void *src, size_t bytes, uint64_t seed, uint64_t offset)
{
    size_t words = bytes / 8, rest = bytes % 8, differ = 0;
    uint64_t x = seed + offset / 8 * STEP;
    const uint8_t *p = src;
    uint8_t want[8];

    assert(offset % 8 == 0);
    for (size_t done = 0, n; done < words; done += n, p += n * 8, x += n * STEP) {
        uint64_t any = 0;

        n = words - done < STRIDE_WORDS ? words - done : STRIDE_WORDS;
        for (size_t i = 0; i < n; i++) {
            uint64_t w;

            memcpy(&w, p + i * 8, 8);
            any |= w ^ (x + i * STEP);
        }
        if (any != 0)
            differ += count_differing(p, n, x);
    }
    memcpy(want, &x, 8);
    for (size_t b = 0; b < rest; b++)
        differ += p[b] != want[b];
    return differ;
}
