/* A staging ring and its entries, as staging.c (rings open and close) and staging_entry.c (when an
 * entry pays, and its way) share them.
 *
 * An entry carries pieces of several jobs where more wait than the ring has entries. All of them
 * have one region, the same planes and the same form. So one order describes them, and the copy
 * agent needs no notion of jobs.
 * Threads: the GPU's. */
#ifndef UCMD_CUDA_STAGING_ENTRY_H
#define UCMD_CUDA_STAGING_ENTRY_H

#include "daemon/cuda/gpu.h"
#include "proto/backoff.h"
#include "proto/memory/staging.h"

#define ENTRY_PARTS 16u /* jobs that share an entry */

/* The way of an entry:
 * - load: FREE, FILLING, POSTED, FREE
 * - dump: FREE, POSTED, GATHERED, EMPTYING, FREE
 * STRAIGHT: the copy agent did nothing, the parts go straight. */
enum entry_state {
    ENTRY_FREE,
    ENTRY_FILLING,  /* the engines write a load's bytes into it */
    ENTRY_POSTED,   /* the copy agent moves it */
    ENTRY_GATHERED, /* a dump's bytes are in it */
    ENTRY_EMPTYING, /* the engines read them */
    ENTRY_STRAIGHT,
};

struct gpu_staging_entry {
    struct gpu_staging *staging;
    uint32_t index, tag;
    enum entry_state state;
    enum ucm_copy_direction direction;
    struct entry_part {
        struct device_job *job;
        struct job_piece piece;
    } parts[ENTRY_PARTS]; /* in the order of their items; a job is in one part */
    uint32_t n_parts;
    struct job_piece all; /* the items and bytes of all parts; first_item means nothing */
    uint64_t posted_ms;
};

struct gpu_staging {
    struct list link;
    uint64_t connection;
    struct worker worker;
    struct gpu_ipc *ipc;
    CUdeviceptr base; /* of the first entry */
    struct ucm_staging *shared;
    uint64_t entry_bytes;
    uint32_t n_entries, generation, next_number;
    uint32_t under_way[2];  /* entries, by direction */
    struct backoff backoff; /* after the copy agent was too slow, or refused */
    bool retired;           /* takes no copy any more */
    struct gpu_staging_entry entries[UCM_MAX_STAGING_ENTRIES];
};

/* ---- staging.c ---- */

/* no kernel of the copy agent's may begin any more */
void staging_mark_dead(struct gpu_staging *s);
bool staging_paused(
    const struct gpu_staging *s); /* it takes no new copies, for a while or for good */

#endif
