/* Summaries of hashes. */
#ifndef UCM_KERNELS_SPARSE_SUMMARY_HASH_CUH
#define UCM_KERNELS_SPARSE_SUMMARY_HASH_CUH

#include "kernels/sparse/summary_rows.cuh"

/* ---- rows of 64, 128 or 256 channels that are all hashed ----
 *
 * A lane has 16 channels in a row, so a token has size / 16 lanes. Four of a transform's steps need
 * no other lane, and 32 / lanes tokens are under way at once. */

#define RUN 16u

/* Whether the kernel's rows are such rows; the same in all lanes. */
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

/* ---- any rows ---- */

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

#endif
