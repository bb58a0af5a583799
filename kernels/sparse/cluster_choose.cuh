/* From a list's scores, spread over the thread blocks of a cluster, to its choice: softmax and top k. Each thread block
 * sums up what it has, and gives that to the others; so all find the same cut. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_CLUSTER_CHOOSE_CUH

#include "kernels/sparse/cluster.cuh"
#include "kernels/sparse/cluster_score.cuh"

#define CLUSTER UCM_SELECT_CLUSTER_MOST
#define QUERIES UCM_SELECT_CLUSTER_QUERIES
#define KEY_BYTES 4u
#define BYTE 256u /* values of a key's byte */

static_assert(CLUSTER <= WARP_LANES && QUERIES == WARP_LANES, "a lane has a thread block, or a query");

/* In shared memory, all 0 at first. */
struct __align__(16) agreement {
    uint32_t count[KEY_BYTES][BYTE]; /* of this thread block's blocks between the windows, by a byte of their keys */
    uint32_t all[KEY_BYTES][BYTE];   /* of all of the list's */
    uint32_t poison;                 /* this thread block's with +inf, between the windows */
    uint32_t top[QUERIES];           /* of this thread block's: keys */
    uint32_t low[QUERIES], high[QUERIES]; /* sums of weights' low 16 bits, and of the others */
    uint32_t chosen[UCM_SELECT_CLUSTER_THREADS / WARP_LANES]; /* by warp, in two halves: above the cut, and at it */
    /* Of each thread block of the cluster. */
    uint32_t tops[CLUSTER][QUERIES];
    uint64_t sums[CLUSTER][QUERIES];
    uint32_t chosens[CLUSTER];
};

/* The blocks of a warp, in a row: from `first` on in `shared`. */
struct run {
    uint32_t first, end;
};

static __device__ __forceinline__ struct run run_of(const struct part &p)
{
    uint32_t each = (p.count + blockDim.x - 1) / blockDim.x * WARP_LANES, first = threadIdx.x / WARP_LANES * each;

    return run{min(first, p.count), min(first + each, p.count)};
}

/* A query's scores; those of the first become the list's. */
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

/* Scores become weights; those with +inf stay. The scores go to the workspace, for struct ucm_cuda_select_info. top: of
 * query `lane`. */
static __device__ __forceinline__ void weigh(args_t a, const struct part &p, const struct run &r, float top,
                                             struct agreement *s)
{
    float *raw = (float *)a.raw + raw_list(a, p.chain, p.list * a.queries_a_head) * a.pitch + p.first;

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

/* The list's score of block b, from its queries', if b is below `end`; total: softmax, of query `lane`. By whole warps. */
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
    float by = __frcp_rn(total), *list = scores_of(a, 0);

    for (uint32_t at = r.first; at < r.end; at += WARP_LANES) {
        uint32_t b = at + warp_lane(), key;
        bool inside = b < r.end && p.first + b >= between.begin && p.first + b < between.end;
        float x = list_score(a, b, r.end, total, by);
        uint32_t poison = __ballot_sync(WARP_ALL, inside && x == ucm_inf());

        if (b < r.end)
            list[b] = x;
        key = ucm_score_key(x);
        count_digit(s->count[0], key >> 24, inside);
        if (poison != 0 && warp_lane() == 0)
            atomicAdd(&s->poison, (uint32_t)__popc(poison));
    }
}

/* ---- top k ---- */

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

/* The byte, from the largest down, in which the taking ends; it is known to exist. What is above it is taken off the
 * need; count: how many have it. Every warp finds it for itself. */
static __device__ __forceinline__ uint32_t find_byte(const uint32_t all[BYTE], uint32_t *need, uint32_t *count)
{
    constexpr uint32_t EACH = BYTE / WARP_LANES;
    const uint4 *from = (const uint4 *)(all + BYTE - EACH * (warp_lane() + 1));
    uint4 low = from[0], high = from[1];
    uint32_t x[EACH] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x}, before, own = 0, byte = 0, of = 0;
    uint32_t left = 0, src;

#pragma unroll
    for (uint32_t i = 0; i < EACH; i++)
        own += x[i];
    before = own;
#pragma unroll
    for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
        uint32_t other = __shfl_up_sync(WARP_ALL, before, s);

        before += warp_lane() >= s ? other : 0;
    }
    before -= own;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        if (before < *need && before + x[i] >= *need) {
            byte = BYTE - 1 - EACH * warp_lane() - i;
            left = *need - before;
            of = x[i];
        }
        before += x[i];
    }
    src = (uint32_t)__ffs((int)__ballot_sync(WARP_ALL, of > 0)) - 1;
    *need = __shfl_sync(WARP_ALL, left, src);
    *count = __shfl_sync(WARP_ALL, of, src);
    return __shfl_sync(WARP_ALL, byte, src);
}

/* How many blocks with +inf are between the windows. */
static __device__ __forceinline__ uint32_t all_poison(const struct agreement *s)
{
    return __reduce_add_sync(WARP_ALL, warp_lane() < cluster_size()
                                           ? cluster_get(cluster_address(&s->poison, warp_lane()))
                                           : 0);
}

/* Counts the next byte of the keys that begin with prefix. */
static __device__ __forceinline__ void count_byte(args_t a, const struct part &p, const struct run &r,
                                                  const struct span &between, uint32_t prefix, uint32_t byte,
                                                  struct agreement *s)
{
    const float *list = scores_of(a, 0);
    uint32_t shift = 24 - 8 * byte;

    for (uint32_t b = r.first + warp_lane(); b < r.end; b += WARP_LANES) {
        uint32_t key = ucm_score_key(list[b]);

        if (p.first + b >= between.begin && p.first + b < between.end && key >> (shift + 8) == prefix)
            atomicAdd(s->count[byte] + (key >> shift & (BYTE - 1)), 1);
    }
}

/* Where the taking ends. windows < room. The first bytes are counted. */
static __device__ __forceinline__ struct cut agree_cut(args_t a, const struct part &p, const struct run &r,
                                                       const struct span &between, uint32_t room, struct agreement *s)
{
    uint32_t windows = p.n - (between.end - between.begin), most = min(most_blocks(a, p.chain, p.n), room), need;
    uint32_t prefix = 0, count;

    agree_counts(s, 0);
    need = max(most > windows ? most - windows : 0, min(all_poison(s), room - windows));
    if (need >= between.end - between.begin)
        return cut{0, 0}; /* all keys are above it */
    if (need == 0)
        return cut{~0u, 0};
    for (uint32_t i = 0;; i++) {
        prefix = prefix << 8 | find_byte(s->all[i], &need, &count);
        if (i == KEY_BYTES - 1)
            return cut{prefix, need};
        if (need == count)
            return cut{(prefix << (24 - 8 * i)) - 1, 0};
        count_byte(a, p, r, between, prefix, i + 1, s);
        agree_counts(s, i + 1);
    }
}

/* ---- the answer ---- */


/* Which of a warp's 32 blocks from `at` on are above the cut, and which at it. */
struct marks {
    uint32_t over, same;
};

static __device__ __forceinline__ struct marks marks_of(args_t a, const struct part &p, const struct run &r,
                                                        const struct span &between, const struct cut &cut,
                                                        uint32_t at)
{
    uint32_t b = at + warp_lane(), key = 0;

    if (b < r.end && p.first + b >= between.begin && p.first + b < between.end)
        key = ucm_score_key(scores_of(a, 0)[b]); /* above 0 */
    return marks{__ballot_sync(WARP_ALL, key > cut.key), __ballot_sync(WARP_ALL, key > 0 && key == cut.key)};
}

/* How many blocks are above the cut, and how many at it: before this warp's, and in all. */
struct tally {
    uint32_t over, same, all_over, all_same;
};

static __device__ __forceinline__ struct tally agree_tally(args_t a, const struct part &p, const struct run &r,
                                                           const struct span &between, const struct cut &cut,
                                                           struct agreement *s)
{
    uint32_t warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES, own = 0, x, before;
    struct tally t;

    for (uint32_t at = r.first; at < r.end; at += WARP_LANES) {
        struct marks m = marks_of(a, p, r, between, cut, at);

        own += (uint32_t)__popc(m.over) + ((uint32_t)__popc(m.same) << 16);
    }
    if (warp_lane() == 0)
        s->chosen[warp] = own;
    __syncthreads();
    x = warp_lane() < warps ? s->chosen[warp_lane()] : 0;
    before = __reduce_add_sync(WARP_ALL, warp_lane() < warp ? x : 0);
    x = __reduce_add_sync(WARP_ALL, x);
    if (threadIdx.x < cluster_size())
        cluster_put(cluster_address(&s->chosens[cluster_rank()], threadIdx.x), x);
    cluster_sync(); /* and nobody reads this thread block's memory behind it */
    x = warp_lane() < cluster_size() ? s->chosens[warp_lane()] : 0;
    t.all_over = __reduce_add_sync(WARP_ALL, x & 0xffff);
    t.all_same = __reduce_add_sync(WARP_ALL, x >> 16);
    x = warp_lane() < cluster_rank() ? x : 0;
    t.over = __reduce_add_sync(WARP_ALL, x & 0xffff) + (before & 0xffff);
    t.same = __reduce_add_sync(WARP_ALL, x >> 16) + (before >> 16);
    return t;
}

/* Puts this thread block's chosen blocks, each to its place. */
static __device__ __forceinline__ void put_answer(args_t a, const struct part &p, const struct run &r,
                                                  const struct span &between, const struct cut &cut, uint32_t room,
                                                  struct agreement *s)
{
    struct tally t = agree_tally(a, p, r, between, cut, s);
    uint64_t number = (uint64_t)p.chain * a.lists + p.list;
    uint32_t windows = min(p.n - (between.end - between.begin), room), below = (1u << warp_lane()) - 1;
    uint32_t count = windows + t.all_over + min(t.all_same, cut.ties);
    uint32_t *index = (uint32_t *)a.index + number * a.room;
    float *score = a.score ? (float *)a.score + number * a.room : nullptr;

    for (uint32_t at = r.first; at < r.end; at += WARP_LANES) {
        struct marks m = marks_of(a, p, r, between, cut, at);
        uint32_t b = at + warp_lane(), block = p.first + b, same = t.same + __popc(m.same & below), to = ~0u;

        if (b < r.end && block < between.begin)
            to = block;
        else if (b < r.end && block >= between.end)
            to = block - between.end + (windows == room ? between.begin : count - (p.n - between.end));
        else if ((m.over >> warp_lane() & 1) || ((m.same >> warp_lane() & 1) && same < cut.ties))
            to = between.begin + t.over + __popc(m.over & below) + min(same, cut.ties);
        if (to < room) {
            index[to] = block;
            if (score)
                score[to] = scores_of(a, 0)[b];
        }
        t.over += __popc(m.over);
        t.same += __popc(m.same);
    }
    for (uint32_t i = count + cluster_rank() * blockDim.x + threadIdx.x; i < a.room;
         i += cluster_size() * blockDim.x) {
        index[i] = UCM_SELECT_CUDA_NO_INDEX;
        if (score)
            score[i] = -ucm_inf();
    }
    if (cluster_rank() == 0 && threadIdx.x == 0)
        ((uint32_t *)a.count)[number] = count;
}

#endif
