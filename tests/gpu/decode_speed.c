/* test_decode --speed: a layer of a decode step, by rounds that stop and by lists of as many blocks. Llama-3.1-8B's shape, a context of
 * 131,072 tokens, everything resident. Blocks weigh e^(-rank / DECAY), and are estimated so; query heads differ in how fast that falls. */
#include "tests/gpu/decode.h"

#include "client/cuda/error.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define KV_HEADS 8u
#define Q_HEADS 32u
#define D 128u
#define ROW (2u * D)
#define SHARD (2u * TOKENS * KV_HEADS * ROW)
#define CANDIDATES 8192u
#define LIMIT 1024u
#define LOCAL 32u /* blocks in pages */
#define STEP_LAYERS 4u
#define STEP_CHAINS 8u
#define DECAY 122.0f
#define SAMPLES 15

struct bench {
    struct ucm_cuda_decode_options options;
    struct ucm_cuda_decode_layer layer;
    struct ucm_cuda_decode *decode;
    CUdeviceptr kv; /* [LIMIT] blocks of one layer, by their ranks */
    uint32_t rank[CANDIDATES];
};

static uint16_t bf16(float x)
{
    union {
        float f;
        uint32_t u;
    } bits = {x};

    return (uint16_t)(bits.u >> 16);
}

static float falls(uint32_t q_head)
{
    return 0.7f + 0.1f * (float)(q_head / (Q_HEADS / KV_HEADS)) +
           0.02f * (float)(q_head % (Q_HEADS / KV_HEADS));
}

/* q . k / sqrt(D) = -rank / DECAY * falls. */
static CUdeviceptr blocks_make(void)
{
    uint16_t *kv = fresh((size_t)LIMIT * SHARD);
    CUdeviceptr at;

    for (uint32_t rank = 0; rank < LIMIT; rank++)
        for (uint32_t i = 0; i < SHARD / 2; i++)
            kv[(size_t)rank * SHARD / 2 + i] =
                bf16(i < SHARD / 4 ? -(float)rank / DECAY / sqrtf((float)D) : rnd_normal());
    at = gpu_put(0, kv, (size_t)LIMIT * SHARD);
    free(kv);
    return at;
}

static void ranks_make(struct bench *b)
{
    for (uint32_t i = 0; i < CANDIDATES; i++)
        b->rank[i] = i;
    for (uint32_t i = CANDIDATES; i > 1; i--) {
        uint32_t j = rnd_below(i), x = b->rank[i - 1];

        b->rank[i - 1] = b->rank[j];
        b->rank[j] = x;
    }
}

/* Lists of the best `count` blocks, ascending, and what a selection says of all. */
static void lists_make(struct bench *b, uint32_t count)
{
    uint32_t lists = STEP_CHAINS * KV_HEADS, room = b->options.room;
    uint32_t *index = fresh((size_t)lists * room * 4), *counts = fresh(lists * 4);
    float *score = fresh((size_t)lists * room * 4);
    float *head = fresh((size_t)STEP_CHAINS * Q_HEADS * CANDIDATES * 4);

    for (uint32_t l = 0; l < lists; l++) {
        counts[l] = 0;
        for (uint32_t i = 0; i < CANDIDATES; i++)
            if (b->rank[i] < count) {
                index[l * room + counts[l]] = i;
                score[l * room + counts[l]++] = -(float)b->rank[i];
            }
    }
    for (size_t i = 0; i < (size_t)STEP_CHAINS * Q_HEADS * CANDIDATES; i++)
        head[i] = logf((float)TOKENS) - (float)b->rank[i % CANDIDATES] / DECAY *
                                            falls((uint32_t)(i / CANDIDATES % Q_HEADS));
    b->layer.index = gpu_put(0, index, (size_t)lists * room * 4);
    b->layer.count = gpu_put(0, counts, lists * 4);
    b->layer.score = gpu_put(0, score, (size_t)lists * room * 4);
    b->layer.head_scores = gpu_put(0, head, (size_t)STEP_CHAINS * Q_HEADS * CANDIDATES * 4);
    b->layer.head_pitch = CANDIDATES;
    free(index);
    free(counts);
    free(score);
    free(head);
}

static void tables_make(struct bench *b)
{
    int32_t *table = fresh((size_t)STEP_CHAINS * CANDIDATES * 4);
    int32_t pages[STEP_CHAINS * LOCAL], candidates[STEP_CHAINS];
    uint32_t length[STEP_CHAINS], zero[STEP_CHAINS] = {0};
    uint16_t q[STEP_CHAINS * Q_HEADS * D];

    for (uint32_t i = 0; i < STEP_CHAINS * CANDIDATES; i++)
        table[i] = (int32_t)(i % CANDIDATES);
    for (uint32_t i = 0; i < STEP_CHAINS * LOCAL; i++)
        pages[i] = 0; /* of rank 0: each of its tokens weighs 1 */
    for (uint32_t i = 0; i < STEP_CHAINS; i++) {
        length[i] = LOCAL * TOKENS;
        candidates[i] = CANDIDATES;
    }
    for (uint32_t i = 0; i < STEP_CHAINS * Q_HEADS * D; i++)
        q[i] = bf16(falls(i / D % Q_HEADS));
    b->layer.table = gpu_put(0, table, (size_t)STEP_CHAINS * CANDIDATES * 4);
    b->layer.table_stride = CANDIDATES;
    b->layer.request = gpu_put(0, zero, sizeof(zero));
    b->layer.first = gpu_put(0, zero, sizeof(zero));
    b->layer.length = gpu_put(0, length, sizeof(length));
    b->layer.candidates = gpu_put(0, candidates, sizeof(candidates));
    b->layer.page_table = gpu_put(0, pages, sizeof(pages));
    b->layer.page_table_stride = LOCAL;
    b->layer.pages = b->kv;
    b->layer.page_stride = SHARD;
    b->layer.page_bound = LIMIT;
    b->layer.q = gpu_put(0, q, sizeof(q));
    b->layer.out = gpu_new(sizeof(q));
    b->layer.report = gpu_new(STEP_CHAINS * KV_HEADS * sizeof(struct ucm_cuda_decode_report));
    free(table);
}

static void bench_open(struct bench *b, uint32_t chains, uint32_t rounds, uint32_t count)
{
    struct ucm_cuda_decode_layout layout = {.k_token_stride = KV_HEADS * ROW,
                                            .k_head_stride = ROW,
                                            .v_offset = SHARD / 2,
                                            .v_token_stride = KV_HEADS * ROW,
                                            .v_head_stride = ROW};
    uint64_t bytes;

    b->options = (struct ucm_cuda_decode_options){
        .layers = STEP_LAYERS,
        .q_heads = Q_HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = D,
        .dtype = UCM_SPARSE_BF16,
        .tokens = TOKENS,
        .slots = STEP_LAYERS * KV_HEADS * LIMIT,
        .numbers = CANDIDATES,
        .requests = 1,
        .chains = chains,
        .lists = KV_HEADS,
        .room = rounds > 0 ? LIMIT : count,
        .window = LOCAL,
        .shard = layout,
        .shard_bytes = SHARD,
        .page = layout,
        .rule = rounds > 0 ? UCM_CUDA_DECODE_ESTIMATED : UCM_CUDA_DECODE_ALL,
        .known = UCM_CUDA_DECODE_ESTIMATES,
        .eps = 0.95f,
        .rounds = rounds,
        .first = 64,
    };
    check(ucm_cuda_decode_slot_bytes(&b->options, &bytes) == 0, "%s", ucm_cuda_errmsg());
    b->options.pool = gpu_new(bytes * b->options.slots);
    check(ucm_cuda_decode_open(gpu_uuid, &b->options, &b->decode) == 0, "%s", ucm_cuda_errmsg());
    lists_make(b, count);
    b->layer.chains = chains;
}

static void bench_close(struct bench *b)
{
    CUdeviceptr mine[] = {b->options.pool, b->layer.index, b->layer.count, b->layer.score,
                          b->layer.head_scores};

    ucm_cuda_decode_close(b->decode);
    for (size_t i = 0; i < sizeof(mine) / sizeof(mine[0]); i++)
        gpu_free(mine[i]);
}

static void launch_step(struct bench *b)
{
    int r = ucm_cuda_decode_begin(b->decode, gpu_stream);

    for (uint32_t layer = 0; r == 0 && layer < STEP_LAYERS; layer++) {
        b->layer.layer = layer;
        r = ucm_cuda_decode_layer(b->decode, &b->layer, gpu_stream);
    }
    if (r == 0)
        r = ucm_cuda_decode_end(b->decode, gpu_stream);
    check(r == 0, "%s", r ? ucm_cuda_errmsg() : "");
}

static CUgraphExec captured(struct bench *b)
{
    CUgraphExec exec;
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    launch_step(b);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&exec, graph, 0), "the graph");
    must(cuGraphDestroy(graph), "the graph");
    return exec;
}

static struct ucm_cuda_decode_result replay(struct bench *b, CUgraphExec exec)
{
    struct ucm_cuda_decode_result r = {0};

    must(cuGraphLaunch(exec, gpu_stream), "the graph");
    gpu_sync();
    check(ucm_cuda_decode_result(b->decode, &r) == 0, "%s", ucm_cuda_errmsg());
    return r;
}

/* Until everything that it attends is resident. */
static struct ucm_cuda_decode_result settled(struct bench *b, CUgraphExec exec)
{
    uint32_t room = b->options.slots, n;
    struct ucm_cuda_decode_key *key = fresh(room * sizeof(*key));
    struct ucm_cuda_decode_put *put = fresh(room * sizeof(*put));
    struct ucm_cuda_decode_result r = replay(b, exec);

    for (uint32_t run = 0; r.flags != 0 && run < STEP_LAYERS * UCM_CUDA_DECODE_ROUNDS; run++) {
        check(ucm_cuda_decode_unserved(b->decode, key, room, &n, gpu_stream) == 0, "%s",
              ucm_cuda_errmsg());
        for (uint32_t i = 0; i < n && i < room; i++)
            put[i] = (struct ucm_cuda_decode_put){
                .key = key[i], .from = b->kv + (uint64_t)b->rank[key[i].number] % LIMIT * SHARD};
        check(ucm_cuda_decode_put(b->decode, put, n < room ? n : room, NULL, gpu_stream) == 0, "%s",
              ucm_cuda_errmsg());
        r = replay(b, exec);
    }
    check(r.flags == 0, "flags are %u", r.flags);
    free(key);
    free(put);
    return r;
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static float median_us(CUgraphExec exec)
{
    float us[SAMPLES];
    CUevent begin, end;

    must(cuEventCreate(&begin, 0), "an event");
    must(cuEventCreate(&end, 0), "an event");
    for (int i = 0; i < SAMPLES; i++) {
        must(cuEventRecord(begin, gpu_stream), "an event");
        must(cuGraphLaunch(exec, gpu_stream), "the graph");
        must(cuEventRecord(end, gpu_stream), "an event");
        gpu_sync();
        must(cuEventElapsedTime(&us[i], begin, end), "an event");
    }
    must(cuEventDestroy(begin), "an event");
    must(cuEventDestroy(end), "an event");
    qsort(us, SAMPLES, sizeof(us[0]), by_size);
    return us[SAMPLES / 2] * 1000 / STEP_LAYERS;
}

/* rounds 0: all of `count` blocks. Returns how many a list attended. */
static uint32_t row(struct bench *b, uint32_t chains, uint32_t rounds, uint32_t count)
{
    struct ucm_cuda_decode_result r;
    CUgraphExec exec;
    uint32_t blocks;

    bench_open(b, chains, rounds, count);
    exec = captured(b);
    r = settled(b, exec);
    blocks = rounds > 0 ? (uint32_t)(r.attended / (STEP_LAYERS * chains * KV_HEADS)) : count;
    for (int i = 0; i < 50; i++) /* clocks */
        must(cuGraphLaunch(exec, gpu_stream), "the graph");
    printf("| %s, %u launches | %u | %u of %u | %u | %.3f | %.1f |\n",
           rounds > 0 ? "rounds" : "a list", rounds > 0 ? 1 + 3 * rounds : 3, chains, blocks, count,
           r.rounds, (double)r.share, (double)median_us(exec));
    must(cuGraphExecDestroy(exec), "the graph");
    bench_close(b);
    return blocks;
}

void measure_rounds(void)
{
    struct bench *b = fresh(sizeof(*b));
    CUdeviceptr left[10];

    b->kv = blocks_make();
    ranks_make(b);
    tables_make(b);
    printf("| a layer | chains | blocks a list | rounds | least share | us |\n"
           "|---|---|---|---|---|---|\n");
    for (uint32_t chains = 1; chains <= STEP_CHAINS; chains *= STEP_CHAINS) {
        uint32_t blocks = row(b, chains, 5, LIMIT);

        row(b, chains, 3, LIMIT);
        row(b, chains, 1, LIMIT);
        row(b, chains, 0, blocks);
        row(b, chains, 0, LIMIT);
    }
    left[0] = b->kv;
    left[1] = b->layer.table;
    left[2] = b->layer.request;
    left[3] = b->layer.first;
    left[4] = b->layer.length;
    left[5] = b->layer.candidates;
    left[6] = b->layer.page_table;
    left[7] = b->layer.q;
    left[8] = b->layer.out;
    left[9] = b->layer.report;
    for (size_t i = 0; i < sizeof(left) / sizeof(left[0]); i++)
        gpu_free(left[i]);
    free(b);
}
