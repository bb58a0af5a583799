#include "daemon/backend/uncached.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

struct move {
    int fd;
    const struct iovec *pieces;
    unsigned n;
    const struct uncached_bounce *bounce;
    bool write, direct;
    uint64_t at, all;
    uint64_t cached; /* bytes that went through the page cache */
};

static uint64_t aligned(uint64_t bytes)
{
    return bytes & ~(uint64_t)(UNCACHED_ALIGN - 1);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* From here on through the page cache. */
static void direct_end(struct move *m)
{
    m->direct = false;
    (void)fcntl(m->fd, F_SETFL, 0); /* it only takes a flag away that was accepted */
}

/* Where the byte at `at` lies, and how many follow it in its piece. */
static uint8_t *piece_at(const struct move *m, uint64_t at, uint64_t *left)
{
    const struct iovec *p = m->pieces;

    for (; at >= p->iov_len; p++)
        at -= p->iov_len;
    *left = p->iov_len - at;
    return (uint8_t *)p->iov_base + at;
}

/* Between the pieces, from m->at on, and the bounce buffer. */
static void bounce_copy(const struct move *m, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes;) {
        uint64_t left;
        uint8_t *piece = piece_at(m, m->at + done, &left);
        uint64_t n = least(left, bytes - done);

        if (m->write)
            memcpy(m->bounce->memory + done, piece, n);
        else
            memcpy(piece, m->bounce->memory + done, n);
        done += n;
    }
}

static ssize_t transfer(const struct move *m, uint8_t *memory, uint64_t bytes)
{
    ssize_t n;

    do
        n = m->write ? pwrite(m->fd, memory, bytes, (off_t)m->at)
                     : pread(m->fd, memory, bytes, (off_t)m->at);
    while (n < 0 && errno == EINTR);
    return n;
}

/* Straight to or from its piece, or by the bounce buffer. What was moved, which may be more than there is in the pieces, or -1. */
static ssize_t direct_step(const struct move *m)
{
    uint64_t left, rest = m->all - m->at, bytes;
    uint8_t *memory = piece_at(m, m->at, &left);
    ssize_t n;

    if (((uintptr_t)memory & (UNCACHED_ALIGN - 1)) == 0 && left >= UNCACHED_ALIGN)
        return transfer(m, memory, aligned(left));
    /* Behind a file's end there is nothing to read; a write would make it longer. */
    bytes = least(m->write ? aligned(rest) : aligned(rest + UNCACHED_ALIGN - 1), m->bounce->bytes);
    if (m->write)
        bounce_copy(m, bytes);
    n = transfer(m, m->bounce->memory, bytes);
    if (!m->write && n > 0)
        bounce_copy(m, least((uint64_t)n, rest));
    return n;
}

static ssize_t cached_step(struct move *m)
{
    uint64_t left;
    uint8_t *memory = piece_at(m, m->at, &left);
    ssize_t n = transfer(m, memory, left);

    m->cached += n > 0 ? (uint64_t)n : 0;
    return n;
}

static int move_all(struct move *m)
{
    m->all = 0;
    for (unsigned i = 0; i < m->n; i++)
        m->all += m->pieces[i].iov_len;
    m->direct = fcntl(m->fd, F_SETFL, O_DIRECT) == 0;
    while (m->at < m->all) {
        ssize_t n;

        /* A short transfer may end anywhere, and a file's last bytes are less than can be written directly. */
        if (m->direct && (m->at % UNCACHED_ALIGN || (m->write && m->all - m->at < UNCACHED_ALIGN)))
            direct_end(m);
        n = m->direct ? direct_step(m) : cached_step(m);
        if (n < 0 && errno == EINVAL && m->direct) /* it wants another alignment */
            direct_end(m);
        else if (n < 0)
            return -errno;
        else if (n == 0)
            return m->write ? -EIO : UNCACHED_SHORT;
        else
            m->at += least((uint64_t)n, m->all - m->at);
    }
    return 0;
}

int uncached_read(int fd, const struct iovec *pieces, unsigned n,
                  const struct uncached_bounce *bounce)
{
    struct move m = {.fd = fd, .pieces = pieces, .n = n, .bounce = bounce};
    int err = move_all(&m);

    if (m.cached > 0)
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* advice */
    return err;
}

/* Only pages that were written can be dropped. A file system that can't begin that drops them some other time. */
static int written(int fd)
{
    const unsigned flags =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;

    if (sync_file_range(fd, 0, 0, flags) == 0)
        return 0;
    return errno == ENOSYS || errno == EINVAL || errno == ESPIPE ? 0 : -errno;
}

int uncached_write(int fd, const struct iovec *pieces, unsigned n,
                   const struct uncached_bounce *bounce, bool sync)
{
    struct move m = {.fd = fd, .pieces = pieces, .n = n, .bounce = bounce, .write = true};
    int err = move_all(&m);

    if (err == 0 && sync)
        err = fdatasync(fd) < 0 ? -errno : 0;
    else if (err == 0 && m.cached >= UNCACHED_ALIGN) /* for the last page alone nobody waits */
        err = written(fd);
    if (m.cached > 0)
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    return err;
}
