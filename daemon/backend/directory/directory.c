#include "daemon/backend/directory/directory.h"

#include "daemon/backend/directory/uncached.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ATTEMPTS 3u /* of a call whose directory or file another host removes */
#define NEW_FILE (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)
#define NAME_BYTES 256u /* of one directory */

static uint64_t mtime_ns(const struct stat *st)
{
    uint64_t s = st->st_mtim.tv_sec > 0 ? (uint64_t)st->st_mtim.tv_sec : 0;

    if (s >= UINT64_MAX / 1000000000u)
        return UINT64_MAX;
    return s * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
}

/* ---- directories ---- */

static int root_open(const char *path)
{
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);

    return fd >= 0 ? fd : errno == ENOENT ? -ENODEV : -errno;
}

/* -EBADMSG: something else has its name. */
static int below_open(int parent, const char *name, bool make)
{
    int fd;

    if (make && mkdirat(parent, name, 0700) < 0 && errno != EEXIST)
        return -errno;
    fd = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        return fd;
    /* EBADMSG of the file system: it can't read the directory. */
    return errno == EBADMSG ? -EIO : errno == ENOTDIR || errno == ELOOP ? -EBADMSG : -errno;
}

/* Makes what is missing if `make`. -ENOTDIR: a directory above the bucket is none, which says
 * nothing about a file. */
static int bucket_open(const char *root, const char *bucket, bool make)
{
    int fd = root_open(root);

    while (fd >= 0 && *bucket) {
        size_t n = strcspn(bucket, "/");
        char name[NAME_BYTES];
        int above = fd;

        snprintf(name, sizeof(name), "%.*s", (int)n, bucket);
        bucket += n + (bucket[n] == '/');
        fd = below_open(above, name, make);
        close(above);
        if (fd == -EBADMSG && *bucket)
            fd = -ENOTDIR;
    }
    return fd;
}

/* ---- one file ---- */

static bool fits(const struct directory_file *f, const struct stat *st)
{
    return S_ISREG(st->st_mode) && (uint64_t)st->st_size == f->bytes;
}

static int find(struct directory_file *f, int directory)
{
    struct stat st;

    if (fstatat(directory, f->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    return fits(f, &st) ? 0 : -EBADMSG;
}

static int read_all(struct directory_file *f, int directory)
{
    /* O_NONBLOCK: a FIFO may lie there. */
    int fd = openat(directory, f->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int err = -EBADMSG;
    struct stat st;

    if (fd < 0) /* a link, a socket, a device without a driver */
        return errno == ELOOP || errno == ENXIO || errno == ENODEV ? -EBADMSG : -errno;
    if (fstat(fd, &st) < 0)
        err = -errno;
    else if (fits(f, &st))
        err = uncached_read(fd, f->memory, f->bytes);
    if (err == UNCACHED_SHORT)
        err = -EBADMSG;
    close(fd); /* nothing was written: it can't lose anything */
    if (err == 0)
        f->mtime_ns = mtime_ns(&st);
    return err;
}

/* Not all file systems sync directories. */
static int directory_sync(int directory)
{
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), err;

    if (fd < 0)
        return -errno;
    err = fsync(fd) < 0 && errno != EINVAL ? -errno : 0;
    close(fd);
    return err;
}

/* What an attempt left behind must not be in the way of the next one: the last digit is of another
 * alphabet then. */
static void temp_name(const struct directory_file *f, char out[NAME_BYTES])
{
    static const char digits[ATTEMPTS][17] = {"0123456789abcdef", "ghijklmnopqrstuv",
                                              "GHIJKLMNOPQRSTUV"};
    int n = snprintf(out, NAME_BYTES, "%.*s", (int)NAME_BYTES - 1, f->temp);
    const char *last = n > 0 ? strchr(digits[0], out[n - 1]) : NULL;

    if (last)
        out[n - 1] = digits[f->attempt][last - digits[0]];
}

/* A descriptor or -errno. */
static int temp_open(int directory, const char *temp)
{
    int fd = openat(directory, temp, NEW_FILE, 0600);

    if (fd < 0)
        return errno == EEXIST ? -EIO : -errno; /* -EEXIST would mean that the file exists */
    return fd;
}

/* A file server may report a full disk as late as at close. */
static int temp_fill(const struct directory_file *f, int fd)
{
    int err = uncached_write(fd, f->memory, f->bytes, f->sync);

    if (close(fd) < 0 && err == 0)
        err = -errno;
    return err;
}

static int write_all(struct directory_file *f, int directory)
{
    char temp[NAME_BYTES];
    int err = find(f, directory), fd;

    if (err == 0)
        return -EEXIST;
    if (err != -ENOENT && err != -EBADMSG)
        return err;
    temp_name(f, temp);
    fd = temp_open(directory, temp);
    if (fd < 0)
        return fd;
    err = temp_fill(f, fd);
    if (err == 0 && renameat(directory, temp, directory, f->name) < 0)
        err = errno == EISDIR ? -EBADMSG : -errno;
    if (err < 0) {
        unlinkat(directory, temp, 0); /* on failure garbage collection removes it when it is old */
        return err;
    }
    return f->sync ? directory_sync(directory) : 0;
}

static int remove_it(struct directory_file *f, int directory)
{
    if (unlinkat(directory, f->name, 0) < 0)
        return errno == EISDIR ? -EBADMSG : -errno;
    return 0;
}

/* NULL sets both times to the server's now, and needs only the right to write. */
static int touch(struct directory_file *f, int directory)
{
    return utimensat(directory, f->name, NULL, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
}

static int in_bucket(struct directory_file *f, bool make,
                     int (*run)(struct directory_file *f, int directory))
{
    int err = -ESTALE;

    for (f->attempt = 0; f->attempt < ATTEMPTS && (err == -ESTALE || (make && err == -ENOENT));
         f->attempt++) {
        int directory = bucket_open(f->root, f->bucket, make);

        err = directory < 0 ? directory : run(f, directory);
        if (directory >= 0)
            close(directory);
    }
    return err;
}

int directory_find(struct directory_file *f)
{
    return in_bucket(f, false, find);
}

int directory_read(struct directory_file *f)
{
    return in_bucket(f, false, read_all);
}

int directory_write(struct directory_file *f)
{
    int err = in_bucket(f, true, write_all);

    /* Directories are removed again and again: no answer about the file. */
    return err == -ENOENT || err == -ESTALE ? -EIO : err;
}

int directory_remove(struct directory_file *f)
{
    return in_bucket(f, false, remove_it);
}

int directory_touch(struct directory_file *f)
{
    return in_bucket(f, false, touch);
}

/* ---- the root ---- */

/* Makes a file and removes it again. */
static int check_writes(struct directory_file *f, int directory)
{
    size_t bytes = strlen(f->temp);
    struct stat st = {0};
    int fd = temp_open(directory, f->temp), err;
    ssize_t wrote;

    if (fd < 0)
        return fd;
    wrote = pwrite(fd, f->temp, bytes, 0);
    err = wrote == (ssize_t)bytes ? 0
          : wrote < 0             ? -errno
                                  : -EIO; /* a short write: the disk is full */
    if (err == 0 && fdatasync(fd) < 0)
        err = -errno;
    /* Setting the times brings the server's clock; after a write alone a client may show its
     * own. */
    if (err == 0 && (futimens(fd, NULL) < 0 || fstat(fd, &st) < 0))
        err = -errno;
    if (close(fd) < 0 && err == 0)
        err = -errno;
    if (unlinkat(directory, f->temp, 0) < 0 && err == 0)
        err = -errno;
    if (err == 0)
        f->mtime_ns = mtime_ns(&st);
    return err;
}

int directory_check(struct directory_file *f)
{
    struct stat st;
    int root = root_open(f->root), directory, err;

    if (root < 0)
        return root;
    /* A client whose server hangs answers from memory for what exists, not for a name that never
     * existed. */
    err = fstatat(root, f->temp, &st, AT_SYMLINK_NOFOLLOW) < 0 && errno != ENOENT ? -errno : 0;
    close(root);
    if (err < 0)
        return err;
    directory = bucket_open(f->root, f->bucket, f->sync);
    if (directory == -EBADMSG) /* would be an answer about a part */
        return -ENOTDIR;
    if (directory < 0)
        return directory != -ENOENT ? directory : f->sync ? -ENODEV : 0;
    err = f->sync ? check_writes(f, directory) : 0;
    close(directory);
    return err == -ENOENT || err == -ESTALE ? -ENODEV : err;
}

/* ---- listings ---- */

/* -EBADMSG would mean that the bucket is not a directory. */
static int list_error(int error)
{
    return error == EBADMSG ? -EIO : -error;
}

/* Unreadable files are left out; any other error fails the list. */
static int entry_unread(struct directory_listing *l, int error)
{
    bool bad =
        error == EIO || error == EACCES || error == EPERM || error == EUCLEAN || error == EBADMSG;

    if (error == ENOENT || error == ESTALE) /* gone meanwhile */
        return 0;
    l->unread += bad;
    return bad ? 0 : list_error(error);
}

/* 0, also when there are too many; -ENOMEM. */
static int file_add(struct directory_listing *l, const char *name, const struct stat *st)
{
    struct wire_file *f;

    if (l->n == DIRECTORY_FILES)
        return 0;
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? 2 * l->cap : 256;
        struct wire_file *files = realloc(l->files, cap * sizeof(*files));

        if (!files)
            return -ENOMEM;
        l->files = files;
        l->cap = cap;
    }
    f = &l->files[l->n++];
    snprintf(f->name, sizeof(f->name), "%.*s", (int)WIRE_KEY_BYTES, name);
    f->bytes = (uint64_t)st->st_size;
    f->mtime_ns = mtime_ns(st);
    return 0;
}

static int entry_add(struct directory_listing *l, int directory, const struct dirent *e)
{
    struct stat st;

    if ((e->d_type != DT_REG && e->d_type != DT_UNKNOWN) || strlen(e->d_name) > WIRE_KEY_BYTES)
        return 0;
    if (fstatat(directory, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return entry_unread(l, errno);
    return S_ISREG(st.st_mode) ? file_add(l, e->d_name, &st) : 0;
}

static int entries_add(struct directory_listing *l, int directory, DIR *dir)
{
    int rc = 0;

    while (rc == 0) {
        const struct dirent *e;

        errno = 0;
        e = readdir(dir);
        if (!e)
            return list_error(errno);
        rc = entry_add(l, directory, e);
    }
    return rc;
}

static int list_once(struct directory_listing *l)
{
    int directory = bucket_open(l->root, l->bucket, false), fd, rc;
    DIR *dir;

    if (directory < 0)
        return directory == -ENOENT || directory == -EBADMSG ? 0 : directory;
    fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rc = fd < 0 ? list_error(errno) : 0;
    dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir) {
        rc = entries_add(l, directory, dir);
        closedir(dir);
    } else if (fd >= 0) {
        close(fd);
        rc = -ENOMEM;
    }
    close(directory);
    return rc == -ENOENT ? 0 : rc; /* it went meanwhile */
}

/* Lists a bucket again if another host removed it and made it again meanwhile. */
int directory_list(struct directory_listing *l)
{
    int rc = -ESTALE;

    for (unsigned i = 0; i < ATTEMPTS && rc == -ESTALE; i++) {
        l->n = l->unread = 0;
        rc = list_once(l);
    }
    return rc;
}
