/* What the files of test_entries share: a pool on the GPU, and its copy that the host reads. */
#ifndef UCM_TESTS_GPU_ENTRIES_H
#define UCM_TESTS_GPU_ENTRIES_H

#include "kernels/entries/entries_cuda.h"
#include "tests/gpu/compare.h"
#include "tests/gpu/mapping.h"

struct pool {
    struct ucm_entries gpu, host; /* the same arrays at two places */
    CUdeviceptr memory;
    size_t bytes;
};

void pool_open(struct pool *p, const struct ucm_entries_shape *shape);
/* Copies all arrays from the GPU, and checks that they are whole. */
void pool_read(struct pool *p, const char *when);
void pool_write(struct pool *p);

void pool_next(struct pool *p);
/* kernel: warp, block, warp_weak, block_weak. */
void pool_gather(struct pool *p, const char *kernel, uint32_t blocks,
                 const struct ucm_entries_gather *g);

void test_gather(void);

#endif
