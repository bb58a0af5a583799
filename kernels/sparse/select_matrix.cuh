/* Scores by the matrix units, for UCM_METRIC_ROUNDED: they multiply vectors of 32 N channels with 4
 * P queries of a KV head.
 *
 * Channels are taken in the order in which a thread loads them, also those of queries. A warp waits
 * for no other: it rounds its queries in registers, and loads vectors some steps ahead. */
#ifndef UCM_KERNELS_SPARSE_SELECT_MATRIX_CUH
#define UCM_KERNELS_SPARSE_SELECT_MATRIX_CUH

#include "kernels/sparse/select_halves.cuh"
#include "kernels/sparse/select_work.cuh"

#define MATRIX_BLOCKS UCM_SELECT_CUDA_MATRIX_BLOCKS

static_assert(WARPS * MATRIX_BLOCKS <= UCM_SELECT_CUDA_TILE, "a tile has blocks for all warps");

/* Steps that vectors are loaded ahead. */
template <int F> struct ahead {
    static constexpr uint32_t depth = F == UCM_SELECT_REST ? 4 : 3;
};

/* ---- queries ---- */

/* P times four queries. A lane has halves of words of query lane / 8: high ones in even eighths of
 * the lanes, low ones in odd eighths. It also has what sums of query lane % 4 are multiplied
 * with. */
template <int N, int P> struct halves {
    uint32_t word[P][2 * N];
    float step[P];
};

/* The first of the four channels of a thread's word i. */
template <int F, int N> static __device__ __forceinline__ uint32_t word_channel(uint32_t i)
{
    uint32_t at = 4 * N * quarter() + 4 * (i / 2); /* rest: the byte of the word that has it in a half */

    if (F == UCM_SELECT_REST)
        return at / 16 * WARP_LANES + at % 16 + i % 2 * 16;
    return i / 4 * 64 + quarter() * 16 + i % 4 * 4;
}

/* Where the i-th query of KV head g begins, in elements of q. */
static __device__ __forceinline__ uint64_t query_at(args_t a, uint32_t sequence, uint32_t g, uint32_t i)
{
    uint32_t group = a.q_heads / a.kv_heads, row = i / group;

    return sequence * a.q_stride + ((uint64_t)row * a.q_heads + g * group + i - row * group) * a.head_dim;
}

/* The halves of the query at element `at`. Returns what its sums are multiplied with. */
template <int F, int N>
static __device__ __forceinline__ float round_halves(args_t a, uint64_t at, uint32_t word[2 * N])
{
    bool low = threadIdx.x / 4 % 2 != 0;
    float x[2 * N][4];
    struct grid grid;

#pragma unroll
    for (uint32_t i = 0; i < 2 * N; i++)
        query_word(a, at, word_channel<F, N>(i), x[i]);
    grid = grid_of<F, N, false, 2 * N>(a, x);
#pragma unroll
    for (uint32_t i = 0; i < 2 * N; i++) {
        int32_t n[4];

        to_integers(grid, x[i], n);
        word[i] = pack_halves(n, low);
    }
    return step_of<F>(grid);
}

template <int F, int N, int P>
static __device__ __forceinline__ void load_halves(args_t a, uint32_t sequence, uint32_t g, uint32_t first,
                                                   struct halves<N, P> *to)
{
#pragma unroll
    for (uint32_t p = 0; p < P; p++) {
        uint32_t query = min(first + 4 * p + warp_lane() / 8, a.queries_a_head - 1);
        float step = round_halves<F, N>(a, query_at(a, sequence, g, query), to->word[p]);

        to->step[p] = __shfl_sync(WARP_ALL, step, quarter() * 8);
    }
}

/* ---- vectors ---- */

/* A thread's quarter of two blocks' vectors. */
template <int F, int N> struct pair {
    uint32_t word[2][quarter_of<F, N>::words];
    uint16_t scale[2];
};

/* The next step to load, and where its blocks' summaries are. */
struct next {
    uint32_t block, v;
    const uint8_t *summary[2];
};

static __device__ __forceinline__ void next_blocks(const struct work &w, struct next *n)
{
    n->v = 0;
#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
        n->summary[k] = (const uint8_t *)w.summary[min(n->block + 8 * k + warp_lane() / 4, w.count)];
}

template <int WORDS>
static __device__ __forceinline__ void load_words(args_t a, const uint8_t *from, uint32_t *to)
{
    if (!a.wide)
#pragma unroll
        for (uint32_t i = 0; i < WORDS; i++)
            to[i] = __ldg((const uint32_t *)from + i);
    else if constexpr (WORDS == 2)
        *(uint2 *)to = __ldg((const uint2 *)from);
    else
        *(uint4 *)to = __ldg((const uint4 *)from);
}

template <int F, int N>
static __device__ __forceinline__ void load_pair(args_t a, const struct work &w, struct next *n,
                                                 struct pair<F, N> *to)
{
    constexpr uint32_t WORDS = quarter_of<F, N>::words, AT_ONCE = WORDS < 4 ? WORDS : 4;
    uint32_t vector = w.g * a.vectors + n->v;

    if (n->block >= w.count)
        return;
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const uint8_t *from = n->summary[k] + a.array[0] + vector * a.vector_bytes + quarter() * AT_ONCE * 4;

#pragma unroll
        for (uint32_t i = 0; i < WORDS; i += AT_ONCE)
            load_words<AT_ONCE>(a, from + 16 * i, to->word[k] + i);
        to->scale[k] = __ldg((const uint16_t *)(n->summary[k] + a.scale[0]) + vector);
    }
    if (++n->v == a.vectors) {
        n->block += w.step;
        next_blocks(w, n);
    }
}

/* ---- scores ---- */

/* What the vectors of two blocks give, for each of P queries. */
template <int F, int P> struct scores {
    struct gathered<F> of[P][2];
};

template <int F, int N, int P>
static __device__ __forceinline__ void add_pair(args_t a, const struct halves<N, P> &q, const struct pair<F, N> &x,
                                                uint32_t v, struct scores<F, P> *to)
{
    int32_t sums[P][4] = {};

#pragma unroll
    for (uint32_t k = 0; k < N; k++) {
        uint32_t vectors[4];

        channels_of<F, N>(x.word, k, vectors);
#pragma unroll
        for (uint32_t p = 0; p < P; p++)
            multiply(sums[p], vectors, q.word[p] + 2 * k);
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        float s = ucm_bf16_decode(x.scale[k]);

#pragma unroll
        for (uint32_t p = 0; p < P; p++) {
            float sum = (float)(256 * sums[p][2 * k] + sums[p][2 * k + 1]) * q.step[p];

            to->of[p][k].add(finish<F>(a, &sum, &s, 0, v));
        }
    }
}

template <int F, int N, int P>
static __device__ __forceinline__ void put_scores(args_t a, const struct work &w, uint32_t block,
                                                  const struct scores<F, P> &from)
{
#pragma unroll
    for (uint32_t p = 0; p < P; p++)
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            uint32_t b = block + 8 * k + warp_lane() / 4, query = 4 * p + quarter();
            float x = from.of[p][k].score();

            if (b < w.count && query < w.queries)
                w.out[query * a.raw_pitch + b] = ucm_is_nan(x) ? -ucm_inf() : x;
        }
}

/* By a warp: its blocks, by the queries of one job. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_matrix(args_t a, const struct work &w, const struct halves<N, P> &q)
{
    constexpr uint32_t DEPTH = ahead<F>::depth;
    struct pair<F, N> ring[DEPTH];
    struct next next = {w.first, 0, {}};
    struct scores<F, P> scores = {};
    uint32_t block = w.first, v = 0;

    next_blocks(w, &next);
#pragma unroll
    for (uint32_t i = 0; i < DEPTH; i++)
        load_pair<F, N>(a, w, &next, &ring[i]);
    while (block < w.count)
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) {
            if (block >= w.count)
                break;
            add_pair<F, N, P>(a, q, ring[i], v, &scores);
            load_pair<F, N>(a, w, &next, &ring[i]);
            if (++v < a.vectors)
                continue;
            put_scores<F, N, P>(a, w, block, scores);
            scores = {};
            v = 0;
            block += w.step;
        }
}

/* The whole tile at once. The numbers of its blocks are on their way while the queries are
 * rounded. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_tile_matrix(args_t a, const struct tile &t)
{
    uint32_t jobs = a.kv_heads * ((a.queries_a_head + 4 * P - 1) / (4 * P)), warp = threadIdx.x / WARP_LANES;
    uint32_t ways = jobs < WARPS ? WARPS / jobs : 1, number = block_number(a, t), first = 0;
    uint32_t job = warp < ways * jobs ? warp % jobs : jobs;
    struct halves<N, P> q;
    struct work w = {};

    w.summary = summaries_at(a);
    w.count = t.count;
    w.first = warp / jobs * MATRIX_BLOCKS;
    w.step = ways * MATRIX_BLOCKS;
    for (bool known = false; job < jobs || !known; job += WARPS) {
        if (job < jobs) {
            first = job / a.kv_heads * 4 * P;
            load_halves<F, N, P>(a, t.sequence, job % a.kv_heads, first, &q);
        }
        if (!known) {
            put_summaries(a, t, number);
            __syncthreads();
            known = true;
        }
        if (job >= jobs)
            break;
        w.g = job % a.kv_heads;
        w.queries = min(4u * P, a.queries_a_head - first);
        w.out = (float *)shared + (w.g * a.queries_a_head + first) * a.raw_pitch;
        score_matrix<F, N, P>(a, w, q);
    }
    __syncthreads();
}

#endif
