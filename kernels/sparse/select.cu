/* Scores and choices for many chains in one launch.
 *
 * The work is cut into items, numbered in the order of their needs: each chain's queries are prepared;
 * tiles of its blocks are scored; with softmax the weights of each tile are summed, then shared out;
 * slices of long lists are looked through; at last a choice is made from each list. Thread blocks draw
 * items from a counter, and an item waits for those that it needs. They have lower numbers, so thread
 * blocks that run have drawn them: no wait needs a thread block that has not begun, whatever else the GPU
 * does. The last thread block that finds no item sets all counters to 0 for the next launch. The bits are
 * those of score_plain.c and choose.c.
 *
 * select_item.cuh has what items have in common, select_score.cuh the scores, select_reduce.cuh what
 * makes lists of them, select_cut.cuh and select_choose.cuh the choice; here are the items and the kernels. */
#include "kernels/sparse/select_choose.cuh"
#include "kernels/sparse/select_score.cuh"

/* ---- items ---- */

struct plan {
    uint32_t tile;                                   /* blocks of an item */
    uint32_t first_tile[UCM_SELECT_CUDA_CHAINS + 1]; /* of each chain, counted over all */
};

static __device__ __forceinline__ uint32_t chain_blocks(args_t a, uint32_t chain)
{
    int32_t n = ((const int32_t *)a.n_blocks)[chain];

    return n < 0 ? 0 : min((uint32_t)n, a.max_blocks);
}

/* Of an item where chains share the launch, at most: their ends leave small tiles. */
#define SHARED_TILE 256u

/* So many blocks that each thread block gets as many tiles, and few of them. */
static __device__ __forceinline__ uint32_t tile_blocks(args_t a)
{
    uint32_t most = a.chains > 1 ? min(a.tile, SHARED_TILE) : a.tile;
    uint64_t all = 0, whole = (uint64_t)gridDim.x * most, waves;

    for (uint32_t chain = a.chains > 1 ? threadIdx.x : 0; chain < a.chains; chain += THREADS)
        all += chain_blocks(a, chain);
    if (a.chains > 1)
        all = block_sum(all);
    waves = (all + whole - 1) / whole * gridDim.x;
    if (waves == 0)
        return most;
    return min(most, max(32u, (uint32_t)((all + waves - 1) / waves + 7) / 8 * 8));
}

/* By all threads: counts the tiles of the chains before each. */
static __device__ __forceinline__ void plan_tiles(args_t a, struct plan *p)
{
    __shared__ uint32_t part[WARPS];
    uint32_t base = 0, tile = tile_blocks(a);

    if (a.chains == 1) {
        p->first_tile[0] = 0; /* the same by all threads */
        p->first_tile[1] = (chain_blocks(a, 0) + tile - 1) / tile;
        p->tile = tile;
        __syncthreads();
        return;
    }
    for (uint32_t from = 0; from < a.chains; from += THREADS) {
        uint32_t chain = from + threadIdx.x;
        uint32_t tiles = chain < a.chains ? (chain_blocks(a, chain) + tile - 1) / tile : 0;
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
        if (chain < a.chains)
            p->first_tile[chain] = base + sum - tiles;
        for (uint32_t i = 0; i < WARPS; i++)
            base += part[i];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        p->first_tile[a.chains] = base;
    p->tile = tile;
    __syncthreads();
}

static __device__ __forceinline__ struct tile tile_of(args_t a, const struct plan *p, uint32_t number)
{
    uint32_t low = 0, high = a.chains; /* the last chain whose first tile is not above number */
    struct tile t;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (p->first_tile[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    t.chain = low;
    t.n = chain_blocks(a, low);
    t.first = (number - p->first_tile[low]) * p->tile;
    t.count = min(p->tile, t.n - t.first);
    return t;
}

static __device__ __forceinline__ uint32_t chain_tiles(const struct plan *p, uint32_t chain)
{
    return p->first_tile[chain + 1] - p->first_tile[chain];
}

/* The lists' scores of a chunk, from its queries' in `raw`. */
static __device__ __noinline__ void reduce(args_t a, const struct tile &t, uint32_t chunk, const float *raw)
{
    uint32_t first = chunk * a.chunk;
    struct tile part = {t.chain, t.n, t.first + first, min(a.chunk, t.count - first)};

    if (a.reduce == UCM_REDUCE_SOFTMAX)
        keep_raw(a, part, raw);
    else
        reduce_chunk(a, part, raw);
}

/* A block's digest; LACKS is set if it has none. */
static __device__ __forceinline__ uint64_t digest_of(args_t a, uint32_t id)
{
    return id < a.blocks ? a.digests + id * a.block_stride : a.digests | LACKS;
}

/* The whole tile at once: a warp has one job at most, so each digest is read once or twice. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_whole(args_t a, const struct tile &t, uint64_t *digest)
{
    struct jobs jobs = jobs_of<Q>(a);
    uint32_t warp = threadIdx.x / WARP_LANES, id = a.blocks;
    struct queries<F, Q, N> q;
    struct work w = {};

    static_assert(UCM_SELECT_CUDA_TILE <= THREADS, "a thread has one block");
    if (threadIdx.x < t.count)
        id = ((const uint32_t *)a.table)[t.chain * a.table_stride + t.first + threadIdx.x];
    w.chain = t.chain;
    w.digest = digest;
    work_begin<Q>(a, jobs, warp % jobs.n, &w);
    if constexpr (N > 0)
        load_queries<F, Q, N>(a, w, &q);
    if (threadIdx.x < t.count)
        digest[threadIdx.x] = digest_of(a, id);
    if (threadIdx.x < PAD)
        digest[t.count + threadIdx.x] = digest_of(a, a.blocks);
    if (N > 0)
        __syncthreads();
    else
        wait_for(&progress(a, t.chain)->prepared, 1);
    w.count = warp < jobs.ways * jobs.n ? t.count : 0;
    score_job<F, Q, N>(a, w, (float *)shared, q);
    __syncthreads();
    reduce(a, t, 0, (const float *)shared);
}

/* By chunks, whose digests many queries share: the next one's are on their way while a chunk is scored, and
 * what was scored before is reduced. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_chunks(args_t a, const struct tile &t, uint64_t *digest)
{
    uint32_t chunks = (t.count + a.chunk - 1) / a.chunk, raw_floats = a.rows * a.q_heads * a.raw_pitch;
    struct work w = {};

    w.chain = t.chain;
    for (uint32_t b = threadIdx.x; b < t.count + PAD; b += THREADS) {
        uint32_t id = a.blocks;

        if (b < t.count)
            id = ((const uint32_t *)a.table)[t.chain * a.table_stride + t.first + b];
        digest[b] = digest_of(a, id);
    }
    if (N > 0)
        __syncthreads();
    else
        wait_for(&progress(a, t.chain)->prepared, 1);
    for (uint32_t i = 0; i + 1 < UCM_SELECT_CUDA_STAGES && a.staged; i++)
        stage_chunk(a, digest, t.count, i);
    for (uint32_t i = 0; i < chunks; i++) {
        float *raw = (float *)shared + i % 2 * raw_floats;

        if (a.staged)
            stage_wait();
        __syncthreads(); /* chunk i is there, and i - 1 scored */
        if (a.staged) {
            stage_chunk(a, digest, t.count, i + UCM_SELECT_CUDA_STAGES - 1);
            w.stage = (const uint8_t *)shared + a.stage_at + i % UCM_SELECT_CUDA_STAGES * a.chunk * a.staged;
        }
        if (i > 0)
            reduce(a, t, i - 1, (const float *)shared + (i - 1) % 2 * raw_floats);
        w.digest = digest + i * a.chunk;
        w.count = min(a.chunk, t.count - i * a.chunk);
        score_jobs<F, Q, N>(a, w, raw);
    }
    __syncthreads();
    reduce(a, t, chunks - 1, (const float *)shared + (chunks - 1) % 2 * raw_floats);
}

template <int F, int Q, int N>
static __device__ __forceinline__ void score_item(args_t a, const struct tile &t)
{
    __shared__ uint64_t digest[UCM_SELECT_CUDA_TILE + PAD];

    if (jobs_of<Q>(a).n <= WARPS)
        score_whole<F, Q, N>(a, t, digest);
    else
        score_chunks<F, Q, N>(a, t, digest);
    item_done(&progress(a, t.chain)->scored);
}

/* Returns false when there is no such item. */
template <int F, int Q, int N>
static __device__ __forceinline__ bool run_item(args_t a, const struct plan *p, uint32_t item)
{
    uint32_t tiles = p->first_tile[a.chains];
    bool softmax = a.reduce == UCM_REDUCE_SOFTMAX;
    struct tile t;

    if (N == 0) {
        if (item < a.chains) {
            prepare_item<F>(a, item);
            return true;
        }
        item -= a.chains;
    }
    if (item < (softmax ? 3 : 1) * tiles) {
        t = tile_of(a, p, item % tiles);
        if (item < tiles) {
            score_item<F, Q, N>(a, t);
        } else if (item < 2 * tiles) {
            wait_for(&progress(a, t.chain)->scored, chain_tiles(p, t.chain));
            weigh_item(a, t);
        } else {
            wait_for(&progress(a, t.chain)->weighed, chain_tiles(p, t.chain));
            share_item(a, t);
        }
        return true;
    }
    item -= (softmax ? 3 : 1) * tiles;
    if (item < a.chains * a.lists * a.slices) {
        t.chain = item / (a.lists * a.slices);
        item %= a.lists * a.slices;
        wait_for(softmax ? &progress(a, t.chain)->shared : &progress(a, t.chain)->scored,
                 chain_tiles(p, t.chain));
        look_item(a, t.chain, item / a.slices, item % a.slices, chain_blocks(a, t.chain));
        return true;
    }
    item -= a.chains * a.lists * a.slices;
    if (item >= a.chains * a.lists)
        return false;
    t.chain = item / a.lists;
    if (a.slices > 0)
        wait_for(&progress(a, t.chain)->looked, a.lists * a.slices);
    else
        wait_for(softmax ? &progress(a, t.chain)->shared : &progress(a, t.chain)->scored,
                 chain_tiles(p, t.chain));
    choose_item(a, t.chain, item % a.lists, chain_blocks(a, t.chain));
    return true;
}

/* By the last thread block: for the next launch. */
static __device__ __forceinline__ void reset(args_t a)
{
    uint32_t *words = (uint32_t *)a.progress;

    for (uint32_t i = threadIdx.x; i < a.chains * sizeof(struct ucm_select_cuda_progress) / 4; i += THREADS)
        words[i] = 0;
    if (a.reduce == UCM_REDUCE_SOFTMAX)
        for (uint32_t i = threadIdx.x; i < a.chains * a.rows * a.q_heads; i += THREADS) {
            ((uint32_t *)a.top)[i] = 0;
            ((uint64_t *)a.sum)[i] = 0;
        }
    if (threadIdx.x < 2)
        ((uint32_t *)a.ticket)[threadIdx.x] = 0;
}

template <int F, int Q, int N>
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
        /* The next is drawn ahead. An item drawn waits only for lower numbers: the lowest that is not
         * done is being run, or waits behind a lower one, which can't be. */
        if (threadIdx.x == 0)
            next = atomicAdd(&ticket[0], 1);
        more = run_item<F, Q, N>(a, &p, item);
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
        select_all<family, queries, n>(args);                                                      \
    }
#define KERNELS(name, family)                                                                      \
    KERNEL(name, family, 1, 0)                                                                     \
    KERNEL(name, family, 1, 2)                                                                     \
    KERNEL(name, family, 1, 4)                                                                     \
    KERNEL(name, family, 4, 0)                                                                     \
    KERNEL(name, family, 4, 2)                                                                     \
    KERNEL(name, family, 4, 4)

KERNELS(dot, UCM_SELECT_DOT)
KERNELS(box, UCM_SELECT_BOX)
KERNELS(stats, UCM_SELECT_STATS)
KERNELS(rest, UCM_SELECT_REST)
KERNEL(l2, UCM_SELECT_L2, 1, 0)
KERNEL(l2, UCM_SELECT_L2, 4, 0)
KERNEL(hash, UCM_SELECT_HASH, 1, 0)
KERNEL(hash, UCM_SELECT_HASH, 4, 0)
