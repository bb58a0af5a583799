/* How fast copies are, GPU otherwise idle and beside a worker that computes, against one large DMA
 * transfer, and how much of its speed the worker keeps. Prints a table; passes when 64 KiB chunks
 * reach 0.85 of the DMA's speed in both directions. */
#include "tests/gpu/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOTAL (256 * MIB)
#define MEMORY (1024 * MIB)
#define SLOTS (512 * MIB)
#define ROUNDS 7

static struct test_device t;
static struct test_worker w;
static uint8_t ipc[64];

/* Chunks 4 apart in GPU memory, in random order; a block of `layers` of them is contiguous in its
 * slot. */
static struct device_region *speed_region(uint64_t chunk, uint32_t layers, uint32_t *blocks)
{
    struct test_layout l = {.name = "speed",
                            .shards = layers,
                            .n_handles = 1,
                            .n_planes = layers,
                            .shard_bytes = chunk};
    struct device_region *r = NULL;
    struct ucm_error e = {0};

    *blocks = l.blocks = (uint32_t)(TOTAL / layers / chunk);
    for (uint32_t i = 0; i < layers; i++)
        l.planes[i] = (struct test_plane){0, i * l.blocks * 4 * chunk, 4 * chunk, chunk, i};
    if (region_open(&t, &l, w.pid, ipc, -1, 0, MEMORY, &r, &e) < 0)
        CHECK(false, "region of %d byte chunks: %s", (int)chunk, e.text);
    return r;
}

static struct ucm_copy_item *items_new(uint32_t blocks, uint64_t slot_bytes)
{
    struct ucm_copy_item *items = calloc(blocks, sizeof(*items));
    uint64_t seed = 1;

    for (uint32_t i = 0; i < blocks; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)t.slots + i * slot_bytes,
                                          .block = i};
    for (uint32_t i = blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(random_next(&seed) % (i + 1)), block = items[i].block;

        items[i].block = items[j].block;
        items[j].block = block;
    }
    return items;
}

/* Bytes a second, the median of ROUNDS. */
static double copy_rate(struct device_region *r, const struct ucm_copy_item *items, uint32_t n,
                        uint64_t bytes, enum device_op op, double *latency_us)
{
    double rate[ROUNDS];
    struct test_job j;

    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t begin;

        job_init(&j, op, r, items, n);
        begin = uv_hrtime();
        if (job_run(&t, &j) != 0)
            CHECK(false, "copy: %s", j.job.error.text);
        rate[i] = (double)bytes / ((double)(j.done_ns - begin) * 1e-9);
        for (unsigned k = i; k > 0 && rate[k] < rate[k - 1]; k--) {
            double x = rate[k];

            rate[k] = rate[k - 1];
            rate[k - 1] = x;
        }
    }
    if (latency_us)
        *latency_us = (double)bytes / rate[ROUNDS / 2] * 1e6;
    return rate[ROUNDS / 2];
}

/* Loads and dumps under way together. */
static double both_rate(struct device_region *r, const struct ucm_copy_item *items, uint32_t n)
{
    struct test_job jobs[8];
    uint64_t begin = uv_hrtime();

    for (unsigned i = 0; i < 8; i++) {
        job_init(&jobs[i], i % 2 ? DEVICE_DUMP : DEVICE_LOAD, r, items, n);
        job_submit(&t, &jobs[i]);
    }
    for (unsigned i = 0; i < 8; i++)
        (void)job_wait(&t, &jobs[i]);
    return 8.0 * TOTAL / ((double)(uv_hrtime() - begin) * 1e-9);
}

static void small(void)
{
    static const uint32_t counts[] = {1, 16, 128};
    uint32_t blocks;
    struct device_region *r = speed_region(65536, 1, &blocks);
    struct ucm_copy_item *items = items_new(blocks, 65536);

    for (unsigned i = 0; r && i < 3; i++) {
        double load_us, dump_us;

        copy_rate(r, items, counts[i], counts[i] * 65536ull, DEVICE_LOAD, &load_us);
        copy_rate(r, items, counts[i], counts[i] * 65536ull, DEVICE_DUMP, &dump_us);
        printf("RATE  %3u chunks of 64 KiB, submit to done: load %.0f us, dump %.0f us\n",
               counts[i], load_us, dump_us);
    }
    if (r)
        region_shut(&t, r);
    free(items);
}

/* ---- beside a worker that computes ---- */

#define BUSY_SECONDS 0.5

static double kernels_per_second(double seconds, void (*work)(void *), void *arg)
{
    uint64_t begin = uv_hrtime(), first;

    worker_do(&w, WORKER_BUSY_COUNT, 0, 0, 0);
    first = w.reply.value;
    do {
        work(arg);
    } while ((double)(uv_hrtime() - begin) * 1e-9 < seconds);
    worker_do(&w, WORKER_BUSY_COUNT, 0, 0, 0);
    return (double)(w.reply.value - first) / ((double)(uv_hrtime() - begin) * 1e-9);
}

struct busy_copy {
    struct device_region *region;
    struct ucm_copy_item *items;
    uint32_t blocks;
    enum device_op op;
    uint64_t bytes, ns;
};

static void pause_cb(void *arg)
{
    (void)arg;
    loop_for(&t, 10);
}

/* Two jobs of half of the bytes each are under way, so that the bus has no gap between jobs. */
static void busy_copy_cb(void *arg)
{
    struct busy_copy *c = arg;
    uint64_t begin = uv_hrtime();
    struct test_job j[4];

    for (unsigned i = 0; i < 4; i++) {
        job_init(&j[i], c->op, c->region, c->items + c->blocks / 4 * i, c->blocks / 4);
        job_submit(&t, &j[i]);
    }
    for (unsigned i = 0; i < 4; i++)
        if (job_wait(&t, &j[i]) != 0)
            CHECK(false, "copy: %s", j[i].job.error.text);
    c->bytes += TOTAL;
    c->ns += uv_hrtime() - begin;
}

static void busy_rates(double to_gpu, double from_gpu)
{
    static const uint64_t chunks[] = {4096, 16384, 32768, 65536, 524288, 2097152};
    double alone;

    if (!CHECK(worker_do(&w, WORKER_BUSY, 0, 0, 0), "the worker computes"))
        return;
    loop_for(&t, 500);
    alone = kernels_per_second(1, pause_cb, NULL);
    printf("RATE  alone the worker does %.0f multiplications a second (%.0f TFLOP/s)\n", alone,
           alone * 2 * 2048.0 * 2048.0 * 2048.0 / 1e12);
    for (unsigned i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        uint32_t layers = chunks[i] <= 65536 ? 32 : 4, blocks;
        struct device_region *r = speed_region(chunks[i], layers, &blocks);
        struct ucm_copy_item *items = items_new(blocks, layers * chunks[i]);
        double rate[2], keeps[2];

        for (unsigned d = 0; r && d < 2; d++) {
            struct busy_copy c = {r, items, blocks, d ? DEVICE_DUMP : DEVICE_LOAD, 0, 0};

            keeps[d] = kernels_per_second(BUSY_SECONDS, busy_copy_cb, &c) / alone;
            rate[d] = (double)c.bytes / (double)c.ns;
        }
        if (r)
            printf("RATE  busy, %4d KiB: load %.1f GB/s (%.2f), worker keeps %.2f; dump %.1f "
                   "(%.2f), keeps %.2f\n",
                   (int)(chunks[i] >> 10), rate[0], rate[0] * 1e9 / to_gpu, keeps[0], rate[1],
                   rate[1] * 1e9 / from_gpu, keeps[1]);
        if (r)
            region_shut(&t, r);
        free(items);
    }
    worker_do(&w, WORKER_BUSY_END, 0, 0, 0);
}

/* ---- a chain of short kernels, alone and while loads run ---- */

static double chain_us(struct busy_copy *c, double *median_us)
{
    uint64_t median;

    worker_begin(&w, WORKER_CHAIN, 0, 0, 600);
    while (!worker_ended(&w)) {
        if (c)
            busy_copy_cb(c);
        else
            usleep(1000);
    }
    memcpy(&median, w.reply.handle, sizeof(median));
    *median_us = (double)median / 1e3;
    return (double)w.reply.value / 1e3;
}

static void chains(void)
{
    static const uint64_t chunks[] = {4096, 32768, 524288};
    double median, p99 = chain_us(NULL, &median);

    printf("RATE  a chain of kernels alone: median %.0f us, p99 %.0f us\n", median, p99);
    for (unsigned i = 0; i < 3; i++) {
        uint32_t layers = chunks[i] <= 65536 ? 32 : 4, blocks;
        struct device_region *r = speed_region(chunks[i], layers, &blocks);
        struct ucm_copy_item *items = items_new(blocks, layers * chunks[i]);
        struct busy_copy c = {r, items, blocks, DEVICE_LOAD, 0, 0};
        double m, p;

        if (!r)
            continue;
        p = chain_us(&c, &m);
        printf("RATE  while loads of %3d KiB run at %.1f GB/s: median %.0f us (%.2f), p99 %.0f us "
               "(%.2f)\n",
               (int)(chunks[i] >> 10), (double)c.bytes / (double)c.ns, m, m / median, p, p / p99);
        region_shut(&t, r);
        free(items);
    }
}

/* Loads of 16 MiB, each submitted when the one before is done. */
static void one_after_another(double to_gpu, double from_gpu)
{
    uint32_t blocks;
    struct device_region *r = speed_region(65536, 32, &blocks);
    struct ucm_copy_item *items = items_new(blocks, 32 * 65536);
    double load, dump;

    if (!r)
        return;
    load = copy_rate(r, items, 8, 16 * MIB, DEVICE_LOAD, NULL);
    dump = copy_rate(r, items, 8, 16 * MIB, DEVICE_DUMP, NULL);
    printf("RATE  16 MiB of 64 KiB chunks, one after another: load %.1f GB/s (%.2f), dump %.1f "
           "(%.2f)\n",
           load / 1e9, load / to_gpu, dump / 1e9, dump / from_gpu);
    region_shut(&t, r);
    free(items);
}

/* How long a load of 1 MiB takes, alone and behind 256 MiB of less urgent work. */
static void urgent(void)
{
    static const char *const names[] = {"alone", "behind 256 MiB of dumps",
                                        "behind 256 MiB of loads"};
    uint32_t blocks;
    struct device_region *r = speed_region(32768, 32, &blocks);
    struct ucm_copy_item *items = items_new(blocks, 32 * 32768);
    double worst[3] = {0};

    for (unsigned round = 0; r && round < 3 * 20; round++) {
        struct test_job large, small_job;
        unsigned kind = round % 3;
        uint64_t begin;
        double us;

        if (kind > 0) {
            job_init(&large, kind == 1 ? DEVICE_DUMP : DEVICE_LOAD, r, items, blocks - 1);
            job_submit(&t, &large);
            loop_for(&t, 1);
        }
        job_init(&small_job, DEVICE_LOAD, r, items + blocks - 1, 1);
        small_job.job.priority = 1;
        begin = uv_hrtime();
        job_submit(&t, &small_job);
        (void)job_wait(&t, &small_job);
        us = (double)(small_job.done_ns - begin) / 1e3;
        if (us > worst[kind])
            worst[kind] = us;
        if (kind > 0)
            (void)job_wait(&t, &large);
    }
    for (unsigned i = 0; i < 3; i++)
        printf("RATE  an urgent load of 1 MiB in 32 KiB chunks, %s: at worst %.0f us\n", names[i],
               worst[i]);
    CHECK(worst[1] < 2000 && worst[2] < 2000, "less urgent work holds up a load for under 2 ms");
    if (r)
        region_shut(&t, r);
    free(items);
}

static void print_stats(void)
{
    struct device_stats stats;

    t.gpu->ops->stats(t.gpu, &stats);
    printf("RATE  by the engines %.1f GB in %llu launches, by kernels %.1f GB in %llu\n",
           (double)stats.bytes[COPY_DMA] / 1e9, (unsigned long long)stats.launches[COPY_DMA],
           (double)stats.bytes[COPY_SM] / 1e9, (unsigned long long)stats.launches[COPY_SM]);
}

int main(int argc, char **argv)
{
    static const uint64_t chunks[] = {4096, 16384, 65536, 524288, 2097152};
    double to_gpu, from_gpu;

    harness_main(argc, argv);
    device_start(&t, SLOTS);
    worker_start(&w);
    CHECK(worker_do(&w, WORKER_ALLOC_IPC, MEMORY, 0, 0), "worker allocates");
    memcpy(ipc, w.reply.handle, 64);
    worker_do(&w, WORKER_DMA, TOTAL, 0, 0);
    to_gpu = (double)w.reply.value;
    worker_do(&w, WORKER_DMA, TOTAL, 1, 0);
    from_gpu = (double)w.reply.value;
    printf("RATE  one DMA of 256 MiB: to the GPU %.1f GB/s, from it %.1f GB/s\n", to_gpu / 1e9,
           from_gpu / 1e9);
    for (unsigned i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        uint32_t layers = chunks[i] <= 65536 ? 32 : 4, blocks;
        struct device_region *r = speed_region(chunks[i], layers, &blocks);
        struct ucm_copy_item *items = items_new(blocks, layers * chunks[i]);
        double load, dump;

        if (!r)
            continue;
        load = copy_rate(r, items, blocks, TOTAL, DEVICE_LOAD, NULL);
        dump = copy_rate(r, items, blocks, TOTAL, DEVICE_DUMP, NULL);
        printf(
            "RATE  256 MiB in chunks of %4d KiB: load %.1f GB/s (%.2f of DMA), dump %.1f (%.2f), "
            "both at once %.1f\n",
            (int)(chunks[i] >> 10), load / 1e9, load / to_gpu, dump / 1e9, dump / from_gpu,
            both_rate(r, items, blocks) / 1e9);
        if (chunks[i] == 65536) /* idle */
            CHECK(load > 0.85 * to_gpu && dump > 0.85 * from_gpu, "64 KiB chunks reach the bus");
        region_shut(&t, r);
        free(items);
    }
    small();
    one_after_another(to_gpu, from_gpu);
    urgent();
    chains();
    print_stats();
    busy_rates(to_gpu, from_gpu);
    print_stats();
    worker_kill(&w);
    device_stop(&t);
    return tally();
}
