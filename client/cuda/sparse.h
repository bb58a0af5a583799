/* What builds and selections on a GPU have in common. */
#ifndef UCM_CUDA_SPARSE_H
#define UCM_CUDA_SPARSE_H

#include "client/cuda/context.h"
#include "client/include/ucmclient_cuda_sparse.h"
#include "kernels/sparse/select.h"
#include "kernels/sparse/warp.cuh"

#include <cuda.h>

/* A summary's plan and one kernel for it, in the GPU's primary context. */
struct sparse_kernel {
    CUdevice dev;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr channel, flips; /* of the plan, or 0 */
    struct ucm_summary_plan plan;
};

/* Checks the summary and makes the plan; touches no GPU. */
int sparse_plan(struct ucm_summary_plan *plan, const struct ucm_sparse_summary *summary);

/* The plan is there. Loads the kernel `name` of `fatbin` on that GPU, with so much dynamic shared memory,
 * and enters its context: ucm_context_leave follows. On an error nothing is left. */
int sparse_kernel_open(struct sparse_kernel *k, const uint8_t *gpu, const void *fatbin,
                       const char *name, uint32_t shared_bytes);
/* The context is entered; leaves it. */
void sparse_kernel_close(struct sparse_kernel *k);

/* Fills memory and waits for it. Context entered. */
CUresult sparse_fill(CUdeviceptr at, uint8_t byte, size_t bytes);

void sparse_segments(const struct ucm_summary_plan *plan, struct ucm_cuda_segment out[2]);

#endif
