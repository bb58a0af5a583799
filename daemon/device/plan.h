/* How a piece of a copy is carried out: which extents it comes down to once neighbours are merged.
 * Pure computation, no CUDA, no memory of its own.
 *
 * An extent is `rows` runs of `width` bytes, a fixed pitch apart on each side: what a copy engine
 * moves by one command, at the bus's speed from small rows on. Layers of one allocation lie a fixed
 * distance apart, so that a block is one extent; so do consecutive blocks in consecutive slots.
 *
 * Promise: extents cover exactly the bytes of the items and planes, each byte once, and none
 * reaches over two pieces of memory (`memory` of planes and items). Any thread. */
#ifndef UCMD_DEVICE_PLAN_H
#define UCMD_DEVICE_PLAN_H

#include "kernels/copy.h"

#include <stdint.h>

enum copy_strategy {
    COPY_AUTO,   /* by the planner */
    COPY_DMA,    /* the copy engines, straight between slots and pages */
    COPY_SM,     /* a kernel, straight between slots and pages */
    COPY_STAGED, /* the copy engines to and from slices of the worker's memory, and its own kernel
                    between slices and pages */
    COPY_STRATEGIES
};

/* The largest pitch of a row that every GPU takes. */
#define PLAN_PITCH_MAX 0x7fffffffull

struct plan_extent {
    uint64_t slot, page;             /* addresses of the first row */
    uint64_t slot_pitch, page_pitch; /* from a row to the next; width when there is one row */
    uint64_t width;
    uint32_t rows;
};

/* Merges what is adjacent, in whichever order of planes and items leaves fewer extents. Returns
 * their number, or 0 when there are more than `max`; then `out` holds nothing of use. */
uint32_t plan_extents(const struct ucm_copy_plane *planes, uint32_t n_planes,
                      const struct ucm_copy_item *items, uint32_t n_items, struct plan_extent *out,
                      uint32_t max);

#endif
