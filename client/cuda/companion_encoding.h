/* The part of the companion that encodes and decodes slices, for regions of encoded namespaces. */
#ifndef UCM_CUDA_COMPANION_ENCODING_H
#define UCM_CUDA_COMPANION_ENCODING_H

#include "client/cuda/companion.h"

/* A region that has its planes learns how they are encoded; its kernels are loaded and have run once. An
 * error of CUDA; INVALID_VALUE when the planes are no tensors. What it has done by then, close undoes. */
CUresult companion_encoding_open(struct companion *c, struct companion_region *r,
                                 const struct ucm_encoding_spec *encoding);
void companion_encoding_close(struct companion_region *r); /* harmless when it is not open */
/* Encodes or decodes between items of a slice and pages. */
CUresult companion_encoding_launch(const struct companion_region *region, uint32_t first_plane,
                                   uint32_t n_planes, struct ucm_copy_item *items, uint32_t n_items,
                                   uint32_t direction, CUstream stream);

#endif
