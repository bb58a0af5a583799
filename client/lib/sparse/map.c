#include "client/lib/sparse/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

/* If a file shrinks under a mapping, or a huge page is missing, the kernel kills the reader. */
static int file_check(int fd, uint64_t bytes, const char *what, struct ucm_error *e)
{
    struct statfs fs;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return ucm_error_set(e, UCM_EPROTOCOL,
                             "ucmd's memory of %s is no memfd that is sealed against shrinking",
                             what);
    if (fstat(fd, &st) < 0 || st.st_size < 0 || (uint64_t)st.st_size != bytes)
        return ucm_error_set(e, UCM_EPROTOCOL,
                             "ucmd's memory of %s has %lld bytes, and its answer says %llu", what,
                             (long long)st.st_size, (unsigned long long)bytes);
    if (fstatfs(fd, &fs) < 0 || fs.f_type == HUGETLBFS_MAGIC)
        return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's memory of %s is of hugetlbfs", what);
    return 0;
}

int client_memory_map(int fd, uint64_t bytes, const char *what, void **out, struct ucm_error *e)
{
    void *p;
    int r = file_check(fd, bytes, what, e);

    if (r)
        return r;
    p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return ucm_error_set(e, UCM_ENOMEMORY, "can't map %llu bytes of %s: %s",
                             (unsigned long long)bytes, what, strerror(errno));
    /* Otherwise a forked child would hold the memory after this process has died. */
    if (madvise(p, bytes, MADV_DONTFORK) < 0) {
        munmap(p, bytes);
        return ucm_error_set(e, UCM_ENOMEMORY, "can't keep %s from children: %s", what,
                             strerror(errno));
    }
    *out = p;
    return 0;
}
