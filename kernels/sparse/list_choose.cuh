/* From a list's scores to its choice by top k, by a crew of threads. The crew is a cluster of
 * thread blocks, or some warps of one thread block. Each thread block has its scores in its own
 * shared memory. A crew C has:
 *
 *     agreement       a struct with struct counts first, in shared memory, all 0 at first
 *     size(), rank()  thread blocks, and which this one is
 *     threads(), thread(), sync()      of this thread block's part of the crew
 *     sum_counts(s, byte)  a barrier of the crew; then counts[byte] of all of it, summed up
 *     all_poison(s)        after a barrier of the crew: the sum of `poison`
 *     of_all(x, s)         x of thread block `lane`, in each warp; a barrier of the crew */
#ifndef UCM_KERNELS_SPARSE_LIST_CHOOSE_CUH
#define UCM_KERNELS_SPARSE_LIST_CHOOSE_CUH

#include "kernels/sparse/select_cut.cuh"

#define KEY_BYTES 4u
#define BYTE 256u /* values of a key's byte */

/* The blocks of a list that are this thread block's. */
struct part {
    uint32_t sequence, list, n; /* n: of all the sequence's blocks */
    uint32_t first, count;
};

struct __align__(16) counts {
    uint32_t count[KEY_BYTES][BYTE]; /* of this thread block's blocks between the windows, by a byte of their keys */
    uint32_t poison;                 /* this thread block's with +inf, between the windows */
    uint32_t chosen[WARP_LANES];     /* by warp, in two halves: above the cut, and at it */
};

/* The blocks of a warp, in a row: from `first` on in `shared`. */
struct run {
    uint32_t first, end;
};

template <typename C>
static __device__ __forceinline__ struct run run_of(const struct part &p)
{
    uint32_t each = (p.count + C::threads() - 1) / C::threads() * WARP_LANES, first = C::thread() / WARP_LANES * each;

    return run{min(first, p.count), min(first + each, p.count)};
}

/* The list's scores of this thread block's blocks. */
static __device__ __forceinline__ float *list_scores(void)
{
    return (float *)shared;
}

/* Puts the score of a thread's block b, if it is one, and counts its first byte. By whole warps. */
static __device__ __forceinline__ void put_score(const struct part &p, const struct span &between, uint32_t b, bool valid,
                                                 float x, struct counts *s)
{
    bool inside = valid && p.first + b >= between.begin && p.first + b < between.end;
    uint32_t poison = __ballot_sync(WARP_ALL, inside && x == ucm_inf());

    if (valid)
        list_scores()[b] = x;
    count_digit(s->count[0], ucm_score_key(x) >> 24, inside);
    if (poison != 0 && warp_lane() == 0)
        atomicAdd(&s->poison, (uint32_t)__popc(poison));
}

/* ---- top k ---- */

/* The byte, from the largest down, in which the taking ends; it is known to exist. Candidates above
 * it are subtracted from the need. count: how many candidates have the byte. Every warp finds it
 * for itself. */
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

/* Counts the next byte of the keys that begin with prefix. */
template <typename C>
static __device__ __forceinline__ void count_byte(args_t a, const struct part &p, const struct run &r,
                                                  const struct span &between, uint32_t prefix, uint32_t byte,
                                                  typename C::agreement *s)
{
    const float *list = list_scores();
    uint32_t shift = 24 - 8 * byte;

    for (uint32_t b = r.first + warp_lane(); b < r.end; b += WARP_LANES) {
        uint32_t key = ucm_score_key(list[b]);

        if (p.first + b >= between.begin && p.first + b < between.end && key >> (shift + 8) == prefix)
            atomicAdd(s->count[byte] + (key >> shift & (BYTE - 1)), 1);
    }
}

/* Where the taking ends. windows < room. The first bytes are counted. */
template <typename C>
static __device__ __forceinline__ struct cut agree_cut(args_t a, const struct part &p, const struct run &r,
                                                       const struct span &between, uint32_t room, typename C::agreement *s)
{
    uint32_t windows = p.n - (between.end - between.begin), most = min(most_blocks(a, p.sequence, p.n), room), need;
    uint32_t prefix = 0, count;
    const uint32_t *all;

    all = C::sum_counts(s, 0);
    need = max(most > windows ? most - windows : 0, min(C::all_poison(s), room - windows));
    if (need >= between.end - between.begin)
        return cut{0, 0}; /* all keys are above it */
    if (need == 0)
        return cut{~0u, 0};
    for (uint32_t i = 0;; i++) {
        prefix = prefix << 8 | find_byte(all, &need, &count);
        if (i == KEY_BYTES - 1)
            return cut{prefix, need};
        if (need == count)
            return cut{(prefix << (24 - 8 * i)) - 1, 0};
        count_byte<C>(a, p, r, between, prefix, i + 1, s);
        all = C::sum_counts(s, i + 1);
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
        key = ucm_score_key(list_scores()[b]); /* above 0 */
    return marks{__ballot_sync(WARP_ALL, key > cut.key), __ballot_sync(WARP_ALL, key > 0 && key == cut.key)};
}

/* How many blocks are above the cut, and how many at it: those before this warp's, and in all. */
struct tally {
    uint32_t over, same, all_over, all_same;
};

template <typename C>
static __device__ __forceinline__ struct tally agree_tally(args_t a, const struct part &p, const struct run &r,
                                                           const struct span &between, const struct cut &cut,
                                                           typename C::agreement *s)
{
    uint32_t warp = C::thread() / WARP_LANES, own = 0, x, before;
    struct tally t;

    for (uint32_t at = r.first; at < r.end; at += WARP_LANES) {
        struct marks m = marks_of(a, p, r, between, cut, at);

        own += (uint32_t)__popc(m.over) + ((uint32_t)__popc(m.same) << 16);
    }
    if (warp_lane() == 0)
        s->chosen[warp] = own;
    C::sync();
    x = warp_lane() < C::threads() / WARP_LANES ? s->chosen[warp_lane()] : 0;
    before = __reduce_add_sync(WARP_ALL, warp_lane() < warp ? x : 0);
    x = C::of_all(__reduce_add_sync(WARP_ALL, x), s);
    t.all_over = __reduce_add_sync(WARP_ALL, x & 0xffff);
    t.all_same = __reduce_add_sync(WARP_ALL, x >> 16);
    x = warp_lane() < C::rank() ? x : 0;
    t.over = __reduce_add_sync(WARP_ALL, x & 0xffff) + (before & 0xffff);
    t.same = __reduce_add_sync(WARP_ALL, x >> 16) + (before >> 16);
    return t;
}

/* Puts this thread block's chosen blocks, each to its place. */
template <typename C>
static __device__ __forceinline__ void put_answer(args_t a, const struct part &p, const struct run &r,
                                                  const struct span &between, const struct cut &cut, uint32_t room,
                                                  typename C::agreement *s)
{
    struct tally t = agree_tally<C>(a, p, r, between, cut, s);
    uint64_t number = (uint64_t)p.sequence * a.lists + p.list;
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
                score[to] = list_scores()[b];
        }
        t.over += __popc(m.over);
        t.same += __popc(m.same);
    }
    for (uint32_t i = count + C::rank() * C::threads() + C::thread(); i < a.room;
         i += C::size() * C::threads()) {
        index[i] = UCM_SELECT_CUDA_NO_INDEX;
        if (score)
            score[i] = -ucm_inf();
    }
    if (C::rank() == 0 && C::thread() == 0)
        ((uint32_t *)a.count)[number] = count;
}

#endif
