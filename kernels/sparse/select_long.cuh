/* Scores of vectors of any length, and of hashes, by prepared queries. */
#ifndef UCM_KERNELS_SPARSE_SELECT_LONG_CUH
#define UCM_KERNELS_SPARSE_SELECT_LONG_CUH

#include "kernels/sparse/select_work.cuh"

static __device__ __forceinline__ const uint8_t *bytes_of(args_t a, const struct work &w, uint32_t b)
{
    return w.stage ? w.stage + min(b, a.chunk - 1) * a.staged : (const uint8_t *)w.summary[b];
}

static __device__ __forceinline__ void put_score(args_t a, const struct work &w, uint32_t b,
                                                 uint32_t query, bool mine, float score)
{
    if (mine && query < w.queries && b < w.count)
        w.out[query * a.raw_pitch + b] = ucm_is_nan(score) ? -ucm_inf() : score;
}

/* ---- vectors of any length ---- */

/* A thread's four of vector v's channels from c on. */
template <int F>
static __device__ __forceinline__ uint32_t load_channels(args_t a, const uint8_t *array, uint32_t v,
                                                         uint32_t c)
{
    const uint8_t *vector = array + v * a.vector_bytes;

    if (F == UCM_SELECT_REST)
        return half_channels(((const uint32_t *)(vector + c / WARP_LANES * 16))[c / 4 % 4], c / 4 % TEAM);
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
    float size;

#pragma unroll
    for (uint32_t i = 0; i < Q; i++)
        from[i] = query_in<Q>(a, w, i);
    size = F == UCM_SELECT_BOX ? query_size(a, from[0]) : 0;
    for (uint32_t at = w.first; at < w.count; at += AT_ONCE * w.step) {
        const uint8_t *summary[AT_ONCE];
        struct gathered<F> best[AT_ONCE];

#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            summary[k] = bytes_of(a, w, min(at + k * w.step + team, w.count));
        for (uint32_t v = w.g * a.vectors; v < (w.g + 1) * a.vectors; v++) {
            float acc[AT_ONCE][family<F>::sums][Q][4] = {}, s[AT_ONCE][family<F>::sums];

#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (uint32_t i = 0; i < family<F>::sums; i++)
                    s[k][i] = load_scale(summary[k] + a.scale[i] + 2 * v);
            for (uint32_t c = part * 4; c < a.padded; c += WARP_LANES) {
                float q[Q][4];
                uint32_t mask[Q];

#pragma unroll
                for (uint32_t i = 0; i < Q; i++) {
                    *(float4 *)q[i] = *(const float4 *)(from[i] + c);
                    mask[i] = F == UCM_SELECT_BOX ? query_masks(a, from[i])[c / 4] : 0;
                }
#pragma unroll
                for (uint32_t k = 0; k < AT_ONCE; k++) {
                    uint32_t word[family<F>::arrays];

#pragma unroll
                    for (uint32_t i = 0; i < family<F>::arrays; i++)
                        word[i] = load_channels<F>(a, summary[k] + a.array[i], v, c);
                    add_terms<F, Q>(acc[k], q, mask, word, s[k][0]);
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) {
                float sum[family<F>::sums];

#pragma unroll
                for (uint32_t i = 0; i < family<F>::sums; i++)
                    sum[i] = team_fold<Q>(acc[k][i]);
                best[k].add(finish<F>(a, sum, s[k], size, v - w.g * a.vectors));
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
        const uint32_t *from = (const uint32_t *)(w.query + min(i, w.queries - 1) * a.query_floats);

#pragma unroll
        for (uint32_t j = 0; j < HASH_WORDS; j++)
            q[i][j] = j < a.padded ? from[j] : 0;
    }
    for (uint32_t at = w.first; at < w.count; at += w.step) {
        const uint8_t *summary = bytes_of(a, w, at + team);
        const uint32_t *words = (const uint32_t *)(summary + w.g * a.vectors * a.channels);
        bool bad = *(const uint32_t *)(summary + a.array[1] + 4 * w.g) != 0;
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

/* ---- summaries on their way to shared memory ---- */

/* A block's summary, by a warp; what lies after it up to a multiple of 16 bytes comes along. */
static __device__ __forceinline__ void copy_summary(args_t a, uint32_t to, const uint8_t *summary)
{
    uint32_t at = warp_lane();

    if (a.wide)
        for (at *= 16; at < a.copy_bytes; at += WARP_LANES * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(summary + at));
    else
        for (at *= 4; at < a.copy_bytes; at += WARP_LANES * 4)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + at), "l"(summary + at));
}

/* Begins the copies of a chunk, if there is one, as one group. */
static __device__ __forceinline__ void stage_chunk(args_t a, const uint64_t *summary, uint32_t blocks,
                                                   uint32_t chunk)
{
    uint32_t first = chunk * a.chunk, end = min(first + a.chunk, blocks);
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared) + a.stage_at +
                  chunk % UCM_SELECT_CUDA_STAGES * a.chunk * a.staged;

    for (uint32_t b = first + threadIdx.x / WARP_LANES; b < end; b += WARPS)
        copy_summary(a, to + (b - first) * a.staged, (const uint8_t *)summary[b]);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The chunk that was begun STAGES - 1 groups ago is there, once a barrier follows. */
static __device__ __forceinline__ void stage_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(UCM_SELECT_CUDA_STAGES - 2) : "memory");
}

#endif
