/* share: the shared tier against its root. The daemons are started here; the root, an NFS server's
 * export or a folder, is the caller's. */
#include "client/bench/share.h"

#include "client/bench/plain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STORED_MS 120000
#define POLL_MS 2

/* ---- daemons ---- */

int share_daemon_open(struct share_bench *b, const char *target, uint64_t arena_bytes,
                      const char *const *more, struct rig_options *o, struct rig *rig)
{
    struct tier_bench *t = &b->tier;
    char arena[64], root[SHARE_TARGET_BYTES + 16], depth[64], threads[64];
    const char *sets[DAEMON_MAX_SETS + 1] = {
        arena, root, depth, threads, "log.level=warn", "share.deadline=1min"};
    unsigned n = 6;

    snprintf(arena, sizeof(arena), "arena.size=%llu", (unsigned long long)arena_bytes);
    snprintf(root, sizeof(root), "share.roots=%s", target);
    snprintf(depth, sizeof(depth), "share.depth=%u", t->depth);
    snprintf(threads, sizeof(threads), "share.threads=%u", t->depth);
    for (; more && *more && n < DAEMON_MAX_SETS; more++)
        sets[n++] = *more;
    return tier_daemon_begin(t, sets, o, rig);
}

int share_daemon_close(struct share_bench *b, struct rig *rig)
{
    return tier_daemon_close(&b->tier, rig);
}

int share_store(struct rig *rig, const struct rig_move *move, uint64_t *ns)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * 1000000};
    struct rig_moved moved;
    uint64_t before = 0, now = 0, start = clock_ns();
    int rc = rig_metric(rig, "share_writes", &before);

    if (rc == 0)
        rc = rig_move(rig, RIG_DUMP, move, NULL, &moved);
    if (rc == 0 && moved.ok < move->n)
        return bench_fail(BENCH_FAILED, "%u of %u blocks were stored", moved.ok, move->n);
    while (rc == 0 && now < before + move->n) {
        if (clock_ns() - start > STORED_MS * UINT64_C(1000000))
            return bench_fail(BENCH_FAILED, "%llu of %u blocks are on the root after %d s",
                              (unsigned long long)(now - before), move->n, STORED_MS / 1000);
        nanosleep(&pause, NULL);
        rc = rig_metric(rig, "share_writes", &now);
    }
    *ns = clock_ns() - start;
    return rc < 0 ? bench_rig_fail(rig, rc) : 0;
}

/* ---- links ---- */

/* The number behind `name` in the target's options, or 0. */
static unsigned option(const char *target, const char *name)
{
    const char *at = strchr(target, '?');

    at = at ? strstr(at, name) : NULL;
    return at ? (unsigned)strtoul(at + strlen(name), NULL, 10) : 0;
}

int share_links_open(const char *target, struct share_links *out)
{
    unsigned nfs = option(target, "nfsport="), mount = option(target, "mountport=");
    const char *host = target + strlen("nfs://"), *path;
    char name[128];
    int rc;

    if (!plain_is_nfs(target) || nfs == 0 || mount == 0)
        return -ENOTSUP;
    path = strchr(host, '/');
    if (!path || (size_t)(path - host) >= sizeof(name))
        return -EINVAL;
    memcpy(name, host, (size_t)(path - host));
    name[path - host] = '\0';
    *out = (struct share_links){.nfs = NULL};
    rc = link_open(name, nfs, &out->nfs);
    if (rc == 0)
        rc = link_open(name, mount, &out->mount);
    if (rc < 0) {
        share_links_close(out);
        return rc;
    }
    snprintf(out->target, sizeof(out->target),
             "nfs://127.0.0.1%.*s?version=3&nfsport=%u&mountport=%u", (int)strcspn(path, "?"), path,
             link_port(out->nfs), link_port(out->mount));
    return 0;
}

void share_links_close(struct share_links *l)
{
    link_close(l->nfs);
    link_close(l->mount);
}

/* ---- the command ---- */

static const struct {
    const char *name;
    int (*measure)(struct share_bench *b);
} things[] = {
    {"speed", share_bench_speed}, {"lookup", share_bench_lookup}, {"hung", share_bench_hung}};

static int measure(struct share_bench *b)
{
    const char *only = args_text(b->tier.args, "only");
    struct report *r = &b->tier.report;
    int rc = 0;

    report_text(r, "root", plain_is_nfs(b->target) ? "an NFS server" : "a folder");
    report_text(r, "baseline", plain_name(b->target, PLAIN_FILES));
    report_number(r, "depth", b->tier.depth);
    report_number(r, "total_bytes", (double)b->tier.total_bytes);
    report_number(r, "rounds", b->tier.rounds);
    for (unsigned i = 0; rc == 0 && i < sizeof(things) / sizeof(things[0]); i++)
        if (!only || strcmp(only, things[i].name) == 0)
            rc = things[i].measure(b);
    return rc;
}

int bench_share(const struct args *a)
{
    struct share_bench b = {.target = args_text(a, "root"),
                            .tier = {.args = a,
                                     .daemon = {.path = args_text(a, "ucmd")},
                                     .total_bytes = args_number(a, "total"),
                                     .rounds = (unsigned)args_number(a, "rounds"),
                                     .depth = (unsigned)args_number(a, "depth"),
                                     .seconds = (double)args_number(a, "slice") / 1e3}};
    struct tier_bench *t = &b.tier;
    int rc;

    if (!b.target)
        return program_usage_error(a, "--root is missing: a folder, or nfs://SERVER/EXPORT");
    if (!plain_is_nfs(b.target) && !disk_has_fio())
        return bench_fail(BENCH_FAILED, "fio can't be run, and is the measure of a folder");
    if (access(t->daemon.path, X_OK) != 0)
        return bench_fail(BENCH_FAILED, "cannot run %s: %s; name the daemon with --ucmd",
                          t->daemon.path, strerror(errno));
    snprintf(t->folder, sizeof(t->folder), "/tmp/ucm-bench-XXXXXX");
    if (!mkdtemp(t->folder))
        return bench_fail(BENCH_FAILED, "%s: %s", t->folder, strerror(errno));
    t->daemon.dir = t->folder;
    progress_begin(&t->progress, args_given(a, "quiet"));
    report_begin(&t->report, "share", args_given(a, "json"));
    rc = measure(&b);
    progress_end(&t->progress);
    tier_folder_empty(t);
    rmdir(t->folder);
    return report_end(&t->report) < 0 ? BENCH_FAILED : rc;
}
