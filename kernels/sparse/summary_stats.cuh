/* Summaries of means and variances. */
#ifndef UCM_KERNELS_SPARSE_SUMMARY_STATS_CUH
#define UCM_KERNELS_SPARSE_SUMMARY_STATS_CUH

#include "kernels/sparse/summary_rows.cuh"

/* ---- rows of up to 128 channels: a lane has four in a row ---- */

#define ROWS 16u /* whose loads are under way together */

template <int D> struct quad {
    uint32_t word[D == UCM_KV_FP8_E4M3 ? 1 : 2];
};

template <int D> static __device__ __forceinline__ bool quick_stats(args_t a, const struct head &h)
{
    uint64_t v = a.v_head_dim > 0 ? h.v | a.v_token_stride : 0;

    return D != UCM_KV_F32 && a.head_dim <= 128 && a.v_head_dim <= 128 &&
           ((h.k | a.k_token_stride | v) & (4 * element_bytes(D) - 1)) == 0;
}

template <int D>
static __device__ __forceinline__ struct quad<D> load_quad(uint64_t row, uint32_t n)
{
    struct quad<D> q = {};

    if (4 * warp_lane() >= n)
        return q;
    if constexpr (D == UCM_KV_FP8_E4M3) {
        q.word[0] = ((const uint32_t *)row)[warp_lane()];
    } else {
        uint2 two = ((const uint2 *)row)[warp_lane()];

        q.word[0] = two.x;
        q.word[1] = two.y;
    }
    return q;
}

template <int D>
static __device__ __forceinline__ void quad_floats(const struct quad<D> &q, float x[4])
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t word = q.word[D == UCM_KV_FP8_E4M3 ? 0 : i / 2];

        if (D == UCM_KV_FP8_E4M3)
            x[i] = fp8_decode(word >> 8 * i & 0xff);
        else if (D == UCM_KV_BF16)
            x[i] = ucm_f32(i % 2 ? word & 0xffff0000u : word << 16);
        else
            x[i] = __half2float(__ushort_as_half((uint16_t)(word >> 16 * (i % 2))));
    }
}

/* use(t, x[4]) for the rows from `at`, in order. */
template <int D, typename USE>
static __device__ __forceinline__ void each_row(uint64_t at, uint64_t stride, uint32_t rows, uint32_t n,
                                                USE use)
{
    for (uint32_t from = 0; from < rows; from += ROWS) {
        struct quad<D> q[ROWS];

#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++)
            q[i] = load_quad<D>(at + min(from + i, rows - 1) * stride, n);
#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++) {
            float x[4];

            quad_floats<D>(q[i], x);
            if (from + i < rows)
                use(from + i, x);
        }
    }
}

/* The reciprocal of a power of two is exact, so the product with it equals the division. */
static __device__ __forceinline__ void divide_count(float x[4], uint32_t n)
{
    if ((n & (n - 1)) != 0) {
        divide<4>(x, (float)n);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        x[i] *= 1.0f / (float)n;
}

/* The mean; whether a value of it or of the rows is not finite. */
template <int D>
static __device__ __forceinline__ bool quad_mean(uint64_t at, uint64_t stride, uint32_t rows, uint32_t n,
                                                 float x[4])
{
    uint32_t bad = 0;

    each_row<D>(at, stride, rows, n, [&](uint32_t t, const float row[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            x[i] = t == 0 ? row[i] : x[i] + row[i];
            bad |= ucm_not_finite(row[i]);
        }
    });
    divide_count(x, rows);
    return bad || row_bad<4>(x);
}

/* Quantises finite x; value(x, s) is one's byte. */
template <typename VALUE>
static __device__ __forceinline__ void quad_put(const float x[4], uint32_t n, float steps, uint8_t *out,
                                                uint8_t *scale, VALUE value)
{
    uint32_t bits = ucm_scale(row_largest<4>(x), steps), word = 0;
    float s = ucm_bf16_decode(bits);

    put_scale(scale, bits);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        word |= (uint32_t)(bits == 0 ? (uint8_t)0 : value(x[i], s)) << 8 * i;
    if (4 * warp_lane() < n)
        ((uint32_t *)out)[warp_lane()] = word;
}

template <int D> static __device__ __forceinline__ void build_stats_quick(args_t a, const struct head &h)
{
    uint32_t d = a.channels, vd = a.v_head_dim;
    uint8_t *m = h.out + h.g * d, *var = m + a.array[1], *v = h.out + a.array[2] + h.g * vd;
    uint8_t *s0 = h.out + a.scale[0] + 2 * h.g, *s1 = h.out + a.scale[1] + 2 * h.g;
    uint8_t *s2 = h.out + a.scale[2] + 2 * h.g;
    auto i8 = [](float x, float s) { return (uint8_t)(int8_t)ucm_quantise(x, s); };
    auto u8 = [](float x, float s) { return (uint8_t)ucm_quantise_u8(x, s); };
    float mean[4], y[4] = {}, z[4] = {};
    bool bad = quad_mean<D>(h.k, a.k_token_stride, a.tokens, d, mean);

    if (vd > 0)
        bad |= quad_mean<D>(h.v, a.v_token_stride, a.tokens, vd, z);
    each_row<D>(h.k, a.k_token_stride, a.tokens, d, [&](uint32_t, const float row[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            float x = row[i] - mean[i];

            y[i] = ucm_fma(x, x, y[i]);
        }
    });
    divide_count(y, a.tokens);
    if (__any_sync(WARP_ALL, bad || row_bad<4>(y))) {
        row_poison(m, d, s0, 1);
        row_poison(var, d, s1, 1);
        row_poison(v, vd, s2, 1);
        return;
    }
    quad_put(mean, d, 127.0f, m, s0, i8);
    quad_put(y, d, 255.0f, var, s1, u8);
    quad_put(z, vd, 127.0f, v, s2, i8);
}

/* ---- any rows ---- */

template <int D, int N>
static __device__ __forceinline__ bool variance(args_t a, const struct head &h, const float mean[N],
                                                float var[N])
{
    float row[N];

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        var[i] = 0;
#pragma unroll (at_once(N))
    for (uint32_t t = 0; t < a.tokens; t++) {
        load_k<D, N>(a, h, t, row);
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            float x = row[i] - mean[i];

            var[i] = ucm_fma(x, x, var[i]);
        }
    }
    divide<N>(var, (float)a.tokens);
    return row_bad<N>(var);
}

/* N suffices for V's channels too. */
template <int D, int N>
static __device__ void build_stats(args_t a, const struct head &h)
{
    if (N == 4 && quick_stats<D>(a, h)) {
        build_stats_quick<D>(a, h);
        return;
    }

    uint32_t d = a.channels, vd = a.v_head_dim;
    uint8_t *m = h.out + h.g * d, *var = m + a.array[1], *v = h.out + a.array[2] + h.g * vd;
    uint8_t *s0 = h.out + a.scale[0] + 2 * h.g, *s1 = h.out + a.scale[1] + 2 * h.g;
    uint8_t *s2 = h.out + a.scale[2] + 2 * h.g;
    float x[N], y[N];
    bool bad = row_mean<D, N>(a, h.k, a.k_token_stride, a.tokens, d, x) || row_bad<N>(x);

    bad |= variance<D, N>(a, h, x, y);
    row_put<N>(x, d, false, m, s0);
    row_put_u8<N>(y, d, var, s1);
    if (vd > 0)
        bad |= row_mean<D, N>(a, h.v, a.v_token_stride, a.tokens, vd, x) || row_bad<N>(x);
    row_put<N>(x, vd, false, v, s2);
    if (__any_sync(WARP_ALL, bad)) {
        __syncwarp();
        row_poison(m, d, s0, 1);
        row_poison(var, d, s1, 1);
        row_poison(v, vd, s2, 1);
    } else if (vd == 0) {
        put_scale(s2, 0);
    }
}

#endif
