/* Scores and choices for many chains in one launch.
 *
 * The work is cut into items, numbered in the order of their needs: each chain's queries are prepared;
 * tiles of its blocks are scored; with softmax the weights of each tile are summed, then shared out; at
 * last a choice is made from each list. Thread blocks draw items from a counter, and an item waits for
 * those that it needs. They have lower numbers, so thread blocks that run have drawn them: no wait needs
 * a thread block that has not begun, whatever else the GPU does. The last thread block that finds no
 * item sets all counters to 0 for the next launch.
 *
 * Sums over channels are defined with 32 lanes (docs/retrieval.md). A team of 8 threads computes one:
 * thread t has lanes 4t .. 4t + 3, a word of int8 in each 32 channels, so that a team reads a sector at
 * once. For four queries at a time each step of the fold halves the queries whose sums a thread keeps.
 * The bits are those of score_plain.c and choose.c. */
#include "kernels/sparse/arith.h"
#include "kernels/sparse/select.h"
#include "kernels/sparse/select_cuda.h"

#include <cuda_fp16.h>

#define TEAM 8u  /* threads that score a block */
#define TEAMS 4u /* of a warp */
#define THREADS UCM_SELECT_CUDA_THREADS
#define WARPS (THREADS / WARP_LANES)
#define FIRST_SHIFT 21 /* a key's digits have 11, 11 and 10 bits */

typedef const struct ucm_select_cuda &args_t;

/* A chain and, of its blocks, those of one item. */
struct tile {
    uint32_t chain, n; /* of all the chain's blocks */
    uint32_t first, count;
};

/* ---- items that wait for others ---- */

static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *at)
{
    uint32_t value;

    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

static __device__ __forceinline__ void wait_for(const uint32_t *done, uint32_t count)
{
    if (threadIdx.x == 0) {
        while (load_acquire(done) < count)
            __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

static __device__ __forceinline__ void item_done(uint32_t *done)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(done, 1);
    }
}

static __device__ __forceinline__ struct ucm_select_cuda_progress *progress(args_t a, uint32_t chain)
{
    return (struct ucm_select_cuda_progress *)a.progress + chain;
}

/* ---- queries ---- */

static __device__ __forceinline__ float query_value(args_t a, uint64_t at)
{
    if (a.q_dtype == UCM_SELECT_Q_F32)
        return ((const float *)a.q)[at];
    if (a.q_dtype == UCM_SELECT_Q_BF16)
        return ucm_bf16_decode(((const uint16_t *)a.q)[at]);
    return __half2float(((const __half *)a.q)[at]);
}

static __device__ __forceinline__ float *prepared(args_t a, uint32_t chain, uint32_t g, uint32_t i)
{
    uint64_t query = ((uint64_t)chain * a.kv_heads + g) * a.queries_a_head + i;

    return (float *)a.queries + query * a.query_floats;
}

static __device__ __forceinline__ void prepare_hash(args_t a, uint64_t at, float *out)
{
    struct bit_writer bits = {(uint32_t *)out, 0, 0};

    for (uint32_t i = 0; i < a.n_segments; i++) {
        const struct ucm_cuda_segment s = a.segment[i];

        row_hash<32>(s, (const uint32_t *)a.flips, &bits, [&](uint32_t j) {
            return query_value(a, at + s.first + warp_lane() + WARP_LANES * j);
        });
    }
}

/* By a warp: one query head, from element `at` of q. */
template <int F>
static __device__ __forceinline__ void prepare_query(args_t a, uint64_t at, float *out)
{
    const uint16_t *channel = (const uint16_t *)a.channel;
    float sum = 0;

    for (uint32_t c = warp_lane(); c < a.padded; c += WARP_LANES) {
        float x = c < a.channels ? query_value(a, at + (channel ? channel[c] : c)) : 0.0f;

        out[c] = x;
        if (F == UCM_SELECT_STATS)
            out[a.padded + c] = x * x;
        if (c < a.channels)
            sum += ucm_abs(x);
    }
    if (F == UCM_SELECT_BOX) {
        sum = warp_fold(sum);
        if (warp_lane() == 0)
            out[a.padded] = sum;
    }
}

template <int F>
static __device__ __noinline__ void prepare_item(args_t a, uint32_t chain)
{
    uint32_t group = a.q_heads / a.kv_heads;

    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint32_t row = i / a.q_heads, head = i % a.q_heads;

        uint64_t at = chain * a.q_stride + (uint64_t)i * a.head_dim;
        float *out = prepared(a, chain, head / group, row * group + head % group);

        if constexpr (F == UCM_SELECT_HASH)
            prepare_hash(a, at, out);
        else
            prepare_query<F>(a, at, out);
    }
    item_done(&progress(a, chain)->prepared);
}

/* ---- words of int8 ---- */

/* Four bytes as floats, without conversions: each becomes the low byte of 2^23. */
static __device__ __forceinline__ void bytes_to_floats(uint32_t word, float bias, float out[4])
{
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        out[j] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + j)) - bias;
}

static __device__ __forceinline__ void int8_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word ^ 0x80808080u, 0x1.0001p23f, out);
}

static __device__ __forceinline__ void uint8_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word, 0x1p23f, out);
}

/* Bytes c .. c + 3 of a vector of n; 0 past its end. */
static __device__ __forceinline__ uint32_t load_word(const uint8_t *vector, uint32_t c, uint32_t n,
                                                     uint32_t aligned)
{
    uint32_t word = 0;

    if (c >= n)
        return 0;
    if (aligned)
        return __ldg((const uint32_t *)(vector + c));
    for (uint32_t j = 0; j < 4 && c + j < n; j++)
        word |= (uint32_t)__ldg(vector + c + j) << 8 * j;
    return word;
}

static __device__ __forceinline__ float load_scale(const uint8_t *at)
{
    return ucm_bf16_decode(__ldg((const uint16_t *)at));
}

/* ---- sums over channels, by teams ---- */

/* A family's int8 arrays, and the sums that it needs. */
template <int F> struct family {
    static constexpr int arrays = F == UCM_SELECT_BOX || F == UCM_SELECT_STATS ? 2 : 1;
    static constexpr int sums = F == UCM_SELECT_STATS ? 2 : 1;
};

/* 0xff where a channel's query is not negative: for box, which then takes hi. */
static __device__ __forceinline__ uint32_t high_mask(const float q[4])
{
    uint32_t mask = 0;

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        mask |= q[j] >= 0 ? 0xffu << 8 * j : 0;
    return mask;
}

/* The terms of four channels: q of Q queries, and the words of the family's arrays. mask: box,
 * high_mask of each query. */
template <int F, int Q>
static __device__ __forceinline__ void add_terms(float acc[family<F>::sums][Q][4], const float q[Q][4],
                                                 const uint32_t mask[Q],
                                                 const uint32_t word[family<F>::arrays], float s)
{
    float r[2][4];

    if (F != UCM_SELECT_BOX)
        int8_to_floats(word[0], r[0]);
    if (F == UCM_SELECT_STATS)
        uint8_to_floats(word[family<F>::arrays - 1], r[1]);
#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        if (F == UCM_SELECT_BOX)
            int8_to_floats((word[1 % family<F>::arrays] & mask[i]) | (word[0] & ~mask[i]), r[0]);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float x = q[i][j];

            if (F == UCM_SELECT_DOT || F == UCM_SELECT_BOX)
                acc[0][i][j] = ucm_fma(x, r[0][j], acc[0][i][j]);
            if (F == UCM_SELECT_L2)
                acc[0][i][j] = ucm_fma(x - s * r[0][j], x - s * r[0][j], acc[0][i][j]);
            if (F == UCM_SELECT_STATS) {
                acc[0][i][j] = ucm_fma(x, r[0][j], acc[0][i][j]);
                acc[family<F>::sums - 1][i][j] =
                    ucm_fma(x * x, r[1][j], acc[family<F>::sums - 1][i][j]);
            }
        }
    }
}

static __device__ __forceinline__ float swap_add(float keep, float give, uint32_t with)
{
    return keep + __shfl_xor_sync(WARP_ALL, give, with);
}

/* Which query a thread has in place i: so that each step of the fold keeps the first half of the places
 * and gives the second, which are the first of the thread that gets them. */
template <int Q> static __device__ __forceinline__ uint32_t query_of(uint32_t i)
{
    return Q == 4 ? i ^ threadIdx.x % TEAM / 2 : i;
}

/* The sum over 32 lanes of query_of<Q>(0). */
template <int Q>
static __device__ __forceinline__ float team_fold(const float acc[Q][4])
{
    float x[4];

#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        if constexpr (Q == 4) {
            float a = swap_add(acc[0][j], acc[2][j], 4), b = swap_add(acc[1][j], acc[3][j], 4);

            x[j] = swap_add(a, b, 2);
        } else {
            x[j] = swap_add(acc[0][j], acc[0][j], 4);
            x[j] = swap_add(x[j], x[j], 2);
        }
        x[j] = swap_add(x[j], x[j], 1);
    }
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* The score of a block's vector, from its sums and scales. */
template <int F>
static __device__ __forceinline__ float finish(args_t a, const float sum[family<F>::sums],
                                               const float s[family<F>::sums], float abs_sum)
{
    if (F == UCM_SELECT_BOX)
        return ucm_box_score(s[0], sum[0], abs_sum);
    if (ucm_is_nan(s[0]))
        return ucm_inf();
    if (F == UCM_SELECT_L2)
        return -sum[0];
    if (F == UCM_SELECT_STATS)
        return ucm_stats_score(s[0], sum[0], s[family<F>::sums - 1], sum[family<F>::sums - 1],
                               a.stats_beta, a.ln_tokens);
    return s[0] * sum[0];
}

/* ---- scores of a tile ---- */

extern __shared__ uint32_t shared[]; /* an item's scores, by query head and block; or a list's keys */

/* A block's digest, or another's with LACKS set: such a block has none. */
#define LACKS 1ull
#define PAD TEAMS /* digests past the tile's, for teams that have no block */

/* What one warp scores of a tile: queries first_query .. of a KV head, against blocks first, first +
 * step .. */
struct work {
    const uint64_t *digest; /* of the tile's blocks */
    float *out;             /* the first query's scores */
    uint32_t chain, g, first_query, queries;
    uint32_t first, step, count; /* blocks */
};

static __device__ __forceinline__ const uint8_t *bytes_of(uint64_t digest)
{
    return (const uint8_t *)(digest & ~LACKS);
}

static __device__ __forceinline__ void put_score(args_t a, const struct work &w, uint32_t b,
                                                 uint32_t query, bool mine, float score)
{
    if (w.digest[b] & LACKS)
        score = ucm_inf();
    if (mine && query < w.queries && b < w.count)
        w.out[query * a.tile + b] = ucm_is_nan(score) ? -ucm_inf() : score;
}

/* ---- short vectors, of 32 N channels ---- */

/* The queries stay in registers. */
template <int F, int Q, int N> struct queries {
    float q[N][Q][4], abs_sum;
    uint32_t mask[N][Q];
};

/* Four channels of a query as they came; at: of element c. */
static __device__ __forceinline__ void query_word(args_t a, uint64_t at, uint32_t c, float out[4])
{
    const uint16_t *channel = (const uint16_t *)a.channel;

    if (channel || !a.q_aligned) {
        for (uint32_t j = 0; j < 4; j++)
            out[j] = query_value(a, at + (channel ? channel[c + j] : c + j));
    } else if (a.q_dtype == UCM_SELECT_Q_F32) {
        *(float4 *)out = *(const float4 *)((const float *)a.q + at + c);
    } else {
        ushort4 h = *(const ushort4 *)((const uint16_t *)a.q + at + c);
        uint16_t x[4] = {h.x, h.y, h.z, h.w};

        for (uint32_t j = 0; j < 4; j++)
            out[j] = a.q_dtype == UCM_SELECT_Q_BF16 ? ucm_bf16_decode(x[j])
                                                    : __half2float(__ushort_as_half(x[j]));
    }
}

template <int F, int Q, int N>
static __device__ __forceinline__ void load_queries(args_t a, const struct work &w,
                                                    struct queries<F, Q, N> *to)
{
    uint32_t c = threadIdx.x % TEAM * 4, group = a.q_heads / a.kv_heads;
    float sizes[Q][4] = {};

#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        uint32_t query = w.first_query + min(query_of<Q>(i), w.queries - 1);
        uint32_t head = query / group * a.q_heads + w.g * group + query % group;
        uint64_t at = w.chain * a.q_stride + (uint64_t)head * a.head_dim;

#pragma unroll
        for (uint32_t k = 0; k < N; k++) {
            query_word(a, at, c + WARP_LANES * k, to->q[k][i]);
            to->mask[k][i] = high_mask(to->q[k][i]);
            for (uint32_t j = 0; j < 4; j++)
                sizes[i][j] += ucm_abs(to->q[k][i][j]);
        }
    }
    to->abs_sum = F == UCM_SELECT_BOX ? team_fold<Q>(sizes) : 0;
}

/* A vector of a block: a thread's words in each 32 channels, and its scales. */
template <int F, int N> struct vector {
    uint32_t word[family<F>::arrays][N];
    float s[family<F>::sums];
};

template <int F, int N>
static __device__ __forceinline__ void load_vector(args_t a, const struct work &w, uint32_t b,
                                                   uint32_t v, struct vector<F, N> *to)
{
    const uint8_t *digest = bytes_of(w.digest[b]);

    v += w.g * a.vectors;
#pragma unroll
    for (uint32_t k = 0; k < family<F>::arrays; k++) {
        const uint32_t *words =
            (const uint32_t *)(digest + (a.array[k] + v * (WARP_LANES * N))) + threadIdx.x % TEAM;

#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            to->word[k][i] = __ldg(words + TEAM * i);
    }
#pragma unroll
    for (uint32_t k = 0; k < family<F>::sums; k++)
        to->s[k] = load_scale(digest + (a.scale[k] + 2 * v));
}

template <int F, int Q, int N>
static __device__ __forceinline__ float score_vector(args_t a, const struct queries<F, Q, N> &q,
                                                     const struct vector<F, N> &x)
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
    return finish<F>(a, sum, x.s, q.abs_sum);
}

/* The next vector is under way while one is used. All teams of a warp take as many steps. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_short(args_t a, const struct work &w)
{
    uint32_t team = threadIdx.x % WARP_LANES / TEAM, at = w.first, v = 0;
    bool mine = threadIdx.x % (Q == 4 ? 2 : TEAM) == 0;
    struct queries<F, Q, N> q;
    struct vector<F, N> x, next;
    float best = -ucm_inf();

    if (at >= w.count)
        return;
    load_queries<F, Q, N>(a, w, &q);
    load_vector<F, N>(a, w, at + team, 0, &next);
    while (at < w.count) {
        uint32_t now = at;

        x = next;
        v = v + 1 < a.vectors ? v + 1 : 0;
        at += v == 0 ? w.step : 0;
        if (at < w.count)
            load_vector<F, N>(a, w, at + team, v, &next);
        best = ucm_max(score_vector<F, Q, N>(a, q, x), best);
        if (v == 0) {
            put_score(a, w, now + team, query_of<Q>(0), mine, best);
            best = -ucm_inf();
        }
    }
}

/* ---- vectors of any length ---- */

/* A team takes several blocks at once, to use each load of a query as often. */
template <int F, int Q>
static __device__ __forceinline__ void score_long(args_t a, const struct work &w)
{
    constexpr uint32_t AT_ONCE = family<F>::sums == 1 ? 4 : 2;
    uint32_t part = threadIdx.x % TEAM, team = threadIdx.x % WARP_LANES / TEAM;
    bool mine = threadIdx.x % (Q == 4 ? 2 : TEAM) == 0;
    const float *from[Q];
    float abs_sum = 0;

#pragma unroll
    for (uint32_t i = 0; i < Q; i++)
        from[i] = prepared(a, w.chain, w.g, w.first_query + min(query_of<Q>(i), w.queries - 1));
    if (F == UCM_SELECT_BOX)
        abs_sum = from[0][a.padded];
    for (uint32_t at = w.first; at < w.count; at += AT_ONCE * w.step) {
        const uint8_t *digest[AT_ONCE];
        float best[AT_ONCE];

#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            digest[k] = bytes_of(w.digest[min(at + k * w.step + team, w.count)]);
            best[k] = -ucm_inf();
        }
        for (uint32_t v = w.g * a.vectors; v < (w.g + 1) * a.vectors; v++) {
            float acc[AT_ONCE][family<F>::sums][Q][4] = {}, s[AT_ONCE][family<F>::sums];

#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (uint32_t i = 0; i < family<F>::sums; i++)
                    s[k][i] = load_scale(digest[k] + a.scale[i] + 2 * v);
            for (uint32_t c = part * 4; c < a.padded; c += WARP_LANES) {
                float q[Q][4];
                uint32_t mask[Q];

#pragma unroll
                for (uint32_t i = 0; i < Q; i++) {
                    *(float4 *)q[i] = *(const float4 *)(from[i] + c);
                    mask[i] = F == UCM_SELECT_BOX ? high_mask(q[i]) : 0;
                }
#pragma unroll
                for (uint32_t k = 0; k < AT_ONCE; k++) {
                    uint32_t word[family<F>::arrays];

#pragma unroll
                    for (uint32_t i = 0; i < family<F>::arrays; i++)
                        word[i] = load_word(digest[k] + a.array[i] + v * a.channels, c, a.channels,
                                            a.aligned);
                    add_terms<F, Q>(acc[k], q, mask, word, s[k][0]);
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) {
                float sum[family<F>::sums];

#pragma unroll
                for (uint32_t i = 0; i < family<F>::sums; i++)
                    sum[i] = team_fold<Q>(acc[k][i]);
                best[k] = ucm_max(finish<F>(a, sum, s[k], abs_sum), best[k]);
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            put_score(a, w, min(at + k * w.step + team, w.count), query_of<Q>(0), mine, best[k]);
    }
}

/* ---- hashes ---- */

#define HASH_WORDS 8u

/* A thread of a team takes every eighth token. */
template <int Q> static __device__ __forceinline__ void score_hash(args_t a, const struct work &w)
{
    uint32_t part = threadIdx.x % TEAM, team = threadIdx.x % WARP_LANES / TEAM;
    int32_t bits = (int32_t)a.channels * 8;
    uint32_t q[Q][HASH_WORDS];

#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        const uint32_t *from = (const uint32_t *)prepared(
            a, w.chain, w.g, w.first_query + min(i, w.queries - 1));

#pragma unroll
        for (uint32_t j = 0; j < HASH_WORDS; j++)
            q[i][j] = j < a.padded ? from[j] : 0;
    }
    for (uint32_t at = w.first; at < w.count; at += w.step) {
        const uint8_t *digest = bytes_of(w.digest[at + team]);
        const uint32_t *words = (const uint32_t *)(digest + w.g * a.vectors * a.channels);
        bool bad = __ldg((const uint32_t *)(digest + a.array[1] + 4 * w.g)) != 0;
        uint32_t least[Q];

#pragma unroll
        for (uint32_t i = 0; i < Q; i++)
            least[i] = (uint32_t)bits;
#pragma unroll 2
        for (uint32_t t = part; t < a.vectors; t += TEAM) {
            uint32_t distance[Q] = {};

#pragma unroll
            for (uint32_t j = 0; j < HASH_WORDS; j++) {
                uint32_t k = j < a.padded ? __ldg(words + t * a.padded + j) : 0;

#pragma unroll
                for (uint32_t i = 0; i < Q; i++)
                    if (j < a.padded)
                        distance[i] += __popc(k ^ q[i][j]);
            }
#pragma unroll
            for (uint32_t i = 0; i < Q; i++)
                least[i] = min(least[i], distance[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < Q; i++) {
            least[i] = min(least[i], __shfl_xor_sync(WARP_ALL, least[i], 4));
            least[i] = min(least[i], __shfl_xor_sync(WARP_ALL, least[i], 2));
            least[i] = min(least[i], __shfl_xor_sync(WARP_ALL, least[i], 1));
            put_score(a, w, at + team, i, part == i,
                      bad ? ucm_inf() : (float)(bits - 2 * (int32_t)least[i]));
        }
    }
}

/* Every query of every KV head against the tile, into `shared`. A warp takes some queries of one head;
 * when there are fewer of those than warps, several share the blocks. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_tile(args_t a, const struct tile &t,
                                                  const uint64_t *digest)
{
    uint32_t warp = threadIdx.x / WARP_LANES, parts = (a.queries_a_head + Q - 1) / Q;
    uint32_t jobs = a.kv_heads * parts, ways = jobs < WARPS ? WARPS / jobs : 1;
    struct work w;

    w.digest = digest;
    w.chain = t.chain;
    w.count = t.count;
    w.first = warp / jobs * TEAMS;
    w.step = ways * TEAMS;
    for (uint32_t job = jobs < WARPS ? warp % jobs : warp; job < jobs && warp < ways * jobs; job += WARPS) {
        w.g = job % a.kv_heads;
        w.first_query = job / a.kv_heads * Q;
        w.queries = min((uint32_t)Q, a.queries_a_head - w.first_query);
        w.out = (float *)shared + (w.g * a.queries_a_head + w.first_query) * a.tile;
        if constexpr (F == UCM_SELECT_HASH)
            score_hash<Q>(a, w);
        else if constexpr (N > 0)
            score_short<F, Q, N>(a, w);
        else
            score_long<F, Q>(a, w);
    }
}

/* ---- reduces: struct many of score_plain.c ---- */

struct many {
    float sum, top;
    uint32_t n;
};

static __device__ __forceinline__ void many_add(struct many *m, float x)
{
    m->sum = m->n == 0 ? x : m->sum + x;
    m->top = ucm_max(x, m->n == 0 ? -ucm_inf() : m->top);
    m->n++;
}

static __device__ __forceinline__ float many_sum(const struct many *m, float by)
{
    float x = m->sum / by;

    return m->top == ucm_inf() ? m->top : ucm_is_nan(x) ? -ucm_inf() : x;
}

static __device__ __forceinline__ float *list_of(args_t a, uint32_t chain, uint32_t list)
{
    return (float *)a.scores + ((uint64_t)chain * a.lists + list) * a.pitch;
}

/* How many blocks between the windows have a key with such first bits; top k only. */
static __device__ __forceinline__ uint32_t *digits_of(args_t a, uint32_t chain, uint32_t list)
{
    return (uint32_t *)a.digits + ((uint64_t)chain * a.lists + list) * UCM_SELECT_CUDA_DIGITS;
}

struct span {
    uint32_t begin, end;
};

static __device__ __forceinline__ struct span between_windows(args_t a, uint32_t n)
{
    uint32_t init = min(a.init_window, n);

    return span{init, n - min(a.local_window, n - init)};
}

/* From the scores of a KV head's queries for each block of the tile to those of the lists. head(g, b)
 * is the head's. */
template <typename HEAD>
static __device__ __forceinline__ void put_lists(args_t a, const struct tile &t, HEAD head)
{
    struct span s = between_windows(a, t.n);

    for (uint32_t i = threadIdx.x; i < a.lists * t.count; i += THREADS) {
        uint32_t list = i / t.count, b = i % t.count;
        float x;

        if (a.heads == UCM_HEADS_EACH) {
            x = head(list, b);
        } else {
            struct many heads = {0, 0, 0};

            for (uint32_t g = 0; g < a.kv_heads; g++)
                many_add(&heads, head(g, b));
            x = a.heads == UCM_HEADS_SUM ? many_sum(&heads, 1.0f) : heads.top;
        }
        list_of(a, t.chain, list)[t.first + b] = x;
        if (a.policy == UCM_CHOOSE_TOPK && t.first + b >= s.begin && t.first + b < s.end)
            atomicAdd(digits_of(a, t.chain, list) + (ucm_score_key(x) >> FIRST_SHIFT), 1);
    }
}

static __device__ __forceinline__ void reduce_tile(args_t a, const struct tile &t)
{
    put_lists(a, t, [&](uint32_t g, uint32_t b) {
        const float *raw = (const float *)shared + g * a.queries_a_head * a.tile + b;
        struct many group = {0, 0, 0};

        for (uint32_t i = 0; i < a.queries_a_head; i++)
            many_add(&group, raw[i * a.tile]);
        return a.reduce == UCM_REDUCE_MEAN ? many_sum(&group, (float)a.queries_a_head) : group.top;
    });
}

/* ---- softmax ---- */

/* The score of that key. */
static __device__ __forceinline__ float key_score(uint32_t key)
{
    return ucm_f32(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

static __device__ __forceinline__ uint32_t weight_of(float score, float top, float beta)
{
    return score == ucm_inf() ? 0 : ucm_weight(ucm_exp(beta * (score - top)));
}

static __device__ __forceinline__ uint64_t warp_sum(uint64_t x)
{
#pragma unroll
    for (uint32_t s = WARP_LANES / 2; s > 0; s /= 2)
        x += __shfl_xor_sync(WARP_ALL, x, s);
    return x;
}

/* Query head i of a chain, in the order of KV heads. */
static __device__ __forceinline__ uint64_t raw_list(args_t a, uint32_t chain, uint32_t i)
{
    return (uint64_t)chain * a.rows * a.q_heads + i;
}

/* Keeps the tile's scores of each query head, and the largest that is not +inf. */
static __device__ __forceinline__ void keep_raw(args_t a, const struct tile &t)
{
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint64_t list = raw_list(a, t.chain, i);
        float *to = (float *)a.raw + list * a.max_blocks + t.first;
        uint32_t top = 0;

        for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES) {
            float x = ((const float *)shared)[i * a.tile + b];

            to[b] = x;
            top = x == ucm_inf() ? top : max(top, ucm_score_key(x));
        }
        top = __reduce_max_sync(WARP_ALL, top);
        if (warp_lane() == 0)
            atomicMax((uint32_t *)a.top + list, top);
    }
}

/* Of query head i; -inf if it has no score. */
static __device__ __forceinline__ float raw_top(args_t a, uint64_t list)
{
    uint32_t key = ((const uint32_t *)a.top)[list];

    return key == 0 ? -ucm_inf() : key_score(key);
}

static __device__ __noinline__ void weigh_item(args_t a, const struct tile &t)
{
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint64_t list = raw_list(a, t.chain, i), sum = 0;
        const float *raw = (const float *)a.raw + list * a.max_blocks + t.first;
        float top = raw_top(a, list);

        for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES)
            sum += weight_of(raw[b], top, a.beta);
        sum = warp_sum(sum);
        if (warp_lane() == 0)
            atomicAdd((unsigned long long *)a.sum + list, (unsigned long long)sum);
    }
    item_done(&progress(a, t.chain)->weighed);
}

static __device__ __noinline__ void share_item(args_t a, const struct tile &t)
{
    put_lists(a, t, [&](uint32_t g, uint32_t b) {
        struct many group = {0, 0, 0};

        for (uint32_t i = 0; i < a.queries_a_head; i++) {
            uint64_t list = raw_list(a, t.chain, g * a.queries_a_head + i);
            float x = ((const float *)a.raw)[list * a.max_blocks + t.first + b];
            float total = ucm_max(1.0f, __ull2float_rn(((const unsigned long long *)a.sum)[list]));

            if (x != ucm_inf())
                x = (float)weight_of(x, raw_top(a, list), a.beta);
            many_add(&group, x / total);
        }
        return many_sum(&group, 1.0f);
    });
    item_done(&progress(a, t.chain)->shared);
}

template <int F, int Q, int N>
static __device__ __forceinline__ void score_item(args_t a, const struct tile &t)
{
    __shared__ uint64_t digest[UCM_SELECT_CUDA_TILE + PAD];

    for (uint32_t b = threadIdx.x; b < t.count + PAD; b += THREADS) {
        uint32_t id = a.blocks;

        if (b < t.count)
            id = ((const uint32_t *)a.table)[t.chain * a.table_stride + t.first + b];
        digest[b] = id < a.blocks ? a.digests + id * a.block_stride : a.digests | LACKS;
    }
    if (N > 0)
        __syncthreads();
    else
        wait_for(&progress(a, t.chain)->prepared, 1);
    score_tile<F, Q, N>(a, t, digest);
    __syncthreads();
    if (a.reduce == UCM_REDUCE_SOFTMAX)
        keep_raw(a, t);
    else
        reduce_tile(a, t);
    item_done(&progress(a, t.chain)->scored);
}

/* ---- the choice among one list ---- */

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

/* ---- items ---- */

struct plan {
    uint32_t tile;                                   /* blocks of an item */
    uint32_t first_tile[UCM_SELECT_CUDA_CHAINS + 1]; /* of each chain, counted over all */
};

static __device__ __forceinline__ uint32_t chain_blocks(args_t a, uint32_t chain)
{
    int32_t n = ((const int32_t *)a.n_blocks)[chain];

    return n < 0 ? 0 : min((uint32_t)n, a.max_blocks);
}

/* So many blocks that each thread block gets as many tiles, and few of them. */
static __device__ __forceinline__ uint32_t tile_blocks(args_t a)
{
    uint64_t all = 0, whole = (uint64_t)gridDim.x * a.tile, waves;

    for (uint32_t chain = threadIdx.x; chain < a.chains; chain += THREADS)
        all += chain_blocks(a, chain);
    all = block_sum(all);
    waves = (all + whole - 1) / whole * gridDim.x;
    if (waves == 0)
        return a.tile;
    return min(a.tile, max(32u, (uint32_t)((all + waves - 1) / waves + 7) / 8 * 8));
}

/* By all threads: counts the tiles of the chains before each. */
static __device__ __forceinline__ void plan_tiles(args_t a, struct plan *p)
{
    __shared__ uint32_t part[WARPS];
    uint32_t base = 0, tile = tile_blocks(a);

    for (uint32_t from = 0; from < a.chains; from += THREADS) {
        uint32_t chain = from + threadIdx.x;
        uint32_t tiles = chain < a.chains ? (chain_blocks(a, chain) + tile - 1) / tile : 0;
        uint32_t sum = tiles;

        for (uint32_t s = 1; s < WARP_LANES; s *= 2) {
            uint32_t other = __shfl_up_sync(WARP_ALL, sum, s);

            sum += warp_lane() >= s ? other : 0;
        }
        if (warp_lane() == WARP_LANES - 1)
            part[threadIdx.x / WARP_LANES] = sum;
        __syncthreads();
        for (uint32_t i = 0; i < WARPS; i++)
            sum += i < threadIdx.x / WARP_LANES ? part[i] : 0;
        if (chain < a.chains)
            p->first_tile[chain] = base + sum - tiles;
        for (uint32_t i = 0; i < WARPS; i++)
            base += part[i];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        p->first_tile[a.chains] = base;
    p->tile = tile;
    __syncthreads();
}

static __device__ __forceinline__ struct tile tile_of(args_t a, const struct plan *p, uint32_t number)
{
    uint32_t low = 0, high = a.chains; /* the last chain whose first tile is not above number */
    struct tile t;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (p->first_tile[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    t.chain = low;
    t.n = chain_blocks(a, low);
    t.first = (number - p->first_tile[low]) * p->tile;
    t.count = min(p->tile, t.n - t.first);
    return t;
}

static __device__ __forceinline__ uint32_t chain_tiles(const struct plan *p, uint32_t chain)
{
    return p->first_tile[chain + 1] - p->first_tile[chain];
}

/* Returns false when there is no such item. */
template <int F, int Q, int N>
static __device__ __forceinline__ bool run_item(args_t a, const struct plan *p, uint32_t item)
{
    uint32_t tiles = p->first_tile[a.chains];
    bool softmax = a.reduce == UCM_REDUCE_SOFTMAX;
    struct tile t;

    if (N == 0) {
        if (item < a.chains) {
            prepare_item<F>(a, item);
            return true;
        }
        item -= a.chains;
    }
    if (item < (softmax ? 3 : 1) * tiles) {
        t = tile_of(a, p, item % tiles);
        if (item < tiles) {
            score_item<F, Q, N>(a, t);
        } else if (item < 2 * tiles) {
            wait_for(&progress(a, t.chain)->scored, chain_tiles(p, t.chain));
            weigh_item(a, t);
        } else {
            wait_for(&progress(a, t.chain)->weighed, chain_tiles(p, t.chain));
            share_item(a, t);
        }
        return true;
    }
    item -= (softmax ? 3 : 1) * tiles;
    if (item >= a.chains * a.lists)
        return false;
    t.chain = item / a.lists;
    wait_for(softmax ? &progress(a, t.chain)->shared : &progress(a, t.chain)->scored,
             chain_tiles(p, t.chain));
    choose_item(a, t.chain, item % a.lists, chain_blocks(a, t.chain));
    return true;
}

/* By the last thread block: for the next launch. */
static __device__ __forceinline__ void reset(args_t a)
{
    uint32_t *words = (uint32_t *)a.progress;

    for (uint32_t i = threadIdx.x; i < a.chains * sizeof(struct ucm_select_cuda_progress) / 4; i += THREADS)
        words[i] = 0;
    if (a.reduce == UCM_REDUCE_SOFTMAX)
        for (uint32_t i = threadIdx.x; i < a.chains * a.rows * a.q_heads; i += THREADS) {
            ((uint32_t *)a.top)[i] = 0;
            ((uint64_t *)a.sum)[i] = 0;
        }
    if (threadIdx.x < 2)
        ((uint32_t *)a.ticket)[threadIdx.x] = 0;
}

template <int F, int Q, int N>
static __device__ __forceinline__ void select_all(args_t a)
{
    __shared__ struct plan p;
    __shared__ uint32_t drawn;
    uint32_t *ticket = (uint32_t *)a.ticket, next = 0;
    bool more = true;

    if (threadIdx.x == 0)
        next = atomicAdd(&ticket[0], 1);
    plan_tiles(a, &p);
    while (more) {
        if (threadIdx.x == 0)
            drawn = next;
        __syncthreads();
        uint32_t item = drawn;
        /* The next is drawn ahead. An item drawn waits only for lower numbers: the lowest that is not
         * done is being run, or waits behind a lower one, which can't be. */
        if (threadIdx.x == 0)
            next = atomicAdd(&ticket[0], 1);
        more = run_item<F, Q, N>(a, &p, item);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        __threadfence();
        drawn = atomicAdd(&ticket[1], 1) + 1 == gridDim.x;
    }
    __syncthreads();
    if (drawn)
        reset(a);
}

#define KERNEL(name, family, queries, n)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
    ucm_select_##name##_##queries##_##n(const __grid_constant__ struct ucm_select_cuda args)       \
    {                                                                                              \
        select_all<family, queries, n>(args);                                                      \
    }
#define KERNELS(name, family)                                                                      \
    KERNEL(name, family, 1, 0)                                                                     \
    KERNEL(name, family, 1, 2)                                                                     \
    KERNEL(name, family, 1, 4)                                                                     \
    KERNEL(name, family, 4, 0)                                                                     \
    KERNEL(name, family, 4, 2)                                                                     \
    KERNEL(name, family, 4, 4)

KERNELS(dot, UCM_SELECT_DOT)
KERNELS(box, UCM_SELECT_BOX)
KERNELS(stats, UCM_SELECT_STATS)
KERNEL(l2, UCM_SELECT_L2, 1, 0)
KERNEL(l2, UCM_SELECT_L2, 4, 0)
KERNEL(hash, UCM_SELECT_HASH, 1, 0)
KERNEL(hash, UCM_SELECT_HASH, 4, 0)
