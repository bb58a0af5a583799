/* A list's vectors on their way to the warps that score them (list_score.cuh). They pass through a
 * ring in shared memory, one for each warp, which cp.async fills some steps ahead. Loads to
 * registers would share the scoreboards by which a warp waits, so it would wait for the newest
 * load. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_SCORE_CUH
#define UCM_KERNELS_SPARSE_CLUSTER_SCORE_CUH

#include "kernels/sparse/cluster.h"
#include "kernels/sparse/list_score.cuh"

template <int F, int N> struct panel {
    static constexpr uint32_t words = quarter_of<F, N>::words;
    static constexpr uint32_t bytes = 16 * words; /* of a vector */
    static constexpr uint32_t at_once = words < 4 ? words : 4;
    /* A slot of the ring: each thread's words of two vectors, then the 4 bytes that have the
     * vectors' scales. */
    static constexpr uint32_t scales = GROUP * bytes;
    static constexpr uint32_t slot = scales + GROUP * 4;
    static constexpr uint32_t depth = UCM_SELECT_CLUSTER_RING / slot;

    static_assert(depth >= 3, "a ring fits");
};

/* ---- vectors ---- */

/* What a warp loads next: vector v of its blocks of one group, to a slot of its ring. A thread has
 * blocks lane / 4 and lane / 4 + 8, and copies the scale of one of them, if any. */
struct feed {
    const uint8_t *vector[2]; /* of its part of the next ones */
    const uint8_t *scale;
    uint32_t v, group;      /* group: the next one */
    uint32_t number[2];     /* of the next group's blocks, in the summaries' memory */
    uint32_t at, from, end; /* address of the next slot; of the ring */
};

static __device__ __forceinline__ void feed_numbers(args_t a, const struct part &p, struct feed *f)
{
    const uint32_t *table = (const uint32_t *)a.table + p.sequence * a.table_stride + p.first;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        uint32_t b = f->group * GROUP + 8 * k + warp_lane() / 4;

        f->number[k] = b < p.count ? __ldg(table + b) : ~0u;
    }
}

/* After the last group a thread's blocks are those that have no summary. */
template <int F, int N>
static __device__ __forceinline__ void feed_group(args_t a, const struct part &p, struct feed *f)
{
    uint32_t first = p.list * a.vectors;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const uint8_t *summary = (const uint8_t *)(f->number[k] < a.blocks ? a.summaries + f->number[k] * a.block_stride
                                                                          : a.poison);

        f->vector[k] = summary + a.array[0] + first * panel<F, N>::bytes + quarter() * panel<F, N>::at_once * 4;
        if (k == quarter() % 2)
            f->scale = summary + a.scale[0] + 2 * first;
    }
    f->v = 0;
    f->group += blockDim.x / WARP_LANES;
    feed_numbers(a, p, f);
}

template <int WORDS>
static __device__ __forceinline__ void copy_words(uint32_t to, const uint8_t *from)
{
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "cp.async has these");
    if (WORDS == 4)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(4 * WORDS));
}

/* Begins the copies of the next step, as one group. */
template <int F, int N>
static __device__ __forceinline__ void feed_next(args_t a, const struct part &p, struct feed *f)
{
    typedef struct panel<F, N> panel;
    constexpr uint32_t WORDS = panel::at_once;
    uint32_t to = f->at + warp_lane() * WORDS * 4;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
#pragma unroll
        for (uint32_t i = 0; i < panel::words; i += WORDS)
            if (a.wide)
                copy_words<WORDS>(to + (k * panel::words + i) * 128, f->vector[k] + 16 * i);
            else
#pragma unroll 1
                for (uint32_t j = 0; j < 4 * WORDS; j += 4)
                    copy_words<1>(to + (k * panel::words + i) * 128 + j, f->vector[k] + 16 * i + j);
        f->vector[k] += panel::bytes;
    }
    if (quarter() < 2)
        copy_words<1>(f->at + panel::scales + warp_lane() / 4 * 8 + quarter() * 4,
                      (const uint8_t *)((uint64_t)f->scale & ~(uint64_t)3));
    asm volatile("cp.async.commit_group;" ::: "memory");
    f->scale += 2;
    f->at = f->at + panel::slot == f->end ? f->from : f->at + panel::slot;
    if (++f->v == a.vectors)
        feed_group<F, N>(a, p, f);
}

/* When the oldest copy is there, takes the step's vectors out of their slot. odd: where their
 * scales are in the 4 bytes. */
template <int F, int N>
static __device__ __forceinline__ void take_vectors(uint32_t slot, uint32_t odd, struct vectors<F, N> *to)
{
    typedef struct panel<F, N> panel;
    constexpr uint32_t WORDS = panel::at_once;
    uint32_t from = slot + warp_lane() * WORDS * 4, scale[2], select = odd ? 0x3244 : 0x1044;

    asm volatile("cp.async.wait_group %0;" ::"n"(panel::depth - 2) : "memory");
    __syncwarp();
#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
#pragma unroll
        for (uint32_t i = 0; i < panel::words; i += WORDS) {
            uint32_t *x = to->word[k] + i, at = from + (k * panel::words + i) * 128;

            if constexpr (WORDS == 4)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                             : "r"(at));
            else
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
        }
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(scale[0]), "=r"(scale[1])
                 : "r"(slot + panel::scales + warp_lane() / 4 * 8));
#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
        to->scale[k] = ucm_f32(__byte_perm(scale[k], 0, select));
}

/* ---- scores ---- */

/* The warp's blocks b and b + 8 are scored by queries `first` and after it. */
template <int F, int N, int P>
static __device__ __forceinline__ void put_scores(args_t a, const struct part &p, uint32_t b, uint32_t first,
                                                  struct scoring<F, N, P> *s)
{
#pragma unroll
    for (uint32_t i = 0; i < P; i++)
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            uint32_t query = first + 4 * i + quarter();
            float x = s->of[i][k].score();

            x = ucm_is_nan(s->worst[k]) ? ucm_inf() : ucm_is_nan(x) ? -ucm_inf() : x;
            if (b + 8 * k < p.count && query < a.queries_a_head) {
                ((float *)shared)[query * a.raw_pitch + b + 8 * k] = x;
                s->top[i] = x == ucm_inf() ? s->top[i] : max(s->top[i], ucm_score_key(x));
            }
            s->of[i][k] = gathered<F>();
        }
    s->worst[0] = s->worst[1] = 0;
}

/* By a warp: its groups of the thread block's blocks, by queries `first` and after it. ring: the
 * warp's, an address of shared memory. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_groups(args_t a, const struct part &p, uint32_t ring, uint32_t first,
                                                    struct scoring<F, N, P> *s)
{
    typedef struct panel<F, N> panel;
    uint32_t group = threadIdx.x / WARP_LANES, groups = (p.count + GROUP - 1) / GROUP, v = 0, slot = ring;
    uint32_t odd = (a.scale[0] / 2 + p.list * a.vectors) % 2;
    struct feed f = {{}, 0, 0, group, {}, ring, ring, ring + panel::depth * panel::slot};

    if (group >= groups)
        return;
    feed_numbers(a, p, &f);
    feed_group<F, N>(a, p, &f);
#pragma unroll 1
    for (uint32_t i = 0; i < panel::depth - 1; i++)
        feed_next<F, N>(a, p, &f);
    while (group < groups) {
        struct vectors<F, N> x;

        take_vectors<F, N>(slot, (odd + v) % 2, &x);
        feed_next<F, N>(a, p, &f); /* to the slot before, which all lanes have read */
        slot = slot + panel::slot == f.end ? ring : slot + panel::slot;
        v++;
        add_vectors<F, N, P>(a, x, v == a.vectors ? a.ln_count : 0.0f, s);
        if (v < a.vectors)
            continue;
        put_scores<F, N, P>(a, p, group * GROUP + warp_lane() / 4, first, s);
        v = 0;
        group += blockDim.x / WARP_LANES;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp(); /* before the ring is filled again */
}

/* By all threads: scores of the thread block's blocks by all queries of the list, at `shared`,
 * raw_pitch apart. top receives the largest score of each query, as a key; it is 0 before. halves,
 * step: space for the queries; rings: a ring for each warp. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_part(args_t a, const struct part &p, uint32_t *halves, float *step,
                                                  const uint8_t *rings, uint32_t *top)
{
    uint32_t padded = (a.queries_a_head + 4 * P - 1) / (4 * P) * 4 * P, warps = blockDim.x / WARP_LANES;
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(rings + threadIdx.x / WARP_LANES * UCM_SELECT_CLUSTER_RING);

    for (uint32_t i = threadIdx.x / WARP_LANES; i < padded; i += warps)
        round_query_halves<F, N>(a, p, i, halves, step + i);
    __syncthreads();
#pragma unroll 1
    for (uint32_t first = 0; first < a.queries_a_head; first += 4 * P) {
        struct scoring<F, N, P> s = {};

#pragma unroll
        for (uint32_t i = 0; i < P; i++) {
#pragma unroll
            for (uint32_t j = 0; j < 2 * N; j++)
                s.query[i][j] = halves[((first / 4 + i) * 2 * N + j) * WARP_LANES + warp_lane()];
            s.step[i] = step[first + 4 * i + quarter()];
        }
        score_groups<F, N, P>(a, p, ring, first, &s);
#pragma unroll
        for (uint32_t i = 0; i < P; i++) {
            for (uint32_t l = 4; l < WARP_LANES; l *= 2)
                s.top[i] = max(s.top[i], __shfl_xor_sync(WARP_ALL, s.top[i], l));
            if (warp_lane() < 4 && first + 4 * i + warp_lane() < a.queries_a_head)
                atomicMax(top + first + 4 * i + warp_lane(), s.top[i]);
        }
    }
    __syncthreads();
}

#endif
