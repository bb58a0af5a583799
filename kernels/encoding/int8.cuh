/* int8, eight elements at a time, and K with a scale a channel. */
#ifndef UCM_KERNELS_ENCODING_INT8_CUH
#define UCM_KERNELS_ENCODING_INT8_CUH

#include "kernels/encoding/rows.cuh"

template <uint32_t D> struct int8 {
    static const uint32_t DTYPE = D;
    static const bool CHANNELS = true; /* K may have a scale a channel */
    typedef uint2 code;
    typedef uint16_t scale_t;

    static __device__ __forceinline__ uint32_t scale(uint32_t largest)
    {
        return ucm_int8_scale(element_magnitude<D>(largest));
    }

    static __device__ __forceinline__ float reciprocal(uint32_t scale)
    {
        return 1.0f / ucm_bf16_decode(scale);
    }

    static __device__ __forceinline__ uint32_t encode_one(uint32_t h, uint32_t scale)
    {
        return (uint32_t)ucm_int8_encode(ucm_element_decode(D, h), reciprocal(scale)) & 0xffu;
    }

    static __device__ __forceinline__ uint32_t decode_one(uint32_t code, uint32_t scale)
    {
        return ucm_int8_decode(D, (int8_t)code, ucm_bf16_decode(scale));
    }

    /* The sum that rounds a finite value has the integer in its low bits. */
    static __device__ __forceinline__ uint32_t encode_fast(float x, float r)
    {
        return __float_as_uint(x * r + 0x1.8p23f);
    }

    static __device__ __forceinline__ uint32_t encode_word(uint32_t ab, uint32_t cd, float ra,
                                                           float rb, float rc, float rd)
    {
        float2 x = element_pair<D>(ab), y = element_pair<D>(cd);
        uint32_t low = __byte_perm(encode_fast(x.x, ra), encode_fast(x.y, rb), 0x0040);
        uint32_t high = __byte_perm(encode_fast(y.x, rc), encode_fast(y.y, rd), 0x0040);

        return __byte_perm(low, high, 0x5410);
    }

    static __device__ __noinline__ uint2 encode_rare(uint4 x, const uint32_t *scales, uint32_t step)
    {
        uint32_t in[4] = {x.x, x.y, x.z, x.w}, out[2] = {0, 0};

        for (uint32_t i = 0; i < 8; i++)
            out[i / 4] |= encode_one(in[i / 2] >> i % 2 * 16 & 0xffffu, scales[i * step])
                          << i % 4 * 8;
        return make_uint2(out[0], out[1]);
    }

    static __device__ __forceinline__ uint2 encode(uint4 x, uint32_t scale)
    {
        float r = reciprocal(scale);

        if (element_special<D>(x))
            return encode_rare(x, &scale, 0);
        return make_uint2(encode_word(x.x, x.y, r, r, r, r), encode_word(x.z, x.w, r, r, r, r));
    }

    /* Byte b of four, as a float. It is put under the exponent of 2^23, with an offset that makes
     * it positive. */
    template <uint32_t B> static __device__ __forceinline__ float code_float(uint32_t flipped)
    {
        return __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7540 + B)) - 8388736.0f;
    }

    static __device__ __forceinline__ bool raw_scale(uint32_t scale)
    {
        return scale < (D == UCM_ENCODING_BF16 ? 0x7b00u : 0x4400u);
    }

    static __device__ __noinline__ uint4 decode_rare(uint2 c, const uint32_t *scales, uint32_t step)
    {
        uint32_t x[4] = {0, 0, 0, 0}, codes[2] = {c.x, c.y};

        for (uint32_t i = 0; i < 8; i++)
            x[i / 2] |= decode_one(codes[i / 4] >> i % 4 * 8 & 0xffu, scales[i * step])
                        << i % 2 * 16;
        return make_uint4(x[0], x[1], x[2], x[3]);
    }

    /* step 0: one scale for all eight. */
    template <uint32_t STEP>
    static __device__ __forceinline__ uint4 decode_with(uint2 c, const uint32_t *scales)
    {
        uint32_t a = c.x ^ 0x80808080u, b = c.y ^ 0x80808080u;
        float x[8] = {code_float<0>(a), code_float<1>(a), code_float<2>(a), code_float<3>(a),
                      code_float<0>(b), code_float<1>(b), code_float<2>(b), code_float<3>(b)};
        float most = 0;
        bool raw = true;

#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            most = fmaxf(most, fabsf(x[i]));
            x[i] *= ucm_bf16_decode(scales[i * STEP]);
            raw &= raw_scale(scales[i * STEP]);
        }
        if (most >= 127.0f || !raw)
            return decode_rare(c, scales, STEP);
        return make_uint4(element_pack<D>(x[0], x[1]), element_pack<D>(x[2], x[3]),
                          element_pack<D>(x[4], x[5]), element_pack<D>(x[6], x[7]));
    }

    static __device__ __forceinline__ uint4 decode(uint2 c, uint32_t scale)
    {
        return decode_with<0>(c, &scale);
    }
};

/* ---- a scale a channel ---- */

/* Columns: channel c of head h is column h * dim + c. A tile has UCM_ENCODING_TILE_COLUMNS of them,
 * over the tokens of a run; a lane has eight, or one after another if rows are not aligned. */
struct columns {
    uint64_t raw, encoded, scales;    /* scales: the run's */
    uint32_t tokens, from, of_head;   /* of the run; its first; of the tensor */
    uint32_t heads, dim, first, n, lane;
    bool hnd;

    /* The element of column i at the first token, and how far its tokens lie apart. */
    __device__ __forceinline__ uint64_t at(uint32_t i) const
    {
        return (hnd ? (uint64_t)(i / dim) * of_head * dim + i % dim : i) + from * step();
    }
    __device__ __forceinline__ uint64_t step() const
    {
        return hnd ? dim : (uint64_t)heads * dim;
    }
};

template <uint32_t D>
static __device__ __forceinline__ void encode_columns_vector(const struct columns &t)
{
    uint32_t i = t.first + t.lane * 8, scales[8], largest[4] = {0, 0, 0, 0};
    uint64_t at = t.at(i), step = t.step();
    float r[8];

    if (t.lane * 8 >= t.n)
        return;
#pragma unroll 8
    for (uint32_t token = 0; token < t.tokens; token++) {
        uint4 x = __ldg((const uint4 *)(t.raw + (at + token * step) * 2));

        largest[0] = __vmaxu2(largest[0], element_finite<D>(x.x));
        largest[1] = __vmaxu2(largest[1], element_finite<D>(x.y));
        largest[2] = __vmaxu2(largest[2], element_finite<D>(x.z));
        largest[3] = __vmaxu2(largest[3], element_finite<D>(x.w));
    }
#pragma unroll
    for (uint32_t c = 0; c < 8; c++) {
        scales[c] = int8<D>::scale(largest[c / 2] >> c % 2 * 16 & 0xffffu);
        r[c] = int8<D>::reciprocal(scales[c]);
    }
    __stcs((uint4 *)(t.scales + i * 2),
           make_uint4(scales[0] | scales[1] << 16, scales[2] | scales[3] << 16,
                      scales[4] | scales[5] << 16, scales[6] | scales[7] << 16));
#pragma unroll 8
    for (uint32_t token = 0; token < t.tokens; token++) {
        uint4 x = __ldcs((const uint4 *)(t.raw + (at + token * step) * 2));
        uint2 c = make_uint2(int8<D>::encode_word(x.x, x.y, r[0], r[1], r[2], r[3]),
                             int8<D>::encode_word(x.z, x.w, r[4], r[5], r[6], r[7]));

        if (element_special<D>(x))
            c = int8<D>::encode_rare(x, scales, 1);
        __stcs((uint2 *)(t.encoded + at + token * step), c);
    }
}

template <uint32_t D>
static __device__ __forceinline__ void decode_columns_vector(const struct columns &t)
{
    uint32_t i = t.first + t.lane * 8, scales[8];
    uint64_t at = t.at(i), step = t.step();
    uint4 s;

    if (t.lane * 8 >= t.n)
        return;
    s = __ldcs((const uint4 *)(t.scales + i * 2));
    scales[0] = s.x & 0xffffu, scales[1] = s.x >> 16;
    scales[2] = s.y & 0xffffu, scales[3] = s.y >> 16;
    scales[4] = s.z & 0xffffu, scales[5] = s.z >> 16;
    scales[6] = s.w & 0xffffu, scales[7] = s.w >> 16;
    for (uint32_t token = 0; token < t.tokens; token += 8) {
        uint2 c[8];

#pragma unroll
        for (uint32_t u = 0; u < 8; u++)
            if (token + u < t.tokens)
                c[u] = __ldcs((const uint2 *)(t.encoded + at + (token + u) * step));
#pragma unroll
        for (uint32_t u = 0; u < 8; u++)
            if (token + u < t.tokens)
                __stcs((uint4 *)(t.raw + (at + (token + u) * step) * 2),
                       int8<D>::template decode_with<1>(c[u], scales));
    }
}

template <uint32_t D> static __device__ void encode_columns(const struct columns &t)
{
    for (uint32_t i = t.first + t.lane; i < t.first + t.n; i += LANES) {
        uint64_t at = t.at(i), step = t.step();
        uint32_t largest = 0, scale;

        for (uint32_t token = 0; token < t.tokens; token++)
            largest =
                max(largest, element_finite<D>(element_load(t.raw + (at + token * step) * 2)));
        scale = int8<D>::scale(largest);
        __stcs((uint16_t *)(t.scales + i * 2), (uint16_t)scale);
        for (uint32_t token = 0; token < t.tokens; token++)
            __stcs((uint8_t *)(t.encoded + at + token * step),
                   (uint8_t)int8<D>::encode_one(element_load(t.raw + (at + token * step) * 2),
                                                scale));
    }
}

template <uint32_t D> static __device__ void decode_columns(const struct columns &t)
{
    for (uint32_t i = t.first + t.lane; i < t.first + t.n; i += LANES) {
        uint64_t at = t.at(i), step = t.step();
        uint32_t scale = __ldcs((const uint16_t *)(t.scales + i * 2));

        for (uint32_t token = 0; token < t.tokens; token++)
            element_store(
                t.raw + (at + token * step) * 2,
                int8<D>::decode_one(__ldcs((const uint8_t *)(t.encoded + at + token * step)), scale));
    }
}

template <uint32_t D, bool ENCODE>
static __device__ __forceinline__ void columns_tile(const struct ucm_encoding_tensor &s,
                                                    uint32_t run, uint64_t raw, uint64_t encoded,
                                                    uint32_t number, uint32_t lane)
{
    uint32_t all = s.heads * s.dim, runs = (s.tokens + run - 1) / run;
    uint32_t chunks = (all + UCM_ENCODING_TILE_COLUMNS - 1) / UCM_ENCODING_TILE_COLUMNS;
    uint64_t elements = (uint64_t)s.tokens * all, scales = encoded + aligned16(elements);
    struct columns t;

    if (number >= runs * chunks)
        return;
    t.raw = raw;
    t.encoded = encoded;
    t.scales = scales + (uint64_t)(number / chunks) * all * 2;
    t.from = number / chunks * run;
    t.tokens = min(run, s.tokens - t.from);
    t.of_head = s.tokens;
    t.heads = s.heads;
    t.dim = s.dim;
    t.first = number % chunks * UCM_ENCODING_TILE_COLUMNS;
    t.n = min(UCM_ENCODING_TILE_COLUMNS, all - t.first);
    t.lane = lane;
    t.hnd = s.order == UCM_ENCODING_HND;
    if (ENCODE && number == 0) {
        pad16(encoded, elements, lane);
        pad16(scales, (uint64_t)runs * all * 2, lane);
    }
    if (s.dim % 8 == 0 && raw % 16 == 0)
        ENCODE ? encode_columns_vector<D>(t) : decode_columns_vector<D>(t);
    else
        ENCODE ? encode_columns<D>(t) : decode_columns<D>(t);
}

#endif
