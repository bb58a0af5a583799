/* The kernels: each warp takes tiles of sections, in the order in which they lie in the slots. */
#include "kernels/encoding/fp8.cuh"
#include "kernels/encoding/int8.cuh"
#include "kernels/encoding/lossless_units.cuh"
#include "kernels/encoding/q4.cuh"

template <class M> struct by_rows {
    template <bool ENCODE>
    static __device__ __forceinline__ void unit(const struct ucm_encoding_spec &spec,
                                                uint32_t section, uint64_t plain, uint64_t coded,
                                                uint32_t number, uint32_t lane)
    {
        const struct ucm_encoding_section &s = spec.section[section];

        uint32_t run = M::CHANNELS ? ucm_int8_run(&spec, section) : 0;

        if (M::CHANNELS && run > 0)
            columns_tile<M::DTYPE, ENCODE>(s, run, plain, coded, number, lane);
        else
            rows_tile<M, ENCODE>(s, plain, coded, number, lane);
    }
};

struct lossless {
    template <bool ENCODE>
    static __device__ __forceinline__ void unit(const struct ucm_encoding_spec &spec,
                                                uint32_t section, uint64_t plain, uint64_t coded,
                                                uint32_t number, uint32_t lane)
    {
        lossless_decode(lossless_section(spec.section[section], plain, coded), number, lane);
    }
};

/* The first items and planes, as each CTA keeps them: items lie in the host's memory, and each read of
 * one takes as long as many tiles. */
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

/* One section of one block. */
struct place {
    uint32_t section;
    uint64_t plain, coded;
};

static __device__ __forceinline__ struct place place_of(const struct kept *kept,
                                                        const struct job &job, uint64_t number)
{
    uint32_t i = (uint32_t)(number / job.n_planes), p = (uint32_t)(number % job.n_planes);
    const struct ucm_encoding_plane *plane = p < KEPT_PLANES ? &kept->planes[p] : &job.planes[p];
    const struct ucm_copy_item *item = i < KEPT_ITEMS ? &kept->items[i] : &job.items[i];
    struct place at = {plane->section, plane->base + item->block * plane->stride,
                       item->slot + plane->slot_offset};

    return at;
}

template <class METHOD, bool ENCODE>
static __device__ __forceinline__ void walk(const struct job &job, struct kept *kept,
                                            const struct ucm_encoding_spec &spec, uint32_t tiles)
{
    uint32_t lane = threadIdx.x % LANES;
    uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    uint64_t warps = (uint64_t)gridDim.x * blockDim.x / LANES;
    uint64_t total = (uint64_t)job.n_items * job.n_planes * tiles;

    keep(kept, job);
    for (uint64_t t = warp; t < total; t += warps) {
        struct place p = place_of(kept, job, t / tiles);

        METHOD::template unit<ENCODE>(spec, p.section, p.plain, p.coded, (uint32_t)(t % tiles),
                                      lane);
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
KERNEL(q4<UCM_ENCODING_BF16>, q4_bf16_load, false)
KERNEL(q4<UCM_ENCODING_BF16>, q4_bf16_dump, true)
KERNEL(q4<UCM_ENCODING_F16>, q4_f16_load, false)
KERNEL(q4<UCM_ENCODING_F16>, q4_f16_dump, true)
KERNEL(lossless, lossless_bf16_load, false)

extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)
    ucm_encoding_lossless_bf16_dump(const struct ucm_encoding_plane *planes, uint32_t n_planes,
                                    const struct ucm_copy_item *items, uint32_t n_items,
                                    struct ucm_encoding_spec spec, uint32_t tiles)
{
    __shared__ struct lossless_shared shared;
    __shared__ struct kept kept;
    struct job job = {planes, items, n_planes, n_items};
    uint64_t total = (uint64_t)n_items * n_planes;

    keep(&kept, job);
    for (uint64_t t = blockIdx.x; t < total; t += gridDim.x) {
        struct place p = place_of(&kept, job, t);

        lossless_encode_section(lossless_section(spec.section[p.section], p.plain, p.coded),
                                &shared);
    }
}

/* The same of long sections: several CTAs each. */
extern "C" __global__ void __launch_bounds__(UCM_ENCODING_THREADS)
    ucm_encoding_lossless_bf16_dump_long(const struct ucm_encoding_plane *planes, uint32_t n_planes,
                                         const struct ucm_copy_item *items, uint32_t n_items,
                                         struct ucm_encoding_spec spec, uint32_t tiles)
{
    __shared__ struct lossless_shared shared;
    __shared__ struct kept kept;
    struct job job = {planes, items, n_planes, n_items};
    uint64_t sections = (uint64_t)n_items * n_planes;
    uint32_t units = lossless_split(spec, sections);

    keep(&kept, job);
    for (uint64_t t = blockIdx.x; t < sections * units; t += gridDim.x) {
        struct place p = place_of(&kept, job, t / units);
        struct lossless_section s(spec.section[p.section], p.plain, p.coded);
        uint32_t number = (uint32_t)(t % units);

        if (units == 1)
            lossless_encode_alone(s, &shared);
        else if (number < ucm_lossless_units(&spec.section[p.section]))
            lossless_encode_split(s, &shared, (uint32_t)(t / units),
                                  lossless_counts + t / units * units, number,
                                  ucm_lossless_units(&spec.section[p.section]));
    }
}
