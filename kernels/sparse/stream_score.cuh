/* Scores of tiles in shared memory: each warp has a KV head and a group of a tile's blocks. */
#ifndef UCM_KERNELS_SPARSE_STREAM_SCORE_CUH
#define UCM_KERNELS_SPARSE_STREAM_SCORE_CUH

#include "kernels/sparse/stream_pipe.cuh"

/* A warp's tile. */
struct mine {
    uint32_t sequence, list;
    uint32_t b, end; /* its thread's blocks are b and b + 8, of the sequence's `end` */
    const uint8_t *vector[2], *scale[2];
};

/* One load of a quarter of a warp takes rows r and r + 1 of the matrix unit, which are four blocks
 * apart. A summary has an odd multiple of 16 bytes, so there are no bank conflicts. */
static __device__ __forceinline__ uint32_t block_of_row(void)
{
    return warp_lane() / 8 + warp_lane() / 4 % 2 * 4;
}

static __device__ __forceinline__ struct mine mine_of(args_t a, const struct tile &t, const uint8_t *stage)
{
    uint32_t warp = threadIdx.x / WARP_LANES, b = warp / a.kv_heads * GROUP + block_of_row();
    struct mine m;

    m.sequence = t.sequence;
    m.list = warp % a.kv_heads;
    m.b = t.first + b;
    m.end = t.n;
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const uint8_t *summary = stage + (b + 8 * k) * a.staged;

        m.vector[k] = summary + a.array[0] + m.list * a.vectors * 64 + quarter() * 16;
        m.scale[k] = summary + a.scale[0] + m.list * a.vectors * 2;
    }
    return m;
}

template <int F, int N, int P>
static __device__ __forceinline__ void take_queries(args_t a, uint32_t sequence, uint32_t list, uint32_t *halves, float *step,
                                                    struct scoring<F, N, P> *s)
{
    struct part p = {sequence, list, 0, 0, 0};

    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4 * P; i++)
        round_query_halves<F, N>(a, p, i, halves, step + i);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < P; i++) {
#pragma unroll
        for (uint32_t j = 0; j < 2 * N; j++)
            s->query[i][j] = halves[(i * 2 * N + j) * WARP_LANES + warp_lane()];
        s->step[i] = step[4 * i + quarter()];
    }
}

template <int F, int N>
static __device__ __forceinline__ void take_staged(const struct mine &m, uint32_t v, struct vectors<F, N> *x)
{
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        uint4 w = *(const uint4 *)(m.vector[k] + 64 * v);

        x->word[k][0] = w.x;
        x->word[k][1] = w.y;
        x->word[k][2] = w.z;
        x->word[k][3] = w.w;
        x->scale[k] = ucm_bf16_decode(*(const uint16_t *)(m.scale[k] + 2 * v));
    }
}

#define AT_ONCE 9u /* vectors: those of 8 tokens and rest */

/* Scores the warp's part of the tile in a stage. It gives the stage back when all of its vectors
 * are weighed. Adding them up, one after the other, takes longer. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_tile(args_t a, const struct mine &m, uint64_t *empty, struct scoring<F, N, P> *s)
{
#pragma unroll 1
    for (uint32_t v = 0; v < a.vectors; v += AT_ONCE) {
        float of[AT_ONCE][P][2];

#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            struct vectors<F, N> x;

            take_staged<F, N>(m, min(v + i, a.vectors - 1), &x); /* the last one again, in place of a branch */
            weigh_vectors<F, N, P>(a, x, s, of[i]);
        }
        if (v + AT_ONCE >= a.vectors) {
            __syncwarp();
            if (warp_lane() == 0)
                barrier_arrive(empty);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            if (v + i < a.vectors)
                add_weighed<F, N, P>(of[i], v + i + 1 == a.vectors ? a.ln_count : 0.0f, s);
    }
}

/* Keeps the scores, and the largest of each query that is not +inf. */
template <int F, int N, int P>
static __device__ __forceinline__ void keep_scores(args_t a, const struct mine &m, struct scoring<F, N, P> *s)
{
#pragma unroll
    for (uint32_t i = 0; i < P; i++) {
        uint32_t query = 4 * i + quarter(), top = 0;
        uint64_t row = raw_list(a, m.sequence, m.list * a.queries_a_head + query);
        float *raw = (float *)a.raw + row * a.pitch;

#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            float x = s->of[i][k].score();

            x = ucm_is_nan(s->worst[k]) ? ucm_inf() : ucm_is_nan(x) ? -ucm_inf() : x;
            if (m.b + 8 * k < m.end && query < a.queries_a_head) {
                raw[m.b + 8 * k] = x;
                top = x == ucm_inf() ? top : max(top, ucm_score_key(x));
            }
            s->of[i][k] = gathered<F>();
        }
        for (uint32_t l = 4; l < WARP_LANES; l *= 2)
            top = max(top, __shfl_xor_sync(WARP_ALL, top, l));
        if (top > s->top[i] && warp_lane() < 4)
            atomicMax((uint32_t *)a.top + row, top);
        s->top[i] = max(s->top[i], top);
    }
    s->worst[0] = s->worst[1] = 0;
}

/* Says that the scores of so many of a sequence's tiles are visible to others. */
static __device__ __forceinline__ void tell_scored(args_t a, uint32_t sequence, uint32_t tiles)
{
    __syncwarp();
    if (warp_lane() == 0 && tiles > 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&progress(a, sequence)->scored), "r"(tiles) : "memory");
}

/* By a warp: its part of all tiles that come. halves, step: space for its queries. Telling others
 * waits for all that the warp has stored. So it does that once a sequence, when another sequence's
 * first tile comes, or at the end. */
template <int F, int N, int P>
static __device__ __forceinline__ void score_pipe(args_t a, struct pipe *pipe, uint32_t *halves, float *step)
{
    struct scoring<F, N, P> s = {};
    uint32_t sequence = NO_SEQUENCE, tiles = 0;

    for (uint32_t i = 0;; i++) {
        uint32_t stage = i % STAGES;
        struct tile t;

        barrier_wait(&pipe->full[stage], i / STAGES % 2);
        t = pipe->tile[stage];
        if (t.sequence == NO_SEQUENCE)
            break;
        struct mine m = mine_of(a, t, (const uint8_t *)shared + a.stage_at + stage * tile_blocks(a) * a.staged);

        if (t.sequence != sequence) {
            take_queries<F, N, P>(a, t.sequence, m.list, halves, step, &s);
            for (uint32_t j = 0; j < P; j++)
                s.top[j] = 0;
        }
        score_tile<F, N, P>(a, m, &pipe->empty[stage], &s);
        if (t.sequence != sequence) {
            tell_scored(a, sequence, tiles);
            sequence = t.sequence;
            tiles = 0;
        }
        keep_scores<F, N, P>(a, m, &s);
        tiles++;
    }
    tell_scored(a, sequence, tiles);
}

#endif
