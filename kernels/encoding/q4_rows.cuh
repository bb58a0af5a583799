/* q4's encoding. r = lane / 4 and q = lane % 4. A lane has the unit's vectors q, q + 4, q + 8 and q
 * + 12 of tokens r and r + 8. So only the transform's steps over 8 and 16 channels pass between
 * lanes. Sums over tokens have a defined order. They pass through the warp's own shared memory. */
#ifndef UCM_KERNELS_ENCODING_Q4_ROWS_CUH
#define UCM_KERNELS_ENCODING_Q4_ROWS_CUH

#include "kernels/encoding/q4_unit.cuh"

#define Q4_ROW 132u /* floats: so that 8 rows lie in different banks */

struct q4_scratch {
    float rows[8][Q4_ROW];
    float divisors[Q4_COLUMNS], centre[Q4_COLUMNS];
};

/* A lane's vectors. */
struct q4_tile {
    struct q4_vector at[4];
    uint32_t r, q;
};

/* log2 of a group's channels, where G says so at compile time; 0: any. */
template <uint32_t G> static __device__ __forceinline__ uint32_t q4_group(uint32_t group)
{
    return G ? G : group;
}

/* Reduces what each vector has over the lanes and vectors of a group. The result is in all of
 * them. */
static __device__ __forceinline__ void q4_group_max(uint32_t most[4], uint32_t group)
{
    if (group >= 6) {
        most[0] = most[1] = max(most[0], most[1]);
        most[2] = most[3] = max(most[2], most[3]);
    }
    if (group == 7) {
        uint32_t one = max(most[0], most[2]);

        one = max(one, __shfl_xor_sync(ALL, one, 1));
        one = max(one, __shfl_xor_sync(ALL, one, 2));
        most[0] = most[1] = most[2] = most[3] = one;
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t other;

        most[k] = max(most[k], __shfl_xor_sync(ALL, most[k], 1));
        other = __shfl_xor_sync(ALL, most[k], 2);
        most[k] = group >= 5 ? max(most[k], other) : most[k];
    }
}

static __device__ __forceinline__ uint32_t q4_magnitude(float y)
{
    return __float_as_uint(y) & 0x7fffffffu;
}

/* The result's bits are those of infinity or more if one value is not finite. */
static __device__ __forceinline__ uint32_t q4_largest(const float y[8])
{
    float most = fabsf(y[0]);

#pragma unroll
    for (uint32_t i = 1; i < 8; i++) /* fmaxf would drop NaN */
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(y[i])));
    return __float_as_uint(most);
}

/* ---- the transform ---- */

/* Steps within a vector. */
static __device__ __forceinline__ void q4_rotate_vector(float y[8])
{
#pragma unroll
    for (uint32_t stride = 1; stride < 8; stride *= 2)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            if ((i & stride) == 0) {
                float a = y[i], b = y[i + stride];

                y[i] = a + b;
                y[i + stride] = a - b;
            }
}

/* The step over `stride` lanes. A product with +-1 is exact, so this is other + y or other - y. */
static __device__ __forceinline__ void q4_rotate_lanes(float y[4][8], uint32_t lane,
                                                       uint32_t stride, bool apply)
{
    float sign = lane & stride ? -1.0f : 1.0f;

#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            float other = __shfl_xor_sync(ALL, y[k][i], stride);

            y[k][i] = apply ? __fmaf_rn(y[k][i], sign, other) : y[k][i];
        }
}

static __device__ __forceinline__ void q4_rotate_vectors(float y[4][8], uint32_t stride)
{
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        if ((k & stride) == 0)
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) {
                float a = y[k][i], b = y[k + stride][i];

                y[k][i] = a + b;
                y[k + stride][i] = a - b;
            }
}

/* The steps between vectors, after those within. */
static __device__ __forceinline__ void q4_rotate(float y[4][8], uint32_t lane, uint32_t group)
{
    q4_rotate_lanes(y, lane, 1, true);
    q4_rotate_lanes(y, lane, 2, group >= 5);
    if (group >= 6)
        q4_rotate_vectors(y, 1);
    if (group >= 7)
        q4_rotate_vectors(y, 2);
}

/* ---- codes ---- */

/* Two values' codes, in the low bits of the halves. The thresholds are f16, so values rounded down
 * to f16 compare with them as before. Adding 0 makes -0, and only that, not negative. */
static __device__ __forceinline__ uint32_t q4_code_pair(float a, float b, float reciprocal)
{
    uint32_t two, first, second, third, at;

    a = __fmaf_rn(a, reciprocal, 0.0f);
    b = __fmaf_rn(b, reciprocal, 0.0f);
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    const __half2 rest = __habs2(*(const __half2 *)&two);

    first = __hge2_mask(rest, __half2(__half_raw{0x5270}, __half_raw{0x5270})); /* 51.5 */
    at = 0x4e204e20u ^ (first & (0x4e204e20u ^ 0x55685568u)); /* 24.5, 86.5 */
    second = __hge2_mask(rest, *(const __half2 *)&at);
    /* 12, 67.5; where the second is, too: 37.5, 112 */
    at = 0x4a004a00u ^ (first & (0x4a004a00u ^ 0x54385438u)) ^
         (second & ((0x4a004a00u ^ 0x50b050b0u) ^
                    (first & (0x4a004a00u ^ 0x50b050b0u ^ 0x54385438u ^ 0x57005700u))));
    third = __hge2_mask(rest, *(const __half2 *)&at);
    return (first & 0x00040004u) | (second & 0x00020002u) | (third & 0x00010001u) |
           (two >> 12 & 0x00080008u);
}

/* If the reciprocal is 0, all codes are 0. */
static __device__ __forceinline__ uint32_t q4_codes(const float y[8], float reciprocal)
{
    uint32_t codes = 0;

#pragma unroll
    for (int i = 3; i >= 0; i--)
        codes = codes * 16 + q4_code_pair(y[i], y[i + 4], reciprocal);
    return codes;
}

/* 1 / s rounded, of an s far from where its reciprocal is a denormal or infinite. */
static __device__ __forceinline__ float q4_reciprocal(float s)
{
    float r;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
    return __fmaf_rn(r, __fmaf_rn(-s, r, 1.0f), r);
}

/* ucm_q4_scale of the bits of a group's largest magnitude, or NaN; and the factor for its
 * values. */
static __device__ __forceinline__ uint32_t q4_scale(uint32_t most, float *reciprocal)
{
    float a = __uint_as_float(most) * __uint_as_float(UCM_Q4_PART), s;
    uint32_t scale = element_pack<UCM_ENCODING_BF16>(a, 0.0f) & 0xffffu;

    s = ucm_bf16_decode(scale);
    *reciprocal = 0.0f;
    if (most >= UCM_F32_INF)
        return UCM_BF16_NAN;
    if (s < UCM_Q4_SCALE_LEAST)
        return 0;
    *reciprocal = q4_reciprocal(s);
    return scale;
}

/* Codes and scales of one token, most: of each vector's group. */
template <uint32_t G>
static __device__ __forceinline__ void q4_store_row(const struct q4_shared *shared,
                                                    const struct q4_unit &u,
                                                    const struct q4_tile &l, const float y[4][8],
                                                    const uint32_t most[4], uint32_t token)
{
    const struct q4_tensor *s = &shared->tensor[u.tensor];
    uint32_t scale = 0;
    float reciprocal = 0;

#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t element = l.at[k].element + token * u.row_step, codes;

        if (k == 0 || q4_group<G>(u.group) < 7)
            scale = q4_scale(most[k], &reciprocal);
        codes = q4_codes(y[k], reciprocal);
        if (!l.at[k].there || token >= u.tokens)
            continue;
        __stcs((uint32_t *)(u.encoded + element / 2), codes);
        if ((l.at[k].channel & ((1u << q4_group<G>(u.group)) - 1)) == 0)
            __stcs((uint16_t *)(u.encoded + s->scales) + (element >> q4_group<G>(u.group)), (uint16_t)scale);
    }
}

#endif
