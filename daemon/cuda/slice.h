/* A staging ring and its slices, as staging.c (rings open and close) and slice.c (when a slice
 * pays, and its way) share them.
 *
 * A slice carries pieces of several jobs where more wait than the ring has slices. All of them are
 * of one region, of the same planes and in the same form, so one order says it all, and the
 * companion knows nothing of jobs.
 * Threads: the GPU's. */
#ifndef UCMD_CUDA_SLICE_H
#define UCMD_CUDA_SLICE_H

#include "daemon/cuda/gpu.h"
#include "proto/backoff.h"
#include "proto/memory/staging.h"

#define SLICE_PARTS 16u /* jobs that share a slice */

/* The way of a slice:
 * - load: FREE, FILLING, POSTED, FREE
 * - dump: FREE, POSTED, GATHERED, EMPTYING, FREE
 * STRAIGHT: the companion did nothing, the parts go straight. */
enum slice_state {
    SLICE_FREE,
    SLICE_FILLING,  /* the engines write a load's bytes into it */
    SLICE_POSTED,   /* the companion moves it */
    SLICE_GATHERED, /* a dump's bytes are in it */
    SLICE_EMPTYING, /* the engines read them */
    SLICE_STRAIGHT,
};

struct gpu_slice {
    struct gpu_staging *staging;
    uint32_t index, tag;
    enum slice_state state;
    enum ucm_copy_direction direction;
    struct slice_part {
        struct device_job *job;
        struct job_piece piece;
    } parts[SLICE_PARTS]; /* in the order of their items; a job is in one part */
    uint32_t n_parts;
    struct job_piece all; /* the items and bytes of all parts; first_item means nothing */
    uint64_t posted_ms;
};

struct gpu_staging {
    struct list link;
    uint64_t connection;
    struct worker worker;
    struct gpu_ipc *ipc;
    CUdeviceptr base; /* of the first slice */
    struct ucm_staging *shared;
    uint64_t slice_bytes;
    uint32_t n_slices, generation, next_number;
    uint32_t under_way[2];  /* slices, by direction */
    struct backoff backoff; /* after the companion was too slow, or refused */
    bool retired;           /* takes no copy any more */
    struct gpu_slice slices[UCM_MAX_SLICES];
};

/* ---- staging.c ---- */

void staging_mark_dead(struct gpu_staging *s); /* no kernel of the companion's may begin any more */
bool staging_paused(
    const struct gpu_staging *s); /* it takes no new copies, for a while or for good */

#endif
