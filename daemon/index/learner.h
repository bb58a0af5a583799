/* Learns how long a block is worth keeping after its last use.
 *
 * LRU keeps all blocks equally long. Where few blocks come back, a block that was used before
 * deserves longer, and one that was never used again less. How much depends on the traffic and on
 * the size of DRAM, so it is tried out: small simulations of the policy run beside it, each with
 * other bonuses, on a sample of the same references; the bonuses of the one that hits most are the
 * policy's. (Miniature simulations: Waldspurger, Saemundsson, Ahmad, Park, "Cache Modeling and
 * Optimization using Miniature Simulations", USENIX ATC 2017.)
 *
 * Memory: some 500 KiB, whatever DRAM's size. Thread: the loop only. */
#ifndef UCMD_INDEX_LEARNER_H
#define UCMD_INDEX_LEARNER_H

#include <stdbool.h>
#include <stdint.h>

/* What is known of a block's uses. 0: none. USES_LATE: it was in DRAM before, long ago. USES_ONE: one
 * use, USES_ONE + 1: two, and so on. */
#define USES_LATE 1u
#define USES_ONE 2u
#define USES_MAX 7u
#define USES_CLASSES (USES_MAX + 1)

/* A bonus of one: a block stays as long again as it takes to insert as many blocks as DRAM holds. */
#define BONUS_ONE 256

struct learner;

int learner_new(struct learner **out); /* 0 or -ENOMEM */
void learner_free(struct learner *l);
/* A block came into DRAM or was used there; uses: with this one. hash: of its key, the same each
 * time. in_dram: how many blocks DRAM holds, which for want of space holds no more. */
void learner_reference(struct learner *l, uint64_t hash, uint32_t uses, uint64_t in_dram);
/* USES_CLASSES bonuses, by uses; valid until the next reference. At first all are 0, as in LRU. */
const int32_t *learner_bonus(const struct learner *l);

#endif
