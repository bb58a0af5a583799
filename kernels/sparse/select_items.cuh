/* Scores and choices for many sequences in one launch.
 *
 * The work is cut into items, numbered in the order of their needs. First, each sequence's queries
 * are prepared. Then tiles of its blocks are scored. With softmax, the weights of each tile are
 * summed, then turned into shares. Then slices of long lists are looked through. Last, a choice is
 * made from each list. Thread blocks draw items from a counter, and an item waits for those that it
 * needs. These have lower numbers, so thread blocks that run have drawn them. So no wait needs a
 * thread block that has not begun, whatever else the GPU does. The last thread block that finds no
 * item sets all counters to 0 for the next launch. The bits are those of score_plain.c and
 * choose.c.
 *
 * select_item.cuh has what items have in common. select_score.cuh scores a tile, by
 * select_short.cuh or select_long.cuh, which share select_work.cuh and select_sums.cuh.
 * select_reduce.cuh makes lists of the scores. select_cut.cuh and select_choose.cuh choose. Here
 * are the items; select.cu and select_rare.cu have the kernels. */
#ifndef UCM_KERNELS_SPARSE_SELECT_ITEMS_CUH
#define UCM_KERNELS_SPARSE_SELECT_ITEMS_CUH

#include "kernels/sparse/select_choose.cuh"
#include "kernels/sparse/select_score.cuh"

/* ---- items ---- */

struct plan {
    uint32_t tile;                                   /* blocks of an item */
    uint32_t first_tile[UCM_SELECT_CUDA_SEQUENCES + 1]; /* of each sequence, counted over all */
};

static __device__ __forceinline__ uint32_t sequence_blocks(args_t a, uint32_t sequence)
{
    int32_t n = ((const int32_t *)a.n_blocks)[sequence];

    return n < 0 ? 0 : min((uint32_t)n, a.max_blocks);
}

/* Blocks of an item, at most, if sequences share the launch: their ends leave small tiles. */
#define SHARED_TILE 256u

/* How many blocks a tile has, so that each thread block gets the same number of tiles, and few. */
static __device__ __forceinline__ uint32_t tile_blocks(args_t a)
{
    uint32_t most = a.sequences > 1 ? min(a.tile, SHARED_TILE) : a.tile;
    uint64_t all = 0, whole = (uint64_t)gridDim.x * most, waves;

    for (uint32_t sequence = a.sequences > 1 ? threadIdx.x : 0; sequence < a.sequences; sequence += THREADS)
        all += sequence_blocks(a, sequence);
    if (a.sequences > 1)
        all = block_sum(all);
    waves = (all + whole - 1) / whole * gridDim.x;
    if (waves == 0)
        return most;
    all = (all + waves - 1) / waves;
    return min(most, max(32u, (uint32_t)(all + a.grain - 1) / a.grain * a.grain));
}

/* By all threads: counts the tiles of the sequences before each. */
static __device__ __forceinline__ void plan_tiles(args_t a, struct plan *p)
{
    __shared__ uint32_t part[WARPS];
    uint32_t base = 0, tile = tile_blocks(a);

    if (a.sequences == 1) {
        p->first_tile[0] = 0; /* the same by all threads */
        p->first_tile[1] = (sequence_blocks(a, 0) + tile - 1) / tile;
        p->tile = tile;
        __syncthreads();
        return;
    }
    for (uint32_t from = 0; from < a.sequences; from += THREADS) {
        uint32_t sequence = from + threadIdx.x;
        uint32_t tiles = sequence < a.sequences ? (sequence_blocks(a, sequence) + tile - 1) / tile : 0;
        uint32_t sum = tiles;

        for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
            uint32_t other = __shfl_up_sync(WARP_ALL, sum, s);

            sum += warp_lane() >= s ? other : 0;
        }
        if (warp_lane() == WARP_LANES - 1)
            part[threadIdx.x / WARP_LANES] = sum;
        __syncthreads();
        for (uint32_t i = 0; i < WARPS; i++)
            sum += i < threadIdx.x / WARP_LANES ? part[i] : 0;
        if (sequence < a.sequences)
            p->first_tile[sequence] = base + sum - tiles;
        for (uint32_t i = 0; i < WARPS; i++)
            base += part[i];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        p->first_tile[a.sequences] = base;
    p->tile = tile;
    __syncthreads();
}

static __device__ __forceinline__ struct tile tile_of(args_t a, const struct plan *p, uint32_t number)
{
    /* the last sequence whose first tile is not above number */
    uint32_t low = 0, high = a.sequences;
    struct tile t;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (p->first_tile[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    t.sequence = low;
    t.n = sequence_blocks(a, low);
    t.first = (number - p->first_tile[low]) * p->tile;
    t.count = min(p->tile, t.n - t.first);
    return t;
}

static __device__ __forceinline__ uint32_t sequence_tiles(const struct plan *p, uint32_t sequence)
{
    return p->first_tile[sequence + 1] - p->first_tile[sequence];
}

/* Returns false when there is no such item. */
template <int F, int Q, int N, int P>
static __device__ __forceinline__ bool run_item(args_t a, const struct plan *p, uint32_t item)
{
    uint32_t tiles = p->first_tile[a.sequences];
    bool softmax = a.reduce == UCM_REDUCE_SOFTMAX;
    struct tile t;

    if (a.prepares) {
        if (item < a.sequences) {
            prepare_item<F>(a, item);
            return true;
        }
        item -= a.sequences;
    }
    if (item < (softmax ? 3 : 1) * tiles) {
        t = tile_of(a, p, item % tiles);
        if (item < tiles) {
            score_item<F, Q, N, P>(a, t);
        } else if (item < 2 * tiles) {
            wait_for(&progress(a, t.sequence)->scored, sequence_tiles(p, t.sequence));
            weigh_item(a, t);
        } else {
            wait_for(&progress(a, t.sequence)->weighed, sequence_tiles(p, t.sequence));
            share_item(a, t);
        }
        return true;
    }
    item -= (softmax ? 3 : 1) * tiles;
    if (item < a.sequences * a.lists * a.slices) {
        t.sequence = item / (a.lists * a.slices);
        item %= a.lists * a.slices;
        wait_for(softmax ? &progress(a, t.sequence)->shared : &progress(a, t.sequence)->scored,
                 sequence_tiles(p, t.sequence));
        look_item(a, t.sequence, item / a.slices, item % a.slices, sequence_blocks(a, t.sequence));
        return true;
    }
    item -= a.sequences * a.lists * a.slices;
    if (item >= a.sequences * a.lists)
        return false;
    t.sequence = item / a.lists;
    if (a.slices > 0)
        wait_for(&progress(a, t.sequence)->looked, a.lists * a.slices);
    else
        wait_for(softmax ? &progress(a, t.sequence)->shared : &progress(a, t.sequence)->scored,
                 sequence_tiles(p, t.sequence));
    choose_item(a, t.sequence, item % a.lists, sequence_blocks(a, t.sequence));
    return true;
}

/* By the last thread block: for the next launch. */
static __device__ __forceinline__ void reset(args_t a)
{
    uint32_t *words = (uint32_t *)a.progress;

    for (uint32_t i = threadIdx.x; i < a.sequences * sizeof(struct ucm_select_cuda_progress) / 4; i += THREADS)
        words[i] = 0;
    if (a.reduce == UCM_REDUCE_SOFTMAX)
        for (uint32_t i = threadIdx.x; i < a.sequences * a.rows * a.q_heads; i += THREADS) {
            ((uint32_t *)a.top)[i] = 0;
            ((uint64_t *)a.sum)[i] = 0;
        }
    if (threadIdx.x < 2)
        ((uint32_t *)a.ticket)[threadIdx.x] = 0;
}

template <int F, int Q, int N, int P>
static __device__ __forceinline__ void select_all(args_t a)
{
    __shared__ struct plan p;
    __shared__ uint32_t drawn;
    uint32_t *ticket = (uint32_t *)a.ticket, next = 0;
    bool more = true;

    if (threadIdx.x == 0)
        next = atomicAdd(&ticket[0], 1);
    plan_tiles(a, &p);
    while (more) {
        if (threadIdx.x == 0)
            drawn = next;
        __syncthreads();
        uint32_t item = drawn;
        /* The next item is drawn ahead. A drawn item waits only for lower numbers. The lowest that
         * is not done is running: otherwise its thread block would be at a lower one that is not
         * done. */
        if (threadIdx.x == 0)
            next = atomicAdd(&ticket[0], 1);
        more = run_item<F, Q, N, P>(a, &p, item);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        __threadfence();
        drawn = atomicAdd(&ticket[1], 1) + 1 == gridDim.x;
    }
    __syncthreads();
    if (drawn)
        reset(a);
}

#define KERNEL(name, family, queries, n)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
    ucm_select_##name##_##queries##_##n(const __grid_constant__ struct ucm_select_cuda args)       \
    {                                                                                              \
        select_all<family, queries, n, 0>(args);                                                   \
    }

/* For UCM_METRIC_ROUNDED: by the matrix units, for vectors of 32 * n channels and 4 * panels
 * queries at once. */
#define MATRIX_KERNEL(name, family, n, panels)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
    ucm_select_matrix_##name##_##n##_##panels(const __grid_constant__ struct ucm_select_cuda args) \
    {                                                                                              \
        select_all<family, 4, n, panels>(args);                                                    \
    }

#endif
