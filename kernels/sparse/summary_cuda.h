/* What the kernels of summary.cu take, filled in by client/cuda/sparse.c. All addresses are the
 * GPU's. Kernels take it by value, so a captured launch keeps its own copy. */
#ifndef UCM_KERNELS_SUMMARY_CUDA_H
#define UCM_KERNELS_SUMMARY_CUDA_H

#include "kernels/sparse/warp.cuh"

#include <stdint.h>

#define UCM_SUMMARY_CUDA_THREADS 128u
#define UCM_SUMMARY_CUDA_WARPS (UCM_SUMMARY_CUDA_THREADS / WARP_LANES)
#define UCM_SUMMARY_CUDA_LAYERS 128u /* of one launch */

/* K, V and summaries of one layer. Those of block b lie b strides further on. For K and V the
 * shape's offset is included. */
struct ucm_summary_cuda_layer {
    uint64_t k, v, out;
};

/* The kernel ucm_summary_METHOD_DTYPE_N, by the numbers of sparse.h, takes up to 32 * N channels of
 * K and V. N is 4, 8 or 32; for F32 it is 32. `tokens` needs a float a token and warp of dynamic
 * shared memory. */
struct ucm_summary_cuda {
    /* From the plan. */
    uint32_t kind, run;
    uint32_t tokens, kv_heads, head_dim, v_head_dim;
    uint32_t vectors, channels;
    uint32_t vector_bytes;
    uint32_t chosen, rest; /* tokens */
    uint32_t bytes, used;  /* of a summary; of them before the padding */
    uint32_t array[3], scale[3];
    uint32_t n_segments;
    struct ucm_cuda_segment segment[2];
    uint64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    uint64_t channel; /* uint16_t[channels]: submean */
    uint64_t flips;   /* uint32_t[]: hash */
    /* The launch. */
    uint32_t n_layers, n_blocks;
    uint64_t block, out_block;   /* int32_t[n_blocks]: numbers of blocks */
    uint32_t blocks, out_blocks; /* their bounds: numbers outside are skipped */
    uint64_t block_stride, out_stride;
    struct ucm_summary_cuda_layer layer[UCM_SUMMARY_CUDA_LAYERS];
};

#endif
