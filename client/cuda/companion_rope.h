/* The part of the companion that re-rotates K in slices, for regions whose loads do. */
#ifndef UCM_CUDA_COMPANION_ROPE_H
#define UCM_CUDA_COMPANION_ROPE_H

#include "client/cuda/companion.h"

/* A region that has its planes learns where K lies; its kernel is loaded and has run once. An error leaves it
 * to companion_rope_close. INVALID_VALUE: K reaches out of a plane, or a number is wrong. */
CUresult companion_rope_open(struct companion *c, struct companion_region *r,
                             const struct companion_rope *rope);
void companion_rope_close(struct companion_region *r); /* harmless when it is not open */
/* Are the order's shifts the region's, and sound? */
bool companion_rope_sound(const struct companion_region *r, const struct ucm_staging_order *order);
/* Copies items of a slice to pages and re-rotates their K; of an encoded order only re-rotates it, behind the decoding.
 * The items are those of the order, whose numbers of tables go into them; its tables go to pinned memory, where
 * the kernel reads them. */
CUresult companion_rope_launch(const struct companion_region *r,
                               const struct ucm_staging_order *order, struct ucm_copy_item *items,
                               struct ucm_rope_angle *tables, CUstream stream);

#endif
