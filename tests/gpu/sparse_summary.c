/* Summaries: every method, type of K and layout in memory. Values poison, overflow, vanish or are
 * all the same. Blocks come out of order, twice, or lie outside. */
#include "tests/gpu/sparse.h"

#include <string.h>

#define BLOCKS 9u
#define LAYERS 3u
#define GUARD 0xaa

static void put_value(uint8_t *at, uint32_t dtype, float x)
{
    union {
        float f;
        uint32_t u;
    } v = {x};
    uint16_t h = (uint16_t)(v.u >> 16);

    switch (dtype) {
    case UCM_SPARSE_F32:
        memcpy(at, &x, sizeof(x));
        break;
    case UCM_SPARSE_F16: { /* rounded down: any bits will do */
        int32_t e = (int32_t)(v.u >> 23 & 0xff) - 112;

        h = (uint16_t)(v.u >> 16 & 0x8000);
        if (e > 0 && e < 31)
            h |= (uint16_t)(e << 10 | (v.u >> 13 & 0x3ff));
        else if (e >= 31)
            h |= 0x7bff;
        memcpy(at, &h, sizeof(h));
        break;
    }
    case UCM_SPARSE_BF16:
        memcpy(at, &h, sizeof(h));
        break;
    default: {
        int32_t e = (int32_t)(v.u >> 23 & 0xff) - 120;

        *at = (uint8_t)(v.u >> 24 & 0x80);
        if (e > 0 && e < 16)
            *at |= (uint8_t)(e << 3 | (v.u >> 20 & 6));
        break;
    }
    }
}

/* One of each kind of block. */
static float value_of(uint32_t block, uint32_t i)
{
    switch (block % BLOCKS) {
    case 1:
        return 0;
    case 2: /* ties */
        return i % 3 ? 1.0f : -1.0f;
    case 3: /* small, some denormal in each type */
        return rnd_normal() * (rnd_below(2) ? 0x1p-9f : 0x1p-30f);
    case 4: /* large: sums overflow in F32 and BF16 */
        return rnd_normal() * 0x1p126f;
    case 5:
        return (float)(int32_t)rnd_below(5) - 2;
    default:
        return rnd_normal();
    }
}

/* A NaN or infinity in some head of blocks 6 and 7. */
static void put_poison(uint8_t *at, uint32_t dtype, uint32_t block)
{
    static const uint32_t bits[] = {0x7fc00001, 0x7f800000, 0xff800000, 0x7f800001};
    uint32_t u = bits[rnd_below(4)];
    uint16_t h = (uint16_t)(u >> 16 | (block & 1));

    if (dtype == UCM_SPARSE_F32) {
        memcpy(at, &u, sizeof(u));
    } else if (dtype == UCM_SPARSE_BF16) {
        memcpy(at, &h, sizeof(h));
    } else if (dtype == UCM_SPARSE_F16) {
        h = rnd_below(2) ? 0x7c00 : 0xfe01;
        memcpy(at, &h, sizeof(h));
    } else {
        *at = rnd_below(2) ? 0x7f : 0xff;
    }
}

static void fill(uint8_t *kv, const struct ucm_sparse_shape *s, size_t stride)
{
    uint32_t element = s->dtype == UCM_SPARSE_F32 ? 4 : s->dtype == UCM_SPARSE_FP8_E4M3 ? 1 : 2;

    for (size_t i = 0; i < LAYERS * BLOCKS * stride; i++)
        kv[i] = (uint8_t)rnd();
    for (uint32_t n = 0; n < LAYERS * BLOCKS; n++) {
        uint8_t *layer = kv + n * stride;
        uint32_t b = n % BLOCKS;

        for (uint32_t t = 0; t < s->tokens; t++)
            for (uint32_t g = 0; g < s->kv_heads; g++) {
                uint8_t *k = layer + s->k_offset + t * s->k_token_stride + g * s->k_head_stride;
                uint8_t *v = layer + s->v_offset + t * s->v_token_stride + g * s->v_head_stride;

                for (uint32_t c = 0; c < s->head_dim; c++)
                    put_value(k + c * element, s->dtype, value_of(b, c));
                for (uint32_t c = 0; c < s->v_head_dim; c++)
                    put_value(v + c * element, s->dtype, value_of(b, c));
            }
        if (b == 6 || (b == 7 && s->v_head_dim == 0))
            put_poison(layer + s->k_offset + rnd_below(s->tokens) * s->k_token_stride +
                           rnd_below(s->kv_heads) * s->k_head_stride +
                           rnd_below(s->head_dim) * element,
                       s->dtype, b);
        else if (b == 7)
            put_poison(layer + s->v_offset + rnd_below(s->tokens) * s->v_token_stride +
                           rnd_below(s->kv_heads) * s->v_head_stride +
                           rnd_below(s->v_head_dim) * element,
                       s->dtype, b);
    }
}

struct arena {
    uint8_t *kv, *out; /* out: what is expected */
    size_t stride, out_stride, out_bytes;
    CUdeviceptr gpu_kv, gpu_out, numbers, out_numbers;
};

/* The pairs of numbers: each block somewhere else, and two that are skipped. */
static const int32_t numbers[] = {3, 0, 8, 1, -1, 2, 7, 4, 6, 5, 0};
static const int32_t out_numbers[] = {1, 2, 0, 8, 9, 7, 3, 4, 5, 6, (int32_t)BLOCKS + 1};
#define PAIRS (sizeof(numbers) / sizeof(*numbers))

static void expect(const struct ucm_summary_plan *plan, struct arena *a)
{
    uint64_t *summary = fresh((plan->bytes + 7) / 8 * 8);

    memset(a->out, GUARD, a->out_bytes);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t i = 0; i < PAIRS; i++) {
            if (numbers[i] < 0 || out_numbers[i] > (int32_t)BLOCKS)
                continue;
            ucm_summary_build(plan, a->kv + (l * BLOCKS + (uint32_t)numbers[i]) * a->stride,
                              summary);
            memcpy(a->out + (l * (BLOCKS + 1) + (uint32_t)out_numbers[i]) * a->out_stride, summary,
                   plan->bytes);
        }
}

static bool launch(const struct ucm_sparse_summary *summary, const struct arena *a)
{
    struct ucm_cuda_summary_layer layers[LAYERS];
    struct ucm_cuda_summary_build build = {.layers = layers,
                                           .n_layers = LAYERS,
                                           .n_blocks = PAIRS,
                                           .numbers = a->numbers,
                                           .out_numbers = a->out_numbers,
                                           .stride = a->stride,
                                           .out_stride = a->out_stride,
                                           .bound = BLOCKS,
                                           .out_bound = BLOCKS + 1,
                                           .thread_blocks = rnd_below(3) * 3};
    struct ucm_cuda_summary *d;

    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[l].k = layers[l].v = a->gpu_kv + l * BLOCKS * a->stride;
        layers[l].out = a->gpu_out + l * (BLOCKS + 1) * a->out_stride;
    }
    if (!check(ucm_cuda_summary_open(gpu_uuid, summary, &d) == 0, "open: %s", ucm_cuda_errmsg()))
        return false;
    if (!check(ucm_cuda_summary(d, &build, gpu_stream) == 0, "launch: %s", ucm_cuda_errmsg()))
        return false;
    gpu_sync();
    ucm_cuda_summary_close(d);
    return true;
}

static void compare(const struct ucm_sparse_summary *summary)
{
    const struct ucm_sparse_shape *s = &summary->shape;
    struct ucm_summary_plan *plan = plan_of(summary);
    uint8_t *got;
    struct arena a = {.stride = (ucm_summary_extent(&plan->spec) + 64) / 16 * 16,
                      .out_stride = plan->bytes + 8};

    if (s->v_head_dim > 0)
        a.stride += s->v_offset + s->tokens * s->kv_heads * s->v_head_dim * 4;
    a.out_bytes = LAYERS * (BLOCKS + 1) * a.out_stride;
    a.kv = fresh(LAYERS * BLOCKS * a.stride);
    a.out = fresh(a.out_bytes);
    got = fresh(a.out_bytes);
    fill(a.kv, s, a.stride);
    memset(a.out, GUARD, a.out_bytes);
    a.gpu_kv = gpu_put(0, a.kv, LAYERS * BLOCKS * a.stride);
    a.gpu_out = gpu_put(0, a.out, a.out_bytes);
    a.numbers = gpu_put(0, numbers, sizeof(numbers));
    a.out_numbers = gpu_put(0, out_numbers, sizeof(out_numbers));
    expect(plan, &a);
    if (launch(summary, &a)) {
        size_t at = 0;

        gpu_get(got, a.gpu_out, a.out_bytes);
        while (at < a.out_bytes && got[at] == a.out[at])
            at++;
        check(
            at == a.out_bytes,
            "summary %s, dtype %u, %u tokens, %u heads of %u: byte %zu of %u, block %zu, is %02x, "
            "not %02x",
            method_name(summary->method), s->dtype, s->tokens, s->kv_heads, s->head_dim,
            at % a.out_stride, plan->bytes, at / a.out_stride % (BLOCKS + 1), got[at], a.out[at]);
    }
    memory_end();
}

void test_summaries(void)
{
    static const struct {
        uint32_t tokens, heads, d, rope;
    } shapes[] = {{16, 8, 128, 0}, {16, 1, 576, 64}, {8, 3, 64, 0},   {5, 2, 80, 0},
                  {32, 2, 96, 0},  {1, 1, 4, 0},     {16, 2, 256, 0}, {4, 5, 100, 0},
                  {3, 1, 1024, 0}, {64, 1, 128, 0},  {2, 7, 12, 0},   {16, 1, 68, 20}};

    for (uint32_t i = few ? 2 : 0; i < (few ? 4 : sizeof(shapes) / sizeof(*shapes)); i++)
        for (uint32_t method = UCM_SPARSE_MEAN; method <= TOKENS_REST; method++)
            for (uint32_t dtype = few ? 2 : 0; dtype < (few ? 3 : 4); dtype++)
                for (uint32_t k = 0; k < (i < 2 ? 3 : 1); k++) {
                    struct ucm_sparse_summary summary;

                    if (summary_of(&summary, method, dtype, shapes[i].tokens, shapes[i].heads,
                                   shapes[i].d, shapes[i].rope))
                        compare(&summary);
                }
}
