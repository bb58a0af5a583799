/* Stores and loads through a daemon against a plain client of the same root, by turns. */
#include "client/bench/plain.h"
#include "client/bench/share.h"

#include <stdlib.h>
#include <string.h>

#define TARGET 0.9
#define PASSES_MAX 64u

static const uint64_t block_sizes[] = {256u << 10, 1u << 20, 4u << 20};

struct speed {
    struct share_bench *bench;
    struct rig rig;
    struct plain plain;
    struct rig_move plan;
    uint8_t *keys;
    uint64_t run;
    uint32_t sets;
    struct pair stores, loads, prefetches;
    struct pair rewrites, rereads; /* of stores and prefetches, by what the root does to one file */
    struct pair cpu[2];            /* seconds a GB: of loads, of stores */
};

/* The set before is gone from everywhere, so that a root need not hold more than one. */
static int store_set(struct speed *s, uint64_t *ns)
{
    if (rig_evict(&s->rig, 0) < 0)
        return bench_rig_fail(&s->rig, -UCM_EBUSY);
    bench_keys(s->run, s->sets++, s->plan.n, s->keys);
    return share_store(&s->rig, &s->plan, ns);
}

static int read_set(struct speed *s, enum rig_op op, uint64_t *ns)
{
    struct rig_moved moved;
    uint64_t start;
    int rc = rig_evict(&s->rig, 1);

    start = clock_ns();
    if (rc == 0)
        rc = rig_move(&s->rig, op, &s->plan, NULL, &moved);
    *ns = clock_ns() - start;
    if (rc == 0 && moved.ok < s->plan.n)
        return bench_fail(BENCH_FAILED, "%u of %u blocks were read", moved.ok, s->plan.n);
    return rc < 0 ? bench_rig_fail(&s->rig, rc) : 0;
}

/* Of the daemon, its backend, and us: the client. */
static double cpu_s(const struct speed *s)
{
    return daemon_cpu_s(&s->bench->tier.daemon) + disk_cpu_s();
}

static int daemon_slice(struct speed *s, enum rig_op op, double *rate, double *cpu_s_per_gb)
{
    uint64_t all_ns = 0, ns = 0;
    double cpu = cpu_s(s), bytes;
    unsigned n = 0;
    int rc = 0;

    for (; rc == 0 && n < PASSES_MAX && (double)all_ns < s->bench->tier.seconds * 1e9; n++) {
        rc = op == RIG_DUMP ? store_set(s, &ns) : read_set(s, op, &ns);
        all_ns += ns;
    }
    bytes = n * (double)s->plan.n * (double)s->rig.block_bytes;
    *rate = bytes * 1e9 / (double)all_ns;
    *cpu_s_per_gb = (cpu_s(s) - cpu) * 1e9 / bytes;
    return rc;
}

static int plain_slice(struct speed *s, enum plain_shape shape, bool write, double *rate)
{
    return plain_rate(&s->plain, shape, write, s->bench->tier.seconds, rate) < 0
               ? bench_fail(BENCH_FAILED, "%s", s->plain.why)
               : 0;
}

/* Writes, or reads what was written, against both shapes of the baseline. */
static int speed_half(struct speed *s, enum rig_op op, struct pair *files, struct pair *one)
{
    bool write = op == RIG_DUMP;
    double own = 0, base = 0, cpu = 0;
    int rc = plain_slice(s, PLAIN_FILES, write, &base);

    if (rc == 0)
        rc = daemon_slice(s, op, &own, &cpu);
    if (rc == 0)
        rc = pair_add(files, own, base);
    if (rc == 0 && plain_is_nfs(s->bench->target))
        rc = pair_add(&s->cpu[write], cpu, s->plain.cpu_s_per_gb);
    if (rc == 0 && !write)
        rc = daemon_slice(s, RIG_PREFETCH, &own, &cpu);
    if (rc == 0 && !write)
        rc = pair_add(&s->prefetches, own, base);
    if (rc == 0)
        rc = plain_slice(s, PLAIN_ONE_FILE, write, &base);
    return rc == 0 ? pair_add(one, own, base) : rc;
}

static int speed_round(struct speed *s)
{
    int rc = speed_half(s, RIG_DUMP, &s->stores, &s->rewrites);

    return rc == 0 ? speed_half(s, RIG_LOAD, &s->loads, &s->rereads) : rc;
}

static void cpu_report(struct speed *s)
{
    static const char *const names[] = {"processor time of loads", "processor time of stores"};

    for (unsigned i = 0; i < 2 && s->cpu[i].own.n > 0; i++)
        report_figure(&s->bench->tier.report,
                      &(struct figure){.name = names[i],
                                       .unit = "s/GB",
                                       .value = samples_at(&s->cpu[i].own, 0.5),
                                       .baseline_name = plain_name(s->bench->target, PLAIN_FILES),
                                       .baseline = samples_at(&s->cpu[i].base, 0.5),
                                       .ratio = samples_at(&s->cpu[i].ratio, 0.5)});
}

static int speed_rounds(struct speed *s)
{
    struct tier_bench *b = &s->bench->tier;
    const char *files = plain_name(s->bench->target, PLAIN_FILES);
    const char *one = plain_name(s->bench->target, PLAIN_ONE_FILE);
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < b->rounds; i++) {
        if (progress_due(&b->progress))
            progress_show(&b->progress, "blocks of %llu KiB, round %u",
                          (unsigned long long)s->rig.block_bytes >> 10, i + 1);
        rc = speed_round(s);
    }
    if (rc == 0 && rig_evict(&s->rig, 0) < 0)
        rc = bench_rig_fail(&s->rig, -UCM_EBUSY);
    if (rc != 0)
        return rc;
    pair_report(b, &s->stores, "store", s->rig.block_bytes, files, TARGET);
    pair_report(b, &s->loads, "load", s->rig.block_bytes, files, TARGET);
    pair_report(b, &s->prefetches, "prefetch", s->rig.block_bytes, files, TARGET);
    pair_report(b, &s->rewrites, "store", s->rig.block_bytes, one, 0);
    pair_report(b, &s->rereads, "prefetch", s->rig.block_bytes, one, 0);
    cpu_report(s);
    return 0;
}

static int speed_measure(struct share_bench *b, uint64_t block_bytes)
{
    uint64_t total = b->tier.total_bytes;
    uint32_t n = (uint32_t)(total / block_bytes);
    struct rig_options o = {.name = program_name(),
                            .model = "ucm-bench share",
                            .parts = 1,
                            .block_bytes = block_bytes,
                            .chunk = 64u << 10,
                            .blocks = n,
                            .timeout_ms = (int)args_number(b->tier.args, "timeout")};
    struct speed s = {.bench = b, .run = bench_run_id()};
    int rc = share_daemon_open(b, b->target, total * 3 / 2 + (256u << 20), NULL, &o, &s.rig);

    if (rc != 0)
        return rc;
    s.keys = malloc((size_t)n * RIG_KEY_BYTES);
    s.plan = (struct rig_move){.keys = s.keys, .n = n, .batch = 32, .in_flight = 4};
    s.plain = (struct plain){.target = b->target,
                             .block_bytes = block_bytes,
                             .total_bytes = total,
                             .depth = b->tier.depth};
    memset(s.rig.memory, 1, s.rig.memory_bytes);
    rc = s.keys ? speed_rounds(&s) : bench_fail(BENCH_FAILED, "memory ran out");
    plain_remove(&s.plain);
    if (share_daemon_close(b, &s.rig) != 0)
        rc = BENCH_FAILED;
    free(s.keys);
    pair_free(&s.stores);
    pair_free(&s.loads);
    pair_free(&s.prefetches);
    pair_free(&s.rewrites);
    pair_free(&s.rereads);
    pair_free(&s.cpu[0]);
    pair_free(&s.cpu[1]);
    return rc;
}

int share_bench_speed(struct share_bench *b)
{
    uint64_t only = args_number(b->tier.args, "block");
    int rc = 0;

    if (only > 0)
        return speed_measure(b, only);
    for (unsigned i = 0; rc == 0 && i < sizeof(block_sizes) / sizeof(block_sizes[0]); i++)
        rc = speed_measure(b, block_sizes[i]);
    return rc;
}
