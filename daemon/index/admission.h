/* Which blocks are worth writing to NVMe, learnt for each namespace. All are written at first. Once
 * NVMe has let go of enough that nobody had used, the share that was used there for the first time
 * is known; from it and the blocks stored follows how many hits would be lost if blocks were written
 * only at their second use. Where that is under one hit in 128, they are: such blocks wear the disk
 * and displace better ones. One stretch of blocks in 16 is written all the same, and shows when that
 * changes. docs/eviction.md has what this saves and costs.
 *
 * Thread: the loop only. */
#ifndef UCMD_INDEX_ADMISSION_H
#define UCMD_INDEX_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

/* Counts of parts; all zero at first. What is older counts less. */
struct admission {
    uint32_t hits;     /* that were loaded or prefetched */
    uint32_t stored;   /* admission_first was asked for */
    uint32_t returned; /* read from NVMe at their block's first use */
    uint32_t unused;   /* let go by NVMe before their block's first use */
};

void admission_hit(struct admission *a);
void admission_returned(struct admission *a);
void admission_unused(struct admission *a);
/* Blocks are written at their second use only. */
bool admission_reused_only(const struct admission *a);
/* A part of a block that was not used yet is stored: shall it be written? */
bool admission_first(struct admission *a);

#endif
