/* load, dump: GB/s of moving blocks, against memcpy of the same fragments. Every loaded byte is checked, outside the measured
 * time. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"

#include <stdlib.h>
#include <string.h>

struct move {
    const struct args *args;
    const char *name;
    enum rig_op op;
    struct rig rig;
    struct rig_move plan;
    uint8_t *keys, *result;
    uint64_t run, bytes; /* of a round */
    uint64_t differing, unmoved;
    struct copy copy; /* the baseline */
    struct pair rate; /* GB/s */
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
        return program_fail(BENCH_FAILED,
                            "%u of %u blocks found no room in the daemon's arena: use a "
                            "smaller --total or a larger arena.size",
                            moved.no_room, m->plan.n);
    return 0;
}

/* Loads everything; loaded bytes are checked afterwards. */
static int load_all(struct move *m, double *seconds)
{
    struct rig_moved moved;
    uint64_t t;
    int rc;

    rig_poison(&m->rig);
    t = clock_ns();
    rc = rig_move(&m->rig, RIG_LOAD, &m->plan, m->result, &moved);
    if (rc < 0)
        return bench_rig_fail(&m->rig, rc);
    *seconds = (double)(clock_ns() - t) / 1e9;
    m->unmoved += m->plan.n - moved.ok;
    for (uint32_t b = 0; b < m->plan.n; b++)
        if (m->result[b] == UCM_BLOCK_IS_OK)
            m->differing += rig_differ(&m->rig, b, m->keys + (size_t)b * RIG_KEY_BYTES) > 0;
    return 0;
}

static int add(struct move *m, double seconds, double base)
{
    return pair_add(&m->rate, (double)m->bytes / seconds / 1e9, base / 1e9) < 0
               ? program_fail(BENCH_FAILED, "memory ran out")
               : 0;
}

/* Both find the region as it is just after it was written, so that caches favour neither. */
static int measure_round(struct move *m, uint32_t round)
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
        rc = load_all(m, &seconds);
    else
        rc = dump_all(m, round + 1, &seconds);
    if (rc == 0 && !load)
        rc = rig_evict(&m->rig, 0) < 0 ? bench_rig_fail(&m->rig, -UCM_EBUSY) : 0;
    return rc != 0 ? rc : add(m, seconds, base);
}

/* ---- the command ---- */

static void report(struct move *m)
{
    struct report r;
    struct figure f = {
        .name = m->name, .unit = "GB/s", .baseline_name = "memcpy", .more_is_better = true};

    report_begin(&r, m->args->command, args_given(m->args, "json"));
    report_number(&r, "block_bytes", (double)m->rig.block_bytes);
    report_number(&r, "fragment_bytes", m->rig.fragment);
    report_number(&r, "total_bytes", (double)m->bytes);
    report_number(&r, "in_flight", m->plan.in_flight);
    report_number(&r, "unmoved", (double)m->unmoved);
    if (m->op == RIG_LOAD)
        report_number(&r, "differing", (double)m->differing);
    report_pair(&r, &m->rate, f);
    (void)report_end(&r);
}

static int measure_rounds(struct move *m)
{
    uint32_t rounds = (uint32_t)args_number(m->args, "rounds");
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < rounds; i++) {
        rc = measure_round(m, i);
        if (progress_due(&m->progress))
            progress_show(&m->progress, "round %u of %u", i + 1, rounds);
    }
    progress_end(&m->progress);
    return rc;
}

static int measure(struct move *m)
{
    double seconds;
    int rc = 0;

    if (m->op == RIG_LOAD)
        rc = dump_all(m, 0, &seconds);
    if (rc == 0)
        rc = measure_rounds(m);
    if (rc == 0)
        report(m);
    if (rig_evict(&m->rig, 0) < 0 && rc == 0)
        rc = bench_rig_fail(&m->rig, -UCM_EBUSY);
    if (rc == 0 && m->differing > 0)
        rc = program_fail(BENCH_DIFFERING, "%llu loaded blocks differ from what was stored",
                          (unsigned long long)m->differing);
    return rc;
}

static int run(struct move *m)
{
    int rc;

    m->keys = malloc((size_t)m->plan.n * RIG_KEY_BYTES);
    m->result = malloc(m->plan.n);
    if (m->keys == NULL || m->result == NULL)
        rc = program_fail(BENCH_FAILED, "memory ran out");
    else
        rc = copy_init(&m->copy, m->rig.memory, m->plan.n, m->rig.planes, m->rig.fragment,
                       (unsigned)args_number(m->args, "threads")) < 0
                 ? program_fail(BENCH_FAILED, "memory ran out")
                 : 0;
    m->plan.keys = m->keys;
    if (rc == 0) {
        rc = measure(m);
        copy_close(&m->copy);
    }
    free(m->keys);
    free(m->result);
    return rc;
}

static int move_command(const struct args *a, const char *name, enum rig_op op)
{
    struct move m = {.args = a, .name = name, .op = op};
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
    rc = rc < 0 ? bench_rig_fail(&m.rig, rc) : run(&m);
    rig_close(&m.rig);
    pair_free(&m.rate);
    return rc;
}

int bench_load(const struct args *a)
{
    return move_command(a, "load from DRAM", RIG_LOAD);
}

int bench_dump(const struct args *a)
{
    return move_command(a, "dump", RIG_DUMP);
}
