/* The order of the lists before their first round, and what is left after each block. That is the
 * total minus what was attended, in whole units, so nothing is lost. */
#ifndef UCM_KERNELS_ATTEND_ORDER_CUH
#define UCM_KERNELS_ATTEND_ORDER_CUH

#include "kernels/attend/attend_stop.cuh"

#define ORDER_THREADS UCM_ATTEND_CUDA_ORDER_THREADS
#define ORDER_WARPS (ORDER_THREADS / 32)

/* The best score has the smallest key; of equals the earlier. */
static __device__ __forceinline__ void sort_keys(uint64_t *key, uint32_t n)
{
    for (uint32_t size = 2; size <= n; size *= 2)
        for (uint32_t half = size / 2; half > 0; half /= 2) {
            for (uint32_t i = threadIdx.x; i < n / 2; i += ORDER_THREADS) {
                uint32_t at = i / half * 2 * half + i % half;
                bool up = (at & size) == 0;
                uint64_t x = key[at], y = key[at + half];

                if ((x > y) == up) {
                    key[at] = y;
                    key[at + half] = x;
                }
            }
            __syncthreads();
        }
}

/* The largest known value, over the thread block. */
static __device__ __forceinline__ float largest_known(float x)
{
    __shared__ float warp[ORDER_THREADS / 32];

#pragma unroll
    for (uint32_t h = 16; h > 0; h /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, h));
    if (threadIdx.x % 32 == 0)
        warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp[0];
#pragma unroll
    for (uint32_t w = 1; w < ORDER_THREADS / 32; w++)
        x = fmaxf(x, warp[w]);
    __syncthreads();
    return x;
}


/* A row's scores: at most 2^20 blocks of 2^41 units. */
struct row_scores {
    const float *at;
    uint32_t n;
    bool box;
    float logit_scale, ln_tokens;
};

static __device__ __forceinline__ float log_weight_of(const struct row_scores &s, uint32_t block)
{
    if (block >= s.n)
        return -INFINITY;
    return s.box ? ucm_left_of_box(s.logit_scale, s.at[block], s.ln_tokens) : s.at[block];
}

static __device__ __forceinline__ uint64_t units_of(const struct row_scores &s, float top, uint32_t block, bool *unknown)
{
    float w = log_weight_of(s, block);

    *unknown = !ucm_left_is_known(w);
    return *unknown ? 0 : ucm_left_units(top, w);
}

/* Units, and how many blocks are unknown. */
struct amount {
    uint64_t units;
    uint32_t unknown;
};

static __device__ __forceinline__ void amount_add(struct amount &x, const struct row_scores &s, float top, uint32_t block)
{
    bool unknown;

    x.units += units_of(s, top, block, &unknown);
    x.unknown += unknown;
}

/* Returns the sum of what this thread and those before it have. *all receives that of all threads,
 * the same in each. */
static __device__ __forceinline__ struct amount amount_until(struct amount own, struct amount *all)
{
    __shared__ struct amount warp[ORDER_WARPS];
    uint32_t lane = threadIdx.x % 32, mine = threadIdx.x / 32;

#pragma unroll
    for (uint32_t h = 1; h < 32; h *= 2) {
        uint64_t units = __shfl_up_sync(ALL_LANES, (unsigned long long)own.units, h);
        uint32_t unknown = __shfl_up_sync(ALL_LANES, own.unknown, h);

        if (lane >= h) {
            own.units += units;
            own.unknown += unknown;
        }
    }
    if (lane == 31)
        warp[mine] = own;
    __syncthreads();
    *all = amount{0, 0};
    for (uint32_t w = 0; w < ORDER_WARPS; w++) {
        if (w == mine) {
            own.units += all->units;
            own.unknown += all->unknown;
        }
        all->units += warp[w].units;
        all->unknown += warp[w].unknown;
    }
    __syncthreads();
    return own;
}

typedef const struct ucm_attend_cuda_order &order_t;

/* block(i): the list's i-th of n. row: counted over all sequences. */
template <typename BLOCK>
static __device__ __forceinline__ void put_left(order_t a, const struct row_scores &s, uint64_t row, uint32_t n, BLOCK block)
{
    uint64_t *units = (uint64_t *)a.stop.left.units + row * (a.room + 1);
    uint32_t each = (n + ORDER_THREADS - 1) / ORDER_THREADS, first = min(n, threadIdx.x * each), end = min(first + each, n);
    struct amount all, of_list, own = {0, 0};
    float top = -INFINITY;

    for (uint32_t b = threadIdx.x; b < s.n; b += ORDER_THREADS) {
        float w = log_weight_of(s, b);

        if (ucm_left_is_known(w))
            top = fmaxf(top, w);
    }
    top = largest_known(top);
    for (uint32_t b = threadIdx.x; b < s.n; b += ORDER_THREADS)
        amount_add(own, s, top, b);
    (void)amount_until(own, &all);
    own = amount{0, 0};
    for (uint32_t i = first; i < end; i++)
        amount_add(own, s, top, block(i));
    own = amount_until(own, &of_list);
    for (uint32_t i = end; i > first; i--) {
        bool unknown;
        uint64_t its = units_of(s, top, block(i - 1), &unknown);

        units[i] = all.unknown > own.unknown ? UNKNOWN : all.units - own.units;
        own.units -= its;
        own.unknown -= unknown;
    }
    if (threadIdx.x == 0) {
        units[0] = all.unknown > 0 ? UNKNOWN : all.units;
        ((float *)a.stop.left.top)[row] = top;
    }
}

static __device__ __forceinline__ void begin_rounds(order_t a, uint32_t list, uint32_t n)
{
    uint32_t *ends = (uint32_t *)a.stop.ends, lists = a.sequences * a.lists, first = a.first;

    if (a.least != 0)
        first = max(first, ((const uint32_t *)a.least)[list / a.lists]);
    ends[list] = 0;
    for (uint32_t r = 1; r <= a.stop.rounds; r++)
        ends[(uint64_t)r * lists + list] = a.stop.rounds > 1 ? min(first, n) : n;
    ((float *)a.stop.least)[2 * list] = ((float *)a.stop.least)[2 * list + 1] = 1.0f;
    ((uint32_t *)a.stop.next)[list] = ((uint32_t *)a.stop.heads)[list] = 0;
}

static __device__ __forceinline__ uint64_t key_of(order_t a, uint64_t at, uint32_t i)
{
    bool window = ((const uint32_t *)a.list)[at + i] < a.windows;

    return (uint64_t)(window ? 0 : ~ucm_score_key(((const float *)a.score)[at + i])) << 32 | i;
}

static __device__ __forceinline__ void order(order_t a)
{
    __shared__ uint64_t key[UCM_ATTEND_CUDA_ORDER];
    uint32_t list = blockIdx.y, sequence = list / a.lists, n = min(((const uint32_t *)a.count)[list], a.room), size = 1;
    int32_t candidates = ((const int32_t *)a.stop.candidates)[sequence];
    uint64_t at = (uint64_t)list * a.room, row = (uint64_t)list * a.rows + blockIdx.x;
    const uint32_t *from = (const uint32_t *)a.list + at;

    while (size < n)
        size *= 2;
    if (a.score != 0) {
        for (uint32_t i = threadIdx.x; i < size; i += ORDER_THREADS)
            key[i] = i < n ? key_of(a, at, i) : UINT64_MAX;
        __syncthreads();
        sort_keys(key, size);
    }
    if (a.row_score != 0) {
        struct row_scores s = {(const float *)a.row_score + row * a.pitch, min((uint32_t)max(candidates, 0), a.pitch),
                               a.stop.known == UCM_ATTEND_CUDA_BOUNDS, a.logit_scale, a.ln_tokens};

        put_left(a, s, row, n, [&](uint32_t i) { return from[a.score != 0 ? (uint32_t)key[i] : i]; });
    }
    if (blockIdx.x > 0)
        return;
    for (uint32_t i = threadIdx.x; i < n; i += ORDER_THREADS)
        ((uint32_t *)a.to)[at + i] = from[a.score != 0 ? (uint32_t)key[i] : i];
    if (threadIdx.x == 0)
        begin_rounds(a, list, n);
}

#endif
