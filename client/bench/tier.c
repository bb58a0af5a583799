/* tier: the NVMe tier of a daemon against the disk below it, reads and writes, in short slices by turns: disks
 * of virtual machines have bursts, and others use them too. The daemon is started here, on an empty directory of the
 * disk. */
#include "client/bench/bench.h"
#include "client/bench/daemon.h"
#include "client/bench/disk.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ANSWER_MS 30000
#define READ_TARGET 0.95
#define WRITE_TARGET 0.90
#define PASSES_MAX 64u

static const uint64_t block_sizes[] = {512u << 10, 1u << 20, 4u << 20};

struct tier {
    const struct args *args;
    struct report report;
    struct progress progress;
    char directory[DISK_PATH_BYTES / 2]; /* ours, under --dir */
    struct daemon daemon;
    uint64_t total_bytes;
    unsigned rounds, depth;
    double seconds;
    /* For one size of blocks. */
    struct rig rig;
    struct disk disk;
    struct rig_move plan;
    uint8_t *keys;
    uint64_t run;
    uint32_t sets;                         /* of blocks, dumped so far */
    struct pair writes, loads, prefetches; /* GB/s, against the disk's */
};

static int add(struct pair *p, double own, double base)
{
    return pair_add(p, own / 1e9, base / 1e9) < 0 ? program_fail(BENCH_FAILED, "memory ran out")
                                                  : 0;
}

static void report(struct tier *t, struct pair *p, const char *what, double target)
{
    char name[96];

    snprintf(name, sizeof(name), "%s, %llu KiB", what,
             (unsigned long long)t->rig.block_bytes >> 10);
    report_pair(&t->report, p,
                (struct figure){.name = name,
                                .unit = "GB/s",
                                .baseline_name = "a plain io_uring loop",
                                .target = target,
                                .more_is_better = true});
}

/* ---- the daemon and its directory ---- */

static void directory_empty(struct tier *t)
{
    char path[DISK_PATH_BYTES + 256];
    DIR *d = opendir(t->directory);
    struct dirent *e;

    while (d && (e = readdir(d)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", t->directory, e->d_name);
        if (e->d_name[0] != '.')
            unlink(path);
    }
    if (d)
        closedir(d);
}

/* The daemon's files are gone afterwards. */
static int daemon_close(struct tier *t)
{
    int rc;

    rig_close(&t->rig);
    rc = daemon_stop(&t->daemon);
    directory_empty(t);
    return rc == 0 ? 0 : program_fail(BENCH_FAILED, "the daemon did not end well");
}

/* Starts a daemon on the empty directory, waits until it has its whole arena, and opens the rig on it. 0 or an exit
 * code, everything stopped. */
static int daemon_open(struct tier *t, struct rig_options *o)
{
    char arena[64], size[64], paths[DISK_PATH_BYTES], depth[64], backlog[64];
    const char *sets[] = {arena, size, paths, depth, backlog, "log.level=warn", NULL};
    unsigned long long arena_bytes = t->total_bytes + (256u << 20);
    int rc;

    snprintf(arena, sizeof(arena), "arena.size=%llu", arena_bytes);
    snprintf(size, sizeof(size), "nvme.size=%llu", arena_bytes + t->total_bytes / 2);
    snprintf(paths, sizeof(paths), "nvme.paths=%s", t->directory);
    snprintf(depth, sizeof(depth), "nvme.queue_depth=%u", t->depth);
    snprintf(backlog, sizeof(backlog), "nvme.write_queue_size=%llu", arena_bytes);
    rc = daemon_start(&t->daemon, sets);
    if (rc < 0)
        return program_fail(BENCH_FAILED, "the daemon could not be started: %s", strerror(-rc));
    if (daemon_wait(&t->daemon, ANSWER_MS) < 0) {
        (void)daemon_stop(&t->daemon);
        return program_fail(BENCH_FAILED, "the daemon does not answer: %s", ucm_errmsg());
    }
    o->socket = t->daemon.socket;
    rc = rig_open(&t->rig, o);
    if (rc == 0)
        return 0;
    rc = bench_rig_fail(&t->rig, rc);
    (void)daemon_close(t);
    return rc;
}

/* ---- slices ---- */

static int disk_slice(struct tier *t, bool write, double *rate)
{
    return disk_run(&t->disk, write, t->seconds, rate) < 0
               ? program_fail(BENCH_FAILED, "%s", t->disk.why)
               : 0;
}

/* From the first dump to the last block on NVMe; the set before is gone. */
static int write_set(struct tier *t, uint64_t *ns)
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
        return program_fail(BENCH_FAILED, "%u of %u blocks were stored", moved.ok, t->plan.n);
    if (rc == 0)
        rc = rig_wait_written(&t->rig, before + t->plan.n);
    *ns = clock_ns() - start;
    return rc < 0 ? bench_rig_fail(&t->rig, rc) : 0;
}

static int read_set(struct tier *t, enum rig_op op, uint64_t *ns)
{
    struct rig_moved moved;
    uint64_t start;
    int rc = rig_evict(&t->rig, 1);

    start = clock_ns();
    if (rc == 0)
        rc = rig_move(&t->rig, op, &t->plan, NULL, &moved);
    *ns = clock_ns() - start;
    if (rc == 0 && moved.ok < t->plan.n)
        return program_fail(BENCH_FAILED, "%u of %u blocks were read", moved.ok, t->plan.n);
    return rc < 0 ? bench_rig_fail(&t->rig, rc) : 0;
}

/* Sets one after the other, until they have taken as long as the disk's slice. */
static int daemon_slice(struct tier *t, enum rig_op op, double *rate)
{
    uint64_t all_ns = 0, ns = 0;
    unsigned n = 0;
    int rc = 0;

    for (; rc == 0 && n < PASSES_MAX && (double)all_ns < t->seconds * 1e9; n++) {
        rc = op == RIG_DUMP ? write_set(t, &ns) : read_set(t, op, &ns);
        all_ns += ns;
    }
    *rate = n * (double)t->plan.n * (double)t->rig.block_bytes * 1e9 / (double)all_ns;
    return rc;
}

static int measure_round(struct tier *t)
{
    double own = 0, base = 0;
    int rc = disk_slice(t, true, &base);

    if (rc == 0)
        rc = daemon_slice(t, RIG_DUMP, &own);
    if (rc == 0)
        rc = add(&t->writes, own, base);
    if (rc == 0)
        rc = daemon_slice(t, RIG_LOAD, &own);
    if (rc == 0)
        rc = disk_slice(t, false, &base);
    if (rc == 0)
        rc = add(&t->loads, own, base);
    if (rc == 0)
        rc = daemon_slice(t, RIG_PREFETCH, &own);
    return rc == 0 ? add(&t->prefetches, own, base) : rc;
}

static int measure_rounds(struct tier *t)
{
    uint64_t ns;
    /* Twice unmeasured, until every place of the file has been written. */
    int rc = write_set(t, &ns);

    if (rc == 0)
        rc = write_set(t, &ns);
    for (unsigned i = 0; rc == 0 && i < t->rounds; i++) {
        if (progress_due(&t->progress))
            progress_show(&t->progress, "%llu KiB, round %u",
                          (unsigned long long)t->rig.block_bytes >> 10, i + 1);
        rc = measure_round(t);
    }
    if (rc != 0)
        return rc;
    report(t, &t->loads, "load", READ_TARGET);
    report(t, &t->prefetches, "prefetch", READ_TARGET);
    report(t, &t->writes, "write", WRITE_TARGET);
    return 0;
}

static int measure_size(struct tier *t, uint64_t block_bytes)
{
    uint32_t n = (uint32_t)(t->total_bytes / block_bytes);
    struct rig_options o = {.name = program_name(),
                            .model = "ucm-bench tier",
                            .parts = 1,
                            .block_bytes = block_bytes,
                            .fragment = 64u << 10,
                            .blocks = n,
                            .timeout_ms = (int)args_number(t->args, "timeout")};
    int rc = daemon_open(t, &o);

    if (rc != 0)
        return rc;
    t->keys = malloc((size_t)n * RIG_KEY_BYTES);
    t->plan = (struct rig_move){.keys = t->keys, .n = n, .batch = 32, .in_flight = 4};
    t->disk = (struct disk){.bytes = t->total_bytes, .block_bytes = block_bytes, .depth = t->depth};
    memset(t->rig.memory, 1, t->rig.memory_bytes);
    if (!t->keys)
        rc = program_fail(BENCH_FAILED, "memory ran out");
    else if (disk_make(&t->disk, t->directory, "baseline") < 0)
        rc = program_fail(BENCH_FAILED, "%s", t->disk.why);
    else
        rc = measure_rounds(t);
    if (daemon_close(t) != 0)
        rc = BENCH_FAILED;
    free(t->keys);
    pair_free(&t->writes);
    pair_free(&t->loads);
    pair_free(&t->prefetches);
    return rc;
}

/* ---- the command ---- */

static int measure(struct tier *t)
{
    int rc = 0;

    report_text(&t->report, "baseline",
                "a plain io_uring loop, O_DIRECT, registered buffers and files");
    report_number(&t->report, "depth", t->depth);
    report_number(&t->report, "total_bytes", (double)t->total_bytes);
    report_number(&t->report, "rounds", t->rounds);
    for (unsigned i = 0; rc == 0 && i < sizeof(block_sizes) / sizeof(block_sizes[0]); i++)
        rc = measure_size(t, block_sizes[i]);
    return rc;
}

int bench_tier(const struct args *a)
{
    struct tier t = {.args = a,
                     .run = bench_run_id(),
                     .daemon = {.path = args_text(a, "ucmd")},
                     .total_bytes = args_number(a, "total"),
                     .rounds = (unsigned)args_number(a, "rounds"),
                     .depth = (unsigned)args_number(a, "depth"),
                     .seconds = (double)args_number(a, "slice") / 1e3};
    int rc;

    if (access(t.daemon.path, X_OK) != 0)
        return program_fail(BENCH_FAILED, "cannot run %s: %s; name the daemon with --ucmd",
                            t.daemon.path, strerror(errno));
    snprintf(t.directory, sizeof(t.directory), "%s/ucm-bench-XXXXXX", args_text(a, "dir"));
    if (!mkdtemp(t.directory))
        return program_fail(BENCH_FAILED, "%s: %s; name a directory on the disk with --dir",
                            t.directory, strerror(errno));
    t.daemon.dir = t.directory;
    progress_begin(&t.progress, args_given(a, "quiet"));
    report_begin(&t.report, "tier", args_given(a, "json"));
    rc = measure(&t);
    progress_end(&t.progress);
    directory_empty(&t);
    rmdir(t.directory);
    return report_end(&t.report) < 0 ? BENCH_FAILED : rc;
}
