#include "daemon/base/take.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/file.h>
#include <uv.h>

#define PAUSE_MS 10

static uint64_t end_ns(void)
{
    return uv_hrtime() + TAKE_WAIT_MS * 1000000ull;
}

/* False when it is late. */
static bool pause_before(uint64_t end)
{
    if (uv_hrtime() >= end)
        return false;
    uv_sleep(PAUSE_MS);
    return true;
}

int take_lock(int fd)
{
    uint64_t end = end_ns();
    int rc;

    do
        rc = flock(fd, LOCK_EX | LOCK_NB) < 0 ? -errno : 0;
    while ((rc == -EWOULDBLOCK || rc == -EINTR) && pause_before(end));
    return rc;
}

int take_open(const char *path, int flags)
{
    uint64_t end = end_ns();
    int fd;

    do {
        fd = open(path, flags | O_EXCL | O_CLOEXEC);
        fd = fd < 0 ? -errno : fd;
    } while (fd == -EBUSY && pause_before(end));
    return fd;
}

bool take_failed(int rc)
{
    switch (rc) {
    case -EIO:
    case -EROFS:
    case -ENXIO:
    case -ENODEV:
    case -ENOMEDIUM:
    case -ETIMEDOUT:
    case -EUCLEAN: /* the file system, or the superblock, is damaged */
    case -ESTALE:
        return true;
    default:
        return false;
    }
}
