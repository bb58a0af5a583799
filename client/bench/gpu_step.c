#include "client/bench/gpu_step.h"

#include "client/bench/cuda.h"
#include "client/bench/kernels.h"

#include <stdlib.h>

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

#define LAYERS 32
#define WEIGHT_BYTES (2048 * MIB) /* read round and round: far more than the GPU's caches hold */
#define HEAD_BYTES (1024 * MIB)   /* of the last layer */
#define INPUT_BYTES (64 * KIB)    /* room for one of the inputs */
#define MEMORY_BYTES (WEIGHT_BYTES + (INPUTS + 2) * INPUT_BYTES)
#define CTAS 264
#define SMALL_CTAS 16
#define AFTER 12 /* kernels outside the graph: sampling */
#define SETTLE_NS 250000000u

enum { COMPUTES, BRINGS_IN, BRINGS_OUT };
enum { BEGIN, IN, COMPUTED, OUT };

/* Of a layer: the weights of QKV, output, gate and up, down; norms, rotation, attention of a short
 * sequence, and the activation between them. */
static const struct {
    uint64_t bytes;
    unsigned ctas;
} layer_reads[] = {
    {MIB, SMALL_CTAS}, {48 * MIB, CTAS},  {MIB, SMALL_CTAS}, {MIB, SMALL_CTAS}, {32 * MIB, CTAS},
    {MIB, SMALL_CTAS}, {224 * MIB, CTAS}, {MIB, SMALL_CTAS}, {112 * MIB, CTAS},
};

/* Block tables, slots, positions and the like of 16 sequences. */
static const uint64_t inputs[] = {64 * KIB, 8 * KIB, 4 * KIB, 512, 512, 256, 256, 64};
#define INPUTS (sizeof(inputs) / sizeof(inputs[0]))
#define PAGEABLE_BYTES 512

/* ---- the graph ---- */

static int launch_read(struct gpu_steps *s, uint64_t at, uint64_t bytes, unsigned ctas)
{
    cuda_address from = s->memory + at, odd = s->memory + MEMORY_BYTES - 16;
    unsigned n = (unsigned)(bytes / 16);
    void *arguments[] = {&from, &n, &odd};

    return bench_cuda.launch(s->work->read, ctas, 1, 1, 512, 1, 1, 0, s->streams[COMPUTES],
                             arguments, NULL);
}

static int launch_model(struct gpu_steps *s)
{
    uint64_t at = 0;
    int r = 0;

    for (unsigned layer = 0; layer < LAYERS; layer++)
        for (unsigned i = 0; i < sizeof(layer_reads) / sizeof(layer_reads[0]) && r == 0; i++) {
            if (at + layer_reads[i].bytes > WEIGHT_BYTES)
                at = 0;
            r = launch_read(s, at, layer_reads[i].bytes, layer_reads[i].ctas);
            at += layer_reads[i].bytes;
        }
    return r == 0 ? launch_read(s, 0, HEAD_BYTES, CTAS) : r;
}

static int graph_make(struct gpu_steps *s)
{
    void *graph = NULL;
    int r = bench_cuda.capture_begin(s->streams[COMPUTES], BENCH_CAPTURE_THREAD);
    int launched, ended;

    if (r != 0)
        return r;
    launched = launch_model(s);
    ended = bench_cuda.capture_end(s->streams[COMPUTES], &graph);
    r = launched != 0 ? launched : ended;
    if (r == 0)
        r = bench_cuda.graph_instantiate(&s->graph, graph, 0);
    if (graph)
        bench_cuda.graph_destroy(graph);
    return r;
}

/* ---- a step ---- */

static int input_send(struct gpu_steps *s, unsigned i, unsigned stream)
{
    return bench_cuda.to_device_async(s->memory + WEIGHT_BYTES + i * INPUT_BYTES,
                                      s->pinned + i * INPUT_BYTES, inputs[i], s->streams[stream]);
}

/* The last input takes the other stream, and the one of pageable memory goes between. */
static int inputs_send(struct gpu_steps *s)
{
    int r = input_send(s, INPUTS - 1, BRINGS_IN);

    if (r == 0)
        r = bench_cuda.event_record(s->joined[0], s->streams[BRINGS_IN]);
    for (unsigned i = 0; i < INPUTS - 1 && r == 0; i++)
        r = input_send(s, i, COMPUTES);
    if (r == 0)
        r = bench_cuda.to_device_async(s->memory + WEIGHT_BYTES + INPUTS * INPUT_BYTES, s->pageable,
                                       PAGEABLE_BYTES, s->streams[COMPUTES]);
    return r == 0 ? bench_cuda.stream_wait(s->streams[COMPUTES], s->joined[0], 0) : r;
}

static int tokens_fetch(struct gpu_steps *s)
{
    void *stream = s->streams[BRINGS_OUT];
    int r = bench_cuda.event_record(s->joined[1], s->streams[COMPUTES]);

    if (r == 0)
        r = bench_cuda.stream_wait(stream, s->joined[1], 0);
    if (r == 0)
        r = bench_cuda.to_host_async(s->pinned, s->memory + WEIGHT_BYTES, 256, stream);
    if (r == 0)
        r = bench_cuda.event_record(s->marks[OUT], stream);
    return r == 0 ? bench_cuda.event_synchronize(s->marks[OUT]) : r;
}

static int step_once(struct gpu_steps *s)
{
    void *stream = s->streams[COMPUTES];
    int r = bench_cuda.event_record(s->marks[BEGIN], stream);

    if (r == 0)
        r = inputs_send(s);
    if (r == 0)
        r = bench_cuda.event_record(s->marks[IN], stream);
    if (r == 0)
        r = bench_cuda.graph_launch(s->graph, stream);
    if (r == 0)
        r = bench_cuda.event_record(s->marks[COMPUTED], stream);
    for (unsigned i = 0; i < AFTER && r == 0; i++)
        r = launch_read(s, i * MIB, MIB, SMALL_CTAS);
    return r == 0 ? tokens_fetch(s) : r;
}

/* 2: CUDA_ERROR_OUT_OF_MEMORY, or what the driver says. */
static int parts_add(struct gpu_steps *s)
{
    struct samples *parts[] = {&s->inputs_ms, &s->graph_ms, &s->tokens_ms};
    int r = 0;

    for (unsigned i = 0; i < 3 && r == 0; i++) {
        float ms = 0;

        r = bench_cuda.event_elapsed(&ms, s->marks[i], s->marks[i + 1]);
        if (r == 0 && samples_add(parts[i], ms) < 0)
            r = 2;
    }
    return r;
}

static void *steps_run(void *arg)
{
    struct gpu_steps *s = arg;
    uint64_t settled = clock_ns() + SETTLE_NS;
    int r = bench_cuda.context_set(s->work->gpu->context);

    while (r == 0 && atomic_load(&s->runs)) {
        uint64_t begin = clock_ns();

        r = step_once(s);
        if (r != 0 || begin < settled)
            continue;
        if (samples_add(&s->step_ms, (double)(clock_ns() - begin) / 1e6) < 0)
            r = 2;
        if (r == 0)
            r = parts_add(s);
    }
    s->failed = gpu_check(s->work->gpu, "a step", r) < 0;
    return NULL;
}

/* ---- life ---- */

static int steps_make(struct gpu_steps *s)
{
    int r = bench_cuda.allocate(&s->memory, MEMORY_BYTES);
    void *p = NULL;

    if (r == 0)
        r = bench_cuda.host_allocate(&p, INPUTS * INPUT_BYTES, 0);
    s->pinned = p;
    for (unsigned i = 0; i < GPU_STEP_STREAMS && r == 0; i++)
        r = bench_cuda.stream_create(&s->streams[i], BENCH_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < GPU_STEP_MARKS && r == 0; i++)
        r = bench_cuda.event_create(&s->marks[i], 0);
    for (unsigned i = 0; i < 2 && r == 0; i++)
        r = bench_cuda.event_create(&s->joined[i], BENCH_EVENT_NO_TIMING);
    if (r == 0)
        r = bench_cuda.set_async(s->memory, 0, MEMORY_BYTES, s->streams[COMPUTES]);
    if (r == 0)
        r = graph_make(s);
    return r == 0 ? bench_cuda.stream_synchronize(s->streams[COMPUTES]) : r;
}

int gpu_steps_open(struct gpu_steps *s, struct gpu_work *work)
{
    *s = (struct gpu_steps){.work = work, .pageable = calloc(1, PAGEABLE_BYTES)};
    if (gpu_current(work->gpu) < 0)
        return -1;
    return gpu_check(work->gpu, "preparing steps", s->pageable ? steps_make(s) : 2);
}

void gpu_steps_close(struct gpu_steps *s)
{
    struct samples *all[] = {&s->step_ms, &s->inputs_ms, &s->graph_ms, &s->tokens_ms};

    if (s->graph)
        bench_cuda.graph_exec_destroy(s->graph);
    for (unsigned i = 0; i < 2; i++)
        if (s->joined[i])
            bench_cuda.event_destroy(s->joined[i]);
    for (unsigned i = 0; i < GPU_STEP_MARKS; i++)
        if (s->marks[i])
            bench_cuda.event_destroy(s->marks[i]);
    for (unsigned i = 0; i < GPU_STEP_STREAMS; i++)
        if (s->streams[i])
            bench_cuda.stream_destroy(s->streams[i]);
    if (s->pinned)
        bench_cuda.host_release(s->pinned);
    if (s->memory)
        bench_cuda.release(s->memory);
    for (unsigned i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        samples_free(all[i]);
    free(s->pageable);
    *s = (struct gpu_steps){.memory = 0};
}

int gpu_steps_start(struct gpu_steps *s)
{
    samples_clear(&s->step_ms);
    samples_clear(&s->inputs_ms);
    samples_clear(&s->graph_ms);
    samples_clear(&s->tokens_ms);
    atomic_store(&s->runs, true);
    return pthread_create(&s->thread, NULL, steps_run, s) == 0 ? 0 : -1;
}

int gpu_steps_stop(struct gpu_steps *s)
{
    atomic_store(&s->runs, false);
    pthread_join(s->thread, NULL);
    return s->failed ? -1 : 0;
}
