#include "daemon/base/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Newer than headers and kernels in use. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x10
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PAGE_BYTES 4096u

int memfd_new(const char *name, uint64_t bytes, int *out)
{
    int rc, fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

    if (fd < 0 && errno == EINVAL)
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    if (fchmod(fd, 0400) < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        rc = -errno;
        close(fd);
        return rc;
    }
    *out = fd;
    return 0;
}

int memfd_populate(int fd, uint64_t offset, char *p, uint64_t bytes)
{
    if (madvise(p, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return -errno;
    if (fallocate(fd, 0, (off_t)offset, (off_t)bytes) < 0)
        return -errno;
    for (uint64_t i = 0; i < bytes; i += PAGE_BYTES)
        *(volatile char *)(p + i) = 0;
    return 0;
}

/* Without FUTURE_WRITE (before Linux 5.1) nothing is shared: a worker that runs as the daemon's
 * user could open the file again, and write. Sealed after the daemon has mapped it: its own mapping
 * stays writable. */
int memfd_share(int fd)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
        return -errno;
    return memfd_grant(fd);
}

int memfd_grant(int own)
{
    char path[40];
    int fd;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", own);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* The kernel grants a write lease only to the file's sole opener (fcntl(2), F_SETLEASE). */
int memfd_granted(int own)
{
    if (fcntl(own, F_SETLEASE, F_WRLCK) < 0)
        return errno == EAGAIN ? 1 : -errno;
    return fcntl(own, F_SETLEASE, F_UNLCK) < 0 ? -errno : 0;
}
