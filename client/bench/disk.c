#include "client/bench/disk.h"

#include "client/bench/figure.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int disk_fail(struct disk *d, int code, const char *what)
{
    snprintf(d->why, sizeof(d->why), "%s: %s", what, strerror(-code));
    return code;
}

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

int disk_run(struct disk *d, bool write, double seconds, double *rate)
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

int disk_make(struct disk *d, const char *directory, const char *name)
{
    const size_t piece = 4u << 20;
    char *memory = malloc(piece);
    int fd, rc = 0;

    snprintf(d->path, sizeof(d->path), "%s/%s", directory, name);
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
