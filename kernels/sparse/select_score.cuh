/* Scores of a tile's blocks.
 *
 * Sums over channels are defined with 32 lanes (docs/retrieval.md). A team of 8 threads computes one:
 * thread t has lanes 4t .. 4t + 3, a word of int8 in each 32 channels, so that a team reads a sector at
 * once. For four queries at a time each step of the fold halves the queries whose sums a thread keeps. */
#ifndef UCM_KERNELS_SPARSE_SELECT_SCORE_CUH
#define UCM_KERNELS_SPARSE_SELECT_SCORE_CUH

#include "kernels/sparse/select_item.cuh"

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

/* Channels of 4 bits, one in each byte's low half. */
static __device__ __forceinline__ void int4_to_floats(uint32_t word, float out[4])
{
    bytes_to_floats(word ^ 0x08080808u, 0x1.00001p23f, out);
}

/* Where a thread's 4 of each 32 channels of 4 bits lie: the word of their 16 bytes, and the bits to shift it
 * by. */
static __device__ __forceinline__ uint32_t half_word(void)
{
    return threadIdx.x % TEAM % 4;
}

static __device__ __forceinline__ uint32_t half_channels(uint32_t word)
{
    return word >> threadIdx.x % TEAM / 4 * 4 & 0x0f0f0f0fu;
}

/* Bytes c .. c + 3 of a vector of n; 0 past its end. */
static __device__ __forceinline__ uint32_t load_word(const uint8_t *vector, uint32_t c, uint32_t n,
                                                     uint32_t aligned)
{
    uint32_t word = 0;

    if (c >= n)
        return 0;
    if (aligned)
        return *(const uint32_t *)(vector + c);
    for (uint32_t j = 0; j < 4 && c + j < n; j++)
        word |= (uint32_t)vector[c + j] << 8 * j;
    return word;
}

static __device__ __forceinline__ float load_scale(const uint8_t *at)
{
    return ucm_bf16_decode(*(const uint16_t *)at);
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

    if (F == UCM_SELECT_REST)
        int4_to_floats(word[0], r[0]);
    else if (F != UCM_SELECT_BOX)
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

            if (F == UCM_SELECT_DOT || F == UCM_SELECT_BOX || F == UCM_SELECT_REST)
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

/* The score of a block's vector v of a head, from its sums and scales. */
template <int F>
static __device__ __forceinline__ float finish(args_t a, const float sum[family<F>::sums],
                                               const float s[family<F>::sums], float abs_sum,
                                               uint32_t v)
{
    if (F == UCM_SELECT_REST)
        return ucm_rest_score(s[0], sum[0], a.stats_beta, v < a.chosen ? 0.0f : a.ln_count);
    if (F == UCM_SELECT_BOX)
        return ucm_box_score(s[0], sum[0], abs_sum);
    if (ucm_is_nan(s[0]))
        return ucm_inf();
    if (F == UCM_SELECT_L2)
        return -sum[0];
    if (F == UCM_SELECT_STATS)
        return ucm_stats_score(s[0], sum[0], s[family<F>::sums - 1], sum[family<F>::sums - 1],
                               a.stats_beta, a.ln_count);
    return s[0] * sum[0];
}

/* What a block's vectors make: the best of them; of `rest` the logarithm of their sum. */
template <int F> struct gathered {
    struct ucm_log_sum sum = {-ucm_inf(), 0.0f};

    __device__ __forceinline__ void add(float score)
    {
        if (F == UCM_SELECT_REST)
            ucm_log_sum_add(&sum, score);
        else
            sum.top = ucm_max(score, sum.top);
    }

    __device__ __forceinline__ float score(void) const
    {
        return F == UCM_SELECT_REST ? ucm_log_sum(&sum) : sum.top;
    }
};

/* ---- scores of a tile ---- */

/* A block's digest, or another's with LACKS set: such a block has none. */
#define LACKS 1ull
#define PAD TEAMS /* digests past the tile's, for teams that have no block */

/* What one warp scores of a chunk: queries first_query .. of a KV head, against blocks first, first +
 * step .. */
struct work {
    const uint64_t *digest; /* of the chunk's blocks */
    const uint8_t *stage;   /* or a copy of them, in shared memory */
    float *out;             /* the first query's scores */
    uint32_t chain, g, first_query, queries;
    uint32_t first, step, count; /* blocks */
};

static __device__ __forceinline__ const uint8_t *bytes_of(args_t a, const struct work &w, uint32_t b)
{
    return w.stage ? w.stage + min(b, a.chunk - 1) * a.staged
                   : (const uint8_t *)(w.digest[b] & ~LACKS);
}

static __device__ __forceinline__ void put_score(args_t a, const struct work &w, uint32_t b,
                                                 uint32_t query, bool mine, float score)
{
    if (w.digest[b] & LACKS)
        score = ucm_inf();
    if (mine && query < w.queries && b < w.count)
        w.out[query * a.raw_pitch + b] = ucm_is_nan(score) ? -ucm_inf() : score;
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

/* Place i of the work's queries: its first element in q. */
template <int Q>
static __device__ __forceinline__ uint64_t query_at(args_t a, const struct work &w, uint32_t i)
{
    uint32_t group = a.q_heads / a.kv_heads, query = w.first_query + min(query_of<Q>(i), w.queries - 1);
    uint32_t head = query / group * a.q_heads + w.g * group + query % group;

    return w.chain * a.q_stride + (uint64_t)head * a.head_dim;
}

template <int F, int Q, int N>
static __device__ __forceinline__ void load_queries(args_t a, const struct work &w,
                                                    struct queries<F, Q, N> *to)
{
    bool quick = a.q_dtype == UCM_SELECT_Q_BF16 && a.q_aligned && !a.channel;
    uint32_t c = threadIdx.x % TEAM * 4;
    float sizes[Q][4] = {};

#pragma unroll
    for (uint32_t i = 0; i < Q; i++) {
        uint64_t at = query_at<Q>(a, w, i) + c;
        ushort4 raw[N];

        if (quick) { /* the loads are under way together */
#pragma unroll
            for (uint32_t k = 0; k < N; k++)
                raw[k] = *(const ushort4 *)((const uint16_t *)a.q + at + WARP_LANES * k);
        }
#pragma unroll
        for (uint32_t k = 0; k < N; k++) {
            if (quick) {
                to->q[k][i][0] = ucm_bf16_decode(raw[k].x);
                to->q[k][i][1] = ucm_bf16_decode(raw[k].y);
                to->q[k][i][2] = ucm_bf16_decode(raw[k].z);
                to->q[k][i][3] = ucm_bf16_decode(raw[k].w);
            } else {
                query_word(a, at - c, c + WARP_LANES * k, to->q[k][i]);
            }
            to->mask[k][i] = high_mask(to->q[k][i]);
#pragma unroll
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
    const uint8_t *digest = bytes_of(a, w, b);

    v += w.g * a.vectors;
    if constexpr (F == UCM_SELECT_REST) {
        const uint32_t *words = (const uint32_t *)(digest + v * (WARP_LANES / 2 * N)) + half_word();

#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            to->word[0][i] = half_channels(words[TEAM / 2 * i]);
    } else {
#pragma unroll
        for (uint32_t k = 0; k < family<F>::arrays; k++) {
            const uint32_t *words =
                (const uint32_t *)(digest + (a.array[k] + v * (WARP_LANES * N))) + threadIdx.x % TEAM;

#pragma unroll
            for (uint32_t i = 0; i < N; i++)
                to->word[k][i] = words[TEAM * i];
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < family<F>::sums; k++)
        to->s[k] = load_scale(digest + (a.scale[k] + 2 * v));
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
    return finish<F>(a, sum, x.s, q.abs_sum, v);
}

/* The next vector is under way while one is used. All teams of a warp take as many steps. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_short(args_t a, const struct work &w,
                                                   const struct queries<F, Q, N> &q)
{
    uint32_t team = threadIdx.x % WARP_LANES / TEAM, at = w.first, v = 0;
    bool mine = threadIdx.x % (Q == 4 ? 2 : TEAM) == 0;
    struct vector<F, N> x, next;
    struct gathered<F> best;

    if (at >= w.count)
        return;
    load_vector<F, N>(a, w, at + team, 0, &next);
    while (at < w.count) {
        uint32_t now = at, which = v;

        x = next;
        v = v + 1 < a.vectors ? v + 1 : 0;
        at += v == 0 ? w.step : 0;
        if (at < w.count)
            load_vector<F, N>(a, w, at + team, v, &next);
        best.add(score_vector<F, Q, N>(a, q, x, which));
        if (v == 0) {
            put_score(a, w, now + team, query_of<Q>(0), mine, best.score());
            best = gathered<F>();
        }
    }
}

/* ---- vectors of any length ---- */

/* A thread's four of vector v's channels from c on. */
template <int F>
static __device__ __forceinline__ uint32_t load_channels(args_t a, const uint8_t *array, uint32_t v,
                                                         uint32_t c)
{
    const uint8_t *vector = array + v * a.vector_bytes;

    if (F == UCM_SELECT_REST)
        return half_channels(((const uint32_t *)(vector + c / WARP_LANES * 16))[half_word()]);
    return load_word(vector, c, a.channels, a.aligned);
}

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
        struct gathered<F> best[AT_ONCE];

#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            digest[k] = bytes_of(a, w, min(at + k * w.step + team, w.count));
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
                        word[i] = load_channels<F>(a, digest[k] + a.array[i], v, c);
                    add_terms<F, Q>(acc[k], q, mask, word, s[k][0]);
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) {
                float sum[family<F>::sums];

#pragma unroll
                for (uint32_t i = 0; i < family<F>::sums; i++)
                    sum[i] = team_fold<Q>(acc[k][i]);
                best[k].add(finish<F>(a, sum, s[k], abs_sum, v - w.g * a.vectors));
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            put_score(a, w, min(at + k * w.step + team, w.count), query_of<Q>(0), mine, best[k].score());
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
        const uint8_t *digest = bytes_of(a, w, at + team);
        const uint32_t *words = (const uint32_t *)(digest + w.g * a.vectors * a.channels);
        bool bad = *(const uint32_t *)(digest + a.array[1] + 4 * w.g) != 0;
        uint32_t least[Q];

#pragma unroll
        for (uint32_t i = 0; i < Q; i++)
            least[i] = (uint32_t)bits;
#pragma unroll 2
        for (uint32_t t = part; t < a.vectors; t += TEAM) {
            uint32_t distance[Q] = {};

#pragma unroll
            for (uint32_t j = 0; j < HASH_WORDS; j++) {
                uint32_t k = j < a.padded ? words[t * a.padded + j] : 0;

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

/* Jobs: each is Q queries of one KV head. A warp has one or more; when there are fewer of them than warps,
 * several share a job's blocks. */
struct jobs {
    uint32_t n, ways;
};

template <int Q> static __device__ __forceinline__ struct jobs jobs_of(args_t a)
{
    uint32_t n = a.kv_heads * ((a.queries_a_head + Q - 1) / Q);

    return jobs{n, n < WARPS ? WARPS / n : 1};
}

template <int Q>
static __device__ __forceinline__ void work_begin(args_t a, const struct jobs &jobs, uint32_t job,
                                                  struct work *w)
{
    w->first = threadIdx.x / WARP_LANES / jobs.n * TEAMS;
    w->step = jobs.ways * TEAMS;
    w->g = job % a.kv_heads;
    w->first_query = job / a.kv_heads * Q;
    w->queries = min((uint32_t)Q, a.queries_a_head - w->first_query);
}

/* By a warp that has one job: the chunk w against q. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_job(args_t a, struct work &w, float *raw,
                                                 const struct queries<F, Q, N> &q)
{
    w.out = raw + (w.g * a.queries_a_head + w.first_query) * a.raw_pitch;
    if constexpr (F == UCM_SELECT_HASH)
        score_hash<Q>(a, w);
    else if constexpr (N > 0)
        score_short<F, Q, N>(a, w, q);
    else
        score_long<F, Q>(a, w);
}

/* Every query of every KV head against the chunk, into `raw`. */
template <int F, int Q, int N>
static __device__ __forceinline__ void score_jobs(args_t a, struct work w, float *raw)
{
    struct jobs jobs = jobs_of<Q>(a);

    for (uint32_t job = threadIdx.x / WARP_LANES; job < jobs.n; job += WARPS) {
        struct queries<F, Q, N> q;

        work_begin<Q>(a, jobs, job, &w);
        if constexpr (N > 0)
            load_queries<F, Q, N>(a, w, &q);
        score_job<F, Q, N>(a, w, raw, q);
    }
}

/* ---- digests on their way to shared memory ---- */

/* A block's digest, by a warp; what lies behind it up to a multiple of 16 bytes comes along. */
static __device__ __forceinline__ void copy_digest(args_t a, uint32_t to, const uint8_t *digest)
{
    uint32_t at = warp_lane();

    if (a.wide)
        for (at *= 16; at < a.copy_bytes; at += WARP_LANES * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(digest + at));
    else
        for (at *= 4; at < a.copy_bytes; at += WARP_LANES * 4)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + at), "l"(digest + at));
}

/* Begins the copies of a chunk, if there is one, as one group. */
static __device__ __forceinline__ void stage_chunk(args_t a, const uint64_t *digest, uint32_t blocks,
                                                   uint32_t chunk)
{
    uint32_t first = chunk * a.chunk, end = min(first + a.chunk, blocks);
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared) + a.stage_at +
                  chunk % UCM_SELECT_CUDA_STAGES * a.chunk * a.staged;

    for (uint32_t b = first + threadIdx.x / WARP_LANES; b < end; b += WARPS)
        copy_digest(a, to + (b - first) * a.staged, (const uint8_t *)(digest[b] & ~LACKS));
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The chunk that was begun STAGES - 1 groups ago is there, once a barrier follows. */
static __device__ __forceinline__ void stage_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(UCM_SELECT_CUDA_STAGES - 2) : "memory");
}

#endif
