/* From the scores of query heads to those of the lists: the reduces, and softmax in two more
 * steps. */
#ifndef UCM_KERNELS_SPARSE_SELECT_REDUCE_CUH
#define UCM_KERNELS_SPARSE_SELECT_REDUCE_CUH

#include "kernels/sparse/select_item.cuh"

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

static __device__ __forceinline__ float *list_of(args_t a, uint32_t sequence, uint32_t list)
{
    return (float *)a.scores + ((uint64_t)sequence * a.lists + list) * a.pitch;
}

/* How many blocks between the windows have a key with such first bits; top k only. */
static __device__ __forceinline__ uint32_t *digits_of(args_t a, uint32_t sequence, uint32_t list)
{
    return (uint32_t *)a.digits + ((uint64_t)sequence * a.lists + list) * UCM_SELECT_CUDA_DIGITS;
}

struct span {
    uint32_t begin, end;
};

static __device__ __forceinline__ struct span between_windows(args_t a, uint32_t n)
{
    uint32_t init = min(a.sink_blocks, n);

    return span{init, n - min(a.recent_blocks, n - init)};
}

/* Adds 1 to each valid lane's counter. Lanes of one counter add together, since most scores have
 * one of few digits. By whole warps. */
static __device__ __forceinline__ void count_digit(uint32_t *digits, uint32_t number, bool valid)
{
    uint32_t same = __match_any_sync(WARP_ALL, valid ? number : ~0u);

    if (valid && warp_lane() == (uint32_t)__ffs((int)same) - 1)
        atomicAdd(digits + number, (uint32_t)__popc(same));
}

/* From the scores of a KV head's queries for each block of the tile to those of the lists. head(g,
 * b) is the head's. */
template <typename HEAD>
static __device__ __forceinline__ void put_lists(args_t a, const struct tile &t, HEAD head)
{
    struct span s = between_windows(a, t.n);
    uint32_t *digits = digits_of(a, t.sequence, 0);
    uint32_t shift = WARP_LANES - __clz((int)(t.count - 1)); /* places a list: a power of two */

    for (uint32_t base = 0; base < a.lists << shift; base += THREADS) {
        uint32_t i = base + threadIdx.x, list = i >> shift, b = i & ((1u << shift) - 1);
        bool valid = list < a.lists && b < t.count;
        float x = 0;

        if (valid && a.heads == UCM_HEADS_EACH) {
            x = head(list, b);
        } else if (valid) {
            struct many heads = {0, 0, 0};

            for (uint32_t g = 0; g < a.kv_heads; g++)
                many_add(&heads, head(g, b));
            x = a.heads == UCM_HEADS_SUM ? many_sum(&heads, 1.0f) : heads.top;
        }
        b += t.first;
        if (valid)
            list_of(a, t.sequence, list)[b] = x;
        if (a.policy == UCM_CHOOSE_TOPK)
            count_digit(digits, list * UCM_SELECT_CUDA_DIGITS + (ucm_score_key(x) >> FIRST_SHIFT),
                        valid && b >= s.begin && b < s.end);
    }
}

/* raw: the scores of a chunk. */
static __device__ __forceinline__ void reduce_chunk(args_t a, const struct tile &t, const float *raw)
{
    put_lists(a, t, [&](uint32_t g, uint32_t b) {
        const float *from = raw + g * a.queries_a_head * a.raw_pitch + b;
        struct many group = {0, 0, 0};

        for (uint32_t i = 0; i < a.queries_a_head; i++)
            many_add(&group, from[i * a.raw_pitch]);
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

/* Query head i of a sequence, in the order of KV heads. */
static __device__ __forceinline__ uint64_t raw_list(args_t a, uint32_t sequence, uint32_t i)
{
    return (uint64_t)sequence * a.rows * a.q_heads + i;
}

/* Keeps a chunk's scores of each query head, and the largest that is not +inf. */
static __device__ __forceinline__ void keep_raw(args_t a, const struct tile &t, const float *raw)
{
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint64_t list = raw_list(a, t.sequence, i);
        float *to = (float *)a.raw + list * a.pitch + t.first;
        uint32_t top = 0;

        for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES) {
            float x = raw[i * a.raw_pitch + b];

            to[b] = x;
            top = x == ucm_inf() ? top : max(top, ucm_score_key(x));
        }
        top = __reduce_max_sync(WARP_ALL, top);
        if (warp_lane() == 0)
            atomicMax((uint32_t *)a.top + list, top);
    }
}

/* The largest score of a query head; -inf if it has none. */
static __device__ __forceinline__ float top_score(uint32_t key)
{
    return key == 0 ? -ucm_inf() : key_score(key);
}

/* A thread's four blocks from b on, of a query head's `count` in a tile; 0 for those that are not.
 * The tile begins at a multiple of 4 blocks, and so do rows. */
static __device__ __forceinline__ uint32_t four_weights(const float *raw, uint32_t b, uint32_t count, float top,
                                                        float beta)
{
    float4 four = __ldcg((const float4 *)(raw + b));
    float x[4] = {four.x, four.y, four.z, four.w};
    uint32_t sum = 0;

#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        sum += b + j < count ? weight_of(x[j], top, beta) : 0;
    return sum;
}

static __device__ __noinline__ void weigh_item(args_t a, const struct tile &t)
{
    static_assert(UCM_SELECT_CUDA_TILE / WARP_LANES <= 256, "a thread's sum fits 32 bits");
#pragma unroll 2
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint64_t list = raw_list(a, t.sequence, i);
        const float *raw = (const float *)a.raw + list * a.pitch + t.first;
        float top = top_score(__ldcg((const uint32_t *)a.top + list));
        uint32_t sum = 0, low;

        for (uint32_t b = 4 * warp_lane(); b < t.count; b += 4 * WARP_LANES)
            sum += four_weights(raw, b, t.count, top, a.beta);
        low = __reduce_add_sync(WARP_ALL, sum & 0xffff);
        sum = __reduce_add_sync(WARP_ALL, sum >> 16);
        if (warp_lane() == 0)
            atomicAdd((unsigned long long *)a.sum + list, ((unsigned long long)sum << 16) + low);
    }
    item_done(&progress(a, t.sequence)->weighed);
}

/* x / total, rounded to nearest, for a weight x and a total from 1 to 2^44. by: 1 / total. The
 * second quotient is off by less than one unit, and its remainder corrects it. */
static __device__ __forceinline__ float share_of(float x, float total, float by)
{
    float q = x * by;

    q = ucm_fma(ucm_fma(-q, total, x), by, q);
    return ucm_fma(ucm_fma(-q, total, x), by, q);
}

static __device__ __noinline__ void share_item(args_t a, const struct tile &t)
{
    uint32_t group = a.queries_a_head;
    uint64_t first = raw_list(a, t.sequence, 0);

    put_lists(a, t, [&](uint32_t g, uint32_t b) {
        const float *raw = (const float *)a.raw + (first + g * group) * a.pitch + t.first + b;
        const unsigned long long *sums = (const unsigned long long *)a.sum + first + g * group;
        const uint32_t *tops = (const uint32_t *)a.top + first + g * group;
        struct many shares = {0, 0, 0};

#pragma unroll 4
        for (uint32_t i = 0; i < group; i++) {
            float x = __ldcg(raw + (uint64_t)i * a.pitch), top = top_score(__ldcg(tops + i));
            float total = ucm_max(1.0f, __ull2float_rn(__ldcg(sums + i)));

            if (x != ucm_inf())
                x = share_of((float)weight_of(x, top, a.beta), total, __frcp_rn(total));
            many_add(&shares, x);
        }
        return many_sum(&shares, 1.0f);
    });
    item_done(&progress(a, t.sequence)->shared);
}

#endif
