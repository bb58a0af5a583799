/* One thread block's tiles: where they lie, their way to shared memory, and a warp's softmax over every fourth of
 * them. */
#ifndef UCM_KERNELS_ATTEND_TILES_CUH
#define UCM_KERNELS_ATTEND_TILES_CUH

#include "kernels/attend/attend_cuda.h"
#include "kernels/attend/attend_machine.cuh"

typedef const struct ucm_attend_cuda &args_t;

#define THREADS UCM_ATTEND_CUDA_THREADS
#define WARPS UCM_ATTEND_CUDA_WARPS
#define TILE UCM_ATTEND_CUDA_TILE
#define ROWS UCM_ATTEND_CUDA_ROWS
#define STAGES UCM_ATTEND_CUDA_STAGES
#define RULE_PSA 1u /* enum ucm_stop_rule */

extern __shared__ uint4 shared[];

/* ---- the list ---- */

/* What one launch attends to for one KV head. */
struct tiles {
    const int32_t *list, *table;
    uint32_t chosen, all;   /* tiles of the chosen blocks; and of the window */
    uint32_t first, length; /* of the window: its first block; the chain's tokens */
    uint32_t more;          /* not 0: the list goes on behind this launch's blocks */
};

static __device__ __forceinline__ uint32_t list_of(args_t a)
{
    return blockIdx.z * a.lists + (a.lists > 1 ? blockIdx.y : 0);
}

static __device__ __forceinline__ struct tiles tiles_of(args_t a)
{
    uint32_t chain = blockIdx.z, which = list_of(a), in_block = a.tokens / TILE;
    uint32_t count = min(((const uint32_t *)a.count)[which], a.room), end = min(a.end, count);
    struct tiles t;

    t.list = (const int32_t *)a.list + (uint64_t)which * a.room + a.begin;
    t.chosen = end > a.begin ? (end - a.begin) * in_block : 0;
    t.all = t.chosen;
    t.more = count > end;
    t.table = NULL;
    t.first = t.length = 0;
    if (a.begin > 0 || a.length == 0)
        return t;
    t.table = (const int32_t *)a.table + chain * a.table_stride;
    t.first = ((const uint32_t *)a.first)[chain];
    t.length = ((const uint32_t *)a.length)[chain];
    if (t.length > t.first * a.tokens)
        t.all += (t.length - t.first * a.tokens + TILE - 1) / TILE;
    return t;
}

/* Where a tile lies: its block's address, a multiple of 16, and the tile's number in it, below 16; in the upper
 * bits, which addresses leave, how many tokens count, and whether the block is a page. 0: nowhere. */
#define VALID_SHIFT 56
#define IS_PAGE (UINT64_C(1) << 63)
/* Of a block that is on its way to its slot: there, its row in slot_of is in place of the address, times 16. */
#define IS_WANTED (UINT64_C(1) << 62)
#define WANTED (-2) /* UCM_SLOTS_WANTED, in slot_of */
#define PATIENCE UINT64_C(2000000000) /* ns; a gather that takes longer has failed */

static __device__ __forceinline__ void raise_flag(args_t a, uint32_t flag)
{
    atomicOr((uint32_t *)a.flags, flag);
}

static __device__ __forceinline__ uint64_t block_at(const struct ucm_attend_cuda_memory &m, int32_t number)
{
    return (uint32_t)number < m.blocks ? m.base + (uint32_t)number * m.stride : 0;
}

/* A list entry's number, or what it is itself; -1 if there is none. */
static __device__ __forceinline__ int32_t number_at(args_t a, int32_t entry)
{
    if (a.numbers == 0)
        return entry;
    return (uint32_t)entry < a.numbers_stride
               ? ((const int32_t *)a.numbers)[(uint64_t)blockIdx.z * a.numbers_stride + (uint32_t)entry]
               : -1;
}

static __device__ __forceinline__ uint64_t chosen_at(args_t a, int32_t number, uint32_t tile)
{
    uint64_t row = (uint64_t)(a.apart * blockIdx.y) * a.rows + (uint32_t)number, at;
    const int32_t *cell = (const int32_t *)a.slot_of + row;
    int32_t slot = number;

    if (a.slot_of != 0) {
        slot = -1;
        if ((uint32_t)number < a.rows)
            slot = a.wait ? load_acquire(cell) : *cell;
    }
    at = a.wait && slot == WANTED ? row * 16 | IS_WANTED : block_at(a.pool, slot);
    if (at == 0) {
        raise_flag(a, UCM_ATTEND_NO_SLOT);
        return 0;
    }
    return (at + tile) | (uint64_t)TILE << VALID_SHIFT;
}

/* Of the window: tile so many of a block of the chain. */
static __device__ __forceinline__ uint64_t page_at(args_t a, const struct tiles &t, uint32_t block, uint32_t tile)
{
    uint64_t valid = min(TILE, t.length - block * a.tokens - tile * TILE);
    uint64_t at = block < a.table_stride ? block_at(a.pages, t.table[block]) : 0;

    if (at == 0) {
        raise_flag(a, UCM_ATTEND_NO_PAGE);
        return 0;
    }
    return (at + tile) | valid << VALID_SHIFT | IS_PAGE;
}

static __device__ __forceinline__ uint64_t tile_at(args_t a, const struct tiles &t, uint32_t tile)
{
    uint32_t in_block = a.tokens / TILE;

    if (tile < t.chosen)
        return chosen_at(a, number_at(a, t.list[tile / in_block]), tile % in_block);
    tile -= t.chosen;
    return page_at(a, t, t.first + tile / in_block, tile % in_block);
}

/* By a warp, all of which has looked at *where: the tile's place, when its block has come, or has not. */
static __device__ __forceinline__ void tile_await(args_t a, uint64_t *where)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        const int32_t *cell = (const int32_t *)a.slot_of + (*where & ((UINT64_C(1) << VALID_SHIFT) - 1)) / 16;
        uint64_t began = nanoseconds(), at;
        int32_t slot;

        while ((slot = load_acquire(cell)) == WANTED && nanoseconds() - began < PATIENCE)
            pause();
        at = block_at(a.pool, slot);
        if (at == 0)
            raise_flag(a, UCM_ATTEND_NO_SLOT);
        *where = at == 0 ? 0 : (at + *where % 16) | (uint64_t)TILE << VALID_SHIFT;
    }
    __syncwarp();
}

static __device__ __forceinline__ uint32_t valid_of(uint64_t where)
{
    return (uint32_t)(where >> VALID_SHIFT) & 0x1f;
}

/* D 16-bit elements a row; pieces of 16 bytes are exchanged by the row's number, so that ldmatrix meets no bank
 * twice. */
template <int D>
static __device__ __forceinline__ uint4 *piece(uint4 *rows, uint32_t row, uint32_t i)
{
    return rows + row * (D / 8) + (i ^ (row & 7));
}

static __device__ __forceinline__ const uint8_t *rows_at(const struct ucm_attend_cuda_plane &p, uint64_t block,
                                                        uint32_t tile)
{
    return (const uint8_t *)(block + p.offset + tile * TILE * p.token_stride + blockIdx.y * p.head_stride);
}

/* The tile's K, then its V, to `to`; rows that don't count become zeros. */
template <int D>
static __device__ __forceinline__ void tile_load(args_t a, uint64_t where, uint4 *to)
{
    const struct ucm_attend_cuda_memory &m = where & IS_PAGE ? a.pages : a.pool;
    uint32_t valid = valid_of(where), tile = where % 16;
    uint64_t block = (where & ((UINT64_C(1) << VALID_SHIFT) - 1)) - tile;
    const uint8_t *k = rows_at(m.k, block, tile), *v = rows_at(m.v, block, tile);
    uint64_t k_stride = m.k.token_stride, v_stride = m.v.token_stride;

#pragma unroll
    for (uint32_t i = 0; i < TILE * D / 8 / 32; i++) {
        uint32_t at = i * 32 + threadIdx.x % 32, row = at / (D / 8), col = at % (D / 8);
        bool there = row < valid;

        copy16(piece<D>(to, row, col), there ? k + row * k_stride + col * 16 : (const void *)a.q, there);
        copy16(piece<D>(to + TILE * D / 8, row, col), there ? v + row * v_stride + col * 16 : (const void *)a.q, there);
    }
}

/* ---- one warp ---- */

/* Rows lane / 4 (0) and 8 more (1). sum is of this lane's tokens. */
template <int D> struct warp_state {
    float top[2], sum[2], lightest[2];
    uint32_t key_max; /* bits of two elements without signs */
    float out[D / 8][4];
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

template <typename T, int D>
static __device__ __forceinline__ void load_query(args_t a, uint32_t query[D / 16][4])
{
    const T *q = (const T *)a.q + blockIdx.z * a.q_stride + (uint64_t)blockIdx.y * a.group * D;
    uint32_t row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;

#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t r = row + j % 2 * 8;

            query[i][j] = r < a.group ? *(const uint32_t *)(q + r * D + i * 16 + j / 2 * 8 + col) : 0;
        }
}

/* Logits of the tile's 16 tokens: [8 tokens of them][row 0: two, row 1: two]. */
template <typename T, int D>
static __device__ __forceinline__ void logits(const uint32_t query[D / 16][4], uint4 *k, float s[2][4])
{
    uint32_t lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        s[0][j] = s[1][j] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++) {
        uint32_t b[4];

        matrices(b, piece<D>(k, row, 2 * i + half));
        element<T>::multiply(s[0], query[i], b[0], b[1]);
        element<T>::multiply(s[1], query[i], b[2], b[3]);
    }
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

/* Turns logits into weights, and takes what was summed so far to the new maximum. light: the tile is a chosen
 * block, and PSA's rule asks what it weighs. */
template <int D>
static __device__ __forceinline__ void weigh(struct warp_state<D> &st, float s[2][4], float scale, uint32_t valid,
                                             bool light)
{
    uint32_t col = threadIdx.x % 4 * 2;

#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float top = st.top[r], keep, base, sum = 0.0f;

#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float *x = &s[j / 2][2 * r + j % 2];

            *x = col + j % 2 + j / 2 * 8 < valid ? *x * scale : -INFINITY;
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

template <typename T, int D>
static __device__ __forceinline__ void add_values(struct warp_state<D> &st, const float s[2][4], uint4 *v)
{
    uint32_t lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
    uint32_t p[4] = {element<T>::pair(s[0][0], s[0][1]), element<T>::pair(s[0][2], s[0][3]),
                     element<T>::pair(s[1][0], s[1][1]), element<T>::pair(s[1][2], s[1][3])};

#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++) {
        uint32_t b[4];

        matrices_turned(b, piece<D>(v, row, 2 * i + half));
        element<T>::multiply(st.out[2 * i], p, b[0], b[1]);
        element<T>::multiply(st.out[2 * i + 1], p, b[2], b[3]);
    }
}

/* Without its sign an element of either type orders as an integer; NaN is above all. */
template <int D>
static __device__ __forceinline__ void measure_keys(struct warp_state<D> &st, const uint4 *k)
{
#pragma unroll
    for (uint32_t i = 0; i < TILE * D / 8 / 32; i++) {
        uint4 x = k[i * 32 + threadIdx.x % 32];

        st.key_max = __vmaxu2(st.key_max, __vmaxu2(__vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu),
                                                   __vmaxu2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu)));
    }
}

/* Every WARPS-th of n tiles, from the warp's number on; the first `chosen` are of chosen blocks. A tile on its way is
 * waited for in its turn, and while the one before it is not done nothing is. */
template <typename T, int D>
static __device__ __forceinline__ void attend_tiles(args_t a, uint64_t *where, uint32_t n, uint32_t chosen,
                                                    struct warp_state<D> &st)
{
    constexpr uint32_t pieces = 2 * TILE * D / 8;
    uint32_t warp = threadIdx.x / 32;
    uint4 *stage = shared + warp * STAGES * pieces;
    uint32_t query[D / 16][4];
    bool light = a.stop.rule == RULE_PSA, certify = a.stop.certify != 0;
    float s[2][4];

    if (warp < n && where[warp] & IS_WANTED)
        tile_await(a, &where[warp]);
    if (warp < n)
        tile_load<D>(a, where[warp], stage);
    copies_commit();
    load_query<T, D>(a, query);
    for (uint32_t tile = warp, at = 0; tile < n; tile += WARPS, at ^= 1) {
        uint32_t next = tile + WARPS;
        bool more = next < n, wanted = more && where[next] & IS_WANTED;
        uint4 *k = stage + at * pieces;

        if (more && !wanted)
            tile_load<D>(a, where[next], stage + (at ^ 1) * pieces);
        copies_commit();
        copies_wait<1>();
        __syncwarp();
        logits<T, D>(query, k, s);
        if (certify)
            measure_keys<D>(st, k);
        weigh<D>(st, s, a.scale_log2, valid_of(where[tile]), light && tile < chosen);
        add_values<T, D>(st, s, k + TILE * D / 8);
        __syncwarp();
        if (wanted) {
            tile_await(a, &where[next]);
            tile_load<D>(a, where[next], stage + (at ^ 1) * pieces);
            copies_commit();
        }
    }
    copies_wait<0>();
}

#endif
