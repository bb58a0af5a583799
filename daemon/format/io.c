#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

ssize_t io_read_some(int fd, void *p, size_t bytes, uint64_t at)
{
    size_t done = 0;

    while (done < bytes) {
        ssize_t n = pread(fd, (char *)p + done, bytes - done, (off_t)(at + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

int io_read(int fd, void *p, size_t bytes, uint64_t at)
{
    ssize_t n = io_read_some(fd, p, bytes, at);

    return n < 0 ? (int)n : n < (ssize_t)bytes ? -ENODATA : 0;
}

int io_write(int fd, const void *p, size_t bytes, uint64_t at)
{
    size_t done = 0;

    while (done < bytes) {
        ssize_t n = pwrite(fd, (const char *)p + done, bytes - done, (off_t)(at + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        done += (size_t)n;
    }
    return 0;
}

int io_length(int fd, uint64_t *out)
{
    struct stat st;
    uint64_t bytes;

    if (fstat(fd, &st) < 0)
        return -errno;
    bytes = (uint64_t)st.st_size;
    if (S_ISBLK(st.st_mode) && ioctl(fd, BLKGETSIZE64, &bytes) < 0)
        return -errno;
    *out = bytes;
    return 0;
}

int io_directory_sync(const char *directory)
{
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc;

    if (fd < 0)
        return -errno;
    rc = fsync(fd) < 0 ? -errno : 0;
    close(fd);
    return rc;
}
