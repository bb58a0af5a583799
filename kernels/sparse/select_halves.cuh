/* What the matrix units take and give, for UCM_METRIC_ROUNDED. Rounded queries are integers of at
 * most 15 bits times a power of two. So each is two int8, a high and a low one. A dot product is
 * two exact sums of products of int8: 256 * high + low. One m16n8k32 multiplies 16 vectors, each of
 * another block, with the two halves of 4 queries. A thread gets both halves of its query's sums
 * with two of the blocks. */
#ifndef UCM_KERNELS_SPARSE_SELECT_HALVES_CUH
#define UCM_KERNELS_SPARSE_SELECT_HALVES_CUH

#include "kernels/sparse/select_item.cuh"

/* Vectors of 32 N channels: the part that each of four threads has, and how their queries are
 * rounded. */
template <int F, int N> struct quarter_of {
    static constexpr uint32_t words = F == UCM_SELECT_REST ? N : 2 * N;
    static constexpr uint32_t top = F == UCM_SELECT_REST ? 3 : 7; /* of ucm_grid_coarser */
};

/* Four threads share a vector, and a query. */
static __device__ __forceinline__ uint32_t quarter(void)
{
    return threadIdx.x % 4;
}

/* ---- queries ---- */

/* Reduces over the threads that share a query: all of a warp, or four. */
template <bool WARP> static __device__ __forceinline__ uint32_t sharers_max(uint32_t x)
{
    if (WARP)
        return __reduce_max_sync(WARP_ALL, x);
    x = max(x, __shfl_xor_sync(WARP_ALL, x, 1));
    return max(x, __shfl_xor_sync(WARP_ALL, x, 2));
}

template <bool WARP> static __device__ __forceinline__ uint32_t sharers_sum(uint32_t x)
{
    if (WARP)
        return __reduce_add_sync(WARP_ALL, x);
    x += __shfl_xor_sync(WARP_ALL, x, 1);
    return x + __shfl_xor_sync(WARP_ALL, x, 2);
}

/* An integer of at most 22 bits to the nearest, ties to even. */
static __device__ __forceinline__ int32_t to_integer(float x)
{
    return (int32_t)(ucm_f32_bits(x + 0x1.8p23f) - 0x4b400000u);
}

/* The high or the low halves of four integers, as signed bytes: 256 * high + low is the integer. */
static __device__ __forceinline__ uint32_t pack_halves(const int32_t n[4], bool low)
{
    uint32_t word = 0;

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        word |= (uint32_t)((low ? n[j] : (n[j] + 128) >> 8) & 0xff) << 8 * j;
    return word;
}

/* How ucm_summary_round rounds a query: to multiples of 2^e; `largest` has the bits of its largest
 * channel. */
struct grid {
    uint32_t largest;
    int32_t e;
};

/* What sums of products with its integers are multiplied with. */
template <int F> static __device__ __forceinline__ float step_of(const struct grid &g)
{
    int32_t e = F == UCM_SELECT_REST ? g.e - 4 : g.e; /* vectors of 4 bits are in the high halves of bytes */

    return g.largest < UCM_GRID_TOP ? ucm_power(e) : ucm_f32(0x7fc00000u);
}

/* By the threads that share a query; each has 4 WORDS of its channels. */
template <int F, int N, bool WARP, int WORDS>
static __device__ __forceinline__ struct grid grid_of(args_t a, const float x[WORDS][4])
{
    struct grid g = {0, 0};
    uint32_t units = 0;
    float by;

#pragma unroll
    for (uint32_t i = 0; i < 4 * WORDS; i++)
        g.largest = max(g.largest, ucm_f32_bits(x[i / 4][i % 4]) & 0x7fffffffu);
    g.largest = sharers_max<WARP>(g.largest);
    g.e = ucm_grid_first(min(g.largest, UCM_GRID_TOP));
    by = g.largest < UCM_GRID_TOP ? ucm_power(-g.e) : 0;
#pragma unroll
    for (uint32_t i = 0; i < 4 * WORDS; i++)
        units += (uint32_t)to_integer(ucm_abs(x[i / 4][i % 4]) * by);
    g.e += (int32_t)ucm_grid_coarser(sharers_sum<WARP>(units), a.channels, quarter_of<F, N>::top);
    return g;
}

/* Four channels as integers. */
static __device__ __forceinline__ void to_integers(const struct grid &g, const float x[4], int32_t n[4])
{
    float by = ucm_power(-g.e);

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        n[j] = to_integer(x[j] * by);
}

/* ---- products ---- */

static __device__ __forceinline__ void multiply(int32_t sums[4], const uint32_t vectors[4], const uint32_t queries[2])
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(vectors[0]), "r"(vectors[1]), "r"(vectors[2]), "r"(vectors[3]), "r"(queries[0]), "r"(queries[1]));
}

/* 32 channels of two vectors, as the unit takes them. */
template <int F, int N>
static __device__ __forceinline__ void channels_of(const uint32_t word[2][quarter_of<F, N>::words], uint32_t k,
                                                   uint32_t to[4])
{
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        if (F == UCM_SELECT_REST) { /* 4 bits: 16 times what they are */
            to[i] = word[i][k] << 4 & 0xf0f0f0f0u;
            to[2 + i] = word[i][k] & 0xf0f0f0f0u;
        } else {
            to[i] = word[i][2 * k];
            to[2 + i] = word[i][2 * k + 1];
        }
}

#endif
