/* One thread block's tiles: their way to shared memory, and a warp's softmax over every fourth of them.
 *
 * T is the type of queries and results, KV that of keys and values: T, or E4M3. E4M3 is multiplied as float16, which
 * holds all of its values; queries are then float16, too, times a power of two for each row, so that they keep bfloat16's
 * range.
 *
 * Rows lie in shared memory as they lie in a block, one behind the other: then a whole tile of K is one copy, and memory is
 * read in pieces of kilobytes. (Rows exchanged or set apart, which ldmatrix wants, would have to be copied one by one, or 16
 * bytes at a time: 3.8 and 3.5 TB/s in place of 4.0 on an H200.) A lane reads 16 bytes of a row at once, and
 * the order of channels in a product, which is free, is that in which they come. */
#ifndef UCM_KERNELS_ATTEND_TILES_CUH
#define UCM_KERNELS_ATTEND_TILES_CUH

#include "kernels/attend/attend_list.cuh"

#define RULE_PSA 1u /* enum ucm_stop_rule */

extern __shared__ uint4 shared[];

struct e4m3 {
    uint8_t bits;
};

template <typename T, typename KV> struct product { /* of queries and keys, of weights and values */
    typedef T type;
    static constexpr bool scaled = false; /* queries are T as they are */
};
template <> struct product<__half, e4m3> {
    typedef __half type;
    static constexpr bool scaled = false;
};
template <> struct product<__nv_bfloat16, e4m3> {
    typedef __half type;
    static constexpr bool scaled = true;
};

/* Of a row of K or V. In a product over channels a lane has every fourth piece of 16 bytes of K, and the 8 rows of a result
 * have pieces of V: of 16 bytes, or less in short rows. */
template <typename KV, int D> struct row_of {
    static constexpr uint32_t bytes = D * sizeof(KV), tile = TILE * bytes;
    static constexpr uint32_t k_pieces = bytes / 64, k_channels = 16 / sizeof(KV);
    static constexpr uint32_t v_piece = bytes < 128 ? bytes / 8 : 16, v_pieces = bytes / 8 / v_piece;
    static constexpr uint32_t v_channels = v_piece / sizeof(KV);
};

/* ---- the way to shared memory ---- */

struct tile_rows {
    const uint8_t *k, *v;
    uint64_t k_stride, v_stride;
    uint32_t valid;
};

static __device__ __forceinline__ const uint8_t *plane_at(const struct ucm_attend_cuda_plane &p, uint64_t block,
                                                         uint32_t tile)
{
    return (const uint8_t *)(block + p.offset + tile * TILE * p.token_stride + blockIdx.y * p.head_stride);
}

static __device__ __forceinline__ struct tile_rows rows_at(args_t a, uint64_t where)
{
    const struct ucm_attend_cuda_memory &m = where & IS_PAGE ? a.pages : a.pool;
    uint32_t tile = where % 16;
    uint64_t block = (where & ((UINT64_C(1) << VALID_SHIFT) - 1)) - tile;

    return tile_rows{plane_at(m.k, block, tile), plane_at(m.v, block, tile), m.k.token_stride, m.v.token_stride,
                     valid_of(where)};
}

/* A warp copies the tile's K, then its V, to `to`. */
template <typename KV, int D>
static __device__ __forceinline__ void tile_load(args_t a, uint64_t where, uint8_t *to, struct arrivals &on_way,
                                                 uint32_t stage)
{
    constexpr uint32_t bytes = row_of<KV, D>::bytes;
    struct tile_rows r = rows_at(a, where);

    arrivals_expect(on_way, stage, 2 * r.valid * bytes);
    copy_rows<bytes, TILE>(to, r.k, r.k_stride, r.valid, 0, on_way, stage);
    copy_rows<bytes, TILE>(to + row_of<KV, D>::tile, r.v, r.v_stride, r.valid, 16, on_way, stage);
    arrivals_commit();
}

/* Behind a wait: rows that don't count become zeros, whatever lay there. */
template <typename KV, int D>
static __device__ __forceinline__ void tile_pad(uint8_t *tile, uint32_t valid)
{
    constexpr uint32_t bytes = row_of<KV, D>::bytes;
    uint4 *k = (uint4 *)(tile + valid * bytes), *v = (uint4 *)(tile + row_of<KV, D>::tile + valid * bytes);

    for (uint32_t i = threadIdx.x % 32; i < (TILE - valid) * bytes / 16; i += 32)
        k[i] = v[i] = make_uint4(0, 0, 0, 0);
    stores_before_copies();
    __syncwarp();
}

/* ---- one warp ---- */

/* Rows lane / 4 (0) and 8 more (1). sum is of this lane's tokens. */
template <int D> struct warp_state {
    float top[2], sum[2], lightest[2];
    uint32_t key_max; /* bits of elements of KV without signs */
    float out[D / 8][4];
};

template <typename T, int D> struct warp_query {
    uint32_t q[D / 16][4];
    float scale[2]; /* of logits, times log2(e) */
};

template <int D>
static __device__ __forceinline__ void warp_begin(struct warp_state<D> &s)
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        s.top[r] = -INFINITY;
        s.sum[r] = 0.0f;
        s.lightest[r] = INFINITY;
    }
    s.key_max = 0;
#pragma unroll
    for (uint32_t i = 0; i < D / 8; i++)
        s.out[i][0] = s.out[i][1] = s.out[i][2] = s.out[i][3] = 0.0f;
}

/* Over the four lanes that have a row. */
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* For a row of queries that are at most `most`: what makes them at most 2^15, and what brings logits back. Infinities and
 * NaN stay. */
static __device__ __forceinline__ float query_factor(float most, float *back)
{
    uint32_t e = __float_as_uint(most) >> 23;

    e = e < 15 ? 15 : e == 255 ? 141 : e;
    *back = __uint_as_float((e - 14) << 23);
    return __uint_as_float((268 - e) << 23);
}

template <typename T, int D>
static __device__ __forceinline__ void scale_query(struct warp_query<T, D> &query)
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float most = 0.0f, factor, back;

#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            uint32_t x = query.q[i / 2][i % 2 * 2 + r];

            most = fmaxf(most, fmaxf(fabsf(element<T>::widen(x & 0xffff)), fabsf(element<T>::widen(x >> 16))));
        }
        factor = query_factor(quad_max(most), &back);
        query.scale[r] *= back;
#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            uint32_t *x = &query.q[i / 2][i % 2 * 2 + r];

            *x = element<__half>::pair(element<T>::widen(*x & 0xffff) * factor, element<T>::widen(*x >> 16) * factor);
        }
    }
}

/* Product i is over 16 channels: of each of the four lanes that have a row, four of the piece of K that it reads. */
template <typename T, typename KV, int D>
static __device__ __forceinline__ void load_query(args_t a, struct warp_query<T, D> &query)
{
    const T *q = (const T *)a.q + blockIdx.z * a.q_stride + (uint64_t)blockIdx.y * a.group * D;
    constexpr uint32_t channels = row_of<KV, D>::k_channels;
    uint32_t row = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;

#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t r = row + j % 2 * 8, piece = 4 * i / channels * 4 + lane;

            query.q[i][j] =
                r < a.group ? *(const uint32_t *)(q + r * D + piece * channels + 4 * i % channels + j / 2 * 2) : 0;
        }
    query.scale[0] = query.scale[1] = a.scale_log2;
    if constexpr (product<T, KV>::scaled)
        scale_query<T, D>(query);
}

/* Logits of the tile's 16 tokens: [8 tokens of them][row 0: two, row 1: two]. */
template <typename T, typename KV, int D>
static __device__ __forceinline__ void logits(const uint32_t query[D / 16][4], const uint8_t *k, float s[2][4])
{
    typedef element<typename product<T, KV>::type> e;
    constexpr uint32_t bytes = row_of<KV, D>::bytes, products = row_of<KV, D>::k_channels / 4;
    uint32_t lane = threadIdx.x % 32;

    k += lane / 4 * bytes + lane % 4 * 16;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        s[0][j] = s[1][j] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::k_pieces; i++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint4 x = *(const uint4 *)(k + half * 8 * bytes + i * 64);

            if constexpr (sizeof(KV) == 2) {
                e::multiply(s[half], query[products * i], x.x, x.y);
                e::multiply(s[half], query[products * i + 1], x.z, x.w);
            } else {
                e::multiply(s[half], query[products * i], e4m3_pair(x.x), e4m3_pair(x.x >> 16));
                e::multiply(s[half], query[products * i + 1], e4m3_pair(x.y), e4m3_pair(x.y >> 16));
                e::multiply(s[half], query[products * i + 2], e4m3_pair(x.z), e4m3_pair(x.z >> 16));
                e::multiply(s[half], query[products * i + 3], e4m3_pair(x.w), e4m3_pair(x.w >> 16));
            }
        }
}

/* Turns logits into weights, and takes what was summed so far to the new maximum. light: the tile is a chosen
 * block, and PSA's rule asks what it weighs. */
template <int D>
static __device__ __forceinline__ void weigh(struct warp_state<D> &st, float s[2][4], const float scale[2], uint32_t valid,
                                             bool light)
{
    uint32_t col = threadIdx.x % 4 * 2;

#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float top = st.top[r], keep, base, sum = 0.0f;

#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float *x = &s[j / 2][2 * r + j % 2];

            *x = col + j % 2 + j / 2 * 8 < valid ? *x * scale[r] : -INFINITY;
            top = fmaxf(top, *x);
        }
        top = quad_max(top);
        base = top == -INFINITY ? 0.0f : top;
        keep = exp2f(st.top[r] - base);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float *x = &s[j / 2][2 * r + j % 2];

            *x = exp2f(*x - base);
            sum += *x;
        }
        if (light)
            st.lightest[r] = fminf(st.lightest[r], base + log2f(quad_sum(sum)));
        st.sum[r] = st.sum[r] * keep + sum;
        st.top[r] = top;
#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            st.out[i][2 * r] *= keep;
            st.out[i][2 * r + 1] *= keep;
        }
    }
}

/* A word of each of four tokens: its channels' products. */
template <typename T, typename KV>
static __device__ __forceinline__ void add_word(float (*out)[4], const uint32_t p[4], const uint32_t x[4])
{
    typedef element<typename product<T, KV>::type> e;

    if constexpr (sizeof(KV) == 2) {
        e::multiply(out[0], p, __byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410));
        e::multiply(out[1], p, __byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632));
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t low = __byte_perm(x[0], x[1], i == 0 ? 0x5140 : 0x7362);
            uint32_t high = __byte_perm(x[2], x[3], i == 0 ? 0x5140 : 0x7362);

            e::multiply(out[2 * i], p, e4m3_pair(low), e4m3_pair(high));
            e::multiply(out[2 * i + 1], p, e4m3_pair(low >> 16), e4m3_pair(high >> 16));
        }
    }
}

/* Result n of a piece is over the n-th channels of the pieces that the eight groups of four lanes read. */
template <typename T, typename KV, int D>
static __device__ __forceinline__ void add_values(struct warp_state<D> &st, const float s[2][4], const uint8_t *v)
{
    typedef element<typename product<T, KV>::type> e;
    constexpr uint32_t bytes = row_of<KV, D>::bytes, piece = row_of<KV, D>::v_piece, words = piece / 4;
    uint32_t lane = threadIdx.x % 32;
    uint32_t p[4] = {e::pair(s[0][0], s[0][1]), e::pair(s[0][2], s[0][3]), e::pair(s[1][0], s[1][1]),
                     e::pair(s[1][2], s[1][3])};

    v += lane % 4 * 2 * bytes + lane / 4 * piece;
#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::v_pieces; i++) {
        uint32_t x[4][words]; /* of tokens 2n, 2n + 1, 2n + 8, 2n + 9 */

#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            load_words<words>(x[j], v + (j / 2 * 8 + j % 2) * bytes + i * 8 * piece);
#pragma unroll
        for (uint32_t w = 0; w < words; w++) {
            uint32_t four[4] = {x[0][w], x[1][w], x[2][w], x[3][w]};

            add_word<T, KV>(st.out + i * row_of<KV, D>::v_channels + w * (4 / sizeof(KV)), p, four);
        }
    }
}

/* Without its sign an element of any type orders as an integer; NaN is above all. */
template <typename KV>
static __device__ __forceinline__ uint32_t larger_keys(uint32_t x, uint32_t y)
{
    return sizeof(KV) == 2 ? __vmaxu2(x & 0x7fff7fffu, y & 0x7fff7fffu) : __vmaxu4(x & 0x7f7f7f7fu, y & 0x7f7f7f7fu);
}

template <typename KV, int D>
static __device__ __forceinline__ void measure_keys(struct warp_state<D> &st, const uint8_t *k)
{
#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::tile / 16 / 32; i++) {
        uint4 x = ((const uint4 *)k)[i * 32 + threadIdx.x % 32];

        st.key_max = larger_keys<KV>(st.key_max, larger_keys<KV>(larger_keys<KV>(x.x, x.y), larger_keys<KV>(x.z, x.w)));
    }
}

/* Every WARPS-th of n tiles, from the warp's number on; the first `chosen` are of chosen blocks. A tile on its way to
 * its slot is waited for in its turn, behind the arithmetic of the one before it. */
template <typename T, typename KV, int D>
static __device__ __forceinline__ void attend_tiles(args_t a, uint64_t *where, uint32_t n, uint32_t chosen,
                                                    struct warp_state<D> &st)
{
    constexpr uint32_t bytes = 2 * row_of<KV, D>::tile;
    uint32_t warp = threadIdx.x / 32;
    uint8_t *tiles = (uint8_t *)shared + warp * STAGES * bytes;
    bool light = a.stop.rule == RULE_PSA, certify = a.stop.certify != 0;
    struct warp_query<T, D> query;
    struct arrivals on_way;
    float s[2][4];

    arrivals_begin(on_way);
    if (warp < n && where[warp] & IS_WANTED)
        tile_await(a, &where[warp]);
    if (warp < n)
        tile_load<KV, D>(a, where[warp], tiles, on_way, 0);
    load_query<T, KV, D>(a, query);
    for (uint32_t tile = warp, at = 0; tile < n; tile += WARPS, at ^= 1) {
        uint32_t next = tile + WARPS, valid = valid_of(where[tile]);
        bool wanted = next < n && where[next] & IS_WANTED, ahead = next < n && !wanted;
        uint8_t *k = tiles + at * bytes;

        if (ahead)
            tile_load<KV, D>(a, where[next], tiles + (at ^ 1) * bytes, on_way, at ^ 1);
        arrivals_wait(on_way, at, ahead);
        if (valid < TILE)
            tile_pad<KV, D>(k, valid);
        logits<T, KV, D>(query.q, k, s);
        if (certify)
            measure_keys<KV, D>(st, k);
        weigh<D>(st, s, query.scale, valid, light && tile < chosen);
        add_values<T, KV, D>(st, s, k + row_of<KV, D>::tile);
        __syncwarp();
        if (wanted) {
            tile_await(a, &where[next]);
            tile_load<KV, D>(a, where[next], tiles + (at ^ 1) * bytes, on_way, at ^ 1);
        }
    }
}

#endif
