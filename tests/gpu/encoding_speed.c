/* How fast: a slice's worth of blocks between the slice and pages, alone and beside matrices that the
 * same process multiplies, a slice each time the bus would have moved one. */
#include "tests/gpu/encoding.h"

#include "client/bench/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLICE (16ull << 20)
#define BUS 55.4e9
#define LAYERS 32u
#define PAGES (2ull << 30)
#define FILL (4ull << 20)
#define ROUNDS 21
#define MULTIPLIES 400

extern const char ucm_bench_fatbin[];
extern const uint64_t ucm_bench_fatbin_bytes;

struct speed {
    struct ucm_encoding_spec spec;
    uint32_t n_items, n_planes, layers;
    uint64_t coded, plain; /* of the slice */
    CUdeviceptr slice, pages, planes, items;
    CUfunction kernel;
};

static CUfunction multiply;
static CUdeviceptr matrices;
static CUstream other;

static double now_s(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* About what KV is: the kernels' ways depend on the values. */
static void fill(CUdeviceptr pages)
{
    uint16_t *kv = fresh(FILL);

    for (uint64_t i = 0; i < FILL / 2; i++) {
        float x = rnd_normal();
        uint32_t u;

        memcpy(&u, &x, sizeof(u));
        kv[i] = (uint16_t)(u >> 16);
    }
    gpu_put(pages, kv, FILL);
    for (uint64_t at = FILL; at < PAGES; at *= 2)
        must(cuMemcpyDtoD(pages + at, pages, at), "pages");
    free(kv);
}

/* Layers of one allocation, K and V side by side; blocks in random order. */
static void speed_open(struct speed *s, uint32_t encoding, uint32_t axis, uint32_t tokens,
                       uint32_t heads, uint32_t dim, uint32_t sections)
{
    struct ucm_encoding_plane planes[2 * LAYERS];
    struct ucm_copy_item *items;
    uint64_t item = 0, page, blocks;

    *s = (struct speed){
        .spec = encoding_spec(encoding, UCM_ENCODING_BF16, tokens, heads, dim, 0, axis)};
    s->spec.n_sections = sections;
    page = ucm_encoding_plain_shard_bytes(&s->spec);
    s->layers = tokens > 16 ? 1 : LAYERS;
    blocks = PAGES / s->layers / page;
    s->slice = gpu_new(SLICE);
    s->pages = gpu_new(PAGES);
    fill(s->pages);
    s->n_planes = sections * s->layers;
    for (uint32_t p = 0; p < s->n_planes; p++) {
        uint32_t section = p % sections;

        planes[p] = (struct ucm_encoding_plane){
            s->pages + p / sections * blocks * page +
                section * ucm_encoding_plain_bytes(&s->spec, 0),
            page, item, (uint32_t)ucm_encoding_bytes(&s->spec, section), section};
        item += planes[p].bytes;
    }
    s->n_items = (uint32_t)(SLICE / item);
    items = fresh(s->n_items * sizeof(*items));
    for (uint32_t i = 0; i < s->n_items; i++)
        items[i] = (struct ucm_copy_item){.slot = s->slice + i * item,
                                          .block = (uint32_t)(i * 7919u % blocks)};
    s->coded = s->n_items * item;
    s->plain = s->n_items * page * s->layers;
    s->planes = gpu_put(0, planes, sizeof(planes));
    must(cuMemHostAlloc((void **)&s->items, s->n_items * sizeof(*items), CU_MEMHOSTALLOC_DEVICEMAP),
         "items");
    memcpy((void *)s->items, items, s->n_items * sizeof(*items));
    free(items);
    encoding_launch(encoding_kernel(&s->spec, UCM_COPY_DUMP), 256, gpu_stream, s->planes,
                    s->n_planes, s->items, s->n_items, &s->spec);
    gpu_sync();
}

static void speed_close(struct speed *s)
{
    gpu_free(s->slice);
    gpu_free(s->pages);
    gpu_free(s->planes);
    must(cuMemFreeHost((void *)s->items), "items");
}

static void launch(struct speed *s, uint32_t ctas)
{
    encoding_launch(s->kernel, ctas, gpu_stream, s->planes, s->n_planes, s->items, s->n_items,
                    &s->spec);
}

/* Microseconds of one launch, by events: the median. */
static double alone_us(struct speed *s, uint32_t ctas)
{
    double us[ROUNDS];
    CUevent begin, end;
    float ms;

    must(cuEventCreate(&begin, 0), "an event");
    must(cuEventCreate(&end, 0), "an event");
    for (int i = -2; i < ROUNDS; i++) {
        must(cuEventRecord(begin, gpu_stream), "an event");
        launch(s, ctas);
        must(cuEventRecord(end, gpu_stream), "an event");
        must(cuEventSynchronize(end), "a kernel");
        must(cuEventElapsedTime(&ms, begin, end), "an event");
        if (i >= 0)
            us[i] = 1000.0 * ms;
    }
    must(cuEventDestroy(begin), "an event");
    must(cuEventDestroy(end), "an event");
    qsort(us, ROUNDS, sizeof(*us), by_value);
    return us[ROUNDS / 2];
}

/* Seconds of the multiplications; beside them a launch every so often, whose median in us is *us. */
static double multiplied_s(struct speed *s, uint32_t ctas, double every_s, double *us)
{
    CUdeviceptr b = matrices + 2u * UCM_BENCH_MATRIX * UCM_BENCH_MATRIX, c = b + (b - matrices);
    void *arguments[] = {&matrices, &b, &c};
    static double took[100000];
    double begin, next, sent = 0;
    CUevent end, done;
    size_t n = 0;

    must(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING), "an event");
    must(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING), "an event");
    begin = next = now_s();
    for (int i = 0; i < MULTIPLIES; i++)
        must(cuLaunchKernel(multiply, UCM_BENCH_MATRIX / 128, UCM_BENCH_MATRIX / 64, 1, 256, 1, 1,
                            0, other, arguments, NULL),
             "a multiplication");
    must(cuEventRecord(end, other), "an event");
    while (cuEventQuery(end) == CUDA_ERROR_NOT_READY) {
        if (sent > 0 && cuEventQuery(done) == CUDA_SUCCESS) {
            took[n++ % 100000] = (now_s() - sent) * 1e6;
            sent = 0;
        }
        if (sent > 0 || every_s <= 0 || now_s() < next)
            continue;
        sent = now_s();
        next = next + every_s > sent ? next + every_s : sent;
        launch(s, ctas);
        must(cuEventRecord(done, gpu_stream), "an event");
    }
    begin = now_s() - begin;
    gpu_sync();
    must(cuEventDestroy(end), "an event");
    must(cuEventDestroy(done), "an event");
    qsort(took, n, sizeof(*took), by_value);
    if (us)
        *us = n > 0 ? took[n / 2] : 0;
    return begin;
}

static void one(struct speed *s, const char *name, enum ucm_copy_direction direction)
{
    static const uint32_t ctas[] = {16, 64, 128, 192, 256, 384, 512};
    double bus_us = (double)s->coded / BUS * 1e6, alone = multiplied_s(s, 0, 0, NULL), beside;

    s->kernel = encoding_kernel(&s->spec, direction);
    for (uint32_t i = 0; i < sizeof(ctas) / sizeof(*ctas); i++) {
        double us = alone_us(s, ctas[i]), with = multiplied_s(s, ctas[i], bus_us * 1e-6, &beside);

        printf("%-18s %-4s %4u %8.1f %8.1f %8.1f %8.1f %6.3f\n", name,
               direction == UCM_COPY_LOAD ? "load" : "dump", ctas[i], bus_us, us,
               (double)s->plain / us / 1e3, beside, alone / with);
    }
}

static const char *only; /* cases whose names begin so */

static void case_of(const char *name, uint32_t encoding, uint32_t axis, uint32_t tokens,
                    uint32_t heads, uint32_t dim, uint32_t sections)
{
    struct speed s;

    if (only && strncmp(name, only, strlen(only)) != 0)
        return;
    speed_open(&s, encoding, axis, tokens, heads, dim, sections);
    one(&s, name, UCM_COPY_LOAD);
    one(&s, name, UCM_COPY_DUMP);
    speed_close(&s);
}

void measure(const char *cases)
{
    CUmodule module;

    only = cases;
    if (ucm_bench_fatbin_bytes == 0)
        must(CUDA_ERROR_NOT_FOUND, "the kernels of ucm-bench");
    must(cuModuleLoadData(&module, ucm_bench_fatbin), "the kernels of ucm-bench");
    must(cuModuleGetFunction(&multiply, module, UCM_BENCH_MULTIPLY), "matrices");
    matrices = gpu_new(3ull * 2 * UCM_BENCH_MATRIX * UCM_BENCH_MATRIX);
    must(cuMemsetD8(matrices, 0, 6ull * UCM_BENCH_MATRIX * UCM_BENCH_MATRIX), "matrices");
    must(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), "a stream");
    must(cuStreamDestroy(gpu_stream), "the stream");
    must(cuStreamCreateWithPriority(&gpu_stream, CU_STREAM_NON_BLOCKING, -5), "a stream");
    printf("%-18s %-4s %4s %8s %8s %8s %8s %6s\n", "a slice of 16 MiB", "", "CTAs", "bus us", "us",
           "GB/s", "beside", "keeps");
    case_of("fp8 8x128", UCM_ENCODING_FP8, 0, 16, 8, 128, 2);
    case_of("q4 8x128", UCM_ENCODING_Q4, 0, 16, 8, 128, 2);
    case_of("lossless 8x128", UCM_ENCODING_LOSSLESS, 0, 16, 8, 128, 2);
    case_of("lossless, 32 layers", UCM_ENCODING_LOSSLESS, 0, 1024, 8, 128, 1);
    case_of("fp8 1x576 (MLA)", UCM_ENCODING_FP8, 0, 16, 1, 576, 1);
    case_of("int8 8x128", UCM_ENCODING_INT8, 0, 16, 8, 128, 2);
    case_of("int8 channel 8x128", UCM_ENCODING_INT8, 1, 16, 8, 128, 2);
    must(cuModuleUnload(module), "the kernels of ucm-bench");
}
