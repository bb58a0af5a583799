/* How fast: selections a layer, and builds of digests alone. Layers lie apart, so that the GPU's cache
 * has none of them; a graph of many launches is replayed, so that the host's part is not measured. */
#include "tests/gpu/sparse.h"

#include "client/bench/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LAYERS 24u
#define ROUNDS 9
#define HEADS 8u
#define DIM 128u

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Microseconds of one of the graph's `launches`, the median of ROUNDS replays. */
static double replay(CUgraphExec exec, uint32_t launches)
{
    double us[ROUNDS];
    CUevent begin, end;
    float ms;

    must(cuEventCreate(&begin, 0), "an event");
    must(cuEventCreate(&end, 0), "an event");
    for (int i = -2; i < ROUNDS; i++) {
        must(cuEventRecord(begin, gpu_stream), "an event");
        must(cuGraphLaunch(exec, gpu_stream), "a graph");
        must(cuEventRecord(end, gpu_stream), "an event");
        must(cuEventSynchronize(end), "a graph");
        must(cuEventElapsedTime(&ms, begin, end), "an event");
        if (i >= 0)
            us[i] = 1000.0 * ms / launches;
    }
    must(cuEventDestroy(begin), "an event");
    must(cuEventDestroy(end), "an event");
    qsort(us, ROUNDS, sizeof(*us), by_value);
    return us[ROUNDS / 2];
}

static CUgraphExec graph_end(void)
{
    CUgraphExec exec;
    CUgraph graph;

    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&exec, graph, 0), "a graph");
    must(cuGraphDestroy(graph), "a graph");
    return exec;
}

static CUdeviceptr random_memory(size_t bytes, size_t copies)
{
    uint32_t *bytes_of = fresh(bytes);
    CUdeviceptr at = gpu_new(bytes * copies);

    for (size_t i = 0; i < bytes / 4; i++)
        bytes_of[i] = rnd();
    for (size_t i = 0; i < copies; i++)
        gpu_put(at + i * bytes, bytes_of, bytes);
    free(bytes_of);
    return at;
}

static uint64_t bytes_of(const struct ucm_sparse_digest *digest)
{
    struct ucm_digest_plan *plan = plan_of(digest);
    uint64_t bytes = plan->bytes;

    free(plan);
    return bytes;
}

/* ---- selections ---- */

/* size: hash: bits; tokens: how many. */
struct speed {
    const char *what;
    uint32_t method, size, blocks, chains, reduce, heads, policy;
    uint32_t kv_heads, group, d, rope, metric;
};

/* A handle and what its launches take: `layers` of digests, far more than the GPU's cache holds. */
struct selecting {
    struct ucm_cuda_select *handle;
    struct ucm_cuda_select_info info;
    struct ucm_cuda_select_layer layer;
    struct ucm_digest_plan *plan;
    uint32_t layers;
    uint64_t layer_bytes;
};

static bool selecting_open(struct selecting *s, const struct speed *c)
{
    struct ucm_cuda_select_options o = {.score = {.metric = c->metric,
                                                  .reduce = c->reduce,
                                                  .heads = c->heads,
                                                  .rows = 1,
                                                  .q_heads = c->kv_heads * c->group},
                                        .choose = {.policy = c->policy,
                                                   .min_blocks = 4,
                                                   .init_window_sz = 1,
                                                   .local_window_sz = 2,
                                                   .sparse_ratio = 0.1,
                                                   .eps = 0.95,
                                                   .beta_m = 0.1},
                                        .q_dtype = UCM_SPARSE_BF16,
                                        .chains = c->chains,
                                        .max_blocks = c->blocks};
    struct ucm_sparse_digest digest;

    digest_of(&digest, c->method, UCM_SPARSE_BF16, 16, c->kv_heads, c->d, c->rope);
    digest.kind = 0;
    digest.bits = digest.chosen = c->size;
    digest.keep_bytes = 0;
    *s = (struct selecting){.plan = plan_of(&digest), .layers = LAYERS};
    s->layer.stride = s->plan->bytes;
    s->layer_bytes = s->layer.stride * c->blocks * c->chains;
    while (s->layers > 2 && s->layers * s->layer_bytes > (6ull << 30))
        s->layers /= 2;
    return check(ucm_cuda_select_open(gpu_uuid, &digest, &o, &s->handle) == 0 &&
                     ucm_cuda_select_info(s->handle, &s->info) == 0,
                 "open: %s", ucm_cuda_errmsg());
}

/* So many digests are made; the others are copies of them. */
#define MADE 65536u

/* Random bytes, but for scales, which are much alike, as real ones are: where scores gather decides how
 * much of a list a choice must look at twice. */
static void random_digest(const struct ucm_digest_plan *p, uint8_t *d)
{
    uint32_t heads = p->spec.shape.kv_heads, arrays = p->spec.method == UCM_DIGEST_STATS ? 3 : 1;

    for (size_t i = 0; i < p->bytes / 4; i++)
        ((uint32_t *)d)[i] = rnd();
    if (p->spec.method == UCM_DIGEST_HASH) {
        memset(d + p->array[1], 0, heads * sizeof(uint32_t));
        return;
    }
    for (uint32_t a = 0; a < arrays; a++)
        for (uint32_t v = 0; v < heads * p->vectors; v++) {
            uint16_t scale = (uint16_t)(0x3c00 + rnd_below(0x80));

            memcpy(d + p->scale[a] + 2 * v, &scale, sizeof(scale));
        }
}

static CUdeviceptr random_digests(const struct ucm_digest_plan *p, uint32_t n, uint32_t layers)
{
    uint64_t all = (uint64_t)n * layers, made = all < MADE ? all : MADE, more;
    uint8_t *digests = fresh(made * p->bytes);
    CUdeviceptr at = gpu_new(all * p->bytes);

    for (uint64_t i = 0; i < made; i++)
        random_digest(p, digests + i * p->bytes);
    gpu_put(at, digests, made * p->bytes);
    for (uint64_t done = made; done < all; done += more) {
        more = all - done < made ? all - done : made;
        must(cuMemcpyDtoD(at + done * p->bytes, at, more * p->bytes), "a copy");
    }
    must(cuCtxSynchronize(), "a copy");
    free(digests);
    return at;
}

static CUdeviceptr shuffled_numbers(uint32_t n)
{
    int32_t *number = fresh(n * sizeof(*number));
    CUdeviceptr at;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = rnd_below(i + 1);

        number[i] = number[j];
        number[j] = (int32_t)i;
    }
    at = gpu_put(0, number, n * sizeof(*number));
    free(number);
    return at;
}

static CUdeviceptr normal_queries(uint32_t n)
{
    uint16_t *q = fresh(n * sizeof(*q));
    CUdeviceptr at;

    for (uint32_t i = 0; i < n; i++) {
        union {
            float f;
            uint32_t u;
        } x = {rnd_normal()};

        q[i] = (uint16_t)(x.u >> 16);
    }
    at = gpu_put(0, q, n * sizeof(*q));
    free(q);
    return at;
}

static void selecting_fill(struct selecting *s, const struct speed *c)
{
    struct ucm_cuda_select_layer *l = &s->layer;
    int32_t *n = fresh(c->chains * sizeof(*n));

    for (uint32_t i = 0; i < c->chains; i++)
        n[i] = (int32_t)c->blocks;
    l->chains = c->chains;
    l->bound = c->blocks * c->chains;
    l->table_stride = c->blocks;
    l->digests = random_digests(s->plan, l->bound, s->layers);
    l->table = shuffled_numbers(l->bound);
    l->n_blocks = gpu_put(0, n, c->chains * sizeof(*n));
    l->q = normal_queries(c->chains * c->kv_heads * c->group * c->d);
    l->count = gpu_new(c->chains * s->info.lists * 4);
    l->index = gpu_new((size_t)c->chains * s->info.lists * s->info.room * 4);
    free(n);
}

static void selecting_free(struct selecting *s)
{
    ucm_cuda_select_close(s->handle);
    gpu_free(s->layer.digests);
    gpu_free(s->layer.table);
    gpu_free(s->layer.n_blocks);
    gpu_free(s->layer.q);
    gpu_free(s->layer.count);
    gpu_free(s->layer.index);
    free(s->plan);
}

static void select_speed(const struct speed *c)
{
    struct selecting s;
    CUgraphExec exec;
    double us;

    if (!selecting_open(&s, c))
        return;
    selecting_fill(&s, c);
    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    for (uint32_t i = 0; i < s.layers; i++) {
        struct ucm_cuda_select_layer l = s.layer;

        l.digests += i * s.layer_bytes;
        check(ucm_cuda_select(s.handle, &l, gpu_stream) == 0, "launch: %s", ucm_cuda_errmsg());
    }
    exec = graph_end();
    us = replay(exec, s.layers);
    printf("%-34s %3u x %6u %8.1f us %7.0f GB/s\n", c->what, c->chains, c->blocks, us,
           (double)s.layer_bytes / us / 1000);
    must(cuGraphExecDestroy(exec), "a graph");
    selecting_free(&s);
}

/* ---- builds ---- */

static void digest_speed(uint32_t method, uint32_t thread_blocks)
{
    enum { BLOCKS = 512, TOKENS = 16, LAYERS_OF = 32 };
    struct ucm_sparse_digest digest;
    struct ucm_cuda_digest_layer layers[LAYERS_OF];
    size_t shard = 2 * TOKENS * HEADS * DIM * 2, kv_bytes = BLOCKS * shard;
    CUdeviceptr kv = random_memory(kv_bytes, LAYERS_OF), out;
    int32_t numbers[BLOCKS];
    struct ucm_cuda_digest_build build = {.layers = layers,
                                          .n_layers = LAYERS_OF,
                                          .n_blocks = BLOCKS,
                                          .stride = shard,
                                          .bound = BLOCKS,
                                          .out_bound = BLOCKS,
                                          .thread_blocks = thread_blocks};
    struct ucm_cuda_digest *d;
    CUgraphExec exec;
    uint64_t bytes;
    double us;

    digest_of(&digest, method, UCM_SPARSE_BF16, TOKENS, HEADS, DIM, 0);
    digest.kind = 0;
    digest.bits = 128;
    digest.keep_bytes = 0;
    digest.chosen = digest.rest ? 3 : 2;
    digest.shape.k_offset = 0;
    digest.shape.v_offset = shard / 2;
    bytes = bytes_of(&digest);
    out = gpu_new(bytes * BLOCKS * LAYERS_OF);
    for (int32_t i = 0; i < BLOCKS; i++)
        numbers[i] = (i * 37) % BLOCKS;
    for (uint32_t l = 0; l < LAYERS_OF; l++)
        layers[l] = (struct ucm_cuda_digest_layer){kv + l * kv_bytes, kv + l * kv_bytes,
                                                   out + l * bytes * BLOCKS};
    build.numbers = gpu_put(0, numbers, sizeof(numbers));
    build.out_stride = bytes;
    check(ucm_cuda_digest_open(gpu_uuid, &digest, &d) == 0, "open: %s", ucm_cuda_errmsg());
    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    check(ucm_cuda_digest(d, &build, gpu_stream) == 0, "launch: %s", ucm_cuda_errmsg());
    exec = graph_end();
    us = replay(exec, 1);
    printf("build %-8s %3u thread blocks %8.0f us, %6.0f GB/s of KV\n", method_name(method),
           thread_blocks, us, (double)kv_bytes * LAYERS_OF / us / 1000);
    must(cuGraphExecDestroy(exec), "a graph");
    ucm_cuda_digest_close(d);
    gpu_free(kv);
    gpu_free(out);
    gpu_free(build.numbers);
}

/* ---- builds beside a worker and a dump ---- */

#define PIECE (64u << 20) /* bytes of KV that are dumped, and digested, at once */
#define MATRIX ((size_t)UCM_BENCH_MATRIX * UCM_BENCH_MATRIX * 2)

extern const unsigned char ucm_bench_fatbin[];

/* Work that repeats on a stream of its own: how often it ran by now. */
struct repeat {
    CUstream stream;
    CUevent done[4]; /* of the last launches */
    uint64_t launched, ended;
};

static void repeat_open(struct repeat *r)
{
    must(cuStreamCreate(&r->stream, CU_STREAM_NON_BLOCKING), "a stream");
    for (int i = 0; i < 4; i++)
        must(cuEventCreate(&r->done[i], CU_EVENT_DISABLE_TIMING), "an event");
    r->launched = r->ended = 0;
}

static void repeat_close(struct repeat *r)
{
    must(cuStreamSynchronize(r->stream), "a stream");
    for (int i = 0; i < 4; i++)
        must(cuEventDestroy(r->done[i]), "an event");
    must(cuStreamDestroy(r->stream), "a stream");
}

/* Whether another launch fits; counts those that ended. */
static bool repeat_room(struct repeat *r)
{
    while (r->ended < r->launched && cuEventQuery(r->done[r->ended % 4]) == CUDA_SUCCESS)
        r->ended++;
    return r->launched - r->ended < 4;
}

static void repeat_launched(struct repeat *r)
{
    must(cuEventRecord(r->done[r->launched++ % 4], r->stream), "an event");
}

static double now_s(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct beside {
    CUfunction multiply;
    CUdeviceptr matrix, kv, out, numbers;
    void *host;
    struct ucm_cuda_digest_build build;
    struct ucm_cuda_digest_layer layers[32];
};

/* For a second: products if worker, pieces to the host if dump, and a build of each piece if d. Gives
 * products and pieces a second. */
static void beside_run(struct beside *x, bool worker, bool dump, struct ucm_cuda_digest *d,
                       double *products, double *pieces)
{
    CUdeviceptr a = x->matrix, b = a + MATRIX, c = b + MATRIX;
    void *arguments[] = {&a, &b, &c};
    struct repeat work, copy, builds;
    double begin = now_s(), seconds;

    repeat_open(&work);
    repeat_open(&copy);
    repeat_open(&builds);
    while ((seconds = now_s() - begin) < 1) {
        if (worker && repeat_room(&work)) {
            must(cuLaunchKernel(x->multiply, UCM_BENCH_MATRIX / 128, UCM_BENCH_MATRIX / 64, 1, 256,
                                1, 1, 0, work.stream, arguments, NULL),
                 "a product");
            repeat_launched(&work);
        }
        if (dump && repeat_room(&copy) && repeat_room(&builds)) {
            must(cuMemcpyDtoHAsync(x->host, x->kv, PIECE, copy.stream), "a dump");
            repeat_launched(&copy);
            if (d) {
                check(ucm_cuda_digest(d, &x->build, builds.stream) == 0, "launch: %s",
                      ucm_cuda_errmsg());
                repeat_launched(&builds);
            }
        }
    }
    *products = (double)work.ended / seconds;
    *pieces = (double)copy.ended / seconds;
    repeat_close(&work);
    repeat_close(&copy);
    repeat_close(&builds);
}

static void beside_init(struct beside *x)
{
    int32_t numbers[32];
    CUmodule module;

    must(cuModuleLoadData(&module, ucm_bench_fatbin), "the worker's kernel");
    must(cuModuleGetFunction(&x->multiply, module, "ucm_bench_multiply"), "the worker's kernel");
    x->matrix = random_memory(MATRIX, 3);
    x->kv = random_memory(PIECE, 1);
    x->out = gpu_new(PIECE / 4);
    must(cuMemHostAlloc(&x->host, PIECE, 0), "pinned memory");
    for (int32_t i = 0; i < 32; i++)
        numbers[i] = i;
    x->numbers = gpu_put(0, numbers, sizeof(numbers));
    x->build = (struct ucm_cuda_digest_build){.layers = x->layers,
                                              .n_layers = 32,
                                              .n_blocks = 32,
                                              .numbers = x->numbers,
                                              .stride = 65536,
                                              .bound = 32,
                                              .out_bound = 32};
}

static void beside_speed(void)
{
    double alone, bus, worker, dump, worker_with, dump_with, none;
    struct beside x;

    beside_init(&x);
    beside_run(&x, true, false, NULL, &alone, &none);
    beside_run(&x, false, true, NULL, &none, &bus);
    beside_run(&x, true, true, NULL, &worker, &dump);
    printf("dump %.1f GB/s alone; beside a worker %.1f, the worker keeps %.3f\n",
           bus * PIECE * 1e-9, dump * PIECE * 1e-9, worker / alone);
    for (uint32_t method = UCM_SPARSE_MEAN; method <= TOKENS_REST; method++) {
        struct ucm_sparse_digest digest;
        struct ucm_cuda_digest *d;

        digest_of(&digest, method, UCM_SPARSE_BF16, 16, HEADS, DIM, 0);
        digest.kind = 0;
        digest.bits = 128;
        digest.keep_bytes = 0;
        digest.chosen = digest.rest ? 3 : 2;
        digest.shape.k_offset = 0;
        digest.shape.v_offset = 32768;
        x.build.out_stride = bytes_of(&digest);
        for (uint32_t l = 0; l < 32; l++)
            x.layers[l] =
                (struct ucm_cuda_digest_layer){x.kv + l * 32 * 65536ull, x.kv + l * 32 * 65536ull,
                                               x.out + l * 32 * x.build.out_stride};
        check(ucm_cuda_digest_open(gpu_uuid, &digest, &d) == 0, "open: %s", ucm_cuda_errmsg());
        beside_run(&x, true, true, d, &worker_with, &dump_with);
        printf("building %-8s as it is dumped: the dump keeps %.3f, the worker %.3f\n",
               method_name(method), dump_with / dump, worker_with / worker);
        ucm_cuda_digest_close(d);
    }
    gpu_free(x.matrix);
    gpu_free(x.kv);
    gpu_free(x.out);
    gpu_free(x.numbers);
    must(cuMemFreeHost(x.host), "pinned memory");
}

void measure(const char *only)
{
    static const struct speed cases[] = {
        {"mean", UCM_SPARSE_MEAN, 0, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"mean, sum over heads", UCM_SPARSE_MEAN, 0, 8192, 1, 0, 1, 0, HEADS, 4, DIM, 0, 0},
        {"box", UCM_SPARSE_BOX, 0, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"box, softmax", UCM_SPARSE_BOX, 0, 8192, 1, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"box, mass", UCM_SPARSE_BOX, 0, 8192, 1, 0, 0, 1, HEADS, 4, DIM, 0, 0},
        {"stats", UCM_SPARSE_STATS, 0, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"hash, 64 bits", UCM_SPARSE_HASH, 64, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"hash, 128 bits", UCM_SPARSE_HASH, 128, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"submean, 4 a block", UCM_SPARSE_SUBMEAN, 0, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 2 a block", UCM_SPARSE_TOKENS, 2, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 3 and rest", TOKENS_REST, 3, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 3 and rest, softmax", TOKENS_REST, 3, 8192, 1, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 8 and rest, softmax", TOKENS_REST, 8, 8192, 1, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 8 and rest, softmax", TOKENS_REST, 8, 8192, 50, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 8 and rest, softmax", TOKENS_REST, 8, 65536, 1, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"tokens, 8 and rest, rounded", TOKENS_REST, 8, 8192, 1, 2, 0, 0, HEADS, 4, DIM, 0, 2},
        {"tokens, 8 and rest, rounded", TOKENS_REST, 8, 8192, 50, 2, 0, 0, HEADS, 4, DIM, 0, 2},
        {"tokens, 8 and rest, rounded", TOKENS_REST, 8, 65536, 1, 2, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, rounded", UCM_SPARSE_MEAN, 0, 8192, 1, 0, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, rounded, softmax", UCM_SPARSE_MEAN, 0, 8192, 1, 2, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, rounded", UCM_SPARSE_MEAN, 0, 1024, 64, 0, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, rounded", UCM_SPARSE_MEAN, 0, 8192, 50, 0, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, rounded", UCM_SPARSE_MEAN, 0, 65536, 1, 0, 0, 0, HEADS, 4, DIM, 0, 2},
        {"mean, MLA of 128 heads", UCM_SPARSE_MEAN, 0, 8192, 1, 0, 0, 0, 1, 128, 576, 64, 0},
        {"mean", UCM_SPARSE_MEAN, 0, 1024, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"mean", UCM_SPARSE_MEAN, 0, 1024, 64, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"mean", UCM_SPARSE_MEAN, 0, 8192, 50, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"mean", UCM_SPARSE_MEAN, 0, 65536, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"box", UCM_SPARSE_BOX, 0, 65536, 1, 0, 0, 0, HEADS, 4, DIM, 0, 0},
        {"box, sum over heads", UCM_SPARSE_BOX, 0, 65536, 1, 0, 1, 0, HEADS, 4, DIM, 0, 0},
        {"box, softmax", UCM_SPARSE_BOX, 0, 65536, 1, 2, 0, 0, HEADS, 4, DIM, 0, 0},
        {"box, mass", UCM_SPARSE_BOX, 0, 65536, 1, 0, 0, 1, HEADS, 4, DIM, 0, 0},
    };

    for (uint32_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        if (!only || strstr(cases[i].what, only))
            select_speed(&cases[i]);
    for (uint32_t method = UCM_SPARSE_MEAN; method <= TOKENS_REST; method++)
        for (uint32_t n = 8; n <= 128; n *= 4)
            if (!only || strstr("build", only))
                digest_speed(method, n);
    if (!only || strstr("beside", only))
        beside_speed();
}
