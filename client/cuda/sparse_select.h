/* Selections on a GPU, inside: what a handle has, and lists that a cluster of thread blocks chooses from. */
#ifndef UCM_CUDA_SPARSE_SELECT_H
#define UCM_CUDA_SPARSE_SELECT_H

#include "client/cuda/sparse.h"
#include "kernels/sparse/cluster.h"
#include "kernels/sparse/stream.h"

#include <stdbool.h>

struct ucm_cuda_select {
    struct sparse_kernel kernel;
    struct ucm_select_cuda args; /* what follows from summary and options, and the workspace */
    uint32_t sequences, thread_blocks, shared_bytes;
    uint32_t threads; /* of a thread block */
    uint32_t cluster; /* thread blocks a list; 0: a kernel of select.cu or select_stream.cu */
    CUdeviceptr workspace;
    uint64_t workspace_bytes, counters_bytes;
    struct ucm_cuda_select
        *few; /* serves launches of at most its own sequences, in this one's workspace; or NULL */
};

/* Whether select_cluster.cu has what the arguments ask for, and the GPU has clusters. */
bool sparse_cluster_serves(const struct ucm_cuda_select *s, const uint8_t *gpu,
                           enum ucm_select_cuda_family family);
/* As sparse_kernel_open; plans the launches, and lowers sequences to what all have a cluster a list at once. After an error another
 * kernel can be opened: a cluster may have no room for its list, or the GPU none for the clusters of a sequence. */
int sparse_cluster_open(struct ucm_cuda_select *s, const uint8_t *gpu);
CUresult sparse_cluster_launch(struct ucm_cuda_select *s, const struct ucm_select_cuda *args,
                               CUstream stream);

/* From compute capability 9.0 on GPUs have clusters, and bulk copies. */
bool sparse_has_clusters(const uint8_t *gpu);

/* Whether select_stream.cu has what the arguments ask for; then it plans the shared memory. */
bool sparse_stream_serves(struct ucm_cuda_select *s, const uint8_t *gpu,
                          enum ucm_select_cuda_family family);
/* As sparse_kernel_open. */
int sparse_stream_open(struct ucm_cuda_select *s, const uint8_t *gpu);

#endif
