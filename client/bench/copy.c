/* copy: loads and dumps of a GPU by each strategy and fragment size, idle and alongside a worker
 * that computes, as shares of one large DMA transfer of the same run. Starts daemons of its own;
 * this process plays the worker. */
#include "client/bench/copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHAIN_NS 600000000u
#define CHAIN_ROUNDS 3

static int measure_both(struct copy_bench *b, struct rig *rig, struct copy_row *row)
{
    struct stream s[2] = {copy_stream(b, rig, true, 0, COPY_REQUEST_BYTES),
                          copy_stream(b, rig, false, 1, COPY_REQUEST_BYTES)};
    int rc = copy_stream_run(b, s, 2, &row->both);

    row->both_ratio = row->both / b->dma.both;
    return rc;
}

/* ---- the chain ---- */

static int beside_nothing(struct copy_bench *b, struct stream *s)
{
    (void)b, (void)s;
    usleep(CHAIN_NS / 1000);
    return 0;
}

/* What the bus alone does to the chain, without a daemon: no strategy can do less at its speed. */
static int beside_dma(struct copy_bench *b, struct stream *s)
{
    (void)s;
    return gpu_dma_repeat(&b->work, COPY_TOTAL, CHAIN_NS) < 0
               ? program_fail(BENCH_FAILED, "%s", b->gpu.why)
               : 0;
}

static int beside_loads(struct copy_bench *b, struct stream *s)
{
    return streams_run(s, 1, b->error) < 0 ? program_fail(BENCH_FAILED, "%s", b->error) : 0;
}

/* Medians of some rounds' medians and p99s, in us: one hiccup of the host makes one round's p99. */
static int chain_rounds(struct copy_bench *b, int (*beside)(struct copy_bench *, struct stream *),
                        struct stream *s, double *p50, double *p99)
{
    struct samples medians = {.n = 0}, p99s = {.n = 0};
    int rc = 0;

    for (unsigned i = 0; i < CHAIN_ROUNDS && rc == 0; i++) {
        if (gpu_chain_start(&b->work) < 0) {
            rc = program_fail(BENCH_FAILED, "no thread");
            break;
        }
        rc = beside(b, s);
        if (gpu_chain_stop(&b->work) < 0)
            rc = program_fail(BENCH_FAILED, "%s", b->gpu.why);
        if (samples_add(&medians, samples_at(&b->work.chain_us, 0.5)) < 0 ||
            samples_add(&p99s, samples_at(&b->work.chain_us, 0.99)) < 0)
            rc = program_fail(BENCH_FAILED, "memory ran out");
    }
    *p50 = samples_at(&medians, 0.5);
    *p99 = samples_at(&p99s, 0.5);
    samples_free(&medians);
    samples_free(&p99s);
    return rc;
}

static int measure_chain(struct copy_bench *b, struct rig *rig, struct copy_row *row)
{
    struct stream s = copy_stream(b, rig, true, 2, COPY_REQUEST_BYTES);
    double p50, p99;
    int rc;

    if (stream_store(&s) < 0)
        return program_fail(BENCH_FAILED, "%s", s.error);
    s.warm_ms = COPY_SETTLE_MS;
    rc = chain_rounds(b, beside_loads, &s, &p50, &p99);
    row->chain_p50 = p50 / b->chain_p50;
    row->chain_p99 = p99 / b->chain_p99;
    return rc;
}

static int measure_chain_alone(struct copy_bench *b)
{
    double p50, p99;
    int rc = chain_rounds(b, beside_nothing, NULL, &b->chain_p50, &b->chain_p99);

    if (rc == 0)
        rc = chain_rounds(b, beside_dma, NULL, &p50, &p99);
    if (rc != 0)
        return rc;
    report_number(&b->report, "chain's median, us", b->chain_p50);
    report_number(&b->report, "chain's p99, us", b->chain_p99);
    report_number(&b->report, "chain's median alongside one DMA, to alone", p50 / b->chain_p50);
    report_number(&b->report, "chain's p99 alongside one DMA, to alone", p99 / b->chain_p99);
    return 0;
}

/* ---- all of one fragment ---- */

static int measure_fragment(struct copy_bench *b, struct copy_row *row)
{
    struct rig rig;
    int rc = copy_rig_open(b, &rig, row->fragment, 0);

    if (rc != 0)
        return rc;
    for (unsigned d = 0; d < 2 && rc == 0; d++)
        rc = copy_measure(b, &rig, d, &row->idle[d]);
    if (rc == 0)
        rc = measure_both(b, &rig, row);
    if (rc == 0 && gpu_work_kernels(&b->work)) {
        rc = measure_chain(b, &rig, row);
        if (rc == 0)
            rc = copy_measure_busy(b, &rig, row);
    }
    rig_close(&rig);
    return rc;
}

/* ---- the command ---- */

/* The worker by itself: its DMA, its matrices, its chain. */
static int measure_alone(struct copy_bench *b)
{
    unsigned long before;

    if (gpu_dma_measure(&b->work, COPY_TOTAL, &b->dma) < 0)
        return program_fail(BENCH_FAILED, "%s", b->gpu.why);
    report_number(&b->report, "one DMA to the GPU", b->dma.to_gpu);
    report_number(&b->report, "one DMA from the GPU", b->dma.from_gpu);
    report_number(&b->report, "DMA both ways", b->dma.both);
    if (!gpu_work_kernels(&b->work)) {
        report_text(&b->report, "alongside a worker",
                    "not measured: built without CUDA's compiler");
        return 0;
    }
    if (gpu_busy_start(&b->work) < 0)
        return program_fail(BENCH_FAILED, "no thread");
    usleep(COPY_SETTLE_MS * 1000);
    before = gpu_busy_count(&b->work);
    usleep(1000000);
    b->multiplied = (double)(gpu_busy_count(&b->work) - before);
    if (gpu_busy_stop(&b->work) < 0)
        return program_fail(BENCH_FAILED, "%s", b->gpu.why);
    report_number(&b->report, "multiplications a second", b->multiplied);
    return measure_chain_alone(b);
}

/* A list of sizes in bytes, "4KiB,64KiB"; only whole KiB and MiB. */
static unsigned fragments_parse(const char *text, struct copy_row *rows, unsigned max)
{
    unsigned n = 0;

    while (*text && n < max) {
        char *end;
        uint64_t v = strtoull(text, &end, 10);

        v <<= strncmp(end, "KiB", 3) == 0 ? 10 : strncmp(end, "MiB", 3) == 0 ? 20 : 0;
        if (end == text || v < 4096 || v > 4u << 20 || (v & (v - 1)) != 0)
            return 0;
        rows[n++] = (struct copy_row){.fragment = v};
        text = end + 3;
        text += *text == ',';
    }
    return *text ? 0 : n;
}

static int measure_strategy(struct copy_bench *b, const char *strategy)
{
    int rc;

    copy_strategy_set(b, strategy);
    rc = copy_daemon_start(b, NULL);
    if (rc != 0)
        return rc;
    b->n_rows = fragments_parse(args_text(b->args, "fragments"), b->rows, 16);
    for (unsigned i = 0; i < b->n_rows && rc == 0; i++) {
        rc = measure_fragment(b, &b->rows[i]);
        if (rc != 0)
            break;
        copy_report_row(b, &b->rows[i]);
    }
    if (!b->ring)
        memcpy(b->alone, b->rows, sizeof b->alone);
    return copy_daemon_stop(b, rc);
}

static int measure_strategies(struct copy_bench *b, char *names)
{
    int rc = 0;

    copy_report_head(b);
    for (char *at = names, *name; rc == 0 && (name = strsep(&at, ",")) != NULL;)
        rc = measure_strategy(b, name);
    return rc;
}

static int measure_cases(struct copy_bench *b)
{
    const char *directory = args_text(b->args, "nvme-dir");
    int rc;

    copy_report_aims(b);
    rc = copy_daemon_start(b, NULL);
    if (rc != 0)
        return rc;
    rc = copy_one_after_another(b);
    if (rc == 0)
        rc = copy_latency(b);
    if (rc == 0)
        rc = copy_two_gpus(b);
    rc = copy_daemon_stop(b, rc);
    return rc == 0 && directory ? copy_from_nvme(b, directory) : rc;
}

static int measure_all(struct copy_bench *b)
{
    const char *encodings = args_text(b->args, "encoding");
    char names[128];
    int rc;

    snprintf(names, sizeof names, "%s", encodings ? encodings : args_text(b->args, "strategies"));
    if (encodings) {
        copy_strategy_set(b, "auto" COPY_WITH_RING);
        return copy_encodings(b, names);
    }
    rc = measure_strategies(b, names);
    return rc == 0 ? measure_cases(b) : rc;
}

static int measure_on_gpu(struct copy_bench *b)
{
    int rc;

    if (gpu_open(&b->gpu, 0, COPY_GPU_BYTES) < 0)
        return program_fail(BENCH_FAILED, "no GPU: %s", b->gpu.why);
    if (gpu_work_open(&b->work, &b->gpu, COPY_GPU_BYTES) < 0) {
        rc = program_fail(BENCH_FAILED, "%s", b->gpu.why);
    } else {
        rc = measure_alone(b);
        if (rc == 0)
            rc = measure_all(b);
        gpu_work_close(&b->work);
    }
    gpu_close(&b->gpu);
    return rc;
}

static int measure_in_directory(struct copy_bench *b)
{
    char dir[] = "/tmp/ucm-bench-XXXXXX";
    int rc;

    b->daemon = (struct daemon){.path = args_text(b->args, "ucmd"), .dir = dir};
    if (access(b->daemon.path, X_OK) != 0)
        return program_fail(BENCH_FAILED, "cannot run %s: %s; name the daemon with --ucmd",
                            b->daemon.path, strerror(errno));
    if (!mkdtemp(dir))
        return program_fail(BENCH_FAILED, "no temporary directory: %s", strerror(errno));
    rc = measure_on_gpu(b);
    if (daemon_directory_remove(dir) < 0)
        program_fail(0, "%s is left behind", dir);
    return rc;
}

int bench_copy(const struct args *a)
{
    struct copy_bench b = {.args = a, .run = bench_run_id(), .run_ms = (int)args_number(a, "time")};
    int rc;

    if (fragments_parse(args_text(a, "fragments"), b.rows, 16) == 0)
        return program_fail(PROGRAM_EXIT_USAGE,
                            "--fragments: powers of two from 4KiB to 4MiB, at most 16 of them, as "
                            "\"4KiB,64KiB\"");
    /* Forks, which a process with a GPU open must not. */
    if (echo_start(&b.echo, 128, 32) < 0)
        return program_fail(BENCH_FAILED, "no echo");
    report_begin(&b.report, "copy", args_given(a, "json"));
    rc = measure_in_directory(&b);
    echo_stop(&b.echo);
    return report_end(&b.report) < 0 ? BENCH_FAILED : rc;
}
