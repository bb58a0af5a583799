/* One thread block's tiles of latents: their way to shared memory, logits, weights, and values.
 *
 * A *step* is over four tiles, 64 tokens. All eight warps work on each of its three parts, and meet
 * between them:
 *   logits    a warp has one tile and one half of the channels; the query of that half stays in its registers
 *   weights   a warp has two rows, or four: it adds the halves, and keeps their maxima and sums
 *   values    a warp has 64 of the 512 channels of all rows, for all tokens
 * So a tile is read from shared memory twice, once as keys and once as values.
 *
 * Tiles enter a ring once its oldest are consumed, so it prefetches as many tiles as it has beyond
 * a step. Warp t % 8 brings tile t. It is one of the two that make the tile's logits. If the tile's
 * block is on its way to an entry, that warp waits for it when the step begins. Two rows lie in
 * shared memory as they lie in a block, and the next two 16 bytes further. So a tile is eight
 * copies, and a matrix of every second row has no bank conflicts. In products a tile's tokens
 * therefore have the order 0, 2 .. 14, 1, 3 .. 15.
 *
 * T is the type of queries and results, KV that of latents: T, or E4M3, as in attend_tiles.cuh. */
#ifndef UCM_KERNELS_ATTEND_MLA_TILES_CUH
#define UCM_KERNELS_ATTEND_MLA_TILES_CUH

#include "kernels/attend/attend_merge.cuh"
#include "kernels/attend/mla_cuda.h"
#include "kernels/attend/mla_machine.cuh"

#define CHANNELS UCM_ATTEND_MLA_CHANNELS
#define VALUES UCM_ATTEND_MLA_VALUES
#define MLA_THREADS UCM_ATTEND_MLA_THREADS
#define MLA_WARPS (MLA_THREADS / 32u)
#define STEP UCM_ATTEND_MLA_STEP
#define STEP_TOKENS (STEP * TILE)
#define HALF (CHANNELS / 2)              /* channels of a warp's logits */
#define PRODUCTS (HALF / 16)             /* of a row, over its half */
#define WARP_VALUES (VALUES / MLA_WARPS) /* channels of a warp's values */

template <typename KV> struct latent {
    static constexpr uint32_t bytes = CHANNELS * sizeof(KV), tile = LATENT_BYTES(bytes);
};

/* Shared memory before the ring. Rows are set apart for the banks' sake. */
template <int R> struct mla_scratch {
    float logits[2][16 * R][STEP_TOKENS + 8];
    uint16_t weights[16 * R][STEP_TOKENS + 8]; /* tokens in the order of products */
    float keep[16 * R]; /* what results so far are multiplied by */
};

/* R: row tiles, of 16 rows. Of each a lane has row lane / 4 and the eighth after it, in pairs of
 * eight channels. */
template <int R> struct mla_query {
    uint32_t q[R][PRODUCTS][4];
    float back[R][2]; /* of logits, if queries were scaled */
};

template <int R> struct mla_state {
    float out[R][WARP_VALUES / 8][4];
    float top[R], sum[R]; /* of row row_of_lane(): sum is of a quarter of each tile's tokens, top of
                           * all */
};

template <int R> static __device__ __forceinline__ uint32_t row_of_lane(uint32_t i)
{
    return (threadIdx.x / 32 * R + i) * 2 + threadIdx.x % 32 / 16;
}

template <int R> static __device__ __forceinline__ void mla_begin(struct mla_state<R> &st)
{
#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        st.top[r] = -INFINITY;
        st.sum[r] = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < WARP_VALUES / 8; i++)
            st.out[r][i][0] = st.out[r][i][1] = st.out[r][i][2] = st.out[r][i][3] = 0.0f;
    }
}

/* ---- the ring ---- */

struct ring {
    uint8_t *tiles;
    uint64_t *barriers;
    uint32_t size;
    uint32_t brought, to; /* tiles before this one are there, on their way, or wait for their block;
                           * and its place */
    uint32_t from, turn;  /* place of the step's first tile, and how often the ring was full before
                           * it */
};

static __device__ __forceinline__ uint32_t ring_next(const struct ring &ring, uint32_t place, uint32_t n)
{
    return place + n < ring.size ? place + n : place + n - ring.size;
}

/* The address of tile j of the step. */
template <typename KV> static __device__ __forceinline__ uint8_t *ring_tile(const struct ring &ring, uint32_t j)
{
    return ring.tiles + ring_next(ring, ring.from, j) * latent<KV>::tile;
}

static __device__ __forceinline__ void ring_step(struct ring &ring)
{
    ring.turn ^= ring.from + STEP >= ring.size;
    ring.from = ring_next(ring, ring.from, STEP);
}

/* By a warp. Rows that don't count become zeros, whatever lay there. Racecheck reports a race of
 * these stores with reads of logits. It sees no order in a __syncwarp, which is no instruction on
 * Hopper. */
template <typename KV>
static __device__ __forceinline__ void ring_copy(args_t a, const struct ring &ring, uint64_t where, uint32_t place)
{
    constexpr uint32_t bytes = latent<KV>::bytes;
    uint32_t valid = valid_of(where);
    uint8_t *to = ring.tiles + place * latent<KV>::tile;
    struct tile_rows rows = rows_at(a, where);

    if (valid < TILE) {
        for (uint32_t i = valid * bytes + threadIdx.x % 32 * 16; i < TILE * bytes; i += 512)
            *(uint4 *)(to + latent_row<bytes>(i / bytes) + i % bytes) = make_uint4(0, 0, 0, 0);
        stores_before_copies();
        __syncwarp(); /* so the copy's barrier tells of the zeros, too */
    }
    copy_rows<bytes>(to, rows.k, rows.k_stride, valid, ring.barriers + place);
}

/* Tiles below `end`; each by its warp, except those that wait for their block. */
template <typename KV>
static __device__ __forceinline__ void ring_bring(args_t a, struct ring &ring, const uint64_t *where, uint32_t end)
{
    for (; ring.brought < end; ring.brought++, ring.to = ring_next(ring, ring.to, 1))
        if (ring.brought % MLA_WARPS == threadIdx.x / 32 && !(where[ring.brought] & IS_WANTED))
            ring_copy<KV>(a, ring, where[ring.brought], ring.to);
}

/* By a warp: tile j of the step, which is that of the list. */
template <typename KV>
static __device__ __forceinline__ const uint8_t *ring_await(args_t a, struct ring &ring, uint64_t *where, uint32_t j,
                                                            uint32_t tile)
{
    uint32_t place = ring_next(ring, ring.from, j);

    if (tile % MLA_WARPS == threadIdx.x / 32 && where[tile] & IS_WANTED) {
        tile_await(a, &where[tile]);
        ring_copy<KV>(a, ring, where[tile], place);
    }
    tile_barrier_wait(ring.barriers + place, ring.turn ^ (ring.from + j >= ring.size));
    return ring_tile<KV>(ring, j);
}

/* ---- logits ---- */

/* Channels of E4M3 come in fours: two of them are of the first eight of a product. */
template <typename KV> static __device__ __forceinline__ uint32_t channel_of(uint32_t product, uint32_t pair)
{
    uint32_t lane = threadIdx.x % 4;

    return product * 16 + (sizeof(KV) == 2 ? lane * 2 + pair * 8 : lane * 4 + pair * 2);
}

/* float16 for products with E4M3: each row times a power of two, so that it keeps bfloat16's
 * range. */
template <typename T, int R> static __device__ __forceinline__ void scale_rows(struct mla_query<R> &query)
{
#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            float most = 0.0f, factor;

#pragma unroll
            for (uint32_t i = 0; i < PRODUCTS * 2; i++) {
                uint32_t x = query.q[r][i / 2][i % 2 * 2 + h];

                most = fmaxf(most, fmaxf(fabsf(element<T>::widen(x & 0xffff)), fabsf(element<T>::widen(x >> 16))));
            }
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            factor = query_factor(most, &query.back[r][h]);
#pragma unroll
            for (uint32_t i = 0; i < PRODUCTS * 2; i++) {
                uint32_t *x = &query.q[r][i / 2][i % 2 * 2 + h];

                *x = element<__half>::pair(element<T>::widen(*x & 0xffff) * factor, element<T>::widen(*x >> 16) * factor);
            }
        }
}

template <typename T, typename KV, int R>
static __device__ __forceinline__ void mla_load_query(args_t a, struct mla_query<R> &query)
{
    const T *q = (const T *)a.q + blockIdx.z * a.q_stride + (uint64_t)blockIdx.y * a.group * CHANNELS;
    uint32_t first = threadIdx.x / 32 / STEP * HALF;

#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t row = r * 16 + j % 2 * 8 + threadIdx.x % 32 / 4;

#pragma unroll
            for (uint32_t i = 0; i < PRODUCTS; i++)
                query.q[r][i][j] =
                    row < a.group ? *(const uint32_t *)(q + row * CHANNELS + first + channel_of<KV>(i, j / 2)) : 0;
        }
    if constexpr (product<T, KV>::scaled)
        scale_rows<T, R>(query);
}

/* x: of tokens 2 * (lane / 4), y: of those after them. Each is two words of 16 bits, or four E4M3.
 * A product has 16 channels of them. */
template <typename T, typename KV, int R>
static __device__ __forceinline__ void multiply_keys(float s[R][2][4], const struct mla_query<R> &query, uint32_t i,
                                                     const uint32_t x[2], const uint32_t y[2])
{
    typedef element<typename product<T, KV>::type> e;

#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        e::multiply(s[r][0], query.q[r][i], x[0], x[1]);
        e::multiply(s[r][1], query.q[r][i], y[0], y[1]);
    }
}

template <int R> static __device__ __forceinline__ void add_turns(float x[R][2][4], const float y[R][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < R * 8; i++)
        x[i / 8][i / 4 % 2][i % 4] += y[i / 8][i / 4 % 2][i % 4];
}

/* Logits of one tile over the warp's half of the channels, into `logits`. With few rows, products
 * alternate between two sums, so that none waits for the one before it. */
template <typename T, typename KV, int R>
static __device__ __forceinline__ void mla_logits(const struct mla_query<R> &query, const uint8_t *tile,
                                                  struct mla_scratch<R> &scratch)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / STEP;
    constexpr uint32_t turns = R == 1 ? 2 : 1;
    float s[turns][R][2][4] = {};

    tile += latent_row<latent<KV>::bytes>(lane % 8 * 2 + lane / 16) + half * HALF * sizeof(KV) + lane / 8 % 2 * 16;
#pragma unroll
    for (uint32_t i = 0; i < HALF * sizeof(KV) / 32; i++) {
        uint32_t x[4];

        load_matrices(x, tile + i * 32);
        if constexpr (sizeof(KV) == 2) {
            multiply_keys<T, KV, R>(s[i % turns], query, i, x, x + 2);
        } else {
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                uint32_t y[2] = {e4m3_pair(x[j]), e4m3_pair(x[j] >> 16)};
                uint32_t z[2] = {e4m3_pair(x[2 + j]), e4m3_pair(x[2 + j] >> 16)};

                multiply_keys<T, KV, R>(s[j % turns], query, 2 * i + j, y, z);
            }
        }
    }
    if constexpr (turns == 2)
        add_turns<R>(s[0], s[1]);
#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            float *x = s[0][r][0] + h * 2, *y = s[0][r][1] + h * 2, by = product<T, KV>::scaled ? query.back[r][h] : 1.0f;

            *(float4 *)&scratch.logits[half][r * 16 + h * 8 + lane / 4][warp % STEP * TILE + lane % 4 * 4] =
                make_float4(x[0] * by, y[0] * by, x[1] * by, y[1] * by);
        }
}

/* ---- weights ---- */

static __device__ __forceinline__ float row16_max(float x)
{
#pragma unroll
    for (uint32_t h = 8; h > 0; h /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, h));
    return x;
}

static __device__ __forceinline__ float row16_sum(float x)
{
#pragma unroll
    for (uint32_t h = 8; h > 0; h /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, h);
    return x;
}

/* valid: tokens of the lane's tile. */
template <typename T, typename KV, int R>
static __device__ __forceinline__ void mla_weigh(args_t a, struct mla_state<R> &st, struct mla_scratch<R> &scratch,
                                                 uint32_t valid)
{
    typedef element<typename product<T, KV>::type> e;
    uint32_t lane = threadIdx.x % 32, token = lane % 16 * 4;

#pragma unroll
    for (uint32_t i = 0; i < R; i++) {
        uint32_t row = row_of_lane<R>(i);
        float4 x = *(const float4 *)&scratch.logits[0][row][token], y = *(const float4 *)&scratch.logits[1][row][token];
        float w[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w}, top = st.top[i], base, keep;

#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            w[j] = token % TILE + j < valid ? w[j] * a.scale_log2 : -INFINITY;
            top = fmaxf(top, w[j]);
        }
        top = row16_max(top);
        base = base_of(top);
        keep = exp2f(st.top[i] - base);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            w[j] = exp2f(w[j] - base);
        st.top[i] = top;
        st.sum[i] = st.sum[i] * keep + ((w[0] + w[1]) + (w[2] + w[3]));
        *(uint32_t *)&scratch.weights[row][lane % 16 / 4 * TILE + lane % 4 * 2] = e::pair(w[0], w[2]);
        *(uint32_t *)&scratch.weights[row][lane % 16 / 4 * TILE + 8 + lane % 4 * 2] = e::pair(w[1], w[3]);
        if (lane % 16 == 0)
            scratch.keep[row] = keep;
    }
}

/* ---- values ---- */

template <int R>
static __device__ __forceinline__ void mla_keep(struct mla_state<R> &st, const struct mla_scratch<R> &scratch)
{
#pragma unroll
    for (uint32_t r = 0; r < R; r++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            float keep = scratch.keep[r * 16 + h * 8 + threadIdx.x % 32 / 4];

#pragma unroll
            for (uint32_t i = 0; i < WARP_VALUES / 8; i++) {
                st.out[r][i][2 * h] *= keep;
                st.out[r][i][2 * h + 1] *= keep;
            }
        }
}

/* The values of tile j of the step. Of eight channels of 16 bits a lane has 2 * (lane % 4) and the
 * next. Of 16 of E4M3 it has the even two and then the odd two of four. */
template <typename T, typename KV, int R>
static __device__ __forceinline__ void mla_values(struct mla_state<R> &st, const struct mla_scratch<R> &scratch,
                                                  const uint8_t *tile, uint32_t j)
{
    typedef element<typename product<T, KV>::type> e;
    uint32_t lane = threadIdx.x % 32, w[R][4];

#pragma unroll
    for (uint32_t r = 0; r < R; r++)
        load_matrices(w[r], &scratch.weights[r * 16 + lane % 16][j * TILE + lane / 16 * 8]);
    tile += latent_row<latent<KV>::bytes>(lane % 8 * 2 + lane / 8 % 2) + threadIdx.x / 32 * WARP_VALUES * sizeof(KV) +
            lane / 16 * 16;
#pragma unroll
    for (uint32_t i = 0; i < WARP_VALUES * sizeof(KV) / 32; i++) {
        uint32_t x[4];

        load_turned(x, tile + i * 32);
#pragma unroll
        for (uint32_t n = 0; n < 2; n++) {
            if constexpr (sizeof(KV) == 2) {
#pragma unroll
                for (uint32_t r = 0; r < R; r++)
                    e::multiply(st.out[r][2 * i + n], w[r], x[2 * n], x[2 * n + 1]);
            } else {
#pragma unroll
                for (uint32_t odd = 0; odd < 2; odd++) {
                    uint32_t bytes = odd ? 0x4431 : 0x4420;
                    uint32_t low = e4m3_pair(__byte_perm(x[2 * n], 0, bytes));
                    uint32_t high = e4m3_pair(__byte_perm(x[2 * n + 1], 0, bytes));

#pragma unroll
                    for (uint32_t r = 0; r < R; r++)
                        e::multiply(st.out[r][4 * i + 2 * n + odd], w[r], low, high);
                }
            }
        }
    }
}

/* ---- all of it ---- */

template <typename T, typename KV, int R>
static __device__ __forceinline__ void mla_tiles(args_t a, uint64_t *where, uint32_t n, struct ring &ring,
                                                 struct mla_scratch<R> &scratch, struct mla_state<R> &st)
{
    uint32_t own = threadIdx.x / 32 % STEP, quarter = threadIdx.x % 16 / 4;
    struct mla_query<R> query;

    ring_bring<KV>(a, ring, where, min(n, ring.size));
    mla_load_query<T, KV, R>(a, query);
    for (uint32_t first = 0; first < n; first += STEP) {
        uint32_t end = min(n, first + STEP);

        if (first + own < end)
            mla_logits<T, KV, R>(query, ring_await<KV>(a, ring, where, own, first + own), scratch);
        __syncthreads(); /* all warps are also done with the tiles before `first` */
        ring_bring<KV>(a, ring, where, min(n, first + ring.size));
        mla_weigh<T, KV, R>(a, st, scratch, first + quarter < end ? valid_of(where[first + quarter]) : 0);
        __syncthreads();
        mla_keep<R>(st, scratch);
#pragma unroll
        for (uint32_t j = 0; j < STEP; j++)
            if (first + j < end)
                mla_values<T, KV, R>(st, scratch, ring_tile<KV>(ring, j), j);
        ring_step(ring);
        if (ring.size < 2 * STEP) { /* the next step's would not come */
            __syncthreads();
            ring_bring<KV>(a, ring, where, min(n, first + STEP + ring.size));
        }
    }
}

#endif
