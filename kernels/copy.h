/* Copies between slots (one part of one block, contiguous in host memory) and a worker's paged KV
 * memory. This header is plain C. copy_ref.c is the reference and the test oracle, copy.cu the CUDA
 * form.
 *
 * A region's planes say where a block's fragments lie: block b of plane p is at base + b * stride.
 * In a slot the fragments of the planes follow one another; plane p's begins at slot_offset. One
 * item is one block. The copier walks items x planes itself, so a block needs 16 bytes of
 * description however many layers it has.
 *
 * Promise: of the given items and planes it touches only [slot + slot_offset, + block_bytes) and
 * [base + block * stride, + block_bytes). The caller has checked every bound. Any alignment and
 * fragment size. */
#ifndef UCM_KERNELS_COPY_H
#define UCM_KERNELS_COPY_H

#include <stdint.h>

struct ucm_copy_plane {
    uint64_t base;        /* address, as the copier sees it */
    uint64_t stride;      /* bytes from a block to the next */
    uint64_t slot_offset; /* bytes from the slot's start */
    uint32_t block_bytes; /* bytes */
    uint32_t memory;      /* which allocation base lies in; no copy spans two of them */
};

struct ucm_copy_item {
    uint64_t slot;   /* address of the slot, as the copier sees it */
    uint32_t block;  /* block id in the region */
    uint32_t memory; /* which piece of pinned memory the slot lies in, numbered as the planes'
                      * allocations; for kernels/rope, which table of angles re-rotates its K */
};

enum ucm_copy_direction {
    UCM_COPY_LOAD = 0, /* slot to region */
    UCM_COPY_DUMP = 1, /* region to slot */
};

/* The reference, on memory that the calling CPU can address. Any thread. */
void ucm_copy_ref(const struct ucm_copy_plane *planes, uint32_t n_planes,
                  const struct ucm_copy_item *items, uint32_t n_items,
                  enum ucm_copy_direction direction);

/* The CUDA form. copy.cu is compiled into a fatbin that the binary embeds, so the daemon needs no
 * CUDA library to start. Launch it with UCM_COPY_CTAS x UCM_COPY_THREADS and these arguments, the
 * arrays in memory that the GPU can read:
 * - const struct ucm_copy_plane *planes, uint32_t n_planes
 * - const struct ucm_copy_item *items, uint32_t n_items
 * - uint32_t tiles: ucm_copy_tiles(the largest fragment)
 * - uint32_t direction */
#define UCM_COPY_KERNEL "ucm_copy"
#define UCM_COPY_CTAS 16
#define UCM_COPY_THREADS 512
#define UCM_COPY_TILE_BYTES 4096u /* of a fragment, what one warp copies at a time */

static inline uint32_t ucm_copy_largest_fragment(const struct ucm_copy_plane *planes, uint32_t n)
{
    uint32_t largest = 0;

    for (uint32_t p = 0; p < n; p++)
        if (planes[p].block_bytes > largest)
            largest = planes[p].block_bytes;
    return largest;
}

static inline uint32_t ucm_copy_tiles(uint32_t largest_fragment)
{
    return largest_fragment / UCM_COPY_TILE_BYTES + (largest_fragment % UCM_COPY_TILE_BYTES != 0);
}

#endif
