/* How a warp walks rows. A row is one token's channels of one head; its elements are contiguous. A
 * lane holds vectors of 8 elements (16 bytes). L lanes share a row, and 32 / L rows pass at a time.
 * Of a row a lane has the vectors at, at + L, ... Rows whose pages are not aligned, or whose dim is
 * no multiple of 8, go element by element. */
#ifndef UCM_KERNELS_ENCODING_ROWS_CUH
#define UCM_KERNELS_ENCODING_ROWS_CUH

#include "kernels/encoding/arith.h"
extern "C" {
#include "kernels/encoding/encoding_cuda.h"
}

#include <cuda_fp16.h>

#define LANES 32u
#define ALL 0xffffffffu

/* Data passes once, so it is marked for early eviction, to leave the caches to the worker. */
static __device__ __forceinline__ uint32_t element_load(uint64_t at)
{
    const uint8_t *p = (const uint8_t *)at;

    return at % 2 == 0 ? __ldcs((const uint16_t *)at) : __ldcs(p) | (uint32_t)__ldcs(p + 1) << 8;
}

static __device__ __forceinline__ void element_store(uint64_t at, uint32_t x)
{
    uint8_t *p = (uint8_t *)at;

    if (at % 2 == 0) {
        __stcs((uint16_t *)at, (uint16_t)x);
    } else {
        __stcs(p, (uint8_t)x);
        __stcs(p + 1, (uint8_t)(x >> 8));
    }
}

static __device__ __forceinline__ uint64_t aligned16(uint64_t n)
{
    return (n + 15) / 16 * 16;
}

/* Zeroes what lies between the n bytes of an array and the next multiple of 16. */
static __device__ __forceinline__ void pad16(uint64_t array, uint64_t n, uint32_t lane)
{
    if (n + lane < aligned16(n))
        __stcs((uint8_t *)(array + n + lane), (uint8_t)0);
}

/* ---- two elements in a word ---- */

template <uint32_t D> struct dtype_bits {
    static const uint32_t INF = D == UCM_ENCODING_BF16 ? 0x7f807f80u : 0x7c007c00u;
};

/* Their magnitudes, 0 in place of NaN and infinities. */
template <uint32_t D> static __device__ __forceinline__ uint32_t element_finite(uint32_t two)
{
    uint32_t rest = two & 0x7fff7fffu;

    return rest & ~__vcmpgeu2(rest, dtype_bits<D>::INF);
}

/* Whether any of the eight is NaN or an infinity. The sum carries into bit 15 only for those. */
template <uint32_t D> static __device__ __forceinline__ uint32_t element_special(uint4 x)
{
    const uint32_t add = 0x80008000u - dtype_bits<D>::INF, rest = 0x7fff7fffu;

    return (((x.x & rest) + add) | ((x.y & rest) + add) | ((x.z & rest) + add) |
            ((x.w & rest) + add)) &
           0x80008000u;
}

/* ucm_magnitude of an element's magnitude bits, which are finite. */
template <uint32_t D> static __device__ __forceinline__ uint32_t element_magnitude(uint32_t h)
{
    return ucm_f32_bits(ucm_element_decode(D, h));
}

template <uint32_t D> static __device__ __forceinline__ float2 element_pair(uint32_t two)
{
    if (D == UCM_ENCODING_BF16)
        return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    return __half22float2(*(const __half2 *)&two);
}

/* Rounds to nearest even. Values past the largest finite one must not come here. */
template <uint32_t D> static __device__ __forceinline__ uint32_t element_pack(float low, float high)
{
    uint32_t two;

    if (D == UCM_ENCODING_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

/* The largest finite magnitude's bits of eight. */
template <uint32_t D> static __device__ __forceinline__ uint32_t element_largest(uint4 x)
{
    uint32_t two = __vmaxu2(__vmaxu2(element_finite<D>(x.x), element_finite<D>(x.y)),
                            __vmaxu2(element_finite<D>(x.z), element_finite<D>(x.w)));

    return max(two & 0xffffu, two >> 16);
}

/* ---- rows ---- */

/* The largest of the values of the L lanes that share a row. */
template <uint32_t L> static __device__ __forceinline__ uint32_t group_max(uint32_t x)
{
#pragma unroll
    for (uint32_t s = L / 2; s > 0; s /= 2)
        x = max(x, __shfl_xor_sync(ALL, x, s));
    return x;
}

/* One tile: rows first .. first + n of a tensor. encoded: its first code; scales: its first
 * scale. */
struct tile {
    uint64_t raw, encoded, scales;
    uint32_t dim, first, n, lane;
};

template <class M, uint32_t L, uint32_t V, uint32_t U>
static __device__ __forceinline__ void encode_vectors(const struct tile &t)
{
    constexpr uint32_t rows = LANES / L;
    uint32_t vectors = t.dim / 8, group = t.lane / L, at = t.lane % L, mine = 0;
    const uint4 *raw = (const uint4 *)t.raw + (uint64_t)t.first * vectors;
    typename M::code *encoded = (typename M::code *)t.encoded + (uint64_t)t.first * vectors;

    for (uint32_t row = 0; row < t.n; row += rows * U) {
        uint4 x[U][V];

#pragma unroll
        for (uint32_t u = 0; u < U; u++)
#pragma unroll
            for (uint32_t v = 0; v < V; v++) {
                uint32_t r = row + u * rows + group, i = at + v * L;

                x[u][v] = r < t.n && i < vectors ? __ldcs(raw + r * vectors + i)
                                                 : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
        for (uint32_t u = 0; u < U; u++) {
            uint32_t r = row + u * rows + group, largest = 0, scale, kept;

#pragma unroll
            for (uint32_t v = 0; v < V; v++)
                largest = max(largest, element_largest<M::DTYPE>(x[u][v]));
            scale = M::scale(group_max<L>(largest));
            kept = __shfl_sync(ALL, scale, t.lane % rows * L);
            if (t.lane / rows == row / rows + u)
                mine = kept;
#pragma unroll
            for (uint32_t v = 0; v < V; v++)
                if (r < t.n && at + v * L < vectors)
                    __stcs(encoded + r * vectors + at + v * L, M::encode(x[u][v], scale));
        }
    }
    if (t.lane < t.n)
        __stcs((typename M::scale_t *)t.scales + t.first + t.lane, (typename M::scale_t)mine);
}

template <class M, uint32_t L, uint32_t V, uint32_t U>
static __device__ __forceinline__ void decode_vectors(const struct tile &t)
{
    constexpr uint32_t rows = LANES / L;
    uint32_t vectors = t.dim / 8, group = t.lane / L, at = t.lane % L, mine = 0;
    uint4 *raw = (uint4 *)t.raw + (uint64_t)t.first * vectors;
    const typename M::code *encoded = (const typename M::code *)t.encoded + (uint64_t)t.first * vectors;

    if (t.lane < t.n)
        mine = __ldcs((const typename M::scale_t *)t.scales + t.first + t.lane);
    for (uint32_t row = 0; row < t.n; row += rows * U) {
        typename M::code x[U][V];

#pragma unroll
        for (uint32_t u = 0; u < U; u++)
#pragma unroll
            for (uint32_t v = 0; v < V; v++) {
                uint32_t r = row + u * rows + group, i = at + v * L;

                if (r < t.n && i < vectors)
                    x[u][v] = __ldcs(encoded + r * vectors + i);
            }
#pragma unroll
        for (uint32_t u = 0; u < U; u++) {
            uint32_t r = row + u * rows + group;
            uint32_t scale = __shfl_sync(ALL, mine, r);

#pragma unroll
            for (uint32_t v = 0; v < V; v++)
                if (r < t.n && at + v * L < vectors)
                    __stcs(raw + r * vectors + at + v * L, M::decode(x[u][v], scale));
        }
    }
}

template <class M> static __device__ void encode_elements(const struct tile &t)
{
    for (uint32_t r = t.first; r < t.first + t.n; r++) {
        uint64_t raw = t.raw + (uint64_t)r * t.dim * 2, encoded = t.encoded + (uint64_t)r * t.dim;
        uint32_t largest = 0, scale;

        for (uint32_t i = t.lane; i < t.dim; i += LANES)
            largest = max(largest, element_finite<M::DTYPE>(element_load(raw + i * 2)));
        scale = M::scale(group_max<LANES>(largest));
        for (uint32_t i = t.lane; i < t.dim; i += LANES)
            __stcs((uint8_t *)encoded + i,
                   (uint8_t)M::encode_one(element_load(raw + i * 2), scale));
        if (t.lane == 0)
            __stcs((typename M::scale_t *)t.scales + r, (typename M::scale_t)scale);
    }
}

template <class M> static __device__ void decode_elements(const struct tile &t)
{
    for (uint32_t r = t.first; r < t.first + t.n; r++) {
        uint64_t raw = t.raw + (uint64_t)r * t.dim * 2, encoded = t.encoded + (uint64_t)r * t.dim;
        uint32_t scale = __ldcs((const typename M::scale_t *)t.scales + r);

        for (uint32_t i = t.lane; i < t.dim; i += LANES)
            element_store(raw + i * 2, M::decode_one(__ldcs((const uint8_t *)encoded + i), scale));
    }
}

/* Takes the way by vectors for the dim of the tile. */
template <class M, bool ENCODE>
static __device__ __forceinline__ void tile_vectors(const struct tile &t)
{
    uint32_t vectors = t.dim / 8;

    if (vectors <= 8)
        ENCODE ? encode_vectors<M, 8, 1, 8>(t) : decode_vectors<M, 8, 1, 8>(t);
    else if (vectors <= 16)
        ENCODE ? encode_vectors<M, 16, 1, 8>(t) : decode_vectors<M, 16, 1, 8>(t);
    else if (vectors <= 32)
        ENCODE ? encode_vectors<M, 32, 1, 8>(t) : decode_vectors<M, 32, 1, 8>(t);
    else
        ENCODE ? encode_vectors<M, 32, 4, 2>(t) : decode_vectors<M, 32, 4, 2>(t);
}

/* Methods of one code byte an element and one scale a row, scales after the codes. */
template <class M, bool ENCODE>
static __device__ __forceinline__ void rows_tile(const struct ucm_encoding_tensor &s,
                                                 uint64_t raw, uint64_t encoded, uint32_t number,
                                                 uint32_t lane)
{
    uint32_t rows = s.tokens * s.heads, most = ucm_encoding_tile_rows(s.dim);
    uint64_t codes = (uint64_t)rows * s.dim, scales = encoded + aligned16(codes);
    struct tile t = {raw, encoded, scales, s.dim, number * most, 0, lane};

    if (t.first >= rows)
        return;
    t.n = min(most, rows - t.first);
    if (ENCODE && number == 0) {
        pad16(encoded, codes, lane);
        pad16(scales, rows * sizeof(typename M::scale_t), lane);
    }
    if (s.dim % 8 == 0 && s.dim <= UCM_ENCODING_DIM_VECTOR && raw % 16 == 0)
        tile_vectors<M, ENCODE>(t);
    else if (ENCODE)
        encode_elements<M>(t);
    else
        decode_elements<M>(t);
}

#endif
