/* test_encoding: the kernels of kernels/encoding on a GPU, compared bit for bit with its C. */
#ifndef UCM_TESTS_GPU_ENCODING_H
#define UCM_TESTS_GPU_ENCODING_H

#include "kernels/encoding/encoding_cuda.h"
#include "tests/gpu/compare.h"

/* The kernel of a spec; ends the program if there is none. */
CUfunction encoding_kernel(const struct ucm_encoding_spec *spec, enum ucm_copy_direction direction);
/* Launches it over planes and items that the GPU can read. */
void encoding_launch(CUfunction kernel, uint32_t ctas, CUstream stream, CUdeviceptr planes,
                     uint32_t n_planes, CUdeviceptr items, uint32_t n_items,
                     const struct ucm_encoding_spec *spec);

struct ucm_encoding_spec encoding_spec(uint32_t encoding, uint32_t dtype, uint32_t tokens,
                                       uint32_t heads, uint32_t dim, uint32_t order, uint32_t axis);

#endif
