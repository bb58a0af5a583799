/* Digests on a GPU: a warp computes one KV head of one layer of one block, then the next. A launch
 * takes few thread blocks with little or no shared memory, so that it runs beside the worker's own
 * kernels. The bits are those of the C code in simd/, whose functions have the same names. */
#include "kernels/sparse/digest_cuda.h"
#include "kernels/sparse/sparse.h"

#include <cuda_fp16.h>

typedef const struct ucm_digest_cuda &args_t;

/* Rows whose loads are under way together. */
static __host__ __device__ constexpr int at_once(int n)
{
    return n <= 4 ? 8 : n <= 8 ? 2 : 1;
}

struct head {
    uint64_t k, v; /* its first token */
    uint8_t *out;  /* the digest */
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

/* The GPU's own conversion of F16 is exact, too. E4M3 is F16 without the low 7 bits, times 2^8, but
 * for NaN. */
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

/* Quantises x to int8 with a scale of its own; poison, or x not finite: the scale is NaN, the rest 0. */
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

/* The same to 4 bits: 16 bytes hold 32 channels, byte i of them channel i in the low half and channel
 * 16 + i in the high one. x finite. */
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

/* ---- methods, a head each ---- */

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

        if (n < a.head_dim) /* a key's other channels count only if they are not finite */
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

/* ---- hashes of rows of 64, 128 or 256 channels that are all hashed ----
 *
 * A lane has 16 channels in a row, a token size / 16 lanes: of a transform's steps four need no other
 * lane, and 32 / lanes tokens are under way at once. */

#define RUN 16u

/* Whether the kernel's rows are such ones; the same in all lanes. */
template <int D> static __device__ __forceinline__ bool quick_hash(args_t a, const struct head &h)
{
    const struct ucm_cuda_segment &s = a.segment[0];

    return D != UCM_KV_F32 && a.n_segments == 1 && s.first == 0 && s.channels == s.size &&
           (s.size == 64 || s.size == 128 || s.size == 256) &&
           ((h.k | a.k_token_stride) & 15) == 0;
}

/* 16 channels as they lie in memory. */
template <int D> struct packed {
    uint4 word[D == UCM_KV_FP8_E4M3 ? 1 : 2];
};

template <int D> static __device__ __forceinline__ struct packed<D> load_packed(uint64_t at)
{
    struct packed<D> p;

#pragma unroll
    for (uint32_t i = 0; i < sizeof(p.word) / sizeof(*p.word); i++)
        p.word[i] = ((const uint4 *)at)[i];
    return p;
}

template <int D>
static __device__ __forceinline__ void unpack(const struct packed<D> &p, float x[RUN])
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof(p.word) / sizeof(*p.word); i++) {
        const uint32_t word[4] = {p.word[i].x, p.word[i].y, p.word[i].z, p.word[i].w};

#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            if (D == UCM_KV_FP8_E4M3) {
#pragma unroll
                for (uint32_t b = 0; b < 4; b++)
                    x[4 * j + b] = fp8_decode(word[j] >> 8 * b & 0xff);
            } else if (D == UCM_KV_BF16) {
                x[8 * i + 2 * j] = ucm_f32(word[j] << 16);
                x[8 * i + 2 * j + 1] = ucm_f32(word[j] & 0xffff0000u);
            } else {
                x[8 * i + 2 * j] = __half2float(__ushort_as_half((uint16_t)word[j]));
                x[8 * i + 2 * j + 1] = __half2float(__ushort_as_half((uint16_t)(word[j] >> 16)));
            }
    }
}

/* The transform of `lanes` lanes' channels: the steps and sums of row_transform. */
static __device__ __forceinline__ void run_transform(float x[RUN], uint32_t lanes)
{
#pragma unroll
    for (uint32_t h = 1; h < RUN; h *= 2)
#pragma unroll
        for (uint32_t i = 0; i < RUN; i++)
            if ((i & h) == 0) {
                float a = x[i], b = x[i | h];

                x[i] = a + b;
                x[i | h] = a - b;
            }
    for (uint32_t h = 1; h < lanes; h *= 2) {
        float sign = warp_lane() & h ? -1.0f : 1.0f;

#pragma unroll
        for (uint32_t i = 0; i < RUN; i++) /* a product with 1 is exact */
            x[i] = ucm_fma(x[i], sign, __shfl_xor_sync(WARP_ALL, x[i], h));
    }
}

/* The signs of a lane's channels, from channel `first` on: bit i of channel i. */
static __device__ __forceinline__ uint32_t run_signs(const uint32_t *flips, uint32_t first)
{
    uint32_t signs = 0;

#pragma unroll
    for (uint32_t i = 0; i < RUN; i += 4) {
        uint4 four = __ldg((const uint4 *)(flips + first + i));

        signs |= (four.x >> 31 | four.y >> 31 << 1 | four.z >> 31 << 2 | four.w >> 31 << 3) << i;
    }
    return signs;
}

static __device__ __forceinline__ void run_flip(float x[RUN], uint32_t signs)
{
#pragma unroll
    for (uint32_t i = 0; i < RUN; i++)
        x[i] = ucm_f32(ucm_f32_bits(x[i]) ^ (signs << (31 - i) & 0x80000000u));
}

/* 16 bits of a token. */
template <int D>
static __device__ __forceinline__ uint32_t hash_run(const struct packed<D> &p, uint32_t lanes,
                                                    uint32_t inner, uint32_t outer)
{
    uint32_t word = 0;
    float x[RUN];

    unpack<D>(p, x);
    run_flip(x, inner);
    run_transform(x, lanes);
    run_flip(x, outer);
    run_transform(x, lanes);
#pragma unroll
    for (uint32_t i = 0; i < RUN; i++)
        word |= (uint32_t)(x[i] > 0) << i;
    return word;
}

template <int D>
static __device__ __forceinline__ bool run_bad(const struct packed<D> &p)
{
    float x[RUN];

    unpack<D>(p, x);
    return row_bad<RUN>(x);
}

template <int D>
static __device__ __forceinline__ bool build_hash_quick(args_t a, const struct head &h)
{
    constexpr uint32_t GROUPS = 4; /* of tokens, whose loads are under way together */
    const struct ucm_cuda_segment &s = a.segment[0];
    uint32_t lanes = s.size / RUN, tokens = WARP_LANES / lanes;
    uint32_t own = warp_lane() / lanes, first = warp_lane() % lanes * RUN;
    const uint32_t *flips = (const uint32_t *)a.flips + s.flips;
    uint8_t *data = h.out + h.g * a.vectors * a.channels + first / 8;
    bool bad = false;

    for (uint32_t from = 0; from < a.tokens; from += GROUPS * tokens) {
        struct packed<D> p[GROUPS];

#pragma unroll
        for (uint32_t i = 0; i < GROUPS; i++) {
            uint32_t t = min(from + i * tokens + own, a.tokens - 1);

            p[i] = load_packed<D>(h.k + t * a.k_token_stride + first * element_bytes(D));
        }
#pragma unroll
        for (uint32_t i = 0; i < GROUPS; i++)
            bad |= run_bad<D>(p[i]);
        for (uint32_t w = 0; w < s.chunks; w++) {
            uint32_t inner = run_signs(flips + 2 * w * s.size, first);
            uint32_t outer = run_signs(flips + (2 * w + 1) * s.size, first);

#pragma unroll
            for (uint32_t i = 0; i < GROUPS; i++) {
                uint32_t t = from + i * tokens + own, word = hash_run<D>(p[i], lanes, inner, outer);

                if (t < a.tokens && w * s.size + first < s.bits)
                    *(uint16_t *)(data + t * a.channels + w * (s.size / 8)) = (uint16_t)word;
            }
        }
    }
    return bad;
}

template <int D, int N>
static __device__ __forceinline__ bool build_hash_rows(args_t a, const struct head &h)
{
    uint8_t *data = h.out + h.g * a.vectors * a.channels;
    bool bad = false;

    for (uint32_t t = 0; t < a.tokens; t++) {
        struct bit_writer out = {(uint32_t *)(data + t * a.channels), 0, 0};
        float k[N];

        load_k<D, N>(a, h, t, k);
        bad |= row_bad<N>(k);
        for (uint32_t i = 0; i < a.n_segments; i++) {
            const struct ucm_cuda_segment s = a.segment[i];
            float x[N];

            row_load<D, N>(x, h.k + t * a.k_token_stride + s.first * element_bytes(D), s.channels);
            row_hash<N>(s, (const uint32_t *)a.flips, &out, [&](uint32_t j) { return x[j]; });
        }
    }
    return bad;
}

template <int D, int N>
static __device__ void build_hash(args_t a, const struct head &h)
{
    uint32_t bytes = a.vectors * a.channels;
    uint8_t *data = h.out + h.g * bytes;
    bool bad = quick_hash<D>(a, h) ? build_hash_quick<D>(a, h) : build_hash_rows<D, N>(a, h);

    bad = __any_sync(WARP_ALL, bad);
    if (bad) {
        __syncwarp();
        row_poison(data, bytes, data, 0);
    }
    if (warp_lane() == 0)
        *(uint32_t *)(h.out + a.array[1] + 4 * h.g) = bad;
}

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

/* ---- stats of rows of up to 128 channels: a lane has four in a row ---- */

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

/* A power of two's reciprocal is exact, and so is its product what the division gives. */
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
        /* Distances from the mean chose the first token only. */
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

/* ---- the kernels ---- */

template <int M, int D, int N>
static __device__ __forceinline__ void build_head(args_t a, const struct head &h)
{
    if (M == UCM_DIGEST_MEAN)
        build_mean<D, N>(a, h);
    else if (M == UCM_DIGEST_SUBMEAN)
        build_submean<D, N>(a, h);
    else if (M == UCM_DIGEST_BOX)
        build_box<D, N>(a, h);
    else if (M == UCM_DIGEST_HASH)
        build_hash<D, N>(a, h);
    else if (M == UCM_DIGEST_STATS)
        build_stats<D, N>(a, h);
    else
        build_tokens<D, N>(a, h);
}

template <int M, int D, int N>
static __device__ __forceinline__ void build_all(args_t a)
{
    extern __shared__ float distances[];
    uint32_t warp = threadIdx.x / WARP_LANES;
    uint64_t heads = (uint64_t)a.n_layers * a.n_blocks * a.kv_heads;
    uint64_t step = (uint64_t)gridDim.x * UCM_DIGEST_CUDA_WARPS;

    for (uint64_t i = (uint64_t)blockIdx.x * UCM_DIGEST_CUDA_WARPS + warp; i < heads; i += step) {
        uint32_t g = (uint32_t)(i % a.kv_heads), b = (uint32_t)(i / a.kv_heads % a.n_blocks);
        const struct ucm_digest_cuda_layer *l = &a.layer[i / a.kv_heads / a.n_blocks];
        uint32_t from = ((const uint32_t *)a.block)[b], to = ((const uint32_t *)a.out_block)[b];
        struct head h;

        if (from >= a.blocks || to >= a.out_blocks)
            continue;
        h.k = l->k + from * a.block_stride + g * a.k_head_stride;
        h.v = l->v + from * a.block_stride + g * a.v_head_stride;
        h.out = (uint8_t *)(l->out + to * a.out_stride);
        h.g = g;
        h.distance = distances + warp * a.tokens;
        build_head<M, D, N>(a, h);
        if (g == 0 && warp_lane() < a.bytes - a.used)
            h.out[a.used + warp_lane()] = 0;
    }
}

#define KERNEL(method, dtype, n)                                                                   \
    extern "C" __global__ void __launch_bounds__(UCM_DIGEST_CUDA_THREADS)                          \
    ucm_digest_##method##_##dtype##_##n(const __grid_constant__ struct ucm_digest_cuda args)       \
    {                                                                                              \
        build_all<method, dtype, n>(args);                                                         \
    }
#define KERNELS_OF(method, dtype)                                                                  \
    KERNEL(method, dtype, 4)                                                                       \
    KERNEL(method, dtype, 8)                                                                       \
    KERNEL(method, dtype, 32)
#define KERNELS(method)                                                                            \
    KERNEL(method, 0, 32)                                                                          \
    KERNELS_OF(method, 1)                                                                          \
    KERNELS_OF(method, 2)                                                                          \
    KERNELS_OF(method, 3)

/* By the numbers of sparse.h. */
KERNELS(1)
KERNELS(2)
KERNELS(3)
KERNELS(4)
KERNELS(5)
KERNELS(6)
