/* Keys by number, and batches of keys drawn at random. */
#ifndef UCM_TESTS_KEY_BATCH_H
#define UCM_TESTS_KEY_BATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define KEY_BYTES 32u
#define BATCH 8192u

static uint8_t keys[BATCH * KEY_BYTES];

static inline uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

static inline uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline void key_make(uint8_t *key, uint64_t number)
{
    for (uint64_t i = 0; i < KEY_BYTES / 8; i++) {
        uint64_t v = mix(number * 4 + i);

        memcpy(key + 8 * i, &v, 8);
    }
}

/* Into `keys`: of numbers below `blocks`, or of some that are not there. */
static inline void batch_draw(uint64_t blocks, bool present)
{
    static uint64_t state = 1;

    for (uint32_t i = 0; i < BATCH; i++) {
        state = mix(state);
        key_make(keys + (size_t)i * KEY_BYTES, state % blocks + (present ? 0 : UINT64_C(1) << 40));
    }
}

/* Of uint64_t, for qsort. */
static inline int by_value(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return (x > y) - (x < y);
}

#endif
