/* ucmd-backend-folder FOLDER [THREADS]: keeps blocks in a folder of a mounted file system, as the daemon's own
 * threads do, but in a process: a mount that hangs or a file system's bug costs the process. */
#include "daemon/backend/ucmbackend.h"
#include "daemon/backend/uncached.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES 200u  /* of a page of a listing */
#define ATTEMPTS 3u /* of a write whose folder another host removes */
#define NEW_FILE (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)

static uint64_t mtime_ns(const struct stat *st)
{
    return (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
}

/* The folder that a key lies in, and the key's last part. No link below the root is followed; the root
 * itself is never made, as it may be mounted later. A descriptor or -errno. */
static int folder_open(const char *root, const char *key, bool make, const char **name)
{
    int fd = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    const char *slash;

    if (fd < 0)
        return errno == ENOENT ? -ENODEV : -errno;
    for (; (slash = strchr(key, '/')) != NULL; key = slash + 1) {
        char part[WIRE_KEY_BYTES + 1];
        int above = fd, err;

        snprintf(part, sizeof(part), "%.*s", (int)(slash - key), key);
        err = make && mkdirat(above, part, 0700) < 0 && errno != EEXIST ? -errno : 0;
        fd = err < 0 ? -1 : openat(above, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 && err == 0)
            err = -errno;
        close(above);
        if (err < 0)
            return err;
    }
    *name = key;
    return fd;
}

/* Its length; -EISDIR: no regular file. */
static int64_t file_length(int folder, const char *name)
{
    struct stat st;

    if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    return S_ISREG(st.st_mode) ? st.st_size : -EISDIR;
}

static int file_read(int folder, const char *name, struct ucm_backend_request *r,
                     struct ucm_backend_result *result)
{
    /* O_NONBLOCK: a FIFO may lie there. */
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), err = -EISDIR;
    const struct iovec span = {r->data, r->bytes};
    struct stat st;
    _Alignas(UNCACHED_ALIGN)
        uint8_t memory[UNCACHED_ALIGN]; /* for the last bytes: spans are aligned */
    const struct uncached_bounce bounce = {memory, sizeof(memory)};

    if (fd < 0)
        return errno == ENXIO ? -EISDIR : -errno;
    if (fstat(fd, &st) < 0)
        err = -errno;
    else if (S_ISREG(st.st_mode) && (uint64_t)st.st_size == r->bytes)
        err = uncached_read(fd, &span, 1, &bounce);
    if (err == UNCACHED_SHORT)
        err = -EISDIR;
    close(fd);
    result->bytes = r->bytes;
    result->mtime_ns = err == 0 ? mtime_ns(&st) : 0;
    return err;
}

static int file_fill(int fd, struct ucm_backend_request *r)
{
    const struct iovec span = {r->data, r->bytes};
    _Alignas(UNCACHED_ALIGN)
        uint8_t memory[UNCACHED_ALIGN]; /* for the last bytes: spans are aligned */
    const struct uncached_bounce bounce = {memory, sizeof(memory)};
    int err = uncached_write(fd, &span, 1, &bounce, r->sync);

    if (close(fd) < 0 && err == 0) /* a file server may report a full disk as late as here */
        err = -errno;
    return err;
}

static int file_write(int folder, const char *name, struct ucm_backend_request *r)
{
    const char *temp = strrchr(r->temp, '/') + 1;
    int64_t length = file_length(folder, name);
    int fd, err;

    if (length == (int64_t)r->bytes)
        return -EEXIST;
    fd = openat(folder, temp, NEW_FILE, 0600);
    if (fd < 0)
        return errno == EEXIST ? -EIO : -errno; /* -EEXIST would mean that the file is there */
    err = file_fill(fd, r);
    if (err == 0 && renameat(folder, temp, folder, name) < 0)
        err = -errno;
    if (err < 0)
        (void)unlinkat(folder, temp, 0);
    return err;
}

static int list(const char *root, struct ucm_backend *b, struct ucm_backend_request *r)
{
    struct wire_file files[FILES];
    const char *none;
    const struct dirent *e;
    uint32_t n = 0;
    int folder = folder_open(root, r->key, false, &none), fd, err = 0;
    DIR *dir;

    if (folder == -ENOENT || folder == -ENOTDIR || folder == -ELOOP)
        return 0;
    if (folder < 0)
        return folder;
    fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    close(folder);
    dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir)
        return -errno;
    while (err == 0 && (errno = 0, e = readdir(dir)) != NULL) {
        struct stat st;

        if (strlen(e->d_name) > WIRE_KEY_BYTES ||
            fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
            continue;
        snprintf(files[n].name, sizeof(files[n].name), "%.128s", e->d_name);
        files[n].bytes = (uint64_t)st.st_size;
        files[n++].mtime_ns = mtime_ns(&st);
        if (n == FILES) {
            err = ucm_backend_files(b, r, files, n);
            n = 0;
        }
    }
    err = err == 0 && errno != 0 ? -errno : err;
    closedir(dir);
    return err == 0 && n > 0 ? ucm_backend_files(b, r, files, n) : err;
}

/* Makes a file and removes it again. */
static int check_sync(const char *root, struct ucm_backend_request *r, uint64_t *now_ns)
{
    const char *name;
    struct stat st;
    int folder = folder_open(root, r->temp, true, &name), fd, err;

    if (folder < 0)
        return folder;
    fd = openat(folder, name, NEW_FILE, 0600);
    err = fd < 0 ? -errno : 0;
    /* Setting the times brings the server's clock. */
    if (fd >= 0 && (pwrite(fd, name, 1, 0) != 1 || fdatasync(fd) < 0 || futimens(fd, NULL) < 0 ||
                    fstat(fd, &st) < 0))
        err = errno ? -errno : -ENOSPC;
    if (fd >= 0) {
        close(fd);
        (void)unlinkat(folder, name, 0);
    }
    close(folder);
    if (err == 0)
        *now_ns = mtime_ns(&st);
    return err;
}

static int check(const char *root, struct ucm_backend_request *r, uint64_t *now_ns)
{
    const char *name;
    struct stat st;
    int folder = folder_open(root, strrchr(r->temp, '/') + 1, false, &name), err = 0;

    if (folder < 0)
        return folder;
    /* A client whose server hangs answers from memory for what exists, not for a name that never did. */
    if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) < 0 && errno != ENOENT)
        err = -errno;
    close(folder);
    return err == 0 && r->sync ? check_sync(root, r, now_ns) : err;
}

static int in_folder(const char *root, struct ucm_backend_request *r,
                     struct ucm_backend_result *result)
{
    const char *name;
    int64_t length;
    int folder = folder_open(root, r->key, r->verb == WIRE_WRITE, &name), err = 0;

    if (folder < 0)
        return folder;
    switch (r->verb) {
    case WIRE_FIND:
        length = file_length(folder, name);
        err = length < 0 ? (int)length : 0;
        result->bytes = length < 0 ? 0 : (uint64_t)length;
        break;
    case WIRE_READ:
        err = file_read(folder, name, r, result);
        break;
    case WIRE_WRITE:
        err = file_write(folder, name, r);
        break;
    case WIRE_REMOVE:
        err = unlinkat(folder, name, 0) < 0 ? -errno : 0;
        break;
    default:
        err = utimensat(folder, name, NULL, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
    }
    close(folder);
    return err;
}

static void handle_cb(void *ctx, struct ucm_backend *b, struct ucm_backend_request *r,
                      struct ucm_backend_result *result)
{
    const char *root = ctx;
    bool write = r->verb == WIRE_WRITE;
    int err = -ENOENT;

    if (r->verb == WIRE_LIST)
        err = list(root, b, r);
    else if (r->verb == WIRE_CHECK)
        err = check(root, r, &result->now_ns);
    else
        for (unsigned i = 0; i < ATTEMPTS && (i == 0 || (write && err == -ENOENT)); i++)
            err = in_folder(root, r, result);
    result->status = err == -EEXIST ? WIRE_EXISTS : ucm_backend_status(-err);
    if (result->status == WIRE_MISSING && (write || r->verb == WIRE_CHECK))
        result->status =
            WIRE_FAILED; /* folders are removed again and again: no answer about a file */
    result->reason = err == -ENODEV ? "the folder does not exist: is it mounted?" : strerror(-err);
}

int main(int argc, char **argv)
{
    const struct ucm_backend_about about = {.name = "folder", .touch = true, .list = true};
    int threads = argc > 2 ? atoi(argv[2]) : 16, rc;

    if (argc < 2 || argv[1][0] != '/' || threads < 1 || threads > 1024) {
        fprintf(stderr, "Usage: ucmd-backend-folder FOLDER [THREADS], which ucmd starts: see "
                        "docs/backends.md\n");
        return 2;
    }
    rc = ucm_backend_serve(&about, (unsigned)threads, handle_cb, argv[1]);
    if (rc < 0)
        fprintf(stderr, "ucmd-backend-folder: %s\n", strerror(-rc));
    return rc < 0;
}
