/* The part of the copy agent that encodes and decodes entries, for regions of encoded
 * namespaces. */
#ifndef UCM_CUDA_COPY_AGENT_ENCODING_H
#define UCM_CUDA_COPY_AGENT_ENCODING_H

#include "client/cuda/copy_agent.h"

/* A region that has its planes learns how they are encoded; its kernels are loaded and have run once. An
 * error of CUDA; INVALID_VALUE when the planes are no tensors. What it has done by then, close undoes. */
CUresult copy_agent_encoding_open(struct copy_agent *c, struct copy_agent_region *r,
                                  const struct ucm_encoding_spec *encoding);
void copy_agent_encoding_close(struct copy_agent_region *r); /* harmless when it is not open */
/* Encodes or decodes between items of an entry and pages. */
CUresult copy_agent_encoding_launch(const struct copy_agent_region *region, uint32_t first_plane,
                                    uint32_t n_planes, struct ucm_copy_item *items,
                                    uint32_t n_items, uint32_t direction, CUstream stream);

#endif
