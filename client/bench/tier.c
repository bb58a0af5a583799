/* tier: the NVMe tier against the disk below it. Everything that is measured is started here, on an
 * empty folder of the disk. */
#include "client/bench/tier.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ANSWER_MS 30000

int pair_add(struct pair *p, double own, double base)
{
    if (samples_add(&p->own, own) < 0 || samples_add(&p->base, base) < 0 ||
        samples_add(&p->ratio, own / base) < 0)
        return bench_fail(BENCH_FAILED, "memory ran out");
    return 0;
}

void pair_free(struct pair *p)
{
    samples_free(&p->own);
    samples_free(&p->base);
    samples_free(&p->ratio);
}

const char *disk_name(const struct tier_bench *b)
{
    return b->fio ? "fio" : LOOP_NAME;
}

void pair_report(struct tier_bench *b, struct pair *p, const char *what, uint64_t block_bytes,
                 const char *against, double target)
{
    char name[96];

    snprintf(name, sizeof(name), "%s, %llu KiB", what, (unsigned long long)block_bytes >> 10);
    report_figure(&b->report, &(struct figure){.name = name,
                                               .unit = "GB/s",
                                               .value = samples_at(&p->own, 0.5) / 1e9,
                                               .baseline_name = against,
                                               .baseline = samples_at(&p->base, 0.5) / 1e9,
                                               .ratio = samples_at(&p->ratio, 0.5),
                                               .target = target,
                                               .more_is_better = true});
}

/* ---- the daemon and its folder ---- */

void tier_folder_empty(struct tier_bench *b)
{
    char path[DISK_PATH_BYTES + 256];
    DIR *d = opendir(b->folder);
    struct dirent *e;

    while (d && (e = readdir(d)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", b->folder, e->d_name);
        if (e->d_name[0] != '.')
            unlink(path);
    }
    if (d)
        closedir(d);
}

int tier_daemon_begin(struct tier_bench *b, const char *const *sets, struct rig_options *o,
                      struct rig *rig)
{
    int rc;

    rc = daemon_start(&b->daemon, sets);
    if (rc < 0)
        return bench_fail(BENCH_FAILED, "the daemon could not be started: %s", strerror(-rc));
    if (daemon_wait(&b->daemon, ANSWER_MS) < 0) {
        (void)daemon_stop(&b->daemon);
        return bench_fail(BENCH_FAILED, "the daemon does not answer: %s", ucm_errmsg());
    }
    o->socket = b->daemon.socket;
    rc = rig_open(rig, o);
    if (rc == 0)
        rc = rig_wait_arena(rig);
    if (rc == 0)
        return 0;
    rc = bench_rig_fail(rig, rc);
    (void)tier_daemon_close(b, rig);
    return rc;
}

int tier_daemon_open(struct tier_bench *b, uint64_t arena_bytes, uint64_t file_bytes,
                     struct rig_options *o, struct rig *rig)
{
    char arena[64], size[64], paths[DISK_PATH_BYTES], depth[64], backlog[64];
    const char *sets[] = {arena, size, paths, depth, backlog, "log.level=warn", NULL};

    snprintf(arena, sizeof(arena), "arena.size=%llu", (unsigned long long)arena_bytes);
    snprintf(size, sizeof(size), "nvme.size=%llu", (unsigned long long)file_bytes);
    snprintf(paths, sizeof(paths), "nvme.paths=%s", b->folder);
    snprintf(depth, sizeof(depth), "nvme.depth=%u", b->depth);
    snprintf(backlog, sizeof(backlog), "nvme.backlog=%llu", (unsigned long long)arena_bytes);
    return tier_daemon_begin(b, sets, o, rig);
}

int tier_daemon_close(struct tier_bench *b, struct rig *rig)
{
    int rc;

    rig_close(rig);
    rc = daemon_stop(&b->daemon);
    tier_folder_empty(b);
    return rc == 0 ? 0 : bench_fail(BENCH_FAILED, "the daemon did not end well");
}

/* ---- the command ---- */

static const struct {
    const char *name;
    int (*measure)(struct tier_bench *b);
} things[] = {{"alone", tier_alone},
              {"daemon", tier_through},
              {"hits", tier_hits},
              {"encrypted", tier_sealed}};

static int measure(struct tier_bench *b)
{
    const char *only = args_text(b->args, "only");
    int rc = 0;

    report_text(&b->report, "baseline",
                b->fio ? "fio, io_uring, O_DIRECT, registered buffers and files"
                       : "a plain io_uring loop, O_DIRECT, registered buffers and files (no fio)");
    report_number(&b->report, "depth", b->depth);
    report_number(&b->report, "total_bytes", (double)b->total_bytes);
    report_number(&b->report, "rounds", b->rounds);
    for (unsigned i = 0; rc == 0 && i < sizeof(things) / sizeof(things[0]); i++)
        if (!only || strcmp(only, things[i].name) == 0)
            rc = things[i].measure(b);
    return rc;
}

static int baseline_choose(struct tier_bench *b)
{
    const char *wanted = args_text(b->args, "baseline");

    b->fio = strcmp(wanted, "loop") != 0 && disk_has_fio();
    if (strcmp(wanted, "fio") == 0 && !b->fio)
        return bench_fail(BENCH_FAILED, "fio can't be run: install it, or use --baseline loop");
    return 0;
}

int bench_tier(const struct args *a)
{
    struct tier_bench b = {.args = a,
                           .daemon = {.path = args_text(a, "ucmd")},
                           .total_bytes = args_number(a, "total"),
                           .rounds = (unsigned)args_number(a, "rounds"),
                           .depth = (unsigned)args_number(a, "depth"),
                           .seconds = (double)args_number(a, "slice") / 1e3};
    int rc = baseline_choose(&b);

    if (rc != 0)
        return rc;
    if (access(b.daemon.path, X_OK) != 0)
        return bench_fail(BENCH_FAILED, "cannot run %s: %s; name the daemon with --ucmd",
                          b.daemon.path, strerror(errno));
    snprintf(b.folder, sizeof(b.folder), "%s/ucm-bench-XXXXXX", args_text(a, "dir"));
    if (!mkdtemp(b.folder))
        return bench_fail(BENCH_FAILED, "%s: %s; name a folder on the disk with --dir", b.folder,
                          strerror(errno));
    b.daemon.dir = b.folder;
    progress_begin(&b.progress, args_given(a, "quiet"));
    report_begin(&b.report, "tier", args_given(a, "json"));
    rc = measure(&b);
    progress_end(&b.progress);
    tier_folder_empty(&b);
    rmdir(b.folder);
    return report_end(&b.report) < 0 ? BENCH_FAILED : rc;
}
