/* Merges neighbouring fragments of a copy into extents. Pure computation, no CUDA, no allocation.
 *
 * An extent is `rows` runs of `width` bytes, a fixed pitch apart on each side. A copy engine moves
 * it with one command, at the bus's speed even for small rows. Layers of one allocation lie a fixed
 * distance apart, so a block is one extent; so are consecutive blocks in consecutive slots.
 *
 * Promise: extents cover exactly the bytes of the items and planes, each byte once. None crosses
 * from one piece of memory to another (`memory` of planes and items). Any thread. */
#ifndef UCMD_CUDA_PLAN_H
#define UCMD_CUDA_PLAN_H

#include "kernels/copy.h"

#include <stdint.h>

/* The largest row pitch that every GPU accepts. */
#define PLAN_PITCH_MAX 0x7fffffffull

struct plan_extent {
    uint64_t slot, page;             /* addresses of the first row */
    uint64_t slot_pitch, page_pitch; /* from a row to the next; width when there is one row */
    uint64_t width;
    uint32_t rows;
};

/* Merges neighbours, in whichever order of planes and items leaves fewer extents. Returns their
 * number, or 0 when there are more than `max`; then `out` is undefined. */
uint32_t plan_extents(const struct ucm_copy_plane *planes, uint32_t n_planes,
                      const struct ucm_copy_item *items, uint32_t n_items, struct plan_extent *out,
                      uint32_t max);

#endif
