/* What fuzz targets share. */
#ifndef UCM_TESTS_FUZZ_FUZZ_H
#define UCM_TESTS_FUZZ_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Of the target; libFuzzer calls it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Traps on a broken promise. */
static inline void must(bool promise)
{
    if (!promise)
        abort();
}

#endif
