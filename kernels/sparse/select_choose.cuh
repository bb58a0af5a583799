/* The choice among one list. */
#ifndef UCM_KERNELS_SPARSE_SELECT_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_SELECT_CHOOSE_CUH

#include "kernels/sparse/select_top.cuh"

/* ---- top k of a long list: the first digits are counted already ---- */

#define CLOSE 256u /* candidates that are compared with each other */
#define FOUND UCM_SELECT_CUDA_FOUND
#define MARKS UCM_SELECT_CUDA_MARKS
#define CHOSEN (2 * DIGITS - CLOSE) /* candidates that only their second digits chose, at most */

/* Blocks whose first digit is that of the cut. */
struct found {
    uint32_t *key, *block;
    uint32_t n; /* may be more than FOUND; then only FOUND of them are stored */
};

/* Where a choice ends, as far as the first digits say. */
struct first_cut {
    uint32_t poison; /* blocks with +inf, which is a digit of its own */
    uint32_t need;   /* how many are needed beyond the windows and these; 0: they suffice */
    int32_t digit;   /* -1: all are taken */
};

static __device__ __forceinline__ struct first_cut first_cut_of(args_t a, const struct choose &c,
                                                                uint4 digits, uint32_t windows,
                                                                uint32_t room)
{
    __shared__ uint32_t poison;
    uint32_t count[4] = {digits.w, digits.z, digits.y, digits.x}, most = min(c.most, room);
    struct first_cut cut;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (DIGITS - 1 - 4 * threadIdx.x - i == POISON_DIGIT) {
            poison = count[i];
            count[i] = 0;
        }
    __syncthreads();
    cut.poison = poison;
    cut.need = most > windows + poison ? most - windows - poison : 0;
    cut.digit = cut.need == 0 ? -1 : walk_counts(count, &cut.need);
    return cut;
}

/* Looks through blocks [first, end), at most SLICE of them; first is a multiple of 32. It marks
 * those whose first digit is above that of the cut, a bit each. It adds those that have that digit
 * to `to`, whose n is in shared memory. The loops are short on purpose, since code that runs once
 * waits for its instructions. */
static __device__ __forceinline__ void look(const struct choose &c, uint32_t digit, uint32_t first,
                                            uint32_t end, uint32_t *marks, struct found *to)
{
    uint32_t *scores = shared + 2 * FOUND + MARKS;

#pragma unroll
    for (uint32_t i = 0; i < UCM_SELECT_CUDA_SLICE / THREADS; i++) {
        uint32_t b = first + i * THREADS + threadIdx.x;

        if (b < end)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(scores + (b - first))),
                         "l"(c.scores + b));
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#pragma unroll 2
    for (uint32_t at = first + threadIdx.x / WARP_LANES * WARP_LANES; at < end; at += THREADS) {
        uint32_t b = at + warp_lane(), key = 0, over, own, base = 0;
        bool inside = b >= c.begin && b < min(end, c.end);

        if (inside)
            key = ucm_score_key(ucm_f32(scores[b - first]));
        over = __ballot_sync(WARP_ALL, inside && key >> FIRST_SHIFT > digit);
        own = __ballot_sync(WARP_ALL, inside && key >> FIRST_SHIFT == digit);
        if (warp_lane() == 0) {
            marks[(at - first) / WARP_LANES] = over;
            if (own != 0)
                base = atomicAdd(&to->n, (uint32_t)__popc(own));
        }
        if (own == 0)
            continue;
        base = __shfl_sync(WARP_ALL, base, 0) + (uint32_t)__popc(own & ((1u << warp_lane()) - 1));
        if ((own >> warp_lane() & 1) && base < FOUND) {
            to->key[base] = key;
            to->block[base] = b;
        }
    }
    __syncthreads();
}

/* Candidates whose first digit does not decide, and those that are chosen. */
struct close {
    uint32_t key[CLOSE], block[CLOSE];
    uint32_t n, n_chosen; /* may be more than fit */
};

/* The digit of the candidates' keys at `shift` in which the taking ends, among keys whose bits
 * above it are `prefix`. Candidates above it are subtracted from the need. */
static __device__ __forceinline__ uint32_t candidates_digit(const struct found *f, uint32_t *counts,
                                                            uint32_t prefix, uint32_t shift,
                                                            uint32_t width, uint32_t *need)
{
    uint32_t n = f->n;

    __syncthreads();
    *own_digits(counts) = uint4{};
    __syncthreads();
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        if (f->key[i] >> (shift + width) == prefix)
            atomicAdd(counts + (f->key[i] >> shift & ((1u << width) - 1)), 1);
    __syncthreads();
    uint4 own = *own_digits(counts);
    uint32_t count[4] = {own.w, own.z, own.y, own.x};

    return (uint32_t)walk_counts(count, need); /* it is among them */
}

/* Sorts the candidates by their bits from `shift` up. Those above `prefix` go to `chosen`, which
 * has space for CHOSEN. Those equal to it go to `close`. */
static __device__ __forceinline__ void sort_candidates(const struct found *f, uint32_t prefix,
                                                       uint32_t shift, struct close *close,
                                                       uint32_t *chosen)
{
    uint32_t n = f->n;

#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        uint32_t key = f->key[i], at;

        if (key >> shift > prefix) {
            at = atomicAdd(&close->n_chosen, 1);
            if (at < CHOSEN)
                chosen[at] = f->block[i];
        } else if (key >> shift == prefix) {
            at = atomicAdd(&close->n, 1);
            if (at < CLOSE) {
                close->key[at] = key;
                close->block[at] = f->block[i];
            }
        }
    }
    __syncthreads();
}

/* Takes the best `need` of at most CLOSE candidates. It compares each with all others. */
static __device__ __forceinline__ void take_best(struct close *close, uint32_t need, uint32_t *chosen)
{
    uint32_t n = close->n, at = threadIdx.x / 2, better = 0, key, block;

    static_assert(2 * CLOSE == THREADS, "two threads a candidate");
    key = at < n ? close->key[at] : 0;
    block = at < n ? close->block[at] : 0;
    if (at < n)
#pragma unroll 4
        for (uint32_t i = threadIdx.x % 2; i < n; i += 2)
            better += close->key[i] > key || (close->key[i] == key && close->block[i] < block);
    better += __shfl_xor_sync(WARP_ALL, better, 1);
    if (at < n && better < need && threadIdx.x % 2 == 0)
        chosen[atomicAdd(&close->n_chosen, 1)] = block;
    __syncthreads();
}

/* Puts the marked blocks of [first, first + 32 words) from place `at` on, in order. Returns how
 * many. order: space in shared memory for as many as one call can have, or fewer. */
static __device__ __forceinline__ uint32_t put_marked(const struct choose &c, const uint32_t *marks,
                                                      uint32_t first, uint32_t words,
                                                      uint32_t *order, const struct answer &to,
                                                      uint32_t at)
{
    __shared__ uint32_t part[WARPS];
    uint32_t each = (words + THREADS - 1) / THREADS, from = threadIdx.x * each;
    uint32_t end = min(from + each, words), n = 0, own, all = 0, warp = threadIdx.x / WARP_LANES;

    for (uint32_t i = from; i < end; i++)
        n += __popc(marks[i]);
    own = n;
    for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
        uint32_t other = __shfl_up_sync(WARP_ALL, n, s);

        n += warp_lane() >= s ? other : 0;
    }
    __syncthreads();
    if (warp_lane() == WARP_LANES - 1)
        part[warp] = n;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++) {
        n += i < warp ? part[i] : 0;
        all += part[i];
    }
    n -= own;
    for (uint32_t i = from; i < end; i++)
        for (uint32_t word = marks[i]; word != 0; word &= word - 1, n++) {
            uint32_t b = first + i * WARP_LANES + (uint32_t)__ffs((int)word) - 1;

            if (all <= FOUND)
                order[n] = b;
            else
                put(c, to, at + n, b);
        }
    __syncthreads();
    if (all <= FOUND)
        for (uint32_t i = threadIdx.x; i < all; i += THREADS)
            put(c, to, at + i, order[i]);
    return all;
}

/* What a slice of a long list found, and its marks, in the workspace. */
static __device__ __forceinline__ struct found list_found(args_t a, uint32_t number)
{
    uint32_t *at = (uint32_t *)a.found_at + (uint64_t)number * 2 * FOUND;

    return found{at, at + FOUND, 0};
}

static __device__ __forceinline__ uint32_t *list_marks(args_t a, uint32_t number)
{
    return (uint32_t *)a.marks + (uint64_t)number * ((a.max_blocks + 31) / 32);
}

/* Copies what the slices found of list `number` to `f`, in shared memory. */
static __device__ __forceinline__ void collect(args_t a, uint32_t number, struct found *f)
{
    struct found from = list_found(a, number);

    if (threadIdx.x == 0)
        f->n = __ldcg((const uint32_t *)a.found + number);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < min(f->n, FOUND); i += THREADS) {
        f->key[i] = __ldcg(from.key + i);
        f->block[i] = __ldcg(from.block + i);
    }
    __syncthreads();
}

/* The last step. The blocks above the cut are marked in the workspace, and n candidates are
 * chosen. */
static __device__ __forceinline__ uint32_t put_choice(args_t a, const struct choose &c, uint32_t number,
                                                      const uint32_t *chosen, uint32_t n_chosen,
                                                      const struct answer &to, uint32_t at)
{
    uint32_t *marks = shared + 2 * FOUND, begin = at, words = (c.n + 31) / 32;

    for (uint32_t first = 0; first < words; first += MARKS) {
        uint32_t n = min(MARKS, words - first);

        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
            marks[i] = __ldcg(list_marks(a, number) + first + i);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n_chosen; i += THREADS) {
            uint32_t b = chosen[i];

            if (b / 32 >= first && b / 32 < first + n)
                atomicOr(marks + b / 32 - first, 1u << b % 32);
        }
        __syncthreads();
        at += put_marked(c, marks, first * 32, n, shared, to, at);
        __syncthreads();
    }
    return at - begin;
}

/* windows < room <= n, n > UCM_SELECT_CUDA_LONG. Puts blocks between the windows at place `at` and
 * after it. Returns how many. */
static __device__ __forceinline__ uint32_t put_top(args_t a, const struct choose &c,
                                                   struct digit_sums *sums, uint32_t *digits,
                                                   uint32_t number, uint32_t windows, uint32_t room,
                                                   const struct answer &to, uint32_t at)
{
    __shared__ struct found f;
    uint4 own = __ldcg(own_digits(digits));
    __shared__ struct close close;
    struct first_cut first;
    uint32_t prefix, *chosen = sums->mass_low; /* and mass_high: only mass needs them */

    *own_digits(digits) = uint4{}; /* for the next launch */
    if (threadIdx.x == 0) {
        f = found{shared, shared + FOUND, 0};
        close.n = close.n_chosen = 0;
    }
    first = first_cut_of(a, c, own, windows, room);
    if (first.need == 0)
        return put_rest(c, cut{POISON_KEY, least(first.poison, room - windows)}, to, at);
    if (first.digit < 0)
        return put_rest(c, cut{0, c.end - c.begin}, to, at);
    collect(a, number, &f);
    if (f.n > FOUND)
        return put_rest(c, take(a, c, sums, need{first.need, UINT64_MAX}, 1, (uint32_t)first.digit), to, at);
    prefix = (uint32_t)first.digit << 11 |
             candidates_digit(&f, sums->count, (uint32_t)first.digit, 10, 11, &first.need);
    sort_candidates(&f, prefix, 10, &close, chosen);
    if (close.n > CLOSE || close.n_chosen > CHOSEN) { /* very many alike */
        prefix = prefix << 10 | candidates_digit(&f, sums->count, prefix, 0, 10, &first.need);
        return put_rest(c, cut{prefix, first.need}, to, at);
    }
    take_best(&close, first.need, chosen);
    return put_choice(a, c, number, chosen, close.n_chosen, to, at);
}

/* ---- items ---- */

static __device__ __forceinline__ struct choose choose_of(args_t a, uint32_t sequence, uint32_t list, uint32_t n)
{
    struct span s = between_windows(a, n);
    bool mass = a.policy == UCM_CHOOSE_MASS;

    return choose{list_of(a, sequence, list),           n,    s.begin, s.end, most_blocks(a, sequence, n),
                  mass && n <= UCM_SELECT_CUDA_KEYS, mass, 0};
}

/* One slice of a list, for choose_item; nothing to do if the list is not long. */
static __device__ __noinline__ void look_item(args_t a, uint32_t sequence, uint32_t list, uint32_t slice,
                                              uint32_t n)
{
    __shared__ struct found f;
    __shared__ uint32_t base;
    uint32_t number = sequence * a.lists + list, first = slice * UCM_SELECT_CUDA_SLICE;
    struct choose c = choose_of(a, sequence, list, n);
    uint32_t windows = n - (c.end - c.begin), room = min(a.room, n), *found = (uint32_t *)a.found + number;
    struct first_cut cut = {0, 0, -1};

    if (threadIdx.x == 0)
        f = {shared, shared + FOUND, 0};
    if (n > UCM_SELECT_CUDA_LONG && first < n && room > windows)
        cut = first_cut_of(a, c, __ldcg(own_digits(digits_of(a, sequence, list))), windows, room);
    if (cut.digit >= 0) {
        struct found to = list_found(a, number);

        look(c, (uint32_t)cut.digit, first, min(first + UCM_SELECT_CUDA_SLICE, n),
             list_marks(a, number) + first / WARP_LANES, &f);
        if (threadIdx.x == 0)
            base = atomicAdd(found, f.n);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < f.n && base + i < FOUND; i += THREADS) {
            to.key[base + i] = f.key[i];
            to.block[base + i] = f.block[i];
        }
    }
    item_done(&progress(a, sequence)->looked);
}

static __device__ __noinline__ void choose_item(args_t a, uint32_t sequence, uint32_t list, uint32_t n)
{
    __shared__ struct digit_sums sums;
    uint64_t number = (uint64_t)sequence * a.lists + list;
    struct choose c = choose_of(a, sequence, list, n);
    uint32_t init = c.begin, windows = n - (c.end - c.begin), room = min(a.room, n), count;
    struct answer to = {(uint32_t *)a.index + number * a.room,
                        a.score ? (float *)a.score + number * a.room : nullptr};
    uint32_t *digits = digits_of(a, sequence, list);

    __syncthreads();
    if (c.held)
        for (uint32_t b = threadIdx.x; b < n; b += THREADS)
            shared[b] = ucm_score_key(c.scores[b]);
    __syncthreads();
    count = min(windows, room);
    if (room > windows && c.mass)
        count += put_rest(c, cut_of(a, c, &sums, windows, room), to, init);
    else if (room > windows && n <= UCM_SELECT_CUDA_LONG)
        count += put_top_held(a, c, (uint32_t *)&sums, digits, windows, room, to, init);
    else if (room > windows)
        count += put_top(a, c, &sums, digits, (uint32_t)number, windows, room, to, init);
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
    if (threadIdx.x == 0) {
        ((uint32_t *)a.count)[number] = count;
        if (a.slices > 0)
            ((uint32_t *)a.found)[number] = 0;
    }
    __syncthreads();
}

#endif
