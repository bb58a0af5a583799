/* Numbers that look random. They are the same in each run, unless a test sets random_state, which is never 0. */
#ifndef UCMD_TESTS_RANDOM_H
#define UCMD_TESTS_RANDOM_H

#include "tests/runner/environment.h"

#include <stdint.h>

static uint64_t random_state = 0x5EED;

/* $UCM_SEED, or what the test begins with. */
static inline uint64_t random_seed(uint64_t usual)
{
    return number_given("UCM_SEED", usual);
}

static inline uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline uint32_t below(uint32_t n)
{
    return (uint32_t)(random_next(&random_state) >> 11) % n;
}

#endif
