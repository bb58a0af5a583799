/* How long one load of a small block that lies in DRAM takes, while the disk is busy with the
 * write-behind of the same daemon and while it is idle. */
#include "client/bench/tier.h"

#include <stdlib.h>
#include <string.h>

#define HIT_BYTES 4096u
#define HIT_BLOCKS 64u
#define HIT_CALLS 256u /* between two looks at how far the writes are */
#define IDLE_CALLS 8192u
#define REGION_BYTES (64u << 20)
#define FILL_BYTES_MAX (1u << 30)
#define P99_TARGET 2.0

static const uint64_t fill_sizes[] = {1u << 20, 64u << 10, 4u << 10};

struct hits {
    struct tier_bench *bench;
    struct rig hit, fill;
    uint8_t hit_keys[HIT_BLOCKS * RIG_KEY_BYTES];
    uint8_t *fill_keys;
    uint64_t run;
    uint32_t blocks, sets, turn;
    struct samples us;
    struct pair p50, p99;
    struct samples disk; /* bytes a second written meanwhile */
};

static int load_some(struct hits *h, unsigned calls)
{
    for (unsigned i = 0; i < calls; i++) {
        uint32_t n = h->turn++ % HIT_BLOCKS;
        struct rig_move move = {.keys = h->hit_keys + (size_t)n * RIG_KEY_BYTES,
                                .n = 1,
                                .first_block = n,
                                .batch = 1,
                                .in_flight = 1};
        struct rig_moved moved;
        uint64_t start = clock_ns();
        int rc = rig_move(&h->hit, RIG_LOAD, &move, NULL, &moved);

        if (rc < 0)
            return bench_rig_fail(&h->hit, rc);
        if (moved.ok != 1)
            return bench_fail(BENCH_FAILED, "a block that was stored is no hit");
        if (samples_add(&h->us, (double)(clock_ns() - start) / 1e3) < 0)
            return bench_fail(BENCH_FAILED, "memory ran out");
    }
    return 0;
}

/* Stores the fill, through a region that is smaller: what is in it does not matter. */
static int store_fill(struct hits *h, uint32_t *stored)
{
    uint32_t done = 0;
    int rc = 0;

    *stored = 0;
    bench_keys(h->run, h->sets++, h->blocks, h->fill_keys);
    while (rc == 0 && done < h->blocks) {
        uint32_t left = h->blocks - done;
        struct rig_move move = {.keys = h->fill_keys + (size_t)done * RIG_KEY_BYTES,
                                .n = left < h->fill.blocks ? left : h->fill.blocks,
                                .batch = 1024,
                                .in_flight = 4};
        struct rig_moved moved;

        rc = rig_move(&h->fill, RIG_DUMP, &move, NULL, &moved);
        done += move.n;
        *stored += moved.ok;
    }
    return rc;
}

/* Stores the fill and loads while it is being written. */
static int load_while_writing(struct hits *h)
{
    uint64_t before = 0, written = 0, target, start, first;
    uint32_t stored = 0;
    int rc = rig_written(&h->fill, &before);

    if (rc == 0)
        rc = store_fill(h, &stored);
    start = clock_ns();
    if (rc == 0)
        rc = rig_written(&h->fill, &written);
    if (rc < 0)
        return bench_rig_fail(&h->fill, rc);
    first = written;
    target = before + stored;
    while (rc == 0 && written < target) {
        rc = load_some(h, HIT_CALLS);
        if (rc == 0 && rig_written(&h->fill, &written) < 0)
            rc = bench_rig_fail(&h->fill, -UCM_EDISCONNECTED);
    }
    if (rc == 0 && samples_add(&h->disk, (double)(written - first) * (double)h->fill.block_bytes *
                                             1e9 / (double)(clock_ns() - start)) < 0)
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    return rc;
}

static int hits_round(struct hits *h)
{
    double idle50, idle99;
    int rc;

    samples_clear(&h->us);
    rc = load_some(h, IDLE_CALLS);
    idle50 = samples_at(&h->us, 0.5);
    idle99 = samples_at(&h->us, 0.99);
    samples_clear(&h->us);
    if (rc == 0)
        rc = load_while_writing(h);
    if (rc == 0)
        rc = pair_add(&h->p50, samples_at(&h->us, 0.5), idle50);
    if (rc == 0)
        rc = pair_add(&h->p99, samples_at(&h->us, 0.99), idle99);
    if (rc == 0 && rig_evict(&h->fill, 0) < 0)
        rc = bench_rig_fail(&h->fill, -UCM_EBUSY);
    return rc;
}

static void hits_report(struct hits *h)
{
    struct report *r = &h->bench->report;
    char name[96];

    for (int i = 0; i < 2; i++) {
        struct pair *p = i == 0 ? &h->p50 : &h->p99;

        snprintf(name, sizeof(name), "DRAM hit, %s, writing %llu KiB", i == 0 ? "median" : "p99",
                 (unsigned long long)h->fill.block_bytes >> 10);
        report_figure(r, &(struct figure){.name = name,
                                          .unit = "us",
                                          .value = samples_at(&p->own, 0.5),
                                          .baseline_name = "an idle disk",
                                          .baseline = samples_at(&p->base, 0.5),
                                          .ratio = samples_at(&p->ratio, 0.5),
                                          .target = i == 0 ? 0 : P99_TARGET});
    }
    report_figure(r, &(struct figure){.name = "  written meanwhile",
                                      .unit = "GB/s",
                                      .value = samples_at(&h->disk, 0.5) / 1e9});
}

static int hits_rounds(struct hits *h)
{
    struct tier_bench *b = h->bench;
    struct rig_move move = {
        .keys = h->hit_keys, .n = HIT_BLOCKS, .batch = HIT_BLOCKS, .in_flight = 1};
    struct rig_moved moved;
    uint64_t reads[2] = {0, 0};
    int rc;

    bench_keys(h->run, h->sets++, HIT_BLOCKS, h->hit_keys);
    rc = rig_move(&h->hit, RIG_DUMP, &move, NULL, &moved);
    if (rc == 0)
        rc = rig_metric(&h->hit, "nvme_reads", &reads[0]);
    if (rc < 0)
        return bench_rig_fail(&h->hit, rc);
    for (unsigned i = 0; rc == 0 && i < b->rounds; i++) {
        if (progress_due(&b->progress))
            progress_show(&b->progress, "hits, writing %llu KiB, round %u",
                          (unsigned long long)h->fill.block_bytes >> 10, i + 1);
        rc = hits_round(h);
    }
    if (rc == 0 && rig_metric(&h->hit, "nvme_reads", &reads[1]) == 0 && reads[1] != reads[0])
        rc = bench_fail(BENCH_FAILED, "%llu hits were read from NVMe",
                        (unsigned long long)(reads[1] - reads[0]));
    if (rc == 0)
        hits_report(h);
    return rc;
}

static int hits_measure(struct tier_bench *b, uint64_t fill_bytes)
{
    uint64_t bytes = b->total_bytes < FILL_BYTES_MAX ? b->total_bytes : FILL_BYTES_MAX;
    int timeout_ms = (int)args_number(b->args, "timeout");
    struct rig_options hit = {.name = program_name(),
                              .model = "ucm-bench hits",
                              .parts = 1,
                              .block_bytes = HIT_BYTES,
                              .chunk = HIT_BYTES,
                              .blocks = HIT_BLOCKS,
                              .timeout_ms = timeout_ms};
    struct rig_options fill = hit;
    struct hits h = {.bench = b, .run = bench_run_id()};
    int rc = tier_daemon_open(b, 2 * bytes, 3 * bytes + (512u << 20), &hit, &h.hit);

    if (rc != 0)
        return rc;
    fill.socket = b->daemon.socket;
    fill.model = "ucm-bench fill";
    fill.block_bytes = fill_bytes;
    fill.chunk = fill_bytes < 65536 ? fill_bytes : 65536;
    fill.blocks = (uint32_t)(REGION_BYTES / fill_bytes);
    rc = rig_open(&h.fill, &fill);
    if (rc < 0) {
        rc = bench_rig_fail(&h.fill, rc);
        goto err_after_daemon;
    }
    h.blocks = (uint32_t)(bytes / fill_bytes);
    h.fill_keys = malloc((size_t)h.blocks * RIG_KEY_BYTES);
    rc = h.fill_keys ? hits_rounds(&h) : bench_fail(BENCH_FAILED, "memory ran out");
    rig_close(&h.fill);
    free(h.fill_keys);
    samples_free(&h.us);
    samples_free(&h.disk);
    pair_free(&h.p50);
    pair_free(&h.p99);
err_after_daemon:
    return tier_daemon_close(b, &h.hit) != 0 ? BENCH_FAILED : rc;
}

int tier_hits(struct tier_bench *b)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < sizeof(fill_sizes) / sizeof(fill_sizes[0]); i++)
        rc = hits_measure(b, fill_sizes[i]);
    return rc;
}
