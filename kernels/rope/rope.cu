/* Loads with position shifts: see rope_cuda.h. A warp takes tiles of fragments, as in copy.cu: rows
 * of K, or bytes around it. If rows allow it, a tile of K moves as one run of vectors, whichever
 * part of it is rotated, since runs suit the bus. Each lane then has the same channels of all its
 * rows, and keeps their angles in registers. It gets the other half of its pairs from a
 * neighbour. */
extern "C" {
#include "kernels/rope/rope_cuda.h"
}
#include "kernels/copy.cuh"
#include "kernels/rope/words.cuh"

#define VECTOR 16u /* bytes */
#define ROWS_AHEAD 4u
#define ALL_LANES 0xffffffffu

/* ---- any alignment, any sizes ---- */

template <uint32_t DTYPE>
static __device__ __forceinline__ float element_get(const unsigned char *p)
{
    uint32_t bits = 0;

#pragma unroll
    for (uint32_t i = 0; i < words<DTYPE>::bytes; i++)
        bits |= (uint32_t)p[i] << (8 * i);
    return ucm_rope_decode(DTYPE, bits);
}

template <uint32_t DTYPE>
static __device__ __forceinline__ void element_put(unsigned char *p, float x)
{
    uint32_t bits = ucm_rope_encode(DTYPE, x);

#pragma unroll
    for (uint32_t i = 0; i < words<DTYPE>::bytes; i++)
        p[i] = (unsigned char)(bits >> (8 * i));
}

template <uint32_t DTYPE>
static __device__ void rerotate_slowly(unsigned char *to, const unsigned char *from, uint32_t rows,
                                   const struct ucm_rope_spec *s,
                                   const struct ucm_rope_angle *table, uint32_t lane)
{
    constexpr uint32_t B = words<DTYPE>::bytes;
    uint32_t half = s->rotary / 2;

    for (uint32_t i = lane; i < rows * half; i += LANES) {
        uint64_t row = (uint64_t)(i / half) * s->dim;
        uint64_t a = (row + ucm_rope_channel_x(s, i % half)) * B,
                 b = (row + ucm_rope_channel_y(s, i % half)) * B;
        float x = element_get<DTYPE>(from + a), y = element_get<DTYPE>(from + b);

        element_put<DTYPE>(to + a, ucm_rope_x(x, y, table[i % half]));
        element_put<DTYPE>(to + b, ucm_rope_y(x, y, table[i % half]));
    }
}

/* ---- vectors ---- */

union vector {
    uint4 all;
    uint32_t words[4];
};

/* One vector of pairs of neighbours. A pair of float32 takes two words. */
template <uint32_t DTYPE>
static __device__ __forceinline__ union vector rerotate_neighbours(const union vector &v,
                                                               const struct ucm_rope_angle *angle)
{
    constexpr uint32_t n = words<DTYPE>::n;
    float x[4 * n], out[4 * n];
    union vector rerotated;

#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        words<DTYPE>::decode(v.words[w], x + w * n);
#pragma unroll
    for (uint32_t i = 0; i < 2 * n; i++) {
        out[2 * i] = ucm_rope_x(x[2 * i], x[2 * i + 1], angle[i]);
        out[2 * i + 1] = ucm_rope_y(x[2 * i], x[2 * i + 1], angle[i]);
    }
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        rerotated.words[w] = words<DTYPE>::encode(out + w * n);
    return rerotated;
}

/* A lane's channels of a row: two vectors whose elements are pairs, or one of neighbours. */
template <uint32_t DTYPE, bool HALVES> struct part {
    static constexpr uint32_t n = words<DTYPE>::n;
    static constexpr uint32_t pairs = HALVES ? 4 * n : 2 * n;
    union vector v[HALVES ? 2 : 1];

    __device__ __forceinline__ void load(const unsigned char *p, uint32_t apart)
    {
        v[0].all = __ldcs((const uint4 *)p);
        if (HALVES)
            v[HALVES].all = __ldcs((const uint4 *)(p + apart));
    }
    __device__ __forceinline__ void store(unsigned char *p, uint32_t apart) const
    {
        __stcs((uint4 *)p, v[0].all);
        if (HALVES)
            __stcs((uint4 *)(p + apart), v[HALVES].all);
    }
    __device__ __forceinline__ void rerotate_halves(const struct ucm_rope_angle *angle)
    {
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) {
            float x[n], y[n], out[n];

            words<DTYPE>::decode(v[0].words[w], x);
            words<DTYPE>::decode(v[HALVES].words[w], y);
#pragma unroll
            for (uint32_t i = 0; i < n; i++)
                out[i] = ucm_rope_x(x[i], y[i], angle[w * n + i]);
            v[0].words[w] = words<DTYPE>::encode(out);
#pragma unroll
            for (uint32_t i = 0; i < n; i++)
                out[i] = ucm_rope_y(x[i], y[i], angle[w * n + i]);
            v[HALVES].words[w] = words<DTYPE>::encode(out);
        }
    }
    __device__ __forceinline__ void rerotate(const struct ucm_rope_angle *angle)
    {
        if (HALVES)
            rerotate_halves(angle);
        else
            v[0].all = rerotate_neighbours<DTYPE>(v[0], angle).all;
    }
};

/* How many lanes have work in a row; 0: use turn_slowly. */
template <uint32_t DTYPE, bool HALVES>
static __device__ __forceinline__ uint32_t lanes_of_row(const struct ucm_rope_spec *s,
                                                        uint64_t ends)
{
    constexpr uint32_t B = words<DTYPE>::bytes;
    uint32_t bytes = s->rotary * B / (HALVES ? 2 : 1), lanes = bytes / VECTOR;

    if ((ends | bytes | s->first * B | s->dim * B) % VECTOR != 0 || lanes > LANES ||
        LANES % lanes != 0)
        return 0;
    return lanes;
}

template <uint32_t DTYPE, bool HALVES>
static __device__ void rerotate_fast(unsigned char *to, const unsigned char *from, uint32_t rows,
                                 uint32_t lanes, const struct ucm_rope_spec *s,
                                 const struct ucm_rope_angle *table, uint32_t lane)
{
    constexpr uint32_t B = words<DTYPE>::bytes, PAIRS = part<DTYPE, HALVES>::pairs;
    uint32_t own = lane % lanes, step = LANES / lanes, apart = s->rotary / 2 * B;
    uint64_t row_bytes = (uint64_t)s->dim * B, at = (uint64_t)s->first * B + own * VECTOR;
    const struct ucm_rope_angle *angle = table + own * PAIRS;

    for (uint32_t row = lane / lanes; row < rows; row += step * ROWS_AHEAD) {
        part<DTYPE, HALVES> parts[ROWS_AHEAD];

#pragma unroll
        for (uint32_t u = 0; u < ROWS_AHEAD; u++)
            if (row + u * step < rows)
                parts[u].load(from + (row + u * step) * row_bytes + at, apart);
#pragma unroll
        for (uint32_t u = 0; u < ROWS_AHEAD; u++)
            if (row + u * step < rows) {
                parts[u].rerotate(angle);
                parts[u].store(to + (row + u * step) * row_bytes + at, apart);
            }
    }
}

/* Channels [begin, end) of rows, which stay. */
static __device__ void rows_stay(uint64_t to, uint64_t from, uint32_t rows, uint32_t row_bytes,
                                 uint32_t begin, uint32_t end, uint32_t lane)
{
    if (to == from || begin >= end)
        return;
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t at = (uint64_t)row * row_bytes + begin;

        copy_tile(to + at, from + at, end - begin, lane);
    }
}

/* ---- whole rows as runs of vectors ---- */

/* A lane's channels, the same in all its rows. */
template <uint32_t DTYPE, bool HALVES> struct column {
    static constexpr uint32_t n = words<DTYPE>::n, pairs = HALVES ? 4 * n : 2 * n;
    bool rotates;
    uint32_t partner; /* the lane with the other half of its pairs */
    struct ucm_rope_angle angle[pairs];

    __device__ __forceinline__ column(const struct ucm_rope_spec *s,
                                      const struct ucm_rope_angle *table, uint32_t lane)
    {
        constexpr uint32_t B = words<DTYPE>::bytes;
        uint32_t at = lane % (s->dim * B / VECTOR) - s->first * B / VECTOR;
        uint32_t span = s->rotary * B / VECTOR, apart = span / 2;
        bool second = HALVES && at < span && at >= apart; /* it has y of its pairs */

        rotates = at < span; /* not where it wrapped */
        partner = !HALVES || !rotates ? lane : second ? lane - apart : lane + apart;
        at = !rotates ? 0 : second ? at - apart : at;
#pragma unroll
        for (uint32_t i = 0; i < pairs; i++)
            angle[i] = table[at * pairs + i];
        if (second) /* for y's it is the same function the other way around: y cos + x sin */
#pragma unroll
            for (uint32_t i = 0; i < pairs; i++)
                angle[i].sin = -angle[i].sin;
    }
    __device__ __forceinline__ uint32_t rerotate_half(uint32_t own, uint32_t other, uint32_t w) const
    {
        float a[n], b[n], c[n];

        words<DTYPE>::decode(own, a);
        words<DTYPE>::decode(other, b);
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            c[i] = ucm_rope_x(a[i], b[i], angle[w * n % pairs + i]);
        return words<DTYPE>::encode(c);
    }
    /* All lanes of a warp call it. */
    __device__ __forceinline__ union vector rerotate(const union vector &v) const
    {
        union vector out = v;

        if constexpr (HALVES) {
#pragma unroll
            for (uint32_t w = 0; w < 4; w++) {
                uint32_t other = __shfl_sync(ALL_LANES, v.words[w], partner);

                out.words[w] = rotates ? rerotate_half(v.words[w], other, w) : v.words[w];
            }
        } else if (rotates) {
            out = rerotate_neighbours<DTYPE>(v, angle);
        }
        return out;
    }
};

template <uint32_t DTYPE, bool HALVES>
static __device__ __forceinline__ bool rows_are_runs(const struct ucm_rope_spec *s, uint64_t ends)
{
    constexpr uint32_t B = words<DTYPE>::bytes;
    uint32_t row = s->dim * B, part = s->rotary * B / (HALVES ? 2 : 1);

    return (ends | row | part | s->first * B) % VECTOR == 0 && row <= LANES * VECTOR &&
           LANES * VECTOR % row == 0;
}

template <uint32_t DTYPE, bool HALVES>
static __device__ __forceinline__ void rerotate_runs(uint4 *to, const uint4 *from, uint32_t rows,
                                                 const struct ucm_rope_spec *s,
                                                 const struct ucm_rope_angle *table, uint32_t lane)
{
    const column<DTYPE, HALVES> own(s, table, lane);
    uint32_t n = rows * (s->dim * words<DTYPE>::bytes / VECTOR);

    for (uint32_t first = 0; first < n; first += LANES * UNROLL) {
        union vector piece[UNROLL];

#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++)
            if (first + u * LANES + lane < n)
                piece[u].all = __ldcs(from + first + u * LANES + lane);
            else
                piece[u].all = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            union vector rerotated = own.rerotate(piece[u]);

            if (first + u * LANES + lane < n)
                __stcs(to + first + u * LANES + lane, rerotated.all);
        }
    }
}

template <uint32_t DTYPE, bool HALVES>
static __device__ void rerotate_odd_rows(uint64_t to, uint64_t from, uint32_t rows,
                                     const struct ucm_rope_spec *s,
                                     const struct ucm_rope_angle *table, uint32_t lane)
{
    constexpr uint32_t B = words<DTYPE>::bytes;
    uint32_t lanes = lanes_of_row<DTYPE, HALVES>(s, to | from);

    rows_stay(to, from, rows, s->dim * B, 0, s->first * B, lane);
    rows_stay(to, from, rows, s->dim * B, (s->first + s->rotary) * B, s->dim * B, lane);
    if (lanes > 0)
        rerotate_fast<DTYPE, HALVES>((unsigned char *)to, (const unsigned char *)from, rows, lanes, s,
                                 table, lane);
    else
        rerotate_slowly<DTYPE>((unsigned char *)to, (const unsigned char *)from, rows, s, table, lane);
}

template <uint32_t DTYPE, bool HALVES>
static __device__ __forceinline__ void rerotate_rows(uint64_t to, uint64_t from, uint32_t rows,
                                                 const struct ucm_rope_spec *s,
                                                 const struct ucm_rope_angle *table, uint32_t lane)
{
    if (rows_are_runs<DTYPE, HALVES>(s, to | from))
        rerotate_runs<DTYPE, HALVES>((uint4 *)to, (const uint4 *)from, rows, s, table, lane);
    else
        rerotate_odd_rows<DTYPE, HALVES>(to, from, rows, s, table, lane);
}

/* ---- tiles ---- */

static __device__ __forceinline__ uint32_t tiles_of(uint32_t bytes)
{
    return (bytes + UCM_COPY_TILE_BYTES - 1) / UCM_COPY_TILE_BYTES;
}

/* Tile t of the bytes [0, before) and [behind, fragment). */
static __device__ __forceinline__ void tile_around(uint64_t to, uint64_t from, uint32_t t,
                                                   uint32_t before, uint32_t behind, uint32_t fragment,
                                                   uint32_t lane)
{
    uint32_t first = tiles_of(before);
    uint64_t begin = t < first ? (uint64_t)t * UCM_COPY_TILE_BYTES
                               : behind + (uint64_t)(t - first) * UCM_COPY_TILE_BYTES;
    uint32_t end = t < first ? before : fragment;

    if (to != from && begin < end)
        copy_tile(to + begin, from + begin, min(end - (uint32_t)begin, UCM_COPY_TILE_BYTES), lane);
}

template <uint32_t DTYPE, bool HALVES>
static __device__ __forceinline__ void
load_all(const struct ucm_copy_plane *planes, uint32_t n_planes, const struct ucm_copy_item *items,
         uint32_t n_items, const uint32_t *at, const struct ucm_rope_angle *tables,
         const struct ucm_rope_spec *s, uint32_t tiles, bool in_place)
{
    uint32_t lane = threadIdx.x % LANES, k_tiles = ucm_rope_k_tiles(s),
             tile_rows = ucm_rope_tile_rows(s);
    uint32_t row_bytes = ucm_rope_row_bytes(s);
    uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    uint64_t warps = (uint64_t)gridDim.x * blockDim.x / LANES;
    uint64_t total = (uint64_t)n_items * n_planes * tiles;

    for (uint64_t n = warp; n < total; n += warps) {
        uint64_t fragment_number = n / tiles;
        uint32_t t = (uint32_t)(n % tiles), p = (uint32_t)(fragment_number % n_planes), k = at[p];
        const struct ucm_copy_plane *plane = &planes[p];
        uint32_t behind = k + s->rows * row_bytes;

        /* Items may lie in host memory, so none is read for a tile without bytes. */
        if (t >= (k == UCM_ROPE_NO_K ? tiles_of(plane->block_bytes)
                                     : k_tiles + tiles_of(k) + tiles_of(plane->block_bytes - behind)))
            continue;
        const struct ucm_copy_item item = items[fragment_number / n_planes];
        uint64_t to = plane->base + item.block * plane->stride,
                 from = in_place ? to : item.slot + plane->slot_offset;

        if (k == UCM_ROPE_NO_K || item.memory == UCM_ROPE_STAYS) {
            tile_around(to, from, t, plane->block_bytes, plane->block_bytes, plane->block_bytes, lane);
        } else if (t < k_tiles) {
            uint32_t row = t * tile_rows;
            uint64_t byte = k + (uint64_t)row * row_bytes;

            rerotate_rows<DTYPE, HALVES>(to + byte, from + byte, min(s->rows - row, tile_rows), s,
                                     tables + (uint64_t)item.memory * (s->rotary / 2), lane);
        } else {
            tile_around(to, from, t - k_tiles, k, behind, plane->block_bytes, lane);
        }
    }
}

/* The tables may lie in host memory, so each CTA reads them only once. */
extern __shared__ struct ucm_rope_angle tables_here[];

static __device__ __forceinline__ void tables_take(const struct ucm_rope_angle *tables, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        tables_here[i] = tables[i];
    __syncthreads();
}

#define KERNEL(name, dtype, halves)                                                                \
    extern "C" __global__ void __launch_bounds__(UCM_COPY_THREADS) ucm_rope_##name(                \
        const struct ucm_copy_plane *planes, uint32_t n_planes, const struct ucm_copy_item *items, \
        uint32_t n_items, const uint32_t *at, const struct ucm_rope_angle *tables,                 \
        uint32_t n_tables, struct ucm_rope_spec spec, uint32_t tiles, uint32_t in_place)           \
    {                                                                                              \
        tables_take(tables, n_tables *(spec.rotary / 2));                                          \
        load_all<dtype, halves>(planes, n_planes, items, n_items, at, tables_here, &spec, tiles,   \
                                in_place != 0);                                                    \
    }

KERNEL(f32_halves, UCM_ROPE_F32, true)
KERNEL(f32_neighbours, UCM_ROPE_F32, false)
KERNEL(f16_halves, UCM_ROPE_F16, true)
KERNEL(f16_neighbours, UCM_ROPE_F16, false)
KERNEL(bf16_halves, UCM_ROPE_BF16, true)
KERNEL(bf16_neighbours, UCM_ROPE_BF16, false)
KERNEL(fp8_halves, UCM_ROPE_FP8_E4M3, true)
KERNEL(fp8_neighbours, UCM_ROPE_FP8_E4M3, false)
