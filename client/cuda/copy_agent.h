/* The inside of the copy agent: entries of GPU memory, and a thread that moves what the daemon
 * orders between them and the worker's pages (proto/memory/staging.h). It knows nothing of connections: its owner
 * hands it one shared memory after the other.
 *
 * Promises:
 * - No kernel is launched for an order that does not fit the regions added here, or for a shared
 *   memory that is dead.
 * - When copy_agent_region_remove returns, no kernel of the region runs any more. When
 *   copy_agent_serve returns, none of the previous shared memory does.
 * Threads: any, but one for init and close. A thread of the copy agent makes all launches. */
#ifndef UCM_CUDA_COPY_AGENT_H
#define UCM_CUDA_COPY_AGENT_H

#include "kernels/copy.h"
#include "kernels/encoding/encoding.h"
#include "kernels/rope/rope.h"
#include "proto/memory/staging.h"

#include <cuda.h>
#include <pthread.h>
#include <time.h>

#define COPY_AGENT_REGIONS 256

static inline int64_t copy_agent_now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct copy_agent_region {
    CUdeviceptr planes; /* struct ucm_copy_plane of all planes, in GPU memory */
    struct ucm_copy_plane *spec;
    uint32_t n_planes, blocks;
    /* For an encoded region: its encoding, its tensors, those in GPU memory, and the kernels by
     * enum ucm_copy_direction. encoded_spec NULL: it is not encoded, and encoded orders are
     * refused. */
    struct ucm_encoding_spec encoding;
    struct ucm_encoding_plane *encoded_spec;
    CUdeviceptr encoded;
    CUmodule module;
    CUfunction coders[2];
    /* For a region whose loads re-rotate K: the rotation, K's place in each plane, in GPU memory,
     * and the kernel. rerotator NULL: they don't, and orders that do are refused. */
    struct ucm_rope_spec rope;
    CUdeviceptr rope_at;
    CUmodule rope_module;
    CUfunction rerotator;
    uint32_t kernels; /* under way */
    void *user;       /* copy_agent_region_mark */
};

struct copy_agent_entry {
    bool claimed; /* and then its order: */
    uint32_t tag;
    CUevent moved;
    struct ucm_copy_item *items;   /* pinned; the kernel reads them */
    struct ucm_rope_angle *tables; /* the same, of an order that re-rotates */
    struct copy_agent_region *region;
    struct ucm_staging_order order; /* a copy that the daemon can't change */
};

struct copy_agent {
    CUdevice dev;
    CUcontext context; /* the process's primary one */
    CUmodule module;
    CUfunction kernel;
    /* By enum ucm_copy_direction, and entry: a kernel begins when others' end, and those of several
     * entries then begin together instead of one after another. */
    CUstream streams[2][UCM_MAX_STAGING_ENTRIES];
    CUdeviceptr base; /* of the first entry */
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    uint64_t offset; /* of base in the allocation that ipc names */
    uint64_t entry_bytes;
    uint32_t n_entries;
    struct ucm_copy_item *items;   /* of all entries */
    struct ucm_rope_angle *tables; /* the same */
    struct copy_agent_entry *entries;

    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Under the mutex. */
    bool quit;
    struct ucm_staging *served; /* by the thread; it turns to `wanted` when no order is claimed */
    struct ucm_staging *wanted;
    struct copy_agent_region *regions[COPY_AGENT_REGIONS]; /* by number - 1 */
};

/* Creates the entries on that GPU, in the process's primary context, and starts the thread. On a CUDA
 * error nothing is left. */
CUresult copy_agent_init(struct copy_agent *c, const uint8_t uuid[UCM_UUID_BYTES],
                         uint64_t entry_bytes, uint32_t n_entries);
/* Ends the thread and frees the entries, which the daemon must not use any more. */
void copy_agent_close(struct copy_agent *c);

/* Writes a nonce of ucmd's over the first bytes of the entries, before they are registered: what stood there is of no use.
 * It is there on return. */
CUresult copy_agent_prove(struct copy_agent *c, const uint8_t nonce[UCM_NONCE_BYTES]);

/* Takes orders from this shared memory from now on, whose generation is set; NULL: from none. The
 * previous one is dead on return and may be unmapped. */
void copy_agent_serve(struct copy_agent *c, struct ucm_staging *staging);

/* Where K lies in a region, and how it is rotated. */
struct copy_agent_rope {
    struct ucm_rope_spec spec;
    uint32_t *at; /* of each plane, where K begins in its fragment; UCM_ROPE_NO_K: not there */
};

/* What orders of a region may ask besides copies. encoding: how its namespace's blocks are encoded, where each
 * plane is one tensor, in order; NULL: they are not. rope NULL: K is not re-rotated. */
struct copy_agent_skills {
    const struct ucm_encoding_spec *encoding;
    const struct copy_agent_rope *rope;
};

/* Adds a region; planes' bases are addresses in this process. Orders call it *number. A CUDA error;
 * OUT_OF_MEMORY also when there are COPY_AGENT_REGIONS already, INVALID_VALUE when the planes are no tensors,
 * or K does not lie in them. */
CUresult copy_agent_region_add(struct copy_agent *c, const struct ucm_copy_plane *planes,
                               uint32_t n_planes, uint32_t blocks, struct copy_agent_skills skills,
                               uint32_t *number);
void copy_agent_region_remove(struct copy_agent *c, uint32_t number);
/* Attaches a pointer to a region; find detaches it and returns the region's number, or 0. */
void copy_agent_region_mark(struct copy_agent *c, uint32_t number, void *user);
uint32_t copy_agent_region_find(struct copy_agent *c, const void *user);
/* Is the address on the entries' GPU? A CUDA error: on none. */
CUresult copy_agent_owns(struct copy_agent *c, uint64_t address, bool *owns);

#endif
