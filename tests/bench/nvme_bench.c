/* How near the NVMe tier comes to the disk: parts written and read through it, checksums included,
 * against a bare io_uring loop that reads the same places of the same file with O_DIRECT and
 * registered buffers. The two take turns, medians are compared. Both have `depth` reads at the
 * disk; the tier is given twice as many, so that those being checked are not missing there.
 *
 * nvme_bench FOLDER [MiB [rounds [depth [uring|threads]]]]   1024 MiB, 5 rounds, depth 32, uring */
#include "daemon/base/config.h"
#include "daemon/tier/nvme_format.h"
#include "daemon/tier/tier.h"
#include "proto/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define ROUNDS_MAX 64
#define SEGMENT (64ull << 20)

struct bench;

struct job {
    struct tier_io io;
    struct bench *bench;
};

struct bench {
    uv_loop_t loop;
    struct config config;
    struct metrics metrics;
    struct tier *tier;
    char *folder;
    uint64_t total, part;
    unsigned rounds, depth, jobs_n; /* depth: at the disk */
    enum config_io engine;
    /* of the present block size */
    unsigned parts, next, failed;
    bool writing;
    struct tier_place *places;
    unsigned *order; /* reads go all over the file */
    char *memory;    /* jobs_n slots */
    struct job *jobs;
};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what, int rc)
{
    fprintf(stderr, "nvme_bench: %s: %s\n", what, strerror(-rc));
    exit(1);
}

static bool drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    (void)ctx, (void)owner, (void)loc;
    return false;
}

static unsigned heat_cb(void *ctx, uint64_t owner)
{
    (void)ctx, (void)owner;
    return TIER_HEAT_BUSY;
}

/* ---- through the tier ---- */

static void job_next(struct job *j);

static void job_done_cb(struct tier_io *io, int status)
{
    struct job *j = LIST_ENTRY(io, struct job, io);
    struct bench *b = j->bench;

    b->failed += status < 0;
    if (b->writing)
        b->places[io->name.owner] = io->place;
    job_next(j);
}

static void job_next(struct job *j)
{
    struct bench *b = j->bench;
    unsigned i;
    int rc;

    if (b->next == b->parts)
        return;
    i = b->writing ? b->next : b->order[b->next];
    b->next++;
    j->io.op = b->writing ? TIER_WRITE : TIER_READ;
    j->io.name.owner = i;
    j->io.name.key_bytes = UCM_MIN_KEY_BYTES;
    j->io.place = b->places[i];
    rc = tier_nvme.submit(b->tier, &j->io);
    if (rc < 0)
        die("submit", rc);
}

/* Seconds for all parts. */
static double tier_pass(struct bench *b, bool writing)
{
    double start = now_s();

    b->writing = writing;
    b->next = b->failed = 0;
    for (unsigned i = 0; i < b->jobs_n; i++)
        job_next(&b->jobs[i]);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    if (b->failed > 0)
        die(writing ? "writes failed" : "reads failed", -EIO);
    return now_s() - start;
}

/* ---- the bare loop ---- */

static void plain_read(struct bench *b, struct io_uring *ring, unsigned slot)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    uint64_t page = nvme_loc_page(b->places[b->order[b->next++]].loc);

    io_uring_prep_read_fixed(sqe, 0, b->memory + slot * b->part, (unsigned)b->part,
                             (page + 1) * NVME_PAGE, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = slot;
}

static double plain_pass(struct bench *b, struct io_uring *ring)
{
    double start = now_s();
    unsigned done = 0;

    b->next = 0;
    for (unsigned i = 0; i < b->depth && b->next < b->parts; i++)
        plain_read(b, ring, i);
    while (done < b->parts) {
        struct io_uring_cqe *cqe;
        unsigned slot;

        io_uring_submit_and_wait(ring, 1);
        while (io_uring_peek_cqe(ring, &cqe) == 0) {
            if (cqe->res != (int)b->part)
                die("plain read", cqe->res < 0 ? cqe->res : -EIO);
            slot = (unsigned)cqe->user_data;
            io_uring_cqe_seen(ring, cqe);
            done++;
            if (b->next < b->parts)
                plain_read(b, ring, slot);
        }
    }
    return now_s() - start;
}

static int plain_open(struct bench *b, struct io_uring *ring)
{
    struct iovec iov = {.iov_base = b->memory, .iov_len = b->depth * b->part};
    char path[4096];
    int fd, rc;

    snprintf(path, sizeof(path), "%s/%s", b->folder, CONFIG_NVME_FILE);
    fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0)
        die(path, -errno);
    rc = io_uring_queue_init(b->depth, ring, 0);
    if (rc == 0)
        rc = io_uring_register_files(ring, &fd, 1);
    if (rc == 0)
        rc = io_uring_register_buffers(ring, &iov, 1);
    if (rc < 0)
        die("io_uring", rc);
    return fd;
}

/* ---- one block size ---- */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v, unsigned n)
{
    qsort(v, n, sizeof(v[0]), compare);
    return v[n / 2];
}

static void bench_open(struct bench *b)
{
    struct tier_callbacks callbacks = {.drop = drop_cb, .heat = heat_cb};
    struct ucm_error e = {0};
    double start = now_s();
    uint64_t slots = nvme_slots(SEGMENT, nvme_stride(b->part));

    b->parts = (unsigned)(b->total / b->part);
    b->config = (struct config){
        .nvme_paths = {.item = &b->folder, .n = 1},
        .nvme_size = NVME_DATA_OFFSET + (b->parts / slots + 2) * SEGMENT,
        .nvme_segment = SEGMENT,
        .nvme_depth = b->depth,
        .nvme_io = b->engine,
        .nvme_threads = 4,
        .nvme_backlog = 1ull << 30,
    };
    uv_loop_init(&b->loop);
    if (tier_nvme.open(&b->loop, &b->config, &callbacks, &b->metrics, &b->tier, &e) < 0) {
        fprintf(stderr, "nvme_bench: %s\n", e.text);
        exit(1);
    }
    printf("open %.1f ms; ", (now_s() - start) * 1e3);
}

static void bench_memory(struct bench *b)
{
    size_t bytes = b->jobs_n * b->part;

    b->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    b->places = calloc(b->parts, sizeof(b->places[0]));
    b->order = calloc(b->parts, sizeof(b->order[0]));
    b->jobs = calloc(b->jobs_n, sizeof(b->jobs[0]));
    if (b->memory == MAP_FAILED || !b->places || !b->order || !b->jobs)
        die("memory", -ENOMEM);
    madvise(b->memory, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes; i++)
        b->memory[i] = (char)(i * 2654435761u >> 13);
    for (unsigned i = 0; i < b->parts; i++)
        b->order[i] = i;
    for (unsigned i = b->parts - 1; i > 0; i--) {
        unsigned k = (unsigned)rand() % (i + 1), swap = b->order[i];

        b->order[i] = b->order[k];
        b->order[k] = swap;
    }
    for (unsigned i = 0; i < b->jobs_n; i++) {
        b->jobs[i].bench = b;
        b->jobs[i].io.data = b->memory + i * b->part;
        b->jobs[i].io.bytes = b->part;
        b->jobs[i].io.done = job_done_cb;
    }
    tier_nvme.buffer_add(b->tier, 0, b->memory, bytes);
}

static void bench_close(struct bench *b)
{
    char path[4096];

    tier_nvme.close(b->tier);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    uv_loop_close(&b->loop);
    munmap(b->memory, b->jobs_n * b->part);
    free(b->places);
    free(b->order);
    free(b->jobs);
    snprintf(path, sizeof(path), "%s/%s", b->folder, CONFIG_NVME_FILE);
    unlink(path);
}

static void bench_run(struct bench *b)
{
    double tier_s[ROUNDS_MAX], plain_s[ROUNDS_MAX], fresh_s, again_s;
    struct io_uring ring;
    double gb;
    int fd;

    bench_open(b);
    bench_memory(b);
    gb = (double)b->parts * (double)b->part / 1e9;
    fresh_s = tier_pass(b, true);
    for (unsigned i = 0; i < b->parts; i++)
        tier_nvme.forget(b->tier, &b->places[i], b->part);
    again_s = tier_pass(b, true);
    fd = plain_open(b, &ring);
    for (unsigned i = 0; i < b->rounds; i++) {
        if (i % 2 == 0)
            plain_s[i] = plain_pass(b, &ring);
        tier_s[i] = tier_pass(b, false);
        if (i % 2 == 1)
            plain_s[i] = plain_pass(b, &ring);
    }
    printf("%5u KiB depth %u: write fresh %.2f, again %.2f; ", (unsigned)(b->part >> 10), b->depth,
           gb / fresh_s, gb / again_s);
    printf("read tier %.2f, plain %.2f GB/s, ratio %.2f\n", gb / median(tier_s, b->rounds),
           gb / median(plain_s, b->rounds), median(plain_s, b->rounds) / median(tier_s, b->rounds));
    io_uring_queue_exit(&ring);
    close(fd);
    bench_close(b);
}

int main(int argc, char **argv)
{
    static const uint64_t sizes[] = {512 << 10, 1 << 20, 4 << 20};
    struct bench b = {.total = 1ull << 30, .rounds = 5, .depth = 32, .engine = CONFIG_IO_URING};

    if (argc < 2) {
        fprintf(stderr, "usage: nvme_bench FOLDER [MiB [rounds [depth [uring|threads]]]]\n");
        return 2;
    }
    b.folder = argv[1];
    if (argc > 2)
        b.total = strtoull(argv[2], NULL, 10) << 20;
    if (argc > 3)
        b.rounds = (unsigned)strtoul(argv[3], NULL, 10);
    if (argc > 4)
        b.depth = (unsigned)strtoul(argv[4], NULL, 10);
    if (argc > 5 && strcmp(argv[5], "threads") == 0)
        b.engine = CONFIG_IO_THREADS;
    if (b.total < 16u << 20 || b.rounds == 0 || b.rounds > ROUNDS_MAX || b.depth == 0) {
        fprintf(stderr, "nvme_bench: at least 16 MiB, 1 to %d rounds, depth from 1\n", ROUNDS_MAX);
        return 2;
    }
    b.jobs_n = 2 * b.depth;
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        b.part = sizes[i];
        bench_run(&b);
    }
    return 0;
}
