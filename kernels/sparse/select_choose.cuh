/* The choice among one list. */
#ifndef UCM_KERNELS_SPARSE_SELECT_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_SELECT_CHOOSE_CUH

#include "kernels/sparse/select_reduce.cuh"

#define POISON_KEY 0xff800000u /* of +inf, the largest key there is */
#define DIGITS UCM_SELECT_CUDA_DIGITS

struct digit_sums {
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

/* use(key) for the keys of blocks [begin, end), in any order; several loads are under way at once. */
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

/* Sums of the digit at `shift` over the candidates whose bits from `above` up are `prefix`; above 32:
 * over all. */
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

/* The digit, from the largest down, in which the taking ends; what the digits above it hold is taken off
 * the need. -1: all of them are taken. A thread has four digits. */
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

/* Blocks that the policy allows, windows included. */
static __device__ __forceinline__ uint32_t most_blocks(args_t a, uint32_t n)
{
    uint64_t k;

    if (a.policy == UCM_CHOOSE_MASS)
        return a.k_max > 0 ? least(a.k_max, n) : n;
    if (a.topk_tokens > 0)
        k = ((uint64_t)a.topk_tokens + a.block_tokens - 1) / a.block_tokens;
    else
        k = (uint64_t)((double)n * a.sparse_ratio);
    return least(k > a.min_blocks ? k : a.min_blocks, n);
}

/* What mass asks for beyond the windows. */
static __device__ __forceinline__ uint64_t mass_need(args_t a, const struct choose &c)
{
    uint64_t all = 0, between = 0, need, have;

    each_key(c, 0, c.n, [&](uint32_t key) { all += key_weight(a, c, key); });
    each_key(c, c.begin, c.end, [&](uint32_t key) { between += key_weight(a, c, key); });
    all = block_sum(all);
    have = all - block_sum(between);
    need = (uint64_t)ceil(a.eps * (double)all);
    return need > have ? need - have : 0;
}

/* windows < room <= n */
static __device__ __forceinline__ struct cut cut_of(args_t a, struct choose &c,
                                                    struct digit_sums *sums, uint32_t windows,
                                                    uint32_t room)
{
    uint32_t most = least(most_blocks(a, c.n), room), poisoned = 0, top = 0;
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

/* ---- top k: the first digits are counted already ---- */

#define FOUR 4u      /* blocks a lane reads at once */
#define BATCH 4u     /* such reads under way */
#define ROOM (UCM_SELECT_CUDA_KEYS / 2) /* candidates in `shared`, keys and blocks */

/* A warp's run of blocks, ascending by warp; whole reads of warps. */
static __device__ __forceinline__ uint32_t run_blocks(const struct choose &c)
{
    constexpr uint32_t READ = WARP_LANES * FOUR;

    return (c.n + WARPS * READ - 1) / (WARPS * READ) * READ;
}

/* use(b, score[4]) for the warp's run, four blocks from b on a lane; in order. Places past the list are
 * read, which its pitch allows, and use must not use them. */
template <typename USE>
static __device__ __forceinline__ void each_four(const struct choose &c, USE use)
{
    uint32_t run = run_blocks(c), first = threadIdx.x / WARP_LANES * run;
    uint32_t end = min(first + run, c.n);

    for (uint32_t at = first; at < end; at += WARP_LANES * FOUR * BATCH) {
        float4 x[BATCH];

#pragma unroll
        for (uint32_t i = 0; i < BATCH; i++) {
            uint32_t b = at + (i * WARP_LANES + warp_lane()) * FOUR;

            x[i] = b < end ? *(const float4 *)(c.scores + b) : float4{};
        }
#pragma unroll
        for (uint32_t i = 0; i < BATCH; i++) {
            uint32_t b = at + (i * WARP_LANES + warp_lane()) * FOUR;
            const float four[FOUR] = {x[i].x, x[i].y, x[i].z, x[i].w};

            if (at + i * WARP_LANES * FOUR < end)
                use(b, four);
        }
    }
}

/* Blocks of each warp's run that the cut lets in, and that equal its key. */
struct run_counts {
    uint32_t over[WARPS], same[WARPS], candidates;
};

/* Gathers the blocks whose first digit is that of the cut, and counts those above it. Returns false if
 * there are more than ROOM. */
static __device__ __forceinline__ bool gather(const struct choose &c, uint32_t digit,
                                              struct run_counts *runs)
{
    uint32_t over = 0;

    if (threadIdx.x == 0)
        runs->candidates = 0;
    __syncthreads();
    each_four(c, [&](uint32_t b, const float four[FOUR]) {
#pragma unroll
        for (uint32_t i = 0; i < FOUR; i++) {
            uint32_t key = ucm_score_key(four[i]);

            if (b + i < c.begin || b + i >= c.end)
                continue;
            over += key >> FIRST_SHIFT > digit;
            if (key >> FIRST_SHIFT == digit) {
                uint32_t at = atomicAdd(&runs->candidates, 1);

                if (at < ROOM) {
                    shared[at] = key;
                    shared[ROOM + at] = b + i;
                }
            }
        }
    });
    over = __reduce_add_sync(WARP_ALL, over);
    if (warp_lane() == 0) {
        runs->over[threadIdx.x / WARP_LANES] = over;
        runs->same[threadIdx.x / WARP_LANES] = 0;
    }
    __syncthreads();
    return runs->candidates <= ROOM;
}

/* The cut among the candidates, whose first digit is `digit`. */
static __device__ __forceinline__ struct cut take_candidates(const struct choose &c,
                                                             struct digit_sums *sums,
                                                             struct run_counts *runs,
                                                             uint32_t digit, struct need need)
{
    uint32_t n = runs->candidates, prefix = digit, run = run_blocks(c);
    struct cut cut;

    for (uint32_t level = 1; level < 3; level++) {
        uint32_t shift = level == 1 ? 10 : 0, width = level == 1 ? 11 : 10;

        for (uint32_t i = threadIdx.x; i < DIGITS; i += THREADS)
            sums->count[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
            if (shared[i] >> (shift + width) == prefix)
                atomicAdd(&sums->count[shared[i] >> shift & ((1u << width) - 1)], 1);
        __syncthreads();
        /* The digit that is sought is among them. */
        prefix = prefix << width | (uint32_t)walk(c, sums, &need);
    }
    cut = {prefix, need.count};
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        if (shared[i] > cut.key)
            atomicAdd(&runs->over[shared[ROOM + i] / run], 1);
        else if (shared[i] == cut.key)
            atomicAdd(&runs->same[shared[ROOM + i] / run], 1);
    }
    __syncthreads();
    return cut;
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

/* Blocks that the cut lets in, whose runs are counted, from place `at` on; returns how many. */
static __device__ __forceinline__ uint32_t put_runs(const struct choose &c, const struct cut &cut,
                                                    const struct run_counts *runs,
                                                    const struct answer &to, uint32_t at)
{
    uint32_t warp = threadIdx.x / WARP_LANES, over = 0, same = 0, all_over = 0, all_same = 0;

    for (uint32_t i = 0; i < WARPS; i++) {
        over += i < warp ? runs->over[i] : 0;
        same += i < warp ? runs->same[i] : 0;
        all_over += runs->over[i];
        all_same += runs->same[i];
    }
    each_four(c, [&](uint32_t b, const float four[FOUR]) {
        uint32_t overs = 0, sames = 0, counts, before;

#pragma unroll
        for (uint32_t i = 0; i < FOUR; i++) {
            uint32_t key = ucm_score_key(four[i]);
            bool inside = b + i >= c.begin && b + i < c.end;

            overs |= (uint32_t)(inside && key > cut.key) << i;
            sames |= (uint32_t)(inside && key == cut.key) << i;
        }
        counts = before = __popc(overs) | (uint32_t)__popc(sames) << 16;
        if (!__any_sync(WARP_ALL, counts != 0))
            return;
        for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
            uint32_t other = __shfl_up_sync(WARP_ALL, before, s);

            before += warp_lane() >= s ? other : 0;
        }
        counts = before - counts; /* of the lanes before */
        before = __shfl_sync(WARP_ALL, before, WARP_LANES - 1);
        for (uint32_t i = 0; i < FOUR; i++) {
            uint32_t below = (1u << i) - 1;
            uint32_t rank = same + (counts >> 16) + __popc(sames & below);

            if ((overs >> i & 1) || ((sames >> i & 1) && rank < cut.ties))
                put(c, to, at + over + (counts & 0xffff) + __popc(overs & below) + min(rank, cut.ties),
                    b + i);
        }
        over += before & 0xffff;
        same += before >> 16;
    });
    return all_over + min(all_same, cut.ties);
}

/* Blocks between the windows that the cut lets in, ascending, from place `at` on; returns how many. A
 * warp has a run of blocks; it counts them, then knows where its own go. */
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

/* windows < room <= n. Puts blocks between the windows to place `at` and behind; returns how many. */
static __device__ __forceinline__ uint32_t put_top(args_t a, const struct choose &c,
                                                   struct digit_sums *sums, uint32_t *digits,
                                                   uint32_t windows, uint32_t room,
                                                   const struct answer &to, uint32_t at)
{
    __shared__ struct run_counts runs;
    __shared__ uint32_t poison;
    uint32_t most = least(most_blocks(a, c.n), room);
    struct need need = {0, UINT64_MAX};
    int32_t digit;

    for (uint32_t i = threadIdx.x; i < DIGITS; i += THREADS) {
        sums->count[i] = digits[i];
        digits[i] = 0; /* for the next launch */
        if (i == POISON_KEY >> FIRST_SHIFT) { /* a digit of its own */
            poison = sums->count[i];
            sums->count[i] = 0;
        }
    }
    __syncthreads();
    if (most > windows + poison)
        need.count = most - windows - poison;
    if (need.count == 0)
        return put_rest(c, cut{POISON_KEY, least(poison, room - windows)}, to, at);
    digit = walk(c, sums, &need);
    if (digit < 0)
        return put_rest(c, cut{0, c.end - c.begin}, to, at);
    if (gather(c, (uint32_t)digit, &runs)) {
        struct cut cut = take_candidates(c, sums, &runs, (uint32_t)digit, need);

        return put_runs(c, cut, &runs, to, at);
    }
    return put_rest(c, take(a, c, sums, need, 1, (uint32_t)digit), to, at);
}

static __device__ __noinline__ void choose_item(args_t a, uint32_t chain, uint32_t list, uint32_t n)
{
    __shared__ struct digit_sums sums;
    uint64_t number = (uint64_t)chain * a.lists + list;
    uint32_t init = min(a.init_window, n), windows = least((uint64_t)a.init_window + a.local_window, n);
    uint32_t room = min(a.room, n), count;
    struct answer to = {(uint32_t *)a.index + number * a.room,
                        a.score ? (float *)a.score + number * a.room : nullptr};
    struct choose c = {list_of(a, chain, list), n, init, n - (windows - init),
                       a.policy == UCM_CHOOSE_MASS && n <= UCM_SELECT_CUDA_KEYS,
                       a.policy == UCM_CHOOSE_MASS, 0};
    uint32_t *digits = digits_of(a, chain, list);

    __syncthreads();
    if (c.held)
        for (uint32_t b = threadIdx.x; b < n; b += THREADS)
            shared[b] = ucm_score_key(c.scores[b]);
    __syncthreads();
    count = min(windows, room);
    if (room > windows && c.mass)
        count += put_rest(c, cut_of(a, c, &sums, windows, room), to, init);
    else if (room > windows)
        count += put_top(a, c, &sums, digits, windows, room, to, init);
    else if (!c.mass)
        for (uint32_t i = threadIdx.x; i < DIGITS; i += THREADS)
            digits[i] = 0;
    /* The windows: the first blocks, and the last. */
    for (uint32_t i = threadIdx.x; i < min(windows, room); i += THREADS)
        put(c, to, i < init ? i : count - min(windows, room) + i, i < init ? i : c.end + (i - init));
    for (uint32_t i = count + threadIdx.x; i < a.room; i += THREADS) {
        to.index[i] = UCM_SELECT_CUDA_NO_INDEX;
        if (to.score)
            to.score[i] = -ucm_inf();
    }
    if (threadIdx.x == 0)
        ((uint32_t *)a.count)[number] = count;
    __syncthreads();
}

#endif
