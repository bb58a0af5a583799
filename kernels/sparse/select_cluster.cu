/* Scores and choices of lists, one for each KV head, of tokens with rest by the metric `rounded`
 * and top k. Each list has a cluster of thread blocks. A thread block scores its part of the list's
 * blocks and keeps the scores in shared memory. Then the cluster agrees on what softmax and the
 * choice need. Only summaries and queries are read from the GPU's memory, and nothing is kept
 * between launches. No thread block waits for one of another cluster. The bits are those of
 * score_plain.c and choose.c.
 *
 * cluster_score.cuh scores, cluster_choose.cuh chooses. */
#include "kernels/sparse/cluster_choose.cuh"

static __device__ __forceinline__ uint32_t sequence_blocks(args_t a, uint32_t sequence)
{
    int32_t n = ((const int32_t *)a.n_blocks)[sequence];

    return n < 0 ? 0 : min((uint32_t)n, a.max_blocks);
}

static __device__ __forceinline__ struct part part_of(args_t a)
{
    uint32_t unit = blockIdx.x / cluster_size(), groups, first;
    struct part p;

    p.sequence = unit / a.lists;
    p.list = unit % a.lists;
    p.n = sequence_blocks(a, p.sequence);
    groups = (p.n + GROUP - 1) / GROUP;
    first = groups * cluster_rank() / cluster_size();
    p.first = first * GROUP;
    p.count = min(groups * (cluster_rank() + 1) / cluster_size() * GROUP, p.n) - p.first;
    return p;
}

template <int F, int N, int P>
static __device__ __forceinline__ void select_list(args_t a)
{
    __shared__ struct agreement s;
    __shared__ float step[QUERIES + 4 * P];
    struct part p = part_of(a);
    uint32_t room = min(a.room, p.n);
    struct cut cut = {~0u, 0};
    struct span between;
    struct run r;
    float total = 1;

    for (uint32_t i = threadIdx.x; i < sizeof(s) / 4; i += blockDim.x)
        ((uint32_t *)&s)[i] = 0;
    cluster_arrive(); /* this thread block's memory is ready for the others */
    score_part<F, N, P>(a, p, shared + a.query_at / 4, step, (const uint8_t *)shared + a.stage_at, s.top);
    cluster_wait();
    r = run_of<cluster_crew>(p);
    between = between_windows(a, p.n);
    if (a.reduce == UCM_REDUCE_SOFTMAX) {
        weigh(a, p, r, agree_top(a, &s), &s);
        total = agree_sum(a, &s);
    }
    put_list(a, p, r, between, total, &s);
    if (room > p.n - (between.end - between.begin))
        cut = agree_cut<cluster_crew>(a, p, r, between, room, &s);
    put_answer<cluster_crew>(a, p, r, between, cut, room, &s);
}

#define KERNEL(panels)                                                                             \
    extern "C" __global__ void __launch_bounds__(UCM_SELECT_CLUSTER_THREADS, 1)                    \
    ucm_select_cluster_rest_4_##panels(const __grid_constant__ struct ucm_select_cuda args)        \
    {                                                                                              \
        if (args.sequences > 0) /* otherwise it is launched only to load it */                     \
            select_list<UCM_SELECT_REST, 4, panels>(args);                                         \
    }

KERNEL(1)
KERNEL(2)
