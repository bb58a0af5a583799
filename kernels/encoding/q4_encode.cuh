/* q4's encoding: units of V, whose rows are independent, and units of K, which have a centre and
 * shifts. */
#ifndef UCM_KERNELS_ENCODING_Q4_ENCODE_CUH
#define UCM_KERNELS_ENCODING_Q4_ENCODE_CUH

#include "kernels/encoding/q4_rows.cuh"

/* ---- V ---- */

static __device__ __forceinline__ uint4 q4_raw_at(const struct q4_unit &u,
                                                    const struct q4_vector &v, uint32_t token)
{
    if (!v.there || token >= u.tokens)
        return make_uint4(0, 0, 0, 0);
    return __ldcs((const uint4 *)(u.raw + 2 * (v.element + token * u.row_step)));
}

template <uint32_t D>
static __device__ __forceinline__ void q4_unpack(float y[8], uint4 x)
{
    const uint32_t two[4] = {x.x, x.y, x.z, x.w};

#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float2 pair = element_pair<D>(two[i]);

        y[2 * i] = pair.x;
        y[2 * i + 1] = pair.y;
    }
}

template <uint32_t D, uint32_t G>
static __device__ __forceinline__ void q4_encode_v(const struct q4_unit &u, const struct q4_tile &l,
                                                   uint32_t lane, const struct q4_shared *shared)
{
    uint4 x[2][4];

#pragma unroll
    for (uint32_t p = 0; p < 2; p++)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            x[p][k] = q4_raw_at(u, l.at[k], 8 * p + l.r);
#pragma unroll
    for (uint32_t p = 0; p < 2; p++) {
        uint32_t most[4];
        float y[4][8];

        if (8 * p >= u.tokens)
            break;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint4 v = x[p][k], signs = shared->signs[l.at[k].there ? l.at[k].channel / 8 : 0];

            v = make_uint4(v.x ^ signs.x, v.y ^ signs.y, v.z ^ signs.z, v.w ^ signs.w);
            q4_unpack<D>(y[k], v);
            q4_rotate_vector(y[k]);
        }
        q4_rotate(y, lane, q4_group<G>(u.group));
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            most[k] = q4_largest(y[k]);
        q4_group_max(most, q4_group<G>(u.group));
        q4_store_row<G>(shared, u, l, y, most, 8 * p + l.r);
    }
}

/* ---- K: how channels are levelled ---- */

/* Takes the larger halves of `most`, which has 2 * N words, across a step of lanes. A lane keeps N
 * of them. */
template <uint32_t N>
static __device__ __forceinline__ void q4_exchange(uint32_t *most, uint32_t lane, uint32_t stride)
{
    bool upper = lane & stride;

#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        uint32_t keep = upper ? most[N + i] : most[i], give = upper ? most[i] : most[N + i];

        most[i] = __vmaxu2(keep, __shfl_xor_sync(ALL, give, stride));
    }
}

/* The largest finite magnitudes of four channels in all tokens: those of vector q + 4 * (r / 2),
 * from 4 * (r % 2) on. */
template <uint32_t D>
static __device__ __forceinline__ void q4_magnitudes(uint32_t four[2], const uint4 x[2][4],
                                                     uint32_t lane)
{
    for (bool finite = true;; finite = false) {
        uint32_t most[16];

#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t a[4] = {x[0][k].x, x[0][k].y, x[0][k].z, x[0][k].w};
            const uint32_t b[4] = {x[1][k].x, x[1][k].y, x[1][k].z, x[1][k].w};

#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                most[4 * k + i] =
                    finite ? __vmaxu2(a[i] & 0x7fff7fffu, b[i] & 0x7fff7fffu)
                           : __vmaxu2(element_finite<D>(a[i]), element_finite<D>(b[i]));
        }
        q4_exchange<8>(most, lane, 16);
        q4_exchange<4>(most, lane, 8);
        q4_exchange<2>(most, lane, 4);
        four[0] = most[0];
        four[1] = most[1];
        if (!__any_sync(ALL, __vcmpgeu2(four[0], dtype_bits<D>::INF) |
                                 __vcmpgeu2(four[1], dtype_bits<D>::INF)))
            break;
    }
}

/* The sum of what the lanes of a group have, each with four channels of q4_magnitudes. */
static __device__ __forceinline__ uint32_t q4_group_sum(uint32_t x, uint32_t group)
{
    uint32_t other;

    if (group == 7)
        return __reduce_add_sync(ALL, x);
    x += __shfl_xor_sync(ALL, x, 4);
    x += __shfl_xor_sync(ALL, x, 1);
    other = __shfl_xor_sync(ALL, x, 2);
    x += group >= 5 ? other : 0;
    other = __shfl_xor_sync(ALL, x, 8);
    return x + (group >= 6 ? other : 0);
}

static __device__ __forceinline__ uint32_t q4_median(const uint32_t e[4], uint32_t group)
{
    uint32_t m = 0;

#pragma unroll
    for (uint32_t bit = 128; bit > 0; bit /= 2) {
        uint32_t below = (uint32_t)(e[0] < (m | bit)) + (uint32_t)(e[1] < (m | bit)) +
                         (uint32_t)(e[2] < (m | bit)) + (uint32_t)(e[3] < (m | bit));

        if (q4_group_sum(below, group) < 1u << (group - 1))
            m |= bit;
    }
    return m;
}

/* Stores the shifts and leaves the divisors in scratch. */
template <uint32_t D, uint32_t G>
static __device__ __forceinline__ void q4_level(const struct q4_unit &u, const struct q4_tile &l,
                                                const uint4 x[2][4], uint32_t lane,
                                                const struct q4_shared *shared, struct q4_scratch *scratch)
{
    uint32_t column = 8 * (l.q + 4 * (l.r >> 1)) + 4 * (l.r & 1), four[2], e[4], shifts = 0, m;
    struct q4_vector at = q4_vector(shared, u, column);
    uint4 signs = shared->signs[at.there ? at.channel / 8 : 0];
    const uint32_t negative[2] = {at.channel & 4 ? signs.z : signs.x,
                                  at.channel & 4 ? signs.w : signs.y};
    float divisors[4];

    q4_magnitudes<D>(four, x, lane);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        e[i] = element_magnitude<D>(four[i / 2] >> i % 2 * 16 & 0xffffu) >> 23;
    m = q4_median(e, q4_group<G>(u.group));
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t shift = ucm_q4_shift(e[i], m);

        shifts |= shift << 4 * i;
        divisors[i] = ucm_q4_divisor(shift, negative[i / 2] >> (15 + i % 2 * 16) & 1);
    }
    *(float4 *)&scratch->divisors[column] =
        make_float4(divisors[0], divisors[1], divisors[2], divisors[3]);
    if (at.there)
        __stcs((uint16_t *)(u.encoded + shared->tensor[u.tensor].shifts) + q4_centre_of(shared, u, at) / 4, (uint16_t)shifts);
}

/* ---- K: the centre ---- */

/* Adds the tokens first .. first + 8, whose rows are in scratch, to the sums of columns 4 *
 * lane. */
static __device__ __forceinline__ void q4_sum(float c[4], const struct q4_scratch *scratch,
                                              uint32_t lane, uint32_t first, uint32_t tokens)
{
#pragma unroll
    for (uint32_t t = 0; t < 8; t++) {
        float4 y;

        if (first + t >= tokens)
            break;
        y = *(const float4 *)&scratch->rows[t][4 * lane];
        c[0] = first + t == 0 ? y.x : c[0] + y.x;
        c[1] = first + t == 0 ? y.y : c[1] + y.y;
        c[2] = first + t == 0 ? y.z : c[2] + y.z;
        c[3] = first + t == 0 ? y.w : c[3] + y.w;
    }
}

/* The centre of columns 4 * lane: codes, scale, and the decoded values. */
struct q4_centre {
    uint32_t codes, scale;
    float z[4];
};

static __device__ __forceinline__ void q4_centre(struct q4_centre *centre, float c[4],
                                                 const struct q4_shared *shared, uint32_t tokens,
                                                 uint32_t group)
{
    float part = 1.0f / (float)tokens, reciprocal, s;
    uint32_t most = 0, a, b;
    uint2 levels;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        c[i] *= part;
        most = max(most, q4_magnitude(c[i]));
    }
#pragma unroll
    for (uint32_t stride = 1; stride < LANES; stride *= 2) {
        uint32_t other = __shfl_xor_sync(ALL, most, stride);

        most = stride < 1u << (group - 2) ? max(most, other) : most;
    }
    centre->scale = q4_scale(most, &reciprocal);
    if (centre->scale == UCM_BF16_NAN)
        centre->scale = 0;
    a = q4_code_pair(c[0], c[1], reciprocal);
    b = q4_code_pair(c[2], c[3], reciprocal);
    centre->codes = (a & 15u) | (a >> 12 & 0xf0u) | (b & 15u) << 8 | (b >> 4 & 0xf000u);
    levels = q4_levels(centre->codes, shared->table);
    s = ucm_bf16_decode(centre->scale);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        centre->z[i] = (float)(int8_t)(levels.x >> 8 * i) * s;
}

/* Subtracts the centre from y. most: the largest of the remainder, for each vector's group. Bit k
 * of the result: in this token the centre helps the group of vector k. */
static __device__ __forceinline__ uint32_t q4_subtract(float y[4][8], uint32_t most[4],
                                                       const struct q4_tile &l, uint32_t group,
                                                       const struct q4_scratch *scratch)
{
    uint32_t before[4], serves = 0;

#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const float4 *z = (const float4 *)&scratch->centre[8 * (l.q + 4 * k)];
        float4 a = z[0], b = z[1];

        before[k] = q4_largest(y[k]);
        y[k][0] -= a.x, y[k][1] -= a.y, y[k][2] -= a.z, y[k][3] -= a.w;
        y[k][4] -= b.x, y[k][5] -= b.y, y[k][6] -= b.z, y[k][7] -= b.w;
        most[k] = q4_largest(y[k]);
    }
    q4_group_max(before, group);
    q4_group_max(most, group);
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        serves |= (uint32_t)(before[k] < UCM_F32_INF && most[k] < UCM_F32_INF &&
                             __uint_as_float(most[k]) <=
                                 UCM_Q4_CENTRE_MOST * __uint_as_float(before[k]))
                  << k;
    return serves;
}

/* ---- K ---- */

template <uint32_t D>
static __device__ __forceinline__ void q4_rotate_k(float y[2][4][8], const uint4 x[2][4],
                                                   const struct q4_tile &l, uint32_t lane,
                                                   uint32_t group, const float *divisors)
{
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const float4 *d = (const float4 *)&divisors[8 * (l.q + 4 * k)];
        float4 a = d[0], b = d[1];
        const float of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};

#pragma unroll
        for (uint32_t p = 0; p < 2; p++) {
            q4_unpack<D>(y[p][k], x[p][k]);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                y[p][k][i] *= of[i];
            q4_rotate_vector(y[p][k]);
        }
    }
    q4_rotate(y[0], lane, group);
    q4_rotate(y[1], lane, group);
}

/* Finds and stores the centre; leaves its values in scratch. */
template <uint32_t G>
static __device__ __forceinline__ void q4_find_centre(struct q4_centre *centre,
                                                      const float y[2][4][8],
                                                      const struct q4_shared *shared,
                                                      const struct q4_unit &u,
                                                      const struct q4_tile &l, uint32_t lane,
                                                      struct q4_scratch *scratch)
{
    float c[4] = {0, 0, 0, 0};

#pragma unroll
    for (uint32_t p = 0; p < 2; p++) {
        __syncwarp();
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            float4 *to = (float4 *)&scratch->rows[l.r][8 * (l.q + 4 * k)];

            to[0] = make_float4(y[p][k][0], y[p][k][1], y[p][k][2], y[p][k][3]);
            to[1] = make_float4(y[p][k][4], y[p][k][5], y[p][k][6], y[p][k][7]);
        }
        __syncwarp();
        q4_sum(c, scratch, lane, 8 * p, u.tokens);
    }
    q4_centre(centre, c, shared, u.tokens, q4_group<G>(u.group));
    *(float4 *)&scratch->centre[4 * lane] =
        make_float4(centre->z[0], centre->z[1], centre->z[2], centre->z[3]);
    __syncwarp();
}

/* Drops the centres of groups that they do not help. serves: for both tokens, bit k for vector k.
 * Returns whether any was dropped. */
static __device__ __forceinline__ bool q4_drop_centres(struct q4_centre *centre, uint32_t serves,
                                                       uint32_t lane, struct q4_scratch *scratch)
{
    uint32_t k = lane / 8, q = lane / 2 % 4, all = 0;

    if (__all_sync(ALL, serves == 15))
        return false;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t votes = __ballot_sync(ALL, serves >> i & 1);

        all = i == k ? votes : all;
    }
    __syncwarp(); /* votes do not order memory: all lanes have read the centres */
    if ((all >> q & 0x11111111u) != 0x11111111u) {
        centre->codes = centre->scale = 0;
        *(float4 *)&scratch->centre[4 * lane] = make_float4(0, 0, 0, 0);
    }
    __syncwarp();
    return true;
}

template <uint32_t G>
static __device__ __forceinline__ void q4_store_centre(const struct q4_centre &centre,
                                                       const struct q4_shared *shared,
                                                       const struct q4_unit &u, uint32_t lane)
{
    const struct q4_tensor *s = &shared->tensor[u.tensor];
    struct q4_vector at = q4_vector(shared, u, 4 * lane);
    uint32_t number = q4_centre_of(shared, u, at);

    if (!at.there)
        return;
    __stcs((uint16_t *)(u.encoded + s->centres) + number / 4, (uint16_t)centre.codes);
    if ((at.channel & ((1u << q4_group<G>(u.group)) - 1)) == 0)
        __stcs((uint16_t *)(u.encoded + s->centre_scales) + (number >> q4_group<G>(u.group)),
               (uint16_t)centre.scale);
}

template <uint32_t D, uint32_t G>
static __device__ __forceinline__ void q4_encode_k(const struct q4_unit &u, const struct q4_tile &l,
                                                   uint32_t lane, const struct q4_shared *shared,
                                                   struct q4_scratch *scratch)
{
    struct q4_centre centre;
    float y[2][4][8];
    uint32_t most[2][4];

    __syncwarp(); /* the unit before is done with scratch */
    for (bool first = true;; first = false) {
        uint32_t serves = 15;
        uint4 x[2][4];

#pragma unroll
        for (uint32_t p = 0; p < 2; p++)
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                x[p][k] = q4_raw_at(u, l.at[k], 8 * p + l.r);
        if (first)
            q4_level<D, G>(u, l, x, lane, shared, scratch);
        __syncwarp();
        q4_rotate_k<D>(y, x, l, lane, q4_group<G>(u.group), scratch->divisors);
        if (first)
            q4_find_centre<G>(&centre, y, shared, u, l, lane, scratch);
#pragma unroll
        for (uint32_t p = 0; p < 2; p++) {
            uint32_t in_row = q4_subtract(y[p], most[p], l, q4_group<G>(u.group), scratch);

            if (8 * p + l.r < u.tokens)
                serves &= in_row;
        }
        if (!first || !q4_drop_centres(&centre, serves, lane, scratch))
            break;
    }
    q4_store_centre<G>(centre, shared, u, lane);
#pragma unroll
    for (uint32_t p = 0; p < 2; p++)
        q4_store_row<G>(shared, u, l, y[p], most[p], 8 * p + l.r);
}

/* ---- a unit ---- */

/* Zeroes what lies between the arrays: of the first unit of a tensor. */
static __device__ __forceinline__ void q4_pad(const struct q4_shared *shared,
                                              const struct q4_unit &u, uint32_t lane)
{
    const struct q4_tensor *s = &shared->tensor[u.tensor];

    pad16(u.encoded, s->codes_end, lane);
    pad16(u.encoded, s->scales_end, lane);
    pad16(u.encoded, s->centres_end, lane);
    pad16(u.encoded, s->centre_scales_end, lane);
    pad16(u.encoded, s->end, lane);
}

template <uint32_t D, uint32_t G>
static __device__ __forceinline__ void q4_encode_group(const struct q4_unit &u, uint32_t lane,
                                                 const struct q4_shared *shared, struct q4_scratch *scratch)
{
    struct q4_tile l;

    l.r = lane / 4;
    l.q = lane % 4;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        l.at[k] = q4_vector(shared, u, 8 * (l.q + 4 * k));
    if (u.tile == 0 && u.chunk == 0)
        q4_pad(shared, u, lane);
    if (u.k)
        q4_encode_k<D, G>(u, l, lane, shared, scratch);
    else
        q4_encode_v<D, G>(u, l, lane, shared);
}

template <uint32_t D>
static __device__ __forceinline__ void q4_encode(const struct q4_unit &u, uint32_t lane,
                                                 const struct q4_shared *shared,
                                                 struct q4_scratch *scratch)
{
    if (u.group == 7)
        q4_encode_group<D, 7>(u, lane, shared, scratch);
    else if (u.group == 6)
        q4_encode_group<D, 6>(u, lane, shared, scratch);
    else
        q4_encode_group<D, 0>(u, lane, shared, scratch);
}

#endif
