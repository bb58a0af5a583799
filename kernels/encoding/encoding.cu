/* The kernels: each warp takes tiles of tensors, in the order in which they lie in the slots. */
#include "kernels/encoding/fp8.cuh"
#include "kernels/encoding/int8.cuh"
#include "kernels/encoding/lossless_units.cuh"
#include "kernels/encoding/q4_decode.cuh"
#include "kernels/encoding/q4_encode.cuh"

template <class M> struct by_rows {
    template <bool ENCODE>
    static __device__ __forceinline__ void unit(const struct ucm_encoding_spec &spec,
                                                uint32_t tensor, uint64_t raw, uint64_t encoded,
                                                uint32_t number, uint32_t lane)
    {
        const struct ucm_encoding_tensor &s = spec.tensor[tensor];

        uint32_t run = M::CHANNELS ? ucm_int8_run(&spec, tensor) : 0;

        if (M::CHANNELS && run > 0)
            columns_tile<M::DTYPE, ENCODE>(s, run, raw, encoded, number, lane);
        else
            rows_tile<M, ENCODE>(s, raw, encoded, number, lane);
    }
};

struct lossless {
    template <bool ENCODE>
    static __device__ __forceinline__ void unit(const struct ucm_encoding_spec &spec,
                                                uint32_t tensor, uint64_t raw, uint64_t encoded,
                                                uint32_t number, uint32_t lane)
    {
        lossless_decode(lossless_tensor(spec.tensor[tensor], raw, encoded), number, lane);
    }
};

/* The first items and planes, as each CTA keeps them. Items lie in the host's memory, and each read
 * of one takes as long as many tiles. */
#define KEPT_ITEMS 128u
#define KEPT_PLANES 128u

struct kept {
    struct ucm_copy_item items[KEPT_ITEMS];
    struct ucm_encoding_plane planes[KEPT_PLANES];
};

struct job {
    const struct ucm_encoding_plane *planes;
    const struct ucm_copy_item *items;
    uint32_t n_planes, n_items;
};

static __device__ __forceinline__ void keep(struct kept *kept, const struct job &job)
{
    for (uint32_t i = threadIdx.x; i < min(job.n_items, KEPT_ITEMS); i += blockDim.x)
        kept->items[i] = job.items[i];
    for (uint32_t i = threadIdx.x; i < min(job.n_planes, KEPT_PLANES); i += blockDim.x)
        kept->planes[i] = job.planes[i];
    __syncthreads();
}

/* A value that all lanes of a warp have, in a form that shows it to the compiler. Shuffles then
 * need no branches. */
static __device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(ALL, x, 0);
}

/* Where a warp is among the tiles of all tensors. It advances by a step that has the same
 * digits. */
struct cursor {
    uint32_t tile, plane, item;
};

static __device__ __forceinline__ struct cursor cursor_of(uint32_t n, uint32_t n_planes,
                                                          uint32_t tiles)
{
    struct cursor c = {n % tiles, n / tiles % n_planes, n / tiles / n_planes};

    return c;
}

static __device__ __forceinline__ void cursor_add(struct cursor *c, const struct cursor &step,
                                                  uint32_t n_planes, uint32_t tiles)
{
    c->tile += step.tile;
    c->plane += step.plane;
    c->item += step.item;
    if (c->tile >= tiles) {
        c->tile -= tiles;
        c->plane++;
    }
    if (c->plane >= n_planes) {
        c->plane -= n_planes;
        c->item++;
    }
}

/* One tensor of one block. */
struct place {
    uint32_t tensor;
    uint64_t raw, encoded;
};

static __device__ __forceinline__ struct place place_of(const struct kept *kept,
                                                        const struct job &job,
                                                        const struct cursor &c)
{
    const struct ucm_encoding_plane *plane =
        c.plane < KEPT_PLANES ? &kept->planes[c.plane] : &job.planes[c.plane];
    const struct ucm_copy_item *item =
        c.item < KEPT_ITEMS ? &kept->items[c.item] : &job.items[c.item];
    struct place at = {plane->tensor, plane->base + item->block * plane->stride,
                       item->slot + plane->slot_offset};

    return at;
}

template <class METHOD, bool ENCODE>
static __device__ __forceinline__ void walk(const struct job &job, struct kept *kept,
                                            const struct ucm_encoding_spec &spec, uint32_t tiles)
{
    uint32_t lane = threadIdx.x % LANES, warps = blockDim.x / LANES;
    struct cursor at, step;

    if (job.n_items == 0)
        return;
    keep(kept, job);
    at = cursor_of(blockIdx.x * warps + uniform(threadIdx.x / LANES), job.n_planes, tiles);
    step = cursor_of(gridDim.x * warps, job.n_planes, tiles);
    for (; at.item < job.n_items; cursor_add(&at, step, job.n_planes, tiles)) {
        struct place p = place_of(kept, job, at);

        METHOD::template unit<ENCODE>(spec, p.tensor, p.raw, p.encoded, at.tile, lane);
    }
}

/* ---- q4 ---- */

static __device__ __forceinline__ struct q4_unit q4_at(const struct job &job,
                                                       const struct kept *kept,
                                                       const struct q4_shared *shared,
                                                       const struct cursor &at)
{
    struct place p;

    if (at.item >= job.n_items)
        return {};
    p = place_of(kept, job, at);
    return q4_unit(shared, uniform(p.tensor), p.raw, p.encoded, at.tile);
}

static __device__ __forceinline__ void q4_read_any(struct q4_encoded *c, struct q4_spot *spot,
                                                   const struct q4_shared *shared,
                                                   const struct q4_unit &u,
                                                   const struct q4_lane &l)
{
    if (u.tensor != spot->tensor || u.number != spot->number)
        q4_spot(spot, shared, u, l);
    if (u.tokens == 0)
        return;
    if (u.group > 4 && u.k)
        q4_read<true, false>(c, shared, u, *spot, l);
    else if (u.group > 4)
        q4_read<false, false>(c, shared, u, *spot, l);
    else if (u.k)
        q4_read<true, true>(c, shared, u, *spot, l);
    else
        q4_read<false, true>(c, shared, u, *spot, l);
}

/* Reads each unit while it decodes the one before. */
template <uint32_t D>
static __device__ __forceinline__ void q4_load(const struct job &job,
                                               const struct ucm_encoding_spec &spec, uint32_t tiles)
{
    __shared__ struct kept kept;
    __shared__ struct q4_shared shared;
    uint32_t lane = threadIdx.x % LANES, warps = blockDim.x / LANES, group = 0;
    struct q4_spot spot = {};
    struct q4_encoded next = {};
    struct q4_lane l = {};
    struct q4_unit u;
    struct cursor at, step;

    if (job.n_items == 0)
        return;
    keep(&kept, job);
    q4_prepare(spec, &shared);
    at = cursor_of(blockIdx.x * warps + uniform(threadIdx.x / LANES), job.n_planes, tiles);
    step = cursor_of(gridDim.x * warps, job.n_planes, tiles);
    l.table = shared.table;
    l.g = lane / 4;
    l.q = lane % 4;
    spot.tensor = UCM_ENCODING_TENSORS_MAX; /* none */
    u = q4_at(job, &kept, &shared, at);
    q4_read_any(&next, &spot, &shared, u, l);
    while (at.item < job.n_items) {
        const struct q4_vector out[2] = {spot.out[0], spot.out[1]};
        const struct q4_encoded now = next;
        const struct q4_unit done = u;

        cursor_add(&at, step, job.n_planes, tiles);
        u = q4_at(job, &kept, &shared, at);
        q4_read_any(&next, &spot, &shared, u, l);
        if (done.tokens == 0)
            continue;
        if (done.group != group) {
            group = done.group;
            q4_matrix(&l, lane, group);
        }
        if (group > 4 && done.k)
            q4_decode<D, true, false>(now, &shared, done, out, l);
        else if (group > 4)
            q4_decode<D, false, false>(now, &shared, done, out, l);
        else if (done.k)
            q4_decode<D, true, true>(now, &shared, done, out, l);
        else
            q4_decode<D, false, true>(now, &shared, done, out, l);
    }
}

template <uint32_t D>
static __device__ __forceinline__ void q4_dump(const struct job &job,
                                               const struct ucm_encoding_spec &spec, uint32_t tiles)
{
    __shared__ struct kept kept;
    __shared__ struct q4_shared shared;
    __shared__ __align__(16) struct q4_scratch scratch[UCM_ENCODING_THREADS / LANES];
    uint32_t lane = threadIdx.x % LANES, warp = uniform(threadIdx.x / LANES);
    uint32_t warps = blockDim.x / LANES;
    struct cursor at, step;

    if (job.n_items == 0)
        return;
    keep(&kept, job);
    q4_prepare(spec, &shared);
    at = cursor_of(blockIdx.x * warps + warp, job.n_planes, tiles);
    step = cursor_of(gridDim.x * warps, job.n_planes, tiles);
    for (; at.item < job.n_items; cursor_add(&at, step, job.n_planes, tiles)) {
        struct q4_unit u = q4_at(job, &kept, &shared, at);

        if (u.tokens > 0)
            q4_encode<D>(u, lane, &shared, &scratch[warp]);
    }
}

#define KERNEL(METHOD, NAME, ENCODE)                                                               \
    extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)                             \
        ucm_encoding_##NAME(const struct ucm_encoding_plane *planes, uint32_t n_planes,            \
                            const struct ucm_copy_item *items, uint32_t n_items,                   \
                            struct ucm_encoding_spec spec, uint32_t tiles)                         \
    {                                                                                              \
        __shared__ struct kept kept;                                                               \
        struct job job = {planes, items, n_planes, n_items};                                       \
                                                                                                   \
        walk<METHOD, ENCODE>(job, &kept, spec, tiles);                                             \
    }

KERNEL(by_rows<fp8<UCM_ENCODING_BF16>>, fp8_bf16_load, false)
KERNEL(by_rows<fp8<UCM_ENCODING_BF16>>, fp8_bf16_dump, true)
KERNEL(by_rows<fp8<UCM_ENCODING_F16>>, fp8_f16_load, false)
KERNEL(by_rows<fp8<UCM_ENCODING_F16>>, fp8_f16_dump, true)
KERNEL(by_rows<int8<UCM_ENCODING_BF16>>, int8_bf16_load, false)
KERNEL(by_rows<int8<UCM_ENCODING_BF16>>, int8_bf16_dump, true)
KERNEL(by_rows<int8<UCM_ENCODING_F16>>, int8_f16_load, false)
KERNEL(by_rows<int8<UCM_ENCODING_F16>>, int8_f16_dump, true)
KERNEL(lossless, lossless_bf16_load, false)

#define Q4_KERNEL(NAME, CODE)                                                                      \
    extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS, 4)                          \
        ucm_encoding_q4_##NAME(const struct ucm_encoding_plane *planes, uint32_t n_planes,         \
                               const struct ucm_copy_item *items, uint32_t n_items,                \
                               struct ucm_encoding_spec spec, uint32_t tiles)                      \
    {                                                                                              \
        struct job job = {planes, items, n_planes, n_items};                                       \
                                                                                                   \
        CODE(job, spec, tiles);                                                                    \
    }

Q4_KERNEL(bf16_load, q4_load<UCM_ENCODING_BF16>)
Q4_KERNEL(bf16_dump, q4_dump<UCM_ENCODING_BF16>)
Q4_KERNEL(f16_load, q4_load<UCM_ENCODING_F16>)
Q4_KERNEL(f16_dump, q4_dump<UCM_ENCODING_F16>)

extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)
    ucm_encoding_lossless_bf16_dump(const struct ucm_encoding_plane *planes, uint32_t n_planes,
                                    const struct ucm_copy_item *items, uint32_t n_items,
                                    struct ucm_encoding_spec spec, uint32_t tiles)
{
    __shared__ struct lossless_shared shared;
    __shared__ struct kept kept;
    struct job job = {planes, items, n_planes, n_items};
    struct cursor at, step;

    if (n_items == 0)
        return;
    keep(&kept, job);
    at = cursor_of(blockIdx.x, n_planes, 1);
    step = cursor_of(gridDim.x, n_planes, 1);
    for (; at.item < n_items; cursor_add(&at, step, n_planes, 1)) {
        struct place p = place_of(&kept, job, at);

        lossless_encode_tensor(lossless_tensor(spec.tensor[p.tensor], p.raw, p.encoded),
                                &shared);
    }
}

/* The same for long tensors, with several CTAs each. */
extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)
    ucm_encoding_lossless_bf16_dump_long(const struct ucm_encoding_plane *planes, uint32_t n_planes,
                                         const struct ucm_copy_item *items, uint32_t n_items,
                                         struct ucm_encoding_spec spec, uint32_t tiles)
{
    __shared__ struct lossless_shared shared;
    __shared__ struct kept kept;
    struct job job = {planes, items, n_planes, n_items};
    uint32_t units = lossless_split(spec, (uint64_t)n_items * n_planes);
    struct cursor at, step;

    if (n_items == 0)
        return;
    keep(&kept, job);
    at = cursor_of(blockIdx.x, n_planes, units);
    step = cursor_of(gridDim.x, n_planes, units);
    for (; at.item < n_items; cursor_add(&at, step, n_planes, units)) {
        struct place p = place_of(&kept, job, at);
        struct lossless_tensor s(spec.tensor[p.tensor], p.raw, p.encoded);
        uint32_t number = at.item * n_planes + at.plane;

        if (units == 1)
            lossless_encode_alone(s, &shared);
        else if (at.tile < ucm_lossless_units(&spec.tensor[p.tensor]))
            lossless_encode_split(s, &shared, number, lossless_counts + number * units, at.tile,
                                  ucm_lossless_units(&spec.tensor[p.tensor]));
    }
}
