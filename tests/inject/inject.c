#include "tests/inject/inject.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define CACHE_BYTES (2 << 20) /* what is longer is the cache file; a checkpoint is not */
#define PAGE 4096u

static struct inject none, *inject = &none;

__attribute__((constructor)) static void inject_open(void)
{
    const char *path = getenv("UCM_INJECT");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *p;

    if (fd < 0)
        return;
    p = mmap(NULL, sizeof(*inject), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p != MAP_FAILED)
        inject = p;
}

static int load(const int *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static int is_cache(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > CACHE_BYTES;
}

/* Whether this call is to fail. */
static int due(int *left, const int *error, int fd)
{
    int n = load(left);

    if (load(error) == 0 || n == 0 || !is_cache(fd))
        return 0;
    while (n > 0 &&
           !__atomic_compare_exchange_n(left, &n, n - 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    if (n == 0)
        return 0;
    __atomic_add_fetch(&inject->failed, 1, __ATOMIC_RELAXED);
    errno = load(error);
    return 1;
}

/* As much as a device that ends early would move: a cut first iovec. */
static ssize_t cut(long number, int fd, const struct iovec *iov, off_t offset)
{
    size_t n = iov->iov_len > PAGE ? iov->iov_len / 2 / PAGE * PAGE : iov->iov_len;
    ssize_t rc = syscall(number, fd, iov->iov_base, n, offset);

    return rc > (ssize_t)PAGE ? rc - load(&inject->short_by) : rc;
}

EXPORT ssize_t preadv(int fd, const struct iovec *iov, int n, off_t offset)
{
    int delay_ms = load(&inject->read_delay_ms);
    struct timespec delay = {delay_ms / 1000, delay_ms % 1000 * 1000000L};

    if (delay_ms > 0 && is_cache(fd))
        nanosleep(&delay, NULL);
    if (due(&inject->reads, &inject->read_error, fd))
        return -1;
    if (load(&inject->short_by) > 0 && is_cache(fd))
        return cut(SYS_pread64, fd, iov, offset);
    return syscall(SYS_preadv, fd, iov, n, offset, 0);
}

EXPORT ssize_t pwritev(int fd, const struct iovec *iov, int n, off_t offset)
{
    if (due(&inject->writes, &inject->write_error, fd))
        return -1;
    if (load(&inject->short_by) > 0 && is_cache(fd))
        return cut(SYS_pwrite64, fd, iov, offset);
    return syscall(SYS_pwritev, fd, iov, n, offset, 0);
}

EXPORT ssize_t pread(int fd, void *p, size_t n, off_t offset)
{
    if (offset >= __atomic_load_n(&inject->read_from, __ATOMIC_RELAXED) &&
        due(&inject->reads, &inject->read_error, fd))
        return -1;
    return syscall(SYS_pread64, fd, p, n, offset);
}

EXPORT ssize_t pwrite(int fd, const void *p, size_t n, off_t offset)
{
    return due(&inject->writes, &inject->write_error, fd) ? -1
                                                          : syscall(SYS_pwrite64, fd, p, n, offset);
}

EXPORT int fdatasync(int fd)
{
    static int all = -1;

    return due(&all, &inject->sync_error, fd) ? -1 : (int)syscall(SYS_fdatasync, fd);
}

static void *real(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);

    if (!p)
        abort();
    return p;
}

EXPORT int statvfs(const char *path, struct statvfs *out)
{
    int (*f)(const char *, struct statvfs *), rc;

    *(void **)&f = real("statvfs");
    rc = f(path, out);
    if (rc == 0 && load(&inject->no_room))
        out->f_bavail = out->f_bfree = 0;
    return rc;
}

EXPORT int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                                      struct io_uring_params *p)
{
    int (*f)(unsigned, struct io_uring *, struct io_uring_params *);

    if (load(&inject->setup_error))
        return -load(&inject->setup_error);
    *(void **)&f = real("io_uring_queue_init_params");
    return f(entries, ring, p);
}

EXPORT unsigned io_uring_peek_batch_cqe(struct io_uring *ring, struct io_uring_cqe **cqes,
                                        unsigned max)
{
    unsigned (*f)(struct io_uring *, struct io_uring_cqe **, unsigned);
    unsigned n;

    *(void **)&f = real("io_uring_peek_batch_cqe");
    n = f(ring, cqes, max);
    for (unsigned i = 0; i < n && load(&inject->ring_error); i++)
        cqes[i]->res = -load(&inject->ring_error);
    return n;
}
