/* Scores of vectors of 32 N channels, N known when this is compiled. A thread keeps its part of Q
 * queries in registers. Vectors come through a ring of slots in shared memory, one ring for each
 * warp. It is filled DEPTH - 1 steps ahead, and a warp waits only for its own copies. */
#ifndef UCM_KERNELS_SPARSE_SELECT_SHORT_CUH
#define UCM_KERNELS_SPARSE_SELECT_SHORT_CUH

#include "kernels/sparse/select_work.cuh"

/* ---- queries ---- */

template <int F, int Q, int N> struct queries {
    float q[N][Q][4], size; /* size: of query_of<Q>(0) */
    uint32_t mask[N][Q];
};

template <int F, int Q, int N>
static __device__ __forceinline__ void load_queries(args_t a, const struct work &w,
                                                    struct queries<F, Q, N> *to)
{
    uint32_t part = threadIdx.x % TEAM;

#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        const float *from = query_in<Q>(a, w, i);

#pragma unroll
        for (uint32_t k = 0; k < N; k++) {
            *(float4 *)to->q[k][i] = *(const float4 *)(from + WARP_LANES * k + 4 * part);
            to->mask[k][i] = F == UCM_SELECT_BOX ? query_masks(a, from)[TEAM * k + part] : 0;
        }
    }
    to->size = F == UCM_SELECT_BOX ? query_size(a, query_in<Q>(a, w, 0)) : 0;
}

/* ---- the ring ---- */

/* A slot has a step's vectors, one for each team. It has the words of the family's arrays, then for
 * each scale the 4 bytes around it. No two teams' words have a bank in common. */
template <int F, int N> struct ring {
    static constexpr uint32_t vector = (F == UCM_SELECT_REST ? 16 : 32) * N;
    static constexpr uint32_t bytes = family<F>::arrays * vector;
    static constexpr uint32_t pitch = (bytes + 63) / 64 * 64 + 32;
    static constexpr uint32_t slot = TEAMS * pitch;
    static constexpr uint32_t fits = UCM_SELECT_CUDA_RINGS / WARPS / slot;
    static constexpr uint32_t depth = fits < 8 ? fits : 8;

    static_assert(depth >= 2 && bytes + 4 * family<F>::sums <= pitch, "a ring fits");
};

/* A thread's view of its warp's ring. Addresses are of shared memory, of the team's place in a
 * slot. There are few registers, since the queries fill most of them. */
struct feed {
    uint32_t summaries;  /* address: the team's first block's */
    uint32_t at, v;    /* the next vector to copy: of block at + the team's number */
    uint32_t offset;   /* of the thread's part of the KV head's first vector in an array */
    uint32_t scale;    /* of the thread's scale of that vector, in a summary */
    bool has_scale;    /* to copy */
    uint32_t shift[2]; /* that makes a scale of such 4 bytes, if v is even */
    uint32_t from, to; /* the oldest vector; where the next one goes */
    uint32_t end;      /* past the last slot */
};

static __device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

static __device__ __forceinline__ uint32_t load_shared(uint32_t at)
{
    uint32_t value;

    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
    return value;
}

static __device__ __forceinline__ void copy_4(uint32_t to, uint64_t from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

static __device__ __forceinline__ void copy_16(uint32_t to, uint64_t from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

/* By a team: a vector of one block. */
template <int F, int N>
static __device__ __forceinline__ void copy_vector(args_t a, const struct feed &f)
{
    typedef struct ring<F, N> ring;
    uint32_t part = threadIdx.x % TEAM, to = f.to;
    uint64_t summary;

    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(summary) : "r"(f.summaries + 8 * f.at));
    if (f.has_scale)
        copy_4(to + ring::bytes + 4 * part, summary + ((f.scale + 2 * f.v) & ~3u));
    summary += f.offset + f.v * ring::vector;
    if (!a.wide)
        for (uint32_t i = 0; i < ring::vector; i += 4 * TEAM)
#pragma unroll
            for (uint32_t k = 0; k < family<F>::arrays; k++)
                copy_4(to + k * ring::vector + 4 * part + i, summary + a.array[k] + i - 12 * part);
    else if (ring::vector == 16 * TEAM || 16 * part < ring::vector)
#pragma unroll
        for (uint32_t k = 0; k < family<F>::arrays; k++)
            copy_16(to + k * ring::vector + 16 * part, summary + a.array[k]);
}

/* Begins the copy of the next vector, if there is one, as one group. */
template <int F, int N>
static __device__ __forceinline__ void feed_next(args_t a, const struct work &w, struct feed *f)
{
    if (f->at < w.count) {
        copy_vector<F, N>(a, *f);
        if (family<F>::single || ++f->v == a.vectors) {
            f->v = 0;
            f->at += w.step;
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Begins the copies of the first DEPTH - 1 vectors. */
template <int F, int N>
static __device__ __forceinline__ void feed_begin(args_t a, const struct work &w, struct feed *f)
{
    typedef struct ring<F, N> ring;
    uint32_t warp = threadIdx.x / WARP_LANES, part = threadIdx.x % TEAM, vector = w.g * a.vectors;

    f->summaries = shared_address(w.summary + w.team);
    f->at = w.first;
    f->v = 0;
    f->offset = vector * ring::vector + 16 * part;
    f->has_scale = part < family<F>::sums;
    f->scale = a.scale[family<F>::sums > 1 && part > 0] + 2 * vector;
#pragma unroll
    for (uint32_t k = 0; k < family<F>::sums; k++)
        f->shift[k] = (a.scale[k] / 2 + vector) % 2 != 0 ? 0 : 16;
    f->from = shared_address((const uint8_t *)shared + UCM_SELECT_CUDA_RINGS_AT +
                             warp * (ring::depth * ring::slot) + w.team * ring::pitch);
    f->end = f->from + ring::depth * ring::slot;
#pragma unroll 1
    for (f->to = f->from; f->to < f->end - ring::slot; f->to += ring::slot)
        feed_next<F, N>(a, w, f);
}

/* Waits until the oldest copy is there for all of the warp; then the slot used before it is
 * free. */
template <int DEPTH> static __device__ __forceinline__ void feed_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
    __syncwarp();
}

/* ---- scores ---- */

/* A vector of a block: a thread's words in each 32 channels, and its scales. */
template <int F, int N> struct vector {
    uint32_t word[family<F>::arrays][N];
    float s[family<F>::sums];
};

/* The oldest vector of the ring, v of the KV head's. Its slot is the next to be filled, once all
 * have read it. */
template <int F, int N>
static __device__ __forceinline__ void take_vector(struct feed *f, uint32_t v, struct vector<F, N> *to)
{
    typedef struct ring<F, N> ring;
    uint32_t part = threadIdx.x % TEAM, own = f->from + (F == UCM_SELECT_REST ? part % 4 : part) * 4;

#pragma unroll
    for (uint32_t i = 0; i < N; i++)
#pragma unroll
        for (uint32_t k = 0; k < family<F>::arrays; k++) {
            uint32_t word = load_shared(own + ring::vector * k + ring::vector / N * i);

            to->word[k][i] = F == UCM_SELECT_REST ? half_channels(word, part) : word;
        }
#pragma unroll
    for (uint32_t k = 0; k < family<F>::sums; k++)
        to->s[k] = ucm_f32(load_shared(f->from + ring::bytes + 4 * k) << (f->shift[k] ^ v % 2 * 16) & 0xffff0000u);
    f->to = f->from;
    f->from += ring::slot;
    f->from -= f->from >= f->end ? ring::depth * ring::slot : 0;
}

template <int F, int Q, int N>
static __device__ __forceinline__ float score_vector(args_t a, const struct queries<F, Q, N> &q,
                                                     const struct vector<F, N> &x, uint32_t v)
{
    float acc[family<F>::sums][Q][4] = {}, sum[family<F>::sums];

#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        uint32_t word[family<F>::arrays];

#pragma unroll
        for (uint32_t k = 0; k < family<F>::arrays; k++)
            word[k] = x.word[k][i];
        add_terms<F, Q>(acc, q.q[i], q.mask[i], word, x.s[0]);
    }
#pragma unroll
    for (uint32_t k = 0; k < family<F>::sums; k++)
        sum[k] = team_fold<Q>(acc[k]);
    return finish<F>(a, sum, x.s, q.size, v);
}

/* The rest of a job, once the feed has begun. All teams of a warp take as many steps. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_short(args_t a, const struct work &w, const struct queries<F, Q, N> &q,
                                                   struct feed *f)
{
    uint32_t query = query_of<Q>(0), v = 0;
    bool mine = threadIdx.x % (Q == 4 ? 2 : TEAM) == 0 && query < w.queries;
    uint32_t end = mine && w.team < w.count ? w.count - w.team : 0; /* what the thread has to store */
    float *out = w.out + query * a.raw_pitch + w.team;
    struct gathered<F> best;

    for (uint32_t at = w.first; at < w.count;) {
        struct vector<F, N> x;

        feed_wait<ring<F, N>::depth>();
        feed_next<F, N>(a, w, f);
        take_vector<F, N>(f, v, &x);
        best.add(score_vector<F, Q, N>(a, q, x, v));
        if (!family<F>::single && ++v < a.vectors)
            continue;
        if (at < end)
            out[at] = ucm_is_nan(best.score()) ? -ucm_inf() : best.score();
        best = gathered<F>();
        v = 0;
        at += w.step;
    }
}

#endif
