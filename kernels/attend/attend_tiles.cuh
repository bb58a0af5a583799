/* One thread block's tiles: their way to shared memory, and a warp's softmax over every fourth of
 * them.
 *
 * T is the type of queries and results, KV that of keys and values: T, or E4M3. E4M3 is multiplied
 * as float16, which holds all of its values. Then queries are float16, too, times a power of two
 * for each row, so that they keep bfloat16's range.
 *
 * Four rows lie in shared memory as they lie in a block, one after the other. So a tile of K is
 * four copies, and memory is read in pieces of a kilobyte. (ldmatrix needs rows that are exchanged
 * or set apart; these would have to be copied one by one, or 16 bytes at a time. By copies alone,
 * without arithmetic, an H200 did 4.0 TB/s in pieces of 4 KiB, 3.8 row by row, 3.5 by 16 bytes.) A
 * lane reads 16 bytes of a row at once. The order of channels in a product is free: it is that in
 * which they come. The order of a tile's tokens is free, too: rows that are read at once are of
 * different fours. Fours are set apart by 32 bytes, so there are no bank conflicts. */
#ifndef UCM_KERNELS_ATTEND_TILES_CUH
#define UCM_KERNELS_ATTEND_TILES_CUH

#include "kernels/attend/attend_list.cuh"
#include "kernels/encoding/arith.h"

#define THREADS UCM_ATTEND_CUDA_THREADS
#define WARPS UCM_ATTEND_CUDA_WARPS
#define ROWS UCM_ATTEND_CUDA_ROWS
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

/* Constants of a row of K or V. In a product over channels a lane has every fourth piece of 16
 * bytes of K. The 8 rows of a result have pieces of V, of 16 bytes, or less in short rows. */
template <typename KV, int D> struct row_of {
    static constexpr uint32_t bytes = D * sizeof(KV), tile = ROWS_BYTES(bytes);
    static constexpr uint32_t k_pieces = bytes / 64, k_channels = 16 / sizeof(KV);
    static constexpr uint32_t v_piece = bytes < 128 ? bytes / 8 : 16, v_pieces = bytes / 8 / v_piece;
    static constexpr uint32_t v_channels = v_piece / sizeof(KV);
    static constexpr bool scales = sizeof(KV) == 1; /* it may have one */
    static constexpr uint32_t tile_bytes = 2 * tile + (scales ? SCALES_BYTES : 0);
};

/* ---- the way to shared memory ---- */

static __device__ __forceinline__ const uint8_t *plane_at(const struct ucm_attend_cuda_plane &p, uint64_t block,
                                                         uint32_t tile, uint32_t head)
{
    return (const uint8_t *)(block + p.offset + tile * TILE * p.token_stride + head * p.head_stride);
}

static __device__ __forceinline__ struct tile_rows rows_at(args_t a, uint64_t where)
{
    const struct ucm_attend_cuda_memory &m = where & IS_PAGE ? a.pages : a.pool;
    uint32_t tile = where % 16;
    uint64_t block = (where & ((UINT64_C(1) << VALID_SHIFT) - 1)) - tile;

    const uint8_t *scales = m.scales && block ? (const uint8_t *)(block + m.scales + tile * TILE) : NULL;

    return tile_rows{plane_at(m.k, block, tile, head_of(a)), plane_at(m.v, block, tile, head_of(a)), m.k.token_stride,
                     m.v.token_stride, valid_of(where), scales, scales + a.tokens};
}

template <uint32_t BYTES>
static __device__ __forceinline__ bool rows_are_apart(args_t a, uint64_t where)
{
    const struct ucm_attend_cuda_memory &m = where & IS_PAGE ? a.pages : a.pool;

    return m.k.token_stride != BYTES || m.v.token_stride != BYTES;
}

/* The row of token n of a tile's products. Tokens n and n + 1 are of different fours; so are n, n +
 * 2, n + 4 and n + 6. */
static __device__ __forceinline__ uint32_t row_of_token(uint32_t n)
{
    return (n / 2 + n % 2 * 2) % 4 * 4 + n % 2 + n / 8 * 2;
}

/* After a wait: rows that don't count become zeros, whatever lay there. */
template <typename KV, int D>
static __device__ __forceinline__ void tile_pad(uint8_t *tile, uint32_t valid)
{
    constexpr uint32_t bytes = row_of<KV, D>::bytes;

    for (uint32_t i = valid * bytes + threadIdx.x % 32 * 16; i < TILE * bytes; i += 512) {
        uint8_t *at = tile + row_offset<bytes>(i / bytes) + i % bytes;

        *(uint4 *)at = *(uint4 *)(at + row_of<KV, D>::tile) = make_uint4(0, 0, 0, 0);
    }
    stores_before_copies();
    __syncwarp();
}

/* ---- one warp ---- Queries are in octets of rows, O of them: one for up to 8 query heads, or two.
 * Of each octet a lane has rows 2 * (lane % 4) and the next. Of their logits it has tokens lane / 4
 * and lane / 4 + 8 of the products; of their results, channels. */

template <int D, int O> struct warp_state {
    float top[O][2], sum[O][2], lightest[O][2]; /* sum is of this lane's tokens */
    uint32_t key_max;                           /* bits of elements of KV without signs */
    uint32_t k_scale, v_scale;                  /* the largest so far, as ucm_fp8_power takes it */
    float out[O][D / 16][4]; /* channel: row, row; the next channel: row, row; over v_scale's power */
};

template <int D, int O> struct warp_query {
    uint32_t q[O][D / 16][2];
    float scale[O][2]; /* of logits, times log2(e) */
};

template <int D, int O>
static __device__ __forceinline__ void warp_begin(struct warp_state<D, O> &s, bool scales)
{
    s.key_max = 0;
    s.k_scale = s.v_scale = scales ? 0 : 127; /* 2^0 */
#pragma unroll
    for (uint32_t o = 0; o < O; o++) {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            s.top[o][r] = -INFINITY;
            s.sum[o][r] = 0.0f;
            s.lightest[o][r] = INFINITY;
        }
#pragma unroll
        for (uint32_t i = 0; i < D / 16; i++)
            s.out[o][i][0] = s.out[o][i][1] = s.out[o][i][2] = s.out[o][i][3] = 0.0f;
    }
}

/* Reduces over the lanes that have a row's tokens. */
static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    x += __shfl_xor_sync(ALL_LANES, x, 8);
    return x + __shfl_xor_sync(ALL_LANES, x, 16);
}

/* For a row of queries that are at most `most`: the factor that makes them at most 2^15, and the
 * one that scales logits back. Infinities and NaN stay. */
static __device__ __forceinline__ float query_factor(float most, float *back)
{
    uint32_t e = __float_as_uint(most) >> 23;

    e = e < 15 ? 15 : e == 255 ? 141 : e;
    *back = __uint_as_float((e - 14) << 23);
    return __uint_as_float((268 - e) << 23);
}

/* Logits of an octet: a lane has row lane / 4 of the queries, and needs scales of the rows of its
 * logits. */
template <typename T, int D>
static __device__ __forceinline__ void scale_query(uint32_t q[D / 16][2], float scale[2])
{
    float most = 0.0f, factor, back;

#pragma unroll
    for (uint32_t i = 0; i < D / 8; i++) {
        uint32_t x = q[i / 2][i % 2];

        most = fmaxf(most, fmaxf(fabsf(element<T>::widen(x & 0xffff)), fabsf(element<T>::widen(x >> 16))));
    }
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    factor = query_factor(most, &back);
#pragma unroll
    for (uint32_t i = 0; i < D / 8; i++) {
        uint32_t *x = &q[i / 2][i % 2];

        *x = element<__half>::pair(element<T>::widen(*x & 0xffff) * factor, element<T>::widen(*x >> 16) * factor);
    }
#pragma unroll
    for (uint32_t r = 0; r < 2; r++)
        scale[r] *= __shfl_sync(ALL_LANES, back, (threadIdx.x % 4 * 2 + r) * 4);
}

/* Product i is over 16 channels: of each of the four lanes that have a row, four of the piece of K
 * that it reads. */
template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void load_query(args_t a, struct warp_query<D, O> &query)
{
    const T *q = (const T *)a.q + blockIdx.z * a.q_stride + (uint64_t)blockIdx.y * a.group * D;
    constexpr uint32_t channels = row_of<KV, D>::k_channels;

#pragma unroll
    for (uint32_t o = 0; o < O; o++) {
        uint32_t row = o * 8 + threadIdx.x % 32 / 4;

#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            uint32_t piece = 4 * (i / 2) / channels * 4 + threadIdx.x % 4;
            uint32_t channel = piece * channels + 4 * (i / 2) % channels + i % 2 * 2;

            query.q[o][i / 2][i % 2] = row < a.group ? *(const uint32_t *)(q + row * D + channel) : 0;
        }
        query.scale[o][0] = query.scale[o][1] = a.scale_log2;
        if constexpr (product<T, KV>::scaled)
            scale_query<T, D>(query.q[o], query.scale[o]);
    }
}

/* One piece of 16 bytes of token lane / 4 (x) of the products, and of the token 8 after it.
 * Products alternate between two sums, so that none waits for the one before it. */
template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void add_keys(float s[O][2][4], const struct warp_query<D, O> &query, uint32_t first,
                                                const uint32_t x[4], const uint32_t y[4])
{
    typedef element<typename product<T, KV>::type> e;
    constexpr uint32_t products = row_of<KV, D>::k_channels / 4;

#pragma unroll
    for (uint32_t i = 0; i < products; i++) {
        uint32_t k[4];

        if constexpr (sizeof(KV) == 2) {
            k[0] = x[2 * i];
            k[1] = y[2 * i];
            k[2] = x[2 * i + 1];
            k[3] = y[2 * i + 1];
        } else {
            k[0] = e4m3_pair(x[i]);
            k[1] = e4m3_pair(y[i]);
            k[2] = e4m3_pair(x[i] >> 16);
            k[3] = e4m3_pair(y[i] >> 16);
        }
#pragma unroll
        for (uint32_t o = 0; o < O; o++)
            e::multiply(s[o][i % 2], k, query.q[o][first + i][0], query.q[o][first + i][1]);
    }
}

/* Logits of the tile's 16 tokens: token lane / 4: row, row; the token 8 after it: row, row. */
template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void logits(const struct warp_query<D, O> &query, const uint8_t *k, float s[O][4])
{
    constexpr uint32_t bytes = row_of<KV, D>::bytes, products = row_of<KV, D>::k_channels / 4;
    float two[O][2][4] = {};

    k += row_offset<bytes>(row_of_token(threadIdx.x % 32 / 4)) + threadIdx.x % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::k_pieces; i++) {
        uint32_t x[4], y[4];

        load_words<4>(x, k + i * 64);
        load_words<4>(y, k + 2 * bytes + i * 64); /* of the same four */
        add_keys<T, KV, D, O>(two, query, products * i, x, y);
    }
#pragma unroll
    for (uint32_t o = 0; o < O; o++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            s[o][i] = two[o][0][i] + two[o][1][i];
}

/* Turns an octet's logits into weights, and scales the sums so far to the new maximum. light: the
 * tile is of a chosen block, and PSA's rule asks what it weighs. */
template <int D, int O>
static __device__ __forceinline__ void weigh(struct warp_state<D, O> &st, uint32_t o, float s[4], const float scale[2],
                                             uint32_t valid, bool light)
{
    uint32_t row = row_of_token(threadIdx.x % 32 / 4);

#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float top = st.top[o][r], low, high, keep, base;

        low = row < valid ? s[r] * scale[r] : -INFINITY;
        high = row + 2 < valid ? s[2 + r] * scale[r] : -INFINITY;
        top = row_max(fmaxf(top, fmaxf(low, high)));
        base = top == -INFINITY ? 0.0f : top;
        keep = exp2f(st.top[o][r] - base);
        s[r] = low = exp2f(low - base);
        s[2 + r] = high = exp2f(high - base);
        if (light)
            st.lightest[o][r] = fminf(st.lightest[o][r], base + log2f(row_sum(low + high)));
        st.sum[o][r] = st.sum[o][r] * keep + (low + high);
        st.top[o][r] = top;
#pragma unroll
        for (uint32_t i = 0; i < D / 16; i++) {
            st.out[o][i][r] *= keep;
            st.out[o][i][2 + r] *= keep;
        }
    }
}

/* ---- rows with scales: powers of two, which logits and weights are multiplied by ---- */

/* 2^-n */
static __device__ __forceinline__ float power_below(uint32_t n)
{
    return n < 127 ? __uint_as_float((127 - n) << 23) : 0.0f;
}

/* Applies K's scales to a tile's logits, in logits()'s layout. scales: of 16 tokens of K, then of
 * V. */
template <int D, int O>
static __device__ __forceinline__ void scale_logits(struct warp_state<D, O> &st, float s[O][4], const uint8_t *scales)
{
    uint32_t row = row_of_token(threadIdx.x % 32 / 4), low = scales[row], high = scales[row + 2];

    st.k_scale = max(st.k_scale, max(low, high));
#pragma unroll
    for (uint32_t o = 0; o < O; o++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            s[o][i] *= ucm_fp8_power(i < 2 ? low : high);
}

/* Applies V's scales to weights, relative to the largest scale of V so far, so that float16 holds
 * them. A scale of NaN counts as the largest, and stays. */
template <int D, int O>
static __device__ __forceinline__ void scale_weights(struct warp_state<D, O> &st, float s[O][4], const uint8_t *scales)
{
    uint32_t row = TILE + row_of_token(threadIdx.x % 32 / 4), low = scales[row], high = scales[row + 2];
    uint32_t most = __reduce_max_sync(ALL_LANES, max(low, high));

    if (most > st.v_scale) {
        float keep = power_below(most - st.v_scale);

        st.v_scale = most;
#pragma unroll
        for (uint32_t i = 0; i < O * D / 4; i++)
            st.out[i / (D / 4)][i / 4 % (D / 16)][i % 4] *= keep;
    }
#pragma unroll
    for (uint32_t o = 0; o < O; o++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            s[o][i] *= power_below(st.v_scale - (i < 2 ? low : high));
}

/* A word of each of four tokens: two channels of them, as float16 or as they are. */
template <typename KV>
static __device__ __forceinline__ void turn_word(uint32_t v[4], const uint32_t x[4], uint32_t pair)
{
    if constexpr (sizeof(KV) == 2) {
        v[0] = __byte_perm(x[0], x[1], 0x5410);
        v[1] = __byte_perm(x[0], x[1], 0x7632);
        v[2] = __byte_perm(x[2], x[3], 0x5410);
        v[3] = __byte_perm(x[2], x[3], 0x7632);
    } else {
        uint32_t low = __byte_perm(x[0], x[1], pair == 0 ? 0x5140 : 0x7362);
        uint32_t high = __byte_perm(x[2], x[3], pair == 0 ? 0x5140 : 0x7362);

        v[0] = e4m3_pair(low);
        v[1] = e4m3_pair(low >> 16);
        v[2] = e4m3_pair(high);
        v[3] = e4m3_pair(high >> 16);
    }
}

/* A product is over the tile's tokens, for 16 channels. Those are two of each piece that the eight
 * groups of four lanes read. */
template <typename T, typename KV, int D, int O>
static __device__ __forceinline__ void add_values(struct warp_state<D, O> &st, const float s[O][4], const uint8_t *v)
{
    typedef element<typename product<T, KV>::type> e;
    constexpr uint32_t bytes = row_of<KV, D>::bytes, piece = row_of<KV, D>::v_piece, words = piece / 4;
    constexpr uint32_t pairs = 2 / sizeof(KV); /* of channels of a word */
    uint32_t p[O][2];

#pragma unroll
    for (uint32_t o = 0; o < O; o++) {
        p[o][0] = turned(e::pair(s[o][0], s[o][1]));
        p[o][1] = turned(e::pair(s[o][2], s[o][3]));
    }
    v += threadIdx.x % 32 / 4 * piece;
#pragma unroll
    for (uint32_t i = 0; i < row_of<KV, D>::v_pieces; i++) {
        uint32_t x[4][words]; /* of tokens 2n, 2n + 1, 2n + 8, 2n + 9 of the products */

#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            load_words<words>(x[j], v + row_offset<bytes>(row_of_token(threadIdx.x % 4 * 2 + j / 2 * 8 + j % 2)) +
                                        i * 8 * piece);
#pragma unroll
        for (uint32_t w = 0; w < words * pairs; w++) {
            uint32_t four[4] = {x[0][w / pairs], x[1][w / pairs], x[2][w / pairs], x[3][w / pairs]}, turned[4];

            turn_word<KV>(turned, four, w % pairs);
#pragma unroll
            for (uint32_t o = 0; o < O; o++)
                e::multiply(st.out[o][i * words * pairs + w], turned, p[o][0], p[o][1]);
        }
    }
}

/* Without its sign an element of any type orders as an integer; NaN is the largest. */
template <typename KV>
static __device__ __forceinline__ uint32_t larger_keys(uint32_t x, uint32_t y)
{
    return sizeof(KV) == 2 ? __vmaxu2(x & 0x7fff7fffu, y & 0x7fff7fffu) : __vmaxu4(x & 0x7f7f7f7fu, y & 0x7f7f7f7fu);
}

template <typename KV, int D, int O>
static __device__ __forceinline__ void measure_keys(struct warp_state<D, O> &st, const uint8_t *k)
{
#pragma unroll
    for (uint32_t i = 0; i < TILE * row_of<KV, D>::bytes / 512; i++) {
        uint32_t at = i * 512 + threadIdx.x % 32 * 16;
        uint4 x = *(const uint4 *)(k + row_offset<row_of<KV, D>::bytes>(at / row_of<KV, D>::bytes) +
                                   at % row_of<KV, D>::bytes);

        st.key_max = larger_keys<KV>(st.key_max, larger_keys<KV>(larger_keys<KV>(x.x, x.y), larger_keys<KV>(x.z, x.w)));
    }
}

/* Every WARPS-th of n tiles, from the warp's number on. The first `chosen` are of chosen blocks.
 * The warp waits for a tile on its way to its entry when its turn comes, after the arithmetic of
 * the one before it. S: stages, 1 or all. */
template <typename T, typename KV, int D, int O, uint32_t S>
static __device__ __forceinline__ void attend_tiles(args_t a, uint64_t *where, uint32_t n, uint32_t chosen,
                                                    struct warp_state<D, O> &st)
{
    constexpr uint32_t bytes = row_of<KV, D>::bytes, tile_bytes = row_of<KV, D>::tile_bytes;
    uint32_t warp = threadIdx.x / 32;
    uint8_t *tiles = (uint8_t *)shared + warp * S * tile_bytes;
    bool scales = row_of<KV, D>::scales && a.pool.scales != 0;
    bool light = a.stop.rule == RULE_PSA, certify = a.stop.known == UCM_ATTEND_CUDA_BOUNDS;
    struct warp_query<D, O> query;
    struct arrivals on_way;
    float s[O][4];

    arrivals_begin(on_way);
    if (warp < n && where[warp] & IS_WANTED)
        tile_await(a, &where[warp]);
    if (warp < n)
        copy_tile<bytes>(tiles, rows_at(a, where[warp]), on_way, 0);
    load_query<T, KV, D, O>(a, query);
    for (uint32_t tile = warp, at = 0, then; tile < n; tile += WARPS, at = then) {
        uint32_t next = tile + WARPS, valid = valid_of(where[tile]);
        bool more = next < n, wanted = more && where[next] & IS_WANTED, ahead = S > 1 && more && !wanted;
        uint8_t *k = tiles + at * tile_bytes, *other;

        then = (at + 1) % S;
        other = tiles + then * tile_bytes;
        if (ahead)
            copy_tile<bytes>(other, rows_at(a, where[next]), on_way, then);
        arrivals_wait(on_way, at, ahead);
        if (valid < TILE)
            tile_pad<KV, D>(k, valid);
        logits<T, KV, D, O>(query, k, s);
        if (scales)
            scale_logits<D, O>(st, s, k + 2 * row_of<KV, D>::tile);
        if (certify)
            measure_keys<KV, D, O>(st, k);
#pragma unroll
        for (uint32_t o = 0; o < O; o++)
            weigh<D, O>(st, o, s[o], query.scale[o], valid, light && tile < chosen);
        if (scales)
            scale_weights<D, O>(st, s, k + 2 * row_of<KV, D>::tile);
        add_values<T, KV, D, O>(st, s, k + row_of<KV, D>::tile);
        if (rows_are_apart<bytes>(a, where[tile])) /* it came by stores; the next may not */
            stores_before_copies();
        __syncwarp();
        if (wanted)
            tile_await(a, &where[next]);
        if (more && !ahead)
            copy_tile<bytes>(other, rows_at(a, where[next]), on_way, then);
    }
}

#endif
