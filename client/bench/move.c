/* load, dump, prefetch: GB/s of moving blocks, against memcpy of the same chunks or raw reads of
 * the same blocks. Every loaded byte is checked, outside the measured time. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"

#include <stdlib.h>
#include <string.h>

#define DAEMON_DEPTH 128 /* nvme.depth */

struct move {
    const struct args *args;
    const char *name;
    enum rig_op op;
    bool from_nvme;
    struct rig rig;
    struct rig_move plan;
    uint8_t *keys, *result;
    uint64_t run, bytes; /* of a round */
    uint64_t differing, unmoved;
    uint64_t nvme_reads;  /* parts that the daemon read meanwhile */
    struct copy copy;     /* baseline of what stays in memory */
    struct reader reader; /* baseline of what comes from NVMe */
    bool reading;
    struct samples own, base, ratio; /* GB/s */
    struct progress progress;
};

/* ---- steps of a round ---- */

static void fill_all(struct move *m, uint32_t round)
{
    bench_keys(m->run, round, m->plan.n, m->keys);
    for (uint32_t b = 0; b < m->plan.n; b++)
        rig_fill(&m->rig, b, m->keys + (size_t)b * RIG_KEY_BYTES);
}

static int dump_all(struct move *m, uint32_t round, double *seconds)
{
    struct rig_moved moved;
    uint64_t t;
    int rc;

    fill_all(m, round);
    t = clock_ns();
    rc = rig_move(&m->rig, RIG_DUMP, &m->plan, NULL, &moved);
    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    *seconds = (double)(clock_ns() - t) / 1e9;
    m->unmoved += m->plan.n - moved.ok;
    if (moved.no_room > 0)
        return bench_fail(BENCH_FAILED,
                          "%u of %u blocks found no room in the daemon's arena: use a "
                          "smaller --total or a larger arena.size",
                          moved.no_room, m->plan.n);
    return 0;
}

/* Loads or prefetches everything; loaded bytes are checked afterwards. */
static int fetch_all(struct move *m, double *seconds)
{
    struct rig_moved moved;
    uint64_t t;
    int rc;

    rig_poison(&m->rig);
    t = clock_ns();
    rc = rig_move(&m->rig, m->op, &m->plan, m->result, &moved);
    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    *seconds = (double)(clock_ns() - t) / 1e9;
    m->unmoved += m->plan.n - moved.ok;
    for (uint32_t b = 0; m->op == RIG_LOAD && b < m->plan.n; b++)
        if (m->result[b] == UCM_BLOCK_IS_OK)
            m->differing += rig_differ(&m->rig, b, m->keys + (size_t)b * RIG_KEY_BYTES) > 0;
    return 0;
}

static int evict(struct move *m, int dram_only)
{
    int rc = rig_evict(&m->rig, dram_only);

    return rc < 0 ? bench_rig_fail(&m->rig, rc) : 0;
}

/* Stores one set and waits until NVMe has it. */
static int store_on_nvme(struct move *m)
{
    uint64_t before = 0;
    double seconds;
    int rc = rig_metric(&m->rig, "nvme_bytes_capacity", &before);

    if (rc == 0 && before == 0)
        return bench_fail(BENCH_FAILED, "the daemon has no NVMe tier: its nvme.paths is empty");
    if (rc == 0)
        rc = rig_written(&m->rig, &before);
    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    rc = dump_all(m, 0, &seconds);
    if (rc != 0)
        return rc;
    rc = rig_wait_written(&m->rig, before + m->plan.n);
    return rc < 0 ? bench_rig_fail(&m->rig, rc) : 0;
}

static int add(struct move *m, double seconds, double base)
{
    double own = (double)m->bytes / seconds / 1e9;

    if (samples_add(&m->own, own) < 0 || samples_add(&m->base, base / 1e9) < 0 ||
        (base > 0 && samples_add(&m->ratio, own / (base / 1e9)) < 0))
        return bench_fail(BENCH_FAILED, "memory ran out");
    return 0;
}

static int read_baseline(struct move *m, double *rate)
{
    if (m->reading && reader_run(&m->reader, rate) < 0)
        return bench_fail(BENCH_FAILED, "%s", m->reader.why);
    return 0;
}

/* Rounds take turns in who reads first: disks have bursts and caches of their own. */
static int round_nvme(struct move *m, uint32_t round)
{
    double base = 0, seconds = 0;
    int rc = round % 2 == 0 ? read_baseline(m, &base) : 0;

    if (rc == 0)
        rc = evict(m, 1);
    if (rc == 0)
        rc = fetch_all(m, &seconds);
    if (rc == 0 && round % 2 == 1)
        rc = read_baseline(m, &base);
    return rc != 0 ? rc : add(m, seconds, base);
}

/* Both find the region as it is just after it was written, so that caches favour neither. */
static int round_memory(struct move *m, uint32_t round)
{
    bool load = m->op == RIG_LOAD;
    double base, seconds = 0;
    int rc;

    if (load)
        rig_poison(&m->rig);
    else
        fill_all(m, round + 1);
    base = copy_run(&m->copy, load);
    if (load)
        rc = fetch_all(m, &seconds);
    else
        rc = dump_all(m, round + 1, &seconds);
    if (rc == 0 && !load)
        rc = evict(m, 0);
    return rc != 0 ? rc : add(m, seconds, base);
}

/* ---- the command ---- */

static void report(struct move *m)
{
    struct report r;
    bool base = !m->from_nvme || m->reading;
    struct figure f = {.name = m->name,
                       .unit = "GB/s",
                       .value = samples_at(&m->own, 0.5),
                       .baseline_name = !base          ? NULL
                                        : m->from_nvme ? "io_uring O_DIRECT reads"
                                                       : "memcpy",
                       .baseline = samples_at(&m->base, 0.5),
                       .ratio = samples_at(&m->ratio, 0.5),
                       .more_is_better = true};

    report_begin(&r, m->args->command, args_given(m->args, "json"));
    report_number(&r, "block_bytes", (double)m->rig.block_bytes);
    report_number(&r, "chunk_bytes", m->rig.chunk);
    report_number(&r, "total_bytes", (double)m->bytes);
    report_number(&r, "in_flight", m->plan.in_flight);
    report_number(&r, "unmoved", (double)m->unmoved);
    if (m->from_nvme)
        report_number(&r, "nvme_reads", (double)m->nvme_reads);
    if (m->op == RIG_LOAD)
        report_number(&r, "differing", (double)m->differing);
    report_figure(&r, &f);
    (void)report_end(&r);
}

/* Measured rounds. What is called a read from NVMe must have been one. */
static int measure_rounds(struct move *m)
{
    uint32_t rounds = (uint32_t)args_number(m->args, "rounds");
    uint64_t before = 0;
    int rc = rig_metric(&m->rig, "nvme_reads", &before);

    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    for (uint32_t i = 0; rc == 0 && i < rounds; i++) {
        rc = m->from_nvme ? round_nvme(m, i) : round_memory(m, i);
        if (progress_due(&m->progress))
            progress_show(&m->progress, "round %u of %u", i + 1, rounds);
    }
    progress_end(&m->progress);
    if (rc != 0)
        return rc;
    rc = rig_metric(&m->rig, "nvme_reads", &m->nvme_reads);
    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    m->nvme_reads -= before;
    if (m->from_nvme && m->nvme_reads + m->unmoved < (uint64_t)rounds * m->plan.n)
        return bench_fail(BENCH_FAILED, "the daemon read %llu parts from NVMe; %llu were asked for",
                          (unsigned long long)m->nvme_reads,
                          (unsigned long long)rounds * m->plan.n);
    return 0;
}

static int measure(struct move *m)
{
    double seconds;
    int rc = 0;

    if (m->from_nvme)
        rc = store_on_nvme(m);
    else if (m->op == RIG_LOAD)
        rc = dump_all(m, 0, &seconds);
    if (rc == 0)
        rc = measure_rounds(m);
    if (rc == 0)
        report(m);
    if (rig_evict(&m->rig, 0) < 0 && rc == 0)
        rc = bench_rig_fail(&m->rig, -UCM_EBUSY);
    if (rc == 0 && m->differing > 0)
        rc = bench_fail(BENCH_DIFFERING, "%llu loaded blocks differ from what was stored",
                        (unsigned long long)m->differing);
    return rc;
}

/* As many reads at once as the daemon is asked for blocks at once, up to its own default. */
static uint32_t reader_depth(const struct move *m)
{
    uint64_t depth = args_number(m->args, "depth");

    if (depth == 0)
        depth = (uint64_t)m->plan.batch * m->plan.in_flight;
    return depth < DAEMON_DEPTH || args_given(m->args, "depth") ? (uint32_t)depth : DAEMON_DEPTH;
}

static int open_baseline(struct move *m)
{
    const char *folder = m->from_nvme ? args_text(m->args, "file-dir") : NULL;

    if (!m->from_nvme)
        return copy_init(&m->copy, m->rig.memory, m->plan.n, m->rig.planes, m->rig.chunk,
                         (unsigned)args_number(m->args, "threads")) < 0
                   ? bench_fail(BENCH_FAILED, "memory ran out")
                   : 0;
    if (folder == NULL) {
        bench_fail(
            0, "no baseline: name a folder of the same file system as nvme.paths with --file-dir");
        return 0;
    }
    if (reader_open(&m->reader, folder, m->rig.block_bytes, m->plan.n, reader_depth(m)) < 0)
        return bench_fail(BENCH_FAILED, "%s: %s", folder, m->reader.why);
    m->reading = true;
    return 0;
}

static int run(struct move *m)
{
    int rc;

    m->keys = malloc((size_t)m->plan.n * RIG_KEY_BYTES);
    m->result = malloc(m->plan.n);
    if (m->keys == NULL || m->result == NULL)
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    else
        rc = open_baseline(m);
    m->plan.keys = m->keys;
    if (rc == 0) {
        rc = measure(m);
        if (!m->from_nvme)
            copy_close(&m->copy);
        else if (m->reading)
            reader_close(&m->reader);
    }
    free(m->keys);
    free(m->result);
    return rc;
}

static int move_command(const struct args *a, const char *name, enum rig_op op, bool from_nvme)
{
    struct move m = {.args = a, .name = name, .op = op, .from_nvme = from_nvme};
    struct rig_options o;
    uint64_t blocks;
    int rc;

    bench_rig_options(a, &o);
    blocks = args_number(a, "total") / o.block_bytes;
    if (blocks == 0 || blocks > UINT32_MAX)
        return program_usage_error(a, "--total must hold one block at least and 2^32 at most");
    o.model = "ucm-bench move";
    o.blocks = (uint32_t)blocks;
    m.run = bench_run_id();
    m.bytes = blocks * o.block_bytes;
    m.plan.n = o.blocks;
    m.plan.batch = (uint32_t)args_number(a, "batch");
    m.plan.in_flight = (uint32_t)args_number(a, "in-flight");
    progress_begin(&m.progress, args_given(a, "quiet"));
    rc = rig_open(&m.rig, &o);
    if (rc < 0)
        return bench_rig_fail(&m.rig, rc);
    rc = rig_wait_arena(&m.rig);
    rc = rc < 0 ? bench_rig_fail(&m.rig, rc) : run(&m);
    rig_close(&m.rig);
    samples_free(&m.own);
    samples_free(&m.base);
    samples_free(&m.ratio);
    return rc;
}

int bench_load(const struct args *a)
{
    bool nvme = strcmp(args_text(a, "tier"), "nvme") == 0;

    return move_command(a, nvme ? "load from NVMe" : "load from DRAM", RIG_LOAD, nvme);
}

int bench_dump(const struct args *a)
{
    return move_command(a, "dump", RIG_DUMP, false);
}

int bench_prefetch(const struct args *a)
{
    return move_command(a, "prefetch from NVMe", RIG_PREFETCH, true);
}
