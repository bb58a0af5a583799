#include "tests/unit/tier/nvme_faults.h"

#include "daemon/format/nvme_format.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LATE_READS 3

struct nvme_faults fault;

static ssize_t fail(int error)
{
    errno = error;
    return -1;
}

ssize_t pwritev(int fd, const struct iovec *iov, int n, off_t offset)
{
    if (fault.writes_fail > 0 && fault.writes_fail-- > 0)
        return fail(fault.write_error);
    if (fault.headers_fail && iov->iov_len == NVME_PAGE && memcmp(iov->iov_base, "UCMG", 4) == 0)
        return fail(EIO);
    return syscall(SYS_pwritev, fd, iov, n, offset, 0);
}

ssize_t preadv(int fd, const struct iovec *iov, int n, off_t offset)
{
    bool among = offset >= fault.late_from && offset < fault.late_to;
    ssize_t read;

    while (among && offset == fault.late_from && fault.late_reads < LATE_READS)
        sched_yield();
    read = syscall(SYS_preadv, fd, iov, n, offset, 0);
    if (among)
        fault.late_reads++;
    return read;
}

int open(const char *path, int flags, ...)
{
    mode_t mode;
    va_list args;

    va_start(args, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (fault.open_error && strncmp(path, fault.open_path, strlen(fault.open_path)) == 0 &&
        (flags & O_ACCMODE) == O_RDWR)
        return (int)fail(fault.open_error);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    if (fault.allocate_error)
        return (int)fail(fault.allocate_error);
    return (int)syscall(SYS_fallocate, fd, mode, offset, length);
}

int fdatasync(int fd)
{
    fault.syncs++;
    return fault.sync_error ? (int)fail(fault.sync_error) : (int)syscall(SYS_fdatasync, fd);
}

static void *real(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);

    if (!p)
        abort();
    return p;
}

int io_uring_submit(struct io_uring *ring)
{
    int (*f)(struct io_uring *);

    if (fault.ring_submit_error)
        return -fault.ring_submit_error;
    *(void **)&f = real("io_uring_submit");
    return f(ring);
}

unsigned io_uring_peek_batch_cqe(struct io_uring *ring, struct io_uring_cqe **cqes, unsigned max)
{
    unsigned (*f)(struct io_uring *, struct io_uring_cqe **, unsigned);
    unsigned n;

    *(void **)&f = real("io_uring_peek_batch_cqe");
    n = f(ring, cqes, max);
    for (unsigned i = 0; i < n && fault.ring_error; i++)
        cqes[i]->res = -fault.ring_error;
    return n;
}
