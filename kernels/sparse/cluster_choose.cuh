/* A cluster as the crew that chooses from a list, whose scores are spread over the thread blocks.
 * Each sums up what it has, and gives that to the others. So all find the same cut. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_CLUSTER_CHOOSE_CUH

#include "kernels/sparse/cluster.cuh"
#include "kernels/sparse/cluster_score.cuh"
#include "kernels/sparse/list_choose.cuh"

#define CLUSTER UCM_SELECT_CLUSTER_MOST
#define QUERIES UCM_SELECT_CLUSTER_QUERIES

static_assert(CLUSTER <= WARP_LANES && QUERIES == WARP_LANES, "a lane has a thread block, or a query");
static_assert(UCM_SELECT_CLUSTER_THREADS / WARP_LANES <= WARP_LANES, "and a warp");

/* In shared memory, all 0 at first. */
struct __align__(16) agreement : counts {
    uint32_t all[KEY_BYTES][BYTE];   /* of all of the list's */
    uint32_t top[QUERIES];           /* of this thread block's: keys */
    uint32_t low[QUERIES], high[QUERIES]; /* sums of weights' low 16 bits, and of the others */
    /* For each thread block of the cluster. */
    uint32_t tops[CLUSTER][QUERIES];
    uint64_t sums[CLUSTER][QUERIES];
    uint32_t chosens[CLUSTER];
};

/* A query's scores. Those of the first become the list's. */
static __device__ __forceinline__ float *scores_of(args_t a, uint32_t query)
{
    return (float *)shared + query * a.raw_pitch;
}

/* ---- softmax ---- */

/* The largest score of query `lane`. */
static __device__ __forceinline__ float agree_top(args_t a, struct agreement *s)
{
    uint32_t q = a.queries_a_head, top = 0;

    for (uint32_t i = threadIdx.x; i < cluster_size() * q; i += blockDim.x)
        cluster_put(cluster_address(&s->tops[cluster_rank()][i % q], i / q), s->top[i % q]);
    cluster_sync();
    for (uint32_t i = 0; i < cluster_size() && warp_lane() < q; i++)
        top = max(top, s->tops[i][warp_lane()]);
    return top_score(top);
}

/* Scores become weights; those with +inf stay. The scores go to the workspace, for struct
 * ucm_cuda_select_info. top: of query `lane`. */
static __device__ __forceinline__ void weigh(args_t a, const struct part &p, const struct run &r, float top,
                                             struct agreement *s)
{
    float *raw = (float *)a.raw + raw_list(a, p.sequence, p.list * a.queries_a_head) * a.pitch + p.first;

    for (uint32_t i = 0; i < a.queries_a_head; i++) {
        float *scores = scores_of(a, i), own = __shfl_sync(WARP_ALL, top, i);
        uint32_t sum = 0, low;

#pragma unroll 2
        for (uint32_t b = r.first + warp_lane(); b < r.end; b += WARP_LANES) {
            float x = scores[b];
            uint32_t w = x == ucm_inf() ? 0 : ucm_weight(exp_of(a.beta * (x - own)));

            sum += w;
            scores[b] = x == ucm_inf() ? x : (float)w;
            raw[(uint64_t)i * a.pitch + b] = x;
        }
        low = __reduce_add_sync(WARP_ALL, sum & 0xffff);
        sum = __reduce_add_sync(WARP_ALL, sum >> 16);
        if (warp_lane() == 0 && r.first < r.end) {
            atomicAdd(s->low + i, low);
            atomicAdd(s->high + i, sum);
        }
    }
    __syncthreads();
}

/* The sum of the weights of query `lane`, at least 1. */
static __device__ __forceinline__ float agree_sum(args_t a, struct agreement *s)
{
    uint32_t q = a.queries_a_head;
    uint64_t sum = 0;

    for (uint32_t i = threadIdx.x; i < cluster_size() * q; i += blockDim.x)
        cluster_put(cluster_address(&s->sums[cluster_rank()][i % q], i / q),
                    ((uint64_t)s->high[i % q] << 16) + s->low[i % q]);
    cluster_sync();
    for (uint32_t i = 0; i < cluster_size() && warp_lane() < q; i++)
        sum += s->sums[i][warp_lane()];
    return ucm_max(1.0f, __ull2float_rn(sum));
}

/* ---- the list ---- */

/* The list's score of block b, from its queries' scores, if b is below `end`. total: with softmax,
 * that of query `lane`. By whole warps. */
static __device__ __forceinline__ float list_score(args_t a, uint32_t b, uint32_t end, float total, float by)
{
    struct many m = {0, 0, 0};

    for (uint32_t i = 0; i < a.queries_a_head; i++) {
        float x = b < end ? scores_of(a, i)[b] : 0;

        if (a.reduce == UCM_REDUCE_SOFTMAX) {
            float own = __shfl_sync(WARP_ALL, total, i), inverse = __shfl_sync(WARP_ALL, by, i);

            x = x == ucm_inf() ? x : share_of(x, own, inverse);
        }
        many_add(&m, x);
    }
    return a.reduce == UCM_REDUCE_MAX ? m.top : many_sum(&m, a.reduce == UCM_REDUCE_MEAN ? (float)m.n : 1.0f);
}

/* Puts the list's scores in place of the first query's, and counts their first byte. */
static __device__ __forceinline__ void put_list(args_t a, const struct part &p, const struct run &r,
                                                const struct span &between, float total, struct agreement *s)
{
    float by = __frcp_rn(total);

    for (uint32_t at = r.first; at < r.end; at += WARP_LANES) {
        uint32_t b = at + warp_lane();

        put_score(p, between, b, b < r.end, list_score(a, b, r.end, total, by), s);
    }
}

/* ---- counts ---- */

/* Sums up the cluster's counts of a key's byte i. */
static __device__ __forceinline__ void agree_counts(struct agreement *s, uint32_t i)
{
    constexpr uint32_t EACH = BYTE / 4 * CLUSTER / UCM_SELECT_CLUSTER_LEAST; /* of a thread, at most */
    uint4 x[EACH];

    static_assert(BYTE / 4 * CLUSTER % UCM_SELECT_CLUSTER_LEAST == 0, "threads have as many");
    cluster_sync();
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        uint32_t at = threadIdx.x + j * blockDim.x;

        x[j] = at < BYTE / 4 * cluster_size()
                   ? cluster_get4(cluster_address(s->count[i] + at % (BYTE / 4) * 4, at / (BYTE / 4)))
                   : uint4{};
    }
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        uint32_t *to = s->all[i] + (threadIdx.x + j * blockDim.x) % (BYTE / 4) * 4;
        uint32_t four[4] = {x[j].x, x[j].y, x[j].z, x[j].w};

#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (four[k] > 0)
                atomicAdd(to + k, four[k]);
    }
    __syncthreads();
}

/* ---- the crew ---- */

struct cluster_crew {
    typedef struct agreement agreement;

    static __device__ __forceinline__ uint32_t size(void)
    {
        return cluster_size();
    }
    static __device__ __forceinline__ uint32_t rank(void)
    {
        return cluster_rank();
    }
    static __device__ __forceinline__ uint32_t threads(void)
    {
        return blockDim.x;
    }
    static __device__ __forceinline__ uint32_t thread(void)
    {
        return threadIdx.x;
    }
    static __device__ __forceinline__ void sync(void)
    {
        __syncthreads();
    }
    static __device__ __forceinline__ const uint32_t *sum_counts(agreement *s, uint32_t byte)
    {
        agree_counts(s, byte);
        return s->all[byte];
    }
    static __device__ __forceinline__ uint32_t all_poison(const agreement *s)
    {
        return __reduce_add_sync(WARP_ALL, warp_lane() < cluster_size()
                                               ? cluster_get(cluster_address(&s->poison, warp_lane()))
                                               : 0);
    }
    /* After it nobody reads this thread block's memory. */
    static __device__ __forceinline__ uint32_t of_all(uint32_t x, agreement *s)
    {
        if (threadIdx.x < cluster_size())
            cluster_put(cluster_address(&s->chosens[cluster_rank()], threadIdx.x), x);
        cluster_sync();
        return warp_lane() < cluster_size() ? s->chosens[warp_lane()] : 0;
    }
};

#endif
