/* What warps score: jobs, blocks' summaries, and where the scores go. */
#ifndef UCM_KERNELS_SPARSE_SELECT_WORK_CUH
#define UCM_KERNELS_SPARSE_SELECT_WORK_CUH

#include "kernels/sparse/select_sums.cuh"

#define PAD UCM_SELECT_CUDA_PAD

/* What one warp scores of a chunk: queries of a KV head with blocks first, first + step .. */
struct work {
    const uint64_t *summary; /* of the chunk's blocks, in shared memory */
    const uint8_t *stage;   /* or a copy of them, in shared memory */
    const float *query;     /* the first, prepared */
    float *out;             /* its scores */
    uint32_t g, queries;
    uint32_t team;               /* of the warp */
    uint32_t first, step, count; /* blocks */
};

/* A job is Q queries of one KV head. A warp has one or more. If there are fewer jobs than warps,
 * several warps share a job's blocks. */
struct jobs {
    uint32_t n, ways;
};

template <int Q> static __device__ __forceinline__ struct jobs jobs_of(args_t a)
{
    uint32_t n = a.kv_heads * ((a.queries_a_head + Q - 1) / Q);

    return jobs{n, n < WARPS ? WARPS / n : 1};
}

/* raw: of a chunk's scores, those of query 0. */
template <int Q>
static __device__ __forceinline__ void work_begin(args_t a, const struct jobs &jobs, uint32_t job,
                                                  const float *queries, float *raw, struct work *w)
{
    uint32_t first = job / a.kv_heads * Q, query;

    w->team = threadIdx.x % WARP_LANES / TEAM;
    w->first = threadIdx.x / WARP_LANES / jobs.n * TEAMS;
    w->step = jobs.ways * TEAMS;
    w->g = job % a.kv_heads;
    w->queries = min((uint32_t)Q, a.queries_a_head - first);
    query = w->g * a.queries_a_head + first;
    w->query = queries + query * a.query_floats;
    w->out = raw + query * a.raw_pitch;
}

/* The query that a thread has in place i. */
template <int Q>
static __device__ __forceinline__ const float *query_in(args_t a, const struct work &w, uint32_t i)
{
    return w.query + min(query_of<Q>(i), w.queries - 1) * a.query_floats;
}

static __device__ __forceinline__ uint64_t *summaries_at(args_t a)
{
    return (uint64_t *)(shared + a.summary_at / 4);
}

static_assert(UCM_SELECT_CUDA_TILE <= THREADS, "a thread has one block");

/* The number of this thread's block of the tile. */
static __device__ __forceinline__ uint32_t block_number(args_t a, const struct tile &t)
{
    if (threadIdx.x >= t.count)
        return a.blocks;
    return __ldg((const uint32_t *)a.table + t.sequence * a.table_stride + t.first + threadIdx.x);
}

/* By all threads: where the tile's summaries are; a barrier must follow. */
static __device__ __forceinline__ void put_summaries(args_t a, const struct tile &t, uint32_t number)
{
    uint64_t *summary = summaries_at(a);

    if (threadIdx.x < t.count)
        summary[threadIdx.x] = number < a.blocks ? a.summaries + number * a.block_stride : a.poison;
    if (threadIdx.x < PAD)
        summary[t.count + threadIdx.x] = a.poison;
}

#endif
