#include "daemon/share/posix_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define ATTEMPTS 3 /* of a write whose folder is taken away beneath it */

static int path_of(const struct share_op *op, const char *root, const char *name,
                   char path[PATH_MAX])
{
    int n = snprintf(path, PATH_MAX, "%s/blocks/%02x%s%s", root, op->file.identity[0],
                     name[0] ? "/" : "", name);

    return n < PATH_MAX ? 0 : -ENAMETOOLONG;
}

/* A file under the part's name that has the right length? */
static int file_find(const struct share_op *op, const char *path)
{
    struct stat st;

    if (lstat(path, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != share_op_file_bytes(op))
        return -EBADMSG;
    return 0;
}

/* All of header and payload, or -errno; -EBADMSG: the file ends before that. */
static int file_move(int fd, struct share_op *op, bool write)
{
    uint64_t at = 0, all = share_op_file_bytes(op);

    while (at < all) {
        struct iovec iov[2], *from = iov;
        unsigned n = 2;
        uint64_t payload_at = 0;
        ssize_t moved;

        if (at < BLOCK_FILE_HEADER_BYTES) {
            iov[0].iov_base = op->header + at;
            iov[0].iov_len = BLOCK_FILE_HEADER_BYTES - at;
        } else {
            payload_at = at - BLOCK_FILE_HEADER_BYTES;
            from++;
            n--;
        }
        iov[1].iov_base = (uint8_t *)op->data + payload_at;
        iov[1].iov_len = op->bytes - payload_at;
        moved = write ? pwritev(fd, from, (int)n, (off_t)at) : preadv(fd, from, (int)n, (off_t)at);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return -errno;
        if (moved == 0)
            return write ? -EIO : -EBADMSG;
        at += (uint64_t)moved;
    }
    return 0;
}

static int file_read(struct share_op *op, const char *path)
{
    /* O_NONBLOCK: should a FIFO lie there. */
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat st;
    int err;

    if (fd < 0)
        return errno == ELOOP ? -EBADMSG : -errno;
    if (fstat(fd, &st) < 0)
        err = -errno;
    else if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != share_op_file_bytes(op))
        err = -EBADMSG;
    else
        err = file_move(fd, op, false);
    close(fd); /* nothing was written: it can't lose anything */
    return err < 0 ? err : share_op_verify(op);
}

/* The root itself is never made: that of a file system which is not mounted is not there. */
static int folders_make(const struct share_op *op, const char *root)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/blocks", root);

    if (n >= PATH_MAX)
        return -ENAMETOOLONG;
    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return -errno;
    if (path_of(op, root, "", path) < 0)
        return -ENAMETOOLONG;
    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return -errno;
    return 0;
}

static int folder_sync(const struct share_op *op, const char *root)
{
    char path[PATH_MAX];
    int err = path_of(op, root, "", path), fd;

    if (err < 0)
        return err;
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    err = fsync(fd) < 0 ? -errno : 0;
    close(fd);
    return err;
}

/* A file server may tell of a full disk as late as at the end: close counts. */
static int temp_fill(struct share_op *op, int fd)
{
    int err = file_move(fd, op, true);

    if (err == 0 && op->sync && fdatasync(fd) < 0)
        err = -errno;
    if (close(fd) < 0 && err == 0)
        err = -errno;
    return err;
}

static int temp_write(struct share_op *op, const char *root, const char *temp, const char *path)
{
    int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int err;

    if (fd < 0)
        return -errno;
    err = temp_fill(op, fd);
    if (err == 0 && rename(temp, path) < 0)
        err = -errno;
    if (err < 0) {
        unlink(temp); /* else the garbage collection's, when it is old */
        return err;
    }
    return op->sync ? folder_sync(op, root) : 0;
}

static int file_write(struct share_op *op, const char *root, const struct share_temp *temps,
                      const char *path)
{
    char temp[PATH_MAX];
    int err = file_find(op, path);

    if (err == 0)
        return -EEXIST;
    if (err != -ENOENT && err != -EBADMSG)
        return err;
    share_op_seal(op);
    for (unsigned i = 0; i < ATTEMPTS; i++) {
        share_temp_next(temps, op->temp);
        err = path_of(op, root, op->temp, temp);
        if (err == 0)
            err = temp_write(op, root, temp, path);
        if (err != -ENOENT)
            return err;
        err = folders_make(op, root);
        if (err < 0)
            break;
    }
    return err == -ENOENT ? -ENODEV : err; /* the root is not there: no answer, a failure */
}

static int root_check(const struct share_op *op, const char *root, const struct share_temp *temps)
{
    char path[PATH_MAX], temp[BLOCK_FILE_TEMP_CAP];
    struct stat st;
    int n, fd;

    if (stat(root, &st) < 0)
        return errno == ENOENT ? -ENODEV : -errno;
    if (!op->sync)
        return 0;
    share_temp_next(temps, temp);
    n = snprintf(path, sizeof(path), "%s/%s", root, temp);
    if (n >= PATH_MAX)
        return -ENAMETOOLONG;
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    n = pwrite(fd, temp, sizeof(temp), 0) == sizeof(temp) ? 0 : -EIO;
    if (fdatasync(fd) < 0 && n == 0)
        n = -errno;
    if (close(fd) < 0 && n == 0)
        n = -errno;
    if (unlink(path) < 0 && n == 0)
        n = -errno;
    return n;
}

/* That a part is not there is an answer only where the root is. */
static int missing(const char *root, int err)
{
    struct stat st;

    if (err == -ENOENT && stat(root, &st) < 0)
        return errno == ENOENT ? -ENODEV : -errno;
    return err;
}

int posix_file_run(const char *root, const struct share_temp *temp, struct share_op *op)
{
    char path[PATH_MAX];
    int err;

    if (op->verb == SHARE_CHECK)
        return root_check(op, root, temp);
    err = path_of(op, root, op->name, path);
    if (err < 0)
        return err;
    switch (op->verb) {
    case SHARE_FIND:
        return missing(root, file_find(op, path));
    case SHARE_READ:
        return missing(root, file_read(op, path));
    case SHARE_WRITE:
        return file_write(op, root, temp, path);
    default:
        return missing(root, unlink(path) < 0 ? -errno : 0);
    }
}
