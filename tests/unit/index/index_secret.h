/* The index hashes keys with a secret of the process, from the kernel. The policy tells blocks that
 * it has seen before by some bits of those hashes, so it takes now and then a new block for an old
 * one. A test that counts evictions sets the secret, so that each run of it sees the same. */
#ifndef UCMD_TESTS_INDEX_SECRET_H
#define UCMD_TESTS_INDEX_SECRET_H

#include "daemon/index/internal.h"

/* Before the first block. */
static inline void index_secret_fix(struct index *ix)
{
    uint64_t state = 1;

    for (unsigned i = 0; i < HASH_SECRET_BYTES; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ix->secret[i] = (uint8_t)(state >> 56);
    }
}

#endif
