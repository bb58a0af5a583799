/* How long attention over latents takes, with memory that no cache holds: DeepSeek-V3's layer, 576 channels in bfloat16 or E4M3,
 * with the query heads of 8, 2 and 1 ranks, chosen blocks of 16 tokens anywhere and a window of 512 tokens. Beside it a read of as many
 * bytes that lie in one piece. */
#include "tests/gpu/attend.h"

#include "client/bench/kernels.h"

#include <stdio.h>
#include <stdlib.h>

#define D UCM_ATTEND_MLA_CHANNELS
#define TOKENS 16u
#define WINDOW 32u

extern const unsigned char ucm_bench_fatbin[];

/* split_tiles 0: as ucm_attend_mla_cut has it. */
struct row {
    uint32_t chains, heads, chosen, split_tiles, narrow;
};

static CUdeviceptr pool, odd;
static uint32_t blocks, processors;
static CUmodule plain;

static void pool_open(void)
{
    uint64_t piece = UINT64_C(16) << 20, bytes = UINT64_C(6) << 30;
    uint16_t *from = fresh(piece);

    for (size_t i = 0; i < piece / 2; i++)
        from[i] = (uint16_t)((rnd() & 0x807f) | 0x3f00);
    blocks = (uint32_t)(bytes / (TOKENS * D * 2));
    pool = gpu_new(bytes);
    for (uint64_t at = 0; at < bytes; at += piece)
        gpu_put(pool + at, from, piece);
    free(from);
}

static void args_open(const struct row *r, struct ucm_attend_cuda *a)
{
    uint32_t groups = ucm_attend_mla_groups(r->heads), tiles = r->chosen + WINDOW;
    uint64_t rows = (uint64_t)r->chains * r->heads, row = r->narrow ? D : 2 * D, entries;
    struct ucm_attend_cuda_cut cut = ucm_attend_mla_cut(r->chains * groups, tiles, processors);
    int32_t *list, *table = fresh(r->chains * WINDOW * 4);
    uint32_t *count = fresh(r->chains * 4), *length = fresh(r->chains * 4);

    if (r->split_tiles > 0)
        cut = (struct ucm_attend_cuda_cut){r->split_tiles,
                                           (tiles + r->split_tiles - 1) / r->split_tiles};
    entries = (uint64_t)r->chains * r->chosen;
    list = fresh(entries * 4);
    for (uint64_t i = 0; i < entries; i++)
        list[i] = (int32_t)((i * 104729 + WINDOW) % blocks);
    for (uint32_t i = 0; i < r->chains * WINDOW; i++)
        table[i] = (int32_t)rnd_below(blocks);
    for (uint32_t c = 0; c < r->chains; c++) {
        count[c] = r->chosen;
        length[c] = WINDOW * TOKENS - rnd_below(TOKENS);
    }
    *a = (struct ucm_attend_cuda){
        .kv_heads = groups,
        .group = r->heads / groups,
        .tokens = TOKENS,
        .chains = r->chains,
        .lists = 1,
        .room = r->chosen,
        .split_tiles = cut.split_tiles,
        .splits = cut.splits,
        .scale_log2 = 1.44269504f / 16,
        .q = gpu_new(rows * D * 2),
        .q_stride = (uint64_t)r->heads * D,
        .list = gpu_put(0, list, entries * 4),
        .count = gpu_put(0, count, r->chains * 4),
        .pool = {.base = pool, .stride = TOKENS * row, .blocks = blocks, .k.token_stride = row},
        .table = gpu_put(0, table, r->chains * WINDOW * 4),
        .table_stride = WINDOW,
        .first = gpu_new(r->chains * 4),
        .length = gpu_put(0, length, r->chains * 4),
        .out = gpu_new(rows * UCM_ATTEND_MLA_VALUES * 2),
        .lse = gpu_new(rows * 4),
        .flags = gpu_new(4),
        .partial = gpu_new(rows * cut.splits * UCM_ATTEND_MLA_VALUES * 4),
        .partial_sum = gpu_new(rows * cut.splits * sizeof(struct ucm_attend_cuda_sum)),
    };
    a->pages = a->pool;
    must(cuMemsetD16Async(a->q, 0x3dcd, rows * D, gpu_stream), "queries");
    gpu_clear(a->first, r->chains * 4);
    gpu_clear(a->flags, 4);
    free(list);
    free(table);
    free(count);
    free(length);
}

static void args_close(const struct ucm_attend_cuda *a)
{
    CUdeviceptr mine[] = {a->q,   a->list, a->count, a->table,   a->first,      a->length,
                          a->out, a->lse,  a->flags, a->partial, a->partial_sum};

    for (size_t i = 0; i < sizeof(mine) / sizeof(mine[0]); i++)
        gpu_free(mine[i]);
}

static void nothing(void *arg)
{
    (void)arg;
}

static float attend_us(const struct row *r, const struct ucm_attend_cuda *a)
{
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    mla_launch(a, UCM_KV_BF16, r->narrow);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    return attend_median_us(graph, nothing, NULL);
}

/* Of so many bytes in one piece. */
static float read_us(uint64_t bytes)
{
    uint32_t n = (uint32_t)(bytes / 16);
    CUfunction f;
    CUgraph graph;

    must(cuModuleGetFunction(&f, plain, UCM_BENCH_READ), UCM_BENCH_READ);
    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    must(cuLaunchKernel(f, processors * 8, 1, 1, 256, 1, 1, 0, gpu_stream,
                        (void *[]){&pool, &n, &odd}, NULL),
         UCM_BENCH_READ);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    return attend_median_us(graph, nothing, NULL);
}

void measure_latents(void)
{
    static const struct row rows[] = {
        {1, 16, 256, 0, 0},   {1, 16, 256, 2, 0},   {1, 16, 256, 3, 0},     {1, 16, 256, 8, 0},
        {1, 128, 256, 0, 0},  {1, 128, 256, 8, 0},  {1, 128, 256, 12, 0},   {1, 64, 256, 0, 0},
        {8, 16, 256, 0, 0},   {8, 128, 256, 0, 0},  {8, 128, 256, 32, 0},   {50, 16, 256, 0, 0},
        {50, 16, 256, 96, 0}, {50, 128, 256, 0, 0}, {50, 128, 256, 288, 0}, {1, 16, 8192, 0, 0},
        {1, 128, 8192, 0, 0}, {1, 16, 256, 0, 1},   {1, 128, 256, 0, 1},    {8, 16, 256, 0, 1},
        {50, 16, 256, 0, 1},  {50, 128, 256, 0, 1},
    };
    int n;

    must(cuDeviceGetAttribute(&n, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), "multiprocessors");
    must(cuModuleLoadData(&plain, ucm_bench_fatbin), "the kernels of ucm-bench");
    processors = (uint32_t)n;
    odd = gpu_new(4);
    pool_open();
    printf(
        "\n| latents | chains | query heads | tokens | tiles a split | thread blocks | us | GB/s "
        "| a read, us |\n|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct row *r = &rows[i];
        uint64_t tokens = (uint64_t)(r->chosen + WINDOW) * TOKENS;
        uint64_t bytes = r->chains * tokens * D * (r->narrow ? 1 : 2);
        struct ucm_attend_cuda a;
        float us;

        args_open(r, &a);
        us = attend_us(r, &a);
        printf("| %s | %u | %u | %lu | %u | %u | %.1f | %.0f | %.1f |\n",
               r->narrow ? "e4m3" : "bf16", r->chains, r->heads, (unsigned long)tokens,
               a.split_tiles, a.splits * a.kv_heads * a.chains, (double)us,
               (double)bytes / (double)us / 1e3, (double)read_us(bytes));
        args_close(&a);
    }
    gpu_free(pool);
    gpu_free(odd);
}
