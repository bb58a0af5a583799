/* The benchmark's kernels, in a fatbin that is embedded where the CUDA toolkit was there to make
 * it: how they are launched. */
#ifndef UCM_BENCH_KERNELS_H
#define UCM_BENCH_KERNELS_H

#define UCM_BENCH_MULTIPLY "ucm_bench_multiply" /* (a, b, c), grid N/128 x N/64, 256 threads */
#define UCM_BENCH_MATRIX 2048u
#define UCM_BENCH_READ "ucm_bench_read" /* (from, uint4s, odd), any grid */
#define UCM_BENCH_READ_BYTES (160u << 20)

#endif
