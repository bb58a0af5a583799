/* share_gc_bench FOLDER FILES: one pass of the garbage collection over a posix root with so many
 * block files, of 1 MiB each without blocks on the disk, of which a third has to go. Prints how
 * long it took, and by how much memory grew. The folder must be there, and is left empty. */
#include "daemon/share/gc.h"
#include "tests/bench/share_lay.h"

#include <sys/resource.h>

static long peak_kib(void)
{
    struct rusage usage;

    if (getrusage(RUSAGE_SELF, &usage) < 0)
        lay_fail("getrusage");
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
                                       .capacity_bytes = (uint64_t)n * LAY_BYTES / 3 * 2,
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
    lay_files(argv[1], n);
    if (deadlines_init(&deadlines, loop) < 0 || share_root_open(&config, &root) < 0)
        lay_fail("share_root_open");
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
    return lay_clear(argv[1]) == 0 ? 0 : 1;
}
