#include "tests/bench/ucm_bench_plain.h"

#include "tests/bench/ucm_bench_disk.h"
#include "tests/bench/ucm_bench_figure.h"

#include <errno.h>
#include <fcntl.h>
#include <nfsc/libnfs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "ucm-bench-plain"
#define ROUND_TRIPS 200u
#define ANSWER_MS 10000

bool plain_is_nfs(const char *target)
{
    return strncmp(target, "nfs://", 6) == 0;
}

const char *plain_name(const char *target)
{
    return plain_is_nfs(target) ? "a plain libnfs client" : "fio";
}

static int plain_fail(struct plain *p, int code, const char *what, const char *detail)
{
    snprintf(p->why, sizeof(p->why), "%s: %s", what, detail ? detail : strerror(-code));
    return code;
}

/* ---- NFS ---- */

struct mount {
    struct plain *plain;
    struct nfs_context *nfs;
    struct nfsfh *file;
};

static int mount_open(struct plain *p, struct mount *m)
{
    struct nfs_url *url;
    int rc;

    *m = (struct mount){.plain = p, .nfs = nfs_init_context()};
    if (!m->nfs)
        return plain_fail(p, -ENOMEM, p->target, NULL);
    url = nfs_parse_url_dir(m->nfs, p->target);
    if (!url) {
        rc = plain_fail(p, -EINVAL, p->target, nfs_get_error(m->nfs));
    } else {
        rc = nfs_mount(m->nfs, url->server, url->path);
        if (rc < 0)
            (void)plain_fail(p, rc, p->target, nfs_get_error(m->nfs));
        nfs_destroy_url(url);
    }
    if (rc < 0)
        nfs_destroy_context(m->nfs);
    return rc;
}

static int file_open(struct mount *m)
{
    int rc = nfs_open(m->nfs, FILE_NAME, O_RDWR, &m->file);

    if (rc == -ENOENT)
        rc = nfs_creat(m->nfs, FILE_NAME, 0600, &m->file);
    return rc < 0 ? plain_fail(m->plain, rc, FILE_NAME, nfs_get_error(m->nfs)) : 0;
}

static void mount_close(struct mount *m)
{
    if (m->file)
        (void)nfs_close(m->nfs, m->file);
    nfs_destroy_context(m->nfs);
}

struct stream {
    struct mount *mount;
    bool write, over;
    char *bytes; /* where a block is written from, and to where one is read */
    uint64_t at, moved;
    unsigned under_way;
    int failed;
};

static void stream_more(struct stream *s);

static void moved_cb(int err, struct nfs_context *nfs, void *data, void *private_data)
{
    struct stream *s = private_data;
    uint64_t block = s->mount->plain->block_bytes;

    (void)nfs;
    s->under_way--;
    if (err >= 0 && (uint64_t)err < block)
        s->failed = -EIO;
    else if (err < 0)
        s->failed = err;
    else if (!s->write)
        memcpy(s->bytes, data, block); /* to where it is wanted, as any client must */
    if (s->failed == 0)
        s->moved += block;
    stream_more(s);
}

static void stream_more(struct stream *s)
{
    struct plain *p = s->mount->plain;

    while (!s->over && s->failed == 0 && s->under_way < p->depth) {
        int rc = s->write ? nfs_pwrite_async(s->mount->nfs, s->mount->file, s->at, p->block_bytes,
                                             s->bytes, moved_cb, s)
                          : nfs_pread_async(s->mount->nfs, s->mount->file, s->at, p->block_bytes,
                                            moved_cb, s);

        if (rc < 0) {
            s->failed = rc;
            return;
        }
        s->under_way++;
        s->at = (s->at + p->block_bytes) % p->total_bytes;
    }
}

static int stream_turn(struct stream *s)
{
    struct nfs_context *nfs = s->mount->nfs;
    struct pollfd poll_one = {.fd = nfs_get_fd(nfs), .events = (short)nfs_which_events(nfs)};
    int n = poll(&poll_one, 1, ANSWER_MS);

    if (n <= 0)
        return n == 0 ? -ETIMEDOUT : -errno;
    return nfs_service(nfs, poll_one.revents) < 0 ? -EIO : 0;
}

static int nfs_rate(struct plain *p, bool write, double seconds, double *rate)
{
    struct mount m;
    struct stream s = {.mount = &m, .write = write, .bytes = malloc(p->block_bytes)};
    uint64_t start, end;
    int rc = s.bytes ? mount_open(p, &m) : -ENOMEM;

    if (rc < 0) {
        free(s.bytes);
        return rc;
    }
    memset(s.bytes, 7, p->block_bytes);
    rc = file_open(&m);
    start = clock_ns();
    end = start + (uint64_t)(seconds * 1e9);
    if (rc == 0)
        stream_more(&s);
    while (rc == 0 && s.under_way > 0) {
        s.over = clock_ns() >= end;
        rc = stream_turn(&s);
    }
    if (rc == 0)
        rc = s.failed;
    *rate = (double)s.moved * 1e9 / (double)(clock_ns() - start);
    if (rc < 0 && p->why[0] == '\0')
        (void)plain_fail(p, rc, p->target, nfs_get_error(m.nfs));
    mount_close(&m);
    free(s.bytes);
    return rc;
}

int plain_round_trip(struct plain *p, double *us)
{
    struct samples samples = {.n = 0};
    struct nfs_stat_64 st;
    struct mount m;
    int rc = mount_open(p, &m);

    if (rc < 0)
        return rc;
    rc = file_open(&m);
    for (unsigned i = 0; rc == 0 && i < ROUND_TRIPS; i++) {
        uint64_t start = clock_ns();

        rc = nfs_fstat64(m.nfs, m.file, &st);
        if (rc < 0)
            (void)plain_fail(p, rc, p->target, nfs_get_error(m.nfs));
        else
            rc = samples_add(&samples, (double)(clock_ns() - start) / 1e3);
    }
    *us = samples_at(&samples, 0.5);
    samples_free(&samples);
    mount_close(&m);
    return rc;
}

/* ---- a folder ---- */

static int folder_rate(struct plain *p, bool write, double seconds, double *rate)
{
    char folder[320], block[40], size[40], jobs[40], runtime[40];
    const char *argv[] = {"fio",
                          "--name=" FILE_NAME,
                          "--ioengine=psync",
                          "--thread",
                          "--group_reporting",
                          "--fallocate=none",
                          write ? "--rw=write" : "--rw=read",
                          folder,
                          block,
                          size,
                          jobs,
                          runtime,
                          "--time_based=1",
                          "--invalidate=0",
                          "--output-format=json",
                          NULL};
    int rc;

    snprintf(folder, sizeof(folder), "--directory=%s", p->target);
    snprintf(block, sizeof(block), "--bs=%llu", (unsigned long long)p->block_bytes);
    snprintf(size, sizeof(size), "--size=%llu", (unsigned long long)(p->total_bytes / p->depth));
    snprintf(jobs, sizeof(jobs), "--numjobs=%u", p->depth);
    snprintf(runtime, sizeof(runtime), "--runtime=%.0fms", seconds * 1e3);
    rc = disk_fio(argv, write, rate);
    return rc < 0 ? plain_fail(p, rc, "fio", NULL) : 0;
}

int plain_rate(struct plain *p, bool write, double seconds, double *rate)
{
    p->why[0] = '\0';
    return plain_is_nfs(p->target) ? nfs_rate(p, write, seconds, rate)
                                   : folder_rate(p, write, seconds, rate);
}

void plain_remove(struct plain *p)
{
    char path[512];
    struct mount m;

    if (!plain_is_nfs(p->target)) {
        for (unsigned i = 0; i < p->depth; i++) {
            snprintf(path, sizeof(path), "%s/" FILE_NAME ".%u.0", p->target, i);
            unlink(path);
        }
    } else if (mount_open(p, &m) == 0) {
        (void)nfs_unlink(m.nfs, FILE_NAME);
        mount_close(&m);
    }
}
