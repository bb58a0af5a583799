/* q4's decoding. Tensor cores compute the transform, as a product of matrices of whole numbers. One
 * is H, the 128 x 128 matrix of +-1 (0 between groups), the other the levels of 8 tokens. A lane's
 * channels are chosen so that no number has to move between lanes. With g = lane / 4 and q = lane %
 * 4, and bits counted from 0:
 * - A lane reads 32 codes of token g. Channel bits 5 and 6 are q. Bit 4 is which half (16 codes,
 *   the block of the code). Bit 3 is which word of it, and bit 2 which half of that.
 * - A lane writes 16 channels of tokens 2q and 2q + 1. Channel bits 3, 5 and 6 are g's. Bit 4 is
 *   which of its two vectors. Bits 1 and 2 are which word of that, and bit 0 which half.
 * The sum over bit 4 is made by additions, the others by the products. */
#ifndef UCM_KERNELS_ENCODING_Q4_DECODE_CUH
#define UCM_KERNELS_ENCODING_Q4_DECODE_CUH

#include "kernels/encoding/q4_unit.cuh"

#define Q4_MAGIC 0x4b400000u /* 1.5 * 2^23: with an integer added, the float of that sum */
#define Q4_MAGIC_FLOAT 12582912.0f

/* H, as a lane has it: [channel bit 1 of the result][rows g, g + 8; then the code's bit 3]. minus:
 * for codes whose bit 2 is 1, if the result's bit 2 is 1. */
struct q4_matrix {
    uint32_t plus[2][4], minus[2][4];
};

/* What a lane reads of a unit. Scales are of tokens 2q and 2q + 1, for the vectors 0 and 1 that it
 * writes. */
struct q4_encoded {
    uint4 codes[2], centre; /* codes: [tokens below 8 or not] */
    uint32_t scales[2][2][2], centre_scale[2], shifts[2];
};

/* Where a lane's codes and vectors lie in a tensor. Many units have the same values. */
struct q4_spot {
    uint32_t tensor, number; /* of the unit in the tensor */
    struct q4_vector in[2], out[2];
};

struct q4_lane {
    struct q4_matrix h;
    struct q4_table table;
    uint32_t g, q;
};

static __device__ __forceinline__ void q4_matrix(struct q4_lane *l, uint32_t lane, uint32_t group)
{
    uint32_t g = l->g = lane / 4, q = l->q = lane % 4, cross = q & g >> 1;
    bool zero = (group < 7 && (q ^ g >> 1) & 2) || (group < 6 && (q ^ g >> 1) & 1);

    if (group < 7)
        cross &= 1;
    if (group < 6)
        cross = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t patterns[4] = {0x01010101u, 0xff01ff01u, 0xffff0101u, 0x01ffff01u};
        uint32_t bit1 = i / 4, row = i % 2, half = i / 2 % 2;
        uint32_t x = patterns[bit1 * 2 + row];

        if ((__popc(cross) + (half & g)) & 1)
            x ^= 0xfefefefeu;
        l->h.plus[bit1][row + 2 * half] = zero ? 0 : x;
        l->h.minus[bit1][row + 2 * half] = zero ? 0 : x ^ 0xfefefefeu;
    }
}

/* sum = from + a * b */
static __device__ __forceinline__ void q4_product(int32_t sum[4], const int32_t from[4],
                                                  const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from[0]),
          "r"(from[1]), "r"(from[2]), "r"(from[3]));
}

static __device__ __forceinline__ void q4_spot(struct q4_spot *spot,
                                               const struct q4_shared *shared,
                                               const struct q4_unit &u, const struct q4_lane &l)
{
    spot->tensor = u.tensor;
    spot->number = u.number;
#pragma unroll
    for (uint32_t v = 0; v < 2; v++) {
        spot->in[v] = q4_vector(shared, u, 32 * l.q + 16 * v);
        spot->out[v] = q4_vector(shared, u, 32 * (l.g >> 1) + 8 * (l.g & 1) + 16 * v);
    }
}

static __device__ __forceinline__ uint32_t q4_scale_at(uint64_t scales, uint32_t element,
                                                       uint32_t group)
{
    return __ldcs((const uint16_t *)scales + (element >> group));
}

/* 32 codes from vector 0 on, or 16 and those of vector 1. */
template <bool BLOCKS>
static __device__ __forceinline__ uint4 q4_read_codes(uint64_t codes, const struct q4_vector in[2],
                                                      uint32_t first, uint32_t second, bool there)
{
    uint2 a = make_uint2(0, 0), b = make_uint2(0, 0);

    if (!BLOCKS)
        return in[0].there && there ? __ldcs((const uint4 *)(codes + first / 2))
                                    : make_uint4(0, 0, 0, 0);
    if (in[0].there && there)
        a = __ldcs((const uint2 *)(codes + first / 2));
    if (in[1].there && there)
        b = __ldcs((const uint2 *)(codes + second / 2));
    return make_uint4(a.x, a.y, b.x, b.y);
}

template <bool K, bool BLOCKS>
static __device__ __forceinline__ void
q4_read(struct q4_encoded *c, const struct q4_shared *shared, const struct q4_unit &u,
        const struct q4_spot &spot, const struct q4_lane &l)
{
    const struct q4_tensor *s = &shared->tensor[u.tensor];
    const struct q4_vector *in = spot.in, *out = spot.out;

#pragma unroll
    for (uint32_t o = 0; o < 2; o++) {
        uint32_t t = 8 * o + l.g, step = t * u.row_step;

        c->codes[o] = q4_read_codes<BLOCKS>(u.encoded, in, in[0].element + step,
                                            in[1].element + step, t < u.tokens);
    }
    if (K)
        c->centre = q4_read_codes<BLOCKS>(u.encoded + s->centres, in, q4_centre_of(shared, u, in[0]),
                                          q4_centre_of(shared, u, in[1]), true);
#pragma unroll
    for (uint32_t v = 0; v < 2; v++) {
        uint32_t centre = q4_centre_of(shared, u, out[v]);

        c->centre_scale[v] = c->shifts[v] = 0;
        if (K && out[v].there) {
            c->centre_scale[v] = q4_scale_at(u.encoded + s->centre_scales, centre, u.group);
            c->shifts[v] = __ldcs((const uint32_t *)(u.encoded + s->shifts + centre / 2));
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t t = 8 * (i / 2) + 2 * l.q + i % 2;

            c->scales[v][i / 2][i % 2] = 0;
            if (v == 1 && !BLOCKS)
                c->scales[1][i / 2][i % 2] = c->scales[0][i / 2][i % 2];
            else if (out[v].there && t < u.tokens)
                c->scales[v][i / 2][i % 2] = q4_scale_at(
                    u.encoded + s->scales, out[v].element + t * u.row_step, u.group);
        }
    }
}

/* Codes as products take them: [their bit 2][their bit 4][their bit 3]. */
static __device__ __forceinline__ void q4_operand(uint32_t b[2][2][2], uint4 codes,
                                                  const struct q4_table &table)
{
#pragma unroll
    for (uint32_t block = 0; block < 2; block++) {
        uint2 low = q4_levels(block ? codes.z : codes.x, table),
              high = q4_levels(block ? codes.w : codes.y, table);

        b[0][block][0] = low.x;
        b[1][block][0] = low.y;
        b[0][block][1] = high.x;
        b[1][block][1] = high.y;
    }
}

/* The sums of word `word` of both vectors, over Q4_MAGIC: [vector][row g or g + 8, of two tokens
 * each]. BLOCKS: groups are of 16 channels. */
template <bool BLOCKS>
static __device__ __forceinline__ void q4_sums(int32_t sums[2][4], const struct q4_matrix &h,
                                               const uint32_t b[2][2][2], uint32_t word)
{
    const int32_t none[4] = {0, 0, 0, 0}, magic = (int32_t)Q4_MAGIC;
    int32_t c[2][4];

#pragma unroll
    for (uint32_t block = 0; block < 2; block++) {
        q4_product(c[block], none, h.plus[word & 1], b[0][block]);
        q4_product(c[block], c[block], word & 2 ? h.minus[word & 1] : h.plus[word & 1],
                   b[1][block]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        sums[0][i] = (BLOCKS ? 0 : c[1][i]) + c[0][i] + magic;
        sums[1][i] = BLOCKS ? c[1][i] + magic : c[0][i] - c[1][i] + magic;
    }
}

static __device__ __forceinline__ float q4_float(int32_t sum)
{
    return __int_as_float(sum) - Q4_MAGIC_FLOAT;
}

/* Whether the quick way gives the right bits for these scales. They have no NaN, and no 0 in V.
 * Nothing overflows or is a denormal before the factor. */
template <uint32_t D, bool K> static __device__ __forceinline__ bool q4_raw(float part)
{
    const uint32_t least = 20u << 23, most = D == UCM_ENCODING_BF16 ? 217u << 23 : 127u << 23;
    uint32_t u = __float_as_uint(part);

    return u - least < most - least || (K && u == 0);
}

/* Two neighbours: sums, what the centre adds, and the factors as two elements. */
template <uint32_t D, bool K>
static __device__ __forceinline__ uint32_t q4_pair(int32_t a, int32_t b, float part, const float *w,
                                                   uint32_t factors)
{
    float x, y;
    uint32_t two, r;

    if (!K) { /* both products are exact, so that this is */
        x = __fmaf_rn(__int_as_float(a), part, -Q4_MAGIC_FLOAT * part);
        y = __fmaf_rn(__int_as_float(b), part, -Q4_MAGIC_FLOAT * part);
        return element_pack<D>(x, y) ^ (factors & 0x80008000u);
    }
    x = __fmaf_rn(q4_float(a), part, w[0]);
    y = __fmaf_rn(q4_float(b), part, w[1]);
    if (D == UCM_ENCODING_BF16) { /* no denormal: rounding before or after is the same */
        two = element_pack<D>(x, y);
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(r)
            : "r"(two), "r"(factors), "r"(0x80008000u));
        return r;
    }
    float2 f = element_pair<D>(factors);

    x = fminf(fmaxf(x * f.x, -65504.0f), 65504.0f);
    y = fminf(fmaxf(y * f.y, -65504.0f), 65504.0f);
    return element_pack<D>(x, y);
}

template <uint32_t D> static __device__ __forceinline__ float q4_factor(uint32_t two, uint32_t half)
{
    float2 f = element_pair<D>(two);

    return half ? f.y : f.x;
}

/* The factors of two channels each, of four words. */
template <uint32_t D>
static __device__ __forceinline__ void q4_factors(uint32_t factors[4], uint32_t shifts, uint4 signs)
{
    const uint32_t one = D == UCM_ENCODING_BF16 ? 0x3f803f80u : 0x3c003c00u,
                   unit = D == UCM_ENCODING_BF16 ? 0x80u : 0x400u;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        factors[i] = ((shifts >> 8 * i & 0xffu) * 0x1001u & 0x000f000fu) * unit + one;
    factors[0] |= signs.x;
    factors[1] |= signs.y;
    factors[2] |= signs.z;
    factors[3] |= signs.w;
}

/* What tokens 2q and 2q + 1 of one half of the tile have in common with the other half. */
struct q4_factored {
    float w[2][4][2]; /* what the centre adds, before factors: [vector][word][half] */
    uint32_t factors[2][4];
};

/* out: [vector][token]. */
template <uint32_t D, bool K, bool BLOCKS>
static __device__ __forceinline__ void q4_decode_half(uint4 out[2][2], const struct q4_lane &l,
                                                      uint4 codes, const float part[2][2],
                                                      const struct q4_factored &f)
{
    uint32_t b[2][2][2], words[2][2][4];

    q4_operand(b, codes, l.table);
#pragma unroll
    for (uint32_t word = 0; word < 4; word++) {
        int32_t sums[2][4];

        q4_sums<BLOCKS>(sums, l.h, b, word);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            words[i / 2][i % 2][word] =
                q4_pair<D, K>(sums[i / 2][i % 2], sums[i / 2][2 + i % 2], part[i / 2][i % 2],
                              f.w[i / 2][word], f.factors[i / 2][word]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        out[i / 2][i % 2] = make_uint4(words[i / 2][i % 2][0], words[i / 2][i % 2][1],
                                       words[i / 2][i % 2][2], words[i / 2][i % 2][3]);
}

struct q4_rare {
    struct q4_matrix h;
    struct q4_table table;
    struct q4_factored f;
    uint4 codes;
};

/* The same for scales of any kind, as C does it. */
template <uint32_t D, bool K, bool BLOCKS>
static __device__ __noinline__ void q4_decode_rare(uint4 out[2][2], const struct q4_rare &r,
                                                   const float part[2][2])
{
    const struct q4_factored &f = r.f;
    uint32_t b[2][2][2], words[2][2][4];
    int32_t sums[4][2][4];

    q4_operand(b, r.codes, r.table);
#pragma unroll
    for (uint32_t word = 0; word < 4; word++)
        q4_sums<BLOCKS>(sums[word], r.h, b, word);
#pragma unroll 1
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t v = i / 8, t = i / 4 % 2, word = i % 4, two = 0;

        for (uint32_t half = 0; half < 2; half++) {
            float u = q4_float(sums[word][v][2 * half + t]) * part[v][t];

            u = (K ? u + f.w[v][word][half] : u) * q4_factor<D>(f.factors[v][word], half);
            two |= ucm_element_encode(D, u) << 16 * half;
        }
        words[v][t][word] = two;
    }
    for (uint32_t i = 0; i < 4; i++)
        out[i / 2][i % 2] = make_uint4(words[i / 2][i % 2][0], words[i / 2][i % 2][1],
                                       words[i / 2][i % 2][2], words[i / 2][i % 2][3]);
}

/* What the centre adds; all columns of its product are the same. */
template <bool BLOCKS>
static __device__ __forceinline__ void q4_decode_centre(float w[2][4][2], const struct q4_lane &l,
                                                        uint4 codes, const float part[2])
{
    uint32_t b[2][2][2];

    q4_operand(b, codes, l.table);
#pragma unroll
    for (uint32_t word = 0; word < 4; word++) {
        int32_t sums[2][4];

        q4_sums<BLOCKS>(sums, l.h, b, word);
#pragma unroll
        for (uint32_t v = 0; v < 2; v++) {
            w[v][word][0] = q4_float(sums[v][0]) * part[v];
            w[v][word][1] = q4_float(sums[v][2]) * part[v];
        }
    }
}

/* Tokens first and first + 1. */
static __device__ __forceinline__ void q4_write(const uint4 out[2][2], const struct q4_unit &u,
                                                const struct q4_vector at[2], uint32_t first)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t v = i / 2, token = first + i % 2;

        if (at[v].there && token < u.tokens)
            __stcs((uint4 *)(u.raw + 2 * (at[v].element + token * u.row_step)), out[v][i % 2]);
    }
}

template <uint32_t D, bool K, bool BLOCKS>
static __device__ __forceinline__ void
q4_decode(const struct q4_encoded &c, const struct q4_shared *shared, const struct q4_unit &u,
          const struct q4_vector at[2], const struct q4_lane &l)
{
    const float of = __uint_as_float((127 - u.group) << 23);
    struct q4_factored f = {};
    float of_centre[2];
    bool raw = true;

#pragma unroll
    for (uint32_t v = 0; v < 2; v++) {
        q4_factors<D>(f.factors[v], c.shifts[v],
                      shared->signs[at[v].there ? at[v].channel / 8 : 0]);
        of_centre[v] = ucm_bf16_decode(c.centre_scale[v]) * of;
        raw = raw && (!K || q4_raw<D, K>(of_centre[v]));
    }
    if (K)
        q4_decode_centre<BLOCKS>(f.w, l, c.centre, of_centre);
#pragma unroll
    for (uint32_t o = 0; o < 2; o++) {
        float part[2][2];
        bool quick = raw;

        if (8 * o >= u.tokens)
            break;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t v = i / 2, t = i % 2;

            part[v][t] = ucm_bf16_decode(c.scales[v][o][t]) * of;
            if (v == 0 || BLOCKS)
                quick = quick && (q4_raw<D, K>(part[v][t]) || !at[v].there ||
                                  8 * o + 2 * l.q + t >= u.tokens);
        }
        if (__all_sync(ALL, quick)) {
            uint4 out[2][2];

            q4_decode_half<D, K, BLOCKS>(out, l, c.codes[o], part, f);
            q4_write(out, u, at, 8 * o + 2 * l.q);
        } else { /* of copies, since a variable whose address is taken lies in memory */
            const struct q4_rare rare = {l.h, l.table, f, c.codes[o]};
            const float parts[2][2] = {{part[0][0], part[0][1]}, {part[1][0], part[1][1]}};
            uint4 out[2][2];

            q4_decode_rare<D, K, BLOCKS>(out, rare, parts);
            q4_write(out, u, at, 8 * o + 2 * l.q);
        }
    }
}

#endif
