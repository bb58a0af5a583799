/* lossless: tensors of many tokens, by several CTAs. An engine may keep all layers of a block next
 * to each other, as one tensor. A CTA encodes a unit of it: neighbouring elements that share no
 * base with other units. A unit's share of the list begins where it would if each 128 elements
 * before had one escape. The tensor's last CTA closes the gaps. If a share is too small, that CTA
 * encodes the tensor again, by itself. */
#ifndef UCM_KERNELS_ENCODING_LOSSLESS_UNITS_CUH
#define UCM_KERNELS_ENCODING_LOSSLESS_UNITS_CUH

#include "kernels/encoding/lossless.cuh"

#define LOSSLESS_KEPT 8u /* entries that a lane moves at once */
#define LOSSLESS_TENSORS 1024u
#define LOSSLESS_UNITS 16384u

/* State of a launch's tensors: CTAs that are done, 0 before and after the launch; and the escapes
 * of each unit. A module's dumps run one after another, so only one launch uses it. */
static __device__ uint32_t lossless_done[LOSSLESS_TENSORS];
static __device__ uint32_t lossless_counts[LOSSLESS_UNITS];

/* The tokens of a tile, or a run of a head's. */
struct lossless_unit {
    const struct lossless_tensor &s;
    const struct lossless_shared *shared;
    uint32_t first, end, entry, room; /* as lossless_all has them */
    uint32_t tile, head, n_bases;     /* its first base, and how many */

    __device__ __forceinline__ lossless_unit(const struct lossless_tensor &of,
                                             const struct lossless_shared *kept, uint32_t number)
        : s(of), shared(kept)
    {
        uint32_t runs = (s.tokens + UCM_LOSSLESS_RUN - 1) / UCM_LOSSLESS_RUN, token, n;

        head = s.nhd ? 0 : number / runs;
        token = s.nhd ? number * UCM_LOSSLESS_TILE : number % runs * UCM_LOSSLESS_RUN;
        n = min(s.nhd ? UCM_LOSSLESS_TILE : UCM_LOSSLESS_RUN, s.tokens - token);
        tile = token / UCM_LOSSLESS_TILE;
        n_bases = s.nhd ? s.heads : (n + UCM_LOSSLESS_TILE - 1) / UCM_LOSSLESS_TILE;
        first = (s.nhd ? token * s.heads : head * s.tokens + token) * s.dim;
        end = first + n * (s.nhd ? s.heads : 1) * s.dim;
        entry = (first + 127) / 128;
        room = min(LOSSLESS_KEPT * LANES, (end + 127) / 128 - entry);
    }
    /* Base b of the unit among the tensor's. */
    __device__ __forceinline__ uint32_t base(uint32_t b) const
    {
        return s.nhd ? tile * s.heads + b : (tile + b) * s.heads + head;
    }
    __device__ __forceinline__ uint32_t base_at(uint32_t element) const
    {
        uint32_t row = s.dim_of.of(element), outer = s.inner.of(row), rest = row - outer * s.inner.d;

        return shared->bases[s.nhd ? rest : rest / UCM_LOSSLESS_TILE - tile];
    }
};

/* By the whole CTA. Returns the escapes, or more than fit. */
static __device__ __forceinline__ uint32_t lossless_encode_unit(const struct lossless_unit &unit,
                                                                struct lossless_shared *shared)
{
    uint32_t lane = threadIdx.x % LANES;

    __syncthreads(); /* the unit before is done with the shared bases */
    for (uint32_t b = threadIdx.x / LANES; b < unit.n_bases; b += UCM_ENCODING_THREADS / LANES) {
        uint32_t base = lossless_base(unit.s, unit.base(b), lane);

        if (lane == 0) {
            __stcs((uint8_t *)unit.s.bases + unit.base(b), (uint8_t)base);
            shared->bases[b] = (uint8_t)base;
        }
    }
    __syncthreads();
    return lossless_encode_part(unit, shared);
}

/* The rare case must not take registers from the others. */
static __device__ __noinline__ void lossless_encode_alone(const struct lossless_tensor &s,
                                                          struct lossless_shared *shared)
{
    lossless_encode_tensor(s, shared);
}

/* Moves the units' entries together, in place, WARPS units at a time. No unit begins before those
 * in front of it end. So entries are in registers before others overwrite them. */
static __device__ __noinline__ void lossless_join(const struct lossless_tensor &s,
                                                     struct lossless_shared *shared,
                                                     const uint32_t *counts, uint32_t n_units)
{
    const uint32_t warps = UCM_ENCODING_THREADS / LANES;
    uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, total = 0, over = 0;

    for (uint32_t u = threadIdx.x; u < n_units; u += blockDim.x)
        over |= __ldcg(counts + u) > lossless_unit(s, shared, u).room;
    if (__syncthreads_or((int)over)) {
        lossless_encode_alone(s, shared);
        return;
    }
    for (uint32_t u = 0; u < n_units; u += warps) {
        uint32_t mine = 0, to = total, entries[LOSSLESS_KEPT];
        const uint32_t *from =
            (const uint32_t *)s.list + 1 + lossless_unit(s, shared, min(u + warp, n_units - 1)).entry;

#pragma unroll
        for (uint32_t w = 0; w < warps; w++) {
            uint32_t n = u + w < n_units ? __ldcg(counts + u + w) : 0;

            to += w < warp ? n : 0;
            mine = w == warp ? n : mine;
            total += n;
        }
#pragma unroll
        for (uint32_t k = 0; k < LOSSLESS_KEPT; k++)
            entries[k] = k * LANES + lane < mine ? __ldcg(from + k * LANES + lane) : 0;
        __syncthreads();
#pragma unroll
        for (uint32_t k = 0; k < LOSSLESS_KEPT; k++)
            if (k * LANES + lane < mine)
                __stcs((uint32_t *)s.list + 1 + to + k * LANES + lane, entries[k]);
    }
    __syncthreads(); /* what lies after them was read */
    lossless_pad(s, total);
    if (threadIdx.x == 0)
        __stcs((uint32_t *)s.list, total);
}

/* Unit `number` of the launch's tensor `tensor`; the last of its units joins them. */
static __device__ __forceinline__ void lossless_encode_split(const struct lossless_tensor &s,
                                                             struct lossless_shared *shared,
                                                             uint32_t tensor, uint32_t *counts,
                                                             uint32_t number, uint32_t n_units)
{
    uint32_t count = lossless_encode_unit(lossless_unit(s, shared, number), shared);

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        __stcg(counts + number, count);
        __threadfence();
        shared->last = atomicAdd(&lossless_done[tensor], 1) == n_units - 1;
    }
    __syncthreads();
    if (!shared->last)
        return;
    __threadfence();
    if (threadIdx.x == 0)
        lossless_done[tensor] = 0;
    lossless_join(s, shared, counts, n_units);
}

/* How many units the largest of the launch's tensors has. 1: there is no space for the units'
 * state, so one CTA encodes each tensor. */
static __device__ __forceinline__ uint32_t lossless_split(const struct ucm_encoding_spec &spec,
                                                          uint64_t tensors)
{
    uint32_t most = 1;

    for (uint32_t i = 0; i < spec.n_tensors; i++)
        most = max(most, ucm_lossless_units(&spec.tensor[i]));
    return tensors <= LOSSLESS_TENSORS && tensors * most <= LOSSLESS_UNITS ? most : 1;
}

#endif
