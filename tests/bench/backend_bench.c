/* What the hop to a root's process costs: the same file of a folder on tmpfs is looked up and read by system calls
 * alone, by the daemon's threads, and through ucmd-backend-folder in its sandbox, one operation at a time. Medians of one run.
 *
 *   build/bench/backend_bench [FOLDER] */
#include "daemon/base/config_roots.h"
#include "daemon/base/log.h"
#include "daemon/share/backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROUNDS 4000u
#define SMALL (64u << 10)
#define LARGE (4u << 20)

struct bench {
    uv_loop_t loop;
    struct deadlines deadlines;
    const struct share_backend_ops *ops;
    struct share_backend *b;
    bool done;
    int status;
};
struct bench_op {
    struct share_op op; /* first */
    struct bench *bench;
};

static void done_cb(struct share_op *op, int status)
{
    struct bench *m = ((struct bench_op *)op)->bench;

    m->done = true;
    m->status = status;
}

static int run(struct bench *m, enum share_verb verb, void *data, uint64_t bytes)
{
    struct bench_op o = {.op = {.verb = verb,
                                .id = {.key_bytes = 16, .key = {(uint8_t)(bytes >> 16)}},
                                .data = data,
                                .bytes = bytes,
                                .done_cb = done_cb},
                         .bench = m};

    m->done = false;
    m->ops->start(m->b, &o.op);
    while (!m->done)
        uv_run(&m->loop, UV_RUN_ONCE);
    return m->status;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *times, unsigned n)
{
    qsort(times, n, sizeof(*times), compare);
    return times[n / 2];
}

static double backend_us(struct bench *m, enum share_verb verb, void *data, uint64_t bytes,
                         unsigned rounds)
{
    static double times[ROUNDS];

    for (unsigned i = 0; i < rounds; i++) {
        uint64_t from = uv_hrtime();

        if (run(m, verb, data, bytes) != 0)
            return -1;
        times[i] = (double)(uv_hrtime() - from) / 1000;
    }
    return median(times, rounds);
}

/* The file that `bytes` went to. */
static int path_of(const char *folder, uint64_t bytes, char out[600])
{
    struct block_file_id id = {.key_bytes = 16, .key = {(uint8_t)(bytes >> 16)}};
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP];
    int rc = block_file_locate(&id, identity, name);

    snprintf(out, 600, "%s/blocks/%02x/%s", folder, identity[0], name);
    return rc;
}

static double calls_us(const char *path, void *data, uint64_t bytes, unsigned rounds)
{
    static double times[ROUNDS];
    struct stat st;

    for (unsigned i = 0; i < rounds; i++) {
        uint64_t from = uv_hrtime();
        int fd = data ? open(path, O_RDONLY | O_CLOEXEC) : stat(path, &st);

        if (fd < 0 || (data && pread(fd, data, bytes, BLOCK_FILE_HEADER_BYTES) != (ssize_t)bytes))
            return -1;
        if (data)
            close(fd);
        times[i] = (double)(uv_hrtime() - from) / 1000;
    }
    return median(times, rounds);
}

static int opened(struct bench *m, const struct share_backend_ops *ops,
                  const struct share_backend_config *config)
{
    m->ops = ops;
    return ops->open(config, &m->b);
}

static void closed(struct bench *m)
{
    m->ops->close(m->b);
    uv_run(&m->loop, UV_RUN_DEFAULT);
}

int main(int argc, char **argv)
{
    char folder[256], path[600];
    struct config_process process = {.buffer_bytes = 64u << 20};
    struct bench m;
    struct share_backend_config config = {.loop = &m.loop,
                                          .deadlines = &m.deadlines,
                                          .host = "bench",
                                          .depth = 8,
                                          .process = &process};
    static const uint64_t sizes[] = {0, SMALL, LARGE};
    double us[3][3];
    uint8_t *data = malloc(LARGE);
    char *here = realpath("build/ucmd-backend-folder", NULL), *ucmd = realpath("build/ucmd", NULL);

    log_set_level(LOG_ERROR);
    snprintf(folder, sizeof(folder), "%s", argc > 1 ? argv[1] : "/dev/shm/backend-bench");
    if (!data || !here || !ucmd || (mkdir(folder, 0700) < 0 && errno != EEXIST))
        return 1;
    snprintf(process.command, sizeof(process.command), "%s %s", here, folder);
    snprintf(process.folder, sizeof(process.folder), "%s", folder);
    config.launcher = ucmd;
    memset(data, 7, LARGE);
    uv_loop_init(&m.loop);
    deadlines_init(&m.deadlines, &m.loop);
    for (unsigned k = 1; k < 3; k++) {
        config.target = k == 1 ? folder : CONFIG_PROCESS "bench";
        if (opened(&m, k == 1 ? &share_posix : &share_process, &config) < 0 ||
            run(&m, SHARE_CHECK, NULL, 0) != 0)
            return 1;
        (void)run(&m, SHARE_WRITE, data, SMALL);
        (void)run(&m, SHARE_WRITE, data, LARGE);
        for (unsigned i = 0; i < 3; i++)
            us[i][k] = backend_us(&m, sizes[i] ? SHARE_READ : SHARE_FIND, data,
                                  sizes[i] ? sizes[i] : SMALL, i == 2 ? 400 : ROUNDS);
        closed(&m);
    }
    printf("%-12s %10s %10s %10s %10s\n", "us", "calls", "threads", "process", "hop");
    for (unsigned i = 0; i < 3; i++) {
        path_of(folder, sizes[i] ? sizes[i] : SMALL, path);
        us[i][0] = calls_us(path, sizes[i] ? data : NULL, sizes[i], i == 2 ? 400 : ROUNDS);
        printf("%-12s %10.1f %10.1f %10.1f %10.1f\n",
               i == 0   ? "find"
               : i == 1 ? "read 64 KiB"
                        : "read 4 MiB",
               us[i][0], us[i][1], us[i][2], us[i][2] - us[i][0]);
    }
    free(data);
    free(here);
    free(ucmd);
    return 0;
}
