/* replay: a workload as an engine plays it. Each request looks its prefix up with a lease, loads
 * what is there, checks every byte, and dumps the rest. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"
#include "client/bench/workload.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LEASE_MS 30000
#define REGION_BLOCKS 256
#define BATCH 64
#define IN_FLIGHT 4
#define BASELINE_EVERY 64 /* requests between two looks at the machine's own figures */
#define BASELINE_CALLS 64

struct counts {
    uint64_t requests, blocks, looked_up, hit, hit_dram, loaded, differing, differing_bytes, failed;
    uint64_t dumped, existing, not_stored, load_bytes, dump_bytes;
};

struct replay {
    const struct args *args;
    struct rig rig;
    struct workload *workload;
    struct echo echo;
    struct copy copy;
    uint8_t *keys;      /* of the present request */
    uint8_t *lost_keys; /* promised by the lookup, but not loaded */
    uint8_t result[REGION_BLOCKS];
    struct counts count;
    double load_seconds, dump_seconds;
    struct samples lookup_us, echo_us, copy_in, copy_out;
    struct progress progress;
    uint64_t start_ns;
};

/* ---- one request ---- */

static int lookup(struct replay *r, uint32_t n, uint32_t *hits, uint32_t *lease)
{
    struct ucm_lookup lookup = {.keys = r->keys, .n_keys = n, .lease_ms = LEASE_MS};
    uint32_t in_dram = 0;
    uint64_t t = clock_ns();
    int rc;

    *lease = 0;
    rc = ucm_lookup_prefix(r->rig.ns, &lookup, r->rig.timeout_ms, hits, &in_dram, lease);
    if (rc < 0) {
        snprintf(r->rig.error, sizeof r->rig.error, "lookup: %s", ucm_errmsg());
        return rc;
    }
    r->count.looked_up += n;
    r->count.hit += *hits;
    r->count.hit_dram += in_dram;
    return samples_add(&r->lookup_us, (double)(clock_ns() - t) / 1e3) < 0 ? -UCM_ENOMEMORY : 0;
}

static void check_loaded(struct replay *r, const uint8_t *keys, uint32_t n, uint32_t *n_lost)
{
    for (uint32_t b = 0; b < n; b++) {
        const uint8_t *key = keys + (size_t)b * RIG_KEY_BYTES;
        size_t differ;

        if (r->result[b] != UCM_BLOCK_IS_OK) {
            r->count.failed++;
            memcpy(r->lost_keys + (size_t)(*n_lost)++ * RIG_KEY_BYTES, key, RIG_KEY_BYTES);
            continue;
        }
        r->count.loaded++;
        differ = rig_differ(&r->rig, b, key);
        r->count.differing += differ > 0;
        r->count.differing_bytes += differ;
    }
}

static int load(struct replay *r, uint32_t n, uint32_t lease, uint32_t *n_lost)
{
    for (uint32_t at = 0; at < n; at += r->rig.blocks) {
        uint32_t left = n - at;
        struct rig_move move = {.keys = r->keys + (size_t)at * RIG_KEY_BYTES,
                                .n = left < r->rig.blocks ? left : r->rig.blocks,
                                .batch = BATCH,
                                .in_flight = IN_FLIGHT,
                                .lease = left <= r->rig.blocks ? lease : 0};
        struct rig_moved moved;
        uint64_t t = clock_ns();
        int rc;

        rc = rig_move(&r->rig, RIG_LOAD, &move, r->result, &moved);
        if (rc < 0)
            return rc;
        r->load_seconds += (double)(clock_ns() - t) / 1e9;
        r->count.load_bytes += (uint64_t)moved.ok * r->rig.block_bytes;
        check_loaded(r, move.keys, move.n, n_lost);
    }
    return 0;
}

static int dump(struct replay *r, const uint8_t *keys, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += r->rig.blocks) {
        struct rig_move move = {.keys = keys + (size_t)at * RIG_KEY_BYTES,
                                .n = n - at < r->rig.blocks ? n - at : r->rig.blocks,
                                .batch = BATCH,
                                .in_flight = IN_FLIGHT};
        struct rig_moved moved;
        uint64_t t;
        int rc;

        for (uint32_t b = 0; b < move.n; b++)
            rig_fill(&r->rig, b, move.keys + (size_t)b * RIG_KEY_BYTES);
        t = clock_ns();
        rc = rig_move(&r->rig, RIG_DUMP, &move, NULL, &moved);
        if (rc < 0)
            return rc;
        r->dump_seconds += (double)(clock_ns() - t) / 1e9;
        r->count.dump_bytes += (uint64_t)moved.ok * r->rig.block_bytes;
        r->count.dumped += moved.ok;
        r->count.existing += moved.exists;
        r->count.not_stored += move.n - moved.ok - moved.exists;
    }
    return 0;
}

static int play(struct replay *r, const struct workload_request *q)
{
    uint32_t n = q->n_ids < r->rig.server.max_keys ? q->n_ids : r->rig.server.max_keys;
    uint32_t hits = 0, lease = 0, n_lost = 0;
    int rc;

    r->count.blocks += n;
    if (n == 0)
        return 0;
    workload_keys(q->ids, n, r->keys);
    rc = lookup(r, n, &hits, &lease);
    if (rc == 0 && hits > 0)
        rc = load(r, hits, lease, &n_lost);
    if (rc == 0)
        rc = dump(r, r->lost_keys, n_lost);
    if (rc == 0)
        rc = dump(r, r->keys + (size_t)hits * RIG_KEY_BYTES, n - hits);
    return rc;
}

/* ---- all of them ---- */

static int baselines(struct replay *r)
{
    double in = copy_run(&r->copy, true), out = copy_run(&r->copy, false);

    if (echo_run(&r->echo, BASELINE_CALLS, &r->echo_us) < 0 || samples_add(&r->copy_in, in) < 0 ||
        samples_add(&r->copy_out, out) < 0)
        return program_fail(BENCH_FAILED, "the baselines could not be measured");
    return 0;
}

/* With --speed: waits until the request's time has come. */
static void pace(const struct replay *r, uint64_t timestamp_ms)
{
    uint64_t percent = args_number(r->args, "speed"), due_ns, now = clock_ns() - r->start_ns;
    struct timespec pause;

    if (percent == 0)
        return;
    due_ns = timestamp_ms * 100000000 / percent;
    if (due_ns <= now)
        return;
    pause.tv_sec = (time_t)((due_ns - now) / 1000000000);
    pause.tv_nsec = (long)((due_ns - now) % 1000000000);
    nanosleep(&pause, NULL);
}

static void show(struct replay *r)
{
    double seconds = (double)(clock_ns() - r->start_ns) / 1e9;

    progress_show(
        &r->progress,
        "%.0f s: %llu requests, %.1f %% of %llu blocks hit, %.2f GB loaded, %.2f GB dumped, "
        "%llu differing",
        seconds, (unsigned long long)r->count.requests,
        r->count.looked_up > 0 ? 100.0 * (double)r->count.hit / (double)r->count.looked_up : 0,
        (unsigned long long)r->count.looked_up, (double)r->count.load_bytes / 1e9,
        (double)r->count.dump_bytes / 1e9, (unsigned long long)r->count.differing);
}

static int play_all(struct replay *r)
{
    uint64_t limit = args_number(r->args, "limit");
    int rc = 0;

    while (rc == 0 && (limit == 0 || r->count.requests < limit)) {
        struct workload_request q;
        struct workload_error e;
        int got = workload_next(r->workload, &q, &e);

        if (got < 0)
            return program_fail(BENCH_FAILED, "%s", e.text);
        if (got == 0)
            break;
        if (r->count.requests % BASELINE_EVERY == 0)
            rc = baselines(r);
        pace(r, q.timestamp_ms);
        if (rc == 0) {
            int status = play(r, &q);

            r->count.requests++;
            rc = status < 0 ? bench_rig_fail(&r->rig, status) : 0;
        }
        if (progress_due(&r->progress))
            show(r);
    }
    progress_end(&r->progress);
    return rc;
}

static void report_rates(struct report *out, struct replay *r)
{
    double load = r->load_seconds > 0 ? (double)r->count.load_bytes / r->load_seconds / 1e9 : 0;
    double dumped = r->dump_seconds > 0 ? (double)r->count.dump_bytes / r->dump_seconds / 1e9 : 0;

    report_figure(out, &(struct figure){.name = "lookup p50",
                                        .unit = "us",
                                        .value = samples_at(&r->lookup_us, 0.5),
                                        .baseline_name = "echo",
                                        .baseline = samples_at(&r->echo_us, 0.5)});
    report_figure(out, &(struct figure){.name = "lookup p99",
                                        .unit = "us",
                                        .value = samples_at(&r->lookup_us, 0.99),
                                        .baseline_name = "echo",
                                        .baseline = samples_at(&r->echo_us, 0.99)});
    report_figure(out, &(struct figure){.name = "load",
                                        .unit = "GB/s",
                                        .value = load,
                                        .baseline_name = "memcpy",
                                        .baseline = samples_at(&r->copy_in, 0.5) / 1e9,
                                        .more_is_better = true});
    report_figure(out, &(struct figure){.name = "dump",
                                        .unit = "GB/s",
                                        .value = dumped,
                                        .baseline_name = "memcpy",
                                        .baseline = samples_at(&r->copy_out, 0.5) / 1e9,
                                        .more_is_better = true});
}

static int report(struct replay *r)
{
    const struct counts *c = &r->count;
    struct report out;
    char line[200];

    report_begin(&out, "replay", args_given(r->args, "json"));
    report_number(&out, "seconds", (double)(clock_ns() - r->start_ns) / 1e9);
    report_number(&out, "hit_dram", (double)c->hit_dram);
    report_number(&out, "failed", (double)c->failed);
    report_number(&out, "dumped", (double)c->dumped);
    report_number(&out, "existing", (double)c->existing);
    report_number(&out, "not_stored", (double)c->not_stored);
    report_number(&out, "load_bytes", (double)c->load_bytes);
    report_number(&out, "dump_bytes", (double)c->dump_bytes);
    report_rates(&out, r);
    if (!out.json) {
        snprintf(line, sizeof line,
                 "requests=%llu looked_up=%llu hit=%llu loaded=%llu differing=%llu",
                 (unsigned long long)c->requests, (unsigned long long)c->looked_up,
                 (unsigned long long)c->hit, (unsigned long long)c->loaded,
                 (unsigned long long)c->differing);
        puts(line);
        return report_end(&out);
    }
    report_number(&out, "requests", (double)c->requests);
    report_number(&out, "looked_up", (double)c->looked_up);
    report_number(&out, "hit", (double)c->hit);
    report_number(&out, "loaded", (double)c->loaded);
    report_number(&out, "differing", (double)c->differing);
    report_number(&out, "differing_bytes", (double)c->differing_bytes);
    return report_end(&out);
}

/* ---- the command ---- */

static int open_workload(struct replay *r)
{
    const char *trace = args_text(r->args, "trace");
    struct workload_shape shape = workload_default;
    struct workload_error e;
    int rc;

    shape.seed = args_number(r->args, "seed");
    rc = trace != NULL ? workload_trace(trace, &r->workload, &e)
                       : workload_generate(&shape, &r->workload, &e);
    return rc < 0 ? program_fail(BENCH_FAILED, "%s", e.text) : 0;
}

static int run(struct replay *r)
{
    int rc = -1;

    r->keys = malloc((size_t)WORKLOAD_MAX_BLOCKS * RIG_KEY_BYTES);
    r->lost_keys = malloc((size_t)WORKLOAD_MAX_BLOCKS * RIG_KEY_BYTES);
    if (r->keys == NULL || r->lost_keys == NULL) {
        rc = program_fail(BENCH_FAILED, "memory ran out");
    } else if (copy_init(&r->copy, r->rig.memory, r->rig.blocks, r->rig.planes, r->rig.fragment,
                         1) < 0) {
        rc = program_fail(BENCH_FAILED, "memory ran out");
    } else {
        r->start_ns = clock_ns();
        rc = play_all(r);
        copy_close(&r->copy);
        if (report(r) < 0 && rc == 0)
            rc = BENCH_FAILED;
    }
    free(r->keys);
    free(r->lost_keys);
    if (rc == 0 && r->count.differing > 0)
        rc = program_fail(BENCH_DIFFERING, "%llu loaded blocks differ from what was stored",
                          (unsigned long long)r->count.differing);
    return rc;
}

static void replay_free(struct replay *r)
{
    echo_stop(&r->echo);
    workload_free(r->workload);
    samples_free(&r->lookup_us);
    samples_free(&r->echo_us);
    samples_free(&r->copy_in);
    samples_free(&r->copy_out);
}

int bench_replay(const struct args *a)
{
    struct replay r = {.args = a};
    struct rig_options o;
    int rc;

    if (args_text(a, "trace") == NULL && args_number(a, "limit") == 0)
        return program_usage_error(a, "a generated workload has no end: give --limit");
    bench_rig_options(a, &o);
    o.model = args_text(a, "model");
    o.blocks = REGION_BLOCKS;
    progress_begin(&r.progress, args_given(a, "quiet"));
    rc = open_workload(&r);
    if (rc != 0)
        return rc;
    if (echo_start(&r.echo, 1024, 24) < 0) {
        workload_free(r.workload);
        return program_fail(BENCH_FAILED, "the echo could not be started");
    }
    rc = rig_open(&r.rig, &o);
    rc = rc < 0 ? bench_rig_fail(&r.rig, rc) : run(&r);
    rig_close(&r.rig);
    replay_free(&r);
    return rc;
}
