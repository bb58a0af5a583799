#include "client/bench/gpu_work.h"

#include "client/bench/cuda.h"
#include "client/bench/kernels.h"
#include "kernels/copy.h"

#include <string.h>

#define BUSY_BATCH 4  /* multiplications after one event */
#define BUSY_AHEAD 4u /* batches under way: the GPU never waits for the host */
#define CHAIN_CTAS 264
#define CHAIN_SETTLE_NS 250000000u /* until the daemon has seen that it is not alone */
#define DMA_ROUNDS 5
#define DMA_AHEAD 8 /* of transfers without a pause */

extern const char ucm_bench_fatbin[];
extern const uint64_t ucm_bench_fatbin_bytes;

int gpu_work_open(struct gpu_work *w, struct gpu *g, size_t bytes)
{
    *w = (struct gpu_work){.gpu = g, .bytes = bytes};
    if (gpu_current(g) < 0)
        return -1;
    if (ucm_bench_fatbin_bytes == 0)
        return 0;
    if (gpu_check(g, "cuModuleLoadData", bench_cuda.module_load(&w->module, ucm_bench_fatbin)) < 0)
        return -1;
    if (gpu_check(g, UCM_BENCH_MULTIPLY,
                  bench_cuda.module_function(&w->multiply, w->module, UCM_BENCH_MULTIPLY)) == 0 &&
        gpu_check(g, UCM_BENCH_READ,
                  bench_cuda.module_function(&w->read, w->module, UCM_BENCH_READ)) == 0 &&
        gpu_check(g, UCM_COPY_KERNEL,
                  bench_cuda.module_function(&w->copy, w->module, UCM_COPY_KERNEL)) == 0)
        return 0;
    bench_cuda.module_unload(w->module);
    w->module = NULL;
    return -1;
}

void gpu_work_close(struct gpu_work *w)
{
    if (w->module && gpu_current(w->gpu) == 0)
        bench_cuda.module_unload(w->module);
    samples_free(&w->chain_us);
    w->module = NULL;
}

bool gpu_work_kernels(const struct gpu_work *w)
{
    return w->module != NULL;
}

/* ---- DMA ---- */

/* One transfer each way that is asked for, in bytes a second; 0 after a failure. */
static double dma_once(struct gpu_work *w, void *host[2], void *stream[2], size_t bytes, bool to,
                       bool from)
{
    uint64_t begin = clock_ns();
    int r = 0;

    if (to)
        r = bench_cuda.to_device_async(w->gpu->memory, host[0], bytes, stream[0]);
    if (from && r == 0)
        r = bench_cuda.to_host_async(host[1], w->gpu->memory + w->bytes / 2, bytes, stream[1]);
    if (r == 0)
        r = bench_cuda.stream_synchronize(stream[0]);
    if (r == 0)
        r = bench_cuda.stream_synchronize(stream[1]);
    if (gpu_check(w->gpu, "a transfer", r) < 0)
        return 0;
    return (double)bytes * (to + from) / ((double)(clock_ns() - begin) * 1e-9);
}

static double dma_best(struct gpu_work *w, void *host[2], void *stream[2], size_t bytes, bool to,
                       bool from)
{
    double best = 0, rate;

    for (unsigned i = 0; i < DMA_ROUNDS; i++) {
        rate = dma_once(w, host, stream, bytes, to, from);
        if (rate <= 0)
            return 0;
        if (rate > best)
            best = rate;
    }
    return best;
}

int gpu_dma_measure(struct gpu_work *w, size_t bytes, struct gpu_dma *out)
{
    void *host[2] = {NULL, NULL}, *stream[2] = {NULL, NULL};
    struct gpu *g = w->gpu;
    int rc = gpu_current(g);

    for (unsigned i = 0; i < 2 && rc == 0; i++) {
        rc = gpu_check(g, "cuMemHostAlloc", bench_cuda.host_allocate(&host[i], bytes, 0));
        if (rc == 0)
            rc = gpu_check(g, "cuStreamCreate",
                           bench_cuda.stream_create(&stream[i], BENCH_STREAM_NON_BLOCKING));
    }
    if (rc == 0) {
        out->to_gpu = dma_best(w, host, stream, bytes, true, false);
        out->from_gpu = dma_best(w, host, stream, bytes, false, true);
        out->both = dma_best(w, host, stream, bytes, true, true);
        rc = out->to_gpu > 0 && out->from_gpu > 0 && out->both > 0 ? 0 : -1;
    }
    for (unsigned i = 0; i < 2; i++) {
        if (stream[i])
            bench_cuda.stream_destroy(stream[i]);
        if (host[i])
            bench_cuda.host_release(host[i]);
    }
    return rc;
}

int gpu_dma_repeat(struct gpu_work *w, size_t bytes, uint64_t ns)
{
    uint64_t end_ns = clock_ns() + ns;
    void *host = NULL, *stream = NULL;
    struct gpu *g = w->gpu;
    int rc = gpu_current(g), r = 0;

    if (rc == 0)
        rc = gpu_check(g, "cuMemHostAlloc", bench_cuda.host_allocate(&host, bytes, 0));
    if (rc == 0)
        rc = gpu_check(g, "cuStreamCreate",
                       bench_cuda.stream_create(&stream, BENCH_STREAM_NON_BLOCKING));
    while (rc == 0 && clock_ns() < end_ns) {
        for (unsigned i = 0; i < DMA_AHEAD && r == 0; i++)
            r = bench_cuda.to_device_async(g->memory, host, bytes, stream);
        if (r == 0)
            r = bench_cuda.stream_synchronize(stream);
        rc = gpu_check(g, "a transfer", r);
    }
    if (stream)
        bench_cuda.stream_destroy(stream);
    if (host)
        bench_cuda.host_release(host);
    return rc;
}

/* ---- matrices ---- */

static int multiply_batch(struct gpu_work *w, cuda_address m, void *stream, void *event)
{
    uint64_t bytes = 2ull * UCM_BENCH_MATRIX * UCM_BENCH_MATRIX;
    cuda_address a = m, b = m + bytes, c = m + 2 * bytes;
    void *arguments[] = {&a, &b, &c};
    int r = 0;

    for (unsigned i = 0; i < BUSY_BATCH && r == 0; i++)
        r = bench_cuda.launch(w->multiply, UCM_BENCH_MATRIX / 128, UCM_BENCH_MATRIX / 64, 1, 256, 1,
                              1, 0, stream, arguments, NULL);
    return r != 0 ? r : bench_cuda.event_record(event, stream);
}

static int multiply_loop(struct gpu_work *w, cuda_address m, void *stream, void **events)
{
    unsigned long sent = 0, done = 0;
    int r = 0;

    while (r == 0 && (atomic_load(&w->busy_runs) || done < sent)) {
        if (atomic_load(&w->busy_runs) && sent - done < BUSY_AHEAD) {
            r = multiply_batch(w, m, stream, events[sent++ % BUSY_AHEAD]);
            continue;
        }
        r = bench_cuda.event_synchronize(events[done++ % BUSY_AHEAD]);
        atomic_fetch_add(&w->multiplied, BUSY_BATCH);
    }
    return r;
}

static void *busy_run(void *arg)
{
    struct gpu_work *w = arg;
    void *stream = NULL, *events[BUSY_AHEAD] = {NULL};
    size_t bytes = 6ull * UCM_BENCH_MATRIX * UCM_BENCH_MATRIX;
    cuda_address m = 0;
    int r = bench_cuda.context_set(w->gpu->context);

    if (r == 0)
        r = bench_cuda.allocate(&m, bytes);
    if (r == 0)
        r = bench_cuda.stream_create(&stream, BENCH_STREAM_NON_BLOCKING);
    if (r == 0)
        r = bench_cuda.set_async(m, 0x3c, bytes, stream);
    for (unsigned i = 0; i < BUSY_AHEAD && r == 0; i++)
        r = bench_cuda.event_create(&events[i], BENCH_EVENT_NO_TIMING);
    if (r == 0)
        r = multiply_loop(w, m, stream, events);
    if (gpu_check(w->gpu, "multiplying matrices", r) < 0)
        atomic_store(&w->busy_failed, true);
    for (unsigned i = 0; i < BUSY_AHEAD; i++)
        if (events[i])
            bench_cuda.event_destroy(events[i]);
    if (stream)
        bench_cuda.stream_destroy(stream);
    if (m)
        bench_cuda.release(m);
    return NULL;
}

int gpu_busy_start(struct gpu_work *w)
{
    atomic_store(&w->busy_failed, false);
    atomic_store(&w->busy_runs, true);
    return pthread_create(&w->busy, NULL, busy_run, w) == 0 ? 0 : -1;
}

int gpu_busy_stop(struct gpu_work *w)
{
    atomic_store(&w->busy_runs, false);
    pthread_join(w->busy, NULL);
    return atomic_load(&w->busy_failed) ? -1 : 0;
}

unsigned long gpu_busy_count(struct gpu_work *w)
{
    return atomic_load(&w->multiplied);
}

/* ---- the chain ---- */

static int chain_loop(struct gpu_work *w, cuda_address from, void *stream)
{
    unsigned n = UCM_BENCH_READ_BYTES / 16;
    cuda_address odd = from + UCM_BENCH_READ_BYTES;
    void *arguments[] = {&from, &n, &odd};
    uint64_t settled = clock_ns() + CHAIN_SETTLE_NS, begin;
    int r = 0;

    while (r == 0 && atomic_load(&w->chain_runs)) {
        begin = clock_ns();

        r = bench_cuda.launch(w->read, CHAIN_CTAS, 1, 1, 512, 1, 1, 0, stream, arguments, NULL);
        if (r == 0)
            r = bench_cuda.stream_synchronize(stream);
        if (begin >= settled && r == 0 &&
            samples_add(&w->chain_us, (double)(clock_ns() - begin) / 1e3) < 0)
            return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    }
    return r;
}

static void *chain_run(void *arg)
{
    struct gpu_work *w = arg;
    cuda_address from = 0;
    void *stream = NULL;
    int r = bench_cuda.context_set(w->gpu->context);

    if (r == 0)
        r = bench_cuda.allocate(&from, UCM_BENCH_READ_BYTES + 16);
    if (r == 0)
        r = bench_cuda.stream_create(&stream, BENCH_STREAM_NON_BLOCKING);
    if (r == 0)
        r = bench_cuda.set_async(from, 0, UCM_BENCH_READ_BYTES + 16, stream);
    if (r == 0)
        r = chain_loop(w, from, stream);
    w->chain_failed = gpu_check(w->gpu, "a chain of kernels", r) < 0;
    if (stream)
        bench_cuda.stream_destroy(stream);
    if (from)
        bench_cuda.release(from);
    return NULL;
}

int gpu_chain_start(struct gpu_work *w)
{
    samples_clear(&w->chain_us);
    atomic_store(&w->chain_runs, true);
    return pthread_create(&w->chain, NULL, chain_run, w) == 0 ? 0 : -1;
}

int gpu_chain_stop(struct gpu_work *w)
{
    atomic_store(&w->chain_runs, false);
    pthread_join(w->chain, NULL);
    return w->chain_failed ? -1 : 0;
}

/* ---- the bare kernel ---- */

struct kernel_args {
    struct ucm_copy_plane *planes;
    struct ucm_copy_item *item;
    uint32_t fragments, one, tiles, direction;
};

static int kernel_rounds(struct gpu_work *w, struct kernel_args *a, void *stream, unsigned rounds,
                         struct samples *out_us)
{
    void *arguments[] = {&a->planes, &a->fragments, &a->item, &a->one, &a->tiles, &a->direction};
    int r = 0;

    for (unsigned i = 0; i < rounds + 10 && r == 0; i++) {
        uint64_t begin = clock_ns();

        r = bench_cuda.launch(w->copy, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, stream,
                              arguments, NULL);
        if (r == 0)
            r = bench_cuda.stream_synchronize(stream);
        if (i >= 10 && samples_add(out_us, (double)(clock_ns() - begin) / 1e3) < 0)
            return gpu_check(w->gpu, "samples", 2);
    }
    return gpu_check(w->gpu, "the copy kernel", r);
}

int gpu_kernel_measure(struct gpu_work *w, uint32_t fragment, uint32_t fragments, bool load,
                       unsigned rounds, struct samples *out_us)
{
    size_t slot = (size_t)fragment * fragments, planes = fragments * sizeof(struct ucm_copy_plane);
    struct kernel_args a = {.fragments = fragments, .one = 1, .tiles = ucm_copy_tiles(fragment)};
    void *host = NULL, *stream = NULL;
    int rc = gpu_current(w->gpu);

    a.direction = load ? UCM_COPY_LOAD : UCM_COPY_DUMP;
    if (rc == 0)
        rc = gpu_check(w->gpu, "cuMemHostAlloc",
                       bench_cuda.host_allocate(&host, slot + planes + sizeof(*a.item), 0));
    if (rc < 0)
        return rc;
    a.planes = (struct ucm_copy_plane *)((char *)host + slot);
    a.item = (struct ucm_copy_item *)(a.planes + fragments);
    *a.item = (struct ucm_copy_item){.slot = (uintptr_t)host};
    memset(host, 1, slot);
    for (uint32_t i = 0; i < fragments; i++)
        a.planes[i] = (struct ucm_copy_plane){.base = w->gpu->memory + 4ull * i * fragment,
                                              .stride = 4ull * fragment * fragments,
                                              .slot_offset = (uint64_t)i * fragment,
                                              .block_bytes = fragment};
    rc = gpu_check(w->gpu, "cuStreamCreate",
                   bench_cuda.stream_create(&stream, BENCH_STREAM_NON_BLOCKING));
    if (rc == 0) {
        rc = kernel_rounds(w, &a, stream, rounds, out_us);
        bench_cuda.stream_destroy(stream);
    }
    bench_cuda.host_release(host);
    return rc;
}
