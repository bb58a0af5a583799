/* What the hop to a root's process costs: the same file of a folder on tmpfs is looked up and read by system calls
 * alone, by the daemon's threads, and through ucmd-backend-folder in its sandbox, one operation at a time. Medians of one run.
 * With nfs://SERVER/EXPORT the same through ucmd-backend-nfs, and by libnfs alone.
 *
 *   build/bench/backend_bench [FOLDER | nfs://SERVER/EXPORT] */
#include "daemon/base/log.h"
#include "daemon/config/roots.h"
#include "daemon/share/backend.h"

#include <errno.h>
#include <fcntl.h>
#include <nfsc/libnfs.h>
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

/* The same call to the server by libnfs alone: GETATTR where LOOKUP is, or READ of the whole file, whose handle both sides have. */
static double library_us(const char *target, uint64_t file_bytes, uint64_t bytes, unsigned rounds)
{
    static double times[ROUNDS];
    struct nfs_context *nfs = nfs_init_context();
    struct nfs_url *url = nfs ? nfs_parse_url_dir(nfs, target) : NULL;
    struct nfs_stat_64 st;
    struct nfsfh *file = NULL;
    uint64_t whole = BLOCK_FILE_HEADER_BYTES + bytes;
    char *data = malloc(BLOCK_FILE_HEADER_BYTES + LARGE);
    char path[600];
    bool ok = url && data && path_of("", file_bytes, path) == 0 &&
              nfs_mount(nfs, url->server, url->path) == 0 &&
              nfs_open(nfs, path, O_RDONLY, &file) == 0;

    for (unsigned i = 0; ok && i < rounds; i++) {
        uint64_t from = uv_hrtime();

        ok = bytes ? nfs_pread(nfs, file, 0, whole, data) == (int)whole
                   : nfs_fstat64(nfs, file, &st) == 0;
        times[i] = (double)(uv_hrtime() - from) / 1000;
    }
    if (file)
        (void)nfs_close(nfs, file);
    if (url)
        nfs_destroy_url(url);
    if (nfs)
        nfs_destroy_context(nfs);
    free(data);
    return ok ? median(times, rounds) : -1;
}

static const struct {
    const char *name;
    uint64_t bytes; /* 0: it is looked up */
    unsigned rounds;
} things[] = {{"find", 0, ROUNDS}, {"read 64 KiB", SMALL, ROUNDS}, {"read 4 MiB", LARGE, 400}};
#define THINGS (sizeof(things) / sizeof(things[0]))

static int measure(struct bench *m, const struct share_backend_ops *ops,
                   const struct share_backend_config *config, uint8_t *data, double us[THINGS])
{
    if (opened(m, ops, config) < 0 || run(m, SHARE_CHECK, NULL, 0) != 0)
        return -1;
    (void)run(m, SHARE_WRITE, data, SMALL);
    (void)run(m, SHARE_WRITE, data, LARGE);
    for (unsigned i = 0; i < THINGS; i++)
        us[i] = backend_us(m, things[i].bytes ? SHARE_READ : SHARE_FIND, data,
                           things[i].bytes ? things[i].bytes : SMALL, things[i].rounds);
    closed(m);
    return 0;
}

static int measure_nfs(struct bench *m, struct share_backend_config *config,
                       struct config_process *process, uint8_t *data)
{
    char *here = realpath("build/ucmd-backend-nfs", NULL);
    const char *target = config->target;
    double us[THINGS];

    snprintf(process->command, sizeof(process->command), "%s %s", here ? here : "", target);
    process->network = true;
    free(here);
    if (measure(m, &share_nfs, config, data, us) < 0)
        return 1;
    printf("%-12s %10s %10s %10s\n", "us", "libnfs", "process", "hop");
    for (unsigned i = 0; i < THINGS; i++) {
        uint64_t bytes = things[i].bytes;
        double alone = library_us(target, bytes ? bytes : SMALL, bytes, things[i].rounds);

        printf("%-12s %10.1f %10.1f %10.1f\n", things[i].name, alone, us[i], us[i] - alone);
    }
    return 0;
}

static int measure_folder(struct bench *m, struct share_backend_config *config,
                          struct config_process *process, uint8_t *data)
{
    char *here = realpath("build/ucmd-backend-folder", NULL), path[600];
    const char *folder = config->target;
    double threads[THINGS], us[THINGS];

    if (!here || (mkdir(folder, 0700) < 0 && errno != EEXIST))
        return 1;
    snprintf(process->command, sizeof(process->command), "%s %s", here, folder);
    snprintf(process->folder, sizeof(process->folder), "%s", folder);
    free(here);
    if (measure(m, &share_posix, config, data, threads) < 0)
        return 1;
    config->target = CONFIG_PROCESS "bench";
    if (measure(m, &share_process, config, data, us) < 0)
        return 1;
    printf("%-12s %10s %10s %10s %10s\n", "us", "calls", "threads", "process", "hop");
    for (unsigned i = 0; i < THINGS; i++) {
        uint64_t bytes = things[i].bytes;
        double alone;

        path_of(folder, bytes ? bytes : SMALL, path);
        alone = calls_us(path, bytes ? data : NULL, bytes, things[i].rounds);
        printf("%-12s %10.1f %10.1f %10.1f %10.1f\n", things[i].name, alone, threads[i], us[i],
               us[i] - alone);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct config_process process = {.buffer_bytes = 64u << 20};
    struct bench m;
    char *ucmd = realpath("build/ucmd", NULL);
    struct share_backend_config config = {.loop = &m.loop,
                                          .deadlines = &m.deadlines,
                                          .host = "bench",
                                          .depth = 8,
                                          .process = &process,
                                          .launcher = ucmd,
                                          .target = argc > 1 ? argv[1] : "/dev/shm/backend-bench"};
    uint8_t *data = malloc(LARGE);
    int rc = 1;

    log_set_level(LOG_ERROR);
    if (!data || !ucmd)
        return 1;
    memset(data, 7, LARGE);
    uv_loop_init(&m.loop);
    deadlines_init(&m.deadlines, &m.loop);
    rc = strncmp(config.target, "nfs://", 6) == 0 ? measure_nfs(&m, &config, &process, data)
                                                  : measure_folder(&m, &config, &process, data);
    free(data);
    free(ucmd);
    return rc;
}
