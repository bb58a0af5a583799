/* Finds where the choice among one list ends, by any policy, and puts its blocks in order. Used for
 * mass, and for top k if very many blocks score alike. */
#ifndef UCM_KERNELS_SPARSE_SELECT_CUT_CUH
#define UCM_KERNELS_SPARSE_SELECT_CUT_CUH

#include "kernels/sparse/select_reduce.cuh"

#define POISON_KEY 0xff800000u /* of +inf, the largest key there is */
#define DIGITS UCM_SELECT_CUDA_DIGITS
#define POISON_DIGIT (POISON_KEY >> FIRST_SHIFT) /* of no other key */

struct __align__(16) digit_sums {
    uint32_t count[DIGITS];
    uint32_t mass_low[DIGITS], mass_high[DIGITS]; /* of weights' low 12 bits, and of the others */
};

/* What is still to be taken; both above 0. */
struct need {
    uint32_t count;
    uint64_t mass;
};

struct choose {
    const float *scores;
    uint32_t n, begin, end; /* begin, end: between the windows */
    uint32_t most;          /* blocks that may be chosen, windows included */
    bool held;              /* the keys are in `shared` */
    bool mass;
    float top; /* mass: the largest score that is not +inf */
};

struct cut {
    uint32_t key, ties; /* blocks above the key are in, and so many that equal it */
};

/* Sums over the thread block; the same in every thread. */
static __device__ __forceinline__ uint64_t block_sum(uint64_t x)
{
    __shared__ uint64_t part[WARPS];
    uint64_t sum = 0;

    x = warp_sum(x);
    __syncthreads();
    if (warp_lane() == 0)
        part[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    for (uint32_t i = 0; i < WARPS; i++)
        sum += part[i];
    return sum;
}

static __device__ __forceinline__ uint32_t block_max(uint32_t x)
{
    __shared__ uint32_t part[WARPS];
    uint32_t most = 0;

    x = __reduce_max_sync(WARP_ALL, x);
    __syncthreads();
    if (warp_lane() == 0)
        part[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    for (uint32_t i = 0; i < WARPS; i++)
        most = max(most, part[i]);
    return most;
}

static __device__ __forceinline__ uint32_t key_at(const struct choose &c, uint32_t b)
{
    return c.held ? shared[b] : ucm_score_key(c.scores[b]);
}

/* use(key) for the keys of blocks [begin, end), in any order; several loads are under way at
 * once. */
template <typename USE>
static __device__ __forceinline__ void each_key(const struct choose &c, uint32_t begin, uint32_t end,
                                                USE use)
{
    constexpr uint32_t AT_ONCE = 8;

    for (uint32_t b = begin + threadIdx.x; b < end; b += AT_ONCE * THREADS) {
        uint32_t key[AT_ONCE];

#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            key[i] = b + i * THREADS < end ? key_at(c, b + i * THREADS) : 0;
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            if (b + i * THREADS < end)
                use(key[i]);
    }
}

static __device__ __forceinline__ uint32_t key_weight(args_t a, const struct choose &c, uint32_t key)
{
    return weight_of(key_score(key), c.top, a.mass_beta);
}

/* Sums of the digit at `shift` over the candidates whose bits from `above` up are `prefix`. above
 * 32: over all candidates. */
static __device__ __forceinline__ void sum_digits(args_t a, const struct choose &c,
                                                  struct digit_sums *sums, uint32_t above,
                                                  uint32_t prefix, uint32_t shift, uint32_t mask)
{
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < DIGITS; i += THREADS) {
        sums->count[i] = 0;
        if (c.mass)
            sums->mass_low[i] = sums->mass_high[i] = 0;
    }
    __syncthreads();
    each_key(c, c.begin, c.end, [&](uint32_t key) {
        uint32_t digit = key >> shift & mask;

        if (key == POISON_KEY || (above < 32 && key >> above != prefix))
            return;
        atomicAdd(&sums->count[digit], 1);
        if (c.mass) {
            uint32_t weight = key_weight(a, c, key);

            atomicAdd(&sums->mass_low[digit], weight & 0xfff);
            atomicAdd(&sums->mass_high[digit], weight >> 12);
        }
    });
    __syncthreads();
}

static __device__ __forceinline__ uint64_t digit_mass(const struct choose &c,
                                                      const struct digit_sums *sums, uint32_t digit)
{
    return c.mass ? ((uint64_t)sums->mass_high[digit] << 12) + sums->mass_low[digit] : 0;
}

/* The digit, from the largest down, in which the taking ends. Candidates with higher digits are
 * subtracted from the need. -1: all are taken. A thread has four digits. */
static __device__ __forceinline__ int32_t walk(const struct choose &c, const struct digit_sums *sums,
                                               struct need *need)
{
    __shared__ uint32_t count_part[WARPS];
    __shared__ uint64_t mass_part[WARPS];
    __shared__ struct need left;
    __shared__ int32_t found;
    uint32_t warp = threadIdx.x / WARP_LANES, last = DIGITS - 1 - threadIdx.x * (DIGITS / THREADS);
    uint32_t count = 0, own_count;
    uint64_t mass = 0, own_mass;

    for (uint32_t i = 0; i < DIGITS / THREADS; i++) {
        count += sums->count[last - i];
        mass += digit_mass(c, sums, last - i);
    }
    own_count = count;
    own_mass = mass;
    for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
        uint32_t other_count = __shfl_up_sync(WARP_ALL, count, s);
        uint64_t other_mass = __shfl_up_sync(WARP_ALL, mass, s);

        count += warp_lane() >= s ? other_count : 0;
        mass += warp_lane() >= s ? other_mass : 0;
    }
    if (threadIdx.x == 0)
        found = -1;
    if (warp_lane() == WARP_LANES - 1) {
        count_part[warp] = count;
        mass_part[warp] = mass;
    }
    __syncthreads();
    for (uint32_t i = 0; i < warp; i++) {
        count += count_part[i];
        mass += mass_part[i];
    }
    count -= own_count; /* before the thread's digits */
    mass -= own_mass;
    for (uint32_t i = 0; i < DIGITS / THREADS; i++) {
        uint32_t more = sums->count[last - i];
        uint64_t more_mass = digit_mass(c, sums, last - i);

        if (more > 0 && count < need->count && mass < need->mass &&
            (count + more >= need->count || mass + more_mass >= need->mass)) {
            found = (int32_t)(last - i);
            left.count = need->count - count;
            left.mass = need->mass - mass;
        }
        count += more;
        mass += more_mass;
    }
    __syncthreads();
    if (found >= 0)
        *need = left;
    return found;
}

/* From that level on, with the digits before it. */
static __device__ __forceinline__ struct cut take(args_t a, const struct choose &c,
                                                  struct digit_sums *sums, struct need need,
                                                  uint32_t level, uint32_t prefix)
{
    const uint32_t shift[3] = {FIRST_SHIFT, 10, 0};
    uint32_t same, weight;
    uint64_t ties;

    for (; level < 3; level++) {
        uint32_t above = level == 0 ? 32 : shift[level - 1], width = above - shift[level];
        int32_t digit;

        sum_digits(a, c, sums, above, prefix, shift[level], (1u << width) - 1);
        digit = walk(c, sums, &need);
        if (digit < 0)
            return cut{0, c.end - c.begin};
        prefix = prefix << width | (uint32_t)digit;
    }
    same = sums->count[prefix & 0x3ff];
    weight = c.mass ? key_weight(a, c, prefix) : 0;
    ties = need.mass;
    if (weight > 0)
        ties = (need.mass + weight - 1) / weight;
    ties = ties < need.count ? ties : need.count;
    return cut{prefix, ties < same ? (uint32_t)ties : same};
}

static __device__ __forceinline__ uint32_t least(uint64_t x, uint32_t most)
{
    return x < most ? (uint32_t)x : most;
}

/* How many of n blocks the policy allows, or the launch; windows included. */
static __device__ __forceinline__ uint32_t most_blocks(args_t a, uint32_t sequence, uint32_t n)
{
    uint64_t k;

    if (a.most != 0)
        return min(((const uint32_t *)a.most)[sequence], n);
    if (a.policy == UCM_CHOOSE_MASS)
        return a.k_max > 0 ? least(a.k_max, n) : n;
    if (a.topk_tokens > 0)
        k = ((uint64_t)a.topk_tokens + a.block_tokens - 1) / a.block_tokens;
    else
        k = (uint64_t)((double)n * a.sparse_ratio);
    return least(k > a.min_blocks ? k : a.min_blocks, n);
}

/* What mass needs beyond the windows. */
static __device__ __forceinline__ uint64_t mass_need(args_t a, const struct choose &c)
{
    uint64_t windows = 0, between = 0, need;

    each_key(c, 0, c.begin, [&](uint32_t key) { windows += key_weight(a, c, key); });
    each_key(c, c.end, c.n, [&](uint32_t key) { windows += key_weight(a, c, key); });
    each_key(c, c.begin, c.end, [&](uint32_t key) { between += key_weight(a, c, key); });
    windows = block_sum(windows);
    need = (uint64_t)ceil(a.eps * (double)(windows + block_sum(between)));
    return need > windows ? need - windows : 0;
}

/* windows < room <= n */
static __device__ __forceinline__ struct cut cut_of(args_t a, struct choose &c,
                                                    struct digit_sums *sums, uint32_t windows,
                                                    uint32_t room)
{
    uint32_t most = min(c.most, room), poisoned = 0, top = 0;
    struct need need = {0, UINT64_MAX};

    each_key(c, c.begin, c.end, [&](uint32_t key) { poisoned += key == POISON_KEY; });
    poisoned = (uint32_t)block_sum(poisoned);
    if (c.mass) {
        each_key(c, 0, c.n, [&](uint32_t key) { top = max(top, key == POISON_KEY ? 0 : key); });
        top = block_max(top);
        c.top = top == 0 ? -ucm_inf() : key_score(top);
        need.mass = mass_need(a, c);
    }
    if (most > windows + poisoned)
        need.count = most - windows - poisoned;
    if (need.count == 0 || need.mass == 0)
        return cut{POISON_KEY, least(poisoned, room - windows)};
    return take(a, c, sums, need, 0, 0);
}

struct answer {
    uint32_t *index;
    float *score; /* or NULL */
};

static __device__ __forceinline__ void put(const struct choose &c, const struct answer &to,
                                           uint32_t at, uint32_t b)
{
    to.index[at] = b;
    if (to.score)
        to.score[at] = c.scores[b];
}

/* Puts blocks between the windows that the cut admits, ascending, from place `at` on. Returns how
 * many. A warp has a run of blocks. It counts them, and then knows where its own go. */
static __device__ __forceinline__ uint32_t put_rest(const struct choose &c, const struct cut &cut,
                                                    const struct answer &to, uint32_t at)
{
    __shared__ uint32_t over_part[WARPS], same_part[WARPS];
    uint32_t warp = threadIdx.x / WARP_LANES, below = (1u << warp_lane()) - 1;
    uint32_t run = (c.end - c.begin + THREADS - 1) / THREADS * WARP_LANES;
    uint32_t first = c.begin + warp * run, end = min(first + run, c.end);
    uint32_t over = 0, same = 0, all_over = 0, all_same = 0;

    first = min(first, c.end);
    for (uint32_t b = first + warp_lane(); b < end; b += WARP_LANES) {
        uint32_t key = key_at(c, b);

        over += key > cut.key;
        same += key == cut.key;
    }
    over = __reduce_add_sync(WARP_ALL, over);
    same = __reduce_add_sync(WARP_ALL, same);
    __syncthreads();
    if (warp_lane() == 0) {
        over_part[warp] = over;
        same_part[warp] = same;
    }
    __syncthreads();
    over = same = 0;
    for (uint32_t i = 0; i < WARPS; i++) {
        over += i < warp ? over_part[i] : 0;
        same += i < warp ? same_part[i] : 0;
        all_over += over_part[i];
        all_same += same_part[i];
    }
    for (uint32_t b = first; b < end; b += WARP_LANES) {
        uint32_t key = b + warp_lane() < end ? key_at(c, b + warp_lane()) : 0;
        bool is_over = b + warp_lane() < end && key > cut.key;
        bool is_same = b + warp_lane() < end && key == cut.key;
        uint32_t overs = __ballot_sync(WARP_ALL, is_over), sames = __ballot_sync(WARP_ALL, is_same);
        uint32_t rank = same + __popc(sames & below);

        if (is_over || (is_same && rank < cut.ties))
            put(c, to, at + over + __popc(overs & below) + min(rank, cut.ties), b + warp_lane());
        over += __popc(overs);
        same += __popc(sames);
    }
    return all_over + min(all_same, cut.ties);
}

#endif
