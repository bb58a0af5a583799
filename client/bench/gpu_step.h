/* A stand-in of an engine that decodes under a CUDA graph: step after step, each waited for by its host.
 *
 * A step brings its inputs to the GPU in small copies, most from pinned memory on the stream that
 * computes, one of pageable memory, one on a stream of its own with an event; then comes one graph of
 * 289 kernels, which reads 14 GiB of memory as the weights of an 8B model in bf16 are read (per layer
 * four large reads and five of 1 MiB), a few kernels outside the graph, and the tokens' way back,
 * on a stream of its own behind an event.
 *
 * Threads: start makes one; all else on the caller's. */
#ifndef UCM_BENCH_GPU_STEP_H
#define UCM_BENCH_GPU_STEP_H

#include "client/bench/gpu_work.h"

#define GPU_STEP_STREAMS 3 /* computes; brings inputs; brings tokens back */
#define GPU_STEP_MARKS 4   /* begin, inputs there, graph done, tokens back */

struct gpu_steps {
    struct gpu_work *work;
    unsigned long long memory; /* device address: weights, inputs, tokens */
    uint8_t *pinned, *pageable;
    void *streams[GPU_STEP_STREAMS], *marks[GPU_STEP_MARKS], *joined[2];
    void *graph;
    pthread_t thread;
    atomic_bool runs;
    bool failed;
    /* Of the last run: whole steps by the host's clock, and their parts by the GPU's. */
    struct samples step_ms, inputs_ms, graph_ms, tokens_ms;
};

/* The work has kernels and outlives the steps. 0, or -1 with the GPU's `why`; then, too, close it. */
int gpu_steps_open(struct gpu_steps *s, struct gpu_work *work);
void gpu_steps_close(struct gpu_steps *s);
/* 0, or -1: no thread. */
int gpu_steps_start(struct gpu_steps *s);
/* Samples leave the first quarter of a second out. 0, or -1 with the GPU's `why`. */
int gpu_steps_stop(struct gpu_steps *s);

#endif
