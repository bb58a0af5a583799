/* Learns from traffic: how long a block is worth keeping after its last use, which blocks come
 * back, and which are worth writing to NVMe. The eviction policy and the cache ask; all of it only
 * advises them. docs/design/eviction.md has what it gains.
 *
 * Memory: some 500 KiB, whatever DRAM's size, and the ghosts. Thread: the event loop only. */
#ifndef UCMD_LEARN_LEARN_H
#define UCMD_LEARN_LEARN_H

#include <stdbool.h>
#include <stdint.h>

/* What is known of a block's uses. 0: none. USES_LATE: it was in DRAM before, long ago. USES_ONE:
 * one use, USES_ONE + 1: two, and so on. */
#define USES_LATE 1u
#define USES_ONE 2u
#define USES_MAX 7u
#define USES_CLASSES (USES_MAX + 1)

/* ---- how long to keep, and what comes back: one learner a policy ----
 *
 * LRU keeps all blocks equally long. Where few blocks come back, a block that was used before
 * deserves longer, and one that was never used again less. How much depends on the traffic and on
 * the size of DRAM, so it is tried out: small simulations of the policy run alongside it, each with
 * other bonuses, on a sample of the same references; the bonuses of the one that hits most are the
 * policy's. (Miniature simulations: Waldspurger, Saemundsson, Ahmad, Park, "Cache Modeling and
 * Optimization using Miniature Simulations", USENIX ATC 2017.)
 *
 * Hashes are of keys, each time the same. in_dram: how many blocks DRAM has now that it is full.
 * Before the first eviction there is nothing to learn. */

/* A bonus of one: a block stays as long again as it takes to insert as many blocks as DRAM
 * holds. */
#define BONUS_ONE 256

struct learner;

int learner_new(struct learner **out); /* 0 or -ENOMEM */
void learner_free(struct learner *l);  /* NULL-safe */
/* A block came into DRAM or was used there; uses: with this one. */
void learner_reference(struct learner *l, uint64_t hash, uint32_t uses, uint64_t in_dram);
/* USES_CLASSES bonuses, by uses; valid until the next reference. At first all are 0, as in LRU. */
const int32_t *learner_bonus(const struct learner *l);
/* A block was evicted: some of its hash and its uses are remembered, as its ghost. Without memory
 * for ghosts it remembers none. */
void learner_evicted(struct learner *l, uint64_t hash, uint32_t uses, uint64_t in_dram);
/* Forgets the block's ghosts, as it is back, or will be: the uses that it had, or -1. *late: it
 * left long ago. */
int learner_back(struct learner *l, uint64_t hash, bool *late);

/* ---- which blocks are worth writing to NVMe: one admission a namespace ----
 *
 * At first all are written. Once NVMe has dropped enough parts before their block's first use, the
 * counts give the fraction of stored parts that are read there at that use. So many hits would be
 * lost if blocks were written only at their second use. Where that is under one hit in 128, blocks
 * are written only then: writing them earlier wears the disk and displaces better ones. One stretch
 * of blocks in 16 is written all the same, and shows when that changes. */

/* All zero at first. What is older counts less. */
struct admission {
    uint32_t hits; /* uses of blocks after their first; one, however many workers load the parts */
    uint32_t stored;   /* blocks for which admission_first was asked */
    uint32_t returned; /* parts read from NVMe at their block's first use */
    uint32_t unused;   /* parts that NVMe let go of before their block's first use */
};

void admission_hits(struct admission *a, uint32_t n);
void admission_returned(struct admission *a);
void admission_unused(struct admission *a);
/* Blocks are written at their second use only. */
bool admission_reused_only(const struct admission *a);
/* A block that was not used yet is stored: shall it be written? */
bool admission_first(struct admission *a);

#endif
