/* What the methods of summary.cu have in common: how a warp reads rows of K and V, and how it
 * stores vectors and scales. */
#ifndef UCM_KERNELS_SPARSE_SUMMARY_ROWS_CUH
#define UCM_KERNELS_SPARSE_SUMMARY_ROWS_CUH

#include "kernels/sparse/summary_cuda.h"
#include "kernels/sparse/sparse.h"

#include <cuda_fp16.h>

typedef const struct ucm_summary_cuda &args_t;

/* Rows whose loads are under way together. */
static __host__ __device__ constexpr int at_once(int n)
{
    return n <= 4 ? 8 : n <= 8 ? 2 : 1;
}

struct head {
    uint64_t k, v; /* its first token */
    uint8_t *out;  /* the summary */
    uint32_t g;
    float *distance; /* tokens: of this warp */
};

/* ---- rows ---- */

/* channel: which of the row's values are wanted; NULL: the first n. */
template <int N, typename T, typename DECODE>
static __device__ __forceinline__ void row_read(float x[N], const T *row, uint32_t n,
                                                const uint16_t *channel, DECODE decode)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        uint32_t c = warp_lane() + WARP_LANES * i;

        x[i] = c < n ? decode(row[channel ? channel[c] : c]) : 0.0f;
    }
}

static __device__ constexpr uint32_t element_bytes(int dtype)
{
    return dtype == UCM_KV_F32 ? 4 : dtype == UCM_KV_FP8_E4M3 ? 1 : 2;
}

/* The GPU's own conversion of F16 is exact, too. E4M3 is F16 without the low 7 bits, times 2^8,
 * except for NaN. */
static __device__ __forceinline__ float fp8_decode(uint32_t b)
{
    uint32_t h = (b & 0x80) << 8 | (b & 0x7f) << 7;
    float x = __half2float(__ushort_as_half((uint16_t)h)) * 256.0f;

    return (b & 0x7f) == 0x7f ? ucm_f32(0x7fc00000u) : x;
}

template <int D, int N>
static __device__ __forceinline__ void row_load(float x[N], uint64_t at, uint32_t n,
                                                const uint16_t *channel = nullptr)
{
    if (D == UCM_KV_BF16)
        row_read<N>(x, (const uint16_t *)at, n, channel, [](uint16_t h) { return ucm_bf16_decode(h); });
    else if (D == UCM_KV_F16)
        row_read<N>(x, (const uint16_t *)at, n, channel,
                    [](uint16_t h) { return __half2float(__ushort_as_half(h)); });
    else if (D == UCM_KV_F32)
        row_read<N>(x, (const uint32_t *)at, n, channel, [](uint32_t u) { return ucm_f32(u); });
    else
        row_read<N>(x, (const uint8_t *)at, n, channel, [](uint8_t b) { return fp8_decode(b); });
}

template <int D, int N>
static __device__ __forceinline__ void load_k(args_t a, const struct head &h, uint32_t t, float x[N])
{
    row_load<D, N>(x, h.k + t * a.k_token_stride, a.head_dim);
}

template <int N>
static __device__ __forceinline__ void divide(float x[N], float by)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        x[i] /= by;
}

/* n rows from `at`, in order, divided by n. Returns whether this lane saw a value that is not
 * finite. */
template <int D, int N>
static __device__ __forceinline__ bool row_mean(args_t a, uint64_t at, uint64_t stride, uint32_t n,
                                                uint32_t channels, float x[N],
                                                const uint16_t *channel = nullptr)
{
    float row[N];
    bool bad;

    row_load<D, N>(x, at, channels, channel);
    bad = row_bad<N>(x);
#pragma unroll (at_once(N))
    for (uint32_t t = 1; t < n; t++) {
        row_load<D, N>(row, at + t * stride, channels, channel);
        bad |= row_bad<N>(row);
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            x[i] += row[i];
    }
    divide<N>(x, (float)n);
    return bad;
}

/* ---- what is stored ---- */

template <int N, typename VALUE>
static __device__ __forceinline__ void put_bytes(uint8_t *out, uint32_t n, VALUE value)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (warp_lane() + WARP_LANES * i < n)
            out[warp_lane() + WARP_LANES * i] = value(i);
}

static __device__ __forceinline__ void put_scale(uint8_t *at, uint32_t bits)
{
    if (warp_lane() == 0)
        *(uint16_t *)at = (uint16_t)bits;
}

/* Zeros n bytes of vectors and makes their scales NaN. */
static __device__ void row_poison(uint8_t *out, uint32_t n, uint8_t *scale, uint32_t vectors)
{
    for (uint32_t i = warp_lane(); i < n; i += WARP_LANES)
        out[i] = 0;
    for (uint32_t i = warp_lane(); i < vectors; i += WARP_LANES)
        ((uint16_t *)scale)[i] = UCM_BF16_NAN;
}

/* Quantises x to int8 with a scale of its own. If poison is set, or x is not finite, the scale is
 * NaN and the rest 0. */
template <int N>
static __device__ __forceinline__ void row_put(const float x[N], uint32_t n, bool poison,
                                               uint8_t *out, uint8_t *scale)
{
    uint32_t bits;
    float s;

    if (__any_sync(WARP_ALL, poison || row_bad<N>(x))) {
        row_poison(out, n, scale, 1);
        return;
    }
    bits = ucm_scale(row_largest<N>(x), 127.0f);
    s = ucm_bf16_decode(bits);
    put_scale(scale, bits);
    put_bytes<N>(out, n, [&](uint32_t i) {
        return bits == 0 ? (uint8_t)0 : (uint8_t)(int8_t)ucm_quantise(x[i], s);
    });
}

template <int N>
static __device__ __forceinline__ void row_put_u8(const float x[N], uint32_t n, uint8_t *out,
                                                  uint8_t *scale)
{
    uint32_t bits = ucm_scale(row_largest<N>(x), 255.0f);
    float s = ucm_bf16_decode(bits);

    put_scale(scale, bits);
    put_bytes<N>(out, n, [&](uint32_t i) {
        return bits == 0 ? (uint8_t)0 : (uint8_t)ucm_quantise_u8(x[i], s);
    });
}

/* The same to 4 bits. 16 bytes hold 32 channels. Byte i has channel i in its low half and channel
 * 16 + i in the high one. x is finite. */
template <int N>
static __device__ __forceinline__ void row_put_4(const float x[N], uint32_t n, uint8_t *out,
                                                 uint8_t *scale)
{
    uint32_t bits = ucm_scale(row_largest<N>(x), 7.0f);
    float s = ucm_bf16_decode(bits);

    put_scale(scale, bits);
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        uint32_t v = bits == 0 ? 0 : (uint32_t)(int32_t)ucm_quantise(x[i], s) & 15;
        uint32_t high = __shfl_down_sync(WARP_ALL, v, 16);

        if (warp_lane() < 16 && WARP_LANES * i < n)
            out[16 * i + warp_lane()] = (uint8_t)(v | high << 4);
    }
}

#endif
