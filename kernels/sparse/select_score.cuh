/* Scores of a tile's blocks. */
#ifndef UCM_KERNELS_SPARSE_SELECT_SCORE_CUH
#define UCM_KERNELS_SPARSE_SELECT_SCORE_CUH

#include "kernels/sparse/select_long.cuh"
#include "kernels/sparse/select_matrix.cuh"
#include "kernels/sparse/select_reduce.cuh"
#include "kernels/sparse/select_short.cuh"

/* The lists' scores of a chunk, from its queries' in `raw`. */
static __device__ __noinline__ void reduce(args_t a, const struct tile &t, uint32_t chunk, const float *raw)
{
    uint32_t first = chunk * a.chunk;
    struct tile part = {t.sequence, t.n, t.first + first, min(a.chunk, t.count - first)};

    if (a.reduce == UCM_REDUCE_SOFTMAX)
        keep_raw(a, part, raw);
    else
        reduce_chunk(a, part, raw);
}

/* By all threads. The tile's summaries are known, and the sequence's queries are prepared. */
template <int F>
static __device__ __forceinline__ void tile_begin(args_t a, const struct tile &t)
{
    uint32_t number = block_number(a, t);

    if (!a.prepares)
        prepare_queries<F>(a, t.sequence, prepared(a, t.sequence));
    put_summaries(a, t, number);
    if (a.prepares)
        wait_for(&progress(a, t.sequence)->prepared, 1);
    else
        __syncthreads();
}

/* The whole tile at once. Each warp goes through it for each of its jobs. Queries that no item
 * prepared lie where the scores go. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_tile(args_t a, const struct tile &t)
{
    struct jobs jobs = jobs_of<Q>(a);
    uint32_t warp = threadIdx.x / WARP_LANES, job = warp % jobs.n;
    float *raw = (float *)shared;
    struct work w = {};

    w.summary = summaries_at(a);
    w.count = warp < jobs.ways * jobs.n || jobs.n > WARPS ? t.count : 0;
    do {
        struct queries<F, Q, N> q;
        struct feed f;

        work_begin<Q>(a, jobs, job, prepared(a, t.sequence), raw, &w);
        feed_begin<F, N>(a, w, &f);
        load_queries<F, Q, N>(a, w, &q);
        if (!a.prepares)
            __syncthreads();
        score_short<F, Q, N>(a, w, q, &f);
        __syncwarp(); /* before the ring is filled again */
        job += WARPS;
    } while (job < jobs.n);
    __syncthreads();
    reduce(a, t, 0, raw);
}

/* By a warp: one job of a chunk. */
template <int F, int Q>
static __device__ __forceinline__ void score_job(args_t a, const struct work &w)
{
    if constexpr (F == UCM_SELECT_HASH)
        score_hash<Q>(a, w);
    else
        score_long<F, Q>(a, w);
}

/* Vectors of any length by chunks, or a tile as one chunk. If many queries share summaries, those
 * of the next chunk are on their way while a chunk is scored and the one before is reduced. */
template <int F, int Q>
static __device__ __forceinline__ void score_chunks(args_t a, const struct tile &t)
{
    uint32_t chunks = (t.count + a.chunk - 1) / a.chunk, raw_floats = a.rows * a.q_heads * a.raw_pitch;
    uint32_t warp = threadIdx.x / WARP_LANES;
    const uint64_t *summary = summaries_at(a);
    struct jobs jobs = jobs_of<Q>(a);
    struct work w = {};

    for (uint32_t i = 0; i + 1 < UCM_SELECT_CUDA_STAGES && a.staged; i++)
        stage_chunk(a, summary, t.count, i);
    for (uint32_t i = 0; i < chunks; i++) {
        float *raw = (float *)shared + i % 2 * raw_floats;

        if (a.staged)
            stage_wait();
        __syncthreads(); /* chunk i is there, and i - 1 scored */
        if (a.staged) {
            stage_chunk(a, summary, t.count, i + UCM_SELECT_CUDA_STAGES - 1);
            w.stage = (const uint8_t *)shared + a.stage_at + i % UCM_SELECT_CUDA_STAGES * a.chunk * a.staged;
        }
        if (i > 0)
            reduce(a, t, i - 1, (const float *)shared + (i - 1) % 2 * raw_floats);
        w.summary = summary + i * a.chunk;
        w.count = min(a.chunk, t.count - i * a.chunk);
        if (warp >= jobs.ways * jobs.n)
            continue;
        for (uint32_t job = warp % jobs.n; job < jobs.n; job += WARPS) {
            work_begin<Q>(a, jobs, job, prepared(a, t.sequence), raw, &w);
            score_job<F, Q>(a, w);
        }
    }
    __syncthreads();
    reduce(a, t, chunks - 1, (const float *)shared + (chunks - 1) % 2 * raw_floats);
}

template <int F, int Q, int N, int P>
static __device__ __forceinline__ void score_item(args_t a, const struct tile &t)
{
    if constexpr (P > 0) {
        score_tile_matrix<F, N, P>(a, t);
        reduce(a, t, 0, (const float *)shared);
    } else {
        tile_begin<F>(a, t);
        if constexpr (N > 0)
            score_tile<F, Q, N>(a, t);
        else
            score_chunks<F, Q>(a, t);
    }
    item_done(&progress(a, t.sequence)->scored);
}

#endif
