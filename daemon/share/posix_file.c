#include "daemon/share/posix_file.h"

#include "daemon/base/kill_point.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define ATTEMPTS 3u /* of an operation whose folder or file another host removes */
#define NEW_FILE (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)

static uint64_t mtime_ns(const struct stat *st)
{
    uint64_t s = st->st_mtim.tv_sec > 0 ? (uint64_t)st->st_mtim.tv_sec : 0;

    if (s >= UINT64_MAX / 1000000000u)
        return UINT64_MAX;
    return s * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
}

static bool file_fits(const struct share_op *op, const struct stat *st)
{
    return S_ISREG(st->st_mode) && (uint64_t)st->st_size == share_op_file_bytes(op);
}

static int file_find(const struct share_op *op, int folder)
{
    struct stat st;

    if (fstatat(folder, op->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    return file_fits(op, &st) ? 0 : -EBADMSG;
}

/* The file's pieces: header, or header and seal, and payload. */
static void file_pieces(struct share_op *op, struct iovec pieces[2])
{
    pieces[0] = (struct iovec){.iov_base = op->header, .iov_len = share_op_head_bytes(op)};
    pieces[1] = (struct iovec){.iov_base = op->data, .iov_len = op->bytes};
}

static int file_read(struct share_op *op, int folder, const struct uncached_bounce *bounce)
{
    /* O_NONBLOCK: a FIFO may lie there. */
    int fd = openat(folder, op->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct iovec pieces[2];
    int err = -EBADMSG;
    struct stat st;

    file_pieces(op, pieces);
    if (fd < 0) /* a link, a socket, a device without a driver */
        return errno == ELOOP || errno == ENXIO || errno == ENODEV ? -EBADMSG : -errno;
    if (fstat(fd, &st) < 0)
        err = -errno;
    else if (file_fits(op, &st))
        err = uncached_read(fd, pieces, 2, bounce);
    if (err == UNCACHED_SHORT)
        err = -EBADMSG;
    close(fd); /* nothing was written: it can't lose anything */
    if (err == 0)
        err = share_op_verify(op);
    if (err == 0)
        op->mtime_ns = mtime_ns(&st);
    return err;
}

/* Not all file systems sync folders. */
static int folder_sync(int folder)
{
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), err;

    if (fd < 0)
        return -errno;
    err = fsync(fd) < 0 && errno != EINVAL ? -errno : 0;
    close(fd);
    return err;
}

/* Makes a new file, named op->temp. A descriptor or -errno. */
static int temp_open(struct share_op *op, int folder, const struct share_temp *temps)
{
    int fd;

    share_temp_next(temps, op->temp);
    fd = openat(folder, op->temp, NEW_FILE, 0600);
    if (fd < 0)
        return errno == EEXIST ? -EIO : -errno; /* -EEXIST would mean that the part exists */
    return fd;
}

/* A file server may report a full disk as late as at close. */
static int temp_fill(struct share_op *op, int fd, const struct uncached_bounce *bounce)
{
    struct iovec pieces[2];
    int err;

    KILL_POINT("share-write-begin");
    KILL_POINT_WITH("share-write-torn",
                    if (pwrite(fd, op->header, sizeof(op->header), 0) < 0 ||
                        pwrite(fd, op->data, op->bytes / 2, sizeof(op->header)) < 0) abort());
    file_pieces(op, pieces);
    err = uncached_write(fd, pieces, 2, bounce, op->sync);
    if (close(fd) < 0 && err == 0)
        err = -errno;
    return err;
}

static int file_write(struct share_op *op, int folder, const struct share_temp *temps,
                      const struct uncached_bounce *bounce)
{
    int err = file_find(op, folder), fd;

    if (err == 0)
        return -EEXIST;
    if (err != -ENOENT && err != -EBADMSG)
        return err;
    share_op_seal(op);
    fd = temp_open(op, folder, temps);
    if (fd < 0)
        return fd;
    err = temp_fill(op, fd, bounce);
    KILL_POINT("share-write-written");
    if (err == 0 && renameat(folder, op->temp, folder, op->name) < 0)
        err = errno == EISDIR ? -EBADMSG : -errno;
    if (err < 0) {
        unlinkat(folder, op->temp, 0); /* on failure garbage collection removes it when it is old */
        return err;
    }
    KILL_POINT("share-write-named");
    return op->sync ? folder_sync(folder) : 0;
}

static int file_remove(const struct share_op *op, int folder)
{
    if (unlinkat(folder, op->name, 0) < 0)
        return errno == EISDIR ? -EBADMSG : -errno;
    return 0;
}

/* NULL sets both times to the server's now, and needs no more than the right to write. */
static int file_touch(const struct share_op *op, int folder)
{
    return utimensat(folder, op->name, NULL, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
}

/* -EBADMSG would mean that the bucket is no folder. */
static int list_error(int error)
{
    return error == EBADMSG ? -EIO : -error;
}

/* A few unreadable files are left out; any other error, or more of them, fails the LIST. */
static int entry_unread(struct share_listing *l, int error)
{
    bool bad =
        error == EIO || error == EACCES || error == EPERM || error == EUCLEAN || error == EBADMSG;

    if (error == ENOENT || error == ESTALE) /* gone meanwhile */
        return 0;
    return bad && ++l->unread <= SHARE_LISTING_UNREAD ? 0 : list_error(error);
}

static int entry_add(struct share_listing *l, int folder, const struct dirent *e)
{
    struct stat st;

    if ((e->d_type != DT_REG && e->d_type != DT_UNKNOWN) || !share_listing_wants(e->d_name))
        return 0;
    if (fstatat(folder, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return entry_unread(l, errno);
    if (!S_ISREG(st.st_mode))
        return 0;
    return share_listing_add(l, e->d_name, (uint64_t)st.st_size, mtime_ns(&st));
}

static int entries_add(struct share_listing *l, int folder, DIR *dir)
{
    int err = 0;

    while (err == 0 && !l->cut) {
        const struct dirent *e;

        errno = 0;
        e = readdir(dir);
        if (!e)
            return list_error(errno);
        err = entry_add(l, folder, e);
    }
    return err;
}

static int folder_list(struct share_op *op, int folder)
{
    struct share_listing l = {0};
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), err;
    DIR *dir;

    if (fd < 0)
        return list_error(errno);
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return -ENOMEM;
    }
    err = entries_add(&l, folder, dir);
    closedir(dir);
    if (err < 0)
        share_listing_free(&l);
    else
        op->listing = l;
    return err;
}

/* Makes a file and removes it again. */
static int folder_check(struct share_op *op, int folder, const struct share_temp *temps)
{
    struct stat st = {0};
    int fd = temp_open(op, folder, temps), err;
    ssize_t wrote;

    if (fd < 0)
        return fd;
    wrote = pwrite(fd, op->temp, sizeof(op->temp), 0);
    err = wrote == (ssize_t)sizeof(op->temp) ? 0
          : wrote < 0                        ? -errno
                                             : -EIO; /* a short write: the disk is full */
    if (err == 0 && fdatasync(fd) < 0)
        err = -errno;
    /* Setting the times brings the server's clock; after a write alone a client may show its own. */
    if (err == 0 && (futimens(fd, NULL) < 0 || fstat(fd, &st) < 0))
        err = -errno;
    if (close(fd) < 0 && err == 0)
        err = -errno;
    if (unlinkat(folder, op->temp, 0) < 0 && err == 0)
        err = -errno;
    if (err == 0)
        op->now_ns = mtime_ns(&st);
    return err;
}

/* ---- folders ---- */

/* One of the root's own folders, made where it is missing if `make`; no link is followed. A
 * descriptor; -EBADMSG: something else has its name; -errno. */
static int folder_open(int parent, const char *name, bool make)
{
    int fd;

    if (make && mkdirat(parent, name, 0700) < 0 && errno != EEXIST)
        return -errno;
    fd = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        return fd;
    /* EBADMSG of the file system: it can't read the folder. */
    return errno == EBADMSG ? -EIO : errno == ENOTDIR || errno == ELOOP ? -EBADMSG : -errno;
}

/* -ENODEV: the root does not exist. It is never made: its file system may not be mounted yet. */
static int root_open(const char *path)
{
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);

    return fd >= 0 ? fd : errno == ENOENT ? -ENODEV : -errno;
}

/* Walks from the root each time, so a mount or an unmount takes effect at once. */
static int bucket_open(const char *path, uint8_t bucket, bool make)
{
    int root = root_open(path), blocks, fd;
    char name[3];

    if (root < 0)
        return root;
    blocks = folder_open(root, "blocks", make);
    close(root);
    if (blocks < 0)
        return blocks == -EBADMSG ? -ENOTDIR : blocks;
    snprintf(name, sizeof(name), "%02x", bucket);
    fd = folder_open(blocks, name, make);
    close(blocks);
    return fd;
}

static int root_check(const char *path, const struct share_temp *temps, struct share_op *op)
{
    struct stat st;
    int root = root_open(path), folder, err;

    if (root < 0)
        return root;
    /* A client whose server hangs answers from memory for what exists, not for a name that never
     * existed. */
    share_temp_next(temps, op->temp);
    err = fstatat(root, op->temp, &st, AT_SYMLINK_NOFOLLOW) < 0 && errno != ENOENT ? -errno : 0;
    close(root);
    if (err < 0)
        return err;
    folder = bucket_open(path, 0, op->sync);
    if (folder == -EBADMSG) /* would be an answer about a part */
        return -ENOTDIR;
    if (folder < 0)
        return folder != -ENOENT ? folder : op->sync ? -ENODEV : 0;
    err = op->sync ? folder_check(op, folder, temps) : 0;
    close(folder);
    return err == -ENOENT || err == -ESTALE ? -ENODEV : err;
}

static int attempt(const char *root, const struct share_temp *temps,
                   const struct uncached_bounce *bounce, struct share_op *op)
{
    int folder = bucket_open(root, op->bucket, op->verb == SHARE_WRITE), err;

    if (folder < 0)
        return folder;
    switch (op->verb) {
    case SHARE_FIND:
        err = file_find(op, folder);
        break;
    case SHARE_READ:
        err = file_read(op, folder, bounce);
        break;
    case SHARE_WRITE:
        err = file_write(op, folder, temps, bounce);
        break;
    case SHARE_REMOVE:
        err = file_remove(op, folder);
        break;
    case SHARE_TOUCH:
        err = file_touch(op, folder);
        break;
    default:
        err = folder_list(op, folder);
    }
    close(folder);
    return err;
}

int posix_file_run(const char *root, const struct share_temp *temps,
                   const struct uncached_bounce *bounce, struct share_op *op)
{
    bool write = op->verb == SHARE_WRITE;
    int err = -ESTALE;

    if (op->verb == SHARE_CHECK)
        return root_check(root, temps, op);
    for (unsigned i = 0; i < ATTEMPTS && (err == -ESTALE || (write && err == -ENOENT)); i++)
        err = attempt(root, temps, bounce, op);
    if (write && (err == -ENOENT || err == -ESTALE))
        return -EIO; /* folders are removed again and again: no answer about the part */
    if (op->verb == SHARE_LIST && (err == -ENOENT || err == -EBADMSG)) {
        op->listing = (struct share_listing){0};
        return 0;
    }
    return err;
}
