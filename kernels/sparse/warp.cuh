/* Rows of channels in a warp: a lane has the channels lane, lane + 32, ... Sums over channels are
 * defined in that order (docs/design/retrieval.md). So a sum's last step is a tree of shuffles, and
 * the bits are those of simd/rows.h. N: values of a lane, a constant of the compilation, so that
 * they stay in registers; those past the last channel are 0. */
#ifndef UCM_KERNELS_SPARSE_WARP_CUH
#define UCM_KERNELS_SPARSE_WARP_CUH

#include "kernels/sparse/arith.h"

#define WARP_LANES 32u
#define WARP_ALL 0xffffffffu

/* One part of the channels that is hashed by itself: ucm_hash_segment. */
struct ucm_cuda_segment {
    uint32_t first, channels, size, bits, chunks, flips;
};

#ifdef __CUDACC__

static __device__ __forceinline__ uint32_t warp_lane(void)
{
    return threadIdx.x % WARP_LANES;
}

/* The result is the same in every lane, because each step adds the same two values on both
 * sides. */
static __device__ __forceinline__ float warp_fold(float sum)
{
#pragma unroll
    for (uint32_t s = WARP_LANES / 2; s > 0; s /= 2)
        sum += __shfl_xor_sync(WARP_ALL, sum, s);
    return sum;
}

template <int N>
static __device__ __forceinline__ bool row_bad(const float x[N])
{
    uint32_t bad = 0;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        bad |= ucm_not_finite(x[i]);
    return bad;
}

template <int N>
static __device__ __forceinline__ float row_largest(const float x[N])
{
    uint32_t a = 0;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        a = max(a, ucm_f32_bits(x[i]) & 0x7fffffffu);
    return ucm_f32(__reduce_max_sync(WARP_ALL, a));
}

template <int N>
static __device__ __forceinline__ float row_dot(const float a[N], const float b[N], uint32_t n)
{
    float sum = 0;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (warp_lane() + WARP_LANES * i < n)
            sum = ucm_fma(a[i], b[i], sum);
    return warp_fold(sum);
}

template <int N>
static __device__ __forceinline__ float row_distance(const float a[N], const float b[N], uint32_t n)
{
    float sum = 0;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (warp_lane() + WARP_LANES * i < n)
            sum = ucm_fma(a[i] - b[i], a[i] - b[i], sum);
    return warp_fold(sum);
}

/* The fast Walsh-Hadamard transform of size values, not normalised. */
template <int N>
static __device__ __forceinline__ void row_transform(float x[N], uint32_t size)
{
    uint32_t lane = warp_lane();

#pragma unroll
    for (uint32_t h = 1; h < WARP_LANES; h *= 2) {
        if (h >= size)
            return;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            float other = __shfl_xor_sync(WARP_ALL, x[i], h);

            x[i] = lane & h ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (uint32_t h = 1; h < N; h *= 2) {
        if (WARP_LANES * h >= size)
            return;
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if ((i & h) == 0) {
                float a = x[i], b = x[i | h];

                x[i] = a + b;
                x[i | h] = a - b;
            }
    }
}

template <int N>
static __device__ __forceinline__ void row_flip(float x[N], const uint32_t *flips, uint32_t n)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (warp_lane() + WARP_LANES * i < n)
            x[i] = ucm_f32(ucm_f32_bits(x[i]) ^ flips[warp_lane() + WARP_LANES * i]);
}

/* Bits in the order in which they come, to words of 32. The same in every lane; lane 0 stores. */
struct bit_writer {
    uint32_t *to;
    uint64_t bits;
    uint32_t n;
};

static __device__ __forceinline__ void bits_put(struct bit_writer *w, uint32_t bits, uint32_t n)
{
    w->bits |= (uint64_t)(n < 32 ? bits & ((1u << n) - 1) : bits) << w->n;
    w->n += n;
    if (w->n < 32)
        return;
    if (warp_lane() == 0)
        *w->to = (uint32_t)w->bits;
    w->to++;
    w->bits >>= 32;
    w->n -= 32;
}

/* The bits of one segment of a key or query; load(i) is its channel lane + 32 i, less than
 * channels. */
template <int N, typename LOAD>
static __device__ __forceinline__ void row_hash(const struct ucm_cuda_segment &s,
                                                const uint32_t *all_flips, struct bit_writer *out,
                                                LOAD load)
{
    uint32_t left = s.bits;

    for (uint32_t w = 0; w < s.chunks; w++) {
        const uint32_t *flips = all_flips + s.flips + 2 * w * s.size;
        float x[N];

#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            x[i] = warp_lane() + WARP_LANES * i < s.channels ? load(i) : 0.0f;
        row_flip<N>(x, flips, s.size);
        row_transform<N>(x, s.size);
        row_flip<N>(x, flips + s.size, s.size);
        row_transform<N>(x, s.size);
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = __ballot_sync(WARP_ALL, x[i] > 0);
            uint32_t n = min(min(WARP_LANES, left), s.size - min(s.size, WARP_LANES * i));

            if (n > 0)
                bits_put(out, bits, n);
            left -= n;
        }
    }
}

#endif
#endif
