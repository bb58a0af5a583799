#include "daemon/base/take.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/file.h>
#include <time.h>

#define PAUSE_NS 10000000

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* False when it is late. */
static bool pause_before(uint64_t end_ms)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};

    if (now_ms() >= end_ms)
        return false;
    nanosleep(&pause, NULL);
    return true;
}

int take_lock(int fd)
{
    uint64_t end_ms = now_ms() + TAKE_WAIT_MS;
    int rc;

    do
        rc = flock(fd, LOCK_EX | LOCK_NB) < 0 ? -errno : 0;
    while ((rc == -EWOULDBLOCK || rc == -EINTR) && pause_before(end_ms));
    return rc;
}

int take_open(const char *path, int flags)
{
    uint64_t end_ms = now_ms() + TAKE_WAIT_MS;
    int fd;

    do {
        fd = open(path, flags | O_EXCL | O_CLOEXEC);
        fd = fd < 0 ? -errno : fd;
    } while (fd == -EBUSY && pause_before(end_ms));
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
