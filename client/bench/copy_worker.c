/* copy's worker: its daemon, its region, its streams, and how fast these are, idle and alongside
 * matrices. */
#include "client/bench/copy.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#define START_MS 30000
#define WARM_MS 100

void copy_strategy_set(struct copy_bench *b, const char *name)
{
    b->strategy = name;
    b->ring = strstr(name, COPY_WITH_RING) != NULL || strcmp(name, "staged") == 0;
}

int copy_daemon_start(struct copy_bench *b, const char *const *more)
{
    char how[64], where[128];
    const char *sets[DAEMON_MAX_SETS + 1] = {how, where, "arena.size=2GiB", "device.cuda=required"};
    unsigned n = 4;
    int rc;

    snprintf(how, sizeof how, "copy.strategy=%.*s", (int)strcspn(b->strategy, "+"), b->strategy);
    snprintf(where, sizeof where, "copy.calibration=%s", b->daemon.dir);
    for (; more && *more && n < DAEMON_MAX_SETS; more++)
        sets[n++] = *more;
    rc = daemon_start(&b->daemon, sets);
    if (rc < 0)
        return program_fail(BENCH_FAILED, "%s does not start: %s", b->daemon.path, strerror(-rc));
    if (daemon_wait(&b->daemon, START_MS) == 0)
        return 0;
    daemon_stop(&b->daemon);
    return program_fail(BENCH_NO_DAEMON,
                        "a daemon with %s does not answer; try %s with --set %s --set "
                        "device.cuda=required",
                        how, b->daemon.path, how);
}

int copy_daemon_stop(struct copy_bench *b, int rc)
{
    if (daemon_stop(&b->daemon) == 0)
        return rc;
    return program_fail(rc != 0 ? rc : BENCH_FAILED, "the daemon did not end in order");
}

int copy_rig_open(struct copy_bench *b, struct rig *rig, uint64_t fragment, int ordinal)
{
    uint32_t layers = fragment <= 64u << 10 ? 32 : 4;
    struct rig_options o = {.socket = b->daemon.socket,
                            .name = program_name(),
                            .model = "ucm-bench copy",
                            .parts = 1,
                            .block_bytes = layers * fragment,
                            .fragment = fragment,
                            .blocks = (uint32_t)(COPY_TOTAL / (layers * fragment)),
                            .timeout_ms = (int)args_number(b->args, "timeout"),
                            .gpu = ordinal + 1,
                            .copy_agent = b->ring,
                            .spread = COPY_SPREAD};
    int rc = rig_open(rig, &o);

    return rc < 0 ? bench_rig_fail(rig, rc) : 0;
}

struct stream copy_stream(struct copy_bench *b, struct rig *rig, bool load, unsigned part,
                          uint64_t request_bytes)
{
    struct stream s = {.rig = rig,
                       .load = load,
                       .run = b->run,
                       .first = part == 1 ? rig->blocks / 2 : 0,
                       .blocks = part < 2 ? rig->blocks / 2 : rig->blocks,
                       .in_flight = 4,
                       .warm_ms = WARM_MS,
                       .run_ms = b->run_ms};

    b->run += UINT64_C(0x9e3779b97f4a7c15);
    s.batch = (uint32_t)(request_bytes / rig->block_bytes);
    while (s.batch > 1 && s.batch * s.in_flight > s.blocks)
        s.batch /= 2;
    return s;
}

int copy_stream_run(struct copy_bench *b, struct stream *s, unsigned n, double *rate)
{
    int rc = 0;

    for (unsigned i = 0; i < n && rc == 0; i++)
        if (s[i].load && stream_store(&s[i]) < 0)
            rc = program_fail(BENCH_FAILED, "%s", s[i].error);
    if (rc == 0 && streams_run(s, n, b->error) < 0)
        rc = program_fail(BENCH_FAILED, "%s", b->error);
    *rate = streams_rate(s, n);
    return rc;
}

static double dma_of(const struct copy_bench *b, unsigned d)
{
    return d == 0 ? b->dma.to_gpu : b->dma.from_gpu;
}

int copy_measure(struct copy_bench *b, struct rig *rig, unsigned d, struct copy_rate *out)
{
    struct stream s = copy_stream(b, rig, d == 0, 2, COPY_REQUEST_BYTES);
    unsigned long before;
    uint64_t begin;
    int rc;

    if (s.load && stream_store(&s) < 0)
        return program_fail(BENCH_FAILED, "%s", s.error);
    before = gpu_busy_count(&b->work);
    begin = clock_ns();
    rc = streams_run(&s, 1, b->error);
    if (b->multiplied > 0)
        out->keeps = (double)(gpu_busy_count(&b->work) - before) /
                     ((double)(clock_ns() - begin) * 1e-9) / b->multiplied;
    if (rc < 0)
        return program_fail(BENCH_FAILED, "%s", b->error);
    out->rate = streams_rate(&s, 1);
    out->ratio = out->rate / dma_of(b, d);
    return 0;
}

int copy_measure_busy(struct copy_bench *b, struct rig *rig, struct copy_row *row)
{
    int rc = 0;

    if (gpu_busy_start(&b->work) < 0)
        return program_fail(BENCH_FAILED, "no thread");
    usleep(COPY_SETTLE_MS * 1000);
    for (unsigned d = 0; d < 2 && rc == 0; d++)
        rc = copy_measure(b, rig, d, &row->busy[d]);
    row->busy_keeps = fmin(row->busy[0].keeps, row->busy[1].keeps);
    if (gpu_busy_stop(&b->work) < 0)
        return program_fail(BENCH_FAILED, "%s", b->gpu.why);
    return rc;
}
