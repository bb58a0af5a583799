/* echo: the baselines alone; needs no daemon. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int measure_echo(struct report *r, size_t request, size_t response, unsigned calls,
                        const char *p50, const char *p99)
{
    struct samples us = {.n = 0};
    struct echo echo;
    int rc = echo_start(&echo, request, response);

    if (rc < 0)
        return rc;
    rc = echo_run(&echo, calls, &us);
    echo_stop(&echo);
    if (rc == 0) {
        report_figure(r,
                      &(struct figure){.name = p50, .unit = "us", .value = samples_at(&us, 0.5)});
        report_figure(r,
                      &(struct figure){.name = p99, .unit = "us", .value = samples_at(&us, 0.99)});
    }
    samples_free(&us);
    return rc;
}

static int measure_copy(struct report *r, const struct args *a, uint32_t blocks, uint32_t planes,
                        uint32_t chunk)
{
    size_t bytes = (size_t)blocks * planes * chunk;
    struct samples in = {.n = 0}, out = {.n = 0};
    struct copy copy;
    uint8_t *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int rc;

    if (region == MAP_FAILED)
        return -1;
    memset(region, 1, bytes);
    rc = copy_init(&copy, region, blocks, planes, chunk, (unsigned)args_number(a, "threads"));
    for (uint64_t i = 0; rc == 0 && i < args_number(a, "rounds"); i++) {
        rc = samples_add(&in, copy_run(&copy, true) / 1e9);
        if (rc == 0)
            rc = samples_add(&out, copy_run(&copy, false) / 1e9);
    }
    if (rc == 0) {
        report_figure(r, &(struct figure){.name = "memcpy to chunks",
                                          .unit = "GB/s",
                                          .value = samples_at(&in, 0.5)});
        report_figure(r, &(struct figure){.name = "memcpy from chunks",
                                          .unit = "GB/s",
                                          .value = samples_at(&out, 0.5)});
        copy_close(&copy);
    }
    samples_free(&in);
    samples_free(&out);
    munmap(region, bytes);
    return rc;
}

static int measure_reads(struct report *r, const struct args *a, uint64_t block_bytes,
                         uint32_t blocks)
{
    struct samples rate = {.n = 0};
    struct reader reader;
    double v;
    int rc = reader_open(&reader, args_text(a, "file-dir"), block_bytes, blocks,
                         (uint32_t)args_number(a, "depth"));

    if (rc < 0)
        return bench_fail(BENCH_FAILED, "%s", reader.why);
    for (uint64_t i = 0; rc == 0 && i < args_number(a, "rounds"); i++) {
        rc = reader_run(&reader, &v);
        if (rc == 0)
            rc = samples_add(&rate, v / 1e9);
    }
    if (rc < 0)
        rc = bench_fail(BENCH_FAILED, "%s", reader.why);
    else
        report_figure(r, &(struct figure){.name = "io_uring O_DIRECT reads",
                                          .unit = "GB/s",
                                          .value = samples_at(&rate, 0.5)});
    samples_free(&rate);
    reader_close(&reader);
    return rc;
}

int bench_echo(const struct args *a)
{
    struct rig_options o;
    struct report r;
    unsigned calls = (unsigned)args_number(a, "calls");
    uint32_t blocks;
    int rc;

    bench_rig_options(a, &o);
    blocks = (uint32_t)(args_number(a, "total") / o.block_bytes);
    if (o.block_bytes % o.chunk != 0 || blocks == 0)
        return program_usage_error(a,
                                   "--chunk must divide --block-bytes, and --total hold a block");
    report_begin(&r, "echo", args_given(a, "json"));
    rc = measure_echo(&r, 64, 32, calls, "echo 64 B p50", "echo 64 B p99");
    if (rc == 0)
        rc = measure_echo(&r, 262208, 48, calls / 10 + 1, "echo 256 KiB p50", "echo 256 KiB p99");
    if (rc == 0)
        rc = measure_copy(&r, a, blocks, (uint32_t)(o.block_bytes / o.chunk), (uint32_t)o.chunk);
    if (rc < 0)
        rc = bench_fail(BENCH_FAILED, "a baseline could not be measured: %s", strerror(-rc));
    else if (args_text(a, "file-dir") != NULL)
        rc = measure_reads(&r, a, o.block_bytes, blocks);
    return report_end(&r) < 0 ? BENCH_FAILED : rc;
}
