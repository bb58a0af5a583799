/* The index hashes keys with a secret of the process, from the kernel. The policy recognizes blocks
 * by some bits of those hashes, so now and then it takes a new block for an old one. A test that
 * counts evictions sets the secret, so that all its runs are alike. */
#ifndef UCMD_TESTS_INDEX_SECRET_H
#define UCMD_TESTS_INDEX_SECRET_H

#include "daemon/index/internal.h"

/* To be called before the first block. */
static inline void index_secret_fix(struct index *ix)
{
    uint64_t state = 1;

    for (unsigned i = 0; i < HASH_SECRET_BYTES; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ix->secret[i] = (uint8_t)(state >> 56);
    }
}

#endif
