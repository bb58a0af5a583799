#include "client/bench/plain.h"

#include "client/bench/disk.h"
#include "client/bench/figure.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SETS_MAX 64u

bool plain_is_nfs(const char *target)
{
    return strncmp(target, "nfs://", 6) == 0;
}

const char *plain_name(const char *target, enum plain_shape shape)
{
    if (shape == PLAIN_FILES)
        return plain_is_nfs(target) ? "a plain libnfs client" : "fio";
    return plain_is_nfs(target) ? "a plain libnfs client on one file"
                                : "fio on one file for each thread";
}

int plain_fail(struct plain *p, int code, const char *what, const char *detail)
{
    snprintf(p->why, sizeof(p->why), "%s: %s", what, detail ? detail : strerror(-code));
    return code;
}

/* ---- a folder ---- */

static unsigned files_of_thread(const struct plain *p)
{
    unsigned n = (unsigned)(p->total_bytes / p->block_bytes / p->depth);

    return n > 0 ? n : 1;
}

static void folder_remove(const struct plain *p, enum plain_shape shape)
{
    unsigned n = shape == PLAIN_FILES ? files_of_thread(p) : 1;
    char path[512];

    for (unsigned thread = 0; thread < p->depth; thread++)
        for (unsigned i = 0; i < n; i++) {
            snprintf(path, sizeof(path), "%s/" PLAIN_FILE_NAME "%d.%u.%u", p->target, shape, thread,
                     i);
            unlink(path);
        }
}

static int fio(struct plain *p, enum plain_shape shape, bool write, double seconds, double *rate)
{
    const char *const shapes[][2] = {{"--create_on_open=1", "--openfiles=1"},
                                     {"--time_based=1", "--overwrite=0"}};
    char name[40], folder[320], block[40], size[40], files[40], jobs[40], runtime[40];
    const char *argv[] = {"fio",
                          name,
                          "--ioengine=psync",
                          "--thread",
                          "--group_reporting",
                          "--fallocate=none",
                          "--invalidate=0",
                          "--output-format=json",
                          "--file_service_type=sequential",
                          write ? "--rw=write" : "--rw=read",
                          folder,
                          block,
                          size,
                          files,
                          jobs,
                          runtime,
                          shapes[shape][0],
                          shapes[shape][1],
                          NULL};
    unsigned n = shape == PLAIN_FILES ? files_of_thread(p) : 1;

    snprintf(name, sizeof(name), "--name=" PLAIN_FILE_NAME "%d", shape);
    snprintf(folder, sizeof(folder), "--directory=%s", p->target);
    snprintf(block, sizeof(block), "--bs=%llu", (unsigned long long)p->block_bytes);
    snprintf(size, sizeof(size), "--filesize=%llu",
             (unsigned long long)(files_of_thread(p) / n * p->block_bytes));
    snprintf(files, sizeof(files), "--nrfiles=%u", n);
    snprintf(jobs, sizeof(jobs), "--numjobs=%u", p->depth);
    snprintf(runtime, sizeof(runtime), "--runtime=%.0fms", seconds * 1e3);
    return disk_fio(argv, write, rate);
}

/* A set of files is written or read in no time: so many, until their own times are `seconds`. */
static int folder_rate(struct plain *p, enum plain_shape shape, bool write, double seconds,
                       double *rate)
{
    double set_bytes = (double)files_of_thread(p) * p->depth * (double)p->block_bytes, spent = 0;
    unsigned n = 0;
    int rc = 0;

    if (shape == PLAIN_ONE_FILE)
        return fio(p, shape, write, seconds, rate);
    for (; rc == 0 && n < SETS_MAX && spent < seconds; n++) {
        if (write)
            folder_remove(p, shape);
        rc = fio(p, shape, write, 60, rate);
        spent += rc == 0 ? set_bytes / *rate : 0;
    }
    if (rc == 0)
        *rate = n * set_bytes / spent;
    return rc;
}

int plain_rate(struct plain *p, enum plain_shape shape, bool write, double seconds, double *rate)
{
    int rc;

    p->why[0] = '\0';
    if (plain_is_nfs(p->target))
        return plain_nfs_rate(p, shape, write, seconds, rate);
    rc = folder_rate(p, shape, write, seconds, rate);
    return rc < 0 ? plain_fail(p, rc, "fio", NULL) : 0;
}

void plain_remove(struct plain *p)
{
    if (plain_is_nfs(p->target)) {
        plain_nfs_remove(p);
        return;
    }
    folder_remove(p, PLAIN_FILES);
    folder_remove(p, PLAIN_ONE_FILE);
}
