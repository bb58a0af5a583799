/* From a sequence's scores in the workspace to the choices of its lists. Some warps of a thread
 * block draw lists, one at a time, while others score. A list's scores lie in shared memory. */
#ifndef UCM_KERNELS_SPARSE_STREAM_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_STREAM_CHOOSE_CUH

#include "kernels/sparse/list_choose.cuh"
#include "kernels/sparse/stream_pipe.cuh"

#define QUERIES UCM_SELECT_STREAM_QUERIES

struct stream_crew {
    /* In shared memory. */
    struct __align__(16) agreement : counts {
        uint32_t low[QUERIES], high[QUERIES]; /* sums of weights' low 16 bits, and of the others */
    };

    static __device__ __forceinline__ uint32_t size(void)
    {
        return 1;
    }
    static __device__ __forceinline__ uint32_t rank(void)
    {
        return 0;
    }
    static __device__ __forceinline__ uint32_t threads(void)
    {
        return CHOOSERS * WARP_LANES;
    }
    static __device__ __forceinline__ uint32_t thread(void)
    {
        return threadIdx.x - SCORERS * WARP_LANES;
    }
    static __device__ __forceinline__ void sync(void)
    {
        asm volatile("bar.sync 1, %0;" ::"n"(CHOOSERS * WARP_LANES) : "memory");
    }
    static __device__ __forceinline__ const uint32_t *sum_counts(agreement *s, uint32_t byte)
    {
        sync();
        return s->count[byte];
    }
    static __device__ __forceinline__ uint32_t all_poison(const agreement *s)
    {
        return s->poison;
    }
    static __device__ __forceinline__ uint32_t of_all(uint32_t x, agreement *)
    {
        return warp_lane() == 0 ? x : 0;
    }
};

typedef struct stream_crew::agreement stream_agreement;

/* ---- softmax ---- */

/* What a list's queries need for their shares. */
template <int Q> struct softmax {
    float top[Q], total[Q], by[Q]; /* by: 1 / total */
};

static __device__ __forceinline__ const float *raw_of(args_t a, const struct part &p, uint32_t i)
{
    return (const float *)a.raw + raw_list(a, p.sequence, p.list * a.queries_a_head + i) * a.pitch;
}

static __device__ __forceinline__ uint32_t weight_at(args_t a, float x, float top)
{
    return x == ucm_inf() ? 0 : ucm_weight(exp_of(a.beta * (x - top)));
}

/* A thread's four blocks from b on; rows begin at a multiple of 4. */
static __device__ __forceinline__ void four_scores(const float *raw, uint32_t b, float x[4])
{
    *(float4 *)x = __ldcg((const float4 *)(raw + b));
}

/* The sum of each query's weights. */
template <int Q>
static __device__ __forceinline__ void weigh_list(args_t a, const struct part &p, struct softmax<Q> *m,
                                                  stream_agreement *s)
{
    uint32_t sum[Q] = {};

    static_assert(Q <= QUERIES, "sums have room");
#pragma unroll
    for (uint32_t i = 0; i < Q; i++)
        m->top[i] = i < a.queries_a_head ? top_score(__ldcg((const uint32_t *)a.top + raw_list(a, p.sequence, p.list * a.queries_a_head + i)))
                                         : 0;
#pragma unroll 2
    for (uint32_t b = 4 * stream_crew::thread(); b < p.n; b += 4 * stream_crew::threads()) {
        float x[Q][4];

#pragma unroll
        for (uint32_t i = 0; i < Q; i++)
            if (i < a.queries_a_head)
                four_scores(raw_of(a, p, i), b, x[i]);
#pragma unroll
        for (uint32_t i = 0; i < Q; i++)
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
                sum[i] += i < a.queries_a_head && b + j < p.n ? weight_at(a, x[i][j], m->top[i]) : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        uint32_t low = __reduce_add_sync(WARP_ALL, sum[i] & 0xffff), high = __reduce_add_sync(WARP_ALL, sum[i] >> 16);

        if (warp_lane() == 0) {
            atomicAdd(s->low + i, low);
            atomicAdd(s->high + i, high);
        }
    }
    stream_crew::sync();
#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        m->total[i] = ucm_max(1.0f, __ull2float_rn(((uint64_t)s->high[i] << 16) + s->low[i]));
        m->by[i] = __frcp_rn(m->total[i]);
    }
}

/* Puts the list's scores, and counts their first bytes. */
template <int Q>
static __device__ __forceinline__ void share_list(args_t a, const struct part &p, const struct span &between,
                                                  const struct softmax<Q> &m, stream_agreement *s)
{
    uint32_t first = 4 * (stream_crew::thread() - warp_lane());

#pragma unroll 1
    for (uint32_t at = first; at < p.n; at += 4 * stream_crew::threads()) {
        uint32_t b = at + 4 * warp_lane();
        float x[Q][4] = {};

#pragma unroll
        for (uint32_t i = 0; i < Q; i++)
            if (i < a.queries_a_head && b < p.n)
                four_scores(raw_of(a, p, i), b, x[i]);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            struct many shares = {0, 0, 0};

#pragma unroll
            for (uint32_t i = 0; i < Q; i++)
                if (i < a.queries_a_head)
                    many_add(&shares, x[i][j] == ucm_inf() ? x[i][j]
                                                           : share_of((float)weight_at(a, x[i][j], m.top[i]), m.total[i], m.by[i]));
            put_score(p, between, b + j, b + j < p.n, many_sum(&shares, 1.0f), s);
        }
    }
}

/* ---- lists ---- */

/* By the crew: draws a list whose scores are all there; ~0: none is left. */
static __device__ __forceinline__ uint32_t draw_list(args_t a, uint32_t *ticket, stream_agreement *s)
{
    __shared__ uint32_t drawn;

    stream_crew::sync(); /* nobody reads the agreement of the list before */
    for (uint32_t i = stream_crew::thread(); i < sizeof(*s) / 4; i += stream_crew::threads())
        ((uint32_t *)s)[i] = 0;
    if (stream_crew::thread() == 0) {
        uint32_t list = atomicAdd(ticket, 1), sequence = list / a.lists;

        if (list < a.sequences * a.lists) {
            uint32_t want = sequence_tiles(a, sequence) * SCORERS;

            while (load_acquire(&progress(a, sequence)->scored) < want)
                __nanosleep(64);
        }
        drawn = list < a.sequences * a.lists ? list : ~0u;
    }
    stream_crew::sync();
    return drawn;
}

/* Q: queries of a KV head, at most. */
template <int Q>
static __device__ __forceinline__ void choose_lists(args_t a, uint32_t *ticket, stream_agreement *s)
{
    uint32_t list;

    while ((list = draw_list(a, ticket, s)) != ~0u) {
        uint32_t sequence = list / a.lists, n = sequence_blocks(a, sequence), room = min(a.room, n);
        struct part p = {sequence, list % a.lists, n, 0, n};
        struct span between = between_windows(a, n);
        struct run r = run_of<stream_crew>(p);
        struct cut cut = {~0u, 0};
        struct softmax<Q> m;

        weigh_list<Q>(a, p, &m, s);
        share_list<Q>(a, p, between, m, s);
        stream_crew::sync();
        if (room > n - (between.end - between.begin))
            cut = agree_cut<stream_crew>(a, p, r, between, room, s);
        put_answer<stream_crew>(a, p, r, between, cut, room, s);
    }
}

#endif
