/* Summaries of chosen tokens, with the mean of the others or without. */
#ifndef UCM_KERNELS_SPARSE_SUMMARY_TOKENS_CUH
#define UCM_KERNELS_SPARSE_SUMMARY_TOKENS_CUH

#include "kernels/sparse/summary_rows.cuh"

#define CHOSEN (-1.0f) /* in place of a distance */

/* The token not chosen yet that is farthest; the lowest of equals. */
static __device__ __forceinline__ uint32_t farthest(const float *distance, uint32_t n)
{
    float most = CHOSEN;
    uint32_t at = 0;

    for (uint32_t t = 0; t < n; t++) {
        if (distance[t] > most) {
            most = distance[t];
            at = t;
        }
    }
    return at;
}

template <int D, int N>
static __device__ __forceinline__ void measure(args_t a, const struct head &h, const float from[N])
{
    float row[N];

    for (uint32_t t = 0; t < a.tokens; t++) {
        float far;

        load_k<D, N>(a, h, t, row);
        far = row_distance<N>(row, from, a.head_dim);
        if (warp_lane() == 0)
            h.distance[t] = ucm_min(far, h.distance[t]);
    }
    __syncwarp();
}

static __device__ __forceinline__ void forget(args_t a, const struct head &h)
{
    __syncwarp();
    for (uint32_t t = warp_lane(); t < a.tokens; t += WARP_LANES)
        h.distance[t] = ucm_inf();
    __syncwarp();
}

/* The mean of the tokens that were not chosen. Returns whether it is finite. */
template <int D, int N>
static __device__ __forceinline__ bool put_rest(args_t a, const struct head &h, uint8_t *data,
                                                uint8_t *scale)
{
    float sum[N], row[N];
    bool first = true;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        sum[i] = 0;
    for (uint32_t t = 0; t < a.tokens; t++) {
        if (h.distance[t] == CHOSEN)
            continue;
        load_k<D, N>(a, h, t, row);
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            sum[i] = first ? row[i] : sum[i] + row[i];
        first = false;
    }
    divide<N>(sum, (float)(a.tokens - a.chosen));
    if (__any_sync(WARP_ALL, row_bad<N>(sum)))
        return false;
    row_put_4<N>(sum, a.channels, data, scale);
    return true;
}

template <int D, int N>
static __device__ void build_tokens(args_t a, const struct head &h)
{
    uint32_t d = a.channels, bytes = a.vector_bytes;
    uint8_t *data = h.out + h.g * a.vectors * bytes, *scale = h.out + a.scale[0] + 2 * h.g * a.vectors;
    float from[N];

    if (__any_sync(WARP_ALL, row_mean<D, N>(a, h.k, a.k_token_stride, a.tokens, d, from))) {
        row_poison(data, a.vectors * bytes, scale, a.vectors);
        return;
    }
    forget(a, h);
    measure<D, N>(a, h, from);
    for (uint32_t i = 0; i < a.chosen; i++) {
        uint32_t at = farthest(h.distance, a.tokens);

        load_k<D, N>(a, h, at, from);
        if (a.rest)
            row_put_4<N>(from, d, data + i * bytes, scale + 2 * i);
        else
            row_put<N>(from, d, false, data + i * bytes, scale + 2 * i);
        /* Distances from the mean were for the first token only. */
        if (i == 0)
            forget(a, h);
        __syncwarp();
        if (warp_lane() == 0)
            h.distance[at] = CHOSEN;
        __syncwarp();
        if (i + 1 < a.chosen)
            measure<D, N>(a, h, from);
    }
    if (a.rest && !put_rest<D, N>(a, h, data + a.chosen * bytes, scale + 2 * a.chosen)) {
        __syncwarp();
        row_poison(data, a.vectors * bytes, scale, a.vectors);
    }
}

#endif
