/* What the benchmark runs on a GPU: a load for its SMs, a step like a decoder's, and the daemon's copy
 * kernel, to be timed alone. */
#include "kernels/copy.cu"
#include "client/bench/kernels.h"

#include <cuda_bf16.h>
#include <mma.h>

#define N UCM_BENCH_MATRIX

/* bf16 matrices of N x N, by tensor cores: a warp computes 32 x 32 of c = a * b, a block of eight
 * warps 64 x 128. */
extern "C" __global__ void ucm_bench_multiply(const __nv_bfloat16 *a, const __nv_bfloat16 *b,
                                              __nv_bfloat16 *c)
{
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> x[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> y[2];
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
    unsigned warp = threadIdx.x / 32;
    unsigned row = blockIdx.y * 64 + warp / 4 * 32, column = blockIdx.x * 128 + warp % 4 * 32;
    float odd = 0;

    for (int i = 0; i < 4; i++)
        wmma::fill_fragment(sum[i / 2][i % 2], 0.0f);
    for (unsigned k = 0; k < N; k += 16) {
        for (unsigned i = 0; i < 2; i++) {
            wmma::load_matrix_sync(x[i], a + (size_t)(row + 16 * i) * N + k, N);
            wmma::load_matrix_sync(y[i], b + (size_t)(column + 16 * i) * N + k, N);
        }
        for (int i = 0; i < 4; i++)
            wmma::mma_sync(sum[i / 2][i % 2], x[i / 2], y[i % 2], sum[i / 2][i % 2]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < sum[i / 2][i % 2].num_elements; j++)
            odd += sum[i / 2][i % 2].x[j];
    c[(size_t)(row + threadIdx.x % 32) * N + column] = odd;
}

/* Like a decode step: reads memory at full speed for about 50 us. */
extern "C" __global__ void ucm_bench_read(const uint4 *from, unsigned n, unsigned *odd)
{
    unsigned sum = 0;

    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += __ldcs(from + i).x;
    if (sum == 0x12345678)
        *odd = sum;
}
