/* share_gc_bench FOLDER FILES: one pass of the garbage collection over a posix root with so many
 * block files, of 1 MiB each without blocks on the disk, of which a third has to go. Prints how
 * long it took, and by how much memory grew. The folder must be there, and is left empty. */
#include "daemon/share/gc.h"
#include "daemon/tier/bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FILE_BYTES (1u << 20)

static int unlink_cb(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    return ftw->level == 0 ? 0 : remove(path);
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void file_lay(const char *folder, unsigned number, time_t now)
{
    struct block_file_id id = {.key_bytes = 16};
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP], path[512];
    struct timespec times[2] = {{.tv_sec = now - 600 - (number * 2654435761u) % 864000}};
    int fd;

    put32(id.key, number);
    memset(id.fingerprint, 1, sizeof(id.fingerprint));
    if (block_file_place(&id, identity, name) < 0)
        exit(1);
    snprintf(path, sizeof(path), "%s/blocks/%02x/%s", folder, identity[0], name);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    times[1] = times[0];
    if (fd < 0 || ftruncate(fd, FILE_BYTES) < 0 || futimens(fd, times) < 0)
        fail(path);
    close(fd);
}

static void files_lay(const char *folder, unsigned n)
{
    time_t now = time(NULL);
    char path[512];

    snprintf(path, sizeof(path), "%s/blocks", folder);
    if (mkdir(path, 0700) < 0)
        fail(path);
    for (unsigned b = 0; b < BLOCK_FILE_BUCKETS; b++) {
        snprintf(path, sizeof(path), "%s/blocks/%02x", folder, b);
        if (mkdir(path, 0700) < 0)
            fail(path);
    }
    for (unsigned i = 0; i < n; i++)
        file_lay(folder, i, now);
}

static long peak_kib(void)
{
    struct rusage usage;

    if (getrusage(RUSAGE_SELF, &usage) < 0)
        fail("getrusage");
    return usage.ru_maxrss;
}

static void ready_cb(void *ctx)
{
    (void)ctx;
}

static int pass(uv_loop_t *loop, struct share_root *root, const struct metrics *metrics)
{
    struct gc_config config = {.root = root, .low = 100, .collect_ms = 3600000};
    struct gc *gc;
    int err = gc_new(&config, &gc);

    if (err < 0)
        return err;
    err = gc_run(gc);
    while (err == 0 && (metrics->share_gc_passes + metrics->share_gc_failed == 0 || gc_busy(gc)))
        uv_run(loop, UV_RUN_ONCE);
    gc_stop(gc);
    while (gc_busy(gc) || share_root_busy(root) > 0)
        uv_run(loop, UV_RUN_ONCE);
    gc_free(gc);
    return err;
}

int main(int argc, char **argv)
{
    unsigned n = argc == 3 ? (unsigned)strtoul(argv[2], NULL, 10) : 0;
    uv_loop_t *loop = uv_default_loop();
    static struct deadlines deadlines;
    static struct metrics metrics;
    struct share_root_config config = {.loop = loop,
                                       .deadlines = &deadlines,
                                       .metrics = &metrics,
                                       .ops = &share_posix,
                                       .host = "bench",
                                       .depth = 16,
                                       .capacity_bytes = (uint64_t)n * FILE_BYTES / 3 * 2,
                                       .deadline_ms = 5000,
                                       .ready_cb = ready_cb};
    struct share_root *root = NULL;
    uint64_t began_ns;
    long before_kib;
    double s;

    if (n == 0) {
        fprintf(stderr, "usage: share_gc_bench FOLDER FILES\n");
        return 2;
    }
    config.target = argv[1];
    files_lay(argv[1], n);
    if (deadlines_init(&deadlines, loop) < 0 || share_root_open(&config, &root) < 0)
        fail("share_root_open");
    before_kib = peak_kib();
    began_ns = uv_hrtime();
    if (pass(loop, root, &metrics) < 0)
        return 1;
    s = (double)(uv_hrtime() - began_ns) / 1e9;
    printf("gc: %u files, %llu removed, %.1f s, memory grew by %.1f MiB\n", n,
           (unsigned long long)metrics.share_gc_removed, s,
           (double)(peak_kib() - before_kib) / 1024);
    share_root_close(root);
    deadlines_close(&deadlines);
    uv_run(loop, UV_RUN_DEFAULT);
    return nftw(argv[1], unlink_cb, 16, FTW_DEPTH | FTW_PHYS) == 0 ? 0 : 1;
}
