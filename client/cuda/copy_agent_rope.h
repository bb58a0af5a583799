/* The part of the copy agent that re-rotates K in entries, for regions whose loads do. */
#ifndef UCM_CUDA_COPY_AGENT_ROPE_H
#define UCM_CUDA_COPY_AGENT_ROPE_H

#include "client/cuda/copy_agent.h"

/* A region that has its planes learns where K lies; its kernel is loaded and has run once. An error leaves it
 * to copy_agent_rope_close. INVALID_VALUE: K reaches out of a plane, or a number is wrong. */
CUresult copy_agent_rope_open(struct copy_agent *c, struct copy_agent_region *r,
                              const struct copy_agent_rope *rope);
void copy_agent_rope_close(struct copy_agent_region *r); /* harmless when it is not open */
/* Are the order's shifts the region's, and sound? */
bool copy_agent_rope_sound(const struct copy_agent_region *r,
                           const struct ucm_staging_order *order);
/* Copies items of an entry to pages and re-rotates their K; of an encoded order only re-rotates it, after the decoding.
 * The items are those of the order, whose numbers of tables go into them; its tables go to pinned memory, where
 * the kernel reads them. */
CUresult copy_agent_rope_launch(const struct copy_agent_region *r,
                                const struct ucm_staging_order *order, struct ucm_copy_item *items,
                                struct ucm_rope_angle *tables, CUstream stream);

#endif
