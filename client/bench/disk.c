#include "client/bench/disk.h"

#include "client/bench/figure.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define FIO_OUTPUT_BYTES (256u << 10)

static int disk_fail(struct disk *d, int code, const char *what)
{
    snprintf(d->why, sizeof(d->why), "%s: %s", what, strerror(-code));
    return code;
}

/* ---- fio ---- */

/* Runs fio and keeps what it prints. 0, or -errno. */
static int fio_call(const char *const *argv, char *out, size_t bytes)
{
    size_t n = 0;
    ssize_t got;
    int pipes[2], status;
    pid_t pid;

    if (pipe2(pipes, O_CLOEXEC) < 0)
        return -errno;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);

        if (null < 0 || dup2(null, 0) < 0 || dup2(pipes[1], 1) < 0 || dup2(null, 2) < 0)
            _exit(127);
        /* Huge pages for its buffers, as the tier's are: fewer pieces for the disk. */
        if (setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", 1) == 0)
            execvp(argv[0], (char *const *)argv);
        _exit(127);
    }
    close(pipes[1]);
    if (pid > 0) {
        while ((got = read(pipes[0], out + n, bytes - 1 - n)) > 0)
            n += (size_t)got;
        if (waitpid(pid, &status, 0) != pid || status != 0)
            pid = -1;
    }
    close(pipes[0]);
    out[n] = '\0';
    return pid > 0 ? 0 : -ENOENT;
}

bool disk_has_fio(void)
{
    const char *argv[] = {"fio", "--version", NULL};
    char version[64];

    return fio_call(argv, version, sizeof(version)) == 0;
}

static int fio_rate(const char *text, bool write, double *rate)
{
    cJSON *root = cJSON_Parse(strchr(text, '{'));
    const cJSON *job = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "jobs"), 0);
    const cJSON *way = cJSON_GetObjectItem(job, write ? "write" : "read");
    const cJSON *bytes = cJSON_GetObjectItem(way, "bw_bytes");

    *rate = cJSON_IsNumber(bytes) ? bytes->valuedouble : 0;
    cJSON_Delete(root);
    return *rate > 0 ? 0 : -EIO;
}

static int fio_run(struct disk *d, bool write, double seconds, double *rate)
{
    char file[DISK_PATH_BYTES + 16], block[40], depth[40], size[40], runtime[40];
    const char *argv[] = {"fio",
                          "--name=disk",
                          file,
                          "--ioengine=io_uring",
                          "--direct=1",
                          write ? "--rw=write" : "--rw=randread",
                          block,
                          depth,
                          size,
                          runtime,
                          "--time_based=1",
                          "--fixedbufs=1",
                          "--registerfiles=1",
                          "--invalidate=0",
                          "--allow_file_create=0",
                          "--output-format=json",
                          NULL};
    char *out = malloc(FIO_OUTPUT_BYTES);
    int rc;

    snprintf(file, sizeof(file), "--filename=%s", d->path);
    snprintf(block, sizeof(block), "--bs=%llu", (unsigned long long)d->block_bytes);
    snprintf(depth, sizeof(depth), "--iodepth=%u", d->depth);
    snprintf(size, sizeof(size), "--size=%llu", (unsigned long long)d->bytes);
    snprintf(runtime, sizeof(runtime), "--runtime=%.0fms", seconds * 1e3);
    rc = out ? fio_call(argv, out, FIO_OUTPUT_BYTES) : -ENOMEM;
    if (rc == 0)
        rc = fio_rate(out, write, rate);
    free(out);
    return rc < 0 ? disk_fail(d, rc, "fio") : 0;
}

/* ---- the loop ---- */

struct loop {
    struct io_uring ring;
    struct disk *disk;
    char *memory; /* a block for each operation under way */
    int fd;
    bool write;
    uint64_t blocks, next, random;
};

/* Random reads, or the next write, into or out of a place of the memory. */
static void loop_begin(struct loop *l, unsigned slot)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&l->ring);
    unsigned bytes = (unsigned)l->disk->block_bytes;
    char *p = l->memory + slot * l->disk->block_bytes;
    uint64_t n = l->next++;

    if (!l->write) {
        l->random = l->random * 6364136223846793005u + 1442695040888963407u;
        n = l->random >> 33;
    }
    n = n % l->blocks * l->disk->block_bytes;
    if (l->write)
        io_uring_prep_write_fixed(sqe, 0, p, bytes, n, 0);
    else
        io_uring_prep_read_fixed(sqe, 0, p, bytes, n, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = slot;
}

/* Until `end_ns`, then what is under way. 0 or -errno. */
static int loop_turn(struct loop *l, uint64_t end_ns, uint64_t *done)
{
    unsigned under_way = 0;

    for (; under_way < l->disk->depth; under_way++)
        loop_begin(l, under_way);
    while (under_way > 0) {
        struct io_uring_cqe *cqe;
        int rc = io_uring_submit_and_wait(&l->ring, 1);

        if (rc < 0 && rc != -EINTR)
            return rc;
        while (io_uring_peek_cqe(&l->ring, &cqe) == 0) {
            unsigned slot = (unsigned)cqe->user_data;
            int res = cqe->res;

            io_uring_cqe_seen(&l->ring, cqe);
            if (res != (int)l->disk->block_bytes)
                return res < 0 ? res : -EIO;
            ++*done;
            if (clock_ns() < end_ns)
                loop_begin(l, slot);
            else
                under_way--;
        }
    }
    return 0;
}

static void loop_close(struct loop *l)
{
    if (l->memory != MAP_FAILED)
        munmap(l->memory, l->disk->depth * l->disk->block_bytes);
    close(l->fd);
}

static int loop_open(struct loop *l)
{
    struct disk *d = l->disk;
    struct iovec all = {.iov_len = d->depth * d->block_bytes};
    int rc;

    l->fd = open(d->path, (l->write ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
    if (l->fd < 0)
        return disk_fail(d, -errno, d->path);
    l->memory = mmap(NULL, all.iov_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (l->memory == MAP_FAILED) {
        loop_close(l);
        return disk_fail(d, -ENOMEM, "memory of the disk's baseline");
    }
    (void)madvise(l->memory, all.iov_len, MADV_HUGEPAGE);
    memset(l->memory, 7, all.iov_len);
    all.iov_base = l->memory;
    rc = io_uring_queue_init(d->depth, &l->ring, 0);
    if (rc == 0 && (rc = io_uring_register_files(&l->ring, &l->fd, 1)) == 0)
        rc = io_uring_register_buffers(&l->ring, &all, 1);
    if (rc == 0)
        return 0;
    loop_close(l);
    return disk_fail(d, rc, "io_uring of the disk's baseline");
}

static int loop_run(struct disk *d, bool write, double seconds, double *rate)
{
    struct loop l = {.disk = d, .write = write, .blocks = d->bytes / d->block_bytes};
    uint64_t start, done = 0;
    int rc = loop_open(&l);

    if (rc < 0)
        return rc;
    start = clock_ns();
    l.random = start;
    rc = loop_turn(&l, start + (uint64_t)(seconds * 1e9), &done);
    *rate = (double)(done * d->block_bytes) * 1e9 / (double)(clock_ns() - start);
    io_uring_queue_exit(&l.ring);
    loop_close(&l);
    return rc < 0 ? disk_fail(d, rc, d->path) : 0;
}

int disk_run(struct disk *d, bool write, double seconds, double *rate)
{
    return d->fio ? fio_run(d, write, seconds, rate) : loop_run(d, write, seconds, rate);
}

int disk_make(struct disk *d, const char *folder, const char *name)
{
    const size_t piece = 4u << 20;
    char *memory = malloc(piece);
    int fd, rc = 0;

    snprintf(d->path, sizeof(d->path), "%s/%s", folder, name);
    fd = open(d->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || !memory) {
        rc = fd < 0 ? -errno : -ENOMEM;
        goto out;
    }
    memset(memory, 7, piece);
    for (uint64_t at = 0; rc == 0 && at < d->bytes; at += piece)
        if (pwrite(fd, memory, piece, (off_t)at) != (ssize_t)piece)
            rc = -ENOSPC;
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* or each later write drops its pages */
out:
    free(memory);
    if (fd >= 0)
        close(fd);
    return rc < 0 ? disk_fail(d, rc, d->path) : 0;
}
