/* Tiles of summaries on their way from the GPU's memory to shared memory. One warp of a thread
 * block draws tiles and begins the copies of their summaries, whole ones, for the warps that
 * score. */
#ifndef UCM_KERNELS_SPARSE_STREAM_PIPE_CUH
#define UCM_KERNELS_SPARSE_STREAM_PIPE_CUH

#include "kernels/sparse/list_score.cuh"
#include "kernels/sparse/stream.h"

#define SCORERS UCM_SELECT_STREAM_SCORERS
#define CHOOSERS UCM_SELECT_STREAM_CHOOSERS
#define STAGES UCM_SELECT_STREAM_STAGES
#define NO_SEQUENCE UINT32_MAX

/* Stages and what is in them. */
struct pipe {
    uint64_t full[STAGES], empty[STAGES]; /* mbarriers */
    struct tile tile[STAGES];             /* its sequence is NO_SEQUENCE after the last */
};

/* ---- mbarriers ---- */

static __device__ __forceinline__ uint32_t address_of(const void *shared_memory)
{
    return (uint32_t)__cvta_generic_to_shared(shared_memory);
}

static __device__ __forceinline__ void barrier_init(uint64_t *b, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(b)), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(b)) : "memory");
}

/* Arrives, and so many bytes will. */
static __device__ __forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(b)), "r"(bytes) : "memory");
}

/* Waits for the end of a phase: 0 for the first, then 1, then 0 .. */
static __device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t phase)
{
    uint32_t done;

    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(address_of(b)), "r"(phase)
                     : "memory");
    while (!done);
}

static __device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t *from, uint32_t bytes, uint64_t *b)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(address_of(b))
                 : "memory");
}

static __device__ __forceinline__ void pipe_init(struct pipe *p)
{
    for (uint32_t s = 0; s < STAGES; s++) {
        barrier_init(&p->full[s], 1);
        barrier_init(&p->empty[s], SCORERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* ---- tiles ---- */

/* A tile: a group of blocks for each warp that has the same KV head. */
static __device__ __forceinline__ uint32_t tile_blocks(args_t a)
{
    return SCORERS / a.kv_heads * GROUP;
}

static __device__ __forceinline__ uint32_t sequence_blocks(args_t a, uint32_t sequence)
{
    int32_t n = __ldg((const int32_t *)a.n_blocks + sequence);

    return n < 0 ? 0 : min((uint32_t)n, a.max_blocks);
}

static __device__ __forceinline__ uint32_t sequence_tiles(args_t a, uint32_t sequence)
{
    uint32_t tile = tile_blocks(a);

    return (sequence_blocks(a, sequence) + tile - 1) / tile;
}

/* The sequence of tile `number`, and how many tiles the sequences before it have. From call to
 * call, numbers only grow. */
struct place {
    uint32_t sequence, before;
};

static __device__ __forceinline__ struct tile next_tile(args_t a, uint32_t number, struct place *p)
{
    struct tile t = {NO_SEQUENCE, 0, 0, 0};
    uint32_t tiles;

    for (; p->sequence < a.sequences; p->sequence++, p->before += tiles) {
        tiles = sequence_tiles(a, p->sequence);
        if (number - p->before < tiles)
            break;
    }
    if (p->sequence >= a.sequences)
        return t;
    t.sequence = p->sequence;
    t.n = sequence_blocks(a, t.sequence);
    t.first = (number - p->before) * tile_blocks(a);
    t.count = min(tile_blocks(a), t.n - t.first);
    return t;
}

/* Where block b of the tile has its summary. */
static __device__ __forceinline__ const uint8_t *summary_of(args_t a, const struct tile &t, uint32_t b)
{
    uint32_t number = __ldg((const uint32_t *)a.table + t.sequence * a.table_stride + t.first + b);

    return (const uint8_t *)(number < a.blocks ? a.summaries + number * a.block_stride : a.poison);
}

/* Copies summaries that do not lie at multiples of 16. By a warp. */
static __device__ __noinline__ void copy_plain(args_t a, const struct tile &t, uint32_t *to)
{
    for (uint32_t b = 0; b < t.count; b++) {
        const uint32_t *from = (const uint32_t *)summary_of(a, t, b);

        for (uint32_t i = warp_lane(); i < a.copy_bytes / 4; i += WARP_LANES)
            to[b * (a.staged / 4) + i] = __ldg(from + i);
    }
}

/* By a warp: begins the copies to stage s. first: the summary of the tile's block `lane`. */
static __device__ __forceinline__ void fill_stage(args_t a, const struct tile &t, const uint8_t *first, uint32_t s,
                                                  struct pipe *pipe)
{
    uint32_t *stage = shared + (a.stage_at + s * tile_blocks(a) * a.staged) / 4;
    uint32_t bytes = (a.copy_bytes + 15) / 16 * 16; /* a.wide: the next summary begins no earlier */

    if (warp_lane() == 0)
        pipe->tile[s] = t;
    if (t.sequence == NO_SEQUENCE || !a.wide) {
        if (t.sequence != NO_SEQUENCE)
            copy_plain(a, t, stage);
        __syncwarp();
        if (warp_lane() == 0)
            barrier_arrive(&pipe->full[s]);
        return;
    }
    if (warp_lane() == 0)
        barrier_expect(&pipe->full[s], t.count * bytes);
    __syncwarp();
    for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES)
        copy_bulk(address_of(stage) + b * a.staged, b < WARP_LANES ? first : summary_of(a, t, b), bytes,
                  &pipe->full[s]);
}

/* By a warp: draws tiles, one ahead, until there is none. */
static __device__ __forceinline__ void fill_pipe(args_t a, uint32_t *tickets, struct pipe *pipe)
{
    struct place place = {0, 0};
    uint32_t next = warp_lane() == 0 ? atomicAdd(tickets, 1) : 0;
    struct tile t;

    for (uint32_t i = 0;; i++) {
        uint32_t s = i % STAGES;
        const uint8_t *first = nullptr;

        t = next_tile(a, __shfl_sync(WARP_ALL, next, 0), &place);
        if (t.sequence != NO_SEQUENCE && warp_lane() == 0)
            next = atomicAdd(tickets, 1);
        if (warp_lane() < t.count)
            first = summary_of(a, t, warp_lane());
        barrier_wait(&pipe->empty[s], i / STAGES % 2 ^ 1); /* the first ones at once */
        fill_stage(a, t, first, s, pipe);
        if (t.sequence == NO_SEQUENCE)
            return;
    }
}

#endif
