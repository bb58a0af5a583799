/* copy's single cases, each against an aim. */
#include "client/bench/copy.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KIB (1u << 10)
#define MIB (1u << 20)

/* ---- one request after another ---- */

/* How many processors the daemon keeps busy meanwhile: it spins where it would wake too late. */
static int with_processors(struct copy_bench *b, struct stream *s, const char *name, double *rate)
{
    double cpu_s;
    uint64_t begin;
    int rc;

    if (s->load && stream_store(s) < 0)
        return program_fail(BENCH_FAILED, "%s", s->error);
    cpu_s = daemon_cpu_s(&b->daemon);
    begin = clock_ns();
    rc = streams_run(s, 1, b->error);
    if (rc < 0)
        return program_fail(BENCH_FAILED, "%s", b->error);
    *rate = streams_rate(s, 1);
    report_number(&b->report, name,
                  (daemon_cpu_s(&b->daemon) - cpu_s) / ((double)(clock_ns() - begin) * 1e-9));
    return 0;
}

static int sequential(struct copy_bench *b, struct rig *rig, bool load)
{
    struct stream s = copy_stream(b, rig, load, 2, 16 * MIB);
    double rate;
    int rc;

    s.in_flight = 1;
    rc = with_processors(b, &s, load ? "processors, loads in turn" : "processors, dumps in turn",
                         &rate);
    if (rc == 0)
        report_figure(
            &b->report,
            &(struct figure){.name = load ? "16 MiB loads in turn" : "16 MiB dumps in turn",
                             .unit = "GB/s",
                             .value = rate / 1e9,
                             .baseline_name = "one DMA",
                             .baseline = (load ? b->dma.to_gpu : b->dma.from_gpu) / 1e9,
                             .target = 0.80,
                             .more_is_better = true});
    return rc;
}

/* 16 MiB of 64 KiB fragments, each sent when the one before is done. */
int copy_one_after_another(struct copy_bench *b)
{
    struct rig rig;
    int rc = copy_rig_open(b, &rig, 64 * KIB, 0);

    if (rc != 0)
        return rc;
    rc = sequential(b, &rig, true);
    if (rc == 0)
        rc = sequential(b, &rig, false);
    if (rc == 0) {
        struct stream s = copy_stream(b, &rig, true, 2, 32 * MIB);
        double rate;

        rc = with_processors(b, &s, "processors, loads without a gap", &rate);
    }
    rig_close(&rig);
    return rc;
}

/* ---- latency ---- */

#define LATENCY_ROUNDS 1000

static int latency_samples(struct copy_bench *b, struct rig *rig, struct samples *us)
{
    struct stream s = copy_stream(b, rig, true, 2, MIB);
    uint8_t key[RIG_KEY_BYTES];
    struct ucm_transfer t = {.keys = key, .blocks = &(uint32_t){0}, .n_keys = 1};
    struct ucm_task *task;
    struct ucm_result r;
    int rc = 0;

    bench_keys(s.run, 0, 1, key);
    for (unsigned i = 0; i < LATENCY_ROUNDS + 20 && rc == 0; i++) {
        uint64_t begin = clock_ns();

        rc = (i == 0 ? ucm_dump : ucm_load)(rig->region, &t, rig->timeout_ms, &task);
        if (rc < 0)
            break;
        rc = ucm_task_wait(task, rig->timeout_ms, &r);
        if (rc == 0 && r.n_ok != 1)
            rc = -UCM_EDEVICE;
        ucm_task_free(task);
        if (i >= 20 && samples_add(us, (double)(clock_ns() - begin) / 1e3) < 0)
            rc = -UCM_ENOMEMORY;
    }
    return rc < 0 ? program_fail(BENCH_FAILED, "a load of 1 MiB: %s", ucm_errmsg()) : 0;
}

static void report_latency(struct copy_bench *b, struct samples *us, struct samples *kernel,
                           struct samples *echo)
{
    report_number(&b->report, "bare kernel, us", samples_at(kernel, 0.5));
    report_number(&b->report, "round trip, us", samples_at(echo, 0.5));
    report_number(&b->report, "1 MiB load's p99, us", samples_at(us, 0.99));
    report_figure(&b->report,
                  &(struct figure){.name = "1 MiB load, 32 KiB fragments",
                                   .unit = "us",
                                   .value = samples_at(us, 0.5),
                                   .baseline_name = "kernel and round trip",
                                   .baseline = samples_at(kernel, 0.5) + samples_at(echo, 0.5),
                                   .target = 1.5});
}

/* 1 MiB in 32 KiB fragments, from the request to its completion over the socket. */
int copy_latency(struct copy_bench *b)
{
    struct samples us = {.n = 0}, kernel = {.n = 0}, echo = {.n = 0};
    struct rig rig;
    int rc;

    if (!gpu_work_kernels(&b->work))
        return 0;
    if (gpu_kernel_measure(&b->work, 32 * KIB, 32, true, 300, &kernel) < 0)
        return program_fail(BENCH_FAILED, "%s", b->gpu.why);
    if (echo_run(&b->echo, 2000, &echo) < 0)
        return program_fail(BENCH_FAILED, "the echo failed");
    rc = copy_rig_open(b, &rig, 32 * KIB, 0);
    if (rc == 0) {
        rc = latency_samples(b, &rig, &us);
        rig_close(&rig);
    }
    if (rc == 0)
        report_latency(b, &us, &kernel, &echo);
    samples_free(&us);
    samples_free(&kernel);
    samples_free(&echo);
    return rc;
}

/* ---- two GPUs ---- */

static int side_by_side(struct copy_bench *b, struct rig rigs[2], bool load)
{
    struct stream s[2];
    double one[2], two;
    int rc = 0;

    for (unsigned i = 0; i < 2 && rc == 0; i++) {
        s[0] = copy_stream(b, &rigs[i], load, 2, 32 * MIB);
        rc = copy_stream_run(b, s, 1, &one[i]);
    }
    for (unsigned i = 0; i < 2; i++)
        s[i] = copy_stream(b, &rigs[i], load, 2, 32 * MIB);
    if (rc == 0)
        rc = copy_stream_run(b, s, 2, &two);
    if (rc == 0)
        report_figure(&b->report,
                      &(struct figure){.name = load ? "loads of two GPUs" : "dumps of two GPUs",
                                       .unit = "GB/s",
                                       .value = two / 1e9,
                                       .baseline_name = "one GPU",
                                       .baseline = (one[0] + one[1]) / 2e9,
                                       .target = 1.8,
                                       .more_is_better = true});
    return rc;
}

int copy_two_gpus(struct copy_bench *b)
{
    struct rig rigs[2];
    unsigned open = 0;
    int rc = 0;

    if (gpu_count() < 2) {
        report_text(&b->report, "two GPUs", "not measured: there is one");
        return 0;
    }
    for (; open < 2 && rc == 0; open += rc == 0)
        rc = copy_rig_open(b, &rigs[open], 512 * KIB, (int)open);
    if (rc == 0)
        rc = side_by_side(b, rigs, true);
    if (rc == 0)
        rc = side_by_side(b, rigs, false);
    while (open-- > 0)
        rig_close(&rigs[open]);
    return rc;
}

/* ---- from NVMe ---- */

#define NVME_FRAGMENT (64 * KIB)
#define NVME_ROUNDS 3
#define NVME_DEPTH 128

struct from_nvme {
    struct copy_bench *b;
    struct rig rig;
    struct disk disk;
    uint8_t *keys;
    struct rig_move move;
    struct samples rate, read;
};

static int nvme_store(struct from_nvme *f)
{
    struct rig_moved moved;
    uint64_t before;
    int rc = rig_written(&f->rig, &before);

    if (rc == 0)
        rc = rig_move(&f->rig, RIG_DUMP, &f->move, NULL, &moved);
    if (rc == 0)
        rc = rig_wait_written(&f->rig, before + f->move.n);
    return rc < 0 ? bench_rig_fail(&f->rig, rc) : 0;
}

static int nvme_round(struct from_nvme *f)
{
    struct rig_moved moved;
    uint64_t begin;
    double read;
    int rc = rig_evict(&f->rig, 1);

    if (rc < 0)
        return bench_rig_fail(&f->rig, rc);
    begin = clock_ns();
    rc = rig_move(&f->rig, RIG_LOAD, &f->move, NULL, &moved);
    if (rc < 0)
        return bench_rig_fail(&f->rig, rc);
    if (moved.ok != f->move.n)
        return program_fail(BENCH_FAILED, "%u of %u blocks came from NVMe", moved.ok, f->move.n);
    if (samples_add(&f->rate, (double)moved.bytes / ((double)(clock_ns() - begin) * 1e-9)) < 0)
        return program_fail(BENCH_FAILED, "memory ran out");
    if (disk_run(&f->disk, false, f->b->run_ms / 1e3, &read) < 0 || samples_add(&f->read, read) < 0)
        return program_fail(BENCH_FAILED, "%s", f->disk.why);
    return 0;
}

static int nvme_rounds(struct from_nvme *f, const char *directory)
{
    double disk, bus = f->b->dma.to_gpu;
    int rc;

    f->disk = (struct disk){
        .bytes = f->rig.memory_bytes, .block_bytes = f->rig.block_bytes, .depth = NVME_DEPTH};
    if (disk_make(&f->disk, directory, "baseline") < 0)
        return program_fail(BENCH_FAILED, "%s", f->disk.why);
    rc = nvme_store(f);
    for (unsigned i = 0; i < NVME_ROUNDS && rc == 0; i++)
        rc = nvme_round(f);
    disk = samples_at(&f->read, 0.5);
    if (rc == 0)
        report_figure(&f->b->report,
                      &(struct figure){.name = "loads from NVMe",
                                       .unit = "GB/s",
                                       .value = samples_at(&f->rate, 0.5) / 1e9,
                                       .baseline_name = disk < bus ? "raw reads" : "one DMA",
                                       .baseline = (disk < bus ? disk : bus) / 1e9,
                                       .target = 0.9,
                                       .more_is_better = true});
    return rc;
}

static int nvme_measure(struct copy_bench *b, const char *directory)
{
    struct from_nvme f = {.b = b};
    int rc = copy_rig_open(b, &f.rig, NVME_FRAGMENT, 0);

    if (rc != 0)
        return rc;
    f.keys = malloc((size_t)f.rig.blocks * RIG_KEY_BYTES);
    f.move = (struct rig_move){.keys = f.keys, .n = f.rig.blocks, .batch = 32, .in_flight = 4};
    if (f.keys) {
        bench_keys(b->run, 1, f.rig.blocks, f.keys);
        rc = nvme_rounds(&f, directory);
    } else {
        rc = program_fail(BENCH_FAILED, "memory ran out");
    }
    rig_close(&f.rig);
    free(f.keys);
    samples_free(&f.rate);
    samples_free(&f.read);
    return rc;
}

int copy_from_nvme(struct copy_bench *b, const char *directory)
{
    char dir[160], paths[192];
    int rc;

    snprintf(dir, sizeof dir, "%s/ucm-bench-XXXXXX", directory);
    if (!mkdtemp(dir))
        return program_fail(BENCH_FAILED, "no directory in %s", directory);
    snprintf(paths, sizeof paths, "nvme.paths=%s", dir);
    rc = copy_daemon_start(b, (const char *const[]){paths, "nvme.size=2GiB", NULL});
    if (rc == 0)
        rc = copy_daemon_stop(b, nvme_measure(b, dir));
    if (daemon_directory_remove(dir) < 0)
        program_fail(0, "%s is left behind", dir);
    return rc;
}
