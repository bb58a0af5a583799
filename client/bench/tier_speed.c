/* Reads and writes against the disk's own, in short slices by turns: disks of virtual machines have
 * bursts, and others use them too. */
#include "client/bench/alone.h"
#include "client/bench/tier.h"

#include "daemon/format/checksum.h"

#include <stdlib.h>
#include <string.h>

#define READ_TARGET 0.95
#define WRITE_TARGET 0.90
/* Of one core for 2 GB/s: 10 %. */
#define CPU_TARGET_S_PER_GB 0.05
#define COLD_BYTES (512u << 20) /* more than the caches of a CPU */

static const uint64_t block_sizes[] = {512u << 10, 1u << 20, 4u << 20};

/* ---- the tier alone ---- */

/* One way: the tier against the disk, and against the plain loop where that is not the same. */
struct way {
    struct disk disk;
    struct pair disk_pair, loop_pair;
    struct samples cpu, loop_cpu, more_cpu; /* seconds a GB */
};

struct sides {
    struct tier_bench *bench;
    struct alone *alone;
    uint64_t block_bytes;
    struct way read, write; /* the tier's own file; one like it */
};

static int alone_slice(struct sides *s, bool write, unsigned first)
{
    struct way *w = write ? &s->write : &s->read;
    double own = 0, base = 0, loop = 0, cpu = 0;
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < 3; i++) {
        unsigned turn = (first + i) % 3;

        if (turn == 0 && s->bench->fio && disk_run(&w->disk, write, s->bench->seconds, &base) < 0)
            rc = bench_fail(BENCH_FAILED, "%s", w->disk.why);
        else if (turn == 1 && disk_loop(&w->disk, write, s->bench->seconds, &loop) < 0)
            rc = bench_fail(BENCH_FAILED, "%s", w->disk.why);
        else if (turn == 2 && alone_run(s->alone, write, s->bench->seconds, &own, &cpu) < 0)
            rc = bench_fail(BENCH_FAILED, "the tier's operations failed");
    }
    if (rc == 0)
        rc = pair_add(&w->disk_pair, own, s->bench->fio ? base : loop);
    if (rc == 0)
        rc = pair_add(&w->loop_pair, own, loop);
    if (rc == 0 &&
        (samples_add(&w->cpu, cpu) < 0 || samples_add(&w->loop_cpu, w->disk.cpu_s_per_gb) < 0 ||
         samples_add(&w->more_cpu, cpu - w->disk.cpu_s_per_gb) < 0))
        return bench_fail(BENCH_FAILED, "memory ran out");
    return rc;
}

/* What more CPU the tier takes than the loop for the same reads is its checksums and the ways
 * around them. */
static void cpu_report(struct sides *s, struct way *w, const char *what)
{
    char name[96];

    snprintf(name, sizeof(name), "CPU of %s, %llu KiB", what,
             (unsigned long long)s->block_bytes >> 10);
    report_figure(&s->bench->report, &(struct figure){.name = name,
                                                      .unit = "s/GB",
                                                      .value = samples_at(&w->cpu, 0.5),
                                                      .baseline_name = LOOP_NAME,
                                                      .baseline = samples_at(&w->loop_cpu, 0.5)});
    snprintf(name, sizeof(name), "  that is more");
    report_figure(&s->bench->report, &(struct figure){.name = name,
                                                      .unit = "s/GB",
                                                      .value = samples_at(&w->more_cpu, 0.5),
                                                      .target = CPU_TARGET_S_PER_GB,
                                                      .target_is_value = true});
}

static void alone_report(struct sides *s)
{
    struct tier_bench *b = s->bench;

    pair_report(b, &s->read.disk_pair, "tier alone, read", s->block_bytes, disk_name(b),
                READ_TARGET);
    if (b->fio)
        pair_report(b, &s->read.loop_pair, "  the same", s->block_bytes, LOOP_NAME, 0);
    pair_report(b, &s->write.disk_pair, "tier alone, write", s->block_bytes, disk_name(b),
                WRITE_TARGET);
    if (b->fio)
        pair_report(b, &s->write.loop_pair, "  the same", s->block_bytes, LOOP_NAME, 0);
    cpu_report(s, &s->read, "reads");
    cpu_report(s, &s->write, "writes");
}

static int alone_rounds(struct sides *s)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < s->bench->rounds; i++) {
        if (progress_due(&s->bench->progress))
            progress_show(&s->bench->progress, "tier alone, %llu KiB, round %u",
                          (unsigned long long)s->block_bytes >> 10, i + 1);
        rc = alone_slice(s, false, i);
        if (rc == 0)
            rc = alone_slice(s, true, i);
    }
    return rc;
}

static void way_free(struct way *w)
{
    pair_free(&w->disk_pair);
    pair_free(&w->loop_pair);
    samples_free(&w->cpu);
    samples_free(&w->loop_cpu);
    samples_free(&w->more_cpu);
}

static int alone_measure(struct tier_bench *b, uint64_t block_bytes)
{
    struct alone_options o = {.folder = b->folder,
                              .part_bytes = block_bytes,
                              .total_bytes = b->total_bytes,
                              .depth = b->depth,
                              .io = args_text(b->args, "io")};
    struct sides s = {.bench = b, .block_bytes = block_bytes};
    char why[256];
    int rc;

    if (alone_open(&o, &s.alone, why, sizeof(why)) < 0)
        return bench_fail(BENCH_FAILED, "%s", why);
    s.read.disk = s.write.disk = (struct disk){
        .bytes = b->total_bytes, .block_bytes = block_bytes, .depth = b->depth, .fio = b->fio};
    snprintf(s.read.disk.path, sizeof(s.read.disk.path), "%s",
             alone_file(s.alone, &s.read.disk.offset));
    rc = disk_make(&s.write.disk, b->folder, "baseline") < 0
             ? bench_fail(BENCH_FAILED, "%s", s.write.disk.why)
             : alone_rounds(&s);
    if (rc == 0)
        alone_report(&s);
    alone_close(s.alone);
    tier_folder_empty(b);
    way_free(&s.read);
    way_free(&s.write);
    return rc;
}

/* ---- through a daemon ---- */

struct through {
    struct tier_bench *bench;
    struct rig rig;
    struct disk disk;
    struct rig_move plan;
    uint8_t *keys;
    uint64_t run;
    uint32_t sets; /* of blocks, dumped so far */
    struct pair writes, loads, prefetches;
    struct pair cold_loads, cold_prefetches; /* against reads into as much memory, in order */
};

#define COLD_NAME LOOP_NAME " into as much memory, in order"
#define PASSES_MAX 64u

static double bytes_of(const struct through *t)
{
    return (double)t->plan.n * (double)t->rig.block_bytes;
}

static int disk_slice(struct through *t, bool write, double *rate)
{
    return disk_run(&t->disk, write, t->bench->seconds, rate) < 0
               ? bench_fail(BENCH_FAILED, "%s", t->disk.why)
               : 0;
}

/* What a loop reads that finds no place of its memory in a cache, as the daemon does. */
static int cold_slice(struct through *t, double *rate)
{
    struct disk cold = t->disk;

    cold.memory_bytes = cold.bytes;
    cold.in_order = true;
    return disk_loop(&cold, false, t->bench->seconds, rate) < 0
               ? bench_fail(BENCH_FAILED, "%s", cold.why)
               : 0;
}

/* From the first dump to the last block on NVMe; the set before is gone. */
static int write_set(struct through *t, uint64_t *ns)
{
    struct rig_moved moved;
    uint64_t before = 0, start;
    int rc = rig_evict(&t->rig, 0);

    if (rc == 0)
        rc = rig_written(&t->rig, &before);
    bench_keys(t->run, t->sets++, t->plan.n, t->keys);
    start = clock_ns();
    if (rc == 0)
        rc = rig_move(&t->rig, RIG_DUMP, &t->plan, NULL, &moved);
    if (rc == 0 && moved.ok < t->plan.n)
        return bench_fail(BENCH_FAILED, "%u of %u blocks were stored", moved.ok, t->plan.n);
    if (rc == 0)
        rc = rig_wait_written(&t->rig, before + t->plan.n);
    *ns = clock_ns() - start;
    return rc < 0 ? bench_rig_fail(&t->rig, rc) : 0;
}

static int read_set(struct through *t, enum rig_op op, uint64_t *ns)
{
    struct rig_moved moved;
    uint64_t start;
    int rc = rig_evict(&t->rig, 1);

    start = clock_ns();
    if (rc == 0)
        rc = rig_move(&t->rig, op, &t->plan, NULL, &moved);
    *ns = clock_ns() - start;
    if (rc == 0 && moved.ok < t->plan.n)
        return bench_fail(BENCH_FAILED, "%u of %u blocks were read", moved.ok, t->plan.n);
    return rc < 0 ? bench_rig_fail(&t->rig, rc) : 0;
}

/* Sets one after the other, until they have taken as long as the disk's slice. */
static int daemon_slice(struct through *t, enum rig_op op, double *rate)
{
    uint64_t all_ns = 0, ns = 0;
    unsigned n = 0;
    int rc = 0;

    for (; rc == 0 && n < PASSES_MAX && (double)all_ns < t->bench->seconds * 1e9; n++) {
        rc = op == RIG_DUMP ? write_set(t, &ns) : read_set(t, op, &ns);
        all_ns += ns;
    }
    *rate = n * bytes_of(t) * 1e9 / (double)all_ns;
    return rc;
}

static int through_round(struct through *t)
{
    double own = 0, base = 0, cold = 0;
    int rc = disk_slice(t, true, &base);

    if (rc == 0)
        rc = daemon_slice(t, RIG_DUMP, &own);
    if (rc == 0)
        rc = pair_add(&t->writes, own, base);
    if (rc == 0)
        rc = cold_slice(t, &cold);
    if (rc == 0)
        rc = daemon_slice(t, RIG_LOAD, &own);
    if (rc == 0)
        rc = disk_slice(t, false, &base);
    if (rc == 0)
        rc = pair_add(&t->loads, own, base);
    if (rc == 0)
        rc = pair_add(&t->cold_loads, own, cold);
    if (rc == 0)
        rc = daemon_slice(t, RIG_PREFETCH, &own);
    if (rc == 0)
        rc = pair_add(&t->prefetches, own, base);
    return rc == 0 ? pair_add(&t->cold_prefetches, own, cold) : rc;
}

static int through_rounds(struct through *t)
{
    struct tier_bench *b = t->bench;
    uint64_t ns;
    /* Twice unmeasured, until every place of the file has been written. */
    int rc = write_set(t, &ns);

    if (rc == 0)
        rc = write_set(t, &ns);
    for (unsigned i = 0; rc == 0 && i < b->rounds; i++) {
        if (progress_due(&b->progress))
            progress_show(&b->progress, "through a daemon, %llu KiB, round %u",
                          (unsigned long long)t->rig.block_bytes >> 10, i + 1);
        rc = through_round(t);
    }
    if (rc != 0)
        return rc;
    pair_report(b, &t->loads, "daemon, load", t->rig.block_bytes, disk_name(b), READ_TARGET);
    pair_report(b, &t->cold_loads, "  the same", t->rig.block_bytes, COLD_NAME, 0);
    pair_report(b, &t->prefetches, "daemon, prefetch", t->rig.block_bytes, disk_name(b),
                READ_TARGET);
    pair_report(b, &t->cold_prefetches, "  the same", t->rig.block_bytes, COLD_NAME, 0);
    pair_report(b, &t->writes, "daemon, write", t->rig.block_bytes, disk_name(b), WRITE_TARGET);
    return 0;
}

static int through_measure(struct tier_bench *b, uint64_t block_bytes)
{
    uint32_t n = (uint32_t)(b->total_bytes / block_bytes);
    struct rig_options o = {.name = program_name(),
                            .model = "ucm-bench tier",
                            .parts = 1,
                            .block_bytes = block_bytes,
                            .chunk = 64u << 10,
                            .blocks = n,
                            .timeout_ms = (int)args_number(b->args, "timeout")};
    struct through t = {.bench = b, .run = bench_run_id()};
    int rc = tier_daemon_open(b, b->total_bytes + (256u << 20),
                              b->total_bytes * 3 / 2 + (256u << 20), &o, &t.rig);

    if (rc != 0)
        return rc;
    t.keys = malloc((size_t)n * RIG_KEY_BYTES);
    t.plan = (struct rig_move){.keys = t.keys, .n = n, .batch = 32, .in_flight = 4};
    t.disk = (struct disk){
        .bytes = b->total_bytes, .block_bytes = block_bytes, .depth = b->depth, .fio = b->fio};
    memset(t.rig.memory, 1, t.rig.memory_bytes);
    if (!t.keys)
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    else if (disk_make(&t.disk, b->folder, "baseline") < 0)
        rc = bench_fail(BENCH_FAILED, "%s", t.disk.why);
    else
        rc = through_rounds(&t);
    if (tier_daemon_close(b, &t.rig) != 0)
        rc = BENCH_FAILED;
    free(t.keys);
    pair_free(&t.writes);
    pair_free(&t.loads);
    pair_free(&t.prefetches);
    pair_free(&t.cold_loads);
    pair_free(&t.cold_prefetches);
    return rc;
}

/* ---- the checksum by itself ---- */

static int checksum_measure(struct tier_bench *b)
{
    struct samples cost = {.n = 0}, pass = {.n = 0};
    char *memory = malloc(COLD_BYTES);
    uint64_t sum = 0;
    int rc = 0;

    if (!memory)
        return bench_fail(BENCH_FAILED, "memory ran out");
    memset(memory, 5, COLD_BYTES);
    for (unsigned i = 0; rc == 0 && i < b->rounds; i++) {
        double cpu = disk_cpu_s();

        for (size_t at = 0; at < COLD_BYTES; at += 1u << 20)
            sum ^= checksum_of(memory + at, 1u << 20);
        rc = samples_add(&cost, (disk_cpu_s() - cpu) * 1e9 / COLD_BYTES);
        cpu = disk_cpu_s();
        sum ^= memchr(memory, 6, COLD_BYTES) != NULL; /* looks at every byte in vain */
        if (rc == 0)
            rc = samples_add(&pass, (disk_cpu_s() - cpu) * 1e9 / COLD_BYTES);
    }
    free(memory);
    if (rc < 0 || sum == 1)
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    else
        report_figure(&b->report, &(struct figure){.name = "XXH3-64 of memory",
                                                   .unit = "s/GB",
                                                   .value = samples_at(&cost, 0.5),
                                                   .baseline_name = "memchr of it",
                                                   .baseline = samples_at(&pass, 0.5),
                                                   .target = CPU_TARGET_S_PER_GB,
                                                   .target_is_value = true});
    samples_free(&cost);
    samples_free(&pass);
    return rc;
}

#define N_SIZES (sizeof(block_sizes) / sizeof(block_sizes[0]))

int tier_alone(struct tier_bench *b)
{
    int rc = checksum_measure(b);

    for (unsigned i = 0; rc == 0 && i < N_SIZES; i++)
        rc = alone_measure(b, block_sizes[i]);
    return rc;
}

int tier_through(struct tier_bench *b)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < N_SIZES; i++)
        rc = through_measure(b, block_sizes[i]);
    return rc;
}
