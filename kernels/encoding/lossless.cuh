/* lossless. A warp decodes UCM_ENCODING_TILE_ELEMENTS elements of a tensor and applies the escapes
 * among them. A CTA encodes a whole tensor, because its list of escapes is in the elements' order.
 * In lossless_units.cuh it encodes a part of one. Pages begin at multiples of 16. */
#ifndef UCM_KERNELS_ENCODING_LOSSLESS_CUH
#define UCM_KERNELS_ENCODING_LOSSLESS_CUH

#include "kernels/encoding/rows.cuh"

#define LOSSLESS_BASES 2048u /* kept by a CTA; the others are read back */

/* n / d for n below 2^22 and d up to 2^10. */
struct divisor {
    uint32_t d, m;

    __device__ __forceinline__ explicit divisor(uint32_t by) : d(by), m(0xffffffffu / by + 1)
    {
    }
    __device__ __forceinline__ uint32_t of(uint32_t n) const
    {
        return d == 1 ? n : __umulhi(n, m);
    }
};

struct lossless_tensor {
    uint32_t elements, room, heads, tokens, dim, n_bases;
    bool nhd;
    uint64_t raw, encoded, codes, bases, list, end;
    struct divisor dim_of, inner;

    __device__ __forceinline__ lossless_tensor(const struct ucm_encoding_tensor &s,
                                                uint64_t raw_at, uint64_t encoded_at)
        : elements(s.tokens * s.heads * s.dim), heads(s.heads), tokens(s.tokens), dim(s.dim),
          nhd(s.order == UCM_ENCODING_NHD), raw(raw_at), encoded(encoded_at), dim_of(s.dim),
          inner(s.order == UCM_ENCODING_NHD ? s.heads : s.tokens)
    {
        room = (elements + 127) / 128;
        n_bases = (tokens + UCM_LOSSLESS_TILE - 1) / UCM_LOSSLESS_TILE * heads;
        codes = encoded + aligned16(elements);
        bases = codes + aligned16((elements + 1) / 2);
        list = bases + aligned16(n_bases);
        end = list + aligned16(4 + 4ull * room);
    }
    /* Which base the element with that number has. */
    __device__ __forceinline__ uint32_t base_of(uint32_t element) const
    {
        uint32_t row = dim_of.of(element), outer = inner.of(row), rest = row - outer * inner.d;
        uint32_t head = nhd ? rest : outer, token = nhd ? outer : rest;

        return token / UCM_LOSSLESS_TILE * heads + head;
    }
};

/* ---- decoding ---- */

/* Two elements. Their rests are in the low bytes of the halves of `rest`, their codes likewise;
 * base is in both halves. */
static __device__ __forceinline__ uint32_t lossless_pair(uint32_t rest, uint32_t codes,
                                                         uint32_t base)
{
    uint32_t e = (base + 0x01000100u - codes) & 0x00ff00ffu;
    uint32_t none = (codes + 0x00020002u) & 0x00100010u; /* codes 14 and 15 */

    e &= ~((none << 4) - (none >> 4));
    return (rest & 0x00800080u) << 8 | e << 7 | (rest & 0x007f007fu);
}

static __device__ __forceinline__ uint32_t lossless_codes(uint32_t byte)
{
    return (byte & 0xfu) | (byte & 0xf0u) << 12;
}

static __device__ __forceinline__ uint4 lossless_vector(uint2 rest, uint32_t codes, uint32_t base)
{
    base |= base << 16;
    return make_uint4(
        lossless_pair(__byte_perm(rest.x, 0, 0x4140), lossless_codes(codes), base),
        lossless_pair(__byte_perm(rest.x, 0, 0x4342), lossless_codes(codes >> 8), base),
        lossless_pair(__byte_perm(rest.y, 0, 0x4140), lossless_codes(codes >> 16), base),
        lossless_pair(__byte_perm(rest.y, 0, 0x4342), lossless_codes(codes >> 24), base));
}

/* An element by itself, for vectors that have several bases, or are cut off. */
static __device__ void lossless_element(const struct lossless_tensor &s, uint32_t i)
{
    uint32_t byte = __ldcs((const uint8_t *)s.codes + i / 2),
             rest = __ldcs((const uint8_t *)s.encoded + i);
    uint32_t base = __ldg((const uint8_t *)s.bases + s.base_of(i));
    uint32_t e = ucm_lossless_decode(byte >> 4 * (i % 2) & 15u, base);

    __stcs((uint16_t *)s.raw + i, (uint16_t)ucm_lossless_element(e, rest));
}

/* Applies the list's entries for elements first .. end, which this warp has written, in their
 * order. */
static __device__ __forceinline__ void lossless_apply(const struct lossless_tensor &s,
                                                      uint32_t first, uint32_t end, uint32_t lane)
{
    uint32_t count = __ldg((const uint32_t *)s.list);

    if (count == UCM_LOSSLESS_UNFIT)
        return;
    count = min(count, s.room);
    for (uint32_t i = lane; i < count + lane; i += LANES) {
        uint32_t entry = i < count ? __ldg((const uint32_t *)s.list + 1 + i) : 0, at = entry >> 8;
        bool mine = i < count && at >= first && at < end;
        /* If several are for one element, the last counts. */
        uint32_t same = __match_any_sync(ALL, mine ? at : UINT32_MAX - lane);

        if (mine && lane == 31 - __clz(same))
            __stcs((uint16_t *)s.raw + at,
                   (uint16_t)ucm_lossless_element(entry & 0xffu,
                                                  __ldg((const uint8_t *)s.encoded + at)));
        __syncwarp();
    }
}

static __device__ __forceinline__ void lossless_decode(const struct lossless_tensor &s,
                                                       uint32_t number, uint32_t lane)
{
    const uint32_t unroll = 4;
    uint32_t first = number * UCM_ENCODING_TILE_ELEMENTS, end;

    if (first >= s.elements)
        return;
    end = min(s.elements, first + UCM_ENCODING_TILE_ELEMENTS);
    for (uint32_t at = first + lane * 8; at < end + lane * 8; at += LANES * 8 * unroll) {
        uint2 rest[unroll];
        uint32_t codes[unroll], base[unroll];

#pragma unroll
        for (uint32_t u = 0; u < unroll; u++) {
            uint32_t i = at + u * LANES * 8;

            if (s.dim % 8 == 0 && i < end) {
                rest[u] = __ldcs((const uint2 *)(s.encoded + i));
                codes[u] = __ldcs((const uint32_t *)(s.codes + i / 2));
                base[u] = __ldg((const uint8_t *)s.bases + s.base_of(i));
            }
        }
#pragma unroll
        for (uint32_t u = 0; u < unroll; u++) {
            uint32_t i = at + u * LANES * 8;

            if (s.dim % 8 == 0 && i < end)
                __stcs((uint4 *)(s.raw + 2ull * i), lossless_vector(rest[u], codes[u], base[u]));
            for (uint32_t k = i; s.dim % 8 != 0 && k < min(end, i + 8); k++)
                lossless_element(s, k);
        }
    }
    __syncwarp();
    lossless_apply(s, first, end, lane);
}

/* ---- encoding ---- */

/* The larger exponents, except 255, of two elements each. */
static __device__ __forceinline__ uint32_t lossless_larger(uint32_t most, uint32_t two)
{
    uint32_t e = two >> 7 & 0x00ff00ffu, full = (e + 0x00010001u) & 0x01000100u;

    return __vmaxu2(most, e & ~(full - (full >> 8)));
}

/* The base of a head in a tile of tokens: a warp's work. */
static __device__ __forceinline__ uint32_t lossless_base(const struct lossless_tensor &s,
                                                         uint32_t base, uint32_t lane)
{
    uint32_t tile = base / s.heads, head = base % s.heads, most = 0;
    uint32_t n = min(UCM_LOSSLESS_TILE, s.tokens - tile * UCM_LOSSLESS_TILE);
    uint32_t wide = s.dim % 8 == 0 ? s.dim / 8 : s.dim;
    struct divisor row(wide);

#pragma unroll 8
    for (uint32_t k = lane; k < n * wide; k += LANES) {
        uint32_t t = row.of(k), token = tile * UCM_LOSSLESS_TILE + t;
        uint64_t at =
            (s.nhd ? (uint64_t)token * s.heads + head : (uint64_t)head * s.tokens + token) * wide +
            (k - t * wide);

        if (s.dim % 8 == 0) {
            uint4 x = __ldg((const uint4 *)s.raw + at);

            most = lossless_larger(lossless_larger(most, x.x), x.y);
            most = lossless_larger(lossless_larger(most, x.z), x.w);
        } else {
            most = lossless_larger(most, __ldg((const uint16_t *)s.raw + at));
        }
    }
    return group_max<LANES>(max(most & 0xffffu, most >> 16));
}

#define LOSSLESS_WARPS (UCM_ENCODING_THREADS / LANES)
#define LOSSLESS_FOUND 128u /* escapes that a warp keeps; if there are more, it looks for them
                             * twice */

struct lossless_shared {
    uint8_t bases[LOSSLESS_BASES];
    uint32_t counts[LOSSLESS_WARPS];
    uint32_t found[LOSSLESS_WARPS][LOSSLESS_FOUND];
    uint32_t last;
};

/* Which elements a CTA encodes: of a whole tensor. */
struct lossless_all {
    const struct lossless_tensor &s;
    const struct lossless_shared *shared;
    uint32_t first, end;   /* elements */
    uint32_t entry, room;  /* where their entries begin in the list, and how many there may be */

    __device__ __forceinline__ lossless_all(const struct lossless_tensor &of,
                                            const struct lossless_shared *kept)
        : s(of), shared(kept), first(0), end(of.elements), entry(0), room(of.room)
    {
    }
    __device__ __forceinline__ uint32_t base_at(uint32_t element) const
    {
        uint32_t number = s.base_of(element);

        return number < LOSSLESS_BASES ? shared->bases[number]
                                       : *((const volatile uint8_t *)s.bases + number);
    }
};

/* Two elements' codes in the low bits of the halves; base is in both halves. If one is an escape,
 * it adds a number that is not 0 to *escapes. */
static __device__ __forceinline__ uint32_t lossless_code_pair(uint32_t two, uint32_t base,
                                                              uint32_t *escapes)
{
    uint32_t e = two >> 7 & 0x00ff00ffu, below, far, some;

    below = __vminu2((base + 0x01000100u - e) ^ 0x01000100u, 0x000e000eu); /* past base: 256 up */
    some = (e + 0x00ff00ffu) & 0x01000100u; /* exponents except 0 */
    some -= some >> 8;
    far = (below + 0x00020002u) & 0x00100010u & some;
    *escapes |= far;
    return ((below + (far >> 4)) & some) | (0x000e000eu & ~some);
}

/* Which of eight elements escape. */
template <class PART>
static __device__ __forceinline__ uint32_t lossless_escapes(const PART &part, uint32_t i, uint4 x)
{
    const uint32_t two[4] = {x.x, x.y, x.z, x.w};
    uint32_t escapes = 0;

#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
        if (i + k < part.end)
            escapes |= (uint32_t)(ucm_lossless_code(
                                      ucm_lossless_exponent(two[k / 2] >> k % 2 * 16 & 0xffffu),
                                      part.base_at(i + k)) == UCM_LOSSLESS_ESCAPE)
                       << k;
    return escapes;
}

/* Eight elements' rests and codes; returns which of them escape. */
template <class PART>
static __device__ __forceinline__ uint32_t lossless_encode(const PART &part, uint32_t i, uint4 x,
                                                           uint2 *rest, uint32_t *codes)
{
    const struct lossless_tensor &s = part.s;
    const uint32_t two[4] = {x.x, x.y, x.z, x.w};
    uint32_t escapes = 0;

    *rest = make_uint2(0, 0);
    *codes = 0;
    if (s.dim % 8 == 0) {
        uint32_t base = part.base_at(i) * 0x10001u, r[4];

#pragma unroll
        for (int k = 3; k >= 0; k--) {
            uint32_t pair = lossless_code_pair(two[k], base, &escapes);

            *codes = *codes << 8 | (pair & 15u) | (pair >> 12 & 0xf0u);
            r[k] = (two[k] >> 8 & 0x00800080u) | (two[k] & 0x007f007fu);
        }
        *rest = make_uint2(__byte_perm(r[0], r[1], 0x6420), __byte_perm(r[2], r[3], 0x6420));
        return escapes ? lossless_escapes(part, i, x) : 0;
    }
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        uint32_t h = two[k / 2] >> k % 2 * 16 & 0xffffu, code;

        if (i + k >= s.elements)
            break;
        code = ucm_lossless_code(ucm_lossless_exponent(h), part.base_at(i + k));
        (k < 4 ? rest->x : rest->y) |= ucm_lossless_rest(h) << k % 4 * 8;
        *codes |= code << 4 * k;
        escapes |= (uint32_t)(code == UCM_LOSSLESS_ESCAPE) << k;
    }
    return escapes;
}

/* Appends the escapes of the warp's lanes, in their order, to a list that has `count` and space for
 * `room`. Returns how many there are then. */
static __device__ __forceinline__ uint32_t lossless_append(uint32_t *list, uint32_t room,
                                                           uint32_t count, uint32_t i, uint4 x,
                                                           uint32_t escapes, uint32_t lane)
{
    const uint32_t two[4] = {x.x, x.y, x.z, x.w};
    uint32_t sum = __popc(escapes), before = sum;

#pragma unroll
    for (uint32_t d = 1; d < LANES; d *= 2) {
        uint32_t other = __shfl_up_sync(ALL, before, d);

        before += lane >= d ? other : 0;
    }
    sum = count + before - sum;
#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
        if (escapes >> k & 1) {
            if (sum < room)
                list[sum] = (i + k) << 8 |
                            ucm_lossless_exponent(two[k / 2] >> k % 2 * 16 & 0xffffu);
            sum++;
        }
    return count + __shfl_sync(ALL, before, LANES - 1);
}

static __device__ __forceinline__ uint4 lossless_load(const struct lossless_tensor &s, uint32_t i)
{
    uint32_t two[4] = {0, 0, 0, 0};

    if (i + 8 <= s.elements)
        return __ldcs((const uint4 *)(s.raw + 2ull * i));
    for (uint32_t k = 0; k < 8; k++)
        if (i + k < s.elements)
            two[k / 2] |= (uint32_t)__ldcs((const uint16_t *)s.raw + i + k) << k % 2 * 16;
    return make_uint4(two[0], two[1], two[2], two[3]);
}

static __device__ __forceinline__ void lossless_zero(uint64_t from, uint64_t to)
{
    for (uint64_t at = from + threadIdx.x; at < to; at += blockDim.x)
        __stcs((uint8_t *)at, (uint8_t)0);
}

/* Zeroes what lies between the arrays of a tensor that fits, and after its entries. Vectors were
 * written whole. */
static __device__ __forceinline__ void lossless_pad(const struct lossless_tensor &s, uint32_t count)
{
    lossless_zero(s.encoded + (s.elements + 7ull) / 8 * 8, s.codes);
    lossless_zero(s.codes + (s.elements + 7ull) / 8 * 4, s.bases);
    lossless_zero(s.bases + s.n_bases, s.list);
    for (uint64_t at = s.list + 4 + 4ull * (count + threadIdx.x); at < s.end; at += 4 * blockDim.x)
        __stcs((uint32_t *)at, 0u);
}

/* Elements first .. end of the part: a warp's work. Writes their rests and codes, unless it only
 * looks for escapes; returns how many there are. */
template <class PART>
static __device__ __forceinline__ uint32_t lossless_encode_range(const PART &part, uint32_t first,
                                                                 uint32_t end, uint32_t lane,
                                                                 uint32_t *list, uint32_t room,
                                                                 bool write)
{
    const struct lossless_tensor &s = part.s;
    const uint32_t unroll = 4;
    uint32_t count = 0;

    for (; first < end; first += 8 * LANES * unroll) {
        uint4 x[unroll];

#pragma unroll
        for (uint32_t u = 0; u < unroll; u++)
            x[u] = lossless_load(s, first + (u * LANES + lane) * 8);
#pragma unroll
        for (uint32_t u = 0; u < unroll; u++) {
            uint32_t i = first + (u * LANES + lane) * 8, codes, escapes = 0;
            uint2 rest;

            if (i < end) {
                escapes = lossless_encode(part, i, x[u], &rest, &codes);
                if (write) {
                    __stcs((uint2 *)(s.encoded + i), rest);
                    __stcs((uint32_t *)(s.codes + i / 2), codes);
                }
            }
            if (__any_sync(ALL, escapes))
                count = lossless_append(list, room, count, i, x[u], escapes, lane);
        }
    }
    return count;
}

/* Each warp has `count` escapes and has kept the first of them. They go to their places in the
 * part's list, if that has space for all. Returns the warp's place there; *total receives the sum
 * of all warps. */
template <class PART>
static __device__ __forceinline__ uint32_t *lossless_merge(const PART &part,
                                                           struct lossless_shared *shared,
                                                           uint32_t warp, uint32_t lane,
                                                           uint32_t count, uint32_t *total)
{
    uint32_t *list = (uint32_t *)part.s.list + 1 + part.entry;

    if (lane == 0)
        shared->counts[warp] = count;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < LOSSLESS_WARPS; w++) {
        list += w < warp ? shared->counts[w] : 0;
        *total += shared->counts[w];
    }
    for (uint32_t i = lane; *total <= part.room && i < min(count, LOSSLESS_FOUND); i += LANES)
        __stcs(list + i, shared->found[warp][i]);
    return list;
}

/* Writes the part's rests, codes and entries. Returns how many escapes there are; if they exceed
 * the space in the list, no entry was written. By the whole CTA, which knows the bases. Each warp
 * has a run of elements, so that its escapes follow those of the warp before. */
template <class PART>
static __device__ __forceinline__ uint32_t lossless_encode_part(const PART &part,
                                                                struct lossless_shared *shared)
{
    const uint32_t step = 8 * LANES;
    uint32_t lane = threadIdx.x % LANES, warp = __shfl_sync(ALL, threadIdx.x / LANES, 0);
    uint32_t n = part.end - part.first;
    uint32_t run = (n + LOSSLESS_WARPS * step - 1) / (LOSSLESS_WARPS * step) * step;
    uint32_t first = part.first + min(warp * run, n), end = min(first + run, part.end);
    uint32_t *list = shared->found[warp], room = LOSSLESS_FOUND, total = 0;

    for (bool write = true;; write = false) {
        uint32_t count = lossless_encode_range(part, first, end, lane, list, room, write);

        if (!write)
            break;
        list = lossless_merge(part, shared, warp, lane, count, &total);
        room = count;
        if (total > part.room || count <= LOSSLESS_FOUND)
            break;
    }
    return total;
}

/* The whole CTA. */
static __device__ __forceinline__ void lossless_encode_tensor(const struct lossless_tensor &s,
                                                               struct lossless_shared *shared)
{
    uint32_t lane = threadIdx.x % LANES, count;

    __syncthreads(); /* the tensor before is done with the shared bases */
    for (uint32_t b = threadIdx.x / LANES; b < s.n_bases; b += UCM_ENCODING_THREADS / LANES) {
        uint32_t base = lossless_base(s, b, lane);

        if (lane == 0) {
            *((volatile uint8_t *)s.bases + b) = (uint8_t)base;
            if (b < LOSSLESS_BASES)
                shared->bases[b] = (uint8_t)base;
        }
    }
    __syncthreads();
    count = lossless_encode_part(lossless_all(s, shared), shared);
    if (count > s.room) {
        __syncthreads(); /* after what others have written of it */
        lossless_zero(s.encoded, s.end);
        __syncthreads();
    } else {
        lossless_pad(s, count);
    }
    if (threadIdx.x == 0)
        __stcs((uint32_t *)s.list, count > s.room ? UCM_LOSSLESS_UNFIT : count);
}

#endif
