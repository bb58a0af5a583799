/* The companion's inside: slices of GPU memory, and a thread that moves what the daemon orders
 * between them and the worker's pages (proto/staging.h). Knows nothing of connections: whoever owns it
 * gives it one shared memory after the other.
 *
 * Promises: no kernel is launched for an order that does not fit the regions added here, or for a
 * ring that is dead. companion_region_remove returns when no kernel of the region runs any more,
 * companion_serve(NULL) when none of the old ring does.
 * Threads: any, but init and close; the thread of its own makes all launches. */
#ifndef UCM_CUDA_COMPANION_H
#define UCM_CUDA_COMPANION_H

#include "kernels/copy.h"
#include "proto/staging.h"

#include <cuda.h>
#include <pthread.h>

#define COMPANION_REGIONS 256

struct companion_region {
    CUdeviceptr planes; /* struct ucm_copy_plane of all planes, in GPU memory */
    struct ucm_copy_plane *spec;
    uint32_t n_planes, blocks;
    uint32_t kernels; /* under way */
};

/* What the companion knows of a turn that it has claimed. */
struct companion_turn {
    bool claimed;
    uint32_t tag;
    CUevent moved;
    struct ucm_copy_item *items; /* pinned; the kernel reads them */
    struct companion_region *region;
    struct ucm_staging_order order; /* a copy that nobody else can change */
};

struct companion {
    CUdevice dev;
    CUcontext context; /* the process's primary one */
    CUmodule module;
    CUfunction kernel;
    CUstream streams[2]; /* by enum ucm_copy_direction */
    CUdeviceptr base;    /* of the first slice */
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    uint64_t offset, slice_bytes; /* offset: from the allocation that ipc names */
    uint32_t slices;
    struct ucm_copy_item *items;
    struct companion_turn *turns;

    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool quit;
    struct ucm_staging *wanted,
        *ring; /* the thread takes over `wanted` when `ring`'s turns have ended */
    struct companion_region *regions[COMPANION_REGIONS]; /* number - 1 */
};

/* Makes the slices on that GPU, in the process's primary context, and starts the thread. A CUDA
 * error; then nothing is left. */
CUresult companion_init(struct companion *c, const uint8_t uuid[UCM_UUID_BYTES],
                        uint64_t slice_bytes, uint32_t slices);
/* Ends the thread and frees the slices. No ring may be served, and the daemon not use them. */
void companion_close(struct companion *c);

/* From now on orders come from this ring, whose generation is set; NULL: from none. The old one is
 * dead when this returns and may be unmapped. */
void companion_serve(struct companion *c, struct ucm_staging *ring);

/* Takes note of a region; planes' bases are addresses in this process. *number is what orders name
 * it by. A CUDA error; OUT_OF_MEMORY: COMPANION_REGIONS are known. */
CUresult companion_region_add(struct companion *c, const struct ucm_copy_plane *planes,
                              uint32_t n_planes, uint32_t blocks, uint32_t *number);
void companion_region_remove(struct companion *c, uint32_t number);
/* Is it memory of the slices' GPU? A CUDA error: of none. */
CUresult companion_owns(struct companion *c, uint64_t address, bool *owns);

#endif
