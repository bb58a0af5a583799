/* The inside of the companion: slices of GPU memory, and a thread that moves what the daemon orders
 * between them and the worker's pages (proto/memory/staging.h). It knows nothing of connections: its owner
 * hands it one shared memory after the other.
 *
 * Promises:
 * - No kernel is launched for an order that does not fit the regions added here, or for a shared
 *   memory that is dead.
 * - When companion_region_remove returns, no kernel of the region runs any more. When
 *   companion_serve returns, none of the previous shared memory does.
 * Threads: any, but one for init and close. A thread of the companion makes all launches. */
#ifndef UCM_CUDA_COMPANION_H
#define UCM_CUDA_COMPANION_H

#include "kernels/copy.h"
#include "kernels/encoding/encoding.h"
#include "kernels/rope/rope.h"
#include "proto/memory/staging.h"

#include <cuda.h>
#include <pthread.h>
#include <time.h>

#define COMPANION_REGIONS 256

static inline int64_t companion_now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct companion_region {
    CUdeviceptr planes; /* struct ucm_copy_plane of all planes, in GPU memory */
    struct ucm_copy_plane *spec;
    uint32_t n_planes, blocks;
    /* Of a region that is encoded: how, its tensors, those in GPU memory, and the kernels by enum
     * ucm_copy_direction. encoded_spec NULL: it is not, and encoded orders are refused. */
    struct ucm_encoding_spec encoding;
    struct ucm_encoding_plane *encoded_spec;
    CUdeviceptr encoded;
    CUmodule module;
    CUfunction coders[2];
    /* Of a region whose loads re-rotate K: how, where K lies in each plane, in GPU memory, and the kernel. rerotator NULL:
     * they don't, and orders that do are refused. */
    struct ucm_rope_spec rope;
    CUdeviceptr rope_at;
    CUmodule rope_module;
    CUfunction rerotator;
    uint32_t kernels; /* under way */
    void *user;       /* companion_region_mark */
};

struct companion_slice {
    bool claimed; /* and then its order: */
    uint32_t tag;
    CUevent moved;
    struct ucm_copy_item *items;   /* pinned; the kernel reads them */
    struct ucm_rope_angle *tables; /* the same, of an order that re-rotates */
    struct companion_region *region;
    struct ucm_staging_order order; /* a copy that the daemon can't change */
};

struct companion {
    CUdevice dev;
    CUcontext context; /* the process's primary one */
    CUmodule module;
    CUfunction kernel;
    /* By enum ucm_copy_direction, and slice: a kernel begins when others' end, and those of several
     * slices then begin together instead of one after another. */
    CUstream streams[2][UCM_MAX_SLICES];
    CUdeviceptr base; /* of the first slice */
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    uint64_t offset; /* of base in the allocation that ipc names */
    uint64_t slice_bytes;
    uint32_t n_slices;
    struct ucm_copy_item *items;   /* of all slices */
    struct ucm_rope_angle *tables; /* the same */
    struct companion_slice *slices;

    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool quit;
    struct ucm_staging *served; /* by the thread; it turns to `wanted` when no order is claimed */
    struct ucm_staging *wanted;
    struct companion_region *regions[COMPANION_REGIONS]; /* by number - 1 */
};

/* Creates the slices on that GPU, in the process's primary context, and starts the thread. On a CUDA
 * error nothing is left. */
CUresult companion_init(struct companion *c, const uint8_t uuid[UCM_UUID_BYTES],
                        uint64_t slice_bytes, uint32_t n_slices);
/* Ends the thread and frees the slices, which the daemon must not use any more. */
void companion_close(struct companion *c);

/* Writes a nonce of ucmd's over the first bytes of the slices, before they are registered: what stood there is of no use.
 * It is there on return. */
CUresult companion_prove(struct companion *c, const uint8_t nonce[UCM_NONCE_BYTES]);

/* Takes orders from this shared memory from now on, whose generation is set; NULL: from none. The
 * previous one is dead on return and may be unmapped. */
void companion_serve(struct companion *c, struct ucm_staging *staging);

/* Where K lies in a region, and how it is rotated. */
struct companion_rope {
    struct ucm_rope_spec spec;
    uint32_t *at; /* of each plane, where K begins in its fragment; UCM_ROPE_NO_K: not there */
};

/* What orders of a region may ask besides copies. encoding: how its namespace's blocks are encoded, where each
 * plane is one tensor, in order; NULL: they are not. rope NULL: K is not re-rotated. */
struct companion_skills {
    const struct ucm_encoding_spec *encoding;
    const struct companion_rope *rope;
};

/* Adds a region; planes' bases are addresses in this process. Orders call it *number. A CUDA error;
 * OUT_OF_MEMORY also when there are COMPANION_REGIONS already, INVALID_VALUE when the planes are no tensors,
 * or K does not lie in them. */
CUresult companion_region_add(struct companion *c, const struct ucm_copy_plane *planes,
                              uint32_t n_planes, uint32_t blocks, struct companion_skills skills,
                              uint32_t *number);
void companion_region_remove(struct companion *c, uint32_t number);
/* Attaches a pointer to a region; find detaches it and returns the region's number, or 0. */
void companion_region_mark(struct companion *c, uint32_t number, void *user);
uint32_t companion_region_find(struct companion *c, const void *user);
/* Is the address on the slices' GPU? A CUDA error: on none. */
CUresult companion_owns(struct companion *c, uint64_t address, bool *owns);

#endif
