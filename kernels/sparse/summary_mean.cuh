/* Summaries of sums and bounds of rows: mean, submean and box. */
#ifndef UCM_KERNELS_SPARSE_SUMMARY_MEAN_CUH
#define UCM_KERNELS_SPARSE_SUMMARY_MEAN_CUH

#include "kernels/sparse/summary_rows.cuh"

template <int D, int N>
static __device__ __forceinline__ bool largest_k(args_t a, const struct head &h, float x[N])
{
    float row[N];
    bool bad;

    load_k<D, N>(a, h, 0, x);
    bad = row_bad<N>(x);
#pragma unroll (at_once(N))
    for (uint32_t t = 1; t < a.tokens; t++) {
        load_k<D, N>(a, h, t, row);
        bad |= row_bad<N>(row);
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            x[i] = ucm_max(row[i], x[i]);
    }
    return bad;
}

template <int D, int N>
static __device__ void build_mean(args_t a, const struct head &h)
{
    uint32_t d = a.channels;
    float x[N];
    bool bad;

    if (a.kind == UCM_MEAN_MAX)
        bad = largest_k<D, N>(a, h, x);
    else
        bad = row_mean<D, N>(a, h.k, a.k_token_stride, a.tokens, d, x);
    if (a.kind == UCM_MEAN_NORMALISED) {
        float length = ucm_sqrt(row_dot<N>(x, x, d));

        bad |= ucm_not_finite(length);
        if (length > 0)
            divide<N>(x, length);
    }
    row_put<N>(x, d, bad, h.out + h.g * d, h.out + a.scale[0] + 2 * h.g);
}

template <int D, int N>
static __device__ void build_submean(args_t a, const struct head &h)
{
    const uint16_t *channel = (const uint16_t *)a.channel;
    uint32_t n = a.channels;
    uint8_t *data = h.out + h.g * a.vectors * n, *scale = h.out + a.scale[0] + 2 * h.g * a.vectors;

    for (uint32_t j = 0; j < a.vectors; j++) {
        uint64_t at = h.k + (uint64_t)j * a.run * a.k_token_stride;
        float x[N];
        bool bad = row_mean<D, N>(a, at, a.k_token_stride, a.run, a.head_dim, x);

        if (n < a.head_dim) /* of a key's other channels it matters only whether they are finite */
            row_mean<D, N>(a, at, a.k_token_stride, a.run, n, x, channel);
        if (__any_sync(WARP_ALL, bad || row_bad<N>(x))) {
            __syncwarp();
            row_poison(data, a.vectors * n, scale, a.vectors);
            return;
        }
        row_put<N>(x, n, false, data + j * n, scale + 2 * j);
    }
}

template <int D, int N>
static __device__ void build_box(args_t a, const struct head &h)
{
    uint32_t d = a.channels, bits;
    uint8_t *lo = h.out + h.g * d, *hi = lo + a.array[1], *scale = h.out + a.scale[0] + 2 * h.g;
    float low[N], high[N], row[N], s;
    bool bad;

    load_k<D, N>(a, h, 0, low);
    bad = row_bad<N>(low);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        high[i] = low[i];
#pragma unroll (at_once(N))
    for (uint32_t t = 1; t < a.tokens; t++) {
        load_k<D, N>(a, h, t, row);
        bad |= row_bad<N>(row);
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            low[i] = ucm_min(row[i], low[i]);
            high[i] = ucm_max(row[i], high[i]);
        }
    }
    if (__any_sync(WARP_ALL, bad)) {
        row_poison(lo, d, scale, 1);
        row_poison(hi, d, scale, 0);
        return;
    }
    bits = ucm_scale(ucm_max(row_largest<N>(low), row_largest<N>(high)), 127.0f);
    s = ucm_bf16_decode(bits);
    put_scale(scale, bits);
    put_bytes<N>(lo, d, [&](uint32_t i) {
        return bits == 0 ? (uint8_t)0 : (uint8_t)(int8_t)ucm_box_low(low[i], s);
    });
    put_bytes<N>(hi, d, [&](uint32_t i) {
        return bits == 0 ? (uint8_t)0 : (uint8_t)(int8_t)ucm_box_high(high[i], s);
    });
}

#endif
