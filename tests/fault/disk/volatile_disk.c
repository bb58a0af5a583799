#include "tests/fault/disk/volatile_journal.h"
#include "tests/fault/disk/volatile_real.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Exported, unlike all else of the project. */
#define EXPORT __attribute__((visibility("default")))
#define FDS 4096
#define PAGE 4096
#define DIRECTORIES 8

static char directories[DIRECTORIES][VOLATILE_NAME];
static unsigned n_directories;
static const char *saved_directory;
static bool no_tmpfile;
static _Atomic bool ours[FDS]; /* descriptors of files in the directories */

static void directories_read(const char *list)
{
    while (list && *list && n_directories < DIRECTORIES) {
        size_t n = strcspn(list, ":");

        if (n < VOLATILE_NAME)
            snprintf(directories[n_directories++], VOLATILE_NAME, "%.*s", (int)n, list);
        list += n + (list[n] == ':');
    }
}

__attribute__((constructor)) static void begin(void)
{
    const char *fd = getenv(VOLATILE_JOURNAL);
    void *p;

    real_find_all();
    if (!fd)
        return;
    p = real.mmap(NULL, VOLATILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
    if (p == MAP_FAILED)
        volatile_refuse("this journal");
    directories_read(getenv(VOLATILE_DIRECTORIES));
    saved_directory = getenv(VOLATILE_SAVED);
    no_tmpfile = getenv(VOLATILE_NO_TMPFILE) != NULL;
    journal_begin(p);
}

/* ---- names ---- */

static bool name_is_ours(const char *path)
{
    for (unsigned i = 0; journal && i < n_directories; i++) {
        size_t n = strlen(directories[i]);

        if (strncmp(path, directories[i], n) == 0 && path[n] == '/' && !strchr(path + n + 1, '/'))
            return true;
    }
    return false;
}

static bool is_directory(const char *path)
{
    for (unsigned i = 0; journal && i < n_directories; i++)
        if (strcmp(path, directories[i]) == 0)
            return true;
    return false;
}

static struct stat directory_of(const char *path)
{
    char directory[VOLATILE_NAME];
    struct stat st = {0};

    snprintf(directory, sizeof(directory), "%.*s", (int)(strrchr(path, '/') - path), path);
    if (stat(directory, &st) < 0)
        volatile_refuse("a missing directory");
    return st;
}

/* Keeps the file at `path` under another name; false when there is none. */
static bool name_save(const char *path, char out[VOLATILE_NAME])
{
    snprintf(out, VOLATILE_NAME, "%s/%llu", saved_directory, (unsigned long long)journal_now());
    if (real.link(path, out) == 0)
        return true;
    out[0] = '\0';
    return false;
}

static void name_changed(enum volatile_kind kind, const char *from, const char *to,
                         const char *saved)
{
    struct stat directory = directory_of(to ? to : from), st = {0};
    struct volatile_record *r = record_new(kind, &directory, 0);

    if (to && stat(to, &st) == 0)
        r->other = st.st_ino;
    snprintf(r->from, sizeof(r->from), "%s", from ? from : "");
    snprintf(r->to, sizeof(r->to), "%s", to ? to : "");
    snprintf(r->saved, sizeof(r->saved), "%s", saved ? saved : "");
    r->done = journal_now();
    record_add(r);
    atomic_fetch_add(&journal->names, 1);
}

/* A new file may have the number of one that is gone, with all of its records. */
static void file_is_new(int fd)
{
    struct stat st;

    if (fstat(fd, &st) == 0)
        records_drop(st.st_dev, st.st_ino);
}

/* ---- opening ---- */

static bool fd_is_ours(int fd)
{
    return journal && fd >= 0 && fd < FDS && atomic_load(&ours[fd]);
}

static void fd_take(int fd, int flags)
{
    if (fd < 0)
        return;
    if (fd >= FDS)
        volatile_refuse("so many descriptors");
    atomic_store(&ours[fd], true);
    if (flags & O_DSYNC)
        volatile_refuse("O_DSYNC");
}

static void file_shrinks(int fd, uint64_t to);

static int open_ours(const char *path, int flags, mode_t mode)
{
    bool nameless = (flags & O_TMPFILE) == O_TMPFILE, cut = flags & O_TRUNC, made = false;
    int fd;

    if (nameless && no_tmpfile) {
        errno = EOPNOTSUPP;
        return -1;
    }
    pthread_mutex_lock(&journal_lock);
    if (!nameless && flags & O_CREAT)
        made = access(path, F_OK) < 0;
    fd = real.open(path, flags & ~(O_DIRECT | O_TRUNC), mode);
    if (fd >= 0 && (made || nameless))
        file_is_new(fd);
    if (fd >= 0 && made)
        name_changed(VOLATILE_MADE, NULL, path, NULL);
    if (fd >= 0 && cut)
        file_shrinks(fd, 0);
    fd_take(fd, flags);
    pthread_mutex_unlock(&journal_lock);
    if (fd >= 0 && cut && real.ftruncate(fd, 0) < 0)
        volatile_refuse("a file that can't be cut");
    journal_step();
    return fd;
}

EXPORT int open(const char *path, int flags, ...)
{
    mode_t mode = 0;

    real_find_all();
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
        va_list args;

        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    if (name_is_ours(path) || (is_directory(path) && (flags & O_TMPFILE) == O_TMPFILE))
        return open_ours(path, flags, mode);
    return real.open(path, flags, mode);
}

EXPORT int close(int fd)
{
    real_find_all();
    if (fd >= 0 && fd < FDS)
        atomic_store(&ours[fd], false);
    return real.close(fd);
}

/* ---- bytes ---- */

/* The bytes that are there now; zeros beyond the end. */
static void old_read(int fd, struct volatile_record *r)
{
    uint64_t done = 0;

    while (done < r->length) {
        ssize_t n = real.pread(fd, r->old + done, r->length - done, (off_t)(r->offset + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            volatile_refuse("a file that can't be read");
        if (n == 0) {
            memset(r->old + done, 0, r->length - done);
            return;
        }
        done += (uint64_t)n;
    }
}

static struct volatile_record *bytes_record(int fd, uint64_t offset, uint64_t length)
{
    struct volatile_record *r;
    struct stat st;

    if (fstat(fd, &st) < 0)
        volatile_refuse("fstat failing");
    r = record_new(length > 0 ? VOLATILE_WRITE : VOLATILE_SIZE, &st, length);
    r->offset = offset;
    if (length == 0)
        return r;
    /* pread needs a descriptor that may read; not all that are written to may */
    int reader = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR ? fd : -1;

    if (reader < 0) {
        char self[64];

        snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
        reader = real.open(self, O_RDONLY | O_CLOEXEC);
        if (reader < 0)
            volatile_refuse("a file that can't be read");
    }
    old_read(reader, r);
    if (reader != fd)
        real.close(reader);
    return r;
}

static void file_shrinks(int fd, uint64_t to)
{
    struct volatile_record *r;
    struct stat st;

    if (fstat(fd, &st) < 0)
        volatile_refuse("fstat failing");
    if ((uint64_t)st.st_size <= to)
        return;
    r = bytes_record(fd, to, (uint64_t)st.st_size - to);
    r->done = journal_now();
    record_add(r);
}

static struct volatile_record *change_begin(int fd, uint64_t offset, uint64_t length)
{
    struct volatile_record *r;

    pthread_mutex_lock(&journal_lock);
    r = bytes_record(fd, offset, length);
    record_add(r);
    pthread_mutex_unlock(&journal_lock);
    journal_step();
    return r;
}

static void change_end(struct volatile_record *r)
{
    int error = errno;

    journal_step();
    atomic_store(&r->done, journal_now());
    atomic_fetch_add(&journal->writes, 1);
    journal_step();
    errno = error;
}

/* Whether the test wants this call to fail. */
static bool take(_Atomic uint64_t *wanted)
{
    uint64_t left = atomic_load(wanted);

    while (left > 0 && !atomic_compare_exchange_weak(wanted, &left, left - 1))
        continue;
    return left > 0;
}

#define IOVECS 64

static ssize_t write_any(int fd, const struct iovec *iov, int n, off_t offset)
{
    struct iovec cut[IOVECS];
    struct volatile_record *r;
    uint64_t bytes = 0, most;
    ssize_t rc;

    if (n > IOVECS)
        volatile_refuse("so long a list");
    if (take(&journal->writes_failing)) {
        errno = atomic_load(&journal->write_error);
        return -1;
    }
    for (int i = 0; i < n; i++)
        bytes += iov[i].iov_len;
    most = take(&journal->writes_short) ? bytes / 1024 * 512 : bytes;
    bytes = 0;
    for (int i = 0; i < n; i++) {
        cut[i] = iov[i];
        if (cut[i].iov_len > most - bytes)
            cut[i].iov_len = most - bytes;
        bytes += cut[i].iov_len;
    }
    r = change_begin(fd, (uint64_t)offset, bytes);
    rc = real.pwritev(fd, cut, n, offset);
    change_end(r);
    return rc;
}

EXPORT ssize_t pwrite(int fd, const void *p, size_t n, off_t offset)
{
    struct iovec iov = {.iov_len = n};

    real_find_all();
    if (!fd_is_ours(fd))
        return real.pwrite(fd, p, n, offset);
    memcpy(&iov.iov_base, &p, sizeof(p)); /* const, and stays so */
    return write_any(fd, &iov, 1, offset);
}

EXPORT ssize_t pwritev(int fd, const struct iovec *iov, int n, off_t offset)
{
    real_find_all();
    return fd_is_ours(fd) ? write_any(fd, iov, n, offset) : real.pwritev(fd, iov, n, offset);
}

EXPORT ssize_t preadv(int fd, const struct iovec *iov, int n, off_t offset)
{
    real_find_all();
    if (fd_is_ours(fd) && n == 1 && iov->iov_len == PAGE) {
        usleep((useconds_t)atomic_load(&journal->page_read_us));
        if (!take(&journal->page_reads_spared) && take(&journal->page_reads_failing)) {
            errno = EIO;
            return -1;
        }
    }
    return real.preadv(fd, iov, n, offset);
}

EXPORT ssize_t write(int fd, const void *p, size_t n)
{
    real_find_all();
    if (fd_is_ours(fd))
        volatile_refuse("write without an offset");
    return real.write(fd, p, n);
}

EXPORT int ftruncate(int fd, off_t size)
{
    struct volatile_record *r;
    struct stat st;
    int rc;

    real_find_all();
    if (!fd_is_ours(fd))
        return real.ftruncate(fd, size);
    if (fstat(fd, &st) < 0)
        return -1;
    r = change_begin(fd, (uint64_t)size, st.st_size > size ? (uint64_t)(st.st_size - size) : 0);
    rc = real.ftruncate(fd, size);
    change_end(r);
    return rc;
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    struct volatile_record *r;
    int rc;

    real_find_all();
    if (!fd_is_ours(fd))
        return real.fallocate(fd, mode, offset, bytes);
    if (mode != 0)
        volatile_refuse("fallocate with a mode");
    r = change_begin(fd, 0, 0);
    rc = real.fallocate(fd, mode, offset, bytes);
    change_end(r);
    return rc;
}

/* ---- syncs ---- */

static int sync_any(int fd)
{
    uint64_t start = journal_now(), most_us = atomic_load(&journal->sync_us);
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -1;
    journal_step();
    if (most_us > 0)
        usleep((useconds_t)(start * UINT64_C(0x9e3779b97f4a7c15) % most_us));
    if (!take(&journal->syncs_spared) && take(&journal->syncs_failing)) {
        pthread_mutex_lock(&journal_lock);
        records_mark_deleting(st.st_dev, st.st_ino, start);
        pthread_mutex_unlock(&journal_lock);
        errno = EIO;
        return -1;
    }
    journal_step();
    pthread_mutex_lock(&journal_lock);
    records_sync(st.st_dev, st.st_ino, start);
    pthread_mutex_unlock(&journal_lock);
    atomic_fetch_add(&journal->syncs, 1);
    journal_step();
    return 0;
}

static bool fd_is_directory(int fd)
{
    struct stat st, directory;

    if (!journal || fstat(fd, &st) < 0 || !S_ISDIR(st.st_mode))
        return false;
    for (unsigned i = 0; i < n_directories; i++)
        if (stat(directories[i], &directory) == 0 && directory.st_ino == st.st_ino &&
            directory.st_dev == st.st_dev)
            return true;
    return false;
}

EXPORT int fsync(int fd)
{
    real_find_all();
    return fd_is_ours(fd) || fd_is_directory(fd) ? sync_any(fd) : real.fsync(fd);
}

EXPORT int fdatasync(int fd)
{
    real_find_all();
    return fd_is_ours(fd) || fd_is_directory(fd) ? sync_any(fd) : real.fdatasync(fd);
}

/* ---- changes of names ---- */

static int rename_ours(const char *from, const char *to, unsigned flags)
{
    char saved[VOLATILE_NAME];
    int rc;

    journal_step();
    pthread_mutex_lock(&journal_lock);
    name_save(to, saved);
    rc = real.renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
    if (rc == 0)
        name_changed(VOLATILE_RENAMED, from, to, saved);
    else if (saved[0])
        (void)real.unlink(saved);
    pthread_mutex_unlock(&journal_lock);
    journal_step();
    return rc;
}

EXPORT int rename(const char *from, const char *to)
{
    real_find_all();
    return name_is_ours(to) ? rename_ours(from, to, 0) : real.rename(from, to);
}

EXPORT int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    real_find_all();
    return name_is_ours(to) ? rename_ours(from, to, flags)
                            : real.renameat2(from_fd, from, to_fd, to, flags);
}

EXPORT int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags)
{
    int rc;

    real_find_all();
    if (!name_is_ours(to))
        return real.linkat(from_fd, from, to_fd, to, flags);
    journal_step();
    pthread_mutex_lock(&journal_lock);
    rc = real.linkat(from_fd, from, to_fd, to, flags);
    if (rc == 0)
        name_changed(VOLATILE_MADE, NULL, to, NULL);
    pthread_mutex_unlock(&journal_lock);
    journal_step();
    return rc;
}

EXPORT int link(const char *from, const char *to)
{
    real_find_all();
    return name_is_ours(to) ? linkat(AT_FDCWD, from, AT_FDCWD, to, 0) : real.link(from, to);
}

EXPORT int unlink(const char *path)
{
    char saved[VOLATILE_NAME];
    int rc;

    real_find_all();
    if (!name_is_ours(path))
        return real.unlink(path);
    journal_step();
    pthread_mutex_lock(&journal_lock);
    name_save(path, saved);
    rc = real.unlink(path);
    if (rc == 0)
        name_changed(VOLATILE_REMOVED, path, NULL, saved);
    pthread_mutex_unlock(&journal_lock);
    journal_step();
    return rc;
}

/* ---- calls that this disk would not see ---- */

EXPORT ssize_t writev(int fd, const struct iovec *iov, int n)
{
    real_find_all();
    if (fd_is_ours(fd))
        volatile_refuse("writev");
    return real.writev(fd, iov, n);
}

EXPORT ssize_t pwritev2(int fd, const struct iovec *iov, int n, off_t offset, int flags)
{
    real_find_all();
    if (fd_is_ours(fd))
        volatile_refuse("pwritev2");
    return real.pwritev2(fd, iov, n, offset, flags);
}

EXPORT void *mmap(void *p, size_t n, int prot, int flags, int fd, off_t offset)
{
    real_find_all();
    if (fd_is_ours(fd) && prot & PROT_WRITE && flags & MAP_SHARED)
        volatile_refuse("mmap");
    return real.mmap(p, n, prot, flags, fd, offset);
}

int __open_2(const char *path, int flags);

EXPORT int __open_2(const char *path, int flags)
{
    real_find_all();
    if (name_is_ours(path) && flags & (O_WRONLY | O_RDWR))
        volatile_refuse("this way to open a file");
    return real.open(path, flags);
}
