/* start: from exec to the first answered request with a large arena, and what the daemon costs when
 * it has nothing to do. Starts daemons of its own; the baseline is the program's own `--version`.
 */
#include "client/bench/bench.h"
#include "client/bench/daemon.h"
#include "ucmclient.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_MS 10000
#define SETTLE_MS 2000

static int measure_version(const char *path, struct samples *ms)
{
    const char *argv[] = {path, "--version", NULL};
    uint64_t begin = clock_ns();
    int status;
    pid_t pid = daemon_spawn(argv);

    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
        return -ENOENT;
    return samples_add(ms, (double)(clock_ns() - begin) / 1e6);
}

static int measure_start(struct daemon *d, const char *arena, struct samples *ms)
{
    char set[64];
    uint64_t begin = clock_ns();
    int rc;

    snprintf(set, sizeof(set), "arena.size=%s", arena);
    rc = daemon_start(d, (const char *const[]){set, NULL});
    if (rc == 0)
        rc = daemon_wait(d, ANSWER_MS);
    if (rc == 0)
        rc = samples_add(ms, (double)(clock_ns() - begin) / 1e6);
    return daemon_stop(d) != 0 ? -EPROTO : rc;
}

/* A number behind a name in a file of /proc; 0 when it is not there. */
static uint64_t proc_number(const char *path, const char *name)
{
    char line[256];
    uint64_t value = 0;
    FILE *f = fopen(path, "re");

    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, name, strlen(name)) == 0)
            value = strtoull(line + strlen(name), NULL, 10);
    if (f)
        fclose(f);
    return value;
}

/* How often any thread of the process has been put aside to sleep. */
static uint64_t wake_ups(pid_t pid)
{
    char folder[64], path[384];
    struct dirent *e;
    uint64_t n = 0;
    DIR *d;

    snprintf(folder, sizeof(folder), "/proc/%d/task", (int)pid);
    d = opendir(folder);
    while (d && (e = readdir(d)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s/status", folder, e->d_name);
        if (e->d_name[0] != '.')
            n += proc_number(path, "voluntary_ctxt_switches:");
    }
    if (d)
        closedir(d);
    return n;
}

static int measure_idle(struct daemon *d, uint64_t idle_ms, struct report *r)
{
    char status[64];
    uint64_t before, woken, resident;
    int rc = daemon_start(d, (const char *const[]){"arena.size=64MiB", NULL});

    if (rc == 0)
        rc = daemon_wait(d, ANSWER_MS);
    if (rc != 0)
        return rc;
    usleep(SETTLE_MS * 1000);
    before = wake_ups(d->pid);
    usleep((useconds_t)idle_ms * 1000);
    woken = wake_ups(d->pid) - before;
    snprintf(status, sizeof(status), "/proc/%d/status", (int)d->pid);
    resident = proc_number(status, "VmRSS:") << 10;
    report_number(r, "idle wake-ups", (double)woken);
    report_figure(r, &(struct figure){.name = "resident beyond the arena",
                                      .unit = "MiB",
                                      .value = (double)resident / (1 << 20) - 64,
                                      .target = 32,
                                      .target_is_value = true});
    return daemon_stop(d);
}

static int measure_all(const struct args *a, struct daemon *d, struct report *r)
{
    struct samples start = {.n = 0}, version = {.n = 0};
    int rc = 0;

    for (uint64_t i = 0; rc == 0 && i < args_number(a, "rounds"); i++) {
        rc = measure_version(d->path, &version);
        if (rc == 0)
            rc = measure_start(d, args_text(a, "arena"), &start);
    }
    if (rc == 0) {
        report_text(r, "arena", args_text(a, "arena"));
        report_figure(r, &(struct figure){.name = "start to first answer",
                                          .unit = "ms",
                                          .value = samples_at(&start, 0.5),
                                          .baseline_name = "ucmd --version",
                                          .baseline = samples_at(&version, 0.5),
                                          .target = 100,
                                          .target_is_value = true});
        rc = measure_idle(d, args_number(a, "idle"), r);
    }
    samples_free(&start);
    samples_free(&version);
    return rc;
}

int bench_start(const struct args *a)
{
    char dir[] = "/tmp/ucm-bench-XXXXXX";
    struct daemon d = {.path = args_text(a, "ucmd"), .dir = dir};
    struct report r;
    int rc;

    if (access(d.path, X_OK) != 0)
        return bench_fail(BENCH_FAILED, "cannot run %s: %s; name the daemon with --ucmd", d.path,
                          strerror(errno));
    if (!mkdtemp(dir))
        return bench_fail(BENCH_FAILED, "no temporary folder: %s", strerror(errno));
    report_begin(&r, "start", args_given(a, "json"));
    rc = measure_all(a, &d, &r);
    if (rc < 0)
        rc = bench_fail(BENCH_FAILED, "the daemon could not be measured: %s", ucm_errmsg());
    rmdir(dir);
    return report_end(&r) < 0 ? BENCH_FAILED : rc;
}
