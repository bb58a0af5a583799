/* q4. A unit is a tile of 16 tokens by 32 vectors of 8 channels, one a lane: what a lane holds belongs to one
 * head, and L lanes hold one group. Pages begin at multiples of 16. */
#ifndef UCM_KERNELS_ENCODING_Q4_CUH
#define UCM_KERNELS_ENCODING_Q4_CUH

#include "kernels/encoding/rows.cuh"

/* Where a lane's vectors lie. */
struct q4_unit {
    uint32_t tile, tokens; /* of the tile */
    uint32_t row_vectors, columns, column, head, vector;
    uint32_t signs; /* bit i: channel i of the vector is negated */
    uint64_t plain, codes, scales, centres, centre_scales, shifts;
    uint64_t first, step; /* vectors: of the tile's first token, and from a token to the next */
    uint32_t centre;      /* number of the centre's vector, and of the shifts' */
    bool active;
};

static __device__ __forceinline__ struct q4_unit q4_unit(const struct ucm_encoding_spec &spec,
                                                         const struct ucm_encoding_section &s,
                                                         uint64_t plain, uint64_t coded,
                                                         uint32_t number, uint32_t lane)
{
    uint32_t rows = s.tokens * s.heads, tiles = (s.tokens + UCM_Q4_TILE - 1) / UCM_Q4_TILE, chunks;
    uint32_t groups = s.dim / ucm_q4_rotation(s.dim),
             centres = s.kind == UCM_ENCODING_K ? tiles * s.heads : 0;
    struct q4_unit u;

    u.row_vectors = s.dim / 8;
    u.columns = s.heads * u.row_vectors;
    chunks = (u.columns + LANES - 1) / LANES;
    u.tile = number / chunks;
    u.column = number % chunks * LANES + lane;
    u.active = u.column < u.columns;
    u.head = u.column / u.row_vectors;
    u.vector = u.column % u.row_vectors;
    u.tokens = u.tile < tiles ? min(UCM_Q4_TILE, s.tokens - u.tile * UCM_Q4_TILE) : 0;
    u.signs = (uint32_t)(ucm_q4_signs(spec.seed, u.vector / 8) >> u.vector % 8 * 8) & 0xffu;
    u.plain = plain;
    u.codes = coded;
    u.scales = u.codes + aligned16((uint64_t)rows * s.dim / 2);
    u.centres = u.scales + aligned16(2ull * rows * groups);
    u.centre_scales = u.centres + aligned16((uint64_t)centres * s.dim / 2);
    u.shifts = u.centre_scales + aligned16(2ull * centres * groups);
    u.step = s.order == UCM_ENCODING_NHD ? u.columns : u.row_vectors;
    u.first =
        (s.order == UCM_ENCODING_NHD ? (uint64_t)u.column
                                     : (uint64_t)u.head * s.tokens * u.row_vectors + u.vector) +
        u.tile * UCM_Q4_TILE * u.step;
    u.centre = (u.tile * s.heads + u.head) * u.row_vectors + u.vector;
    return u;
}

/* ---- encoding ---- */

/* divisors: what channels are multiplied by before. */
template <uint32_t D, uint32_t L>
static __device__ __forceinline__ void q4_rotate(uint4 x, const float divisors[8], uint32_t lane,
                                                 float y[8])
{
    const uint32_t two[4] = {x.x, x.y, x.z, x.w};

#pragma unroll
    for (uint32_t i = 0; i < 8; i += 2) {
        float2 pair = element_pair<D>(two[i / 2]);

        y[i] = pair.x * divisors[i];
        y[i + 1] = pair.y * divisors[i + 1];
    }
#pragma unroll
    for (uint32_t stride = 1; stride < 8; stride *= 2)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if ((i & stride) == 0) {
                float a = y[i], b = y[i + stride];

                y[i] = a + b;
                y[i + stride] = a - b;
            }
#pragma unroll
    for (uint32_t stride = 1; stride < L; stride *= 2)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            float other = __shfl_xor_sync(ALL, y[i], stride);

            y[i] = lane & stride ? other - y[i] : y[i] + other;
        }
}

/* The median of the exponents of a group's channels, eight in each of its lanes. */
template <uint32_t L>
static __device__ __forceinline__ uint32_t q4_median(const uint32_t exponents[8])
{
    uint32_t m = 0;

#pragma unroll
    for (uint32_t bit = 128; bit > 0; bit /= 2) {
        uint32_t below = 0;

#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            below += exponents[i] < (m | bit);
#pragma unroll
        for (uint32_t stride = 1; stride < L; stride *= 2)
            below += __shfl_xor_sync(ALL, below, stride);
        if (below < 4 * L)
            m |= bit;
    }
    return m;
}

/* The shifts of a tile's channels, four bits each; x: its elements, or 0. */
template <uint32_t D, uint32_t L>
static __device__ __forceinline__ uint32_t q4_level(const uint4 x[UCM_Q4_TILE])
{
    uint32_t most[4] = {0, 0, 0, 0}, exponents[8], median, shifts = 0;

#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++) {
        most[0] = __vmaxu2(most[0], element_finite<D>(x[t].x));
        most[1] = __vmaxu2(most[1], element_finite<D>(x[t].y));
        most[2] = __vmaxu2(most[2], element_finite<D>(x[t].z));
        most[3] = __vmaxu2(most[3], element_finite<D>(x[t].w));
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        exponents[i] = element_magnitude<D>(most[i / 2] >> i % 2 * 16 & 0xffffu) >> 23;
    median = q4_median<L>(exponents);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        shifts |= ucm_q4_shift(exponents[i], median) << 4 * i;
    return shifts;
}

/* The largest magnitude of a group as bits: those of infinity or more if one is not finite. */
template <uint32_t L> static __device__ __forceinline__ uint32_t q4_largest(const float y[8])
{
    uint32_t most = 0;

#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        most = max(most, __float_as_uint(y[i]) & 0x7fffffffu);
    return group_max<L>(most);
}

/* ucm_q4_code in three comparisons. */
static __device__ __forceinline__ uint32_t q4_code(float y, float reciprocal)
{
    float x = fabsf(y) * reciprocal, b, c;
    bool first = x >= 51.5f, second, third;

    b = first ? 86.5f : 24.5f;
    second = x >= b;
    c = first ? (second ? 112.0f : 67.5f) : (second ? 37.5f : 12.0f);
    third = x >= c;
    return (y < 0 ? 8u : 0u) | (first ? 4u : 0u) | (second ? 2u : 0u) | (third ? 1u : 0u);
}

/* Eight codes; the group's scale in *scale. */
template <uint32_t L>
static __device__ __forceinline__ uint32_t q4_quantise(const float y[8], uint32_t *scale)
{
    uint32_t most = q4_largest<L>(y), codes = 0;
    float reciprocal;

    *scale = most >= UCM_F32_INF ? UCM_BF16_NAN : ucm_q4_scale(__uint_as_float(most));
    if (*scale == 0 || *scale == UCM_BF16_NAN) /* the same in all lanes of the group */
        return 0;
    reciprocal = 1.0f / ucm_bf16_decode(*scale);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        codes |= q4_code(y[i], reciprocal) << 4 * i;
    return codes;
}

template <uint32_t L>
static __device__ __forceinline__ void q4_store(uint64_t codes, uint64_t scales, uint64_t vector,
                                                uint32_t code, uint32_t scale, uint32_t lane)
{
    __stcs((uint32_t *)codes + vector, code);
    if (lane % L == 0)
        __stcs((uint16_t *)scales + vector / L, (uint16_t)scale);
}

/* __byte_perm takes three bits of a selector; the fourth makes a byte of the sign of the one selected. */
static __device__ __forceinline__ uint32_t q4_permute(uint32_t a, uint32_t b, uint32_t select)
{
    uint32_t r;

    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
    return r;
}

/* The levels of eight codes, as signed bytes: of channels 0 to 3, and 4 to 7. */
static __device__ __forceinline__ uint2 q4_levels(uint32_t codes)
{
    uint32_t negative = codes & 0x88888888u, plain = codes & 0x77777777u;
    /* A selector of 8 gives the sign of byte 0, one of 1 byte 1. */
    uint32_t select = negative | (negative ^ 0x88888888u) >> 3;
    uint32_t a = q4_permute(0x2c1f1206u, 0x7f614c3bu, plain);
    uint32_t b = q4_permute(0x2c1f1206u, 0x7f614c3bu, plain >> 16);
    uint32_t p = q4_permute(0x80u, 0, select), q = q4_permute(0x80u, 0, select >> 16);

    return make_uint2((a ^ p) + (p & 0x01010101u), (b ^ q) + (q & 0x01010101u));
}

template <uint32_t D, uint32_t L>
static __device__ __forceinline__ void q4_encode_v(const struct q4_unit &u, uint32_t lane)
{
    float divisors[8];

#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        divisors[i] = ucm_q4_divisor(0, u.signs >> i & 1);
#pragma unroll 4
    for (uint32_t t = 0; t < u.tokens; t++) {
        uint64_t vector = u.first + t * u.step;
        uint4 x = u.active ? __ldcs((const uint4 *)u.plain + vector) : make_uint4(0, 0, 0, 0);
        uint32_t code, scale;
        float y[8];

        q4_rotate<D, L>(x, divisors, lane, y);
        code = q4_quantise<L>(y, &scale);
        if (u.active)
            q4_store<L>(u.codes, u.scales, vector, code, scale, lane);
    }
}

/* z: the centre; whether no row becomes much larger when it is subtracted. The same for all lanes of a
 * group; every lane calls it. */
template <uint32_t L>
static __device__ __forceinline__ bool q4_centre_serves(const float y[UCM_Q4_TILE][8],
                                                        uint32_t tokens, const float z[8])
{
    bool serves = true;

#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++) {
        float r[8];
        uint32_t before, after;

        if (t >= tokens)
            break;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            r[i] = y[t][i] - z[i];
        before = q4_largest<L>(y[t]);
        after = q4_largest<L>(r);
        serves = serves && before < UCM_F32_INF && after < UCM_F32_INF &&
                 __uint_as_float(after) <= UCM_Q4_CENTRE_MOST * __uint_as_float(before);
    }
    return serves;
}

template <uint32_t D, uint32_t L>
static __device__ __forceinline__ void q4_encode_k(const struct q4_unit &u, uint32_t lane)
{
    float y[UCM_Q4_TILE][8], divisors[8], c[8], part = 1.0f / (float)u.tokens, s;
    uint32_t code, scale, shifts;
    uint4 x[UCM_Q4_TILE];
    uint2 levels;

#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++)
        x[t] = u.active && t < u.tokens ? __ldcs((const uint4 *)u.plain + u.first + t * u.step)
                                        : make_uint4(0, 0, 0, 0);
    shifts = q4_level<D, L>(x);
    if (u.active)
        __stcs((uint32_t *)u.shifts + u.centre, shifts);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        divisors[i] = ucm_q4_divisor(shifts >> 4 * i & 15, u.signs >> i & 1);
#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++)
        q4_rotate<D, L>(x[t], divisors, lane, y[t]);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        c[i] = y[0][i];
#pragma unroll
        for (uint32_t t = 1; t < UCM_Q4_TILE; t++)
            if (t < u.tokens)
                c[i] += y[t][i];
        c[i] *= part;
    }
    code = q4_quantise<L>(c, &scale);
    levels = q4_levels(code);
    s = ucm_bf16_decode(scale);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        c[i] = (float)(int8_t)((i < 4 ? levels.x : levels.y) >> i % 4 * 8) * s;
    if (!q4_centre_serves<L>(y, u.tokens, c) || scale == UCM_BF16_NAN) {
        code = scale = 0;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            c[i] = 0;
    }
    if (u.active)
        q4_store<L>(u.centres, u.centre_scales, u.centre, code, scale, lane);
#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++) {
        if (t >= u.tokens)
            break;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            y[t][i] -= c[i]; /* less 0 it is what it was */
        code = q4_quantise<L>(y[t], &scale);
        if (u.active)
            q4_store<L>(u.codes, u.scales, u.first + t * u.step, code, scale, lane);
    }
}

/* ---- decoding ---- */

/* The levels rotated back, of eight channels, as floats that are integers. Two sums share a word,
 * a + b * 2^16, which is as linear as they are; none reaches 2^15. */
template <uint32_t L>
static __device__ __forceinline__ void q4_rotate_back(uint32_t codes, uint32_t lane, float out[8])
{
    uint2 levels = q4_levels(codes);
    uint32_t p[4] = {q4_permute(levels.x, levels.y, 0xc480), q4_permute(levels.x, levels.y, 0xd591),
                     q4_permute(levels.x, levels.y, 0xe6a2),
                     q4_permute(levels.x, levels.y, 0xf7b3)};
    uint32_t a;

#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        p[k] -= (p[k] & 0x8000u) << 1;
    a = p[0], p[0] = a + p[1], p[1] = a - p[1];
    a = p[2], p[2] = a + p[3], p[3] = a - p[3];
    a = p[0], p[0] = a + p[2], p[2] = a - p[2];
    a = p[1], p[1] = a + p[3], p[3] = a - p[3];
#pragma unroll
    for (uint32_t stride = 1; stride < L; stride *= 2)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t other = __shfl_xor_sync(ALL, p[k], stride);

            p[k] = lane & stride ? other - p[k] : p[k] + other;
        }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        int32_t low = (int16_t)p[k], high = (int32_t)(p[k] - (uint32_t)low) >> 16;

        /* As the low bits of 1.5 * 2^23 an integer is a float already. */
        out[k] = __int_as_float(low + high + 0x4b400000) - 12582912.0f;
        out[k + 4] = __int_as_float(low - high + 0x4b400000) - 12582912.0f;
    }
}

template <uint32_t D> static __device__ __noinline__ uint4 q4_pack_rare(const float *x)
{
    uint32_t two[4];

    for (uint32_t i = 0; i < 4; i++)
        two[i] = ucm_element_encode(D, x[2 * i]) | ucm_element_encode(D, x[2 * i + 1]) << 16;
    return make_uint4(two[0], two[1], two[2], two[3]);
}

/* Neither NaN, nor can a sum of 2^14 of each overflow, times `factor`, the largest of a lane. */
template <uint32_t D>
static __device__ __forceinline__ bool q4_sane(float part, float centre, float factor)
{
    const float most = D == UCM_ENCODING_BF16 ? 0x1p100f : 1.0f;

    return fabsf(part) * factor < most && fabsf(centre) * factor < most;
}

template <uint32_t D, uint32_t L, bool CENTRE>
static __device__ __forceinline__ void q4_decode(const struct q4_unit &u, uint32_t lane)
{
    const float of = 1.0f / (float)(8 * L);
    uint32_t codes[UCM_Q4_TILE], scales[UCM_Q4_TILE], centre = 0;
    uint32_t shifts = 0;
    float w[8], factors[8], of_centre = 0, factor = 0;

#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++) {
        uint64_t vector = u.first + t * u.step;
        bool there = u.active && t < u.tokens;

        codes[t] = there ? __ldcs((const uint32_t *)u.codes + vector) : 0;
        scales[t] = there ? __ldcs((const uint16_t *)u.scales + vector / L) : 0;
    }
    if (CENTRE) {
        if (u.active) {
            centre = __ldcs((const uint32_t *)u.centres + u.centre);
            of_centre =
                ucm_bf16_decode(__ldcs((const uint16_t *)u.centre_scales + u.centre / L)) * of;
            shifts = __ldcs((const uint32_t *)u.shifts + u.centre);
        }
        q4_rotate_back<L>(centre, lane, w);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            w[i] *= of_centre;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        factors[i] = ucm_q4_factor(shifts >> 4 * i & 15, u.signs >> i & 1);
        factor = fmaxf(factor, fabsf(factors[i]));
    }
#pragma unroll
    for (uint32_t t = 0; t < UCM_Q4_TILE; t++) {
        float x[8], part = ucm_bf16_decode(scales[t]) * of;
        uint4 out;

        if (t >= u.tokens)
            break;
        q4_rotate_back<L>(codes[t], lane, x);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = (CENTRE ? x[i] * part + w[i] : x[i] * part) * factors[i];
        if (q4_sane<D>(part, of_centre, factor))
            out = make_uint4(element_pack<D>(x[0], x[1]), element_pack<D>(x[2], x[3]),
                             element_pack<D>(x[4], x[5]), element_pack<D>(x[6], x[7]));
        else
            out = q4_pack_rare<D>(x);
        if (u.active)
            __stcs((uint4 *)u.plain + u.first + t * u.step, out);
    }
}

/* ---- a unit ---- */

template <uint32_t D, uint32_t L, bool ENCODE>
static __device__ __forceinline__ void q4_of_lanes(const struct q4_unit &u, bool k, uint32_t lane)
{
    if (ENCODE && k)
        q4_encode_k<D, L>(u, lane);
    else if (ENCODE)
        q4_encode_v<D, L>(u, lane);
    else if (k)
        q4_decode<D, L, true>(u, lane);
    else
        q4_decode<D, L, false>(u, lane);
}

template <uint32_t D> struct q4 {
    template <bool ENCODE>
    static __device__ __forceinline__ void unit(const struct ucm_encoding_spec &spec,
                                                uint32_t section, uint64_t plain, uint64_t coded,
                                                uint32_t number, uint32_t lane)
    {
        const struct ucm_encoding_section &s = spec.section[section];
        struct q4_unit u = q4_unit(spec, s, plain, coded, number, lane);
        uint32_t lanes = ucm_q4_rotation(s.dim) / 8;
        bool k = s.kind == UCM_ENCODING_K;

        if (u.tokens == 0)
            return;
        if (ENCODE && number == 0) {
            uint32_t rows = s.tokens * s.heads, groups = s.dim / ucm_q4_rotation(s.dim);
            uint32_t centres = (s.tokens + UCM_Q4_TILE - 1) / UCM_Q4_TILE * s.heads;

            pad16(u.codes, (uint64_t)rows * s.dim / 2, lane);
            pad16(u.scales, 2ull * rows * groups, lane);
            if (k) {
                pad16(u.centres, (uint64_t)centres * s.dim / 2, lane);
                pad16(u.centre_scales, 2ull * centres * groups, lane);
                pad16(u.shifts, (uint64_t)centres * s.dim / 2, lane);
            }
        }
        if (lanes == 16)
            q4_of_lanes<D, 16, ENCODE>(u, k, lane);
        else if (lanes == 8)
            q4_of_lanes<D, 8, ENCODE>(u, k, lane);
        else if (lanes == 4)
            q4_of_lanes<D, 4, ENCODE>(u, k, lane);
        else
            q4_of_lanes<D, 2, ENCODE>(u, k, lane);
    }
};

#endif
