/* Which blocks are worth writing to NVMe, learnt for each namespace. At first all are written. When
 * NVMe has let go of enough parts before anybody used their block, the counts say what fraction of
 * the stored parts is read there at their block's first use. So many hits would be lost if blocks
 * were written only at their second use. Where that is under one hit in 128, blocks are written only
 * then: writing them earlier wears the disk and displaces better ones. One stretch of blocks in 16 is
 * written all the same, and shows when that changes. docs/eviction.md has what this saves and costs.
 *
 * Thread: the loop only. */
#ifndef UCMD_INDEX_ADMISSION_H
#define UCMD_INDEX_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

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
