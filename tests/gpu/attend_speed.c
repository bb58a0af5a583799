/* How long a launch takes, with memory that no cache holds: Llama-3.1-8B's layer (8 KV heads of 128 channels, 4 query
 * heads each, bfloat16, blocks of 16 tokens), chosen blocks of each KV head and a window of 512 tokens. */
#include "tests/gpu/attend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define HEADS 8u
#define GROUP 4u
#define D 128u
#define TOKENS 16u
#define BLOCK (HEADS * 2 * TOKENS * D * 2)
#define WINDOW 32u
#define SAMPLES 15
#define FLUSH (UINT64_C(256) << 20)

/* split_tiles 0: as ucm_attend_cuda_cut has it. narrow: FP8 E4M3, or CODED. */
struct row {
    uint32_t chains, chosen, split_tiles, narrow;
};

static CUdeviceptr flush, pool;
static uint32_t blocks, processors;

/* Random bytes of some MiB, again and again: cheap, and no cache or link compresses it. */
static void fill_pool(void)
{
    size_t piece = 16 << 20, free_bytes, all;
    uint16_t *from = fresh(piece);

    must(cuMemGetInfo(&free_bytes, &all), "memory");
    blocks = 26000;
    while ((uint64_t)blocks * BLOCK > free_bytes / 2)
        blocks /= 2;
    for (size_t i = 0; i < piece / 2; i++)
        from[i] = (uint16_t)((rnd() & 0x807f) | 0x3f00);
    pool = gpu_new((size_t)blocks * BLOCK);
    for (uint64_t at = 0; at < (uint64_t)blocks * BLOCK; at += piece)
        gpu_put(pool + at, from,
                piece < blocks * (uint64_t)BLOCK - at ? piece : blocks * (uint64_t)BLOCK - at);
    free(from);
}

/* Slots of a KV head, each in a table of its own; anywhere in the pool. */
static CUdeviceptr put_slots(void)
{
    uint64_t slots = (uint64_t)blocks * HEADS;
    int32_t *slot_of = fresh(slots * 4);
    CUdeviceptr at;

    for (uint64_t i = 0; i < slots; i++)
        slot_of[i] = (int32_t)(i * UINT64_C(104729) % slots);
    at = gpu_put(0, slot_of, slots * 4);
    free(slot_of);
    return at;
}

static struct ucm_attend_cuda_cut cut_of(const struct row *r)
{
    uint64_t places = (uint64_t)processors * ucm_attend_cuda_places(D, r->narrow ? 1 : 2, GROUP);
    struct ucm_attend_cuda_cut cut =
        ucm_attend_cuda_cut(r->chains * HEADS, r->chosen + WINDOW, places);

    if (r->split_tiles > 0)
        cut = (struct ucm_attend_cuda_cut){
            r->split_tiles, (r->chosen + WINDOW + r->split_tiles - 1) / r->split_tiles};
    if (r->narrow == CODED)
        cut.splits = (r->chosen + cut.split_tiles - 1) / cut.split_tiles +
                     (WINDOW + cut.split_tiles - 1) / cut.split_tiles;
    return cut;
}

/* What each list chose, and the latest pages of each chain. */
static void put_choices(const struct row *r, struct ucm_attend_cuda *a)
{
    uint64_t lists = (uint64_t)r->chains * HEADS;
    int32_t *list = fresh(lists * r->chosen * 4), *table = fresh(r->chains * WINDOW * 4);
    uint32_t *count = fresh(lists * 4), *length = fresh(r->chains * 4);

    for (uint32_t c = 0; c < r->chains; c++) {
        length[c] = WINDOW * TOKENS - rnd_below(TOKENS);
        for (uint32_t i = 0; i < WINDOW; i++)
            table[c * WINDOW + i] = (int32_t)rnd_below(blocks);
    }
    for (uint64_t i = 0; i < lists * r->chosen; i++)
        list[i] = (int32_t)rnd_below(blocks);
    for (uint64_t l = 0; l < lists; l++)
        count[l] = r->chosen;
    a->list = gpu_put(0, list, lists * r->chosen * 4);
    a->count = gpu_put(0, count, lists * 4);
    a->table = gpu_put(0, table, r->chains * WINDOW * 4);
    a->length = gpu_put(0, length, r->chains * 4);
    free(list);
    free(table);
    free(count);
    free(length);
}

/* Results, and what a launch needs beside. */
static void make_room(uint64_t rows, struct ucm_attend_cuda *a)
{
    uint64_t lists = rows / GROUP;

    a->q = gpu_new(rows * D * 2);
    a->first = gpu_new(a->chains * 4);
    a->out = gpu_new(rows * D * 2);
    a->lse = gpu_new(rows * 4);
    a->flags = gpu_new(4);
    a->done = gpu_new(lists * 4);
    a->partial = gpu_new(rows * a->splits * D * 4);
    a->partial_sum = gpu_new(rows * a->splits * sizeof(struct ucm_attend_cuda_sum));
    must(cuMemsetD16Async(a->q, 0x3dcd, rows * D, gpu_stream), "queries");
    gpu_clear(a->first, a->chains * 4);
    gpu_clear(a->done, lists * 4);
    gpu_clear(a->flags, 4);
}

static void args_open(const struct row *r, struct ucm_attend_cuda *a)
{
    uint64_t row = r->narrow ? D : 2 * D, page_row = r->narrow == 1 ? D : 2 * D;
    struct ucm_attend_cuda_cut cut = cut_of(r);

    *a = (struct ucm_attend_cuda){
        .kv_heads = HEADS,
        .group = GROUP,
        .tokens = TOKENS,
        .chains = r->chains,
        .lists = HEADS,
        .room = r->chosen,
        .split_tiles = cut.split_tiles,
        .splits = cut.splits,
        .scale_log2 = 1.44269504f / sqrtf(D),
        .q_stride = HEADS * GROUP * D,
        .rows = blocks,
        .apart = 1,
        .slot_of = put_slots(),
        .pool = {.base = pool,
                 .stride = 2 * TOKENS * (row + (r->narrow == CODED)),
                 .blocks = blocks * HEADS,
                 .scales = r->narrow == CODED ? 2 * TOKENS * D : 0,
                 .k = {0, row, 0},
                 .v = {TOKENS * row, row, 0}},
        .plain_pages = r->narrow == CODED,
        .pages = {.base = pool,
                  .stride = BLOCK,
                  .blocks = blocks,
                  .k = {0, HEADS * page_row, page_row},
                  .v = {BLOCK / 2, HEADS * page_row, page_row}},
        .table_stride = WINDOW,
    };
    put_choices(r, a);
    make_room((uint64_t)r->chains * HEADS * GROUP, a);
}

static void args_close(const struct ucm_attend_cuda *a)
{
    CUdeviceptr mine[] = {a->q,     a->list,    a->count,      a->slot_of, a->table,
                          a->first, a->length,  a->out,        a->lse,     a->flags,
                          a->done,  a->partial, a->partial_sum};

    for (size_t i = 0; i < sizeof(mine) / sizeof(mine[0]); i++)
        if (mine[i])
            gpu_free(mine[i]);
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static void nothing(void *arg)
{
    (void)arg;
}

float attend_median_us(CUgraph graph, void (*prepare)(void *), void *arg)
{
    float us[SAMPLES];
    CUgraphExec exec;
    CUevent begin, end;

    flush = flush ? flush : gpu_new(FLUSH);
    must(cuGraphInstantiate(&exec, graph, 0), "the graph");
    must(cuGraphDestroy(graph), "the graph");
    must(cuEventCreate(&begin, 0), "an event");
    must(cuEventCreate(&end, 0), "an event");
    for (int i = 0; i < SAMPLES; i++) {
        prepare(arg);
        must(cuMemsetD8Async(flush, (unsigned char)i, FLUSH, gpu_stream), "the flush");
        must(cuEventRecord(begin, gpu_stream), "an event");
        must(cuGraphLaunch(exec, gpu_stream), "the graph");
        must(cuEventRecord(end, gpu_stream), "an event");
        gpu_sync();
        must(cuEventElapsedTime(&us[i], begin, end), "an event");
        us[i] *= 1000;
    }
    must(cuGraphExecDestroy(exec), "the graph");
    must(cuEventDestroy(begin), "an event");
    must(cuEventDestroy(end), "an event");
    qsort(us, SAMPLES, sizeof(us[0]), by_size);
    return us[SAMPLES / 2];
}

static float median_us(const struct row *r, const struct ucm_attend_cuda *a)
{
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    attend_launch(a, UCM_KV_BF16, D, r->narrow);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    return attend_median_us(graph, nothing, NULL);
}

void measure(void)
{
    static const struct row rows[] = {
        {1, 256, 0, 0},       {1, 256, 8, 0},      {1, 256, 12, 0},    {1, 256, 18, 0},
        {1, 256, 24, 0},      {1, 128, 0, 0},      {8, 256, 0, 0},     {8, 256, 24, 0},
        {8, 256, 36, 0},      {50, 256, 0, 0},     {50, 256, 48, 0},   {50, 256, 96, 0},
        {50, 256, 144, 0},    {1, 8192, 0, 0},     {1, 8192, 64, 0},   {1, 8192, 170, 0},
        {1, 256, 0, 1},       {8, 256, 0, 1},      {50, 256, 0, 1},    {50, 256, 96, 1},
        {1, 8192, 0, 1},      {1, 256, 0, CODED},  {8, 256, 0, CODED}, {50, 256, 0, CODED},
        {50, 256, 96, CODED}, {1, 8192, 0, CODED},
    };
    static const char *const kinds[] = {"bf16", "e4m3", "coded"};
    int n;

    must(cuDeviceGetAttribute(&n, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), "multiprocessors");
    processors = (uint32_t)n;
    fill_pool();
    printf("| KV | chains | blocks a KV head | window | tiles a split | thread blocks | "
           "us | GB/s |\n|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct row *r = &rows[i];
        uint64_t elements = r->chosen * (r->narrow ? 1 : 2) + WINDOW * (r->narrow == 1 ? 1 : 2);
        uint64_t bytes = 2 * elements * r->chains * HEADS * TOKENS * D;
        struct ucm_attend_cuda a;
        float us;

        args_open(r, &a);
        us = median_us(r, &a);
        printf("| %s | %u | %u | %u | %u | %u | %.1f | %.0f |\n", kinds[r->narrow], r->chains,
               r->chosen, WINDOW * TOKENS, a.split_tiles, a.splits * HEADS * r->chains, (double)us,
               (double)bytes / (double)us / 1e3);
        args_close(&a);
    }
    gpu_free(pool);
}
