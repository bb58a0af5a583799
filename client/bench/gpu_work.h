/* What a worker's GPU does in a benchmark: large DMA transfers to compare with, matrices multiplied
 * without pause, a chain of short kernels as a decoder launches them, and the bare copy kernel.
 *
 * Threads: one of a worker's own for the matrices, one for the chain; all else on the caller's. */
#ifndef UCM_BENCH_GPU_WORK_H
#define UCM_BENCH_GPU_WORK_H

#include "client/bench/figure.h"
#include "client/bench/gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

struct gpu_work {
    struct gpu *gpu; /* open; its memory is what DMA transfers write to */
    size_t bytes;    /* of that memory */
    void *module, *multiply, *read, *copy;
    /* Matrices. */
    pthread_t busy;
    atomic_bool busy_runs, busy_failed;
    atomic_ulong multiplied;
    /* The chain. */
    pthread_t chain;
    atomic_bool chain_runs;
    bool chain_failed;
    struct samples chain_us;
};

/* 0, or -1 with gpu->why. Without kernels (a build without the CUDA toolkit) only DMA is there. */
int gpu_work_open(struct gpu_work *w, struct gpu *g, size_t bytes);
void gpu_work_close(struct gpu_work *w);
bool gpu_work_kernels(const struct gpu_work *w);

struct gpu_dma {
    double to_gpu, from_gpu, both; /* bytes a second; both: in the two directions together */
};
/* One large transfer of `bytes`, the best of five. 0, or -1 with gpu->why. */
int gpu_dma_measure(struct gpu_work *w, size_t bytes, struct gpu_dma *out);

/* 0, or -1: no thread. */
int gpu_busy_start(struct gpu_work *w);
/* -1 with gpu->why when it did not run to its end. */
int gpu_busy_stop(struct gpu_work *w);
unsigned long gpu_busy_count(struct gpu_work *w); /* multiplications done, of UCM_BENCH_MATRIX */

int gpu_chain_start(struct gpu_work *w);
/* For so long, one large transfer to the GPU after another. 0, or -1 with gpu->why. */
int gpu_dma_repeat(struct gpu_work *w, size_t bytes, uint64_t ns);
/* Samples of one step in us are in w->chain_us then, but for the first quarter of a second. */
int gpu_chain_stop(struct gpu_work *w);

/* The copy kernel, launched and waited for: `fragments` of `fragment` bytes into GPU memory that is
 * 4 times as wide, or out of it. Adds `rounds` samples in us. 0, or -1 with gpu->why. */
int gpu_kernel_measure(struct gpu_work *w, uint32_t fragment, uint32_t fragments, bool load,
                       unsigned rounds, struct samples *out_us);

#endif
