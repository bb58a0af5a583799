/* Inside of volatile_disk.so: the functions that it wraps. */
#ifndef UCM_TESTS_VOLATILE_REAL_H
#define UCM_TESTS_VOLATILE_REAL_H

#include <sys/types.h>
#include <sys/uio.h>

struct volatile_real {
    int (*open)(const char *, int, ...);
    int (*close)(int);
    ssize_t (*pread)(int, void *, size_t, off_t);
    ssize_t (*preadv)(int, const struct iovec *, int, off_t);
    ssize_t (*write)(int, const void *, size_t);
    ssize_t (*pwrite)(int, const void *, size_t, off_t);
    ssize_t (*pwritev)(int, const struct iovec *, int, off_t);
    ssize_t (*writev)(int, const struct iovec *, int);
    ssize_t (*pwritev2)(int, const struct iovec *, int, off_t, int);
    int (*fsync)(int);
    int (*fdatasync)(int);
    int (*ftruncate)(int, off_t);
    int (*fallocate)(int, int, off_t, off_t);
    int (*rename)(const char *, const char *);
    int (*renameat2)(int, const char *, int, const char *, unsigned);
    int (*linkat)(int, const char *, int, const char *, int);
    int (*link)(const char *, const char *);
    int (*unlink)(const char *);
    void *(*mmap)(void *, size_t, int, int, int, off_t);
};

extern struct volatile_real real;

/* Each wrapper calls this first, because the loader may use one before any constructor has run. */
void real_find_all(void);

#endif
