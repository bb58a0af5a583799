/* q4: a warp encodes or decodes a unit at a time, which is the 16 tokens of a tile by 128 columns.
 * Column c is channel c % dim of head c / dim. So a unit holds whole groups, of one head or of
 * several. Blocks of 16 columns lie in one group and are contiguous. Pages begin at multiples of
 * 16. */
#ifndef UCM_KERNELS_ENCODING_Q4_UNIT_CUH
#define UCM_KERNELS_ENCODING_Q4_UNIT_CUH

#include "kernels/encoding/rows.cuh"

#define Q4_COLUMNS UCM_ENCODING_TILE_COLUMNS_Q4
#define Q4_VECTORS (UCM_ENCODING_DIM_MAX / 8)

/* Where a tensor's columns and arrays lie. Elements count from the tensor's first. */
struct q4_tensor {
    uint32_t dim, tokens, columns, chunks, tiles; /* chunks: units side by side */
    uint32_t per_dim;                             /* 2^32 / dim, rounded up: c / dim comes from the
                                                   * product with it */
    uint32_t head_step, row_step;                 /* elements: from a head, and a token, to the next */
    uint32_t group;                               /* log2 of a group's channels */
    uint32_t scales, centres, centre_scales, shifts, end; /* bytes */
    uint32_t codes_end, scales_end, centres_end, centre_scales_end;
    bool k;
};

/* Levels of codes 0 to 7 and of codes 8 to 15, as signed bytes. */
struct q4_table {
    uint32_t positive[2], negative[2];
};

/* What all warps of a CTA read. The table is here so that the compiler does not know its values,
 * and keeps it in registers. Otherwise it would move constants there for each use. */
struct q4_shared {
    struct q4_table table;
    struct q4_tensor tensor[UCM_ENCODING_TENSORS_MAX];
    uint4 signs[Q4_VECTORS]; /* of 8 channels, as their elements' signs */
};

struct q4_unit {
    uint64_t raw, encoded;
    uint32_t tensor, number;     /* of the unit in it: of tile and chunk */
    uint32_t tile, chunk, tokens; /* tokens: of the tile; 0: there is no such unit */
    uint32_t row_step, group;              /* the tensor's */
    bool k;
};

static __device__ __forceinline__ struct q4_tensor q4_tensor(const struct ucm_encoding_tensor &s)
{
    uint32_t rows = s.tokens * s.heads, groups = s.dim / ucm_q4_rotation(s.dim), centres;
    struct q4_tensor q;

    q.k = s.kind == UCM_ENCODING_K;
    q.dim = s.dim;
    q.per_dim = 0xffffffffu / s.dim + 1;
    q.tokens = s.tokens;
    q.columns = s.heads * s.dim;
    q.chunks = (q.columns + Q4_COLUMNS - 1) / Q4_COLUMNS;
    q.tiles = (s.tokens + UCM_Q4_TILE - 1) / UCM_Q4_TILE;
    q.head_step = s.order == UCM_ENCODING_NHD ? s.dim : s.tokens * s.dim;
    q.row_step = s.order == UCM_ENCODING_NHD ? q.columns : s.dim;
    q.group = 31 - __clz(ucm_q4_rotation(s.dim));
    centres = q.k ? q.tiles * s.heads : 0;
    q.codes_end = rows * s.dim / 2;
    q.scales = (uint32_t)aligned16(q.codes_end);
    q.scales_end = q.scales + 2 * rows * groups;
    q.centres = (uint32_t)aligned16(q.scales_end);
    q.centres_end = q.centres + centres * s.dim / 2;
    q.centre_scales = (uint32_t)aligned16(q.centres_end);
    q.centre_scales_end = q.centre_scales + 2 * centres * groups;
    q.shifts = (uint32_t)aligned16(q.centre_scales_end);
    q.end = q.shifts + centres * s.dim / 2;
    return q;
}

static __device__ __forceinline__ uint4 q4_signs(uint32_t byte)
{
    uint32_t two[4];

#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        two[i] = (byte << (15 - 2 * i) & 0x8000u) | (byte << (30 - 2 * i) & 0x80000000u);
    return make_uint4(two[0], two[1], two[2], two[3]);
}

/* The whole CTA. */
static __device__ __forceinline__ void q4_prepare(const struct ucm_encoding_spec &spec,
                                                  struct q4_shared *shared)
{
    if (threadIdx.x < UCM_ENCODING_TENSORS_MAX && threadIdx.x < spec.n_tensors)
        shared->tensor[threadIdx.x] = q4_tensor(spec.tensor[threadIdx.x]);
    if (threadIdx.x == 0)
        shared->table = {{0x2c1f1206u, 0x7f614c3bu}, {0xd4e1eefau, 0x819fb4c5u}};
    for (uint32_t i = threadIdx.x; i < Q4_VECTORS; i += blockDim.x)
        shared->signs[i] =
            q4_signs((uint32_t)(ucm_q4_signs(spec.seed, i / 8) >> i % 8 * 8) & 0xffu);
    __syncthreads();
}

static __device__ __forceinline__ struct q4_unit q4_unit(const struct q4_shared *shared,
                                                         uint32_t tensor, uint64_t raw,
                                                         uint64_t encoded, uint32_t number)
{
    const struct q4_tensor *s = &shared->tensor[tensor];
    struct q4_unit u = {raw, encoded, tensor, number,      0,
                        number, 0,     s->row_step, s->group, s->k};

    if (number >= s->chunks) {
        u.tile = number / s->chunks;
        u.chunk = number % s->chunks;
    }
    if (u.tile < s->tiles)
        u.tokens = min(UCM_Q4_TILE, s->tokens - u.tile * UCM_Q4_TILE);
    u.tokens = __shfl_sync(ALL, u.tokens, 0);
    u.group = __shfl_sync(ALL, u.group, 0);
    return u;
}

/* Eight columns of a unit, one vector of an element's row or four bytes of codes. */
struct q4_vector {
    uint32_t column;  /* of all the tensor's */
    uint32_t channel; /* of its head */
    uint32_t element; /* of the tile's first token */
    bool there;
};

static __device__ __forceinline__ struct q4_vector q4_vector(const struct q4_shared *shared,
                                                             const struct q4_unit &u, uint32_t at)
{
    const struct q4_tensor *s = &shared->tensor[u.tensor];
    struct q4_vector v;
    uint32_t head;

    v.column = u.chunk * Q4_COLUMNS + at;
    v.there = v.column < s->columns && u.tokens > 0;
    head = __umulhi(v.column, s->per_dim); /* of columns below 2^22 */
    v.channel = v.column - head * s->dim;
    v.element = head * s->head_step + u.tile * UCM_Q4_TILE * u.row_step + v.channel;
    return v;
}

/* The number of the vector's centre and shifts, counted in elements. */
static __device__ __forceinline__ uint32_t q4_centre_of(const struct q4_shared *shared,
                                                        const struct q4_unit &u,
                                                        const struct q4_vector &v)
{
    return u.tile * shared->tensor[u.tensor].columns + v.column;
}

/* ---- levels ---- */

/* __byte_perm takes three bits of a selector. The fourth replicates the sign of the selected
 * byte. */
static __device__ __forceinline__ uint32_t q4_permute(uint32_t a, uint32_t b, uint32_t select)
{
    uint32_t r;

    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
    return r;
}

/* The levels of eight codes: of channels 0 to 3, and 4 to 7. */
static __device__ __forceinline__ uint2 q4_levels(uint32_t codes, const struct q4_table &table)
{
    uint32_t raw = codes & 0x77777777u;
    /* A selector of 8 gives the sign of byte 0, one of 1 byte 1. */
    uint32_t select = (codes & 0x88888888u) | (~codes & 0x88888888u) >> 3;
    uint32_t a = q4_permute(table.positive[0], table.positive[1], raw);
    uint32_t b = q4_permute(table.positive[0], table.positive[1], raw >> 16);
    uint32_t na = q4_permute(table.negative[0], table.negative[1], raw);
    uint32_t nb = q4_permute(table.negative[0], table.negative[1], raw >> 16);
    uint32_t p = q4_permute(0x80u, 0, select), q = q4_permute(0x80u, 0, select >> 16);

    return make_uint2((a & ~p) | (na & p), (b & ~q) | (nb & q));
}

#endif
