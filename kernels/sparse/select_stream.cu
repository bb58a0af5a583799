/* Scores and choices for many sequences in one launch, of tokens with rest by the metric `rounded`,
 * softmax and top k. A thread block has three kinds of warps, each at its own pace. One brings
 * tiles of summaries, one sequence after another. Some score them. Others make choices from the
 * lists of sequences whose scores are complete. So the GPU's memory is read all the time.
 *
 * Tiles and lists are drawn from counters. A warp waits only for tiles that running thread blocks
 * have drawn or will draw. So no wait needs a thread block that has not begun. The last thread
 * block sets the counters to 0 for the next launch. The bits are those of score_plain.c and
 * choose.c.
 *
 * stream_pipe.cuh brings, stream_score.cuh scores, stream_choose.cuh chooses. */
#include "kernels/sparse/stream_score.cuh"
#include "kernels/sparse/stream_choose.cuh"

enum { TILES, LISTS, DONE }; /* tickets */

static_assert(DONE < UCM_SELECT_STREAM_TICKETS, "the workspace has them");

/* By the last thread block. */
static __device__ __forceinline__ void reset(args_t a)
{
    uint32_t *ticket = (uint32_t *)a.ticket;

    for (uint32_t i = threadIdx.x; i < a.sequences; i += blockDim.x)
        progress(a, i)->scored = 0;
    for (uint32_t i = threadIdx.x; i < a.sequences * a.rows * a.q_heads; i += blockDim.x)
        ((uint32_t *)a.top)[i] = 0;
    if (threadIdx.x <= DONE)
        ticket[threadIdx.x] = 0;
}

template <int F, int N, int P>
static __device__ __forceinline__ void select_all(args_t a)
{
    __shared__ struct pipe pipe;
    __shared__ stream_agreement agreement;
    __shared__ float step[SCORERS][4 * P];
    __shared__ bool last;
    uint32_t *ticket = (uint32_t *)a.ticket, warp = threadIdx.x / WARP_LANES;

    if (threadIdx.x == 0)
        pipe_init(&pipe);
    __syncthreads();
    if (warp < SCORERS)
        score_pipe<F, N, P>(a, &pipe, shared + a.query_at / 4 + warp * P * 2 * N * WARP_LANES, step[warp]);
    else if (warp < SCORERS + CHOOSERS)
        choose_lists<4 * P>(a, ticket + LISTS, &agreement);
    else
        fill_pipe(a, ticket + TILES, &pipe);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket + DONE, 1) + 1 == gridDim.x;
    }
    __syncthreads();
    if (last)
        reset(a);
}

#define KERNEL(panels)                                                                             \
    extern "C" __global__ void __launch_bounds__(UCM_SELECT_STREAM_THREADS, 1)                     \
    ucm_select_stream_rest_4_##panels(const __grid_constant__ struct ucm_select_cuda args)         \
    {                                                                                              \
        select_all<UCM_SELECT_REST, 4, panels>(args);                                              \
    }

KERNEL(1)
KERNEL(2)
