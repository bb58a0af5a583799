#include "daemon/backend/directory/uncached.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

struct move {
    int fd;
    uint8_t *memory;
    bool write, direct;
    uint64_t at, all;
    uint64_t cached; /* bytes that went through the page cache */
};

static uint64_t aligned(uint64_t bytes)
{
    return bytes & ~(uint64_t)(UNCACHED_ALIGN - 1);
}

/* From here on through the page cache. */
static void direct_end(struct move *m)
{
    m->direct = false;
    (void)fcntl(m->fd, F_SETFL, 0); /* it only takes a flag away that was accepted */
}

/* What was moved, or -1. */
static ssize_t transfer(struct move *m)
{
    uint64_t left = m->all - m->at;
    ssize_t n;

    /* Past a file's end there is nothing to read; a write would make it longer. */
    if (m->direct)
        left = m->write ? aligned(left) : aligned(left + UNCACHED_ALIGN - 1);
    do
        n = m->write ? pwrite(m->fd, m->memory + m->at, left, (off_t)m->at)
                     : pread(m->fd, m->memory + m->at, left, (off_t)m->at);
    while (n < 0 && errno == EINTR);
    if (n > (ssize_t)(m->all - m->at)) /* it grew meanwhile */
        n = (ssize_t)(m->all - m->at);
    m->cached += !m->direct && n > 0 ? (uint64_t)n : 0;
    return n;
}

static int move_all(struct move *m)
{
    m->direct = fcntl(m->fd, F_SETFL, O_DIRECT) == 0;
    while (m->at < m->all) {
        ssize_t n;

        /* A short transfer may end anywhere, and a file's last bytes are less than can be written
         * directly. */
        if (m->direct && (m->at % UNCACHED_ALIGN || (m->write && m->all - m->at < UNCACHED_ALIGN)))
            direct_end(m);
        n = transfer(m);
        if (n < 0 && errno == EINVAL && m->direct) /* it wants another alignment */
            direct_end(m);
        else if (n < 0)
            return -errno;
        else if (n == 0)
            return m->write ? -EIO : UNCACHED_SHORT;
        else
            m->at += (uint64_t)n;
    }
    return 0;
}

int uncached_read(int fd, void *memory, uint64_t bytes)
{
    struct move m = {.fd = fd, .memory = memory, .all = bytes};
    int err = move_all(&m);

    if (m.cached > 0)
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* advice */
    return err;
}

/* Only pages that were written can be dropped. A file system that can't begin that drops them some
 * other time. */
static int written(int fd)
{
    const unsigned flags =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;

    if (sync_file_range(fd, 0, 0, flags) == 0)
        return 0;
    return errno == ENOSYS || errno == EINVAL || errno == ESPIPE ? 0 : -errno;
}

int uncached_write(int fd, void *memory, uint64_t bytes, bool sync)
{
    struct move m = {.fd = fd, .memory = memory, .all = bytes, .write = true};
    int err = move_all(&m);

    if (err == 0 && sync)
        err = fdatasync(fd) < 0 ? -errno : 0;
    else if (err == 0 && m.cached >= UNCACHED_ALIGN) /* for the last page alone nobody waits */
        err = written(fd);
    if (m.cached > 0)
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    return err;
}
