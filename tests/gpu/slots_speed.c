/* How fast: resolve, taking slots, and the gather from a window, beside what the bus gives a plain copy. Graphs of many
 * launches are replayed; medians. */
#include "tests/gpu/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 9
#define LAYERS 32u
#define HEADS 8u
#define NUMBERS 8192u
#define CHOSEN 256u
#define BLOCK (64u << 10)

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void capture(void)
{
    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
}

/* Microseconds of what was captured, the median of ROUNDS replays; before each of them `prepare` runs, not measured. */
static double replay(void (*prepare)(void *), void *arg)
{
    double us[ROUNDS];
    CUgraphExec exec;
    CUgraph graph;
    CUevent begin, end;
    float ms;

    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    must(cuGraphInstantiate(&exec, graph, 0), "a graph");
    must(cuEventCreate(&begin, 0), "an event");
    must(cuEventCreate(&end, 0), "an event");
    for (int i = -2; i < ROUNDS; i++) {
        prepare(arg);
        must(cuEventRecord(begin, gpu_stream), "an event");
        must(cuGraphLaunch(exec, gpu_stream), "a graph");
        must(cuEventRecord(end, gpu_stream), "an event");
        must(cuEventSynchronize(end), "a graph");
        must(cuEventElapsedTime(&ms, begin, end), "an event");
        if (i >= 0)
            us[i] = 1000.0 * ms;
    }
    must(cuEventDestroy(begin), "an event");
    must(cuEventDestroy(end), "an event");
    must(cuGraphExecDestroy(exec), "a graph");
    must(cuGraphDestroy(graph), "a graph");
    qsort(us, ROUNDS, sizeof(*us), by_value);
    return us[ROUNDS / 2];
}

struct bed {
    struct pool pool;
    CUdeviceptr keys, requests, places, bytes;
    struct window window, table;
    uint32_t misses;
};

static void nothing(void *arg)
{
    (void)arg;
}

/* All misses get a slot and arrive. */
static void serve_all(struct pool *p)
{
    uint32_t n = p->gpu.shape.misses;
    uint8_t *all = fresh(n);
    CUdeviceptr arrived;

    memset(all, 1, n);
    arrived = gpu_put(0, all, n);
    launch("ucm_slots_take_all", 64, 256, (void *[]){&p->gpu});
    launch("ucm_slots_publish_all", 64, 256, (void *[]){&p->gpu, &arrived});
    gpu_sync();
    gpu_free(arrived);
    free(all);
}

/* ---- resolve: 32 layers of 8 lists of 256, in slots of a layer or of a KV head ---- */

static void measure_resolve(uint32_t apart, uint32_t slots)
{
    struct ucm_slots_shape shape = {.strands = LAYERS * (apart ? HEADS : 1),
                                    .numbers = NUMBERS,
                                    .slots = slots,
                                    .requests = 1,
                                    .misses = 1u << 16};
    uint32_t *index = fresh(HEADS * CHOSEN * 4), count[HEADS], request = 0;
    int32_t *table = fresh(NUMBERS * 4);
    struct ucm_slots_lists lists = {
        .chains = 1, .lists = HEADS, .room = CHOSEN, .apart = apart, .table_stride = NUMBERS};
    CUdeviceptr at = 0;
    struct pool p;
    double us;

    pool_open(&p, &shape);
    for (uint32_t i = 0; i < NUMBERS; i++)
        table[i] = (int32_t)i;
    for (uint32_t l = 0; l < HEADS; l++) {
        count[l] = CHOSEN;
        for (uint32_t i = 0; i < CHOSEN; i++) /* heads agree on a part */
            index[l * CHOSEN + i] = i < 220 ? i * 29 : 16 + i * 29 + l;
    }
    lists.table = (const int32_t *)(uintptr_t)gpu_put(0, table, NUMBERS * 4);
    lists.count = (const uint32_t *)(uintptr_t)gpu_put(0, count, sizeof(count));
    lists.request = (const uint32_t *)(uintptr_t)gpu_put(0, &request, 4);
    at = gpu_put(0, index, HEADS * CHOSEN * 4);
    lists.index = (const uint32_t *)(uintptr_t)at;
    pool_next(&p);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        pool_resolve(&p, layer * (apart ? HEADS : 1), &lists);
    serve_all(&p);
    pool_read(&p, "a warm pool");
    if (!check(p.host.step->flags == 0, "a warm pool has flags %u", p.host.step->flags))
        return;
    capture();
    pool_next(&p);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        pool_resolve(&p, layer * (apart ? HEADS : 1), &lists);
    us = replay(nothing, NULL);
    printf("| resolve, 8 lists of %u, slots of a %s, all hits | %.2f us a layer |\n", CHOSEN,
           apart ? "KV head" : "layer", us / LAYERS);
    free(index);
    free(table);
    gpu_free(at);
    pool_close(&p);
}

/* ---- the gather ---- */

struct piece {
    const char *what;
    uint32_t heads, rows, row_bytes; /* of a plane */
};

/* Everything is forgotten, and keys that lie apart are wanted. */
static void want_misses(void *arg)
{
    struct bed *b = arg;

    gpu_put((CUdeviceptr)(uintptr_t)b->pool.gpu.slot_of, b->pool.host.slot_of,
            4ull * b->pool.gpu.shape.strands * NUMBERS);
    pool_next(&b->pool);
    launch("ucm_slots_want_keys", 64, 128,
           (void *[]){&b->pool.gpu, &b->keys, &b->requests, &b->misses});
    gpu_sync();
}

static void bed_open(struct bed *b, const struct piece *piece, uint32_t misses,
                     struct ucm_slots_gather *g)
{
    struct ucm_slots_shape shape = {.strands = LAYERS * piece->heads,
                                    .numbers = NUMBERS,
                                    .slots = 27000 * piece->heads,
                                    .requests = 1,
                                    .misses = 1u << 14};
    struct ucm_slots_place *place = fresh(NUMBERS * sizeof(*place));
    uint32_t *keys = fresh(misses * 4), *zero = fresh(misses * 4), plane = BLOCK / 2;
    uint32_t blocks = (uint32_t)(b->window.size / BLOCK);

    pool_open(&b->pool, &shape);
    for (uint32_t i = 0; i < NUMBERS; i++)
        place[i] = (struct ucm_slots_place){b->window.gpu + (uint64_t)(i * 37 % blocks) * BLOCK,
                                            b->table.gpu + 8 * i, 2};
    /* A window holds one layer of each block here: strands of other layers read the same bytes. */
    for (uint32_t i = 0; i < misses; i++)
        keys[i] = i * 5 % shape.strands * NUMBERS + i % NUMBERS;
    b->misses = misses;
    b->keys = gpu_put(0, keys, misses * 4);
    b->requests = gpu_put(0, zero, misses * 4);
    b->places = gpu_put(0, place, NUMBERS * sizeof(*place));
    *g = (struct ucm_slots_gather){.places = b->places, .heads = piece->heads, .planes = 2};
    for (uint32_t i = 0; i < 2; i++)
        g->plane[i] = (struct ucm_slots_plane){
            .slots = b->bytes + i * (plane / piece->heads),
            .slot_stride = BLOCK / piece->heads,
            .first = i * plane,
            .layer_stride = 0,
            .head_stride = piece->rows == 1 ? plane / piece->heads : piece->row_bytes,
            .pitch = plane / piece->rows,
            .rows = piece->rows,
            .row_bytes = piece->row_bytes};
    free(place);
    free(keys);
    free(zero);
}

static void bed_close(struct bed *b)
{
    pool_close(&b->pool);
    gpu_free(b->keys);
    gpu_free(b->requests);
    gpu_free(b->places);
}

static void measure_gather(struct bed *b, const struct piece *piece, const char *kernel,
                           uint32_t blocks, uint32_t misses, double ceiling)
{
    uint64_t bytes = (uint64_t)misses * 2 * piece->rows * piece->row_bytes;
    struct ucm_slots_gather g;
    double us;

    bed_open(b, piece, misses, &g);
    capture();
    pool_gather(&b->pool, kernel, blocks, &g);
    us = replay(want_misses, b);
    gpu_get(b->pool.host.step, (CUdeviceptr)(uintptr_t)b->pool.gpu.step,
            sizeof(*b->pool.host.step));
    check(b->pool.host.step->flags == 0, "%s: flags %u", piece->what, b->pool.host.step->flags);
    printf("| %s | %s, %u | %u | %.1f | %.1f | %.2f |\n", piece->what, kernel, blocks, misses, us,
           (double)bytes / us / 1e3, (double)bytes / us / 1e3 / ceiling);
    bed_close(b);
}

static double measure_bus(struct bed *b)
{
    double us;

    capture();
    must(cuMemcpyHtoDAsync(b->bytes, b->window.readable, b->window.size, gpu_stream), "a copy");
    us = replay(nothing, NULL);
    return (double)b->window.size / us / 1e3;
}

void measure(void)
{
    static const struct piece pieces[] = {
        {"64 KiB, K and V of a layer", 1, 1, 32u << 10},
        {"8 KiB, of a KV head, each plane in one piece", 8, 1, 4u << 10},
        {"8 KiB, of a KV head, rows of 256 bytes", 8, 16, 256},
    };
    static const char *const kernels[] = {"block", "block_weak", "warp", "warp_weak"};
    uint32_t counts[] = {1, 4, 16, 64, 256, 2048};
    struct bed b = {.misses = 0};
    double ceiling;

    measure_resolve(0, 27000);
    measure_resolve(1, 8 * 27000);
    b.bytes = gpu_new(27000ull * BLOCK);
    window_open(&b.window, 1ull << 30);
    window_open(&b.table, 8 * NUMBERS);
    for (uint32_t i = 0; i < NUMBERS; i++)
        ((uint64_t *)(void *)b.table.bytes)[i] = 2;
    ceiling = measure_bus(&b);
    printf("\na copy of 1 GiB: %.1f GB/s\n\n| piece | kernel, thread blocks | misses | us | GB/s | "
           "of a copy |\n",
           ceiling);
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < 4; k++)
            for (size_t n = 0; n < 6; n++)
                measure_gather(&b, &pieces[i], kernels[k], k < 2 ? 132 : 32,
                               counts[n] * (i > 0 && n > 0 ? 4 : 1), ceiling);
    measure_gather(&b, &pieces[0], "block", 16, 256, ceiling);
    measure_gather(&b, &pieces[0], "block", 64, 256, ceiling);
    measure_gather(&b, &pieces[2], "warp", 132, 1024, ceiling);
    window_close(&b.window);
    window_close(&b.table);
    gpu_free(b.bytes);
}
