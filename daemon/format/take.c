#include "daemon/format/take.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <time.h>

#define PAUSE_MS 10

/* Sleeps for a moment, and takes that off *left_ms. False: nothing is left. */
static bool pause_ms(unsigned *left_ms)
{
    if (*left_ms < PAUSE_MS)
        return false;
    *left_ms -= PAUSE_MS;
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * 1000000}, NULL);
    return true;
}

int take_lock(int fd, unsigned wait_ms)
{
    int rc;

    do
        rc = flock(fd, LOCK_EX | LOCK_NB) < 0 ? -errno : 0;
    while ((rc == -EWOULDBLOCK || rc == -EINTR) && pause_ms(&wait_ms));
    return rc;
}

int take_open(const char *path, int flags, unsigned wait_ms)
{
    int fd;

    do {
        fd = open(path, flags | O_CLOEXEC);
        fd = fd < 0 ? -errno : fd;
    } while (fd == -EBUSY && pause_ms(&wait_ms));
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
