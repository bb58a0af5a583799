/* From the scores of query heads to those of the lists: the reduces, and softmax in two more steps. */
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

/* Adds 1 to each valid lane's counter, lanes of one counter together: scores gather in few digits. By
 * whole warps. */
static __device__ __forceinline__ void count_digit(uint32_t *digits, uint32_t number, bool valid)
{
    uint32_t same = __match_any_sync(WARP_ALL, valid ? number : ~0u);

    if (valid && warp_lane() == (uint32_t)__ffs((int)same) - 1)
        atomicAdd(digits + number, (uint32_t)__popc(same));
}

/* From the scores of a KV head's queries for each block of the tile to those of the lists. head(g, b)
 * is the head's. */
template <typename HEAD>
static __device__ __forceinline__ void put_lists(args_t a, const struct tile &t, HEAD head)
{
    struct span s = between_windows(a, t.n);
    uint32_t *digits = digits_of(a, t.chain, 0);
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
            list_of(a, t.chain, list)[b] = x;
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

/* Query head i of a chain, in the order of KV heads. */
static __device__ __forceinline__ uint64_t raw_list(args_t a, uint32_t chain, uint32_t i)
{
    return (uint64_t)chain * a.rows * a.q_heads + i;
}

/* Keeps a chunk's scores of each query head, and the largest that is not +inf. */
static __device__ __forceinline__ void keep_raw(args_t a, const struct tile &t, const float *raw)
{
    for (uint32_t i = threadIdx.x / WARP_LANES; i < a.rows * a.q_heads; i += WARPS) {
        uint64_t list = raw_list(a, t.chain, i);
        float *to = (float *)a.raw + list * a.max_blocks + t.first;
        uint32_t top = 0;

        for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES) {
            float x = raw[i * a.raw_pitch + b];

            to[b] = x;
            top = x == ucm_inf() ? top : max(top, ucm_score_key(x));
        }
        top = __reduce_max_sync(WARP_ALL, top);
        if (warp_lane() == 0 && top > __ldcg((const uint32_t *)a.top + list))
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
        float top = raw_top(a, list), beta = a.beta;

#pragma unroll 4
        for (uint32_t b = warp_lane(); b < t.count; b += WARP_LANES)
            sum += weight_of(raw[b], top, beta);
        sum = warp_sum(sum);
        if (warp_lane() == 0)
            atomicAdd((unsigned long long *)a.sum + list, (unsigned long long)sum);
    }
    item_done(&progress(a, t.chain)->weighed);
}

static __device__ __noinline__ void share_item(args_t a, const struct tile &t)
{
    uint32_t queries = a.rows * a.q_heads, group = a.queries_a_head;
    const float *raw = (const float *)a.raw + raw_list(a, t.chain, 0) * a.max_blocks + t.first;
    float *top = (float *)shared, *total = top + queries, beta = a.beta;
    uint64_t pitch = a.max_blocks;

    for (uint32_t i = threadIdx.x; i < queries; i += THREADS) {
        uint64_t list = raw_list(a, t.chain, i);

        top[i] = raw_top(a, list);
        total[i] = ucm_max(1.0f, __ull2float_rn(((const unsigned long long *)a.sum)[list]));
    }
    __syncthreads();
    put_lists(a, t, [&](uint32_t g, uint32_t b) {
        struct many shares = {0, 0, 0};

#pragma unroll 4
        for (uint32_t i = g * group; i < (g + 1) * group; i++) {
            float x = raw[i * pitch + b];

            if (x != ucm_inf())
                x = (float)weight_of(x, top[i], beta);
            many_add(&shares, x / total[i]);
        }
        return many_sum(&shares, 1.0f);
    });
    item_done(&progress(a, t.chain)->shared);
}

#endif
