/* Ghosts: what is remembered of blocks that left DRAM. One has the uses of its block: a word of 13 bits of hash
 * above 3 bits of uses, in a set of 8, newest first. The policy's; the loop only. */
#ifndef UCMD_INDEX_GHOSTS_H
#define UCMD_INDEX_GHOSTS_H

#include <stdint.h>

#define GHOST_WAYS 8u
#define GHOST_USES 0x7u

struct ghosts {
    uint32_t sets; /* 0: nothing was evicted yet, or there is no memory */
    uint16_t (*set)[GHOST_WAYS];
};

/* So many, all empty. Without memory for them the policy goes on without ghosts. */
void ghosts_clear(struct ghosts *g, uint64_t ghosts);
void ghost_put(struct ghosts *g, uint64_t hash, uint32_t uses);
/* Takes out what is known of the block: its uses, or -1. */
int ghost_take(struct ghosts *g, uint64_t hash);

#endif
